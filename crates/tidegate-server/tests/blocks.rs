//! `block_for` through the binary: answers, restarts, resets, shadow mode, outages, `simulate`.

mod support;

use std::process::Command;

use serde_json::{Value, json};
use support::{Redis, Response, Service, request};

fn config(redis: &Redis, fields: &str) -> String {
    format!(
        "store: {{redis: '{}', timeout: 5s}}\npolicies:\n  - {{name: login, limit: 1, window: 1s, {fields}}}\n",
        redis.url()
    )
}

fn acquire(service: &Service, key: &str) -> Response {
    service.acquire(&json!({"policy": "login", "key": key}))
}

/// Sends requests until one is denied.
fn exceed(service: &Service, key: &str) -> Response {
    loop {
        let response = acquire(service, key);
        if response.status == 429 {
            return response;
        }
        assert_eq!(response.status, 200, "{response:?}");
    }
}

fn retry_after(response: &Response) -> u64 {
    response.header("retry-after").and_then(|text| text.parse().ok()).expect("seconds")
}

fn reset(service: &Service, key: &str) {
    let body = json!({"policy": "login", "key": key}).to_string();
    let response = request(&service.admin, "POST", "/v1/reset", &[], body.as_bytes());
    assert_eq!(response.status, 204, "{response:?}");
}

#[test]
fn block_outlives_a_restart_and_a_reset_lifts_it_on_every_instance() {
    let redis = Redis::start();
    let text = config(&redis, "block_for: [10m, 1h]");
    let mut service = Service::start(&text);
    let denied = exceed(&service, "ann");
    assert_eq!(retry_after(&denied), 600);
    let header = denied.header("ratelimit").expect("the header");
    assert_eq!(header, "\"login\";r=0;t=600");
    assert_eq!(denied.json()["retry_after_ms"], json!(600_000));
    assert!(denied.json()["reset_after_ms"].as_u64() >= Some(600_000), "{denied:?}");
    let policies = service.admin("/v1/policies").json();
    assert_eq!(policies[0]["block_for_ms"], json!([600_000, 3_600_000]));
    let peek = service.post("/v1/peek", &json!({"policy": "login", "key": "ann"}).to_string());
    assert_eq!((peek.status, &peek.json()["allowed"]), (200, &json!(false)));
    service.signal("TERM");
    assert_eq!(service.wait_for_exit().code(), Some(0));

    let services = [Service::start(&text), Service::start(&text)];
    for service in &services {
        let wait = retry_after(&acquire(service, "ann"));
        assert!((500..=600).contains(&wait), "{wait}");
        service.wait_until("the cache denies", |service| {
            acquire(service, "ann").json()["source"] == "deny-cache"
        });
    }
    reset(&services[0], "ann");
    services[1].wait_until("the reset arrives", |service| acquire(service, "ann").status == 200);
    assert_eq!(retry_after(&exceed(&services[1], "ann")), 600, "the reset forgets the first block");
}

#[test]
fn block_in_shadow_mode_only_shows() {
    let redis = Redis::start();
    let service = Service::start(&config(&redis, "block_for: 10m, mode: shadow"));
    let shown = |response: &Response| {
        assert_eq!(response.status, 200, "{response:?}");
        response.json()["decisions"][0]["retry_after_ms"].as_u64().expect("a wait")
    };
    service.wait_until("a block starts", |service| shown(&acquire(service, "ann")) > 0);
    assert!((500_000..=600_000).contains(&shown(&acquire(&service, "ann"))));
}

#[test]
fn query_may_bring_blocks_and_wrong_ones_are_named() {
    let service = Service::start("policies:\n  - {name: p, limit: 1, window: 1s}\n");
    let ask = |block_for: Value| {
        let quota = json!({"limit": 1, "window": "1h", "block_for": block_for});
        service.acquire(&json!({"key": "ann", "quota": quota}))
    };
    assert_eq!(ask(json!("2h")).status, 200);
    assert_eq!(retry_after(&ask(json!("2h"))), 7_200);
    assert!(retry_after(&ask(json!(["3h"]))) <= 7_200, "the block of the key stands");
    for (block_for, message) in [
        (json!("0s"), "block 0ns is out of range: it must be from 1ms to 366 days"),
        (json!("soon"), "quota.block_for: \"soon\" is not a duration"),
        (json!([]), "0 blocks: it must be one, or a list of up to 10"),
        (json!(10), "expected a duration such as 10m, or a list such as [1m, 10m, 1h]"),
    ] {
        let response = ask(block_for);
        assert_eq!(response.status, 400, "{response:?}");
        assert!(response.body.replace("\\\"", "\"").contains(message), "{response:?}");
    }
}

#[test]
fn cached_block_goes_on_without_redis_and_others_are_decided_locally() {
    let redis = Redis::start();
    let service = Service::start(&config(&redis, "block_for: 10m"));
    exceed(&service, "ann");
    service.wait_until("the cache denies", |service| {
        acquire(service, "ann").json()["source"] == "deny-cache"
    });
    drop(redis);
    // Once the invalidations are too old, this instance decides on its own, and keeps its block.
    service.wait_until("this instance decides", |service| {
        acquire(service, "ann").json()["source"] == "local"
    });
    let denied = exceed(&service, "ann");
    assert_eq!(denied.json()["source"], "local");
    assert!((500..=600).contains(&retry_after(&denied)), "{denied:?}");
}

#[test]
fn simulate_blocks_in_virtual_time() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("tidegate.yaml");
    let policy = "policies:\n  - {name: p, limit: 10, window: 60s, block_for: [5m, 20m]}\n";
    std::fs::write(&file, policy).expect("written");
    let output = Command::new(env!("CARGO_BIN_EXE_tidegate"))
        .args(["simulate", "--load", "steady", "--rate", "1", "--duration", "3600s", "--json"])
        .arg("--config")
        .arg(&file)
        .output()
        .expect("the binary runs");
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    // Ten before each block: from second 0, from 310 (after 5 minutes), from 1520 and from 2730.
    let text = report.to_string();
    assert!(text.contains("\"admitted\":40"), "{text}");
}
