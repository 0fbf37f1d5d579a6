use serde_json::{Value, json};

use super::support::{Service, request};
use super::{acquire, attributes, metric};

const POLICIES: &str = "
policies:
  - {name: per-user, match: {path: /api/**}, key: header.x-user-id, limit: 3, window: 1h,
     overrides: [{key: acme, limit: 1000}, {key: zeta, limit: 5, window: 1m}]}
  - {name: planned, match: {path: /api/**}, key: header.x-user-id, limit: 2, window: 1h,
     mode: shadow}
  - {name: total, match: {path: /api/**, method: [GET, POST]}, limit: 1000, window: 1h,
     algorithm: token-bucket, burst: 2000, cost: {attribute: header.x-cost, default: 1, max: 9}}
  - {name: secret, match: {path: /secret}, key: header.authorization, missing_key: deny,
     algorithm: sliding-counter, limit: 1, window: 1h}
";

fn outcomes(service: &Service) -> [String; 4] {
    ["allowed", "denied", "shadow_denied", "error"].map(|name| {
        metric(service, &format!("tidegate_requests_total{{outcome=\"{name}\"}} ")).to_string()
    })
}

fn api(user: &str) -> [(&str, &str); 3] {
    [("path", "/api/x"), ("method", "GET"), ("header.x-user-id", user)]
}

#[test]
fn request_of_several_policies_is_counted_once() {
    let service = Service::start(POLICIES);
    // Two pass, the third one exceeds the planned limit, and two are denied.
    let statuses: Vec<u16> = (0..5).map(|_| acquire(&service, &api("ann"))).collect();
    assert_eq!(statuses, [200, 200, 200, 429, 429]);
    assert_eq!(outcomes(&service), ["2", "2", "1", "0"]);
    assert_eq!(acquire(&service, &[("path", "/other")]), 200, "no policy applies");
    assert_eq!(service.acquire(&json!({"policy": "unknown", "key": "k"})).status, 404);
    service.post("/v1/peek", &attributes(&api("ann")).to_string());
    assert_eq!(outcomes(&service), ["3", "2", "1", "1"]);
    assert!((metric(&service, "tidegate_decision_seconds_count ") - 6.0).abs() < 0.1);
    let allowed =
        metric(&service, r#"tidegate_decisions_total{policy="total",outcome="allowed"} "#);
    assert!((allowed - 5.0).abs() < 0.1, "decisions are those of each policy");
    acquire(&service, &[("path", "/api/x"), ("method", "GET")]);
    let missing = metric(&service, r#"tidegate_missing_key_total{policy="per-user"} "#);
    assert!((missing - 1.0).abs() < 0.1);
}

#[test]
fn hot_keys_distinguish_shadow_denials_and_count_requests_that_passed() {
    let service = Service::start(POLICIES);
    for _ in 0..5 {
        acquire(&service, &api("ann"));
    }
    let hot = service.admin("/v1/hot-keys").json();
    let list = |name: &str| -> Vec<(String, u64)> {
        let entries = hot[name].as_array().expect("a list").iter();
        let entry = |hot: &Value| {
            let policy = hot["policy"].as_str().expect("a name").to_owned();
            (policy, hot["count"].as_u64().expect("a count"))
        };
        let mut entries: Vec<_> = entries.map(entry).collect();
        entries.sort();
        entries
    };
    let of = |name: &str, count| (name.to_owned(), count);
    assert_eq!(list("allowed"), [of("per-user", 3), of("planned", 2), of("total", 3)]);
    assert_eq!(list("denied"), [of("per-user", 2)]);
    assert_eq!(list("shadow_denied"), [of("planned", 3)]);
}

#[test]
fn policies_are_listed_with_match_key_cost_and_overrides() {
    let service = Service::start(POLICIES);
    let policies = service.admin("/v1/policies").json();
    let [per_user, planned, total, secret] = &policies.as_array().expect("a list")[..] else {
        panic!("{policies}")
    };
    assert_eq!(per_user["match"], json!({"path": ["/api/**"]}));
    assert_eq!(per_user["override_count"], json!(2));
    let overrides = per_user["overrides"].as_array().expect("a list");
    let brief = |it: &Value| json!([it["key"], it["limit"], it["window_ms"]]);
    assert_eq!(
        overrides.iter().map(brief).collect::<Vec<_>>(),
        [json!(["acme", 1000, 3_600_000]), json!(["zeta", 5, 60_000])]
    );
    assert_eq!((&per_user["cost"], &per_user["missing_key"]), (&json!(1), &json!("skip")));
    assert_eq!(
        (&per_user["encoding"], &per_user["count_denied"]),
        (&json!("sorted-set"), &json!(false))
    );
    assert_eq!(planned["mode"], json!("shadow"));
    assert_eq!(total["match"], json!({"path": ["/api/**"], "method": ["GET", "POST"]}));
    assert_eq!(total["cost"], json!({"attribute": "header.x-cost", "default": 1, "max": 9}));
    assert_eq!((&total["burst"], &total["encoding"]), (&json!(2000), &Value::Null));
    assert_eq!(secret["missing_key"], json!("deny"));
    assert_eq!((&secret["show_keys"], &secret["encoding"]), (&json!("hashed"), &json!("hash")));
}

#[test]
fn overrides_of_credentials_are_hashed_and_at_most_100_are_listed() {
    let overrides: Vec<String> =
        (0..150).map(|number| format!("{{key: 'Bearer {number}', limit: 5}}")).collect();
    let service = Service::start(&format!(
        "policies: [{{name: p, key: header.authorization, limit: 1, window: 1h, overrides: [{}]}}]\n",
        overrides.join(", ")
    ));
    let policies = service.admin("/v1/policies");
    assert!(!policies.body.contains("Bearer"), "{policies:?}");
    let policy = &policies.json()[0];
    assert_eq!(policy["override_count"], json!(150));
    let listed = policy["overrides"].as_array().expect("a list");
    assert_eq!(listed.len(), 100);
    assert!(listed.iter().all(|it| it["key"].as_str().is_some_and(|it| it.starts_with("sha256:"))));
}

#[test]
fn explained_decisions_name_their_keys_as_the_policy_shows_them() {
    let service = Service::start(POLICIES);
    let keys = |path: &str, query: &Value| -> Vec<Value> {
        let response = service.post(path, &query.to_string());
        let body = response.json();
        let decisions = body["decisions"].as_array().unwrap_or_else(|| panic!("{response:?}"));
        decisions.iter().map(|it| it.get("key").cloned().unwrap_or(json!("absent"))).collect()
    };
    let query = attributes(&api("ann \"x\""));
    for path in ["/v1/acquire?explain", "/v1/peek?a=b&explain=true"] {
        assert_eq!(keys(path, &query), [json!("ann \"x\""), json!("ann \"x\""), json!("all")]);
    }
    for path in ["/v1/acquire", "/v1/acquire?explain=false", "/v1/acquire?explained"] {
        assert_eq!(keys(path, &query), [json!("absent"), json!("absent"), json!("absent")]);
    }
    let secret = attributes(&[("path", "/secret"), ("header.authorization", "abc")]);
    assert_eq!(keys("/v1/acquire?explain", &secret), [json!("sha256:ba7816bf8f01cfea")]);
    let without = attributes(&[("path", "/secret")]);
    assert_eq!(keys("/v1/acquire?explain", &without), [Value::Null], "the request lacks the key");
    let wrong = service.post("/v1/acquire?explain=1", &query.to_string());
    assert_eq!(wrong.status, 400, "{wrong:?}");
}

#[test]
fn history_has_a_sample_per_second_that_adds_up_to_the_requests() {
    let service = Service::start(POLICIES);
    for _ in 0..10 {
        acquire(&service, &api("ann"));
    }
    let samples = |service: &Service| -> Vec<Value> {
        let history = service.admin("/v1/history").json();
        assert_eq!(history["interval_ms"], json!(1000));
        history["samples"].as_array().expect("a list").clone()
    };
    let sum = |samples: &[Value], of: fn(&Value) -> &Value| -> f64 {
        samples.iter().map(|sample| of(sample).as_f64().unwrap_or(0.0)).sum()
    };
    service.wait_until("the requests are in the history", |service| {
        sum(&samples(service), |sample| &sample["denied"]) > 6.0
    });
    let samples = samples(&service);
    // Rates are per second, and a second of a busy machine may be longer.
    let denied = sum(&samples, |sample| &sample["denied"]);
    assert!((6.0..=7.1).contains(&denied), "{samples:?}");
    let by_policy = sum(&samples, |sample| &sample["policies"]["per-user"][1]);
    assert!((by_policy - denied).abs() < 0.1, "{samples:?}");
    let busy = samples.iter().find(|sample| sample["denied"] != json!(0.0)).expect("denials");
    assert!(busy["latency_ms"]["p50"].as_f64() <= busy["latency_ms"]["p99"].as_f64());
    assert!(busy["sources"]["store"].as_f64() > Some(0.0), "{busy}");
    assert_eq!((&busy["store_up"], &busy["fallback"]), (&json!(true), &json!(false)));
    assert_eq!(busy["memory_keys"], json!(3), "{busy}");
}

#[test]
fn status_has_the_version_the_store_and_the_file() {
    let service = Service::start(POLICIES);
    acquire(&service, &api("ann"));
    let status = service.admin("/v1/status").json();
    assert_eq!(status["version"], json!(env!("CARGO_PKG_VERSION")));
    let [started, uptime, now] =
        ["started_at_ms", "uptime_ms", "now_ms"].map(|name| status[name].as_u64().expect(name));
    assert!(now.abs_diff(started + uptime) < 1_000, "{status}");
    let store = &status["store"];
    assert_eq!((&store["kind"], &store["up"]), (&json!("memory"), &json!(true)));
    assert_eq!((&store["nodes"], &store["fallback"]), (&json!([]), &Value::Null));
    let memory = json!({"keys": 3, "max_keys": 10_000_000, "full": false});
    assert_eq!(store["memory"], memory);
    let reload = &status["reload"];
    assert_eq!((&reload["ok"], &reload["at_ms"]), (&json!(true), &Value::Null));
    assert_eq!(reload["config_file"], json!(service.file()));
    assert_eq!(status["upstreams"], Value::Null);
}

const EXCEPTIONS: &str = "
policies:
  - {name: per-ip, key: ip, limit: 1, window: 1h, overrides: [{key: 10.0.0.0/8, limit: 3}],
     unless: [{ip: [10.9.0.0/16, 'fd00::/8']}, {path: /healthz, method: GET}]}
  - {name: per-plan, key: header.x-user-id, window: 1h,
     limits: {attribute: header.x-plan, free: 2, 5: 5, other: 1}}
";

#[test]
fn networks_exceptions_and_plans_are_listed_and_explained() {
    let service = Service::start(EXCEPTIONS);
    let policies = service.admin("/v1/policies").json();
    let (per_ip, per_plan) = (&policies[0], &policies[1]);
    assert_eq!(
        per_ip["unless"],
        json!([{"ip": ["10.9.0.0/16", "fd00::/8"]}, {"path": ["/healthz"], "method": ["GET"]}])
    );
    assert_eq!(per_ip["overrides"][0]["key"], json!("10.0.0.0/8"));
    let values = json!({"attribute": "header.x-plan", "values": {"5": 5, "free": 2}});
    assert_eq!((&per_plan["limits"], &per_plan["limit"]), (&values, &json!(1)));
    let reasons = |of: &[(&str, &str)]| -> Vec<Value> {
        let body = service.post("/v1/peek?explain", &attributes(of).to_string()).json();
        let policies = body["policies"].as_array().unwrap_or_else(|| panic!("{body}"));
        let applies = policies.iter().map(|it| json!([it["policy"], it["applies"]]));
        assert_eq!(applies.filter(|it| it[0] == "per-ip").count(), 1);
        policies.iter().map(|it| it["reason"].clone()).collect()
    };
    assert_eq!(
        reasons(&[("ip", "10.9.1.2"), ("header.x-user-id", "ann"), ("header.x-plan", "free")]),
        [
            json!("unless: entry 1 (ip) matches"),
            json!("it matches; limits: header.x-plan is \"free\"; the limit is 2")
        ]
    );
    assert_eq!(
        reasons(&[("ip", "10.1.1.2"), ("path", "/healthz")]),
        [
            json!("it matches; an override applies; the limit is 3"),
            json!("key: the request has no header.x-user-id")
        ]
    );
    let named = service.post("/v1/peek?explain", r#"{"policy": "per-ip", "key": "10.1.1.2"}"#);
    assert_eq!(named.json().get("policies"), None, "no attributes, nothing to explain");
}

#[test]
fn key_of_a_policy_with_plans_is_looked_up_for_each_plan() {
    let service = Service::start(EXCEPTIONS);
    let request = [("ip", "10.9.1.2"), ("header.x-user-id", "ann"), ("header.x-plan", "5")];
    let statuses: Vec<u16> = (0..3).map(|_| acquire(&service, &request)).collect();
    assert_eq!(statuses, [200, 200, 200]);
    let looked_up = service.admin("/v1/lookup?key=ann&policy=per-plan").json();
    assert_eq!(looked_up["denied"], Value::Null, "it depends on the plan: {looked_up}");
    let results = looked_up["results"].as_array().expect("a list");
    let mut brief: Vec<Value> =
        results.iter().map(|it| json!([it["value"], it["limit"], it["allowed"]])).collect();
    brief.sort_by_key(ToString::to_string);
    assert_eq!(
        brief,
        [json!(["5", 5, true]), json!(["free", 2, false]), json!(["other", 1, false])]
    );
    let other = r#"tidegate_limits_other_total{policy="per-plan"} "#;
    assert!(metric(&service, other) < 0.1, "a lookup is no request");
    acquire(&service, &[("header.x-user-id", "bob"), ("header.x-plan", "gold")]);
    service.acquire(&json!({"policy": "per-plan", "key": "eve"}));
    assert!((metric(&service, other) - 2.0).abs() < 0.1);
    for _ in 0..2 {
        acquire(&service, &request);
    }
    let looked_up = service.admin("/v1/lookup?key=ann&policy=per-plan").json();
    assert_eq!(looked_up["denied"], json!(true), "in every plan: {looked_up}");
}

#[test]
fn refund_by_a_smaller_plan_returns_only_its_units() {
    let service = Service::start(
        "attributes: [tenant, plan]\npolicies: [{name: p, key: tenant, algorithm: token-bucket, \
         window: 1h, limits: {attribute: plan, free: 1, pro: 100, other: 1}}]\n",
    );
    let query =
        |plan: &str, cost: u64| json!({"attributes": {"tenant": "k", "plan": plan}, "cost": cost});
    assert_eq!(service.acquire(&query("pro", 100)).status, 200);
    let refund = |body: &str| service.post("/v1/refund", body).status;
    assert_eq!(refund(r#"{"policy": "p", "key": "k", "cost": 1, "age_ms": 500}"#), 200);
    assert_eq!(
        refund(r#"{"attributes": {"tenant": "k", "plan": "free"}, "cost": 1, "age_ms": 500}"#),
        200
    );
    assert_eq!(service.acquire(&query("pro", 3)).status, 429, "at most two units came back");
}

#[test]
fn address_is_reset_in_any_form() {
    let service = Service::start("policies: [{name: p, key: ip, limit: 1, window: 1h}]\n");
    for (ip, form) in [("10.1.1.1", "::ffff:10.1.1.1"), ("2001:db8::7", "2001:db8::7")] {
        assert_eq!(acquire(&service, &[("ip", ip)]), 200);
        assert_eq!(acquire(&service, &[("ip", ip)]), 429);
        let body = json!({"policy": "p", "key": form}).to_string();
        let headers = [("Content-Type", "application/json")];
        let reset = request(&service.admin, "POST", "/v1/reset", &headers, body.as_bytes());
        assert_eq!(reset.status, 204);
        assert_eq!(acquire(&service, &[("ip", ip)]), 200, "{form}");
    }
}
