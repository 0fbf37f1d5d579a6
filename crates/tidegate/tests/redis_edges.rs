//! Edge cases of the Redis store: changed quotas, values that are not ours, logs with many expired
//! members, and the expiry of buckets.

mod support;

use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use support::{LONG, Redis, every_quota, packed};
use tidegate::{
    Action, Algorithm, Charge, Clock as _, Encoding, Limiter, ManualClock, MemoryStore, Quota,
};

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);

// ---- Changed quotas

/// A denied request under the longer window must extend the expiry of the count.
#[tokio::test]
async fn a_longer_window_keeps_the_counts() {
    let redis = Redis::start();
    let limiter = redis.limiter().await;
    for short in every_quota(5, MINUTE) {
        let long = Quota::new(short.algorithm(), 5, 3_600 * SECOND).expect("valid");
        let long = match short.encoding() {
            Encoding::Packed => long.with_encoding(Encoding::Packed).expect("has encodings"),
            _ => long,
        };
        let (short, long) = (
            Charge::new("u", &short).with_policy("p").with_cost(5),
            Charge::new("u", &long).with_policy("p"),
        );
        assert!(limiter.acquire(&short).await.expect("decided").allowed);
        let key = limiter.store().redis_key(&short);
        // As if most of the short window had passed.
        redis.query::<()>(&["PEXPIRE", &key, "5000"]);
        assert!(!limiter.acquire(&long).await.expect("decided").allowed, "{long:?}");
        let expires_in: i64 = redis.query(&["PTTL", &key]);
        let windows = if long.quota().algorithm() == Algorithm::SlidingCounter { 2 } else { 1 };
        // A fixed window may be about to end; a bucket drains from now on.
        let min = match long.quota().algorithm() {
            Algorithm::FixedWindow | Algorithm::Concurrency => 3_600_000 - 61_000,
            Algorithm::SlidingCounter => 7_200_000 - 61_000,
            _ => 3_590_000,
        };
        assert!(
            (min..=windows * 3_600_000 + 1).contains(&expires_in),
            "{long:?} expires in {expires_in} ms"
        );
        limiter.reset(&long).await.expect("reset");
    }
}

#[tokio::test]
async fn a_long_packed_log_stays_exact_and_fast_under_a_longer_window() {
    let (redis, clock) = (Redis::start(), ManualClock::new());
    let limiter = redis.driven_limiter(clock.clone()).await;
    // More than one chunk. Times within two hours need more bytes than times within one.
    let (one_hour, two_hours) = (packed(20_000, 3_600 * SECOND), packed(20_000, 7_200 * SECOND));
    let (before, after) = (
        Charge::new("u", &one_hour).with_policy("p"),
        Charge::new("u", &two_hours).with_policy("p"),
    );
    for _ in 0..20_000 {
        clock.advance(Duration::from_millis(100));
        assert!(limiter.acquire(&before).await.expect("decided").allowed);
    }
    clock.advance(SECOND);
    let denied = limiter.acquire(&after).await.expect("decided");
    assert!(!denied.allowed && denied.retry_after > 3_600 * SECOND, "{denied:?}");
    redis.query::<()>(&["CONFIG", "RESETSTAT"]);
    // The oldest request leaves the window after two hours.
    clock.advance(denied.retry_after);
    let mut admitted = limiter.acquire(&after).await.expect("decided").allowed;
    assert!(admitted, "retry_after was exact");
    let mut allowed = 1;
    while admitted {
        admitted = limiter.acquire(&after).await.expect("decided").allowed;
        allowed += u64::from(admitted);
    }
    assert_eq!(allowed, 1, "the limit holds");
    clock.advance(40 * SECOND);
    assert!(limiter.acquire(&after).await.expect("decided").allowed, "a block of 1/64 has left");
    assert!(redis.calls_of("hmget") < 2_000, "no request scans the log");
}

#[tokio::test]
async fn a_denial_under_a_lower_limit_does_not_change_a_bucket() {
    let redis = Redis::start();
    let clock = ManualClock::new();
    let on_redis = redis.driven_limiter(clock.clone()).await;
    let in_memory = Limiter::new(MemoryStore::builder().clock(clock.clone()).build());
    let (fast, slow) = (
        Quota::token_bucket(10, SECOND).expect("valid"),
        Quota::token_bucket(1, SECOND).expect("valid"),
    );
    let (fast, slow) =
        (Charge::new("u", &fast).with_policy("p"), Charge::new("u", &slow).with_policy("p"));
    for charge in [&fast.with_cost(10), &slow, &fast] {
        let (actual, expected) = (on_redis.acquire(charge).await, in_memory.acquire(charge).await);
        assert_eq!(actual, expected, "{charge:?}");
        clock.advance(SECOND / 4);
    }
}

/// On the server's clock, by which keys expire: at a lower limit the bucket takes longer to drain.
#[tokio::test]
async fn a_denial_under_a_lowered_limit_extends_the_expiry() {
    let redis = Redis::start();
    let limiter = redis.limiter().await;
    let with_limit = |limit| {
        let quota = Quota::token_bucket(limit, Duration::from_secs(30)).expect("valid");
        quota.with_burst(100).expect("a bucket")
    };
    let (high, low) = (with_limit(100), with_limit(1));
    let charge = |quota| Charge::new("u", quota).with_policy("p");
    assert!(limiter.acquire(&charge(&high).with_cost(100)).await.expect("decided").allowed);
    assert!(!limiter.acquire(&charge(&low).with_cost(100)).await.expect("decided").allowed);
    let expires_in: i64 = redis.query(&["PTTL", &limiter.store().redis_key(&charge(&low))]);
    assert!(expires_in > 2_000_000, "100 units at 1 in 30 s take 3,000 s, not {expires_in} ms");
}

#[tokio::test]
async fn a_changed_algorithm_admits_at_most_twice_the_limit() {
    let redis = Redis::start();
    let limiter = redis.limiter().await;
    let quotas = every_quota(10, LONG);
    for (first, old) in quotas.iter().enumerate() {
        for (second, new) in quotas.iter().enumerate().filter(|(second, _)| *second != first) {
            let key = format!("{first}-{second}");
            let (old, new) =
                (Charge::new(&key, old).with_policy("p"), Charge::new(&key, new).with_policy("p"));
            let mut admitted = Vec::new();
            for charge in [&old, &new, &old] {
                for _ in 0..7 {
                    admitted.push(limiter.acquire(charge).await.expect("decided").allowed);
                }
            }
            // The units of the old algorithm count in the new one, and the reverse.
            let expected: Vec<bool> = (0..21).map(|request| request < 10).collect();
            assert_eq!(admitted, expected, "{old:?}, then {new:?}");
            assert_eq!(limiter.peek(&new).await.expect("decided").remaining, 0);
            // The old count is gone, as if it had expired first.
            redis.query::<()>(&["DEL", &limiter.store().redis_key(&old)]);
            let mut again = 0;
            for request in 0..30 {
                // While a change is rolled out, instances use both.
                let charge = if request % 2 == 0 { &new } else { &old };
                again += u64::from(limiter.acquire(charge).await.expect("decided").allowed);
            }
            assert_eq!(again, 10, "{old:?} and {new:?} in turn");
        }
    }
    redis.assert_every_key_expires();
}

#[tokio::test]
async fn a_changed_algorithm_denies_a_key_for_at_most_a_window_longer() {
    let (redis, clock) = (Redis::start(), ManualClock::new());
    let limiter = redis.driven_limiter(clock.clone()).await;
    for (first, old) in every_quota(10, MINUTE).iter().enumerate() {
        for (second, new) in every_quota(10, MINUTE).iter().enumerate() {
            let key = format!("{first}-{second}");
            let (old, new) =
                (Charge::new(&key, old).with_policy("p"), Charge::new(&key, new).with_policy("p"));
            for _ in 0..15 {
                let _ = limiter.acquire(&old).await.expect("decided");
            }
            // Denied requests do not keep the units in use.
            let mut waited = Duration::ZERO;
            while !limiter.acquire(&new).await.expect("decided").allowed {
                clock.advance(Duration::from_secs(1));
                waited += Duration::from_secs(1);
            }
            // A sliding counter keeps the units of a window until the end of the next.
            assert!(waited <= 2 * MINUTE, "{waited:?}: {old:?}, then {new:?}");
        }
    }
}

/// Memory and Redis make the same decisions while the algorithm of a policy changes again and again.
#[test]
fn memory_and_redis_decide_changed_algorithms_the_same() {
    let redis = Redis::start();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.expect("a runtime");
    let step = (0..7_usize, 0..6_u32, 1..4_u64, 0..30_000_000_u64);
    let sequences = (any::<bool>(), 3..9_u64, proptest::collection::vec(step, 1..60));
    let number = std::cell::Cell::new(0);
    let mut runner = TestRunner::new(ProptestConfig::with_cases(100));
    let run = runner.run(&sequences, |(is_packed, limit, steps)| {
        number.set(number.get() + 1);
        let (clock, name) = (ManualClock::new(), number.get().to_string());
        let in_memory = Limiter::new(MemoryStore::builder().clock(clock.clone()).build());
        let on_redis = runtime.block_on(redis.driven_limiter(clock.clone()));
        // Memory has one encoding of each algorithm. In Redis, another one is another form, too.
        let is_left_out = |quota: &Quota| match quota.algorithm() {
            Algorithm::SlidingLog | Algorithm::SlidingCounter => {
                (quota.encoding() == Encoding::Packed) != is_packed
            }
            _ => false,
        };
        let mut quotas = every_quota(limit, MINUTE);
        quotas.retain(|quota| !is_left_out(quota));
        for (quota, action, cost, micros) in steps {
            clock.advance(Duration::from_micros(micros));
            let quota = &quotas[quota % quotas.len()];
            let charge = Charge::new(&name, quota).with_policy("p").with_cost(cost);
            let (actual, expected) = runtime.block_on(async {
                match action {
                    0 => (on_redis.peek(&charge).await, in_memory.peek(&charge).await),
                    1 => (on_redis.report(&charge).await, in_memory.report(&charge).await),
                    _ => (on_redis.acquire(&charge).await, in_memory.acquire(&charge).await),
                }
            });
            prop_assert_eq!(actual.expect("decided"), expected.expect("decided"), "{:?}", charge);
        }
        Ok(())
    });
    run.expect("the two agree");
}

#[tokio::test]
async fn a_reset_of_one_policy_does_not_affect_policies_with_longer_names() {
    let redis = Redis::start();
    let limiter = redis.limiter().await;
    for quota in every_quota(1, LONG) {
        for suffix in ["window", "log", "packed", "counter", "bucket"] {
            let other = format!("api:{suffix}");
            let other = Charge::new("u", &quota).with_policy(&other);
            assert!(limiter.acquire(&other).await.expect("decided").allowed);
            limiter.reset(&Charge::new("u", &quota).with_policy("api")).await.expect("reset");
            assert!(!limiter.acquire(&other).await.expect("decided").allowed, "{other:?}");
            limiter.reset(&other).await.expect("reset");
        }
    }
}

#[tokio::test]
async fn a_refund_may_be_larger_than_any_limit() {
    let (redis, clock) = (Redis::start(), ManualClock::new());
    let on_redis = redis.driven_limiter(clock.clone()).await;
    let in_memory = Limiter::new(MemoryStore::builder().clock(clock.clone()).build());
    for quota in every_quota(Quota::MAX_LOG_LIMIT, MINUTE) {
        let charge = Charge::new("u", &quota).with_cost(Quota::MAX_LOG_LIMIT);
        for charge in [charge, charge.with_cost(u64::MAX).with_charged_at(clock.now())] {
            let refunds = charge.cost() == u64::MAX;
            let (actual, expected) = if refunds {
                (on_redis.refund(&charge).await, in_memory.refund(&charge).await)
            } else {
                (on_redis.acquire(&charge).await, in_memory.acquire(&charge).await)
            };
            assert_eq!(actual, expected, "{charge:?}");
        }
    }
}

// ---- Values that are not ours

/// A value that another program has written counts as none, and is overwritten.
#[tokio::test]
async fn a_foreign_value_is_no_error_and_is_overwritten() {
    let (redis, clock) = (Redis::start(), ManualClock::new());
    let limiter = redis.driven_limiter(clock).await;
    let long_text = "x".repeat(3_000);
    let values: [&[&str]; 15] = [
        &["SET", ""],
        &["SET", "garbage"],
        &["SET", "wxxxxxxxxxxxxxxxxxxxxxxxx"],
        &["SET", "cxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"],
        &["SET", "bxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"],
        &["SET", "q\u{4}xxxxxxxxxxxxxxxxxxxxx"],
        &["SET", &long_text],
        &["HSET", "start", "x", "log", "y"],
        &["HSET", "log", &long_text],
        &["HSET", "window", "x", "current", "1"],
        &["HSET", "window", "1700049600000000+60s"],
        &["ZADD", "1700049600000000", "garbage"],
        &["ZADD", "1700049600000000", "1:2:60s"],
        &["ZADD", "1700049600000000", "1700049600000000-1000001"],
        &["RPUSH", "1"],
    ];
    for value in values {
        for quota in every_quota(5, MINUTE) {
            let (damaged, other) = (Charge::new("damaged", &quota), Charge::new("other", &quota));
            let key = limiter.store().redis_key(&damaged);
            for action in [Action::Peek, Action::Acquire, Action::Report, Action::Refund] {
                redis.query::<()>(&["DEL", &key]);
                let command = [&value[..1], &[key.as_str()], &value[1..]].concat();
                redis.query::<()>(&command);
                let charge = damaged.with_charged_at(limiter.now());
                let decision = limiter.decide(action, &charge).await;
                let decision = decision.unwrap_or_else(|error| panic!("{value:?}: {error}"));
                let left = if action == Action::Refund { 5 } else { 4 };
                assert!(decision.allowed, "{action:?} of {value:?} as {quota:?}");
                assert_eq!(decision.remaining, left, "{action:?} of {value:?} as {quota:?}");
            }
            // In one call with another key.
            redis.query::<()>(&[&value[..1], &[key.as_str()], &value[1..]].concat());
            let (one, two) = tokio::join!(limiter.acquire(&damaged), limiter.acquire(&other));
            assert_eq!(one.expect("decided").remaining, 4, "{value:?} as {quota:?}");
            assert!(two.expect("decided").allowed);
            assert_eq!(limiter.acquire(&damaged).await.expect("decided").remaining, 3);
            assert!(redis.query::<i64>(&["PTTL", &key]) > 0, "{value:?} as {quota:?}");
            limiter.reset(&other).await.expect("reset");
        }
    }
}

// ---- Logs with many expired members

/// Creates a log of this many requests, of which all except the last have left the window.
fn fill_sorted_set(redis: &Redis, key: &str, requests: u64, window: Duration) {
    let script = r"
        local time = redis.call('TIME')
        local now = time[1] * 1000000 + time[2]
        local n, window = tonumber(ARGV[1]), tonumber(ARGV[2])
        local function add(time, number)
          local member = string.format('%.0f:%.0f:%ds', time, 1e6 + number, window / 1e6)
          redis.call('ZADD', KEYS[1], string.format('%.0f', time), member)
        end
        for i = 1, n - 1 do add(now - window - 1000000 - (n - i), i) end
        add(now - 1000, n)
        redis.call('PEXPIREAT', KEYS[1], string.format('%.0f', (now + window) / 1000))
        return 1";
    redis.query::<u64>(&[
        "EVAL",
        script,
        "1",
        key,
        &requests.to_string(),
        &window.as_micros().to_string(),
    ]);
}

/// Counts the members that each call removes, so that the machine's speed does not matter.
#[tokio::test]
async fn expired_members_of_a_log_are_removed_in_small_steps() {
    let redis = Redis::start();
    let limiter = redis.limiter().await;
    let quota = Quota::sliding_log(100_000, MINUTE).expect("valid");
    let charge = Charge::new("u", &quota);
    let key = limiter.store().redis_key(&charge);
    fill_sorted_set(&redis, &key, 100_000, MINUTE);
    let mut members: u64 = redis.query(&["ZCARD", &key]);
    let mut calls = 0;
    while members > 1_000 {
        assert!(limiter.acquire(&charge).await.expect("decided").allowed);
        let left: u64 = redis.query(&["ZCARD", &key]);
        assert!(members - left.min(members) <= 1_000, "{members} -> {left} in one call");
        members = left;
        calls += 1;
    }
    assert!(calls <= 1_000, "{calls} calls for 100,000 members");
    let decision = limiter.peek(&charge).await.expect("decided");
    assert_eq!(decision.remaining, 100_000 - 1 - calls - 1);
}

#[tokio::test]
async fn the_logs_of_a_batch_share_the_removal_budget_of_one_call() {
    let redis = Redis::start();
    let limiter = redis.limiter().await;
    let quota = Quota::sliding_log(10_000, MINUTE).expect("valid");
    let keys: Vec<String> = (0..100).map(|number| format!("user-{number}")).collect();
    for key in &keys {
        fill_sorted_set(
            &redis,
            &limiter.store().redis_key(&Charge::new(key, &quota)),
            2_000,
            MINUTE,
        );
    }
    let total_members = || -> u64 {
        let members = |key: &String| {
            redis.query::<u64>(&["ZCARD", &limiter.store().redis_key(&Charge::new(key, &quota))])
        };
        keys.iter().map(members).sum()
    };
    let before = total_members();
    let calls = redis.calls_of("evalsha");
    // With a cost of 8, each write removes expired members.
    let tasks: Vec<_> = keys
        .iter()
        .map(|key| {
            let (limiter, quota, key) = (limiter.clone(), quota.clone(), key.clone());
            tokio::spawn(async move {
                limiter.acquire(&Charge::new(&key, &quota).with_cost(8)).await.expect("decided")
            })
        })
        .collect();
    for task in tasks {
        assert!(task.await.expect("no panic").allowed);
    }
    let calls = redis.calls_of("evalsha") - calls;
    let removed = before + 100 - total_members();
    assert!(removed <= calls * 1_000 + 100 * 16, "{removed} members removed in {calls} calls");
}

/// Measures calls by the slow log of Redis. A busy machine makes any command slow, so the fastest
/// of several rounds counts.
#[tokio::test]
async fn no_call_blocks_redis_for_more_than_a_millisecond_at_any_limit() {
    let redis = Redis::start();
    let limiter = redis.limiter().await;
    let hour = 3_600 * SECOND;
    let sorted_set = Quota::sliding_log(Quota::MAX_SORTED_SET_LIMIT, hour).expect("valid");
    let large = packed(1_000_000, hour);
    let mut fastest_round = u64::MAX;
    for round in 0..20 {
        redis.query::<()>(&["FLUSHALL"]);
        let key = format!("user-{round}");
        let (one, other) = (
            Charge::new(&key, &sorted_set),
            Charge::new(&key, &large).with_policy("large").with_cost(8),
        );
        fill_sorted_set(&redis, &limiter.store().redis_key(&one), 100_000, hour);
        redis.query::<()>(&["CONFIG", "SET", "slowlog-log-slower-than", "0"]);
        redis.query::<()>(&["SLOWLOG", "RESET"]);
        for _ in 0..20 {
            let _ = limiter.acquire(&one).await.expect("decided");
            let _ = limiter.acquire(&other).await.expect("decided");
        }
        let refund = one.with_charged_at(limiter.now().saturating_sub(hour / 2));
        let _ = limiter.refund(&refund).await.expect("refunded");
        limiter.reset(&one).await.expect("reset");
        let log: Vec<redis::Value> = redis.query(&["SLOWLOG", "GET", "128"]);
        let slowest = log.iter().filter_map(micros_of_evalsha).max().expect("calls");
        fastest_round = fastest_round.min(slowest);
        if fastest_round <= 1_000 {
            return;
        }
    }
    panic!("the slowest call of the fastest round took {fastest_round} us");
}

fn micros_of_evalsha(entry: &redis::Value) -> Option<u64> {
    let redis::Value::Array(fields) = entry else { return None };
    let words: Vec<Vec<u8>> = redis::from_redis_value(fields.get(3)?.clone()).ok()?;
    let micros: u64 = redis::from_redis_value(fields.get(2)?.clone()).ok()?;
    (words.first()? == b"EVALSHA").then_some(micros)
}

#[tokio::test]
async fn a_packed_log_of_many_chunks_is_exact_and_deletes_expired_chunks() {
    let (redis, clock) = (Redis::start(), ManualClock::new());
    let limiter = redis.driven_limiter(clock.clone()).await;
    let in_memory = Limiter::new(MemoryStore::builder().clock(clock.clone()).build());
    let quota = packed(30_000, MINUTE);
    let charge = Charge::new("u", &quota).with_policy("p");
    let step = Duration::from_millis(2);
    for number in 0..45_000_u64 {
        clock.advance(step);
        // Most requests have a cost of 1; after the first chunk some have another.
        let cost = if number > 9_000 && number.is_multiple_of(1_000) { 50 } else { 1 };
        let (actual, expected) = (
            limiter.acquire(&charge.with_cost(cost)).await,
            in_memory.acquire(&charge.with_cost(cost)).await,
        );
        assert_eq!(actual, expected, "request {number} of cost {cost}");
        if number.is_multiple_of(2_500) {
            let refund = charge.with_charged_at(clock.now());
            assert_eq!(
                limiter.refund(&refund).await,
                in_memory.refund(&refund).await,
                "refund after {number}"
            );
        }
    }
    let keys: Vec<String> = redis.query(&["KEYS", "*"]);
    assert_eq!(keys.len(), 1, "one key per count: {keys:?}");
    redis.assert_every_key_expires();
}

/// A partial refund of the request that filled a chunk changes the sealed chunk.
/// A group of charges and a refund are decided by the general part of the script, a single acquire
/// is not: a string may be longer than a chunk, and its oldest requests may have left the window.
#[tokio::test]
async fn a_short_packed_log_of_several_chunks_is_exact_beside_another_charge() {
    let (redis, clock) = (Redis::start(), ManualClock::new());
    let limiter = redis.driven_limiter(clock.clone()).await;
    let (log, window) = (packed(1_000, MINUTE), Quota::fixed_window(1_000, LONG).expect("valid"));
    let charge = Charge::new("u", &log);
    for _ in 0..600 {
        clock.advance(50 * SECOND / 1_000);
        assert!(limiter.acquire(&charge).await.expect("decided").allowed);
    }
    // The 300 of the first 15 seconds have left.
    clock.advance(45 * SECOND);
    let pair = [charge, Charge::new("u", &window)];
    let decided = limiter.acquire_all(&pair).await.expect("decided");
    assert_eq!(decided[0].remaining, 1_000 - 301);
    let refunded = limiter.refund(&charge.with_charged_at(clock.now())).await.expect("refunded");
    assert_eq!(refunded.remaining, 1_000 - 300);
    let form: String = redis.query(&["TYPE", &limiter.store().redis_key(&charge)]);
    assert_eq!(form, "string");
}

#[tokio::test]
async fn a_refund_of_the_request_that_sealed_a_chunk_is_exact() {
    let (redis, clock) = (Redis::start(), ManualClock::new());
    let limiter = redis.driven_limiter(clock.clone()).await;
    let in_memory = Limiter::new(MemoryStore::builder().clock(clock.clone()).build());
    let quota = packed(20_000, MINUTE);
    let charge = Charge::new("u", &quota).with_policy("p");
    let acquire_in_both = async |charge: &Charge<'_>| {
        let (actual, expected) = (limiter.acquire(charge).await, in_memory.acquire(charge).await);
        assert_eq!(actual, expected, "{charge:?}");
    };
    for _ in 0..8_191 {
        clock.advance(Duration::from_micros(1));
        acquire_in_both(&charge).await;
    }
    clock.advance(Duration::from_micros(809));
    acquire_in_both(&charge.with_cost(1_000)).await;
    let refund = charge.with_cost(900).with_charged_at(clock.now());
    clock.advance(Duration::from_micros(1));
    assert_eq!(limiter.refund(&refund).await, in_memory.refund(&refund).await);
    clock.advance(MINUTE.saturating_sub(Duration::from_micros(9_011)));
    acquire_in_both(&charge.with_cost(11_000)).await;
    acquire_in_both(&charge.with_cost(700)).await;
    clock.advance(Duration::from_micros(9_010));
    acquire_in_both(&charge.with_cost(9_200)).await;
    acquire_in_both(&charge.with_cost(8_200)).await;
}

/// Requests with a cost other than 1 have totals, which are needed until the whole chunk has
/// expired.
#[tokio::test]
async fn a_full_chunk_exists_until_the_window_has_passed_it() {
    let (redis, clock) = (Redis::start(), ManualClock::new());
    let limiter = redis.driven_limiter(clock.clone()).await;
    let quota = packed(100_000, MINUTE);
    let charge = Charge::new("u", &quota).with_policy("p");
    for _ in 0..8_192 {
        clock.advance(Duration::from_micros(1));
        assert!(limiter.acquire(&charge.with_cost(9)).await.expect("decided").allowed);
    }
    clock.advance(10 * SECOND);
    assert!(limiter.acquire(&charge.with_cost(9)).await.expect("decided").allowed);
    let key = limiter.store().redis_key(&charge);
    // The full chunks, the open one, and the window.
    assert_eq!(redis.query::<u64>(&["HLEN", &key]), 8_192 / 255 + 2);
    clock.advance(50 * SECOND + Duration::from_millis(9));
    assert_eq!(limiter.peek(&charge).await.expect("decided").remaining, 100_000 - 9 - 1);
    assert!(limiter.acquire(&charge.with_cost(50_000)).await.expect("decided").allowed);
    assert_eq!(redis.query::<u64>(&["HLEN", &key]), 2, "a write removes chunks that have left");
    assert_eq!(redis.query::<u64>(&["DBSIZE"]), 1, "one key per count");
}

/// All chunks are in one key, so they have one expiry.
#[tokio::test]
async fn an_allowed_request_under_a_longer_window_keeps_a_long_log() {
    let redis = Redis::start();
    let limiter = redis.limiter().await;
    let (minute, hour) = (packed(20_000, MINUTE), packed(20_000, 3_600 * SECOND));
    let (before, after) =
        (Charge::new("u", &minute).with_policy("p"), Charge::new("u", &hour).with_policy("p"));
    for _ in 0..1_000 {
        assert!(limiter.acquire(&before).await.expect("decided").allowed);
    }
    let key = limiter.store().redis_key(&before);
    let expires_in = || redis.query::<i64>(&["PTTL", &key]);
    assert!((30_000..=67_502).contains(&expires_in()), "{} ms", expires_in());
    assert!(limiter.acquire(&after).await.expect("decided").allowed);
    assert!(expires_in() > 3_600_000, "{} ms", expires_in());
}

// ---- Expiry of buckets

/// A full bucket takes a day to drain, one unit of it a hundredth of that.
#[tokio::test]
async fn the_key_of_a_bucket_expires_soon_after_its_level_has_drained() {
    let redis = Redis::start();
    let limiter = redis.limiter().await;
    let hundredth = 864_000;
    for new_quota in [Quota::token_bucket, Quota::leaky_bucket] {
        let quota = new_quota(100, 86_400 * SECOND).expect("valid");
        let charge = Charge::new("u", &quota);
        let expires_in =
            || redis.query::<i64>(&["PTTL", &limiter.store().redis_key(&charge)]) / hundredth;
        assert!(limiter.acquire(&charge).await.expect("decided").allowed);
        assert!((1..=13).contains(&expires_in()), "1 %, and at most an eighth: {}", expires_in());
        let charged_at = limiter.now();
        assert!(limiter.acquire(&charge.with_cost(60)).await.expect("decided").allowed);
        assert!((60..=73).contains(&expires_in()), "61 %: {}", expires_in());
        let refund = charge.with_cost(60).with_charged_at(charged_at);
        let _ = limiter.refund(&refund).await.expect("refunded");
        assert!((1..=13).contains(&expires_in()), "1 % again: {}", expires_in());
    }
    // A small bucket in use lives longer by at most the time in which four units drain.
    let quota = Quota::token_bucket(4, 4 * 3_600 * SECOND).expect("valid");
    let charge = Charge::new("small", &quota);
    let expires_in = || redis.query::<i64>(&["PTTL", &limiter.store().redis_key(&charge)]) / 3_600;
    assert!(limiter.acquire(&charge).await.expect("decided").allowed);
    assert!((999..=1_501).contains(&expires_in()), "{} thousandths of an hour", expires_in());
    assert!(limiter.acquire(&charge).await.expect("decided").allowed);
    assert!((1_999..=6_001).contains(&expires_in()), "{} thousandths of an hour", expires_in());
    // The key of a bucket that drains within a millisecond is gone at once.
    let quota = Quota::token_bucket(1_000, SECOND).expect("valid");
    let charge = Charge::new("fast", &quota);
    assert!(limiter.acquire(&charge).await.expect("decided").allowed);
    let key = limiter.store().redis_key(&charge);
    assert!(redis.query::<i64>(&["PTTL", &key]) <= 127, "1 ms and an eighth of a second");
    support::until("the key has expired", async || redis.query::<i64>(&["EXISTS", &key]) == 0)
        .await;
}

// ---- Arithmetic

/// Compares the arithmetic of all algorithms, in Lua's doubles, with Rust's `u128`.
#[test]
fn lua_multiplies_and_divides_exactly() {
    const ARITHMETIC: &str = include_str!("../src/store/redis/script/arithmetic.lua");
    let redis = Redis::start();
    let mut connection = redis.connection();
    let script = redis::Script::new(&format!(
        "local floor, whole, mul_div_rem, mul_div_ceil = math.floor\n{ARITHMETIC}\n\
         local a, b, m = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])\n\
         local q, r = mul_div_rem(a, b, m)\n\
         return {{whole(q), whole(r), whole(mul_div_ceil(a, b, m))}}"
    ));
    let edge = |max: u64| {
        prop_oneof![
            0..=max,
            Just(max),
            Just(max - 1),
            Just(1),
            (0..45_u32).prop_map(move |bits| max >> bits)
        ]
    };
    let numbers = (edge(1 << 50), edge((1 << 45) - 1), edge((1 << 45) - 1));
    let mut runner = TestRunner::new(ProptestConfig { cases: 3_000, ..ProptestConfig::default() });
    let connection = std::cell::RefCell::new(&mut connection);
    let exact = |(a, b, m): (u64, u64, u64)| {
        let m = m.max(1);
        let product = u128::from(a) * u128::from(b);
        prop_assume!(product / u128::from(m) < 1 << 53);
        let found: Vec<String> =
            script.arg(a).arg(b).arg(m).invoke(*connection.borrow_mut()).expect("the script runs");
        let (quotient, rest) = (product / u128::from(m), product % u128::from(m));
        let expected =
            [quotient, rest, quotient + u128::from(rest > 0)].map(|number| number.to_string());
        prop_assert_eq!(found, expected);
        Ok(())
    };
    runner.run(&numbers, exact).expect("exact");
}
