//! [`Invalidations`]: counts that got units back through another process that shares the store.

use std::hash::Hasher;

use siphasher::sip::SipHasher13;

use crate::charge::Charge;

/// Result of one poll: the counts that were refunded or reset, by any process.
///
/// ```
/// use tidegate::store::invalidation::{Cursor, Invalidations, Scope};
///
/// let polled = Invalidations {
///     cursor: Cursor("17:nonce:".to_owned()),
///     scope: Scope::All,
///     now: None,
/// };
/// assert_eq!(polled.scope, Scope::All);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Invalidations {
    /// Cursor for the next poll.
    pub cursor: Cursor,
    /// Counts that got units back since the cursor of this poll.
    pub scope: Scope,
    /// Time of the store's own clock, which decides, in microseconds. `None` if the store decides
    /// by the clock of this process.
    pub now: Option<u64>,
}

/// Set of counts that an invalidation applies to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Scope {
    /// Only these counts.
    Counts(Vec<CountId>),
    /// Any count: the reader has missed invalidations, or there were too many to list.
    All,
}

/// Position up to which invalidations were read. A poll with the default cursor returns
/// [`Scope::All`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Cursor(pub String);

/// Number that identifies a count in every process. It is a hash, so two counts may share one; an
/// invalidation of either then only makes a reader ask the store once more than necessary.
///
/// ```
/// use std::time::Duration;
/// use tidegate::store::invalidation::CountId;
/// use tidegate::{Charge, Quota};
///
/// let quota = Quota::sliding_log(100, Duration::from_secs(60))?;
/// let count = |key, policy| CountId::of(&Charge::new(key, &quota).with_policy(policy));
/// assert_eq!(count("ann", "per-user"), count("ann", "per-user"));
/// assert_ne!(count("ann", "per-user"), count("ann", "login"));
/// # Ok::<(), tidegate::QuotaError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CountId(pub u64);

impl CountId {
    /// Returns the number of the count that this charge belongs to.
    #[must_use]
    pub fn of(charge: &Charge<'_>) -> Self {
        let mut hasher = hasher();
        hasher.write(charge.key().as_bytes());
        // This byte never occurs in UTF-8, so ("ab", "c") and ("a", "bc") differ.
        hasher.write_u8(0xff);
        hasher.write(charge.policy().as_bytes());
        Self(hasher.finish())
    }

    /// Returns the number of a count from one buffer: the key, the byte 0xff, the policy. Hashing
    /// one buffer takes a third of the time of three writes.
    #[cfg(feature = "resilience")]
    pub(crate) fn of_bytes(bytes: &[u8]) -> Self {
        Self(hasher().hash(bytes))
    }
}

fn hasher() -> SipHasher13 {
    SipHasher13::new_with_keys(0x7469_6465_6761_7465, 0x636f_756e_7400_0001)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::quota::Quota;

    /// Instances of different versions share a Redis, so they must agree on the number.
    #[test]
    fn the_number_of_a_count_is_stable() {
        let quota = Quota::fixed_window(1, Duration::from_secs(1)).expect("valid");
        let number = |key, policy| CountId::of(&Charge::new(key, &quota).with_policy(policy)).0;
        assert_eq!(number("user123", "per-user"), NUMBER);
        assert_ne!(number("ab", "c"), number("a", "bc"));
    }
    const NUMBER: u64 = 10_618_801_331_831_113_556;
}
