//! [`Charge`]: one (key, quota, cost) to be decided.

use crate::action::Action;
use crate::algorithm::{Algorithm, mul_div_ceil};
use crate::clock::Timestamp;
use crate::clock::micros;
use crate::decision::Decision;
use crate::enum_names::enum_names;
use crate::hold::{Hold, HoldError, HoldStatus, MAX_ENDED};
use crate::key::{Key, KeyError, is_plain_key};
use crate::quota::Quota;

/// The maximum number of charges that one call decides together.
pub const MAX_CHARGES: usize = 128;

/// One (key, quota, cost) to be decided, counted under a policy name.
///
/// ```
/// use std::time::Duration;
/// use tidegate::{Charge, Quota};
///
/// let quota = Quota::sliding_log(100, Duration::from_secs(60))?;
/// let charge = Charge::new("user123", &quota).with_policy("uploads").with_cost(5);
/// assert_eq!(charge.cost(), 5);
/// assert_eq!(charge.policy(), "uploads");
/// # Ok::<(), tidegate::QuotaError>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Charge<'a> {
    key: &'a str,
    quota: &'a Quota,
    policy: Option<&'a str>,
    cost: u64,
    /// Time on the store's clock; zero if unknown.
    charged_at: Timestamp,
    /// Whether a refund may lack the time of its charge.
    allows_unknown_time: bool,
    on_store_failure: OnStoreFailure,
    hold: Option<&'a Hold>,
}

/// Decision on requests while the store is unavailable, with a `Fallback` (feature `resilience`)
/// around the store. Without a `Fallback`, requests end with the store's error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnStoreFailure {
    /// Decide in this process's memory, by its share of the quota.
    #[default]
    Local,
    /// Fail open: for limits that only smooth load.
    Allow,
    /// Fail closed: for limits that protect something, such as logins.
    Deny,
    /// Return the store's error, so that the caller decides. Policies of a configuration do not
    /// have it.
    Error,
}

enum_names!(
    OnStoreFailure,
    "on_store_failure",
    Local = "local",
    Allow = "allow",
    Deny = "deny",
    Error = "error"
);

/// The reason why a charge is invalid, whatever the counts are.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ChargeError {
    /// The key is invalid.
    #[error("the key {0}")]
    Key(KeyError),
    /// The policy name is invalid.
    #[error("the policy name {0}")]
    Policy(KeyError),
    /// The cost is zero.
    #[error("cost 0 is too low: a cost is at least 1 (peek shows the remaining units)")]
    ZeroCost,
    /// The cost exceeds the burst, so the charge could never be admitted.
    #[error("cost {cost} can never be admitted: this quota admits at most {most} at once")]
    CostTooHigh {
        /// The requested cost.
        cost: u64,
        /// The maximum cost of one request.
        most: u64,
    },
    /// The refund lacks the time of its charge.
    #[error(
        "a refund needs the time of its charge (Charge::with_charged_at): units of a charge that \
         has left the window do not return"
    )]
    NoChargeTime,
    /// The action needs a hold.
    #[error("a commit, a renewal and a charge of concurrency need a hold (Charge::with_hold)")]
    NoHold,
    /// The hold is invalid.
    #[error(transparent)]
    Hold(HoldError),
    /// The refund would release too many units in flight.
    #[error(
        "a refund of units in flight releases at most {MAX_ENDED}, not {0}: make several, or name \
         the id of each hold"
    )]
    TooManyInFlight(u64),
    /// Units in flight are not settled at once.
    #[error("an id that is settled at once cannot count in concurrency: reserve instead")]
    SettledInFlight,
    /// The id of the hold was used with another cost.
    #[error("the id {0:?} is in use with another cost: a new request needs a new id")]
    HoldConflict(String),
    /// The call has too many charges.
    #[error("{0} charges in one call: at most {MAX_CHARGES} are allowed")]
    TooMany(usize),
    /// Two charges of one call have the same count.
    #[error(
        "two charges of one call share key {key:?} and policy {policy:?}: \
         give each a different policy name"
    )]
    Twice {
        /// The key that both charges have.
        key: String,
        /// The policy that both charges have.
        policy: String,
    },
}

impl<'a> Charge<'a> {
    /// Creates a charge of one unit of `quota` for `key`. The limiter validates the key when it
    /// decides the charge.
    #[must_use]
    pub fn new(key: &'a str, quota: &'a Quota) -> Self {
        Self {
            key,
            quota,
            policy: None,
            cost: 1,
            charged_at: Timestamp::ZERO,
            allows_unknown_time: false,
            on_store_failure: OnStoreFailure::default(),
            hold: None,
        }
    }

    /// Creates a charge that an acquire in memory was called with.
    pub(crate) fn of_parts(
        key: &'a str,
        quota: &'a Quota,
        cost: u64,
        policy: Option<&'a str>,
    ) -> Self {
        Self { policy, cost, ..Self::new(key, quota) }
    }

    /// Sets the policy name to count under. The default has the algorithm and the window
    /// ([`Quota::default_policy_name`]).
    #[must_use]
    pub fn with_policy(mut self, name: &'a str) -> Self {
        self.policy = Some(name);
        self
    }

    /// Sets the cost in units; the default is 1.
    #[must_use]
    pub fn with_cost(mut self, units: u64) -> Self {
        self.cost = units;
        self
    }

    /// Sets the time of the charge that a refund returns, on the store's clock
    /// ([`Limiter::now`](crate::Limiter::now)), read just before the acquire. The refund returns
    /// the units of that charge and never younger ones, and nothing if that charge has left the
    /// window. A refund without a time is [`ChargeError::NoChargeTime`]: no store knows whether its
    /// units still count. [`Timestamp::ZERO`] is no time.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tidegate::{Charge, Limiter, MemoryStore, Quota};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let limiter = Limiter::new(MemoryStore::new());
    /// let quota = Quota::sliding_log(1, Duration::from_secs(60))?;
    /// let charge = Charge::new("user123", &quota);
    /// let charged_at = limiter.now();
    /// limiter.blocking().acquire(&charge)?;
    /// // The request failed.
    /// limiter.blocking().refund(&charge.with_charged_at(charged_at))?;
    /// assert!(limiter.blocking().acquire(&charge)?.allowed);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn with_charged_at(mut self, time: Timestamp) -> Self {
        self.charged_at = time;
        self
    }

    /// Lets a refund without a time return the oldest units that still count, even if the refunded
    /// charge has left the window: up to its cost is then admitted above the limit.
    pub(crate) fn with_unknown_time_allowed(mut self, allowed: bool) -> Self {
        self.allows_unknown_time = allowed;
        self
    }

    /// Sets the behaviour while the store cannot decide, for a store inside a `Fallback` (feature
    /// `resilience`). By default this process decides locally.
    #[must_use]
    pub fn with_on_store_failure(mut self, failure: OnStoreFailure) -> Self {
        self.on_store_failure = failure;
        self
    }

    /// Sets the hold: an acquire becomes a reservation, which a commit settles. A refund of the same
    /// hold returns exactly its units, once, and needs no time.
    #[must_use]
    pub fn with_hold(mut self, hold: &'a Hold) -> Self {
        self.hold = Some(hold);
        self
    }

    /// Returns this charge without its hold.
    pub(crate) fn without_hold(mut self) -> Self {
        self.hold = None;
        self
    }

    /// Returns this charge with another quota, under the same policy name.
    pub(crate) fn with_quota<'b>(&self, quota: &'b Quota) -> Charge<'b>
    where
        'a: 'b,
    {
        Charge { key: self.key, quota, policy: Some(self.policy()), ..*self }
    }

    /// Returns the key.
    #[must_use]
    pub fn key(&self) -> &'a str {
        self.key
    }

    /// Returns the quota.
    #[must_use]
    pub fn quota(&self) -> &'a Quota {
        self.quota
    }

    /// Returns the policy name that the charge counts under.
    #[must_use]
    pub fn policy(&self) -> &'a str {
        self.policy.unwrap_or_else(|| self.quota.default_policy_name())
    }

    /// Returns the policy name that was set, if any.
    #[inline]
    pub(crate) fn explicit_policy(&self) -> Option<&'a str> {
        self.policy
    }

    /// Returns the cost in units.
    #[must_use]
    pub fn cost(&self) -> u64 {
        self.cost
    }

    /// Returns the time of the charge that a refund returns; [`Timestamp::ZERO`] if unknown.
    #[must_use]
    pub fn charged_at(&self) -> Timestamp {
        self.charged_at
    }

    /// Returns the hold.
    #[must_use]
    pub fn hold(&self) -> Option<&'a Hold> {
        self.hold
    }

    /// Returns whether more than the count of its key decides it: a hold, a block, or the ends of
    /// holds.
    pub(crate) fn is_extended(&self) -> bool {
        self.hold.is_some() || self.quota.has_blocks() || self.quota.releases_holds()
    }

    /// Returns the behaviour while the store cannot decide.
    #[must_use]
    pub fn on_store_failure(&self) -> OnStoreFailure {
        self.on_store_failure
    }

    /// Returns the charge that refunds this one, which `decision` allowed and which was sent at
    /// `sent_at`. Returns `None` if nothing of it can be left at `now`.
    pub(crate) fn to_refund(
        self,
        decision: &Decision,
        sent_at: Timestamp,
        now: Timestamp,
    ) -> Option<Self> {
        if self.hold.is_some() {
            // By the id. An earlier request made the charge of a repeated one.
            let is_repeated = decision.hold.is_some_and(|hold| hold.status == HoldStatus::Replayed);
            return (!is_repeated).then_some(self);
        }
        let (sent_at, now) = (sent_at.as_micros(), now.as_micros());
        let age = now.saturating_sub(sent_at);
        let charged_at = match self.quota.algorithm() {
            Algorithm::SlidingLog | Algorithm::FixedWindow if age >= self.quota.window_micros() => {
                return None;
            }
            Algorithm::SlidingCounter if age >= 2 * self.quota.window_micros() => return None,
            Algorithm::SlidingLog
            | Algorithm::FixedWindow
            | Algorithm::SlidingCounter
            | Algorithm::Concurrency => sent_at,
            // The earlier contents of the bucket drain first, with or without this refund. Only
            // afterwards does this charge drain.
            Algorithm::TokenBucket | Algorithm::LeakyBucket => {
                let drain = mul_div_ceil(self.cost, self.quota.window_micros(), self.quota.limit());
                let earlier_drain = micros(decision.reset_after).saturating_sub(drain + 1);
                if age.saturating_sub(earlier_drain) >= drain {
                    return None;
                }
                sent_at.saturating_add(earlier_drain)
            }
        };
        Some(self.with_charged_at(Timestamp::from_micros(charged_at.max(1))))
    }

    /// Checks whether the charge is valid for this action. A refund needs a time and may exceed a
    /// limit that was lowered since, and a reset ignores the cost.
    pub(crate) fn check(&self, action: Action) -> Result<(), ChargeError> {
        let is_valid = matches!(action, Action::Acquire | Action::Peek)
            && self.quota.parameters().admits_on_fast_path(self.cost)
            && is_plain_key(self.key)
            && self.policy.is_none_or(is_plain_key);
        if is_valid { Ok(()) } else { self.check_slow(action) }
    }

    /// Checks that the cost is not 0, which only [`Action::Peek`] through
    /// [`Limiter::decide`](crate::Limiter::decide) accepts.
    pub(crate) fn check_cost(&self) -> Result<(), ChargeError> {
        if self.cost == 0 { Err(ChargeError::ZeroCost) } else { Ok(()) }
    }

    #[cold]
    fn check_slow(&self, action: Action) -> Result<(), ChargeError> {
        Key::new(self.key).map_err(ChargeError::Key)?;
        if let Some(policy) = self.policy {
            Key::new(policy).map_err(ChargeError::Policy)?;
        }
        let is_reserved = self.hold.is_some_and(|hold| !hold.is_settled());
        match (action, self.hold) {
            (Action::Commit | Action::Release | Action::Renew, hold) => {
                return hold.map(|_| ()).ok_or(ChargeError::NoHold);
            }
            (Action::Acquire, _) if self.quota.is_concurrency() && !is_reserved => {
                let is_settled = self.hold.is_some();
                let error =
                    if is_settled { ChargeError::SettledInFlight } else { ChargeError::NoHold };
                return Err(error);
            }
            _ => {}
        }
        match (action, self.cost) {
            // A peek of cost 0 asks whether more units are recorded than the limit allows.
            (Action::Reset, _) | (Action::Peek, 0) => Ok(()),
            (_, 0) => Err(ChargeError::ZeroCost),
            (Action::Refund, _) if self.lacks_time() => Err(ChargeError::NoChargeTime),
            // Each hold has one unit at least.
            (Action::Refund, cost)
                if cost > MAX_ENDED as u64
                    && self.quota.is_concurrency()
                    && self.hold.is_none() =>
            {
                Err(ChargeError::TooManyInFlight(cost))
            }
            (Action::Acquire | Action::Peek, cost) if cost > self.quota.burst() => {
                Err(ChargeError::CostTooHigh { cost, most: self.quota.burst() })
            }
            _ => Ok(()),
        }
    }

    fn lacks_time(&self) -> bool {
        self.charged_at == Timestamp::ZERO && !self.allows_unknown_time && self.hold.is_none()
    }

    /// Checks charges that are decided together: each must be valid, and no two may have the same
    /// count.
    pub(crate) fn check_all(action: Action, charges: &[Charge<'_>]) -> Result<(), ChargeError> {
        if charges.len() > MAX_CHARGES {
            return Err(ChargeError::TooMany(charges.len()));
        }
        for (at, charge) in charges.iter().enumerate() {
            charge.check(action)?;
            let is_same =
                |other: &Charge<'_>| other.key == charge.key && other.policy() == charge.policy();
            if charges[..at].iter().any(is_same) {
                return Err(ChargeError::Twice {
                    key: charge.key.to_owned(),
                    policy: charge.policy().to_owned(),
                });
            }
        }
        Ok(())
    }
}

/// Copy of a charge that does not borrow from the caller.
#[derive(Debug)]
pub(crate) struct OwnedCharge {
    key: String,
    policy: String,
    quota: Quota,
    cost: u64,
    charged_at: Timestamp,
    on_store_failure: OnStoreFailure,
    hold: Option<Hold>,
}

impl OwnedCharge {
    pub(crate) fn of(charge: &Charge<'_>) -> Self {
        Self {
            key: charge.key().to_owned(),
            policy: charge.policy().to_owned(),
            quota: charge.quota().clone(),
            cost: charge.cost(),
            charged_at: charge.charged_at(),
            on_store_failure: charge.on_store_failure(),
            hold: charge.hold().cloned(),
        }
    }

    pub(crate) fn charge(&self) -> Charge<'_> {
        let charge = Charge::new(&self.key, &self.quota)
            .with_policy(&self.policy)
            .with_cost(self.cost)
            .with_charged_at(self.charged_at)
            .with_on_store_failure(self.on_store_failure);
        Charge { hold: self.hold.as_ref(), ..charge }
    }
}
