//! [`Decision`]: the answer, with its evidence.

use std::cmp::Reverse;
use std::fmt;
use std::time::Duration;

/// The answer to a charge, with its evidence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decision {
    /// May the request pass?
    pub allowed: bool,
    /// The quota's units per window.
    pub limit: u64,
    /// Units that could be taken right after this decision.
    pub remaining: u64,
    /// The exact shortest wait after which the same request would be admitted if nobody else came.
    /// Zero when allowed.
    pub retry_after: Duration,
    /// How long until the full limit is back if nobody else comes.
    pub reset_after: Duration,
    /// How long an admitted request has to wait for its turn, so that what passes is evenly spaced.
    /// Zero but for `leaky-bucket`.
    pub delay: Duration,
    /// Who decided.
    pub source: Source,
}

/// Who decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Source {
    /// The store that holds the counts.
    Store,
    /// This process's memory of a denial by the store that still holds.
    DenyCache,
    /// This process's memory, while the store cannot decide.
    Local,
    /// Let pass, for the store could not decide.
    Allow,
    /// Denied, for the store could not decide or the request lacks the key that it would count by.
    Deny,
}

impl Source {
    /// The name in API bodies and metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Store => "store",
            Self::DenyCache => "deny-cache",
            Self::Local => "local",
            Self::Allow => "allow",
            Self::Deny => "deny",
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl Decision {
    /// The decision that binds the request: of several denials the one with the longest wait,
    /// otherwise the one with the least left (and, of equals, the one that takes longest to come
    /// back).
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tidegate::{Charge, Decision, Limiter, MemoryStore, Quota};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let second = Quota::fixed_window(10, Duration::from_secs(1))?;
    /// let hour = Quota::fixed_window(100, Duration::from_secs(3600))?;
    /// let limiter = Limiter::new(MemoryStore::new());
    /// let decisions =
    ///     limiter.blocking().acquire_all(&[Charge::new("u", &hour), Charge::new("u", &second)])?;
    /// assert_eq!(Decision::most_restrictive(&decisions).map(|d| d.limit), Some(10));
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn most_restrictive(decisions: &[Decision]) -> Option<&Decision> {
        decisions.iter().min_by_key(|decision| decision.rank())
    }

    /// The lowest rank of several decisions has the one that binds the request.
    #[must_use]
    pub fn rank(&self) -> impl Ord + use<> {
        let longest = Reverse((self.delay, self.reset_after));
        (self.allowed, Reverse(self.retry_after), self.remaining, longest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decision(allowed: bool, remaining: u64, retry: u64, reset: u64) -> Decision {
        Decision {
            allowed,
            limit: 10,
            remaining,
            retry_after: Duration::from_secs(retry),
            reset_after: Duration::from_secs(reset),
            delay: Duration::ZERO,
            source: Source::Store,
        }
    }

    #[test]
    fn the_most_restrictive_is_the_longest_denial_then_the_least_left() {
        let free = decision(true, 5, 0, 1);
        let tight = decision(true, 1, 0, 1);
        let tight_for_longer = decision(true, 1, 0, 9);
        let denied = decision(false, 3, 1, 1);
        let denied_for_longer = decision(false, 4, 2, 1);
        assert_eq!(Decision::most_restrictive(&[]), None);
        assert_eq!(Decision::most_restrictive(&[free, tight]), Some(&tight));
        assert_eq!(
            Decision::most_restrictive(&[tight, tight_for_longer, free]),
            Some(&tight_for_longer)
        );
        assert_eq!(Decision::most_restrictive(&[tight, denied, free]), Some(&denied));
        assert_eq!(
            Decision::most_restrictive(&[denied, denied_for_longer]),
            Some(&denied_for_longer)
        );
    }
}
