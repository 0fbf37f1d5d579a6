//! The deny cache around memory. Many tests compare it with a second store that has no cache.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use tidegate::{
    Action, Algorithm, Charge, Clock, Decision, DenyCache, Limiter, ManualClock, MemoryStore,
    Quota, Source, Store, Timestamp,
};

use crate::flaky::{Flaky, down};
use crate::support::LONG;

const MINUTE: Duration = Duration::from_secs(60);

fn quota(limit: u64) -> Quota {
    Quota::sliding_log(limit, MINUTE).expect("valid")
}

fn memory(clock: &ManualClock) -> MemoryStore {
    MemoryStore::builder().clock(clock.clone()).build()
}

/// Creates a limiter with a cache around a store that counts its calls.
fn counted(clock: &ManualClock) -> (Flaky, Limiter<DenyCache<Flaky>>) {
    let store = Flaky::on(clock);
    (store.clone(), Limiter::new(DenyCache::new(store)))
}

#[tokio::test]
async fn a_denial_is_repeated_without_the_store_and_counts_down() {
    let clock = ManualClock::new();
    let (store, limiter) = counted(&clock);
    let quota = quota(2);
    let charge = Charge::new("u", &quota);
    for _ in 0..2 {
        assert!(limiter.acquire(&charge).await.expect("decided").allowed);
    }
    clock.advance(Duration::from_secs(1));
    let first = limiter.acquire(&charge).await.expect("decided");
    assert_eq!((first.source, first.retry_after), (Source::Store, Duration::from_secs(59)));
    assert_eq!(store.calls(), 3);
    for (action, passed) in [(Action::Acquire, 0), (Action::Peek, 2), (Action::Acquire, 4)] {
        clock.set(Timestamp::from_micros(start_time() + (1 + passed) * 1_000_000));
        let again = limiter.decide(action, &charge).await.expect("decided");
        let wait = Duration::from_secs(59 - passed);
        let expected = Decision::deny(first.limit, wait)
            .with_remaining(first.remaining)
            .with_source(Source::DenyCache);
        assert_eq!(again, expected);
    }
    assert_eq!(store.calls(), 3, "the store was not called");
    clock.set(Timestamp::from_micros(start_time() + 60 * 1_000_000));
    assert!(limiter.acquire(&charge).await.expect("decided").allowed);
}

#[tokio::test]
async fn an_entry_lives_five_seconds_and_its_wait_stays_exact() {
    let clock = ManualClock::new();
    let (store, limiter) = counted(&clock);
    let quota = quota(1);
    let charge = Charge::new("u", &quota);
    assert!(limiter.acquire(&charge).await.expect("decided").allowed);
    for passed in 0..60_000 {
        clock.set(Timestamp::from_micros(start_time() + passed * 1_000));
        let denied = limiter.acquire(&charge).await.expect("decided");
        assert_eq!(
            (denied.allowed, denied.retry_after),
            (false, Duration::from_millis(60_000 - passed))
        );
    }
    assert!((13..16).contains(&store.calls()), "{} calls in a minute", store.calls());
}

fn start_time() -> u64 {
    ManualClock::new().now().as_micros()
}

#[tokio::test]
async fn an_entry_applies_only_to_its_count_quota_and_cost() {
    let clock = ManualClock::new();
    let (store, limiter) = counted(&clock);
    let (quota, raised) = (quota(4), quota(5));
    let charge = Charge::new("u", &quota).with_policy("p");
    assert!(limiter.acquire(&charge.with_cost(2)).await.expect("decided").allowed);
    assert!(!limiter.acquire(&charge.with_cost(3)).await.expect("decided").allowed);
    let before = store.calls();
    let source = async |charge: &Charge<'_>| limiter.peek(charge).await.expect("decided").source;
    assert_eq!(source(&charge.with_cost(3)).await, Source::DenyCache);
    assert_eq!(source(&charge.with_cost(4)).await, Source::Store, "its wait may be longer");
    assert_eq!(source(&charge.with_cost(4)).await, Source::DenyCache);
    assert_eq!(source(&charge.with_cost(2)).await, Source::Store);
    assert_eq!(
        source(&Charge::new("v", &quota).with_policy("p").with_cost(3)).await,
        Source::Store
    );
    assert_eq!(
        source(&Charge::new("u", &quota).with_policy("q").with_cost(3)).await,
        Source::Store
    );
    assert_eq!(store.calls() - before, 4);
    // A raised limit takes effect at once, and drops the entry of the old one.
    let more = Charge::new("u", &raised).with_policy("p").with_cost(3);
    assert!(limiter.acquire(&more).await.expect("decided").allowed);
    assert_eq!(source(&charge.with_cost(3)).await, Source::Store);
}

#[tokio::test]
async fn later_admissions_lengthen_the_wait() {
    for algorithm in Algorithm::ALL {
        let clock = ManualClock::new();
        let (_, limiter) = counted(&clock);
        let quota = Quota::new(algorithm, 10, Duration::from_secs(10)).expect("valid");
        let charge = Charge::new("u", &quota);
        assert!(limiter.acquire(&charge.with_cost(5)).await.expect("decided").allowed);
        assert!(!limiter.acquire(&charge.with_cost(10)).await.expect("decided").allowed);
        assert_eq!(
            limiter.peek(&charge.with_cost(10)).await.expect("decided").source,
            Source::DenyCache
        );
        clock.advance(Duration::from_secs(1));
        assert!(limiter.acquire(&charge).await.expect("decided").allowed);
        let denied = limiter.acquire(&charge.with_cost(10)).await.expect("decided");
        assert!(!denied.allowed);
        clock.advance(denied.retry_after);
        assert!(
            limiter.acquire(&charge.with_cost(10)).await.expect("decided").allowed,
            "{algorithm}: {denied:?}"
        );
    }
}

#[tokio::test]
async fn a_cached_bucket_shows_drained_units_as_remaining() {
    let clock = ManualClock::new();
    let (store, limiter) = counted(&clock);
    let quota = Quota::token_bucket(10, Duration::from_secs(10)).expect("valid");
    let charge = Charge::new("u", &quota);
    assert!(limiter.acquire(&charge.with_cost(10)).await.expect("decided").allowed);
    assert_eq!(limiter.acquire(&charge.with_cost(9)).await.expect("decided").remaining, 0);
    for (millis, remaining) in [(999, 0), (1, 1), (1_999, 2), (1, 3)] {
        clock.advance(Duration::from_millis(millis));
        let denied = limiter.acquire(&charge.with_cost(9)).await.expect("decided");
        assert_eq!((denied.source, denied.remaining), (Source::DenyCache, remaining));
    }
    assert_eq!(store.calls(), 2, "the store was not called");
}

/// A client that keeps retrying on a bucket causes about as many calls as it has admissions, and
/// gets the decisions that the store would make.
#[tokio::test]
async fn retries_on_a_bucket_cause_one_call_per_unit() {
    const SECONDS: u64 = 20;
    for (algorithm, cost) in
        [(Algorithm::TokenBucket, 1), (Algorithm::LeakyBucket, 1), (Algorithm::TokenBucket, 3)]
    {
        let clock = ManualClock::new();
        let (store, limiter) = counted(&clock);
        let uncached = memory(&clock);
        let quota = Quota::new(algorithm, 200, Duration::from_secs(1)).expect("valid");
        let charge = Charge::new("u", &quota).with_cost(cost);
        let (mut admitted, mut by_cache) = (0, 0);
        for _ in 0..SECONDS * 1_000 {
            for _ in 0..5 {
                let found = limiter.acquire(&charge).await.expect("decided");
                let truth = uncached.decide(Action::Acquire, &charge).await.expect("decided");
                assert_eq!(found.with_source(Source::Store), truth);
                admitted += u64::from(found.allowed);
                by_cache += u64::from(found.source == Source::DenyCache);
            }
            clock.advance(Duration::from_millis(1));
        }
        assert!(admitted >= 200 * SECONDS / cost, "{admitted}");
        // One more call for each entry that has expired or ended slightly too early.
        let calls = store.calls();
        assert!(
            calls <= admitted + admitted / 50 + SECONDS,
            "{algorithm}: {calls} calls, {admitted} admitted"
        );
        assert_eq!(calls + by_cache, SECONDS * 5_000);
    }
}

#[tokio::test]
async fn many_costs_of_one_count_are_denied_by_the_entry_of_a_lower_cost() {
    let clock = ManualClock::new();
    let (store, limiter) = counted(&clock);
    let quota = quota(1_000);
    let charge = Charge::new("u", &quota);
    assert!(limiter.acquire(&charge.with_cost(1_000)).await.expect("decided").allowed);
    for cost in 1..=1_000 {
        assert!(!limiter.acquire(&charge.with_cost(cost)).await.expect("decided").allowed);
    }
    assert!(store.calls() < 10, "{} calls", store.calls());
    assert!(
        limiter.acquire(&charge.with_cost(1_001)).await.is_err(),
        "a cost above the limit is still an error"
    );
}

/// A client that keeps retrying on a quota that counts denials costs two calls per 100 ms, and is
/// denied for as long as by the store.
#[tokio::test(start_paused = true)]
async fn counted_denials_are_recorded_in_bulk() {
    let clock = ManualClock::new();
    let (store, limiter) = counted(&clock);
    let uncached = memory(&clock);
    let quota = quota(10).with_count_denied(true).expect("a log");
    let charge = Charge::new("u", &quota);
    let tolerance = Duration::from_millis(100);
    for number in 0..10_000_u64 {
        let found = limiter.acquire(&charge).await.expect("decided");
        let truth = uncached.decide(Action::Acquire, &charge).await.expect("decided");
        assert_eq!((found.allowed, found.remaining), (truth.allowed, truth.remaining));
        let (shortest, longest) =
            (truth.retry_after.saturating_sub(tolerance), truth.retry_after + tolerance);
        assert!((shortest..=longest).contains(&found.retry_after), "{number}: {found:?} {truth:?}");
        clock.advance(Duration::from_micros(100));
    }
    assert!(store.calls() < 45, "{} calls for 10,000 requests in a second", store.calls());
    // The last denials are recorded without another request.
    let (calls, last) = (store.calls(), clock.now());
    clock.advance(tolerance);
    tokio::time::sleep(tolerance + Duration::from_millis(1)).await;
    assert_eq!(store.calls(), calls + 1);
    assert_eq!(store.remaining(&charge).await, 0);
    let minute = Duration::from_secs(60);
    clock.set(last.saturating_add(minute).saturating_sub(Duration::from_millis(1)));
    assert!(!limiter.peek(&charge).await.expect("decided").allowed);
    clock.set(last.saturating_add(minute + Duration::from_millis(100)));
    assert_eq!(store.remaining(&charge).await, 10, "no denial is recorded later than that");
    assert!(limiter.acquire(&charge).await.expect("decided").allowed);
}

#[tokio::test(start_paused = true)]
async fn charges_that_count_denials_need_an_entry_each() {
    let clock = ManualClock::new();
    let (store, limiter) = counted(&clock);
    let (counting, plain) = (quota(1).with_count_denied(true).expect("a log"), self::quota(1));
    let (charge, other) = (Charge::new("u", &counting), Charge::new("v", &plain));
    for _ in 0..2 {
        let _ = limiter.acquire(&other).await.expect("decided");
    }
    let before = store.calls();
    // The other charge is denied, but only the store knows whether this denial counts for the first
    // one.
    for _ in 0..3 {
        assert!(!limiter.acquire_all(&[charge, other]).await.expect("decided")[1].allowed);
    }
    assert_eq!(store.calls() - before, 3);
    assert!(limiter.acquire(&charge).await.expect("decided").allowed);
    assert!(!limiter.acquire_all(&[charge, other]).await.expect("decided")[0].allowed);
    let before = store.calls();
    let both = limiter.acquire_all(&[charge, other]).await.expect("decided");
    assert!(both.iter().all(|decision| !decision.allowed && decision.source == Source::DenyCache));
    assert_eq!(store.calls(), before);
}

#[tokio::test]
async fn one_entry_denies_a_request_and_the_other_decisions_repeat_the_store() {
    let clock = ManualClock::new();
    let (store, limiter) = counted(&clock);
    let (scarce, ample) = (quota(1), quota(10));
    let both = |user: &'static str| {
        [Charge::new(user, &ample).with_policy("ample"), Charge::new("ip", &scarce)]
    };
    assert!(
        limiter
            .acquire_all(&both("a"))
            .await
            .expect("decided")
            .iter()
            .all(|decision| decision.allowed)
    );
    let by_store = limiter.acquire_all(&both("a")).await.expect("decided");
    let before = store.calls();
    let again = limiter.acquire_all(&both("a")).await.expect("decided");
    let cached = |decision: &Decision| decision.with_source(Source::DenyCache);
    assert_eq!(again, by_store.iter().map(cached).collect::<Vec<_>>().into());
    assert_eq!((again[0].allowed, again[0].remaining, again[1].allowed), (true, 9, false));
    // The same address with new users.
    for user in ["b", "c", "d"] {
        let others = limiter.acquire_all(&both(user)).await.expect("decided");
        assert_eq!((others[0].allowed, others[0].remaining, others[1].allowed), (true, 10, false));
    }
    assert_eq!(limiter.peek(&both("a")[1]).await.expect("decided").source, Source::DenyCache);
    assert_eq!(store.calls(), before, "the store was not called");
    let refund = both("a")[1].with_charged_at(clock.now());
    let _ = limiter.refund(&refund).await.expect("refunded");
    assert!(
        limiter
            .acquire_all(&both("e"))
            .await
            .expect("decided")
            .iter()
            .all(|decision| decision.allowed)
    );
}

#[tokio::test]
async fn a_cached_denial_needs_no_store_and_a_failure_is_not_cached() {
    let clock = ManualClock::new();
    let (store, limiter) = counted(&clock);
    let quota = quota(1);
    let (charge, other) = (Charge::new("u", &quota), Charge::new("v", &quota));
    for _ in 0..2 {
        let _ = limiter.acquire(&charge).await.expect("decided");
    }
    store.set_fault(down());
    assert_eq!(limiter.acquire(&charge).await.expect("decided").source, Source::DenyCache);
    assert!(limiter.acquire(&other).await.is_err());
    // The store may have made a refund that failed.
    assert!(limiter.refund(&charge.with_charged_at(clock.now())).await.is_err());
    assert!(limiter.acquire(&charge).await.is_err());
}

#[tokio::test]
async fn a_flood_of_denied_keys_exceeds_no_bound_and_keeps_the_hot_key() {
    const MAX_ENTRIES: usize = 10_000;
    let clock = ManualClock::new();
    let store = Flaky::on(&clock);
    let cache = DenyCache::builder(store.clone()).max_entries(MAX_ENTRIES).build();
    let quota = Quota::token_bucket(1, LONG).expect("valid");
    let hot = Charge::new("hot", &quota);
    for _ in 0..2 {
        let _ = cache.decide(Action::Acquire, &hot).await.expect("decided");
    }
    let mut hot_calls = 0;
    for number in 0..500_000_u32 {
        let key = number.to_string();
        let charge = Charge::new(&key, &quota);
        // The first is admitted, the second denied.
        for _ in 0..2 {
            let _ = cache.decide(Action::Acquire, &charge).await.expect("decided");
        }
        if number % 100 == 0 {
            let before = store.calls();
            assert!(!cache.decide(Action::Acquire, &hot).await.expect("decided").allowed);
            hot_calls += store.calls() - before;
        }
        // Keeps the wrapped memory store small.
        let _ = cache.store().decide(Action::Reset, &charge).await.expect("reset");
    }
    let entries = cache.entries();
    assert!((MAX_ENTRIES * 9 / 10..=MAX_ENTRIES).contains(&entries), "{entries}");
    assert!(hot_calls <= 5, "{hot_calls} calls for 5,000 requests of the hot key");
    cache.clear();
    assert_eq!(cache.entries(), 0);
}

#[test]
fn a_cached_denial_does_not_allocate() {
    let cache = DenyCache::new(MemoryStore::new());
    let quota = Quota::sliding_log(1, LONG).expect("valid");
    let charge = Charge::new("user123", &quota).with_policy("per-user");
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    runtime.block_on(async {
        for _ in 0..2 {
            let _ = cache.decide(Action::Acquire, &charge).await.expect("decided");
        }
    });
    let mut hits = 0;
    let counted = allocation_counter::measure(|| {
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        for _ in 0..100 {
            let call = std::pin::pin!(cache.decide(Action::Acquire, &charge));
            if let std::task::Poll::Ready(Ok(decision)) = call.poll(&mut context) {
                hits += u32::from(decision.source == Source::DenyCache);
            }
        }
    });
    assert_eq!((hits, counted.count_total), (100, 0));
}

#[derive(Debug, Clone)]
enum Step {
    One { action: Action, count: usize, quota: usize, cost: u64 },
    Several { action: Action, quota: usize, costs: [u64; 3] },
    Advance(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let action = prop_oneof![
        12 => Just(Action::Acquire), 4 => Just(Action::Peek), 2 => Just(Action::Refund),
        1 => Just(Action::Reset), 1 => Just(Action::ChargeUpTo),
    ];
    let both =
        prop_oneof![3 => Just(Action::Acquire), 1 => Just(Action::Peek), 1 => Just(Action::Refund)];
    prop_oneof![
        6 => (action, 0..3_usize, 0..10_usize, 1..4_u64)
            // Mostly the first quota.
            .prop_map(|(action, count, quota, cost)| {
                Step::One { action, count, quota: quota.saturating_sub(7), cost }
            }),
        2 => (both, 0..10_usize, [1..4_u64, 1..4_u64, 1..4_u64])
            .prop_map(|(action, quota, costs)| {
                Step::Several { action, quota: quota.saturating_sub(7), costs }
            }),
        3 => (1..40_000_u64).prop_map(Step::Advance),
        1 => (1..2_000_000_u64).prop_map(Step::Advance),
    ]
}

/// The second store, which is called for every request, denies whenever the cache does.
#[test]
fn no_cached_denial_could_have_been_an_admission() {
    let cases = (0..5_usize, 1..6_u64, proptest::collection::vec(step(), 1..120));
    let hits = AtomicU64::new(0);
    let mut runner = TestRunner::new(ProptestConfig::with_cases(1_000));
    let run = runner.run(&cases, |(kind, limit, steps)| {
        hits.fetch_add(compare(kind, limit, &steps)?, Ordering::Relaxed);
        Ok(())
    });
    run.expect("the two agree");
    let hits = hits.into_inner();
    assert!(hits > 1_000, "{hits} hits");
}

/// A count of a sliding log, whose units expire all at once, is continued as a bucket.
#[test]
fn the_wait_of_a_bucket_that_continues_a_log_is_not_too_long() {
    let acquire = |quota, cost| Step::One { action: Action::Acquire, count: 0, quota, cost };
    let steps = [
        acquire(2, 3),
        Step::Advance(60_000),
        acquire(0, 3),
        Step::Advance(40_000),
        acquire(0, 3),
        acquire(0, 3),
        Step::Advance(20_000),
        acquire(0, 3),
    ];
    let leaky_bucket = 4;
    assert_eq!(compare(leaky_bucket, 5, &steps).expect("the two agree"), 1);
}

/// Runs the steps, and returns the number of cache hits.
fn compare(kind: usize, limit: u64, steps: &[Step]) -> Result<u64, TestCaseError> {
    let algorithm = Algorithm::ALL[kind];
    let window = Duration::from_millis(100);
    // One quota, the same with a raised limit, and one with a different algorithm.
    let quotas = [
        Quota::new(algorithm, limit, window).expect("valid"),
        Quota::new(algorithm, limit + 2, window).expect("valid"),
        Quota::new(Algorithm::ALL[(kind + 1) % 5], limit, window * 2).expect("valid"),
    ];
    let keys = ["a", "b", "c"];
    let clock = ManualClock::new();
    let (cache, uncached) =
        (DenyCache::builder(memory(&clock)).max_entries(16).build(), memory(&clock));
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    let mut hits = 0;
    for step in steps {
        let (action, charges): (Action, Vec<Charge<'_>>) = match *step {
            Step::Advance(micros) => {
                clock.advance(Duration::from_micros(micros));
                continue;
            }
            Step::One { action, count, quota, cost } => (
                action,
                vec![Charge::new(keys[count], &quotas[quota]).with_policy("p").with_cost(cost)],
            ),
            Step::Several { action, quota, costs } => {
                let charge =
                    |(key, cost)| Charge::new(key, &quotas[quota]).with_policy("p").with_cost(cost);
                (action, keys.into_iter().zip(costs).map(charge).collect())
            }
        };
        if charges.iter().any(|charge| charge.cost() > charge.quota().burst()) {
            continue;
        }
        let (found, truth) = match &*charges {
            [one] => (
                vec![runtime.block_on(cache.decide(action, one)).expect("decided")],
                vec![runtime.block_on(uncached.decide(action, one)).expect("decided")],
            ),
            all => (
                runtime.block_on(cache.decide_all(action, all)).expect("decided"),
                runtime.block_on(uncached.decide_all(action, all)).expect("decided"),
            ),
        };
        let allowed = |decisions: &[Decision]| decisions.iter().all(|decision| decision.allowed);
        prop_assert_eq!(allowed(&found), allowed(&truth), "{:?}: {:?} {:?}", action, found, truth);
        for (found, truth) in found.iter().zip(&truth) {
            if found.source == Source::DenyCache {
                hits += 1;
                prop_assert!(found.allowed || !truth.allowed, "{:?} {:?}", found, truth);
                // Two waits are rounded up before they are added.
                let longest = truth.retry_after + Duration::from_micros(1);
                prop_assert!(found.retry_after <= longest, "{:?} {:?}", found, truth);
            } else {
                prop_assert_eq!(found, truth);
            }
        }
    }
    Ok(hits)
}
