use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::support::Redis;
use crate::{advice_of, assert_found, doctor, findings_of, report, run_checks};

/// Chooses the server of a connection, or of a command.
enum Routing {
    /// The next server for each connection, as a load balancer does.
    Connection,
    /// The server by the hash of the first key; the first server for commands without one.
    Key,
    /// Like `Key`, but the hash is that of the hash tag.
    HashTag,
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
        let key = first_key(&command);
        let server = match (routing, &key) {
            (Routing::Connection, _) => number,
            (Routing::Key, Some(key)) => hash(key),
            (Routing::HashTag, Some(key)) => hash(hash_tag(key)),
            (_, None) => 0,
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

fn hash_tag(key: &str) -> &str {
    key.split_once('{').and_then(|(_, rest)| rest.split_once('}')).map_or(key, |(tag, _)| tag)
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

#[test]
fn scripts_that_a_proxy_routes_elsewhere_are_an_error() {
    let servers = two_servers();
    let (found, code) = run_checks(&proxy(&servers, Routing::HashTag));
    assert_eq!(code, Some(2), "{found}");
    assert_found(&found, "routing", "error", "EVALSHA does not find a script");
    assert!(advice_of(&found, "routing", "error").contains("SCRIPT LOAD"), "{found}");
    servers.iter().for_each(Redis::assert_every_key_expires);
}

#[test]
fn keys_of_one_script_that_a_proxy_separates_are_an_error() {
    let servers = two_servers();
    let (found, code) = run_checks(&proxy(&servers, Routing::Key));
    assert_eq!(code, Some(2), "{found}");
    assert_found(&found, "routing", "error", "hash tag");
    assert!(advice_of(&found, "routing", "error").contains("hash tags"), "{found}");
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
