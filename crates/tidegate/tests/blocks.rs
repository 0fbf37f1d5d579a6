//! Blocks (`Quota::with_block_for`) in memory and on Redis.

mod support;

use std::path::PathBuf;
use std::time::Duration;

use support::{LONG, NAME, Redis, Sentinels, every_quota, redis_6, until, valkey_9};
use tidegate::{
    Charge, Clock, DenyCache, Limiter, ManualClock, MemoryStore, Quota, QuotaError, RedisStore,
    Source, Store,
};

const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3_600);
const DAY: Duration = Duration::from_secs(86_400);
const TICK: Duration = Duration::from_micros(1);

fn memory(clock: &ManualClock) -> Limiter {
    Limiter::new(MemoryStore::builder().clock(clock.clone()).build())
}

/// Returns a quota of one request per minute that blocks for these times.
fn blocking(lengths: &[Duration]) -> Quota {
    Quota::fixed_window(1, MINUTE).and_then(|quota| quota.with_block_for(lengths)).expect("valid")
}

async fn retry_after<S: Store>(limiter: &Limiter<S>, charge: &Charge<'_>) -> Duration {
    let decision = limiter.acquire(charge).await.expect("decided");
    assert_eq!(decision.allowed, decision.retry_after.is_zero());
    decision.retry_after
}

#[test]
fn wrong_lengths_have_specific_errors() {
    let quota = || Quota::sliding_log(1, MINUTE).expect("valid");
    let error = |lengths: &[Duration]| quota().with_block_for(lengths).expect_err("wrong");
    assert_eq!(error(&[]), QuotaError::BlockCount(0));
    assert_eq!(
        error(&[MINUTE; 11]).to_string(),
        "11 blocks: it must be one, or a list of up to 10"
    );
    assert_eq!(error(&[MINUTE, Duration::ZERO]), QuotaError::Block(Duration::ZERO));
    assert_eq!(error(&[366 * DAY + TICK]), QuotaError::Block(366 * DAY + TICK));
    let fraction = MINUTE + Duration::from_nanos(1);
    assert_eq!(error(&[fraction]), QuotaError::Block(fraction));
    let counting = quota().with_count_denied(true).expect("a log");
    assert_eq!(counting.with_block_for(&[MINUTE]), Err(QuotaError::BlockAndCountDenied));
    let blocking = quota().with_block_for(&[MINUTE]).expect("valid");
    assert_eq!(blocking.clone().with_count_denied(true), Err(QuotaError::BlockAndCountDenied));
    assert!(blocking.with_count_denied(false).is_ok());
}

/// Each block is as long as the number of blocks in the last day says. Denials do not extend it.
async fn check_list<S: Store>(limiter: &Limiter<S>, clock: &ManualClock) {
    let quota = blocking(&[MINUTE, 10 * MINUTE, HOUR]);
    let charge = Charge::new("u", &quota);
    let mut last_end = clock.now();
    for length in [MINUTE, 10 * MINUTE, HOUR, HOUR] {
        assert!(retry_after(limiter, &charge).await.is_zero());
        assert_eq!(retry_after(limiter, &charge).await, length);
        clock.advance(length / 2);
        assert_eq!(retry_after(limiter, &charge).await, length / 2);
        clock.advance((length / 2).saturating_sub(TICK));
        assert_eq!(retry_after(limiter, &charge).await, TICK);
        clock.advance(TICK);
        last_end = clock.now();
    }
    clock.set(last_end.saturating_add(DAY));
    assert!(retry_after(limiter, &charge).await.is_zero());
    assert_eq!(retry_after(limiter, &charge).await, MINUTE, "the last one ended a day ago");
}

#[tokio::test]
async fn length_follows_the_number_of_blocks_in_the_last_day() {
    let (redis, clock) = (Redis::start(), ManualClock::new());
    check_list(&memory(&clock), &clock).await;
    check_list(&redis.driven_limiter(clock.clone()).await, &clock).await;
    redis.assert_every_key_expires();
}

/// A block of a day would otherwise be over before it counts.
#[tokio::test]
async fn long_block_counts_for_a_day_after_its_end() {
    let clock = ManualClock::new();
    let quota = blocking(&[DAY, 366 * DAY]);
    let charge = Charge::new("u", &quota);
    let limiter = memory(&clock);
    for length in [DAY, 366 * DAY, 366 * DAY] {
        assert!(retry_after(&limiter, &charge).await.is_zero());
        assert_eq!(retry_after(&limiter, &charge).await, length);
        clock.advance(length);
    }
}

async fn check_actions<S: Store>(limiter: &Limiter<S>, clock: &ManualClock) {
    let quota = Quota::token_bucket(10, MINUTE)
        .and_then(|quota| quota.with_block_for(&[HOUR, DAY]))
        .expect("valid");
    let charge = Charge::new("u", &quota);
    let charged_at = limiter.now();
    assert!(limiter.acquire(&charge.with_cost(9)).await.expect("decided").allowed);
    // A peek and a report start no block.
    let peeked = limiter.peek(&charge.with_cost(2)).await.expect("decided");
    assert_eq!((peeked.allowed, peeked.retry_after), (false, MINUTE / 10));
    assert!(!limiter.report(&charge.with_cost(2)).await.expect("recorded").allowed);
    clock.advance(MINUTE / 5);
    // Another one would fit, but this one exceeds the limit.
    let denied = limiter.acquire(&charge.with_cost(2)).await.expect("decided");
    assert_eq!((denied.allowed, denied.remaining, denied.retry_after), (false, 0, HOUR));
    assert_eq!(denied.reset_after, HOUR);
    // A refund does not lift it, a report does not extend it, and a peek shows it.
    let refund = charge.with_cost(9).with_charged_at(charged_at);
    assert!(limiter.refund(&refund).await.expect("refunded").allowed);
    let _ = limiter.report(&charge).await.expect("recorded");
    assert_eq!(limiter.peek(&charge).await.expect("decided").retry_after, HOUR);
    assert_eq!(retry_after(limiter, &charge).await, HOUR);
    // A reset lifts it, and forgets it.
    limiter.reset(&charge).await.expect("reset");
    for _ in 0..10 {
        assert!(retry_after(limiter, &charge).await.is_zero());
    }
    assert_eq!(retry_after(limiter, &charge).await, HOUR);
    limiter.reset(&charge).await.expect("reset");
}

#[tokio::test]
async fn only_an_acquire_starts_a_block_and_only_a_reset_lifts_it() {
    let (redis, clock) = (Redis::start(), ManualClock::new());
    check_actions(&memory(&clock), &clock).await;
    check_actions(&redis.driven_limiter(clock.clone()).await, &clock).await;
    let mut left: Vec<String> = redis.query(&["KEYS", "*u*"]);
    // A reset leaves its time, for the ids of earlier requests.
    left.retain(|key| !key.ends_with(":h"));
    assert!(left.is_empty(), "{left:?}");
}

async fn check_several<S: Store>(limiter: &Limiter<S>) {
    let (one, ten) = (blocking(&[HOUR]), Quota::fixed_window(10, DAY).expect("valid"));
    let two = Quota::fixed_window(2, DAY).and_then(|quota| quota.with_block_for(&[DAY]));
    let two = two.expect("valid");
    let charges = [
        Charge::new("u", &one).with_policy("one"),
        Charge::new("u", &ten).with_policy("ten"),
        Charge::new("u", &two).with_policy("two"),
    ];
    assert!(limiter.acquire_all(&charges).await.expect("decided").is_allowed());
    let denied = limiter.acquire_all(&charges).await.expect("decided");
    let waits: Vec<_> = denied.iter().map(|decision| decision.retry_after).collect();
    assert_eq!(waits, [HOUR, Duration::ZERO, Duration::ZERO]);
    let left: Vec<_> = denied.iter().map(|decision| decision.remaining).collect();
    assert_eq!(left, [0, 9, 1], "nothing is spent beside a block");
    // One that fits is not blocked by the block of another.
    assert!(limiter.acquire(&charges[2]).await.expect("decided").allowed);
    let denied = limiter.acquire_all(&charges).await.expect("decided");
    let waits: Vec<_> = denied.iter().map(|decision| decision.retry_after).collect();
    assert_eq!(waits, [HOUR, Duration::ZERO, DAY], "each that exceeds its limit has its block");
}

#[tokio::test]
async fn only_charges_that_exceed_their_limit_start_a_block() {
    let (redis, clock) = (Redis::start(), ManualClock::new());
    check_several(&memory(&clock)).await;
    check_several(&redis.driven_limiter(clock).await).await;
}

async fn check_concurrency<S: Store>(limiter: &Limiter<S>, clock: &ManualClock) {
    let quota = blocking(&[MINUTE, HOUR]);
    for length in [MINUTE, HOUR] {
        let tasks = (0..16).map(|_| {
            let (limiter, quota) = (limiter.clone(), quota.clone());
            tokio::spawn(async move { retry_after(&limiter, &Charge::new("u", &quota)).await })
        });
        let mut waits = Vec::new();
        for task in tasks.collect::<Vec<_>>() {
            waits.push(task.await.expect("no panic"));
        }
        waits.sort_unstable();
        assert_eq!(waits[0], Duration::ZERO);
        assert_eq!(waits[1..], [length; 15]);
        clock.advance(length);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn concurrent_requests_start_one_block() {
    let (redis, clock) = (Redis::start(), ManualClock::new());
    check_concurrency(&memory(&clock), &clock).await;
    check_concurrency(&redis.driven_limiter(clock.clone()).await, &clock).await;
}

#[tokio::test]
async fn clock_that_steps_back_does_not_prolong_a_block() {
    let (redis, clock) = (Redis::start(), ManualClock::new());
    clock.advance(DAY);
    let quota = blocking(&[HOUR]);
    let charge = Charge::new("u", &quota);
    let (memory, on_redis) = (memory(&clock), redis.driven_limiter(clock.clone()).await);
    for _ in 0..2 {
        let _ = memory.acquire(&charge).await.expect("decided");
        let _ = on_redis.acquire(&charge).await.expect("decided");
    }
    clock.advance(HOUR / 2);
    clock.step_back(10 * HOUR);
    for wait in [HOUR, HOUR / 4] {
        assert_eq!(retry_after(&memory, &charge).await, wait);
        assert_eq!(retry_after(&on_redis, &charge).await, wait);
        clock.advance(HOUR / 4 * 3);
    }
    assert!(retry_after(&memory, &charge).await.is_zero());
    assert!(retry_after(&on_redis, &charge).await.is_zero());
}

#[tokio::test]
async fn wait_starts_no_block_and_waits_for_its_end() {
    let clock = ManualClock::new();
    let limiter = memory(&clock);
    let quota = Quota::sliding_log(1, MINUTE).expect("valid").with_block_for(&[HOUR]);
    let quota = quota.expect("valid");
    let charge = Charge::new("u", &quota);
    assert!(limiter.acquire(&charge).await.expect("decided").allowed);
    let denied = limiter.wait(&charge, MINUTE / 2).await.expect("decided");
    assert_eq!((denied.allowed, denied.retry_after), (false, MINUTE));
    assert_eq!(retry_after(&limiter, &charge).await, HOUR);
    let denied = limiter.wait(&charge, MINUTE).await.expect("decided");
    assert_eq!((denied.allowed, denied.retry_after), (false, HOUR));
}

/// Memory: a blocked key stays blocked, its block takes room, and both end.
#[test]
fn flood_of_keys_lifts_no_block_and_ended_blocks_make_room() {
    let clock = ManualClock::new();
    let store = MemoryStore::builder().clock(clock.clone()).max_keys(1_000).build();
    let limiter = Limiter::new(store);
    let quota = blocking(&[HOUR, DAY]);
    let acquire = |key: &str| limiter.blocking().acquire(&Charge::new(key, &quota));
    for key in 0..400 {
        assert!(acquire(&format!("u{key}")).expect("room").allowed);
        assert_eq!(acquire(&format!("u{key}")).expect("room").retry_after, HOUR);
    }
    assert_eq!(limiter.store().keys(), 800);
    clock.advance(2 * MINUTE);
    let plain = Quota::fixed_window(5, HOUR).expect("valid");
    let flood = |keys: std::ops::Range<u32>| {
        for key in keys {
            let _ = limiter.blocking().acquire(&Charge::new(&format!("f{key}"), &plain));
        }
        assert!(limiter.store().keys() <= 1_000);
    };
    flood(0..10_000);
    for key in 0..400 {
        assert_eq!(acquire(&format!("u{key}")).expect("known").retry_after, 58 * MINUTE);
    }
    // A full store forgets the blocks that have ended.
    clock.advance(HOUR);
    flood(10_000..20_000);
    assert!(acquire("u0").expect("room").allowed);
    assert_eq!(acquire("u0").expect("room").retry_after, HOUR);
}

/// A full store denies by the count, rather than failing.
#[test]
fn key_is_denied_without_room_for_its_block() {
    let clock = ManualClock::new();
    let store = MemoryStore::builder().clock(clock.clone()).max_keys(10).build();
    let limiter = Limiter::new(store);
    let quota = Quota::sliding_log(1, HOUR).and_then(|quota| quota.with_block_for(&[DAY]));
    let quota = quota.expect("valid");
    let acquire = |key: &str| limiter.blocking().acquire(&Charge::new(key, &quota));
    let keys: Vec<String> = (0..20).map(|key| format!("u{key}")).collect();
    let known: Vec<&String> = keys.iter().filter(|key| acquire(key).is_ok()).collect();
    assert!((5..=10).contains(&known.len()), "{}", known.len());
    let mut waits: Vec<_> =
        known.iter().map(|key| acquire(key).expect("denied").retry_after).collect();
    waits.dedup();
    assert!(waits.contains(&HOUR) && waits.iter().all(|wait| [HOUR, DAY].contains(wait)));
}

#[tokio::test]
async fn every_algorithm_blocks_and_every_key_expires() {
    let redis = Redis::start();
    let limiter = redis.limiter().await;
    for quota in every_quota(1, LONG) {
        let quota = quota.with_block_for(&[366 * DAY, HOUR]).expect("valid");
        let charge = Charge::new("u{1}", &quota);
        assert!(limiter.acquire(&charge).await.expect("decided").allowed);
        let first = retry_after(&limiter, &charge).await;
        let second = limiter.acquire(&charge).await.expect("decided");
        assert_eq!(first, 366 * DAY);
        assert!(second.retry_after < first && second.retry_after > 365 * DAY);
        assert!(second.reset_after >= second.retry_after);
        let name = quota.default_policy_name();
        let ttl: i64 = redis.query(&["TTL", &format!("rate_limit:{{u%7B1%7D}}block:{name}")]);
        let expected = 367 * 86_400;
        assert!((expected - 3_600..=expected + 1).contains(&ttl), "{name}: {ttl}");
    }
    redis.assert_every_key_expires();
}

/// A value that is not ours counts as none. It affects no other key, and hangs nothing.
#[tokio::test]
async fn damaged_block_affects_its_key_only() {
    let redis = Redis::start();
    let limiter = redis.limiter().await;
    let quota = Quota::sliding_log(1, LONG).and_then(|quota| quota.with_block_for(&[HOUR, DAY]));
    let quota = quota.expect("valid");
    let charge = |key| Charge::new(key, &quota).with_policy("p");
    assert!(retry_after(&limiter, &charge("u")).await.is_zero());
    assert_eq!(retry_after(&limiter, &charge("other")).await, Duration::ZERO);
    let key = "rate_limit:{u}block:p";
    let far = "9007199254740991";
    for damage in [
        vec!["SET", key, "abc"],
        vec!["SET", key, ""],
        vec!["SET", key, "17"],
        vec!["SET", key, "1 2 x"],
        vec!["SET", key, "99999999999999999999999 1"],
        vec!["SET", key, "0 9007199254740991"],
        vec!["SET", key, "9 3"],
        vec!["HSET", key, "a", "b"],
        vec!["RPUSH", key, "1", "2"],
        vec!["ZADD", key, "1", "2"],
    ] {
        redis.query::<()>(&["DEL", key]);
        redis.query::<()>(&damage);
        let wait = retry_after(&limiter, &charge("u")).await;
        assert_eq!(wait, HOUR, "{damage:?}");
        assert!(retry_after(&limiter, &charge("u")).await <= HOUR, "{damage:?}");
        assert!(limiter.peek(&charge("other")).await.is_ok());
        redis.assert_every_key_expires();
    }
    // Of a time far ahead, only the length of the block counts.
    redis.query::<()>(&["SET", key, &format!("{far} {far}")]);
    assert_eq!(retry_after(&limiter, &charge("u")).await, DAY, "one that ends now");
    redis.query::<()>(&["SET", key, &format!("9007199254000000 {far}")]);
    assert_eq!(retry_after(&limiter, &charge("u")).await, Duration::from_micros(740_991));
    redis.assert_every_key_expires();
}

/// Without memory for its block, a key is denied rather than decided without the store.
#[tokio::test]
async fn full_redis_denies_without_a_block() {
    for program in [PathBuf::from("redis-server"), redis_6(), valkey_9()] {
        check_full_redis(&Redis::start_program(&program, &[])).await;
    }
}

async fn check_full_redis(redis: &Redis) {
    let limiter = redis.limiter().await;
    let quota = Quota::fixed_window(1, LONG).and_then(|quota| quota.with_block_for(&[HOUR]));
    let quota = quota.expect("valid");
    let charge = Charge::new("u", &quota);
    assert!(retry_after(&limiter, &charge).await.is_zero());
    redis.query::<()>(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]);
    redis.query::<()>(&["CONFIG", "SET", "maxmemory", "1"]);
    for _ in 0..3 {
        assert_eq!(retry_after(&limiter, &charge).await, HOUR);
    }
    redis.query::<()>(&["CONFIG", "SET", "maxmemory", "0"]);
    assert_eq!(redis.query::<Vec<String>>(&["KEYS", "*block*"]).len(), 0);
}

/// Only charges with blocks read the key of a block.
#[tokio::test]
async fn commands_of_other_quotas_stay() {
    let redis = Redis::start();
    let limiter = redis.limiter().await;
    let gets = || -> u64 {
        let stats: String = redis.query(&["INFO", "commandstats"]);
        let line = stats.lines().find_map(|line| line.strip_prefix("cmdstat_get:calls="));
        line.and_then(|rest| rest.split(',').next()?.parse().ok()).unwrap_or(0)
    };
    let plain = Quota::fixed_window(1, LONG).expect("valid");
    let blocking = plain.clone().with_block_for(&[HOUR]).expect("valid");
    for (quota, policy, expected) in [(&plain, "plain", 3), (&blocking, "blocking", 6)] {
        let before = gets();
        for allowed in [true, false, false] {
            let charge = Charge::new("u", quota).with_policy(policy);
            assert_eq!(limiter.acquire(&charge).await.expect("decided").allowed, allowed);
        }
        assert_eq!(gets() - before, expected);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn block_survives_a_restart_and_a_failover() {
    let quota = Quota::fixed_window(1, MINUTE).and_then(|quota| quota.with_block_for(&[HOUR]));
    let quota = quota.expect("valid");
    let charge = Charge::new("u", &quota);
    let mut redis = Redis::start();
    let limiter = redis.limiter().await;
    while retry_after(&limiter, &charge).await.is_zero() {}
    redis.query::<()>(&["SAVE"]);
    redis.restart();
    let limiter = redis.limiter().await;
    let rest = retry_after(&limiter, &charge).await;
    assert!(rest < HOUR && rest > 55 * MINUTE, "{rest:?}");

    let sentinels = Sentinels::start();
    let store = RedisStore::sentinel(NAME, sentinels.urls()).connect().await.expect("connected");
    let limiter = Limiter::new(store);
    while retry_after(&limiter, &charge).await.is_zero() {}
    let key = limiter.store().redis_key(&charge).replace("}:", "}block:");
    until("the replicas are in sync", async || {
        let replicas = &sentinels.servers()[1..];
        replicas.iter().all(|replica| replica.query::<u64>(&["EXISTS", &key]) == 1)
    })
    .await;
    sentinels.servers()[0].signal("STOP");
    let mut rest = Duration::ZERO;
    until("the new primary decides", async || match limiter.acquire(&charge).await {
        Ok(decision) => {
            assert!(!decision.allowed);
            rest = decision.retry_after;
            true
        }
        Err(_) => false,
    })
    .await;
    sentinels.servers()[0].signal("CONT");
    assert!(rest < HOUR && rest > 55 * MINUTE, "{rest:?}");
}

/// The cache on memory asks the store once, for one limit and for several.
#[tokio::test]
async fn deny_cache_answers_for_the_whole_block() {
    let clock = ManualClock::new();
    let store = MemoryStore::builder().clock(clock.clone()).build();
    let limiter = Limiter::new(DenyCache::new(store));
    let (quota, plain) = (blocking(&[HOUR]), Quota::fixed_window(9, DAY).expect("valid"));
    let charges = [Charge::new("u", &quota), Charge::new("u", &plain).with_policy("plain")];
    for several in [false, true] {
        limiter.reset(&charges[0]).await.expect("reset");
        let acquire = async || {
            let charges = if several { &charges[..] } else { &charges[..1] };
            limiter.acquire_all(charges).await.expect("decided")[0]
        };
        let start = clock.now();
        assert!(acquire().await.allowed);
        // The denial of a peek is no block: the acquire that follows starts it.
        let peeked = limiter.peek(&charges[0]).await.expect("decided");
        assert!(!peeked.allowed && peeked.retry_after <= MINUTE);
        assert_eq!(
            (acquire().await.retry_after, acquire().await.source),
            (HOUR, Source::DenyCache)
        );
        for minute in 1..59 {
            clock.set(start.saturating_add(minute * MINUTE));
            let denied = acquire().await;
            assert_eq!(
                (denied.retry_after, denied.source),
                ((60 - minute) * MINUTE, Source::DenyCache)
            );
        }
        clock.set(start.saturating_add(HOUR.saturating_sub(TICK)));
        assert_eq!((acquire().await.retry_after, acquire().await.source), (TICK, Source::Store));
        clock.set(start.saturating_add(HOUR));
        assert!(acquire().await.allowed);
        clock.advance(DAY);
    }
}

#[tokio::test]
async fn reset_through_another_instance_ends_a_cached_block() {
    let redis = Redis::start();
    let connect = async || RedisStore::connect(&redis.url()).await.expect("connected");
    let limiter = Limiter::new(DenyCache::new(connect().await));
    let quota = Quota::fixed_window(1, LONG).and_then(|quota| quota.with_block_for(&[HOUR]));
    let quota = quota.expect("valid");
    let charge = Charge::new("u", &quota);
    assert!(retry_after(&limiter, &charge).await.is_zero());
    assert_eq!(retry_after(&limiter, &charge).await, HOUR);
    until("the cache answers", async || {
        limiter.acquire(&charge).await.expect("decided").source == Source::DenyCache
    })
    .await;
    let other = Limiter::new(connect().await);
    other.reset(&charge).await.expect("reset");
    until("the reset arrives", async || limiter.acquire(&charge).await.expect("decided").allowed)
        .await;
}
