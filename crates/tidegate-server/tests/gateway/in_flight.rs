use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::refunds::Door;
use crate::support::{Redis, Response, Service, request};
use crate::upstream::{OK, Received, Upstream};
use crate::websocket::{connect, echo, read_frame, read_head, write_frame};

/// Lease of a request: after it, the units of a killed gateway are free.
const LEASE: Duration = Duration::from_secs(10);

fn policy(store: &str, limit: u64) -> String {
    format!(
        "{store}policies: [{{name: exports, key: [ip], algorithm: concurrency, limit: {limit}}}]\n"
    )
}

fn get(gateway: &Service, path: &str) -> Response {
    request(&gateway.http, "GET", path, &[], b"")
}

/// Returns the units that are left after a request, which is in flight itself.
fn left(response: &Response) -> u64 {
    response.header("x-ratelimit-remaining").expect("the header").parse().expect("a number")
}

/// Requests that the upstream serves, now and at most.
#[derive(Clone, Default)]
struct Served(Arc<(AtomicUsize, AtomicUsize)>);

impl Served {
    fn now(&self) -> usize {
        self.0.0.load(Ordering::SeqCst)
    }

    fn most(&self) -> usize {
        self.0.1.load(Ordering::SeqCst)
    }

    /// Upstream that serves `/slow` when the door is open.
    fn upstream(&self, door: &Door) -> Upstream {
        let (served, door) = (self.clone(), door.clone());
        Upstream::start(move |request: &Received, stream: &mut TcpStream| {
            if request.head.contains(" /slow") {
                let (now, most) = &*served.0;
                most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                door.pass();
                now.fetch_sub(1, Ordering::SeqCst);
            }
            stream.write_all(OK)
        })
    }
}

fn store(redis: &Redis) -> String {
    // A decision of an instance alone would admit requests beside those of the store.
    format!("store: {{redis: '{}', timeout: 10s}}\n", redis.url())
}

fn assert_limit_in_flight(gateways: &[&Service], served: &Served, door: &Door) {
    let gateway = |turn: usize| gateways[turn % gateways.len()];
    std::thread::scope(|scope| {
        let requests: Vec<_> =
            (0..30).map(|turn| scope.spawn(move || get(gateway(turn), "/slow").status)).collect();
        gateway(0).wait_until("25 are denied", |_| {
            requests.iter().filter(|request| request.is_finished()).count() == 25
        });
        gateway(0).wait_until("5 are served", |_| served.now() == 5);
        door.open();
        let statuses = requests.into_iter().map(|request| request.join().expect("no panic"));
        let statuses: Vec<u16> = statuses.collect();
        assert_eq!(statuses.iter().filter(|status| **status == 200).count(), 5, "{statuses:?}");
        assert_eq!(statuses.iter().filter(|status| **status == 429).count(), 25, "{statuses:?}");
    });
    assert_eq!(served.most(), 5);
    let start = Instant::now();
    for turn in 0..10 {
        gateway(turn).wait_until("all are released", |gateway| {
            let response = get(gateway, "/");
            response.status == 200 && left(&response) == 4
        });
    }
    assert!(start.elapsed() < LEASE, "{:?}", start.elapsed());
}

#[test]
fn requests_in_flight_never_exceed_the_limit() {
    let (served, door) = (Served::default(), Door::default());
    let upstream = served.upstream(&door);
    let gateway = Service::gateway(&policy("", 5), &[&upstream.url()]);
    assert_limit_in_flight(&[&gateway], &served, &door);
}

#[test]
fn requests_in_flight_of_two_gateways_never_exceed_the_limit() {
    let redis = Redis::start();
    let (served, door) = (Served::default(), Door::default());
    let upstream = served.upstream(&door);
    let start = || Service::gateway(&policy(&store(&redis), 5), &[&upstream.url()]);
    assert_limit_in_flight(&[&start(), &start()], &served, &door);
    redis.assert_every_key_expires();
}

#[test]
fn denial_names_the_limit_and_when_to_try_again() {
    let (served, door) = (Served::default(), Door::default());
    let upstream = served.upstream(&door);
    let gateway = Service::gateway(&policy("", 1), &[&upstream.url()]);
    std::thread::scope(|scope| {
        let slow = scope.spawn(|| get(&gateway, "/slow").status);
        gateway.wait_until("it is served", |_| served.now() == 1);
        let denied = get(&gateway, "/");
        assert_eq!((denied.status, denied.header("retry-after")), (429, Some("1")), "{denied:?}");
        let listed = r#""exports";q=1;qu="concurrent-requests""#;
        assert_eq!(denied.header("ratelimit-policy"), Some(listed));
        let detail = denied.json()["detail"].as_str().expect("a detail").to_owned();
        assert!(detail.contains("\"exports\" allows 1 in flight"), "{detail}");
        door.open();
        assert_eq!(slow.join().expect("no panic"), 200);
    });
    // One after the other, the client is never denied.
    for _ in 0..20 {
        assert_eq!(get(&gateway, "/").status, 200);
    }
}

#[test]
fn client_that_disconnects_is_released() {
    let redis = Redis::start();
    for store in [String::new(), store(&redis)] {
        let (served, door) = (Served::default(), Door::default());
        let upstream = Upstream::start({
            let (slow, door) = (served.upstream(&door), door.clone());
            move |request: &Received, stream: &mut TcpStream| {
                if request.head.contains(" /body") {
                    stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf")?;
                    door.pass();
                }
                let mut other = TcpStream::connect(&slow.address)?;
                other.write_all(request.head.as_bytes())?;
                let mut response = [0; OK.len()];
                other.read_exact(&mut response)?;
                stream.write_all(&response)
            }
        });
        let gateway = Service::gateway(&policy(&store, 1), &[&upstream.url()]);
        for path in ["/slow", "/body"] {
            let mut client = TcpStream::connect(&gateway.http).expect("it listens");
            let head = format!("GET {path} HTTP/1.1\r\nHost: h\r\n\r\n");
            client.write_all(head.as_bytes()).expect("sent");
            if path == "/body" {
                read_head(&mut client);
            } else {
                gateway.wait_until("it is served", |_| served.now() == 1);
            }
            assert_eq!(get(&gateway, "/").status, 429, "{path}");
            drop(client);
            let start = Instant::now();
            gateway.wait_until("it is released", |gateway| get(gateway, "/").status == 200);
            assert!(start.elapsed() < LEASE, "{path}: {:?}", start.elapsed());
        }
        door.open();
    }
}

#[test]
fn failed_and_repeated_requests_are_released() {
    let broken = Upstream::start(|_, stream| stream.write_all(b"nonsense\r\n\r\n"));
    let gateway = Service::gateway(&policy("", 1), &[&broken.url()]);
    for _ in 0..5 {
        assert_eq!(get(&gateway, "/").status, 502);
    }
    // A request that fails over to the second upstream is in flight once.
    let dead = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let dead_url = format!("http://{}", dead.local_addr().expect("bound"));
    drop(dead);
    let upstream = Upstream::responding_with(OK);
    let gateway = Service::gateway(&policy("", 1), &[&dead_url, &upstream.url()]);
    for _ in 0..5 {
        assert_eq!(get(&gateway, "/").status, 200);
    }
    let retries = gateway.admin("/metrics").body;
    assert!(!retries.contains("tidegate_upstream_retries_total 0\n"), "{retries}");
}

#[test]
fn websocket_is_in_flight_until_it_is_closed() {
    let redis = Redis::start();
    for store in [String::new(), store(&redis)] {
        let upstream = echo();
        let gateway = Service::gateway(&policy(&store, 1), &[&upstream.url()]);
        let open = || {
            let mut client = connect(&gateway);
            let head = read_head(&mut client);
            (client, head.split(' ').nth(1).expect("a status").to_owned())
        };
        let (mut client, status) = open();
        assert_eq!(status, "101");
        for _ in 0..3 {
            write_frame(&mut client, b"hello", Some([1, 2, 3, 4])).expect("sent");
            assert_eq!(read_frame(&mut client).expect("an echo"), b"hello");
            assert_eq!(open().1, "429");
        }
        drop(client);
        let start = Instant::now();
        gateway.wait_until("it is closed", |_| open().1 == "101");
        assert!(start.elapsed() < LEASE, "{:?}", start.elapsed());
    }
}

/// Upstream that has used as many tokens as the request says.
fn model() -> Upstream {
    Upstream::start(|request: &Received, stream: &mut TcpStream| {
        let status = request.header("x-status").unwrap_or("200");
        let used = request.header("x-use").map(|used| format!("X-Tokens-Used: {used}\r\n"));
        let used = used.unwrap_or_default();
        write!(stream, "HTTP/1.1 {status} Status\r\n{used}Content-Length: 2\r\n\r\nok")
    })
}

#[test]
fn tokens_are_reserved_and_settled_by_the_response() {
    let config = |store: &str| {
        format!(
            "{store}policies:
  - name: tokens
    key: [ip]
    limit: 10000
    window: 30d
    cost: {{reserve: {{attribute: header.x-max-tokens, default: 2000, max: 4000}},
            actual: {{response_header: x-tokens-used}}}}
    refund_on: {{status: [5xx]}}
"
        )
    };
    let redis = Redis::start();
    let upstream = model();
    let test = |gateways: &[Service]| {
        let mut taken = 0;
        for (turn, (headers, reserve, used)) in [
            (&[("x-use", "700")][..], 2_000, 700),
            (&[("x-use", "0")], 2_000, 0),
            (&[("x-max-tokens", "300"), ("x-use", "250")], 300, 250),
            (&[("x-max-tokens", "9999"), ("x-use", "50")], 4_000, 50),
            // More than was reserved is charged, too.
            (&[("x-max-tokens", "10"), ("x-use", "1500")], 10, 1_500),
            // Without a number, the reserve stays.
            (&[("x-max-tokens", "100")], 100, 100),
            (&[("x-max-tokens", "100"), ("x-use", "many")], 100, 100),
            (&[("x-use", "700"), ("x-status", "503")], 2_000, 0),
            (&[("x-use", "400"), ("x-status", "404")], 2_000, 400),
        ]
        .into_iter()
        .enumerate()
        {
            let gateway = &gateways[turn % gateways.len()];
            let response = request(&gateway.http, "POST", "/", headers, b"");
            assert_eq!(left(&response), 10_000 - taken - reserve, "{turn}: {response:?}");
            let used_header = headers.iter().find(|(name, _)| *name == "x-use");
            let used_header = used_header.map(|(_, used)| *used);
            assert_eq!(response.header("x-tokens-used"), used_header, "the client sees it");
            taken += used;
        }
        let peek = request(&gateways[0].http, "POST", "/", &[("x-max-tokens", "1")], b"");
        assert_eq!(left(&peek), 10_000 - taken - 1);
    };
    test(&[Service::gateway(&config(""), &[&upstream.url()])]);
    let start = || Service::gateway(&config(&store(&redis)), &[&upstream.url()]);
    test(&[start(), start()]);
    redis.assert_every_key_expires();
}

#[test]
fn refunds_settlements_and_limits_in_flight_do_not_disturb_each_other() {
    let upstream = model();
    let gateway = Service::gateway(
        "policies:
  - {name: exports, key: [ip], algorithm: concurrency, limit: 1, refund_on: {status: [404]}}
  - {name: failures, key: [ip], limit: 3, window: 1h, refund_on: {status: [2xx]}}
  - name: tokens
    key: [ip]
    limit: 100
    window: 1h
    mode: shadow
    cost: {reserve: 60, actual: {response_header: x-tokens-used}}
",
        &[&upstream.url()],
    );
    let call = |status: &str| {
        let headers = [("x-status", status), ("x-use", "1")];
        request(&gateway.http, "GET", "/", &headers, b"").status
    };
    for _ in 0..20 {
        assert_eq!(call("200"), 200);
    }
    assert_eq!([call("404"), call("500"), call("404"), call("200")], [404, 500, 404, 429]);
    let metrics = gateway.admin("/metrics").body;
    let shadow = "tidegate_decisions_total{policy=\"tokens\",outcome=\"shadow_denied\"} 0\n";
    assert!(metrics.contains(shadow), "settled in shadow mode, too: {metrics}");
}

#[test]
fn units_in_flight_are_released_while_the_gateway_drains() {
    let redis = Redis::start();
    let (served, door) = (Served::default(), Door::default());
    let upstream = served.upstream(&door);
    let start = || Service::gateway(&policy(&store(&redis), 1), &[&upstream.url()]);
    let (mut gateway, other) = (start(), start());
    std::thread::scope(|scope| {
        let head = b"GET /slow HTTP/1.1\r\nHost: h\r\n\r\n";
        let slow = scope.spawn(|| crate::support::raw(&gateway.http, head).status);
        gateway.wait_until("it is served", |_| served.now() == 1);
        gateway.signal("TERM");
        gateway.wait_until_logged("draining");
        assert_eq!(get(&other, "/").status, 429);
        door.open();
        assert_eq!(slow.join().expect("no panic"), 200);
    });
    assert!(gateway.wait_for_exit().success());
    assert_eq!(get(&other, "/").status, 200);
}

/// Units of a gateway that lives are renewed for longer than a lease; those of one that is killed
/// are free after it.
#[test]
fn killed_gateway_frees_its_units_after_the_lease() {
    let redis = Redis::start();
    let (served, door) = (Served::default(), Door::default());
    let upstream = served.upstream(&door);
    let start = || Service::gateway(&policy(&store(&redis), 2), &[&upstream.url()]);
    let (killed, other) = (start(), start());
    let slow = [(); 2].map(|()| {
        let mut client = TcpStream::connect(&killed.http).expect("it listens");
        client.write_all(b"GET /slow HTTP/1.1\r\nHost: h\r\n\r\n").expect("sent");
        client
    });
    other.wait_until("both are served", |_| served.now() == 2);
    let start = Instant::now();
    while start.elapsed() < LEASE + LEASE / 4 {
        assert_eq!(get(&other, "/").status, 429, "{:?}", start.elapsed());
        std::thread::sleep(Duration::from_millis(100));
    }
    killed.signal("KILL");
    door.open();
    let start = Instant::now();
    other.wait_until("the units are free", |other| get(other, "/").status == 200);
    assert!(start.elapsed() < LEASE + Duration::from_secs(5), "{:?}", start.elapsed());
    other.wait_until("both are free", |other| left(&get(other, "/")) == 1);
    drop(slow);
}
