use std::io::Write as _;
use std::net::TcpStream;

use crate::support::{PATIENCE, Service, raw, read_answer, request};
use crate::upstream::{OK, Upstream};

/// Each as it goes over the wire.
const AMBIGUOUS: &[(&str, &[u8])] = &[
    (
        "a length and chunks",
        b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ),
    (
        "chunks and a length",
        b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n",
    ),
    ("two lengths", b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\nContent-Length: 2\r\n\r\nabcd"),
    ("the same length twice", b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\nContent-Length: 4\r\n\r\nabcd"),
    ("a list of lengths", b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 4, 4\r\n\r\nabcd"),
    ("a length with a sign", b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: +4\r\n\r\nabcd"),
    ("a space before the colon", b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length : 4\r\n\r\nabcd"),
    ("an unknown encoding", b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n"),
    ("two encodings", b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n"),
    (
        "an encoding twice",
        b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ),
    ("chunks in HTTP/1.0", b"POST / HTTP/1.0\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
    ("a lone LF behind the request line", b"GET / HTTP/1.1\nHost: h\r\n\r\n"),
    ("a lone LF behind a header", b"GET / HTTP/1.1\r\nHost: h\nX: y\r\n\r\n"),
    ("a lone LF at the end", b"GET / HTTP/1.1\r\nHost: h\r\n\n"),
    ("lone LFs throughout", b"GET / HTTP/1.1\nHost: h\n\n"),
    ("a lone CR", b"GET / HTTP/1.1\r\nHost: h\r\nX: a\rY: b\r\n\r\n"),
    ("a folded header", b"GET / HTTP/1.1\r\nHost: h\r\nX: a\r\n b\r\n\r\n"),
    ("a header folded by a tab", b"GET / HTTP/1.1\r\nHost: h\r\nX: a\r\n\tb\r\n\r\n"),
    ("a space before the first header", b"GET / HTTP/1.1\r\n Host: h\r\n\r\n"),
    ("a NUL", b"GET / HTTP/1.1\r\nHost: h\r\nX: a\0b\r\n\r\n"),
    ("two hosts", b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"),
    ("no host", b"GET / HTTP/1.1\r\n\r\n"),
    ("a host that is none", b"GET / HTTP/1.1\r\nHost: a b\r\n\r\n"),
    ("a target with a host, and no Host", b"GET http://a/ HTTP/1.1\r\n\r\n"),
    ("a host with a user", b"GET / HTTP/1.1\r\nHost: u@h\r\n\r\n"),
    ("a target and a host with a user", b"GET http://u@h/ HTTP/1.1\r\nHost: u@h\r\n\r\n"),
    ("two users", b"GET / HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer a\r\nAuthorization: Bearer b\r\n\r\n"),
    ("a target for another host", b"GET http://a/ HTTP/1.1\r\nHost: b\r\n\r\n"),
    (
        "a chunk that ends with a lone LF",
        b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n1\na\r\n0\r\n\r\n",
    ),
    (
        "a chunk longer than it says",
        b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nab\r\n0\r\n\r\n",
    ),
    ("a chunk with a sign", b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n+1\r\na\r\n0\r\n\r\n"),
];

#[test]
fn requests_that_could_be_read_in_two_ways_are_refused() {
    let upstream = Upstream::answering(OK);
    let gateway = Service::gateway("", &[&upstream.url()]);
    let good = b"GET /good HTTP/1.1\r\nHost: h\r\n\r\n";
    for (what, bytes) in AMBIGUOUS {
        let before = upstream.received().len();
        let answer = raw(&gateway.http, bytes);
        assert_eq!(answer.status, 400, "{what}: {answer:?}");
        // Nor behind a good one, nor byte by byte, with one behind it that must not be heard.
        let together = [good, *bytes, b"GET /smuggled HTTP/1.1\r\nHost: h\r\n\r\n"].concat();
        for piece in [together.len(), 1] {
            let mut client = TcpStream::connect(&gateway.http).expect("it listens");
            client.set_nodelay(true).expect("a socket");
            client.set_read_timeout(Some(PATIENCE)).expect("a timeout");
            for piece in together.chunks(piece) {
                if client.write_all(piece).is_err() {
                    break;
                }
            }
            let answer = read_answer(&mut client);
            assert_eq!(answer.status, 200, "{what}: {answer:?}");
            let others = answer.body.matches("HTTP/1.1 ").count();
            assert!(answer.body.contains("HTTP/1.1 400 ") && others == 1, "{what}: {answer:?}");
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
fn what_follows_a_refused_upgrade_is_not_read_as_a_request() {
    let upstream = Upstream::answering(OK);
    let gateway = Service::gateway("", &[&upstream.url()]);
    let bytes =
        b"GET / HTTP/1.1\r\nHost: h\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\nGET /smuggled HTTP/1.1\nHost: h\n\n";
    let answer = raw(&gateway.http, bytes);
    assert_eq!((answer.status, answer.header("connection")), (200, Some("close")));
    assert_eq!(upstream.received().len(), 1);
}

#[test]
fn no_other_http_is_gone_over_to() {
    // It would grant it, and answer all that comes then.
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
            "GET / HTTP/1.1\r\nHost: h\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: {protocol}\r\n\
             HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n\r\nPRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        );
        let answer = raw(&gateway.http, bytes.as_bytes());
        assert_eq!((answer.status, answer.body.as_str()), (200, "ok"), "{protocol}: {answer:?}");
    }
    let received = upstream.received();
    assert_eq!(received.len(), 7);
    assert!(
        received.iter().all(|request| request.header("http2-settings").is_none()),
        "{received:?}"
    );
}

#[test]
fn the_upstream_is_told_the_path_that_the_policies_saw() {
    let upstream = Upstream::answering(OK);
    let policies = "policies: [{name: p, match: {path: /limited/**}, limit: 1, window: 1h}]\n";
    let gateway = Service::gateway(policies, &[&upstream.url()]);
    let ask = |path: &str| request(&gateway.http, "GET", path, &[], b"").status;
    assert_eq!((ask("/limited/a"), ask("/open/../limited/a")), (200, 429));
    for (path, told) in [
        ("/limited/../open", "/open"),
        ("/limited/%2e%2E/open?x=/../y", "/open?x=/../y"),
        ("/a/./b%2Fc//d/.%2e/?", "/a/b%2Fc//?"),
        ("/a/b%2F../.c//%41", "/a/b%2F../.c//%41"),
    ] {
        assert_eq!(ask(path), 200, "{path}");
        let head = upstream.received().pop().expect("a request").head;
        assert_eq!(head.split(' ').nth(1), Some(told), "{path}");
    }
}

#[test]
fn pipelined_requests_are_answered_in_their_order() {
    let upstream = Upstream::start(|request, stream| {
        let path = request.head.split(' ').nth(1).unwrap_or_default().to_owned();
        stream.write_all(
            format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{path}", path.len()).as_bytes(),
        )
    });
    let gateway = Service::gateway("", &[&upstream.url()]);
    let bytes = b"GET /1 HTTP/1.1\r\nHost: h\r\n\r\nPOST /2 HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\na\nb\
        POST /3 HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\n\r\n\n\r\n0\r\n\r\n\
        GET /4 HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n";
    let answer = raw(&gateway.http, bytes);
    let all = answer.body;
    let places: Vec<usize> =
        ["/1", "/2", "/3", "/4"].iter().filter_map(|path| all.find(path)).collect();
    assert!(places.len() == 4 && places.is_sorted(), "{all}");
    let bodies: Vec<Vec<u8>> =
        upstream.received().into_iter().map(|request| request.body).collect();
    assert_eq!(bodies, [&b""[..], b"a\nb", b"\r\n\n", b""]);
}

#[test]
fn no_tunnel_is_opened_to_elsewhere() {
    let upstream = Upstream::answering(OK);
    let gateway = Service::gateway("", &[&upstream.url()]);
    let answer = raw(
        &gateway.http,
        b"CONNECT other:443 HTTP/1.1\r\nHost: other:443\r\nConnection: close\r\n\r\n",
    );
    assert_eq!(answer.status, 501, "{answer:?}");
    assert!(upstream.received().is_empty());
}
