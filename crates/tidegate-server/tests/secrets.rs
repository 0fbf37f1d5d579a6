//! Plants a secret in invalid configurations and checks that no error message shows it.

mod support;

use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

use support::{Service, with_free_ports};

const SECRET: &str = "S3CR3T";

/// Invalid configurations.
const INVALID_CONFIGS: &[&str] = &[
    "auth:\n  api_tokn: S3CR3T\n",
    "auth:\n  api-tokn: S3CR3T\n",
    "auth:\n  api_key: S3CR3T\n",
    "auth:\n  bearer: S3CR3T\n",
    "auth: {api_token: S3CR3T, admin_tokn: S3CR3T}\n",
    "auth: {api_token: S3CR3T, api_token: S3CR3T}\n",
    "auth: S3CR3T\n",
    "gateway:\n  upstreams:\u{a0}u:S3CR3T@h\n",
    "gateway:\n\u{3000}#\u{3000}u:S3CR3T@h\n  upstreams\n",
    "auth: [S3CR3T]\n",
    "auth: {S3CR3T: x}\n",
    "auth:\n- S3CR3T\n",
    "auth:\n  api_token:\n    - S3CR3T\n",
    "auth:\n  api_token:\n    S3CR3T: x\n",
    "auth:\n  api_token: a\n  S3CR3T\n",
    "auth:\n  api_token: a\nS3CR3T\n",
    "auth:\n  api_token: a\n S3CR3T: b\n",
    "auth:\n  api_token: a\n  S3CR3T: 1\n  S3CR3T: 2\n",
    "auth:\n  api_token: !S3CR3T\n",
    "auth:\n  api_token: &S3CR3T\n",
    "auth:\n  api_token: *S3CR3T\n",
    "auth:\n  api_token: @S3CR3T\n",
    "auth:\n  api_token: %S3CR3T\n",
    "auth:\n  api_token: `S3CR3T`\n",
    "auth:\n  api_token: \"S3CR3T\n",
    "auth:\n  api_token: \"\\S3CR3T\"\n",
    "auth:\n  api_token: {S3CR3T\n",
    "auth:\n  api_token: a: S3CR3T\n",
    "auth:\n  <<: S3CR3T\n",
    "auht:\n  api_token: S3CR3T\n",
    "api_token: S3CR3T\n",
    "S3CR3T: api_token\n",
    "S3CR3T\n",
    "{auth: {api_tokn: S3CR3T}, policies: []}\n",
    "policies: []\n---\nauth: {api_token: S3CR3T}\n",
    "listen:\n  http: 127.0.0.1:0\n  auth: {api_token: S3CR3T}\n",
    "listen:\n  http: 127.0.0.1:0\n  api_token: S3CR3T\n",
    "policies: []\r  api_token: S3CR3T\r",
    "auth: {api_token: &t S3CR3T}\npolicies:\n  - {name: a, limit: 1, window: *t}\n",
    "auth: {api_token: &t S3CR3T}\npolicies:\n  - {name: a, limit: *t, window: 1s}\n",
    "auth: {api_token: &t S3CR3T}\npolicies:\n  - {name: a, limit: 1, window: 1s, mode: *t}\n",
    "auth: {api_token: &t S3CR3T}\npolicies:\n  - {name: a, limit: 1, window: 1s, *t : b}\n",
    "auth: {api_token: &t S3CR3T}\npolicies:\n  - {name: a, limit: 1, window: 1s, cost: *t}\n",
    "auth: {api_token: &t S3CR3T}\npolicies:\n  - {name: *t, limit: 1, window: 1s, cost: 2}\n",
    "auth: {api_token: &t S3CR3T}\npolicies:\n  - {name: a, limit: 1, window: 1s, key: *t}\n",
    "auth: {api_token: &t S3CR3T}\npolicies:\n  - {name: a, limit: 1, window: 1s, key: [ip, *t]}\n",
    "auth: {api_token: &t header-S3CR3T}\npolicies:\n  - {name: a, limit: 1, window: 1s, key: \
     [*t]}\n",
    "auth: {api_token: &t S3CR3T}\npolicies:\n  - {name: a, limit: 1, window: 1s, match: {*t : \
     b}}\n",
    "auth: {api_token: &t S3CR3T}\npolicies:\n  - {name: a, limit: 1, window: 1s, cost: \
     {attribute: *t}}\n",
    "auth: {api_token: &t S3CR3T}\nattributes: [*t, *t]\n",
    "auth: {api_token: &t header.S3CR3T}\nattributes: [*t]\n",
    "auth: {api_token: &t S3CR3T}\nattributes: *t\n",
    "auth: {api_token: &t S3CR3T}\nlisten: {http: *t}\n",
    "auth: {api_token: &t S3CR3T}\nheaders: {x_ratelimit: *t}\n",
    "store: S3CR3T\n",
    "store:\n  redis: S3CR3T\n",
    "store:\n  redis: !S3CR3T\n",
    "store:\n  redis: {a: S3CR3T}\n",
    "store:\n  redis: [[S3CR3T]]\n",
    "store:\n  redis: http://u:S3CR3T@h\n",
    "store:\n  redis: 'redis://:S3CR3T@h:port'\n",
    "store:\n  redis:\n    - redis://:S3CR3T@a\n    - redis://:other@b\n",
    "store: {redis: 'redis://:S3CR3T@h', prefx: x}\n",
    "store:\n  redis: redis://h\n  prefix: 'S3CR3T{'\n",
    "store:\n  redis: redis://h\n  timeout: S3CR3T\n",
    "store:\n  redis: redis://h\n  instances: S3CR3T\n",
    "store:\n  max_keys: S3CR3T\n",
    "store:\n  S3CR3T: redis://h\n",
    "store:\n  sentinel:\n    master: m\n    nodes: [redis://h]\n    passwrd: S3CR3T\n",
    "store:\n  sentinel:\n    master: m\n    nodes: [redis://h]\n    pwd:\n      S3CR3T\n",
    "store:\n  sentinel:\n    master: m\n    nodes: [redis://h]\n    password: [S3CR3T]\n",
    "store:\n  sentinel:\n    master: m\n    nodes: [redis://h]\n    password: !S3CR3T\n",
    "store:\n  sentinel:\n    master: m\n    nodes: [redis://h]\n    username: S3CR3T\n",
    "store:\n  sentinel:\n    master: m\n    nodes: ['S3CR3T@h']\n",
    "store:\n  sentinel: S3CR3T\n",
    "store:\n  redis: rediss://h\n  tls: {ca: S3CR3T}\n",
    "store:\n  redis: rediss://h\n  tls:\n    certificate: S3CR3T\n",
    "tls: S3CR3T\n",
    "tls: {certificate: S3CR3T, key: k.pem}\n",
    "tls:\n  key: S3CR3T\n",
    "tls:\n  certificate: c.pem\n  key: |\n    -----BEGIN PRIVATE KEY-----\n    S3CR3T\n",
    "gateway:\n  upstreams: ['http://u:S3CR3T@h']\n",
    "gateway:\n  upstreams: [http://u:S3CR3T@h, ftp://v:S3CR3T@i]\n",
    "gateway:\n  upstreams:\n    - u:S3CR3T@h\n",
    "gateway:\n  upstreams: 'http://u:S3CR3T@h'\n",
    "gateway:\n  upstream: http://u:S3CR3T@h\n",
    "gateway:\n  connect_timeout: http://u:S3CR3T@h\n",
    "listen: {http: 'http://u:S3CR3T@h'}\n",
    "gateway:\n  upstream_key: S3CR3T\n",
    "gateway:\n  upstream_key:\n    - S3CR3T\n",
    "gateway: {connect_timeout: 1s, upstream_key: S3CR3T}\n",
    "gateway: {connect_timeout: x: y, upstream_key: S3CR3T}\n",
    "gateway: {connect_timeout: [], upstream_key: S3CR3T}\n",
    "gateway:\n  upstream_key:\n    S3CR3T: [a\n",
    "gateway:\n  upstream_key: S3CR3T: a\n",
    "gateway:\n  'upstream key': S3CR3T\n",
    "gateway:\n  upstream_key: 'S3CR3T\n",
    "gateway:\n  upstream_key:S3CR3T\n",
    "gateway:\n  idle_timeout: 1s\n  upstream_key:S3CR3T\n",
    "gateway: {upstream_key:S3CR3T}\n",
    "gateway:\n  idle_timeout: 1s\n\tupstream_key: S3CR3T\n",
    "gateway:\n  upstream_key: *S3CR3T\n",
    "gateway:\n  upstream_key: @S3CR3T\n",
    "headers:\n  x-upstream-key: S3CR3T\n",
    "listen:\n  http: 127.0.0.1:0\n  signing: 'S3CR3T'\n",
    "listen:\n  http: 127.0.0.1:0\n  ? signing\n  : S3CR3T\n",
    "envoy: {webhook: 'https://hooks.example/S3CR3T'}\n",
    "policies:\n  - {name: a, limit: 1, window: 1s, webhook: 'https://hooks.example/S3CR3T'}\n",
    "policies:\n  - name: a\n    webhook: https://hooks.example/S3CR3T\n    limit: 1\n",
    "policies:\n  - name: a\n    limit: 1\n    hooks: [{url: S3CR3T}]\n",
    "policies:\n  - {name: a, limit: one, webhook: S3CR3T}\n",
    "policies:\n  - {name: a, limit: 1, window: 1s, cost: {atribute: S3CR3T}}\n",
];

fn output_of(command: &[&str], file: &Path) -> (Option<i32>, String) {
    let mut process = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    let output = process.args(command).arg(file).env_clear().output().expect("the binary runs");
    let text = [output.stdout, output.stderr]
        .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
        .concat();
    (output.status.code(), text)
}

#[test]
fn check_and_startup_errors_hide_secrets() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = folder.path().join("tidegate.yaml");
    let mut shown = String::new();
    for text in INVALID_CONFIGS {
        std::fs::write(&file, text).expect("written");
        for command in
            [["config", "check"].as_slice(), &["config", "check", "--json"], &["serve", "--config"]]
        {
            let (code, output) = output_of(command, &file);
            assert_eq!(code, Some(2), "{command:?} of {text}\n{output}");
            if output.contains(SECRET) {
                let _ = writeln!(shown, "{command:?} of {text}\n{output}");
            }
        }
    }
    assert!(shown.is_empty(), "{shown}");
}

#[test]
fn failed_reloads_hide_secrets() {
    let service = Service::start("policies: []\n");
    for (number, text) in (1..).zip(INVALID_CONFIGS) {
        std::fs::write(service.file(), text).expect("written");
        service.signal("HUP");
        service.wait_until("the reload fails", |service| {
            service.output().matches("reloading the configuration failed").count() >= number
        });
    }
    std::fs::write(service.file(), with_free_ports("policies: []\n")).expect("written");
    service.signal("HUP");
    service.wait_until("a valid file is loaded", |service| service.output().contains("reloaded"));
    let output = service.output();
    assert!(!output.contains(SECRET), "{output}");
}

#[test]
fn errors_show_lines_without_secrets() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = folder.path().join("tidegate.yaml");
    for (text, line) in [
        (
            "policies:\n  - name: a\n    algorithm: token_bucket\n    limit: 1\n    window: 1s\n",
            "algorithm: token_bucket",
        ),
        ("policies:\n  - name: a\n    limit: password\n", "limit: password"),
        ("auth: {api_token: x}\nlisten: {http: redis}\n", "listen: {http: redis}"),
        ("auth:\n  admin_tokn: S3CR3T\n", "  admin_tokn: …"),
    ] {
        std::fs::write(&file, text).expect("written");
        let (code, output) = output_of(&["config", "check"], &file);
        assert_eq!(code, Some(2));
        assert!(output.contains(line) && !output.contains(SECRET), "{output}");
    }
}
