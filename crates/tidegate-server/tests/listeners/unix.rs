use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};

use super::support::{Service, request};

/// Directory with the sockets of a service.
struct Sockets(tempfile::TempDir);

impl Sockets {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("a temporary directory"))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(format!("{name}.sock"))
    }

    fn address(&self, name: &str) -> String {
        format!("unix:{}", self.path(name).display())
    }

    /// Returns a `listen` section with the listeners of `tidegate serve`.
    fn listen(&self) -> String {
        let line = |name: &str| format!("  {name}: '{}'\n", self.address(name));
        format!("listen:\n{}{}{}", line("http"), line("grpc"), line("admin"))
    }
}

const POLICY: &str = "policies:\n  - {name: per-user, key: [header.x], limit: 2, window: 1h}\n";

/// Runs curl and returns the status and the body.
fn curl(socket: &Path, arguments: &[&str]) -> (String, String) {
    let output = Command::new("curl")
        .args(["--silent", "--show-error", "--max-time", "20", "-w", "\n%{http_code}"])
        .arg("--unix-socket")
        .arg(socket)
        .args(arguments)
        .output()
        .expect("curl runs");
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    let error = String::from_utf8_lossy(&output.stderr);
    let (body, status) = text.rsplit_once('\n').unwrap_or_else(|| panic!("{text}{error}"));
    (status.to_owned(), body.to_owned())
}

/// Runs a service that cannot start, and returns its message.
fn failure(config: &str) -> String {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = folder.path().join("tidegate.yaml");
    fs::write(&file, config).expect("written");
    let Output { status, stderr, .. } = Command::new(env!("CARGO_BIN_EXE_tidegate"))
        .args(["serve", "--config"])
        .arg(&file)
        .env_clear()
        .stdin(Stdio::null())
        .output()
        .expect("the binary starts");
    let message = String::from_utf8_lossy(&stderr).into_owned();
    assert_eq!(status.code(), Some(2), "{message}");
    message
}

#[test]
fn curl_reaches_the_service_and_the_files_are_removed() {
    let sockets = Sockets::new();
    let mut service = Service::start_on_terminal(&format!("{}{POLICY}", sockets.listen()));
    assert_eq!(service.http, sockets.address("http"));
    service.wait_until("the example is printed", |service| service.output().contains("Try it:"));
    let output = service.output();
    let line = output.lines().find(|line| line.trim_start().starts_with("curl ")).expect("a line");
    let command = line.replace("curl -i", "curl -s");
    let response = Command::new("sh").args(["-c", &command]).output().expect("curl runs");
    let body: Value = serde_json::from_slice(&response.stdout).expect("a response");
    assert_eq!((&body["allowed"], &body["remaining"]), (&json!(true), &json!(1)), "{line}");

    let admin = sockets.path("admin");
    assert_eq!(curl(&admin, &["http://localhost/readyz"]).0, "200");
    let (status, policies) = curl(&admin, &["http://localhost/v1/policies"]);
    assert_eq!(status, "200", "no token is needed: {policies}");
    for name in ["http", "grpc", "admin"] {
        let mode = fs::metadata(sockets.path(name)).expect("the socket").permissions().mode();
        assert_eq!(mode & 0o777, 0o660, "{name}");
    }
    service.signal("TERM");
    assert!(service.wait_for_exit().success());
    for name in ["http", "grpc", "admin"] {
        assert!(!sockets.path(name).exists(), "{name}");
    }
}

#[test]
fn socket_of_a_dead_process_is_replaced_and_that_of_a_live_one_is_kept() {
    let sockets = Sockets::new();
    let config = format!("{}{POLICY}", sockets.listen());
    let mut killed = Service::start(&config);
    killed.signal("KILL");
    let _ = killed.wait_for_exit();
    assert!(sockets.path("http").exists(), "its file remains");
    let _service = Service::start(&config);
    let ready = || curl(&sockets.path("admin"), &["http://localhost/readyz"]).0;
    assert_eq!(ready(), "200");

    let message = failure(&config);
    let address = sockets.address("http");
    assert!(message.contains(&format!("listen.http: cannot listen on {address}")), "{message}");
    assert!(message.contains("another process listens on it"), "{message}");
    assert_eq!(ready(), "200");
    assert!(sockets.path("http").exists() && sockets.path("grpc").exists());
}

#[test]
fn unusable_paths_are_rejected() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = folder.path().join("file");
    fs::write(&file, "precious").expect("written");
    let listen = |address: &str| {
        format!(
            "listen: {{http: '{address}', grpc: '127.0.0.1:0', admin: '127.0.0.1:0'}}\n{POLICY}"
        )
    };
    let long = format!("unix:/{}", "d".repeat(107));
    for (address, words) in [
        (format!("unix:{}", file.display()), "exists and is not a socket"),
        (format!("unix:{}/none/http.sock", folder.path().display()), "directory does not exist"),
        (long, "has 108 bytes: at most 107 are allowed"),
        ("unix:http.sock".to_owned(), "must be absolute"),
        ("unix:".to_owned(), "must be absolute"),
        ("localhost".to_owned(), "is not an address: write it like 127.0.0.1:8080"),
    ] {
        let message = failure(&listen(&address));
        assert!(message.contains(words), "{address}: {message}");
    }
    assert_eq!(fs::read_to_string(&file).expect("still there"), "precious");
    let message = failure(&format!("listen: {{unix_mode: '999'}}\n{POLICY}"));
    assert!(message.contains("write three octal digits"), "{message}");
}

#[test]
fn permissions_are_configurable_and_changed_paths_need_a_restart() {
    let sockets = Sockets::new();
    let config = format!("{}  unix_mode: '600'\n{POLICY}", sockets.listen());
    let service = Service::start(&config);
    let mode = fs::metadata(sockets.path("http")).expect("the socket").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    fs::write(service.file(), config.replace("http.sock", "other.sock")).expect("written");
    service.wait_until("the change is reported", |service| {
        service.output().contains("changes in listen need a restart")
    });
    assert_eq!(curl(&sockets.path("http"), &["http://localhost/openapi.json"]).0, "200");
    assert!(!sockets.path("other").exists());
}

#[test]
fn tls_applies_to_unix_sockets() {
    let sockets = Sockets::new();
    let folder = tempfile::tempdir().expect("a temporary directory");
    let own = rcgen::generate_simple_self_signed(["localhost".to_owned()]).expect("a certificate");
    let (cert, key) = (folder.path().join("cert.pem"), folder.path().join("key.pem"));
    fs::write(&cert, own.cert.pem()).expect("written");
    fs::write(&key, own.signing_key.serialize_pem()).expect("written");
    let cert = cert.display();
    let tls = format!("tls: {{certificate: '{cert}', key: '{}'}}\n", key.display());
    let service = Service::start_on_terminal(&format!("{}{tls}{POLICY}", sockets.listen()));
    let (http, ca) = (sockets.path("http"), cert.to_string());
    assert_eq!(curl(&http, &["--cacert", &ca, "https://localhost/openapi.json"]).0, "200");
    let shown = format!("--unix-socket '{}' --cacert CA.pem", http.display());
    service.wait_until("the example is printed", |service| service.output().contains(&shown));
}

/// A peer of a Unix socket counts as 127.0.0.1, which can be a trusted proxy.
#[test]
fn gateway_on_a_unix_socket_trusts_forwarded_addresses_if_configured() {
    let upstream = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let url = format!("http://{}", upstream.local_addr().expect("bound"));
    std::thread::spawn(move || {
        for mut stream in upstream.incoming().map_while(Result::ok) {
            std::thread::spawn(move || {
                let mut buffer = [0; 4096];
                while stream.read(&mut buffer).is_ok_and(|length| length > 0) {
                    let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
                }
            });
        }
    });
    let policy = "policies:\n  - {name: per-client, key: [ip], limit: 1, window: 1h}\n";
    for (trusted, expected) in [("", ["200", "429"]), ("127.0.0.1", ["200", "200"])] {
        let sockets = Sockets::new();
        let folder = tempfile::tempdir().expect("a temporary directory");
        let file = folder.path().join("tidegate.yaml");
        let config = format!(
            "listen: {{admin: '127.0.0.1:0'}}\n\
             client_ip: {{trusted_proxies: [{trusted}]}}\n{policy}"
        );
        fs::write(&file, config).expect("written");
        let listen = sockets.address("gateway");
        let service = Service::gateway_on(folder, &["--listen", &listen, "--upstream", &url]);
        assert_eq!(service.http, listen);
        let send = |hop: &str| {
            let header = format!("X-Forwarded-For: {hop}");
            curl(&sockets.path("gateway"), &["-H", &header, "http://localhost/"]).0
        };
        assert_eq!([send("192.0.2.1"), send("192.0.2.2")], expected, "{trusted:?}");
    }
}

/// The C core of gRPC sends the percent-encoded path of the socket as `:authority`.
#[test]
fn grpc_client_of_the_c_core_calls_the_rate_limit_service() {
    let sockets = Sockets::new();
    let policy = "policies:\n  - {name: edge, match: {domain: edge}, limit: 2, window: 1h}\n";
    let _service = Service::start(&format!("{}{policy}", sockets.listen()));
    // A request for the domain `edge` with one descriptor, and the code of its response.
    let client = r"
import sys, grpc
channel = grpc.insecure_channel(sys.argv[1])
call = channel.unary_unary('/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit')
request = b'\n\x04edge\x12\x08\n\x06\n\x01k\x12\x01v'
print([call(request, timeout=20)[:2].hex() for _ in range(3)])
";
    let python = concat!(env!("CARGO_MANIFEST_DIR"), "/../../.venv/bin/python");
    let output = Command::new(python)
        .args(["-c", client, &sockets.address("grpc")])
        .output()
        .expect("run `make setup`");
    let error = String::from_utf8_lossy(&output.stderr);
    let codes = String::from_utf8_lossy(&output.stdout);
    assert_eq!(codes.trim(), "['0801', '0801', '0802']", "two are OK, one is over limit: {error}");
}

/// Starts a gateway to a Unix socket, with the admin listener on TCP.
fn gateway_to(socket: &Path) -> Service {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = folder.path().join("tidegate.yaml");
    let config = format!("listen: {{admin: '127.0.0.1:0', gateway: '127.0.0.1:0'}}\n{POLICY}");
    fs::write(&file, config).expect("written");
    Service::gateway_on(folder, &["--upstream", &format!("unix:{}", socket.display())])
}

/// Answers every request on a connection with its own head.
fn echo(mut stream: std::os::unix::net::UnixStream) {
    let mut buffer = [0; 4096];
    while let Ok(length @ 1..) = stream.read(&mut buffer) {
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n");
        let _ = stream.write_all(&[head.as_bytes(), &buffer[..length]].concat());
    }
}

#[test]
fn gateway_forwards_to_a_unix_socket() {
    let sockets = Sockets::new();
    let path = sockets.path("app");
    let listener = std::os::unix::net::UnixListener::bind(&path).expect("bound");
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            std::thread::spawn(|| echo(stream));
        }
    });
    let service = gateway_to(&path);
    let get = || request(&service.http, "GET", "/a?b=c", &[], b"");
    let host = format!("host: {}\r\n", service.http);
    for _ in 0..3 {
        let response = get();
        assert_eq!(response.status, 200);
        assert!(response.body.starts_with("GET /a?b=c HTTP/1.1\r\n"), "{}", response.body);
        assert!(response.body.to_lowercase().contains(&host), "{response:?}");
    }
    let label = format!("upstream=\"unix:{}\"", path.display());
    let metrics = service.admin("/metrics").body;
    let line = format!("tidegate_upstream_responses_total{{{label},code=\"2xx\"}} 3");
    assert!(metrics.contains(&line), "{line} is not in\n{metrics}");
    assert!(service.admin("/readyz").body.contains(&format!("unix:{}", path.display())));

    let service = gateway_to(&sockets.path("none"));
    assert_eq!(request(&service.http, "GET", "/", &[], b"").status, 502);
}

#[tokio::test(flavor = "multi_thread")]
async fn gateway_waits_for_room_in_the_queue_of_a_unix_socket() {
    let sockets = Sockets::new();
    let path = sockets.path("app");
    let socket = tokio::net::UnixSocket::new_stream().expect("a socket");
    socket.bind(&path).expect("bound");
    let listener = socket.listen(1).expect("listening");
    let service = gateway_to(&path);
    // Connections that are not accepted fill the queue.
    let mut waiting = Vec::new();
    while let Ok(stream) = tokio::net::UnixStream::connect(&path).await {
        assert!(waiting.len() < 1_000, "the queue has no end");
        waiting.push(stream);
    }
    let address = service.http.clone();
    let response = tokio::task::spawn_blocking(move || request(&address, "GET", "/", &[], b""));
    service.wait_until("the request is in flight", |service| {
        let metrics = service.admin("/metrics").body;
        metrics.lines().any(|line| {
            line.starts_with("tidegate_upstream_requests_in_flight{") && line.ends_with(" 1")
        })
    });
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let stream = stream.into_std().expect("a stream");
            stream.set_nonblocking(false).expect("a socket");
            std::thread::spawn(|| echo(stream));
        }
    });
    assert_eq!(response.await.expect("no panic").status, 200);
}
