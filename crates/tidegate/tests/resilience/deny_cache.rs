//! The deny cache around memory: its calls to the store, and what ends an entry.

use std::time::Duration;

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
    for algorithm in Algorithm::RATES {
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

/// A client that keeps retrying on a bucket causes two calls per admission: itself, and the denial
/// that is repeated until the next unit has drained.
#[tokio::test]
async fn retries_on_a_bucket_cause_two_calls_per_admission() {
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
                assert_eq!((found.allowed, found.retry_after), (truth.allowed, truth.retry_after));
                admitted += u64::from(found.allowed);
                by_cache += u64::from(found.source == Source::DenyCache);
            }
            clock.advance(Duration::from_millis(1));
        }
        assert!(admitted >= 200 * SECONDS / cost, "{admitted}");
        // One more call for each entry that ended slightly too early.
        let calls = store.calls();
        assert!(
            calls <= 2 * admitted + admitted / 50,
            "{algorithm}: {calls} calls, {admitted} admitted"
        );
        assert_eq!(calls + by_cache, SECONDS * 5_000);
    }
}

/// Each denial changes the count, so only the store can decide the next one, and it does in one
/// call: within its own timeout, however many charges count denials.
#[tokio::test(start_paused = true)]
async fn a_request_that_counts_denials_is_one_call() {
    let clock = ManualClock::new();
    let (store, limiter) = counted(&clock);
    let quota = quota(1).with_count_denied(true).expect("a log");
    let keys = ["a", "b", "c", "d", "e", "f"];
    let charges = keys.map(|key| Charge::new(key, &quota));
    for requests in 1..=10 {
        for charge in &charges {
            let _ = limiter.acquire(charge).await.expect("decided");
        }
        let _ = limiter.acquire_all(&charges).await.expect("decided");
        clock.advance(Duration::from_millis(30));
        tokio::time::sleep(Duration::from_millis(30)).await;
        assert_eq!(store.calls(), requests * 7);
    }
}

#[tokio::test]
async fn a_denied_request_of_several_charges_is_repeated_as_a_whole() {
    let clock = ManualClock::new();
    let (store, limiter) = counted(&clock);
    let (scarce, ample) = (quota(1), quota(10));
    let both = |user: &'static str| {
        [Charge::new(user, &ample).with_policy("ample"), Charge::new("ip", &scarce)]
    };
    assert!(limiter.acquire_all(&both("a")).await.expect("decided").is_allowed());
    let by_store = limiter.acquire_all(&both("a")).await.expect("decided");
    let before = store.calls();
    let again = limiter.acquire_all(&both("a")).await.expect("decided");
    let cached = |decision: &Decision| decision.with_source(Source::DenyCache);
    assert_eq!(again, by_store.iter().map(cached).collect::<Vec<_>>().into());
    assert_eq!((again[0].allowed, again[0].remaining, again[1].allowed), (true, 9, false));
    assert_eq!(store.calls(), before, "the store was not called");
    // Another user, another order or a part of the request is another request.
    let [user, ip] = both("a");
    for other in [&both("b")[..], &[ip, user], &[ip]] {
        let decided = limiter.acquire_all(other).await.expect("decided");
        assert!(decided.iter().all(|decision| decision.source == Source::Store));
    }
    // An admission on either count ends it.
    assert!(limiter.acquire(&user).await.expect("decided").allowed);
    let decided = limiter.acquire_all(&both("a")).await.expect("decided");
    assert_eq!((decided[0].source, decided[0].remaining), (Source::Store, 8));
}

/// More units may become free than a denial shows if the request lacks several, or one of its
/// limits allows it. It is then repeated for one second instead of five.
#[tokio::test]
async fn a_denial_that_may_show_too_few_units_is_repeated_for_a_second() {
    let clock = ManualClock::new();
    let (store, limiter) = counted(&clock);
    let quota = Quota::token_bucket(10, Duration::from_secs(1_000)).expect("valid");
    let hour = Quota::fixed_window(10, Duration::from_secs(3_600)).expect("valid");
    let charge = Charge::new("u", &quota);
    let both = [charge, Charge::new("u", &hour)];
    assert!(limiter.acquire(&charge.with_cost(10)).await.expect("decided").allowed);
    let calls = async |charges: &[Charge<'_>]| {
        let before = store.calls();
        for _ in 0..8_000 {
            assert!(!limiter.acquire_all(charges).await.expect("decided").is_allowed());
            clock.advance(Duration::from_millis(1));
        }
        store.calls() - before
    };
    assert_eq!(calls(&[charge.with_cost(9)]).await, 8);
    assert_eq!(calls(&both).await, 2, "an untouched limit cannot change");
    limiter.reset(&charge).await.expect("reset");
    let _ = limiter.acquire_all(&both).await.expect("decided");
    assert!(limiter.acquire(&charge.with_cost(9)).await.expect("decided").allowed);
    assert_eq!(calls(&both).await, 8);
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
    // A few admissions share its version.
    assert!(hot_calls <= 20, "{hot_calls} calls for 5,000 requests of the hot key");
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
            let call = std::pin::pin!(cache.decide(Action::Acquire, &charge).into_future());
            if let std::task::Poll::Ready(Ok(decision)) = call.poll(&mut context) {
                hits += u32::from(decision.source == Source::DenyCache);
            }
        }
    });
    assert_eq!((hits, counted.count_total), (100, 0));
}
