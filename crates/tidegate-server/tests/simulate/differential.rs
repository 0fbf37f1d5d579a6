//! The simulation and a running service give the same decisions for the same sequence of requests.
//!
//! Windows are so long that the speed of the machine does not matter; unit tests of the library
//! compare the algorithms in time.

use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use crate::support::{Service, TEST_TIMEOUT};
use crate::{Folder, simulate, text};

const REQUESTS: usize = 10_000;

const CONFIG: &str = "
attributes: [tenant]
policies:
  - name: per-user
    match: {path: /api/**}
    key: [header.x-user-id]
    algorithm: sliding-log
    limit: 90
    window: 100d
    overrides:
      - {key: user-3, limit: 20}
      - {key: user-4, limit: 1000}
  - name: per-address
    key: [ip]
    algorithm: sliding-counter
    limit: 700
    window: 100d
    cost: {attribute: header.x-cost, default: 1, max: 7}
  - name: writes
    match: {method: [POST, PUT]}
    key: [tenant]
    missing_key: deny
    algorithm: fixed-window
    limit: 350
    window: 100d
  - name: searches
    match: {path: /api/search}
    key: [query.q, ip]
    algorithm: token-bucket
    limit: 60
    burst: 80
    window: 100d
  - name: host
    key: [host]
    algorithm: leaky-bucket
    limit: 3000
    window: 100d
  - name: planned
    key: [header.x-user-id]
    mode: shadow
    algorithm: sliding-log
    count_denied: true
    limit: 50
    window: 100d
";

/// Attributes of the requests, as columns.
const COLUMNS: [&str; 9] = [
    "ip",
    "method",
    "path",
    "host",
    "header.x-user-id",
    "header.x-cost",
    "query.q",
    "tenant",
    "cost",
];

/// Returns the values of a random request; an empty one is absent.
fn request(random: &mut impl FnMut(u64) -> u64) -> [String; 9] {
    let pick = |values: &[&str], number: u64| {
        values[usize::try_from(number).expect("small") % values.len()].to_owned()
    };
    let address = match random(10) {
        0 => format!("2001:db8:0:{:x}::{:x}", random(3), random(500)),
        _ => format!("203.0.113.{}", random(12)),
    };
    let paths = ["/api/items", "/api/search", "/api//items/../search", "/", "/api/a%2fb", "/x;y"];
    [
        address,
        pick(&["GET", "GET", "GET", "POST", "PUT"], random(5)),
        pick(&paths, random(30).saturating_sub(20) + random(4)),
        pick(&["a.example", "A.example:8080", "b.example."], random(3)),
        if random(20) == 0 { String::new() } else { format!("user-{}", random(60)) },
        pick(&["", "", "3", "100", "many"], random(5)),
        pick(&["", "rate", "limit", "a \"quoted\", value"], random(4)),
        if random(10) == 0 { String::new() } else { format!("tenant-{}", random(4)) },
        pick(&["", "", "", "2", "1000000"], random(60).saturating_sub(55)),
    ]
}

/// Keeps one connection, so that the requests are decided in order.
struct Connection(BufReader<TcpStream>);

impl Connection {
    fn open(address: &str) -> Self {
        let stream = TcpStream::connect(address).expect("the service listens");
        stream.set_read_timeout(Some(TEST_TIMEOUT)).expect("a timeout");
        stream.set_nodelay(true).expect("a socket");
        Self(BufReader::new(stream))
    }

    /// Returns the status and body of the response.
    fn acquire(&mut self, body: &Value) -> (u16, Value) {
        let body = body.to_string();
        let request = format!(
            "POST /v1/acquire HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        self.0.get_mut().write_all(request.as_bytes()).expect("sent");
        let mut line = String::new();
        self.0.read_line(&mut line).expect("a status line");
        let status = line.split(' ').nth(1).and_then(|status| status.parse().ok());
        let mut length = 0;
        loop {
            line.clear();
            self.0.read_line(&mut line).expect("a header");
            let lower = line.trim_end().to_ascii_lowercase();
            if lower.is_empty() {
                break;
            }
            if let Some(value) = lower.strip_prefix("content-length:") {
                length = value.trim().parse().expect("a length");
            }
        }
        let mut body = vec![0; length];
        self.0.read_exact(&mut body).expect("a body");
        (status.expect("a status"), serde_json::from_slice(&body).expect("JSON"))
    }
}

/// Members of a line that the answer of the service does not have.
const REQUEST_MEMBERS: [&str; 6] = ["time", "file", "line", "method", "path", "key"];

/// Removes the times, which depend on the clock, and the members of the request.
fn without_times(decision: &Value) -> Value {
    match decision {
        Value::Object(members) => members
            .iter()
            .filter(|(name, _)| !name.ends_with("_ms") && !REQUEST_MEMBERS.contains(&name.as_str()))
            .map(|(name, value)| (name.clone(), without_times(value)))
            .collect(),
        Value::Array(items) => items.iter().map(without_times).collect(),
        other => other.clone(),
    }
}

fn quoted(value: &str) -> String {
    format!("\"{}\"", value.replace('"', "\"\""))
}

#[test]
fn service_and_simulation_make_the_same_ten_thousand_decisions() {
    let service = Service::start(CONFIG);
    let mut connection = Connection::open(&service.http);
    let mut state = 1_u64;
    let mut random = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
        (state >> 33) % below
    };
    let start = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs();
    let mut csv = format!("time,{}\n", COLUMNS.join(","));
    let mut decided = Vec::with_capacity(REQUESTS);
    for number in 0..REQUESTS {
        let values = request(&mut random);
        let cells: Vec<String> = values.iter().map(|value| quoted(value)).collect();
        let _ = writeln!(csv, "{start}.{number:06},{}", cells.join(","));
        let mut body = json!({"attributes": {}});
        for (name, value) in COLUMNS.iter().zip(&values) {
            match *name {
                _ if value.is_empty() => {}
                "cost" => body["cost"] = value.parse::<u64>().expect("a number").into(),
                name => body["attributes"][name] = value.as_str().into(),
            }
        }
        decided.push(connection.acquire(&body));
    }
    let folder = Folder::new();
    let config = folder.write("tidegate.yaml", CONFIG);
    let log = folder.write("requests.csv", csv);
    let lines = folder.path("decisions.jsonl");
    let lines = lines.to_str().expect("UTF-8");
    let arguments = ["--access-log", &log, "--config", &config, "--decisions", lines];
    let output = simulate(&arguments);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let lines = std::fs::read_to_string(lines).expect("the decisions");
    let simulated: Vec<Value> =
        lines.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!(simulated.len(), REQUESTS);
    let (mut denied, mut errors, mut shadow_denied) = (0, 0, 0);
    for (number, ((status, answer), simulated)) in decided.iter().zip(&simulated).enumerate() {
        if *status >= 400 && *status != 429 {
            errors += 1;
            assert!(simulated["error"].is_string(), "{number}: {answer} {simulated}");
            continue;
        }
        denied += usize::from(*status == 429);
        let entries = answer["decisions"].as_array().expect("decisions");
        shadow_denied += entries
            .iter()
            .filter(|entry| entry["mode"] == "shadow" && entry["allowed"] == false)
            .count();
        assert_eq!(without_times(simulated), without_times(answer), "request {number}");
    }
    // The sequence has enough of each kind to be a test.
    let admitted = REQUESTS - denied - errors;
    assert!(
        denied > 1_000 && admitted > 1_000 && errors > 50 && shadow_denied > 100,
        "{denied} denied, {admitted} admitted, {errors} errors, {shadow_denied} shadow denials"
    );
}
