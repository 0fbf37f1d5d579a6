//! `/v1/forward-auth` over the wire, asked as proxies ask.

mod support;

use support::{Answer, Redis, Service, request};

type Header = (&'static str, &'static str);

const GET: Header = ("X-Forwarded-Method", "GET");

fn ask(service: &Service, question: &str, headers: &[(&str, &str)]) -> Answer {
    request(&service.http, "GET", &format!("/v1/forward-auth{question}"), headers, b"")
}

fn statuses(service: &Service, question: &str, headers: &[(&str, &str)], times: usize) -> Vec<u16> {
    (0..times).map(|_| ask(service, question, headers).status).collect()
}

fn one_policy(policy: &str) -> Service {
    Service::start(&format!("policies:\n  - {{name: p, limit: 1, window: 1h, {policy}}}\n"))
}

#[test]
fn what_passes_gets_200_and_what_does_not_429_with_its_wait() {
    let service = Service::start("policies: [{name: all, limit: 2, window: 1h}]");
    let first = ask(&service, "", &[]);
    assert_eq!((first.status, first.body.as_str()), (200, ""));
    assert_eq!(first.header("ratelimit-policy"), Some("\"all\";q=2;w=3600"));
    assert_eq!(first.header("ratelimit"), Some("\"all\";r=1;t=3600"));
    assert_eq!(first.header("x-ratelimit-remaining"), Some("1"));
    assert_eq!(first.header("retry-after"), None);
    assert_eq!(request(&service.http, "HEAD", "/v1/forward-auth", &[], b"").status, 200);

    let denied = ask(&service, "", &[]);
    assert_eq!(denied.status, 429);
    assert_eq!(denied.header("content-type"), Some("application/problem+json"));
    assert_eq!(denied.header("retry-after"), Some("3600"));
    assert_eq!(denied.header("ratelimit"), Some("\"all\";r=0;t=3600"));
    assert_eq!(denied.json()["title"], "Too Many Requests");
    let detail = denied.json()["detail"].as_str().expect("a detail").to_owned();
    assert!(detail.contains("\"all\"") && detail.contains("try again in"), "{detail}");
}

#[test]
fn a_denial_has_the_status_that_the_proxy_can_take() {
    let service = Service::start("policies: [{name: all, limit: 1, window: 1h}]");
    assert_eq!(ask(&service, "", &[]).status, 200);
    for (status, title) in [(401, "Unauthorized"), (403, "Forbidden"), (429, "Too Many Requests")] {
        let denied = ask(&service, &format!("?deny_status={status}"), &[]);
        assert_eq!(denied.status, status);
        assert_eq!(denied.json()["title"], title);
        assert!(denied.header("retry-after").is_some());
    }
}

#[test]
fn questions_that_are_none_are_refused_and_spend_nothing() {
    let service = Service::start("policies: [{name: all, limit: 1, window: 1h}]");
    for (question, status, reason) in [
        ("?deny_status=500", 400, "`401`, `403`, `429`"),
        ("?deny_status=", 400, "deny_status"),
        ("?deny-status=403", 400, "unknown field `deny-status`"),
        ("?policy=all&policy=all", 400, "duplicate field"),
        ("?policy=al", 404, "did you mean \\\"all\\\"?"),
    ] {
        let answer = ask(&service, question, &[]);
        assert_eq!(answer.status, status, "{question}");
        assert!(answer.body.contains(reason), "{question}: {}", answer.body);
        assert_eq!(answer.header("content-type"), Some("application/problem+json"), "{question}");
    }
    assert_eq!(request(&service.http, "POST", "/v1/forward-auth", &[], b"").status, 405);
    assert_eq!(ask(&service, "", &[]).status, 200);
}

#[test]
fn each_attribute_of_the_held_back_request_can_be_the_key() {
    let cases: [(&str, Header, Header); 9] = [
        ("header.x-user-id", ("X-User-Id", "u1"), ("X-User-Id", "u2")),
        ("cookie.sid", ("Cookie", "a=b; sid=1"), ("Cookie", "a=b; sid=2")),
        (
            "query.api_key",
            ("X-Forwarded-Uri", "/?api_key=k%31"),
            ("X-Forwarded-Uri", "/?api_key=k2"),
        ),
        (
            "query.api_key",
            ("X-Original-URI", "/?x&api_key=k1"),
            ("X-Original-URI", "/?x&api_key=k2"),
        ),
        ("path", ("X-Forwarded-Uri", "/a?b"), ("X-Forwarded-Uri", "/b")),
        (
            "path",
            ("X-Original-URL", "https://example.com/a"),
            ("X-Original-URL", "https://example.com/b"),
        ),
        ("method", GET, ("X-Forwarded-Method", "POST")),
        ("method", ("X-Original-Method", "GET"), ("X-Original-Method", "POST")),
        ("host", ("X-Forwarded-Host", "a.example:8443"), ("X-Forwarded-Host", "b.example")),
    ];
    for (attribute, one, other) in cases {
        let service = one_policy(&format!("key: [{attribute}], missing_key: deny"));
        assert_eq!(statuses(&service, "", &[one], 2), [200, 429], "{attribute}: {one:?}");
        assert_eq!(ask(&service, "", &[other]).status, 200, "{attribute}: {other:?}");
        assert_eq!(ask(&service, "", &[]).status, 429, "{attribute} is missing");
    }
}

#[test]
fn policies_match_the_held_back_request_and_not_the_question() {
    let service = one_policy("match: {path: /login, method: POST, host: example.com}");
    let login = |method, uri, host| {
        [("X-Forwarded-Method", method), ("X-Forwarded-Uri", uri), ("X-Forwarded-Host", host)]
    };
    assert_eq!(ask(&service, "", &login("POST", "//login/?x=1", "Example.com:443")).status, 200);
    assert_eq!(ask(&service, "", &login("POST", "/login", "example.com")).status, 429);
    let others = [
        login("GET", "/login", "example.com"),
        login("POST", "/", "example.com"),
        login("POST", "/login", "b.example"),
    ];
    for other in others {
        let answer = ask(&service, "", &other);
        assert_eq!(
            (answer.status, answer.header("ratelimit")),
            (200, None),
            "no policy applies to {other:?}"
        );
    }
}

#[test]
fn a_chosen_policy_is_applied_alone_whatever_it_matches() {
    let service = Service::start(
        "policies:
  - {name: every, limit: 1000, window: 1h}
  - {name: login, limit: 2, window: 1h, match: {path: /login}, key: [header.x-user-id]}
  - {name: strict, limit: 2, window: 1h, key: [header.x-user-id], missing_key: deny}
",
    );
    let user = [("X-User-Id", "u1"), ("X-Forwarded-Uri", "/elsewhere")];
    let first = ask(&service, "?policy=login", &user);
    assert_eq!(
        (first.status, first.header("ratelimit-policy")),
        (200, Some("\"login\";q=2;w=3600"))
    );
    assert_eq!(statuses(&service, "?policy=login&deny_status=403", &user, 2), [200, 403]);
    assert_eq!(ask(&service, "?policy=login", &[("X-User-Id", "u2")]).status, 200);
    let keyless = ask(&service, "?policy=login", &[]);
    assert_eq!((keyless.status, keyless.header("ratelimit")), (200, None), "missing_key: skip");
    assert_eq!(ask(&service, "?policy=strict", &[]).status, 429, "missing_key: deny");
    assert_eq!(
        ask(&service, "", &user).header("ratelimit"),
        Some("\"every\";r=999;t=3600, \"strict\";r=1;t=3600")
    );
}

#[test]
fn addresses_are_believed_from_trusted_proxies_alone() {
    let policy = "policies: [{name: p, limit: 1, window: 1h, key: [ip]}]";
    let from = |address| [("X-Forwarded-For", address)];
    let trusting =
        Service::start(&format!("client_ip: {{trusted_proxies: [127.0.0.1/32]}}\n{policy}"));
    assert_eq!(statuses(&trusting, "", &from("192.0.2.1"), 2), [200, 429]);
    assert_eq!(ask(&trusting, "", &from("192.0.2.2")).status, 200);
    assert_eq!(
        ask(&trusting, "", &from("192.0.2.3, 192.0.2.1")).status,
        429,
        "the nearest hop counts"
    );
    assert_eq!(ask(&trusting, "", &from("nonsense")).status, 400);
    let doubting = Service::start(policy);
    assert_eq!(ask(&doubting, "", &from("192.0.2.1")).status, 200);
    assert_eq!(ask(&doubting, "", &from("192.0.2.2")).status, 429, "both are the proxy's");
}

/// nginx hands on all headers of the client. One that its configuration does not know of must not
/// win.
#[test]
fn a_client_cannot_speak_for_the_proxy() {
    let service = one_policy("match: {path: /login}");
    let honest = ("X-Original-URI", "/login");
    assert_eq!(ask(&service, "", &[honest]).status, 200);
    assert_eq!(ask(&service, "", &[honest]).status, 429);
    for spoofed in [
        ("X-Forwarded-Uri", "/harmless"),
        ("X-Original-URL", "http://a/harmless"),
        ("X-Original-URI", "/b"),
    ] {
        let answer = ask(&service, "", &[honest, spoofed]);
        assert_eq!(answer.status, 400, "{spoofed:?}");
        assert!(answer.body.contains("differ"), "{}", answer.body);
    }
}

/// Caddy rewrites `uri /v1/forward-auth` with the client's query behind it; with `uri
/// /v1/forward-auth?` it does not.
#[test]
fn a_client_cannot_choose_its_policy_by_its_own_query() {
    let service = Service::start("policies: [{name: lenient, limit: 1000, window: 1h}]");
    for query in ["policy=lenient", "x=1"] {
        let answer =
            ask(&service, &format!("?{query}"), &[("X-Forwarded-Uri", &format!("/a?{query}"))]);
        assert_eq!(answer.status, 400);
        assert!(answer.body.contains("uri /v1/forward-auth?"), "{}", answer.body);
    }
    assert_eq!(
        ask(&service, "?policy=lenient", &[("X-Forwarded-Uri", "/a?policy=strict")]).status,
        200
    );
    assert_eq!(ask(&service, "?", &[("X-Forwarded-Uri", "/a?")]).status, 200);
}

#[test]
fn a_token_is_asked_for_and_never_becomes_a_key() {
    let service = Service::start(
        "auth: {api_token: sesame}\npolicies: [{name: p, limit: 1, window: 1h, key: [header.authorization]}]\n",
    );
    let bearer = ("Authorization", "Bearer sesame");
    for wrong in [&[][..], &[("Authorization", "Bearer no")], &[("X-Tidegate-Token", "no"), bearer]]
    {
        let answer = ask(&service, "", wrong);
        assert_eq!(answer.status, 401, "{wrong:?}");
        assert_eq!(answer.header("content-type"), Some("application/problem+json"));
    }
    assert_eq!(statuses(&service, "", &[bearer], 2), [200, 200], "ours is nobody's key");
    // The other header leaves the client's own in its place.
    let token = ("X-Tidegate-Token", "sesame");
    assert_eq!(statuses(&service, "", &[token, ("Authorization", "Bearer alice")], 2), [200, 429]);
    assert_eq!(ask(&service, "", &[token, ("Authorization", "Bearer bob")]).status, 200);
    assert!(!service.admin("/v1/hot-keys").body.contains("sesame"));
}

#[test]
fn when_the_store_is_gone_each_policy_says_what_then() {
    let redis = Redis::start();
    let service = Service::start(&format!(
        "store: {{redis: '{}'}}
policies:
  - {{name: open, limit: 1, window: 1h, on_store_failure: allow}}
  - {{name: shut, limit: 1, window: 1h, on_store_failure: deny}}
",
        redis.url()
    ));
    assert_eq!(statuses(&service, "?policy=open", &[], 2), [200, 429]);
    drop(redis);
    service.until("the store is gone", |service| ask(service, "?policy=open", &[]).status == 200);
    assert_eq!(ask(&service, "?policy=shut", &[]).status, 429);
}
