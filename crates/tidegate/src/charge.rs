//! [`Charge`]: one (key, quota, cost) to be decided.

#[cfg(any(feature = "resilience", feature = "tower"))]
use std::time::Duration;

#[cfg(any(feature = "resilience", feature = "tower"))]
use crate::algorithm::Algorithm;
#[cfg(any(feature = "resilience", feature = "tower"))]
use crate::decision::Decision;
use crate::fingerprint::{Fingerprint, Secret};
use crate::key::{Key, KeyError, is_plain_key};
use crate::policy::OnStoreFailure;
use crate::quota::Quota;
use crate::store::Action;

/// The most charges that one call decides together.
pub const MAX_CHARGES: usize = 128;

/// One (key, quota, cost) to be decided, counted under a policy's name.
///
/// ```
/// use std::time::Duration;
/// use tidegate::{Charge, Quota};
///
/// let quota = Quota::sliding_log(100, Duration::from_secs(60))?;
/// let charge = Charge::new("user123", &quota).policy("uploads").cost(5);
/// assert_eq!(charge.units(), 5);
/// # Ok::<(), tidegate::QuotaError>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Charge<'a> {
    key: &'a str,
    quota: &'a Quota,
    policy: Option<&'a str>,
    cost: u64,
    on_store_failure: OnStoreFailure,
}

/// Why this charge cannot be decided, whatever the counts are.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ChargeError {
    /// The key is no key.
    #[error("the key {0}")]
    Key(KeyError),
    /// The policy's name is no name.
    #[error("the policy name {0}")]
    Policy(KeyError),
    /// Nothing to take.
    #[error("cost 0 takes nothing: a cost is at least 1 (peek tells what is left)")]
    ZeroCost,
    /// More than could ever be admitted.
    #[error("cost {cost} can never be admitted: this quota admits at most {most} at once")]
    CostTooHigh {
        /// The cost asked for.
        cost: u64,
        /// The most that one request can take.
        most: u64,
    },
    /// Too many charges in one call.
    #[error("{0} charges in one call: at most {MAX_CHARGES} are allowed")]
    TooMany(usize),
    /// Two charges of one call would count on the same count.
    #[error("two charges of one call share key {key:?} and policy {policy:?}: give each a policy name of its own")]
    Twice {
        /// The key they share.
        key: String,
        /// The policy they share.
        policy: String,
    },
}

impl<'a> Charge<'a> {
    /// One unit of `quota` for `key`. What is wrong with the key, if anything, the limiter says.
    #[must_use]
    pub fn new(key: &'a str, quota: &'a Quota) -> Self {
        Self { key, quota, policy: None, cost: 1, on_store_failure: OnStoreFailure::default() }
    }

    /// Counts under this policy's name. Without it, the algorithm and the window are the name
    /// ([`Quota::unnamed_policy`]).
    #[must_use]
    pub fn policy(mut self, name: &'a str) -> Self {
        self.policy = Some(name);
        self
    }

    /// Takes `units` instead of one.
    #[must_use]
    pub fn cost(mut self, units: u64) -> Self {
        self.cost = units;
        self
    }

    /// What to answer while the store cannot decide, if a `Fallback` (feature `resilience`) stands around it. By default
    /// this process decides.
    #[must_use]
    pub fn on_store_failure(mut self, failure: OnStoreFailure) -> Self {
        self.on_store_failure = failure;
        self
    }

    /// The same for another quota.
    pub(crate) fn with_quota<'b>(&self, quota: &'b Quota) -> Charge<'b>
    where
        'a: 'b,
    {
        Charge { key: self.key, quota, policy: Some(self.policy_name()), ..*self }
    }

    /// Whose count it is.
    #[must_use]
    pub fn key(&self) -> &'a str {
        self.key
    }

    /// The quota.
    #[must_use]
    pub fn quota(&self) -> &'a Quota {
        self.quota
    }

    /// The name it counts under.
    #[must_use]
    pub fn policy_name(&self) -> &'a str {
        self.policy.unwrap_or_else(|| self.quota.unnamed_policy())
    }

    /// What stands for its key and policy in memory.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a tenth of what a decision takes, and its one caller is the decision")]
    pub(crate) fn fingerprint(&self, secret: &Secret) -> Fingerprint {
        let named;
        let policy = match self.policy {
            None => self.quota.unnamed_policy_sum(),
            Some(name) => {
                named = secret.policy(name);
                &named
            }
        };
        secret.fingerprint(self.key, policy)
    }

    /// What to answer while the store cannot decide.
    #[must_use]
    pub fn store_failure(&self) -> OnStoreFailure {
        self.on_store_failure
    }

    /// For how long what an allowed charge took can be given back without giving back what others took. After that it is
    /// better left to fade.
    #[cfg(any(feature = "resilience", feature = "tower"))]
    pub(crate) fn keeps(&self, decision: &Decision) -> Duration {
        let (window, limit) = (self.quota.window_micros(), self.quota.limit());
        let taken = self.quota.burst().saturating_sub(decision.remaining);
        match self.quota.algorithm() {
            // Until the window ends, or the log's newest entry leaves.
            Algorithm::FixedWindow | Algorithm::SlidingLog => decision.reset_after,
            // Until this window ends: in the next one, others' units go first. It ends as much before the reset as a count,
            // which is at most all that is taken, needs in the next window to weigh less than one.
            Algorithm::SlidingCounter => {
                decision.reset_after.saturating_sub(Duration::from_micros(window - window / taken.max(1) + 1))
            }
            // Until the bucket would be empty without it: what drains from then on is not there to be given back. (To
            // the unit: what it held before is known no better.)
            Algorithm::TokenBucket | Algorithm::LeakyBucket => {
                let before = u128::from(taken.saturating_sub(self.cost).max(1));
                let drained = before * u128::from(window) / u128::from(limit);
                Duration::from_micros(u64::try_from(drained).unwrap_or(u64::MAX))
            }
        }
    }

    /// How many units it takes.
    #[must_use]
    pub fn units(&self) -> u64 {
        self.cost
    }

    /// Whether there is a time when its units can be taken.
    #[inline]
    pub(crate) fn can_be_admitted(&self) -> bool {
        (1..=self.quota.burst()).contains(&self.cost)
    }

    /// Whether it can be decided at all. What was once taken can be given back even if a lower limit would not admit it
    /// now, and to forget a key costs nothing.
    pub(crate) fn check(&self, action: Action) -> Result<(), ChargeError> {
        let sound = self.can_be_admitted() && is_plain_key(self.key) && self.policy.is_none_or(is_plain_key);
        if sound { Ok(()) } else { self.check_with_care(action) }
    }

    #[cold]
    fn check_with_care(&self, action: Action) -> Result<(), ChargeError> {
        Key::new(self.key).map_err(ChargeError::Key)?;
        if let Some(policy) = self.policy {
            Key::new(policy).map_err(ChargeError::Policy)?;
        }
        match (action, self.cost) {
            (Action::Reset, _) => Ok(()),
            (_, 0) => Err(ChargeError::ZeroCost),
            (Action::Acquire | Action::Peek, cost) if cost > self.quota.burst() => {
                Err(ChargeError::CostTooHigh { cost, most: self.quota.burst() })
            }
            _ => Ok(()),
        }
    }

    /// A set of charges to be decided together: each is sound, and no count is named twice.
    pub(crate) fn check_all(action: Action, charges: &[Charge<'_>]) -> Result<(), ChargeError> {
        if charges.len() > MAX_CHARGES {
            return Err(ChargeError::TooMany(charges.len()));
        }
        for (at, charge) in charges.iter().enumerate() {
            charge.check(action)?;
            let same = |other: &Charge<'_>| other.key == charge.key && other.policy_name() == charge.policy_name();
            if charges[..at].iter().any(same) {
                return Err(ChargeError::Twice { key: charge.key.to_owned(), policy: charge.policy_name().to_owned() });
            }
        }
        Ok(())
    }
}
