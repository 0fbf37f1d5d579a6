//! Counts the instructions of a real redis-server per decision, by callgrind: a regression check
//! without noise. `make bench-redis-instructions` runs it, and `make bench-redis-instructions-renew`
//! rewrites its limits.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use redis::{Connection, ConnectionLike};

use super::reply::ItemReply;
use super::requests::{EncodedRequests, Operation, Request};
use super::{KeyMode, Parts, Script};
use crate::algorithm::{Algorithm, Encoding};
use crate::calendar::{Calendar, CalendarUnit};
use crate::charge::Charge;
use crate::hold::Hold;
use crate::quota::Quota;
use crate::store::Action;
use crate::store::redis::client::resp::Value;
use crate::store::redis::client::server_clock::ServerTimes;

const LIMITS: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/../../bench/redis-instructions/limits.txt");
/// Highest count that passes, in percent of the limit.
const TOLERANCE: u64 = 105;
/// Acquires of each key: first to create its count, then to be measured.
const SETUP: usize = 3;
const MEASURED: usize = 6;
/// Results that are measured, each with the limit that leads to it.
const RESULTS: [(&str, u64); 3] =
    [("allowed", 100), ("allowed-few", (SETUP + MEASURED) as u64), ("denied", SETUP as u64)];
/// Time of the first acquire, in microseconds, for a bucket's expiry is a multiple of a sixteenth of
/// its window. 4,000 s after such a multiple, one of the measured acquires sets it again.
const START: u64 = (86_400 / 16 * 300_000 + 4_000) * 1_000_000;
/// Time between two acquires of a key, in microseconds.
const STEP: u64 = 1_234;
/// Keys per call, and calls.
const SHAPES: [(usize, usize); 2] = [(1, 64), (64, 2)];

/// A redis-server under callgrind.
struct Server {
    process: Child,
    folder: tempfile::TempDir,
}

impl Server {
    fn start() -> (Self, Connection) {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let socket = folder.path().join("redis.sock");
        let process = Command::new("valgrind")
            .args(["--tool=callgrind", "--combine-dumps=no"])
            .arg(format!("--callgrind-out-file={}", folder.path().join("out").display()))
            .args(["redis-server", "--port", "0", "--save", "", "--appendonly", "no"])
            .args(["--hz", "1", "--unixsocket"])
            .arg(&socket)
            .arg("--dir")
            .arg(folder.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("valgrind and redis-server are installed by `make setup`");
        let server = Self { process, folder };
        let client =
            redis::Client::open(format!("redis+unix://{}", socket.display())).expect("a URL");
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            match client.get_connection() {
                Ok(connection) => return (server, connection),
                Err(error) => assert!(Instant::now() < deadline, "{error}"),
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Returns the number of instructions since the last call.
    fn instructions(&self) -> u64 {
        let dumps = || -> Vec<PathBuf> {
            let files = std::fs::read_dir(self.folder.path()).expect("our own folder");
            let files = files.map(|file| file.expect("readable").path());
            files.filter(|path| is_dump(path)).collect()
        };
        let dumped = Command::new("callgrind_control")
            .arg("-d")
            .arg(self.process.id().to_string())
            .stdout(Stdio::null())
            .status()
            .expect("callgrind_control comes with valgrind");
        assert!(dumped.success());
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let total = dumps().first().and_then(|path| {
                let text = std::fs::read_to_string(path).ok()?;
                let line = text.lines().find_map(|line| line.strip_prefix("totals: "))?;
                line.split_whitespace().next()?.parse().ok()
            });
            if let Some(total) = total {
                for path in dumps() {
                    std::fs::remove_file(path).expect("our own file");
                }
                return total;
            }
            assert!(Instant::now() < deadline, "no dump");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn is_dump(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("out."))
}

/// Calls of a quota on keys of their own.
struct Calls {
    requests: Vec<EncodedRequests>,
}

impl Calls {
    /// `first`: number of the first key.
    fn new(quota: &Quota, first: usize, keys: usize, calls: usize) -> Self {
        let key = |text: &mut String, charge: &Charge<'_>| {
            let _ = write!(text, "rate_limit:{{{}}}:per-user", charge.key());
        };
        let requests = (0..calls).map(|call| {
            let mut requests = EncodedRequests::default();
            for number in 0..keys {
                let name = format!("{:012}", first + call * keys + number);
                let charges = [Charge::new(&name, quota)];
                let operation = Operation::Apply(Action::Acquire);
                requests.add(&Request::new(operation, &charges), 0, key);
            }
            requests
        });
        Self { requests: requests.collect() }
    }

    /// Sends all calls once in each round, and asserts that all decisions are equal.
    fn send(&self, connection: &mut Connection, rounds: Range<usize>, allowed: bool) {
        let order = self.requests[0].order(0..self.requests[0].items().len(), |_| 1);
        let calls = rounds.len() * self.requests.len();
        let mut commands = Vec::new();
        for round in rounds {
            let driven = Some(START + STEP * round as u64);
            let server_times = ServerTimes { driven, ..ServerTimes::default() };
            for requests in &self.requests {
                let arguments = requests.arguments(&order, &server_times, KeyMode::Declared);
                let script = Script::decide(KeyMode::Declared, requests.parts(&order));
                arguments.encode(&script.first_words(false), &mut commands);
            }
        }
        for reply in connection.req_packed_commands(&commands, 0, calls).expect("decided") {
            let redis::Value::BulkString(reply) = reply else { panic!("{reply:?}") };
            let reply = self.requests[0].read(&order, &Value::String(reply)).expect("valid");
            for item in reply.items.expect("in time") {
                assert!(
                    matches!(&item, ItemReply::Grants(grants) if grants.granted == u64::from(allowed)),
                    "{item:?}"
                );
            }
        }
    }
}

/// Returns a quota of each form in Redis.
fn quotas(limit: u64) -> Vec<Quota> {
    let quota = |algorithm| {
        Quota::new(algorithm, limit, Duration::from_secs(86_400)).expect("a valid quota")
    };
    let algorithms = Algorithm::RATES.into_iter().filter(|name| *name != Algorithm::LeakyBucket);
    let packed = [Algorithm::SlidingLog, Algorithm::SlidingCounter]
        .map(|algorithm| quota(algorithm).with_encoding(Encoding::Packed).expect("has encodings"));
    algorithms.map(quota).chain(packed).collect()
}

/// Returns the quota of a calendar.
fn calendars(limit: u64) -> Vec<Quota> {
    let calendar = Calendar::new(CalendarUnit::Month, "Europe/Berlin").expect("a zone");
    vec![Quota::calendar_window(limit, calendar).expect("valid")]
}

/// Returns the instructions per decision by name.
fn measure() -> BTreeMap<String, u64> {
    let (server, mut connection) = Server::start();
    let mut counts = BTreeMap::new();
    measure_acquires(&server, &mut connection, &mut counts, quotas, Parts::default());
    measure_holds(&server, &mut connection, &mut counts);
    measure_published(&server, &mut connection, &mut counts);
    // Last, so that the garbage of its script is in no other count.
    let parts = Parts { calendars: true, ..Parts::default() };
    measure_acquires(&server, &mut connection, &mut counts, calendars, parts);
    counts
}

/// Adds the instructions of acquires without holds.
fn measure_acquires(
    server: &Server,
    connection: &mut Connection,
    counts: &mut BTreeMap<String, u64>,
    quotas: fn(u64) -> Vec<Quota>,
    parts: Parts,
) {
    load(connection, Script::decide(KeyMode::Declared, parts));
    let first = if parts.calendars { 1_000_000 } else { 0 };
    let mut cases = Vec::new();
    for (result, limit) in RESULTS {
        // A small bucket sets its expiry more often.
        let is_measured =
            |quota: &Quota| result != "allowed-few" || quota.algorithm() == Algorithm::TokenBucket;
        for quota in quotas(limit).into_iter().filter(is_measured) {
            for (keys, calls) in SHAPES {
                let sent = Calls::new(&quota, first + 1_000 * cases.len(), keys, calls);
                sent.send(connection, 0..SETUP, true);
                let name = quota.default_policy_name().trim_end_matches("-86400s");
                let name = if quota.calendar().is_some() { "calendar" } else { name };
                let name = format!("{name}/{result}/{keys}");
                cases.push((name, keys * calls * MEASURED, sent, result != "denied"));
            }
        }
    }
    server.instructions();
    for (name, decisions, sent, allowed) in cases {
        sent.send(connection, SETUP..SETUP + MEASURED, allowed);
        counts.insert(name, server.instructions() / decisions as u64);
    }
}

/// The script that people write for a semaphore, by the client's clock.
const NAIVE_SEMAPHORE: &str = "
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', ARGV[1])
if redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[2]) then return 0 end
redis.call('ZADD', KEYS[1], ARGV[3], ARGV[4])
redis.call('PEXPIRE', KEYS[1], 60000)
return 1";
/// Keys per call of holds, and calls: more would be too much work for one call.
const HOLD_SHAPES: [(usize, usize); 2] = [(1, 64), (10, 6)];
/// Ways to release a unit in flight: with a decision, and as permits do.
const RELEASES: [(&str, Action); 2] =
    [("committed", Action::Commit), ("released", Action::Release)];
/// Holds of a key before those that are measured.
const HELD: usize = 20;

/// Sends one request per key with a hold, whose id has this number. Returns whether all were
/// allowed.
fn send_holds(
    connection: &mut Connection,
    quota: &Quota,
    (keys, calls): (usize, usize),
    action: Action,
    (case, number): (usize, usize),
) -> bool {
    let name = |text: &mut String, charge: &Charge<'_>| {
        let _ = write!(text, "rate_limit:{{{}}}:holds", charge.key());
    };
    let requests = |call: usize| {
        let mut requests = EncodedRequests::default();
        for key in 0..keys {
            let key = format!("{case:04}{:08}", call * keys + key);
            let hold = Hold::new(format!("{number:032x}")).expect("valid");
            let charges = [Charge::new(&key, quota).with_hold(&hold)];
            requests.add(&Request::new(Operation::Apply(action), &charges), 0, name);
        }
        requests
    };
    let requests: Vec<EncodedRequests> = (0..calls).map(requests).collect();
    let order = requests[0].order(0..keys, |_| 1);
    let driven = Some(START + STEP * number as u64);
    let server_times = ServerTimes { driven, ..ServerTimes::default() };
    let mut commands = Vec::new();
    for requests in &requests {
        if action == Action::Release {
            (0..keys).for_each(|key| requests.release(key).encode(&["ZREM"], &mut commands));
            continue;
        }
        let arguments = requests.arguments(&order, &server_times, KeyMode::Declared);
        let script = Script::decide(KeyMode::Declared, requests.parts(&order));
        arguments.encode(&script.first_words(false), &mut commands);
    }
    let count = if action == Action::Release { keys * calls } else { calls };
    let is_allowed = |reply: redis::Value| {
        let reply = match reply {
            redis::Value::BulkString(reply) => reply,
            removed => return removed == redis::Value::Int(1),
        };
        let reply = requests[0].read(&order, &Value::String(reply)).expect("valid");
        reply.items.expect("in time").into_iter().all(|item| match item {
            ItemReply::Decisions(decisions) => decisions[0].0.allowed,
            ItemReply::Grants(grants) | ItemReply::Held(grants, _) => grants.granted == 1,
            ItemReply::Error(error) => panic!("{error}"),
        })
    };
    let replies = connection.req_packed_commands(&commands, 0, count).expect("decided");
    replies.into_iter().all(is_allowed)
}

fn load(connection: &mut Connection, script: &Script) {
    redis::cmd("SCRIPT").arg("LOAD").arg(script.text()).exec(connection).expect("loaded");
}

/// Adds the instructions of holds, and of a naive semaphore.
fn measure_holds(server: &Server, connection: &mut Connection, counts: &mut BTreeMap<String, u64>) {
    load(connection, Script::decide(KeyMode::Declared, Parts { holds: true, calendars: false }));
    let mut cases: Vec<(String, Quota)> = Vec::new();
    for quota in quotas(100) {
        let name = quota.default_policy_name().trim_end_matches("-86400s").to_owned();
        cases.push((format!("{name}/reserved"), quota));
    }
    let concurrency = |limit| Quota::concurrency(limit as u64).expect("valid");
    cases.push(("concurrency/allowed".to_owned(), concurrency(100)));
    cases.push(("concurrency/denied".to_owned(), concurrency(HELD)));
    for (case, (name, quota)) in cases.into_iter().enumerate() {
        for (shape, (keys, calls)) in HOLD_SHAPES.into_iter().enumerate() {
            let mut send = |action, number| {
                let id = (10 * case + shape, number);
                send_holds(connection, &quota, (keys, calls), action, id)
            };
            (0..HELD).for_each(|number| assert!(send(Action::Acquire, number)));
            server.instructions();
            let measured = HELD..HELD + MEASURED;
            let is_denied = name.ends_with("denied");
            measured.clone().for_each(|it| assert_eq!(send(Action::Acquire, it), !is_denied));
            let decisions = (keys * calls * MEASURED) as u64;
            counts.insert(format!("{name}/{keys}"), server.instructions() / decisions);
            if name == "concurrency/allowed" {
                for (result, action) in RELEASES {
                    measured.clone().for_each(|number| assert!(send(Action::Acquire, number)));
                    server.instructions();
                    measured.clone().for_each(|number| assert!(send(action, number)));
                    let count = server.instructions() / decisions;
                    counts.insert(format!("concurrency/{result}/{keys}"), count);
                }
            }
        }
    }
    let sha: String =
        redis::cmd("SCRIPT").arg("LOAD").arg(NAIVE_SEMAPHORE).query(connection).expect("loaded");
    for (name, limit) in [("allowed", 100), ("denied", HELD)] {
        let mut send = |number: usize| -> Vec<u8> {
            let now = START / 1_000 + number as u64;
            let mut calls = redis::pipe();
            for key in 0..SHAPES[0].1 {
                let key = format!("rate_limit:{{{name}{key:012}}}:holds");
                calls.cmd("EVALSHA").arg(&sha).arg(1).arg(key).arg(now).arg(limit);
                calls.arg(now + 60_000).arg(format!("{number:032x}"));
            }
            calls.query(connection).expect("decided")
        };
        (0..HELD).for_each(|number| assert!(send(number).iter().all(|allowed| *allowed == 1)));
        server.instructions();
        (HELD..HELD + MEASURED).for_each(|number| drop(send(number)));
        let decisions = (SHAPES[0].1 * MEASURED) as u64;
        counts.insert(format!("naive-semaphore/{name}/1"), server.instructions() / decisions);
    }
}

/// Scripts of our own for the algorithms that other libraries document.
const PUBLISHED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../bench/src/redis/published");
/// Names of the libraries, their script, and how many keys it has.
const LIBRARIES: [(&str, &str, usize); 3] = [
    ("like-upstash-sliding-window", "two_windows.lua", 2),
    ("like-redis_rate-gcra", "gcra.lua", 1),
    ("like-rate-limiter-flexible", "counter.lua", 1),
];

/// Adds the instructions of algorithms as other libraries document them, one decision per call.
fn measure_published(
    server: &Server,
    connection: &mut Connection,
    counts: &mut BTreeMap<String, u64>,
) {
    for (library, file, keys) in LIBRARIES {
        let text = std::fs::read_to_string(Path::new(PUBLISHED).join(file)).expect("our own file");
        let sha: String =
            redis::cmd("SCRIPT").arg("LOAD").arg(text).query(connection).expect("loaded");
        for (result, limit) in [("allowed", 100), ("denied", SETUP)] {
            let mut send = |_| -> Vec<redis::Value> {
                let mut calls = redis::pipe();
                for number in 0..SHAPES[0].1 {
                    calls.cmd("EVALSHA").arg(&sha).arg(keys);
                    for key in ["", ":previous"].iter().take(keys) {
                        calls.arg(format!("rate_limit:{{{result}{number:012}}}:{library}{key}"));
                    }
                    match file {
                        "two_windows.lua" => calls.arg(limit).arg(START / 1_000).arg(86_400_000),
                        "gcra.lua" => calls.arg(limit).arg(limit).arg(86_400),
                        _ => calls.arg(1).arg(86_400),
                    };
                }
                calls.query(connection).expect("decided")
            };
            let is_allowed = |reply: &redis::Value| match reply {
                redis::Value::Int(remaining) => *remaining >= 0,
                redis::Value::Array(fields) if file == "gcra.lua" => {
                    fields[0] == redis::Value::Int(1)
                }
                redis::Value::Array(fields) => {
                    matches!(fields[0], redis::Value::Int(count)
                        if u64::try_from(count).is_ok_and(|count| count <= limit as u64))
                }
                other => panic!("{other:?}"),
            };
            assert!((0..SETUP).all(|round| send(round).iter().all(is_allowed)));
            server.instructions();
            for round in 0..MEASURED {
                let is_expected = |reply| is_allowed(reply) == (result == "allowed");
                assert!(send(round).iter().all(is_expected), "{library} {result}");
            }
            let decisions = (SHAPES[0].1 * MEASURED) as u64;
            counts.insert(format!("{library}/{result}/1"), server.instructions() / decisions);
        }
    }
}

#[test]
#[ignore = "slow: make bench-redis-instructions runs it"]
fn decisions_in_redis_take_no_more_instructions_than_the_limits() {
    let counts = measure();
    let mut text = String::new();
    for (name, count) in &counts {
        let _ = writeln!(text, "{name} {count}");
    }
    println!("{text}");
    if std::env::var_os("RENEW").is_some() {
        return std::fs::write(LIMITS, text).expect("the limits are writable");
    }
    let limits = std::fs::read_to_string(LIMITS).expect("the limits are readable");
    let limits: BTreeMap<&str, u64> = limits
        .lines()
        .filter_map(|line| line.split_once(' '))
        .map(|(name, count)| (name, count.parse().expect("a number")))
        .collect();
    let names: Vec<&str> = counts.keys().map(String::as_str).collect();
    let limited: Vec<&str> = limits.keys().copied().collect();
    assert_eq!(names, limited, "renew the limits: make bench-redis-instructions-renew");
    let above: Vec<String> = counts
        .iter()
        .filter(|(name, count)| 100 * **count > TOLERANCE * limits[name.as_str()])
        .map(|(name, count)| format!("{name}: {count}, limit {}", limits[name.as_str()]))
        .collect();
    assert!(above.is_empty(), "more than 5 % above the limits:\n{}", above.join("\n"));
    for (name, count) in counts.iter().filter(|(name, _)| name.starts_with("calendar/")) {
        let fixed = counts[&name.replace("calendar", "fixed-window")];
        assert!(100 * count <= TOLERANCE * fixed, "{name}: {count}, of a fixed window {fixed}");
    }
}

/// 200 heartbeats per second, as in any fleet of more than 200 instances, and 50 publications, on a
/// core with three billion instructions per second.
#[test]
#[ignore = "slow: make bench-redis-instructions runs it"]
fn a_fleet_of_1000_takes_less_than_one_percent_of_a_core_in_redis() {
    const INSTANCES: usize = 1_000;
    let (server, mut connection) = Server::start();
    let state = "x".repeat(1_500);
    let key = "rate_limit:{%alive}";
    let mut version = String::new();
    let mut heartbeat = |connection: &mut Connection, instance: usize| {
        let mut call = redis::cmd("EVALSHA");
        call.arg(&Script::heartbeat().sha).arg(3).arg(key).arg(format!("{key}:version"));
        call.arg(format!("{key}:overrides:version"));
        call.arg(format!("{instance:032}")).arg(5_000_000).arg(25_000).arg(250_000_000);
        call.arg(INSTANCES).arg(&version).arg(format!("{instance:032}")).arg(0);
        let (known, list, _): (String, Option<Vec<String>>, String) =
            call.query(connection).expect("a heartbeat");
        assert_eq!(list, None);
        version = known;
    };
    let publish = |connection: &mut Connection, instance: usize, shared: &str| {
        let mut call = redis::cmd("EVALSHA");
        call.arg(&Script::board().sha).arg(2).arg(format!("{key}:instance:{instance:032}"));
        call.arg(format!("{key}:shared:config")).arg("publish");
        call.arg(&state).arg(100_000).arg(900_000).arg(shared);
        let (_, has_shared): (u64, u64) = call.query(connection).expect("published");
        assert_eq!(has_shared, 1);
    };
    load(&mut connection, Script::heartbeat());
    load(&mut connection, Script::board());
    for instance in 0..INSTANCES {
        heartbeat(&mut connection, instance);
        publish(&mut connection, instance, "shared");
    }
    let _ = server.instructions();
    (0..INSTANCES).for_each(|instance| heartbeat(&mut connection, instance));
    let per_heartbeat = server.instructions() / INSTANCES as u64;
    (0..INSTANCES).for_each(|instance| publish(&mut connection, instance, ""));
    let per_publication = server.instructions() / INSTANCES as u64;
    let per_second = 250 * per_heartbeat + 50 * per_publication;
    println!("{per_heartbeat} per heartbeat, {per_publication} per publication, {per_second}/s");
    assert!(per_second < 30_000_000);
}
