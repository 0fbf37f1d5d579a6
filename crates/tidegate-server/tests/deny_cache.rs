//! Denials from the deny cache, and their invalidation.

mod support;

use std::cell::Cell;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use support::{Redis, Service, request};

const SECOND: Duration = Duration::from_secs(1);

fn config(redis: &Redis, limit: u64) -> String {
    format!(
        "store: {{redis: '{}', timeout: 5s}}\npolicies:\n  - {{name: p, limit: {limit}, window: 1h}}\n",
        redis.url()
    )
}

fn payload(key: &str) -> Value {
    json!({"policy": "p", "key": key})
}

fn refund(service: &Service, key: &str) -> support::Response {
    let refund = json!({"policy": "p", "key": key, "age_ms": 60_000});
    service.post("/v1/refund", &refund.to_string())
}

fn reset(service: &Service, key: &str) {
    let response =
        request(&service.admin, "POST", "/v1/reset", &[], payload(key).to_string().as_bytes());
    assert_eq!(response.status, 204, "{response:?}");
}

/// Uses up the limit, until the denial comes from the cache.
fn exhaust(service: &Service, key: &str) {
    service.wait_until("the cache denies", |service| {
        let response = service.acquire(&payload(key));
        response.status == 429 && response.json()["source"] == "deny-cache"
    });
}

/// Sends requests until one is allowed. Returns the time of the last denial by the cache.
fn wait_until_allowed(service: &Service, key: &str) -> Duration {
    let (start, last) = (Instant::now(), Cell::new(Duration::ZERO));
    service.wait_until("a request is allowed", |service| {
        let elapsed = start.elapsed();
        let response = service.acquire(&payload(key));
        if response.json()["source"] == "deny-cache" {
            last.set(elapsed);
        }
        response.status == 200
    });
    last.get()
}

#[test]
fn denials_come_from_the_cache_until_a_change() {
    let redis = Redis::start();
    let service = Service::start(&config(&redis, 2));
    exhaust(&service, "u1");
    let response = service.acquire(&payload("u1"));
    assert_eq!((response.status, &response.json()["source"]), (429, &json!("deny-cache")));
    let retry_after: u64 =
        response.header("retry-after").and_then(|text| text.parse().ok()).expect("seconds");
    assert!((3_590..=3_600).contains(&retry_after), "{retry_after}");
    assert_eq!(response.json()["remaining"], 0);
    let peek = service.post("/v1/peek", &payload("u1").to_string());
    assert_eq!((peek.status, &peek.json()["allowed"]), (200, &json!(false)));

    let metrics = service.admin("/metrics").body;
    let value = |name: &str| {
        metrics.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok())
    };
    assert!(
        value("tidegate_decision_sources_total{source=\"deny-cache\"}") >= Some(2),
        "{metrics}"
    );
    assert_eq!(value("tidegate_deny_cache_entries"), Some(1), "{metrics}");

    // A raised limit is another quota, so the next request goes to Redis.
    std::fs::write(service.file(), support::with_free_ports(&config(&redis, 3))).expect("written");
    service.wait_until("the reload succeeds", |service| {
        service
            .admin("/metrics")
            .body
            .contains("tidegate_config_reloads_total{outcome=\"success\"} 1")
    });
    let raised = service.acquire(&payload("u1"));
    assert_eq!((raised.status, &raised.json()["source"]), (200, &json!("store")), "{raised:?}");

    exhaust(&service, "u1");
    assert_eq!(refund(&service, "u1").status, 200);
    assert_eq!(service.acquire(&payload("u1")).status, 200, "a refund is seen at once");
    exhaust(&service, "u1");
    reset(&service, "u1");
    assert_eq!(service.acquire(&payload("u1")).status, 200, "a reset is seen at once");
    redis.assert_every_key_expires();
}

#[test]
fn refund_by_another_instance_is_noticed_within_a_second() {
    let redis = Redis::start();
    let services = [Service::start(&config(&redis, 1)), Service::start(&config(&redis, 1))];
    for _ in 0..2 {
        exhaust(&services[0], "u1");
        assert_eq!(refund(&services[1], "u1").status, 200);
        let noticed = wait_until_allowed(&services[0], "u1");
        assert!(noticed < SECOND, "{noticed:?}");
        exhaust(&services[0], "u1");
        reset(&services[1], "u1");
        let noticed = wait_until_allowed(&services[0], "u1");
        assert!(noticed < SECOND, "{noticed:?}");
    }
}

/// The limit of a user denies while that of the address has room; then another user exhausts the
/// address.
#[test]
fn retry_after_is_that_of_the_limit_that_denies_longest() {
    let redis = Redis::start();
    let service = Service::start(&format!(
        "store: {{redis: '{}', timeout: 5s}}
attributes: [user, address]
policies:
  - {{name: short, match: {{user: '*'}}, key: [user], limit: 1, window: 20s}}
  - {{name: long, match: {{address: '*'}}, key: [address], limit: 2, window: 3000s}}
",
        redis.url()
    ));
    let acquire =
        |user: &str| service.acquire(&json!({"attributes": {"user": user, "address": "a"}}));
    let retry_after = |user: &str| -> u64 {
        let response = acquire(user);
        assert_eq!(response.status, 429, "{response:?}");
        response.header("retry-after").and_then(|text| text.parse().ok()).expect("seconds")
    };
    assert_eq!(acquire("u1").status, 200);
    service.wait_until("the cache denies", |_| {
        let response = acquire("u1");
        response.status == 429 && response.json()["decisions"][0]["source"] == "deny-cache"
    });
    assert!(retry_after("u1") <= 20);
    assert_eq!(acquire("u2").status, 200);
    for _ in 0..10 {
        assert!(retry_after("u1") > 2_000);
    }
}
