//! Lines that real servers write. `make setup` installs them.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::client::Client;
use crate::support::{Service, TEST_TIMEOUT, free_port};
use crate::{Folder, report, simulate, text};

/// User agent that every format has to escape.
const AGENT: &str = "a \"quoted\" \\ agent ü";

struct Server {
    process: Child,
    address: SocketAddr,
    folder: Folder,
}

impl Server {
    /// Starts a server whose files have the port 24000.
    fn start(program: &str, arguments: &[&str], files: &[(&str, &str)]) -> Self {
        let folder = Folder::new();
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, free_port()));
        let place = folder.0.path().to_str().expect("UTF-8");
        for (name, text) in files {
            let text = text.replace("24000", &address.port().to_string());
            folder.write(name, text.replace("FOLDER", place));
        }
        let log = File::create(folder.path("output")).expect("a log");
        let process = Command::new(installed(program))
            .args(arguments.iter().map(|argument| argument.replace("FOLDER", place)))
            .current_dir(folder.0.path())
            .env_clear()
            .env("HOME", place)
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("the log"))
            .stderr(log)
            .spawn()
            .unwrap_or_else(|error| panic!("{program}: {error}: run `make setup`"));
        let mut server = Self { process, address, folder };
        // Traefik answers before it logs.
        server.wait_until("it listens and logs", |server| {
            let _ = Client(99).send(server.address, "GET", "/ready", &[], "");
            let log = std::fs::read(server.folder.path("access.log")).unwrap_or_default();
            String::from_utf8_lossy(&log).contains("/ready")
        });
        server
    }

    fn wait_until(&mut self, what: &str, happened: impl Fn(&Self) -> bool) {
        let deadline = Instant::now() + TEST_TIMEOUT;
        while !happened(self) {
            let output = || std::fs::read_to_string(self.folder.path("output")).unwrap_or_default();
            assert!(matches!(self.process.try_wait(), Ok(None)), "it exited: {}", output());
            assert!(Instant::now() < deadline, "timeout until {what}: {}", output());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Returns the access log when it has the lines of this number of requests, besides those of
    /// the start.
    fn log(&mut self, lines: usize) -> String {
        let count = |server: &Self| {
            let log = std::fs::read(server.folder.path("access.log")).unwrap_or_default();
            let is_request = |line: &&str| line.ends_with('\n') && !line.contains("/ready");
            String::from_utf8_lossy(&log).split_inclusive('\n').filter(is_request).count()
        };
        self.wait_until("the log is written", |server| count(server) >= lines);
        self.folder.path("access.log").to_str().expect("UTF-8").to_owned()
    }
}

impl Drop for Server {
    /// Sends SIGTERM first, so that workers stop, too.
    fn drop(&mut self) {
        let _ = Command::new("kill").arg(self.process.id().to_string()).status();
        let deadline = Instant::now() + Duration::from_secs(5);
        while Instant::now() < deadline && matches!(self.process.try_wait(), Ok(None)) {
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn installed(program: &str) -> PathBuf {
    let venv = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../.venv/bin"));
    let folders = [venv, "/usr/sbin".into(), "/usr/bin".into()];
    let found = folders.iter().map(|folder| folder.join(program)).find(|file| file.exists());
    found.unwrap_or_else(|| panic!("{program} is not installed: run `make setup`"))
}

/// Sends requests of three clients, and returns their number.
fn send_requests(address: SocketAddr) -> usize {
    let agent = [("User-Agent", AGENT), ("X-User-Id", "ann"), ("Referer", "http://r.example/")];
    for _ in 0..5 {
        Client(2).get(address, "/api/items?user=ann&q=a%20b", &agent);
    }
    for _ in 0..3 {
        Client(3).post(address, "/api/a%20b/../login", &[("User-Agent", "curl")], "");
    }
    Client(4).get(address, "/other", &[]);
    9
}

const POLICIES: &str = "
policies:
  - {name: address, match: {path: '/api/**'}, key: [ip], limit: 2, window: 1h}
  - {name: agent, key: [header.user-agent], limit: 1000, window: 1h}
  - {name: query, key: [query.q, query.user], limit: 1000, window: 1h}
  - {name: login, match: {path: /api/login, method: POST}, key: [ip], limit: 1000, window: 1h}
  - {name: referer, key: [header.referer], limit: 1000, window: 1h}
  - {name: host, key: [host], limit: 1000, window: 1h}
  - {name: user, key: [header.x-user-id], limit: 1000, window: 1h}
";

/// Returns the requests of each key of a policy.
fn keys(report: &Value, policy: &str) -> BTreeMap<String, u64> {
    let policies = report["variants"][0]["policies"].as_array().expect("policies");
    let found = policies.iter().find(|entry| entry["name"] == policy).expect("the policy");
    let key = |entry: &Value| {
        let name = entry["key"].as_str().expect("a key").to_owned();
        (name, entry["requests"].as_u64().expect("a number"))
    };
    found["heaviest_keys"].as_array().expect("keys").iter().map(key).collect()
}

/// Checks the attributes of the requests in a log.
fn check(log: &str, has_headers: bool) {
    let folder = Folder::new();
    let config = folder.write("tidegate.yaml", POLICIES);
    let report = report(&["--access-log", log, "--config", &config, "--strict"]);
    let map = |entries: &[(&str, u64)]| -> BTreeMap<String, u64> {
        entries.iter().map(|(key, count)| ((*key).to_owned(), *count)).collect()
    };
    let mut addresses = keys(&report, "address");
    addresses.remove("127.0.0.99");
    assert_eq!(addresses, map(&[("127.0.0.2", 5), ("127.0.0.3", 3)]), "{log}");
    let agents = keys(&report, "agent");
    assert_eq!((agents[AGENT], agents["curl"]), (5, 3), "{log}");
    assert_eq!(keys(&report, "query"), map(&[("a b|ann", 5)]), "{log}");
    assert_eq!(keys(&report, "login"), map(&[("127.0.0.3", 3)]), "{log}");
    assert_eq!(keys(&report, "referer"), map(&[("http://r.example/", 5)]), "{log}");
    let policies = &report["variants"][0]["policies"];
    assert_eq!(policies[0]["denied"], 4, "two of five, and two of three, are admitted");
    if has_headers {
        assert_eq!(keys(&report, "user"), map(&[("ann", 5)]), "{log}");
        let hosts = keys(&report, "host");
        assert!(hosts["example.com"] >= 9, "{hosts:?}");
    }
}

#[test]
fn nginx_log_has_the_attributes_of_the_requests() {
    let config = "
daemon off; pid nginx.pid; error_log stderr; worker_processes 1;
events {}
http {
  access_log access.log combined;
  client_body_temp_path a; proxy_temp_path b; fastcgi_temp_path c; uwsgi_temp_path d;
  scgi_temp_path e;
  server { listen 127.0.0.1:24000; location / { return 200 ok; } }
}";
    let files = [("nginx.conf", config)];
    let mut server = Server::start("nginx", &["-p", "FOLDER", "-c", "nginx.conf"], &files);
    let count = send_requests(server.address);
    check(&server.log(count), false);
    // A client that speaks TLS to a plain port.
    Client(5).send_bytes(server.address, b"\x16\x03\x01\x02 hello\r\n\r\n");
    let log = server.log(count + 1);
    let found = report(&["--access-log", &log, "--limit", "5", "--window", "1h", "--strict"]);
    assert_eq!((&found["lines"]["not_http"], &found["lines"]["bad"]), (&json!(1), &json!(0)));
}

#[test]
fn apache_log_has_the_attributes_of_the_requests() {
    let config = r#"
ServerRoot FOLDER
ServerName localhost
Listen 127.0.0.1:24000
LoadModule mpm_event_module /usr/lib/apache2/modules/mod_mpm_event.so
LoadModule authz_core_module /usr/lib/apache2/modules/mod_authz_core.so
PidFile apache.pid
DefaultRuntimeDir FOLDER
ErrorLog error.log
DocumentRoot FOLDER
LogFormat "%h %l %u %t \"%r\" %>s %O \"%{Referer}i\" \"%{User-Agent}i\"" combined
CustomLog access.log combined
"#;
    // As root it would not start without another user.
    let user = if is_root() { "User www-data\nGroup www-data\n" } else { "" };
    let config = format!("{config}{user}");
    let files = [("httpd.conf", config.as_str())];
    let arguments = ["-DFOREGROUND", "-f", "FOLDER/httpd.conf"];
    let mut server = Server::start("apache2", &arguments, &files);
    let count = send_requests(server.address);
    check(&server.log(count), false);
}

fn is_root() -> bool {
    let output = Command::new("id").arg("-u").output().expect("id runs");
    output.stdout == b"0\n"
}

#[test]
fn caddy_log_has_the_attributes_of_the_requests() {
    let config = "{
	admin off
	auto_https off
}
http://:24000 {
	bind 127.0.0.1
	log {
		output file access.log
		format json
	}
	respond ok
}
";
    let arguments = ["run", "--config", "Caddyfile"];
    let mut server = Server::start("caddy", &arguments, &[("Caddyfile", config)]);
    let count = send_requests(server.address);
    check(&server.log(count), true);
    // Caddy hides credentials, which must not become one key of all clients.
    Client(6).get(server.address, "/", &[("Authorization", "Bearer secret")]);
    let log = server.log(count + 1);
    let output = simulate(&[
        "--access-log",
        &log,
        "--key",
        "header.authorization",
        "--limit",
        "1",
        "--window",
        "1h",
    ]);
    assert!(text(&output.stderr).contains("no policy of"), "{}", text(&output.stderr));
}

#[test]
fn traefik_logs_have_the_attributes_of_the_requests() {
    for (format, has_headers) in [("json", true), ("common", false)] {
        let config = format!(
            "entryPoints: {{web: {{address: '127.0.0.1:24000'}}}}\n\
             accessLog: {{filePath: access.log, format: {format}, \
             fields: {{headers: {{defaultMode: keep}}}}}}\n"
        );
        let files = [("traefik.yaml", config.as_str())];
        let mut server = Server::start("traefik", &["--configfile=traefik.yaml"], &files);
        let count = send_requests(server.address);
        let log = server.log(count);
        if has_headers {
            check(&log, true);
        } else {
            let report = report(&["--access-log", &log, "--limit", "5", "--window", "1h"]);
            assert_eq!(keys(&report, "limit")["127.0.0.2"], 5);
            assert_eq!(report["lines"]["bad"], 0, "{report}");
        }
    }
}

#[test]
fn logs_of_the_gateway_are_decided_as_the_gateway_did() {
    let policies = "
client_ip: {trusted_proxies: [127.0.0.0/8]}
policies:
  - {name: address, match: {path: '/api/**'}, key: [ip], limit: 30, window: 100d}
  - {name: agent, key: [header.user-agent], algorithm: token-bucket, limit: 60, window: 100d}
";
    for format in ["json", "combined"] {
        let folder = Folder::new();
        let config = folder.write("tidegate.yaml", policies);
        let place = folder.path("access.log");
        let access_log =
            format!("gateway: {{access_log: {{path: '{}', format: {format}}}}}\n", place.display());
        let gateway = Service::gateway(&format!("{policies}{access_log}"), &[&upstream()]);
        let address: SocketAddr = gateway.http.parse().expect("an address");
        let mut denied = 0;
        for number in 0..200_u32 {
            let client = format!("203.0.113.{}", number % 5);
            let agent = format!("agent \"{}\"", number % 3);
            let path = ["/api/items?x=1", "/other"][usize::from(number % 7 == 0)];
            let headers = [("X-Forwarded-For", client.as_str()), ("User-Agent", agent.as_str())];
            let response = Client(9).get(address, path, &headers);
            denied += usize::from(response.status == 429);
        }
        let lines = || std::fs::read_to_string(&place).unwrap_or_default().lines().count();
        gateway.wait_until("the log is written", |_| lines() >= 200);
        let log = place.to_str().expect("UTF-8");
        let report = report(&["--access-log", log, "--config", &config, "--strict"]);
        assert!(denied > 20, "{denied}");
        assert_eq!(report["variants"][0]["denied"], denied, "{format}");
        assert_eq!(report["variants"][0]["admitted"], 200 - denied, "{format}");
    }
}

#[test]
fn clients_behind_trusted_proxies_are_those_of_the_gateway() {
    let policies = "
client_ip: {trusted_proxies: [127.0.0.0/8, 10.0.0.0/8]}
policies:
  - {name: address, key: [ip], limit: 3, window: 100d}
";
    let folder = Folder::new();
    let config = folder.write("tidegate.yaml", policies);
    let gateway = Service::gateway(policies, &[&upstream()]);
    let address: SocketAddr = gateway.http.parse().expect("an address");
    let hops = [
        "203.0.113.1",
        "203.0.113.1, 10.0.0.2",
        "198.51.100.7, 203.0.113.1",
        "203.0.113.2:4711, 10.0.0.2",
        "[2001:db8::1]:80",
        "2001:db8::2, 10.0.0.3",
        "unknown, 10.0.0.9",
        "10.0.0.4",
        "-",
    ];
    let (mut log, mut json, mut denied) = (String::new(), String::new(), 0);
    for number in 0..90 {
        let list = hops[number % hops.len()];
        let headers: &[(&str, &str)] = &[("X-Forwarded-For", list)];
        let headers = if list == "-" { &[] } else { headers };
        denied += usize::from(Client(9).get(address, "/", headers).status == 429);
        let time = format!("16/Nov/2026:07:{:02}:{:02} +0000", number / 60, number % 60);
        let request = "GET / HTTP/1.1";
        let _ = writeln!(log, r#"127.0.0.9 - - [{time}] "{request}" 200 5 "-" "-" "{list}""#);
        let line = json!({
            "time_local": time,
            "remote_addr": "127.0.0.9",
            "request": request,
            "http_x_forwarded_for": list,
        });
        let _ = writeln!(json, "{line}");
    }
    assert!(denied > 20, "{denied}");
    for lines in [log, json] {
        let log = folder.write("access.log", lines);
        let found = report(&["--access-log", &log, "--config", &config, "--strict"]);
        assert_eq!(found["variants"][0]["denied"], denied, "{found}");
    }
}

/// Starts an application that answers each connection once, and returns its URL.
fn upstream() -> String {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    std::thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            let mut head = [0; 4096];
            let _ = stream.read(&mut head);
            let response = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok";
            let _ = stream.write_all(response);
        }
    });
    url
}
