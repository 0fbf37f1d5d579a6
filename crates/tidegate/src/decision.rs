//! [`Decision`]: the answer to one charge; [`Decisions`]: the answer to several.

use std::cmp::Reverse;
use std::fmt;
use std::time::Duration;

use crate::hold::HoldState;

/// Answer to one charge.
///
/// A denial is an answer, not an error. `Decision` is `#[must_use]`, and
/// [`into_result`](Self::into_result) turns a denial into an error for callers that prefer `?`.
///
/// ```
/// use std::time::Duration;
/// use tidegate::{Charge, Limiter, ManualClock, MemoryStore, Quota};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let clock = ManualClock::new();
/// let limiter = Limiter::new(MemoryStore::builder().clock(clock.clone()).build());
/// let quota = Quota::sliding_log(2, Duration::from_secs(60))?;
/// let charge = Charge::new("user123", &quota);
///
/// let first = limiter.blocking().acquire(&charge)?;
/// assert_eq!((first.allowed, first.limit, first.remaining), (true, 2, 1));
///
/// clock.advance(Duration::from_secs(20));
/// let _ = limiter.blocking().acquire(&charge)?;
/// let denied = limiter.blocking().acquire(&charge)?;
/// assert_eq!((denied.allowed, denied.remaining), (false, 0));
/// assert_eq!(denied.retry_after, Duration::from_secs(40)); // then the first one expires
/// assert_eq!(denied.reset_after, Duration::from_secs(60)); // then the second one, too
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "a denied request must not pass: check `allowed`, or use `into_result()?`"]
#[non_exhaustive]
pub struct Decision {
    /// Whether the request may pass.
    pub allowed: bool,
    /// Capacity of the quota: the [burst](crate::Quota::burst) of a bucket, the limit of the other
    /// algorithms. `remaining` never exceeds it.
    pub limit: u64,
    /// Units that another request could take right after this decision.
    pub remaining: u64,
    /// Exact shortest wait after which the same request would be admitted if no other request
    /// arrived. Zero when allowed.
    pub retry_after: Duration,
    /// Time until the full limit is available again if no other request arrives.
    pub reset_after: Duration,
    /// How long an admitted request has to wait in the queue of a `leaky-bucket`, so that admitted
    /// requests are evenly spaced. Zero for every other algorithm.
    pub delay: Duration,
    /// Origin of the decision.
    pub source: Source,
    /// State of the [hold](crate::Hold); `None` for a charge without one, and for a reservation that
    /// is denied.
    pub hold: Option<HoldState>,
}

/// Origin of a decision: the store, a cache, a substitute while the store is unavailable, or a
/// policy that cannot count the request.
///
/// ```
/// use tidegate::{Decision, Source};
///
/// let decision = Decision::allow(100, 99).with_source(Source::Local);
/// assert_eq!(decision.source.as_str(), "local");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Source {
    /// The store that holds the counts.
    Store,
    /// A cached denial of the store that still holds.
    DenyCache,
    /// The memory of this process, while the store is unavailable.
    Local,
    /// Failing open, because the store is unavailable.
    Allow,
    /// Failing closed, because the store is unavailable.
    Deny,
    /// The policy itself: the request lacks its key, or has an invalid one, so it has no count.
    MissingKey,
    /// An override that blocks the key or the policy while the program runs.
    Override,
}

impl Source {
    /// Returns the name in API bodies and metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Store => "store",
            Self::DenyCache => "deny-cache",
            Self::Local => "local",
            Self::Allow => "allow",
            Self::Deny => "deny",
            Self::MissingKey => "missing-key",
            Self::Override => "override",
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl Decision {
    /// Creates a decision that allows the request and leaves `remaining` of `limit` units.
    ///
    /// For implementers of [`Store`](crate::Store), and for tests:
    ///
    /// ```
    /// use std::time::Duration;
    /// use tidegate::Decision;
    ///
    /// let decision = Decision::allow(100, 99).with_reset_after(Duration::from_secs(60));
    /// assert!(decision.allowed && decision.retry_after.is_zero());
    /// ```
    pub const fn allow(limit: u64, remaining: u64) -> Self {
        Self {
            allowed: true,
            limit,
            remaining,
            retry_after: Duration::ZERO,
            reset_after: Duration::ZERO,
            delay: Duration::ZERO,
            source: Source::Store,
            hold: None,
        }
    }

    /// Creates a decision that denies the request for `retry_after`.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tidegate::Decision;
    ///
    /// let decision = Decision::deny(100, Duration::from_secs(2));
    /// assert!(!decision.allowed);
    /// assert_eq!(decision.reset_after, Duration::from_secs(2));
    /// ```
    pub const fn deny(limit: u64, retry_after: Duration) -> Self {
        Self { allowed: false, retry_after, reset_after: retry_after, ..Self::allow(limit, 0) }
    }

    /// Sets the units that are left.
    pub const fn with_remaining(mut self, remaining: u64) -> Self {
        self.remaining = remaining;
        self
    }

    /// Sets the time until the full limit is available again.
    pub const fn with_reset_after(mut self, reset_after: Duration) -> Self {
        self.reset_after = reset_after;
        self
    }

    /// Sets how long the admitted request has to wait.
    pub const fn with_delay(mut self, delay: Duration) -> Self {
        self.delay = delay;
        self
    }

    /// Sets the origin of the decision; [`Source::Store`] by default.
    pub const fn with_source(mut self, source: Source) -> Self {
        self.source = source;
        self
    }

    /// Sets the state of the hold.
    pub const fn with_hold(mut self, hold: HoldState) -> Self {
        self.hold = Some(hold);
        self
    }

    /// Returns the decision if it allows the request, and an error that holds it otherwise.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tidegate::{Charge, Limiter, MemoryStore, Quota};
    /// type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;
    ///
    /// fn handle(limiter: &Limiter, user: &str, quota: &Quota) -> Result<()> {
    ///     limiter.blocking().acquire(&Charge::new(user, quota))?.into_result()?;
    ///     Ok(()) // the request may pass
    /// }
    /// # let limiter = Limiter::new(MemoryStore::new());
    /// # let quota = Quota::fixed_window(1, Duration::from_secs(60)).unwrap();
    /// assert!(handle(&limiter, "ann", &quota).is_ok());
    /// let denied = handle(&limiter, "ann", &quota).unwrap_err();
    /// assert!(denied.to_string().starts_with("rate limit of 1 exceeded"));
    /// ```
    pub fn into_result(self) -> Result<Self, Denied> {
        if self.allowed { Ok(self) } else { Err(Denied(self)) }
    }

    /// Returns the order of decisions by how restrictive they are: the lowest binds the request.
    #[must_use]
    pub fn rank(&self) -> impl Ord + use<> {
        let longest = Reverse((self.delay, self.reset_after));
        (self.allowed, Reverse(self.retry_after), self.remaining, longest)
    }
}

/// Error of [`Decision::into_result`]: the request is denied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("rate limit of {} exceeded: retry after {:?}", .0.limit, .0.retry_after)]
pub struct Denied(pub Decision);

/// Decisions on several charges of one request, in the order of the charges.
///
/// The request may pass only if all of them allow it. A single entry may say `allowed` although the
/// request is denied by another, so ask [`is_allowed`](Self::is_allowed).
///
/// ```
/// # use std::time::Duration;
/// # use tidegate::{Charge, Limiter, MemoryStore, Quota};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let second = Quota::fixed_window(10, Duration::from_secs(1))?;
/// let hour = Quota::fixed_window(100, Duration::from_secs(3600))?;
/// let limiter = Limiter::new(MemoryStore::new());
/// let decisions =
///     limiter.blocking().acquire_all(&[Charge::new("u", &hour), Charge::new("u", &second)])?;
/// assert!(decisions.is_allowed());
/// assert_eq!(decisions.binding().map(|decision| decision.limit), Some(10));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[must_use = "a denied request must not pass: check `is_allowed()`, or use `into_result()?`"]
pub struct Decisions(Vec<Decision>);

impl Decisions {
    /// Returns whether the request may pass: whether every decision allows it.
    #[must_use]
    pub fn is_allowed(&self) -> bool {
        self.0.iter().all(|decision| decision.allowed)
    }

    /// Returns the most restrictive decision: of several denials the one with the longest wait,
    /// otherwise the one with the fewest units left (of equals, the one that resets last).
    #[must_use]
    pub fn binding(&self) -> Option<&Decision> {
        self.0.iter().min_by_key(|decision| decision.rank())
    }

    /// Iterates over the decisions, in the order of the charges.
    pub fn iter(&self) -> std::slice::Iter<'_, Decision> {
        self.0.iter()
    }

    /// Returns the decisions as a slice, in the order of the charges.
    pub fn as_slice(&self) -> &[Decision] {
        &self.0
    }

    /// Returns the number of decisions, which is that of the charges.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns whether there was no charge to decide.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the decisions if the request may pass, and the most restrictive denial otherwise.
    pub fn into_result(self) -> Result<Self, Denied> {
        match self.binding() {
            Some(binding) if !binding.allowed => Err(Denied(*binding)),
            _ => Ok(self),
        }
    }
}

impl From<Vec<Decision>> for Decisions {
    fn from(decisions: Vec<Decision>) -> Self {
        Self(decisions)
    }
}

impl From<Decisions> for Vec<Decision> {
    fn from(decisions: Decisions) -> Self {
        decisions.0
    }
}

impl std::ops::Index<usize> for Decisions {
    type Output = Decision;

    fn index(&self, position: usize) -> &Decision {
        &self.0[position]
    }
}

impl IntoIterator for Decisions {
    type Item = Decision;
    type IntoIter = std::vec::IntoIter<Decision>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

impl<'a> IntoIterator for &'a Decisions {
    type Item = &'a Decision;
    type IntoIter = std::slice::Iter<'a, Decision>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn binding_decision_is_the_longest_denial_then_the_fewest_left() {
        let free = Decision::allow(10, 5).with_reset_after(SECOND);
        let tight = Decision::allow(10, 1).with_reset_after(SECOND);
        let tight_for_longer = tight.with_reset_after(9 * SECOND);
        let denied = Decision::deny(10, SECOND).with_remaining(3);
        let denied_for_longer = Decision::deny(10, 2 * SECOND).with_remaining(4);
        let binding =
            |decisions: &[Decision]| Decisions::from(decisions.to_vec()).binding().copied();
        assert_eq!(binding(&[]), None);
        assert_eq!(binding(&[free, tight]), Some(tight));
        assert_eq!(binding(&[tight, tight_for_longer, free]), Some(tight_for_longer));
        assert_eq!(binding(&[tight, denied, free]), Some(denied));
        assert_eq!(binding(&[denied, denied_for_longer]), Some(denied_for_longer));
    }

    #[test]
    fn one_denial_denies_the_request() {
        let allowed = Decision::allow(10, 5);
        let denied = Decision::deny(10, SECOND);
        assert!(Decisions::default().is_allowed());
        assert!(Decisions::from(vec![allowed, allowed]).into_result().is_ok());
        let mixed = Decisions::from(vec![allowed, denied]);
        assert!(!mixed.is_allowed());
        assert_eq!(mixed.into_result(), Err(Denied(denied)));
        assert_eq!(denied.into_result(), Err(Denied(denied)));
    }
}
