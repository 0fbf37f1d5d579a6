//! The deny cache with calls in flight, and with a store whose epoch changes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tidegate::store::invalidation::{Cursor, Invalidations};
use tidegate::{
    Action, Charge, Clock, Decision, DenyCache, ManualClock, MemoryStore, Outcome, Quota,
    SharedStore, Source, Store, StoreError,
};
use tokio::sync::Semaphore;

use crate::support::LONG;

/// A store that decides at once and delays its answers until the test adds a permit. It delays
/// refunds before they are made.
struct Delayed {
    memory: MemoryStore,
    answers: Arc<Semaphore>,
    refunds: Arc<Semaphore>,
}

impl Delayed {
    fn with_permits(answers: usize, refunds: usize) -> Self {
        let [answers, refunds] =
            [answers, refunds].map(|permits| Arc::new(Semaphore::new(permits)));
        Self { memory: MemoryStore::new(), answers, refunds }
    }
}

impl Store for Delayed {
    fn decide(
        &self,
        action: Action,
        charge: &Charge<'_>,
    ) -> Outcome<impl Future<Output = Result<Decision, StoreError>> + Send> {
        Outcome::Pending(async move {
            if matches!(action, Action::Refund | Action::Reset) {
                self.refunds.acquire().await.expect("open").forget();
            }
            let decided = self.memory.decide(action, charge).await;
            if action == Action::Acquire {
                self.answers.acquire().await.expect("open").forget();
            }
            decided
        })
    }

    fn decide_all(
        &self,
        action: Action,
        charges: &[Charge<'_>],
    ) -> Outcome<impl Future<Output = Result<Vec<Decision>, StoreError>> + Send> {
        Outcome::Pending(async move { self.memory.decide_all(action, charges).await })
    }

    fn clock(&self) -> &dyn Clock {
        self.memory.clock()
    }
}

impl SharedStore for Delayed {
    async fn heartbeat(&self, instance: &str) -> Result<Vec<String>, StoreError> {
        self.memory.heartbeat(instance).await
    }

    fn invalidations(
        &self,
        since: &Cursor,
    ) -> Option<impl Future<Output = Result<Invalidations, StoreError>> + Send> {
        self.memory.invalidations(since)
    }
}

/// A store with an epoch that the test changes.
struct Moving {
    memory: MemoryStore,
    epoch: AtomicU64,
}

impl Store for Moving {
    fn decide(
        &self,
        action: Action,
        charge: &Charge<'_>,
    ) -> Outcome<impl Future<Output = Result<Decision, StoreError>> + Send> {
        Outcome::Pending(async move { self.memory.decide(action, charge).await })
    }

    fn decide_all(
        &self,
        action: Action,
        charges: &[Charge<'_>],
    ) -> Outcome<impl Future<Output = Result<Vec<Decision>, StoreError>> + Send> {
        Outcome::Pending(async move { self.memory.decide_all(action, charges).await })
    }

    fn clock(&self) -> &dyn Clock {
        self.memory.clock()
    }
}

impl SharedStore for Moving {
    async fn heartbeat(&self, instance: &str) -> Result<Vec<String>, StoreError> {
        self.memory.heartbeat(instance).await
    }

    fn invalidations(
        &self,
        since: &Cursor,
    ) -> Option<impl Future<Output = Result<Invalidations, StoreError>> + Send> {
        self.memory.invalidations(since)
    }

    fn epoch_of(&self, _charge: &Charge<'_>) -> u64 {
        self.epoch.load(Ordering::Relaxed)
    }
}

#[tokio::test]
async fn an_entry_of_an_earlier_epoch_is_not_used() {
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
async fn a_denial_in_flight_during_a_refund_is_not_cached() {
    for action in [Action::Refund, Action::Reset] {
        let cache = DenyCache::new(Delayed::with_permits(1, 1));
        let quota = Quota::sliding_log(1, LONG).expect("valid");
        let charge = Charge::new("u", &quota);
        assert!(cache.decide(Action::Acquire, &charge).await.expect("decided").allowed);
        let in_flight = cache.decide(Action::Acquire, &charge).into_future();
        tokio::pin!(in_flight);
        // The store has denied it, but its answer is delayed.
        assert!(poll_once(in_flight.as_mut()).await.is_none());
        let _ = cache.decide(action, &charge).await.expect("refunded");
        cache.store().answers.add_permits(2);
        assert!(!in_flight.await.expect("decided").allowed);
        assert!(
            cache.decide(Action::Acquire, &charge).await.expect("decided").allowed,
            "after {action:?}"
        );
    }
}

/// Polls a future once, and returns its output if it is ready.
pub(crate) async fn poll_once<T>(
    mut future: std::pin::Pin<&mut impl Future<Output = T>>,
) -> Option<T> {
    std::future::poll_fn(|context| match future.as_mut().poll(context) {
        std::task::Poll::Ready(value) => std::task::Poll::Ready(Some(value)),
        std::task::Poll::Pending => std::task::Poll::Ready(None),
    })
    .await
}

#[tokio::test]
async fn a_denial_cached_during_a_refund_is_dropped() {
    for is_cancelled in [false, true] {
        let cache = DenyCache::new(Delayed::with_permits(10, 0));
        let quota = Quota::sliding_log(1, LONG).expect("valid");
        let charge = Charge::new("u", &quota);
        assert!(cache.decide(Action::Acquire, &charge).await.expect("decided").allowed);
        {
            let refund = cache.decide(Action::Refund, &charge).into_future();
            tokio::pin!(refund);
            assert!(poll_once(refund.as_mut()).await.is_none(), "it is in flight");
            assert!(!cache.decide(Action::Acquire, &charge).await.expect("decided").allowed);
            let again = cache.decide(Action::Acquire, &charge).await.expect("decided");
            assert_eq!(again.source, Source::DenyCache);
            if !is_cancelled {
                cache.store().refunds.add_permits(1);
                let _ = refund.await.expect("refunded");
            }
        }
        let after = cache.decide(Action::Acquire, &charge).await.expect("decided");
        assert_eq!((after.allowed, after.source), (!is_cancelled, Source::Store));
    }
}

#[tokio::test]
async fn an_acquire_that_is_not_answered_drops_the_entries_of_its_count() {
    let clock = ManualClock::new();
    let store = Delayed {
        memory: MemoryStore::builder().clock(clock.clone()).build(),
        ..Delayed::with_permits(2, 0)
    };
    let (answers, cache) = (Arc::clone(&store.answers), DenyCache::new(store));
    let quota = Quota::token_bucket(10, Duration::from_secs(10)).expect("valid");
    let charge = Charge::new("u", &quota);
    let ask =
        async |cost| cache.decide(Action::Acquire, &charge.with_cost(cost)).await.expect("decided");
    assert!(ask(8).await.allowed);
    assert_eq!(ask(3).await.retry_after, Duration::from_secs(1));
    assert_eq!(ask(3).await.source, Source::DenyCache);
    let mut cancelled = Box::pin(cache.decide(Action::Acquire, &charge).into_future());
    assert!(poll_once(cancelled.as_mut()).await.is_none(), "it goes to the store");
    drop(cancelled);
    answers.add_permits(1);
    let next = ask(3).await;
    assert_eq!((next.source, next.retry_after), (Source::Store, Duration::from_secs(2)));
}
