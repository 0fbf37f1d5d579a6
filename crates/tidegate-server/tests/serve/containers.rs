//! Life in a container: addresses by flags, secrets by files and variables, health checks.

use std::fs;
use std::os::unix::fs::symlink;
use std::process::{Command, Output, Stdio};

use serde_json::json;

use crate::POLICIES;
use crate::support::{Service, request};

/// Runs the binary with only these variables.
fn tidegate(arguments: &[&str], environment: &[(&str, &str)]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tidegate"))
        .args(arguments)
        .env_clear()
        .envs(environment.iter().copied())
        .stdin(Stdio::null())
        .output()
        .expect("the binary runs")
}

/// Runs the binary, which must fail with exit code 2, and returns its message.
fn failure(arguments: &[&str], environment: &[(&str, &str)]) -> String {
    let output = tidegate(arguments, environment);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{message}");
    message
}

fn metrics_with(service: &Service, token: &str) -> u16 {
    let token = format!("Bearer {token}");
    request(&service.admin, "GET", "/metrics", &[("Authorization", &token)], b"").status
}

#[test]
fn flags_and_variables_override_the_addresses_of_the_file() {
    let file = format!("listen: {{http: '192.0.2.1:1', grpc: '192.0.2.1:2'}}\n{POLICIES}");
    let service = Service::start_with(
        &file,
        &["--listen-http=127.0.0.1:0", "--listen-grpc=127.0.0.1:0", "--listen-admin=127.0.0.1:0"],
    );
    assert!(service.http.starts_with("127.0.0.1:"), "{}", service.http);
    assert_eq!(service.acquire(&json!({"policy": "per-user", "key": "a"})).status, 200);
    let service = Service::start_with_environment(
        &file,
        &[
            ("TIDEGATE_LISTEN_HTTP", "127.0.0.1:0"),
            ("TIDEGATE_LISTEN_GRPC", "127.0.0.1:0"),
            ("TIDEGATE_LISTEN_ADMIN", "127.0.0.1:0"),
        ],
    );
    assert_eq!(service.acquire(&json!({"policy": "per-user", "key": "a"})).status, 200);
    let message = failure(&["serve", "--listen-http=localhost"], &[]);
    assert!(message.contains("--listen-http") && message.contains("127.0.0.1:8080"), "{message}");
}

#[test]
fn admin_listener_leaves_loopback_only_with_a_token() {
    let flags = ["serve", "--listen-http=127.0.0.1:0", "--listen-grpc=127.0.0.1:0"];
    let exposed = [&flags[..], &["--listen-admin=0.0.0.0:0"]].concat();
    let message = failure(&exposed, &[]);
    assert!(message.contains("TIDEGATE_ADMIN_TOKEN"), "{message}");
    let message = failure(&exposed, &[("TIDEGATE_ADMIN_TOKEN", " ")]);
    assert!(message.contains("TIDEGATE_ADMIN_TOKEN is empty"), "{message}");
    let both = [("TIDEGATE_ADMIN_TOKEN", "t"), ("TIDEGATE_ADMIN_TOKEN_FILE", "/none")];
    let message = failure(&exposed, &both);
    assert!(message.contains("both TIDEGATE_ADMIN_TOKEN and"), "{message}");
    let message = failure(&exposed, &[("TIDEGATE_ADMIN_TOKEN_FILE", "/none.txt")]);
    assert!(message.contains("TIDEGATE_ADMIN_TOKEN_FILE /none.txt: cannot be read"), "{message}");
}

#[test]
fn tokens_come_from_the_environment_or_from_files() {
    let variables = [("TIDEGATE_ADMIN_TOKEN", "s3cr3t"), ("TIDEGATE_API_TOKEN", "ap1")];
    let service = Service::start_with_environment(POLICIES, &variables);
    assert_eq!(service.admin("/metrics").status, 401);
    assert_eq!(metrics_with(&service, "s3cr3t"), 200);
    assert_eq!(service.post("/v1/acquire", "{}").status, 401);
    assert!(!service.output().contains("s3cr3t"), "{}", service.output());

    // The variable overrides the file, also after a reload.
    let file = format!("auth: {{admin_token: of-the-file}}\n{POLICIES}");
    let service = Service::start_with_environment(&file, &variables[..1]);
    assert_eq!(metrics_with(&service, "s3cr3t"), 200);
    service.signal("HUP");
    service.wait_until("it is reloaded", |service| {
        service.output().contains("configuration reloaded")
    });
    assert_eq!(
        (metrics_with(&service, "s3cr3t"), metrics_with(&service, "of-the-file")),
        (200, 401)
    );

    let folder = tempfile::tempdir().expect("a temporary directory");
    let token = folder.path().join("admin.txt");
    fs::write(&token, "from-a-file\n").expect("written");
    let path = token.to_str().expect("UTF-8");
    let service = Service::start_with_environment(POLICIES, &[("TIDEGATE_ADMIN_TOKEN_FILE", path)]);
    assert_eq!(metrics_with(&service, "from-a-file"), 200);
}

/// As a volume of Kubernetes: names are symlinks into a folder that is replaced as a whole.
#[test]
fn token_file_of_the_configuration_is_reloaded() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let secrets = folder.path().join("secrets");
    for (version, token) in [("..1", "first"), ("..2", "second")] {
        fs::create_dir_all(secrets.join(version)).expect("created");
        fs::write(secrets.join(version).join("admin-token"), token).expect("written");
    }
    symlink("..1", secrets.join("..data")).expect("a symlink");
    symlink("..data/admin-token", secrets.join("admin-token")).expect("a symlink");
    let file = folder.path().join("tidegate.yaml");
    let listen = "listen: {http: '127.0.0.1:0', grpc: '127.0.0.1:0', admin: '127.0.0.1:0'}";
    let auth = "auth: {admin_token_file: secrets/admin-token}";
    fs::write(&file, format!("{listen}\n{auth}\n{POLICIES}")).expect("written");
    let service = Service::start_on(folder, &file, &[]);
    assert_eq!((metrics_with(&service, "first"), metrics_with(&service, "second")), (200, 401));
    symlink("..2", secrets.join("..new")).expect("a symlink");
    fs::rename(secrets.join("..new"), secrets.join("..data")).expect("replaced");
    service.wait_until("it is reloaded", |service| metrics_with(service, "second") == 200);
    assert_eq!(metrics_with(&service, "first"), 401);
}

#[test]
fn values_of_the_file_contain_variables() {
    let config =
        "listen: {http: '${ADDRESS}:0', grpc: '127.0.0.1:${PORT:-0}', admin: '127.0.0.1:0'}
auth:
  admin_token: ${ADMIN_TOKEN}
  api_token: a$${b}
policies:
  - name: per-user
    limit: ${LIMIT}
    window: ${WINDOW:-60s}
";
    let variables = [("ADDRESS", "127.0.0.1"), ("ADMIN_TOKEN", "from: {yaml}"), ("LIMIT", "7")];
    let service = Service::start_with_environment(config, &variables);
    assert_eq!(metrics_with(&service, "from: {yaml}"), 200);
    let body = br#"{"policy": "per-user", "key": "u1"}"#;
    let token = [("Authorization", "Bearer a${b}")];
    let response = request(&service.http, "POST", "/v1/acquire", &token, body);
    assert_eq!(response.json()["remaining"], 6, "{response:?}");

    let file = service.file();
    let file = file.to_str().expect("UTF-8");
    let message = failure(&["config", "check", file], &variables[..2]);
    assert!(message.contains(":7:12: limit: the variable LIMIT is not set"), "{message}");
    // The line of a secret field is masked, but the name of its variable is shown.
    let message = failure(&["config", "check", file], &variables[..1]);
    assert!(message.contains(":3:16: "), "{message}");
    assert!(message.contains("the variable ADMIN_TOKEN is not set"), "{message}");
    let message =
        failure(&["config", "check", file], &[("ADDRESS", "nowhere"), variables[1], variables[2]]);
    assert!(message.contains("… is not an address"), "{message}");
    assert!(message.contains("${ADDRESS}:0") && !message.contains("nowhere"), "{message}");
}

#[test]
fn secret_values_of_variables_are_never_shown() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = folder.path().join("tidegate.yaml");
    for (config, value) in [
        ("store:\n  redis: ${X}\n", "http://user:S3CR3T@h"),
        ("store:\n  redis: redis://${X}@h/x\n", "S3CR3T"),
        ("store:\n  redis: redis://h\n  timeout: ${X}\n", "S3CR3T"),
        ("store: {sentinel: {master: m, nodes: ['${X}']}}\n", "S3CR3T"),
        ("auth:\n  api_token_file: ${X}\n", "S3CR3T"),
        ("auth:\n  api_token: ${X} ${S3CR3Tlower}\n", "S3CR3T"),
        ("auth:\n  api_token: ${X} ${S3CR3T\n", "S3CR3T"),
        ("gateway:\n  upstreams: ['${X}']\n", "http://u:S3CR3T@h"),
    ] {
        fs::write(&file, config).expect("written");
        let path = file.to_str().expect("UTF-8");
        let message = failure(&["config", "check", path], &[("X", value)]);
        assert!(!message.contains("S3CR3T"), "{config}: {message}");
    }
}

/// Another machine lacks the variables of the service, but not the policies.
#[test]
fn simulation_needs_no_variables_of_other_sections() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = folder.path().join("tidegate.yaml");
    let config = "auth: {api_token: '${MISSING}'}\npolicies: [{name: a, key: ip, limit: 5, window: '${W}'}]\n";
    fs::write(&file, config).expect("written");
    let file = file.to_str().expect("UTF-8");
    let simulate = ["simulate", "--load", "boundary", "--config", file];
    let output = tidegate(&simulate, &[("W", "10s")]);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{message}");
    let message = failure(&simulate, &[]);
    assert!(message.contains("the variable W is not set"), "{message}");
}

#[test]
fn logs_have_no_banner_without_a_terminal() {
    let service = Service::start(POLICIES);
    // The exit shows that all output has been written.
    let mut service = service;
    service.signal("TERM");
    assert!(service.wait_for_exit().success());
    let output = service.output();
    assert!(output.contains("listening") && !output.contains("Try it:"), "{output}");
    assert!(
        output.lines().all(|line| line.contains(" INFO ") || line.contains(" WARN ")),
        "{output}"
    );
}

#[test]
fn unknown_log_level_is_an_error() {
    let message = failure(&["serve", "--listen-http=127.0.0.1:0"], &[("TIDEGATE_LOG", "a=b=c")]);
    assert!(message.contains("TIDEGATE_LOG=a=b=c"), "{message}");
    let config = POLICIES;
    let service = Service::start_with_environment(config, &[("TIDEGATE_LOG", "tidegate=debug")]);
    assert!(service.output().contains("listening"));
}

#[test]
fn health_follows_readiness() {
    let config = format!(
        "listen: {{http: '127.0.0.1:0', grpc: '127.0.0.1:0', admin: '127.0.0.1:0', \
         shutdown_delay: 1m}}\n{POLICIES}"
    );
    let mut service = Service::start(&config);
    let url = format!("http://{}", service.admin);
    let check = |arguments: &[&str], environment: &[(&str, &str)]| {
        let output = tidegate(&[&["health"], arguments].concat(), environment);
        let text = [output.stdout, output.stderr].concat();
        (output.status.code(), String::from_utf8_lossy(&text).into_owned())
    };
    assert_eq!(check(&["--admin", &url], &[]), (Some(0), "ready\n".to_owned()));
    assert_eq!(check(&["--admin", &service.admin, "--require", "store"], &[]).0, Some(0));
    let listen = service.admin.replace("127.0.0.1", "0.0.0.0");
    assert_eq!(check(&[], &[("TIDEGATE_LISTEN_ADMIN", &listen)]).0, Some(0));
    let (code, message) = check(&["--admin", &url, "--require", "upstreams"], &[]);
    assert!(
        code == Some(1) && message.contains("only tidegate gateway has upstreams"),
        "{message}"
    );
    service.signal("TERM");
    service.wait_until("it is not ready", |_| check(&["--admin", &url], &[]).0 == Some(1));
    let (_, message) = check(&["--admin", &url], &[]);
    assert!(message.starts_with("not ready: 503 "), "{message}");
    service.signal("TERM");
    assert!(service.wait_for_exit().success());
    let (code, message) = check(&["--admin", &url, "--timeout", "1s"], &[]);
    assert!(code == Some(1) && message.contains("cannot connect to 127.0.0.1:"), "{message}");
    assert_eq!(check(&["--admin", "ftp://h"], &[]).0, Some(2));
}

#[test]
fn health_uses_the_address_of_the_configuration() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let socket = folder.path().join("admin.sock");
    let config = format!(
        "listen: {{http: '127.0.0.1:0', grpc: '127.0.0.1:0', admin: 'unix:{}'}}\n{POLICIES}",
        socket.display()
    );
    let service = Service::start(&config);
    let file = service.file();
    let file = file.to_str().expect("UTF-8");
    assert!(tidegate(&["health", "--config", file], &[]).status.success());
    assert!(tidegate(&["health"], &[("TIDEGATE_CONFIG", file)]).status.success());
}

#[test]
fn health_reaches_a_listener_with_tls() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let signed =
        rcgen::generate_simple_self_signed(vec!["tidegate.example".to_owned()]).expect("signed");
    fs::write(folder.path().join("cert.pem"), signed.cert.pem()).expect("written");
    fs::write(folder.path().join("key.pem"), signed.signing_key.serialize_pem()).expect("written");
    let file = folder.path().join("tidegate.yaml");
    let config = format!(
        "listen: {{http: '127.0.0.1:0', grpc: '127.0.0.1:0', admin: '127.0.0.1:0'}}\n\
         tls: {{certificate: cert.pem, key: key.pem, admin: true}}\n{POLICIES}"
    );
    fs::write(&file, config).expect("written");
    let service = Service::start_on(folder, &file, &[]);
    let url = format!("https://{}", service.admin);
    let output = tidegate(&["health", "--admin", &url], &[]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    // The instance keeps its configuration while the file is invalid.
    let invalid = service.folder().join("invalid.yaml");
    fs::write(&invalid, "policies: 5\n").expect("written");
    let variables = [
        ("TIDEGATE_CONFIG", invalid.to_str().expect("UTF-8")),
        ("TIDEGATE_LISTEN_ADMIN", &service.admin),
    ];
    let output = tidegate(&["health"], &variables);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && message.contains("warning: "), "{message}");
    let plain = format!("http://{}", service.admin);
    assert_eq!(tidegate(&["health", "--admin", &plain], &[]).status.code(), Some(1));
}

#[test]
fn completions_and_manual_pages_name_every_command() {
    for shell in ["bash", "zsh", "fish"] {
        let output = tidegate(&["completions", shell], &[]);
        let script = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(
            script.contains("simulate") && script.contains("listen-admin"),
            "{shell}: {script}"
        );
    }
    let page = tidegate(&["man"], &[]).stdout;
    assert!(String::from_utf8_lossy(&page).contains(".TH tidegate 1"));
    let folder = tempfile::tempdir().expect("a temporary directory");
    let out = folder.path().join("man1");
    let output = tidegate(&["man", "--out", out.to_str().expect("UTF-8")], &[]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for name in ["tidegate.1", "tidegate-serve.1", "tidegate-config-check.1", "tidegate-health.1"] {
        assert!(out.join(name).exists(), "{name}");
    }
}
