//! What a user of the library is promised, whatever the store: on memory and on a real Redis alike.

mod support;

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use proptest::prelude::*;
use support::{LONG, Redis, every_quota};
use tidegate::{
    Action, Algorithm, Charge, ChargeError, Clock, Decision, Error, Key, KeyError, Limiter,
    MAX_CHARGES, ManualClock, MemoryStore, Quota, Store,
};

const MICROSECOND: Duration = Duration::from_micros(1);
const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3600);

fn in_memory(clock: &ManualClock) -> Limiter {
    Limiter::new(MemoryStore::builder().clock(clock.clone()).build())
}

/// Runs the test on both stores, each on a clock of its own.
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
    a_denied_request_spends_nothing,
    a_client_that_keeps_hammering_stays_out_if_denials_count,
    several_charges_are_all_or_nothing,
    a_changed_limit_keeps_the_counts,
    a_report_is_recorded_beyond_the_limit_and_paid_back_by_time,
    a_changed_algorithm_starts_anew,
    after_a_step_back_of_an_hour_no_more_pass_and_none_is_locked_out,
    a_leaky_bucket_spaces_what_it_admits_evenly,
    bad_input_gets_its_own_error,
    a_wait_ends_exactly_when_it_is_admitted,
    a_wait_that_cannot_end_in_time_fails_at_once_and_spends_nothing,
    a_cancelled_wait_has_spent_nothing,
    a_wait_is_no_hammering,
    a_limit_that_is_lowered_does_not_let_a_bucket_be_forgotten,
    in_no_interval_does_a_log_admit_more_than_its_limit,
    the_long_run_rate_is_exact,
);

async fn acquire<S: Store>(limiter: &Limiter<S>, charge: &Charge<'_>) -> Decision {
    limiter.acquire(charge).await.expect("a decision")
}

async fn left<S: Store>(limiter: &Limiter<S>, charge: &Charge<'_>) -> u64 {
    // What acquire would leave, and what it would take.
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

async fn a_denied_request_spends_nothing<S: Store>(limiter: Limiter<S>, clock: ManualClock) {
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

async fn a_client_that_keeps_hammering_stays_out_if_denials_count<S: Store>(
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
        assert_eq!(admitted, 10, "only the first ten: then the hammering itself fills the window");
        let denied = acquire(&limiter, &charge).await;
        clock.advance(denied.retry_after);
        assert!(acquire(&limiter, &charge).await.allowed, "who waits as told gets in");
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
        assert!(acquire(&limiter, &full.with_cost(7)).await.allowed);
        let decisions = limiter.acquire_all(&charges).await.expect("decisions");
        for (other, decision) in decisions.iter().enumerate() {
            assert_eq!(decision.allowed, other != index);
            assert_eq!(decision.remaining, if other == index { 0 } else { 7 }, "none is spent");
        }
        let leading = Decision::most_restrictive(&decisions).expect("some");
        assert!(!leading.allowed);
        limiter.refund(&full.with_cost(7)).await.expect("refunded");
    }
    assert!(limiter.acquire_all(&[]).await.expect("nothing to decide").is_empty());
}

async fn a_report_is_recorded_beyond_the_limit_and_paid_back_by_time<S: Store>(
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
        assert!(is_exceeded().await, "{quota:?}: 150 of 100 is");
        // After the wait one unit is free, and a microsecond earlier it is not.
        clock.advance(over.retry_after.saturating_sub(MICROSECOND));
        assert!(!limiter.acquire(&charge).await.expect("decided").allowed, "{quota:?}");
        clock.advance(MICROSECOND);
        assert!(limiter.acquire(&charge).await.expect("decided").allowed, "{quota:?}");
        limiter.reset(&charge).await.expect("reset");
        // The overdraft is bounded: ten times the limit is recorded, and time pays it back.
        limiter.report(&charge.with_cost(u64::MAX)).await.expect("recorded");
        clock.advance(11 * HOUR);
        assert_eq!(limiter.peek(&charge).await.expect("looked").remaining, 99, "{quota:?}");
        limiter.reset(&charge).await.expect("reset");
    }
}

async fn a_changed_limit_keeps_the_counts<S: Store>(limiter: Limiter<S>, _clock: ManualClock) {
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

async fn a_changed_algorithm_starts_anew<S: Store>(limiter: Limiter<S>, _clock: ManualClock) {
    let quotas = every_quota(10, HOUR);
    for before in &quotas {
        for after in &quotas {
            let charge = |quota| Charge::new("user123", quota).with_policy("per-user").with_cost(6);
            assert!(acquire(&limiter, &charge(before)).await.allowed, "{before:?}");
            // Both buckets keep one kind of state; memory has one log for both encodings.
            let bucket = |quota: &Quota| {
                matches!(quota.algorithm(), Algorithm::TokenBucket | Algorithm::LeakyBucket)
            };
            let alike =
                before.algorithm() == after.algorithm() || (bucket(before) && bucket(after));
            if !alike {
                assert!(
                    acquire(&limiter, &charge(after)).await.allowed,
                    "{before:?} then {after:?}"
                );
                assert!(!acquire(&limiter, &charge(after)).await.allowed, "it counts: {after:?}");
            }
            limiter.reset(&charge(before)).await.expect("reset");
        }
    }
}

async fn after_a_step_back_of_an_hour_no_more_pass_and_none_is_locked_out<S: Store>(
    limiter: Limiter<S>,
    clock: ManualClock,
) {
    // Windows that an hour is a multiple of, and not; steps into the window before, and far back.
    for (window, back) in [(60, 3_600_000), (7, 3_600_000), (60, 12_000), (7, 1_400)] {
        let (window, back) = (Duration::from_secs(window), Duration::from_millis(back));
        step_back(&limiter, &clock, window, back).await;
    }
}

async fn step_back<S: Store>(
    limiter: &Limiter<S>,
    clock: &ManualClock,
    window: Duration,
    back: Duration,
) {
    let micros = u64::try_from(window.as_micros()).expect("short");
    for quota in every_quota(10, window) {
        let charge = Charge::new("user123", &quota);
        // Some late in one window, and as many as will fit early in the next.
        clock.set(clock.now().next_multiple_of(micros) + micros - micros / 20);
        for _ in 0..4 {
            assert!(acquire(limiter, &charge).await.allowed);
        }
        clock.advance(window / 10);
        while acquire(limiter, &charge).await.allowed {}
        let open = limiter.peek(&charge).await.expect("a decision").retry_after;
        clock.step_back(back);
        assert!(
            !limiter.peek(&charge).await.expect("a decision").allowed,
            "no more pass by a look: {quota:?}"
        );
        for _ in 0..3 {
            let denied = acquire(limiter, &charge).await;
            assert!(!denied.allowed, "no more pass: {quota:?}");
            assert!(denied.retry_after >= open.min(window / 10), "nor much sooner: {quota:?}");
            // Its own rule keeps a full sliding counter closed into the next window, by a tenth at
            // this limit.
            let most = if quota.algorithm() == Algorithm::SlidingCounter {
                window + window / 10
            } else {
                window
            };
            assert!(
                denied.retry_after <= most + Duration::from_micros(1),
                "{:?} of {quota:?}",
                denied.retry_after
            );
        }
        let stepped_back_at = clock.now();
        let denied = acquire(limiter, &charge).await;
        clock.advance(denied.retry_after);
        assert!(acquire(limiter, &charge).await.allowed, "none is locked out: {quota:?}");
        clock.set(stepped_back_at);
        clock.advance(back + 3 * window);
    }
}

async fn a_leaky_bucket_spaces_what_it_admits_evenly<S: Store>(
    limiter: Limiter<S>,
    clock: ManualClock,
) {
    let quota = Quota::leaky_bucket(10, SECOND).expect("valid").with_burst(5).expect("a bucket");
    let charge = Charge::new("user123", &quota);
    let start = clock.now();
    let mut turns = Vec::new();
    for step in 0_u64..100 {
        let decision = acquire(&limiter, &charge).await;
        if decision.allowed {
            turns.push(clock.now() + u64::try_from(decision.delay.as_micros()).expect("short"));
        }
        clock.advance(Duration::from_millis(7 * (step % 5)));
    }
    assert!(turns.len() > 10);
    assert_eq!(turns[0], start, "the first one need not wait");
    for pair in turns.windows(2) {
        assert!(pair[1] - pair[0] >= 100_000, "{turns:?}");
    }
}

async fn bad_input_gets_its_own_error<S: Store>(limiter: Limiter<S>, _clock: ManualClock) {
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
        // What was taken under a higher limit can be given back; and to forget a key costs nothing.
        if !matches!(error, Error::Charge(ChargeError::CostTooHigh { .. })) {
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
        .expect_err("one count, named twice");
    assert!(
        twice.to_string().contains(r#"share key "k" and policy "sliding-log-3600s""#),
        "{twice}"
    );
    let many = vec![charge("k"); MAX_CHARGES + 1];
    assert_eq!(limiter.acquire_all(&many).await, Err(Error::Charge(ChargeError::TooMany(129))));
    for key in ["{user}", "}:{", "a:b", "ключ", "%", "k"] {
        assert!(Key::new(key).is_ok());
        assert_eq!(
            acquire(&limiter, &charge(key)).await.remaining,
            9,
            "{key}: a count of its own, untouched so far"
        );
        assert_eq!(
            acquire(&limiter, &charge("x").with_policy(key)).await.remaining,
            9,
            "policy {key}"
        );
    }
}

/// Polls once; a wait on a manual clock that is not done is asleep.
fn poll<T>(future: std::pin::Pin<&mut impl Future<Output = T>>) -> Poll<T> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

async fn a_wait_ends_exactly_when_it_is_admitted<S: Store>(
    limiter: Limiter<S>,
    clock: ManualClock,
) {
    for quota in every_quota(4, SECOND) {
        let charge = Charge::new("user123", &quota).with_cost(3);
        while acquire(&limiter, &charge).await.allowed {}
        let retry_after = limiter.peek(&charge).await.expect("a decision").retry_after;
        let waiting = tokio::spawn({
            let (limiter, quota) = (limiter.clone(), quota.clone());
            async move { limiter.wait(&Charge::new("user123", &quota).with_cost(3), HOUR).await }
        });
        // A microsecond early it is still asleep; in time it is admitted, and sleeps on only for
        // its turn.
        asleep(&clock).await;
        clock.advance(retry_after.saturating_sub(MICROSECOND));
        asleep(&clock).await;
        assert!(!waiting.is_finished(), "{quota:?}");
        clock.advance(MICROSECOND);
        if quota.algorithm() == Algorithm::LeakyBucket {
            asleep(&clock).await;
            assert!(!waiting.is_finished(), "{quota:?}");
            clock.advance(Duration::from_millis(250));
        }
        let decision = waiting.await.expect("no panic").expect("a decision");
        assert!(decision.allowed, "{quota:?}");
        limiter.reset(&charge).await.expect("reset");
    }
}

/// Until somebody is asleep on this clock, which only its own steps can wake.
async fn asleep(clock: &ManualClock) {
    let waiting = async {
        while clock.sleepers() == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), waiting).await.expect("somebody falls asleep");
}

async fn a_wait_that_cannot_end_in_time_fails_at_once_and_spends_nothing<S: Store>(
    limiter: Limiter<S>,
    clock: ManualClock,
) {
    for quota in every_quota(4, SECOND) {
        let charge = Charge::new("user123", &quota);
        assert!(acquire(&limiter, &charge.with_cost(3)).await.allowed);
        let denied = limiter.peek(&charge.with_cost(3)).await.expect("a decision");
        // In a queue the turn comes only after all that is ahead.
        let queued = quota.algorithm() == Algorithm::LeakyBucket;
        let needed = if queued { denied.reset_after } else { denied.retry_after };
        let before = clock.now();
        let denied = limiter
            .wait(&charge.with_cost(3), needed.saturating_sub(MICROSECOND))
            .await
            .expect("a decision");
        assert!(!denied.allowed, "{quota:?}");
        assert_eq!(clock.now(), before);
        assert_eq!(left(&limiter, &charge).await, 1, "{quota:?}");
        if quota.algorithm() == Algorithm::LeakyBucket {
            let late = limiter.wait(&charge, Duration::from_millis(749)).await.expect("a decision");
            assert!(!late.allowed, "there is room, but its turn would come in 750 ms");
            assert_eq!(late.retry_after, Duration::from_millis(1));
            assert_eq!((late.remaining, late.reset_after), (1, Duration::from_millis(750)));
            assert_eq!(left(&limiter, &charge).await, 1, "nothing is spent");
        }
        limiter.reset(&charge).await.expect("reset");
    }
}

async fn a_cancelled_wait_has_spent_nothing<S: Store>(limiter: Limiter<S>, clock: ManualClock) {
    for quota in every_quota(4, SECOND) {
        let charge = Charge::new("user123", &quota).with_cost(4);
        assert!(acquire(&limiter, &charge).await.allowed);
        {
            let mut waiting = pin!(limiter.wait(&charge, HOUR));
            tokio::select! {
                biased;
                _ = &mut waiting => panic!("it waits"),
                () = asleep(&clock) => {}
            }
        }
        clock.advance(3 * SECOND);
        assert_eq!(left(&limiter, &charge).await, 4, "{quota:?}");
        limiter.reset(&charge).await.expect("reset");
    }
}

async fn a_wait_is_no_hammering<S: Store>(limiter: Limiter<S>, clock: ManualClock) {
    for quota in every_quota(1, SECOND)
        .into_iter()
        .filter(|quota| quota.algorithm() == Algorithm::SlidingLog)
    {
        let quota = quota.with_count_denied(true).expect("a log");
        let charge = Charge::new("user123", &quota);
        assert!(acquire(&limiter, &charge).await.allowed);
        clock.advance(Duration::from_millis(900));
        let denied = limiter.wait(&charge, Duration::from_millis(99)).await.expect("a decision");
        assert_eq!((denied.allowed, denied.retry_after), (false, Duration::from_millis(100)));
        clock.advance(Duration::from_millis(100));
        assert!(acquire(&limiter, &charge).await.allowed, "the wait that failed has not counted");
    }
}

async fn a_limit_that_is_lowered_does_not_let_a_bucket_be_forgotten<S: Store>(
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
    // Others come and go meanwhile, and what has expired is swept.
    clock.advance(2 * SECOND);
    for number in 0..2_000 {
        acquire(&limiter, &Charge::new(&format!("other-{number}"), &high)).await;
    }
    assert_eq!(
        left(&limiter, &charge(&low)).await,
        2,
        "two have come back in two seconds, not all"
    );
}

/// The definition itself, over every window that begins with an admitted request.
async fn in_no_interval_does_a_log_admit_more_than_its_limit<S: Store>(
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
                admitted.push((clock.now(), cost));
            }
        }
        assert!(admitted.len() > 100);
        for (start, _) in &admitted {
            let inside = admitted.iter().filter(|(time, _)| (*start..start + 1_000).contains(time));
            assert!(inside.map(|(_, cost)| cost).sum::<u64>() <= 7, "{quota:?}");
        }
    }
}

/// Takes whatever there is at odd times: what was admitted in the long run is L/W, to 0.01 %.
async fn the_long_run_rate_is_exact<S: Store>(limiter: Limiter<S>, clock: ManualClock) {
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
                // Windows of the clock: begin at the start of one.
                clock.set(clock.now().next_multiple_of(window));
                let start = clock.now();
                let mut admitted = 0_u128;
                let steps = 60;
                for step in 0..steps {
                    let there = left(&limiter, &charge).await;
                    if there > 0 {
                        assert!(acquire(&limiter, &charge.with_cost(there)).await.allowed);
                        admitted += u128::from(there);
                    }
                    // Never so long that a full bucket spills, and an odd part of a window.
                    let pause = match algorithm {
                        Algorithm::TokenBucket | Algorithm::LeakyBucket if there > 0 => {
                            window * (step % 7) / 14
                        }
                        Algorithm::TokenBucket | Algorithm::LeakyBucket => {
                            let wait = limiter
                                .peek(&charge)
                                .await
                                .expect("a decision")
                                .retry_after
                                .as_micros();
                            u64::try_from(wait).expect("no more than a window")
                        }
                        _ => window,
                    };
                    clock.advance(Duration::from_micros(pause));
                }
                let there = u128::from(left(&limiter, &charge).await);
                let elapsed = u128::from(clock.now() - start);
                // All that was there at first, and what has come back since; a part of a unit may
                // be under way.
                let exact = u128::from(limit) * elapsed / u128::from(window) + u128::from(limit);
                let found = admitted + there;
                assert!(
                    found.abs_diff(exact) <= 1 + exact / 1_000_000,
                    "{quota:?}: {found} instead of {exact}"
                );
                limiter.reset(&charge).await.expect("reset");
            }
        }
    }
}

#[test]
fn a_blocking_wait_needs_no_runtime() {
    let limiter = Limiter::new(MemoryStore::new());
    let quota = Quota::leaky_bucket(1_000, SECOND).expect("valid");
    let charge = Charge::new("user123", &quota);
    let start = std::time::Instant::now();
    for _ in 0..5 {
        assert!(limiter.blocking().wait(&charge, HOUR).expect("a decision").allowed);
    }
    assert!(start.elapsed() >= Duration::from_millis(4), "five requests, a millisecond apart");
}

#[test]
fn a_wait_is_asleep_until_its_time_and_not_a_microsecond_longer() {
    let clock = ManualClock::new();
    let limiter = in_memory(&clock);
    let quota = Quota::sliding_log(1, SECOND).expect("valid");
    let charge = Charge::new("user123", &quota);
    limiter.blocking().acquire(&charge).expect("a decision");
    let mut waiting = pin!(limiter.wait(&charge, HOUR));
    assert!(poll(waiting.as_mut()).is_pending());
    clock.advance(SECOND.saturating_sub(MICROSECOND));
    assert!(poll(waiting.as_mut()).is_pending());
    clock.advance(Duration::from_micros(1));
    assert!(matches!(poll(waiting.as_mut()), Poll::Ready(Ok(decision)) if decision.allowed));
}

proptest! {
    /// The definition itself, checked over every window that begins with an admitted request.
    #[test]
    fn in_no_interval_of_a_window_does_a_sliding_log_admit_more_than_the_limit(
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
                admitted.push((clock.now(), cost.min(limit)));
            }
        }
        for (start, _) in &admitted {
            let inside = admitted.iter().filter(|(time, _)| (*start..start + 1_000).contains(time));
            prop_assert!(inside.map(|(_, cost)| cost).sum::<u64>() <= limit);
        }
    }
}
