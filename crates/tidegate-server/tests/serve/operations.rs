//! Tokens, admin API, shared counters and outages of Redis.

use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::POLICIES;
use crate::support::{Redis, Service, TEST_TIMEOUT, free_port, request};

#[test]
fn api_and_admin_have_separate_tokens() {
    let auth = "auth: {api_token: open-sesame, admin_token: hunter2}\n";
    let service = Service::start_on_terminal(&format!("{auth}{POLICIES}"));
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
    for guarded in [
        "/metrics",
        "/v1/policies",
        "/v1/hot-keys",
        "/v1/status",
        "/v1/history",
        "/v1/lookup?key=u1",
    ] {
        assert_eq!(service.admin(guarded).status, 401, "{guarded}");
        let authorized =
            request(&service.admin, "GET", guarded, &[("Authorization", "Bearer hunter2")], b"");
        assert_eq!(authorized.status, 200, "{guarded}");
        assert!(!authorized.body.contains("hunter2") && !authorized.body.contains("open-sesame"));
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
    let config = redis.healthy_store() + POLICIES;
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
        "store: {{redis: '{}', timeout: 5s}}
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
    let refund = service
        .post("/v1/refund", &json!({"policy": "allow", "key": "u1", "age_ms": 9}).to_string());
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
    assert_eq!(ready["store_health"]["state"], "down", "{ready}");
    assert_eq!(ready["store_health"]["slots_unavailable_ratio"], 1.0, "{ready}");
    assert_eq!(service.admin("/readyz?require=store").status, 503);
}

#[test]
fn service_starts_during_an_outage_and_uses_redis_after_it() {
    let port = std::net::TcpListener::bind("127.0.0.1:0")
        .and_then(|listener| listener.local_addr())
        .expect("a port");
    let config = format!("store: {{redis: 'redis://{port}'}}\n{POLICIES}");
    let service = Service::start(&config);
    service.wait_until_logged("Redis is unavailable");
    let payload = json!({"policy": "per-user", "key": "u1"});
    assert_eq!(service.acquire(&payload).json()["source"], "local");
    // During the outage it assumes a number of instances, unless the file sets one.
    service.wait_until_logged("store.instances is not set");
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
fn process_metrics_are_those_of_the_process() {
    let service = Service::start("");
    let text = service.admin("/metrics").body;
    let value = |name: &str| -> f64 {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("{name} in {text}"))
    };
    let resident = value("process_resident_memory_bytes");
    #[allow(clippy::cast_precision_loss, reason = "a few megabytes")]
    let expected = (service.memory() * 1024) as f64;
    assert!((0.5..2.0).contains(&(resident / expected)), "{resident} of {expected}");
    assert!(value("process_virtual_memory_bytes") > resident);
    // The connection of the scrape may be closed by now.
    let files =
        value("process_open_fds") - f64::from(u32::try_from(service.open_files()).expect("few"));
    assert!((0.0..=3.0).contains(&files), "{files}");
    assert_eq!(service.file_limits().0, value("process_max_fds").to_string());
    assert!(value("process_threads") >= 2.0);
    assert!((0.0..60.0).contains(&value("process_cpu_seconds_total")));
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("now");
    let age = now.as_secs_f64() - value("process_start_time_seconds");
    // The boot time of Linux has whole seconds.
    assert!((-2.0..TEST_TIMEOUT.as_secs_f64() + 2.0).contains(&age), "{age}");
}

#[test]
fn full_pipe_of_the_log_delays_no_request() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = folder.path().join("tidegate.yaml");
    let [http, grpc, admin] = [(); 3].map(|()| format!("127.0.0.1:{}", free_port()));
    let listen = format!("listen: {{http: '{http}', grpc: '{grpc}', admin: '{admin}'}}\n");
    std::fs::write(&file, format!("{listen}{POLICIES}")).expect("written");
    let mut process = Command::new(env!("CARGO_BIN_EXE_tidegate"))
        .args(["serve", "--config"])
        .arg(&file)
        .env_clear()
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary starts");
    let deadline = Instant::now() + TEST_TIMEOUT;
    while TcpStream::connect(&admin).is_err() {
        assert!(Instant::now() < deadline, "the service does not listen");
        std::thread::sleep(Duration::from_millis(10));
    }
    // Each reset logs a line of more than 100 bytes, and nothing reads the pipe of 64 KiB.
    let body = format!(r#"{{"policy": "per-user", "key": "{}"}}"#, "k".repeat(100));
    for _ in 0..1_000 {
        let response = request(&admin, "POST", "/v1/reset", &[], body.as_bytes());
        assert_eq!(response.status, 204);
    }
    let metrics = request(&admin, "GET", "/metrics", &[], b"").body;
    assert!(metrics.contains("tidegate_log_lines_total{outcome=\"dropped\"} 0\n"), "{metrics}");
    assert!(metrics.contains("\ntidegate_longest_stall_seconds "), "{metrics}");
    process.kill().expect("it runs");
    process.wait().expect("it ended");
}
