//! Requests and responses of the API.

use std::io::Write as _;
use std::net::{Shutdown, TcpStream};
use std::process::Command;

use serde_json::{Value, json};

use crate::support::{Response, Service, read_response, request};
use crate::{POLICIES, attributes};

#[test]
fn acquire_accepts_three_request_forms() {
    let service = Service::start(POLICIES);
    let first = json!({
        "allowed": true, "policy": "per-user", "limit": 3, "remaining": 2, "retry_after_ms": 0,
        "reset_after_ms": 3_600_000, "delay_ms": 0, "source": "store",
    });
    let mut whole = first.clone();
    whole["decisions"] = json!([first]);
    whole["decisions"][0]["mode"] = json!("enforce");
    let response = service.acquire(&json!({"policy": "per-user", "key": "u1"}));
    assert_eq!(response.status, 200);
    assert_eq!(response.header("content-type"), Some("application/json"));
    assert_eq!(response.json(), whole);
    assert_eq!(response.header("ratelimit-policy"), Some(r#""per-user";q=3;w=3600"#));
    assert_eq!(response.header("ratelimit"), Some(r#""per-user";r=2;t=3600"#));
    assert_eq!(response.header("x-ratelimit-limit"), Some("3"));
    assert_eq!(response.header("x-ratelimit-remaining"), Some("2"));
    assert_eq!(response.header("x-ratelimit-reset"), Some("3600"));
    assert_eq!(response.header("retry-after"), None);

    // The same counter, selected by attributes.
    let by_attributes =
        attributes(&[("path", "/api/items"), ("method", "GET"), ("header.x-user-id", "u1")]);
    assert_eq!(service.acquire(&by_attributes).json()["remaining"], 1);
    assert_eq!(service.acquire(&by_attributes).json()["remaining"], 0);
    let denied = service.acquire(&by_attributes);
    assert_eq!(denied.status, 429);
    assert_eq!(denied.json()["allowed"], false);
    let retry: u64 = denied.header("retry-after").expect("a wait").parse().expect("seconds");
    let retry_ms = denied.json()["retry_after_ms"].as_u64().expect("a number");
    assert!((3_500..=3_600).contains(&retry) && retry * 1_000 >= retry_ms, "{denied:?}");

    // A quota in the request.
    let quota = json!({
        "key": "u1",
        "quota": {"algorithm": "token-bucket", "limit": 1, "window": "60s", "burst": 2},
        "cost": 2,
    });
    assert_eq!(service.acquire(&quota).status, 200);
    assert_eq!(service.acquire(&quota).status, 429);
}

/// Such as `nc -N`. Whether the end arrives with the request or just after it depends on the
/// scheduler, so there are many tries.
#[test]
fn client_that_stops_sending_gets_its_response() {
    let service = Service::start(POLICIES);
    let body = r#"{"key": "k", "quota": {"limit": 1000, "window": "1h"}}"#;
    let length = body.len();
    let head = format!("POST /v1/acquire HTTP/1.1\r\nHost: a\r\nContent-Length: {length}\r\n");
    for attempt in 0..200 {
        let mut stream = TcpStream::connect(&service.http).expect("the service listens");
        stream.write_all(format!("{head}\r\n{body}").as_bytes()).expect("sent");
        stream.shutdown(Shutdown::Write).expect("open");
        let response = read_response(&mut stream);
        assert_eq!(response.status, 200, "attempt {attempt}");
        assert_eq!(response.json()["remaining"], 999 - attempt);
    }
}

#[test]
fn unknown_path_is_repeated_in_part_only() {
    let service = Service::start(POLICIES);
    let path = format!("/v1/%C3%A9{}", "x".repeat(20_000));
    for address in [&service.http, &service.admin] {
        let response = request(address, "GET", &path, &[], b"");
        assert_eq!(response.status, 404);
        assert!(response.body.len() < 400, "{} bytes", response.body.len());
        let detail = response.json()["detail"].as_str().expect("a detail").to_owned();
        assert!(detail.starts_with("/v1/%C3") && detail.ends_with("… does not exist"), "{detail}");
    }
}

#[test]
fn t_is_the_time_until_more_quota_and_the_limit_shown_is_the_burst() {
    let service = Service::start(POLICIES);
    let acquire = |burst: u64| {
        let quota =
            json!({"algorithm": "token-bucket", "limit": 10, "window": "1d", "burst": burst});
        service.acquire(&json!({"key": "u1", "quota": quota, "cost": 1}))
    };
    let first = acquire(50);
    assert_eq!(first.header("ratelimit-policy"), Some(r#""token-bucket-86400s";q=50;w=432000"#));
    assert_eq!(first.header("ratelimit"), Some(r#""token-bucket-86400s";r=49;t=8640"#));
    assert_eq!(first.header("x-ratelimit-limit"), Some("50"));
    assert_eq!(first.header("x-ratelimit-remaining"), Some("49"));
    assert_eq!((&first.json()["limit"], &first.json()["remaining"]), (&json!(50), &json!(49)));

    // With a burst of 3, the count of the same key has one unit left after its second request.
    let headers = |response: &Response| {
        let wait = response.header("ratelimit").and_then(|item| item.rsplit_once(";t="));
        let number = |text: &str| text.parse::<u64>().expect("seconds");
        let name = |name| response.header(name).map(number);
        (wait.map(|(_, wait)| number(wait)), name("retry-after"), name("x-ratelimit-reset"))
    };
    let near = |wait: Option<u64>, units: u64| {
        let wait = wait.expect("a wait");
        assert!((8_640 * units - 600..=8_640 * units).contains(&wait), "{wait} for {units}");
    };
    for spent in [2, 3] {
        let allowed = acquire(3);
        assert_eq!(allowed.status, 200);
        let (more, retry_after, reset) = headers(&allowed);
        near(more, 1);
        near(reset, spent);
        assert_eq!(retry_after, None);
    }
    let denied = acquire(3);
    assert_eq!(denied.status, 429);
    let (more, retry_after, reset) = headers(&denied);
    near(retry_after, 1);
    near(reset, 3);
    assert_eq!(more, retry_after, "not the time until the bucket is full");
}

#[test]
fn reports_exceed_the_limit_and_refunds_need_an_age() {
    let service = Service::start(POLICIES);
    let send = |cost: u64| {
        let quota = json!({"algorithm": "sliding-log", "limit": 100, "window": "1h"});
        json!({"key": "u1", "quota": quota, "cost": cost}).to_string()
    };
    let over = service.post("/v1/report", &send(150));
    let body = over.json();
    assert_eq!(
        (over.status, &body["allowed"], &body["remaining"]),
        (200, &json!(false), &json!(0)),
        "{body}"
    );
    assert!(body["retry_after_ms"].as_u64().is_some_and(|wait| wait > 3_590_000), "{body}");
    assert_eq!(service.post("/v1/acquire", &send(1)).status, 429, "the report was recorded");
    let refund = |age: Option<u64>| {
        let mut body: serde_json::Value = serde_json::from_str(&send(120)).expect("JSON");
        if let Some(age) = age {
            body["age_ms"] = json!(age);
        }
        service.post("/v1/refund", &body.to_string())
    };
    assert_eq!(
        refund(Some(3_600_000)).json()["remaining"],
        json!(0),
        "the charge has left the window"
    );
    assert_eq!(refund(Some(60_000)).json()["remaining"], json!(70));
    let refused = refund(None);
    assert_eq!(refused.header("content-type"), Some("application/problem+json"));
    let detail = refused.json()["detail"].as_str().expect("a reason").to_owned();
    assert!(refused.status == 400 && detail.contains("age_ms"), "{refused:?}");
    assert_eq!(refund(Some(60_000)).json()["remaining"], json!(100));
}

#[test]
fn peek_writes_nothing_and_refund_restores_units() {
    let service = Service::start(POLICIES);
    let payload = json!({"policy": "per-user", "key": "u1"}).to_string();
    for _ in 0..5 {
        let peeked = service.post("/v1/peek", &payload);
        assert_eq!((peeked.status, &peeked.json()["remaining"]), (200, &json!(2)));
    }
    for _ in 0..3 {
        assert_eq!(service.post("/v1/acquire", &payload).status, 200);
    }
    let peeked = service.post("/v1/peek", &payload);
    assert_eq!((peeked.status, &peeked.json()["allowed"]), (200, &json!(false)));
    assert_eq!(peeked.header("retry-after"), None, "a peek is never denied");
    let refund = json!({"policy": "per-user", "key": "u1", "age_ms": 30_000});
    let refunded = service.post("/v1/refund", &refund.to_string());
    assert_eq!((refunded.status, &refunded.json()["remaining"]), (200, &json!(1)));
    assert_eq!(service.post("/v1/acquire", &payload).status, 200);
}

#[test]
fn policies_apply_as_configured() {
    let service = Service::start(POLICIES);
    // All or nothing; the binding limit is reported.
    let write =
        attributes(&[("path", "/api/items"), ("method", "POST"), ("header.x-user-id", "u1")]);
    let response = service.acquire(&write);
    assert_eq!(response.json()["policy"], "writes");
    assert_eq!(response.json()["decisions"].as_array().map(Vec::len), Some(2));
    let denied = service.acquire(&write);
    assert_eq!((denied.status, &denied.json()["policy"]), (429, &json!("writes")));
    let peeked = service.post("/v1/peek", &json!({"policy": "per-user", "key": "u1"}).to_string());
    assert_eq!(
        peeked.json()["remaining"],
        1,
        "the denied write consumed nothing of the other limit"
    );
    // An override by key.
    let acme = attributes(&[("path", "/api/items"), ("header.x-user-id", "acme")]);
    assert_eq!(service.acquire(&acme).json()["limit"], 1000);
    // Shadow mode: counted but allowed.
    let watched = attributes(&[("path", "/watched")]);
    assert_eq!(service.acquire(&watched).status, 200);
    let shadowed = service.acquire(&watched);
    assert_eq!((shadowed.status, &shadowed.json()["allowed"]), (200, &json!(true)));
    assert_eq!(shadowed.json()["decisions"][0]["allowed"], false);
    assert_eq!(shadowed.json()["retry_after_ms"], 0, "shadow mode never denies");
    assert_eq!(shadowed.header("ratelimit"), None, "no policy is enforced");
    // A missing key attribute.
    let stranger = service.acquire(&attributes(&[("path", "/members")]));
    assert_eq!((stranger.status, &stranger.json()["source"]), (429, &json!("missing-key")));
    assert_eq!(stranger.json()["missing_key"], "header.x-member", "{stranger:?}");
    assert_eq!(stranger.json()["decisions"][0]["missing_key"], "header.x-member");
    assert_eq!(stranger.header("retry-after"), None, "no wait helps");
    assert!(!stranger.header("ratelimit").expect("a policy").contains(";t="), "{stranger:?}");
    assert_eq!(
        service.acquire(&attributes(&[("path", "/api/x")])).json()["policy"],
        Value::Null,
        "missing_key: skip"
    );
    // A cost from an attribute.
    assert_eq!(service.acquire(&attributes(&[("path", "/heavy")])).json()["remaining"], 8);
    assert_eq!(
        service.acquire(&attributes(&[("path", "/heavy"), ("header.x-cost", "3")])).json()["remaining"],
        5
    );
    // No policy applies.
    let free = service.acquire(&attributes(&[("path", "/elsewhere")]));
    assert_eq!((free.status, &free.json()["decisions"]), (200, &json!([])));
    assert_eq!(free.header("ratelimit"), None);

    let metrics = service.admin("/metrics").body;
    for line in [
        r#"tidegate_decisions_total{policy="writes",outcome="denied"} 1"#,
        r#"tidegate_decisions_total{policy="watched",outcome="shadow_denied"} 1"#,
        r#"tidegate_decisions_total{policy="watched",outcome="denied"} 0"#,
        r#"tidegate_decision_sources_total{source="store"}"#,
        "tidegate_store_up 1",
        "tidegate_build_info{version=",
    ] {
        assert!(metrics.contains(line), "{line} in\n{metrics}");
    }
    assert!(!metrics.contains("acme"), "a key must not be a label");
    let policies = service.admin("/v1/policies").json();
    assert_eq!(policies.as_array().map(Vec::len), Some(5));
    assert_eq!(policies[1]["algorithm"], "token-bucket");
}

#[test]
fn shadow_policy_never_denies_and_counts_denials() {
    let policy = "{name: watched, mode: shadow, key: [header.authorization], missing_key: deny, \
                  limit: 2, window: 1h}";
    let service = Service::start(&format!("policies:\n  - {policy}\n"));
    let long = format!("Bearer {}", "x".repeat(600));
    let payloads = [
        json!({"attributes": {"path": "/"}}),
        json!({"attributes": {"header.authorization": long}}),
        json!({"attributes": {"header.authorization": "a"}, "cost": 3}),
        json!({"policy": "watched", "key": "a", "cost": 3}),
    ];
    for payload in &payloads {
        let response = service.acquire(payload);
        assert_eq!(
            (response.status, &response.json()["allowed"]),
            (200, &json!(true)),
            "{payload}: {response:?}"
        );
        let line = &response.json()["decisions"][0];
        assert_eq!(
            (&line["policy"], &line["allowed"], &line["mode"]),
            (&json!("watched"), &json!(false), &json!("shadow")),
            "{payload}"
        );
    }
    let metrics = service.admin("/metrics").body;
    assert!(metrics.contains(r#"{policy="watched",outcome="shadow_denied"} 4"#), "{metrics}");
}

#[test]
fn decisions_mark_the_policies_in_shadow_mode() {
    let service = Service::start(
        "policies:\n  - {name: new, mode: shadow, limit: 1, window: 1h}\n  \
         - {name: old, limit: 5, window: 1h}\n",
    );
    let modes = |body: Value| -> Vec<(Value, Value, Value)> {
        let decisions = body["decisions"].as_array().expect("a list").iter();
        let fields = |entry: &Value| ["policy", "mode", "allowed"].map(|name| entry[name].clone());
        decisions.map(fields).map(|[policy, mode, allowed]| (policy, mode, allowed)).collect()
    };
    for is_allowed in [true, false] {
        let response = service.acquire(&json!({"attributes": {"path": "/"}}));
        assert_eq!((response.status, &response.json()["policy"]), (200, &json!("old")));
        let expected = [("new", "shadow", is_allowed), ("old", "enforce", true)];
        let expected =
            expected.map(|(policy, mode, allowed)| (json!(policy), json!(mode), json!(allowed)));
        assert_eq!(modes(response.json()), expected);
    }
}

#[test]
fn compressed_bodies_get_415_and_what_is_accepted() {
    let service = Service::start(POLICIES);
    let send = |address: &str, path: &str, encoding: &str| {
        let body = match path {
            "/v1/refund" => &br#"{"policy": "per-user", "key": "u", "age_ms": 9}"#[..],
            _ => br#"{"policy": "per-user", "key": "u"}"#,
        };
        request(address, "POST", path, &[("Content-Encoding", encoding)], body)
    };
    for (address, path) in [
        (&service.http, "/v1/acquire"),
        (&service.http, "/v1/peek"),
        (&service.http, "/v1/refund"),
        (&service.http, "/v1/report"),
        (&service.admin, "/v1/reset"),
    ] {
        for encoding in ["gzip", "br", "identity, gzip", "GZIP", "zstd"] {
            let response = send(address, path, encoding);
            assert_eq!(response.status, 415, "{path} {encoding}: {response:?}");
            assert_eq!(response.header("accept-encoding"), Some("identity"), "{path} {encoding}");
            assert_eq!(response.header("content-type"), Some("application/problem+json"));
            let detail = response.json()["detail"].as_str().expect("a detail").to_owned();
            assert!(detail.contains("Content-Encoding"), "{detail}");
        }
        for encoding in ["identity", "Identity", ""] {
            let response = send(address, path, encoding);
            assert!(matches!(response.status, 200 | 204), "{path} {encoding}: {response:?}");
        }
    }
}

#[test]
fn openapi_has_the_server_and_the_bounds_of_all_values() {
    let service = Service::start(POLICIES);
    let api = request(&service.http, "GET", "/openapi.json", &[], b"").json();
    // Relative to the description's URL, so it is the server that the client asked.
    assert_eq!(api["servers"], json!([{"url": "/"}]));
    // Every number has a range, every text a length, names or a pattern, and every list a length.
    let mut unbounded = Vec::new();
    for (name, body) in api["components"]["schemas"].as_object().expect("types") {
        let parts = body["allOf"].as_array().cloned().unwrap_or_default();
        for schema in parts.iter().chain([body]) {
            for (field, schema) in schema["properties"].as_object().into_iter().flatten() {
                let has = |keyword: &str| schema.get(keyword).is_some();
                let is_bounded = match schema["type"].to_string() {
                    kind if kind.contains("integer") => has("minimum") && has("maximum"),
                    kind if kind.contains("string") => has("maxLength") || has("pattern"),
                    kind if kind.contains("array") => has("maxItems"),
                    kind if kind.contains("object") => has("maxProperties"),
                    _ => true,
                };
                if !is_bounded {
                    unbounded.push(format!("{name}.{field}: {schema}"));
                }
            }
        }
    }
    assert!(unbounded.is_empty(), "{unbounded:#?}");
    for path in api["paths"].as_object().expect("paths").values() {
        let parameters = ["get", "post"].map(|method| path[method]["parameters"].as_array());
        for parameter in parameters.into_iter().flatten().flatten() {
            let schema = &parameter["schema"];
            let is_flag = schema["type"].to_string().contains("boolean");
            let is_bounded = schema.get("enum").or(schema.get("maxLength")).is_some();
            assert!(is_flag || is_bounded, "{parameter}");
        }
    }
}

#[test]
fn header_and_host_names_are_normalized() {
    let policy =
        "{name: p, match: {host: '*.example.com'}, key: [header.x-user], limit: 9, window: 1h}";
    let service = Service::start(&format!("policies:\n  - {policy}\n"));
    for (left, host) in
        (0..9).rev().zip(["a.example.com", "A.EXAMPLE.com", "a.example.com:8080", "a.example.com."])
    {
        let payload = attributes(&[("host", host), ("header.X-User", "u")]);
        assert_eq!(service.acquire(&payload).json()["remaining"], left, "{host}");
    }
}

#[test]
fn host_list_counts_by_the_nearest_as_before() {
    let policy = "{name: p, match: {host: a.example.com}, limit: 9, window: 1h}";
    let service = Service::start(&format!("policies:\n  - {policy}\n"));
    for host in ["a.example.com", " a.example.com", "spoofed.example, a.example.com"] {
        let response = service.acquire(&attributes(&[("host", host)])).json();
        assert_eq!(response["policy"], "p", "{host}");
    }
}

#[test]
fn quotas_in_requests_share_one_metric_name() {
    let service = Service::start(POLICIES);
    for window in ["60s", "61s", "60s"] {
        service.acquire(&json!({"key": "k", "quota": {"limit": 1, "window": window}}));
    }
    let metrics = service.admin("/metrics").body;
    for line in [
        r#"tidegate_decisions_total{policy="(quota)",outcome="allowed"} 2"#,
        r#"tidegate_decisions_total{policy="(quota)",outcome="denied"} 1"#,
        r#"tidegate_decision_sources_total{source="store"} 3"#,
    ] {
        assert!(metrics.contains(line), "{line} in\n{metrics}");
    }
}

#[test]
fn invalid_requests_get_a_status_and_a_helpful_message() {
    let service = Service::start(POLICIES);
    let long_key = json!({"policy": "per-user", "key": "k".repeat(513)}).to_string();
    let with = |part: &str| format!(r#"{{"policy": "per-user", "key": "u", {part}}}"#);
    let quota = |quota: &str| format!(r#"{{"key": "u", "quota": {quota}}}"#);
    let cases = [
        ("not json".to_owned(), 400, "not JSON"),
        (String::new(), 400, "not JSON"),
        ("[]".to_owned(), 400, "not a query"),
        ("{}".to_owned(), 400, "one of three forms"),
        (r#"{"policy": "per-user"}"#.to_owned(), 400, "one of three forms"),
        (with(r#""attributes": {}"#), 400, "one of three forms"),
        (with(r#""colour": 1"#), 400, "unknown field `colour`"),
        (r#"{"policy": 5, "key": "u"}"#.to_owned(), 400, "expected a string"),
        (r#"{"policy": "per-usr", "key": "u"}"#.to_owned(), 404, "did you mean \"per-user\"?"),
        (with(r#""cost": 0"#), 400, "at least 1"),
        (with(r#""cost": -1"#), 400, "cost: invalid value: integer `-1`, expected a whole number"),
        (with(r#""cost": 1.5"#), 400, "expected a whole number"),
        (with(r#""cost": NaN"#), 400, "not JSON"),
        (with(r#""cost": 4"#), 400, "at most 3 at once"),
        (with(r#""cost": 99999999999999999999999"#), 400, "expected a whole number"),
        (r#"{"policy": "per-user", "key": ""}"#.to_owned(), 400, "the key is empty"),
        (r#"{"policy": "per-user", "key": "a\nb"}"#.to_owned(), 400, "control character"),
        (long_key, 400, "at most 512"),
        (r#"["per-user", "u", null, null, 1]"#.to_owned(), 400, "expected a JSON object"),
        (
            r#"{"attributes": {"header.A": "1", "header.a": "2"}}"#.to_owned(),
            400,
            "attributes: \"header.a\" is given twice",
        ),
        (
            r#"{"attributes": {"paths": "/"}}"#.to_owned(),
            400,
            "attributes: unknown attribute \"paths\"",
        ),
        (
            r#"{"attributes": {"headers.X-User": "u"}}"#.to_owned(),
            400,
            "(did you mean `header.X-User`?)",
        ),
        (r#"{"attributes": {"tenant": "acme"}}"#.to_owned(), 400, "or be declared in `attributes`"),
        (json!({"attributes": {"é".repeat(9_000): ""}}).to_string(), 400, "é…\""),
        (quota(r#"["sliding-log", null, null, 5, "1s", null]"#), 400, "quota: "),
        (quota(r#"{"limit": 5, "window": 60}"#), 400, "quota.window: "),
        (quota(r#"{"limit": 5, "window": "60"}"#), 400, "write it like 500ms"),
        (quota(r#"{"limit": 0, "window": "60s"}"#), 400, "from 1 to 1000000000000"),
        (
            quota(r#"{"limit": 5, "window": "60s", "algorithm": "gcra"}"#),
            400,
            "it must be one of sliding-log",
        ),
        (quota(r#"{"limit": 5, "window": "60s", "burst": 5}"#), 400, "has no burst"),
        (
            json!({"attributes": {"path": "/api/x", "header.x-user-id": "k".repeat(600)}})
                .to_string(),
            400,
            "counts by header.x-user-id",
        ),
        (format!("{}{}", " ".repeat(65 * 1024), "{}"), 413, "more than 65536 bytes"),
    ];
    for (body, status, message) in cases {
        let response = service.post("/v1/acquire", &body);
        assert_eq!(response.status, status, "{body}: {response:?}");
        assert_eq!(response.header("content-type"), Some("application/problem+json"), "{body}");
        let problem = response.json();
        let detail = problem["detail"].as_str().expect("a detail");
        assert!(detail.contains(message), "{body}: {detail}");
        assert_eq!(problem["status"], status);
    }
    let wrong_method = request(&service.http, "GET", "/v1/acquire", &[], b"");
    assert_eq!((wrong_method.status, wrong_method.header("allow")), (405, Some("POST")));
    let nowhere = request(&service.http, "POST", "/v2/acquire", &[], b"{}");
    assert_eq!(
        (nowhere.status, nowhere.header("content-type")),
        (404, Some("application/problem+json"))
    );
    assert_eq!(
        service.acquire(&json!({"policy": "per-user", "key": "u"})).json()["remaining"],
        2,
        "no units were consumed"
    );
}

#[test]
fn clients_may_send_declared_attributes() {
    let service = Service::start(
        "attributes: [tenant, plan]
policies:
  - {name: per-tenant, match: {plan: free}, key: [tenant], limit: 2, window: 1h}
",
    );
    let acquire = |pairs: &[(&str, &str)]| service.acquire(&attributes(pairs));
    for (tenant, status) in [("acme", 200), ("acme", 200), ("acme", 429), ("other", 200)] {
        assert_eq!(acquire(&[("plan", "free"), ("tenant", tenant)]).status, status, "{tenant}");
    }
    let unlimited = acquire(&[("plan", "gold"), ("tenant", "acme")]).json();
    let expected = json!({
        "allowed": true, "policy": null, "limit": null, "remaining": null, "retry_after_ms": 0,
        "reset_after_ms": 0, "delay_ms": 0, "source": null, "decisions": [],
    });
    assert_eq!(unlimited, expected, "no policy applies, so nothing is said about one");
    // End users choose the names of parameters and cookies, so all names must be accepted.
    let others = [
        ("query.any thing", "x"),
        ("query.", "x"),
        ("cookie.\u{7}", "x"),
        ("domain", "d"),
        ("descriptor.k", "v"),
    ];
    assert_eq!(acquire(&others).status, 200);
    for path in ["/v1/acquire", "/v1/peek", "/v1/refund", "/v1/report", "/v1/reserve"] {
        let response =
            service.post(path, &attributes(&[("plan", "free"), ("tennant", "acme")]).to_string());
        assert_eq!(response.status, 400, "{path}: {response:?}");
        let detail = &response.json()["detail"];
        let message = detail.as_str().expect("a detail");
        assert!(message.starts_with("attributes: unknown attribute \"tennant\""), "{message}");
        assert!(message.ends_with("(did you mean `tenant`?)"), "{message}");
    }
}

#[test]
fn head_requests_get_no_body_in_both_http_versions() {
    let service = Service::start(POLICIES);
    for version in ["--http1.1", "--http2-prior-knowledge"] {
        let url = format!("http://{}/openapi.json", service.http);
        let head = Command::new("curl")
            .args(["-sS", "-m", "10", "--head", version, &url])
            .output()
            .expect("curl runs");
        let text = String::from_utf8_lossy(&head.stdout).to_lowercase();
        assert!(
            head.status.success(),
            "{version}: {text} {}",
            String::from_utf8_lossy(&head.stderr)
        );
        let length =
            text.lines().find_map(|line| line.strip_prefix("content-length: ")).expect("a length");
        assert!(length.trim().parse::<u64>().expect("a number") > 1_000, "{text}");
    }
}

#[test]
fn client_address_comes_from_the_peer_a_trusted_proxy_or_the_request() {
    let policy = "policies:\n  - {name: per-ip, key: [ip], limit: 1000, window: 1h}\n";
    let hot = |service: &Service| -> Vec<String> {
        let hot = service.admin("/v1/hot-keys").json();
        let keys = hot["allowed"].as_array().expect("a list").iter();
        keys.map(|entry| entry["key"].as_str().expect("a key").to_owned()).collect()
    };
    let send = |service: &Service, headers: &[(&str, &str)], attributes: &Value| {
        let body = json!({"attributes": attributes}).to_string();
        request(&service.http, "POST", "/v1/acquire", headers, body.as_bytes())
    };
    let forwarded = [("X-Forwarded-For", "203.0.113.66, 198.51.100.7")];
    let direct = Service::start(policy);
    send(&direct, &forwarded, &json!({}));
    assert_eq!(hot(&direct), ["127.0.0.1"], "no proxy is trusted");
    send(&direct, &[], &json!({"ip": "2001:db8:1:2:3::4"}));
    assert!(hot(&direct).contains(&"2001:db8:1:2::/64".to_owned()));
    let wrong = send(&direct, &[], &json!({"ip": "nowhere"}));
    assert_eq!(wrong.status, 400);
    assert!(wrong.body.contains("is not an address"), "{wrong:?}");

    let proxied = Service::start(&format!(
        "client_ip: {{trusted_proxies: [127.0.0.0/8], ipv6_prefix: 48}}\n{policy}"
    ));
    send(&proxied, &forwarded, &json!({}));
    assert_eq!(hot(&proxied), ["198.51.100.7"], "the rightmost untrusted hop");
    send(&proxied, &[("Forwarded", "for=\"[2001:db8:1:2::3]:4711\"")], &json!({}));
    assert!(hot(&proxied).contains(&"2001:db8:1::/48".to_owned()));
    send(&proxied, &[("X-Forwarded-For", "::ffff:192.0.2.1")], &json!({}));
    assert!(hot(&proxied).contains(&"192.0.2.1".to_owned()), "IPv4-mapped is IPv4");
    let garbage = send(&proxied, &[("X-Forwarded-For", "198.51.100.7, <script>")], &json!({}));
    assert_eq!(garbage.status, 400);
    assert!(garbage.body.contains("X-Forwarded-For"), "{garbage:?}");
}
