use crate::frames::{DATA, END_HEADERS, END_STREAM, Frames, GET, HEADERS, STATUS_200, field};
use crate::support::{Service, raw, request};
use crate::upstream::{OK, Upstream};

#[test]
fn get_body_without_a_length_is_refused() {
    let upstream = Upstream::responding_with(OK);
    let gateway = Service::gateway("", &[&upstream.url()]);
    for method in ["GET", "HEAD"] {
        let text = format!(
            "{method} / HTTP/1.1\r\nHost: h\r\nConnection: close\r\nTransfer-Encoding: \
             chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
        );
        let response = raw(&gateway.http, text.as_bytes());
        assert_eq!(response.status, 411, "{method}: {response:?}");
    }
    let mut client = Frames::connect(&gateway.http, 65_535);
    client.send(HEADERS, END_HEADERS, 1, GET);
    client.send(DATA, END_STREAM, 1, b"hello");
    assert_eq!(client.next().0, HEADERS);
    let (kind, _, problem) = client.next();
    let problem = String::from_utf8_lossy(&problem).into_owned();
    assert!(kind == DATA && problem.contains("\"status\":411"), "{problem}");
    assert_eq!(upstream.received().len(), 0, "no request without its body");
}

#[test]
fn get_body_with_a_length_is_forwarded() {
    let upstream = Upstream::responding_with(OK);
    let gateway = Service::gateway("", &[&upstream.url()]);
    assert_eq!(request(&gateway.http, "GET", "/", &[], b"hello").status, 200);
    let mut client = Frames::connect(&gateway.http, 65_535);
    let head = [GET, &field("content-length", "5")].concat();
    client.send(HEADERS, END_HEADERS, 1, &head);
    client.send(DATA, END_STREAM, 1, b"hello");
    assert_eq!(client.next().0, HEADERS);
    let bodies: Vec<Vec<u8>> =
        upstream.received().into_iter().map(|request| request.body).collect();
    assert_eq!(bodies, [b"hello", b"hello"]);
}

#[test]
fn empty_get_body_without_a_length_is_no_body() {
    let upstream = Upstream::responding_with(OK);
    let gateway = Service::gateway("", &[&upstream.url()]);
    let text = "GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\nTransfer-Encoding: \
                chunked\r\n\r\n0\r\n\r\n";
    assert_eq!(raw(&gateway.http, text.as_bytes()).status, 200);
    let mut client = Frames::connect(&gateway.http, 65_535);
    client.send(HEADERS, END_HEADERS, 1, GET);
    client.send(DATA, END_STREAM, 1, b"");
    let (kind, _, head) = client.next();
    assert!(kind == HEADERS && head.starts_with(STATUS_200), "{head:?}");
    assert!(
        upstream.received().iter().all(|request| request.header("transfer-encoding").is_none())
    );
}
