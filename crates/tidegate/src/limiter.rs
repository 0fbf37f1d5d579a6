//! [`Limiter`]: the front of the library.

use std::sync::Arc;
use std::time::Duration;

use crate::algorithm::Algorithm;
use crate::charge::{Charge, ChargeError};
use crate::clock::Clock;
use crate::decision::Decision;
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

    /// Decides several charges together, all or nothing: if one denies, none is spent. The decisions come in the order of
    /// the charges; the request may pass if all are allowed. A charge that would have been allowed but for another says
    /// `allowed`, and what is left with nothing taken.
    pub async fn acquire_all(&self, charges: &[Charge<'_>]) -> Result<Vec<Decision>, Error> {
        self.decide_all(Action::Acquire, charges).await
    }

    /// What [`acquire`](Self::acquire) would answer; writes nothing.
    pub async fn peek(&self, charge: &Charge<'_>) -> Result<Decision, Error> {
        self.decide(Action::Peek, charge).await
    }

    /// What [`acquire_all`](Self::acquire_all) would answer; writes nothing.
    pub async fn peek_all(&self, charges: &[Charge<'_>]) -> Result<Vec<Decision>, Error> {
        self.decide_all(Action::Peek, charges).await
    }

    /// Gives the charge's cost back, the newest units first, and tells what is left then.
    pub async fn refund(&self, charge: &Charge<'_>) -> Result<Decision, Error> {
        self.decide(Action::Refund, charge).await
    }

    /// Forgets the charge's count.
    pub async fn reset(&self, charge: &Charge<'_>) -> Result<Decision, Error> {
        self.decide(Action::Reset, charge).await
    }

    /// Sleeps until the charge is admitted, for `timeout` at most, and through the delay of a `leaky-bucket`.
    ///
    /// Each sleep is as long as the store says that it must be; there is no polling. If the wait cannot end within the
    /// timeout, the answer is a denial at once, with nothing spent. For a `leaky-bucket` whose queue has room but
    /// whose turn would come too late, `retry_after` is how long until the turn would come in time.
    ///
    /// Cancel-safe: a future that is dropped while it waits has spent nothing. (Once admitted to a `leaky-bucket`, its
    /// place in the queue is spent, and drains by itself.)
    pub async fn wait(&self, charge: &Charge<'_>, timeout: Duration) -> Result<Decision, Error> {
        charge.check()?;
        let clock = self.store.clock();
        let mut wait = Wait::new(charge, clock, timeout);
        loop {
            let decision = self.store.decide(wait.action, charge).await?;
            match wait.next(decision) {
                Next::Sleep(duration) => clock.sleep(duration).await,
                Next::Ask => {}
                Next::GiveBack(decision) => {
                    self.store.decide(Action::Refund, charge).await?;
                    return Ok(decision);
                }
                Next::Done(decision) => {
                    if !decision.delay.is_zero() && decision.allowed {
                        clock.sleep(decision.delay).await;
                    }
                    return Ok(decision);
                }
            }
        }
    }

    async fn decide(&self, action: Action, charge: &Charge<'_>) -> Result<Decision, Error> {
        charge.check()?;
        Ok(self.store.decide(action, charge).await?)
    }

    async fn decide_all(&self, action: Action, charges: &[Charge<'_>]) -> Result<Vec<Decision>, Error> {
        Charge::check_all(charges)?;
        Ok(self.store.decide_all(action, charges).await?)
    }
}

/// The steps of a wait, the same for async and blocking callers.
struct Wait<'a> {
    clock: &'a dyn Clock,
    deadline: u64,
    /// A queue may have room but a turn that is too late: there a look comes before the step.
    queued: bool,
    action: Action,
}

enum Next {
    Sleep(Duration),
    Ask,
    GiveBack(Decision),
    Done(Decision),
}

impl<'a> Wait<'a> {
    fn new(charge: &Charge<'_>, clock: &'a dyn Clock, timeout: Duration) -> Self {
        let timeout = u64::try_from(timeout.as_micros()).unwrap_or(u64::MAX);
        let queued = charge.quota().algorithm() == Algorithm::LeakyBucket;
        let action = if queued { Action::Peek } else { Action::Acquire };
        Self { clock, deadline: clock.now().saturating_add(timeout), queued, action }
    }

    fn next(&mut self, decision: Decision) -> Next {
        let left = Duration::from_micros(self.deadline.saturating_sub(self.clock.now()));
        let asked = std::mem::replace(&mut self.action, if self.queued { Action::Peek } else { Action::Acquire });
        if !decision.allowed {
            return match decision.retry_after {
                wait if wait > left => Next::Done(decision),
                wait => Next::Sleep(wait),
            };
        }
        if decision.delay > left {
            let too_late = Decision {
                allowed: false,
                retry_after: decision.delay.saturating_sub(left),
                delay: Duration::ZERO,
                ..decision
            };
            // Admitted between our look and our step, others went ahead.
            return if asked == Action::Acquire { Next::GiveBack(too_late) } else { Next::Done(too_late) };
        }
        if asked == Action::Peek {
            self.action = Action::Acquire;
            return Next::Ask;
        }
        Next::Done(decision)
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
        Charge::check_all(charges)?;
        Ok(self.store.decide_all_now(Action::Acquire, charges)?)
    }

    /// See [`Limiter::peek`].
    pub fn peek(&self, charge: &Charge<'_>) -> Result<Decision, Error> {
        self.decide(Action::Peek, charge)
    }

    /// See [`Limiter::peek_all`].
    pub fn peek_all(&self, charges: &[Charge<'_>]) -> Result<Vec<Decision>, Error> {
        Charge::check_all(charges)?;
        Ok(self.store.decide_all_now(Action::Peek, charges)?)
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
        charge.check()?;
        let clock = self.store.clock();
        let mut wait = Wait::new(charge, clock, timeout);
        loop {
            let decision = self.store.decide_now(wait.action, charge)?;
            match wait.next(decision) {
                Next::Sleep(duration) => clock.sleep_blocking(duration),
                Next::Ask => {}
                Next::GiveBack(decision) => {
                    self.store.decide_now(Action::Refund, charge)?;
                    return Ok(decision);
                }
                Next::Done(decision) => {
                    if !decision.delay.is_zero() && decision.allowed {
                        clock.sleep_blocking(decision.delay);
                    }
                    return Ok(decision);
                }
            }
        }
    }

    fn decide(self, action: Action, charge: &Charge<'_>) -> Result<Decision, Error> {
        charge.check()?;
        Ok(self.store.decide_now(action, charge)?)
    }
}
