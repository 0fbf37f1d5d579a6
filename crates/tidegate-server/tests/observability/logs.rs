use serde_json::json;

use super::support::{Response, Service, request};

const RESET: &str = r#"{"policy": "per-user", "key": "ann"}"#;
const JSON: (&str, &str) = ("Content-Type", "application/json");

fn reset(service: &Service, headers: &[(&str, &str)], body: &str) -> Response {
    request(&service.admin, "POST", "/v1/reset", headers, body.as_bytes())
}

#[test]
fn resets_are_logged_with_the_caller_and_the_shown_key() {
    let policies = "policies:
  - {name: per-user, limit: 1, window: 1h}
  - {name: per-token, key: header.authorization, limit: 1, window: 1h}
";
    let service = Service::start(&format!("auth: {{admin_token: hunter2}}\n{policies}"));
    let token = ("Authorization", "Bearer hunter2");
    assert_eq!(reset(&service, &[JSON], RESET).status, 401);
    assert_eq!(reset(&service, &[token, JSON], RESET).status, 204);
    assert_eq!(
        reset(&service, &[token, JSON], r#"{"policy": "per-token", "key": "abc"}"#).status,
        204
    );
    service.wait_until("both resets are logged", |service| {
        service.output().matches("count reset").count() == 2
    });
    let output = service.output();
    let line = |part: &str| {
        let mut lines = output.lines().filter(|line| line.contains("count reset"));
        lines.find(|line| line.contains(part)).unwrap_or_else(|| panic!("{output}")).to_owned()
    };
    let user = line("per-user");
    assert!(user.contains("peer=127.0.0.1:") && user.contains("token=\"admin_token\""), "{user}");
    assert!(user.contains("key=\"ann\""), "{user}");
    assert!(line("per-token").contains("key=\"sha256:ba7816bf8f01cfea\""), "{output}");
    assert!(!output.contains("hunter2"), "{output}");
}

#[test]
fn reset_needs_json_and_the_own_origin_with_and_without_a_token() {
    let policies = "policies: [{name: per-user, limit: 1, window: 1h}]\n";
    let token = ("Authorization", "Bearer hunter2");
    for auth in ["", "auth: {admin_token: hunter2}\n"] {
        let service = Service::start(&format!("{auth}{policies}"));
        let own = format!("http://{}", service.admin);
        let send = |headers: &[(&str, &str)]| {
            let headers: Vec<_> = headers.iter().copied().chain([token]).collect();
            reset(&service, &headers, RESET).status
        };
        assert_eq!(send(&[JSON, ("Origin", "https://evil.example")]), 403, "{auth}");
        assert_eq!(send(&[JSON, ("Origin", "null")]), 403, "{auth}");
        assert_eq!(send(&[JSON, ("Sec-Fetch-Site", "cross-site")]), 403, "{auth}");
        assert_eq!(send(&[JSON, ("Sec-Fetch-Site", "same-site")]), 403, "{auth}");
        assert_eq!(send(&[("Content-Type", "text/plain")]), 415, "{auth}");
        let of_curl = ("Content-Type", "application/x-www-form-urlencoded");
        assert_eq!(send(&[of_curl]), 415, "as curl -d sends it: {auth}");
        assert_eq!(send(&[("Content-Type", "text/plain"), ("Origin", &own)]), 415, "{auth}");
        assert_eq!(send(&[("Origin", &own)]), 415, "a browser must send JSON: {auth}");
        assert!(!service.output().contains("count reset"), "{}", service.output());
        assert_eq!(send(&[JSON, ("Origin", &own), ("Sec-Fetch-Site", "same-origin")]), 204);
        assert_eq!(send(&[JSON]), 204, "{auth}");
    }
}

#[test]
fn denials_are_logged_only_if_asked_and_at_a_bounded_rate() {
    let policies = "policies:
  - {name: per-user, limit: 1, window: 1h}
  - {name: per-token, key: header.authorization, limit: 1, window: 1h}
  - {name: planned, limit: 1, window: 1h, mode: shadow}
";
    let deny = |service: &Service, policy: &str, times: usize| {
        for _ in 0..=times {
            service.acquire(&json!({"policy": policy, "key": "abc"}));
        }
    };
    let silent = Service::start(policies);
    deny(&silent, "per-user", 5);
    let service = Service::start(&format!("log_denials: {{max_per_second: 2}}\n{policies}"));
    deny(&service, "planned", 5);
    deny(&service, "per-token", 1);
    service.wait_until("the denial is logged", |service| service.output().contains("denied"));
    let output = service.output();
    let line = output.lines().find(|line| line.contains("request denied")).expect("a line");
    assert!(line.contains(r#"policy="per-token" key="sha256:ba7816bf8f01cfea""#), "{line}");
    assert!(line.contains("limit=1 remaining=0") && line.contains("source=\"store\""), "{line}");
    // However fast they are, there are at most two lines per second.
    let start = std::time::Instant::now();
    deny(&service, "per-user", 200);
    let seconds = usize::try_from(start.elapsed().as_secs()).expect("few");
    let lines = service.output().matches("request denied").count();
    assert!(lines <= 2 * (seconds + 2), "{lines} lines in {seconds} seconds");
    assert!(!silent.output().contains("request denied"), "{}", silent.output());
}

#[test]
fn reload_turns_the_log_of_denials_on() {
    let policies = "policies: [{name: per-user, limit: 1, window: 1h}]\n";
    let service = Service::start(policies);
    let body = json!({"policy": "per-user", "key": "ann"});
    service.acquire(&body);
    let file = std::fs::read_to_string(service.file()).expect("the file");
    std::fs::write(service.file(), format!("log_denials: {{ratio: 1}}\n{file}")).expect("written");
    service.wait_until("a denial is logged", |service| {
        service.acquire(&body);
        service.output().contains("request denied")
    });
}

const USERS: &str = "policies:\n  - {name: per-user, key: header.x-user, limit: 1, window: 1h}\n";

#[test]
fn level_warning_shows_warnings() {
    let level = [("TIDEGATE_LOG", "warning")];
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = folder.path().join("tidegate.yaml");
    let run = |variables: &[(&str, &str)], config: &str| {
        std::fs::write(&file, config).expect("written");
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_tidegate"))
            .args(["serve", "--config"])
            .arg(&file)
            .env_clear()
            .envs(variables.iter().copied())
            .output()
            .expect("the binary runs");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    // An address that is in use ends the process after its warnings.
    let used = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let used = used.local_addr().map(|address| (address, used)).expect("an address");
    let listen = "http: '127.0.0.1:0', grpc: '127.0.0.1:0', admin: ";
    let (code, text) = run(&level, &format!("listen: {{{listen}'{}'}}\n{USERS}", used.0));
    assert_eq!(code, Some(2), "{text}");
    assert!(text.contains("WARN") && text.contains("a client that leaves out"), "{text}");
    let (code, text) = run(&[("TIDEGATE_LOG", "warnings")], USERS);
    assert_eq!(code, Some(2), "{text}");
    assert!(text.contains("\"warnings\" is no level: write one of off, error, warn"), "{text}");
}

#[test]
fn unknown_variables_are_one_warning_with_the_right_names() {
    let variables = [
        ("TIDEGATE_REDIS_URL", "redis://S3CR3T"),
        ("TIDEGATE_LOG_LEVEL", "debug"),
        ("TIDEGATE_LOG_FORMAT", "text"),
        ("TIDEGATE_PORT_8080_TCP_ADDR", "10.0.0.1"),
    ];
    let service = Service::start_with_environment(
        "auth: {api_token: '${TIDEGATE_OWN:-0123456789abcdef}'}\npolicies: []\n",
        &variables,
    );
    let output = service.output();
    let warnings: Vec<_> = output.lines().filter(|line| line.contains("WARN")).collect();
    assert_eq!(warnings.len(), 1, "{output}");
    let expected = "TIDEGATE_LOG_LEVEL (did you mean TIDEGATE_LOG?), TIDEGATE_REDIS_URL (did you \
                    mean TIDEGATE_REDIS?): write the right name";
    assert!(warnings[0].contains(expected) && !output.contains("S3CR3T"), "{output}");
}

#[test]
fn log_has_the_addresses_of_redis_without_its_password() {
    let url = "redis://limiter:S3CR3T@127.0.0.1:1/2";
    for (store, expected) in [
        (format!("redis: '{url}'"), "Redis at redis://127.0.0.1:1/2"),
        (
            "redis: ['redis://:S3CR3T@127.0.0.1:1', 'redis://:S3CR3T@127.0.0.1:2']".to_owned(),
            "Redis Cluster at redis://127.0.0.1:1, redis://127.0.0.1:2",
        ),
        (
            "sentinel: {master: main, nodes: ['redis://127.0.0.1:1']}".to_owned(),
            "Redis primary \\\"main\\\" of the sentinels at redis://127.0.0.1:1",
        ),
    ] {
        let service = Service::start(&format!("store: {{{store}}}\npolicies: []\n"));
        let output = service.output();
        let line = output.lines().find(|line| line.contains("listening")).expect("the line");
        assert!(line.contains(expected) && !output.contains("S3CR3T"), "{expected}: {line}");
    }
}
