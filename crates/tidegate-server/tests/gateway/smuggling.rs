use std::io::Write as _;
use std::net::TcpStream;

use crate::frames::{END_HEADERS, END_STREAM, Frames, GET, HEADERS, field};
use crate::support::{Service, TEST_TIMEOUT, raw, read_response, request};
use crate::upstream::{OK, Upstream};

/// Ambiguous requests as raw bytes.
const AMBIGUOUS: &[(&str, &[u8])] = &[
    (
        "a length and chunks",
        b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n\
          0\r\n\r\n",
    ),
    (
        "chunks and a length",
        b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n\
          0\r\n\r\n",
    ),
    (
        "two lengths",
        b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\nContent-Length: 2\r\n\
                      \r\nabcd",
    ),
    (
        "the same length twice",
        b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\
                                Content-Length: 4\r\n\r\nabcd",
    ),
    ("a list of lengths", b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 4, 4\r\n\r\nabcd"),
    ("a length with a sign", b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: +4\r\n\r\nabcd"),
    ("a space before the colon", b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length : 4\r\n\r\nabcd"),
    (
        "an unknown encoding",
        b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: xchunked\r\n\r\n\
                              0\r\n\r\n",
    ),
    (
        "two encodings",
        b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked, identity\r\n\
                        \r\n0\r\n\r\n",
    ),
    (
        "an encoding twice",
        b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: \
          chunked\r\n\r\n0\r\n\r\n",
    ),
    (
        "chunks in HTTP/1.0",
        b"POST / HTTP/1.0\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n\
                             0\r\n\r\n",
    ),
    ("a bare LF behind the request line", b"GET / HTTP/1.1\nHost: h\r\n\r\n"),
    ("a bare LF behind a header", b"GET / HTTP/1.1\r\nHost: h\nX: y\r\n\r\n"),
    ("a bare LF at the end", b"GET / HTTP/1.1\r\nHost: h\r\n\n"),
    ("bare LFs throughout", b"GET / HTTP/1.1\nHost: h\n\n"),
    ("a bare CR", b"GET / HTTP/1.1\r\nHost: h\r\nX: a\rY: b\r\n\r\n"),
    ("a folded header", b"GET / HTTP/1.1\r\nHost: h\r\nX: a\r\n b\r\n\r\n"),
    ("a header folded by a tab", b"GET / HTTP/1.1\r\nHost: h\r\nX: a\r\n\tb\r\n\r\n"),
    ("a space before the first header", b"GET / HTTP/1.1\r\n Host: h\r\n\r\n"),
    ("a NUL", b"GET / HTTP/1.1\r\nHost: h\r\nX: a\0b\r\n\r\n"),
    ("an asterisk as the target of a GET", b"GET * HTTP/1.1\r\nHost: h\r\n\r\n"),
    ("two hosts", b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"),
    ("no host", b"GET / HTTP/1.1\r\n\r\n"),
    ("an invalid host", b"GET / HTTP/1.1\r\nHost: a b\r\n\r\n"),
    ("a target with a host, and no Host", b"GET http://a/ HTTP/1.1\r\n\r\n"),
    ("a host with a user", b"GET / HTTP/1.1\r\nHost: u@h\r\n\r\n"),
    ("a target and a host with a user", b"GET http://u@h/ HTTP/1.1\r\nHost: u@h\r\n\r\n"),
    (
        "two users",
        b"GET / HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer a\r\nAuthorization: \
                    Bearer b\r\n\r\n",
    ),
    ("a target for another host", b"GET http://a/ HTTP/1.1\r\nHost: b\r\n\r\n"),
    (
        "a chunk that ends with a bare LF",
        b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n1\na\r\n0\r\n\r\n",
    ),
    (
        "a chunk longer than its size",
        b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nab\r\n0\r\n\r\n",
    ),
    (
        "a chunk with a sign",
        b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n\
                              +1\r\na\r\n0\r\n\r\n",
    ),
];

#[test]
fn ambiguous_requests_are_rejected() {
    let upstream = Upstream::responding_with(OK);
    let gateway = Service::gateway("", &[&upstream.url()]);
    let good = b"GET /good HTTP/1.1\r\nHost: h\r\n\r\n";
    for (what, bytes) in AMBIGUOUS {
        let before = upstream.received().len();
        let response = raw(&gateway.http, bytes);
        assert_eq!(response.status, 400, "{what}: {response:?}");
        // Also after a valid request, and byte by byte, with another request behind it that must
        // not be handled.
        let together = [good, *bytes, b"GET /smuggled HTTP/1.1\r\nHost: h\r\n\r\n"].concat();
        for piece in [together.len(), 1] {
            let mut client = TcpStream::connect(&gateway.http).expect("the service listens");
            client.set_nodelay(true).expect("a socket");
            client.set_read_timeout(Some(TEST_TIMEOUT)).expect("a timeout");
            for piece in together.chunks(piece) {
                if client.write_all(piece).is_err() {
                    break;
                }
            }
            let response = read_response(&mut client);
            assert_eq!(response.status, 200, "{what}: {response:?}");
            let others = response.body.matches("HTTP/1.1 ").count();
            assert!(response.body.contains("HTTP/1.1 400 ") && others == 1, "{what}: {response:?}");
        }
        let received = upstream.received();
        let new: Vec<&str> = received[before..]
            .iter()
            .map(|request| request.head.lines().next().unwrap_or(""))
            .collect();
        assert_eq!(new, ["GET /good HTTP/1.1"; 2], "{what}");
    }
}

#[test]
fn content_length_over_http2_must_be_a_number() {
    let upstream = Upstream::responding_with(OK);
    let gateway = Service::gateway("", &[&upstream.url()]);
    for length in ["", "+0", "0x0", "0, 0"] {
        let mut client = Frames::connect(&gateway.http, 65_535);
        let block = [GET, &field("content-length", length)].concat();
        client.send(HEADERS, END_HEADERS | END_STREAM, 1, &block);
        // A response, or the stream is reset.
        client.next();
    }
    assert!(upstream.received().is_empty(), "{:?}", upstream.received());
}

#[test]
fn bytes_after_a_rejected_upgrade_are_not_parsed() {
    let upstream = Upstream::responding_with(OK);
    let gateway = Service::gateway("", &[&upstream.url()]);
    let bytes =
        b"GET / HTTP/1.1\r\nHost: h\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\nGET /smuggled \
          HTTP/1.1\nHost: h\n\n";
    let response = raw(&gateway.http, bytes);
    assert_eq!((response.status, response.header("connection")), (200, Some("close")));
    assert_eq!(upstream.received().len(), 1);
}

#[test]
fn upgrades_to_other_http_versions_are_not_forwarded() {
    // This upstream would accept the upgrade and respond to everything after it.
    let upstream = Upstream::start(|request, stream| {
        let granted = request.header("upgrade").is_some();
        stream.write_all(if granted {
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\n\r\n"
        } else {
            OK
        })
    });
    let gateway = Service::gateway("", &[&upstream.url()]);
    for protocol in [
        "h2c",
        "H2C",
        "websocket, h2c",
        "websocket\r\nUpgrade: h2c",
        "h2c, websocket",
        "HTTP/2.0",
        "TLS/1.2",
    ] {
        let bytes = format!(
            "GET / HTTP/1.1\r\nHost: h\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: \
             {protocol}\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n\r\nPRI * HTTP/2.0\r\n\r\n\
             SM\r\n\r\n"
        );
        let response = raw(&gateway.http, bytes.as_bytes());
        assert_eq!(
            (response.status, response.body.as_str()),
            (200, "ok"),
            "{protocol}: {response:?}"
        );
    }
    let received = upstream.received();
    assert_eq!(received.len(), 7);
    assert!(
        received.iter().all(|request| request.header("http2-settings").is_none()),
        "{received:?}"
    );
}

#[test]
fn upstream_gets_the_path_that_the_policies_matched() {
    let upstream = Upstream::responding_with(OK);
    let policies = "paths: {encoded_slashes: keep}\n\
                    policies: [{name: p, match: {path: /limited/**}, limit: 1, window: 1h}]\n";
    let gateway = Service::gateway(policies, &[&upstream.url()]);
    let send = |path: &str| request(&gateway.http, "GET", path, &[], b"").status;
    assert_eq!((send("/limited/a"), send("/open/../limited/a")), (200, 429));
    for (path, forwarded) in [
        ("/limited/../open", "/open"),
        ("/limited/%2e%2E/open?x=/../y", "/open?x=/../y"),
        ("/a/./b%2fc//d/.%2e/?", "/a/b%2Fc/?"),
        ("/a/b%2F../.c//%41", "/a/b%2F../.c/A"),
    ] {
        assert_eq!(send(path), 200, "{path}");
        let head = upstream.received().pop().expect("a request").head;
        assert_eq!(head.split(' ').nth(1), Some(forwarded), "{path}");
    }
}

#[test]
fn pipelined_requests_are_answered_in_order() {
    let upstream = Upstream::start(|request, stream| {
        let path = request.head.split(' ').nth(1).unwrap_or_default().to_owned();
        stream.write_all(
            format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{path}", path.len()).as_bytes(),
        )
    });
    let gateway = Service::gateway("", &[&upstream.url()]);
    let bytes = b"GET /1 HTTP/1.1\r\nHost: h\r\n\r\nPOST /2 HTTP/1.1\r\nHost: h\r\n\
                  Content-Length: 3\r\n\r\na\nbPOST /3 HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: \
                  chunked\r\n\r\n3;x=y\r\n\r\n\n\r\n0\r\n\r\nGET /4 HTTP/1.1\r\nHost: h\r\n\
                  Connection: close\r\n\r\n";
    let response = raw(&gateway.http, bytes);
    let all = response.body;
    let places: Vec<usize> =
        ["/1", "/2", "/3", "/4"].iter().filter_map(|path| all.find(path)).collect();
    assert!(places.len() == 4 && places.is_sorted(), "{all}");
    let bodies: Vec<Vec<u8>> =
        upstream.received().into_iter().map(|request| request.body).collect();
    assert_eq!(bodies, [&b""[..], b"a\nb", b"\r\n\n", b""]);
}

#[test]
fn connect_is_rejected() {
    let upstream = Upstream::responding_with(OK);
    let gateway = Service::gateway("", &[&upstream.url()]);
    let response = raw(
        &gateway.http,
        b"CONNECT other:443 HTTP/1.1\r\nHost: other:443\r\nConnection: close\r\n\r\n",
    );
    assert_eq!(response.status, 501, "{response:?}");
    assert!(upstream.received().is_empty());
}
