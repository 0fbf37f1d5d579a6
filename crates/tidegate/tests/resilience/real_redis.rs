//! A real Redis that is stopped, killed and started again.

use std::time::Duration;

use tidegate::{Action, Breaker, Charge, Fallback, Quota, RedisStore, Source, Store};
use tokio::time::{Instant, sleep};

use crate::support::{LONG, PATIENCE, Redis};

const DEADLINE: Duration = Duration::from_millis(100);
/// Of this machine, when it is busy.
const SLACK: Duration = Duration::from_secs(2);

async fn connect(redis: &Redis) -> Fallback<Breaker<RedisStore>> {
    let store =
        RedisStore::builder(&redis.url()).timeout(DEADLINE).connect().await.expect("connected");
    Fallback::new(Breaker::new(store))
}

/// Asks until the store itself decides.
async fn until_the_store_decides(fallback: &impl Store, charge: &Charge<'_>) {
    let start = Instant::now();
    while fallback.decide(Action::Peek, charge).await.expect("decided").source != Source::Store {
        assert!(start.elapsed() < PATIENCE, "the store is back");
        sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn a_redis_that_stops_again_and_again_lets_nobody_beyond_and_nobody_wait() {
    const LIMIT: u64 = 60;
    let redis = Redis::start();
    let fallback = connect(&redis).await;
    let quota = Quota::sliding_log(LIMIT, LONG).expect("valid");
    let charge = Charge::new("u", &quota);
    let (mut admitted, mut local) = (0, 0);
    for round in 0..4 {
        for stopped in [true, false] {
            if stopped {
                redis.signal("STOP");
            } else {
                redis.signal("CONT");
                until_the_store_decides(&fallback, &charge).await;
            }
            for _ in 0..12 {
                let start = Instant::now();
                let decision = fallback.decide(Action::Acquire, &charge).await.expect("decided");
                assert!(start.elapsed() < DEADLINE + SLACK, "{:?}", start.elapsed());
                admitted += u64::from(decision.allowed);
                local += u64::from(decision.allowed && decision.source == Source::Local);
                assert!(!stopped || decision.source == Source::Local, "round {round}");
            }
        }
    }
    assert!(local > 0 && admitted <= LIMIT, "{admitted} admitted, {local} of them here");
    // Calls that were under way when it stopped may have been heard, so it may count more than were
    // admitted, and have no room for all of the rest.
    let start = Instant::now();
    loop {
        until_the_store_decides(&fallback, &charge).await;
        let look = fallback.store().decide(Action::ChargeUpTo, &charge.with_cost(0)).await;
        let left = look.map_or(LIMIT, |look| look.remaining);
        if left == 0 || (fallback.stats().owed_keys == 0 && left <= LIMIT - admitted) {
            break;
        }
        assert!(
            start.elapsed() < PATIENCE,
            "{left} left, {admitted} admitted, {:?}",
            fallback.stats()
        );
        sleep(Duration::from_millis(20)).await;
    }
    assert!(fallback.stats().repaid_units > 0);
}

#[tokio::test]
async fn a_redis_that_is_killed_is_missed_for_a_moment_only() {
    let mut redis = Redis::start();
    let fallback = connect(&redis).await;
    let quota = Quota::token_bucket(1_000, LONG).expect("valid");
    let charge = Charge::new("u", &quota);
    assert_eq!(
        fallback.decide(Action::Acquire, &charge).await.expect("decided").source,
        Source::Store
    );
    // It comes back with nothing: what is owed is all that it hears of.
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
        assert!(start.elapsed() < PATIENCE, "the store is back");
        sleep(Duration::from_millis(5)).await;
    }
    let look =
        fallback.store().decide(Action::ChargeUpTo, &charge.with_cost(0)).await.expect("decided");
    assert!(look.remaining < 1_000 - local, "{} left, {local} owed", look.remaining);
    redis.assert_every_key_expires();
}
