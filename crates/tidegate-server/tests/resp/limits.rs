//! Limits of connections, idle and slow clients, backpressure, drain and reload.

use std::io::{Read as _, Write as _};
use std::time::{Duration, Instant};

use crate::client::{Client, Reply, command};
use crate::support::TEST_TIMEOUT;
use crate::{POLICIES, metric, start, start_with_listen};

fn closed(service: &crate::support::Service, reason: &str) -> u64 {
    metric(service, &format!("tidegate_connections_closed_total{{reason=\"{reason}\"}}"))
}

#[test]
fn idle_client_is_closed_and_one_that_asks_is_not() {
    let (service, address) = start_with_listen("idle_timeout: 1s");
    let mut busy = Client::connect(&address);
    let mut idle = Client::connect(&address);
    let mut silent = Client::connect(&address);
    assert_eq!(idle.ask(&["PING"]), Reply::Simple("PONG".to_owned()));
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(std::sync::atomic::Ordering::Relaxed) {
                assert_eq!(busy.ask(&["PING"]), Reply::Simple("PONG".to_owned()));
            }
        });
        assert_eq!(idle.next(), None);
        assert_eq!(silent.next(), None);
        done.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    assert_eq!(closed(&service, "idle"), 2);
}

#[test]
fn incomplete_command_is_not_waited_for() {
    let (service, address) = start(POLICIES);
    let mut client = Client::connect(&address);
    let start = Instant::now();
    client.send(b"*1\r\n$4\r\nPI");
    assert_eq!(client.next(), None);
    assert!(start.elapsed() >= Duration::from_secs(9), "{:?}", start.elapsed());
    assert_eq!(closed(&service, "header_timeout"), 1);
}

#[test]
fn client_that_does_not_read_is_not_read_from() {
    let (service, address) = start(POLICIES);
    let mut client = Client::connect(&address);
    client.stream().set_nonblocking(true).expect("a socket");
    let pipeline = command(&["ECHO", &"x".repeat(30_000)]).repeat(8);
    let (mut sent, mut position, mut blocked_since) = (0_usize, 0, None);
    // The buffers of the sockets fill up, then the service reads nothing more.
    let limit = 256 * 1024 * 1024;
    loop {
        match client.stream().write(&pipeline[position..]) {
            Ok(length) => {
                position = (position + length) % pipeline.len();
                sent += length;
                blocked_since = None;
                assert!(sent < limit, "the service does not stop reading");
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                let since = *blocked_since.get_or_insert_with(Instant::now);
                if since.elapsed() > Duration::from_secs(1) {
                    break;
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(error) => panic!("{error}"),
        }
    }
    let memory = service.memory();
    assert!(memory < 200 * 1024, "{memory} KiB");
    // It is closed as stalled, and others are served.
    assert_eq!(Client::connect(&address).ask(&["PING"]), Reply::Simple("PONG".to_owned()));
    service.wait_until("the stalled client is closed", |service| closed(service, "stalled") == 1);
}

#[test]
fn longest_idle_connection_makes_room() {
    let (service, address) =
        start_with_listen("max_connections: 2, max_connections_per_address: 2");
    let mut first = Client::connect(&address);
    first.ask(&["PING"]);
    let mut second = Client::connect(&address);
    // The service records that the first is idle after it has sent the reply.
    for _ in 0..1_000 {
        second.ask(&["PING"]);
    }
    let mut third = Client::connect(&address);
    assert_eq!(third.ask(&["PING"]), Reply::Simple("PONG".to_owned()));
    assert_eq!(first.next(), None);
    assert_eq!(second.ask(&["PING"]), Reply::Simple("PONG".to_owned()));
    assert_eq!(closed(&service, "evicted"), 1);
}

#[test]
fn shutdown_answers_what_has_arrived() {
    let (mut service, address) = start(POLICIES);
    let mut idle = Client::connect(&address);
    assert_eq!(idle.ask(&["PING"]), Reply::Simple("PONG".to_owned()));
    let mut partial = Client::connect(&address);
    partial.send(b"PING\r\n*1\r\n$4\r\nPI");
    assert_eq!(partial.reply(), Reply::Simple("PONG".to_owned()));
    let start = Instant::now();
    service.signal("TERM");
    assert!(service.wait_for_exit().success());
    assert!(start.elapsed() < TEST_TIMEOUT / 2, "{:?}", start.elapsed());
    assert_eq!(idle.next(), None);
    assert_eq!(partial.next(), None);
}

#[test]
fn token_that_a_reload_adds_is_required_at_once() {
    let (service, address) = start(POLICIES);
    let mut client = Client::connect(&address);
    assert_eq!(client.ask(&["PING"]), Reply::Simple("PONG".to_owned()));
    let config = std::fs::read_to_string(service.file()).expect("the file");
    std::fs::write(service.file(), format!("{config}auth: {{api_token: secret}}\n"))
        .expect("written");
    service.wait_until("the token is required", |_| {
        matches!(Client::connect(&address).ask(&["PING"]), Reply::Error(_))
    });
    assert!(client.ask(&["PING"]).error().starts_with("NOAUTH"));
    assert_eq!(client.ask(&["AUTH", "secret"]), Reply::Simple("OK".to_owned()));
    assert_eq!(client.ask(&["PING"]), Reply::Simple("PONG".to_owned()));
    let mut rest = [0; 1];
    client.stream().set_nonblocking(true).expect("a socket");
    assert!(client.stream().read(&mut rest).is_err(), "nothing more is sent");
}

#[test]
fn guesses_end_the_connection_and_resets_are_logged() {
    let auth = "auth: {api_token: secret, admin_token: root}\n";
    let (service, address) = start(&format!("{auth}{POLICIES}"));
    let mut client = Client::connect(&address);
    for _ in 0..3 {
        assert!(client.ask(&["AUTH", "S3CR3T"]).error().starts_with("WRONGPASS"));
    }
    assert_eq!(client.next(), None);
    service.wait_until_logged("wrong tokens");
    let mut admin = Client::connect(&address);
    assert_eq!(admin.ask(&["AUTH", "root"]), Reply::Simple("OK".to_owned()));
    admin.ask(&["TG.RESET", "unknown", "ann"]).error();
    admin.ask(&["TG.RESET", "per-user", "ann"]).integers();
    admin.ask(&["TG.RESET", "KEY", "ann", "QUOTA", "fixed-window", "5", "1s"]).integers();
    service.wait_until("both resets are logged", |service| {
        service.output().matches("count reset").count() == 2
    });
    let output = service.output();
    let line = "count reset peer=127.0.0.1:";
    assert!(output.contains("listener=\"resp\" peer=127.0.0.1:"), "{output}");
    assert!(
        output.contains(line)
            && output.contains("token=\"admin_token\" policy=\"per-user\" key=\"ann\""),
        "{output}"
    );
    assert!(!output.contains("S3CR3T") && !output.contains("root"), "{output}");
}
