//! `/v1/forward-auth` over the network, with the requests that proxies send.

mod support;

use support::{Redis, Response, Service, request};

type Header = (&'static str, &'static str);

const GET: Header = ("X-Forwarded-Method", "GET");

fn send(service: &Service, query: &str, headers: &[(&str, &str)]) -> Response {
    request(&service.http, "GET", &format!("/v1/forward-auth{query}"), headers, b"")
}

fn statuses(service: &Service, query: &str, headers: &[(&str, &str)], times: usize) -> Vec<u16> {
    (0..times).map(|_| send(service, query, headers).status).collect()
}

fn one_policy(policy: &str) -> Service {
    Service::start(&format!("policies:\n  - {{name: p, limit: 1, window: 1h, {policy}}}\n"))
}

#[test]
fn allowed_requests_get_200_and_denied_ones_429_with_retry_after() {
    let service = Service::start("policies: [{name: all, limit: 2, window: 1h}]");
    let first = send(&service, "", &[]);
    assert_eq!((first.status, first.body.as_str()), (200, ""));
    assert_eq!(first.header("ratelimit-policy"), Some("\"all\";q=2;w=3600"));
    assert_eq!(first.header("ratelimit"), Some("\"all\";r=1;t=3600"));
    assert_eq!(first.header("x-ratelimit-remaining"), Some("1"));
    assert_eq!(first.header("retry-after"), None);
    assert_eq!(request(&service.http, "HEAD", "/v1/forward-auth", &[], b"").status, 200);

    let denied = send(&service, "", &[]);
    assert_eq!(denied.status, 429);
    assert_eq!(denied.header("content-type"), Some("application/problem+json"));
    assert_eq!(denied.header("retry-after"), Some("3600"));
    assert_eq!(denied.header("ratelimit"), Some("\"all\";r=0;t=3600"));
    assert_eq!(
        denied.json()["type"],
        "https://iana.org/assignments/http-problem-types#quota-exceeded"
    );
    assert_eq!(denied.json()["title"], "Quota Exceeded");
    assert_eq!(denied.json()["violated-policies"], serde_json::json!(["all"]));
    let detail = denied.json()["detail"].as_str().expect("a detail").to_owned();
    assert!(detail.contains("\"all\"") && detail.contains("try again in"), "{detail}");
}

#[test]
fn denials_use_the_status_that_the_proxy_requests() {
    let service = Service::start("policies: [{name: all, limit: 1, window: 1h}]");
    assert_eq!(send(&service, "", &[]).status, 200);
    for status in [401, 403, 429] {
        let denied = send(&service, &format!("?deny_status={status}"), &[]);
        assert_eq!(denied.status, status);
        assert_eq!(denied.json()["status"], status);
        assert_eq!(denied.json()["violated-policies"], serde_json::json!(["all"]));
        assert!(denied.header("retry-after").is_some());
    }
}

#[test]
fn invalid_queries_are_rejected_and_consume_nothing() {
    let service = Service::start("policies: [{name: all, limit: 1, window: 1h}]");
    for (query, status, reason) in [
        ("?deny_status=500", 400, "`401`, `403`, `429`"),
        ("?deny_status=", 400, "deny_status"),
        ("?deny-status=403", 400, "unknown field `deny-status`"),
        ("?policy=all&policy=all", 400, "duplicate field"),
        ("?policy=al", 404, "did you mean \\\"all\\\"?"),
    ] {
        let response = send(&service, query, &[]);
        assert_eq!(response.status, status, "{query}");
        assert!(response.body.contains(reason), "{query}: {}", response.body);
        assert_eq!(response.header("content-type"), Some("application/problem+json"), "{query}");
    }
    assert_eq!(request(&service.http, "POST", "/v1/forward-auth", &[], b"").status, 405);
    assert_eq!(send(&service, "", &[]).status, 200);
}

#[test]
fn every_attribute_of_the_original_request_can_be_the_key() {
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
        assert_eq!(send(&service, "", &[other]).status, 200, "{attribute}: {other:?}");
        assert_eq!(send(&service, "", &[]).status, 429, "{attribute} is missing");
    }
}

#[test]
fn policies_match_the_original_request() {
    let service = one_policy("match: {path: /login, method: POST, host: example.com}");
    let login = |method, uri, host| {
        [("X-Forwarded-Method", method), ("X-Forwarded-Uri", uri), ("X-Forwarded-Host", host)]
    };
    assert_eq!(send(&service, "", &login("POST", "//login/?x=1", "Example.com:443")).status, 200);
    assert_eq!(send(&service, "", &login("POST", "/login", "example.com")).status, 429);
    let others = [
        login("GET", "/login", "example.com"),
        login("POST", "/", "example.com"),
        login("POST", "/login", "b.example"),
    ];
    for other in others {
        let response = send(&service, "", &other);
        assert_eq!(
            (response.status, response.header("ratelimit")),
            (200, None),
            "no policy applies to {other:?}"
        );
    }
}

/// A proxy that does not describe the request bypasses the policies that match by path. That must
/// not go unnoticed.
#[test]
fn missing_description_of_the_request_is_logged_once_and_counted() {
    const WARNING: &str = "forward-auth request without";
    let counts = |service: &Service| -> Vec<u64> {
        let metrics = service.admin("/metrics").body;
        let count = |part: &str| {
            let line = format!("tidegate_forward_auth_incomplete_total{{missing=\"{part}\"}} ");
            let (_, rest) = metrics.split_once(&line).expect("the metric");
            rest.lines().next().and_then(|count| count.parse().ok()).expect("a number")
        };
        ["uri", "method", "host"].map(count).to_vec()
    };
    let service = one_policy("match: {path: /login, method: POST}");
    let described = [("X-Original-URI", "/"), ("X-Original-Method", "GET")];
    assert_eq!(send(&service, "", &described).status, 200);
    assert_eq!(statuses(&service, "?policy=p", &[], 2), [200, 429]);
    assert_eq!(counts(&service), [0, 0, 0]);
    assert!(!service.output().contains(WARNING), "{}", service.output());

    assert_eq!(statuses(&service, "", &[GET], 3), [200; 3], "no policy applies");
    assert_eq!(send(&service, "", &[("X-Forwarded-Uri", "/login")]).status, 200);
    assert_eq!(counts(&service), [3, 1, 0]);
    service.wait_until("both headers are logged", |service| {
        service.output().contains(&format!("{WARNING} X-Forwarded-Method"))
    });
    let output = service.output();
    assert_eq!(output.matches(&format!("{WARNING} X-Forwarded-Uri")).count(), 1, "{output}");
    for fix in [
        "proxy_set_header X-Forwarded-Uri $request_uri;",
        "header_up X-Forwarded-Uri {uri}",
        "use forwardAuth",
    ] {
        assert!(output.contains(fix), "{fix} in\n{output}");
    }

    // Nothing is missing that a policy needs.
    let by_ip = one_policy("key: [ip]");
    assert_eq!(statuses(&by_ip, "", &[], 2), [200, 429]);
    assert_eq!(counts(&by_ip), [0, 0, 0]);
    assert!(!by_ip.output().contains(WARNING));
}

#[test]
fn named_policy_is_applied_alone_regardless_of_its_match() {
    let service = Service::start(
        "policies:
  - {name: every, limit: 1000, window: 1h}
  - {name: login, limit: 2, window: 1h, match: {path: /login}, key: [header.x-user-id]}
  - {name: strict, limit: 2, window: 1h, key: [header.x-user-id], missing_key: deny}
",
    );
    let user = [("X-User-Id", "u1"), ("X-Forwarded-Uri", "/elsewhere")];
    let first = send(&service, "?policy=login", &user);
    assert_eq!(
        (first.status, first.header("ratelimit-policy")),
        (200, Some("\"login\";q=2;w=3600"))
    );
    assert_eq!(statuses(&service, "?policy=login&deny_status=403", &user, 2), [200, 403]);
    assert_eq!(send(&service, "?policy=login", &[("X-User-Id", "u2")]).status, 200);
    let keyless = send(&service, "?policy=login", &[]);
    assert_eq!((keyless.status, keyless.header("ratelimit")), (200, None), "missing_key: skip");
    let keyless = send(&service, "?policy=strict", &[]);
    assert_eq!((keyless.status, keyless.header("retry-after")), (429, None), "missing_key: deny");
    assert_eq!(keyless.header("ratelimit"), Some("\"strict\";r=0"), "no wait helps");
    let problem = keyless.json();
    assert_eq!(problem["type"], "about:blank", "no quota is exceeded");
    assert_eq!(
        (&problem["source"], &problem["missing_key"]),
        (&"missing-key".into(), &"header.x-user-id".into())
    );
    let detail = "the request lacks header.x-user-id, by which policy \"strict\" counts: send it";
    assert_eq!(problem["detail"], detail);
    assert_eq!(
        send(&service, "", &user).header("ratelimit"),
        Some("\"every\";r=999;t=3600, \"strict\";r=1;t=3600")
    );
}

#[test]
fn only_trusted_proxies_may_forward_addresses() {
    let policy = "policies: [{name: p, limit: 1, window: 1h, key: [ip]}]";
    let from = |address| [("X-Forwarded-For", address)];
    let trusting =
        Service::start(&format!("client_ip: {{trusted_proxies: [127.0.0.1/32]}}\n{policy}"));
    assert_eq!(statuses(&trusting, "", &from("192.0.2.1"), 2), [200, 429]);
    assert_eq!(send(&trusting, "", &from("192.0.2.2")).status, 200);
    assert_eq!(
        send(&trusting, "", &from("192.0.2.3, 192.0.2.1")).status,
        429,
        "the rightmost hop counts"
    );
    assert_eq!(send(&trusting, "", &from("nonsense")).status, 400);
    let distrusting = Service::start(policy);
    assert_eq!(send(&distrusting, "", &from("192.0.2.1")).status, 200);
    assert_eq!(
        send(&distrusting, "", &from("192.0.2.2")).status,
        429,
        "both have the address of the proxy"
    );
}

/// nginx forwards all headers of the client. A header that its configuration does not set must not
/// override the others.
#[test]
fn client_cannot_spoof_proxy_headers() {
    let service = one_policy("match: {path: /login}");
    let honest = ("X-Original-URI", "/login");
    assert_eq!(send(&service, "", &[honest]).status, 200);
    assert_eq!(send(&service, "", &[honest]).status, 429);
    for spoofed in [
        ("X-Forwarded-Uri", "/harmless"),
        ("X-Original-URL", "http://a/harmless"),
        ("X-Original-URI", "/b"),
    ] {
        let response = send(&service, "", &[honest, spoofed]);
        assert_eq!(response.status, 400, "{spoofed:?}");
        assert!(response.body.contains("differ"), "{}", response.body);
    }
}

/// With `uri /v1/forward-auth` Caddy appends the client's query; with `uri /v1/forward-auth?` it
/// does not.
#[test]
fn client_cannot_choose_its_policy_by_its_query() {
    let service = Service::start("policies: [{name: lenient, limit: 1000, window: 1h}]");
    for query in ["policy=lenient", "x=1"] {
        let response =
            send(&service, &format!("?{query}"), &[("X-Forwarded-Uri", &format!("/a?{query}"))]);
        assert_eq!(response.status, 400);
        assert!(response.body.contains("uri /v1/forward-auth?"), "{}", response.body);
    }
    assert_eq!(
        send(&service, "?policy=lenient", &[("X-Forwarded-Uri", "/a?policy=strict")]).status,
        200
    );
    assert_eq!(send(&service, "?", &[("X-Forwarded-Uri", "/a?")]).status, 200);
}

#[test]
fn api_token_is_required_and_never_used_as_a_key() {
    let service = Service::start(
        "auth: {api_token: sesame}\npolicies: [{name: p, limit: 1, window: 1h, key: \
         [header.authorization]}]\n",
    );
    let bearer = ("Authorization", "Bearer sesame");
    for wrong in [&[][..], &[("Authorization", "Bearer no")], &[("X-Tidegate-Token", "no"), bearer]]
    {
        let response = send(&service, "", wrong);
        assert_eq!(response.status, 401, "{wrong:?}");
        assert_eq!(response.header("content-type"), Some("application/problem+json"));
    }
    assert_eq!(statuses(&service, "", &[bearer], 2), [200, 200], "our token is not used as a key");
    // A token in the other header leaves the client's own Authorization in place.
    let token = ("X-Tidegate-Token", "sesame");
    assert_eq!(statuses(&service, "", &[token, ("Authorization", "Bearer alice")], 2), [200, 429]);
    assert_eq!(send(&service, "", &[token, ("Authorization", "Bearer bob")]).status, 200);
    assert!(!service.admin("/v1/hot-keys").body.contains("sesame"));
}

#[test]
fn store_failure_applies_each_policys_mode() {
    let redis = Redis::start();
    let service = Service::start(&format!(
        "store: {{redis: '{}', timeout: 5s}}
policies:
  - {{name: open, limit: 1, window: 1h, on_store_failure: allow}}
  - {{name: shut, limit: 1, window: 1h, on_store_failure: deny}}
",
        redis.url()
    ));
    assert_eq!(statuses(&service, "?policy=open", &[], 2), [200, 429]);
    drop(redis);
    service.wait_until("the outage is noticed", |service| {
        send(service, "?policy=open", &[]).status == 200
    });
    assert_eq!(send(&service, "?policy=shut", &[]).status, 429);
}
