//! [`Blocking`]: the calls of a [`Limiter`] without `async`.

use std::sync::Arc;
use std::time::Duration;

use super::{Error, Limiter, Next, Wait, check, without_counting_denials};
use crate::charge::{Charge, OwnedCharge};
use crate::decision::{Decision, Decisions};
use crate::store::memory::MemoryStore;
use crate::store::{Action, BlockingStore, Outcome};

impl<S: BlockingStore> Limiter<S> {
    /// Returns the same calls without `async`.
    ///
    /// On memory they need no runtime and never block. On Redis they block the thread until the
    /// answer, at most for the store's timeout; `RedisStore::connect_blocking` creates a store for
    /// a program without a runtime.
    ///
    /// Do not call them on Redis in async code, which has the same calls with `.await`: a blocked
    /// thread runs no other tasks. They do not panic there. On the only thread of the runtime that
    /// the store was connected in, each call ends with [`StoreError::Misconfigured`](crate::StoreError::Misconfigured).
    #[must_use]
    pub fn blocking(&self) -> Blocking<'_, S> {
        Blocking { store: &self.store }
    }
}

/// Calls of a [`Limiter`] for synchronous code. See [`Limiter::blocking`].
///
/// ```
/// use std::time::Duration;
/// use tidegate::{Charge, Limiter, MemoryStore, Quota};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let limiter = Limiter::new(MemoryStore::new());
/// let quota = Quota::fixed_window(10, Duration::from_secs(60))?;
/// let blocking = limiter.blocking();
/// assert!(blocking.acquire(&Charge::new("job", &quota).with_cost(4))?.allowed);
/// assert_eq!(blocking.peek(&Charge::new("job", &quota))?.remaining, 5);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Blocking<'a, S = MemoryStore> {
    store: &'a Arc<S>,
}

impl<S> Clone for Blocking<'_, S> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<S> Copy for Blocking<'_, S> {}

impl<S: BlockingStore> Blocking<'_, S> {
    /// Decides a charge and, if it is allowed, takes its units; see [`Limiter::acquire`].
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "the caller computes only the fields that it uses")]
    pub fn acquire(&self, charge: &Charge<'_>) -> Result<Decision, Error> {
        self.decide(Action::Acquire, charge)
    }

    /// Decides several charges together, all or nothing; see [`Limiter::acquire_all`].
    pub fn acquire_all(&self, charges: &[Charge<'_>]) -> Result<Decisions, Error> {
        self.decide_all(Action::Acquire, charges)
    }

    /// Returns the decision of an acquire without taking units; see [`Limiter::peek`].
    pub fn peek(&self, charge: &Charge<'_>) -> Result<Decision, Error> {
        charge.check_cost()?;
        self.decide(Action::Peek, charge)
    }

    /// Returns the decisions of several acquires without taking units; see
    /// [`Limiter::peek_all`].
    pub fn peek_all(&self, charges: &[Charge<'_>]) -> Result<Decisions, Error> {
        charges.iter().try_for_each(Charge::check_cost)?;
        self.decide_all(Action::Peek, charges)
    }

    /// Records units that were used already, even beyond the limit; see [`Limiter::report`].
    pub fn report(&self, charge: &Charge<'_>) -> Result<Decision, Error> {
        self.decide(Action::Report, charge)
    }

    /// Returns the units of an earlier charge to the limit; see [`Limiter::refund`].
    pub fn refund(&self, charge: &Charge<'_>) -> Result<Decision, Error> {
        self.decide(Action::Refund, charge)
    }

    /// Deletes the count of the charge's key; see [`Limiter::reset`].
    pub fn reset(&self, charge: &Charge<'_>) -> Result<(), Error> {
        self.decide(Action::Reset, charge).map(drop)
    }

    /// Blocks the thread until the charge is admitted, at most for `timeout`; see
    /// [`Limiter::wait`].
    pub fn wait(&self, charge: &Charge<'_>, timeout: Duration) -> Result<Decision, Error> {
        charge.check(Action::Acquire)?;
        let clock = self.store.clock();
        let quota = without_counting_denials(charge.quota());
        let charge = charge.with_quota(&quota);
        let mut wait = Wait::new(&charge, clock, timeout);
        loop {
            let decision = self.decide(wait.action, &wait.charge(&charge))?;
            match wait.next(&charge, decision) {
                Next::Sleep(duration) => clock.sleep_blocking(duration),
                Next::Decide => {}
                Next::Delay(decision) => {
                    clock.sleep_blocking(decision.delay);
                    return Ok(decision);
                }
                Next::Done(decision) => return Ok(decision),
            }
        }
    }

    /// Applies an action to one charge; see [`Limiter::decide`].
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "the caller computes only the fields that it uses")]
    pub fn decide(&self, action: Action, charge: &Charge<'_>) -> Result<Decision, Error> {
        check::<S>(action, charge)?;
        match self.store.decide(action, charge) {
            Outcome::Ready(decided) => Ok(decided?),
            Outcome::Pending(_) => {
                let (store, charge) = (Arc::clone(self.store), OwnedCharge::of(charge));
                let call = async move { store.decide(action, &charge.charge()).await };
                Ok(self.store.block_on(call)?)
            }
        }
    }

    /// Applies an action to several charges; see [`Limiter::decide_all`].
    pub fn decide_all(&self, action: Action, charges: &[Charge<'_>]) -> Result<Decisions, Error> {
        Charge::check_all(action, charges)?;
        match self.store.decide_all(action, charges) {
            Outcome::Ready(decided) => Ok(decided?.into()),
            Outcome::Pending(_) => {
                let owned: Vec<OwnedCharge> = charges.iter().map(OwnedCharge::of).collect();
                let store = Arc::clone(self.store);
                let call = async move {
                    let charges: Vec<Charge<'_>> = owned.iter().map(OwnedCharge::charge).collect();
                    store.decide_all(action, &charges).await
                };
                Ok(self.store.block_on(call)?.into())
            }
        }
    }
}
