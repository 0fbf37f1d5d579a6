//! [`News`]: which counts have room again, by the hand of somebody else who shares the store.

use std::hash::Hasher;

use siphasher::sip::SipHasher13;

use crate::charge::Charge;

/// What a store tells of counts that had units given back or were forgotten, whoever asked for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct News {
    /// How far it goes: what to ask with next time.
    pub mark: Mark,
    /// Whose units were freed since the mark that was asked with.
    pub freed: Freed,
    /// The time of the clock that decides, in microseconds, if the store has one of its own.
    pub now: Option<u64>,
}

/// Which counts have room again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Freed {
    /// These, and no others.
    Counts(Vec<CountId>),
    /// It is not known: any of them.
    Anything,
}

/// Up to where news have been read. The default is nowhere: what comes first is then
/// [`Freed::Anything`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Mark(pub String);

/// A count by a number that is the same in every process. Two counts may have one number: who takes
/// news of the one for news of the other asks the store once too often, and that is all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CountId(pub u64);

impl CountId {
    /// Of the count that a charge is on.
    #[must_use]
    pub fn of(charge: &Charge<'_>) -> Self {
        let mut hasher = hasher();
        hasher.write(charge.key().as_bytes());
        // No UTF-8 text has this byte, so a key and a policy cannot flow into each other.
        hasher.write_u8(0xff);
        hasher.write(charge.policy().as_bytes());
        Self(hasher.finish())
    }

    /// Of a key, this byte and a policy in one piece: to hash them is then a third of the work.
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

    /// Instances of different versions must agree on it.
    #[test]
    fn the_number_of_a_count_stays_as_it_is() {
        let quota = Quota::fixed_window(1, Duration::from_secs(1)).expect("valid");
        let number = |key, policy| CountId::of(&Charge::new(key, &quota).with_policy(policy)).0;
        assert_eq!(number("user123", "per-user"), NUMBER);
        assert_ne!(number("ab", "c"), number("a", "bc"));
    }
    const NUMBER: u64 = 10_618_801_331_831_113_556;
}
