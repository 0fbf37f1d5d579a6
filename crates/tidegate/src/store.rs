//! [`Store`]: where counts are kept and decisions are made. [`SharedStore`]: a store that several
//! instances of a service use.

use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use pin_project_lite::pin_project;

pub use crate::action::Action;
use crate::charge::{Charge, ChargeError};
use crate::clock::Clock;
use crate::decision::Decision;

mod blocking;
#[cfg(feature = "resilience")]
pub(crate) mod circuit;
pub mod invalidation;
pub mod memory;
#[cfg(feature = "redis")]
pub mod redis;
pub(crate) mod shared;

pub use blocking::BlockingStore;
pub use shared::{SharedStore, heartbeat_interval};

/// Where counts are kept: [`MemoryStore`](crate::MemoryStore), `RedisStore`, or your own store.
///
/// A store gets charges that the [`Limiter`](crate::Limiter) has validated. Each call must be
/// atomic: no other decision on the same counts may happen between its read and its write. The
/// conformance suite of the feature `testing` checks an implementation.
///
/// A store that answers without waiting, as memory does, returns [`Outcome::Ready`], and callers
/// need no future for it. Any other returns [`Outcome::Pending`], with an `async` block.
///
/// Use [`SharedStore`] as well for a store behind a `DenyCache` or a `Fallback`.
///
/// ```
/// use tidegate::{Action, Charge, Clock, Decision, MemoryStore, Outcome, Store, StoreError};
///
/// /// Logs each denial.
/// struct Logged(MemoryStore);
///
/// impl Store for Logged {
///     fn decide(
///         &self,
///         action: Action,
///         charge: &Charge<'_>,
///     ) -> Outcome<impl Future<Output = Result<Decision, StoreError>> + Send> {
///         self.0.decide(action, charge).map(|decided| {
///             decided.inspect(|decision| {
///                 if !decision.allowed {
///                     println!("denied: {}", charge.key());
///                 }
///             })
///         })
///     }
///
///     fn decide_all(
///         &self,
///         action: Action,
///         charges: &[Charge<'_>],
///     ) -> Outcome<impl Future<Output = Result<Vec<Decision>, StoreError>> + Send> {
///         self.0.decide_all(action, charges)
///     }
///
///     fn clock(&self) -> &dyn Clock {
///         self.0.clock()
///     }
/// }
/// ```
pub trait Store: Send + Sync + 'static {
    /// Whether the store validates the charges of single acquires itself, so that the limiter need
    /// not. A count that exists was validated before.
    const VALIDATES_ACQUIRES: bool = false;

    /// Decides one charge. A pending answer has done nothing before it is awaited.
    fn decide(
        &self,
        action: Action,
        charge: &Charge<'_>,
    ) -> Outcome<impl Future<Output = Result<Decision, StoreError>> + Send>;

    /// Decides several charges and returns one decision per charge, in the same order.
    ///
    /// [`Action::Acquire`] is all or nothing: if one charge is denied, none is spent, and
    /// [`Action::Peek`] answers accordingly. Every other action applies to each charge separately.
    fn decide_all(
        &self,
        action: Action,
        charges: &[Charge<'_>],
    ) -> Outcome<impl Future<Output = Result<Vec<Decision>, StoreError>> + Send>;

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
}

/// Answer of a store: there now, or by a future that waits for it.
#[derive(Debug)]
#[must_use = "a pending answer does nothing before it is awaited"]
pub enum Outcome<F: Future> {
    /// The answer.
    Ready(F::Output),
    /// The future of the answer.
    Pending(F),
}

impl<F: Future> Outcome<F> {
    /// Applies a function to the answer, when it is there.
    pub fn map<T>(
        self,
        function: impl FnOnce(F::Output) -> T + Send,
    ) -> Outcome<impl Future<Output = T> + Send>
    where
        F: Send,
    {
        match self {
            Self::Ready(answer) => Outcome::Ready(function(answer)),
            Self::Pending(future) => Outcome::Pending(async move { function(future.await) }),
        }
    }
}

pin_project! {
    /// Future of an [`Outcome`].
    #[derive(Debug)]
    pub struct OutcomeFuture<F: Future> {
        // Taken when it is polled.
        answer: Option<F::Output>,
        #[pin]
        pending: Option<F>,
    }
}

impl<F: Future> IntoFuture for Outcome<F> {
    type Output = F::Output;
    type IntoFuture = OutcomeFuture<F>;

    fn into_future(self) -> OutcomeFuture<F> {
        match self {
            Self::Ready(answer) => OutcomeFuture { answer: Some(answer), pending: None },
            Self::Pending(future) => OutcomeFuture { answer: None, pending: Some(future) },
        }
    }
}

impl<F: Future> Future for OutcomeFuture<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let this = self.project();
        match this.pending.as_pin_mut() {
            Some(future) => future.poll(context),
            // Polled again after the answer, which no caller may do.
            None => this.answer.take().map_or(Poll::Pending, Poll::Ready),
        }
    }
}

/// Lets several owners use one store, such as a limiter with a fallback and one without.
impl<S: Store> Store for Arc<S> {
    const VALIDATES_ACQUIRES: bool = S::VALIDATES_ACQUIRES;

    #[inline]
    fn decide(
        &self,
        action: Action,
        charge: &Charge<'_>,
    ) -> Outcome<impl Future<Output = Result<Decision, StoreError>> + Send> {
        S::decide(self, action, charge)
    }

    fn decide_all(
        &self,
        action: Action,
        charges: &[Charge<'_>],
    ) -> Outcome<impl Future<Output = Result<Vec<Decision>, StoreError>> + Send> {
        S::decide_all(self, action, charges)
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
}

/// Reason why a store could not decide. A `Fallback` (feature `resilience`) around the store
/// decides the request instead, except for [`Misconfigured`](Self::Misconfigured) and
/// [`Invalid`](Self::Invalid).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// A memory store without room for a new key, or for an entry of a sliding log, in which nearly
    /// all keys are at their limit.
    #[error(
        "the memory store is full (at most {cap} keys, and a maximum of bytes for sliding logs), \
         and evicting a key at its limit would let its owner exceed it: raise the maximum or wait \
         until some keys expire"
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
    /// The store has no memory left, and evicts nothing.
    #[error("the store is full: {0}")]
    OutOfMemory(String),
    /// The store lacks a command, or its user a permission, that decisions need.
    #[error("the store does not permit what decisions need: {0}")]
    NotPermitted(String),
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
    /// The charge is invalid; of a store that [validates](Store::VALIDATES_ACQUIRES) it itself.
    #[error(transparent)]
    Invalid(#[from] ChargeError),
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

/// Collects the results of calls that do not depend on each other. If one failed and another ran,
/// the error forbids to make them again.
#[cfg(feature = "resilience")]
pub(crate) fn collect_independent<T>(
    results: Vec<Result<T, StoreError>>,
) -> Result<Vec<T>, StoreError> {
    let ran = results.iter().any(|result| match result {
        Ok(_) => true,
        Err(error) => error.may_have_run(),
    });
    let collected: Result<Vec<T>, StoreError> = results.into_iter().collect();
    collected
        .map_err(|error| if ran && !error.may_have_run() { error.answer_lost() } else { error })
}

#[cfg(all(test, feature = "resilience"))]
mod tests {
    use super::*;

    #[test]
    fn failure_beside_a_success_forbids_a_repetition() {
        let down = || StoreError::Unreachable("down".to_owned());
        assert_eq!(collect_independent(vec![Ok(1), Ok(2)]), Ok(vec![1, 2]));
        assert_eq!(collect_independent(vec![Err::<u64, _>(down()), Err(down())]), Err(down()));
        let lost = Err(down().answer_lost());
        assert_eq!(collect_independent(vec![Ok(1), Err(down())]), lost);
        assert_eq!(collect_independent(vec![Err(down()), lost.clone().map(|_: Vec<u64>| 1)]), lost);
    }
}
