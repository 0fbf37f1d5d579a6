//! Many connections, of which some are stuck in the middle of a command.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::client::{Client, Reply};
use crate::support::{Service, TEST_TIMEOUT};
use crate::{metric, start_with_fields, start_with_listen};

const CONNECTIONS: usize = 10_000;
const STUCK: usize = 1_000;
/// Clients that ask, one after the other.
const ASKING: usize = 20;
const QUESTIONS_PER_ROUND: usize = 1_000;
const ROUNDS: usize = 5;
/// Files of this process and of the service in addition to the connections.
const OTHER_FILES: usize = 500;

/// Returns the number of connections that both processes may open.
fn connections(service: &Service) -> usize {
    let limit = |text: String| text.parse::<usize>().unwrap_or(usize::MAX);
    let of_service = limit(service.file_limits().0);
    let own = std::fs::read_to_string("/proc/self/limits").expect("its limits");
    let line = own.lines().find_map(|line| line.strip_prefix("Max open files")).expect("a limit");
    let own = limit(line.split_whitespace().next().expect("a number").to_owned());
    CONNECTIONS.min(own.min(of_service).saturating_sub(OTHER_FILES))
}

/// Connections that each send half a command of 60 KB.
const HALF_COMMANDS: usize = 3_000;
/// Number of those commands for which there is memory.
const BUFFERS: u64 = 1_024;

/// Opens connections, sends half a long command on each, and waits until the service has refused
/// those for which there is no memory. Returns by how many KiB its memory grew.
fn memory_of_half_commands(token: &str) -> u64 {
    let limits = "max_connections: 20000, max_connections_per_address: 20000";
    let (service, address) = start_with_fields(limits, token);
    let count = connections(&service).min(HALF_COMMANDS);
    let mut all: Vec<TcpStream> =
        (0..count).map(|_| TcpStream::connect(&address).expect("the service accepts")).collect();
    let count = count as u64;
    service.wait_until("all are connected", |service| {
        metric(service, "tidegate_resp_connections") == count
    });
    let before = service.memory();
    let half = format!("*2\r\n$4\r\nECHO\r\n$60000\r\n{}", "x".repeat(59_000));
    for stream in &mut all {
        // The service may have refused it already.
        let _ = stream.write_all(half.as_bytes());
    }
    if token.is_empty() {
        let closed = |service: &Service, reason: &str| {
            metric(service, &format!("tidegate_connections_closed_total{{reason=\"{reason}\"}}"))
        };
        service.wait_until("the others are refused", |service| {
            let (refused, late) =
                (closed(service, "buffers_full"), closed(service, "header_timeout"));
            refused + late + BUFFERS >= count
        });
        let pong = Client::connect(&address).ask(&["PING"]);
        assert_eq!(pong, Reply::Simple("PONG".to_owned()), "short commands need no share");
    } else {
        for stream in &mut all {
            stream.set_read_timeout(Some(TEST_TIMEOUT)).expect("a timeout");
            let mut reply = [0; 44];
            stream.read_exact(&mut reply).expect("a reply");
            assert_eq!(reply, *b"-ERR Protocol error: unauthenticated command");
        }
    }
    service.memory().saturating_sub(before)
}

#[test]
fn half_commands_take_a_bounded_share_of_memory() {
    for (token, max_mib) in [("auth: {api_token: 0123456789abcdef}\n", 64), ("", 128)] {
        let growth = memory_of_half_commands(token);
        println!("{token:?}: {growth} KiB");
        assert!(growth < max_mib * 1024, "{token:?}: {growth} KiB");
    }
}

/// Returns the 99th percentile of the time of a question.
fn p99(clients: &mut [Client]) -> Duration {
    let mut times: Vec<Duration> = (0..QUESTIONS_PER_ROUND)
        .map(|number| {
            let client = &mut clients[number % ASKING];
            let start = Instant::now();
            assert_eq!(client.ask(&["TG.ACQUIRE", "wide", "k"]).integers()[0], 1);
            start.elapsed()
        })
        .collect();
    times.sort_unstable();
    times[times.len() * 99 / 100]
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

#[test]
fn stuck_connections_do_not_slow_down_the_others() {
    let limits = "max_connections: 20000, max_connections_per_address: 20000, idle_timeout: 1h";
    let (quiet, quiet_address) = start_with_listen(limits);
    let (crowded, address) = start_with_listen(limits);
    let count = connections(&crowded);
    let mut crowd: Vec<TcpStream> = (0..count - ASKING)
        .map(|_| TcpStream::connect(&address).expect("the service accepts"))
        .collect();
    let mut asking = [&quiet_address, &address]
        .map(|address| (0..ASKING).map(|_| Client::connect(address)).collect::<Vec<Client>>());
    crowded.wait_until("all are connected", |service| {
        metric(service, "tidegate_resp_connections") == count as u64
    });
    // In turns, so that the load of the machine affects both equally. The stuck ones are renewed,
    // because the service closes them after ten seconds.
    let mut times: [Vec<Duration>; 2] = Default::default();
    let stuck = STUCK * count / CONNECTIONS;
    for _ in 0..ROUNDS {
        for stream in &mut crowd[..stuck] {
            *stream = TcpStream::connect(&address).expect("the service accepts");
            stream.write_all(b"*3\r\n$10\r\nTG.ACQ").expect("sent");
        }
        for (clients, times) in asking.iter_mut().zip(&mut times) {
            times.push(p99(clients));
        }
    }
    let [without, with] = times.map(median);
    println!("p99 with {count} connections, {stuck} stuck: {with:?}; without: {without:?}");
    // Below this, the clock and the scheduler of a busy machine are measured.
    let floor = Duration::from_millis(2);
    assert!(with <= 2 * without.max(floor), "with {with:?}, without {without:?}");
    assert!(metric(&crowded, "tidegate_resp_connections") >= (count - stuck) as u64);
    let memory_per_connection = crowded.memory().saturating_sub(quiet.memory()) * 1024;
    println!("{} bytes per connection", memory_per_connection / count as u64);
    assert!(memory_per_connection / (count as u64) < 64 * 1024);
}
