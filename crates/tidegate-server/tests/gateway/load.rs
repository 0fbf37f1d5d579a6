use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::{Service, TEST_TIMEOUT, read_response};
use crate::upstream::{OK, Upstream};

/// Sends one request on a kept connection and returns the status and body.
fn send(stream: &mut BufReader<TcpStream>, text: &str) -> Option<(u16, String)> {
    stream.get_mut().write_all(text.as_bytes()).ok()?;
    let (mut status, mut length, mut line) = (None, 0, String::new());
    loop {
        line.clear();
        if stream.read_line(&mut line).ok()? == 0 {
            return None;
        }
        let text = line.trim_end().to_ascii_lowercase();
        if text.is_empty() {
            break;
        }
        if status.is_none() {
            status = text.split(' ').nth(1).and_then(|status| status.parse().ok());
        } else if let Some(value) = text.strip_prefix("content-length: ") {
            length = value.parse().ok()?;
        }
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body).ok()?;
    Some((status?, String::from_utf8(body).ok()?))
}

fn connect(address: &str) -> BufReader<TcpStream> {
    let stream = TcpStream::connect(address).expect("the service listens");
    stream.set_read_timeout(Some(TEST_TIMEOUT)).expect("a timeout");
    stream.set_nodelay(true).expect("a socket");
    BufReader::new(stream)
}

#[test]
fn ten_thousand_requests_leak_no_connections() {
    let upstream = Upstream::responding_with(OK);
    let policy =
        "policies: [{name: p, key: [ip], algorithm: token-bucket, limit: 1000000, window: 1s}]\n";
    let gateway = Service::gateway(policy, &[&upstream.url()]);
    let before = gateway.open_files();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut stream = connect(&gateway.http);
                for _ in 0..2_500 {
                    let response = send(&mut stream, "GET / HTTP/1.1\r\nHost: h\r\n\r\n");
                    assert_eq!(response, Some((200, "ok".to_owned())));
                }
            });
        }
    });
    assert_eq!(upstream.received().len(), 10_000);
    assert!(
        upstream.connections() <= 16,
        "{} connections were made for 4 at a time",
        upstream.connections()
    );
    // Connections to the upstream are pooled for a while, and then closed.
    gateway.wait_until("all connections are closed", |gateway| gateway.open_files() <= before);
}

const GIBIBYTE: usize = 1 << 30;

#[test]
fn gibibyte_streams_in_constant_memory_in_both_directions() {
    let size = GIBIBYTE;
    let upstream = Upstream::start(move |request, stream| {
        if request.head.starts_with("GET") {
            stream.write_all(
                format!("HTTP/1.1 200 OK\r\nContent-Length: {size}\r\n\r\n").as_bytes(),
            )?;
            let piece = vec![b'x'; 1 << 20];
            for _ in 0..size >> 20 {
                stream.write_all(&piece)?;
            }
            return Ok(());
        }
        stream.write_all(OK)
    });
    let gateway = Service::gateway("", &[&upstream.url()]);
    let warm = read_response(&mut {
        let mut client = TcpStream::connect(&gateway.http).expect("the service listens");
        client.write_all(b"PUT / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n").expect("sent");
        client
    });
    assert_eq!(warm.status, 200);
    let before = gateway.memory();
    let done = AtomicBool::new(false);
    let peak = std::thread::scope(|scope| {
        let watching = scope.spawn(|| {
            let mut peak = 0;
            while !done.load(Ordering::Relaxed) {
                peak = peak.max(gateway.memory());
                std::thread::sleep(Duration::from_millis(5));
            }
            peak
        });
        let start = Instant::now();
        let mut client = TcpStream::connect(&gateway.http).expect("the service listens");
        client.write_all(b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n").expect("sent");
        let mut piece = vec![0; 1 << 20];
        let mut got = 0;
        loop {
            match client.read(&mut piece).expect("more") {
                0 => break,
                read => got += read,
            }
        }
        assert!(got > size && got < size + 4096, "{got} bytes");
        println!("{} MiB down in {:?}", size >> 20, start.elapsed());

        let start = Instant::now();
        let mut client = TcpStream::connect(&gateway.http).expect("the service listens");
        upload(&mut client, size);
        assert_eq!(read_response(&mut client).status, 200);
        assert_eq!(upstream.received().last().map(|request| request.length), Some(size as u64));
        println!("{} MiB up in {:?}", size >> 20, start.elapsed());
        done.store(true, Ordering::Relaxed);
        watching.join().expect("no panic")
    });
    println!("memory: {before} KiB before, at peak {peak} KiB");
    assert!(peak < before + 48 * 1024, "from {before} KiB to {peak} KiB");
}

/// Chunked body of unknown length.
fn upload(client: &mut TcpStream, size: usize) {
    let head = b"PUT / HTTP/1.1\r\nHost: h\r\nConnection: close\r\nX-Discard: y\r\n\
                 Transfer-Encoding: chunked\r\n\r\n";
    client.write_all(head).expect("sent");
    let mut chunk = format!("{:x}\r\n", 1 << 20).into_bytes();
    chunk.extend(std::iter::repeat_n(b'x', 1 << 20));
    chunk.extend_from_slice(b"\r\n");
    for _ in 0..size >> 20 {
        client.write_all(&chunk).expect("sent");
    }
    client.write_all(b"0\r\n\r\n").expect("sent");
}

/// Two real services as upstreams. One is killed and restarted several times, while clients send
/// requests with distinguishable responses.
#[test]
fn killed_upstream_never_causes_a_wrong_response() {
    let steady = Service::start("");
    let mut mortal = Service::start("");
    let port = mortal.http.clone();
    let gateway = Service::gateway(
        "",
        &[&format!("http://{}", steady.http), &format!("http://{}", mortal.http)],
    );
    let (stop, right, failed) = (AtomicBool::new(false), AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for client in 0..4 {
            let (gateway, stop, right, failed) = (&gateway, &stop, &right, &failed);
            scope.spawn(move || {
                let mut stream = connect(&gateway.http);
                let mut number = 0_u64;
                while !stop.load(Ordering::Relaxed) {
                    number += 1;
                    let limit = client * 1_000_000 + number;
                    let body =
                        json!({"key": "k", "quota": {"limit": limit, "window": "60s"}}).to_string();
                    let length = body.len();
                    let text = format!(
                        "POST /v1/peek HTTP/1.1\r\nHost: localhost\r\nContent-Length: \
                                        {length}\r\n\r\n{body}"
                    );
                    match send(&mut stream, &text) {
                        Some((200, body)) => {
                            let response: Value = serde_json::from_str(&body).expect("JSON");
                            assert_eq!(response["limit"], limit, "the response to another request");
                            right.fetch_add(1, Ordering::Relaxed);
                        }
                        Some((502..=504, _)) => {
                            failed.fetch_add(1, Ordering::Relaxed);
                        }
                        // An incomplete response.
                        None => {
                            failed.fetch_add(1, Ordering::Relaxed);
                            stream = connect(&gateway.http);
                        }
                        other => panic!("{other:?}"),
                    }
                }
            });
        }
        let progress = |count: usize| {
            let goal = right.load(Ordering::Relaxed) + count;
            gateway.wait_until("requests succeed", |_| right.load(Ordering::Relaxed) >= goal);
        };
        let listen =
            format!("listen: {{http: '{port}', grpc: '127.0.0.1:0', admin: '127.0.0.1:0'}}\n");
        for _ in 0..3 {
            progress(200);
            mortal.signal("KILL");
            mortal.wait_for_exit();
            progress(200);
            mortal = Service::start(&listen);
            progress(200);
        }
        stop.store(true, Ordering::Relaxed);
    });
    let (right, failed) = (right.into_inner(), failed.into_inner());
    println!("{right} right, {failed} failed");
    // Requests that were in flight at the kill, and those that met a closed pooled connection: four
    // clients, three times.
    assert!(failed <= 24, "{failed} failed, {right} right");
}
