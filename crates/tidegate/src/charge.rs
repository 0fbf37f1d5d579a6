//! [`Charge`]: one (key, quota, cost) to be decided.

#[cfg(any(feature = "resilience", feature = "tower"))]
use crate::algorithm::{Algorithm, mul_div_ceil};
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
    /// Microseconds by the store's clock; 0 if unknown.
    charged_at: u64,
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
    #[error(
        "two charges of one call share key {key:?} and policy {policy:?}: give each a policy name of its own"
    )]
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
        Self {
            key,
            quota,
            policy: None,
            cost: 1,
            charged_at: 0,
            on_store_failure: OnStoreFailure::default(),
        }
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

    /// For a refund: when the charge to be refunded was made, in microseconds by the store's clock
    /// ([`Store::clock`](crate::Store::clock)), read just before the acquire. The refund then
    /// returns that charge's units and never younger ones.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tidegate::{Charge, Limiter, MemoryStore, Quota, Store as _};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let limiter = Limiter::new(MemoryStore::new());
    /// let quota = Quota::sliding_log(1, Duration::from_secs(60))?;
    /// let charge = Charge::new("user123", &quota);
    /// let asked = limiter.store().clock().now();
    /// limiter.blocking().acquire(&charge)?;
    /// // The request failed.
    /// limiter.blocking().refund(&charge.charged_at(asked))?;
    /// assert!(limiter.blocking().acquire(&charge)?.allowed);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn charged_at(mut self, micros: u64) -> Self {
        self.charged_at = micros;
        self
    }

    /// What to answer while the store cannot decide, if a `Fallback` (feature `resilience`) stands
    /// around it. By default this process decides.
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
    #[expect(
        clippy::inline_always,
        reason = "a tenth of what a decision takes, and its one caller is the decision"
    )]
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

    /// The charge that refunds this one, which was allowed by `decision` and asked for at `asked`.
    /// `None` if nothing of it can be left at `now`.
    #[cfg(any(feature = "resilience", feature = "tower"))]
    pub(crate) fn to_refund(self, decision: &Decision, asked: u64, now: u64) -> Option<Self> {
        let age = now.saturating_sub(asked);
        let charged_at = match self.quota.algorithm() {
            Algorithm::SlidingLog | Algorithm::FixedWindow if age >= self.quota.window_micros() => {
                return None;
            }
            Algorithm::SlidingCounter if age >= 2 * self.quota.window_micros() => return None,
            Algorithm::SlidingLog | Algorithm::FixedWindow | Algorithm::SlidingCounter => asked,
            // What the bucket held before this charge drains first, whether this charge is refunded
            // or not. Only from then on does this charge drain.
            Algorithm::TokenBucket | Algorithm::LeakyBucket => {
                let own = mul_div_ceil(self.cost, self.quota.window_micros(), self.quota.limit());
                let reset_after =
                    u64::try_from(decision.reset_after.as_micros()).unwrap_or(u64::MAX);
                let held_before = reset_after.saturating_sub(own + 1);
                if age.saturating_sub(held_before) >= own {
                    return None;
                }
                asked.saturating_add(held_before)
            }
        };
        Some(self.charged_at(charged_at.max(1)))
    }

    /// When the charge to be refunded was made; 0 if unknown.
    pub(crate) fn charge_time(&self) -> u64 {
        self.charged_at
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

    /// Whether it can be decided at all. What was once taken can be given back even if a lower
    /// limit would not admit it now, and to forget a key costs nothing.
    pub(crate) fn check(&self, action: Action) -> Result<(), ChargeError> {
        let sound = self.can_be_admitted()
            && is_plain_key(self.key)
            && self.policy.is_none_or(is_plain_key);
        if sound { Ok(()) } else { self.check_with_care(action) }
    }

    /// A cost of 0 is for [`Action::Peek`] through [`Limiter::decide`](crate::Limiter::decide)
    /// alone.
    pub(crate) fn check_cost(&self) -> Result<(), ChargeError> {
        if self.cost == 0 { Err(ChargeError::ZeroCost) } else { Ok(()) }
    }

    #[cold]
    fn check_with_care(&self, action: Action) -> Result<(), ChargeError> {
        Key::new(self.key).map_err(ChargeError::Key)?;
        if let Some(policy) = self.policy {
            Key::new(policy).map_err(ChargeError::Policy)?;
        }
        match (action, self.cost) {
            // A peek of cost 0 asks whether more is recorded than the limit.
            (Action::Reset, _) | (Action::Peek, 0) => Ok(()),
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
            let same = |other: &Charge<'_>| {
                other.key == charge.key && other.policy_name() == charge.policy_name()
            };
            if charges[..at].iter().any(same) {
                return Err(ChargeError::Twice {
                    key: charge.key.to_owned(),
                    policy: charge.policy_name().to_owned(),
                });
            }
        }
        Ok(())
    }
}
