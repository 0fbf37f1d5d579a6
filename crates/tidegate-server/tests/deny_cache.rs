//! Denials that the service answers without Redis, and how it notices that they are over.

mod support;

use std::cell::Cell;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use support::{Redis, Service, request};

const SECOND: Duration = Duration::from_secs(1);

fn config(redis: &Redis, limit: u64) -> String {
    format!(
        "store: {{redis: '{}'}}\npolicies:\n  - {{name: p, limit: {limit}, window: 1h}}\n",
        redis.url()
    )
}

fn ask(key: &str) -> Value {
    json!({"policy": "p", "key": key})
}

fn reset(service: &Service, key: &str) {
    let answer = request(&service.admin, "POST", "/v1/reset", &[], ask(key).to_string().as_bytes());
    assert_eq!(answer.status, 204, "{answer:?}");
}

/// Takes what there is, and asks until the denial comes from the cache.
fn exhaust(service: &Service, key: &str) {
    service.until("the cache answers", |service| {
        let answer = service.acquire(&ask(key));
        answer.status == 429 && answer.json()["source"] == "deny-cache"
    });
}

/// Asks until it is admitted; when the cache last denied, from now on.
fn until_admitted(service: &Service, key: &str) -> Duration {
    let (start, last) = (Instant::now(), Cell::new(Duration::ZERO));
    service.until("it is admitted", |service| {
        let asked = start.elapsed();
        let answer = service.acquire(&ask(key));
        if answer.json()["source"] == "deny-cache" {
            last.set(asked);
        }
        answer.status == 200
    });
    last.get()
}

#[test]
fn a_denial_is_answered_from_the_cache_until_something_changes() {
    let redis = Redis::start();
    let service = Service::start(&config(&redis, 2));
    exhaust(&service, "u1");
    let answer = service.acquire(&ask("u1"));
    assert_eq!((answer.status, &answer.json()["source"]), (429, &json!("deny-cache")));
    let retry_after: u64 =
        answer.header("retry-after").and_then(|text| text.parse().ok()).expect("seconds");
    assert!((3_590..=3_600).contains(&retry_after), "{retry_after}");
    assert_eq!(answer.json()["remaining"], 0);
    let look = service.post("/v1/peek", &ask("u1").to_string());
    assert_eq!((look.status, &look.json()["allowed"]), (200, &json!(false)));

    let metrics = service.admin("/metrics").body;
    let value = |name: &str| {
        metrics.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok())
    };
    assert!(
        value("tidegate_decision_sources_total{source=\"deny-cache\"}") >= Some(2),
        "{metrics}"
    );
    assert_eq!(value("tidegate_deny_cache_entries"), Some(1), "{metrics}");

    // A raised limit is another quota: the very next request is asked of Redis.
    std::fs::write(service.file(), support::with_free_ports(&config(&redis, 3))).expect("written");
    service.until("it is taken", |service| {
        service
            .admin("/metrics")
            .body
            .contains("tidegate_config_reloads_total{outcome=\"taken\"} 1")
    });
    let raised = service.acquire(&ask("u1"));
    assert_eq!((raised.status, &raised.json()["source"]), (200, &json!("store")), "{raised:?}");

    exhaust(&service, "u1");
    assert_eq!(service.post("/v1/refund", &ask("u1").to_string()).status, 200);
    assert_eq!(service.acquire(&ask("u1")).status, 200, "a refund is seen at once");
    exhaust(&service, "u1");
    reset(&service, "u1");
    assert_eq!(service.acquire(&ask("u1")).status, 200, "a reset is seen at once");
    redis.assert_every_key_expires();
}

#[test]
fn what_another_instance_gives_back_is_noticed_within_a_second() {
    let redis = Redis::start();
    let services = [Service::start(&config(&redis, 1)), Service::start(&config(&redis, 1))];
    for _ in 0..2 {
        exhaust(&services[0], "u1");
        assert_eq!(services[1].post("/v1/refund", &ask("u1").to_string()).status, 200);
        let noticed = until_admitted(&services[0], "u1");
        assert!(noticed < SECOND, "{noticed:?}");
        exhaust(&services[0], "u1");
        reset(&services[1], "u1");
        let noticed = until_admitted(&services[0], "u1");
        assert!(noticed < SECOND, "{noticed:?}");
    }
}
