//! [`Permit`]: units that are held as long as it lives.

use std::time::Duration;

use tokio::runtime::Handle;

use super::lease::Lease;
use super::{Error, Limiter};
use crate::charge::Charge;
use crate::clock::Timestamp;
use crate::decision::Decision;
use crate::hold::Hold;
use crate::store::Store;
use crate::store::memory::MemoryStore;

/// Units that are held until it is dropped. See [`Limiter::hold`].
#[derive(Debug)]
#[must_use = "check whether it is allowed; a permit that is dropped is released"]
pub struct Permit<S: Store = MemoryStore> {
    limiter: Limiter<S>,
    lease: Lease,
    decision: Decision,
    /// Runtime for a release that has to wait for the store.
    runtime: Option<Handle>,
}

impl<S: Store> Limiter<S> {
    /// Takes the units of a charge until the permit is dropped: for limits of what is in flight
    /// ([`Quota::concurrency`](crate::Quota::concurrency)).
    ///
    /// The permit is a lease of ten seconds, which this process renews. So if the process is
    /// killed, its units are free ten seconds later; if it only stalls for longer than that, another
    /// holder may have got them. Renewals end with the maximum of the quota's
    /// [terms](crate::HoldTerms).
    ///
    /// Dropping it releases the units without blocking. Call it within a Tokio runtime, which makes
    /// the renewals. Without one, which only memory allows, the permit lasts until that maximum.
    ///
    /// ```
    /// # use tidegate::{Charge, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let limiter = Limiter::new(MemoryStore::new());
    /// let exports = Quota::concurrency(1)?;
    /// let charge = Charge::new("customer-7", &exports);
    ///
    /// let permit = limiter.hold(&charge).await?;
    /// assert!(permit.is_allowed());
    /// assert!(!limiter.hold(&charge).await?.is_allowed());
    /// drop(permit);
    /// assert!(limiter.hold(&charge).await?.is_allowed());
    /// # Ok(())
    /// # }
    /// ```
    pub async fn hold(&self, charge: &Charge<'_>) -> Result<Permit<S>, Error> {
        let runtime = Handle::try_current().ok();
        let hold = charge.hold().cloned().unwrap_or_else(Hold::lease);
        let terms = charge.quota().holds();
        // Other times could be too short for the renewals, which need a runtime.
        let (hold, terms) = match runtime {
            Some(_) => (hold.leased(), terms.leased()),
            None => (hold.with_max_ttl_of(terms), *terms),
        };
        let quota = charge.quota().clone().with_holds(terms);
        // Before the answer, so that a cancelled call is released, too.
        let mut permit = Permit {
            limiter: self.clone(),
            lease: Lease::new(&charge.with_quota(&quota).with_hold(&hold)),
            decision: Decision::allow(charge.quota().burst(), 0),
            runtime,
        };
        let sent_at = self.now();
        match self.acquire(&permit.lease.charge()).await {
            Ok(decision) => {
                permit.decision = decision;
                permit.lease.extend(sent_at, &decision);
            }
            // The call may have run.
            Err(Error::Store(error)) if error.may_have_run() => return Err(Error::Store(error)),
            Err(error) => {
                permit.decision.allowed = false;
                return Err(error);
            }
        }
        if permit.decision.allowed
            && let Some(runtime) = &permit.runtime
        {
            self.renew(&mut permit.lease, runtime);
        }
        Ok(permit)
    }

    /// Returns the permit of a charge with a hold that `decision` has allowed, for callers that
    /// decide several charges together. It is renewed as those of [`hold`](Self::hold) are.
    pub fn permit(&self, charge: &Charge<'_>, decision: Decision) -> Permit<S> {
        let (mut lease, runtime) = (Lease::new(charge), Handle::try_current().ok());
        lease.extend(self.now(), &decision);
        if decision.allowed
            && let Some(runtime) = &runtime
        {
            self.renew(&mut lease, runtime);
        }
        Permit { limiter: self.clone(), lease, decision, runtime }
    }
}

impl<S: Store> Permit<S> {
    /// Returns whether the units are held.
    #[must_use]
    pub fn is_allowed(&self) -> bool {
        self.decision.allowed
    }

    /// Returns whether the units are still held, as far as is known: it has not ended, and the last
    /// renewal that was answered lasts until now. Otherwise another holder may have them.
    #[must_use]
    pub fn is_held(&self) -> bool {
        !self.held_for().is_zero()
    }

    /// Returns how long the units are still held if no further renewal succeeds; zero if they are
    /// not held.
    #[must_use]
    pub fn held_for(&self) -> Duration {
        let until = if self.is_allowed() { self.lease.held_until() } else { Timestamp::ZERO };
        until.saturating_duration_since(self.limiter.now())
    }

    /// Returns the decision.
    pub fn decision(&self) -> &Decision {
        &self.decision
    }

    /// Releases the units, and waits until they are free.
    pub async fn release(mut self) -> Result<(), Error> {
        if !std::mem::replace(&mut self.decision.allowed, false) {
            return Ok(());
        }
        let charge = self.lease.charge().with_cost(0);
        self.limiter.decide(self.lease.release_action(), &charge).await.map(drop)
    }
}

impl<S: Store> Drop for Permit<S> {
    fn drop(&mut self) {
        if !self.decision.allowed {
            return;
        }
        let action = self.lease.release_action();
        let charge = self.lease.charge().with_cost(0);
        if self.limiter.decide_now(action, &charge).is_some() {
            return;
        }
        let Some(runtime) = &self.runtime else { return };
        let (limiter, lease) = (self.limiter.clone(), self.lease.take());
        runtime.spawn(async move {
            let charge = lease.charge().with_cost(0);
            if let Err(error) = limiter.decide(action, &charge).await {
                tracing::debug!(%error, "a permit was not released, and ends with its lease");
            }
        });
    }
}
