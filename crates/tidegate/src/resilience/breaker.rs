//! [`Breaker`]: stops asking a store that fails, so that nobody waits for it, and looks by itself when it is back.
//!
//! One circuit for each [`Part`] of the store, for parts fail apart. Closed, calls pass and are counted with a few atomic
//! steps. Open, they fail at once, while a task in the background probes the part; two good probes in a row close it.

use std::future::Future;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::{sleep, timeout};

use self::circuit::{Circuit, Circuits, History};
use super::jittered;
use crate::charge::Charge;
use crate::clock::Clock;
use crate::decision::Decision;
use crate::store::{Action, Part, Store, StoreError};

mod circuit;

/// So many good probes in a row close a circuit.
const GOOD_PROBES: u32 = 2;

/// A store around a store that fails at once while the inner one is failing.
///
/// It opens for a part after five failures in a row, or when at least five calls of the last second failed and that is half
/// of them or more. A failure is [`StoreError::Timeout`], [`Unreachable`](StoreError::Unreachable) or
/// [`Refused`](StoreError::Refused); any other error is the answer of a store that is there. While open, the error is
/// [`StoreError::Open`] with the last failure in it.
///
/// A part is [probed](Store::probe) several times a second until it is back. A probe that says yes while decisions still
/// fail would make the breaker flap, so a store's probe should do what a decision does.
///
/// It needs a Tokio runtime to probe on; outside of one it never opens. Over several parts, an acquire goes from part to part
/// in order and gives back what it took when a later part denies or fails: it may refuse a little too much for a
/// moment, and never admits too much.
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
    async fn decide_parts(&self, action: Action, charges: &[Charge<'_>]) -> Result<Vec<Decision>, StoreError> {
        let inner = &self.inner;
        let groups = by_part(&inner.store, charges);
        if let Some(open) = groups.iter().map(|group| inner.circuits.of(group.part)).find(|circuit| circuit.is_open()) {
            return Err(inner.refusal(open));
        }
        let mut answers: Vec<Vec<Decision>> = Vec::with_capacity(groups.len());
        let mut first_denial = None;
        for group in &groups {
            // Once a part has denied, the others only look.
            let step = if first_denial.is_some() && action == Action::Acquire { Action::Peek } else { action };
            let found =
                inner.guarded(inner.circuits.of(group.part), inner.store.decide_all(step, &group.charges)).await;
            let denies = found.as_ref().is_ok_and(|found| found.iter().any(|decision| !decision.allowed));
            if step == Action::Acquire && (denies || found.is_err()) {
                inner.give_back(&groups, &mut answers).await;
            }
            if denies && first_denial.is_none() {
                first_denial = Some(answers.len());
            }
            answers.push(found?);
        }
        if let Some(first_denial) = first_denial {
            let peeked = if action == Action::Peek { 0 } else { first_denial + 1 };
            groups.iter().zip(&mut answers).skip(peeked).for_each(|(group, answer)| group.untake(answer));
        }
        let mut decisions: Vec<(usize, Decision)> =
            groups.iter().zip(answers).flat_map(|(group, answer)| group.places.iter().copied().zip(answer)).collect();
        decisions.sort_unstable_by_key(|(place, _)| *place);
        Ok(decisions.into_iter().map(|(_, decision)| decision).collect())
    }
}

impl<S: Store> Inner<S> {
    /// A call to a part of the store, if it is not known to fail.
    async fn guarded<T>(
        self: &Arc<Self>,
        circuit: &Circuit,
        call: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        if circuit.is_open() {
            return Err(self.refusal(circuit));
        }
        let result = match self.options.deadline {
            Some(deadline) => timeout(deadline, call).await.unwrap_or(Err(StoreError::Timeout(deadline))),
            None => call.await,
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
            tracing::warn!(part = circuit.part.0, %error, "the store is failing, and is not asked until it is back");
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

    /// Gives back what the answered groups took. Their decisions are then those of charges that would have fitted.
    async fn give_back(self: &Arc<Self>, groups: &[Group<'_>], answers: &mut [Vec<Decision>]) {
        for (group, answer) in groups.iter().zip(answers) {
            let refund = self.store.decide_all(Action::Refund, &group.charges);
            // What cannot be given back counts until it expires: too much refused, never too much admitted.
            if let Ok(refunded) = self.guarded(self.circuits.of(group.part), refund).await {
                *answer = refunded;
            }
        }
    }
}

async fn probe_until_back<S: Store>(inner: Weak<Inner<S>>, part: Part, options: Options) {
    let mut good = 0;
    loop {
        let pause = if good == 0 { options.probe_pause } else { options.probe_pause / 4 };
        sleep(jittered(pause)).await;
        let Some(inner) = inner.upgrade() else { return };
        let deadline = options.probe_deadline;
        match timeout(deadline, inner.store.probe(part)).await.unwrap_or(Err(StoreError::Timeout(deadline))) {
            Ok(()) => good += 1,
            Err(error) => {
                good = 0;
                inner.circuits.of(part).history().last_error = Some(Arc::new(error));
            }
        }
        if good == GOOD_PROBES {
            let open_for = inner.circuits.of(part).close();
            tracing::info!(part = part.0, ?open_for, "the store is back");
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
        StoreError::Full { .. } | StoreError::Misconfigured(_) | StoreError::Open(_) => false,
    }
}

/// The charges of one part, and where they stand among all.
struct Group<'a> {
    part: Part,
    places: Vec<usize>,
    charges: Vec<Charge<'a>>,
}

/// In the order in which the parts first appear.
fn by_part<'a, S: Store>(store: &S, charges: &[Charge<'a>]) -> Vec<Group<'a>> {
    let mut groups: Vec<Group<'a>> = Vec::new();
    for (place, charge) in charges.iter().enumerate() {
        let part = store.part(charge);
        let at = groups.iter().position(|group| group.part == part).unwrap_or_else(|| {
            groups.push(Group { part, places: Vec::new(), charges: Vec::new() });
            groups.len() - 1
        });
        groups[at].places.push(place);
        groups[at].charges.push(*charge);
    }
    groups
}

impl Group<'_> {
    /// A look said what would be left if all were taken, but another part denies. (A group that itself denies has said so
    /// already.)
    fn untake(&self, answer: &mut [Decision]) {
        if answer.iter().all(|decision| decision.allowed) {
            for (charge, decision) in self.charges.iter().zip(answer) {
                decision.remaining += charge.units();
                decision.delay = Duration::ZERO;
            }
        }
    }
}

impl<S: Store> Store for Breaker<S> {
    async fn decide(&self, action: Action, charge: &Charge<'_>) -> Result<Decision, StoreError> {
        let circuit = self.inner.circuits.of(self.inner.store.part(charge));
        self.inner.guarded(circuit, self.inner.store.decide(action, charge)).await
    }

    async fn decide_all(&self, action: Action, charges: &[Charge<'_>]) -> Result<Vec<Decision>, StoreError> {
        let store = &self.inner.store;
        let Some((first, others)) = charges.split_first() else { return Ok(Vec::new()) };
        let part = store.part(first);
        if others.iter().any(|charge| store.part(charge) != part) {
            return self.decide_parts(action, charges).await;
        }
        self.inner.guarded(self.inner.circuits.of(part), store.decide_all(action, charges)).await
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
}
