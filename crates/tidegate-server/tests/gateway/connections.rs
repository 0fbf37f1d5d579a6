use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::mpsc::{self, Receiver, Sender};

use crate::retries::read_message;
use crate::support::{Service, TEST_TIMEOUT, request};
use crate::upstream::{OK, Upstream};
use crate::websocket::read_head;

/// Starts an upstream that serves each of its connections by the closure, and returns its URL.
fn upstream(serve: impl Fn(usize, TcpStream) + Send + Sync + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let url = format!("http://{}", listener.local_addr().expect("bound"));
    let serve = std::sync::Arc::new(serve);
    std::thread::spawn(move || {
        for (number, stream) in listener.incoming().map_while(Result::ok).enumerate() {
            let serve = std::sync::Arc::clone(&serve);
            std::thread::spawn(move || serve(number, stream));
        }
    });
    url
}

/// Reads up to the end of the connection, and reports it.
fn report_end(mut stream: TcpStream, ended: &Sender<()>) {
    let mut buffer = [0; 4096];
    while stream.read(&mut buffer).is_ok_and(|length| length > 0) {}
    ended.send(()).expect("a receiver");
}

fn wait(event: &Receiver<()>, what: &str) {
    event.recv_timeout(TEST_TIMEOUT).unwrap_or_else(|error| panic!("{what}: {error}"));
}

/// Sends a part of a request on a connection of its own.
fn send(gateway: &Service, bytes: &[u8]) -> TcpStream {
    let mut client = TcpStream::connect(&gateway.http).expect("the service listens");
    client.set_read_timeout(Some(TEST_TIMEOUT)).expect("a timeout");
    client.write_all(bytes).expect("sent");
    client
}

#[test]
fn connection_is_ready_for_the_next_request_when_the_client_has_the_response() {
    let upstream = Upstream::start(|request, stream| {
        let path = request.head.split(' ').nth(1).expect("a path");
        let body = "b".repeat(path[1..].parse().unwrap_or(0));
        let is_head = request.head.starts_with("HEAD");
        let text = match path {
            _ if is_head => "HTTP/1.1 200 OK\r\nContent-Length: 70\r\n\r\n".to_owned(),
            "/chunked" => "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n\
                           3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
                .to_owned(),
            "/none" => "HTTP/1.1 204 No Content\r\n\r\n".to_owned(),
            _ => format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len()),
        };
        stream.write_all(text.as_bytes())
    });
    let gateway = Service::gateway("", &[&upstream.url()]);
    let bodies = [("/0", 0), ("/10", 10), ("/60000", 60_000), ("/chunked", 5), ("/none", 0)];
    for (method, sent) in [("POST", &b"body"[..]), ("GET", b""), ("PUT", b""), ("HEAD", b"")] {
        for (path, length) in bodies {
            let response = request(&gateway.http, method, path, &[], sent);
            assert!([200, 204].contains(&response.status), "{method} {path}: {response:?}");
            let length = if method == "HEAD" { 0 } else { length };
            // The chunks and their lengths.
            let is_chunked = path == "/chunked" && method != "HEAD";
            assert!(is_chunked || response.body.len() == length, "{method} {path}");
        }
    }
    assert_eq!(upstream.received().len(), 20);
    assert_eq!(upstream.connections(), 1);
}

#[test]
fn connection_closed_while_it_is_idle_fails_no_request() {
    let (close, closing) = mpsc::channel::<()>();
    let (closed, is_closed) = mpsc::channel();
    let (arrived, requests) = mpsc::channel();
    let closing = std::sync::Mutex::new(closing);
    let url = upstream(move |number, mut stream| {
        let head = read_message(&mut stream).expect("a request");
        arrived.send((number, head)).expect("a receiver");
        stream.write_all(OK).expect("sent");
        let _ = closing.lock().expect("no panic").recv();
        stream.shutdown(Shutdown::Both).expect("open");
        closed.send(()).expect("a receiver");
    });
    let gateway = Service::gateway("", &[&url]);
    // A POST is never sent twice, so that it must not be sent on the closed connection.
    for turn in 0..10 {
        let path = format!("/{turn}");
        assert_eq!(request(&gateway.http, "POST", &path, &[], b"body").status, 200, "{turn}");
        let (number, head) = requests.recv_timeout(TEST_TIMEOUT).expect("a request");
        assert_eq!((number, head.starts_with(&format!("POST {path} "))), (turn, true), "{head}");
        close.send(()).expect("a receiver");
        wait(&is_closed, "the close");
    }
    assert!(requests.try_recv().is_err(), "each request arrived once");
}

#[test]
fn connection_of_a_client_that_leaves_is_closed() {
    // Before the response, in the middle of its head, and in the middle of its body.
    let parts =
        ["", "HTTP/1.1 200 OK\r\nX-Half: ", "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf"];
    for part in parts {
        let (arrived, has_arrived) = mpsc::channel();
        let (ended, has_ended) = mpsc::channel();
        let url = upstream(move |number, mut stream| {
            read_message(&mut stream).expect("a request");
            if number == 0 {
                stream.write_all(part.as_bytes()).expect("sent");
                arrived.send(()).expect("a receiver");
            } else {
                stream.write_all(OK).expect("sent");
            }
            report_end(stream, &ended);
        });
        let gateway = Service::gateway("", &[&url]);
        let mut client = send(&gateway, b"GET / HTTP/1.1\r\nHost: h\r\n\r\n");
        wait(&has_arrived, "the request");
        if part.ends_with("half") {
            read_head(&mut client);
        }
        drop(client);
        wait(&has_ended, "the end of the connection");
        let response = request(&gateway.http, "GET", "/", &[], b"");
        assert_eq!((response.status, response.body.as_str()), (200, "ok"), "{part:?}");
    }
}

#[test]
fn upload_continues_after_an_early_response() {
    // More than is read before the request is sent.
    let length = 1_000_000;
    let (received, whole) = mpsc::channel();
    let url = upstream(move |_, mut stream| {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            stream.read_exact(&mut byte).expect("a head");
            head.push(byte[0]);
        }
        stream.write_all(OK).expect("sent");
        stream.read_exact(&mut vec![0; length]).expect("a body");
        received.send(()).expect("a receiver");
    });
    let gateway = Service::gateway("", &[&url]);
    let head = format!("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: {length}\r\n\r\n");
    let mut client = send(&gateway, head.as_bytes());
    client.write_all(&vec![b'x'; length / 2]).expect("sent");
    assert!(read_head(&mut client).starts_with("http/1.1 200 "));
    client.write_all(&vec![b'x'; length / 2]).expect("sent");
    wait(&whole, "the whole body");
}

#[test]
fn idle_connection_is_closed_after_a_while() {
    let (ended, has_ended) = mpsc::channel();
    let url = upstream(move |_, mut stream| {
        read_message(&mut stream).expect("a request");
        stream.write_all(OK).expect("sent");
        report_end(stream, &ended);
    });
    let gateway = Service::gateway("", &[&url]);
    assert_eq!(request(&gateway.http, "GET", "/", &[], b"").status, 200);
    assert!(has_ended.try_recv().is_err(), "the connection is kept");
    wait(&has_ended, "the end of the connection");
}
