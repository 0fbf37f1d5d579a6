use std::io::Write as _;
use std::net::TcpStream;

use serde_json::json;

use crate::support::{Service, TEST_TIMEOUT, raw, read_response, request, with_free_ports};
use crate::upstream::{OK, Upstream};

const LIMIT: &str = "
policies:
  - {name: per-user, match: {path: /api/**}, key: [header.x-user-id], limit: 3, window: 1h}
";

#[test]
fn upstream_gets_forwarded_headers_without_hop_by_hop_ones() {
    let response =
        b"HTTP/1.1 201 Created\r\nContent-Length: 2\r\nX-Own: a\r\nKeep-Alive: timeout=5\r\n\
          Connection: X-Private\r\nX-Private: secret\r\nVia: 1.0 cache\r\nSet-Cookie: a=b\r\n\
          Set-Cookie: c=d\r\n\r\nok";
    let upstream = Upstream::responding_with(response);
    let gateway = Service::gateway("", &[&upstream.url()]);
    let bytes = "POST /a/b?c=%20d HTTP/1.1\r\nHost: example.org\r\nX-Forwarded-For: 6.6.6.6\r\n\
                 Forwarded: for=6.6.6.6\r\nX-Forwarded-Prefix: /evil\r\nConnection: close, \
                 X-Hop\r\nX-Hop: secret\r\nProxy-Authorization: secret\r\nKeep-Alive: 5\r\nTE: \
                 trailers, gzip\r\nX-Twice: 1\r\nX-Twice: 2\r\nContent-Length: 4\r\n\r\nbody";
    let response = raw(&gateway.http, bytes.as_bytes());
    assert_eq!((response.status, response.body.as_str()), (201, "ok"));
    assert_eq!(response.header("x-own"), Some("a"));
    assert_eq!((response.header("x-private"), response.header("keep-alive")), (None, None));
    assert_eq!(response.headers.iter().filter(|(name, _)| name == "set-cookie").count(), 2);
    let via: Vec<&str> = response
        .headers
        .iter()
        .filter(|(name, _)| name == "via")
        .map(|(_, via)| via.as_str())
        .collect();
    assert_eq!(via, ["1.0 cache", "1.1 tidegate"]);

    let received = upstream.received().remove(0);
    assert!(received.head.starts_with("POST /a/b?c=%20d HTTP/1.1\r\n"), "{}", received.head);
    assert_eq!(received.body, b"body");
    for (name, value) in [
        ("host", Some("example.org")),
        ("x-forwarded-for", Some("127.0.0.1")),
        ("x-forwarded-proto", Some("http")),
        ("x-forwarded-host", Some("example.org")),
        ("via", Some("1.1 tidegate")),
        ("te", Some("trailers")),
        ("content-length", Some("4")),
        ("x-twice", Some("1")),
        ("x-forwarded-prefix", None),
        ("forwarded", None),
        ("x-hop", None),
        ("proxy-authorization", None),
        ("keep-alive", None),
        ("connection", None),
    ] {
        assert_eq!(received.header(name), value, "{name} in {}", received.head);
    }
    assert!(received.head.contains("x-twice: 2\r\n"), "{}", received.head);
}

#[test]
fn headers_listed_in_connection_are_dropped() {
    let upstream = Upstream::responding_with(OK);
    let gateway = Service::gateway("", &[&upstream.url()]);
    let bytes =
        b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close, X-Secret, \xff\r\nX-Secret: s\r\n\r\n";
    assert_eq!(raw(&gateway.http, bytes).status, 200);
    assert_eq!(upstream.received()[0].header("x-secret"), None);
}

#[test]
fn trailers_cannot_spoof_headers() {
    let upstream = Upstream::start(|_, stream| {
        stream.write_all(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: x-sum, keep-alive\r\n\r\n\
              2\r\nok\r\n0\r\nX-Sum: 2\r\nKeep-Alive: 5\r\n\r\n",
        )
    });
    let gateway = Service::gateway("", &[&upstream.url()]);
    let bytes = b"POST / HTTP/1.1\r\nHost: h\r\nConnection: close\r\nTE: trailers\r\n\
                  Transfer-Encoding: chunked\r\nTrailer: x-sum, x-forwarded-for, forwarded, \
                  connection\r\n\r\n1\r\na\r\n0\r\nX-Sum: 1\r\nX-Forwarded-For: 6.6.6.6\r\n\
                  Forwarded: for=6.6.6.6\r\nConnection: x\r\n\r\n";
    let response = raw(&gateway.http, bytes);
    assert_eq!(response.status, 200);
    assert!(response.body.ends_with("0\r\nx-sum: 2\r\n\r\n"), "{response:?}");
    let trailers = upstream.received().remove(0).trailers;
    assert_eq!(trailers.to_ascii_lowercase(), "x-sum: 1\r\n\r\n");
}

#[test]
fn responses_are_reframed_for_the_client() {
    let upstream = Upstream::start(|request, stream| {
        if request.head.starts_with("GET /both") {
            return stream.write_all(
                b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n\
                  whole\r\n0\r\n\r\n",
            );
        }
        if request.head.starts_with("GET /stops") {
            stream.write_all(b"HTTP/1.0 200 OK\r\n\r\nhalf")?;
            std::thread::sleep(std::time::Duration::from_secs(2));
        } else {
            stream.write_all(b"HTTP/1.0 200 OK\r\n\r\nwhole")?;
        }
        stream.shutdown(std::net::Shutdown::Both)?;
        Err(std::io::ErrorKind::BrokenPipe.into())
    });
    let gateway = Service::gateway("gateway: {idle_timeout: 500ms}\n", &[&upstream.url()]);
    let mut client = TcpStream::connect(&gateway.http).expect("the service listens");
    client.set_read_timeout(Some(TEST_TIMEOUT)).expect("a timeout");
    // Sequential requests on one connection, which stays open until the last response.
    client
        .write_all(
            b"GET /both HTTP/1.1\r\nHost: h\r\n\r\nGET /old HTTP/1.1\r\nHost: h\r\n\r\nGET \
              /stops HTTP/1.1\r\nHost: h\r\n\r\n",
        )
        .expect("sent");
    let mut all = String::new();
    let _ = std::io::Read::read_to_string(&mut client, &mut all);
    assert_eq!(all.matches("HTTP/1.1 200 OK\r\n").count(), 3, "{all}");
    assert_eq!(all.matches("transfer-encoding: chunked\r\n").count(), 3, "{all}");
    assert_eq!(all.matches("\r\n5\r\nwhole\r\n0\r\n\r\n").count(), 2, "{all}");
    assert!(!all.contains("content-length") && all.ends_with("\r\n4\r\nhalf\r\n"), "{all}");
}

#[test]
fn rate_limit_headers_of_upstreams_are_not_mixed_with_ours() {
    let upstream = Upstream::responding_with(
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nRateLimit: \"up\";r=7;t=1\r\n\
          RateLimit-Policy: \"up\";q=9;w=1\r\nRateLimit-Remaining: 7\r\nX-RateLimit-Limit: 9\r\n\
          X-RateLimit-Used: 2\r\nRetry-After: 5\r\n\r\n",
    );
    let send = |config: &str, path: &str| {
        let gateway = Service::gateway(config, &[&upstream.url()]);
        let response = request(&gateway.http, "GET", path, &[("X-User-Id", "u1")], b"");
        let limits = response
            .headers
            .into_iter()
            .filter(|(name, _)| name.contains("ratelimit") || name == "retry-after");
        limits
            .map(|(name, value)| format!("{name}: {value}"))
            .collect::<std::collections::BTreeSet<_>>()
    };
    let ours = ["ratelimit-policy: \"per-user\";q=3;w=3600", "ratelimit: \"per-user\";r=2;t=3600"];
    let our_x = ["x-ratelimit-limit: 3", "x-ratelimit-remaining: 2", "x-ratelimit-reset: 3600"];
    let theirs =
        ["ratelimit: \"up\";r=7;t=1", "ratelimit-policy: \"up\";q=9;w=1", "ratelimit-remaining: 7"];
    let their_x = ["x-ratelimit-limit: 9", "x-ratelimit-used: 2"];
    let set = |parts: &[&[&str]]| {
        parts
            .concat()
            .into_iter()
            .chain(["retry-after: 5"])
            .map(str::to_owned)
            .collect::<std::collections::BTreeSet<_>>()
    };
    assert_eq!(send(LIMIT, "/api/x"), set(&[&ours, &our_x]));
    assert_eq!(send(LIMIT, "/other"), set(&[&theirs, &their_x]));
    let without_x = format!("{LIMIT}headers: {{x_ratelimit: false}}\n");
    assert_eq!(send(&without_x, "/api/x"), set(&[&ours, &their_x]));
}

#[test]
fn partition_key_is_an_optional_hash_of_the_key() {
    let upstream = Upstream::responding_with(OK);
    // printf %s u1 | sha256sum | head -c 32 | xxd -r -p | base64
    let pk = ";pk=:u4IDDbwryroyqQvy4geoSg==:";
    let config = format!("{LIMIT}headers: {{partition_key: true}}\n");
    let gateway = Service::gateway(&config, &[&upstream.url()]);
    let send = |gateway: &Service, user| {
        let response = request(&gateway.http, "GET", "/api/x", &[("X-User-Id", user)], b"");
        let header = |name| response.header(name).expect("always").to_owned();
        [header("ratelimit-policy"), header("ratelimit")]
    };
    let expected = ["\"per-user\";q=3;w=3600", "\"per-user\";r=2;t=3600"];
    assert_eq!(send(&gateway, "u1"), expected.map(|item| format!("{item}{pk}")));
    assert_ne!(send(&gateway, "u2"), expected.map(|item| format!("{item}{pk}")));
    // A reload applies the setting.
    let file = std::fs::read_to_string(gateway.file()).expect("the file");
    let without = file.replace("partition_key: true", "partition_key: false");
    std::fs::write(gateway.file(), without).expect("written");
    gateway.wait_until("the partition key is gone", |gateway| {
        send(gateway, "u3").iter().all(|header| !header.contains("pk="))
    });
}

#[test]
fn forwarded_headers_of_trusted_proxies_are_extended() {
    let upstream = Upstream::responding_with(OK);
    let gateway =
        Service::gateway("client_ip: {trusted_proxies: [127.0.0.1]}\n", &[&upstream.url()]);
    let headers = [
        ("X-Forwarded-For", "203.0.113.9"),
        ("X-Forwarded-Proto", "https"),
        ("X-Forwarded-Host", "example.org"),
    ];
    assert_eq!(request(&gateway.http, "GET", "/", &headers, b"").status, 200);
    let received = upstream.received().remove(0);
    assert_eq!(received.header("x-forwarded-for"), Some("203.0.113.9, 127.0.0.1"));
    assert_eq!(received.header("x-forwarded-proto"), Some("https"));
    assert_eq!(received.header("x-forwarded-host"), Some("example.org"));
}

#[test]
fn only_allowed_requests_reach_the_upstream() {
    let upstream = Upstream::responding_with(OK);
    let gateway = Service::gateway(LIMIT, &[&upstream.url()]);
    let send = |user| request(&gateway.http, "GET", "/api/items?x=y", &[("X-User-Id", user)], b"");
    for remaining in ["2", "1", "0"] {
        let response = send("u1");
        assert_eq!((response.status, response.body.as_str()), (200, "ok"));
        assert_eq!(response.header("x-ratelimit-remaining"), Some(remaining));
        assert_eq!(response.header("ratelimit-policy"), Some(r#""per-user";q=3;w=3600"#));
    }
    let denied = send("u1");
    assert_eq!(
        (denied.status, denied.header("content-type")),
        (429, Some("application/problem+json"))
    );
    assert_eq!(denied.json()["status"], 429);
    let wait: u64 = denied.header("retry-after").expect("a wait").parse().expect("seconds");
    assert!((3_500..=3_600).contains(&wait));
    assert_eq!(send("u2").status, 200);
    assert_eq!(upstream.received().len(), 4, "denied requests do not reach the upstream");
    // Other paths are not limited, and other spellings of the path do not bypass the limit.
    assert_eq!(
        request(&gateway.http, "GET", "/", &[("X-User-Id", "u1")], b"").header("ratelimit"),
        None
    );
    assert_eq!(
        request(&gateway.http, "GET", "//x/..//%61pi/items", &[("X-User-Id", "u1")], b"").status,
        429
    );
    let metrics = gateway.admin("/metrics").body;
    assert!(
        metrics.contains(r#"tidegate_decisions_total{policy="per-user",outcome="denied"} 2"#),
        "{metrics}"
    );
    let hot = gateway.admin("/v1/hot-keys").json();
    assert_eq!(hot["denied"][0]["key"], json!("u1"));
}

#[test]
fn body_of_a_denied_request_is_not_read() {
    let upstream = Upstream::responding_with(OK);
    let gateway =
        Service::gateway("policies: [{name: p, limit: 1, window: 1h}]\n", &[&upstream.url()]);
    assert_eq!(request(&gateway.http, "GET", "/", &[], b"").status, 200);
    let mut client = TcpStream::connect(&gateway.http).expect("the service listens");
    client.set_read_timeout(Some(TEST_TIMEOUT)).expect("a timeout");
    client.set_write_timeout(Some(TEST_TIMEOUT)).expect("a timeout");
    client
        .write_all(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 1073741824\r\n\r\n")
        .expect("sent");
    // The response is read although body packets are still in flight.
    let _ = client.write_all(&vec![0; 100_000]);
    let response = read_response(&mut client);
    assert_eq!((response.status, response.header("connection")), (429, Some("close")));
    let piece = vec![0; 64 * 1024];
    let mut taken = 0;
    while taken < 1 << 30 && client.write_all(&piece).is_ok() {
        taken += piece.len();
    }
    assert!(taken < 32 << 20, "{taken} bytes were read");
    assert_eq!(upstream.received().len(), 1);
    // With Expect, the client gets no 100 Continue.
    let expecting = b"POST / HTTP/1.1\r\nHost: h\r\nConnection: close\r\nExpect: 100-continue\r\n\
          Content-Length: 9\r\n\r\n";
    assert_eq!(raw(&gateway.http, expecting).status, 429);
}

#[test]
fn expect_continue_is_answered_when_the_body_is_read() {
    let upstream = Upstream::responding_with(OK);
    let gateway = Service::gateway("", &[&upstream.url()]);
    let mut client = TcpStream::connect(&gateway.http).expect("the service listens");
    client.set_read_timeout(Some(TEST_TIMEOUT)).expect("a timeout");
    let head = b"POST / HTTP/1.1\r\nHost: h\r\nConnection: close\r\nExpect: 100-continue\r\n\
                 Content-Length: 4\r\n\r\n";
    client.write_all(head).expect("sent");
    let mut interim = [0; 25];
    std::io::Read::read_exact(&mut client, &mut interim).expect("an interim response");
    assert_eq!(&interim, b"HTTP/1.1 100 Continue\r\n\r\n");
    client.write_all(b"body").expect("sent");
    assert_eq!(read_response(&mut client).status, 200);
    assert_eq!(upstream.received()[0].body, b"body");
}

#[test]
fn policies_are_reloaded_and_shutdown_drains_in_flight_requests() {
    let upstream = Upstream::start(|request, stream| {
        if request.head.starts_with("GET /slow") {
            std::thread::sleep(std::time::Duration::from_millis(300));
        }
        stream.write_all(OK)
    });
    let mut gateway =
        Service::gateway("policies: [{name: p, limit: 1, window: 1h}]\n", &[&upstream.url()]);
    let send = |gateway: &Service| request(&gateway.http, "GET", "/", &[], b"");
    assert_eq!((send(&gateway).status, send(&gateway).status), (200, 429));
    let text = std::fs::read_to_string(gateway.file()).expect("the file");
    std::fs::write(gateway.file(), text.replace("limit: 1", "limit: 1000")).expect("written");
    gateway.wait_until("the new limit holds", |gateway| send(gateway).status == 200);
    assert!(!gateway.output().contains("need a restart"), "{}", gateway.output());

    let mut slow = TcpStream::connect(&gateway.http).expect("the service listens");
    slow.write_all(b"GET /slow HTTP/1.1\r\nHost: h\r\n\r\n").expect("sent");
    gateway.wait_until("the request is in flight", |_| {
        upstream.received().iter().any(|r| r.head.starts_with("GET /slow"))
    });
    gateway.signal("TERM");
    let response = read_response(&mut slow);
    assert_eq!((response.status, response.body.as_str()), (200, "ok"));
    assert_eq!(gateway.wait_for_exit().code(), Some(0));
}

#[test]
fn policies_that_never_match_are_logged() {
    let upstream = Upstream::responding_with(OK);
    let config =
        |policy: &str| with_free_ports(&format!("attributes: [tenant]\npolicies:\n  - {policy}\n"));
    let by_tenant = "{name: by-tenant, key: [tenant], limit: 1, window: 1h}";
    let gateway = Service::gateway(&config(by_tenant), &[&upstream.url()]);
    let warned = |name: &str| {
        let is_warning = |line: &str| line.contains("policy never applies") && line.contains(name);
        gateway.output().lines().filter(|line| is_warning(line)).count()
    };
    assert_eq!(warned("by-tenant"), 1, "{}", gateway.output());
    std::fs::write(
        gateway.file(),
        config("{name: edge, match: {domain: edge}, limit: 1, window: 1h}"),
    )
    .expect("written");
    gateway.wait_until("the new policy is logged", |_| warned("edge") == 1);
    std::fs::write(gateway.file(), config("{name: by-ip, key: [ip], limit: 1, window: 1h}"))
        .expect("written");
    gateway.wait_until("the limit applies", |gateway| {
        request(&gateway.http, "GET", "/", &[], b"").header("ratelimit-policy").is_some()
    });
    assert_eq!((warned("by-tenant"), warned("by-ip")), (1, 0), "{}", gateway.output());
}
