//! [`Flaky`]: a memory store whose shards fail in the way that a test sets.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tidegate::store::invalidation::{Cursor, Invalidations};
use tidegate::{
    Action, Charge, Clock, Decision, ManualClock, MemoryStore, Outcome, SharedStore, Store,
    StoreError,
};
use tokio::time::Instant;

/// A store with injected faults. Clones share their state. A key that ends in `@1` belongs to shard
/// 1, and so on; all other keys belong to shard 0.
#[derive(Clone)]
pub(crate) struct Flaky(Arc<State>);

struct State {
    memory: MemoryStore,
    faults: Mutex<BTreeMap<u64, Fault>>,
    calls: AtomicU64,
    alive: Mutex<BTreeMap<String, Instant>>,
}

/// Fault of a shard.
#[derive(Debug, Clone)]
pub(crate) enum Fault {
    None,
    /// Answers after this delay.
    Slow(Duration),
    Fails(StoreError),
    /// Decides, but the answer is lost.
    LosesAnswers,
    /// Decides, but the answer to this action is lost.
    LosesAnswersOf(Action),
}

pub(crate) fn down() -> Fault {
    Fault::Fails(StoreError::Unreachable("down".to_owned()))
}

impl Flaky {
    pub(crate) fn new() -> Self {
        Self::around(MemoryStore::new())
    }

    pub(crate) fn on(clock: &ManualClock) -> Self {
        Self::around(MemoryStore::builder().clock(clock.clone()).build())
    }

    fn around(memory: MemoryStore) -> Self {
        Self(Arc::new(State {
            memory,
            faults: Mutex::default(),
            calls: AtomicU64::new(0),
            alive: Mutex::default(),
        }))
    }

    /// Sets the fault of shard 0, which is the only one unless keys name others.
    pub(crate) fn set_fault(&self, fault: Fault) {
        self.set_shard_fault(0, fault);
    }

    pub(crate) fn set_shard_fault(&self, shard: u64, fault: Fault) {
        self.0.faults.lock().expect("no panic").insert(shard, fault);
    }

    /// Returns the number of calls to decide.
    pub(crate) fn calls(&self) -> u64 {
        self.0.calls.load(Ordering::Relaxed)
    }

    /// Returns the number of clones.
    pub(crate) fn clones(&self) -> usize {
        Arc::strong_count(&self.0)
    }

    /// Returns the remaining units of this charge's quota, without faults.
    pub(crate) async fn remaining(&self, charge: &Charge<'_>) -> u64 {
        let count = self.0.memory.decide(Action::ChargeUpTo, &charge.with_cost(0)).await;
        count.expect("memory does not fail").remaining
    }

    /// Injects the fault of a shard, and returns whether the answer must be lost.
    async fn inject(&self, shard: u64, action: Option<Action>) -> Result<bool, StoreError> {
        let fault = self.0.faults.lock().expect("no panic").get(&shard).cloned();
        match fault.unwrap_or(Fault::None) {
            Fault::None => Ok(false),
            Fault::Slow(delay) => {
                tokio::time::sleep(delay).await;
                Ok(false)
            }
            Fault::Fails(error) => Err(error),
            Fault::LosesAnswers => Ok(true),
            Fault::LosesAnswersOf(lost) => Ok(action == Some(lost)),
        }
    }
}

fn shard_of(charge: &Charge<'_>) -> u64 {
    let number = charge.key().rsplit_once('@').and_then(|(_, number)| number.parse().ok());
    number.unwrap_or(0)
}

fn lose_if<T>(is_lost: bool, answer: Result<T, StoreError>) -> Result<T, StoreError> {
    if is_lost {
        Err(StoreError::Timeout(Duration::from_millis(100)).answer_lost())
    } else {
        answer
    }
}

impl Store for Flaky {
    fn decide(
        &self,
        action: Action,
        charge: &Charge<'_>,
    ) -> Outcome<impl Future<Output = Result<Decision, StoreError>> + Send> {
        Outcome::Pending(async move {
            self.0.calls.fetch_add(1, Ordering::Relaxed);
            let is_lost = self.inject(shard_of(charge), Some(action)).await?;
            lose_if(is_lost, self.0.memory.decide(action, charge).await)
        })
    }

    fn decide_all(
        &self,
        action: Action,
        charges: &[Charge<'_>],
    ) -> Outcome<impl Future<Output = Result<Vec<Decision>, StoreError>> + Send> {
        Outcome::Pending(async move {
            self.0.calls.fetch_add(1, Ordering::Relaxed);
            let mut is_lost = false;
            for charge in charges {
                is_lost |= self.inject(shard_of(charge), Some(action)).await?;
            }
            lose_if(is_lost, self.0.memory.decide_all(action, charges).await)
        })
    }

    fn clock(&self) -> &dyn Clock {
        self.0.memory.clock()
    }
}

impl SharedStore for Flaky {
    async fn heartbeat(&self, instance: &str) -> Result<Vec<String>, StoreError> {
        let is_lost = self.inject(0, None).await?;
        let mut alive = self.0.alive.lock().expect("no panic");
        alive.insert(instance.to_owned(), Instant::now());
        alive.retain(|_, last| last.elapsed() < Duration::from_secs(3));
        lose_if(is_lost, Ok(alive.keys().cloned().collect()))
    }

    fn invalidations(
        &self,
        _since: &Cursor,
    ) -> Option<impl Future<Output = Result<Invalidations, StoreError>> + Send> {
        None::<std::future::Ready<_>>
    }
}
