use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::time::{Duration, Instant};

use crate::frames::{END_HEADERS, END_STREAM, Frames, GET, HEADERS, RST_STREAM, STATUS_200};
use crate::support::{Response, Service, read_response, request};
use crate::telemetry::metrics;
use crate::upstream::{OK, Upstream};
use crate::websocket;

/// Upstream whose responses wait until they are released.
struct HeldUpstream {
    url: String,
    state: Arc<Held>,
}

#[derive(Default)]
struct Held {
    /// Number of connections that the gateway may open.
    allowed: usize,
    is_released: Mutex<bool>,
    released: Condvar,
    arrived: AtomicUsize,
    connections: AtomicUsize,
    /// Maximum number of connections that were open when one was accepted.
    max_connections: AtomicUsize,
}

impl Held {
    fn accept(self: &Arc<Self>, stream: TcpStream) {
        self.connections.fetch_add(1, Ordering::Relaxed);
        let (requests, pending) = mpsc::channel();
        let mut reader = stream.try_clone().expect("a socket");
        let (reading, responding) = (Arc::clone(self), Arc::clone(self));
        std::thread::spawn(move || {
            reading.read(&mut reader, &requests);
            reading.connections.fetch_sub(1, Ordering::Relaxed);
        });
        std::thread::spawn(move || responding.respond(stream, &pending));
        // The end of another connection may still be on its way.
        let deadline = Instant::now() + Duration::from_secs(2);
        let open = || self.connections.load(Ordering::Relaxed);
        while open() > self.allowed && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.max_connections.fetch_max(open(), Ordering::Relaxed);
    }

    /// Reads requests without a body, up to the end of the connection.
    fn read(&self, stream: &mut TcpStream, requests: &mpsc::Sender<()>) {
        let mut head = Vec::new();
        let mut buffer = [0; 4096];
        while let Ok(length @ 1..) = stream.read(&mut buffer) {
            head.extend_from_slice(&buffer[..length]);
            if head.ends_with(b"\r\n\r\n") {
                head.clear();
                self.arrived.fetch_add(1, Ordering::Relaxed);
                let _ = requests.send(());
            }
        }
    }

    fn respond(&self, mut stream: TcpStream, pending: &mpsc::Receiver<()>) {
        while pending.recv().is_ok() {
            let is_released = self.is_released.lock().expect("no panic");
            drop(self.released.wait_while(is_released, |released| !*released));
            if stream.write_all(OK).is_err() {
                break;
            }
        }
    }
}

impl HeldUpstream {
    fn start(allowed: usize) -> Self {
        let state = Arc::new(Held { allowed, ..Held::default() });
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let url = format!("http://{}", listener.local_addr().expect("bound"));
        let held = Arc::clone(&state);
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                held.accept(stream);
            }
        });
        Self { url, state }
    }

    fn url(&self) -> String {
        self.url.clone()
    }

    fn arrived(&self) -> usize {
        self.state.arrived.load(Ordering::Relaxed)
    }

    fn max_connections(&self) -> usize {
        self.state.max_connections.load(Ordering::Relaxed)
    }

    fn release(&self) {
        *self.state.is_released.lock().expect("no panic") = true;
        self.state.released.notify_all();
    }
}

impl Drop for HeldUpstream {
    fn drop(&mut self) {
        self.release();
    }
}

/// Sends requests on one HTTP/2 connection.
fn send_streams(gateway: &Service, count: u32) -> Frames {
    let mut client = Frames::connect(&gateway.http, 65_535);
    for stream in 0..count {
        client.send(HEADERS, END_HEADERS | END_STREAM, 2 * stream + 1, GET);
    }
    client
}

/// Reads this number of complete responses, and returns how many of them have the status 200.
fn read_streams(client: &mut Frames, count: usize) -> usize {
    let (mut ended, mut successful) = (0, 0);
    while ended < count {
        let frame = client.next_frame().expect("a frame");
        successful += usize::from(frame.kind == HEADERS && frame.payload.starts_with(STATUS_200));
        ended += usize::from(frame.flags & END_STREAM != 0);
        assert_ne!(frame.kind, RST_STREAM, "after {ended}");
    }
    successful
}

fn in_background(gateway: &Service) -> std::thread::JoinHandle<Response> {
    let address = gateway.http.clone();
    std::thread::spawn(move || request(&address, "GET", "/", &[], b""))
}

fn wait_for_requests(gateway: &Service, upstream: &HeldUpstream, count: usize) {
    gateway.wait_until("the requests arrive", |_| upstream.arrived() >= count);
}

/// Returns a metric of an upstream, with further labels.
fn of(gateway: &Service, name: &str, upstream: &HeldUpstream, labels: &str) -> Option<f64> {
    let name = format!("tidegate_upstream_{name}{{upstream=\"{}\"{labels}}}", upstream.url());
    metrics(gateway).get(&name).copied()
}

fn wait_until_idle(gateway: &Service, upstream: &HeldUpstream) {
    gateway.wait_until("no request is in flight", |gateway| {
        of(gateway, "requests_in_flight", upstream, "") == Some(0.0)
            && of(gateway, "requests_pending", upstream, "") == Some(0.0)
    });
}

fn assert_unavailable(response: &Response) {
    let kind = response.header("content-type");
    assert_eq!((response.status, kind), (503, Some("application/problem+json")), "{response:?}");
    assert_eq!(response.header("retry-after"), Some("1"), "{response:?}");
}

/// Settings with a queue in which one client may have 100 requests.
const EIGHT: &str = "gateway: {max_connections: 8, max_pending: 106, pending_timeout: 1m}\n";

#[test]
fn one_client_cannot_open_more_connections_than_allowed() {
    let upstream = HeldUpstream::start(8);
    let gateway = Service::gateway(EIGHT, &[&upstream.url()]);
    let mut client = send_streams(&gateway, 256);
    assert_eq!(read_streams(&mut client, 148), 0, "8 are in flight and 100 wait");
    wait_for_requests(&gateway, &upstream, 8);
    assert_eq!(of(&gateway, "requests_pending", &upstream, ""), Some(100.0));
    let full = request(&gateway.http, "GET", "/", &[], b"");
    assert_unavailable(&full);
    upstream.release();
    assert_eq!(read_streams(&mut client, 108), 108);
    assert_eq!((upstream.arrived(), upstream.max_connections()), (108, 8));
    wait_until_idle(&gateway, &upstream);
    assert_eq!(of(&gateway, "rejections_total", &upstream, ",reason=\"queue_full\""), Some(149.0));
    assert_eq!(of(&gateway, "rejections_total", &upstream, ",reason=\"queue_timeout\""), Some(0.0));
    assert_eq!(of(&gateway, "up", &upstream, ""), Some(1.0));
    let mut client = send_streams(&gateway, 108);
    assert_eq!(read_streams(&mut client, 108), 108, "all places are free");
    assert_eq!(upstream.max_connections(), 8);
}

#[test]
fn places_are_free_after_clients_have_left() {
    let upstream = HeldUpstream::start(8);
    let gateway = Service::gateway(EIGHT, &[&upstream.url()]);
    for round in 0..4 {
        let mut client = send_streams(&gateway, 108);
        wait_for_requests(&gateway, &upstream, 8 * (round + 1));
        gateway.wait_until("the others wait", |gateway| {
            of(gateway, "requests_pending", &upstream, "") == Some(100.0)
        });
        if round % 2 == 0 {
            // Those that wait leave first: those in flight would make room for them.
            for stream in (0..108).rev() {
                client.send(RST_STREAM, 0, 2 * stream + 1, &8_u32.to_be_bytes());
            }
        } else {
            client.close();
        }
        wait_until_idle(&gateway, &upstream);
    }
    let arrived = upstream.arrived();
    let mut client = send_streams(&gateway, 8);
    wait_for_requests(&gateway, &upstream, arrived + 8);
    upstream.release();
    assert_eq!(read_streams(&mut client, 8), 8);
    assert_eq!(upstream.max_connections(), 8);
}

#[test]
fn wait_for_an_upstream_is_bounded() {
    let upstream = HeldUpstream::start(8);
    let config = "gateway: {max_connections: 1, max_pending: 1, pending_timeout: 300ms}\n\
                  policies: [{name: p, limit: 100, window: 1h}]\n";
    let gateway = Service::gateway(config, &[&upstream.url()]);
    let first = in_background(&gateway);
    wait_for_requests(&gateway, &upstream, 1);
    let late = request(&gateway.http, "GET", "/", &[], b"");
    assert_unavailable(&late);
    // As with other failures of the gateway, the request stays charged.
    assert!(late.header("ratelimit").is_some_and(|value| value.contains("r=98")), "{late:?}");
    assert_eq!(of(&gateway, "rejections_total", &upstream, ",reason=\"queue_timeout\""), Some(1.0));
    upstream.release();
    assert_eq!(first.join().expect("no panic").status, 200);
    assert_eq!(request(&gateway.http, "GET", "/", &[], b"").status, 200);
}

#[test]
fn other_upstreams_take_what_a_busy_one_cannot() {
    let (busy, other) = (HeldUpstream::start(8), Upstream::responding_with(OK));
    let config = "gateway: {max_connections: 1, max_pending: 1, pending_timeout: 1m}\n";
    let gateway = Service::gateway(config, &[&busy.url(), &other.url()]);
    let first = in_background(&gateway);
    wait_for_requests(&gateway, &busy, 1);
    for _ in 0..10 {
        assert_eq!(request(&gateway.http, "GET", "/", &[], b"").status, 200);
    }
    assert_eq!((busy.arrived(), other.received().len()), (1, 10));
    busy.release();
    assert_eq!(first.join().expect("no panic").status, 200);
}

#[test]
fn upgraded_connection_and_unfinished_response_keep_their_place() {
    let (end, ended) = mpsc::channel::<()>();
    let ended = Mutex::new(ended);
    let half = Upstream::start(move |_, stream| {
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\nhalf")?;
        let _ = ended.lock().expect("no panic").recv();
        stream.write_all(b"half")
    });
    let config = "gateway: {max_connections: 1, max_pending: 0}\n";
    let gateway = Service::gateway(config, &[&half.url()]);
    let mut client = TcpStream::connect(&gateway.http).expect("the service listens");
    client.write_all(b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n").expect("sent");
    websocket::read_head(&mut client);
    assert_unavailable(&request(&gateway.http, "GET", "/", &[], b""));
    drop(end);
    let all = |mut client: TcpStream| {
        let mut body = String::new();
        client.read_to_string(&mut body).expect("text");
        body
    };
    assert_eq!(all(client), "halfhalf");
    gateway.wait_until("the place is free", |gateway| {
        request(&gateway.http, "GET", "/", &[], b"").status == 200
    });

    let echo = websocket::echo();
    let gateway = Service::gateway(config, &[&echo.url()]);
    let client = websocket::connect(&gateway);
    let open = |mut client: TcpStream| websocket::read_head(&mut client);
    let mut first = client.try_clone().expect("a socket");
    assert!(websocket::read_head(&mut first).starts_with("http/1.1 101 "));
    let mut second = websocket::connect(&gateway);
    assert_unavailable(&read_response(&mut second));
    client.shutdown(std::net::Shutdown::Both).expect("open");
    gateway.wait_until("the place is free", |gateway| {
        open(websocket::connect(gateway)).starts_with("http/1.1 101 ")
    });
}

#[test]
fn lack_of_file_descriptors_is_no_failure_of_the_upstream() {
    // With a name, the lookup fails for the same reason.
    for host in ["127.0.0.1", "localhost"] {
        let upstream = HeldUpstream::start(usize::MAX);
        let url = upstream.url().replace("127.0.0.1", host);
        // A busy machine needs time to connect.
        let config = "gateway: {connect_timeout: 20s}\n";
        let gateway = Service::gateway_with_files(config, &[&url], 48);
        let mut client = send_streams(&gateway, 200);
        // As many connections are open as there may be files.
        assert_eq!(read_streams(&mut client, 150), 0, "{host}");
        gateway.wait_until_logged("ulimit -n");
        upstream.release();
        assert!(read_streams(&mut client, 50) > 0, "{host}");
        client.close();
        gateway.wait_until("files are free", |gateway| gateway.open_files() < 32);
        let all = metrics(&gateway);
        let of = |name: &str, labels: &str| {
            all[&format!("tidegate_upstream_{name}{{upstream=\"{url}\"{labels}}}")].to_string()
        };
        assert_eq!(of("up", ""), "1", "{host}: {all:?}");
        assert_eq!(of("ejections_total", ""), "0", "{host}: {all:?}");
        assert_eq!(of("errors_total", ",kind=\"connect\""), "0", "{host}: {all:?}");
        let rejected = all["tidegate_gateway_requests_total{code=\"503\"}"];
        let local = all["tidegate_gateway_local_errors_total{resource=\"files\"}"];
        assert_eq!(local.to_string(), rejected.to_string());
        assert!(rejected >= 150.0, "{rejected}");
        assert_eq!(gateway.output().matches("ulimit -n").count(), 1, "once per minute");
        assert!(!gateway.output().contains("ejected"), "{}", gateway.output());
        assert_eq!(request(&gateway.http, "GET", "/", &[], b"").status, 200, "{host}");
    }
}
