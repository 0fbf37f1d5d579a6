//! A store that fails when a test says so, and in the way that it says. Its counts are real: a
//! memory store's.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tidegate::{
    Action, Charge, Clock, Decision, ManualClock, MemoryStore, Part, Store, StoreError,
};
use tokio::time::Instant;

/// Clones are one store. A key that ends in `@1` is decided by part 1, and so on; all others by
/// part 0.
#[derive(Clone)]
pub(crate) struct Flaky(Arc<State>);

struct State {
    memory: MemoryStore,
    moods: Mutex<BTreeMap<u64, Mood>>,
    calls: AtomicU64,
    probes: AtomicU64,
    alive: Mutex<BTreeMap<String, Instant>>,
}

#[derive(Debug, Clone)]
pub(crate) enum Mood {
    Well,
    /// Answers, but so late.
    Slow(Duration),
    Fails(StoreError),
    /// Decides, and the answer is lost.
    LosesAnswers,
}

pub(crate) fn gone() -> Mood {
    Mood::Fails(StoreError::Unreachable("gone".to_owned()))
}

impl Flaky {
    pub(crate) fn new() -> Self {
        Self::around(MemoryStore::new())
    }

    pub(crate) fn on(clock: &ManualClock) -> Self {
        Self::around(MemoryStore::builder().clock(clock.clone()).build())
    }

    fn around(memory: MemoryStore) -> Self {
        let (calls, probes) = (AtomicU64::new(0), AtomicU64::new(0));
        Self(Arc::new(State {
            memory,
            moods: Mutex::default(),
            calls,
            probes,
            alive: Mutex::default(),
        }))
    }

    /// How the whole store does from now on.
    pub(crate) fn is(&self, mood: Mood) {
        self.part_is(0, mood);
    }

    pub(crate) fn part_is(&self, part: u64, mood: Mood) {
        self.0.moods.lock().expect("no panic").insert(part, mood);
    }

    /// How often it was asked to decide.
    pub(crate) fn calls(&self) -> u64 {
        self.0.calls.load(Ordering::Relaxed)
    }

    pub(crate) fn probes(&self) -> u64 {
        self.0.probes.load(Ordering::Relaxed)
    }

    /// How many hold it.
    pub(crate) fn holders(&self) -> usize {
        Arc::strong_count(&self.0)
    }

    /// What is left of this charge's quota, whatever mood it is in.
    pub(crate) async fn left(&self, charge: &Charge<'_>) -> u64 {
        let look = self.0.memory.decide(Action::ChargeUpTo, &charge.with_cost(0)).await;
        look.expect("memory answers").remaining
    }

    /// Does what the mood says; true if the answer is to be lost.
    async fn suffer(&self, part: Part) -> Result<bool, StoreError> {
        let mood =
            self.0.moods.lock().expect("no panic").get(&part.0).cloned().unwrap_or(Mood::Well);
        match mood {
            Mood::Well => Ok(false),
            Mood::Slow(by) => {
                tokio::time::sleep(by).await;
                Ok(false)
            }
            Mood::Fails(error) => Err(error),
            Mood::LosesAnswers => Ok(true),
        }
    }
}

fn lost<T>(answer: Result<T, StoreError>, lost: bool) -> Result<T, StoreError> {
    if lost { Err(StoreError::Timeout(Duration::from_millis(100))) } else { answer }
}

impl Store for Flaky {
    async fn decide(&self, action: Action, charge: &Charge<'_>) -> Result<Decision, StoreError> {
        self.0.calls.fetch_add(1, Ordering::Relaxed);
        let loses = self.suffer(self.part(charge)).await?;
        lost(self.0.memory.decide(action, charge).await, loses)
    }

    async fn decide_all(
        &self,
        action: Action,
        charges: &[Charge<'_>],
    ) -> Result<Vec<Decision>, StoreError> {
        self.0.calls.fetch_add(1, Ordering::Relaxed);
        let mut loses = false;
        for charge in charges {
            loses |= self.suffer(self.part(charge)).await?;
        }
        lost(self.0.memory.decide_all(action, charges).await, loses)
    }

    fn clock(&self) -> &dyn Clock {
        self.0.memory.clock()
    }

    fn part(&self, charge: &Charge<'_>) -> Part {
        Part(charge.key().rsplit_once('@').and_then(|(_, part)| part.parse().ok()).unwrap_or(0))
    }

    async fn probe(&self, part: Part) -> Result<(), StoreError> {
        self.0.probes.fetch_add(1, Ordering::Relaxed);
        let loses = self.suffer(part).await?;
        lost(Ok(()), loses)
    }

    async fn announce(&self, instance: &str) -> Result<Vec<String>, StoreError> {
        let loses = self.suffer(Part::WHOLE).await?;
        let mut alive = self.0.alive.lock().expect("no panic");
        alive.insert(instance.to_owned(), Instant::now());
        alive.retain(|_, last| last.elapsed() < Duration::from_secs(3));
        lost(Ok(alive.keys().cloned().collect()), loses)
    }
}
