use std::collections::BTreeMap;
use std::io::Write as _;
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, mpsc};

use serde_json::{Value, json};

use crate::support::{Service, request};
use crate::upstream::{OK, Upstream};

/// Returns the values of all series, by name and labels.
pub(crate) fn metrics(gateway: &Service) -> BTreeMap<String, f64> {
    let text = gateway.admin("/metrics").body;
    let series = text.lines().filter(|line| !line.starts_with('#'));
    let parse = |line: &str| {
        let (name, value) = line.rsplit_once(' ').expect("a value");
        (name.to_owned(), value.parse().expect("a number"))
    };
    let parsed: Vec<(String, f64)> = series.map(parse).collect();
    let map: BTreeMap<String, f64> = parsed.iter().cloned().collect();
    assert_eq!(map.len(), parsed.len(), "every series is unique");
    map
}

fn check_with_promtool(gateway: &Service) {
    let mut promtool = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("promtool runs: `make setup` installs it");
    let text = gateway.admin("/metrics").body;
    promtool.stdin.take().expect("piped").write_all(text.as_bytes()).expect("read");
    let output = promtool.wait_with_output().expect("it exits");
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
}

/// Returns the URL of an address without a listener.
fn unreachable_url() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    format!("http://{}", listener.local_addr().expect("bound"))
}

#[test]
fn requests_are_counted_by_status_and_by_upstream() {
    let upstream = Upstream::responding_with(OK);
    let (url, dead) = (upstream.url(), unreachable_url());
    let policies = "policies: [{name: p, match: {path: /limited}, limit: 1, window: 1h}]\n";
    let log = "gateway: {access_log: {path: access.log}}\n";
    // One is listed twice, as a weight.
    let gateway = Service::gateway(&format!("{policies}{log}"), &[&url, &dead, &url]);
    for _ in 0..3 {
        assert_eq!(request(&gateway.http, "GET", "/", &[], b"").status, 200);
    }
    assert_eq!(request(&gateway.http, "GET", "/limited", &[], b"").status, 200);
    assert_eq!(request(&gateway.http, "GET", "/limited", &[], b"").status, 429);
    assert_eq!(request(&gateway.http, "CONNECT", "h:1", &[], b"").status, 501);
    gateway.wait_until("all have ended and are logged", |gateway| {
        let all = metrics(gateway);
        let logged = all.get("tidegate_access_log_lines_total{outcome=\"written\"}");
        logged == Some(&6.0) && all.get("tidegate_gateway_requests_in_flight") == Some(&0.0)
    });
    let all = metrics(&gateway);
    let value = |name: &str| all.get(name).copied();
    assert_eq!(value("tidegate_gateway_requests_total{code=\"200\"}"), Some(4.0));
    assert_eq!(value("tidegate_gateway_requests_total{code=\"429\"}"), Some(1.0));
    assert_eq!(value("tidegate_gateway_requests_total{code=\"501\"}"), Some(1.0));
    assert_eq!(value("tidegate_gateway_request_seconds_count"), Some(6.0));
    let of = |name: &str, upstream: &str, label: &str| {
        value(&format!("tidegate_upstream_{name}{{upstream=\"{upstream}\"{label}}}"))
    };
    assert_eq!(of("responses_total", &url, ",code=\"2xx\""), Some(4.0));
    assert_eq!(of("response_seconds_count", &url, ""), Some(4.0));
    assert_eq!(of("up", &url, ""), Some(1.0));
    assert_eq!(of("responses_total", &dead, ",code=\"2xx\""), Some(0.0));
    assert_eq!(of("errors_total", &dead, ",kind=\"connect\""), Some(1.0));
    assert_eq!(value("tidegate_access_log_lines_total{outcome=\"dropped\"}"), Some(0.0));
    assert!(value("process_resident_memory_bytes").is_some());
    check_with_promtool(&gateway);
}

#[test]
fn methods_paths_and_codes_of_clients_are_not_labels() {
    let upstream = Upstream::start(|_, stream| {
        stream.write_all(b"HTTP/1.1 987 Odd\r\nContent-Length: 0\r\n\r\n")
    });
    let gateway = Service::gateway("", &[&upstream.url()]);
    let before = metrics(&gateway).len();
    for number in 0..20 {
        let (method, path) = (format!("METHOD{number}"), format!("/path{number}"));
        assert_eq!(request(&gateway.http, &method, &path, &[], b"").status, 987);
    }
    gateway.wait_until("all have ended", |gateway| {
        metrics(gateway).get("tidegate_gateway_requests_total{code=\"other\"}") == Some(&20.0)
    });
    assert_eq!(metrics(&gateway).len(), before + 1);
}

#[test]
fn in_flight_requests_and_aborts_are_counted() {
    let (release, released) = mpsc::channel::<()>();
    let released = Arc::new(Mutex::new(released));
    let upstream = Upstream::start(move |_, stream| {
        let _ = released.lock().expect("no panic").recv();
        stream.write_all(OK)
    });
    let gateway = Service::gateway("", &[&upstream.url()]);
    let at_upstream =
        format!("tidegate_upstream_requests_in_flight{{upstream=\"{}\"}}", upstream.url());
    let in_flight = |gateway: &Service| {
        let all = metrics(gateway);
        (all["tidegate_gateway_requests_in_flight"], all[&at_upstream])
    };
    let mut client = TcpStream::connect(&gateway.http).expect("the service listens");
    client.write_all(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n").expect("sent");
    gateway.wait_until("it is in flight", |gateway| in_flight(gateway) == (1.0, 1.0));
    drop(client);
    gateway.wait_until("it has ended", |gateway| in_flight(gateway) == (0.0, 0.0));
    let all = metrics(&gateway);
    let aborted = all.get("tidegate_gateway_aborted_responses_total{side=\"client\"}");
    assert_eq!(aborted, Some(&1.0));
    assert_eq!(all.get("tidegate_gateway_requests_total{code=\"499\"}"), Some(&1.0));
    drop(release);
}

#[test]
fn readyz_shows_the_upstreams() {
    let upstream = Upstream::responding_with(OK);
    let dead = unreachable_url();
    let gateway = Service::gateway("", &[&upstream.url(), &dead]);
    let ready = |path: &str| {
        let response = gateway.admin(path);
        (response.status, response.json())
    };
    let health = |url: &str, up: bool| json!({"url": url, "up": up, "ejected": !up});
    let (status, body) = ready("/readyz");
    assert_eq!(status, 200);
    assert_eq!(body["upstreams"], json!([health(&upstream.url(), true), health(&dead, true)]));
    // Three failures eject it.
    for _ in 0..6 {
        request(&gateway.http, "GET", "/", &[], b"");
    }
    let (status, body) = ready("/readyz");
    assert_eq!(
        (status, &body["upstreams_up"], &body["upstreams_total"]),
        (200, &1.into(), &2.into())
    );
    assert_eq!(body["upstreams"], json!([health(&upstream.url(), true), health(&dead, false)]));
    assert_eq!(ready("/readyz?require=upstreams").0, 200, "one is enough");
    let up = format!("tidegate_upstream_up{{upstream=\"{dead}\"}}");
    let ejections = format!("tidegate_upstream_ejections_total{{upstream=\"{dead}\"}}");
    let all = metrics(&gateway);
    assert_eq!((all[&up], all[&ejections]), (0.0, 1.0));
}

#[test]
fn probe_can_require_an_upstream() {
    let gateway = Service::gateway("", &[&unreachable_url()]);
    for _ in 0..3 {
        request(&gateway.http, "GET", "/", &[], b"");
    }
    // Within the four seconds, at least, for which it is ejected.
    let required = gateway.admin("/readyz?require=upstreams");
    assert_eq!((required.status, &required.json()["ready"]), (503, &Value::Bool(false)));
    let plain = gateway.admin("/readyz");
    assert_eq!((plain.status, &plain.json()["upstreams_up"]), (200, &0.into()));
    assert_eq!(gateway.admin("/readyz?require=store").status, 200);
    assert_eq!(gateway.admin("/readyz?require=x").status, 400);
    assert_eq!(gateway.admin("/readyz?probe=7").status, 200);
    let service = Service::start("");
    assert_eq!(service.admin("/readyz").json().get("upstreams_total"), None);
    assert_eq!(service.admin("/readyz?require=upstreams").status, 400);
}

#[test]
fn addresses_of_upstreams_are_hidden_without_the_token() {
    let upstream = Upstream::responding_with(OK);
    let gateway = Service::gateway("auth: {admin_token: secret}\n", &[&upstream.url()]);
    let body = gateway.admin("/readyz").json();
    assert_eq!((&body["upstreams_up"], body.get("upstreams")), (&1.into(), None));
    let token = [("Authorization", "Bearer secret")];
    let body = request(&gateway.admin, "GET", "/readyz", &token, b"").json();
    assert_eq!(body["upstreams"][0]["url"], upstream.url());
}
