//! [`Breaker`]: stops asking a store that fails, so that nobody waits for it, and looks by itself when it is back.
//!
//! One circuit for each [`Part`] of the store, for parts fail apart. Closed, calls pass and are
//! counted with a few atomic steps. Open, they fail at once, while a task in the background probes
//! the part; two good probes in a row close it.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use self::circuit::{Circuit, Circuits, History};
use super::jittered;
use crate::charge::Charge;
use crate::clock::{Clock, Timestamp};
use crate::decision::Decision;
use crate::store::in_order::{
    Groups, Owned, Refund, Step, group_by, in_order, in_places, restore_unspent, without_cost,
};
use crate::store::news::{Mark, News};
use crate::store::{Action, Part, Store, StoreError};

mod circuit;

/// So many good probes in a row close a circuit.
const GOOD_PROBES: u32 = 2;

/// A store around a store that fails at once while the inner one is failing.
///
/// It opens for a part after five failures in a row, or when at least five calls of the last second
/// failed and that is half of them or more. A failure is [`StoreError::Timeout`],
/// [`Unreachable`](StoreError::Unreachable) or [`Refused`](StoreError::Refused); any other error is
/// the answer of a store that is there. While open, the error is [`StoreError::Open`] with the last
/// failure in it.
///
/// A part is [probed](Store::probe) several times a second until it is back. A probe that says yes
/// while decisions still fail would make the breaker flap, so a store's probe should do what a
/// decision does.
///
/// It needs a Tokio runtime to probe on; outside of one it never opens. Over several parts, an
/// acquire goes from part to part in order and gives back what it took when a later part denies or
/// fails: it may refuse a little too much for a moment, and never admits too much.
#[derive(Debug)]
pub struct Breaker<S> {
    inner: Arc<Inner<S>>,
}

#[derive(Debug)]
struct Inner<S> {
    store: S,
    circuits: Circuits,
    options: Options,
}

#[derive(Debug, Clone, Copy)]
struct Options {
    deadline: Option<Duration>,
    probe_deadline: Duration,
    probe_pause: Duration,
    failures: u32,
}

/// Options of a [`Breaker`].
#[derive(Debug)]
pub struct Builder<S> {
    store: S,
    options: Options,
}

/// How a part of the store does, as a breaker sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PartState {
    /// Which part.
    pub part: Part,
    /// Whether it is not asked.
    pub open: bool,
    /// For how long it has been open, or closed.
    pub since: Duration,
    /// How often it was opened.
    pub opened: u64,
    /// The last failure while it was open.
    pub last_error: Option<StoreError>,
}

impl<S: Store> Builder<S> {
    /// How long a call may take; none by default, for a `RedisStore` has its own.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.options.deadline = Some(deadline);
        self
    }

    /// How long a probe may take; 100 ms by default. A store that is slower is not back.
    #[must_use]
    pub fn probe_deadline(mut self, deadline: Duration) -> Self {
        self.options.probe_deadline = deadline;
        self
    }

    /// How long between two probes, give or take a half; 200 ms by default.
    #[must_use]
    pub fn probe_pause(mut self, pause: Duration) -> Self {
        self.options.probe_pause = pause;
        self
    }

    /// How many failures open it; 5 by default.
    #[must_use]
    pub fn failures(mut self, failures: u32) -> Self {
        self.options.failures = failures.max(1);
        self
    }

    /// The breaker.
    #[must_use]
    pub fn build(self) -> Breaker<S> {
        let Self { store, options } = self;
        Breaker { inner: Arc::new(Inner { store, circuits: Circuits::new(), options }) }
    }
}

impl<S: Store> Breaker<S> {
    /// A closed breaker around this store.
    #[must_use]
    pub fn new(store: S) -> Self {
        Self::builder(store).build()
    }

    /// A breaker with options.
    #[must_use]
    pub fn builder(store: S) -> Builder<S> {
        let options = Options {
            deadline: None,
            probe_deadline: Duration::from_millis(100),
            probe_pause: Duration::from_millis(200),
            failures: 5,
        };
        Builder { store, options }
    }

    /// The store within.
    #[must_use]
    pub fn store(&self) -> &S {
        &self.inner.store
    }

    /// Each part that was asked so far, in their order.
    #[must_use]
    pub fn states(&self) -> Vec<PartState> {
        let state = |circuit: &Circuit| {
            let history = circuit.history();
            PartState {
                part: circuit.part,
                open: circuit.is_open(),
                since: history.since.elapsed(),
                opened: history.opened,
                last_error: history.last_error.as_deref().cloned(),
            }
        };
        let mut states: Vec<PartState> = self.inner.circuits.iter().map(state).collect();
        states.sort_unstable_by_key(|state| state.part);
        states
    }

    /// Decides charges of several parts, part by part.
    async fn decide_parts(
        &self,
        action: Action,
        charges: &[Charge<'_>],
    ) -> Result<Vec<Decision>, StoreError> {
        let inner = &self.inner;
        let groups = group_by(charges, |charge| inner.store.part(charge));
        let members: Vec<Vec<Charge<'_>>> =
            groups.iter().map(|group| group.iter().map(|at| charges[*at]).collect()).collect();
        let deadline = inner.deadline();
        let parts = Parts { inner, groups: members, deadline };
        let mut circuits = (0..parts.count()).map(|group| parts.circuit(group));
        if let Some(open) = circuits.find(|circuit| circuit.is_open()) {
            return Err(inner.refusal(open));
        }
        Ok(in_places(groups, in_order(&parts, action).await?))
    }
}

impl<S: Store> Inner<S> {
    /// When a call that begins now must have ended.
    fn deadline(&self) -> Option<Instant> {
        self.options.deadline.map(|deadline| Instant::now() + deadline)
    }

    /// A call to a part of the store, if it is not known to fail. The call stays where it is: each
    /// move would copy it.
    async fn guarded<T>(
        self: &Arc<Self>,
        circuit: &Circuit,
        deadline: Option<Instant>,
        call: Pin<&mut impl Future<Output = Result<T, StoreError>>>,
    ) -> Result<T, StoreError> {
        if circuit.is_open() {
            return Err(self.refusal(circuit));
        }
        let result = match (deadline, self.options.deadline) {
            (Some(at), Some(deadline)) => {
                timeout_at(at, call).await.unwrap_or(Err(StoreError::Timeout(deadline)))
            }
            _ => call.await,
        };
        // A circuit that others have opened meanwhile is closed by probes alone.
        if !circuit.is_open() {
            let failure = result.as_ref().err().filter(|error| is_failure(error));
            if circuit.count(failure.is_some(), self.options.failures)
                && let Some(error) = failure
            {
                self.open(circuit, error);
            }
        }
        result
    }

    fn open(self: &Arc<Self>, circuit: &Circuit, error: &StoreError) {
        // Nobody could close it again.
        let Ok(runtime) = Handle::try_current() else { return };
        let mut history = circuit.history();
        if !circuit.is_open() {
            circuit.set_open(&mut history, error);
            self.start_prober(&runtime, circuit.part, &mut history);
            // The callers have the error, and warn of it where they have to do without the store.
            tracing::debug!(part = circuit.part.0, %error, "the store is failing, and is not asked until it is back");
        }
    }

    /// Why a call was not made.
    fn refusal(self: &Arc<Self>, circuit: &Circuit) -> StoreError {
        let mut history = circuit.history();
        // The runtime that it ran on may have ended.
        if circuit.is_open()
            && history.prober.as_ref().is_none_or(tokio::task::AbortHandle::is_finished)
            && let Ok(runtime) = Handle::try_current()
        {
            self.start_prober(&runtime, circuit.part, &mut history);
        }
        match &history.last_error {
            Some(error) => StoreError::Open(Arc::clone(error)),
            None => StoreError::Unreachable("it has just come back: try again".to_owned()),
        }
    }

    fn start_prober(self: &Arc<Self>, runtime: &Handle, part: Part, history: &mut History) {
        let prober = runtime.spawn(probe_until_back(Arc::downgrade(self), part, self.options));
        history.prober = Some(prober.abort_handle());
    }
}

async fn probe_until_back<S: Store>(inner: Weak<Inner<S>>, part: Part, options: Options) {
    let mut good = 0;
    loop {
        let pause = if good == 0 { options.probe_pause } else { options.probe_pause / 4 };
        sleep(jittered(pause)).await;
        let Some(inner) = inner.upgrade() else { return };
        let deadline = options.probe_deadline;
        match timeout(deadline, inner.store.probe(part))
            .await
            .unwrap_or(Err(StoreError::Timeout(deadline)))
        {
            Ok(()) => good += 1,
            Err(error) => {
                good = 0;
                inner.circuits.of(part).history().last_error = Some(Arc::new(error));
            }
        }
        if good == GOOD_PROBES {
            let open_for = inner.circuits.of(part).close();
            tracing::debug!(part = part.0, ?open_for, "the store is back");
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

/// Whether it tells that the store is not there, or not well.
fn is_failure(error: &StoreError) -> bool {
    match error {
        StoreError::Timeout(_) | StoreError::Unreachable(_) | StoreError::Refused(_) => true,
        StoreError::Full { .. }
        | StoreError::Misconfigured(_)
        | StoreError::Open(_)
        | StoreError::Unreadable(_) => false,
    }
}

/// Charges that several parts decide, each with its circuit.
struct Parts<'a, S> {
    inner: &'a Arc<Inner<S>>,
    groups: Vec<Vec<Charge<'a>>>,
    /// For all of them together.
    deadline: Option<Instant>,
}

impl<S: Store> Parts<'_, S> {
    fn circuit(&self, group: usize) -> &Circuit {
        // A group has at least one charge.
        let part =
            self.groups[group].first().map_or(Part::WHOLE, |charge| self.inner.store.part(charge));
        self.inner.circuits.of(part)
    }
}

impl<S: Store> Groups for Parts<'_, S> {
    fn count(&self) -> usize {
        self.groups.len()
    }

    fn charges(&self, group: usize) -> &[Charge<'_>] {
        &self.groups[group]
    }

    async fn ask(&self, group: usize, step: Step) -> Result<Vec<Decision>, StoreError> {
        let charges = &self.groups[group];
        let ask = async |action, charges: &[Charge<'_>]| {
            let call = pin!(self.inner.store.decide_all(action, charges));
            self.inner.guarded(self.circuit(group), self.deadline, call).await
        };
        match step {
            Step::Do(action) => ask(action, charges).await,
            Step::Look => ask(Action::ChargeUpTo, &without_cost(charges)).await,
            Step::Forgo => {
                let mut peeked = ask(Action::Peek, charges).await?;
                if peeked.iter().all(|decision| decision.allowed) {
                    match ask(Action::ChargeUpTo, &without_cost(charges)).await {
                        Ok(unspent) => return Ok(unspent),
                        Err(_) => restore_unspent(charges, &mut peeked),
                    }
                }
                Ok(peeked)
            }
        }
    }

    fn refund(&self, charges: &[Charge<'_>]) -> Refund {
        let owned: Vec<Owned> = charges.iter().map(Owned::of).collect();
        let inner = Arc::clone(self.inner);
        let part = charges.first().map_or(Part::WHOLE, |charge| inner.store.part(charge));
        let task = Handle::try_current().ok().map(|runtime| {
            runtime.spawn(async move {
                let charges: Vec<Charge<'_>> = owned.iter().map(Owned::charge).collect();
                let refund = pin!(inner.store.decide_all(Action::Refund, &charges));
                // What cannot be given back counts until it expires: too much refused, never too
                // much admitted.
                inner.guarded(inner.circuits.of(part), inner.deadline(), refund).await.ok()
            })
        });
        // It goes on even if nobody has the time to hear of it.
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

impl<S: Store> Store for Breaker<S> {
    async fn decide(&self, action: Action, charge: &Charge<'_>) -> Result<Decision, StoreError> {
        let circuit = self.inner.circuits.of(self.inner.store.part(charge));
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
        let part = store.part(first);
        if others.iter().any(|charge| store.part(charge) != part) {
            return Box::pin(self.decide_parts(action, charges)).await;
        }
        let circuit = self.inner.circuits.of(part);
        self.inner
            .guarded(circuit, self.inner.deadline(), pin!(store.decide_all(action, charges)))
            .await
    }

    fn clock(&self) -> &dyn Clock {
        self.inner.store.clock()
    }

    fn part(&self, charge: &Charge<'_>) -> Part {
        self.inner.store.part(charge)
    }

    async fn probe(&self, part: Part) -> Result<(), StoreError> {
        self.inner.store.probe(part).await
    }

    async fn announce(&self, instance: &str) -> Result<Vec<String>, StoreError> {
        self.inner.store.announce(instance).await
    }

    fn news(&self, since: &Mark) -> Option<impl Future<Output = Result<News, StoreError>> + Send> {
        self.inner.store.news(since)
    }

    fn epoch(&self) -> u64 {
        self.inner.store.epoch()
    }

    fn epoch_of(&self, charge: &Charge<'_>) -> u64 {
        self.inner.store.epoch_of(charge)
    }
}
