//! The deny cache around memory: each answer from it beside that of a twin which is always asked.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use tidegate::{
    Action, Algorithm, Charge, Clock, Decision, DenyCache, Limiter, ManualClock, MemoryStore,
    Quota, Source, Store, StoreError,
};
use tokio::sync::Semaphore;

use crate::flaky::{Flaky, gone};
use crate::support::LONG;

const MINUTE: Duration = Duration::from_secs(60);

fn quota(limit: u64) -> Quota {
    Quota::sliding_log(limit, MINUTE).expect("valid")
}

fn memory(clock: &ManualClock) -> MemoryStore {
    MemoryStore::builder().clock(clock.clone()).build()
}

/// Around a store that counts how often it is asked.
fn counted(clock: &ManualClock) -> (Flaky, Limiter<DenyCache<Flaky>>) {
    let store = Flaky::on(clock);
    (store.clone(), Limiter::new(DenyCache::new(store)))
}

#[tokio::test]
async fn a_denial_is_answered_without_the_store_and_counts_down_until_it_is_over() {
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
        clock.set(memory_noon().saturating_add(Duration::from_secs(1 + passed)));
        let again = limiter.decide(action, &charge).await.expect("decided");
        let left = Duration::from_secs(59 - passed);
        let told =
            Decision { source: Source::DenyCache, retry_after: left, reset_after: left, ..first };
        assert_eq!(again, told);
    }
    assert_eq!(store.calls(), 3, "the store was not asked");
    clock.set(memory_noon().saturating_add(Duration::from_secs(60)));
    assert!(limiter.acquire(&charge).await.expect("decided").allowed);
}

#[tokio::test]
async fn an_entry_lives_five_seconds_and_its_wait_stays_the_real_one() {
    let clock = ManualClock::new();
    let (store, limiter) = counted(&clock);
    let quota = quota(1);
    let charge = Charge::new("u", &quota);
    assert!(limiter.acquire(&charge).await.expect("decided").allowed);
    for passed in 0..60_000 {
        clock.set(memory_noon().saturating_add(Duration::from_millis(passed)));
        let denied = limiter.acquire(&charge).await.expect("decided");
        assert_eq!(
            (denied.allowed, denied.retry_after),
            (false, Duration::from_millis(60_000 - passed))
        );
    }
    assert!((13..16).contains(&store.calls()), "{} calls in a minute", store.calls());
}

fn memory_noon() -> tidegate::Timestamp {
    ManualClock::new().now()
}

#[tokio::test]
async fn only_the_same_count_quota_and_cost_is_denied() {
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
    // A raised limit is seen at once; and what was denied by the old one is not taken up again.
    let more = Charge::new("u", &raised).with_policy("p").with_cost(3);
    assert!(limiter.acquire(&more).await.expect("decided").allowed);
    assert_eq!(source(&charge.with_cost(3)).await, Source::Store);
}

#[tokio::test]
async fn what_was_admitted_since_is_in_the_wait() {
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
async fn a_bucket_that_drains_has_more_left() {
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
    assert_eq!(store.calls(), 2, "the store was not asked");
}

/// A client that hammers a bucket asks the store about as often as it is admitted, and hears what
/// the store would say.
#[tokio::test]
async fn a_hammered_bucket_asks_the_store_once_per_unit() {
    const SECONDS: u64 = 20;
    for (algorithm, cost) in
        [(Algorithm::TokenBucket, 1), (Algorithm::LeakyBucket, 1), (Algorithm::TokenBucket, 3)]
    {
        let clock = ManualClock::new();
        let (store, limiter) = counted(&clock);
        let twin = memory(&clock);
        let quota = Quota::new(algorithm, 200, Duration::from_secs(1)).expect("valid");
        let charge = Charge::new("u", &quota).with_cost(cost);
        let (mut admitted, mut by_cache) = (0, 0);
        for _ in 0..SECONDS * 1_000 {
            for _ in 0..5 {
                let found = limiter.acquire(&charge).await.expect("decided");
                let truth = twin.decide(Action::Acquire, &charge).await.expect("decided");
                assert_eq!(Decision { source: Source::Store, ..found }, truth);
                admitted += u64::from(found.allowed);
                by_cache += u64::from(found.source == Source::DenyCache);
            }
            clock.advance(Duration::from_millis(1));
        }
        assert!(admitted >= 200 * SECONDS / cost, "{admitted}");
        // One more for each entry that has expired or was a hair too early.
        let asked = store.calls();
        assert!(
            asked <= admitted + admitted / 50 + SECONDS,
            "{algorithm}: {asked} calls, {admitted} admitted"
        );
        assert_eq!(asked + by_cache, SECONDS * 5_000);
    }
}

#[tokio::test]
async fn a_bucket_ask_in_flight_counts_and_one_without_an_answer_does_not() {
    let clock = ManualClock::new();
    let late = Late { memory: memory(&clock), ..Late::letting(2, 0) };
    let (answers, cache) = (Arc::clone(&late.answers), DenyCache::new(late));
    let quota = Quota::token_bucket(10, Duration::from_secs(1)).expect("valid");
    let charge = Charge::new("u", &quota).with_cost(10);
    let ask = async || cache.decide(Action::Acquire, &charge).await.expect("decided");
    assert!(ask().await.allowed);
    assert!(!ask().await.allowed);
    for is_answered in [false, true] {
        clock.advance(Duration::from_secs(1));
        let mut in_flight = Box::pin(cache.decide(Action::Acquire, &charge));
        assert!(poll_once(in_flight.as_mut()).await.is_none(), "it is let through to the store");
        let next = ask().await;
        assert_eq!((next.allowed, next.source), (false, Source::DenyCache));
        assert_eq!(next.retry_after, Duration::from_secs(1));
        if is_answered {
            answers.add_permits(1);
            assert!(in_flight.await.expect("decided").allowed);
            assert_eq!(ask().await.source, Source::DenyCache);
        } else {
            drop(in_flight);
            answers.add_permits(1);
            let next = ask().await;
            assert_eq!(
                (next.allowed, next.source),
                (false, Source::Store),
                "the store is asked again"
            );
        }
    }
}

#[tokio::test]
async fn many_costs_of_one_count_are_denied_by_a_lower_one() {
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
        "what can never pass is an error as before"
    );
}

/// A client that hammers a quota which counts denials costs two calls every 100 ms, and stays out
/// as long as by the store.
#[tokio::test(start_paused = true)]
async fn denials_that_count_are_recorded_in_bulk() {
    let clock = ManualClock::new();
    let (store, limiter) = counted(&clock);
    let twin = memory(&clock);
    let quota = quota(10).with_count_denied(true).expect("a log");
    let charge = Charge::new("u", &quota);
    let late = Duration::from_millis(100);
    for number in 0..10_000_u64 {
        let found = limiter.acquire(&charge).await.expect("decided");
        let truth = twin.decide(Action::Acquire, &charge).await.expect("decided");
        assert_eq!((found.allowed, found.remaining), (truth.allowed, truth.remaining));
        let (shortest, longest) =
            (truth.retry_after.saturating_sub(late), truth.retry_after + late);
        assert!((shortest..=longest).contains(&found.retry_after), "{number}: {found:?} {truth:?}");
        clock.advance(Duration::from_micros(100));
    }
    assert!(store.calls() < 45, "{} calls for 10,000 requests in a second", store.calls());
    // The last denials are recorded without another request.
    let (calls, last) = (store.calls(), clock.now());
    clock.advance(late);
    tokio::time::sleep(late + Duration::from_millis(1)).await;
    assert_eq!(store.calls(), calls + 1);
    assert_eq!(store.left(&charge).await, 0);
    let minute = 60_000_000;
    clock.set(last.saturating_add(Duration::from_micros(minute - 1_000)));
    assert!(!limiter.peek(&charge).await.expect("decided").allowed);
    clock.set(last.saturating_add(Duration::from_micros(minute + 100_000)));
    assert_eq!(store.left(&charge).await, 10, "none is recorded later than that");
    assert!(limiter.acquire(&charge).await.expect("decided").allowed);
}

#[tokio::test(start_paused = true)]
async fn a_request_is_answered_only_if_each_charge_that_counts_denials_is_known_to_deny() {
    let clock = ManualClock::new();
    let (store, limiter) = counted(&clock);
    let (counting, plain) = (quota(1).with_count_denied(true).expect("a log"), self::quota(1));
    let (charge, other) = (Charge::new("u", &counting), Charge::new("v", &plain));
    for _ in 0..2 {
        limiter.acquire(&other).await.expect("decided");
    }
    let before = store.calls();
    // The other charge denies, but whether this denial counts for the first one, the store must
    // say.
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
async fn several_charges_are_denied_by_one_and_the_others_are_told_as_the_store_told_them() {
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
    let told = limiter.acquire_all(&both("a")).await.expect("decided");
    let before = store.calls();
    let again = limiter.acquire_all(&both("a")).await.expect("decided");
    let cached = |decision: &Decision| Decision { source: Source::DenyCache, ..*decision };
    assert_eq!(again, told.iter().map(cached).collect::<Vec<_>>());
    assert_eq!((again[0].allowed, again[0].remaining, again[1].allowed), (true, 9, false));
    // The same address with ever new users.
    for user in ["b", "c", "d"] {
        let others = limiter.acquire_all(&both(user)).await.expect("decided");
        assert_eq!((others[0].allowed, others[0].remaining, others[1].allowed), (true, 10, false));
    }
    assert_eq!(limiter.peek(&both("a")[1]).await.expect("decided").source, Source::DenyCache);
    assert_eq!(store.calls(), before, "the store was not asked");
    limiter.refund(&both("a")[1]).await.expect("refunded");
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
async fn a_cached_denial_needs_no_store_and_a_failure_is_not_remembered() {
    let clock = ManualClock::new();
    let (store, limiter) = counted(&clock);
    let quota = quota(1);
    let (charge, other) = (Charge::new("u", &quota), Charge::new("v", &quota));
    for _ in 0..2 {
        limiter.acquire(&charge).await.expect("decided");
    }
    store.is(gone());
    assert_eq!(limiter.acquire(&charge).await.expect("decided").source, Source::DenyCache);
    assert!(limiter.acquire(&other).await.is_err());
    // A refund that failed may have been made.
    assert!(limiter.refund(&charge).await.is_err());
    assert!(limiter.acquire(&charge).await.is_err());
}

/// Decides at once, and holds the answer back until it is let go. Refunds it holds back before they
/// are made.
struct Late {
    memory: MemoryStore,
    answers: Arc<Semaphore>,
    refunds: Arc<Semaphore>,
}

impl Late {
    fn letting(answers: usize, refunds: usize) -> Self {
        let [answers, refunds] =
            [answers, refunds].map(|permits| Arc::new(Semaphore::new(permits)));
        Self { memory: MemoryStore::new(), answers, refunds }
    }
}

impl Store for Late {
    async fn decide(&self, action: Action, charge: &Charge<'_>) -> Result<Decision, StoreError> {
        if matches!(action, Action::Refund | Action::Reset) {
            self.refunds.acquire().await.expect("open").forget();
        }
        let decided = self.memory.decide(action, charge).await;
        if action == Action::Acquire {
            self.answers.acquire().await.expect("open").forget();
        }
        decided
    }

    async fn decide_all(
        &self,
        action: Action,
        charges: &[Charge<'_>],
    ) -> Result<Vec<Decision>, StoreError> {
        self.memory.decide_all(action, charges).await
    }

    fn clock(&self) -> &dyn Clock {
        self.memory.clock()
    }
}

/// A store whose servers change.
struct Moving {
    memory: MemoryStore,
    epoch: AtomicU64,
}

impl Store for Moving {
    async fn decide(&self, action: Action, charge: &Charge<'_>) -> Result<Decision, StoreError> {
        self.memory.decide(action, charge).await
    }

    async fn decide_all(
        &self,
        action: Action,
        charges: &[Charge<'_>],
    ) -> Result<Vec<Decision>, StoreError> {
        self.memory.decide_all(action, charges).await
    }

    fn clock(&self) -> &dyn Clock {
        self.memory.clock()
    }

    fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Relaxed)
    }
}

#[tokio::test]
async fn what_another_server_said_is_not_said_again() {
    let cache = DenyCache::new(Moving { memory: MemoryStore::new(), epoch: AtomicU64::new(7) });
    let quota = Quota::sliding_log(1, LONG).expect("valid");
    let charge = Charge::new("u", &quota);
    let ask = async || cache.decide(Action::Acquire, &charge).await.expect("decided").source;
    let sources = [ask().await, ask().await, ask().await];
    assert_eq!(sources, [Source::Store, Source::Store, Source::DenyCache]);
    cache.store().epoch.fetch_add(1, Ordering::Relaxed);
    assert_eq!([ask().await, ask().await], [Source::Store, Source::DenyCache]);
}

#[tokio::test]
async fn a_denial_that_was_under_way_while_units_came_back_is_not_kept() {
    for action in [Action::Refund, Action::Reset] {
        let cache = DenyCache::new(Late::letting(1, 1));
        let quota = Quota::sliding_log(1, LONG).expect("valid");
        let charge = Charge::new("u", &quota);
        assert!(cache.decide(Action::Acquire, &charge).await.expect("decided").allowed);
        let late = cache.decide(Action::Acquire, &charge);
        tokio::pin!(late);
        // It has been denied, and nobody knows of it yet.
        assert!(poll_once(late.as_mut()).await.is_none());
        cache.decide(action, &charge).await.expect("given back");
        cache.store().answers.add_permits(2);
        assert!(!late.await.expect("decided").allowed);
        assert_eq!(cache.entries(), 0);
        assert!(
            cache.decide(Action::Acquire, &charge).await.expect("decided").allowed,
            "after {action:?}"
        );
    }
}

/// What a future brings when it is polled once.
async fn poll_once<T>(mut future: std::pin::Pin<&mut impl Future<Output = T>>) -> Option<T> {
    std::future::poll_fn(|context| match future.as_mut().poll(context) {
        std::task::Poll::Ready(value) => std::task::Poll::Ready(Some(value)),
        std::task::Poll::Pending => std::task::Poll::Ready(None),
    })
    .await
}

#[tokio::test]
async fn a_denial_from_before_units_came_back_is_forgotten_even_if_it_was_kept_meanwhile() {
    for goes_away in [false, true] {
        let cache = DenyCache::new(Late::letting(10, 0));
        let quota = Quota::sliding_log(1, LONG).expect("valid");
        let charge = Charge::new("u", &quota);
        assert!(cache.decide(Action::Acquire, &charge).await.expect("decided").allowed);
        {
            let refund = cache.decide(Action::Refund, &charge);
            tokio::pin!(refund);
            assert!(poll_once(refund.as_mut()).await.is_none(), "it is under way");
            assert!(!cache.decide(Action::Acquire, &charge).await.expect("decided").allowed);
            assert_eq!(cache.entries(), 1);
            if !goes_away {
                cache.store().refunds.add_permits(1);
                refund.await.expect("given back");
            }
        }
        assert_eq!(cache.entries(), 0);
        let after = cache.decide(Action::Acquire, &charge).await.expect("decided");
        assert_eq!((after.allowed, after.source), (!goes_away, Source::Store));
    }
}

#[tokio::test]
async fn a_flood_of_denied_keys_leaves_the_bound_and_the_hot_key_in_peace() {
    const BOUND: usize = 10_000;
    let clock = ManualClock::new();
    let store = Flaky::on(&clock);
    let cache = DenyCache::builder(store.clone()).max_entries(BOUND).build();
    let quota = Quota::token_bucket(1, LONG).expect("valid");
    let hot = Charge::new("hot", &quota);
    for _ in 0..2 {
        cache.decide(Action::Acquire, &hot).await.expect("decided");
    }
    let mut asked = 0;
    for number in 0..500_000_u32 {
        let key = number.to_string();
        let charge = Charge::new(&key, &quota);
        // Acquired, denied.
        for _ in 0..2 {
            cache.decide(Action::Acquire, &charge).await.expect("decided");
        }
        if number % 100 == 0 {
            let before = store.calls();
            assert!(!cache.decide(Action::Acquire, &hot).await.expect("decided").allowed);
            asked += store.calls() - before;
        }
        // The memory behind is not what this is about.
        cache.store().decide(Action::Reset, &charge).await.expect("reset");
    }
    assert!(cache.entries() <= BOUND && cache.entries() > BOUND * 9 / 10, "{}", cache.entries());
    assert!(asked <= 5, "the hot key had to ask {asked} times of 5,000");
    cache.clear();
    assert_eq!(cache.entries(), 0);
}

#[test]
fn an_answer_from_the_cache_allocates_nothing() {
    let cache = DenyCache::new(MemoryStore::new());
    let quota = Quota::sliding_log(1, LONG).expect("valid");
    let charge = Charge::new("user123", &quota).with_policy("per-user");
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    runtime.block_on(async {
        for _ in 0..2 {
            cache.decide(Action::Acquire, &charge).await.expect("decided");
        }
    });
    let mut answered = 0;
    let counted = allocation_counter::measure(|| {
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        for _ in 0..100 {
            let look = std::pin::pin!(cache.decide(Action::Acquire, &charge));
            let answer = look.poll(&mut context);
            answered += u32::from(
                matches!(answer, std::task::Poll::Ready(Ok(decision)) if decision.source == Source::DenyCache),
            );
        }
    });
    assert_eq!((answered, counted.count_total), (100, 0));
}

#[derive(Debug, Clone)]
enum Step {
    One { action: Action, count: usize, quota: usize, cost: u64 },
    Several { action: Action, quota: usize, costs: [u64; 3] },
    Pass(u64),
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
            // Mostly one quota, as it is.
            .prop_map(|(action, count, quota, cost)| Step::One { action, count, quota: quota.saturating_sub(7), cost }),
        2 => (both, 0..10_usize, [1..4_u64, 1..4_u64, 1..4_u64])
            .prop_map(|(action, quota, costs)| Step::Several { action, quota: quota.saturating_sub(7), costs }),
        3 => (1..40_000_u64).prop_map(Step::Pass),
        1 => (1..2_000_000_u64).prop_map(Step::Pass),
    ]
}

/// No denial from the cache could have been an admission: the twin, asked at the same time, denies
/// as well.
#[test]
fn no_denial_from_the_cache_could_have_been_an_admission() {
    let cases = (0..5_usize, 1..6_u64, proptest::collection::vec(step(), 1..120));
    let answered = AtomicU64::new(0);
    let mut runner = TestRunner::new(ProptestConfig::with_cases(1_000));
    let run = runner.run(&cases, |(kind, limit, steps)| {
        answered.fetch_add(compare(kind, limit, &steps)?, Ordering::Relaxed);
        Ok(())
    });
    run.expect("the two agree");
    let answered = answered.into_inner();
    assert!(answered > 1_000, "the cache was of use {answered} times");
}

/// How often the cache answered.
fn compare(kind: usize, limit: u64, steps: &[Step]) -> Result<u64, TestCaseError> {
    let algorithm = Algorithm::ALL[kind];
    let window = Duration::from_millis(100);
    // As it is, with a raised limit, and counted in another way.
    let quotas = [
        Quota::new(algorithm, limit, window).expect("valid"),
        Quota::new(algorithm, limit + 2, window).expect("valid"),
        Quota::new(Algorithm::ALL[(kind + 1) % 5], limit, window * 2).expect("valid"),
    ];
    let keys = ["a", "b", "c"];
    let clock = ManualClock::new();
    let (cache, twin) =
        (DenyCache::builder(memory(&clock)).max_entries(16).build(), memory(&clock));
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    let mut answered = 0;
    for step in steps {
        let (action, charges): (Action, Vec<Charge<'_>>) = match *step {
            Step::Pass(micros) => {
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
                vec![runtime.block_on(twin.decide(action, one)).expect("decided")],
            ),
            all => (
                runtime.block_on(cache.decide_all(action, all)).expect("decided"),
                runtime.block_on(twin.decide_all(action, all)).expect("decided"),
            ),
        };
        let allowed = |decisions: &[Decision]| decisions.iter().all(|decision| decision.allowed);
        prop_assert_eq!(allowed(&found), allowed(&truth), "{:?}: {:?} {:?}", action, found, truth);
        for (found, truth) in found.iter().zip(&truth) {
            if found.source == Source::DenyCache {
                answered += 1;
                prop_assert!(found.allowed || !truth.allowed, "{:?} {:?}", found, truth);
                // The sum of two waits that are rounded up.
                let longest = truth.retry_after + Duration::from_micros(1);
                prop_assert!(found.retry_after <= longest, "{:?} {:?}", found, truth);
            } else {
                prop_assert_eq!(found, truth);
            }
        }
    }
    Ok(answered)
}
