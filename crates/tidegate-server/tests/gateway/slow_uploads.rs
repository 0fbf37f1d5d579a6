use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use crate::frames::{
    DATA, END_HEADERS, END_STREAM, Frames, HEADERS, POST, STATUS_200, WINDOW_UPDATE, field,
};
use crate::support::{Service, TEST_TIMEOUT, read_response};
use crate::upstream::{OK, Upstream};
use crate::websocket::read_head;

/// Time between two parts of a slow body.
const PAUSE: Duration = Duration::from_millis(50);
/// Time after which a body that does not have to be fast is completed: longer than `idle_timeout`.
const LONG: Duration = Duration::from_millis(2_500);

fn connect(address: &str, head: &str) -> TcpStream {
    let mut client = TcpStream::connect(address).expect("the service listens");
    client.set_read_timeout(Some(TEST_TIMEOUT)).expect("a timeout");
    client.set_nodelay(true).expect("a socket");
    client.write_all(head.as_bytes()).expect("sent");
    client
}

/// Returns whether a response, or the end of the connection, has arrived.
fn is_answered(client: &TcpStream) -> bool {
    client.set_nonblocking(true).expect("a socket");
    let is_answered = client.peek(&mut [0]).is_ok();
    client.set_nonblocking(false).expect("a socket");
    is_answered
}

#[test]
fn dripping_upload_ends_with_408() {
    let upstream = Upstream::responding_with(OK);
    // Also after a fast start: it pays for no more than the idle timeout.
    for start in [0, 100_000] {
        let config = "gateway: {idle_timeout: 1s, min_upload_rate: 1000}\n";
        let gateway = Service::gateway(config, &[&upstream.url()]);
        let before = gateway.open_files();
        let mut client = connect(
            &gateway.http,
            "POST / HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: 1000000\r\n\r\n",
        );
        client.write_all(&vec![b'x'; start]).expect("sent");
        let began = Instant::now();
        while !is_answered(&client) {
            assert!(began.elapsed() < TEST_TIMEOUT, "the upload drips on");
            let _ = client.write_all(b"x");
            std::thread::sleep(PAUSE);
        }
        let response = read_response(&mut client);
        assert_eq!(response.status, 408, "{response:?}");
        assert_eq!(response.header("content-type"), Some("application/problem+json"));
        drop(client);
        gateway.wait_until("the upstream connection is closed", |gateway| {
            gateway.open_files() <= before
        });
        assert!(!gateway.output().contains("ejected"));
    }
    assert!(upstream.received().is_empty(), "no complete request reached the upstream");
}

#[test]
fn upload_above_the_minimum_rate_may_take_long() {
    let upstream = Upstream::responding_with(OK);
    let config = "gateway: {idle_timeout: 1s, min_upload_rate: 1000}\n";
    let gateway = Service::gateway(config, &[&upstream.url()]);
    let mut client = connect(
        &gateway.http,
        "POST / HTTP/1.1\r\nHost: h\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n",
    );
    let start = Instant::now();
    while start.elapsed() < LONG {
        // Ten times the rate, for a busy machine.
        let chunk = format!("1f4\r\n{}\r\n", "x".repeat(500));
        client.write_all(chunk.as_bytes()).expect("sent");
        std::thread::sleep(PAUSE);
    }
    client.write_all(b"0\r\n\r\n").expect("sent");
    assert_eq!(read_response(&mut client).status, 200);
}

#[test]
fn time_of_a_slow_upstream_is_not_charged_to_the_client() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let url = format!("http://{}", listener.local_addr().expect("bound"));
    let size = 8_000_000;
    let reading = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a connection");
        read_head(&mut stream);
        std::thread::sleep(LONG);
        let mut body = vec![0; size];
        stream.read_exact(&mut body).expect("the body");
        stream.write_all(OK).expect("sent");
    });
    let config = "gateway: {idle_timeout: 1s, min_upload_rate: 1000000}\n";
    let gateway = Service::gateway(config, &[&url]);
    let head = format!(
        "POST / HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: {size}\r\n\r\n"
    );
    let mut client = connect(&gateway.http, &head);
    client.write_all(&vec![b'x'; size]).expect("sent");
    assert_eq!(read_response(&mut client).status, 200);
    reading.join().expect("no panic");
}

/// Sends a slow stream to an HTTP/2 upstream that responds at its end. Returns whether the response
/// has the status 200.
fn streams_slowly(content_type: &str) -> bool {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let url = format!("h2c://{}", listener.local_addr().expect("bound"));
    std::thread::spawn(move || {
        let (stream, _) = listener.accept().expect("a connection");
        let mut upstream = Frames::accept(stream).expect("HTTP/2");
        while let Some(frame) = upstream.next_frame() {
            if frame.flags & END_STREAM != 0 {
                upstream.send(HEADERS, END_HEADERS | END_STREAM, frame.stream, STATUS_200);
            }
        }
    });
    let config = "gateway: {idle_timeout: 1s, min_upload_rate: 1000}\n";
    let gateway = Service::gateway(config, &[&url]);
    let mut client = Frames::connect(&gateway.http, 65_535);
    let fields = [POST, &field("content-type", content_type)].concat();
    client.send(HEADERS, END_HEADERS, 1, &fields);
    let start = Instant::now();
    while start.elapsed() < LONG {
        // The stream may have ended.
        client.send(DATA, 0, 1, b"x");
        std::thread::sleep(PAUSE);
    }
    client.send(DATA, END_STREAM, 1, b"");
    loop {
        let (kind, _, payload) = client.next();
        if kind != WINDOW_UPDATE {
            assert_eq!(kind, HEADERS);
            return payload.starts_with(STATUS_200);
        }
    }
}

#[test]
fn messages_of_grpc_streams_may_be_rare() {
    std::thread::scope(|scope| {
        scope.spawn(|| assert!(streams_slowly("application/grpc+proto")));
        scope.spawn(|| assert!(!streams_slowly("application/grpcx")));
        assert!(!streams_slowly("text/plain"));
    });
}

#[test]
fn messages_may_be_rare_while_the_upstream_responds() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let url = format!("http://{}", listener.local_addr().expect("bound"));
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a connection");
        read_head(&mut stream);
        stream.write_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n").expect("sent");
        // Echoes each chunk, and the end.
        let mut buffer = [0; 1024];
        while let Ok(length @ 1..) = stream.read(&mut buffer) {
            stream.write_all(&buffer[..length]).expect("sent");
        }
    });
    let config = "gateway: {idle_timeout: 1s, min_upload_rate: 1000}\n";
    let gateway = Service::gateway(config, &[&url]);
    let mut client = connect(
        &gateway.http,
        "POST / HTTP/1.1\r\nHost: h\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n",
    );
    assert!(read_head(&mut client).starts_with("http/1.1 200 "));
    let start = Instant::now();
    let mut sent = 0;
    while start.elapsed() < LONG {
        client.write_all(b"1\r\nx\r\n").expect("sent");
        sent += 1;
        std::thread::sleep(PAUSE);
    }
    client.write_all(b"0\r\n\r\n").expect("sent");
    let mut body = String::new();
    client.read_to_string(&mut body).expect("text");
    assert_eq!(body.matches('x').count(), sent, "{body:?}");
    assert!(body.ends_with("0\r\n\r\n"), "{body:?}");
}

#[test]
fn upload_that_drips_on_after_its_response_ends() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let url = format!("http://{}", listener.local_addr().expect("bound"));
    std::thread::spawn(move || {
        // Responds at once, and reads on.
        for mut stream in listener.incoming().map_while(Result::ok) {
            read_head(&mut stream);
            let _ = stream.write_all(OK);
            while let Ok(1..) = stream.read(&mut [0; 1024]) {}
        }
    });
    let config = "gateway: {idle_timeout: 1s, min_upload_rate: 1000, max_connections: 1}\n";
    let gateway = Service::gateway(config, &[&url]);
    let before = gateway.open_files();
    let mut client =
        connect(&gateway.http, "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 1000000\r\n\r\n");
    let start = Instant::now();
    while client.write_all(b"x").is_ok() && gateway.open_files() > before {
        assert!(start.elapsed() < TEST_TIMEOUT, "the upload drips on");
        std::thread::sleep(PAUSE);
    }
}
