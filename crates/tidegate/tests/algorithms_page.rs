//! Claims of `docs/algorithms.md`: the scripts in it on a real Redis, compared with the setting
//! that replaces each, and the figures of its table.

mod support;

use std::collections::VecDeque;
use std::time::Duration;

use support::{Redis, ServerClock, packed, packed_counter, redis_6, redis_with_settable_clock};
use tidegate::{Algorithm, Charge, Limiter, ManualClock, MemoryStore, Quota, RedisStore};

const PAGE: &str = include_str!("../../../docs/algorithms.md");
const INSTRUCTIONS: &str = include_str!("../../../bench/redis-instructions/limits.txt");

/// 2026-01-01 00:00 UTC, the start of a window of ten seconds.
const START: u64 = 1_767_225_600_000_000;
const LIMIT: u64 = 10;
const WINDOW: Duration = Duration::from_secs(10);
const SECOND: u64 = 1_000_000;
/// The clock jumps by some windows between two calls, which must not look like a late call.
const TIMEOUT: Duration = Duration::from_secs(3_600);
/// Difference of a figure that passes, in percent.
const TOLERANCE: u64 = 15;

/// Returns the script of the page whose first line is this comment.
fn script(name: &str) -> String {
    let start = format!("```lua\n-- {name}\n");
    let (_, rest) = PAGE.split_once(&start).unwrap_or_else(|| panic!("no script {name:?}"));
    rest.split_once("```").expect("the end of the script").0.to_owned()
}

/// A Redis at a time that the test sets, with a limiter on it.
struct Server {
    redis: Redis,
    clock: ServerClock,
    connection: redis::Connection,
    requests: u64,
}

impl Server {
    fn start() -> Self {
        let (redis, clock) = redis_with_settable_clock();
        clock.stop_at(START);
        let connection = redis.connection();
        Self { redis, clock, connection, requests: 0 }
    }

    async fn limiter(&self) -> Limiter<RedisStore> {
        let builder = RedisStore::builder(&self.redis.url()).timeout(TIMEOUT);
        Limiter::new(builder.connect().await.expect("our own server answers"))
    }

    /// Returns whether a script of the page admits one more request.
    fn admits(&mut self, script: &str, limit: u64, window: Duration) -> bool {
        self.requests += 1;
        let admitted: u64 = redis::cmd("EVAL")
            .arg(script)
            .arg(1)
            .arg("user123")
            .arg(limit)
            .arg(window.as_millis().to_string())
            .arg(format!("request-{}", self.requests))
            .query(&mut self.connection)
            .expect("the script of the page runs");
        admitted == 1
    }

    /// Returns how many of some requests at the same time a script admits.
    fn admitted(&mut self, script: &str, window: Duration, requests: u64) -> u64 {
        (0..requests).map(|_| u64::from(self.admits(script, LIMIT, window))).sum()
    }
}

/// Random times of requests: several at once, some by microseconds apart, and pauses of windows.
fn random_times(seed: u64, count: usize, step: u64) -> Vec<u64> {
    let mut random = seed;
    let mut now = START;
    let times = (0..count).map(|_| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let number = random >> 33;
        now += step
            * match number % 16 {
                0..4 => 0,
                4..14 => number / 16 % (SECOND / step),
                14 => number / 16 % (12 * SECOND / step),
                _ => 25 * SECOND / step,
            };
        now
    });
    times.collect()
}

/// Asserts that a script of the page and a quota make the same decisions.
async fn assert_same_decisions(name: &str, quota: &Quota, step: u64) {
    let mut server = Server::start();
    let limiter = server.limiter().await;
    let script = script(name);
    let charge = Charge::new("user123", quota);
    let (mut admitted, mut denied) = (0, 0);
    for (number, now) in random_times(7, 600, step).into_iter().enumerate() {
        server.clock.stop_at(now);
        let by_script = server.admits(&script, quota.limit(), quota.window());
        let decision = limiter.acquire(&charge).await.expect("decided");
        assert_eq!(decision.allowed, by_script, "request {number} at {} µs", now - START);
        *(if by_script { &mut admitted } else { &mut denied }) += 1;
    }
    assert!(admitted > 50 && denied > 50, "{admitted} admitted, {denied} denied");
}

// ---- The script you have now is this setting

#[tokio::test]
async fn sorted_set_that_adds_first_is_a_log_that_counts_denied_requests() {
    let quota = Quota::sliding_log(LIMIT, WINDOW).expect("valid");
    let quota = quota.with_count_denied(true).expect("a log");
    assert_same_decisions("sorted set that adds first and counts after", &quota, 1).await;
}

#[tokio::test]
async fn sorted_set_that_counts_first_is_a_log() {
    let quota = Quota::sliding_log(LIMIT, WINDOW).expect("valid");
    assert_same_decisions("sorted set that counts first and adds after", &quota, 1).await;
}

#[tokio::test]
async fn count_with_the_window_in_its_key_is_a_fixed_window() {
    let quota = Quota::fixed_window(LIMIT, WINDOW).expect("valid");
    assert_same_decisions("INCR and EXPIRE, with the window in the key", &quota, 1).await;
}

#[tokio::test]
async fn hash_of_counts_is_a_sliding_counter() {
    let quota = Quota::sliding_counter(LIMIT, WINDOW).expect("valid");
    assert_same_decisions("hash with a count per window", &quota, 1).await;
}

/// A token comes every second, and all times are multiples of 1/4 s, which a double has exactly.
#[tokio::test]
async fn hash_of_tokens_is_a_token_bucket() {
    let quota = Quota::token_bucket(LIMIT, WINDOW).expect("valid");
    assert_same_decisions("hash with the tokens and their time", &quota, SECOND / 4).await;
}

/// The window of a count that starts with its first request is not that of the clock, but the
/// count also starts again at one moment, and twice the limit passes around it.
#[tokio::test]
async fn count_from_the_first_request_also_admits_twice_the_limit() {
    let mut server = Server::start();
    let script = script("INCR and EXPIRE, from the first request");
    server.clock.stop_at(START + 3 * SECOND);
    assert_eq!(server.admitted(&script, WINDOW, 1), 1);
    server.clock.stop_at(START + 13 * SECOND - 1_000);
    assert_eq!(server.admitted(&script, WINDOW, 100), LIMIT - 1);
    server.clock.stop_at(START + 13 * SECOND + 1_000);
    assert_eq!(server.admitted(&script, WINDOW, 100), LIMIT);
}

// ---- Traps

/// Returns how many of 100 requests our setting admits.
async fn admitted_of_100(limiter: &Limiter<RedisStore>, quota: &Quota) -> u64 {
    let mut admitted = 0;
    for _ in 0..100 {
        let charge = Charge::new("user123", quota);
        admitted += u64::from(limiter.acquire(&charge).await.expect("decided").allowed);
    }
    admitted
}

#[tokio::test]
async fn members_that_are_times_collide() {
    let mut server = Server::start();
    let limiter = server.limiter().await;
    let naive = script("trap: the member is the time");
    assert_eq!(server.admitted(&naive, WINDOW, 100), 100, "all count as one");
    let quota = Quota::sliding_log(LIMIT, WINDOW).expect("valid");
    assert_eq!(admitted_of_100(&limiter, &quota).await, LIMIT);
}

/// Times that are different by a microsecond are the same text after 14 digits.
#[tokio::test]
async fn members_that_are_texts_of_times_collide() {
    let mut server = Server::start();
    let naive = script("trap: the member is the text of the time");
    for number in 0..1_000 {
        server.clock.stop_at(START + number);
        let _ = server.admits(&naive, 10_000, WINDOW);
    }
    assert_eq!(server.redis.query::<u64>(&["ZCARD", "user123"]), 11);
}

#[test]
fn random_numbers_of_scripts_repeat_before_redis_7() {
    let random =
        |redis: &Redis| redis.query::<String>(&["EVAL", "return tostring(math.random())", "0"]);
    let old = Redis::start_program(&redis_6(), &[]);
    assert_eq!(random(&old), random(&old), "in each call");
    let new = Redis::start();
    assert_ne!(random(&new), random(&new), "Redis 7 continues");
}

#[tokio::test]
async fn expiry_of_zero_seconds_admits_everything() {
    let mut server = Server::start();
    let limiter = server.limiter().await;
    let window = Duration::from_millis(500);
    let naive = script("trap: EXPIRE in seconds");
    assert_eq!(server.admitted(&naive, window, 100), 100);
    let quota = Quota::fixed_window(LIMIT, window).expect("valid");
    assert_eq!(admitted_of_100(&limiter, &quota).await, LIMIT);
}

#[tokio::test]
async fn log_in_whole_seconds_admits_twice_the_limit() {
    let mut server = Server::start();
    let limiter = server.limiter().await;
    let (window, naive) = (Duration::from_secs(1), script("trap: TIME in whole seconds"));
    let quota = Quota::sliding_log(LIMIT, window).expect("valid");
    let (mut by_script, mut admitted) = (0, 0);
    for now in [START + SECOND - 1_000, START + SECOND] {
        server.clock.stop_at(now);
        by_script += server.admitted(&naive, window, 100);
        for _ in 0..100 {
            let charge = Charge::new("user123", &quota);
            admitted += u64::from(limiter.acquire(&charge).await.expect("decided").allowed);
        }
    }
    assert_eq!((by_script, admitted), (2 * LIMIT, LIMIT), "within a millisecond");
}

/// Without a script, all instances may count before one of them adds.
#[tokio::test]
async fn count_and_add_in_two_calls_admit_more_than_the_limit() {
    let redis = Redis::start();
    let mut instances: Vec<_> = (0..3).map(|_| redis.connection()).collect();
    redis.query::<()>(&["ZADD", "user123", "1", "a", "2", "b", "3", "c", "4", "d"]);
    let limit = 5;
    let mut admitted = 4;
    let counts: Vec<u64> = instances
        .iter_mut()
        .map(|instance| redis::cmd("ZCARD").arg("user123").query(instance).expect("a count"))
        .collect();
    for (number, (instance, count)) in instances.iter_mut().zip(counts).enumerate() {
        if count < limit {
            let member = format!("of-{number}");
            let add = redis::cmd("ZADD").arg("user123").arg(5).arg(member).clone();
            admitted += add.query::<u64>(instance).expect("added");
        }
    }
    assert_eq!(admitted, limit + 2);
}

/// An instance that stops between two commands leaves a count that never expires.
#[tokio::test]
async fn count_without_expiry_denies_forever() {
    let mut server = Server::start();
    let script = script("INCR and EXPIRE, from the first request");
    server.redis.query::<()>(&["INCR", "user123"]);
    assert_eq!(server.admitted(&script, WINDOW, 100), LIMIT - 1);
    server.clock.stop_at(START + 86_400 * SECOND);
    assert_eq!(server.admitted(&script, WINDOW, 100), 0);
}

// ---- The table

/// Returns the cells of the row of an algorithm, without the first.
fn row(name: &str) -> Vec<String> {
    let (_, table) = PAGE.split_once("## Precision, memory and cost").expect("the section");
    let start = format!("| {name} | ");
    let line = table.lines().find_map(|line| line.strip_prefix(&start));
    let line = line.unwrap_or_else(|| panic!("no row {start:?}"));
    line.trim_end_matches(" |").split(" | ").map(str::to_owned).collect()
}

fn number(cell: &str) -> u64 {
    cell.replace(',', "").parse().unwrap_or_else(|_| panic!("{cell:?} is not a number"))
}

/// Rows of the table, each with its quota and its name in the counts of instructions.
fn rows(limit: u64, window: Duration) -> Vec<(&'static str, Quota, &'static str)> {
    let quota = |algorithm| Quota::new(algorithm, limit, window).expect("a valid quota");
    vec![
        ("`sliding-log`", quota(Algorithm::SlidingLog), "sliding-log"),
        ("`sliding-log`, `packed`", packed(limit, window), "sliding-log-packed"),
        ("`sliding-counter`", quota(Algorithm::SlidingCounter), "sliding-counter"),
        ("`sliding-counter`, `packed`", packed_counter(limit, window), "sliding-counter-packed"),
        ("`fixed-window`", quota(Algorithm::FixedWindow), "fixed-window"),
        ("`token-bucket`", quota(Algorithm::TokenBucket), "token-bucket"),
        // Both buckets have one script.
        ("`leaky-bucket`", quota(Algorithm::LeakyBucket), "token-bucket"),
    ]
}

fn assert_near(documented: u64, measured: u64, what: &str) {
    let difference = documented.abs_diff(measured);
    assert!(
        difference * 100 <= measured * TOLERANCE,
        "docs/algorithms.md: {what}: {documented} is documented, {measured} measured"
    );
}

#[tokio::test]
async fn table_has_the_bytes_per_key_that_redis_reports() {
    let redis = Redis::start();
    let clock = ManualClock::new();
    let builder = RedisStore::builder(&redis.url()).timeout(support::TEST_TIMEOUT);
    let store = builder.driven_by(clock.clone()).connect().await.expect("connected");
    let limiter = Limiter::new(store);
    for (name, quota, _) in rows(100, Duration::from_secs(60)) {
        let charge = Charge::new("user123", &quota).with_policy("per-user");
        let key = limiter.store().redis_key(&charge);
        let bytes = || redis.query::<u64>(&["MEMORY", "USAGE", &key, "SAMPLES", "0"]);
        limiter.reset(&charge).await.expect("reset");
        let mut measured = Vec::new();
        for request in 1..=100 {
            assert!(limiter.acquire(&charge).await.expect("decided").allowed);
            clock.advance(Duration::from_millis(500));
            if request == 1 || request == 100 {
                measured.push(bytes());
            }
        }
        limiter.reset(&charge).await.expect("reset");
        let cells = row(name);
        assert_near(number(&cells[1]), measured[0], &format!("{name}, one request"));
        assert_near(number(&cells[2]), measured[1], &format!("{name}, 100 requests"));
    }
}

#[test]
fn table_has_the_counted_instructions() {
    for (name, _, counted) in rows(100, Duration::from_secs(60)) {
        let cells = row(name);
        for (cell, keys) in [(&cells[3], 1), (&cells[4], 64)] {
            let start = format!("{counted}/allowed/{keys} ");
            let count = INSTRUCTIONS.lines().find_map(|line| line.strip_prefix(&start));
            let count = count.unwrap_or_else(|| panic!("no {start}"));
            assert_near(number(cell), number(count), &format!("{name}, {keys} per call"));
        }
    }
}

/// Requests of an adversary: as many as pass, at each of these times.
fn most_in_a_window(quota: &Quota, times: &[u64], runs: impl Fn(u64, Duration) -> u64) -> u64 {
    let clock = ManualClock::new();
    let limiter = Limiter::new(MemoryStore::builder().clock(clock.clone()).build());
    let limiter = limiter.blocking();
    let window = u64::try_from(quota.window().as_micros()).expect("short");
    let charge = Charge::new("user123", quota);
    // The clock of a test starts at a multiple of a window.
    let (mut now, mut most) = (0, 0);
    let mut admitted = VecDeque::new();
    for time in times {
        clock.advance(Duration::from_micros(time - now));
        now = *time;
        for _ in 0..3 * quota.limit() {
            let decision = limiter.acquire(&charge).expect("decided");
            if !decision.allowed {
                break;
            }
            admitted.push_back(runs(now, decision.delay));
        }
        let newest = admitted.back().copied().unwrap_or(now);
        while admitted.front().is_some_and(|first| newest - first >= window) {
            admitted.pop_front();
        }
        most = most.max(u64::try_from(admitted.len()).expect("few"));
    }
    most
}

/// The most that any window admits, in multiples of the limit.
#[test]
fn no_window_admits_more_than_the_table_says() {
    let limit = 100;
    let window = 10 * SECOND;
    // All of a limit just before a window of the clock ends, then whatever passes.
    let boundary = 2 * window;
    let mut attack = vec![boundary - 1];
    attack.extend((0..2_000).map(|step| boundary + step * window / 1_000));
    attack.extend([boundary + window - 2, 2 * boundary + window]);
    attack.sort_unstable();
    let admission = |now: u64, _: Duration| now;
    for (name, quota, _) in rows(limit, WINDOW) {
        let cell = &row(name)[0];
        let most = most_in_a_window(&quota, &attack, admission);
        let expected = match cell.split([',', ';']).next() {
            Some("L") => limit,
            Some("2 L") => 2 * limit,
            Some("B + L − 1") => quota.burst() + limit - 1,
            other => panic!("{name}: {other:?}"),
        };
        assert_eq!(most, expected, "{name}: {cell}");
        for seed in 0..50 {
            let times: Vec<u64> = random_times(seed, 300, 1).iter().map(|t| t - START).collect();
            assert!(most_in_a_window(&quota, &times, admission) <= expected, "{name} {seed}");
        }
    }
    // Callers of a leaky bucket that wait for their delay run evenly.
    let leaky = Quota::leaky_bucket(limit, WINDOW).expect("valid");
    let run = |now: u64, delay: Duration| now + u64::try_from(delay.as_micros()).expect("short");
    assert_eq!(most_in_a_window(&leaky, &attack, run), limit);
    // A burst of its own is what passes at once.
    let bucket = Quota::token_bucket(limit, WINDOW).and_then(|quota| quota.with_burst(20));
    assert_eq!(most_in_a_window(&bucket.expect("valid"), &attack, admission), limit + 20 - 1);
}
