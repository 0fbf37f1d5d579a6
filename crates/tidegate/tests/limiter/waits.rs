//! `Limiter::wait`: on memory and on a real Redis.

use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tidegate::{Algorithm, Charge, Clock, Limiter, ManualClock, MemoryStore, Quota, Store};

use super::support::every_quota;
use super::{HOUR, MICROSECOND, SECOND, acquire, in_memory, left};

/// Polls once. A pending wait on a manual clock is asleep.
fn poll<T>(future: std::pin::Pin<&mut impl Future<Output = T>>) -> Poll<T> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

pub(super) async fn wait_ends_exactly_when_the_charge_is_admitted<S: Store>(
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
        // It sleeps until it is admitted, and a leaky bucket also through its delay.
        wait_for_sleeper(&clock).await;
        clock.advance(retry_after.saturating_sub(MICROSECOND));
        wait_for_sleeper(&clock).await;
        assert!(!waiting.is_finished(), "{quota:?}");
        clock.advance(MICROSECOND);
        if quota.algorithm() == Algorithm::LeakyBucket {
            wait_for_sleeper(&clock).await;
            assert!(!waiting.is_finished(), "{quota:?}");
            clock.advance(Duration::from_millis(250));
        }
        let decision = waiting.await.expect("no panic").expect("a decision");
        assert!(decision.allowed, "{quota:?}");
        limiter.reset(&charge).await.expect("reset");
    }
}

/// Waits until a caller sleeps on this clock.
async fn wait_for_sleeper(clock: &ManualClock) {
    let has_sleeper = async {
        while clock.sleepers() == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), has_sleeper).await.expect("a sleeper");
}

pub(super) async fn wait_beyond_its_timeout_is_denied_at_once_and_spends_nothing<S: Store>(
    limiter: Limiter<S>,
    clock: ManualClock,
) {
    for quota in every_quota(4, SECOND) {
        let charge = Charge::new("user123", &quota);
        assert!(acquire(&limiter, &charge.with_cost(3)).await.allowed);
        let denied = limiter.peek(&charge.with_cost(3)).await.expect("a decision");
        // A queued request waits until everything ahead of it has drained.
        let is_queue = quota.algorithm() == Algorithm::LeakyBucket;
        let needed = if is_queue { denied.reset_after } else { denied.retry_after };
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
            assert!(!late.allowed, "there is room, but with a delay of 750 ms");
            assert_eq!(late.retry_after, Duration::from_millis(1));
            assert_eq!((late.remaining, late.reset_after), (1, Duration::from_millis(750)));
            assert_eq!(left(&limiter, &charge).await, 1, "nothing is spent");
        }
        limiter.reset(&charge).await.expect("reset");
    }
}

pub(super) async fn cancelled_wait_spends_nothing<S: Store>(
    limiter: Limiter<S>,
    clock: ManualClock,
) {
    for quota in every_quota(4, SECOND) {
        let charge = Charge::new("user123", &quota).with_cost(4);
        assert!(acquire(&limiter, &charge).await.allowed);
        {
            let mut waiting = pin!(limiter.wait(&charge, HOUR));
            tokio::select! {
                biased;
                _ = &mut waiting => panic!("it must wait"),
                () = wait_for_sleeper(&clock) => {}
            }
        }
        clock.advance(3 * SECOND);
        assert_eq!(left(&limiter, &charge).await, 4, "{quota:?}");
        limiter.reset(&charge).await.expect("reset");
    }
}

pub(super) async fn denials_during_a_wait_are_not_counted<S: Store>(
    limiter: Limiter<S>,
    clock: ManualClock,
) {
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
        assert!(acquire(&limiter, &charge).await.allowed, "the denied wait was not counted");
    }
}

#[test]
fn blocking_wait_needs_no_runtime() {
    let limiter = Limiter::new(MemoryStore::new());
    let quota = Quota::leaky_bucket(1_000, SECOND).expect("valid");
    let charge = Charge::new("user123", &quota);
    let start = std::time::Instant::now();
    for _ in 0..5 {
        assert!(limiter.blocking().wait(&charge, HOUR).expect("a decision").allowed);
    }
    assert!(
        start.elapsed() >= Duration::from_millis(4),
        "five requests at intervals of a millisecond"
    );
}

#[test]
fn wait_sleeps_exactly_until_its_time() {
    let clock = ManualClock::new();
    let limiter = in_memory(&clock);
    let quota = Quota::sliding_log(1, SECOND).expect("valid");
    let charge = Charge::new("user123", &quota);
    let _ = limiter.blocking().acquire(&charge).expect("a decision");
    let mut waiting = pin!(limiter.wait(&charge, HOUR));
    assert!(poll(waiting.as_mut()).is_pending());
    clock.advance(SECOND.saturating_sub(MICROSECOND));
    assert!(poll(waiting.as_mut()).is_pending());
    clock.advance(Duration::from_micros(1));
    assert!(matches!(poll(waiting.as_mut()), Poll::Ready(Ok(decision)) if decision.allowed));
}
