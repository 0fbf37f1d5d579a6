use std::io::Write as _;
use std::net::TcpListener;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::frames::{DATA, END_HEADERS, END_STREAM, Frames, HEADERS, WINDOW_UPDATE, field};
use crate::request_fields;
use crate::support::{Response, Service, connect_from, read_response};

const OTHER_CLIENT: &str = "127.0.0.9";
/// Addresses of hostile clients, none of which has a quarter of the slots.
const ADDRESSES: [&str; 5] = ["127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5"];
/// Time between two bytes of an upload.
const DRIP_INTERVAL: Duration = Duration::from_millis(100);
/// More than the gateway reads ahead.
const START_BYTES: usize = 66_000;

/// Upstream that only answers `GET /`, and reads all other requests without an end.
struct Upstream {
    url: String,
    /// Number of requests that it does not answer.
    held: Arc<AtomicUsize>,
    _runtime: tokio::runtime::Runtime,
}

impl Upstream {
    fn start() -> Self {
        let mut runtime = tokio::runtime::Builder::new_multi_thread();
        let runtime = runtime.worker_threads(1).enable_all().build().expect("a runtime");
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let url = format!("http://{}", listener.local_addr().expect("bound"));
        listener.set_nonblocking(true).expect("a socket");
        let held = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&held);
        runtime.spawn(async move {
            let listener = tokio::net::TcpListener::from_std(listener).expect("a socket");
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(Self::serve(stream, Arc::clone(&counter)));
            }
        });
        Self { url, held, _runtime: runtime }
    }

    async fn serve(mut stream: tokio::net::TcpStream, held: Arc<AtomicUsize>) {
        let mut buffer = vec![0; 16 * 1024];
        let mut is_held = false;
        while let Ok(length @ 1..) = stream.read(&mut buffer).await {
            if buffer[..length].starts_with(b"GET / ") {
                let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await;
            } else if !is_held {
                is_held = true;
                held.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    fn held(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }
}

/// HTTP/2 connection of a hostile client, whose requests do not end.
struct Hostile {
    client: Frames,
    streams: u32,
    /// Flow control window of the connection.
    window: usize,
}

impl Hostile {
    fn connect(source: &str, gateway: &Service) -> Self {
        let client = Frames::start(connect_from(source, &gateway.http), 65_535);
        Self { client, streams: 0, window: 65_535 }
    }

    fn send(&mut self, fields: &[u8], flags: u8) -> u32 {
        let stream = 2 * self.streams + 1;
        self.streams += 1;
        self.client.send(HEADERS, END_HEADERS | flags, stream, fields);
        stream
    }

    /// Sends data as the flow control of the connection permits.
    fn send_data(&mut self, stream: u32, data: &[u8]) {
        for chunk in data.chunks(16_384) {
            while self.window < chunk.len() {
                let frame = self.client.next_of_any_stream().expect("no timeout").expect("open");
                if frame.kind == WINDOW_UPDATE && frame.stream == 0 {
                    let increment = frame.payload.try_into().expect("4 bytes");
                    self.window += u32::from_be_bytes(increment) as usize;
                }
            }
            self.window -= chunk.len();
            self.client.send(DATA, 0, stream, chunk);
        }
    }

    /// Sends one more byte of every upload.
    fn drip(&mut self) {
        for index in 0..self.streams {
            self.send_data(2 * index + 1, b"x");
        }
    }
}

fn post(length: &str) -> Vec<u8> {
    [request_fields("POST", "/upload"), field("content-length", length)].concat()
}

/// Sends a request from an address that no hostile client has.
fn get(gateway: &str) -> Response {
    let mut stream = connect_from(OTHER_CLIENT, gateway);
    stream
        .write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        .expect("sent");
    read_response(&mut stream)
}

fn in_flight(gateway: &Service, count: usize) -> bool {
    let line = format!("\ntidegate_gateway_requests_in_flight {count}\n");
    gateway.admin("/metrics").body.contains(&line)
}

#[test]
fn requests_whose_body_does_not_come_leave_the_upstream_to_others() {
    let upstream = Upstream::start();
    // No request may wait.
    let gateway = Service::gateway("gateway: {max_pending: 0}\n", &[&upstream.url]);
    let mut hostile: Vec<Hostile> =
        (0..4).map(|_| Hostile::connect("127.0.0.1", &gateway)).collect();
    for client in &mut hostile {
        for _ in 0..256 {
            client.send(&post("10"), 0);
        }
    }
    gateway.wait_until("all have arrived", |gateway| in_flight(gateway, 1_024));
    assert_eq!(get(&gateway.http).status, 200);
    assert_eq!(upstream.held(), 0);
}

/// Takes all slots by uploads until another client has been answered. Returns how many ended.
fn drip_from(addresses: &[&str]) -> u64 {
    let upstream = Upstream::start();
    let gateway = Service::gateway("gateway: {max_connections: 256}\n", &[&upstream.url]);
    let mut hostile: Vec<Hostile> =
        addresses.iter().map(|source| Hostile::connect(source, &gateway)).collect();
    let start = vec![b'x'; START_BYTES];
    for client in &mut hostile {
        for _ in 0..52 {
            let stream = client.send(&post("1000000"), 0);
            client.send_data(stream, &start);
        }
    }
    gateway.wait_until("the slots are taken", |_| upstream.held() >= 240);
    let responses = Arc::new(Mutex::new(Vec::new()));
    let (sink, address) = (Arc::clone(&responses), gateway.http.clone());
    let other = std::thread::spawn(move || {
        for _ in 0..3 {
            sink.lock().expect("no panic").push(get(&address).status);
        }
    });
    while !other.is_finished() {
        hostile.iter_mut().for_each(Hostile::drip);
        std::thread::sleep(DRIP_INTERVAL);
    }
    other.join().expect("no panic");
    assert_eq!(*responses.lock().expect("no panic"), [200, 200, 200], "{addresses:?}");
    ended_uploads(&gateway)
}

fn ended_uploads(gateway: &Service) -> u64 {
    let metrics = gateway.admin("/metrics").body;
    let ended = metrics.lines().find_map(|line| line.split_once("reason=\"slow_upload\"} "));
    ended.expect("a metric").1.parse().expect("a number")
}

#[test]
fn slow_uploads_of_one_address_leave_the_upstream_to_others() {
    drip_from(&["127.0.0.1"; 5]);
}

#[test]
fn slow_uploads_of_many_addresses_end_when_others_wait() {
    assert!(drip_from(&ADDRESSES) > 0);
}

#[test]
fn uploads_of_unknown_length_end_when_others_wait_without_a_minimum_rate() {
    let upstream = Upstream::start();
    let config = "gateway: {max_connections: 256, min_upload_rate: 0}\n";
    let gateway = Service::gateway(config, &[&upstream.url]);
    let mut hostile = ADDRESSES.map(|source| Hostile::connect(source, &gateway));
    for client in &mut hostile {
        for _ in 0..52 {
            client.send(&request_fields("POST", "/upload"), 0);
        }
    }
    gateway.wait_until("the slots are taken", |_| upstream.held() >= 256);
    assert_eq!(get(&gateway.http).status, 200);
    assert!(ended_uploads(&gateway) > 0);
}

#[test]
fn slow_responses_of_one_address_leave_the_upstream_to_others() {
    let upstream = Upstream::start();
    let gateway = Service::gateway("gateway: {max_connections: 256}\n", &[&upstream.url]);
    let mut client = Hostile::connect("127.0.0.1", &gateway);
    for _ in 0..256 {
        client.send(&request_fields("GET", "/slow"), END_STREAM);
    }
    gateway.wait_until("all have arrived", |gateway| in_flight(gateway, 256));
    gateway.wait_until("the slots are taken", |_| upstream.held() >= 240);
    assert_eq!(get(&gateway.http).status, 200);
    assert_eq!(upstream.held(), 240, "the last sixteenth is for others");
}
