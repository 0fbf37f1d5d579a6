use serde_json::{Value, json};

use super::support::{Redis, Service, request};
use super::{acquire, attributes};

const POLICIES: &str = "
policies:
  - {name: per-user, key: header.x-user-id, limit: 3, window: 1h,
     overrides: [{key: acme, limit: 1000}]}
  - {name: planned, key: header.x-user-id, limit: 1, window: 1h, mode: shadow}
  - {name: per-token, key: header.authorization, limit: 2, window: 1h}
  - {name: per-ip, key: ip, limit: 100, window: 1h, algorithm: token-bucket}
  - {name: total, match: {path: /api/**}, limit: 500, window: 1h, algorithm: fixed-window}
";

fn lookup(service: &Service, query: &str) -> Value {
    let response = service.admin(&format!("/v1/lookup?{query}"));
    assert_eq!(response.status, 200, "{response:?}");
    response.json()
}

/// Returns the result of a policy.
fn result<'a>(found: &'a Value, policy: &str) -> &'a Value {
    let mut results = found["results"].as_array().expect("a list").iter();
    results.find(|it| it["policy"] == policy).unwrap_or_else(|| panic!("{policy} in {found}"))
}

fn number(result: &Value, name: &str) -> u64 {
    result[name].as_u64().unwrap_or_else(|| panic!("{name} in {result}"))
}

#[test]
fn denied_key_is_found_in_every_policy_with_the_reason_and_can_be_reset() {
    let redis = Redis::start();
    for store in [String::new(), redis.healthy_store()] {
        let service = Service::start(&format!("{store}{POLICIES}"));
        let ann = [("path", "/api/x"), ("header.x-user-id", "ann")];
        while acquire(&service, &ann) == 200 {}
        let found = lookup(&service, "key=ann");
        assert_eq!((&found["key"], &found["found"]), (&json!("ann"), &json!(true)));
        assert_eq!(found["results"].as_array().map(Vec::len), Some(5), "{found}");
        let denied = result(&found, "per-user");
        assert_eq!((&denied["allowed"], &denied["remaining"]), (&json!(false), &json!(0)));
        assert_eq!((&denied["mode"], &denied["override"]), (&json!("enforce"), &json!(false)));
        assert_eq!((&denied["limit"], &denied["window_ms"]), (&json!(3), &json!(3_600_000)));
        assert!((1..=3_600_000).contains(&number(denied, "retry_after_ms")), "{denied}");
        let reason = denied["reason"].as_str().expect("a sentence");
        assert!(reason.starts_with("3 of 3 units per 1 h are used; the next request"), "{reason}");
        let planned = result(&found, "planned")["reason"].as_str().expect("a sentence");
        assert!(planned.contains("in shadow mode requests pass anyway"), "{planned}");
        // All requests count together, also those of this user.
        let total = result(&found, "total");
        assert_eq!((&total["key"], &total["remaining"]), (&json!("all"), &json!(497)));
        // A look-up takes no units.
        assert_eq!(number(result(&lookup(&service, "key=ann"), "total"), "remaining"), 497);

        let body = json!({"policy": "per-user", "key": "ann"}).to_string();
        let headers = [("Content-Type", "application/json")];
        let reset = request(&service.admin, "POST", "/v1/reset", &headers, body.as_bytes());
        assert_eq!(reset.status, 204);
        let found = lookup(&service, "key=ann&policy=per-user");
        let [free] = &found["results"].as_array().expect("a list")[..] else { panic!("{found}") };
        assert_eq!((&free["allowed"], &free["remaining"]), (&json!(true), &json!(3)), "{free}");
        assert_eq!((&free["reset_after_ms"], &found["found"]), (&json!(0), &json!(false)));
    }
}

#[test]
fn units_in_flight_are_shown_with_the_ends_of_their_holds() {
    const CONFIG: &str = "policies:
  - {name: exports, key: header.x-user-id, algorithm: concurrency, limit: 2, hold: {ttl: 60s}}
";
    let redis = Redis::start();
    for store in [String::new(), redis.healthy_store()] {
        let service = Service::start(&format!("{store}{CONFIG}"));
        let found = lookup(&service, "key=ann");
        let free = result(&found, "exports");
        assert_eq!((&free["window_ms"], &free["remaining"]), (&Value::Null, &json!(2)), "{free}");
        assert_eq!(free["in_flight"], json!({"units": 0, "first_end_ms": null}), "{free}");
        assert_eq!((&found["found"], &free["reset_after_ms"]), (&json!(false), &json!(0)));
        for (units, allowed) in [(1, true), (2, false)] {
            assert_eq!(acquire(&service, &[("header.x-user-id", "ann")]), 200);
            let found = lookup(&service, "key=ann");
            let state = result(&found, "exports");
            assert_eq!(state["in_flight"]["units"], units, "{state}");
            assert_eq!((&state["allowed"], &found["found"]), (&json!(allowed), &json!(true)));
            let first = number(&state["in_flight"], "first_end_ms");
            let last = number(state, "reset_after_ms");
            assert!((1..=last).contains(&first) && last <= 60_000, "{state}");
            let reason = state["reason"].as_str().expect("a sentence");
            assert!(reason.starts_with(&format!("{units} of 2 units are in flight")), "{reason}");
            assert_eq!(reason.contains("when one is released, at the latest in"), !allowed);
        }
        let policies = service.admin("/v1/policies").json();
        assert_eq!(policies[0]["window_ms"], Value::Null, "{policies}");
    }
}

/// Such a key is denied, but not because its limit is reached.
#[test]
fn units_of_a_key_with_as_many_holds_as_it_may_have_are_not_those_of_its_limit() {
    const FILL: &str = "for i = 1, 10000 do redis.call('ZADD', KEYS[1], ARGV[1], i) end
return redis.call('EXPIRE', KEYS[1], 60)";
    let redis = Redis::start();
    let service = Service::start(&format!(
        "store: {{redis: '{}'}}
policies:
  - {{name: exports, key: header.x-user-id, algorithm: concurrency, limit: 20000}}
",
        redis.url()
    ));
    let now: (u64, u64) = redis.query(&["TIME"]);
    let end = ((now.0 + 60) * 1_000_000).to_string();
    let _: u64 = redis.query(&["EVAL", FILL, "1", "rate_limit:{ann}:exports", &end]);
    assert_eq!(acquire(&service, &[("header.x-user-id", "ann")]), 429);
    let found = lookup(&service, "key=ann");
    let state = result(&found, "exports");
    assert_eq!((&state["allowed"], &state["remaining"]), (&json!(false), &json!(10_000)));
    assert_eq!(state["in_flight"]["units"], 10_000, "{state}");
    let reason = state["reason"].as_str().expect("a sentence");
    assert!(reason.starts_with("10000 of 20000 units are in flight"), "{reason}");
}

/// A policy without `key` counts all requests together, unless a caller of the API names a key.
#[test]
fn named_key_of_a_policy_without_a_key_is_found() {
    let service = Service::start(POLICIES);
    let body = json!({"policy": "total", "key": "bob", "cost": 7});
    assert_eq!(service.acquire(&body).status, 200);
    let counts = |key: &str| -> Vec<(Value, Value)> {
        let found = lookup(&service, &format!("policy=total&key={key}"));
        let results = found["results"].as_array().expect("a list").iter();
        results.map(|it| (it["key"].clone(), it["remaining"].clone())).collect()
    };
    let all = || (json!("all"), json!(500));
    assert_eq!(counts("bob"), [(json!("bob"), json!(493)), all()], "those in use come first");
    for key in ["ann", "all"] {
        assert_eq!(counts(key), [all()]);
    }
}

#[test]
fn override_and_address_are_looked_up_as_they_are_counted() {
    let service = Service::start(POLICIES);
    let acme = lookup(&service, "key=acme&policy=per-user");
    assert_eq!(result(&acme, "per-user")["override"], json!(true));
    assert_eq!(number(result(&acme, "per-user"), "remaining"), 1_000);
    service.acquire(&attributes(&[("ip", "2001:db8:1:2:3::4")]));
    let found = lookup(&service, "key=2001:db8:1:2:ffff::1");
    let address = result(&found, "per-ip");
    assert_eq!(address["key"], json!("2001:db8:1:2::/64"), "{found}");
    assert_eq!(number(address, "remaining"), 99);
    assert_eq!(address["reason"], json!("1 of 100 units of the bucket are used."));
}

#[test]
fn credential_is_found_by_its_hash_and_never_shown() {
    let service = Service::start(POLICIES);
    for _ in 0..3 {
        service.acquire(&json!({"policy": "per-token", "key": "abc"}));
    }
    let hash = "sha256:ba7816bf8f01cfea";
    for key in [hash, "abc"] {
        let found = lookup(&service, &format!("key={key}&policy=per-token"));
        let denied = result(&found, "per-token");
        assert_eq!((&denied["key"], &denied["allowed"]), (&json!(hash), &json!(false)), "{found}");
    }
    // The hash is no key of the other policies, and an unknown one is a key of none.
    let found = lookup(&service, &format!("key={hash}"));
    assert!(!found.to_string().contains("abc"), "{found}");
    assert_eq!(result(&found, "per-token")["allowed"], json!(false));
    let unknown = lookup(&service, "key=sha256:0000000000000000&policy=per-token");
    assert_eq!((&unknown["found"], &unknown["results"]), (&json!(false), &json!([])));
}

#[test]
fn wrong_look_ups_say_what_would_be_right() {
    let service = Service::start(POLICIES);
    let long = format!("key={}", "k".repeat(513));
    for (query, status, part) in [
        ("", 400, "the key is missing"),
        ("key=", 400, "the key"),
        (long.as_str(), 400, "512"),
        ("key=a%00b", 400, "control"),
        ("key=k&policy=per-usr", 404, "did you mean"),
        ("key=k&limit=5", 400, "limit"),
    ] {
        let response = service.admin(&format!("/v1/lookup?{query}"));
        assert_eq!(response.status, status, "{query}: {response:?}");
        assert_eq!(response.header("content-type"), Some("application/problem+json"));
        assert!(response.body.contains(part), "{query}: {response:?}");
    }
}

#[test]
fn outage_shows_in_the_reason() {
    let mut redis = Redis::start();
    let service = Service::start(&format!(
        "store: {{redis: '{}', instances: 1}}
policies:
  - {{name: local, limit: 100, window: 1h}}
  - {{name: deny, limit: 100, window: 1h, on_store_failure: deny}}
",
        redis.url()
    ));
    redis.kill();
    let found = lookup(&service, "key=all");
    let local = result(&found, "local");
    assert_eq!((&local["source"], &local["allowed"]), (&json!("local"), &json!(true)), "{found}");
    assert!(local["reason"].as_str().is_some_and(|it| it.contains("by its share")), "{local}");
    let denied = result(&found, "deny");
    assert_eq!(
        denied["reason"],
        json!("The store is unavailable, and requests are denied by on_store_failure.")
    );
}

#[test]
fn denied_key_is_found_among_many_policies() {
    let policy = |number: u32| {
        let fields = "key: header.x-user-id, limit: 1, window: 1h";
        format!("  - {{name: p{number}, match: {{path: /{number}}}, {fields}}}\n")
    };
    let policies: String = (0..1_001).map(policy).collect();
    let service = Service::start(&format!("policies:\n{policies}"));
    let acquire = |path: &str| acquire(&service, &[("path", path), ("header.x-user-id", "ann")]);
    let found = lookup(&service, "key=ann");
    assert_eq!((&found["denied"], &found["truncated"]), (&json!(false), &json!(true)));
    assert_eq!((acquire("/900"), acquire("/900")), (200, 429));
    let found = lookup(&service, "key=ann");
    assert_eq!((&found["denied"], &found["truncated"]), (&json!(true), &json!(true)));
    let results = found["results"].as_array().expect("a list");
    assert_eq!((results.len(), &results[0]["policy"]), (200, &json!("p900")));
    // One warning for all of them.
    let output = service.output();
    let warnings: Vec<_> = output.lines().filter(|line| line.contains("WARN")).collect();
    assert_eq!(warnings.len(), 1, "{output}");
    assert!(warnings[0].contains("1001 policies, \"p0\", \"p1\", \"p2\" and 998 more"), "{output}");
}
