use super::support::{Response, Service, request};

const POLICIES: &str = "policies: [{name: p, limit: 1, window: 1h}]\n";
const FILES: [(&str, &str); 3] =
    [("/", "text/html"), ("/assets/app.js", "text/javascript"), ("/assets/app.css", "text/css")];

fn get(service: &Service, path: &str, headers: &[(&str, &str)]) -> Response {
    request(&service.admin, "GET", path, headers, b"")
}

#[test]
fn files_need_no_token_and_have_strict_headers() {
    let service = Service::start(&format!("auth: {{admin_token: hunter2}}\n{POLICIES}"));
    for (path, kind) in FILES {
        let file = get(&service, path, &[]);
        assert_eq!(file.status, 200, "{file:?}");
        assert!(file.header("content-type").is_some_and(|it| it.starts_with(kind)), "{file:?}");
        let policy = file.header("content-security-policy").expect("a policy");
        for part in [
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ] {
            assert!(policy.contains(part), "{part} in {policy}");
        }
        assert!(!policy.contains("unsafe") && !policy.contains("http"), "{policy}");
        for (name, value) in [
            ("x-content-type-options", "nosniff"),
            ("referrer-policy", "no-referrer"),
            ("cross-origin-opener-policy", "same-origin"),
            ("cross-origin-resource-policy", "same-origin"),
            ("cache-control", "no-cache"),
        ] {
            assert_eq!(file.header(name), Some(value), "{path}");
        }
        assert_eq!(file.header("set-cookie"), None);
    }
    assert_eq!(get(&service, "/v1/status", &[]).status, 401);
    assert_eq!(get(&service, "/assets/other.js", &[]).status, 404);
    assert_eq!(request(&service.admin, "POST", "/", &[], b"").status, 405);
}

#[test]
fn files_are_revalidated_and_compressed_for_clients_that_accept_it() {
    let service = Service::start(POLICIES);
    for (path, _) in FILES {
        let plain = get(&service, path, &[]);
        assert_eq!(plain.header("content-encoding"), None);
        let etag = plain.header("etag").expect("a tag");
        let known = get(&service, path, &[("If-None-Match", etag)]);
        assert_eq!((known.status, known.body.as_str()), (304, ""), "{path}");
        assert_eq!(known.header("etag"), Some(etag));
        let gzip = [("Accept-Encoding", "br, gzip")];
        let compressed = get(&service, path, &gzip);
        assert_eq!(compressed.header("content-encoding"), Some("gzip"), "{path}");
        assert_ne!(compressed.header("etag"), Some(etag), "another representation");
        let again = [gzip[0], ("If-None-Match", etag)];
        assert_eq!(get(&service, path, &again).status, 200, "{path}");
        let output = std::process::Command::new("curl")
            .args(["-s", "--compressed", &format!("http://{}{path}", service.admin)])
            .output();
        assert_eq!(String::from_utf8(output.expect("curl").stdout).expect("text"), plain.body);
    }
}

#[test]
fn data_is_not_stored_by_browsers() {
    let service = Service::start(POLICIES);
    for path in ["/v1/status", "/v1/policies", "/v1/hot-keys", "/v1/lookup?key=k", "/v1/history"] {
        let response = get(&service, path, &[]);
        assert_eq!(response.header("cache-control"), Some("no-store"), "{path}");
        assert_eq!(response.header("x-content-type-options"), Some("nosniff"), "{path}");
        assert_eq!(response.header("cross-origin-resource-policy"), Some("same-origin"));
        assert_eq!(response.header("access-control-allow-origin"), None);
    }
}
