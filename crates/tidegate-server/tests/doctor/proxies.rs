use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::support::{Redis, free_port};
use crate::{advice_of, assert_found, doctor, findings_of, report, run_checks, wait_until};

/// Chooses the server of a connection, or of a command.
enum Routing {
    /// The next server for each connection, as a load balancer does.
    Connection,
    /// The server by the hash of the first key; the first server for commands without one.
    Key,
}

/// Starts a proxy in front of servers, and returns its URL. Its threads end with the process.
fn proxy(servers: &[Redis], routing: Routing) -> String {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
    let url = format!("redis://{}", listener.local_addr().expect("bound"));
    let ports: Vec<u16> = servers.iter().map(Redis::port).collect();
    let (routing, count) = (Arc::new(routing), AtomicUsize::new(0));
    std::thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            let number = count.fetch_add(1, Ordering::Relaxed);
            let (ports, routing) = (ports.clone(), Arc::clone(&routing));
            std::thread::spawn(move || forward(&client, &ports, &routing, number));
        }
    });
    url
}

/// Forwards commands one by one until a connection is closed.
fn forward(client: &TcpStream, ports: &[u16], routing: &Routing, number: usize) {
    let connect = |port: &u16| TcpStream::connect((Ipv4Addr::LOCALHOST, *port));
    let Ok(servers) = ports.iter().map(connect).collect::<Result<Vec<_>, _>>() else { return };
    let mut replies: Vec<_> = servers.iter().map(BufReader::new).collect();
    let mut commands = BufReader::new(client);
    while let Some(command) = message(&mut commands) {
        let server = match (routing, first_key(&command)) {
            (Routing::Connection, _) => number,
            (Routing::Key, Some(key)) => hash(&key),
            (Routing::Key, None) => 0,
        } % servers.len();
        if (&servers[server]).write_all(&command).is_err() {
            return;
        }
        let Some(reply) = message(&mut replies[server]) else { return };
        let mut client = client;
        if client.write_all(&reply).is_err() {
            return;
        }
    }
}

/// Reads one message of the Redis protocol, with its bytes as they are.
fn message(from: &mut impl BufRead) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut missing = 1;
    while missing > 0 {
        missing -= 1;
        let start = bytes.len();
        from.read_until(b'\n', &mut bytes).ok().filter(|length| *length > 0)?;
        let line = std::str::from_utf8(&bytes[start..]).ok()?.trim_end().to_owned();
        let length: i64 = line.get(1..)?.parse().unwrap_or(0);
        match line.as_bytes()[0] {
            b'*' => missing += length.max(0),
            b'$' if length >= 0 => {
                let start = bytes.len();
                bytes.resize(start + usize::try_from(length).ok()? + 2, 0);
                from.read_exact(&mut bytes[start..]).ok()?;
            }
            _ => {}
        }
    }
    Some(bytes)
}

/// Returns the first key of a command of the doctor or of a decision.
fn first_key(command: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(command);
    let words: Vec<&str> = text.split("\r\n").skip(2).step_by(2).collect();
    let position = match words[0].to_ascii_uppercase().as_str() {
        "EVALSHA" | "EVAL" => 3,
        "GET" | "SET" | "UNLINK" | "PTTL" | "HSET" | "HMGET" => 1,
        _ => return None,
    };
    words.get(position).map(|&key| key.to_owned())
}

fn hash(text: &str) -> usize {
    text.bytes().fold(7, |hash: usize, byte| hash.wrapping_mul(31).wrapping_add(usize::from(byte)))
}

fn two_servers() -> [Redis; 2] {
    [Redis::start(), Redis::start()]
}

#[test]
fn load_balancer_over_independent_servers_is_an_error() {
    let servers = two_servers();
    let (found, code) = run_checks(&proxy(&servers, Routing::Connection));
    assert_eq!(code, Some(2), "{found}");
    assert_found(&found, "routing", "error", "a key that one connection has written");
    assert!(advice_of(&found, "routing", "error").contains("one server"), "{found}");
    servers.iter().for_each(Redis::assert_every_key_expires);
}

/// Envoy's Redis proxy, killed at the end of the test.
struct Envoy {
    process: Child,
    url: String,
    _folder: tempfile::TempDir,
}

impl Envoy {
    /// Starts Envoy in front of servers, over which it spreads keys by their hash tags.
    fn start(servers: &[Redis]) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let port = free_port();
        let endpoint = |server: &Redis| format!("{{endpoint: {{{}}}}}", address(server.port()));
        let endpoints = servers.iter().map(endpoint).collect::<Vec<_>>().join(", ");
        let config =
            ENVOY_CONFIG.replace("LISTEN", &address(port)).replace("ENDPOINTS", &endpoints);
        let file = folder.path().join("envoy.yaml");
        std::fs::write(&file, config).expect("written");
        let envoy = concat!(env!("CARGO_MANIFEST_DIR"), "/../../.venv/bin/envoy");
        let process = Command::new(envoy)
            .arg("-c")
            .arg(&file)
            .args(["--concurrency", "1", "--use-dynamic-base-id", "--log-level", "error"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap_or_else(|error| panic!("{envoy} ({error}): install it with `make setup`"));
        let envoy = Self { process, url: format!("redis://127.0.0.1:{port}"), _folder: folder };
        wait_until("Envoy listens", || TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_ok());
        envoy
    }
}

impl Drop for Envoy {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn address(port: u16) -> String {
    format!("address: {{socket_address: {{address: 127.0.0.1, port_value: {port}}}}}")
}

const ENVOY_CONFIG: &str = "
static_resources:
  listeners:
  - LISTEN
    filter_chains:
    - filters:
      - name: envoy.filters.network.redis_proxy
        typed_config:
          '@type': type.googleapis.com/envoy.extensions.filters.network.redis_proxy.v3.RedisProxy
          stat_prefix: redis
          settings: {op_timeout: 10s, enable_hashtagging: true}
          prefix_routes: {catch_all_route: {cluster: redis}}
  clusters:
  - name: redis
    type: STATIC
    lb_policy: MAGLEV
    load_assignment: {cluster_name: redis, endpoints: [{lb_endpoints: [ENDPOINTS]}]}
";

#[test]
fn proxy_that_spreads_keys_is_an_error() {
    let servers = two_servers();
    let envoy = Envoy::start(&servers);
    let (found, code) = run_checks(&envoy.url);
    assert_eq!(code, Some(2), "{found}");
    assert_found(&found, "routing", "error", "a proxy in front spreads keys");
    assert!(advice_of(&found, "routing", "error").contains("by its first key"), "{found}");
    // Whether a single decision works depends on the servers that Envoy chooses for its key and for
    // SCRIPT LOAD.
    assert_found(&found, "topology", "ok", "a single server");
    assert_eq!(findings_of(&found, "commands"), Vec::new(), "{found}");
    servers.iter().for_each(Redis::assert_every_key_expires);

    let one = Envoy::start(&servers[..1]);
    let (found, _) = run_checks(&one.url);
    assert_found(&found, "routing", "ok", "reach one server");
}

#[test]
fn scripts_that_a_proxy_routes_elsewhere_are_an_error() {
    let servers = two_servers();
    let (found, code) = run_checks(&proxy(&servers, Routing::Key));
    assert_eq!(code, Some(2), "{found}");
    assert_found(&found, "routing", "error", "EVALSHA does not find a script");
    servers.iter().for_each(Redis::assert_every_key_expires);
}

#[test]
fn proxy_in_front_of_one_server_is_fit() {
    let server = [Redis::start()];
    let output = doctor(&proxy(&server, Routing::Connection), &["--json", "--probes", "5"]);
    let (found, code) = report(&output);
    assert_eq!(code, Some(0), "{found}");
    let routing = findings_of(&found, "routing");
    assert!(matches!(&routing[..], [(level, _)] if level == "ok"), "{routing:?}");
}
