//! [`Limiter`]: checks charges and hands them to the store.

use std::sync::Arc;
use std::time::Duration;

use crate::algorithm::Algorithm;
use crate::charge::{Charge, ChargeError};
use crate::clock::{Clock, Timestamp};
use crate::decision::{Decision, Decisions};
use crate::quota::Quota;
use crate::store::memory::MemoryStore;
use crate::store::{Action, Outcome, Store, StoreError};

mod blocking;
mod lease;
mod permit;
mod reservation;

pub use blocking::Blocking;
pub(crate) use lease::Lease;
use lease::Leases;
pub use permit::Permit;
pub use reservation::Reservation;

/// Decides whether requests may pass. Clones share one store, and so one set of counts.
///
/// | method | use |
/// | --- | --- |
/// | [`acquire`](Self::acquire) | takes units, or denies the request |
/// | [`acquire_all`](Self::acquire_all) | checks several limits, all or nothing |
/// | [`wait`](Self::wait) | waits for units instead of denying |
/// | [`peek`](Self::peek) | shows the state without taking units |
/// | [`report`](Self::report) | records units that are known only after the request |
/// | [`refund`](Self::refund) | returns the units of a request that failed |
/// | [`reserve`](Self::reserve) | takes units now, and settles what was used later |
/// | [`hold`](Self::hold) | takes units until the permit is dropped |
/// | [`reset`](Self::reset) | deletes a count |
///
/// Every method validates the charge first and returns [`Error::Charge`] if it can never be
/// decided, for example because its key is empty. [`Error::Store`] means that the store failed.
///
/// ```
/// use std::time::Duration;
/// use tidegate::{Charge, Limiter, MemoryStore, Quota};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let limiter = Limiter::new(MemoryStore::new());
/// let quota = Quota::token_bucket(10, Duration::from_secs(1))?.with_burst(20)?;
/// assert!(limiter.blocking().acquire(&Charge::new("user123", &quota))?.allowed);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Limiter<S = MemoryStore> {
    store: Arc<S>,
    leases: Arc<Leases>,
}

/// Error that leaves a request undecided. A denial is not an error.
///
/// ```
/// use std::time::Duration;
/// use tidegate::{Charge, ChargeError, Error, Limiter, MemoryStore, Quota};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let limiter = Limiter::new(MemoryStore::new());
/// let quota = Quota::fixed_window(10, Duration::from_secs(60))?;
/// let error = limiter.blocking().acquire(&Charge::new("user123", &quota).with_cost(11));
/// match error {
///     Err(Error::Charge(ChargeError::CostTooHigh { cost: 11, most: 10 })) => {} // a bad request
///     Err(Error::Store(error)) => println!("503: {error}"),
///     other => panic!("{other:?}"),
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The charge is invalid, whatever the counts are.
    #[error(transparent)]
    Charge(#[from] ChargeError),
    /// The store failed.
    #[error(transparent)]
    Store(StoreError),
}

impl From<StoreError> for Error {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::Invalid(error) => Self::Charge(error),
            error => Self::Store(error),
        }
    }
}

/// Validates a charge, unless the store does.
#[inline]
fn check<S: Store>(action: Action, charge: &Charge<'_>) -> Result<(), ChargeError> {
    let is_validated = S::VALIDATES_ACQUIRES && action == Action::Acquire;
    if is_validated { Ok(()) } else { charge.check(action) }
}

impl<S> Clone for Limiter<S> {
    fn clone(&self) -> Self {
        Self { store: Arc::clone(&self.store), leases: Arc::clone(&self.leases) }
    }
}

impl<S: Store> Limiter<S> {
    /// Creates a limiter that keeps its counts in `store`.
    #[must_use]
    pub fn new(store: S) -> Self {
        Self { store: Arc::new(store), leases: Arc::default() }
    }

    /// Returns the store.
    #[must_use]
    pub fn store(&self) -> &S {
        &self.store
    }

    /// Returns the time of the store's clock. Read just before an acquire, it is the time of that
    /// charge ([`Charge::with_charged_at`]), in case it must be refunded.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        self.store.clock().now()
    }

    /// Decides a charge and, if it is allowed, takes its units.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tidegate::{Charge, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let limiter = Limiter::new(MemoryStore::new());
    /// let quota = Quota::token_bucket(1, Duration::from_secs(10))?;
    /// let charge = Charge::new("user123", &quota);
    /// assert!(limiter.acquire(&charge).await?.allowed);
    ///
    /// let denied = limiter.acquire(&charge).await?;
    /// assert!(!denied.allowed);
    /// println!("429 Too Many Requests, retry after {:?}", denied.retry_after);
    /// # Ok(())
    /// # }
    /// ```
    pub async fn acquire(&self, charge: &Charge<'_>) -> Result<Decision, Error> {
        // Not by `decide`: the compiler leaves out the other actions, for the 10 ns of
        // docs/benchmarks.md.
        check::<S>(Action::Acquire, charge)?;
        Ok(match self.store.decide(Action::Acquire, charge) {
            Outcome::Ready(decided) => decided?,
            Outcome::Pending(decision) => decision.await?,
        })
    }

    /// Decides several charges together, all or nothing: if one is denied, no units are taken. The
    /// decisions are in the order of the charges. An entry that is allowed on a denied request
    /// shows the units that are left with nothing taken.
    pub async fn acquire_all(&self, charges: &[Charge<'_>]) -> Result<Decisions, Error> {
        self.decide_all(Action::Acquire, charges).await
    }

    /// Returns the decision that [`acquire`](Self::acquire) would make, without taking units.
    pub async fn peek(&self, charge: &Charge<'_>) -> Result<Decision, Error> {
        charge.check_cost()?;
        self.decide(Action::Peek, charge).await
    }

    /// Returns the decisions that [`acquire_all`](Self::acquire_all) would make, without taking
    /// units.
    pub async fn peek_all(&self, charges: &[Charge<'_>]) -> Result<Decisions, Error> {
        charges.iter().try_for_each(Charge::check_cost)?;
        self.decide_all(Action::Peek, charges).await
    }

    /// Records units that were used already, such as the bytes of a finished response: always
    /// charges, even beyond the limit. The overdraft is bounded by [`Quota::max_level`] and is paid
    /// back by time. `allowed` is whether the units fitted; if not, `remaining` is 0 and
    /// `retry_after` is the wait until one unit is free again.
    pub async fn report(&self, charge: &Charge<'_>) -> Result<Decision, Error> {
        self.decide(Action::Report, charge).await
    }

    /// Returns the units of an earlier charge to the limit, if they still count.
    /// [`Charge::with_charged_at`] sets the time of that charge; without it the refund is
    /// [`ChargeError::NoChargeTime`](crate::ChargeError::NoChargeTime).
    pub async fn refund(&self, charge: &Charge<'_>) -> Result<Decision, Error> {
        self.decide(Action::Refund, charge).await
    }

    /// Deletes the count of the charge's key.
    pub async fn reset(&self, charge: &Charge<'_>) -> Result<(), Error> {
        self.decide(Action::Reset, charge).await.map(drop)
    }

    /// Waits until the charge is admitted, at most `timeout`, and through the delay of a
    /// `leaky-bucket`.
    ///
    /// Each sleep is exactly as long as the store requires; there is no polling. If the wait cannot
    /// end within the timeout, the charge is denied at once and no units are taken. For a
    /// `leaky-bucket` with room in its queue but a later turn, `retry_after` is the time until
    /// the turn would be within the timeout.
    ///
    /// Cancel-safe: a future that is dropped while it sleeps has taken no units. There are two
    /// exceptions: a call to Redis that is in flight may have run, and an admitted request keeps
    /// its place in the queue of a `leaky-bucket` until it drains.
    ///
    /// Denials while waiting are not counted, even with `count_denied`. A wait through a
    /// [block](Quota::with_block_for) ends with it, and starts none, unless another request takes
    /// the units just before.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tidegate::{Charge, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let limiter = Limiter::new(MemoryStore::new());
    /// let quota = Quota::token_bucket(100, Duration::from_secs(1))?.with_burst(1)?;
    /// for page in ["/1", "/2", "/3"] {
    ///     // A crawler that sends at most 100 requests per second to each host.
    ///     let charge = Charge::new("example.com", &quota);
    ///     let decision = limiter.wait(&charge, Duration::from_secs(1)).await?;
    ///     assert!(decision.allowed, "fetch {page}");
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn wait(&self, charge: &Charge<'_>, timeout: Duration) -> Result<Decision, Error> {
        charge.check(Action::Acquire)?;
        let clock = self.store.clock();
        let quota = without_counting_denials(charge.quota());
        let charge = charge.with_quota(&quota);
        let mut wait = Wait::new(&charge, clock, timeout);
        loop {
            let decision = self.store.decide(wait.action, &wait.charge(&charge)).await?;
            match wait.next(&charge, decision) {
                Next::Sleep(duration) => clock.sleep(duration).await,
                Next::Decide => {}
                Next::Delay(decision) => {
                    clock.sleep(decision.delay).await;
                    return Ok(decision);
                }
                Next::Done(decision) => return Ok(decision),
            }
        }
    }

    /// Applies an action to one charge.
    pub async fn decide(&self, action: Action, charge: &Charge<'_>) -> Result<Decision, Error> {
        check::<S>(action, charge)?;
        Ok(match self.store.decide(action, charge) {
            Outcome::Ready(decided) => decided?,
            Outcome::Pending(decision) => decision.await?,
        })
    }

    /// Applies an action to several charges; see [`Store::decide_all`].
    pub async fn decide_all(
        &self,
        action: Action,
        charges: &[Charge<'_>],
    ) -> Result<Decisions, Error> {
        Charge::check_all(action, charges)?;
        Ok(self.store.decide_all(action, charges).await?.into())
    }

    /// Decides one charge if the store answers without waiting. Otherwise nothing is decided.
    #[inline]
    pub(crate) fn decide_now(
        &self,
        action: Action,
        charge: &Charge<'_>,
    ) -> Option<Result<Decision, Error>> {
        if let Err(error) = check::<S>(action, charge) {
            return Some(Err(error.into()));
        }
        match self.store.decide(action, charge) {
            Outcome::Ready(decided) => Some(decided.map_err(Error::from)),
            Outcome::Pending(_) => None,
        }
    }
}

/// Returns the quota without `count_denied`: denials while waiting are not attempts.
fn without_counting_denials(quota: &Quota) -> Quota {
    match quota.clone().with_count_denied(false) {
        Ok(quota) => quota,
        // The other algorithms have no such option.
        Err(_) => quota.clone(),
    }
}

/// State machine of a wait, shared by async and blocking callers.
struct Wait<'a> {
    clock: &'a dyn Clock,
    deadline: Timestamp,
    /// Next action to send to the store.
    action: Action,
    /// Time at which the action is sent, and for a refund that of its charge.
    charged_at: Timestamp,
    /// Denial to return once the refund of a turn after the deadline is done.
    too_late: Option<Decision>,
}

enum Next {
    Sleep(Duration),
    Decide,
    /// Admitted, to be delayed.
    Delay(Decision),
    Done(Decision),
}

impl<'a> Wait<'a> {
    fn new(charge: &Charge<'_>, clock: &'a dyn Clock, timeout: Duration) -> Self {
        let now = clock.now();
        let deadline = now.saturating_add(timeout);
        Self { clock, deadline, action: first_action(charge), charged_at: now, too_late: None }
    }

    /// Returns the charge for the next action.
    fn charge<'b>(&mut self, charge: &Charge<'b>) -> Charge<'b> {
        if self.action == Action::Refund {
            return charge.with_charged_at(self.charged_at);
        }
        self.charged_at = self.clock.now();
        *charge
    }

    fn next(&mut self, charge: &Charge<'_>, decision: Decision) -> Next {
        let left = self.deadline.saturating_duration_since(self.clock.now());
        if let Some(too_late) = self.too_late {
            let Decision { remaining, reset_after, .. } = decision;
            return Next::Done(Decision { remaining, reset_after, ..too_late });
        }
        let queued = charge.quota().algorithm() == Algorithm::LeakyBucket;
        if !decision.allowed {
            self.action = first_action(charge);
            // A queued request has its turn only when the whole queue has drained.
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
            // Other requests may have been queued between the peek and the acquire.
            let refund = charge.to_refund(&decision, self.charged_at, self.clock.now());
            let Some(refund) = refund.filter(|_| self.action == Action::Acquire) else {
                return Next::Done(too_late);
            };
            self.charged_at = refund.charged_at();
            self.action = Action::Refund;
            self.too_late = Some(too_late);
            return Next::Decide;
        }
        if self.action == Action::Peek {
            self.action = Action::Acquire;
            return Next::Decide;
        }
        if decision.delay.is_zero() { Next::Done(decision) } else { Next::Delay(decision) }
    }
}

/// Returns the first action of a wait: a queue may have room but a turn after the deadline, so it
/// is peeked first; and so is a quota with blocks, because an acquire could start one.
fn first_action(charge: &Charge<'_>) -> Action {
    let quota = charge.quota();
    if quota.algorithm() == Algorithm::LeakyBucket || quota.has_blocks() {
        Action::Peek
    } else {
        Action::Acquire
    }
}
