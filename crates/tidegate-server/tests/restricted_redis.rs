//! The service on a Redis that refuses what others allow.

mod support;

use serde_json::json;
use support::{Refusal, Restrictions, Service, StrictServer};

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
