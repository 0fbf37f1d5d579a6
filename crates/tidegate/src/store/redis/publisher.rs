//! [`Publisher`]: publishes the invalidations of one store, with at most one call in flight.
//!
//! Invalidations that arrive during a call go together in the next one. A call that fails is
//! retried with backoff for as long as deny cache entries can live: after that, no instance has one
//! that the invalidation could end.

use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::time::{sleep, timeout_at};

use super::Shared;
use crate::random::jittered;
use crate::store::news::CountId;
use crate::store::shared::MAX_DENIAL_TTL;

/// The most counts that wait for a call. Beyond that, "anything may have changed" is published
/// instead.
const MAX_PENDING: usize = 1_000;
/// The most counts in one call.
const MAX_BATCH: usize = 128;
const MIN_BACKOFF: Duration = Duration::from_millis(10);
const MAX_BACKOFF: Duration = Duration::from_millis(250);

pub(super) struct Publisher {
    state: Mutex<State>,
    /// Number of the last invalidation that is published or given up.
    done: watch::Sender<u64>,
    /// The store's connections live there as well.
    runtime: Handle,
}

#[derive(Default)]
struct State {
    /// Counts with their numbers, each count once, the lowest number first.
    pending: VecDeque<(u64, CountId)>,
    pending_counts: HashSet<CountId>,
    /// Set once there are too many: the number of the latest invalidation that it stands for. Then
    /// `pending` is empty.
    pending_all: Option<u64>,
    /// The number of the latest invalidation.
    last: u64,
    /// When the latest invalidation was added.
    added: Option<Instant>,
    /// The publishing task exists.
    running: bool,
}

/// What one call publishes.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Scope {
    Counts(Vec<CountId>),
    /// Any count may have units again.
    All,
}

struct Batch {
    /// The numbers of its counts; of `Scope::All` the latest one.
    numbers: Vec<u64>,
    scope: Scope,
}

impl State {
    /// Returns the number to wait for.
    fn add(&mut self, counts: &[CountId], now: Instant) -> u64 {
        self.added = Some(now);
        for count in counts {
            if self.pending_all.is_some() {
                self.last += 1;
                self.pending_all = Some(self.last);
            } else if self.pending_counts.insert(*count) {
                self.last += 1;
                self.pending.push_back((self.last, *count));
            }
        }
        if self.pending.len() > MAX_PENDING {
            self.collapse();
        }
        self.last
    }

    fn collapse(&mut self) {
        self.pending.clear();
        self.pending_counts.clear();
        self.pending_all = Some(self.last);
    }

    fn take_batch(&mut self) -> Option<Batch> {
        if let Some(number) = self.pending_all.take() {
            return Some(Batch { numbers: vec![number], scope: Scope::All });
        }
        if self.pending.is_empty() {
            return None;
        }
        let (numbers, counts): (Vec<u64>, Vec<CountId>) =
            self.pending.drain(..self.pending.len().min(MAX_BATCH)).unzip();
        for count in &counts {
            self.pending_counts.remove(count);
        }
        Some(Batch { numbers, scope: Scope::Counts(counts) })
    }

    /// Puts a batch back that was not published. False if nothing is worth a retry any more.
    fn put_back(&mut self, batch: Batch, now: Instant) -> bool {
        if self.added.is_none_or(|added| now.saturating_duration_since(added) >= MAX_DENIAL_TTL) {
            let running = self.running;
            *self = Self { last: self.last, running, ..Self::default() };
            return false;
        }
        match batch.scope {
            Scope::All => self.collapse(),
            Scope::Counts(_) if self.pending_all.is_some() => {}
            Scope::Counts(counts) => {
                for (number, count) in batch.numbers.into_iter().zip(counts).rev() {
                    // A count that was added again in the meantime has a number of its own, further
                    // back.
                    self.pending_counts.insert(count);
                    self.pending.push_front((number, count));
                }
                if self.pending.len() > MAX_PENDING {
                    self.collapse();
                }
            }
        }
        true
    }
}

impl Publisher {
    pub(super) fn new() -> Self {
        Self { state: Mutex::default(), done: watch::Sender::new(0), runtime: Handle::current() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the next batch; without one the publishing task ends.
    fn next_batch(&self) -> Option<Batch> {
        let mut state = self.state();
        let batch = state.take_batch();
        state.running = batch.is_some();
        batch
    }

    /// Keeps a batch that was not published for a retry. False if it is given up.
    fn put_back(&self, batch: Batch) -> bool {
        let mut state = self.state();
        let retry = state.put_back(batch, Instant::now());
        if !retry {
            self.done.send_replace(state.last);
        }
        retry
    }

    /// Waits until the invalidation with this number is published, or until the deadline.
    pub(super) async fn published(&self, number: u64, deadline: Instant) {
        let mut done = self.done.subscribe();
        let _ = timeout_at(deadline.into(), done.wait_for(|done| *done >= number)).await;
    }
}

impl Shared {
    /// Hands counts over to the publishing task. Returns the number to wait for.
    pub(super) fn enqueue_invalidations(self: &Arc<Self>, counts: &[CountId]) -> u64 {
        let mut state = self.publisher.state();
        let number = state.add(counts, Instant::now());
        let start = !std::mem::replace(&mut state.running, true);
        drop(state);
        if start {
            self.publisher.runtime.spawn(publish_pending(PublishingTask {
                shared: Arc::clone(self),
                completed: false,
            }));
        }
        number
    }
}

async fn publish_pending(mut task: PublishingTask) {
    let shared = &task.shared;
    let publisher = &shared.publisher;
    let mut backoff = MIN_BACKOFF;
    while let Some(batch) = publisher.next_batch() {
        let last = batch.numbers.last().copied().unwrap_or(0);
        let Err(error) = shared.publish(&batch.scope).await else {
            publisher.done.send_replace(last);
            backoff = MIN_BACKOFF;
            continue;
        };
        tracing::debug!(%error, "publishing invalidations failed");
        if publisher.put_back(batch) {
            sleep(jittered(backoff)).await;
            backoff = (2 * backoff).min(MAX_BACKOFF);
        }
    }
    // The last look for a batch has cleared the flag, and another task may be running since.
    task.completed = true;
}

/// The publishing task. One that ends with its runtime makes way for another.
struct PublishingTask {
    shared: Arc<Shared>,
    completed: bool,
}

impl Drop for PublishingTask {
    fn drop(&mut self) {
        if !self.completed {
            self.shared.publisher.state().running = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(numbers: std::ops::Range<u64>) -> Vec<CountId> {
        numbers.map(CountId).collect()
    }

    fn scopes(state: &mut State) -> Vec<Scope> {
        std::iter::from_fn(|| state.take_batch().map(|batch| batch.scope)).collect()
    }

    #[test]
    fn a_count_is_published_once_per_batch_and_again_if_it_is_added_during_the_call() {
        let (mut state, now) = (State::default(), Instant::now());
        assert_eq!(state.add(&counts(0..3), now), 3);
        assert_eq!(state.add(&counts(1..2), now), 3, "it waits for the one that is pending");
        assert_eq!(state.take_batch().map(|batch| batch.scope), Some(Scope::Counts(counts(0..3))));
        assert_eq!(state.add(&counts(1..2), now), 4);
        assert_eq!(scopes(&mut state), [Scope::Counts(counts(1..2))]);
    }

    #[test]
    fn a_failed_batch_is_retried_first_for_as_long_as_entries_live() {
        let (mut state, now) = (State::default(), Instant::now());
        state.add(&counts(0..2), now);
        let batch = state.take_batch().expect("pending");
        state.add(&counts(2..3), now);
        assert!(state.put_back(batch, now));
        let batch = state.take_batch().expect("pending");
        assert_eq!(
            (&batch.scope, batch.numbers.as_slice()),
            (&Scope::Counts(counts(0..3)), &[1, 2, 3][..])
        );
        assert!(!state.put_back(batch, now + MAX_DENIAL_TTL));
        assert_eq!((scopes(&mut state), state.last), (Vec::new(), 3));
    }

    #[test]
    fn too_many_counts_collapse_to_all() {
        let (mut state, now) = (State::default(), Instant::now());
        state.add(&counts(0..1_000), now);
        let batch = state.take_batch().expect("pending");
        assert_eq!(state.add(&counts(2_000..2_129), now), 1_129);
        assert_eq!(state.add(&counts(3_000..3_001), now), 1_130, "{:?}", state.pending_all);
        assert!(state.put_back(batch, now));
        assert_eq!(scopes(&mut state), [Scope::All]);
        state.add(&counts(0..1), now);
        assert_eq!(scopes(&mut state), [Scope::Counts(counts(0..1))]);
    }
}
