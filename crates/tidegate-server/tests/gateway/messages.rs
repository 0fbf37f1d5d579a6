use std::fmt::Write as _;
use std::io::Write as _;
use std::net::{TcpListener, TcpStream};
use std::process::Command;

use crate::frames::{
    CONTINUATION, DATA, END_HEADERS, END_STREAM, Frames, GET, HEADERS, STATUS_200, field,
};
use crate::support::{Service, TEST_TIMEOUT, raw, read_response, request};
use crate::upstream::{OK, Upstream};

/// HTTP/2 upstream that answers each complete request with these frames: kind, flags, payload.
/// Returns its URL.
fn http2_upstream(answer: &[(u8, u8, Vec<u8>)]) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let url = format!("h2c://{}", listener.local_addr().expect("bound"));
    let answer = answer.to_vec();
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let answer = answer.clone();
            std::thread::spawn(move || {
                let Some(mut frames) = Frames::accept(stream) else { return };
                while let Some(frame) = frames.next_frame() {
                    if frame.flags & END_STREAM > 0 {
                        for (kind, flags, payload) in &answer {
                            frames.send(*kind, *flags, frame.stream, payload);
                        }
                    }
                }
            });
        }
    });
    url
}

/// Sends a GET over HTTP/2 with prior knowledge, and returns all that curl prints.
fn curl_http2(address: &str) -> String {
    curl(&["-i", "--http2-prior-knowledge", &format!("http://{address}/")])
}

fn curl(arguments: &[&str]) -> String {
    let output = Command::new("curl").args(["-s", "-m", "20"]).args(arguments).output();
    let output = output.expect("curl runs");
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).expect("text").to_ascii_lowercase()
}

#[test]
fn informational_responses_do_not_replace_the_final_one() {
    let http1 = Upstream::responding_with(
        b"HTTP/1.1 103 Early Hints\r\nLink: </a.css>; rel=preload\r\n\r\nHTTP/1.1 102 \
          Processing\r\n\r\nHTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\n\r\n\
          HTTP/1.1 201 Created\r\nContent-Length: 2\r\nX-Own: a\r\n\r\nok",
    );
    let hints = [field(":status", "103"), field("link", "</a.css>; rel=preload")].concat();
    let http2 = http2_upstream(&[
        (HEADERS, END_HEADERS, hints.clone()),
        (HEADERS, END_HEADERS, hints),
        (HEADERS, END_HEADERS, [field(":status", "201"), field("x-own", "a")].concat()),
        (DATA, END_STREAM, b"ok".to_vec()),
    ]);
    for upstream in [http1.url(), http2] {
        let gateway = Service::gateway("", &[&upstream]);
        for _ in 0..3 {
            let response = request(&gateway.http, "GET", "/", &[], b"");
            assert_eq!(response.status, 201, "{upstream}: {response:?}");
            assert_eq!(response.header("x-own"), Some("a"), "{upstream}");
            assert_eq!(response.header("link"), None, "{upstream}");
            assert!(response.body.contains("ok"), "{upstream}: {response:?}");
            let over_http2 = curl_http2(&gateway.http);
            assert!(over_http2.starts_with("http/2 201"), "{upstream}: {over_http2}");
            assert!(over_http2.ends_with("\r\n\r\nok"), "{upstream}: {over_http2}");
        }
    }
    assert_eq!(http1.connections(), 1, "the connection is reused");
}

#[test]
fn endless_informational_responses_end_with_the_header_timeout() {
    let upstream = Upstream::start(|_, stream| {
        loop {
            stream.write_all(b"HTTP/1.1 102 Processing\r\n\r\n")?;
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    });
    let gateway = Service::gateway("gateway: {header_timeout: 1s}\n", &[&upstream.url()]);
    assert_eq!(request(&gateway.http, "GET", "/", &[], b"").status, 504);
}

const CHUNKED_WITH_TRAILERS: &[u8] = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n\
                                       ok\r\n0\r\nX-Sum: 2\r\nX-Forwarded-For: 6.6.6.6\r\n\r\n";

/// Returns an HTTP/1.1 and an HTTP/2 upstream whose trailers are not announced.
fn upstreams_with_trailers() -> [String; 2] {
    let http2 = http2_upstream(&[
        (HEADERS, END_HEADERS, STATUS_200.to_vec()),
        (DATA, 0, b"ok".to_vec()),
        (HEADERS, END_HEADERS | END_STREAM, field("x-sum", "2")),
    ]);
    [Upstream::responding_with(CHUNKED_WITH_TRAILERS).url(), http2]
}

#[test]
fn trailers_need_no_announcement_towards_http2_clients() {
    for upstream in upstreams_with_trailers() {
        let gateway = Service::gateway("", &[&upstream]);
        let mut client = Frames::connect(&gateway.http, 65_535);
        client.send(HEADERS, END_HEADERS | END_STREAM, 1, GET);
        let mut kinds = Vec::new();
        let trailers = loop {
            let (kind, flags, payload) = client.next();
            kinds.push(kind);
            if flags & END_STREAM > 0 {
                break payload;
            }
        };
        assert_eq!(kinds, [HEADERS, DATA, HEADERS], "{upstream}");
        // curl shows them decoded.
        let shown = curl_http2(&gateway.http);
        assert!(
            shown.ends_with("okx-sum: 2\r\n\r\n") || shown.ends_with("x-sum: 2\r\n"),
            "{shown}"
        );
        assert!(!shown.contains("6.6.6.6") && !trailers.is_empty(), "{shown}");
    }
}

#[test]
fn http1_clients_get_complete_responses_without_unannounced_trailers() {
    for upstream in upstreams_with_trailers() {
        let gateway = Service::gateway("", &[&upstream]);
        for te in ["", "TE: trailers\r\n"] {
            let bytes = format!("GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n{te}\r\n");
            let response = raw(&gateway.http, bytes.as_bytes());
            assert_eq!(response.body, "2\r\nok\r\n0\r\n\r\n", "{upstream} {te}");
        }
    }
}

#[test]
fn status_of_a_grpc_call_reaches_http1_clients() {
    let http2 = http2_upstream(&[
        (
            HEADERS,
            END_HEADERS,
            [STATUS_200, &field("content-type", "application/grpc+proto")].concat(),
        ),
        (DATA, 0, b"message".to_vec()),
        (
            HEADERS,
            END_HEADERS | END_STREAM,
            [field("grpc-status", "5"), field("grpc-message", "gone"), field("x-own", "1")]
                .concat(),
        ),
    ]);
    let gateway = Service::gateway("", &[&http2]);
    let head = "GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n";
    let response = raw(&gateway.http, format!("{head}TE: trailers\r\n\r\n").as_bytes());
    assert_eq!(
        response.header("trailer"),
        Some("grpc-status, grpc-message, grpc-status-details-bin")
    );
    let ending = "7\r\nmessage\r\n0\r\ngrpc-status: 5\r\ngrpc-message: gone\r\n\r\n";
    assert_eq!(response.body, ending);
    let response = raw(&gateway.http, format!("{head}\r\n").as_bytes());
    assert_eq!(response.header("trailer"), None);
    assert_eq!(response.body, "7\r\nmessage\r\n0\r\n\r\n");
}

#[test]
fn request_trailers_need_no_announcement_towards_http2_upstreams() {
    let upstream = Upstream::responding_with(OK);
    // The second gateway is the HTTP/2 upstream; it announces nothing either.
    let second = Service::gateway("", &[&upstream.url()]);
    let gateway = Service::gateway("", &[&format!("h2c://{}", second.http)]);
    let send = |announcement: &str| {
        let bytes = format!(
            "POST / HTTP/1.1\r\nHost: h\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\
             {announcement}\r\n1\r\na\r\n0\r\nX-Sum: 1\r\n\r\n"
        );
        assert_eq!(raw(&gateway.http, bytes.as_bytes()).status, 200);
        let received = upstream.received().pop().expect("a request");
        (received.body, received.trailers.to_ascii_lowercase())
    };
    assert_eq!(send("Trailer: X-Sum\r\n"), (b"a".to_vec(), "x-sum: 1\r\n\r\n".to_owned()));
    assert_eq!(send(""), (b"a".to_vec(), "\r\n".to_owned()), "an HTTP/1.1 upstream gets none");
}

#[test]
fn trace_is_refused() {
    let upstream = Upstream::responding_with(OK);
    let gateway = Service::gateway("", &[&upstream.url()]);
    let response = request(&gateway.http, "TRACE", "/", &[("X-Secret", "s")], b"");
    assert_eq!(response.status, 405, "{response:?}");
    assert_eq!(
        response.header("allow"),
        Some("GET, HEAD, POST, PUT, DELETE, PATCH, OPTIONS"),
        "{response:?}"
    );
    assert!(!response.body.contains("X-Secret"));
    assert!(upstream.received().is_empty());
}

#[test]
fn responses_to_head_requests_have_no_body() {
    let upstream = Upstream::start(|request, stream| {
        if request.head.starts_with("HEAD /broken") {
            return stream.write_all(b"nonsense\r\n\r\n");
        }
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n")
    });
    let policy = "policies: [{name: p, match: {path: /limited}, limit: 1, window: 1h}]\n";
    let gateway = Service::gateway(policy, &[&upstream.url()]);
    let head = |path: &str, version: &str| {
        let url = format!("http://{}{path}", gateway.http);
        let head = curl(&["--head", version, &url]);
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
        let length = length.and_then(|length| length.parse::<u32>().ok()).unwrap_or(0);
        (head.split(' ').nth(1).map(|status| status.trim().to_owned()).expect("a status"), length)
    };
    let ok = ("200".to_owned(), 7);
    assert_eq!(head("/limited", "--http1.1"), ok);
    let denied = head("/limited", "--http1.1");
    assert!(denied.0 == "429" && denied.1 > 0, "{denied:?}");
    assert_eq!(head("/limited", "--http2-prior-knowledge"), denied);
    assert_eq!(head("/broken", "--http2-prior-knowledge").0, "502");
    assert_eq!(head("/other", "--http2-prior-knowledge"), ok);
}

#[test]
fn sloppy_responses_are_corrected() {
    let upstream = Upstream::start(|request, stream| {
        let mut words = request.head.split(' ');
        let method = words.next().expect("a method");
        let head: &[u8] = match words.next().expect("a path") {
            "/repeated" => b"Content-Length: 2\r\nContent-Length: 2\r\n",
            "/list" => b"Content-Length: 2, 2\r\n",
            "/contradictory" => b"Content-Length: 2\r\nContent-Length: 3\r\n",
            "/space" => b"X-Own : a\r\nContent-Length: 2\r\n",
            "/folded" => b"X-Own: a\r\n b\r\nContent-Length: 2\r\n",
            other => panic!("{other}"),
        };
        let body = if method == "HEAD" { "" } else { "ok" };
        stream.write_all(&[b"HTTP/1.1 200 OK\r\n", head, b"\r\n", body.as_bytes()].concat())
    });
    let gateway = Service::gateway("", &[&upstream.url()]);
    for method in ["HEAD", "GET"] {
        let body = if method == "HEAD" { "" } else { "ok" };
        for path in ["/repeated", "/list", "/space", "/folded"] {
            let bytes = format!("{method} {path} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n");
            let response = raw(&gateway.http, bytes.as_bytes());
            let lengths = response.headers.iter().filter(|(name, _)| name == "content-length");
            let lengths: Vec<&str> = lengths.map(|(_, value)| value.as_str()).collect();
            assert_eq!((response.status, response.body.as_str()), (200, body), "{method} {path}");
            assert_eq!(lengths, ["2"], "{method} {path}");
            let own = response.header("x-own").map(|value| value.split_whitespace().collect());
            let expected: Option<Vec<&str>> = match path {
                "/space" => Some(vec!["a"]),
                "/folded" => Some(vec!["a", "b"]),
                _ => None,
            };
            assert_eq!(own, expected, "{method} {path}");
            let url = format!("http://{}{path}", gateway.http);
            let option = if method == "HEAD" { "--head" } else { "--include" };
            assert!(curl(&["--http2-prior-knowledge", option, &url]).starts_with("http/2 200"));
        }
    }
    assert_eq!(request(&gateway.http, "GET", "/contradictory", &[], b"").status, 502);
    let head =
        raw(&gateway.http, b"HEAD /contradictory HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n");
    assert_eq!((head.status, head.header("content-length")), (200, None));
}

/// Returns a response with this number of headers besides its length.
fn response_with_headers(count: usize, value: &str) -> String {
    let mut text = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n".to_owned();
    for number in 0..count {
        let _ = write!(text, "X-Header-{number}: {value}\r\n");
    }
    text + "\r\nok"
}

#[test]
fn responses_may_have_many_headers_up_to_a_bound() {
    let upstream = Upstream::start(|request, stream| {
        let mut words = request.header("x-want").expect("a number").split(' ');
        let count = words.next().and_then(|word| word.parse().ok()).expect("a number");
        let length = words.next().and_then(|word| word.parse().ok()).expect("a number");
        stream.write_all(response_with_headers(count, &"v".repeat(length)).as_bytes())
    });
    let gateway = Service::gateway("", &[&upstream.url()]);
    let get = |want: &str| request(&gateway.http, "GET", "/", &[("X-Want", want)], b"");
    for count in [99, 100, 150, 255] {
        let response = get(&format!("{count} 10"));
        assert_eq!(response.status, 200, "{count}");
        let forwarded = response.headers.iter().filter(|(name, _)| name.starts_with("x-header-"));
        assert_eq!(forwarded.count(), count);
    }
    let response = get("300 10");
    assert_eq!(response.status, 502);
    assert_eq!(
        response.json()["detail"],
        "the upstream's response has more than 256 headers or 400 KiB of them",
        "{response:?}"
    );
    // A request that is not safe is never sent again for the sake of its response.
    let gateway = Service::gateway("", &[&upstream.url()]);
    let before = upstream.received().len();
    let response = request(&gateway.http, "DELETE", "/", &[("X-Want", "150 10")], b"");
    assert_eq!((response.status, upstream.received().len()), (200, before + 1));
    // Large heads are bounded, too: about 400 KiB.
    assert_eq!(get("100 2000").status, 200);
    assert_eq!(get("250 8000").status, 502);
}

#[test]
fn http2_responses_may_have_large_heads_up_to_a_bound() {
    let gateway_with = |fields: usize| {
        let all: Vec<u8> = (0..fields)
            .flat_map(|number| field(&format!("x-header-{number}"), &"v".repeat(100)))
            .collect();
        let pieces: Vec<&[u8]> = all.chunks(16_000).collect();
        let mut answer = vec![(HEADERS, END_STREAM, STATUS_200.to_vec())];
        for (number, piece) in pieces.iter().enumerate() {
            let flags = if number + 1 == pieces.len() { END_HEADERS } else { 0 };
            answer.push((CONTINUATION, flags, piece.to_vec()));
        }
        Service::gateway("", &[&http2_upstream(&answer)])
    };
    for fields in [150, 500, 1_500] {
        let response = request(&gateway_with(fields).http, "GET", "/", &[], b"");
        assert_eq!(response.status, 200, "{fields}");
        let forwarded = response.headers.iter().filter(|(name, _)| name.starts_with("x-header-"));
        assert_eq!(forwarded.count(), fields);
    }
    let gateway = gateway_with(5_000);
    assert_eq!(request(&gateway.http, "GET", "/", &[], b"").status, 502);
}

#[test]
fn requests_with_too_many_headers_get_431() {
    let upstream = Upstream::responding_with(OK);
    let gateway = Service::gateway("", &[&upstream.url()]);
    let send = |count: usize| {
        let mut client = TcpStream::connect(&gateway.http).expect("the service listens");
        client.set_read_timeout(Some(TEST_TIMEOUT)).expect("a timeout");
        let mut text = "GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n".to_owned();
        for number in 2..count {
            let _ = write!(text, "X-Header-{number}: v\r\n");
        }
        client.write_all((text + "\r\n").as_bytes()).expect("sent");
        read_response(&mut client).status
    };
    assert_eq!([send(90), send(100), send(101), send(400)], [200, 200, 431, 431]);
}
