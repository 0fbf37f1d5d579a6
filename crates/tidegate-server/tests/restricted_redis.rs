//! The service on a Redis that refuses what others allow, and on one that bills each command.

mod support;

use std::cell::Cell;
use std::time::Duration;

use serde_json::json;
use support::{Redis, Refusal, Restrictions, Service, StrictServer};

fn config(url: &str, store: &str) -> String {
    format!(
        "store: {{redis: '{url}', timeout: 10s{store}}}\n\
         policies:\n  - {{name: p, limit: 5, window: 1h}}\n"
    )
}

/// Sends 200 requests of 20 keys, 16 at a time. Returns how many were admitted.
fn storm(service: &Service) -> usize {
    let numbers: Vec<usize> = (0..200).collect();
    let chunk = |numbers: &[usize]| {
        let admitted = numbers.iter().filter(|number| {
            let key = format!("user-{}", *number % 20);
            let response = service.acquire(&json!({"policy": "p", "key": key}));
            let source = response.json()["source"].clone();
            assert!(source == "store" || source == "deny-cache", "{response:?}");
            response.status == 200
        });
        admitted.count()
    };
    std::thread::scope(|scope| {
        let chunks = numbers.chunks(200_usize.div_ceil(16));
        let threads: Vec<_> = chunks.map(|numbers| scope.spawn(move || chunk(numbers))).collect();
        threads.into_iter().map(|thread| thread.join().expect("decided")).sum()
    })
}

#[test]
fn one_address_in_front_of_shards_decides_every_request() {
    let redis = StrictServer::start(Restrictions::enterprise());
    let service = Service::start(&config(&redis.url(), ""));
    assert_eq!(storm(&service), 20 * 5);
    assert!(redis.refusals(Refusal::CrossSlot) >= 1);
    let message = "refuses scripts with keys of several slots (CROSSSLOT): one call per slot";
    service.wait_until_logged(message);
    assert_eq!(service.output().matches(message).count(), 1);
    assert!(!service.output().contains("TRYAGAIN"), "{}", service.output());
    let node = service.admin("/readyz").json()["nodes"][0].clone();
    assert_eq!(node["restrictions"], json!(["several_slots"]));
    assert_eq!(node.get("clock_error_ms"), None);
}

#[test]
fn server_that_refuses_time_in_scripts_gets_an_estimated_clock() {
    let redis = StrictServer::start(Restrictions::serverless());
    let service = Service::start(&config(&redis.url(), ""));
    assert_eq!(storm(&service), 20 * 5);
    service.wait_until_logged("refuses TIME in scripts: its clock is estimated from now on");
    let node = service.admin("/readyz").json()["nodes"][0].clone();
    assert_eq!(node["restrictions"], json!(["undeclared_keys", "time_in_scripts"]));
    assert!(node["clock_error_ms"].as_f64().is_some_and(|error| error > 0.0), "{node}");
}

/// Returns the number of commands that the server has run before this one.
fn commands(redis: &Redis) -> u64 {
    let info: String = redis.query(&["INFO", "stats"]);
    let total = info.lines().find_map(|line| line.strip_prefix("total_commands_processed:"));
    total.and_then(|total| total.trim().parse().ok()).expect("in INFO")
}

#[test]
fn idle_instance_without_heartbeats_sends_no_commands() {
    let redis = Redis::start();
    let service = Service::start(&config(&redis.url(), ", heartbeat: off"));
    for status in [200, 200, 200, 200, 200, 429, 429] {
        assert_eq!(service.acquire(&json!({"policy": "p", "key": "a"})).status, status);
    }
    assert_eq!(service.admin("/readyz").json()["instances"], 1);
    // The checks of a start go on for a moment.
    let last = Cell::new(0);
    service.wait_until("nothing is sent for a second", |_| {
        let before = commands(&redis);
        std::thread::sleep(Duration::from_secs(1));
        last.set(commands(&redis));
        last.get() == before + 1
    });
    for _ in 0..30 {
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(service.admin("/readyz").status, 200);
        assert_eq!(service.admin("/metrics").status, 200);
    }
    assert_eq!(commands(&redis), last.get() + 1, "only INFO");
    // A reset through this instance ends its cached denial.
    let reset = json!({"policy": "p", "key": "a"}).to_string();
    let response = support::request(&service.admin, "POST", "/v1/reset", &[], reset.as_bytes());
    assert_eq!(response.status, 204);
    assert_eq!(service.acquire(&json!({"policy": "p", "key": "a"})).status, 200);
}
