//! Reservations and ids, on memory and on a real Redis.

use serde_json::{Value, json};

use crate::attributes;
use crate::support::{Redis, Response, Service, request};

const POLICIES: &str = "
policies:
  - {name: tokens, match: {path: /chat}, key: [header.x-user-id], limit: 100, window: 1d}
  - {name: budget, match: {path: /chat}, algorithm: token-bucket, limit: 150, window: 30d}
  - {name: in-flight, match: {path: /export}, key: [header.x-user-id], algorithm: concurrency,
     limit: 2, hold: {ttl: 1h, max_ttl: 1h}}
  - {name: jobs, match: {path: /job}, key: [header.x-user-id], limit: 10, window: 1d}
  - {name: jobs-in-flight, match: {path: /job}, key: [header.x-user-id], algorithm: concurrency,
     limit: 1, hold: {ttl: 1h, max_ttl: 1h}}
";

/// Runs a check on a service with its counts in memory, and on one with a Redis.
fn on_both_stores(check: impl Fn(&Service)) {
    check(&Service::start(POLICIES));
    let redis = Redis::start();
    check(&Service::start(&on(&redis, POLICIES)));
    redis.assert_every_key_expires();
}

fn on(redis: &Redis, policies: &str) -> String {
    format!("store: {{redis: '{}', timeout: 1s, instances: 1}}\n{policies}", redis.url())
}

/// Sends a query on the policy `tokens` with these fields.
fn send(service: &Service, endpoint: &str, key: &str, fields: Value) -> Response {
    send_to(service, endpoint, json!({"policy": "tokens", "key": key}), fields)
}

fn send_to(service: &Service, endpoint: &str, mut query: Value, mut fields: Value) -> Response {
    let all = query.as_object_mut().expect("an object");
    all.append(fields.as_object_mut().expect("an object"));
    service.post(&format!("/v1/{endpoint}"), &query.to_string())
}

/// Returns the fields of an answer about its reservation.
fn of_hold(response: &Response) -> Value {
    let mut body = response.json();
    let names = ["reservation", "expires_after_ms", "replayed", "settled", "pending", "held"];
    body.as_object_mut().expect("an object").retain(|name, _| names.contains(&name.as_str()));
    body
}

fn remaining(response: &Response) -> u64 {
    response.json()["remaining"].as_u64().unwrap_or_else(|| panic!("no number: {response:?}"))
}

/// Returns what is left of `tokens` for this key.
fn left(service: &Service, key: &str) -> u64 {
    remaining(&send(service, "peek", key, json!({}))) + 1
}

#[test]
fn reservation_is_settled_once() {
    on_both_stores(|service| {
        let reserve = |id: &str, cost: u64| {
            send(service, "reserve", "ann", json!({"id": id, "cost": cost, "ttl_ms": 30_000}))
        };
        let first = reserve("job", 80);
        assert_eq!((first.status, remaining(&first)), (200, 20), "{first:?}");
        let held = json!({"reservation": "job", "expires_after_ms": 30_000});
        assert_eq!(of_hold(&first), held);
        for _ in 0..2 {
            let repeated = reserve("job", 80);
            assert_eq!((repeated.status, remaining(&repeated)), (200, 20), "the earlier answer");
            let mut body = of_hold(&repeated);
            let expires = body["expires_after_ms"].take().as_u64().expect("a number");
            assert!((1..=30_000).contains(&expires), "{repeated:?}");
            let replayed =
                json!({"reservation": "job", "expires_after_ms": null, "replayed": true});
            assert_eq!(body, replayed);
        }
        assert_eq!(left(service, "ann"), 20, "charged once");
        for _ in 0..3 {
            // A denial that the deny cache knows is not that of a repeated request.
            assert_eq!(send(service, "acquire", "ann", json!({"cost": 80})).status, 429);
            assert_eq!(reserve("new", 80).status, 429);
            assert_eq!(reserve("job", 80).json()["replayed"], true);
        }
        let conflict = reserve("job", 70);
        assert_eq!(conflict.status, 409, "{conflict:?}");
        assert_eq!(conflict.header("content-type"), Some("application/problem+json"));
        let detail = conflict.json()["detail"].to_string();
        assert!(detail.contains("in use with another cost"), "{detail}");
        let commit = |id: &str, actual: u64| {
            send(service, "commit", "ann", json!({"id": id, "actual": actual}))
        };
        for actual in [50, 90, 0] {
            let settled = commit("job", actual);
            assert_eq!((settled.status, remaining(&settled)), (200, 50), "{settled:?}");
            assert_eq!(of_hold(&settled), json!({"reservation": "job", "settled": true}));
        }
        assert_eq!(of_hold(&send(service, "renew", "ann", json!({"id": "job"})))["held"], false);
        let more = reserve("more", 10);
        assert_eq!((more.status, remaining(&more)), (200, 40));
        assert_eq!(remaining(&commit("more", 30)), 20, "more than reserved is charged, too");
        let cancelled = reserve("cancelled", 20);
        assert_eq!((cancelled.status, remaining(&commit("cancelled", 0))), (200, 20));
    });
}

#[test]
fn denied_reservation_is_not_remembered() {
    on_both_stores(|service| {
        let reserve =
            |cost: u64| send(service, "reserve", "ann", json!({"id": "job", "cost": cost}));
        let full = send(service, "reserve", "ann", json!({"cost": 95}));
        let random = full.json()["reservation"].as_str().expect("an id").to_owned();
        assert!(random.len() == 32 && random.bytes().all(|byte| byte.is_ascii_hexdigit()));
        for cost in [6, 7] {
            let denied = reserve(cost);
            assert_eq!(denied.status, 429, "{denied:?}");
            assert!(denied.header("retry-after").is_some(), "{denied:?}");
            assert_eq!(of_hold(&denied), json!({}), "no other cost in use: {denied:?}");
        }
        let renewed = send(service, "renew", "ann", json!({"id": "job", "ttl_ms": 5_000}));
        let expected = json!({"reservation": "job", "expires_after_ms": 0, "held": false});
        assert_eq!((renewed.status, of_hold(&renewed)), (200, expected));
        let settled = send(service, "commit", "ann", json!({"id": random, "actual": 0}));
        assert_eq!(
            (of_hold(&settled)["settled"].as_bool(), remaining(&settled)),
            (Some(true), 100)
        );
        assert_eq!(reserve(6).status, 200);
    });
}

/// It denies nothing, because the work is done: `decisions` says that the limit is exceeded.
#[test]
fn commit_beyond_the_limit_names_it_under_decisions() {
    on_both_stores(|service| {
        assert_eq!(send(service, "reserve", "ann", json!({"id": "job", "cost": 60})).status, 200);
        let commit = send(service, "commit", "ann", json!({"id": "job", "actual": 150}));
        let body = commit.json();
        assert_eq!((commit.status, remaining(&commit)), (200, 0), "{body}");
        let tokens = &body["decisions"][0];
        assert_eq!((&body["allowed"], &tokens["allowed"]), (&json!(true), &json!(false)), "{body}");
        assert!(tokens["retry_after_ms"].as_u64().is_some_and(|wait| wait > 0), "{body}");
        assert_eq!(send(service, "acquire", "ann", json!({})).status, 429);
    });
}

#[test]
fn units_of_an_unknown_id_are_reported() {
    on_both_stores(|service| {
        let commit =
            |actual: u64| send(service, "commit", "ann", json!({"id": "job", "actual": actual}));
        let reported = commit(30);
        assert_eq!((reported.status, remaining(&reported)), (200, 70), "{reported:?}");
        assert_eq!(of_hold(&reported), json!({"reservation": "job", "settled": false}));
        assert_eq!(remaining(&commit(0)), 70);
    });
}

#[test]
fn id_is_charged_and_refunded_once() {
    on_both_stores(|service| {
        let pay = json!({"id": "pay-1", "cost": 40, "id_ttl_ms": 600_000});
        let first = send(service, "acquire", "ann", pay.clone());
        assert_eq!((first.status, remaining(&first)), (200, 60));
        let expected = json!({"reservation": "pay-1", "expires_after_ms": 0});
        assert_eq!(of_hold(&first), expected);
        let repeated = send(service, "acquire", "ann", pay);
        assert_eq!((repeated.status, remaining(&repeated)), (200, 60));
        assert_eq!(of_hold(&repeated)["replayed"], true);
        let other = send(service, "acquire", "ann", json!({"id": "pay-1", "cost": 41}));
        assert_eq!(other.status, 409, "{other:?}");
        assert_eq!(remaining(&send(service, "acquire", "ann", json!({"cost": 30}))), 30);
        for _ in 0..2 {
            let refunded = send(service, "refund", "ann", json!({"id": "pay-1"}));
            assert_eq!((refunded.status, remaining(&refunded)), (200, 70), "exactly once");
            assert_eq!(of_hold(&refunded), json!({"reservation": "pay-1", "settled": true}));
        }
        let unknown = send(service, "refund", "ann", json!({"id": "other"}));
        assert_eq!((unknown.status, remaining(&unknown)), (200, 70), "{unknown:?}");
        assert_eq!(of_hold(&unknown)["settled"], false);
    });
}

#[test]
fn one_id_is_all_or_nothing_over_all_policies() {
    on_both_stores(|service| {
        let chat = |user: &str| attributes(&[("path", "/chat"), ("header.x-user-id", user)]);
        let reserve = |user: &str, cost: u64| {
            send_to(service, "reserve", chat(user), json!({"id": "turn-1", "cost": cost}))
        };
        let budget = || {
            let peeked =
                service.post("/v1/peek", &json!({"policy": "budget", "key": "all"}).to_string());
            remaining(&peeked) + 1
        };
        let first = reserve("ann", 90);
        assert_eq!(
            (first.status, first.json()["decisions"].as_array().map(Vec::len)),
            (200, Some(2))
        );
        assert_eq!((left(service, "ann"), budget()), (10, 60));
        // The same id of another user is another reservation of `tokens`, but not of `budget`.
        assert_eq!(reserve("bob", 60).status, 409);
        let bob =
            |id: &str| send_to(service, "reserve", chat("bob"), json!({"id": id, "cost": 61}));
        assert_eq!(bob("turn-2").status, 429, "the budget denies");
        assert_eq!((left(service, "bob"), budget()), (100, 60), "nothing is taken");
        let commit = json!({"id": "turn-1", "actual": 20});
        let settled = send_to(service, "commit", chat("ann"), commit);
        assert_eq!(of_hold(&settled), json!({"reservation": "turn-1", "settled": true}));
        assert_eq!((left(service, "ann"), budget()), (80, 130));
        assert_eq!(bob("turn-2").status, 200);
        // No policy applies. There is an id, so that every reservation can be committed.
        let free = send_to(service, "reserve", attributes(&[("path", "/")]), json!({"id": "a"}));
        assert_eq!((free.status, &free.json()["policy"]), (200, &Value::Null));
        assert_eq!(of_hold(&free), json!({"reservation": "a", "expires_after_ms": 0}));
        let explained = service.post(
            "/v1/commit?explain",
            &json!({"attributes": {"path": "/"}, "id": "a", "actual": 1}).to_string(),
        );
        assert_eq!((explained.status, &explained.json()["settled"]), (200, &json!(false)));
        assert!(explained.json()["policies"].is_array(), "{explained:?}");
    });
}

#[test]
fn acquire_holds_units_in_flight() {
    on_both_stores(|service| {
        let export = || attributes(&[("path", "/export"), ("header.x-user-id", "ann")]);
        let acquire = |fields: Value| send_to(service, "acquire", export(), fields);
        let first = acquire(json!({}));
        let id = first.json()["reservation"].as_str().expect("an id").to_owned();
        assert_eq!((first.status, id.len(), remaining(&first)), (200, 32, 1), "{first:?}");
        assert_eq!(of_hold(&first)["expires_after_ms"], 3_600_000);
        // With an id, a retry does not take a second slot.
        for replayed in [Value::Null, json!(true)] {
            let second = acquire(json!({"id": "second"}));
            assert_eq!((second.status, remaining(&second)), (200, 0), "{second:?}");
            assert_eq!(second.json()["replayed"], replayed);
        }
        let denied = acquire(json!({}));
        assert_eq!((denied.status, of_hold(&denied)), (429, json!({})), "{denied:?}");
        let renewed = send_to(service, "renew", export(), json!({"id": id, "ttl_ms": 60_000}));
        assert_eq!(of_hold(&renewed)["held"], true, "{renewed:?}");
        let released = send_to(service, "commit", export(), json!({"id": id, "actual": 0}));
        assert_eq!(
            (of_hold(&released)["settled"].as_bool(), remaining(&released)),
            (Some(true), 1)
        );
        let refund = send_to(service, "refund", export(), json!({"id": "second"}));
        assert_eq!((refund.status, remaining(&refund)), (200, 2), "{refund:?}");
    });
}

#[test]
fn id_of_a_rate_and_of_units_in_flight_is_one_request() {
    on_both_stores(|service| {
        let job = || attributes(&[("path", "/job"), ("header.x-user-id", "ann")]);
        let send = |endpoint: &str, fields: Value| send_to(service, endpoint, job(), fields);
        let left = || {
            let query = json!({"policy": "jobs", "key": "ann"});
            remaining(&service.post("/v1/peek", &query.to_string())) + 1
        };
        for _ in 0..2 {
            let held = send("acquire", json!({"id": "job-1"}));
            assert_eq!((held.status, left()), (200, 9), "{held:?}");
            let expires = of_hold(&held)["expires_after_ms"].as_u64().expect("a number");
            assert!(expires > 3_000_000, "the units in flight are held: {held:?}");
        }
        assert_eq!(send("acquire", json!({"id": "job-2"})).status, 429);
        let renewed = send("renew", json!({"id": "job-1"}));
        assert_eq!(of_hold(&renewed)["held"], true, "{renewed:?}");
        let settled = send("commit", json!({"id": "job-1", "actual": 1}));
        assert_eq!(of_hold(&settled), json!({"reservation": "job-1", "settled": true}));
        assert_eq!(of_hold(&send("renew", json!({"id": "job-1"})))["held"], false);
        let next = send("acquire", json!({"id": "job-2"}));
        assert_eq!((next.status, left()), (200, 8), "{next:?}");
        // Its units in flight are released already.
        let refunded = send("refund", json!({"id": "job-1"}));
        assert_eq!(of_hold(&refunded), json!({"reservation": "job-1", "settled": true}));
        assert_eq!(left(), 9, "{refunded:?}");
    });
}

#[test]
fn renewal_never_revives() {
    on_both_stores(|service| {
        let quota = json!({"algorithm": "concurrency", "limit": 1, "hold": {"max_ttl": "2s"}});
        let query = || json!({"key": "ann", "quota": quota});
        let renew =
            || of_hold(&send_to(service, "renew", query(), json!({"id": "a", "ttl_ms": 60_000})));
        let held = send_to(service, "reserve", query(), json!({"id": "a", "ttl_ms": 60_000}));
        assert_eq!((held.status, &held.json()["expires_after_ms"]), (200, &json!(2_000)));
        let renewed = renew();
        let expires = renewed["expires_after_ms"].as_u64().expect("a number");
        assert!(expires <= 2_000, "no renewal extends it beyond its maximum: {renewed}");
        service.wait_until("it has ended", |service| {
            let peeked = send_to(service, "peek", query(), json!({}));
            peeked.json()["allowed"] == true
        });
        let expected = json!({"reservation": "a", "expires_after_ms": 0, "held": false});
        assert_eq!(renew(), expected);
        let next = send_to(service, "reserve", query(), json!({"id": "b"}));
        assert_eq!(next.status, 200, "{next:?}");
        assert_eq!(renew(), expected);
    });
}

#[test]
fn commit_after_a_reload_finds_its_own_policies() {
    let redis = Redis::start();
    for store in [String::new(), on(&redis, "")] {
        let policy = |name: &str| {
            format!("  - {{name: {name}, key: [header.x-user-id], limit: 100, window: 1d}}\n")
        };
        let folder = tempfile::tempdir().expect("a temporary directory");
        let file = folder.path().join("tidegate.yaml");
        let config = |names: [&str; 2]| {
            let policies: String = names.map(policy).concat();
            crate::support::with_free_ports(&format!("{store}policies:\n{policies}"))
        };
        std::fs::write(&file, config(["kept", "removed"])).expect("written");
        let service = Service::start_on(folder, &file, &[]);
        let ann = || attributes(&[("header.x-user-id", "ann")]);
        let reserved = send_to(&service, "reserve", ann(), json!({"id": "job", "cost": 60}));
        assert_eq!(reserved.status, 200, "{reserved:?}");
        std::fs::write(&file, config(["kept", "added"])).expect("written");
        let left = |service: &Service, name: &str| {
            let query = json!({"policy": name, "key": "ann"});
            let response = service.post("/v1/peek", &query.to_string());
            (response.status == 200).then(|| remaining(&response) + 1)
        };
        service.wait_until("the policy is added", |service| left(service, "added").is_some());
        let settled = send_to(&service, "commit", ann(), json!({"id": "job", "actual": 70}));
        assert_eq!(settled.status, 200, "{settled:?}");
        assert_eq!(of_hold(&settled), json!({"reservation": "job", "settled": true}));
        assert_eq!(left(&service, "kept"), Some(30));
        assert_eq!(left(&service, "added"), Some(100), "it is newer than the reservation");
    }
}

#[test]
fn commit_during_an_outage_is_made_after_it() {
    let redis = Redis::start();
    let open = POLICIES.replace("limit: 100,", "limit: 100, on_store_failure: allow,");
    let service = Service::start(&on(&redis, &open));
    let reserved = send(&service, "reserve", "ann", json!({"id": "job", "cost": 80}));
    assert_eq!((reserved.status, remaining(&reserved)), (200, 20));
    redis.signal("STOP");
    let commit = json!({"id": "job", "actual": 30});
    let pending = send(&service, "commit", "ann", commit.clone());
    let expected = json!({"reservation": "job", "settled": false, "pending": true});
    assert_eq!((pending.status, of_hold(&pending)), (200, expected), "{pending:?}");
    // Open, so nothing is held, and its commit will be a report.
    let open = send(&service, "reserve", "ann", json!({"id": "open"}));
    assert_eq!((open.status, &open.json()["source"]), (200, &json!("allow")), "{open:?}");
    assert_eq!(of_hold(&open), json!({"reservation": "open", "expires_after_ms": 0}));
    redis.signal("CONT");
    service.wait_until("the commit is made", |service| {
        let peeked = send(service, "peek", "ann", json!({}));
        peeked.json()["source"] == "store" && remaining(&peeked) == 69
    });
    let again = send(&service, "commit", "ann", commit);
    assert_eq!((of_hold(&again)["settled"].as_bool(), remaining(&again)), (Some(true), 70));
}

#[test]
fn invalid_requests_of_reservations_say_what_would_be_right() {
    let service = Service::start(POLICIES);
    let long = "x".repeat(65);
    let concurrency = |fields: Value| {
        let mut quota = json!({"algorithm": "concurrency", "limit": 5});
        quota
            .as_object_mut()
            .expect("an object")
            .extend(fields.as_object().cloned().into_iter().flatten());
        json!({"policy": null, "key": "ann", "quota": quota})
    };
    for (endpoint, fields, message) in [
        ("reserve", json!({"id": ""}), "from 1 to 64 printable ASCII characters"),
        ("reserve", json!({"id": long}), "from 1 to 64 printable ASCII characters"),
        ("reserve", json!({"id": "a b"}), "without spaces"),
        ("reserve", json!({"id": 5}), "id: invalid type: integer `5`, expected a string"),
        ("reserve", json!({"ttl_ms": 999}), "999ms of a hold is out of range: it must be from 1s"),
        ("reserve", json!({"ttl_ms": 86_400_001_u64}), "from 1s to 24h"),
        ("reserve", json!({"ttl_ms": u64::MAX}), "from 1s to 24h"),
        ("reserve", json!({"cost": 0}), "a cost is at least 1"),
        ("reserve", json!({"cost": 101}), "at most 100 at once"),
        ("reserve", json!({"ttl": 1000}), "unknown field `ttl`"),
        (
            "reserve",
            json!({"id_ttl_ms": 5000}),
            "id_ttl_ms is a field of /v1/acquire; /v1/reserve has cost, id, ttl_ms",
        ),
        ("reserve", json!({"age_ms": 5}), "/v1/reserve has cost"),
        ("commit", json!({"actual": 1}), "/v1/commit needs id: that of the reservation"),
        ("commit", json!({"id": "a"}), "/v1/commit needs actual: the units that were used"),
        ("commit", json!({"id": "a", "actual": -1}), "expected a whole number"),
        ("commit", json!({"id": "a", "actual": 1, "cost": 1}), "/v1/commit has id, actual"),
        ("commit", json!({"id": "", "actual": 1}), "from 1 to 64"),
        ("renew", json!({"ttl_ms": 5000}), "/v1/renew needs id"),
        ("renew", json!({"id": "a", "ttl_ms": 1}), "from 1s to 24h"),
        ("acquire", json!({"id": "a", "id_ttl_ms": 600_001}), "from 1s to 10m"),
        ("acquire", json!({"id_ttl_ms": 5000}), "send id, too"),
        (
            "acquire",
            json!({"ttl_ms": 5000}),
            "ttl_ms is a field of /v1/reserve, /v1/renew; /v1/acquire",
        ),
        ("peek", json!({"id": "a"}), "id is a field of /v1/acquire, /v1/reserve"),
        ("report", json!({"id": "a"}), "/v1/report has cost"),
        ("refund", json!({"id": "a", "age_ms": 5}), "send neither cost nor age_ms"),
        ("refund", json!({"id": "a", "cost": 5}), "send neither cost nor age_ms"),
        ("refund", json!({"cost": 5}), "a refund needs id"),
        (
            "refund",
            json!({"policy": null, "key": "ann", "cost": 101, "age_ms": 5,
                "quota": {"algorithm": "concurrency", "limit": 5}}),
            "releases at most 100, not 101",
        ),
        ("acquire", concurrency(json!({"window": "60s"})), "concurrency has no window: its units"),
        ("acquire", concurrency(json!({"burst": 9})), "has no burst"),
        ("acquire", concurrency(json!({"hold": {"ttl": "0s"}})), "quota.hold: "),
        ("acquire", concurrency(json!({"hold": {"ttl": "25h"}})), "from 1s to 24h"),
        ("acquire", concurrency(json!({"hold": {"on_expire": "drop"}})), "charge, release"),
        ("acquire", concurrency(json!({"hold": {"on_expire": "charge"}})), "leave `on_expire` out"),
        ("acquire", concurrency(json!({"hold": ["60s"]})), "expected a JSON object"),
        ("acquire", concurrency(json!({"algorithm": "fixed-window"})), "quota.window is missing"),
    ] {
        let response = send(&service, endpoint, "ann", fields.clone());
        assert_eq!(response.status, 400, "{endpoint} {fields}: {response:?}");
        let detail = response.json()["detail"].as_str().expect("a reason").to_owned();
        assert!(detail.contains(message), "{endpoint} {fields}: {detail}");
    }
    assert_eq!(send(&service, "reserve", "ann", json!({"policy": "tokns"})).status, 404);
    for endpoint in ["/v1/reserve", "/v1/commit", "/v1/renew"] {
        let wrong_method = request(&service.http, "GET", endpoint, &[], b"");
        assert_eq!((wrong_method.status, wrong_method.header("allow")), (405, Some("POST")));
    }
    assert_eq!(left(&service, "ann"), 100, "no units were consumed");
}
