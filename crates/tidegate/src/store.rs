//! [`Store`]: where counts are kept and decisions are made. [`SharedStore`]: a store that several
//! instances of a service use.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

pub use crate::action::Action;
use crate::charge::Charge;
use crate::clock::Clock;
use crate::decision::Decision;
use crate::limiter::Error;

pub mod invalidation;
pub mod memory;
#[cfg(feature = "redis")]
pub mod redis;
pub(crate) mod shared;

pub use shared::{SharedStore, heartbeat_interval};

/// Where counts are kept: [`MemoryStore`](crate::MemoryStore), `RedisStore`, or your own store.
///
/// A store gets charges that the [`Limiter`](crate::Limiter) has validated. Each call must be
/// atomic: no other decision on the same counts may happen between its read and its write. The
/// conformance suite of the feature `testing` checks an implementation.
///
/// Use [`SharedStore`] as well for a store behind a `DenyCache` or a `Fallback`.
///
/// ```
/// use tidegate::{Action, Charge, Clock, Decision, MemoryStore, Store, StoreError};
///
/// /// Logs each denial.
/// struct Logged(MemoryStore);
///
/// impl Store for Logged {
///     async fn decide(
///         &self,
///         action: Action,
///         charge: &Charge<'_>,
///     ) -> Result<Decision, StoreError> {
///         let decision = self.0.decide(action, charge).await?;
///         if !decision.allowed {
///             println!("denied: {}", charge.key());
///         }
///         Ok(decision)
///     }
///
///     async fn decide_all(
///         &self,
///         action: Action,
///         charges: &[Charge<'_>],
///     ) -> Result<Vec<Decision>, StoreError> {
///         self.0.decide_all(action, charges).await
///     }
///
///     fn clock(&self) -> &dyn Clock {
///         self.0.clock()
///     }
/// }
/// ```
pub trait Store: Send + Sync + 'static {
    /// Decides one charge.
    fn decide(
        &self,
        action: Action,
        charge: &Charge<'_>,
    ) -> impl Future<Output = Result<Decision, StoreError>> + Send;

    /// Decides several charges and returns one decision per charge, in the same order.
    ///
    /// [`Action::Acquire`] is all or nothing: if one charge is denied, none is spent, and
    /// [`Action::Peek`] answers accordingly. Every other action applies to each charge separately.
    fn decide_all(
        &self,
        action: Action,
        charges: &[Charge<'_>],
    ) -> impl Future<Output = Result<Vec<Decision>, StoreError>> + Send;

    /// Validates and decides an acquire. A store may compile it apart from the other actions.
    #[doc(hidden)]
    fn acquire(&self, charge: &Charge<'_>) -> impl Future<Output = Result<Decision, Error>> + Send {
        async move {
            charge.check(Action::Acquire)?;
            Ok(self.decide(Action::Acquire, charge).await?)
        }
    }

    /// Decides charges whose call was abandoned with this error, because the caller's own deadline
    /// was exceeded. By default the error is returned; a `Fallback` (feature `resilience`) decides
    /// by the failure policy of each charge.
    fn fall_back(
        &self,
        action: Action,
        charges: &[Charge<'_>],
        error: StoreError,
    ) -> Result<Vec<Decision>, StoreError> {
        let _ = (action, charges);
        Err(error)
    }

    /// Returns the clock of this store's decisions. A [`Limiter`](crate::Limiter) that waits for
    /// units sleeps by it.
    fn clock(&self) -> &dyn Clock;

    /// Validates and decides a charge without a future, as in memory. Returns `None` if this store
    /// needs one.
    #[doc(hidden)]
    fn decide_at_once(
        &self,
        action: Action,
        charge: &Charge<'_>,
    ) -> Option<Result<Decision, Error>> {
        let _ = (action, charge);
        None
    }

    /// Returns whether every decision is ready when its future is polled for the first time, as in
    /// memory. The Tower layer decides such requests without a future of its own.
    #[doc(hidden)]
    fn decides_at_once(&self) -> bool {
        false
    }
}

/// Lets several owners use one store, such as a limiter with a fallback and one without.
impl<S: Store> Store for Arc<S> {
    fn decide(
        &self,
        action: Action,
        charge: &Charge<'_>,
    ) -> impl Future<Output = Result<Decision, StoreError>> + Send {
        S::decide(self, action, charge)
    }

    fn decide_all(
        &self,
        action: Action,
        charges: &[Charge<'_>],
    ) -> impl Future<Output = Result<Vec<Decision>, StoreError>> + Send {
        S::decide_all(self, action, charges)
    }

    fn acquire(&self, charge: &Charge<'_>) -> impl Future<Output = Result<Decision, Error>> + Send {
        S::acquire(self, charge)
    }

    fn fall_back(
        &self,
        action: Action,
        charges: &[Charge<'_>],
        error: StoreError,
    ) -> Result<Vec<Decision>, StoreError> {
        S::fall_back(self, action, charges, error)
    }

    fn clock(&self) -> &dyn Clock {
        S::clock(self)
    }

    fn decide_at_once(
        &self,
        action: Action,
        charge: &Charge<'_>,
    ) -> Option<Result<Decision, Error>> {
        S::decide_at_once(self, action, charge)
    }

    fn decides_at_once(&self) -> bool {
        S::decides_at_once(self)
    }
}

/// Reason why a store could not decide. A `Fallback` (feature `resilience`) around the store
/// decides the request instead, except for [`Misconfigured`](Self::Misconfigured).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// A memory store at its cap, in which every key still counts.
    #[error(
        "the memory store is full ({cap} keys), and evicting a key that still counts would let its \
         owner exceed a limit: raise the cap or wait until some keys expire"
    )]
    Full {
        /// Maximum number of keys.
        cap: usize,
    },
    /// No answer in time. The call has not run: it was not sent, or it came too late to run.
    #[error("no answer from the store within {0:?}")]
    Timeout(Duration),
    /// The store cannot be reached. The call was not sent.
    #[error("the store cannot be reached: {0}")]
    Unreachable(String),
    /// The call was sent, and its answer was lost: it did not arrive in time, or the connection
    /// failed. The call may have run, so it must not be made again. The source is the reason.
    #[error("the answer was lost, so the call may have run: {0}")]
    AnswerLost(Arc<StoreError>),
    /// The store answered with an error.
    #[error("the store refused: {0}")]
    Refused(String),
    /// The value stored under this key is not a count, or is damaged. Other keys are not affected.
    #[error("the count of this key cannot be read: {0}; reset the key to start over")]
    Unreadable(String),
    /// The store was not called because it is failing: the circuit of a node of Redis, or of a
    /// `Breaker`, is open. The source is the last failure.
    #[error("circuit open, the store is failing: {0}")]
    Open(Arc<StoreError>),
    /// The address or an option of the store is wrong.
    #[error("{0}")]
    Misconfigured(String),
}

impl StoreError {
    /// Returns the error of a call that failed for this reason after it was sent.
    #[must_use]
    pub fn answer_lost(self) -> Self {
        Self::AnswerLost(Arc::new(self))
    }

    /// Returns whether the call may have run, so that it must not be made again.
    #[must_use]
    pub fn may_have_run(&self) -> bool {
        matches!(self, Self::AnswerLost(_))
    }

    /// Returns the failure itself, without [`AnswerLost`](Self::AnswerLost) or
    /// [`Open`](Self::Open) around it.
    #[must_use]
    pub fn reason(&self) -> &Self {
        match self {
            Self::AnswerLost(reason) | Self::Open(reason) => reason.reason(),
            reason => reason,
        }
    }
}
