//! [`Breaker`]: stops calling a store that fails, so that no request waits for it.
//!
//! Each [`ShardId`] of the store has its own circuit, because shards fail independently. While the
//! circuit is closed, calls go to the store and their results are counted with a few atomic
//! operations. While it is open, calls fail at once, and a background task probes the shard; two
//! successful probes in a row close the circuit.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use self::circuit::{Circuit, CircuitHistory, Circuits};
use crate::charge::Charge;
use crate::clock::{Clock, Timestamp};
use crate::decision::Decision;
use crate::random::jittered;
use crate::store::compensation::{
    GroupAction, Groups, OwnedCharge, PendingRefund, decide_in_order, group_by, restore_unspent,
    scatter, without_cost,
};
use crate::store::invalidation::{Cursor, Invalidations};
use crate::store::{Action, ShardId, SharedStore, Store, StoreError};

mod circuit;

/// Successful probes in a row that close a circuit.
const SUCCESSES_TO_CLOSE: u32 = 2;

/// A circuit breaker around a store: calls fail at once while the store is failing.
///
/// The circuit of a shard opens after five failures in a row, or when at least five calls of the
/// last second failed and they are half of its calls or more. A failure is
/// [`StoreError::Timeout`], [`Unreachable`](StoreError::Unreachable) or
/// [`Refused`](StoreError::Refused); any other error is an answer of a working store. While the
/// circuit is open, every call returns [`StoreError::Open`] with the last failure.
///
/// An open shard is [probed](SharedStore::probe) several times per second until it recovers. This
/// needs a Tokio runtime; outside of one the circuit never opens.
///
/// Acquires on several shards run shard by shard. If a later shard denies or fails, the units
/// charged by the earlier ones are refunded: for a moment the store may deny too much, but it never
/// admits too much.
///
/// ```
/// use std::time::Duration;
/// use tidegate::{Breaker, Charge, Limiter, MemoryStore, Quota};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let breaker = Breaker::builder(MemoryStore::new()) // or RedisStore::connect(…)
///     .timeout(Duration::from_millis(100))
///     .failure_threshold(10)
///     .build();
/// let limiter = Limiter::new(breaker);
/// let quota = Quota::token_bucket(10, Duration::from_secs(1))?;
///
/// assert!(limiter.acquire(&Charge::new("user123", &quota)).await?.allowed);
/// assert!(limiter.store().states().iter().all(|shard| !shard.open));
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Breaker<S> {
    inner: Arc<BreakerCore<S>>,
}

#[derive(Debug)]
struct BreakerCore<S> {
    store: S,
    circuits: Circuits,
    options: Options,
}

#[derive(Debug, Clone, Copy)]
struct Options {
    timeout: Option<Duration>,
    probe_timeout: Duration,
    probe_interval: Duration,
    failure_threshold: u32,
}

/// Builder of a [`Breaker`].
///
/// ```
/// use std::time::Duration;
/// use tidegate::{Breaker, MemoryStore};
///
/// let breaker = Breaker::builder(MemoryStore::new()) // or RedisStore::connect(…)
///     .failure_threshold(3)
///     .probe_interval(Duration::from_secs(1))
///     .probe_timeout(Duration::from_millis(50))
///     .build();
/// assert!(breaker.states().is_empty()); // no shard was called yet
/// ```
#[derive(Debug)]
pub struct Builder<S> {
    store: S,
    options: Options,
}

/// State of the circuit of one shard: an entry of [`Breaker::states`], for metrics and health
/// checks.
///
/// ```
/// use tidegate::resilience::breaker::ShardState;
/// use tidegate::{Breaker, SharedStore};
///
/// /// Returns the failing shards, with the reason.
/// fn failing<S: SharedStore>(breaker: &Breaker<S>) -> Vec<String> {
///     let open = breaker.states().into_iter().filter(|state| state.open);
///     open.map(|ShardState { shard, elapsed, last_error, .. }| {
///         let reason = last_error.map(|error| error.to_string()).unwrap_or_default();
///         format!("shard {} for {elapsed:?}: {reason}", shard.0)
///     })
///     .collect()
/// }
/// # assert!(failing(&Breaker::new(tidegate::MemoryStore::new())).is_empty());
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardState {
    /// Shard that the circuit belongs to.
    pub shard: ShardId,
    /// Whether the circuit is open: the shard is failing and is not called.
    pub open: bool,
    /// Time since the circuit last opened or closed.
    pub elapsed: Duration,
    /// Number of times that the circuit has opened.
    pub times_opened: u64,
    /// Last failure while the circuit was open.
    pub last_error: Option<StoreError>,
}

impl<S: SharedStore> Builder<S> {
    /// Sets the timeout of a call, which then fails with [`StoreError::Timeout`] and counts as a
    /// failure. By default calls have no timeout here, because a `RedisStore` has one itself.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.options.timeout = Some(timeout);
        self
    }

    /// Sets the timeout of a probe; 100 ms by default. A slower store counts as failing.
    #[must_use]
    pub fn probe_timeout(mut self, timeout: Duration) -> Self {
        self.options.probe_timeout = timeout;
        self
    }

    /// Sets the mean interval between two probes; 200 ms by default. The actual intervals are
    /// jittered by up to a half.
    #[must_use]
    pub fn probe_interval(mut self, interval: Duration) -> Self {
        self.options.probe_interval = interval;
        self
    }

    /// Sets the number of failures that open a circuit: in a row, or within one second if they are
    /// at least half of the calls. 5 by default; 0 counts as 1.
    #[must_use]
    pub fn failure_threshold(mut self, failures: u32) -> Self {
        self.options.failure_threshold = failures.max(1);
        self
    }

    /// Creates the breaker, with all circuits closed.
    #[must_use]
    pub fn build(self) -> Breaker<S> {
        let Self { store, options } = self;
        Breaker { inner: Arc::new(BreakerCore { store, circuits: Circuits::new(), options }) }
    }
}

impl<S: SharedStore> Breaker<S> {
    /// Creates a breaker around this store with the default options.
    #[must_use]
    pub fn new(store: S) -> Self {
        Self::builder(store).build()
    }

    /// Returns a builder with the default options.
    #[must_use]
    pub fn builder(store: S) -> Builder<S> {
        let options = Options {
            timeout: None,
            probe_timeout: Duration::from_millis(100),
            probe_interval: Duration::from_millis(200),
            failure_threshold: 5,
        };
        Builder { store, options }
    }

    /// Returns the wrapped store.
    #[must_use]
    pub fn store(&self) -> &S {
        &self.inner.store
    }

    /// Returns the state of each shard that was called so far, ordered by shard.
    #[must_use]
    pub fn states(&self) -> Vec<ShardState> {
        let mut states: Vec<ShardState> = self.inner.circuits.iter().map(Circuit::state).collect();
        states.sort_unstable_by_key(|state| state.shard);
        states
    }

    /// Decides charges of several shards, shard by shard.
    async fn decide_shards(
        &self,
        action: Action,
        charges: &[Charge<'_>],
    ) -> Result<Vec<Decision>, StoreError> {
        let inner = &self.inner;
        let groups = group_by(charges, |charge| inner.store.shard(charge));
        let members: Vec<Vec<Charge<'_>>> =
            groups.iter().map(|group| group.iter().map(|at| charges[*at]).collect()).collect();
        let shards = ShardGroups { inner, groups: members, deadline: inner.deadline() };
        let mut circuits = (0..shards.count()).map(|group| shards.circuit(group));
        if let Some(open) = circuits.find(|circuit| circuit.is_open()) {
            return Err(inner.open_error(open));
        }
        Ok(scatter(groups, decide_in_order(&shards, action).await?))
    }
}

impl<S: SharedStore> BreakerCore<S> {
    /// Returns the deadline of a call that starts now.
    fn deadline(&self) -> Option<Instant> {
        self.options.timeout.map(|timeout| Instant::now() + timeout)
    }

    /// Awaits a call to a shard, unless its circuit is open, and counts the result. The call is
    /// pinned by the caller because moving the future would copy it.
    async fn guarded<T>(
        self: &Arc<Self>,
        circuit: &Circuit,
        deadline: Option<Instant>,
        call: Pin<&mut impl Future<Output = Result<T, StoreError>>>,
    ) -> Result<T, StoreError> {
        if circuit.is_open() {
            return Err(self.open_error(circuit));
        }
        let result = match (deadline, self.options.timeout) {
            (Some(at), Some(timeout)) => {
                timeout_at(at, call).await.unwrap_or(Err(StoreError::Timeout(timeout)))
            }
            _ => call.await,
        };
        // If the circuit has opened during the call, only probes may close it.
        if !circuit.is_open() {
            let failure = result.as_ref().err().filter(|error| is_failure(error));
            if circuit.record(failure.is_some(), self.options.failure_threshold)
                && let Some(error) = failure
            {
                self.open(circuit, error);
            }
        }
        result
    }

    fn open(self: &Arc<Self>, circuit: &Circuit, error: &StoreError) {
        // Without a runtime there is no prober, and the circuit would stay open forever.
        let Ok(runtime) = Handle::try_current() else { return };
        let mut history = circuit.history();
        if !circuit.is_open() {
            circuit.set_open(&mut history, error);
            self.start_prober(&runtime, circuit.shard, &mut history);
            // At debug level only: the callers get the error, and a fallback logs a warning.
            tracing::debug!(shard = circuit.shard.0, %error, "circuit opened");
        }
    }

    /// Returns the error of a call that was not made because the circuit is open.
    fn open_error(self: &Arc<Self>, circuit: &Circuit) -> StoreError {
        let mut history = circuit.history();
        // The runtime that the prober ran on may have shut down.
        if circuit.is_open()
            && history.prober.as_ref().is_none_or(AbortHandle::is_finished)
            && let Ok(runtime) = Handle::try_current()
        {
            self.start_prober(&runtime, circuit.shard, &mut history);
        }
        match &history.last_error {
            Some(error) => StoreError::Open(Arc::clone(error)),
            None => StoreError::Unreachable("the circuit has just closed, try again".to_owned()),
        }
    }

    fn start_prober(
        self: &Arc<Self>,
        runtime: &Handle,
        shard: ShardId,
        history: &mut CircuitHistory,
    ) {
        let prober = runtime.spawn(probe_until_closed(Arc::downgrade(self), shard, self.options));
        history.prober = Some(prober.abort_handle());
    }
}

/// Probes a shard until enough probes in a row succeed, then closes its circuit.
async fn probe_until_closed<S: SharedStore>(
    inner: Weak<BreakerCore<S>>,
    shard: ShardId,
    options: Options,
) {
    let mut successes = 0;
    loop {
        // After a success the next probe comes sooner, so that recovery is fast.
        let interval =
            if successes == 0 { options.probe_interval } else { options.probe_interval / 4 };
        sleep(jittered(interval)).await;
        let Some(inner) = inner.upgrade() else { return };
        let probed = timeout(options.probe_timeout, inner.store.probe(shard)).await;
        match probed.unwrap_or(Err(StoreError::Timeout(options.probe_timeout))) {
            Ok(()) => successes += 1,
            Err(error) => {
                successes = 0;
                inner.circuits.of(shard).history().last_error = Some(Arc::new(error));
            }
        }
        if successes == SUCCESSES_TO_CLOSE {
            let open_for = inner.circuits.of(shard).close();
            tracing::debug!(shard = shard.0, ?open_for, "circuit closed");
            return;
        }
    }
}

impl<S> Drop for Breaker<S> {
    fn drop(&mut self) {
        for circuit in self.inner.circuits.iter() {
            if let Some(prober) = circuit.history().prober.take() {
                prober.abort();
            }
        }
    }
}

/// Returns whether this error means that the store is unreachable or broken.
fn is_failure(error: &StoreError) -> bool {
    match error {
        StoreError::Timeout(_) | StoreError::Unreachable(_) | StoreError::Refused(_) => true,
        StoreError::Full { .. }
        | StoreError::Misconfigured(_)
        | StoreError::Open(_)
        | StoreError::Unreadable(_) => false,
    }
}

/// Charges grouped by the shard that decides them.
struct ShardGroups<'a, S> {
    inner: &'a Arc<BreakerCore<S>>,
    groups: Vec<Vec<Charge<'a>>>,
    /// Deadline of all groups together.
    deadline: Option<Instant>,
}

impl<S: SharedStore> ShardGroups<'_, S> {
    fn circuit(&self, group: usize) -> &Circuit {
        self.inner.circuits.of(shard_of(&self.inner.store, &self.groups[group]))
    }

    async fn call(
        &self,
        group: usize,
        action: Action,
        charges: &[Charge<'_>],
    ) -> Result<Vec<Decision>, StoreError> {
        let call = pin!(self.inner.store.decide_all(action, charges));
        self.inner.guarded(self.circuit(group), self.deadline, call).await
    }

    /// Reads the counts of a group without spending.
    async fn read(&self, group: usize) -> Result<Vec<Decision>, StoreError> {
        self.call(group, Action::ChargeUpTo, &without_cost(&self.groups[group])).await
    }
}

/// Returns the shard of a group, all charges of which have the same.
fn shard_of<S: SharedStore>(store: &S, group: &[Charge<'_>]) -> ShardId {
    group.first().map_or(ShardId::SINGLE, |charge| store.shard(charge))
}

impl<S: SharedStore> Groups for ShardGroups<'_, S> {
    fn count(&self) -> usize {
        self.groups.len()
    }

    fn charges(&self, group: usize) -> &[Charge<'_>] {
        &self.groups[group]
    }

    async fn decide(&self, group: usize, action: GroupAction) -> Result<Vec<Decision>, StoreError> {
        let charges = &self.groups[group];
        match action {
            GroupAction::Apply(action) => self.call(group, action, charges).await,
            GroupAction::ReadUnspent => self.read(group).await,
            GroupAction::CountDenied => {
                let mut peeked = self.call(group, Action::Peek, charges).await?;
                if peeked.iter().all(|decision| decision.allowed) {
                    match self.read(group).await {
                        Ok(unspent) => return Ok(unspent),
                        Err(_) => restore_unspent(charges, &mut peeked),
                    }
                }
                Ok(peeked)
            }
        }
    }

    fn refund(&self, charges: &[Charge<'_>]) -> PendingRefund {
        let owned: Vec<OwnedCharge> = charges.iter().map(OwnedCharge::of).collect();
        let inner = Arc::clone(self.inner);
        let shard = shard_of(&inner.store, charges);
        // A task, so that the refund completes even if the caller is dropped.
        let task = Handle::try_current().ok().map(|runtime| {
            runtime.spawn(async move {
                let charges: Vec<Charge<'_>> = owned.iter().map(OwnedCharge::charge).collect();
                let refund = pin!(inner.store.decide_all(Action::Refund, &charges));
                // If the refund fails, the units count until they expire: the store denies too
                // much, but never admits too much.
                inner.guarded(inner.circuits.of(shard), inner.deadline(), refund).await.ok()
            })
        });
        let deadline = self.deadline;
        Box::pin(async move {
            match deadline {
                Some(deadline) => timeout_at(deadline, task?).await.ok()?.ok()?,
                None => task?.await.ok()?,
            }
        })
    }

    fn now(&self) -> Timestamp {
        self.inner.store.clock().now()
    }
}

impl<S: SharedStore> Store for Breaker<S> {
    async fn decide(&self, action: Action, charge: &Charge<'_>) -> Result<Decision, StoreError> {
        let circuit = self.inner.circuits.of(self.inner.store.shard(charge));
        self.inner
            .guarded(circuit, self.inner.deadline(), pin!(self.inner.store.decide(action, charge)))
            .await
    }

    async fn decide_all(
        &self,
        action: Action,
        charges: &[Charge<'_>],
    ) -> Result<Vec<Decision>, StoreError> {
        let store = &self.inner.store;
        let Some((first, others)) = charges.split_first() else { return Ok(Vec::new()) };
        let shard = store.shard(first);
        if others.iter().any(|charge| store.shard(charge) != shard) {
            return Box::pin(self.decide_shards(action, charges)).await;
        }
        let circuit = self.inner.circuits.of(shard);
        self.inner
            .guarded(circuit, self.inner.deadline(), pin!(store.decide_all(action, charges)))
            .await
    }

    fn clock(&self) -> &dyn Clock {
        self.inner.store.clock()
    }
}

impl<S: SharedStore> SharedStore for Breaker<S> {
    fn shard(&self, charge: &Charge<'_>) -> ShardId {
        self.inner.store.shard(charge)
    }

    async fn probe(&self, shard: ShardId) -> Result<(), StoreError> {
        self.inner.store.probe(shard).await
    }

    async fn heartbeat(&self, instance: &str) -> Result<Vec<String>, StoreError> {
        self.inner.store.heartbeat(instance).await
    }

    fn invalidations(
        &self,
        since: &Cursor,
    ) -> Option<impl Future<Output = Result<Invalidations, StoreError>> + Send> {
        self.inner.store.invalidations(since)
    }

    fn epoch(&self) -> u64 {
        self.inner.store.epoch()
    }

    fn epoch_of(&self, charge: &Charge<'_>) -> u64 {
        self.inner.store.epoch_of(charge)
    }
}
