//! Another spelling of a request must not have another limit.

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use crate::support::{Service, raw};
use crate::upstream::{OK, Upstream};

/// Sends a GET over HTTP/1.1 and returns the status.
fn get(gateway: &Service, target: &str, headers: &[&str]) -> u16 {
    let start = format!("GET {target} HTTP/1.1\r\nHost: h\r\nConnection: close");
    let head = [&[start.as_str()], headers, &["", ""]].concat().join("\r\n");
    raw(&gateway.http, head.as_bytes()).status
}

/// Sends a GET over HTTP/2 by a client that does not trim header values, and returns the status.
fn get_http2(gateway: &Service, header: (&str, &str)) -> u16 {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let stream = tokio::net::TcpStream::connect(&gateway.http).await.expect("connected");
        let io = hyper_util::rt::TokioIo::new(stream);
        let executor = hyper_util::rt::TokioExecutor::new();
        let (mut client, connection) =
            hyper::client::conn::http2::handshake(executor, io).await.expect("HTTP/2");
        let connection = tokio::spawn(connection);
        let request = http::Request::get(format!("http://{}/", gateway.http))
            .header(header.0, header.1)
            .body(String::new())
            .expect("a request");
        let response = client.send_request(request).await;
        connection.abort();
        response.expect("a response").status().as_u16()
    })
}

/// Asserts that all spellings together are admitted as often as the limit of 3 allows. Spellings
/// that are refused count, too.
fn assert_one_limit(spellings: &[&str], send: impl Fn(&str) -> u16) {
    let statuses: Vec<u16> =
        (0..3).flat_map(|_| spellings).map(|spelling| send(spelling)).collect();
    assert!(statuses[..3].iter().all(|status| [200, 400].contains(status)), "{statuses:?}");
    assert!(
        statuses[0] == 200 && statuses[3..].iter().all(|status| *status == 429),
        "{statuses:?}"
    );
}

#[test]
fn head_has_the_limit_of_get() {
    let upstream = Upstream::responding_with(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
    let policy = "policies: [{name: p, match: {method: GET}, limit: 3, window: 24h}]\n";
    let gateway = Service::gateway(policy, &[&upstream.url()]);
    assert_one_limit(&["GET", "HEAD"], |method| {
        let head = format!("{method} / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n");
        raw(&gateway.http, head.as_bytes()).status
    });
}

#[test]
fn spaces_around_an_http2_header_value_are_no_other_key() {
    let upstream = Upstream::responding_with(OK);
    for name in ["x-user-id", "authorization"] {
        let policy =
            format!("policies: [{{name: p, key: [header.{name}], limit: 3, window: 24h}}]\n");
        let gateway = Service::gateway(&policy, &[&upstream.url()]);
        let spellings = ["Bearer X", "Bearer X ", " Bearer X", "Bearer X\t", "  Bearer X"];
        assert_one_limit(&spellings, |value| get_http2(&gateway, (name, value)));
        assert_eq!(get_http2(&gateway, (name, " Y")), 400, "malformed by RFC 9113, 8.2.1");
    }
}

#[test]
fn schemes_of_credentials_and_spaces_after_them_are_no_other_key() {
    let upstream = Upstream::responding_with(OK);
    let policy = "policies: [{name: p, key: [header.authorization], limit: 3, window: 24h}]\n";
    let gateway = Service::gateway(policy, &[&upstream.url()]);
    let spellings = ["Bearer X", "bearer X", "BEARER X", "Bearer  X", "Bearer \t X"];
    let send = |value: &str| get(&gateway, "/", &[&format!("Authorization: {value}")]);
    assert_one_limit(&spellings, send);
}

#[test]
fn spellings_of_a_cookie_are_no_other_key() {
    let upstream = Upstream::responding_with(OK);
    let policy = "
policies: [{name: p, key: [cookie.session], missing_key: deny, limit: 3, window: 24h}]
";
    let gateway = Service::gateway(policy, &[&upstream.url()]);
    let spellings = [
        "session=X",
        "session =X",
        "session=  X",
        "session=\"X\"",
        "a=b;session=X",
        "session=%58",
        "session=\"\\130\"",
        "session=X\u{a0}",
        "\u{a0}session\u{2003}=\u{3000}X",
        "session=\"\\04558\"",
    ];
    let send = |value: &str| get(&gateway, "/", &[&format!("Cookie: {value}")]);
    assert_one_limit(&spellings, send);
    assert_eq!(send("session=Y; session=Z"), 400, "frameworks read the first or the last");
    assert_eq!(send("session=Y; session=Y"), 200);
}

#[test]
fn duplicates_of_a_key_are_refused() {
    let upstream = Upstream::responding_with(OK);
    let policy = "
policies:
  - {name: header, match: {path: /h}, key: [header.x-user-id], limit: 3, window: 24h}
  - {name: query, match: {path: /q}, key: [query.api_key], limit: 3, window: 24h}
";
    let gateway = Service::gateway(policy, &[&upstream.url()]);
    assert_eq!(get(&gateway, "/h", &["X-User-Id: a", "X-User-Id: b"]), 400);
    assert_eq!(get(&gateway, "/h", &["X-User-Id: a"]), 200);
    assert_eq!(get(&gateway, "/q?api_key=a&api_key=b", &[]), 400);
    assert_eq!(get(&gateway, "/q?api_key=a&%61pi_key=b", &[]), 400);
    assert_eq!(get(&gateway, "/q?api_key=a&api_key=a", &[]), 200);
    assert_eq!(get(&gateway, "/other?api_key=a&api_key=b", &["X-User-Id: a", "X-User-Id: b"]), 200);
}

/// A client that lists the key in `Connection` has it removed, and would be counted by a value that
/// the upstream never sees.
#[test]
fn policies_do_not_count_by_headers_that_are_not_forwarded() {
    let upstream = Upstream::responding_with(OK);
    let policy = "
policies: [{name: p, key: [header.x-user-id], missing_key: deny, limit: 3, window: 24h}]
";
    let gateway = Service::gateway(policy, &[&upstream.url()]);
    for options in ["X-User-Id", "close, x-user-id", "x-user-id, upgrade"] {
        let connection = format!("Connection: {options}");
        assert_eq!(get(&gateway, "/", &["X-User-Id: a", &connection]), 429, "{options}");
    }
    assert_eq!(get(&gateway, "/", &["X-User-Id: a"]), 200);
    assert_eq!(upstream.received().len(), 1);
}

#[test]
fn headers_that_frameworks_mistake_for_others_are_not_forwarded() {
    let upstream = Upstream::responding_with(OK);
    let policy = "policies: [{name: p, match: {method: POST}, limit: 3, window: 24h}]\n";
    let headers = [
        "X_User_Id: other",
        "X_Forwarded_For: 6.6.6.6",
        "X-Original-URL: /admin",
        "X-Rewrite-URL: /admin",
        "X-HTTP-Method-Override: POST",
        "X-Other: kept",
    ];
    let gateway = Service::gateway(policy, &[&upstream.url()]);
    assert_eq!(get(&gateway, "/", &headers), 200);
    let head = upstream.received().remove(0).head.to_ascii_lowercase();
    for dropped in ["x_user_id", "x_forwarded_for", "-url:", "method-override"] {
        assert!(!head.contains(dropped), "{dropped} in {head}");
    }
    assert!(head.contains("x-other: kept"), "{head}");
    let kept = "gateway: {underscore_headers: true}\n";
    let gateway = Service::gateway(kept, &[&upstream.url()]);
    assert_eq!(get(&gateway, "/", &headers), 200);
    let head = upstream.received().remove(1).head.to_ascii_lowercase();
    assert!(head.contains("x_user_id: other") && head.contains("method-override: post"), "{head}");
}

#[test]
fn paths_that_servers_read_differently_are_rejected_unless_configured() {
    let upstream = Upstream::responding_with(OK);
    let policy = |paths: &str| {
        format!(
            "{paths}policies: [{{name: p, match: {{path: /limited/**}}, limit: 3, window: 24h}}]\n"
        )
    };
    let gateway = Service::gateway(&policy(""), &[&upstream.url()]);
    for target in ["/limited%2fx", "/a%5cb", "/limited;x", "/open/..;/limited/x"] {
        assert_eq!(get(&gateway, target, &[]), 400, "{target}");
    }
    assert_eq!(get(&gateway, "/other?x=%2f;", &[]), 200, "the query is not the path's");
    let long = format!("/{}", "a/".repeat(9_000));
    assert_eq!(get(&gateway, &long, &[]), 414);
    assert_eq!(upstream.received().len(), 1);

    let decoding = "paths: {encoded_slashes: decode, parameters: decode, case_insensitive: true}\n";
    let gateway = Service::gateway(&policy(decoding), &[&upstream.url()]);
    let spellings =
        ["/limited/x", "/limited%2Fx", "/LIMITED/x", "/limited;a=b/x", "/o/..;/limited/x"];
    assert_one_limit(&spellings, |target| get(&gateway, target, &[]));
    let targets: Vec<String> = upstream.received()[1..]
        .iter()
        .map(|received| received.head.split(' ').nth(1).expect("a target").to_owned())
        .collect();
    assert_eq!(targets, ["/limited/x", "/limited/x", "/LIMITED/x"], "as it was matched");

    let keeping = "paths: {encoded_slashes: keep, parameters: keep, merge_slashes: false}\n";
    let gateway = Service::gateway(&policy(keeping), &[&upstream.url()]);
    for target in ["/limited%2fx", "/limited;x", "//limited/x"] {
        for _ in 0..4 {
            assert_eq!(get(&gateway, target, &[]), 200, "{target}");
        }
    }
}

/// Applications decode these codes, so they see one path.
#[test]
fn characters_with_and_without_a_code_are_one_path() {
    let upstream = Upstream::responding_with(OK);
    for (pattern, spellings) in [
        ("/users:login", ["/users:login", "/users%3Alogin", "/users%3alogin"]),
        ("/caf%C3%A9/*", ["/café/x", "/caf%C3%A9/x", "/caf%c3%a9/x"]),
        ("/{id}", ["/{id}", "/%7Bid%7D", "/%7bid}"]),
    ] {
        let policy = format!(
            "policies: [{{name: p, match: {{path: '{pattern}'}}, limit: 3, window: 24h}}]\n"
        );
        let gateway = Service::gateway(&policy, &[&upstream.url()]);
        assert_one_limit(&spellings, |target| get(&gateway, target, &[]));
    }
}

/// The upstream receives the very path that the policies count by: requests that it receives with
/// the same path share one count.
#[test]
fn matched_path_is_the_forwarded_path() {
    let upstream = Upstream::responding_with(OK);
    let policy = "
paths: {encoded_slashes: keep, parameters: keep}
policies: [{name: p, match: {path: /**}, key: [path], limit: 1, window: 24h}]
";
    let gateway = Service::gateway(policy, &[&upstream.url()]);
    let send = |target: &str| get(&gateway, target, &[]);
    let mut runner = TestRunner::new(Config { cases: 600, ..Config::default() });
    let targets = r"/(/|\.|%2e|%2E|a|%61|b|%2F|%|2e|;|%32|%%32e|:|%3A|é|%C3%A9|%2a|\*){0,10}";
    let result = runner.run(&targets.prop_map(|target: String| target), |target| {
        let status = send(&target);
        prop_assert!([200, 429].contains(&status), "{} for {}", status, target);
        Ok(())
    });
    result.expect("every target is decided");
    let mut paths: Vec<String> = upstream
        .received()
        .iter()
        .map(|received| {
            let target = received.head.split(' ').nth(1).expect("a target");
            target.trim_end_matches('/').to_owned()
        })
        .collect();
    let forwarded = paths.len();
    paths.sort_unstable();
    paths.dedup();
    assert_eq!(paths.len(), forwarded, "one request per path");
    for path in &paths {
        let again = if path.is_empty() { "/" } else { path };
        assert_eq!(send(again), 429, "{again} is in its normal form and has its count");
    }
}
