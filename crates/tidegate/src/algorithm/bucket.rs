//! `token-bucket` and `leaky-bucket`: one level that drains at L/W; a cost c is admitted if
//! level + c ≤ B.
//!
//! In a token bucket the level is the number of missing tokens (tokens left = B − level). In a
//! leaky bucket it is the length of the queue, which is also the delay of the next request. Because
//! the level counts spent units, a changed limit keeps the counts, and an absent key is a full
//! bucket.
//!
//! The level is a number of W-ths of a unit. Each microsecond drains L/W of a unit, which is
//! exactly L such parts, so integer arithmetic never drifts. Nearly every quota fits 64 bits, where
//! a [`Reciprocal`] replaces each division; the others take 128.

use std::ops::{Add, Sub};

use super::{Algorithm, Counter, Parameters, Reciprocal};

/// The clock skew, in microseconds, up to which a stored time later than now does not mean that the
/// clock stepped back: each CPU core reads its own cycle counter. Storing the earlier time would
/// let the bucket drain twice for the same microsecond.
pub(crate) const MAX_CLOCK_SKEW: u64 = 1_000;

/// A number of W-ths of a unit: `u64` for quotas that [fit](Parameters::fits_64_bits), or `u128`.
pub(crate) trait Parts:
    Copy + Ord + Default + Add<Output = Self> + Sub<Output = Self>
{
    /// Returns the product, or the greatest number if it is too large.
    fn product(a: u64, b: u64) -> Self;
    /// Returns the difference, at least 0.
    fn minus(self, other: Self) -> Self;
    fn divide_up(self, divisor: &Reciprocal) -> u64;
}

impl Parts for u64 {
    #[inline]
    fn product(a: u64, b: u64) -> Self {
        a.saturating_mul(b)
    }

    #[inline]
    fn minus(self, other: Self) -> Self {
        self.saturating_sub(other)
    }

    #[inline]
    fn divide_up(self, divisor: &Reciprocal) -> u64 {
        if self == 0 { 0 } else { divisor.divide_up(self) }
    }
}

impl Parts for u128 {
    fn product(a: u64, b: u64) -> Self {
        Self::from(a) * Self::from(b)
    }

    fn minus(self, other: Self) -> Self {
        self.saturating_sub(other)
    }

    fn divide_up(self, divisor: &Reciprocal) -> u64 {
        u64::try_from(self.div_ceil(divisor.divisor.into())).unwrap_or(u64::MAX)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Bucket<N> {
    /// Time of the level, in microseconds.
    pub(crate) time: u64,
    /// W-ths of a unit.
    pub(crate) parts: N,
}

impl<N: Parts> Bucket<N> {
    /// Returns the level of whole units and a fraction in W-ths of a unit. If the limit was lowered,
    /// it is at most the [maximum](Parameters::max_level).
    pub(crate) fn parts_of(quota: &Parameters, units: u64, fraction: u64) -> N {
        if units >= quota.max_level() {
            return N::product(quota.max_level(), quota.window());
        }
        N::product(units, quota.window()) + N::product(fraction, 1)
    }

    /// Returns whether more whole units are recorded than the burst.
    #[inline]
    pub(crate) fn has_overdraft(&self, quota: &Parameters) -> bool {
        self.parts >= N::product(quota.burst() + 1, quota.window())
    }

    /// Returns the level with this cost.
    #[inline]
    fn with_cost(&self, quota: &Parameters, cost: u64) -> N {
        self.parts + N::product(cost, quota.window())
    }
}

impl<N: Parts> Counter for Bucket<N> {
    #[inline]
    fn advance_to(&mut self, quota: &Parameters, now: u64) -> bool {
        let stepped_back = self.time > now + MAX_CLOCK_SKEW;
        if self.time < now {
            self.parts = self.parts.minus(N::product(now - self.time, quota.limit()));
        }
        if self.time < now || stepped_back {
            self.time = now;
        }
        stepped_back
    }

    #[inline]
    fn remaining(&self, quota: &Parameters) -> u64 {
        quota.burst().saturating_sub(self.level(quota))
    }

    #[inline]
    fn level(&self, quota: &Parameters) -> u64 {
        self.parts.divide_up(quota.window_reciprocal())
    }

    #[inline]
    fn wait_for(&self, quota: &Parameters, _now: u64, cost: u64) -> u64 {
        let capacity = N::product(quota.burst(), quota.window());
        self.with_cost(quota, cost).minus(capacity).divide_up(quota.limit_reciprocal())
    }

    #[inline]
    fn reset_after(&self, quota: &Parameters, _now: u64, extra: u64) -> u64 {
        self.with_cost(quota, extra).divide_up(quota.limit_reciprocal())
    }

    #[inline]
    fn delay(&self, quota: &Parameters) -> u64 {
        match quota.algorithm() {
            Algorithm::LeakyBucket => self.reset_after(quota, 0, 0),
            _ => 0,
        }
    }

    #[inline]
    fn spend(&mut self, quota: &Parameters, _now: u64, cost: u64) {
        self.parts = self.with_cost(quota, cost);
    }

    /// Returns the cost minus the units that have drained since the charge.
    fn refund(&mut self, quota: &Parameters, _now: u64, cost: u64, charged_at: u64) {
        let age = if charged_at == 0 { 0 } else { self.time.saturating_sub(charged_at) };
        let left = N::product(cost, quota.window()).minus(N::product(age, quota.limit()));
        self.parts = self.parts.minus(left);
    }

    #[inline]
    fn is_empty(&self) -> bool {
        self.parts == N::default()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::{MAX_LIMIT, Operation, apply};
    use super::*;
    use crate::action::Action;

    fn number() -> impl Strategy<Value = u64> {
        (0..64_u32, any::<u64>()).prop_map(|(shift, number)| number >> shift)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(20_000))]

        /// Every field of every decision is the same, for any level and time.
        #[test]
        fn both_widths_make_the_same_decisions(
            limit in number(), window in number(), burst in number(), elapsed in number(),
            units in number(), fraction in number(), cost in number(), is_leaky in any::<bool>(),
        ) {
            let window = 1_000 + window % (366 * 86_400 * 1_000_000 - 999);
            let (limit, burst) = (1 + limit % MAX_LIMIT, 1 + burst % MAX_LIMIT);
            let algorithm =
                if is_leaky { Algorithm::LeakyBucket } else { Algorithm::TokenBucket };
            let quota = Parameters::new(algorithm, limit, window, burst);
            let (units, fraction) = (units % (11 * burst), fraction % window);
            let now = elapsed % (1 << 52) + 7;
            prop_assert_eq!(quota.fits_64_bits(), burst.saturating_mul(window) < 1 << 59);
            prop_assert!(!quota.admits_in_64_bits(0) && !quota.admits_in_64_bits(burst + 1));
            if !quota.fits_64_bits() {
                return Ok(());
            }
            for action in [Action::Acquire, Action::Peek, Action::Report, Action::Refund] {
                let is_bounded = matches!(action, Action::Acquire | Action::Peek);
                let cost = if is_bounded { 1 + cost % burst } else { cost };
                let operation =
                    Operation { action, quota: &quota, cost, charged_at: 5, now, all_fit: true };
                let mut narrow =
                    Bucket { time: 7, parts: Bucket::<u64>::parts_of(&quota, units, fraction) };
                let mut wide =
                    Bucket { time: 7, parts: Bucket::<u128>::parts_of(&quota, units, fraction) };
                let decisions =
                    (apply(&mut narrow, &operation), apply(&mut wide, &operation));
                prop_assert_eq!(decisions.0.decision, decisions.1.decision);
                prop_assert_eq!(decisions.0.written, decisions.1.written);
                prop_assert_eq!(u128::from(narrow.parts), wide.parts);
                prop_assert_eq!(narrow.has_overdraft(&quota), wide.has_overdraft(&quota));
            }
        }
    }
}
