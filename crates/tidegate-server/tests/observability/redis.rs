use serde_json::{Value, json};

use super::metric;
use super::support::{Redis, Service};

fn start(redis: &Redis) -> Service {
    Service::start(&format!(
        "store: {{redis: '{}', instances: 2}}\npolicies: [{{name: p, limit: 1000, window: 1h}}]\n",
        redis.url()
    ))
}

fn store(service: &Service) -> Value {
    service.admin("/v1/status").json()["store"].clone()
}

#[test]
fn calls_are_measured_by_node() {
    let redis = Redis::start();
    let service = start(&redis);
    let node = format!("127.0.0.1:{}", redis.port());
    let calls = format!("tidegate_node_seconds_count{{node=\"{node}\"}} ");
    let before = metric(&service, &calls);
    let sizes_before = metric(&service, "tidegate_decisions_per_call_sum ");
    for number in 0..20 {
        service.acquire(&json!({"policy": "p", "key": format!("u{number}")}));
    }
    // Sent one after the other, each request is a call of its own.
    assert!(metric(&service, &calls) - before >= 20.0);
    assert!(metric(&service, "tidegate_decisions_per_call_sum ") - sizes_before >= 20.0);
    let total = format!("tidegate_node_seconds_bucket{{node=\"{node}\",le=\"+Inf\"}} ");
    assert!(metric(&service, &total) >= 20.0);
    let in_flight = metric(&service, &format!("tidegate_node_in_flight{{node=\"{node}\"}} "));
    assert!(in_flight < 1.5, "only a heartbeat may be in flight: {in_flight}");
    service.wait_until("the status has the latency of the node", |service| {
        service.acquire(&json!({"policy": "p", "key": "u"}));
        store(service)["nodes"][0]["latency_ms"]["p99"].as_f64() > Some(0.0)
    });
    let status = store(&service);
    assert_eq!((&status["kind"], &status["up"]), (&json!("redis"), &json!(true)));
    let node_status = &status["nodes"][0];
    assert_eq!(node_status["address"], json!(node), "{status}");
    assert_eq!(
        (&node_status["connected"], &node_status["circuit"]),
        (&json!(true), &json!("closed"))
    );
    assert_eq!(status["fallback"]["active"], json!(false), "{status}");
    assert!(status["deny_cache_entries"].is_u64(), "{status}");
}

#[test]
fn outage_shows_in_status_and_history_until_the_store_recovers() {
    let mut redis = Redis::start();
    let service = start(&redis);
    service.acquire(&json!({"policy": "p", "key": "u"}));
    redis.kill();
    service.wait_until("the circuit opens", |service| {
        service.acquire(&json!({"policy": "p", "key": "u"}));
        store(service)["nodes"][0]["circuit"] != json!("closed")
    });
    let status = store(&service);
    assert_eq!((&status["up"], &status["fallback"]["active"]), (&json!(false), &json!(true)));
    assert_eq!(status["nodes"][0]["connected"], json!(false), "{status}");
    assert!(status["nodes"][0]["last_error"].is_string(), "{status}");
    assert!(status["fallback"]["since_ms"].as_u64() > Some(1_600_000_000_000), "{status}");
    assert_eq!(status["fallback"]["instances"], json!(2));
    assert!(status["fallback"]["pending_debit_units"].as_u64() > Some(0), "{status}");
    let has_outage = |service: &Service| {
        let history = service.admin("/v1/history").json();
        let samples = history["samples"].as_array().expect("a list").clone();
        samples.iter().any(|it| {
            it["fallback"] == json!(true)
                && it["store_up"] == json!(false)
                && it["pending_debit_units"].as_u64() > Some(0)
        })
    };
    service.wait_until("the history has the outage", has_outage);
    redis.restart();
    service.wait_until("the store recovers", |service| {
        let status = store(service);
        status["up"] == json!(true) && status["fallback"]["pending_debit_units"] == json!(0)
    });
    let status = store(&service);
    assert_eq!(status["fallback"]["since_ms"], Value::Null, "{status}");
    assert_eq!(status["nodes"][0]["circuit"], json!("closed"));
}

/// Checks that every light shows a failure of this kind, and that all recover.
fn assert_failure_is_shown(service: &Service, kind: &str, reason: &str, repair: impl FnOnce()) {
    let errors = format!("tidegate_store_errors_total{{kind=\"{kind}\"}} ");
    assert!(metric(service, &errors) < 0.5);
    service.wait_until("the circuit opens", |service| {
        let answer = service.acquire(&json!({"policy": "p", "key": "u"})).json();
        assert_eq!((&answer["allowed"], &answer["source"]), (&json!(false), &json!("deny")));
        store(service)["nodes"][0]["circuit"] != json!("closed")
    });
    let status = store(service);
    assert_eq!((&status["up"], &status["fallback"]["active"]), (&json!(false), &json!(true)));
    let shown = status["nodes"][0]["last_error"].as_str().expect("a reason");
    assert!(shown.contains(reason), "{status}");
    assert!(metric(service, &errors) > 0.0);
    assert!(metric(service, "tidegate_store_up ") < 0.5);
    let readiness = service.admin("/readyz?require=store");
    assert_eq!(readiness.status, 503);
    assert!(readiness.json()["breaker_open"][0].as_str().is_some_and(|it| it.contains(reason)));
    repair();
    service.wait_until("the store recovers", |service| {
        store(service)["up"] == json!(true)
            && service.admin("/readyz?require=store").status == 200
            && service.acquire(&json!({"policy": "p", "key": "u"})).json()["source"] == "store"
    });
    let log = service.output();
    let is_warning = |line: &&str| line.contains("WARN") && line.contains(reason);
    assert_eq!(log.lines().filter(is_warning).count(), 1, "{log}");
    assert!(!log.contains("hunter2"), "{log}");
}

#[test]
fn missing_permission_is_shown_with_its_remedy_until_it_is_granted() {
    let redis = Redis::start();
    let set_user = |rules: &[&str]| redis.query::<()>(&[&["ACL", "SETUSER", "tg"], rules].concat());
    set_user(&["on", ">hunter2", "~rate_limit:*", "+@all", "-zadd"]);
    let service = Service::start(&format!(
        "store: {{redis: '{}', timeout: 2s}}\npolicies: [{{name: p, algorithm: sliding-log, \
         limit: 1000, window: 1h, on_store_failure: deny}}]\n",
        redis.url().replace("//", "//tg:hunter2@")
    ));
    assert_failure_is_shown(&service, "permission", "ACL SETUSER tg +zadd", || {
        set_user(&["+zadd"]);
    });
}

#[test]
fn full_redis_is_counted_as_full() {
    let redis = Redis::start();
    let service = Service::start(&format!(
        "store: {{redis: '{}', timeout: 2s}}\npolicies: [{{name: p, algorithm: sliding-log, \
         limit: 1000, window: 1h, on_store_failure: deny}}]\n",
        redis.url()
    ));
    redis.query::<()>(&["CONFIG", "SET", "maxmemory", "1"]);
    assert_failure_is_shown(&service, "full", "OOM command not allowed", || {
        redis.query::<()>(&["CONFIG", "SET", "maxmemory", "0"]);
    });
}
