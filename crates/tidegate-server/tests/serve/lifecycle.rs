//! Startup, reload and shutdown.

use std::io::Write;
use std::net::TcpStream;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::POLICIES;
use crate::support::{self, Redis, Service, raw, read_response, request, with_free_ports};

#[test]
fn sample_runs_and_prints_a_working_example() {
    let mut process = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    let help = process.args(["config", "sample"]).output().expect("the binary runs");
    let sample = String::from_utf8(help.stdout).expect("UTF-8");
    let sample =
        sample.replace("127.0.0.1:8080", "127.0.0.1:0").replace("127.0.0.1:8081", "127.0.0.1:0");
    let sample = sample.replace("127.0.0.1:8082", "127.0.0.1:0");
    let service = Service::start_on_terminal(&sample);
    service.wait_until("the example is printed", |service| service.output().contains("Try it:"));
    let output = service.output();
    let line = output
        .lines()
        .find(|line| line.trim_start().starts_with("curl "))
        .expect("an example command");
    let shown = line.trim().replace(&service.http, "127.0.0.1:8080");
    assert!(
        include_str!("../../../../README.md").contains(&shown),
        "the README lacks this command: {shown}"
    );
    let response = Command::new("sh")
        .args(["-c", &line.replace("curl -i", "curl -s")])
        .output()
        .expect("curl runs");
    let body: Value = serde_json::from_slice(&response.stdout).expect("a response");
    assert_eq!((&body["allowed"], &body["policy"]), (&json!(true), &json!("per-user")));
}

#[test]
fn reload_applies_valid_files_rejects_invalid_ones_and_keeps_counters() {
    let service = Service::start(POLICIES);
    let payload = json!({"policy": "per-user", "key": "u1"});
    assert_eq!(service.acquire(&payload).json()["remaining"], 2);
    let reloads =
        |outcome: &str| format!("tidegate_config_reloads_total{{outcome=\"{outcome}\"}} ");
    let count = |service: &Service, outcome: &str| -> u64 {
        let metrics = service.admin("/metrics").body;
        let line = metrics
            .lines()
            .find_map(|line| line.strip_prefix(&reloads(outcome)))
            .expect("the metric");
        line.parse().expect("a number")
    };
    let listen = format!(
        "listen: {{http: '{}', grpc: '{}', admin: '{}'}}\n",
        service.http,
        service.grpc.as_deref().expect("an address"),
        service.admin
    );
    let raised = format!("{listen}{POLICIES}").replace("limit: 3", "limit: 10");
    // Written in place, as `>` does.
    std::fs::write(service.file(), &raised).expect("written");
    service.wait_until("the limit is raised", |service| {
        service.acquire(&payload).json()["limit"] == 10
    });
    assert!(count(&service, "success") >= 1);
    // An invalid file is rejected as a whole and logged.
    std::fs::write(service.file(), raised.replace("window: 1h", "window: soon")).expect("written");
    service.wait_until("the reload fails", |service| count(service, "failure") >= 1);
    service.wait_until("the reason is logged", |service| {
        let output = service.output();
        output.contains("soon") && output.contains("tidegate.yaml:")
    });
    assert_eq!(service.acquire(&payload).json()["limit"], 10, "the old configuration stays active");
    // Replaced by a rename, as editors do.
    let lowered = raised.replace(
        "limit: 10\n    window: 1h\n    overrides",
        "limit: 2\n    window: 1h\n    overrides",
    );
    let sibling = service.folder().join("beside.yaml");
    std::fs::write(&sibling, &lowered).expect("written");
    std::fs::rename(&sibling, service.file()).expect("renamed");
    service.wait_until("the limit is lowered", |service| {
        service.acquire(&payload).json()["limit"] == 2
    });
    assert_eq!(service.acquire(&payload).status, 429, "the counters were kept");
    // Reloaded by a signal, without a change.
    let before = count(&service, "success");
    service.signal("HUP");
    service
        .wait_until("the signal triggers a reload", |service| count(service, "success") > before);
}

/// Kubernetes mounts a file as a symlink to a symlink, and swaps one of them.
#[test]
fn swapped_symlink_on_the_path_is_noticed() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let path = |name: &str| folder.path().join(name);
    let config = with_free_ports(POLICIES);
    for (version, limit) in [("v1", "limit: 3"), ("v2", "limit: 7")] {
        std::fs::create_dir(path(version)).expect("a directory");
        std::fs::write(path(version).join("tidegate.yaml"), config.replace("limit: 3", limit))
            .expect("written");
    }
    std::os::unix::fs::symlink("v1", path("..data")).expect("a symlink");
    std::os::unix::fs::symlink("..data/tidegate.yaml", path("tidegate.yaml")).expect("a symlink");
    let file = path("tidegate.yaml");
    let (temporary, data) = (path("..data_tmp"), path("..data"));
    let service = Service::start_on(folder, &file, &[]);
    let payload = json!({"policy": "per-user", "key": "u1"});
    assert_eq!(service.acquire(&payload).json()["limit"], 3);
    std::os::unix::fs::symlink("v2", &temporary).expect("a symlink");
    std::fs::rename(&temporary, &data).expect("swapped");
    service.wait_until("the new configuration is active", |service| {
        service.acquire(&payload).json()["limit"] == 7
    });
}

#[test]
fn reload_drops_no_decision() {
    let service = Service::start("policies:\n  - {name: p, limit: 1000000, window: 1h}\n");
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let client = scope.spawn(|| {
            let mut responses = 0;
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                assert_eq!(service.acquire(&json!({"policy": "p", "key": "u"})).status, 200);
                responses += 1;
            }
            responses
        });
        for _ in 0..10 {
            service.signal("HUP");
            std::thread::sleep(Duration::from_millis(20));
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(client.join().expect("no panic") > 0);
    });
}

#[test]
fn sigterm_drains_in_flight_requests_and_exits_with_0() {
    let mut service = Service::start(POLICIES);
    // A partially sent request.
    let body = r#"{"policy": "per-user", "key": "u1"}"#;
    let mut slow = TcpStream::connect(&service.http).expect("the service listens");
    let head = format!(
        "POST /v1/acquire HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    slow.write_all(head.as_bytes()).expect("sent");
    slow.write_all(&body.as_bytes()[..10]).expect("sent");
    // The partial request was accepted once a later one has a response.
    service.acquire(&json!({"policy": "per-user", "key": "other"}));
    std::thread::sleep(Duration::from_millis(50));
    service.signal("TERM");
    service
        .wait_until("the service is not ready", |service| service.admin("/readyz").status == 503);
    slow.write_all(&body.as_bytes()[10..]).expect("sent");
    assert_eq!(read_response(&mut slow).status, 200);
    let start = Instant::now();
    assert_eq!(service.wait_for_exit().code(), Some(0));
    assert!(start.elapsed() < Duration::from_secs(10));
}

#[test]
fn thousand_slow_clients_do_not_block_others() {
    let service = Service::start(POLICIES);
    let slow: Vec<TcpStream> = (0..1_000)
        .map(|number| {
            let mut stream = TcpStream::connect(&service.http).expect("the service listens");
            let part = if number % 2 == 0 {
                "POST /v1/acq"
            } else {
                "POST /v1/acquire HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{"
            };
            stream.write_all(part.as_bytes()).expect("sent");
            stream
        })
        .collect();
    for _ in 0..20 {
        assert_eq!(
            service.acquire(&json!({"policy": "heavy", "key": "u1", "cost": 1})).status,
            200
        );
        let refund = json!({"policy": "heavy", "key": "u1", "cost": 1, "age_ms": 5_000});
        assert_eq!(service.post("/v1/refund", &refund.to_string()).status, 200);
    }
    drop(slow);
    // The soft limit on open files is raised to the hard limit.
    let (soft, hard) = service.file_limits();
    assert_eq!(soft, hard);
}

#[test]
fn client_without_a_complete_head_is_disconnected() {
    let service = Service::start(POLICIES);
    let mut silent = TcpStream::connect(&service.http).expect("the service listens");
    silent.write_all(b"POST /v1/acquire HT").expect("sent");
    silent.set_read_timeout(Some(support::TEST_TIMEOUT)).expect("a timeout");
    let mut response = String::new();
    let _ = std::io::Read::read_to_string(&mut silent, &mut response);
    assert!(response.is_empty() || response.starts_with("HTTP/1.1 4"), "{response}");
    assert_eq!(raw(&service.http, b"\0\0\0\0\r\n\r\n").status, 400);
}

#[test]
fn secrets_are_never_output() {
    let redis = Redis::start_with(&["--requirepass", "hunter2"]);
    let url = redis.url().replace("//", "//:hunter2@");
    let config = format!("store: {{redis: '{url}'}}\nauth: {{api_token: hunter2}}\n{POLICIES}");
    let service = Service::start_with(&config, &["--log-format", "json"]);
    let header = [("Authorization", "Bearer hunter2")];
    let body = br#"{"policy": "per-user", "key": "u1"}"#;
    assert_eq!(request(&service.http, "POST", "/v1/acquire", &header, body).status, 200);
    drop(redis);
    let failed = request(
        &service.http,
        "POST",
        "/v1/refund",
        &header,
        br#"{"policy": "per-user", "key": "u2", "age_ms": 9}"#,
    );
    assert_eq!(failed.status, 503);
    std::fs::write(service.file(), config.replace("limit: 3", "limit: [hunter2]"))
        .expect("written");
    service.wait_until("the reload fails", |service| {
        service.output().contains("reloading the configuration failed")
    });
    let seen = [
        service.output(),
        failed.body,
        service.admin("/metrics").body,
        service.admin("/readyz").body,
        service.admin("/v1/policies").body,
    ];
    for text in seen {
        assert!(!text.contains("hunter2"), "{text}");
    }
    for line in service.output().lines() {
        serde_json::from_str::<Value>(line).unwrap_or_else(|error| panic!("{error}: {line}"));
    }
}

#[test]
fn invalid_configuration_exits_with_2_and_a_helpful_message() {
    let run = |config: &str| {
        let folder = tempfile::tempdir().expect("a temporary directory");
        let file = folder.path().join("tidegate.yaml");
        std::fs::write(&file, config).expect("written");
        let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
        let output = command
            .args(["serve", "--config"])
            .arg(&file)
            .env_clear()
            .output()
            .expect("the binary runs");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    for (config, message) in [
        ("listen: {admin: '0.0.0.0:0'}\n", "auth.admin_token"),
        ("polices: []\n", "did you mean `policies`?"),
        (
            "listen: {http: '127.0.0.1:0', grpc: '127.0.0.1:0', admin: '127.0.0.1:0'}\nstore: \
             {redis: 'http://127.0.0.1:1'}\n",
            "it must look like redis://",
        ),
        ("store: {redis: []}\n", "store.redis is empty"),
        ("store: {sentinel: {master: m, nodes: []}}\n", "store.sentinel.nodes is empty"),
        (
            "store: {redis: 'redis://127.0.0.1:1', sentinel: {master: m, nodes: [a]}}\n",
            "both redis and sentinel",
        ),
        (
            "store: {redis: 'rediss://127.0.0.1:1', tls: {key: a.pem}}\n",
            "certificate and key together",
        ),
        (
            "listen: {http: '192.0.2.1:1', grpc: '127.0.0.1:0', admin: '127.0.0.1:0'}\n",
            "cannot listen on 192.0.2.1:1",
        ),
    ] {
        let (code, error) = run(config);
        assert_eq!(code, Some(2), "{error}");
        assert!(error.contains(message), "{config}: {error}");
    }
    let nothing = Command::new(env!("CARGO_BIN_EXE_tidegate")).output().expect("the binary runs");
    let help = String::from_utf8_lossy(&nothing.stderr).into_owned();
    assert_eq!(nothing.status.code(), Some(2));
    assert!(help.contains("Usage:") && help.contains("serve") && !help.contains("error"), "{help}");
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    let output =
        command.args(["serve", "--config", "nowhere.yaml"]).output().expect("the binary runs");
    assert!(String::from_utf8_lossy(&output.stderr).contains("nowhere.yaml: cannot be read"));
}

/// Each port has one owner: with `SO_REUSEPORT`, two services would share its connections.
#[test]
fn a_second_service_does_not_share_a_port() {
    let service = Service::start(POLICIES);
    let grpc = service.grpc.as_deref().expect("an address");
    for taken in [&service.http, grpc, &service.admin] {
        let mut listen = ["http", "grpc", "admin"].map(|name| (name, "127.0.0.1:0"));
        let at = [&service.http, grpc, &service.admin].iter().position(|one| *one == taken);
        listen[at.expect("one of them")].1 = taken;
        let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
        command.arg("serve");
        for (name, address) in listen {
            command.args([format!("--listen-{name}"), address.to_owned()]);
        }
        let output = command.env_clear().output().expect("the binary runs");
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.contains(&format!("cannot listen on {taken}")), "{error}");
        assert!(error.contains("already in use"), "{error}");
        let name = listen[at.expect("one of them")].0;
        assert!(error.contains(&format!("or set another by --listen-{name}")), "{error}");
    }
    let payload = json!({"policy": "per-user", "key": "u1"});
    assert_eq!(service.acquire(&payload).status, 200);
}

#[test]
fn config_check_and_schema_report_errors_and_fields() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = folder.path().join("tidegate.yaml");
    let tidegate = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_tidegate"))
            .args(arguments)
            .output()
            .expect("the binary runs");
        let text = [output.stdout, output.stderr]
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        (output.status.code(), text[0].clone(), text[1].clone())
    };
    std::fs::write(&file, POLICIES).expect("written");
    let path = file.to_str().expect("UTF-8");
    let (code, text, _) = tidegate(&["config", "check", path]);
    assert_eq!(code, Some(0));
    assert!(text.contains("valid, 5 policies"), "{text}");
    std::fs::write(&file, "policies: [{name: a, limit: 1, window: 1s}]").expect("written");
    let (_, text, _) = tidegate(&["config", "check", path]);
    assert!(text.ends_with("valid, 1 policy\n"), "{text}");
    std::fs::write(&file, POLICIES.replace("limit: 3", "limt: 3")).expect("written");
    let (code, _, error) = tidegate(&["config", "check", path]);
    assert_eq!(code, Some(2));
    assert!(
        error.contains("tidegate.yaml:6:5: unknown field `limt`")
            && error.contains("did you mean `limit`?"),
        "{error}"
    );
    let (code, schema, _) = tidegate(&["config", "schema"]);
    let schema: Value = serde_json::from_str(&schema).expect("JSON");
    assert_eq!(code, Some(0));
    assert!(schema["$defs"]["Policy"]["properties"]["on_store_failure"].is_object(), "{schema}");
}
