use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use crate::frames::{
    DATA, END_HEADERS, END_STREAM, Frames, GOAWAY, HEADERS, RST_STREAM, STATUS_200,
};
use crate::support::{Service, request};
use crate::upstream::{OK, Upstream};

/// Way in which [`ClosingUpstream`] ends the second request of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Close {
    /// Closes when the request arrives, without reading it: the connection is reset.
    Unread,
    /// Reads the request, then closes.
    Read,
    /// Sends a part of the response head, then closes.
    Answering,
}

/// Upstream that answers the first request of every connection and closes at the second one.
struct ClosingUpstream {
    url: String,
    /// Request lines that arrived, and whether they were answered.
    arrived: Arc<Mutex<Vec<(String, bool)>>>,
}

impl ClosingUpstream {
    fn start(close: Close) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let url = format!("http://{}", listener.local_addr().expect("bound"));
        let upstream = Self { url, arrived: Arc::default() };
        let arrived = Arc::clone(&upstream.arrived);
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let arrived = Arc::clone(&arrived);
                std::thread::spawn(move || Self::serve(stream, close, &arrived));
            }
        });
        upstream
    }

    fn serve(mut stream: TcpStream, close: Close, arrived: &Mutex<Vec<(String, bool)>>) {
        let record = |head: &str, answered: bool| {
            let line = head.lines().next().unwrap_or_default().to_owned();
            arrived.lock().expect("no panic").push((line, answered));
        };
        let Some(head) = read_message(&mut stream) else { return };
        record(&head, true);
        if stream.write_all(OK).is_err() {
            return;
        }
        let head = if close == Close::Unread {
            let mut bytes = [0; 4096];
            let length = stream.peek(&mut bytes).unwrap_or(0);
            String::from_utf8_lossy(&bytes[..length]).into_owned()
        } else {
            read_message(&mut stream).unwrap_or_default()
        };
        if !head.is_empty() {
            record(&head, false);
        }
        if close == Close::Answering {
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nX-Half: ");
        }
    }

    /// Returns how often a request arrived, and how often it was not answered.
    fn times(&self, line: &str) -> (usize, usize) {
        let arrived = self.arrived.lock().expect("no panic");
        let matching = || arrived.iter().filter(|(arrived, _)| arrived.starts_with(line));
        (matching().count(), matching().filter(|(_, answered)| !answered).count())
    }
}

/// Reads one request with its body.
pub(crate) fn read_message(stream: &mut TcpStream) -> Option<String> {
    let mut all = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        let length = stream.read(&mut buffer).ok().filter(|length| *length > 0)?;
        all.extend_from_slice(&buffer[..length]);
        let text = String::from_utf8_lossy(&all).into_owned();
        let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
        let length = head.lines().find_map(|line| {
            line.to_ascii_lowercase().strip_prefix("content-length: ")?.parse::<usize>().ok()
        });
        if body.len() >= length.unwrap_or(0) {
            return Some(head.to_owned());
        }
    }
}

fn retries(gateway: &Service) -> u64 {
    let metrics = gateway.admin("/metrics").body;
    let line = metrics
        .lines()
        .find_map(|line| line.strip_prefix("tidegate_upstream_retries_total "))
        .unwrap_or_else(|| panic!("no counter in {metrics}"));
    line.parse().expect("a number")
}

#[test]
fn idempotent_requests_survive_a_keep_alive_close() {
    for close in [Close::Unread, Close::Read] {
        let upstream = ClosingUpstream::start(close);
        let policy = "policies: [{name: p, limit: 40, window: 1h}]\n";
        let gateway = Service::gateway(policy, &[&upstream.url]);
        let methods = ["GET", "HEAD", "OPTIONS", "PUT", "DELETE"];
        let statuses: Vec<u16> = (0..40)
            .map(|turn| {
                let path = format!("/{turn}");
                request(&gateway.http, methods[turn % methods.len()], &path, &[], b"").status
            })
            .collect();
        assert_eq!(statuses, [200; 40], "{close:?}");
        let unanswered: usize = methods.iter().map(|method| upstream.times(method).1).sum();
        // Every second request meets the close, unless its connection was not idle yet.
        assert!(unanswered > 5, "{close:?}: {unanswered}");
        assert_eq!(retries(&gateway), unanswered as u64, "{close:?}");
        assert!(!gateway.output().contains("ejected"), "{close:?}: {}", gateway.output());
        // Each request was charged once.
        assert_eq!(request(&gateway.http, "GET", "/", &[], b"").status, 429, "{close:?}");
    }
}

#[test]
fn retried_request_is_refunded_by_its_last_response() {
    let upstream = ClosingUpstream::start(Close::Read);
    let policy = "policies: [{name: p, limit: 1, window: 1h, refund_on: {status: [2xx]}}]\n";
    let gateway = Service::gateway(policy, &[&upstream.url]);
    for turn in 0..20 {
        let response = request(&gateway.http, "GET", "/", &[], b"");
        assert_eq!(response.status, 200, "{turn}");
    }
    assert!(retries(&gateway) > 0);
    let refunds = "tidegate_refunds_total{policy=\"p\",outcome=\"success\"} 20\n";
    assert!(gateway.admin("/metrics").body.contains(refunds), "one refund per request");
}

#[test]
fn requests_that_may_have_run_are_sent_once() {
    for (close, method, body) in [
        (Close::Unread, "POST", &b""[..]),
        (Close::Read, "POST", b""),
        (Close::Read, "POST", b"body"),
        (Close::Read, "PATCH", b"body"),
        (Close::Answering, "GET", b""),
    ] {
        let upstream = ClosingUpstream::start(close);
        let gateway = Service::gateway("", &[&upstream.url]);
        let mut failed = 0;
        for turn in 0..20 {
            assert_eq!(request(&gateway.http, "POST", "/before", &[], b"").status, 200);
            let path = format!("/{turn}/");
            let status = request(&gateway.http, method, &path, &[], body).status;
            let times = upstream.times(&format!("{method} {path}"));
            assert!(
                [(200, (1, 0)), (502, (1, 1))].contains(&(status, times)),
                "{status} {times:?}"
            );
            failed += times.1;
            // The connection of an answered request is not idle for the next turn.
            if times.1 == 0 {
                request(&gateway.http, "POST", "/after", &[], b"");
            }
        }
        assert!(failed > 0, "{close:?} {method}");
        assert_eq!(retries(&gateway), 0, "{close:?} {method}");
    }
}

#[test]
fn failure_on_a_new_connection_is_not_retried() {
    let upstream = Upstream::start(|_, _| Err(std::io::ErrorKind::BrokenPipe.into()));
    let gateway = Service::gateway("", &[&upstream.url()]);
    assert_eq!(request(&gateway.http, "GET", "/", &[], b"").status, 502);
    assert_eq!(upstream.received().len(), 1);
}

#[test]
fn retry_moves_on_to_another_upstream_if_the_first_one_is_gone() {
    // Serves one connection: it answers, then closes with its listener at the second request.
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let first = format!("http://{}", listener.local_addr().expect("bound"));
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a connection");
        read_message(&mut stream).expect("a request");
        stream.write_all(OK).expect("sent");
        read_message(&mut stream).expect("a request");
        drop(listener);
    });
    let second = Upstream::responding_with(OK);
    let gateway = Service::gateway("", &[&first, &second.url()]);
    for _ in 0..6 {
        assert_eq!(request(&gateway.http, "GET", "/", &[], b"").status, 200);
    }
    assert_eq!(second.received().len(), 5);
}

#[test]
fn small_bodies_of_idempotent_requests_are_sent_again_as_a_whole() {
    let upstream = ClosingUpstream::start(Close::Read);
    let gateway = Service::gateway("", &[&upstream.url]);
    for size in [10, 60_000] {
        let body = vec![b'x'; size];
        for turn in 0..10 {
            let path = format!("/{size}/{turn}/");
            let status = request(&gateway.http, "PUT", &path, &[], &body).status;
            assert_eq!(status, 200, "{path}");
        }
    }
    assert!(retries(&gateway) > 5);
    // A large body is not kept, so it cannot be sent again.
    let body = vec![b'x'; 1_000_000];
    let statuses: Vec<u16> =
        (0..10).map(|_| request(&gateway.http, "PUT", "/large/", &[], &body).status).collect();
    assert!(statuses.contains(&502) && statuses.contains(&200), "{statuses:?}");
    assert_eq!(upstream.times("PUT /large/").0, 10, "each was sent once");
}

/// HTTP/2 upstream that ends the first connection as `refuse` does, after its stream with this
/// number, and answers all other requests with 200. Returns its URL and the number of requests.
fn refusing_upstream(
    answered: u32,
    refuse: fn(&mut Frames, u32),
) -> (String, Arc<Mutex<Vec<bool>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let url = format!("h2c://{}", listener.local_addr().expect("bound"));
    let answers = Arc::<Mutex<Vec<bool>>>::default();
    let recorder = Arc::clone(&answers);
    std::thread::spawn(move || {
        for (number, stream) in listener.incoming().map_while(Result::ok).enumerate() {
            let recorder = Arc::clone(&recorder);
            std::thread::spawn(move || {
                let Some(mut frames) = Frames::accept(stream) else { return };
                while let Some(frame) = frames.next_frame() {
                    let refused = number == 0 && frame.stream > answered;
                    if refused && frame.kind == HEADERS {
                        recorder.lock().expect("no panic").push(false);
                        refuse(&mut frames, frame.stream);
                    } else if !refused && frame.flags & END_STREAM > 0 {
                        recorder.lock().expect("no panic").push(true);
                        frames.send(HEADERS, END_HEADERS | END_STREAM, frame.stream, STATUS_200);
                    }
                }
            });
        }
    });
    (url, answers)
}

fn refused_stream(frames: &mut Frames, stream: u32) {
    frames.send(RST_STREAM, 0, stream, &7_u32.to_be_bytes());
}

fn going_away(frames: &mut Frames, stream: u32) {
    // The streams before this one were processed. The connection stays open.
    frames.send(GOAWAY, 0, 0, &[(stream - 2).to_be_bytes(), [0; 4]].concat());
}

fn reset_stream(frames: &mut Frames, stream: u32) {
    // INTERNAL_ERROR: the request may have run.
    frames.send(RST_STREAM, 0, stream, &2_u32.to_be_bytes());
}

fn half_of_a_response(frames: &mut Frames, stream: u32) {
    frames.send(HEADERS, END_HEADERS, stream, STATUS_200);
    frames.send(DATA, 0, stream, b"half");
    frames.send(RST_STREAM, 0, stream, &7_u32.to_be_bytes());
}

#[test]
fn http2_requests_that_were_refused_are_sent_again_with_their_bodies() {
    for (name, refuse) in
        [("refused", refused_stream as fn(&mut Frames, u32)), ("going away", going_away)]
    {
        for (method, body) in [("GET", &b""[..]), ("POST", b""), ("POST", b"body")] {
            let (url, answers) = refusing_upstream(1, refuse);
            let gateway = Service::gateway("", &[&url]);
            for _ in 0..4 {
                let status = request(&gateway.http, method, "/", &[], body).status;
                assert_eq!(status, 200, "{name} {method} {body:?}");
            }
            let refused =
                answers.lock().expect("no panic").iter().filter(|answered| !**answered).count();
            assert_eq!(retries(&gateway), refused as u64, "{name} {method} {body:?}");
            assert!(refused > 0, "{name} {method} {body:?}");
        }
    }
}

fn closed(frames: &mut Frames, _: u32) {
    frames.close();
}

#[test]
fn http2_requests_that_may_have_run_are_sent_once() {
    let refuse: [fn(&mut Frames, u32); 3] = [reset_stream, closed, half_of_a_response];
    for (refuse, method, status) in [
        (refuse[0], "POST", 502),
        (refuse[0], "GET", 502),
        (refuse[1], "POST", 502),
        (refuse[2], "GET", 200),
    ] {
        let (url, answers) = refusing_upstream(1, refuse);
        let gateway = Service::gateway("", &[&url]);
        assert_eq!(request(&gateway.http, method, "/", &[], b"").status, 200);
        let response = request(&gateway.http, method, "/", &[], b"");
        assert_eq!(response.status, status, "{response:?}");
        assert_eq!(*answers.lock().expect("no panic"), [true, false], "{method}");
        assert_eq!(retries(&gateway), 0, "{method}");
    }
}

#[test]
fn idempotent_http2_requests_survive_a_keep_alive_close() {
    let (url, answers) = refusing_upstream(1, closed);
    let gateway = Service::gateway("", &[&url]);
    for _ in 0..3 {
        assert_eq!(request(&gateway.http, "GET", "/", &[], b"").status, 200);
    }
    assert_eq!(*answers.lock().expect("no panic"), [true, false, true, true]);
    assert_eq!(retries(&gateway), 1);
}
