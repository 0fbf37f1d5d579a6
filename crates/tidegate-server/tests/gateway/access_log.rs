use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, mpsc};

use serde_json::Value;

use crate::support::{Service, TEST_TIMEOUT, raw, request};
use crate::upstream::{OK, Upstream};
use crate::websocket;

const COMBINED: &str = "gateway: {access_log: {path: access.log}}\n";
const JSON: &str = "gateway: {access_log: {path: access.log, format: json}}\n";

fn log_file(gateway: &Service) -> PathBuf {
    gateway.folder().join("access.log")
}

/// Waits until a file has this many lines and returns them.
fn lines_of(gateway: &Service, file: &Path, count: usize) -> Vec<String> {
    let read = || std::fs::read(file).unwrap_or_default();
    gateway.wait_until("the lines are written", |_| {
        read().split(|byte| *byte == b'\n').count() > count
    });
    let text = String::from_utf8(read()).expect("a log is UTF-8");
    let lines: Vec<String> = text.lines().map(str::to_owned).collect();
    assert_eq!(lines.len(), count, "{text}");
    lines
}

fn lines(gateway: &Service, count: usize) -> Vec<String> {
    lines_of(gateway, &log_file(gateway), count)
}

fn json_lines(gateway: &Service, count: usize) -> Vec<Value> {
    let parse = |line: &String| serde_json::from_str(line).expect("JSON");
    lines(gateway, count).iter().map(parse).collect()
}

/// Line of the combined format, parsed as strictly as the usual regular expression:
/// `^(\S+) - - \[([^]]+)\] "([^"]*)" (\d{3}) (\d+) "([^"]*)" "([^"]*)"$`.
#[derive(Debug, PartialEq, Eq)]
struct Line {
    client: String,
    request: String,
    status: u16,
    bytes: u64,
    referer: String,
    user_agent: String,
}

impl Line {
    fn parse(line: &str) -> Self {
        assert!(line.chars().all(|c| (' '..='~').contains(&c)), "{line:?}");
        let parts: Vec<&str> = line.split('"').collect();
        let [start, request, numbers, referer, " ", user_agent, ""] = parts[..] else {
            panic!("{line}");
        };
        let (client, time) = start.split_once(" - - [").expect(line);
        let time = time.strip_suffix("] ").expect(line);
        let digits: String =
            time.chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).collect();
        assert!(digits.starts_with("00/") && digits.ends_with("/0000:00:00:00 +0000"), "{line}");
        let mut numbers = numbers.trim().split(' ');
        Self {
            client: client.to_owned(),
            request: request.to_owned(),
            status: numbers.next().and_then(|text| text.parse().ok()).expect(line),
            bytes: numbers.next().and_then(|text| text.parse().ok()).expect(line),
            referer: referer.to_owned(),
            user_agent: user_agent.to_owned(),
        }
    }
}

/// Returns the numbers of requests that goaccess has parsed, and that it could not parse.
fn goaccess(file: &Path) -> (Value, Value) {
    let report = file.with_extension("json");
    let output = Command::new("goaccess")
        .arg(file)
        .args(["--log-format=COMBINED", "--no-global-config", "--no-progress", "-o"])
        .arg(&report)
        .output()
        .expect("goaccess runs: `make setup` installs it");
    assert!(output.status.success(), "{output:?}");
    let report: Value =
        serde_json::from_slice(&std::fs::read(report).expect("a report")).expect("JSON");
    (report["general"]["valid_requests"].clone(), report["general"]["failed_requests"].clone())
}

fn curl(arguments: &[&str]) -> (Option<i32>, String) {
    let output =
        Command::new("curl").args(["-s", "-m", "20"]).args(arguments).output().expect("curl runs");
    (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
}

#[test]
fn combined_lines_are_those_of_nginx_and_apache() {
    let upstream = Upstream::responding_with(OK);
    let config =
        format!("{COMBINED}policies: [{{name: p, match: {{path: /p}}, limit: 1, window: 1h}}]\n");
    let gateway = Service::gateway(&config, &[&upstream.url()]);
    let headers = [("Referer", "http://r/?a=b"), ("User-Agent", "agent/1.0 (x)")];
    assert_eq!(request(&gateway.http, "GET", "/a?b=c", &headers, b"").status, 200);
    for status in [200, 429] {
        assert_eq!(request(&gateway.http, "POST", "/p", &[], b"body").status, status);
    }
    let without_host = b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n";
    assert_eq!(raw(&gateway.http, without_host).status, 400);
    let url = format!("http://{}/two", gateway.http);
    assert_eq!(curl(&["--http2-prior-knowledge", "-A", "curl", &url]).1, "ok");

    let lines = lines(&gateway, 5);
    let parsed: Vec<Line> = lines.iter().map(|line| Line::parse(line)).collect();
    let expected = |request: &str, status, bytes, referer: &str, agent: &str| Line {
        client: "127.0.0.1".to_owned(),
        request: request.to_owned(),
        status,
        bytes,
        referer: referer.to_owned(),
        user_agent: agent.to_owned(),
    };
    assert_eq!(
        parsed[0],
        expected("GET /a?b=c HTTP/1.1", 200, 2, "http://r/?a=b", "agent/1.0 (x)")
    );
    assert_eq!(parsed[1], expected("POST /p HTTP/1.1", 200, 2, "-", "-"));
    assert_eq!((parsed[2].status, parsed[3].status), (429, 400), "{lines:?}");
    assert!(parsed[2].bytes > 50, "the body of a denial is counted: {lines:?}");
    assert_eq!(parsed[4], expected("GET /two HTTP/2.0", 200, 2, "-", "curl"));
    assert_eq!(goaccess(&log_file(&gateway)), (5.into(), 0.into()));
}

#[test]
fn clients_cannot_forge_lines() {
    let upstream = Upstream::responding_with(OK);
    let forged =
        b"x\" 200 1 \"-\" \"-\\n127.0.0.1 - - [01/Jan/2026:00:00:00 +0000] \"\t\xff\xc2\x85";
    let send = |gateway: &Service| {
        let mut bytes = b"GET /\"%0a\" HTTP/1.1\r\nHost: h\r\nConnection: close\r\n".to_vec();
        for name in ["User-Agent: ", "Referer: "] {
            bytes.extend_from_slice(name.as_bytes());
            bytes.extend_from_slice(forged);
            bytes.extend_from_slice(b"\r\n");
        }
        bytes.extend_from_slice(b"\r\n");
        // The upstream of the tests rejects bytes that are not UTF-8.
        assert_eq!(raw(&gateway.http, &bytes).status, 502);
    };
    let gateway = Service::gateway(COMBINED, &[&upstream.url()]);
    send(&gateway);
    let line = Line::parse(&lines(&gateway, 1)[0]);
    assert_eq!(line.request, r"GET /\x22%0a\x22 HTTP/1.1");
    assert_eq!(
        line.user_agent,
        concat!(
            r"x\x22 200 1 \x22-\x22 \x22-\x5Cn127.0.0.1 - - [01/Jan/2026:00:00:00 +0000] ",
            r"\x22\x09\xFF\xC2\x85"
        )
    );
    assert_eq!(line.referer, line.user_agent);
    assert_eq!(goaccess(&log_file(&gateway)), (1.into(), 0.into()));

    let gateway = Service::gateway(JSON, &[&upstream.url()]);
    send(&gateway);
    let agent = json_lines(&gateway, 1)[0]["user_agent"].clone();
    let expected =
        "x\" 200 1 \"-\" \"-\\n127.0.0.1 - - [01/Jan/2026:00:00:00 +0000] \"\t\\xFF\u{85}";
    assert_eq!(agent, expected);
}

#[test]
fn json_lines_show_the_decision_the_upstream_and_the_trace() {
    let upstream =
        Upstream::responding_with(b"HTTP/1.1 404 Not Found\r\nContent-Length: 3\r\n\r\nnot");
    let config = format!(
        "{JSON}client_ip: {{trusted_proxies: [127.0.0.1]}}\npolicies:\n\
         \x20 - {{name: limit, limit: 2, window: 1h}}\n\
         \x20 - {{name: planned, limit: 1, window: 1h, mode: shadow}}\n"
    );
    let gateway = Service::gateway(&config, &[&upstream.url()]);
    let headers = [
        ("X-Forwarded-For", "2001:db8::7"),
        ("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
        ("Authorization", "Bearer secret-token"),
        ("Cookie", "session=secret-cookie"),
    ];
    for _ in 0..3 {
        request(&gateway.http, "GET", "/x?y=z", &headers, b"");
    }
    let lines = json_lines(&gateway, 3);
    let first = &lines[0];
    for (name, value) in [
        ("client", "2001:db8::7".into()),
        ("method", "GET".into()),
        ("target", "/x?y=z".into()),
        ("protocol", "HTTP/1.1".into()),
        ("host", gateway.http.clone().into()),
        ("status", 404.into()),
        ("bytes", 3.into()),
        ("upstream", upstream.url().into()),
        ("upstream_status", 404.into()),
        ("decision", "allowed".into()),
        ("policy", "limit".into()),
        ("source", "store".into()),
        ("trace_id", "4bf92f3577b34da6a3ce929d0e0e4736".into()),
        ("aborted", Value::Null),
    ] {
        assert_eq!(first[name], value, "{name} of {first}");
    }
    assert!(first["duration_ms"].as_f64().is_some_and(|millis| millis > 0.0), "{first}");
    assert!(first["time"].as_str().is_some_and(|time| time.ends_with('Z')), "{first}");
    let of = |line: &Value| [&line["decision"], &line["policy"]].map(Value::clone);
    assert_eq!(of(&lines[1]), ["shadow_denied", "planned"]);
    assert_eq!(of(&lines[2]), ["denied", "limit"]);
    assert_eq!((&lines[2]["status"], &lines[2]["upstream"]), (&429.into(), &Value::Null));
    let all = std::fs::read_to_string(log_file(&gateway)).expect("a log");
    assert!(!all.contains("secret"), "{all}");
}

#[test]
fn failed_requests_are_logged() {
    let closing = Upstream::start(|_, _| Err(std::io::ErrorKind::BrokenPipe.into()));
    let gateway = Service::gateway(JSON, &[&closing.url()]);
    assert_eq!(request(&gateway.http, "GET", "/", &[], b"").status, 502);
    let line = &json_lines(&gateway, 1)[0];
    assert_eq!(line["status"], 502);
    assert_eq!(line["upstream"], closing.url());
    assert_eq!(line["upstream_status"], Value::Null);
}

#[test]
fn moved_file_is_opened_again() {
    let upstream = Upstream::responding_with(OK);
    let gateway = Service::gateway(COMBINED, &[&upstream.url()]);
    let (file, old) = (log_file(&gateway), gateway.folder().join("access.log.1"));
    let send = |path: &str| {
        assert_eq!(request(&gateway.http, "GET", path, &[], b"").status, 200);
    };
    send("/first");
    lines(&gateway, 1);
    std::fs::rename(&file, &old).expect("moved");
    send("/second");
    assert!(lines(&gateway, 1)[0].contains("GET /second "));
    assert!(lines_of(&gateway, &old, 1)[0].contains("GET /first "));
    // On SIGHUP the new file exists before the next request, as logrotate's `postrotate` expects.
    std::fs::rename(&file, &old).expect("moved");
    gateway.signal("HUP");
    gateway.wait_until("the file is opened again", |_| file.exists());
    send("/third");
    assert!(lines(&gateway, 1)[0].contains("GET /third "));
    // A truncated file (`copytruncate`) is continued at its start.
    std::fs::write(&file, "").expect("truncated");
    send("/fourth");
    assert!(lines(&gateway, 1)[0].contains("GET /fourth "));
}

#[test]
fn client_that_disconnects_is_logged() {
    // The upstream sends half of its response and waits for the test.
    let (release, released) = mpsc::channel::<()>();
    let released = Arc::new(Mutex::new(released));
    let upstream = Upstream::start(move |request, stream| {
        if request.head.starts_with("GET /half") {
            stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf")?;
        }
        let _ = released.lock().expect("no panic").recv();
        stream.write_all(b"")
    });
    let gateway = Service::gateway(JSON, &[&upstream.url()]);
    let connect = |path: &str| {
        let mut client = TcpStream::connect(&gateway.http).expect("the service listens");
        client.set_read_timeout(Some(TEST_TIMEOUT)).expect("a timeout");
        write!(client, "GET {path} HTTP/1.1\r\nHost: h\r\n\r\n").expect("sent");
        client
    };
    let mut client = connect("/half");
    let mut received = Vec::new();
    let mut byte = [0];
    while !received.ends_with(b"half") {
        client.read_exact(&mut byte).expect("half a response");
        received.push(byte[0]);
    }
    drop(client);
    let line = &json_lines(&gateway, 1)[0];
    assert_eq!(
        [&line["status"], &line["bytes"], &line["aborted"]],
        [&Value::from(200), &4.into(), &"client".into()]
    );
    let client = connect("/nothing");
    gateway.wait_until("the upstream has the request", |_| upstream.received().len() == 2);
    drop(client);
    let line = &json_lines(&gateway, 2)[1];
    assert_eq!(
        [&line["status"], &line["bytes"], &line["aborted"], &line["upstream_status"]],
        [&Value::from(499), &0.into(), &"client".into(), &Value::Null]
    );
    drop(release);
}

#[test]
fn response_that_breaks_off_is_logged() {
    let upstream = Upstream::start(|_, stream| {
        stream.write_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n")?;
        Err(std::io::ErrorKind::BrokenPipe.into())
    });
    let gateway = Service::gateway(JSON, &[&upstream.url()]);
    let mut client = TcpStream::connect(&gateway.http).expect("the service listens");
    client.write_all(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n").expect("sent");
    let _ = client.read_to_end(&mut Vec::new());
    let line = &json_lines(&gateway, 1)[0];
    assert_eq!((&line["status"], &line["aborted"]), (&200.into(), &"upstream".into()), "{line}");
}

#[test]
fn websocket_is_logged_when_it_ends() {
    let upstream = websocket::echo();
    let gateway = Service::gateway(JSON, &[&upstream.url()]);
    let mut client = websocket::connect(&gateway);
    assert!(websocket::read_head(&mut client).starts_with("http/1.1 101 "));
    websocket::write_frame(&mut client, b"hello", Some([1, 2, 3, 4])).expect("sent");
    assert_eq!(websocket::read_frame(&mut client).expect("an echo"), b"hello");
    assert_eq!(std::fs::read(log_file(&gateway)).expect("a log"), b"", "the tunnel is open");
    drop(client);
    let line = &json_lines(&gateway, 1)[0];
    assert_eq!((&line["status"], &line["upstream_status"]), (&101.into(), &101.into()));
    assert_eq!(line["bytes"], 2 + 5, "the frame of the echo");
}

#[test]
fn head_has_no_body_over_either_version() {
    let upstream = Upstream::responding_with(b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n");
    let config = format!("{JSON}policies: [{{name: p, limit: 2, window: 1h}}]\n");
    let gateway = Service::gateway(&config, &[&upstream.url()]);
    let url = format!("http://{}/", gateway.http);
    let mut lengths = Vec::new();
    for (number, version) in
        ["--http1.1", "--http2-prior-knowledge"].into_iter().cycle().take(4).enumerate()
    {
        let (code, head) = curl(&["-I", version, &url]);
        assert_eq!(code, Some(0), "{version} {head}");
        lengths.extend(head.lines().find_map(|line| {
            line.to_ascii_lowercase().strip_prefix("content-length: ").map(str::to_owned)
        }));
        let line = &json_lines(&gateway, number + 1)[number];
        let status = if number < 2 { 200 } else { 429 };
        assert_eq!((&line["status"], &line["bytes"]), (&status.into(), &0.into()), "{line}");
        assert_eq!(line["aborted"], Value::Null);
    }
    assert_eq!(lengths[..2], ["999", "999"]);
    assert_eq!((lengths.len(), &lengths[2]), (4, &lengths[3]));
}

#[test]
fn queries_can_be_left_out() {
    let upstream = Upstream::responding_with(OK);
    for format in ["combined", "json"] {
        let config = format!(
            "gateway: {{access_log: {{path: access.log, format: {format}, query: false}}}}\n"
        );
        let gateway = Service::gateway(&config, &[&upstream.url()]);
        let referer = [("Referer", "https://r/page?token=secret")];
        request(&gateway.http, "GET", "/a?token=secret", &referer, b"");
        let line = &lines(&gateway, 1)[0];
        assert!(line.contains("/a") && line.contains("https://r/page"), "{line}");
        assert!(!line.contains("secret"), "{line}");
    }
}

#[test]
fn log_can_go_to_stdout_by_flag() {
    let upstream = Upstream::responding_with(OK);
    let environment = [("TIDEGATE_ACCESS_LOG", "stdout"), ("TIDEGATE_ACCESS_LOG_FORMAT", "json")];
    let gateway = Service::gateway_with_env("", &[&upstream.url()], &environment);
    request(&gateway.http, "GET", "/here", &[], b"");
    gateway.wait_until("it is logged", |gateway| gateway.output().contains("\"target\":\"/here\""));
    assert!(!gateway.output().contains("Tidegate 0."), "only lines: {}", gateway.output());
}

#[test]
fn full_disk_does_not_stop_requests() {
    let upstream = Upstream::responding_with(OK);
    let gateway =
        Service::gateway("gateway: {access_log: {path: /dev/full}}\n", &[&upstream.url()]);
    for _ in 0..3 {
        assert_eq!(request(&gateway.http, "GET", "/", &[], b"").status, 200);
    }
    gateway.wait_until("the lines are counted", |gateway| {
        gateway.admin("/metrics").body.contains("access_log_lines_total{outcome=\"dropped\"} 3\n")
    });
    let failures = |gateway: &Service| gateway.output().matches("writing log lines failed").count();
    gateway.wait_until("the failure is logged", |gateway| failures(gateway) > 0);
    assert_eq!(failures(&gateway), 1, "{}", gateway.output());
}

#[test]
fn log_that_cannot_be_opened_is_an_error() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = folder.path().join("tidegate.yaml");
    let run = |config: &str| {
        std::fs::write(&file, config).expect("written");
        let output = Command::new(env!("CARGO_BIN_EXE_tidegate"))
            .args(["gateway", "--upstream", "http://127.0.0.1:1", "--listen", "127.0.0.1:0"])
            .arg("--config")
            .arg(&file)
            .output()
            .expect("it runs");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let listen = "listen: {admin: '127.0.0.1:0'}\n";
    let (code, text) =
        run(&format!("{listen}gateway: {{access_log: {{path: missing/access.log}}}}\n"));
    assert_eq!(code, Some(2), "{text}");
    assert!(
        text.contains("gateway.access_log: cannot open") && text.contains("missing/access.log")
    );
    let (code, text) = run(&format!("{listen}gateway: {{access_log: {{path: ''}}}}\n"));
    assert_eq!(code, Some(2));
    assert!(text.contains("gateway.access_log.path is empty"), "{text}");
    let (_, text) = run(&format!("{listen}gateway: {{access_log: {{path: x, format: jsn}}}}\n"));
    assert!(text.contains("must be one of combined, json (did you mean `json`?)"), "{text}");
}

#[test]
fn lines_of_the_last_requests_are_written_before_the_exit() {
    let upstream = Upstream::responding_with(OK);
    let mut gateway = Service::gateway(COMBINED, &[&upstream.url()]);
    for _ in 0..50 {
        request(&gateway.http, "GET", "/", &[], b"");
    }
    gateway.signal("TERM");
    assert_eq!(gateway.wait_for_exit().code(), Some(0));
    let text = std::fs::read_to_string(log_file(&gateway)).expect("a log");
    assert_eq!(text.lines().count(), 50);
}
