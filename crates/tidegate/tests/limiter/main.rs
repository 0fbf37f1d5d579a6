//! The guarantees of a limiter, independent of the store: on memory and on a real Redis.

#[path = "../support/mod.rs"]
mod support;
mod waits;

use std::time::Duration;

use proptest::prelude::*;
use support::{LONG, Redis, every_quota};
use tidegate::{
    Action, Algorithm, Charge, ChargeError, Clock, Decision, Error, Key, KeyError, Limiter,
    MAX_CHARGES, ManualClock, MemoryStore, Quota, Store, Timestamp,
};
use waits::{
    cancelled_wait_spends_nothing, denials_during_a_wait_are_not_counted,
    wait_beyond_its_timeout_is_denied_at_once_and_spends_nothing,
    wait_ends_exactly_when_the_charge_is_admitted,
};

const MICROSECOND: Duration = Duration::from_micros(1);
const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3600);

fn in_memory(clock: &ManualClock) -> Limiter {
    Limiter::new(MemoryStore::builder().clock(clock.clone()).build())
}

/// Runs the test on both stores, each on a separate clock.
macro_rules! on_every_store {
    ($($name:ident),* $(,)?) => {
        mod on_memory {
            use super::*;
            $(#[tokio::test]
            async fn $name() {
                let clock = ManualClock::new();
                super::$name(in_memory(&clock), clock).await;
            })*
        }
        mod on_redis {
            use super::*;
            $(#[tokio::test]
            async fn $name() {
                let redis = Redis::start();
                let clock = ManualClock::new();
                super::$name(redis.driven_limiter(clock.clone()).await, clock).await;
                redis.assert_every_key_expires();
            })*
        }
    };
}

on_every_store!(
    retry_after_is_exact_to_the_microsecond,
    denied_request_spends_nothing,
    counted_denials_keep_an_impatient_client_denied,
    several_charges_are_all_or_nothing,
    changed_limit_keeps_the_counts,
    report_exceeds_the_limit_and_drains_with_time,
    changed_algorithm_keeps_the_units,
    clock_step_back_neither_admits_more_nor_locks_out,
    leaky_bucket_spaces_requests_evenly,
    invalid_charges_have_specific_errors,
    wait_ends_exactly_when_the_charge_is_admitted,
    wait_beyond_its_timeout_is_denied_at_once_and_spends_nothing,
    cancelled_wait_spends_nothing,
    denials_during_a_wait_are_not_counted,
    lowered_limit_does_not_evict_a_bucket_early,
    log_never_exceeds_its_limit_in_any_window,
    long_term_rate_is_exact,
);

async fn acquire<S: Store>(limiter: &Limiter<S>, charge: &Charge<'_>) -> Decision {
    limiter.acquire(charge).await.expect("a decision")
}

async fn left<S: Store>(limiter: &Limiter<S>, charge: &Charge<'_>) -> u64 {
    // `remaining` does not include the cost if the charge fits.
    let peeked = limiter.peek(charge).await.expect("a decision");
    peeked.remaining + if peeked.allowed { charge.cost() } else { 0 }
}

async fn retry_after_is_exact_to_the_microsecond<S: Store>(
    limiter: Limiter<S>,
    clock: ManualClock,
) {
    for limit in [1, 3, 7, 100] {
        for quota in every_quota(limit, Duration::from_micros(1_000_003)) {
            for cost in [1, limit.div_ceil(2), limit] {
                let charge = Charge::new("user123", &quota).with_cost(cost);
                let mut denied = acquire(&limiter, &charge).await;
                while denied.allowed {
                    clock.advance(Duration::from_micros(11));
                    denied = acquire(&limiter, &charge).await;
                }
                clock.advance(denied.retry_after.saturating_sub(MICROSECOND));
                let early = limiter.peek(&charge).await.expect("a decision");
                assert!(!early.allowed, "a microsecond early: {quota:?} cost {cost}");
                assert_eq!(early.retry_after, Duration::from_micros(1), "{quota:?} cost {cost}");
                clock.advance(Duration::from_micros(1));
                assert!(acquire(&limiter, &charge).await.allowed, "in time: {quota:?} cost {cost}");
            }
        }
    }
}

async fn denied_request_spends_nothing<S: Store>(limiter: Limiter<S>, clock: ManualClock) {
    for quota in every_quota(10, HOUR) {
        let charge = Charge::new("user123", &quota);
        assert!(acquire(&limiter, &charge.with_cost(8)).await.allowed);
        for _ in 0..20 {
            clock.advance(Duration::from_micros(1));
            assert!(!acquire(&limiter, &charge.with_cost(5)).await.allowed);
        }
        assert_eq!(left(&limiter, &charge).await, 2, "{quota:?}");
        assert!(acquire(&limiter, &charge.with_cost(2)).await.allowed, "{quota:?}");
    }
}

async fn counted_denials_keep_an_impatient_client_denied<S: Store>(
    limiter: Limiter<S>,
    clock: ManualClock,
) {
    for quota in every_quota(10, SECOND)
        .into_iter()
        .filter(|quota| quota.algorithm() == Algorithm::SlidingLog)
    {
        let quota = quota.with_count_denied(true).expect("a log");
        let charge = Charge::new("user123", &quota);
        let mut admitted = 0;
        for _ in 0..1_000 {
            clock.advance(Duration::from_millis(10));
            admitted += u32::from(acquire(&limiter, &charge).await.allowed);
        }
        assert_eq!(admitted, 10, "after the first ten, the denials fill the window");
        let denied = acquire(&limiter, &charge).await;
        clock.advance(denied.retry_after);
        assert!(acquire(&limiter, &charge).await.allowed, "admitted after retry_after");
    }
}

async fn several_charges_are_all_or_nothing<S: Store>(limiter: Limiter<S>, _clock: ManualClock) {
    let quotas = every_quota(10, LONG);
    let charges: Vec<Charge<'_>> =
        quotas.iter().map(|quota| Charge::new("user123", quota)).collect();
    for used in 1..=3 {
        let decisions = limiter.acquire_all(&charges).await.expect("decisions");
        assert!(
            decisions.iter().all(|decision| decision.allowed && decision.remaining == 10 - used)
        );
    }
    for (index, full) in charges.iter().enumerate() {
        let charged_at = limiter.now();
        assert!(acquire(&limiter, &full.with_cost(7)).await.allowed);
        let decisions = limiter.acquire_all(&charges).await.expect("decisions");
        for (other, decision) in decisions.iter().enumerate() {
            assert_eq!(decision.allowed, other != index);
            assert_eq!(decision.remaining, if other == index { 0 } else { 7 }, "none is spent");
        }
        let leading = decisions.binding().expect("some");
        assert!(!leading.allowed);
        let refund = full.with_cost(7).with_charged_at(charged_at);
        let _ = limiter.refund(&refund).await.expect("refunded");
    }
    assert!(limiter.acquire_all(&[]).await.expect("nothing to decide").is_empty());
}

async fn report_exceeds_the_limit_and_drains_with_time<S: Store>(
    limiter: Limiter<S>,
    clock: ManualClock,
) {
    for quota in every_quota(100, HOUR) {
        let charge = Charge::new("u", &quota);
        let fits = limiter.report(&charge.with_cost(100)).await.expect("recorded");
        assert_eq!(
            (fits.allowed, fits.remaining, fits.retry_after),
            (true, 0, Duration::ZERO),
            "{quota:?}"
        );
        let is_exceeded = async || {
            !limiter.decide(Action::Peek, &charge.with_cost(0)).await.expect("looked").allowed
        };
        assert!(!is_exceeded().await, "{quota:?}: 100 of 100 is not exceeded");
        let over = limiter.report(&charge.with_cost(50)).await.expect("recorded");
        assert_eq!((over.allowed, over.remaining), (false, 0), "{quota:?}");
        assert!(is_exceeded().await, "{quota:?}: 150 of 100 is exceeded");
        // One unit is free after the wait, and not a microsecond earlier.
        clock.advance(over.retry_after.saturating_sub(MICROSECOND));
        assert!(!limiter.acquire(&charge).await.expect("decided").allowed, "{quota:?}");
        clock.advance(MICROSECOND);
        assert!(limiter.acquire(&charge).await.expect("decided").allowed, "{quota:?}");
        limiter.reset(&charge).await.expect("reset");
        // The overdraft is bounded at ten times the limit, and drains with time.
        let _ = limiter.report(&charge.with_cost(u64::MAX)).await.expect("recorded");
        clock.advance(11 * HOUR);
        assert_eq!(limiter.peek(&charge).await.expect("looked").remaining, 99, "{quota:?}");
        limiter.reset(&charge).await.expect("reset");
    }
}

async fn changed_limit_keeps_the_counts<S: Store>(limiter: Limiter<S>, _clock: ManualClock) {
    for (at, quota) in every_quota(10, HOUR).into_iter().enumerate() {
        let policy = format!("policy-{at}");
        let with_limit = |limit| {
            let quota_now = Quota::new(quota.algorithm(), limit, HOUR).expect("valid");
            if quota.algorithm() == Algorithm::SlidingLog {
                quota_now.with_encoding(quota.encoding()).expect("a log")
            } else {
                quota_now
            }
        };
        let (normal, raised, lowered) = (with_limit(10), with_limit(100), with_limit(5));
        let charge = |quota| Charge::new("user123", quota).with_policy(&policy);
        assert!(acquire(&limiter, &charge(&normal).with_cost(7)).await.allowed);
        assert_eq!(left(&limiter, &charge(&raised)).await, 93, "{quota:?}");
        assert!(acquire(&limiter, &charge(&raised).with_cost(1)).await.allowed);
        assert_eq!(left(&limiter, &charge(&normal)).await, 2, "{quota:?}");
        assert_eq!(left(&limiter, &charge(&lowered)).await, 0, "{quota:?}");
        let denied = acquire(&limiter, &charge(&lowered)).await;
        assert!(!denied.allowed && denied.retry_after > Duration::ZERO, "{quota:?}");
    }
}

async fn changed_algorithm_keeps_the_units<S: Store>(limiter: Limiter<S>, _clock: ManualClock) {
    let quotas = every_quota(10, HOUR);
    for before in &quotas {
        for after in &quotas {
            let charge = |quota| Charge::new("user123", quota).with_policy("per-user").with_cost(6);
            let pair = format!("{before:?}, then {after:?}");
            assert!(acquire(&limiter, &charge(before)).await.allowed, "{pair}");
            assert_eq!(left(&limiter, &charge(after)).await, 4, "{pair}");
            let denied = acquire(&limiter, &charge(after)).await;
            assert!(!denied.allowed && denied.retry_after > Duration::ZERO, "{pair}");
            assert!(acquire(&limiter, &charge(after).with_cost(1)).await.allowed, "{pair}");
            // While a change is rolled out, instances use both.
            assert_eq!(left(&limiter, &charge(before)).await, 3, "{pair}");
            assert!(acquire(&limiter, &charge(before).with_cost(3)).await.allowed, "{pair}");
            assert_eq!(left(&limiter, &charge(after)).await, 0, "{pair}");
            // It does not matter which of them resets.
            limiter.reset(&charge(after)).await.expect("reset");
            assert_eq!(left(&limiter, &charge(before)).await, 10, "{pair}");
        }
    }
}

async fn clock_step_back_neither_admits_more_nor_locks_out<S: Store>(
    limiter: Limiter<S>,
    clock: ManualClock,
) {
    // Windows that divide an hour and others; steps into the previous window and further back.
    for (window, back) in [(60, 3_600_000), (7, 3_600_000), (60, 12_000), (7, 1_400)] {
        let (window, back) = (Duration::from_secs(window), Duration::from_millis(back));
        step_back(&limiter, &clock, window, back).await;
    }
}

/// Returns the start of the next window of the clock.
fn next_window(clock: &ManualClock, window: Duration) -> Timestamp {
    let micros = u64::try_from(window.as_micros()).expect("short");
    Timestamp::from_micros(clock.now().as_micros().next_multiple_of(micros))
}

async fn step_back<S: Store>(
    limiter: &Limiter<S>,
    clock: &ManualClock,
    window: Duration,
    back: Duration,
) {
    for quota in every_quota(10, window) {
        let charge = Charge::new("user123", &quota);
        // Some requests late in one window, then as many as fit early in the next.
        clock.set(next_window(clock, window).saturating_add(19 * window / 20));
        for _ in 0..4 {
            assert!(acquire(limiter, &charge).await.allowed);
        }
        clock.advance(window / 10);
        while acquire(limiter, &charge).await.allowed {}
        let open = limiter.peek(&charge).await.expect("a decision").retry_after;
        clock.step_back(back);
        assert!(
            !limiter.peek(&charge).await.expect("a decision").allowed,
            "peek admits no more: {quota:?}"
        );
        for _ in 0..3 {
            let denied = acquire(limiter, &charge).await;
            assert!(!denied.allowed, "no more are admitted: {quota:?}");
            assert!(denied.retry_after >= open.min(window / 10), "not much sooner: {quota:?}");
            // A full sliding counter denies into the next window, by a tenth at this limit.
            let max_wait = if quota.algorithm() == Algorithm::SlidingCounter {
                window + window / 10
            } else {
                window
            };
            assert!(
                denied.retry_after <= max_wait + Duration::from_micros(1),
                "{:?} of {quota:?}",
                denied.retry_after
            );
        }
        let stepped_back_at = clock.now();
        let denied = acquire(limiter, &charge).await;
        clock.advance(denied.retry_after);
        assert!(acquire(limiter, &charge).await.allowed, "not locked out: {quota:?}");
        clock.set(stepped_back_at);
        clock.advance(back + 3 * window);
    }
}

async fn leaky_bucket_spaces_requests_evenly<S: Store>(limiter: Limiter<S>, clock: ManualClock) {
    let quota = Quota::leaky_bucket(10, SECOND).expect("valid").with_burst(5).expect("a bucket");
    let charge = Charge::new("user123", &quota);
    let start = clock.now();
    let mut turns = Vec::new();
    for step in 0_u64..100 {
        let decision = acquire(&limiter, &charge).await;
        if decision.allowed {
            turns.push(clock.now().saturating_add(decision.delay));
        }
        clock.advance(Duration::from_millis(7 * (step % 5)));
    }
    assert!(turns.len() > 10);
    assert_eq!(turns[0], start, "the first request has no delay");
    for pair in turns.windows(2) {
        let interval = pair[1].saturating_duration_since(pair[0]);
        assert!(interval >= Duration::from_millis(100), "{turns:?}");
    }
}

async fn invalid_charges_have_specific_errors<S: Store>(limiter: Limiter<S>, _clock: ManualClock) {
    let quota = Quota::sliding_log(10, HOUR).expect("valid");
    let long = "k".repeat(513);
    let charge = |key| Charge::new(key, &quota);
    let cases = [
        (Charge::new("", &quota), ChargeError::Key(KeyError::Empty)),
        (Charge::new(&long, &quota), ChargeError::Key(KeyError::TooLong(513))),
        (charge("a\u{0}b"), ChargeError::Key(KeyError::Control { character: '\0', at: 1 })),
        (charge("k").with_policy(""), ChargeError::Policy(KeyError::Empty)),
        (
            charge("k").with_policy("a\nb"),
            ChargeError::Policy(KeyError::Control { character: '\n', at: 1 }),
        ),
        (charge("k").with_cost(0), ChargeError::ZeroCost),
        (charge("k").with_cost(11), ChargeError::CostTooHigh { cost: 11, most: 10 }),
        (charge("k").with_cost(u64::MAX), ChargeError::CostTooHigh { cost: u64::MAX, most: 10 }),
    ];
    for (bad, error) in cases {
        let error = Error::Charge(error);
        assert_eq!(limiter.acquire(&bad).await, Err(error.clone()));
        assert_eq!(limiter.peek(&bad).await, Err(error.clone()));
        // A refund may exceed a limit that was lowered since, and a reset ignores the cost.
        if matches!(error, Error::Charge(ChargeError::CostTooHigh { .. })) {
            let untimed = Err(Error::Charge(ChargeError::NoChargeTime));
            assert_eq!(limiter.refund(&bad).await, untimed);
            assert_eq!(
                limiter.decide_all(Action::Refund, &[bad]).await.map(drop),
                untimed.map(drop)
            );
        } else {
            assert_eq!(limiter.refund(&bad).await, Err(error.clone()));
        }
        if matches!(error, Error::Charge(ChargeError::Key(_) | ChargeError::Policy(_))) {
            assert_eq!(limiter.reset(&bad).await, Err(error.clone()));
        }
        assert_eq!(limiter.wait(&bad, HOUR).await, Err(error.clone()));
        assert_eq!(limiter.acquire_all(&[charge("fine"), bad]).await, Err(error));
    }
    let twice = limiter
        .acquire_all(&[charge("k"), charge("k").with_cost(2)])
        .await
        .expect_err("the same count twice");
    assert!(
        twice.to_string().contains(r#"share key "k" and policy "sliding-log-3600s""#),
        "{twice}"
    );
    let many = vec![charge("k"); MAX_CHARGES + 1];
    assert_eq!(limiter.acquire_all(&many).await, Err(Error::Charge(ChargeError::TooMany(129))));
    for key in ["{user}", "}:{", "a:b", "ключ", "%", "k"] {
        assert!(Key::new(key).is_ok());
        assert_eq!(acquire(&limiter, &charge(key)).await.remaining, 9, "{key}: a separate count");
        assert_eq!(
            acquire(&limiter, &charge("x").with_policy(key)).await.remaining,
            9,
            "policy {key}"
        );
    }
}

async fn lowered_limit_does_not_evict_a_bucket_early<S: Store>(
    limiter: Limiter<S>,
    clock: ManualClock,
) {
    let with_limit = |limit| {
        Quota::token_bucket(limit, SECOND).and_then(|quota| quota.with_burst(100)).expect("valid")
    };
    let (high, low) = (with_limit(100), with_limit(1));
    let charge = |quota| Charge::new("user123", quota).with_policy("p");
    assert!(acquire(&limiter, &charge(&high).with_cost(100)).await.allowed);
    assert!(!acquire(&limiter, &charge(&low)).await.allowed);
    // Requests of other keys sweep expired entries.
    clock.advance(2 * SECOND);
    for number in 0..2_000 {
        let _ = acquire(&limiter, &Charge::new(&format!("other-{number}"), &high)).await;
    }
    assert_eq!(
        left(&limiter, &charge(&low)).await,
        2,
        "two of 100 units have refilled in two seconds"
    );
}

/// Checks the definition for every window that starts with an admitted request.
async fn log_never_exceeds_its_limit_in_any_window<S: Store>(
    limiter: Limiter<S>,
    clock: ManualClock,
) {
    for quota in every_quota(7, Duration::from_millis(1))
        .into_iter()
        .filter(|q| q.algorithm() == Algorithm::SlidingLog)
    {
        let mut admitted: Vec<(u64, u64)> = Vec::new();
        let mut random = 1_u64;
        for _ in 0..500 {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            clock.advance(Duration::from_micros((random >> 33) % 300));
            let cost = 1 + (random >> 60) % 4;
            if acquire(&limiter, &Charge::new("user123", &quota).with_cost(cost)).await.allowed {
                admitted.push((clock.now().as_micros(), cost));
            }
        }
        assert!(admitted.len() > 100);
        for (start, _) in &admitted {
            let inside = admitted.iter().filter(|(time, _)| (*start..start + 1_000).contains(time));
            assert!(inside.map(|(_, cost)| cost).sum::<u64>() <= 7, "{quota:?}");
        }
    }
}

/// Spends all remaining units at irregular times: the long-term rate is L/W, to 0.01 %.
async fn long_term_rate_is_exact<S: Store>(limiter: Limiter<S>, clock: ManualClock) {
    let windows = [1_000, 999_983, 60_000_000, 86_400_000_000, 30 * 86_400_000_000];
    for algorithm in [
        Algorithm::TokenBucket,
        Algorithm::LeakyBucket,
        Algorithm::FixedWindow,
        Algorithm::SlidingLog,
    ] {
        for limit in [1, 7, 1_000, 999_983, 1_000_000] {
            for window in windows {
                let quota =
                    Quota::new(algorithm, limit, Duration::from_micros(window)).expect("valid");
                let charge = Charge::new("user123", &quota);
                // Start at the beginning of a window.
                clock.set(next_window(&clock, Duration::from_micros(window)));
                let start = clock.now();
                let mut admitted = 0_u128;
                let steps = 60;
                for step in 0..steps {
                    let available = left(&limiter, &charge).await;
                    if available > 0 {
                        assert!(acquire(&limiter, &charge.with_cost(available)).await.allowed);
                        admitted += u128::from(available);
                    }
                    // Pause for an irregular part of a window, but never until a bucket is full.
                    let pause = match algorithm {
                        Algorithm::TokenBucket | Algorithm::LeakyBucket if available > 0 => {
                            window * (step % 7) / 14
                        }
                        Algorithm::TokenBucket | Algorithm::LeakyBucket => {
                            let wait = limiter
                                .peek(&charge)
                                .await
                                .expect("a decision")
                                .retry_after
                                .as_micros();
                            u64::try_from(wait).expect("at most a window")
                        }
                        _ => window,
                    };
                    clock.advance(Duration::from_micros(pause));
                }
                let available = u128::from(left(&limiter, &charge).await);
                let elapsed = clock.now().saturating_duration_since(start).as_micros();
                // The initial units plus the refill since, up to a fraction of a unit.
                let exact = u128::from(limit) * elapsed / u128::from(window) + u128::from(limit);
                let found = admitted + available;
                assert!(
                    found.abs_diff(exact) <= 1 + exact / 1_000_000,
                    "{quota:?}: {found} instead of {exact}"
                );
                limiter.reset(&charge).await.expect("reset");
            }
        }
    }
}

proptest! {
    /// Checks the definition for every window that starts with an admitted request.
    #[test]
    fn sliding_log_never_exceeds_its_limit_in_any_window(
        limit in 1_u64..20,
        requests in proptest::collection::vec((0_u64..400, 1_u64..5), 1..200),
    ) {
        let clock = ManualClock::new();
        let limiter = in_memory(&clock);
        let quota = Quota::sliding_log(limit, Duration::from_millis(1)).expect("valid");
        let mut admitted: Vec<(u64, u64)> = Vec::new();
        for (pause, cost) in requests {
            clock.advance(Duration::from_micros(pause));
            let charge = Charge::new("user123", &quota).with_cost(cost.min(limit));
            if limiter.blocking().acquire(&charge).expect("a decision").allowed {
                admitted.push((clock.now().as_micros(), cost.min(limit)));
            }
        }
        for (start, _) in &admitted {
            let inside = admitted.iter().filter(|(time, _)| (*start..start + 1_000).contains(time));
            prop_assert!(inside.map(|(_, cost)| cost).sum::<u64>() <= limit);
        }
    }
}
