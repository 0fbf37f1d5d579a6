//! Invalidations: counts that have units again. They are published after each refund and reset, and
//! polled by deny caches.
//!
//! invalidation.lua documents the protocol. In a cluster one key, and so one node, has the
//! invalidations of all counts.
//!
//! The [`Publisher`] of a store has at most one call in flight. Invalidations that arrive during a
//! call share the next one. A call that fails is retried with backoff for a minute: for longer than
//! deny cache entries live, except those of blocks.

use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::time::{sleep, timeout_at};

use super::internal_key;
use crate::charge::Charge;
use crate::random::{jittered, random_u64};
use crate::store::invalidation::{CountId, Cursor, Invalidations, Scope};
use crate::store::redis::client::backoff::Backoff;
use crate::store::redis::client::resp::{Command, Value};
use crate::store::redis::routing::Topology;
use crate::store::redis::script::Script;
use crate::store::redis::script::call::OwnCall;
use crate::store::{Action, StoreError};

/// Number of invalidations that are kept. A reader that has missed more drops its whole cache.
const MAX_INVALIDATIONS: usize = 1_000;
/// Time from the last poll until the invalidation set expires.
const SET_TTL: Duration = Duration::from_secs(10);
/// Number of counts that may wait for a call. Beyond it, [`Scope::All`] is published instead.
const MAX_PENDING: usize = 1_000;
/// Number of counts in one call.
const MAX_BATCH: usize = 128;
/// Time for which a call is retried after the latest invalidation.
const MAX_PUBLISH_AGE: Duration = Duration::from_secs(60);
const PUBLISH_BACKOFF: Backoff = Backoff::from_millis(10, 250);

/// Counts that are about to get units back. They are published when the refund or reset ends, even
/// if it fails (it may have run) or its caller is cancelled.
pub(crate) struct PendingInvalidation {
    publisher: Arc<Publisher>,
    counts: Vec<CountId>,
}

/// The invalidation set of a store in Redis.
pub(crate) struct InvalidationSet {
    topology: Arc<Topology>,
    key: String,
}

impl PendingInvalidation {
    /// Returns `None` for an action that returns no units, and if heartbeats are off: no other
    /// instance has a cache.
    pub(crate) fn of(
        publisher: &Arc<Publisher>,
        action: Action,
        charges: &[Charge<'_>],
    ) -> Option<Self> {
        let counts = || charges.iter().map(CountId::of).collect();
        (matches!(action, Action::Refund | Action::Reset | Action::Commit)
            && publisher.set.has_readers())
        .then(|| Self { publisher: Arc::clone(publisher), counts: counts() })
    }

    /// Publishes the counts, and waits for it until the deadline at most. After that the publisher
    /// goes on retrying, and the refund does not fail.
    pub(crate) async fn publish(mut self, deadline: Instant) {
        let counts = std::mem::take(&mut self.counts);
        let number = self.publisher.enqueue(&counts);
        self.publisher.wait_published(number, deadline).await;
    }
}

impl Drop for PendingInvalidation {
    fn drop(&mut self) {
        if !self.counts.is_empty() {
            self.publisher.enqueue(&self.counts);
        }
    }
}

impl InvalidationSet {
    pub(crate) fn new(topology: &Arc<Topology>, prefix: &str) -> Self {
        Self { topology: Arc::clone(topology), key: internal_key(prefix, "news") }
    }

    /// Returns whether other instances may read it.
    pub(crate) fn has_readers(&self) -> bool {
        self.topology.state().has_heartbeat()
    }

    /// Publishes invalidations by one call.
    async fn publish(&self, scope: &Scope) -> Result<(), StoreError> {
        let arguments = match scope {
            Scope::All => self.arguments("publish-all"),
            Scope::Counts(counts) => {
                let add = |arguments: Command, CountId(number): &CountId| {
                    arguments.arg(format!("{number:016x}"))
                };
                let publish = self.arguments("publish").arg(MAX_INVALIDATIONS.to_string());
                counts.iter().fold(publish, add)
            }
        };
        self.call(arguments, false, |_| Ok(())).await
    }

    /// Reads the invalidations since a cursor.
    pub(crate) async fn poll(&self, since: &Cursor) -> Result<Invalidations, StoreError> {
        let ttl = SET_TTL.as_millis().to_string();
        self.call(self.arguments("poll").arg(ttl).arg(&since.0), true, read_reply).await
    }

    /// Returns the first arguments of an operation.
    fn arguments(&self, operation: &str) -> Command {
        let nonce = format!("{:016x}", random_u64());
        Command::new("1").arg(&self.key).arg(operation).arg(nonce)
    }

    async fn call<T>(
        &self,
        arguments: Command,
        needs_time: bool,
        read: impl FnOnce(Value) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let call =
            OwnCall { script: Script::invalidation(), key: &self.key, arguments, needs_time };
        call.run(self.topology.state(), read).await
    }
}

/// Decodes the reply of a poll.
fn read_reply(reply: Value) -> Result<Invalidations, StoreError> {
    let Value::Array(values) = reply else { return Err(unexpected()) };
    let [Value::Integer(now), Value::Integer(cursor_found), cursor, members @ ..] = &values[..]
    else {
        return Err(unexpected());
    };
    let cursor = Cursor(cursor.text().ok_or_else(unexpected)?.to_owned());
    let count_of = |member: &Value| {
        let number = member.text().and_then(|member| member.rsplit(':').next());
        number.and_then(|number| u64::from_str_radix(number, 16).ok()).map(CountId)
    };
    let counts = members.iter().map(count_of).collect::<Option<Vec<_>>>().ok_or_else(unexpected)?;
    let scope = if *cursor_found == 1 { Scope::Counts(counts) } else { Scope::All };
    Ok(Invalidations { cursor, scope, now: u64::try_from(*now).ok() })
}

fn unexpected() -> StoreError {
    StoreError::Refused("unexpected reply of the invalidation script".to_owned())
}

/// Pending invalidations of one store.
pub(crate) struct Publisher {
    pub(crate) set: InvalidationSet,
    state: Mutex<PublisherState>,
    /// Number of the last invalidation that was published or abandoned.
    completed: watch::Sender<u64>,
    /// Runtime of the store's connections, on which the publishing task runs, too.
    runtime: Handle,
}

#[derive(Default)]
struct PublisherState {
    /// Counts with their numbers, each count once, the lowest number first.
    pending: VecDeque<(u64, CountId)>,
    pending_counts: HashSet<CountId>,
    /// Number of the latest invalidation of a pending [`Scope::All`]; `pending` is empty then.
    pending_all: Option<u64>,
    /// Number of the latest invalidation.
    last: u64,
    /// Time at which the latest invalidation was added.
    added_at: Option<Instant>,
    /// Whether the publishing task runs.
    running: bool,
}

/// Invalidations of one call.
struct InvalidationBatch {
    /// Numbers of its counts; for [`Scope::All`] only the latest number.
    numbers: Vec<u64>,
    scope: Scope,
}

impl PublisherState {
    /// Adds counts, and returns the number to wait for.
    fn add(&mut self, counts: &[CountId], now: Instant) -> u64 {
        self.added_at = Some(now);
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

    /// Replaces all pending counts by [`Scope::All`].
    fn collapse(&mut self) {
        self.pending.clear();
        self.pending_counts.clear();
        self.pending_all = Some(self.last);
    }

    fn take_batch(&mut self) -> Option<InvalidationBatch> {
        if let Some(number) = self.pending_all.take() {
            return Some(InvalidationBatch { numbers: vec![number], scope: Scope::All });
        }
        if self.pending.is_empty() {
            return None;
        }
        let (numbers, counts): (Vec<u64>, Vec<CountId>) =
            self.pending.drain(..self.pending.len().min(MAX_BATCH)).unzip();
        for count in &counts {
            self.pending_counts.remove(count);
        }
        Some(InvalidationBatch { numbers, scope: Scope::Counts(counts) })
    }

    /// Requeues a batch that was not published. Returns false, and drops everything pending, once
    /// the latest invalidation is too old.
    fn requeue(&mut self, batch: InvalidationBatch, now: Instant) -> bool {
        let age = self.added_at.map(|added_at| now.saturating_duration_since(added_at));
        if age.is_none_or(|age| age >= MAX_PUBLISH_AGE) {
            let running = self.running;
            *self = Self { last: self.last, running, ..Self::default() };
            return false;
        }
        match batch.scope {
            Scope::All => self.collapse(),
            Scope::Counts(_) if self.pending_all.is_some() => {}
            Scope::Counts(counts) => {
                for (number, count) in batch.numbers.into_iter().zip(counts).rev() {
                    // A count that was added again during the call is also pending with its new
                    // number.
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
    pub(crate) fn new(set: InvalidationSet) -> Self {
        Self {
            set,
            state: Mutex::default(),
            completed: watch::Sender::new(0),
            runtime: Handle::current(),
        }
    }

    fn state(&self) -> MutexGuard<'_, PublisherState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the next batch. Without one, the publishing task must end.
    fn next_batch(&self) -> Option<InvalidationBatch> {
        let mut state = self.state();
        let batch = state.take_batch();
        state.running = batch.is_some();
        batch
    }

    /// Requeues a batch that was not published. Returns false if all batches are abandoned.
    fn requeue(&self, batch: InvalidationBatch) -> bool {
        let mut state = self.state();
        let retry = state.requeue(batch, Instant::now());
        if !retry {
            self.completed.send_replace(state.last);
        }
        retry
    }

    /// Waits until the invalidation with this number is published, or until the deadline.
    pub(crate) async fn wait_published(&self, number: u64, deadline: Instant) {
        let mut completed = self.completed.subscribe();
        let published = completed.wait_for(|completed| *completed >= number);
        let _ = timeout_at(deadline.into(), published).await;
    }

    /// Queues counts for the publishing task, and returns the number to wait for.
    pub(crate) fn enqueue(self: &Arc<Self>, counts: &[CountId]) -> u64 {
        let mut state = self.state();
        let number = state.add(counts, Instant::now());
        let start = !std::mem::replace(&mut state.running, true);
        drop(state);
        if start {
            let task = PublishingTask { publisher: Arc::clone(self), completed: false };
            self.runtime.spawn(publish_pending(task));
        }
        number
    }
}

/// Publishes until nothing is pending.
async fn publish_pending(mut task: PublishingTask) {
    let publisher = &task.publisher;
    let mut backoff = PUBLISH_BACKOFF;
    while let Some(batch) = publisher.next_batch() {
        let last = batch.numbers.last().copied().unwrap_or(0);
        let Err(error) = publisher.set.publish(&batch.scope).await else {
            publisher.completed.send_replace(last);
            backoff = PUBLISH_BACKOFF;
            continue;
        };
        tracing::debug!(%error, "publishing invalidations failed");
        if publisher.requeue(batch) {
            sleep(jittered(backoff.next_wait())).await;
        }
    }
    // `next_batch` has cleared `running`, and another task may run since.
    task.completed = true;
}

/// The publishing task. If its runtime shuts down, the drop lets another task start.
struct PublishingTask {
    publisher: Arc<Publisher>,
    completed: bool,
}

impl Drop for PublishingTask {
    fn drop(&mut self) {
        if !self.completed {
            self.publisher.state().running = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(numbers: std::ops::Range<u64>) -> Vec<CountId> {
        numbers.map(CountId).collect()
    }

    fn scopes(state: &mut PublisherState) -> Vec<Scope> {
        std::iter::from_fn(|| state.take_batch().map(|batch| batch.scope)).collect()
    }

    #[test]
    fn a_count_added_during_a_call_is_published_again() {
        let (mut state, now) = (PublisherState::default(), Instant::now());
        assert_eq!(state.add(&counts(0..3), now), 3);
        assert_eq!(state.add(&counts(1..2), now), 3, "it is pending already");
        assert_eq!(state.take_batch().map(|batch| batch.scope), Some(Scope::Counts(counts(0..3))));
        assert_eq!(state.add(&counts(1..2), now), 4);
        assert_eq!(scopes(&mut state), [Scope::Counts(counts(1..2))]);
    }

    #[test]
    fn a_failed_batch_is_retried_first_for_as_long_as_entries_live() {
        let (mut state, now) = (PublisherState::default(), Instant::now());
        state.add(&counts(0..2), now);
        let batch = state.take_batch().expect("pending");
        state.add(&counts(2..3), now);
        assert!(state.requeue(batch, now));
        let batch = state.take_batch().expect("pending");
        assert_eq!(
            (&batch.scope, batch.numbers.as_slice()),
            (&Scope::Counts(counts(0..3)), &[1, 2, 3][..])
        );
        assert!(!state.requeue(batch, now + MAX_PUBLISH_AGE));
        assert_eq!((scopes(&mut state), state.last), (Vec::new(), 3));
    }

    #[test]
    fn too_many_counts_collapse_to_all() {
        let (mut state, now) = (PublisherState::default(), Instant::now());
        state.add(&counts(0..1_000), now);
        let batch = state.take_batch().expect("pending");
        assert_eq!(state.add(&counts(2_000..2_129), now), 1_129);
        assert_eq!(state.add(&counts(3_000..3_001), now), 1_130, "{:?}", state.pending_all);
        assert!(state.requeue(batch, now));
        assert_eq!(scopes(&mut state), [Scope::All]);
        state.add(&counts(0..1), now);
        assert_eq!(scopes(&mut state), [Scope::Counts(counts(0..1))]);
    }
}
