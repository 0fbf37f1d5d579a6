//! Named tokens: their scopes, failures, reload and log lines.

use std::fs;

use crate::POLICIES;
use crate::support::{Response, Service, request};

const AUTH: &str = "auth:
  tokens:
    - {name: web, token: web-0123456789abcdef, scopes: [acquire]}
    - {name: billing, token: billing-0123456789abcdef, scopes: [refund]}
    - {name: grafana, token: grafana-0123456789abcdef, scopes: [read]}
    - {name: ci, token: ci-0123456789abcdef, scopes: [reset]}
";
const QUERY: &[u8] = br#"{"policy": "per-user", "key": "ann"}"#;
const COMMIT: &[u8] = br#"{"policy": "per-user", "key": "ann", "id": "a", "actual": 0}"#;
const REFUND: &[u8] = br#"{"policy": "per-user", "key": "ann", "age_ms": 5}"#;

fn send(address: &str, path: &str, token: &str, body: &[u8]) -> Response {
    let token = format!("Bearer {token}-0123456789abcdef");
    let method = if body.is_empty() { "GET" } else { "POST" };
    request(address, method, path, &[("Authorization", &token)], body)
}

#[test]
fn token_permits_the_requests_of_its_scopes() {
    let service = Service::start(&format!("{AUTH}{POLICIES}"));
    let (http, admin) = (&service.http, &service.admin);
    for (address, path, body, permitted) in [
        (http, "/v1/acquire", QUERY, "web"),
        (http, "/v1/report", QUERY, "web"),
        (http, "/v1/peek", QUERY, "web grafana"),
        (http, "/v1/refund", REFUND, "billing"),
        (http, "/v1/refund", br#"{"policy": "per-user", "key": "ann", "id": "a"}"#, "billing"),
        (http, "/v1/reserve", QUERY, "web"),
        (http, "/v1/commit", COMMIT, "web"),
        (http, "/v1/renew", br#"{"policy": "per-user", "key": "ann", "id": "a"}"#, "web"),
        (http, "/v1/forward-auth?", b"", "web"),
        (admin, "/metrics", b"", "grafana"),
        (admin, "/v1/hot-keys", b"", "grafana"),
        (admin, "/v1/lookup?key=ann", b"", "grafana"),
        (admin, "/v1/reset", QUERY, "ci"),
    ] {
        for name in ["web", "billing", "grafana", "ci"] {
            let response = send(address, path, name, body);
            if permitted.split(' ').any(|other| other == name) {
                assert!(response.status < 300, "{name} {path}: {}", response.body);
                continue;
            }
            assert_eq!(response.status, 403, "{name} {path}: {}", response.body);
            let detail = response.json()["detail"].as_str().expect("a detail").to_owned();
            let expected = format!("the token \"{name}\" lacks the scope ");
            assert!(detail.starts_with(&expected), "{path}: {detail}");
        }
        assert_eq!(send(address, path, "other", body).status, 401, "{path}");
    }
    let lacking = send(http, "/v1/refund", "web", REFUND).json()["detail"].to_string();
    assert!(lacking.contains("lacks the scope refund"), "{lacking}");
    service.wait_until_logged("token=\"ci\" policy=\"per-user\" key=\"ann\"");
    assert!(!service.output().contains("0123456789abcdef"), "{}", service.output());
}

#[test]
fn wrong_tokens_are_counted_and_logged_once() {
    let service = Service::start(&format!("{AUTH}{POLICIES}"));
    for _ in 0..5 {
        assert_eq!(send(&service.http, "/v1/acquire", "S3CR3T", QUERY).status, 401);
    }
    assert_eq!(service.post("/v1/acquire", "{}").status, 401, "without a token");
    assert_eq!(send(&service.admin, "/metrics", "web", b"").status, 403);
    assert_eq!(send(&service.admin, "/v1/reset", "S3CR3T", QUERY).status, 401);
    let metrics = send(&service.admin, "/metrics", "grafana", b"").body;
    for (listener, count) in [("http", 5), ("grpc", 0), ("admin", 1), ("resp", 0)] {
        let line = format!("tidegate_auth_failures_total{{listener=\"{listener}\"}} {count}\n");
        assert!(metrics.contains(&line), "{line}{metrics}");
    }
    service.wait_until_logged("listener=\"admin\"");
    let output = service.output();
    let lines: Vec<_> = output.lines().filter(|line| line.contains("wrong tokens")).collect();
    assert_eq!(lines.len(), 2, "{output}");
    assert!(lines[0].contains("listener=\"http\" peer=127.0.0.1:"), "{output}");
    assert!(lines[0].contains("count=1") && !output.contains("S3CR3T"), "{output}");
}

#[test]
fn file_of_a_named_token_is_reloaded() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = folder.path().join("tidegate.yaml");
    let token = folder.path().join("web-token");
    fs::write(&token, "web-0123456789abcdef\n").expect("written");
    let listen = "listen: {http: '127.0.0.1:0', grpc: '127.0.0.1:0', admin: '127.0.0.1:0'}";
    let auth = "auth: {tokens: [{name: web, token_file: web-token, scopes: [acquire]}]}";
    fs::write(&file, format!("{listen}\n{auth}\n{POLICIES}")).expect("written");
    let service = Service::start_on(folder, &file, &[]);
    let status = |name: &str| send(&service.http, "/v1/acquire", name, QUERY).status;
    assert_eq!((status("web"), status("new")), (200, 401));
    fs::write(&token, "new-0123456789abcdef\n").expect("written");
    service.wait_until("it is reloaded", |_| status("new") != 401);
    assert_eq!(status("web"), 401);
}
