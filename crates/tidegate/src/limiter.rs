//! [`Limiter`]: the front of the library.

use std::sync::Arc;
use std::time::Duration;

use crate::algorithm::Algorithm;
use crate::charge::{Charge, ChargeError};
use crate::clock::{Clock, Timestamp};
use crate::decision::Decision;
use crate::policy::SelectError;
use crate::quota::Quota;
use crate::store::memory::MemoryStore;
use crate::store::{Action, Store, StoreError};

/// Decides whether requests may pass. Clones share one store, and so one set of counts.
#[derive(Debug)]
pub struct Limiter<S = MemoryStore> {
    store: Arc<S>,
}

/// Why there is no decision.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The charge itself is wrong: the caller's mistake.
    #[error(transparent)]
    Charge(#[from] ChargeError),
    /// The store could not decide.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The policies make no key of this request: the request's fault.
    #[error(transparent)]
    Select(#[from] SelectError),
    /// A limit goes by the client's address, and nobody told which it is: a mistake in how a
    /// service is put together.
    #[error(
        "a limit counts by ip, but the address of the peer is not known: tell the layer how to find it"
    )]
    UnknownPeer,
}

impl<S> Clone for Limiter<S> {
    fn clone(&self) -> Self {
        Self { store: Arc::clone(&self.store) }
    }
}

impl<S: Store> Limiter<S> {
    /// A limiter whose counts live in `store`.
    #[must_use]
    pub fn new(store: S) -> Self {
        Self { store: Arc::new(store) }
    }

    /// The store.
    #[must_use]
    pub fn store(&self) -> &S {
        &self.store
    }

    /// Decides and, if allowed, spends.
    pub async fn acquire(&self, charge: &Charge<'_>) -> Result<Decision, Error> {
        self.decide(Action::Acquire, charge).await
    }

    /// Decides several charges together, all or nothing: if one denies, none is spent. The
    /// decisions come in the order of the charges; the request may pass if all are allowed. A
    /// charge that would have been allowed but for another says `allowed`, and what is left with
    /// nothing taken.
    pub async fn acquire_all(&self, charges: &[Charge<'_>]) -> Result<Vec<Decision>, Error> {
        self.decide_all(Action::Acquire, charges).await
    }

    /// What [`acquire`](Self::acquire) would answer; writes nothing.
    pub async fn peek(&self, charge: &Charge<'_>) -> Result<Decision, Error> {
        charge.check_cost()?;
        self.decide(Action::Peek, charge).await
    }

    /// What [`acquire_all`](Self::acquire_all) would answer; writes nothing.
    pub async fn peek_all(&self, charges: &[Charge<'_>]) -> Result<Vec<Decision>, Error> {
        charges.iter().try_for_each(Charge::check_cost)?;
        self.decide_all(Action::Peek, charges).await
    }

    /// Records units that were used already, such as the bytes of a finished response: always
    /// charges, even beyond the limit. The overdraft is bounded ([`Quota::max_level`]) and paid
    /// back by time. `allowed` says whether the units fitted; if not, `remaining` is 0 and
    /// `retry_after` is the wait until one unit is free again.
    pub async fn report(&self, charge: &Charge<'_>) -> Result<Decision, Error> {
        self.decide(Action::Report, charge).await
    }

    /// Returns the units of an earlier charge, and answers what is left then.
    /// [`Charge::charged_at`] names the time of that charge; without it the oldest units that still
    /// count are returned, so that the limit is never exceeded.
    pub async fn refund(&self, charge: &Charge<'_>) -> Result<Decision, Error> {
        self.decide(Action::Refund, charge).await
    }

    /// Forgets the charge's count.
    pub async fn reset(&self, charge: &Charge<'_>) -> Result<Decision, Error> {
        self.decide(Action::Reset, charge).await
    }

    /// Sleeps until the charge is admitted, for `timeout` at most, and through the delay of a
    /// `leaky-bucket`.
    ///
    /// Each sleep is as long as the store says that it must be; there is no polling. If the wait
    /// cannot end within the timeout, the answer is a denial at once, with nothing spent. For a
    /// `leaky-bucket` whose queue has room but whose turn would come too late, `retry_after` is how
    /// long until the turn would come in time.
    ///
    /// Cancel-safe: a future that is dropped while it sleeps has spent nothing, but for two cases
    /// that nobody can undo: dropped in the middle of a call to Redis, the call may have been
    /// heard; and once admitted to a `leaky-bucket`, its place in the queue is spent, and drains by
    /// itself.
    ///
    /// Who waits does not hammer: denials along the way do not count, whatever the quota says of
    /// denied requests.
    pub async fn wait(&self, charge: &Charge<'_>, timeout: Duration) -> Result<Decision, Error> {
        charge.check(Action::Acquire)?;
        let clock = self.store.clock();
        let quota = quiet(charge.quota());
        let charge = charge.with_quota(&quota);
        let mut wait = Wait::new(&charge, clock, timeout);
        loop {
            let decision = self.store.decide(wait.action, &charge).await?;
            match wait.next(&charge, decision) {
                Next::Sleep(duration) => clock.sleep(duration).await,
                Next::Ask => {}
                Next::Turn(decision) => {
                    clock.sleep(decision.delay).await;
                    return Ok(decision);
                }
                Next::Done(decision) => return Ok(decision),
            }
        }
    }

    /// Any of the actions on one charge.
    pub async fn decide(&self, action: Action, charge: &Charge<'_>) -> Result<Decision, Error> {
        charge.check(action)?;
        Ok(self.store.decide(action, charge).await?)
    }

    /// Any of the actions on several charges; see [`Store::decide_all`].
    pub async fn decide_all(
        &self,
        action: Action,
        charges: &[Charge<'_>],
    ) -> Result<Vec<Decision>, Error> {
        Charge::check_all(action, charges)?;
        Ok(self.store.decide_all(action, charges).await?)
    }
}

/// The quota of somebody who waits: a denial along the way is no attempt to get in.
fn quiet(quota: &Quota) -> Quota {
    match quota.clone().with_count_denied(false) {
        Ok(quota) => quota,
        // Only a log counts denials.
        Err(_) => quota.clone(),
    }
}

/// The steps of a wait, the same for async and blocking callers.
struct Wait<'a> {
    clock: &'a dyn Clock,
    deadline: Timestamp,
    /// What to ask the store for next.
    action: Action,
    /// Admitted to a queue, but with a turn that is too late: the place is being given back.
    too_late: Option<Decision>,
}

enum Next {
    Sleep(Duration),
    Ask,
    /// Admitted; its turn comes after its delay.
    Turn(Decision),
    Done(Decision),
}

impl<'a> Wait<'a> {
    fn new(charge: &Charge<'_>, clock: &'a dyn Clock, timeout: Duration) -> Self {
        let deadline = clock.now().saturating_add(timeout);
        Self { clock, deadline, action: first_look(charge), too_late: None }
    }

    fn next(&mut self, charge: &Charge<'_>, decision: Decision) -> Next {
        let left = self.deadline.saturating_duration_since(self.clock.now());
        if let Some(too_late) = self.too_late {
            let Decision { remaining, reset_after, .. } = decision;
            return Next::Done(Decision { remaining, reset_after, ..too_late });
        }
        let queued = charge.quota().algorithm() == Algorithm::LeakyBucket;
        if !decision.allowed {
            self.action = first_look(charge);
            // In a queue its turn comes only when all that is in it now has drained.
            let until_through = if queued { decision.reset_after } else { decision.retry_after };
            let in_time = until_through <= left;
            return if in_time { Next::Sleep(decision.retry_after) } else { Next::Done(decision) };
        }
        if decision.delay > left {
            let too_late = Decision {
                allowed: false,
                remaining: decision.remaining + charge.cost(),
                retry_after: decision.delay.saturating_sub(left),
                reset_after: decision.delay,
                delay: Duration::ZERO,
                ..decision
            };
            if self.action == Action::Peek {
                return Next::Done(too_late);
            }
            // Others went ahead between our look and our step.
            self.action = Action::Refund;
            self.too_late = Some(too_late);
            return Next::Ask;
        }
        if self.action == Action::Peek {
            self.action = Action::Acquire;
            return Next::Ask;
        }
        if decision.delay.is_zero() { Next::Done(decision) } else { Next::Turn(decision) }
    }
}

/// A queue may have room but a turn that is too late: there a look comes before the step.
fn first_look(charge: &Charge<'_>) -> Action {
    if charge.quota().algorithm() == Algorithm::LeakyBucket {
        Action::Peek
    } else {
        Action::Acquire
    }
}

impl Limiter<MemoryStore> {
    /// The same calls without `async`: memory answers at once and needs no runtime.
    #[must_use]
    pub fn blocking(&self) -> Blocking<'_> {
        Blocking { store: &self.store }
    }
}

/// The calls of a [`Limiter`] on memory for callers that are not async.
#[derive(Debug, Clone, Copy)]
pub struct Blocking<'a> {
    store: &'a MemoryStore,
}

impl Blocking<'_> {
    /// See [`Limiter::acquire`].
    pub fn acquire(&self, charge: &Charge<'_>) -> Result<Decision, Error> {
        self.decide(Action::Acquire, charge)
    }

    /// See [`Limiter::acquire_all`].
    pub fn acquire_all(&self, charges: &[Charge<'_>]) -> Result<Vec<Decision>, Error> {
        self.decide_all(Action::Acquire, charges)
    }

    /// See [`Limiter::peek`].
    pub fn peek(&self, charge: &Charge<'_>) -> Result<Decision, Error> {
        charge.check_cost()?;
        self.decide(Action::Peek, charge)
    }

    /// See [`Limiter::peek_all`].
    pub fn peek_all(&self, charges: &[Charge<'_>]) -> Result<Vec<Decision>, Error> {
        charges.iter().try_for_each(Charge::check_cost)?;
        self.decide_all(Action::Peek, charges)
    }

    /// See [`Limiter::report`].
    pub fn report(&self, charge: &Charge<'_>) -> Result<Decision, Error> {
        self.decide(Action::Report, charge)
    }

    /// See [`Limiter::refund`].
    pub fn refund(&self, charge: &Charge<'_>) -> Result<Decision, Error> {
        self.decide(Action::Refund, charge)
    }

    /// See [`Limiter::reset`].
    pub fn reset(&self, charge: &Charge<'_>) -> Result<Decision, Error> {
        self.decide(Action::Reset, charge)
    }

    /// See [`Limiter::wait`]; blocks the thread.
    pub fn wait(&self, charge: &Charge<'_>, timeout: Duration) -> Result<Decision, Error> {
        charge.check(Action::Acquire)?;
        let clock = self.store.clock();
        let quota = quiet(charge.quota());
        let charge = charge.with_quota(&quota);
        let mut wait = Wait::new(&charge, clock, timeout);
        loop {
            let decision = self.store.decide_now(wait.action, &charge)?;
            match wait.next(&charge, decision) {
                Next::Sleep(duration) => clock.sleep_blocking(duration),
                Next::Ask => {}
                Next::Turn(decision) => {
                    clock.sleep_blocking(decision.delay);
                    return Ok(decision);
                }
                Next::Done(decision) => return Ok(decision),
            }
        }
    }

    /// See [`Limiter::decide`].
    pub fn decide(&self, action: Action, charge: &Charge<'_>) -> Result<Decision, Error> {
        self.store.decide_checked(action, charge, || Ok(charge.check(action)?))
    }

    /// See [`Limiter::decide_all`].
    pub fn decide_all(
        &self,
        action: Action,
        charges: &[Charge<'_>],
    ) -> Result<Vec<Decision>, Error> {
        Charge::check_all(action, charges)?;
        Ok(self.store.decide_all_now(action, charges)?)
    }
}
