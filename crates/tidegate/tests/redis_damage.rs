//! Damaged values in Redis, and calls that would take long: an error of one key is an error of that
//! key alone, and a call does a bounded amount of work.

mod support;

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpStream;
use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};
use support::{Redis, every_quota, join_all, packed};
use tidegate::{
    Action, Charge, Clock as _, Error, Hold, HoldTerms, Limiter, ManualClock, OnExpire,
    OnStoreFailure, Quota, RedisStore, Source, Store as _, StoreError,
};

const MINUTE: Duration = Duration::from_secs(60);
const SECOND: Duration = Duration::from_secs(1);

/// Change of the bytes of a stored value.
#[derive(Debug, Clone)]
enum Mutation {
    Set(usize, u8),
    Flip(usize, u8),
    Remove(usize, usize),
    Insert(usize, Vec<u8>),
    Number(usize, f64),
}

fn mutation() -> impl Strategy<Value = Mutation> {
    let numbers = [f64::NAN, f64::INFINITY, -1.0, 0.5, 9.0e15, 1e300, 1e13, 1e15, 0.0];
    prop_oneof![
        4 => (any::<usize>(), any::<u8>()).prop_map(|(at, byte)| Mutation::Set(at, byte)),
        2 => (any::<usize>(), 0..8_u8).prop_map(|(at, bit)| Mutation::Flip(at, bit)),
        1 => (any::<usize>(), 1..9_usize).prop_map(|(at, count)| Mutation::Remove(at, count)),
        1 => (any::<usize>(), prop::collection::vec(any::<u8>(), 1..9))
            .prop_map(|(at, bytes)| Mutation::Insert(at, bytes)),
        2 => (any::<usize>(), prop::sample::select(numbers.to_vec()))
            .prop_map(|(at, number)| Mutation::Number(at, number)),
    ]
}

impl Mutation {
    fn apply(&self, bytes: &mut Vec<u8>) {
        let Some(last) = bytes.len().checked_sub(1) else { return };
        match self {
            Self::Set(at, byte) => bytes[at % (last + 1)] = *byte,
            Self::Flip(at, bit) => bytes[at % (last + 1)] ^= 1 << bit,
            Self::Remove(at, count) => {
                let start = at % (last + 1);
                bytes.drain(start..(start + count).min(last + 1));
            }
            Self::Insert(at, new) => {
                let start = at % (last + 1);
                bytes.splice(start..start, new.iter().copied());
            }
            Self::Number(at, number) => {
                let start = at % (last + 1);
                let end = (start + 8).min(last + 1);
                bytes.splice(start..end, number.to_le_bytes());
            }
        }
    }
}

/// Damages the value of a key, and keeps its expiry.
fn damage(connection: &mut redis::Connection, key: &str, part: usize, mutations: &[Mutation]) {
    let mut run = |words: &[&[u8]]| -> redis::Value {
        let mut command = redis::cmd(std::str::from_utf8(words[0]).expect("a name"));
        command.arg(&words[1..]).query(connection).expect("a valid command")
    };
    let bytes = |value: redis::Value| -> Vec<Vec<u8>> {
        redis::from_redis_value(value).expect("byte strings")
    };
    let mutated = |mut value: Vec<u8>| {
        for mutation in mutations {
            mutation.apply(&mut value);
        }
        value
    };
    let name = key.as_bytes();
    let kind: String = redis::from_redis_value(run(&[b"TYPE", name])).expect("a type");
    match kind.as_str() {
        "string" => {
            let value: Vec<u8> = redis::from_redis_value(run(&[b"GET", name])).expect("bytes");
            run(&[b"SET", name, &mutated(value), b"KEEPTTL"]);
        }
        "zset" => {
            let members = bytes(run(&[b"ZRANGE", name, b"0", b"-1"]));
            let damaged = match part % 3 {
                0 => &members[0],
                1 => &members[members.len() - 1],
                _ => &members[part / 3 % members.len()],
            };
            let score: Vec<u8> =
                redis::from_redis_value(run(&[b"ZSCORE", name, damaged])).expect("a score");
            run(&[b"ZADD", name, &score, &mutated(damaged.clone())]);
            run(&[b"ZREM", name, damaged]);
        }
        "hash" => {
            let fields = bytes(run(&[b"HGETALL", name]));
            let field = part % (fields.len() / 2) * 2;
            if part.is_multiple_of(5) {
                run(&[b"HDEL", name, &fields[field]]);
            } else {
                run(&[b"HSET", name, &fields[field], &mutated(fields[field + 1].clone())]);
            }
        }
        other => panic!("{other}"),
    }
    // A key that lost all of its parts was created again.
    run(&[b"PEXPIRE", name, b"7200000"]);
}

#[test]
fn fuzz_a_damaged_value_affects_its_key_only() {
    let (redis, clock) = (Redis::start(), ManualClock::new());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.expect("a runtime");
    let limiter = runtime.block_on(redis.driven_limiter(clock.clone()));
    let mut quotas = every_quota(100, MINUTE);
    quotas.extend([packed(2_000, 7_200 * SECOND), Quota::sliding_log(3, MINUTE).expect("valid")]);
    let cases = (
        0..quotas.len(),
        prop::sample::select(vec![1, 3, 20]),
        prop::sample::select(vec![1_u64, 9]),
        any::<usize>(),
        prop::collection::vec(mutation(), 1..5),
        prop::sample::select(vec![0_u64, 1, 30_000_000, 60_000_001]),
        any::<bool>(),
    );
    let connection = std::cell::RefCell::new(redis.connection());
    let number = std::cell::Cell::new(0_u64);
    let count = std::env::var("FUZZ_CASES").ok().and_then(|count| count.parse().ok());
    let config = ProptestConfig {
        cases: count.unwrap_or(3_000),
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    let seed = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let run = TestRunner::new_with_rng(config, seed).run(
        &cases,
        |(quota, acquires, cost, part, mutations, wait, in_batch)| {
            number.set(number.get() + 1);
            let (quota, name) = (&quotas[quota], number.get().to_string());
            let others = [format!("{name}-a"), format!("{name}-b")];
            let damaged = Charge::new(&name, quota).with_policy("p");
            let charged_at = clock.now();
            runtime.block_on(async {
                for _ in 0..acquires {
                    let cost = cost.min(quota.limit());
                    let _ = limiter.acquire(&damaged.with_cost(cost)).await.expect("decided");
                    clock.advance(Duration::from_micros(97));
                }
            });
            let key = limiter.store().redis_key(&damaged);
            damage(&mut connection.borrow_mut(), &key, part, &mutations);
            clock.advance(Duration::from_micros(wait));
            let refund = damaged.with_charged_at(charged_at);
            let actions = [
                (Action::Peek, damaged),
                (Action::Acquire, damaged),
                (Action::Refund, refund),
                (Action::Report, damaged),
            ];
            for (round, (action, charge)) in (1..).zip(actions) {
                let around = others.iter().map(|other| Charge::new(other, quota).with_policy("p"));
                let around: Vec<_> = around.collect();
                let mut requests = vec![(Action::Acquire, around[0]), (action, charge)];
                requests.push((Action::Acquire, around[1]));
                let decide = |(action, charge)| {
                    let limiter = &limiter;
                    async move { limiter.store().decide(action, &charge).await }
                };
                let answers = runtime.block_on(async {
                    if in_batch {
                        return join_all(requests.into_iter().map(decide)).await;
                    }
                    let mut answers = Vec::new();
                    for request in requests {
                        answers.push(decide(request).await);
                    }
                    answers
                });
                for other in [&answers[0], &answers[2]] {
                    let left = quota.limit().saturating_sub(round);
                    prop_assert_eq!(other.as_ref().map(|decision| decision.remaining), Ok(left));
                }
                prop_assert!(
                    matches!(&answers[1], Ok(_) | Err(StoreError::Unreadable(_))),
                    "{:?} of {:?}: {:?}",
                    action,
                    quota,
                    answers[1]
                );
            }
            let expires: i64 = redis::cmd("PTTL")
                .arg(&key)
                .query(&mut *connection.borrow_mut())
                .expect("a number");
            prop_assert!(expires != -1, "no expiry");
            // A reset heals the key.
            let healed = runtime.block_on(async {
                limiter.reset(&damaged).await.expect("reset");
                limiter.acquire(&damaged).await.expect("decided").remaining
            });
            prop_assert_eq!(healed, quota.limit() - 1);
            Ok(())
        },
    );
    run.expect("no call fails");
}

/// Actions on the holds of a damaged key, each with the number of the id.
const REQUESTS: [(Action, usize); 9] = [
    (Action::Peek, 0),
    (Action::Acquire, 0),
    (Action::Renew, 1),
    (Action::Commit, 1),
    (Action::Acquire, 2),
    (Action::Refund, 0),
    (Action::Commit, 2),
    (Action::Commit, 0),
    (Action::Acquire, 1),
];

fn quotas_with_holds() -> Vec<Quota> {
    let terms = HoldTerms::new(MINUTE, 10 * MINUTE).expect("valid");
    let mut quotas = every_quota(100, MINUTE);
    let released =
        |quota: &Quota| quota.clone().with_holds(terms.with_on_expire(OnExpire::Release));
    quotas.extend(quotas.iter().map(released).collect::<Vec<_>>());
    quotas.extend(std::iter::repeat_n(Quota::concurrency(100).expect("valid"), 6));
    quotas
}

/// The count, the set, and the record of a hold, each damaged, replaced by another type or deleted.
#[test]
fn fuzz_a_damaged_hold_affects_its_key_only() {
    let (redis, clock) = (Redis::start(), ManualClock::new());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.expect("a runtime");
    let limiter = runtime.block_on(redis.driven_limiter(clock.clone()));
    let quotas = quotas_with_holds();
    let ids = ["job", "a:b*2", "other"].map(|id| Hold::new(id).expect("valid"));
    let cases = (
        0..quotas.len(),
        prop::sample::select(vec![1_u64, 9]),
        0..5_usize,
        any::<usize>(),
        prop::collection::vec(mutation(), 1..5),
        prop::sample::select(vec![0_u64, 30_000_000, 60_000_001]),
    );
    let number = std::cell::Cell::new(0_u64);
    let count = std::env::var("FUZZ_CASES").ok().and_then(|count| count.parse().ok());
    let config = ProptestConfig {
        cases: count.unwrap_or(1_000),
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    let connection = std::cell::RefCell::new(redis.connection());
    let seed = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let run = TestRunner::new_with_rng(config, seed).run(
        &cases,
        |(quota, cost, which, part, mutations, wait)| {
            number.set(number.get() + 1);
            let (quota, name) = (&quotas[quota], number.get().to_string());
            let near = format!("{name}-near");
            let damaged = Charge::new(&name, quota).with_policy("p").with_cost(cost);
            let other = Charge::new(&near, quota).with_policy("p");
            runtime.block_on(async {
                for id in &ids[..2] {
                    let _ = limiter.acquire(&damaged.with_hold(id)).await.expect("decided");
                    clock.advance(Duration::from_micros(97));
                }
            });
            let count = limiter.store().redis_key(&damaged);
            let keys = [":h:job", ":h", "", ":h", ":h:job"].map(|suffix| count.clone() + suffix);
            let key = &keys[which];
            let run = |words: &[&str]| {
                let connection = &mut *connection.borrow_mut();
                redis::cmd(words[0]).arg(&words[1..]).query::<redis::Value>(connection)
            };
            match (run(&["EXISTS", key]).expect("a number"), which) {
                (redis::Value::Int(1), ..3) => {
                    damage(&mut connection.borrow_mut(), key, part, &mutations);
                }
                (_, 3) => {
                    run(&["DEL", key]).expect("deleted");
                    run(&["HSET", key, "a", "b"]).expect("another type");
                    run(&["PEXPIRE", key, "7200000"]).expect("it expires");
                }
                _ => drop(run(&["DEL", key]).expect("deleted")),
            }
            clock.advance(Duration::from_micros(wait));
            for (round, (action, id)) in (0..).zip(REQUESTS) {
                let charge = damaged.with_hold(&ids[id]);
                let near_id = Hold::new(format!("near-{round}")).expect("valid");
                let answers = runtime.block_on(join_all([
                    limiter.store().decide(action, &charge).into_future(),
                    limiter
                        .store()
                        .decide(Action::Acquire, &other.with_hold(&near_id))
                        .into_future(),
                ]));
                let left = answers[1].as_ref().map(|decision| decision.remaining);
                prop_assert_eq!(left, Ok(99 - round));
                prop_assert!(
                    matches!(
                        &answers[0],
                        Ok(_) | Err(StoreError::Unreadable(_) | StoreError::Invalid(_))
                    ),
                    "{:?} of {:?} ({}): {:?}",
                    action,
                    quota,
                    which,
                    answers[0]
                );
            }
            for key in &keys {
                let expires = run(&["PTTL", key]).expect("a number");
                prop_assert_ne!(expires, redis::Value::Int(-1), "no expiry: {}", key);
            }
            // A reset heals the key.
            let new = Hold::new("new").expect("valid");
            let healed = runtime.block_on(async {
                limiter.reset(&damaged).await.expect("reset");
                limiter.acquire(&damaged.with_hold(&new)).await.expect("decided").remaining
            });
            prop_assert_eq!(healed, 100 - cost);
            Ok(())
        },
    );
    run.expect("no call fails");
}

/// The value of the issue: the fast path computed with it, outside of any pcall.
#[tokio::test]
async fn a_damaged_value_opens_no_circuit() {
    let redis = Redis::start();
    let limiter = Limiter::new(RedisStore::resilient(&redis.url()).await.expect("connected"));
    let quotas = [
        Quota::sliding_log(100_000, MINUTE).expect("valid"),
        Quota::sliding_counter(100_000, MINUTE).expect("valid"),
        Quota::token_bucket(100_000, MINUTE).expect("valid"),
    ];
    let bucket: Vec<u8> = [1.5, 0.25, 1.0, 9e15, 6e7_f64]
        .iter()
        .fold(b"b".to_vec(), |text, number| [&text[..], &number.to_le_bytes()].concat());
    let values: [&[&[u8]]; 3] = [
        &[b"ZADD", b"9e15", b"xxxxxxxxxxxxxxxx:yyyyyyy:60s"],
        &[b"HSET", b"window", b"1700000000000000+60s", b"current", b"abc", b"previous", b"0"],
        &[b"SET", &bucket],
    ];
    for (quota, value) in quotas.iter().zip(values) {
        let fails = |key| {
            Charge::new(key, quota).with_policy("p").with_on_store_failure(OnStoreFailure::Deny)
        };
        for round in 0..100 {
            let mut command = redis::cmd(std::str::from_utf8(value[0]).expect("a name"));
            command.arg("rate_limit:{bad}:p").arg(&value[1..]);
            command.query::<()>(&mut redis.connection()).expect("written");
            let keys = ["a", "b", "c", "bad", "d", "e"];
            let answers = join_all(keys.map(|key| {
                let (limiter, charge) = (limiter.clone(), fails(key));
                async move { limiter.acquire(&charge).await }
            }));
            for (key, answer) in keys.iter().zip(answers.await) {
                let answer = answer.unwrap_or_else(|error: Error| panic!("{key}: {error}"));
                assert!(
                    *key == "bad" || answer.allowed && answer.source == Source::Store,
                    "{round} {key}: {answer:?}"
                );
            }
            redis.query::<()>(&["DEL", "rate_limit:{bad}:p"]);
        }
        redis.query::<()>(&["FLUSHALL"]);
    }
}

/// Returns for each script call its number of commands, and of members that it adds or removes by
/// name, while a future runs.
async fn work_per_call(redis: &Redis, future: impl Future<Output = ()>) -> Vec<usize> {
    let mut monitor = TcpStream::connect(("127.0.0.1", redis.port())).expect("connected");
    monitor.write_all(b"MONITOR\r\n").expect("sent");
    let mut lines = BufReader::new(monitor).lines().map(|line| line.expect("a line"));
    assert_eq!(lines.next().as_deref(), Some("+OK"));
    future.await;
    redis.query::<()>(&["ECHO", "end"]);
    let mut calls = Vec::new();
    for line in lines.take_while(|line| !line.contains("\"ECHO\" \"end\"")) {
        let is_inside = line.contains(" lua] ");
        let name = line.split('"').nth(1).unwrap_or_default().to_ascii_uppercase();
        if name == "EVALSHA" {
            calls.push(0);
        } else if is_inside && let Some(work) = calls.last_mut() {
            let words = line.split("\" \"").count().saturating_sub(2);
            *work += match name.as_str() {
                "ZADD" => 1 + words / 2,
                "ZREM" => 1 + words,
                _ => 1,
            };
        }
    }
    calls
}

/// 64 of these refunds once shared one call, which rewrote 50 members for each.
#[tokio::test]
async fn refunds_that_rewrite_many_members_are_spread_over_calls() {
    let (redis, clock) = (Redis::start(), ManualClock::new());
    let limiter = redis.driven_limiter(clock.clone()).await;
    let quota = Quota::sliding_log(1_000, MINUTE).expect("valid");
    let keys: Vec<String> = (0..150).map(|number| format!("user-{number}")).collect();
    let mut charged_at = clock.now();
    for request in 0..100 {
        clock.advance(SECOND / 10);
        if request == 50 {
            charged_at = clock.now();
        }
        let charges = keys.iter().map(|key| Charge::new(key, &quota)).collect::<Vec<_>>();
        for decision in join_all(charges.iter().map(|charge| limiter.acquire(charge))).await {
            assert!(decision.expect("decided").allowed);
        }
    }
    let calls = work_per_call(&redis, async {
        let charges = keys.iter().map(|key| Charge::new(key, &quota).with_charged_at(charged_at));
        let charges = charges.collect::<Vec<_>>();
        for decision in join_all(charges.iter().map(|charge| limiter.refund(charge))).await {
            assert_eq!(decision.expect("refunded").remaining, 901, "each is made once");
        }
    })
    .await;
    let most = calls.iter().max().copied().unwrap_or_default();
    assert!(
        (1..=300).contains(&most),
        "{most} commands and members in one of {} calls",
        calls.len()
    );
    // Exactly that request was returned: the oldest still counts until its window has passed.
    clock.advance(SECOND * 50 + SECOND / 10);
    for key in &keys {
        let left = limiter.peek(&Charge::new(key, &quota)).await.expect("decided").remaining;
        assert_eq!(left, 901, "the oldest has left, and one more is asked for");
    }
    redis.assert_every_key_expires();
}

/// Each of these decisions takes the general part of the script.
#[tokio::test]
async fn unusual_decisions_are_spread_over_calls() {
    let (redis, clock) = (Redis::start(), ManualClock::new());
    let limiter = redis.driven_limiter(clock.clone()).await;
    let log = Quota::sliding_log(50, MINUTE).expect("valid");
    let counted = log.clone().with_count_denied(true).expect("a log");
    let bucket = Quota::token_bucket(50, MINUTE).expect("valid");
    let keys: Vec<String> = (0..150).map(|number| format!("user-{number}")).collect();
    let all = async |quota: &Quota, cost| {
        let charge = |key| Charge::new(key, quota).with_policy("p").with_cost(cost);
        let charges = keys.iter().map(|key| charge(key)).collect::<Vec<_>>();
        let decisions = join_all(charges.iter().map(|charge| limiter.acquire(charge))).await;
        let allowed =
            decisions.into_iter().filter(|decision| decision.as_ref().expect("decided").allowed);
        allowed.count()
    };
    for _ in 0..49 {
        clock.advance(SECOND / 2);
        assert_eq!(all(&log, 1).await, 150);
    }
    let calls = work_per_call(&redis, async {
        assert_eq!(all(&log, 20).await, 0, "a binary search for the member that leaves room");
        assert_eq!(all(&counted, 20).await, 0, "each denial is written");
        assert_eq!(all(&bucket, 1).await, 0, "another algorithm");
        clock.step_back(SECOND);
        assert_eq!(all(&log, 1).await, 0, "the clock stepped back");
    })
    .await;
    let most = calls.iter().max().copied().unwrap_or_default();
    assert!(
        (1..=300).contains(&most),
        "{most} commands and members in one of {} calls",
        calls.len()
    );
}

/// Each of these keys has a hundred holds that have ended, which one call removes.
#[tokio::test]
async fn ended_holds_of_many_keys_are_removed_in_several_calls() {
    let redis = Redis::start();
    let limiter = redis.limiter().await;
    let quota = Quota::concurrency(200).expect("valid");
    let keys: Vec<String> = (0..40).map(|number| format!("user-{number}")).collect();
    let id = Hold::new("job").expect("valid");
    let charges: Vec<_> = keys.iter().map(|key| Charge::new(key, &quota).with_hold(&id)).collect();
    let now = limiter.store().clock().now().as_micros();
    let fill = "for i = 1, 300 do redis.call('ZADD', KEYS[1], ARGV[1] + i, 'hold-' .. i) end \
                redis.call('PEXPIRE', KEYS[1], 600000)";
    for charge in &charges {
        let (key, from) = (limiter.store().redis_key(charge), (now - 9_000_000).to_string());
        redis.query::<()>(&["EVAL", fill, "1", &key, &from]);
    }
    for (round, allowed) in [(1, false), (2, true)] {
        let calls = work_per_call(&redis, async {
            for decision in join_all(charges.iter().map(|charge| limiter.acquire(charge))).await {
                assert_eq!(decision.expect("decided").allowed, allowed, "{round}");
            }
        })
        .await;
        let most = calls.iter().max().copied().unwrap_or_default();
        assert!((1..=300).contains(&most), "{most} in one of {} calls", calls.len());
    }
}
