//! [`Store`]: where counts live.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use self::invalidation::{Cursor, Invalidations};
use crate::charge::Charge;
use crate::clock::Clock;
use crate::decision::Decision;

#[cfg(feature = "resilience")]
pub(crate) mod compensation;
pub mod invalidation;
pub mod memory;
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
    fn news(
        &self,
        _since: &Cursor,
    ) -> Option<impl Future<Output = Result<Invalidations, StoreError>> + Send> {
        None::<std::future::Ready<Result<Invalidations, StoreError>>>
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

    fn news(
        &self,
        since: &Cursor,
    ) -> Option<impl Future<Output = Result<Invalidations, StoreError>> + Send> {
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

/// What is to be done with a charge.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// Decide and, if allowed, spend.
    Acquire,
    /// What acquire would answer; writes nothing. A cost of 0 asks whether more is recorded than
    /// the limit.
    Peek,
    /// Returns the units of an earlier charge. [`Charge::charged_at`] names its time; without it,
    /// the oldest units that still count go first, because that never admits too much.
    Refund,
    /// Forget the key.
    Reset,
    /// Take as much of the cost as there is room for, which may be nothing: for what has already
    /// happened, and is charged afterwards. Always answers `allowed`, and what is left then. A cost
    /// of 0 only looks; one above the burst is fine. Several charges are taken each for itself.
    Take,
    /// Records units that were used already: always charges, even beyond the limit. The overdraft
    /// is bounded at [`Quota::max_level`](crate::Quota::max_level) and is paid back by time.
    /// Answers whether the units fitted; if not, `remaining` is 0 and `retry_after` is the wait
    /// until one unit is free again. Several charges are recorded each for itself.
    Report,
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
