//! [`Reservation`]: units that are taken now and settled later.

use std::time::Duration;

use super::{Error, Limiter};
use crate::charge::{Charge, ChargeError, OwnedCharge};
use crate::decision::Decision;
use crate::hold::Hold;
use crate::store::memory::MemoryStore;
use crate::store::{Action, Store};

/// Units that are taken for a request whose cost is known only after it. See
/// [`Limiter::reserve`].
///
/// A reservation that is dropped stays charged until its end, and then as the
/// [terms](crate::HoldTerms) of the quota say.
#[derive(Debug)]
#[must_use = "check whether it is allowed, and commit the units that were used"]
pub struct Reservation<S = MemoryStore> {
    limiter: Limiter<S>,
    charge: OwnedCharge,
    decision: Decision,
}

impl<S: Store> Limiter<S> {
    /// Takes the units of a charge, to settle those that were really used later.
    ///
    /// The units count from now on, by the algorithm of the quota. [`Reservation::commit`] returns
    /// the rest to the time of this charge, or reports what exceeds it. So if no request uses more
    /// than it has reserved, the units used by all requests that started in any window are at most
    /// the limit.
    ///
    /// `ttl` is the time after which the reservation ends, at most the maximum of the
    /// quota's [terms](crate::HoldTerms). The id is that of the charge's [hold](Charge::with_hold),
    /// or a random one.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tidegate::{Charge, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let limiter = Limiter::new(MemoryStore::new());
    /// let tokens = Quota::sliding_log(10_000, Duration::from_secs(60))?;
    /// let charge = Charge::new("user123", &tokens).with_cost(2_000);
    ///
    /// let reservation = limiter.reserve(&charge, Duration::from_secs(30)).await?;
    /// assert!(reservation.decision().allowed);
    /// let answer_tokens = 700; // after the call of the model
    /// let settled = reservation.commit(answer_tokens).await?;
    /// assert_eq!(settled.remaining, 9_300);
    /// # Ok(())
    /// # }
    /// ```
    pub async fn reserve(
        &self,
        charge: &Charge<'_>,
        ttl: Duration,
    ) -> Result<Reservation<S>, Error> {
        let hold = charge.hold().map_or_else(Hold::random, Hold::unsettled);
        let hold = hold.with_ttl(ttl).map_err(ChargeError::Hold)?;
        let charge = OwnedCharge::of(&charge.with_hold(&hold));
        let decision = self.acquire(&charge.charge()).await?;
        Ok(Reservation { limiter: self.clone(), charge, decision })
    }
}

impl<S: Store> Reservation<S> {
    /// Returns the decision. A denied reservation has taken nothing.
    pub fn decision(&self) -> &Decision {
        &self.decision
    }

    /// Returns the id, for a commit by another process.
    #[must_use]
    pub fn id(&self) -> &str {
        self.charge.charge().hold().map_or("", Hold::id)
    }

    /// Settles the units that were used: returns the rest to the time of the charge, or reports
    /// what exceeds it. Units of a denied reservation are reported.
    ///
    /// # Errors
    ///
    /// The store failed. The reservation can be committed again by its [id](Self::id): a second
    /// commit changes nothing.
    pub async fn commit(self, used: u64) -> Result<Decision, Error> {
        let charge = self.charge.charge().with_cost(used);
        self.limiter.decide(Action::Commit, &charge).await
    }

    /// Returns all units.
    pub async fn cancel(self) -> Result<Decision, Error> {
        self.commit(0).await
    }
}
