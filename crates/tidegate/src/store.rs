//! [`Store`]: where counts live.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use self::news::{Mark, News};
pub use crate::action::Action;
use crate::charge::Charge;
use crate::clock::Clock;
use crate::decision::Decision;

#[cfg(feature = "resilience")]
pub(crate) mod in_order;
pub mod memory;
pub mod news;
#[cfg(feature = "redis")]
pub mod redis;

/// Where counts live: memory or Redis, or a store of your own.
///
/// A store gets charges that the [`Limiter`](crate::Limiter) has checked. It decides atomically: no
/// other decision on these counts happens between its look and its write. The feature `testing` has
/// the suite that proves it.
pub trait Store: Send + Sync + 'static {
    /// Decides one charge.
    fn decide(
        &self,
        action: Action,
        charge: &Charge<'_>,
    ) -> impl Future<Output = Result<Decision, StoreError>> + Send;

    /// Decides several charges, in their order. With [`Action::Acquire`] all or nothing: if one
    /// denies, none is spent. (And with [`Action::Peek`] as if.) The other actions are done on each
    /// charge for itself.
    fn decide_all(
        &self,
        action: Action,
        charges: &[Charge<'_>],
    ) -> impl Future<Output = Result<Vec<Decision>, StoreError>> + Send;

    /// The clock that a caller who waits for this store sleeps by.
    fn clock(&self) -> &dyn Clock;

    /// Which part of the store decides this charge. Parts, such as the nodes of a cluster, fail
    /// apart from each other.
    fn part(&self, _charge: &Charge<'_>) -> Part {
        Part::WHOLE
    }

    /// Whether this part could decide now, writes and all. Spends nothing of anybody's.
    fn probe(&self, _part: Part) -> impl Future<Output = Result<(), StoreError>> + Send {
        std::future::ready(Ok(()))
    }

    /// Says that this instance is alive, and hears which are: itself, and those that said so in the
    /// last seconds.
    fn announce(
        &self,
        instance: &str,
    ) -> impl Future<Output = Result<Vec<String>, StoreError>> + Send {
        std::future::ready(Ok(vec![instance.to_owned()]))
    }

    /// Which counts had units given back, or were forgotten, since this mark, by whomever. A store
    /// whose counts other processes share must tell it within a moment, or denials that are
    /// remembered (`DenyCache`) outlive what they were made by. `None`, and always `None`, if
    /// nobody can free a count but through this store.
    fn news(&self, _since: &Mark) -> Option<impl Future<Output = Result<News, StoreError>> + Send> {
        None::<std::future::Ready<Result<News, StoreError>>>
    }

    /// A number that changes whenever other servers come to decide, by other clocks: what was told
    /// before is not to be relied on then.
    fn epoch(&self) -> u64 {
        0
    }

    /// Returns a number that changes whenever another server comes to decide this charge: a cached
    /// decision from before is stale then. By default the [epoch](Self::epoch) of the whole store.
    fn epoch_of(&self, _charge: &Charge<'_>) -> u64 {
        self.epoch()
    }
}

/// A store that several own: some behind a fallback, say, and some who want its errors.
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

    fn clock(&self) -> &dyn Clock {
        S::clock(self)
    }

    fn part(&self, charge: &Charge<'_>) -> Part {
        S::part(self, charge)
    }

    fn probe(&self, part: Part) -> impl Future<Output = Result<(), StoreError>> + Send {
        S::probe(self, part)
    }

    fn announce(
        &self,
        instance: &str,
    ) -> impl Future<Output = Result<Vec<String>, StoreError>> + Send {
        S::announce(self, instance)
    }

    fn news(&self, since: &Mark) -> Option<impl Future<Output = Result<News, StoreError>> + Send> {
        S::news(self, since)
    }

    fn epoch(&self) -> u64 {
        S::epoch(self)
    }

    fn epoch_of(&self, charge: &Charge<'_>) -> u64 {
        S::epoch_of(self, charge)
    }
}

/// A part of a store that fails, and comes back, apart from the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Part(pub u64);

impl Part {
    /// A store of one part.
    pub const WHOLE: Self = Self(0);
}

/// Why nobody could decide.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// A memory store at its cap: each key it holds still counts for somebody.
    #[error(
        "the memory store is full: it holds {cap} keys, and to forget one that counts would let its owner exceed a limit; \
         raise the cap or wait until some expire"
    )]
    Full {
        /// The cap on keys.
        cap: usize,
    },
    /// No answer in time. Whether the charge was spent is not known.
    #[error("no answer from the store within {0:?}")]
    Timeout(Duration),
    /// The store cannot be reached.
    #[error("the store cannot be reached: {0}")]
    Unreachable(String),
    /// The store answered, but not with a decision.
    #[error("the store refused: {0}")]
    Refused(String),
    /// The value stored under this key is not a count, or is damaged. Other keys are not affected.
    #[error("the count of this key cannot be read: {0}; reset the key to start over")]
    Unreadable(String),
    /// The store was not asked, for it has failed and is not back yet: a `Breaker` is open.
    #[error("the store was not asked, for it is failing: {0}")]
    Open(std::sync::Arc<StoreError>),
    /// The address or an option of the store is wrong.
    #[error("{0}")]
    Misconfigured(String),
}
