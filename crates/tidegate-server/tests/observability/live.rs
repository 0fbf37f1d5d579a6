use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::metric;
use super::support::{Service, TEST_TIMEOUT, request};

const POLICIES: &str = "policies: [{name: p, limit: 1000000, window: 1h}]\n";
/// Maximum number of streams of one service.
const MAX_STREAMS: usize = 256;

/// Stream of events of one client.
struct Stream {
    reader: BufReader<TcpStream>,
    /// Bytes of events that are not complete.
    text: String,
}

impl Stream {
    fn open(service: &Service) -> Self {
        let mut socket = TcpStream::connect(&service.admin).expect("the service listens");
        socket.set_read_timeout(Some(TEST_TIMEOUT)).expect("a timeout");
        let head = format!("GET /v1/live HTTP/1.1\r\nHost: {}\r\n\r\n", service.admin);
        socket.write_all(head.as_bytes()).expect("sent");
        let mut stream = Self { reader: BufReader::new(socket), text: String::new() };
        let status = stream.line();
        assert!(status.contains(" 200 "), "{status}");
        let mut is_stream = false;
        loop {
            let line = stream.line();
            is_stream |= line.to_ascii_lowercase().contains("content-type: text/event-stream");
            if line.is_empty() {
                assert!(is_stream);
                return stream;
            }
        }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.reader.read_line(&mut line).expect("a line");
        line.trim_end().to_owned()
    }

    /// Returns the name and the data of the next event; `None` after the end of the stream.
    fn next(&mut self) -> Option<(String, Value)> {
        loop {
            if let Some((event, rest)) = self.text.split_once("\n\n") {
                let (event, rest) = (event.to_owned(), rest.to_owned());
                self.text = rest;
                let (name, data) = event.split_once('\n')?;
                let name = name.strip_prefix("event: ").expect("a name").to_owned();
                let data = data.strip_prefix("data: ").expect("data");
                return Some((name, serde_json::from_str(data).expect("JSON")));
            }
            let size = usize::from_str_radix(&self.line(), 16).expect("the size of a chunk");
            let mut chunk = vec![0; size + 2];
            self.reader.read_exact(&mut chunk).expect("a chunk");
            if size == 0 {
                return None;
            }
            self.text.push_str(std::str::from_utf8(&chunk[..size]).expect("text"));
        }
    }

    /// Returns the data of the next event of this name.
    fn next_of(&mut self, wanted: &str) -> Value {
        loop {
            let (name, data) = self.next().expect("the stream goes on");
            if name == wanted {
                return data;
            }
        }
    }
}

#[test]
fn stream_starts_with_the_history_and_continues_with_samples_under_load() {
    let service = Service::start(POLICIES);
    service.wait_until("there is a sample", |service| {
        service.admin("/v1/history").json()["samples"].as_array().is_some_and(|it| !it.is_empty())
    });
    let mut stream = Stream::open(&service);
    let (name, history) = stream.next().expect("an event");
    assert_eq!((name.as_str(), &history["interval_ms"]), ("history", &json!(1000)));
    let newest = history["samples"].as_array().and_then(|it| it.last()).expect("a sample").clone();
    let (name, status) = stream.next().expect("an event");
    assert_eq!((name.as_str(), &status["store"]["kind"]), ("status", &json!("memory")));
    let (name, hot_keys) = stream.next().expect("an event");
    assert_eq!((name.as_str(), &hot_keys["denied"]), ("hot-keys", &json!([])));

    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_done.load(Ordering::Relaxed) {
                service.acquire(&json!({"policy": "p", "key": "ann"}));
            }
        });
        let first = stream.next_of("sample");
        assert!(first["at_ms"].as_u64() > newest["at_ms"].as_u64(), "no sample comes twice");
        let hot = stream.next_of("hot-keys");
        assert_eq!(hot["allowed"][0]["key"], json!("ann"), "{hot}");
        let busy = stream.next_of("sample");
        is_done.store(true, Ordering::Relaxed);
        assert!(busy["allowed"].as_f64() > Some(0.0), "{busy}");
        assert!(busy["policies"]["p"][0].as_f64() > Some(0.0), "{busy}");
        assert!(busy["latency_ms"]["p99"].as_f64() > Some(0.0), "{busy}");
    });
}

#[test]
fn changes_of_the_status_are_sent_once() {
    let service = Service::start(POLICIES);
    let mut stream = Stream::open(&service);
    stream.next_of("status");
    // The first tick compares with nothing; from then on only changes are sent.
    stream.next_of("sample");
    let good = std::fs::read_to_string(service.file()).expect("the file");
    std::fs::write(service.file(), "policies: 5\n").expect("written");
    loop {
        let status = stream.next_of("status");
        if status["reload"]["ok"] == json!(false) {
            assert!(status["reload"]["error"]["line"].is_u64(), "{status}");
            break;
        }
    }
    stream.next_of("sample");
    let (name, _) = stream.next().expect("an event");
    assert!(matches!(name.as_str(), "sample" | "hot-keys"), "{name} although nothing changed");
    std::fs::write(service.file(), good).expect("written");
    assert_eq!(stream.next_of("status")["reload"]["ok"], json!(true));
}

#[test]
fn a_hundred_streams_get_the_same_samples_and_a_silent_one_disturbs_none() {
    let service = Service::start(POLICIES);
    // It never reads.
    let silent = Stream::open(&service);
    let mut streams: Vec<Stream> = (0..100).map(|_| Stream::open(&service)).collect();
    assert!((metric(&service, "tidegate_live_streams ") - 101.0).abs() < 0.1);
    // Every stream has this sample: in its history, or as an event.
    let newest = streams.last_mut().expect("a stream").next_of("sample");
    for stream in &mut streams[..99] {
        loop {
            let sample = stream.next_of("sample");
            if sample["at_ms"] == newest["at_ms"] {
                assert_eq!(sample, newest);
                break;
            }
            assert!(sample["at_ms"].as_u64() < newest["at_ms"].as_u64(), "a sample is missing");
        }
    }
    drop(silent);
    drop(streams);
    service.wait_until("their places are free", |service| {
        metric(service, "tidegate_live_streams ") < 0.5
    });
}

#[test]
fn newest_streams_are_served() {
    let service = Service::start(POLICIES);
    // Their clients do not read.
    let mut unread: Vec<Stream> = (0..MAX_STREAMS).map(|_| Stream::open(&service)).collect();
    let mut newest = Stream::open(&service);
    newest.next_of("sample");
    while unread[0].next().is_some() {}
    unread[1].next_of("sample");
    let streams = metric(&service, "tidegate_live_streams ");
    assert!((255.5..256.5).contains(&streams), "{streams}");
    assert_eq!(service.admin("/v1/status").status, 200);
}

#[test]
fn streams_end_with_the_process() {
    let mut service = Service::start(POLICIES);
    let mut stream = Stream::open(&service);
    stream.next_of("hot-keys");
    service.signal("TERM");
    while stream.next().is_some() {}
    assert!(service.wait_for_exit().success());
}

#[test]
fn stream_needs_the_token() {
    let service = Service::start(&format!("auth: {{admin_token: hunter2}}\n{POLICIES}"));
    assert_eq!(service.admin("/v1/live").status, 401);
    let query = request(&service.admin, "GET", "/v1/live?token=hunter2", &[], b"");
    assert_eq!(query.status, 401, "only in the header");
}

/// Returns the p99 of some requests, sent one after the other on a connection.
fn p99(service: &Service, requests: usize) -> Duration {
    let body = json!({"policy": "p", "key": "ann"}).to_string();
    let text = format!(
        "POST /v1/acquire HTTP/1.1\r\nHost: h\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut socket = TcpStream::connect(&service.http).expect("the service listens");
    socket.set_nodelay(true).expect("no delay");
    let mut buffer = [0; 8192];
    let mut times: Vec<Duration> = (0..requests)
        .map(|_| {
            let start = Instant::now();
            socket.write_all(text.as_bytes()).expect("sent");
            let length = socket.read(&mut buffer).expect("a response");
            assert!(length > 0);
            start.elapsed()
        })
        .collect();
    times.sort_unstable();
    times[requests * 99 / 100]
}

#[test]
#[ignore = "a measurement: run it on a quiet machine, with --release"]
fn a_hundred_dashboards_change_the_p99_of_decisions_by_less_than_a_tenth() {
    let service = Service::start(POLICIES);
    p99(&service, 20_000);
    let mut ratios: Vec<f64> = (0..9)
        .map(|round| {
            let alone = p99(&service, 40_000);
            let streams: Vec<Stream> = (0..100).map(|_| Stream::open(&service)).collect();
            let is_done = AtomicBool::new(false);
            let with_streams = std::thread::scope(|scope| {
                scope.spawn(|| {
                    let mut streams = streams;
                    while !is_done.load(Ordering::Relaxed) {
                        for stream in &mut streams {
                            stream.next_of("sample");
                        }
                    }
                });
                let measured = p99(&service, 40_000);
                is_done.store(true, Ordering::Relaxed);
                measured
            });
            println!("round {round}: {alone:?} alone, {with_streams:?} with 100 dashboards");
            with_streams.as_secs_f64() / alone.as_secs_f64()
        })
        .collect();
    ratios.sort_by(f64::total_cmp);
    println!("median ratio {:.3}", ratios[4]);
    assert!(ratios[4] < 1.1, "{ratios:?}");
}
