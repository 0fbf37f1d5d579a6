//! `tidegate serve` over the network: the API, policies, reload, startup and shutdown.

mod support;

use std::io::Write;
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use support::{Redis, Service, raw, read_response, request, with_free_ports};

const POLICIES: &str = "
policies:
  - name: per-user
    match: {path: /api/**}
    key: [header.x-user-id]
    limit: 3
    window: 1h
    overrides:
      - {key: acme, limit: 1000}
  - name: writes
    match: {path: /api/**, method: [POST, PUT]}
    key: [header.x-user-id]
    algorithm: token-bucket
    limit: 1
    window: 1h
  - name: watched
    match: {path: /watched}
    mode: shadow
    limit: 1
    window: 1h
  - name: known-only
    match: {path: /members}
    key: header.x-member
    missing_key: deny
    limit: 5
    window: 1h
  - name: heavy
    match: {path: /heavy}
    cost: {attribute: header.x-cost, default: 2, max: 8}
    limit: 10
    window: 1h
";

fn attributes(pairs: &[(&str, &str)]) -> Value {
    let attributes: serde_json::Map<String, Value> =
        pairs.iter().map(|(name, value)| ((*name).to_owned(), json!(value))).collect();
    json!({"attributes": attributes})
}

#[test]
fn sample_runs_and_prints_a_working_example() {
    let mut process = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    let help = process.args(["config", "sample"]).output().expect("the binary runs");
    let sample = String::from_utf8(help.stdout).expect("UTF-8");
    let sample =
        sample.replace("127.0.0.1:8080", "127.0.0.1:0").replace("127.0.0.1:8081", "127.0.0.1:0");
    let sample = sample.replace("127.0.0.1:8082", "127.0.0.1:0");
    let service = Service::start(&sample);
    service.wait_until("the example is printed", |service| service.output().contains("Try it:"));
    let output = service.output();
    let line = output
        .lines()
        .find(|line| line.trim_start().starts_with("curl "))
        .expect("an example command");
    let shown = line.trim().replace(&service.http, "127.0.0.1:8080");
    assert!(
        include_str!("../../../README.md").contains(&shown),
        "the README lacks this command: {shown}"
    );
    let response = Command::new("sh")
        .args(["-c", &line.replace("curl -i", "curl -s")])
        .output()
        .expect("curl runs");
    let body: Value = serde_json::from_slice(&response.stdout).expect("a response");
    assert_eq!((&body["allowed"], &body["policy"]), (&json!(true), &json!("per-user")));
}

#[test]
fn acquire_accepts_three_request_forms() {
    let service = Service::start(POLICIES);
    let first = json!({
        "allowed": true, "policy": "per-user", "limit": 3, "remaining": 2, "retry_after_ms": 0,
        "reset_after_ms": 3_600_000, "delay_ms": 0, "source": "store",
    });
    let mut whole = first.clone();
    whole["decisions"] = json!([first]);
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
    let quota = json!({"key": "u1", "quota": {"algorithm": "token-bucket", "limit": 1, "window": "60s", "burst": 2}, "cost": 2});
    assert_eq!(service.acquire(&quota).status, 200);
    assert_eq!(service.acquire(&quota).status, 429);
}

#[test]
fn reports_exceed_the_limit_and_refunds_accept_an_age() {
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
    assert_eq!(refund(None).json()["remaining"], json!(100), "the oldest charge");
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
    let refunded = service.post("/v1/refund", &payload);
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
    assert_eq!((stranger.status, &stranger.json()["source"]), (429, &json!("deny")));
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
    let policy = "{name: watched, mode: shadow, key: [header.authorization], missing_key: deny, limit: 2, window: 1h}";
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
            (&line["policy"], &line["allowed"]),
            (&json!("watched"), &json!(false)),
            "{payload}"
        );
    }
    let metrics = service.admin("/metrics").body;
    assert!(metrics.contains(r#"{policy="watched",outcome="shadow_denied"} 4"#), "{metrics}");
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
        ("[]".to_owned(), 400, "not a question"),
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
            "attributes: \"header.a\" is there twice",
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
    assert_eq!(acquire(&[("plan", "gold"), ("tenant", "acme")]).json()["policy"], Value::Null);
    // End users choose the names of parameters and cookies, so all names must be accepted.
    let others = [
        ("query.any thing", "x"),
        ("query.", "x"),
        ("cookie.\u{7}", "x"),
        ("domain", "d"),
        ("descriptor.k", "v"),
    ];
    assert_eq!(acquire(&others).status, 200);
    for path in ["/v1/acquire", "/v1/peek", "/v1/refund", "/v1/report"] {
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
fn api_and_admin_have_separate_tokens() {
    let auth = "auth: {api_token: open-sesame, admin_token: hunter2}\n";
    let service = Service::start(&format!("{auth}{POLICIES}"));
    let body = br#"{"policy": "per-user", "key": "u1"}"#;
    let send = |token: &str| {
        request(&service.http, "POST", "/v1/acquire", &[("Authorization", token)], body)
    };
    let anonymous = service.post("/v1/acquire", "{}");
    assert_eq!((anonymous.status, anonymous.header("www-authenticate")), (401, Some("Bearer")));
    assert_eq!(send("Bearer wrong").status, 401);
    service.wait_until("the example is printed", |service| service.output().contains("Try it:"));
    assert!(
        service.output().contains("curl -i -H 'Authorization: Bearer TOKEN' -d "),
        "{}",
        service.output()
    );
    assert_eq!(send("Basic open-sesame").status, 401);
    assert_eq!(send("Bearer open-sesame").status, 200);
    assert_eq!(send("bearer open-sesame").status, 200);
    for guarded in ["/metrics", "/v1/policies", "/v1/hot-keys"] {
        assert_eq!(service.admin(guarded).status, 401, "{guarded}");
        let told =
            request(&service.admin, "GET", guarded, &[("Authorization", "Bearer hunter2")], b"");
        assert_eq!(told.status, 200, "{guarded}");
        assert!(!told.body.contains("hunter2") && !told.body.contains("open-sesame"));
    }
    assert_eq!(service.admin("/healthz").status, 200);
    assert_eq!(service.admin("/readyz").status, 200);
    let output = service.output();
    assert!(!output.contains("hunter2") && !output.contains("open-sesame"), "{output}");
}

#[test]
fn admin_resets_keys_and_lists_hot_keys() {
    let service = Service::start(POLICIES);
    let payload = json!({"policy": "per-user", "key": "hot"});
    for _ in 0..10 {
        service.acquire(&payload);
    }
    let hot = service.admin("/v1/hot-keys?limit=5").json();
    assert_eq!((&hot["denied"][0]["key"], &hot["denied"][0]["count"]), (&json!("hot"), &json!(7)));
    assert_eq!(
        (&hot["allowed"][0]["key"], &hot["allowed"][0]["count"]),
        (&json!("hot"), &json!(3))
    );
    assert_eq!(service.admin("/v1/hot-keys?limit=many").status, 400);
    let reset = |body: &str| request(&service.admin, "POST", "/v1/reset", &[], body.as_bytes());
    assert_eq!(reset(r#"{"policy": "per-usr", "key": "hot"}"#).status, 404);
    assert_eq!(reset(r#"{"policy": "per-user"}"#).status, 400);
    assert_eq!(reset(r#"{"policy": "per-user", "key": "hot"}"#).status, 204);
    assert_eq!(service.acquire(&payload).status, 200);
}

#[test]
fn services_on_one_redis_share_counters() {
    let redis = Redis::start();
    let config = format!("store: {{redis: '{}'}}\n{POLICIES}", redis.url());
    let services = [Service::start(&config), Service::start(&config)];
    let payload = json!({"policy": "per-user", "key": "u1"});
    let admitted =
        (0..10).filter(|number| services[number % 2].acquire(&payload).status == 200).count();
    assert_eq!(admitted, 3);
    redis.assert_every_key_expires();
}

#[test]
fn store_failure_applies_each_policys_failure_mode() {
    let redis = Redis::start();
    let config = format!(
        "store: {{redis: '{}'}}
policies:
  - {{name: local, limit: 2, window: 1h}}
  - {{name: allow, limit: 2, window: 1h, on_store_failure: allow}}
  - {{name: deny, limit: 2, window: 1h, on_store_failure: deny}}
",
        redis.url()
    );
    let service = Service::start(&config);
    let send = |policy: &str| service.acquire(&json!({"policy": policy, "key": "u1"}));
    assert_eq!(send("local").json()["source"], "store");
    drop(redis);
    let sources: Vec<(u16, Value)> = ["local", "local", "local", "allow", "deny"]
        .map(|policy| {
            let response = send(policy);
            (response.status, response.json()["source"].clone())
        })
        .to_vec();
    assert_eq!(
        sources,
        [
            (200, json!("local")),
            (200, json!("local")),
            (429, json!("local")),
            (200, json!("allow")),
            (429, json!("deny"))
        ]
    );
    let quota = service.acquire(&json!({"key": "u1", "quota": {"limit": 5, "window": "60s"}}));
    assert_eq!(
        (quota.status, &quota.json()["source"]),
        (200, &json!("local")),
        "a quota in the request"
    );
    let refund = service.post("/v1/refund", &json!({"policy": "allow", "key": "u1"}).to_string());
    assert_eq!(
        refund.status, 503,
        "units in Redis cannot be refunded during the outage: {refund:?}"
    );
    let metrics = service.admin("/metrics").body;
    for line in [
        "tidegate_store_up 0",
        r#"tidegate_fallback_decisions_total{policy="local",source="local"} 3"#,
        r#"tidegate_fallback_decisions_total{policy="allow",source="allow"} 1"#,
        r#"tidegate_fallback_decisions_total{policy="deny",source="deny"} 1"#,
        "tidegate_fleet_instances 1",
    ] {
        assert!(metrics.contains(&format!("{line}\n")), "{line} is not in {metrics}");
    }
    let ready = service.admin("/readyz").json();
    assert_eq!(
        (&ready["ready"], &ready["store_up"], &ready["store"]),
        (&json!(true), &json!(false), &json!("redis"))
    );
    assert_eq!(ready["nodes"][0]["connected"], false, "{ready}");
}

#[test]
fn service_starts_during_an_outage_and_uses_redis_after_it() {
    let port = std::net::TcpListener::bind("127.0.0.1:0")
        .and_then(|listener| listener.local_addr())
        .expect("a port");
    let config = format!("store: {{redis: 'redis://{port}'}}\n{POLICIES}");
    let service = Service::start(&config);
    assert!(service.output().contains("Redis is away"), "{}", service.output());
    let payload = json!({"policy": "per-user", "key": "u1"});
    assert_eq!(service.acquire(&payload).json()["source"], "local");
    // During the outage it assumes a number of instances, unless the file sets one.
    assert!(service.output().contains("store.instances is not set"), "{}", service.output());
    assert!(service.admin("/metrics").body.contains("tidegate_fleet_instances 10\n"));
    let alone =
        Service::start(&format!("store: {{redis: 'redis://{port}', instances: 1}}\n{POLICIES}"));
    assert!(!alone.output().contains("store.instances"), "{}", alone.output());
    assert!(alone.admin("/metrics").body.contains("tidegate_fleet_instances 1\n"));
    let _redis = Redis::try_start(Path::new("redis-server"), port.port(), &[])
        .expect("the port is still free");
    service.wait_until("Redis decides again", |service| {
        service.acquire(&payload).json()["source"] == "store"
    });
    service.wait_until("the metric reports it", |service| {
        service.admin("/metrics").body.contains("tidegate_store_up 1\n")
    });
}

#[test]
fn reload_applies_valid_files_rejects_invalid_ones_and_keeps_counters() {
    let service = Service::start(POLICIES);
    let payload = json!({"policy": "per-user", "key": "u1"});
    assert_eq!(service.acquire(&payload).json()["remaining"], 2);
    let reloads =
        |outcome: &str| format!("tidegate_config_reloads_total{{outcome=\"{outcome}\"}} ");
    let count = |service: &Service, outcome: &str| -> u64 {
        let metrics = service.admin("/metrics").body;
        let line = metrics
            .lines()
            .find_map(|line| line.strip_prefix(&reloads(outcome)))
            .expect("the metric");
        line.parse().expect("a number")
    };
    let listen = format!(
        "listen: {{http: '{}', grpc: '{}', admin: '{}'}}\n",
        service.http,
        service.grpc.as_deref().expect("an address"),
        service.admin
    );
    let raised = format!("{listen}{POLICIES}").replace("limit: 3", "limit: 10");
    // Written in place, as `>` does.
    std::fs::write(service.file(), &raised).expect("written");
    service.wait_until("the limit is raised", |service| {
        service.acquire(&payload).json()["limit"] == 10
    });
    assert!(count(&service, "success") >= 1);
    // An invalid file is rejected as a whole and logged.
    std::fs::write(service.file(), raised.replace("window: 1h", "window: soon")).expect("written");
    service.wait_until("the reload fails", |service| count(service, "failure") >= 1);
    service.wait_until("the reason is logged", |service| {
        let output = service.output();
        output.contains("soon") && output.contains("tidegate.yaml:")
    });
    assert_eq!(service.acquire(&payload).json()["limit"], 10, "the old configuration stays active");
    // Replaced by a rename, as editors do.
    let lowered = raised.replace(
        "limit: 10\n    window: 1h\n    overrides",
        "limit: 2\n    window: 1h\n    overrides",
    );
    let sibling = service.folder().join("beside.yaml");
    std::fs::write(&sibling, &lowered).expect("written");
    std::fs::rename(&sibling, service.file()).expect("renamed");
    service.wait_until("the limit is lowered", |service| {
        service.acquire(&payload).json()["limit"] == 2
    });
    assert_eq!(service.acquire(&payload).status, 429, "the counters were kept");
    // Reloaded by a signal, without a change.
    let before = count(&service, "success");
    service.signal("HUP");
    service
        .wait_until("the signal triggers a reload", |service| count(service, "success") > before);
}

/// Kubernetes mounts a file as a symlink to a symlink, and swaps one of them.
#[test]
fn swapped_symlink_on_the_path_is_noticed() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let place = |name: &str| folder.path().join(name);
    let config = with_free_ports(POLICIES);
    for (version, limit) in [("v1", "limit: 3"), ("v2", "limit: 7")] {
        std::fs::create_dir(place(version)).expect("a directory");
        std::fs::write(place(version).join("tidegate.yaml"), config.replace("limit: 3", limit))
            .expect("written");
    }
    std::os::unix::fs::symlink("v1", place("..data")).expect("a symlink");
    std::os::unix::fs::symlink("..data/tidegate.yaml", place("tidegate.yaml")).expect("a symlink");
    let file = place("tidegate.yaml");
    let (temporary, data) = (place("..data_tmp"), place("..data"));
    let service = Service::start_on(folder, &file, &[]);
    let payload = json!({"policy": "per-user", "key": "u1"});
    assert_eq!(service.acquire(&payload).json()["limit"], 3);
    std::os::unix::fs::symlink("v2", &temporary).expect("a symlink");
    std::fs::rename(&temporary, &data).expect("swapped");
    service.wait_until("the new configuration is active", |service| {
        service.acquire(&payload).json()["limit"] == 7
    });
}

#[test]
fn reload_drops_no_decision() {
    let service = Service::start("policies:\n  - {name: p, limit: 1000000, window: 1h}\n");
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| {
            let mut responses = 0;
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                assert_eq!(service.acquire(&json!({"policy": "p", "key": "u"})).status, 200);
                responses += 1;
            }
            responses
        });
        for _ in 0..10 {
            service.signal("HUP");
            std::thread::sleep(Duration::from_millis(20));
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(asking.join().expect("no panic") > 0);
    });
}

#[test]
fn sigterm_drains_in_flight_requests_and_exits_with_0() {
    let mut service = Service::start(POLICIES);
    // A partially sent request.
    let body = r#"{"policy": "per-user", "key": "u1"}"#;
    let mut slow = TcpStream::connect(&service.http).expect("the service listens");
    let head =
        format!("POST /v1/acquire HTTP/1.1\r\nHost: h\r\nContent-Length: {}\r\n\r\n", body.len());
    slow.write_all(head.as_bytes()).expect("sent");
    slow.write_all(&body.as_bytes()[..10]).expect("sent");
    // The partial request was accepted once a later one has a response.
    service.acquire(&json!({"policy": "per-user", "key": "other"}));
    std::thread::sleep(Duration::from_millis(50));
    service.signal("TERM");
    service
        .wait_until("the service is not ready", |service| service.admin("/readyz").status == 503);
    slow.write_all(&body.as_bytes()[10..]).expect("sent");
    assert_eq!(read_response(&mut slow).status, 200);
    let start = Instant::now();
    assert_eq!(service.wait_for_exit().code(), Some(0));
    assert!(start.elapsed() < Duration::from_secs(10));
}

#[test]
fn thousand_slow_clients_do_not_block_others() {
    let service = Service::start(POLICIES);
    let slow: Vec<TcpStream> = (0..1_000)
        .map(|number| {
            let mut stream = TcpStream::connect(&service.http).expect("the service listens");
            let part = if number % 2 == 0 {
                "POST /v1/acq"
            } else {
                "POST /v1/acquire HTTP/1.1\r\nHost: h\r\nContent-Length: 50\r\n\r\n{"
            };
            stream.write_all(part.as_bytes()).expect("sent");
            stream
        })
        .collect();
    for _ in 0..20 {
        assert_eq!(
            service.acquire(&json!({"policy": "heavy", "key": "u1", "cost": 1})).status,
            200
        );
        service.post("/v1/refund", &json!({"policy": "heavy", "key": "u1", "cost": 1}).to_string());
    }
    drop(slow);
    // The soft limit on open files is raised to the hard limit.
    let (soft, hard) = service.file_limits();
    assert_eq!(soft, hard);
}

#[test]
fn client_without_a_complete_head_is_disconnected() {
    let service = Service::start(POLICIES);
    let mut silent = TcpStream::connect(&service.http).expect("the service listens");
    silent.write_all(b"POST /v1/acquire HT").expect("sent");
    silent.set_read_timeout(Some(support::TEST_TIMEOUT)).expect("a timeout");
    let mut response = String::new();
    let _ = std::io::Read::read_to_string(&mut silent, &mut response);
    assert!(response.is_empty() || response.starts_with("HTTP/1.1 4"), "{response}");
    assert_eq!(raw(&service.http, b"\0\0\0\0\r\n\r\n").status, 400);
}

#[test]
fn secrets_are_never_output() {
    let redis = Redis::start_with(&["--requirepass", "hunter2"]);
    let url = redis.url().replace("//", "//:hunter2@");
    let config = format!("store: {{redis: '{url}'}}\nauth: {{api_token: hunter2}}\n{POLICIES}");
    let service = Service::start_with(&config, &["--log-format", "json"]);
    let header = [("Authorization", "Bearer hunter2")];
    let body = br#"{"policy": "per-user", "key": "u1"}"#;
    assert_eq!(request(&service.http, "POST", "/v1/acquire", &header, body).status, 200);
    drop(redis);
    let failed = request(
        &service.http,
        "POST",
        "/v1/refund",
        &header,
        br#"{"policy": "per-user", "key": "u2"}"#,
    );
    assert_eq!(failed.status, 503);
    std::fs::write(service.file(), config.replace("limit: 3", "limit: [hunter2]"))
        .expect("written");
    service.wait_until("the reload fails", |service| {
        service.output().contains("reloading the configuration failed")
    });
    let seen = [
        service.output(),
        failed.body,
        service.admin("/metrics").body,
        service.admin("/readyz").body,
        service.admin("/v1/policies").body,
    ];
    for text in seen {
        assert!(!text.contains("hunter2"), "{text}");
    }
    for line in service.output().lines() {
        serde_json::from_str::<Value>(line).unwrap_or_else(|error| panic!("{error}: {line}"));
    }
}

#[test]
fn invalid_configuration_exits_with_2_and_a_helpful_message() {
    let run = |config: &str| {
        let folder = tempfile::tempdir().expect("a temporary directory");
        let file = folder.path().join("tidegate.yaml");
        std::fs::write(&file, config).expect("written");
        let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
        let output = command
            .args(["serve", "--config"])
            .arg(&file)
            .env_clear()
            .output()
            .expect("the binary runs");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    for (config, message) in [
        ("listen: {admin: '0.0.0.0:0'}\n", "auth.admin_token"),
        ("polices: []\n", "did you mean `policies`?"),
        (
            "listen: {http: '127.0.0.1:0', grpc: '127.0.0.1:0', admin: '127.0.0.1:0'}\nstore: {redis: 'http://127.0.0.1:1'}\n",
            "it must look like redis://",
        ),
        ("store: {redis: []}\n", "store.redis is empty"),
        ("store: {sentinel: {master: m, nodes: []}}\n", "store.sentinel.nodes is empty"),
        (
            "store: {redis: 'redis://127.0.0.1:1', sentinel: {master: m, nodes: [a]}}\n",
            "both redis and sentinel",
        ),
        (
            "store: {redis: 'rediss://127.0.0.1:1', tls: {key: a.pem}}\n",
            "certificate and key together",
        ),
        (
            "listen: {http: '192.0.2.1:1', grpc: '127.0.0.1:0', admin: '127.0.0.1:0'}\n",
            "cannot listen on 192.0.2.1:1",
        ),
    ] {
        let (code, error) = run(config);
        assert_eq!(code, Some(2), "{error}");
        assert!(error.contains(message), "{config}: {error}");
    }
    let nothing = Command::new(env!("CARGO_BIN_EXE_tidegate")).output().expect("the binary runs");
    let help = String::from_utf8_lossy(&nothing.stderr).into_owned();
    assert_eq!(nothing.status.code(), Some(2));
    assert!(help.contains("Usage:") && help.contains("serve") && !help.contains("error"), "{help}");
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    let output =
        command.args(["serve", "--config", "nowhere.yaml"]).output().expect("the binary runs");
    assert!(String::from_utf8_lossy(&output.stderr).contains("nowhere.yaml: cannot be read"));
}

#[test]
fn config_check_and_schema_report_errors_and_fields() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = folder.path().join("tidegate.yaml");
    let tidegate = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_tidegate"))
            .args(arguments)
            .output()
            .expect("the binary runs");
        let text = [output.stdout, output.stderr]
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        (output.status.code(), text[0].clone(), text[1].clone())
    };
    std::fs::write(&file, POLICIES).expect("written");
    let path = file.to_str().expect("UTF-8");
    let (code, text, _) = tidegate(&["config", "check", path]);
    assert_eq!(code, Some(0));
    assert!(text.contains("valid, 5 policies"), "{text}");
    std::fs::write(&file, POLICIES.replace("limit: 3", "limt: 3")).expect("written");
    let (code, _, error) = tidegate(&["config", "check", path]);
    assert_eq!(code, Some(2));
    assert!(
        error.contains("tidegate.yaml:6:5: unknown field `limt`")
            && error.contains("did you mean `limit`?"),
        "{error}"
    );
    let (code, schema, _) = tidegate(&["config", "schema"]);
    let schema: Value = serde_json::from_str(&schema).expect("JSON");
    assert_eq!(code, Some(0));
    assert!(schema["$defs"]["Policy"]["properties"]["on_store_failure"].is_object(), "{schema}");
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
