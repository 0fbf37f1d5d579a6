//! The requests are those that Chrome and Firefox send for the script or form in the comment.

use serde_json::json;

use crate::POLICY;
use crate::support::{Response, Service, raw};

const RESET: &str = r#"{"policy": "p", "key": "k"}"#;
const EVIL: (&str, &str) = ("Origin", "https://evil.example");
const CROSS_SITE: (&str, &str) = ("Sec-Fetch-Site", "cross-site");
const TEXT: (&str, &str) = ("Content-Type", "text/plain;charset=UTF-8");
const JSON: (&str, &str) = ("Content-Type", "application/json");

/// Sends a request with this Host to a listener on loopback.
fn send(
    address: &str,
    method: &str,
    path: &str,
    host: &str,
    headers: &[(&str, &str)],
    body: &str,
) -> Response {
    let fields = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n"));
    let fields: String = fields.collect();
    let length = body.len();
    let text = format!(
        "{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{fields}Content-Length: \
         {length}\r\n\r\n{body}"
    );
    raw(address, text.as_bytes())
}

fn port(address: &str) -> &str {
    address.rsplit(':').next().expect("a port")
}

/// Exhausts the limit of the key, so that a reset shows.
fn exhaust(service: &Service) {
    let payload = json!({"policy": "p", "key": "k"});
    while service.acquire(&payload).status == 200 {}
}

fn is_exhausted(service: &Service) -> bool {
    let peek = service.post("/v1/peek", r#"{"policy": "p", "key": "k"}"#);
    peek.json()["allowed"] == json!(false)
}

#[test]
fn web_page_cannot_reset_a_key() {
    let service = Service::start(POLICY);
    exhaust(&service);
    let host = service.admin.as_str();
    let attacks: [(&str, &[(&str, &str)]); 6] = [
        // fetch(url, {method: "POST", body, mode: "no-cors"})
        (host, &[EVIL, CROSS_SITE, ("Sec-Fetch-Mode", "no-cors"), TEXT]),
        // The same from a page on http, where browsers send no Sec-Fetch headers to plain hosts.
        (host, &[("Origin", "http://evil.example"), TEXT]),
        // <form method=post enctype=text/plain> in a sandboxed frame
        (host, &[("Origin", "null"), ("Content-Type", "text/plain")]),
        // navigator.sendBeacon(url, new Blob([body], {type: "application/x-www-form-urlencoded"}))
        (host, &[EVIL, CROSS_SITE, ("Content-Type", "application/x-www-form-urlencoded")]),
        // A page of another program on this host: same site, another port.
        (host, &[("Origin", "http://127.0.0.1:3000"), ("Sec-Fetch-Site", "same-site"), JSON]),
        (host, &[("Origin", "http://127.0.0.1:3000"), JSON]),
    ];
    for (host, headers) in attacks {
        let response = send(&service.admin, "POST", "/v1/reset", host, headers, RESET);
        assert_eq!(response.status, 403, "{headers:?}: {response:?}");
        assert!(is_exhausted(&service), "{headers:?}");
    }
    // A script or a form of this origin: only JSON.
    let own = format!("http://{host}");
    let same: [(&str, &str); 2] = [("Origin", &own), ("Sec-Fetch-Site", "same-origin")];
    let form = [same[0], same[1], ("Content-Type", "application/x-www-form-urlencoded")];
    let response = send(&service.admin, "POST", "/v1/reset", host, &form, RESET);
    assert_eq!(response.status, 415, "{response:?}");
    assert!(is_exhausted(&service));
    let json = [same[0], same[1], JSON];
    assert_eq!(send(&service.admin, "POST", "/v1/reset", host, &json, RESET).status, 204);
    assert!(!is_exhausted(&service));
}

#[test]
fn web_page_cannot_charge_a_key() {
    let service = Service::start(POLICY);
    let body = r#"{"policy": "p", "key": "k"}"#;
    for path in ["/v1/acquire", "/v1/report", "/v1/refund", "/v1/peek"] {
        let host = service.http.as_str();
        let response = send(&service.http, "POST", path, host, &[EVIL, CROSS_SITE, TEXT], body);
        assert_eq!(response.status, 403, "{path}: {response:?}");
        assert!(response.body.contains("another origin"), "{response:?}");
        assert_eq!(response.header("content-type"), Some("application/problem+json"));
    }
    assert!(!is_exhausted(&service));
}

/// The page's own name resolves to this host, so that the browser treats both as one origin.
#[test]
fn rebound_name_reads_and_changes_nothing() {
    let service = Service::start(POLICY);
    exhaust(&service);
    let host = format!("evil.example:{}", port(&service.admin));
    let origin = format!("http://{host}");
    for path in
        ["/v1/hot-keys", "/v1/policies", "/v1/status", "/v1/live", "/v1/lookup?key=k", "/metrics"]
    {
        let response = send(&service.admin, "GET", path, &host, &[], "");
        assert_eq!(response.status, 403, "{path}");
        assert!(response.body.contains("allowed_hosts"), "{response:?}");
    }
    let own = [("Origin", origin.as_str()), ("Sec-Fetch-Site", "same-origin"), JSON];
    assert_eq!(send(&service.admin, "POST", "/v1/reset", &host, &own, RESET).status, 403);
    assert!(is_exhausted(&service));
    let api_host = format!("evil.example:{}", port(&service.http));
    let query = r#"{"policy": "p", "key": "other"}"#;
    let api_origin = format!("http://{api_host}");
    let old_browser = [("Origin", api_origin.as_str()), JSON];
    for headers in [&own[..], &old_browser] {
        let response = send(&service.http, "POST", "/v1/acquire", &api_host, headers, query);
        assert_eq!(response.status, 403, "{response:?}");
    }
    // A program has no Origin, and may call the API by the name of a sidecar.
    let program = send(&service.http, "POST", "/v1/peek", "tidegate", &[JSON], query);
    assert_eq!(program.status, 200, "{program:?}");
    // The absolute form names the host in the target.
    let text = format!(
        "GET http://{host}/v1/hot-keys HTTP/1.1\r\nHost: localhost\r\n\
                        Connection: close\r\n\r\n"
    );
    assert_eq!(raw(&service.admin, text.as_bytes()).status, 403);
}

#[test]
fn rebound_name_sees_no_addresses_in_the_readiness() {
    let service = Service::start("store: {redis: 'redis://127.0.0.1:1', timeout: 50ms}\n");
    let ready = |host: &str| send(&service.admin, "GET", "/readyz", host, &[], "");
    assert!(ready("localhost").body.contains("127.0.0.1:1"));
    let rebound = ready("evil.example");
    assert_eq!(rebound.status, 200, "probes may use any name");
    assert!(!rebound.body.contains("127.0.0.1:1"), "{rebound:?}");
}

#[test]
fn programs_and_probes_are_served_by_their_usual_names() {
    let config = format!(
        "listen:\n  http: '127.0.0.1:0'\n  grpc: '127.0.0.1:0'\n  admin: \
                          '127.0.0.1:0'\n  allowed_hosts: [Ops.Example.com, '*.svc.local']\n\
                          {POLICY}"
    );
    let service = Service::start(&config);
    let hosts = [
        "localhost",
        "LocalHost:8082",
        "tidegate.localhost",
        "127.0.0.1",
        "127.0.0.1:9",
        "[::1]:80",
        "10.1.2.3:8082",
        "[2001:db8::1]",
        "ops.example.com",
        "OPS.example.com.:443",
        "tidegate.svc.local:8080",
    ];
    for host in hosts {
        let query = r#"{"policy": "p", "key": "k"}"#;
        for headers in [
            &[][..],
            // curl -d
            &[("Content-Type", "application/x-www-form-urlencoded")],
            &[TEXT],
            &[JSON],
        ] {
            let response = send(&service.http, "POST", "/v1/peek", host, headers, query);
            assert_eq!(response.status, 200, "{host} {headers:?}: {response:?}");
        }
        assert_eq!(send(&service.admin, "GET", "/v1/hot-keys", host, &[], "").status, 200);
        assert_eq!(send(&service.admin, "POST", "/v1/reset", host, &[], RESET).status, 204);
    }
    for host in ["svc.local", "a.b.evil.example", "ops.example.com.evil.example", "localhost.evil"]
    {
        assert_eq!(send(&service.admin, "GET", "/metrics", host, &[], "").status, 403, "{host}");
    }
    for path in ["/healthz", "/readyz"] {
        assert_eq!(send(&service.admin, "GET", path, "pod.example", &[], "").status, 200);
    }
    // Without a Host, as some probes in HTTP/1.0.
    assert_eq!(raw(&service.admin, b"GET /metrics HTTP/1.0\r\n\r\n").status, 200);
    // A proxy sends the headers of its client to forward-auth.
    let client = [EVIL, CROSS_SITE, ("X-Forwarded-Uri", "/"), ("X-Forwarded-Method", "POST")];
    let forwarded = send(&service.http, "GET", "/v1/forward-auth", "shop.example", &client, "");
    assert_eq!(forwarded.status, 200, "{forwarded:?}");
}

#[test]
fn listeners_on_the_network_serve_any_name_but_no_web_page() {
    let config = format!(
        "listen: {{http: '0.0.0.0:0', grpc: '127.0.0.1:0', admin: '127.0.0.1:0'}}\n{POLICY}"
    );
    let service = Service::start(&config);
    let address = format!("127.0.0.1:{}", port(&service.http));
    let query = r#"{"policy": "p", "key": "k"}"#;
    let name = "tidegate.limits.svc.cluster.local";
    assert_eq!(send(&address, "POST", "/v1/peek", name, &[], query).status, 200);
    assert_eq!(send(&address, "POST", "/v1/peek", name, &[JSON], query).status, 200);
    let foreign = send(&address, "POST", "/v1/acquire", name, &[EVIL, TEXT], query);
    assert_eq!(foreign.status, 403, "{foreign:?}");
    let rebound = [("Origin", "http://evil.example"), JSON];
    let rebound = send(&address, "POST", "/v1/acquire", "evil.example", &rebound, query);
    assert_eq!(rebound.status, 403, "{rebound:?}");
}

#[test]
fn token_is_protection_enough() {
    let config = format!("auth: {{api_token: one, admin_token: two}}\n{POLICY}");
    let service = Service::start(&config);
    let query = r#"{"policy": "p", "key": "k"}"#;
    let headers = [("Authorization", "Bearer one"), EVIL, CROSS_SITE, TEXT];
    let served = send(&service.http, "POST", "/v1/peek", "tidegate.example", &headers, query);
    assert_eq!(served.status, 200, "{served:?}");
    let page = send(&service.http, "POST", "/v1/peek", &service.http, &headers[1..], query);
    assert_eq!(page.status, 401);
    let headers = [("Authorization", "Bearer two"), EVIL, CROSS_SITE, TEXT];
    let refused = send(&service.admin, "POST", "/v1/reset", "tidegate.example", &headers, RESET);
    assert_eq!(refused.status, 403, "a page of another origin changes nothing: {refused:?}");
    // The dashboard, by any name of this host: the token protects against rebinding.
    let own = [headers[0], ("Origin", "http://tidegate.example"), JSON];
    let served = send(&service.admin, "POST", "/v1/reset", "tidegate.example", &own, RESET);
    assert_eq!(served.status, 204, "{served:?}");
    let read = [headers[0], EVIL, CROSS_SITE];
    assert_eq!(send(&service.admin, "GET", "/v1/status", "a.example", &read, "").status, 200);
}

#[test]
fn grpc_is_not_served_over_the_http_of_browsers() {
    let service = Service::start(POLICY);
    let grpc = service.grpc.as_deref().expect("an address");
    let path = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
    let headers = [("Content-Type", "application/grpc"), ("Origin", "http://evil.example")];
    let response = send(grpc, "POST", path, "evil.example", &headers, "\0\0\0\0\0");
    assert_eq!(response.status, 505, "{response:?}");
}

#[test]
fn invalid_host_names_are_config_errors() {
    for (host, reason) in [
        ("'*'", "set a token instead"),
        ("'http://a.example'", "is not a host name"),
        ("'a.example:8080'", "without a port"),
        ("''", "is not a host name"),
    ] {
        let folder = tempfile::tempdir().expect("a temporary directory");
        let file = folder.path().join("tidegate.yaml");
        std::fs::write(&file, format!("listen: {{allowed_hosts: [{host}]}}\n")).expect("written");
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_tidegate"))
            .args(["config", "check"])
            .arg(&file)
            .output()
            .expect("the binary runs");
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && text.contains(reason), "{host}: {text}");
    }
}
