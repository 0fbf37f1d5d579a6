use std::time::{Duration, Instant};

use crate::app::App;
use crate::client::Client;
use crate::proxy::{Proxy, Recipe, changed, deployed};
use crate::support::Service;

// A short timeout for Tidegate is right in production, but the test machine may be busy.
const NGINX: Recipe<'static> = Recipe {
    program: "nginx",
    arguments: &["-p", ".", "-e", "error.log", "-c", "nginx.conf", "-g", "daemon off;"],
    files: &["nginx/nginx.conf"],
    changes: &[("_timeout 1s", "_timeout 10s")],
    environment: &[],
};
const CADDY: Recipe<'static> = Recipe {
    program: "caddy",
    arguments: &["run"],
    files: &["caddy/Caddyfile"],
    changes: &[],
    environment: &[],
};
const TRAEFIK: Recipe<'static> = Recipe {
    program: "traefik",
    arguments: &["--configfile=traefik.yaml", "--global.checknewversion=false"],
    files: &["traefik/traefik.yaml", "traefik/dynamic.yaml"],
    changes: &[],
    environment: &[],
};
pub(crate) const HAPROXY: Recipe<'static> = Recipe {
    program: "haproxy",
    arguments: &["-f", "haproxy.cfg", "-db"],
    files: &["haproxy/haproxy.cfg", "haproxy/tidegate.lua"],
    changes: &[("TIMEOUT = 1000", "TIMEOUT = 10000")],
    environment: &[],
};

/// Three requests in two seconds per client, and two per hour for logins, which no test waits for.
const LIMITS: [(&str, &str); 2] = [
    ("limit: 100\n    window: 60s", "limit: 3\n    window: 2s"),
    ("limit: 5\n    window: 60s", "limit: 2\n    window: 1h"),
];
const WINDOW: Duration = Duration::from_secs(2);

/// Receiver of the rate limit headers of an allowed request.
#[derive(Clone, Copy, PartialEq)]
enum HeaderReceiver {
    Client,
    App,
}

struct Setup {
    app: App,
    tidegate: Service,
    proxy: Proxy,
}

impl Setup {
    fn new(recipe: &Recipe<'_>, limits: &[(&str, &str)], more: &str) -> Self {
        let free = ["127.0.0.1:8080", "127.0.0.1:8081", "127.0.0.1:8082"]
            .map(|address| (address, "127.0.0.1:0"));
        let config = changed(&changed(&deployed("tidegate.yaml"), &free), limits);
        let tidegate = Service::start(&format!("{config}\n{more}"));
        let app = App::start();
        let proxy = Proxy::start(recipe, app.port, (8080, &tidegate.http));
        Self { app, tidegate, proxy }
    }

    /// Three requests are allowed, the fourth is denied, and one is allowed again after its
    /// `Retry-After`.
    fn limits_each_client(&self, receiver: HeaderReceiver) {
        let address = self.proxy.address;
        for attempt in 0..5 {
            let (client, path) = (Client(10 + attempt), format!("/items/{attempt}"));
            let start = Instant::now();
            let responses: Vec<_> = (0..4).map(|_| client.get(address, &path, &[])).collect();
            if start.elapsed() >= WINDOW {
                // The machine was busy, and the first request has left the window.
                continue;
            }
            let reached = self.app.requests(&path);
            assert_eq!(reached.len(), 3, "the application saw {reached:?}");
            for (number, (response, request)) in responses.iter().zip(&reached).enumerate() {
                assert_eq!(response.status, 200, "{response:?}");
                assert_eq!(response.header("retry-after"), None);
                let (policy, left) =
                    ("\"per-client\";q=3;w=2", format!("\"per-client\";r={};t=2", 2 - number));
                match receiver {
                    HeaderReceiver::Client => {
                        assert_eq!(response.header("ratelimit-policy"), Some(policy));
                        assert_eq!(response.header("ratelimit"), Some(left.as_str()));
                    }
                    HeaderReceiver::App => {
                        assert!(
                            request.contains(&format!("ratelimit-policy: {policy}\r\n")),
                            "{request}"
                        );
                        assert!(request.contains(&format!("ratelimit: {left}\r\n")), "{request}");
                    }
                }
            }
            let denied = &responses[3];
            assert_eq!(denied.status, 429, "{denied:?}");
            assert_eq!(denied.header("content-type"), Some("application/problem+json"));
            assert_eq!(denied.header("ratelimit-policy"), Some("\"per-client\";q=3;w=2"));
            assert!(denied.body.contains("\"status\":429"), "{denied:?}");
            let wait: u64 = denied
                .header("retry-after")
                .and_then(|wait| wait.parse().ok())
                .expect("a wait in seconds");
            assert!((1..=2).contains(&wait), "{wait}");
            let left = format!("\"per-client\";r=0;t={wait}");
            assert_eq!(denied.header("ratelimit"), Some(left.as_str()), "t is Retry-After");
            let other = Client(20 + attempt).get(address, "/", &[]);
            assert_eq!(other.status, 200, "another client is not affected: {other:?}");
            std::thread::sleep(Duration::from_secs(wait));
            assert_eq!(client.get(address, "/", &[]).status, 200, "it waited {wait} s");
            return;
        }
        panic!("four requests took longer than {WINDOW:?}, five times");
    }

    /// Method, path, body and address of the client are used, and spoofed headers are ignored.
    fn uses_the_original_request(&self, spoofed: &[(&str, &str)]) {
        let address = self.proxy.address;
        for (number, headers) in [&[][..], spoofed].into_iter().enumerate() {
            let client = Client(30 + u8::try_from(number).expect("two"));
            let before = self.app.requests("/login").len();
            let login = |hop: &str| {
                let headers: Vec<_> =
                    headers.iter().copied().chain([("X-Forwarded-For", hop)]).collect();
                client.post(address, "/login?next=/", &headers, "name=ann")
            };
            assert_eq!(
                [login("192.0.2.1").status, login("192.0.2.2").status],
                [200, 200],
                "{headers:?}"
            );
            let denied = login("192.0.2.3");
            assert_eq!(denied.status, 429, "{headers:?}: {denied:?}");
            let wait: u64 = denied
                .header("retry-after")
                .and_then(|wait| wait.parse().ok())
                .expect("a wait in seconds");
            assert!((3_500..=3_600).contains(&wait), "{wait}");
            let otherwise_written =
                client.post(address, "//x/../%6Cogin/?next=/", headers, "name=ann");
            assert_eq!(otherwise_written.status, 429, "{headers:?}: {otherwise_written:?}");
            assert_eq!(
                client.get(address, "/login", &[]).status,
                200,
                "only POST has this limit, and denials cost nothing"
            );
            let reached = self.app.requests("/login?next=/");
            assert!(
                reached.iter().all(|request| request.ends_with("\r\n\r\nname=ann")),
                "{reached:?}"
            );
            assert_eq!(self.app.requests("/login").len(), before + 3);
            // The application gets the address of the client, not what the client claims.
            let hop = format!("\r\nx-forwarded-for: 127.0.0.{}\r\n", client.0);
            for request in &self.app.requests("/login")[before..] {
                assert!(request.contains(&hop) && !request.contains("192.0.2."), "{request}");
            }
        }
        assert!(
            !self.tidegate.output().contains("forward-auth request without"),
            "the proxy describes the request:\n{}",
            self.tidegate.output()
        );
        let chosen = Client(40).get(address, "/chosen?policy=login&deny_status=401", &[]);
        assert_eq!(chosen.status, 200, "a query is only for the application: {chosen:?}");
        assert!(
            self.app.requests("/chosen")[0]
                .starts_with("GET /chosen?policy=login&deny_status=401 ")
        );
    }
}

/// Sends a token, which the application never sees, then stops Tidegate.
fn hides_its_token_and_handles_an_outage(recipe: &Recipe<'_>, status_without_tidegate: u16) {
    let limits = [("limit: 100\n    window: 60s", "limit: 1\n    window: 1h")];
    let Setup { app, tidegate, mut proxy } =
        Setup::new(recipe, &limits, "auth: {api_token: change-me}");
    let client = Client(50);
    let send =
        |proxy: &Proxy| client.get(proxy.address, "/guarded", &[("Authorization", "Bearer alice")]);
    assert_eq!([send(&proxy).status, send(&proxy).status], [200, 429]);
    let reached = app.requests("/guarded");
    assert_eq!(reached.len(), 1);
    assert!(reached[0].contains("authorization: Bearer alice\r\n"), "{reached:?}");
    assert!(!reached[0].contains("change-me"), "{reached:?}");
    drop(tidegate);
    proxy
        .wait_until("the outage is noticed", |proxy| send(proxy).status == status_without_tidegate);
}

#[test]
fn nginx_limits_each_client_with_retry_after() {
    let setup = Setup::new(&NGINX, &LIMITS, "");
    setup.limits_each_client(HeaderReceiver::Client);
    setup.uses_the_original_request(&[
        ("X-Forwarded-Method", "GET"),
        ("X-Forwarded-Uri", "/"),
        ("X-Original-Method", "GET"),
        ("X-Original-URI", "/"),
    ]);
}

#[test]
fn nginx_without_the_uri_is_warned_about() {
    let without_uri = ("proxy_set_header X-Forwarded-Uri $request_uri;", "");
    let recipe = Recipe { changes: &[NGINX.changes[0], without_uri], ..NGINX };
    let setup = Setup::new(&recipe, &LIMITS, "");
    let login = || Client(60).post(setup.proxy.address, "/login", &[], "name=ann").status;
    assert_eq!(login(), 200);
    setup.tidegate.wait_until("the missing header is logged", |tidegate| {
        let output = tidegate.output();
        output.contains("forward-auth request without X-Forwarded-Uri")
            && output.contains("proxy_set_header X-Forwarded-Uri $request_uri;")
    });
    assert!(!setup.tidegate.output().contains("without X-Forwarded-Method"));
}

#[test]
fn caddy_limits_each_client_with_retry_after() {
    let setup = Setup::new(&CADDY, &LIMITS, "");
    setup.limits_each_client(HeaderReceiver::Client);
    setup.uses_the_original_request(&[
        ("X-Forwarded-Method", "GET"),
        ("X-Forwarded-Uri", "/"),
        ("X-Original-Method", "GET"),
        ("X-Original-URI", "/"),
    ]);
}

#[test]
fn traefik_limits_each_client_with_retry_after() {
    let setup = Setup::new(&TRAEFIK, &LIMITS, "");
    setup.limits_each_client(HeaderReceiver::App);
    setup.uses_the_original_request(&[
        ("X-Forwarded-Method", "GET"),
        ("X-Forwarded-Uri", "/"),
        ("X-Original-Method", "GET"),
        ("X-Original-URI", "/"),
        ("X-Original-URL", "/"),
        ("X-Original-Host", "other"),
    ]);
}

#[test]
fn haproxy_limits_each_client_with_retry_after() {
    let setup = Setup::new(&HAPROXY, &LIMITS, "");
    setup.limits_each_client(HeaderReceiver::Client);
    setup.uses_the_original_request(&[
        ("X-Forwarded-Method", "GET"),
        ("X-Forwarded-Uri", "/"),
        ("X-Original-Method", "GET"),
        ("X-Original-URI", "/"),
    ]);
}

#[test]
fn haproxy_denies_requests_that_tidegate_rejects() {
    let limits = [("limit: 100\n    window: 60s", "limit: 3\n    window: 1h")];
    let by_user = "  - {name: per-user, key: [header.x-user-id], limit: 1000, window: 1h}";
    let setup = Setup::new(&HAPROXY, &limits, by_user);
    let (address, client) = (setup.proxy.address, Client(70));
    // The key is too long.
    let refused = client.get(address, "/refused", &[("X-User-Id", &"k".repeat(600))]);
    assert_eq!(
        (refused.status, refused.header("content-type")),
        (400, Some("application/problem+json"))
    );
    assert_eq!(
        client.send(address, "OPTIONS", "*", &[], "").expect("the service listens").status,
        400
    );
    // More headers than Tidegate accepts, and than HAProxy's client can handle; with one name or
    // with many.
    let names: Vec<String> = (0..97).map(|number| format!("X-{number}")).collect();
    let many: Vec<(&str, &str)> = names.iter().map(|name| (name.as_str(), "y")).collect();
    let statuses: Vec<u16> = (0..3).map(|_| client.get(address, "/many", &many).status).collect();
    assert_eq!(statuses, [200; 3]);
    assert_eq!(client.get(address, "/many", &many).status, 429);
    assert_eq!(client.get(address, "/many", &[("X-User-Id", "u"); 90]).status, 429);
    assert_eq!(client.get(address, "/many", &[("Cookie", "a=b"); 90]).status, 429);
    // The longest request that HAProxy accepts.
    assert_eq!(client.get(address, "/many", &[("Cookie", &"c".repeat(15_000))]).status, 429);
    assert_eq!(client.get(address, &format!("/{}", "p".repeat(15_000)), &[]).status, 429);
    assert_eq!((setup.app.requests("/refused").len(), setup.app.requests("/many").len()), (0, 3));
    assert_eq!(Client(71).get(address, "/", &[]).status, 200, "HAProxy still works");
}

#[test]
fn nginx_sends_a_token_and_fails_open() {
    let token = ("# proxy_set_header X-Tidegate-Token", "proxy_set_header X-Tidegate-Token");
    let recipe = Recipe { changes: &[NGINX.changes[0], token], ..NGINX };
    hides_its_token_and_handles_an_outage(&recipe, 200);
}

#[test]
fn caddy_sends_a_token_and_fails_closed() {
    let token = ("# header_up X-Tidegate-Token", "header_up X-Tidegate-Token");
    let recipe =
        Recipe { changes: &[token], environment: &[("TIDEGATE_API_TOKEN", "change-me")], ..CADDY };
    hides_its_token_and_handles_an_outage(&recipe, 502);
}

#[test]
fn traefik_sends_a_token_and_fails_closed() {
    let token = [
        (
            "middlewares: [no-original, tidegate]",
            "middlewares: [no-original, token, tidegate, no-token]",
        ),
        ("# token:", "token:"),
        ("# no-token:", "no-token:"),
    ];
    let recipe = Recipe { changes: &token, ..TRAEFIK };
    hides_its_token_and_handles_an_outage(&recipe, 500);
}

#[test]
fn haproxy_sends_a_token_and_fails_open() {
    let recipe = Recipe { environment: &[("TIDEGATE_API_TOKEN", "change-me")], ..HAPROXY };
    hides_its_token_and_handles_an_outage(&recipe, 200);
}

#[test]
fn haproxy_can_fail_closed() {
    let deny = ("# http-request deny deny_status 503", "http-request deny deny_status 503");
    let recipe = Recipe {
        changes: &[HAPROXY.changes[0], deny],
        environment: &[("TIDEGATE_API_TOKEN", "change-me")],
        ..HAPROXY
    };
    hides_its_token_and_handles_an_outage(&recipe, 503);
}
