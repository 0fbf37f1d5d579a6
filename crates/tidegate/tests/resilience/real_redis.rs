//! The fallback with a real Redis that is suspended, killed and restarted.

use std::time::Duration;

use tidegate::{Action, Charge, Fallback, Quota, RedisStore, Source, Store};
use tokio::time::{Instant, sleep};

use crate::support::{LONG, Redis, TEST_TIMEOUT};

const TIMEOUT: Duration = Duration::from_millis(100);
/// Scheduling delay of a busy machine.
const SLACK: Duration = Duration::from_secs(2);

async fn connect(redis: &Redis) -> Fallback<RedisStore> {
    let store =
        RedisStore::builder(&redis.url()).timeout(TIMEOUT).connect().await.expect("connected");
    Fallback::new(store)
}

/// Peeks until the store itself decides.
async fn until_the_store_decides(fallback: &impl Store, charge: &Charge<'_>) {
    let start = Instant::now();
    while fallback.decide(Action::Peek, charge).await.expect("decided").source != Source::Store {
        assert!(start.elapsed() < TEST_TIMEOUT, "the store recovers");
        sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn a_flapping_redis_admits_at_most_the_limit_and_delays_no_request() {
    const LIMIT: u64 = 60;
    let redis = Redis::start();
    let fallback = connect(&redis).await;
    let quota = Quota::sliding_log(LIMIT, LONG).expect("valid");
    let charge = Charge::new("u", &quota);
    let (mut admitted, mut local) = (0, 0);
    for round in 0..4 {
        for is_suspended in [true, false] {
            if is_suspended {
                redis.signal("STOP");
            } else {
                redis.signal("CONT");
                until_the_store_decides(&fallback, &charge).await;
            }
            for _ in 0..12 {
                let start = Instant::now();
                let decision = fallback.decide(Action::Acquire, &charge).await.expect("decided");
                assert!(start.elapsed() < TIMEOUT + SLACK, "{:?}", start.elapsed());
                admitted += u64::from(decision.allowed);
                local += u64::from(decision.allowed && decision.source == Source::Local);
                assert!(!is_suspended || decision.source == Source::Local, "round {round}");
            }
        }
    }
    assert!(local > 0 && admitted <= LIMIT, "{admitted} admitted, {local} of them locally");
    // Redis may have counted calls that were in flight when it was suspended, so it may count more
    // than was admitted.
    let start = Instant::now();
    loop {
        until_the_store_decides(&fallback, &charge).await;
        let count = fallback.store().decide(Action::ChargeUpTo, &charge.with_cost(0)).await;
        let remaining = count.map_or(LIMIT, |count| count.remaining);
        let is_settled = fallback.stats().pending_debits == 0;
        if remaining == 0 || (is_settled && remaining <= LIMIT - admitted) {
            break;
        }
        assert!(
            start.elapsed() < TEST_TIMEOUT,
            "{remaining} remaining, {admitted} admitted, {:?}",
            fallback.stats()
        );
        sleep(Duration::from_millis(20)).await;
    }
    assert!(fallback.stats().settled_debit_units > 0);
}

#[tokio::test]
async fn a_restarted_redis_decides_again_and_gets_the_debts() {
    let mut redis = Redis::start();
    let fallback = connect(&redis).await;
    let quota = Quota::token_bucket(1_000, LONG).expect("valid");
    let charge = Charge::new("u", &quota);
    assert_eq!(
        fallback.decide(Action::Acquire, &charge).await.expect("decided").source,
        Source::Store
    );
    // It restarts empty, so it only counts the debts.
    redis.restart();
    let mut local = 0;
    let start = Instant::now();
    loop {
        let decision = fallback.decide(Action::Acquire, &charge).await.expect("decided");
        assert!(decision.allowed);
        if decision.source == Source::Store {
            break;
        }
        local += 1;
        assert!(start.elapsed() < TEST_TIMEOUT, "the store recovers");
        sleep(Duration::from_millis(5)).await;
    }
    let count =
        fallback.store().decide(Action::ChargeUpTo, &charge.with_cost(0)).await.expect("decided");
    assert!(count.remaining < 1_000 - local, "{count:?} after {local} local decisions");
    redis.assert_every_key_expires();
}
