use std::cell::Cell;
use std::io::Write as _;
use std::net::TcpStream;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use serde_json::json;

use crate::support::{Redis, Response, Service, TEST_TIMEOUT, raw, request};
use crate::upstream::{Received, Upstream};
use crate::websocket::{connect, echo, read_head};

const SECOND: Duration = Duration::from_secs(1);

/// Door of the upstream: requests to `/slow` wait until it is open.
#[derive(Clone, Default)]
pub(crate) struct Door(Arc<(Mutex<bool>, Condvar)>);

impl Door {
    pub(crate) fn open(&self) {
        *self.0.0.lock().expect("no panic") = true;
        self.0.1.notify_all();
    }

    pub(crate) fn pass(&self) {
        let closed = self.0.0.lock().expect("no panic");
        let passed = self.0.1.wait_timeout_while(closed, TEST_TIMEOUT, |open| !*open);
        assert!(!passed.expect("no panic").1.timed_out(), "the door stays closed");
    }
}

/// Upstream that responds with the status in `x-status`, to `/slow` when the door is open.
fn upstream(door: &Door) -> Upstream {
    let door = door.clone();
    Upstream::start(move |request: &Received, stream: &mut TcpStream| {
        if request.head.contains(" /slow") {
            door.pass();
        }
        let status = request.header("x-status").unwrap_or("200");
        let body = if request.head.starts_with("HEAD ") || status == "304" { "" } else { "ok" };
        write!(stream, "HTTP/1.1 {status} Status\r\nContent-Length: {}\r\n\r\n{body}", body.len())
    })
}

fn login(gateway: &Service, status: &str) -> Response {
    request(&gateway.http, "POST", "/login", &[("x-status", status)], b"user=ann")
}

fn config(store: &str, limit: u64) -> String {
    format!(
        "{store}policies: [{{name: logins, match: {{path: /**}}, key: [ip], limit: {limit}, \
         window: 30d, refund_on: {{status: [2xx, 3xx]}}}}]\n"
    )
}

/// Gateways on memory and, two of them, on one Redis.
fn on_both_stores(test: impl Fn(&[Service], &Upstream), config: impl Fn(&str) -> String) {
    let upstream = upstream(&Door::default());
    test(&[Service::gateway(&config(""), &[&upstream.url()])], &upstream);
    let redis = Redis::start();
    let store = redis.healthy_store();
    let start = || Service::gateway(&config(&store), &[&upstream.url()]);
    test(&[start(), start()], &upstream);
    redis.assert_every_key_expires();
}

#[test]
fn only_failed_logins_count() {
    let test = |gateways: &[Service], _: &Upstream| {
        let gateway = |turn: usize| &gateways[turn % gateways.len()];
        for turn in 0..20 {
            let status = if turn % 2 == 0 { "200" } else { "302" };
            let response = login(gateway(turn), status);
            assert_eq!(response.status.to_string(), status, "{turn}: {response:?}");
            // The headers are those of the charge.
            assert_eq!(response.header("x-ratelimit-remaining"), Some("4"), "{turn}");
        }
        for turn in 0..5 {
            assert_eq!(login(gateway(turn), "401").status, 401, "{turn}");
        }
        for turn in 0..4 {
            assert_eq!(login(gateway(turn), "200").status, 429, "{turn}");
        }
    };
    on_both_stores(test, |store| config(store, 5));
}

#[test]
fn parallel_guesses_cannot_exceed_the_limit() {
    let test = |gateways: &[Service], upstream: &Upstream| {
        let before = upstream.received().len();
        let passed = std::thread::scope(|scope| {
            let guesses: Vec<_> = (0..50)
                .map(|turn| &gateways[turn % gateways.len()])
                .map(|gateway| scope.spawn(|| login(gateway, "401").status))
                .collect();
            let statuses = guesses.into_iter().map(|guess| guess.join().expect("no panic"));
            statuses.filter(|status| *status == 401).count()
        });
        assert_eq!((passed, upstream.received().len() - before), (5, 5));
    };
    on_both_stores(test, |store| config(store, 5));
}

/// Successes come and go at the same time, and none of them leaves a unit behind or returns that
/// of a failure.
#[test]
fn parallel_successes_return_only_their_own_units() {
    let test = |gateways: &[Service], _: &Upstream| {
        for turn in 0..3 {
            assert_eq!(login(&gateways[turn % gateways.len()], "401").status, 401);
        }
        std::thread::scope(|scope| {
            for turn in 0..8 {
                let gateway = &gateways[turn % gateways.len()];
                scope.spawn(move || {
                    for _ in 0..10 {
                        let status = login(gateway, "200").status;
                        assert!([200, 429].contains(&status), "{status}");
                    }
                });
            }
        });
        // Two units are left. The deny cache of another gateway may need a second to see so.
        gateways[0].wait_until("a login passes", |gateway| login(gateway, "200").status == 200);
        for _ in 0..2 {
            assert_eq!(login(&gateways[0], "401").status, 401);
        }
        assert_eq!(login(&gateways[0], "401").status, 429);
    };
    on_both_stores(test, |store| config(store, 5));
}

#[test]
fn failures_among_successes_stay_within_the_limit_of_each_algorithm() {
    let algorithms =
        ["sliding-log, encoding: packed", "sliding-counter", "fixed-window", "token-bucket"];
    for algorithm in algorithms {
        let test = |gateways: &[Service], _: &Upstream| {
            let failed = std::thread::scope(|scope| {
                let mixed = move |thread: usize| {
                    let gateway = &gateways[thread % gateways.len()];
                    let guess = |turn: usize| {
                        login(gateway, if turn % 3 == thread % 3 { "401" } else { "200" })
                    };
                    (0..20).filter(|turn| guess(*turn).status == 401).count()
                };
                let threads: Vec<_> =
                    (0..8).map(|thread| scope.spawn(move || mixed(thread))).collect();
                threads.into_iter().map(|thread| thread.join().expect("no panic")).sum::<usize>()
            });
            // Units of successes that were in flight are back: the rest of the limit is left.
            let mut failed = failed;
            let deadline = Instant::now() + TEST_TIMEOUT;
            while failed < 5 && Instant::now() < deadline {
                failed += usize::from(login(&gateways[0], "401").status == 401);
            }
            assert_eq!(failed, 5, "{algorithm}");
            assert_eq!(login(&gateways[0], "401").status, 429, "{algorithm}");
        };
        on_both_stores(test, |store| {
            config(store, 5).replace("limit: 5", &format!("algorithm: {algorithm}, limit: 5"))
        });
    }
}

#[test]
fn denied_client_is_admitted_after_a_parallel_success() {
    let redis = Redis::start();
    let store = redis.healthy_store();
    for other in [0, 1] {
        let door = Door::default();
        let upstream = upstream(&door);
        // A count of its own for each turn.
        let config = config(&store, 1).replace("logins", &format!("logins-{other}"));
        let start = || Service::gateway(&config, &[&upstream.url()]);
        let gateways = [start(), start()];
        std::thread::scope(|scope| {
            let slow = || request(&gateways[0].http, "GET", "/slow", &[], b"").status;
            let slow = scope.spawn(slow);
            gateways[0].wait_until("it arrives", |_| !upstream.received().is_empty());
            gateways[other].wait_until("the cache denies", |gateway| {
                assert_eq!(login(gateway, "200").status, 429);
                let metrics = gateway.admin("/metrics").body;
                let by_cache = "tidegate_decision_sources_total{source=\"deny-cache\"} ";
                let count = metrics.lines().find_map(|line| line.strip_prefix(by_cache));
                count.expect("a metric") != "0"
            });
            door.open();
            assert_eq!(slow.join().expect("no panic"), 200);
            let (start, denied) = (Instant::now(), Cell::new(Duration::ZERO));
            gateways[other].wait_until("it is admitted", |gateway| {
                let elapsed = start.elapsed();
                let is_admitted = login(gateway, "200").status == 200;
                if !is_admitted {
                    denied.set(elapsed);
                }
                is_admitted
            });
            assert!(denied.get() < SECOND, "{:?}", denied.get());
        });
    }
}

#[test]
fn other_policies_and_other_statuses_keep_their_units() {
    let upstream = upstream(&Door::default());
    let gateway = Service::gateway(
        "policies:
  - {name: all, limit: 9, window: 1h}
  - {name: refunding, limit: 2, window: 1h, refund_on: {status: [404, '5xx']}}
  - {name: shadow, limit: 1, window: 1h, mode: shadow, refund_on: {status: 404}}
",
        &[&upstream.url()],
    );
    let left = |status: &str| {
        let response = login(&gateway, status);
        assert_eq!(response.status.to_string(), status);
        let header = response.header("ratelimit").expect("the header").to_owned();
        let left = |name: &str| {
            let (_, rest) = header.split_once(&format!("\"{name}\";r="))?;
            rest.split(';').next()?.parse::<u64>().ok()
        };
        (left("all").expect("all"), left("refunding").expect("refunding"))
    };
    assert_eq!(left("404"), (8, 1));
    assert_eq!(left("503"), (7, 1));
    assert_eq!(left("404"), (6, 1));
    assert_eq!(left("403"), (5, 1));
    assert_eq!(left("404"), (4, 0));
    assert_eq!(left("200"), (3, 0));
    assert_eq!(login(&gateway, "404").status, 429);
    // 404 returned the only unit of the policy in shadow mode, 503 kept it.
    let metrics = gateway.admin("/metrics").body;
    let shadow = "tidegate_decisions_total{policy=\"shadow\",outcome=\"shadow_denied\"} ";
    let line = metrics.lines().find_map(|line| line.strip_prefix(shadow));
    assert_eq!(line, Some("5"), "{metrics}");
    for (policy, count) in [("all", 0), ("refunding", 4), ("shadow", 1)] {
        let line =
            format!("tidegate_refunds_total{{policy=\"{policy}\",outcome=\"success\"}} {count}\n");
        assert!(metrics.contains(&line), "{line} in {metrics}");
    }
}

#[test]
fn response_of_the_gateway_counts_by_its_status() {
    let broken = Upstream::start(|_, stream| stream.write_all(b"nonsense\r\n\r\n"));
    let policies = |status: &str| {
        format!("policies: [{{name: p, limit: 1, window: 1h, refund_on: {{status: {status}}}}}]\n")
    };
    let gateway = Service::gateway(&policies("[5xx]"), &[&broken.url()]);
    for _ in 0..3 {
        assert_eq!(request(&gateway.http, "GET", "/", &[], b"").status, 502);
    }
    let gateway = Service::gateway(&policies("[2xx, 3xx]"), &[&broken.url()]);
    assert_eq!(request(&gateway.http, "GET", "/", &[], b"").status, 502);
    assert_eq!(request(&gateway.http, "GET", "/", &[], b"").status, 429);
}

#[test]
fn client_that_leaves_before_the_response_is_not_refunded() {
    let door = Door::default();
    let upstream = upstream(&door);
    let gateway = Service::gateway(&config("", 1), &[&upstream.url()]);
    let mut client = TcpStream::connect(&gateway.http).expect("it listens");
    client.write_all(b"GET /slow HTTP/1.1\r\nHost: h\r\n\r\n").expect("sent");
    gateway.wait_until("the request arrives", |_| upstream.received().len() == 1);
    drop(client);
    gateway.wait_until("the gateway sees it", |gateway| {
        gateway.admin("/metrics").body.contains("tidegate_gateway_requests_in_flight 0")
    });
    door.open();
    assert_eq!(login(&gateway, "200").status, 429);
}

#[test]
fn head_requests_and_upgrades_are_refunded_by_their_status() {
    let upstream = upstream(&Door::default());
    let gateway = Service::gateway(&config("", 1), &[&upstream.url()]);
    for status in ["200", "304"] {
        let head = request(&gateway.http, "HEAD", "/", &[("x-status", status)], b"");
        assert_eq!(head.status.to_string(), status);
    }
    let upgrade = |listed: &str| {
        let upstream = echo();
        let config = config("", 1).replace("[2xx, 3xx]", listed);
        let gateway = Service::gateway(&config, &[&upstream.url()]);
        let open = || {
            let head = read_head(&mut connect(&gateway));
            head.split(' ').nth(1).expect("a status").to_owned()
        };
        [open(), open()]
    };
    assert_eq!(upgrade("[101]"), ["101", "101"]);
    assert_eq!(upgrade("[2xx]"), ["101", "429"]);
}

#[test]
fn grpc_status_counts_wherever_it_is() {
    let upstream = Upstream::start(|request, stream| {
        let status = request.header("x-status").unwrap_or_default();
        if request.head.contains(" /headers") {
            write!(
                stream,
                "HTTP/1.1 200 OK\r\nContent-Type: application/grpc\r\ngrpc-status: {status}\r\n\
                 Content-Length: 0\r\n\r\n"
            )
        } else {
            write!(
                stream,
                "HTTP/1.1 200 OK\r\nContent-Type: application/grpc+proto\r\n\
                 Transfer-Encoding: chunked\r\nTrailer: grpc-status\r\n\r\n\
                 5\r\nhello\r\n0\r\ngrpc-status: {status}\r\n\r\n"
            )
        }
    });
    // Only a gRPC response has a gRPC status.
    let http = Upstream::responding_with(
        b"HTTP/1.1 401 Unauthorized\r\ngrpc-status: 0\r\nContent-Length: 0\r\n\r\n",
    );
    let gateway = Service::gateway(&config("", 1), &[&http.url()]);
    assert_eq!([login(&gateway, "").status, login(&gateway, "").status], [401, 429]);
    for path in ["/headers", "/trailers"] {
        let gateway = Service::gateway(&config("", 2), &[&upstream.url()]);
        let call = |status: &str| {
            let grpc = ("content-type", "application/grpc");
            request(
                &gateway.http,
                "POST",
                path,
                &[grpc, ("te", "trailers"), ("x-status", status)],
                b"",
            )
        };
        let denied = |response: &Response| response.header("grpc-status") == Some("8");
        for _ in 0..10 {
            // The trailers do not wait for the refund.
            gateway.wait_until("the refund", |_| !denied(&call("0")));
        }
        gateway.wait_until("all refunds", |gateway| {
            let metrics = gateway.admin("/metrics").body;
            let value = |name: &str| {
                let name = format!("{name}{{policy=\"logins\",outcome=");
                let line = metrics.lines().find_map(|line| line.strip_prefix(&name));
                line.and_then(|line| line.split(' ').nth(1)).expect("a number").to_owned()
            };
            // The first outcomes are "allowed" and "success".
            value("tidegate_decisions_total") == value("tidegate_refunds_total")
        });
        for _ in 0..2 {
            let response = call("16");
            assert!(!denied(&response), "{path}: {response:?}");
        }
        assert!(denied(&call("16")), "{path}");
    }
}

#[test]
fn refund_is_made_while_the_gateway_drains() {
    let redis = Redis::start();
    let store = redis.healthy_store();
    let door = Door::default();
    let upstream = upstream(&door);
    let mut gateway = Service::gateway(&config(&store, 1), &[&upstream.url()]);
    std::thread::scope(|scope| {
        let slow =
            scope.spawn(|| raw(&gateway.http, b"GET /slow HTTP/1.1\r\nHost: h\r\n\r\n").status);
        gateway.wait_until("the request arrives", |_| upstream.received().len() == 1);
        gateway.signal("TERM");
        gateway.wait_until_logged("draining");
        door.open();
        assert_eq!(slow.join().expect("no panic"), 200);
    });
    assert!(gateway.wait_for_exit().success());
    let next = Service::gateway(&config(&store, 1), &[&upstream.url()]);
    assert_eq!(login(&next, "401").status, 401);
}

#[test]
fn refund_that_a_slow_store_does_not_make_is_counted() {
    let redis = Redis::start();
    let store = format!("store: {{redis: '{}'}}\n", redis.url());
    let door = Door::default();
    let upstream = upstream(&door);
    let gateway = Service::gateway(&config(&store, 1), &[&upstream.url()]);
    std::thread::scope(|scope| {
        let slow = scope.spawn(|| request(&gateway.http, "GET", "/slow", &[], b"").status);
        gateway.wait_until("the request arrives", |_| upstream.received().len() == 1);
        redis.pause_writes();
        let start = Instant::now();
        door.open();
        assert_eq!(slow.join().expect("no panic"), 200);
        assert!(start.elapsed() < 5 * SECOND, "{:?}", start.elapsed());
    });
    let failure = "tidegate_refunds_total{policy=\"logins\",outcome=\"failure\"} 1\n";
    let metrics = gateway.admin("/metrics").body;
    assert!(metrics.contains(failure), "{metrics}");
    redis.resume_writes();
}

#[test]
fn only_failed_logins_count_during_an_outage() {
    let mut redis = Redis::start();
    let upstream = upstream(&Door::default());
    let store = format!("store: {{redis: '{}', timeout: 5s, instances: 1}}\n", redis.url());
    let gateway = Service::gateway(&config(&store, 5), &[&upstream.url()]);
    assert_eq!(login(&gateway, "200").status, 200);
    redis.kill();
    for turn in 0..20 {
        assert_eq!(login(&gateway, "200").status, 200, "{turn}");
    }
    for _ in 0..5 {
        assert_eq!(login(&gateway, "401").status, 401);
    }
    assert_eq!(login(&gateway, "200").status, 429);
}

#[test]
fn refund_on_changes_with_a_reload() {
    let upstream = upstream(&Door::default());
    let text = config("", 1);
    let without = text.replace(", refund_on: {status: [2xx, 3xx]}", "");
    let gateway = Service::gateway(&without, &[&upstream.url()]);
    assert_eq!([login(&gateway, "200").status, login(&gateway, "200").status], [200, 429]);
    let text = text.replace("name: logins", "name: others");
    std::fs::write(gateway.file(), crate::support::with_free_ports(&text)).expect("written");
    gateway.wait_until("the file is loaded", |gateway| login(gateway, "200").status == 200);
    for _ in 0..3 {
        assert_eq!(login(&gateway, "200").status, 200);
    }
}

#[test]
fn statuses_are_shown_and_a_service_without_a_gateway_warns() {
    let upstream = upstream(&Door::default());
    let gateway = Service::gateway(&config("", 5), &[&upstream.url()]);
    let policies = gateway.admin("/v1/policies").json();
    assert_eq!(policies[0]["refund_on"], json!({"status": ["2xx", "3xx"]}), "{policies}");
    assert!(!gateway.output().contains("refund_on has no effect"), "{}", gateway.output());
    // Without a gateway, no response is seen.
    let service = Service::start(&config("", 1));
    service.wait_until_logged("policy \"logins\": refund_on has no effect");
    let body = json!({"policy": "logins", "key": "192.0.2.1"});
    assert_eq!([service.acquire(&body).status, service.acquire(&body).status], [200, 429]);
}
