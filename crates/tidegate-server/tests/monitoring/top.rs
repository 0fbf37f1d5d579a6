use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};

use crate::prometheus::Load;
use crate::support::{Redis, Service};
use crate::terminal::{ENTER, Terminal};

/// Policy `per-user` denies most requests, `trial` would.
const POLICIES: &str = "policies:\n  \
    - {name: per-user, key: [header.x-user-id], limit: 5, window: 1h}\n  \
    - {name: trial, key: [header.x-user-id], limit: 5, window: 1h, mode: shadow}\n";

fn top(arguments: &[&str]) -> Output {
    command(arguments).output().expect("the binary runs")
}

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command.arg("top").args(arguments).env_clear().stdin(Stdio::null());
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

fn url(service: &Service) -> String {
    format!("http://{}", service.admin)
}

/// Key with characters that a terminal obeys: it would write from right to left. Keys with control
/// characters are rejected by the service itself.
const HOSTILE_KEY: &str = "ann\u{202e}\u{200b}e\u{301}";
const HARMLESS_KEY: &str = r"ann\u{202e}\u{200b}e\u{301}";

/// Returns a service on a real Redis under load, with a key that tries to control terminals.
fn busy_service() -> (Redis, Service, [Load; 2]) {
    let redis = Redis::start();
    let store = format!("store: {{redis: '{}', timeout: 5s}}\n", redis.url());
    let service = Service::start(&format!("{store}{POLICIES}"));
    for _ in 0..300 {
        service.acquire(&json!({"policy": "per-user", "key": HOSTILE_KEY}));
    }
    let loads =
        [Load::start(&service.http, "per-user", 50, 3), Load::start(&service.http, "trial", 50, 3)];
    (redis, service, loads)
}

/// Waits until the service has samples with traffic of both loads.
fn wait_for_traffic(service: &Service) {
    service.wait_until("the service has samples of the load", |service| {
        let history = service.admin("/v1/history").json();
        let samples = history["samples"].as_array().expect("samples").clone();
        samples.last().is_some_and(|last| {
            last["denied"].as_f64() > Some(0.0) && last["shadow_denied"].as_f64() > Some(0.0)
        })
    });
}

#[test]
fn terminal_shows_the_service_and_looks_a_key_up() {
    let (_redis, service, _loads) = busy_service();
    wait_for_traffic(&service);
    let admin = url(&service);
    let mut terminal = Terminal::start(80, 24, &["--admin", &admin, "--interval", "200ms"]);
    let lines = terminal.wait_for("the load is shown", |screen| {
        screen.contains("denied keys") && screen.contains("\nper-user ")
    });
    assert_eq!(lines.len(), 24);
    assert!(lines.iter().all(|line| line.chars().count() <= 80), "{lines:#?}");
    let screen = lines.join("\n");
    for part in ["tidegate 0.1.0", "redis up", "fallback off", "denied/s", "latency   p50", "trial"]
    {
        assert!(screen.contains(part), "{part:?} in\n{screen}");
    }
    assert!(screen.contains(HARMLESS_KEY), "the hostile key\n{screen}");

    terminal.press("/user1");
    terminal.wait_for("the prompt shows the key", |screen| screen.contains("key: user1_"));
    terminal.press("\x7f2\r");
    terminal.wait_for("the key is looked up", |screen| {
        screen.contains("key user2  0 of 2 policies deny it") && screen.contains("5 of 5 left")
    });
    for _ in 0..6 {
        service.acquire(&json!({"policy": "per-user", "key": "user2"}));
    }
    terminal.wait_for("the denial is shown, and when it ends", |screen| {
        screen.contains("key user2  1 of 2 policies deny it") && screen.contains("free in 59m")
    });
    terminal.press("\x1b");
    terminal.wait_for("the overview is back", |screen| screen.contains("denied keys"));

    terminal.resize(40, 10);
    let small = terminal.wait_for("the small screen", |screen| screen.lines().count() == 10);
    assert!(small.iter().all(|line| line.chars().count() <= 40), "{small:#?}");
    let screen = small.join("\n");
    for part in ["redis up", "denied/s", "policies", "denied keys", "q quit"] {
        assert!(screen.contains(part), "{part:?} in\n{screen}");
    }
    terminal.press("q");
    assert!(terminal.wait_for_exit().success());
    terminal.assert_harmless();
}

#[test]
fn small_terminal_fits_from_the_start_and_ctrl_c_restores_it() {
    let service = Service::start(POLICIES);
    let mut terminal = Terminal::start(40, 10, &["--admin", &url(&service)]);
    let lines = terminal.wait_for("the service is shown", |screen| screen.contains("memory up"));
    assert_eq!(lines.len(), 10);
    assert!(lines.iter().all(|line| line.chars().count() <= 40), "{lines:#?}");
    terminal.press("\x03");
    assert!(terminal.wait_for_exit().success());
    assert!(terminal.output().starts_with(ENTER));
}

#[test]
fn lost_connection_is_shown_and_made_again() {
    let port = crate::support::free_port();
    let listen = format!(
        "listen: {{http: '127.0.0.1:0', grpc: '127.0.0.1:0', admin: '127.0.0.1:{port}'}}\n"
    );
    let config = format!("{listen}{POLICIES}");
    let service = Service::start(&config);
    let mut terminal = Terminal::start(100, 24, &["--admin", &url(&service)]);
    terminal.wait_for("the service is shown", |screen| screen.contains("memory up"));
    drop(service);
    terminal.wait_for("the loss is shown", |screen| {
        screen.contains("connection lost, retrying: ") && screen.contains("does the service run?")
    });
    let _service = Service::start(&config);
    terminal.wait_for("the connection is back", |screen| {
        !screen.contains("connection lost") && screen.contains("memory up")
    });
    terminal.press("q");
    assert!(terminal.wait_for_exit().success());
}

#[test]
fn pipe_gets_plain_text_and_json() {
    let (_redis, service, _loads) = busy_service();
    wait_for_traffic(&service);
    let admin = url(&service);
    let output = top(&["--admin", &admin, "--once"]);
    let printed = text(&output.stdout);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(!printed.contains(|c: char| c.is_control() && c != '\n'), "{printed:?}");
    for part in ["tidegate 0.1.0", "redis up", "policies", "per-user", "denied keys", "nodes\n"] {
        assert!(printed.contains(part), "{part:?} in\n{printed}");
    }

    let output = top(&["--admin", &admin, "--once", "--json"]);
    let printed = text(&output.stdout);
    assert!(!printed.contains(|c: char| c.is_control() && c != '\n'), "{printed:?}");
    let object: Value = serde_json::from_str(&printed).expect("one JSON object");
    assert_eq!(object["status"]["store"]["kind"], "redis");
    assert!(object["rates"]["denied"].as_f64() > Some(0.0), "{object}");
    assert!(object["rates"]["policies"]["trial"][2].as_f64() > Some(0.0), "{object}");
    let keys = object["hot_keys"]["denied"].as_array().expect("keys");
    assert!(keys.iter().any(|key| key["key"] == HOSTILE_KEY), "{object}");
    assert!(!printed.contains('\u{202e}'), "{printed}");
}

#[test]
fn pipe_gets_a_block_per_interval_until_it_is_closed() {
    let service = Service::start(POLICIES);
    let mut process = command(&["--admin", &url(&service), "--interval", "100ms"])
        .stdout(Stdio::piped())
        .spawn()
        .expect("the binary starts");
    let lines = BufReader::new(process.stdout.take().expect("piped")).lines();
    let titles = lines.map_while(Result::ok).filter(|line| line.starts_with("tidegate 0.1.0"));
    // The pipe is closed after the third block.
    assert_eq!(titles.take(3).count(), 3);
    assert!(process.wait().expect("our own child").success(), "a closed pipe is not an error");
}

#[test]
fn errors_say_what_would_be_right() {
    let service = Service::start(&format!("auth: {{admin_token: secret-token}}\n{POLICIES}"));
    let admin = url(&service);
    let closed = format!("http://127.0.0.1:{}", crate::support::free_port());
    let api = format!("http://{}", service.http);
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = folder.path().join("token");
    std::fs::write(&file, "wrong-token\n").expect("written");
    let wrong = file.to_str().expect("UTF-8");
    for (arguments, message) in [
        (&["--admin", &closed][..], "does the service run?"),
        (&["--admin", &admin], "give the token with --token-file FILE or TIDEGATE_ADMIN_TOKEN"),
        (&["--admin", &admin, "--token-file", wrong], "HTTP 401"),
        (&["--admin", &admin, "--token-file", "/nowhere"], "--token-file /nowhere"),
        (&["--admin", &api], "is this the URL of the admin listener"),
        (&["--admin", "localhost:8082"], "it must look like http://127.0.0.1:8082"),
        (&["--admin", &admin, "--interval", "1ms"], "it must be from 100ms to 60s"),
        (&["--admin", &admin, "--interval", "x"], "--interval"),
    ] {
        let output = top(arguments);
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {error}");
        assert!(error.contains(message), "{arguments:?}: {error}");
        assert_eq!(error.trim_end().lines().count(), 1, "one line: {error}");
        assert!(!error.contains("wrong-token"), "{error}");
    }
    std::fs::write(&file, "secret-token\n").expect("written");
    let with_file = top(&["--admin", &admin, "--once", "--token-file", wrong]);
    assert!(with_file.status.success(), "{}", text(&with_file.stderr));
    let mut with_variable = command(&["--admin", &admin, "--once"]);
    let with_variable = with_variable.env("TIDEGATE_ADMIN_TOKEN", "secret-token").output();
    assert!(with_variable.expect("the binary runs").status.success());
}

/// Starts a server that sends this response to each connection, and returns its URL.
fn hostile_server(response: String) -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let url = format!("http://{}", listener.local_addr().expect("bound"));
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten().take(16) {
            let _ = stream.read(&mut [0; 4096]);
            let _ = stream.write_all(response.as_bytes());
            // Keeps the stream of events open until the client closes it.
            let _ = stream.read(&mut [0; 4096]);
        }
    });
    url
}

#[test]
fn hostile_errors_do_not_reach_the_terminal() {
    let body = r#"{"detail":"\u001b[2Jno\u009b31m"}"#;
    let head = "HTTP/1.1 500 Oops\r\ncontent-type: application/json\r\n";
    let url = hostile_server(format!("{head}content-length: {}\r\n\r\n{body}", body.len()));
    let output = top(&["--admin", &url]);
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2));
    assert!(error.contains(r"HTTP 500 Internal Server Error: \u{1b}[2Jno\u{9b}31m"), "{error:?}");
}

#[test]
fn hostile_data_does_not_reach_the_terminal() {
    let hostile = "\u{1b}]0;owned\u{7}\u{1b}[2J\u{9b}31m\u{202e}x\r\ny";
    let keys = json!([{"policy": hostile, "key": hostile, "count": 7}]);
    let events = [
        (
            "history",
            json!({"samples": [{"at_ms": 1_000, "allowed": 1.0, "denied": 1.0,
            "policies": {hostile: [1.0, 1.0, 1.0]}, "sources": {hostile: 1.0}}]}),
        ),
        (
            "status",
            json!({"version": hostile, "store": {"kind": hostile, "up": false,
            "nodes": [{"address": hostile, "circuit": hostile, "last_error": hostile}]},
            "reload": {"ok": false, "error": {"message": hostile, "file": hostile}},
            "upstreams": [{"url": hostile}]}),
        ),
        ("hot-keys", json!({"allowed": keys, "denied": keys, "shadow_denied": keys})),
    ];
    let events: Vec<String> =
        events.iter().map(|(name, data)| format!("event: {name}\ndata: {data}\n\n")).collect();
    let events = events.concat();
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n";
    let url = hostile_server(format!("{head}{events}"));
    let harmless = r"\u{1b}]0;owned\u{7}\u{1b}[2J\u{9b}31m\u{202e}x\r\ny";
    let printed = text(&top(&["--admin", &url, "--timeout", "1s", "--once"]).stdout);
    assert!(!printed.contains(|c: char| (c.is_control() && c != '\n') || c == '\u{202e}'));
    assert!(printed.matches(harmless).count() > 10, "{printed}");
    let printed = text(&top(&["--admin", &url, "--timeout", "1s", "--once", "--json"]).stdout);
    assert!(!printed.contains(|c: char| (c.is_control() && c != '\n') || c == '\u{202e}'));
    let mut terminal = Terminal::start(200, 50, &["--admin", &url]);
    terminal.wait_for("the data is shown", |screen| screen.contains(harmless));
    terminal.press("q");
    assert!(terminal.wait_for_exit().success());
    terminal.assert_harmless();
}
