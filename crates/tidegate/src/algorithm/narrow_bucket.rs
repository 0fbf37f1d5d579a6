//! [`NarrowBucket`]: the arithmetic of a bucket in 64 bits and without a division.
//!
//! The level is one number, in W-ths of a unit: a microsecond drains L of them. The decisions are
//! those of [`Bucket`](super::Bucket), which handles every other case: a quota that is too large
//! for 64 bits, an overdraft, a changed quota, a clock that stepped back.

/// The numbers of a bucket, precomputed once per quota.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NarrowBucket {
    /// 0 if this is no bucket or its numbers do not fit, so that no cost is admitted.
    burst: u64,
    /// The burst in W-ths of a unit.
    capacity: u64,
    /// The least level with a whole unit above the burst.
    overdraft: u64,
    window: Reciprocal,
    limit: Reciprocal,
}

/// A level in W-ths of a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NarrowLevel(pub(crate) u64);

impl NarrowBucket {
    /// The numbers of a quota that is no bucket.
    pub(crate) const NONE: Self = Self {
        burst: 0,
        capacity: 0,
        overdraft: 0,
        window: Reciprocal::ONE,
        limit: Reciprocal::ONE,
    };

    /// Precomputes the numbers, each at least 1.
    pub(crate) fn new(limit: u64, window: u64, burst: u64) -> Self {
        // A bit stays free for the sum of a level and a cost, and one for the division.
        match burst.checked_mul(window) {
            Some(capacity) if capacity < 1 << 60 => Self {
                burst,
                capacity,
                overdraft: capacity + window,
                window: Reciprocal::new(window),
                limit: Reciprocal::new(limit),
            },
            _ => Self::NONE,
        }
    }

    #[inline]
    pub(crate) fn burst(&self) -> u64 {
        self.burst
    }

    /// Returns whether this cost can be admitted, by this arithmetic.
    #[inline]
    pub(crate) fn can_admit(&self, cost: u64) -> bool {
        cost.wrapping_sub(1) < self.burst
    }

    /// Returns whether the numbers fit 64 bits.
    #[inline]
    pub(crate) fn fits(&self) -> bool {
        self.burst > 0
    }

    /// Returns a stored level after `elapsed` microseconds. Returns `None` for numbers that only
    /// [`Bucket`](super::Bucket) handles.
    #[inline]
    pub(crate) fn level(&self, stored: u64, elapsed: u64) -> Option<NarrowLevel> {
        if stored >= self.overdraft {
            return None;
        }
        let drained = elapsed.checked_mul(self.limit.divisor)?;
        Some(NarrowLevel(stored.saturating_sub(drained)))
    }

    /// Returns the level with the cost, which is at most the burst, if there is room for it.
    #[inline]
    pub(crate) fn spend(&self, level: NarrowLevel, cost: u64) -> Option<NarrowLevel> {
        let spent = NarrowLevel(level.0 + cost * self.window.divisor);
        (spent.0 <= self.capacity).then_some(spent)
    }

    /// Returns the time that the last admitted cost waits for the level below it to drain.
    #[inline]
    pub(crate) fn delay(&self, level: NarrowLevel, cost: u64) -> u64 {
        let before = level.0 - cost * self.window.divisor;
        if before == 0 { 0 } else { self.limit.divide_up(before) }
    }

    /// Returns the whole units that fit above a level of an admitted cost.
    #[inline]
    pub(crate) fn remaining_above(&self, level: NarrowLevel) -> u64 {
        self.burst - self.window.divide_up(level.0)
    }

    /// Returns the whole units that fit above a level, which is not 0.
    #[inline]
    pub(crate) fn remaining(&self, level: NarrowLevel) -> u64 {
        // The fraction of a unit above a burst that was lowered is an overdraft.
        self.burst.saturating_sub(self.window.divide_up(level.0))
    }

    /// Returns the time until a level has drained, which is not 0.
    #[inline]
    pub(crate) fn drain_time(&self, level: NarrowLevel) -> u64 {
        self.limit.divide_up(level.0)
    }

    /// Returns the time until there is room for a cost above a level that has none.
    #[inline]
    pub(crate) fn wait(&self, level: NarrowLevel, cost: u64) -> u64 {
        let too_high = level.0 + cost * self.window.divisor;
        self.limit.divide_up(too_high - self.capacity)
    }
}

/// A divisor below 2^63 and its inverse: a multiplication instead of a division.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Reciprocal {
    divisor: u64,
    /// 2^(64 + shift) / divisor, less at most 1: the greatest integer below it.
    inverse: u64,
    /// Logarithm of the divisor, rounded down.
    shift: u32,
}

impl Reciprocal {
    const ONE: Self = Self { divisor: 1, inverse: u64::MAX, shift: 0 };

    fn new(divisor: u64) -> Self {
        let shift = divisor.ilog2();
        let inverse = ((1_u128 << (64 + shift)) - 1) / u128::from(divisor);
        Self { divisor, inverse: u64::try_from(inverse).unwrap_or(u64::MAX), shift }
    }

    /// Returns the quotient of a number from 1 to 2^63, rounded up. The product with the inverse is
    /// less than the quotient, but by less than 1 / divisor, because the number times the divisor
    /// is less than 2^(64 + shift). So without its fraction it is the greatest integer below the
    /// quotient.
    #[inline]
    fn divide_up(self, number: u64) -> u64 {
        let product = u128::from(number) * u128::from(self.inverse);
        ((product >> 64) as u64).wrapping_shr(self.shift) + 1
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;
    use crate::algorithm::{Bucket, Counter as _};
    use crate::quota::Quota;

    fn number() -> impl Strategy<Value = u64> {
        (0..64_u32, any::<u64>()).prop_map(|(shift, number)| number >> shift)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(20_000))]

        #[test]
        fn a_reciprocal_divides_exactly(number in number(), divisor in number(), near in 0..3_u64) {
            const MAX: u64 = (1 << 63) - 1;
            let (number, divisor) = (number & MAX, (divisor & MAX).max(1));
            let multiple = (number / divisor * divisor + near).saturating_sub(1).min(MAX);
            for divisor in [divisor, 1, 2] {
                for number in [number, multiple, MAX].map(|number| number.max(1)) {
                    let quotient = Reciprocal::new(divisor).divide_up(number);
                    prop_assert_eq!(quotient, number.div_ceil(divisor));
                }
            }
        }

        /// Every field is that of a `Bucket`, for any level and time.
        #[test]
        fn a_narrow_bucket_decides_like_a_bucket(
            limit in number(), window in number(), burst in number(), elapsed in number(),
            units in number(), part in number(), cost in number(),
        ) {
            let window = 1_000 + window % (366 * 86_400 * 1_000_000 - 999);
            let limit = 1 + limit % Quota::MAX_LIMIT;
            let Ok(quota) = Quota::token_bucket(limit, Duration::from_micros(window)) else {
                return Ok(());
            };
            let burst = 1 + burst % Quota::MAX_LIMIT;
            let Ok(quota) = quota.with_burst(burst) else { return Ok(()) };
            let (units, part, cost) = (units % (burst + 1), part % window, 1 + cost % burst);
            let elapsed = elapsed % (1 << 52);
            let quota = *quota.parameters();
            let narrow = quota.narrow();
            prop_assert_eq!(narrow.can_admit(cost), burst.saturating_mul(window) < 1 << 60);
            prop_assert!(!narrow.can_admit(0) && !narrow.can_admit(burst + 1));
            if !narrow.can_admit(cost) {
                return Ok(());
            }
            let parts = |bucket: &Bucket| bucket.level * window + bucket.part;
            let stored = units * window + part;
            let Some(level) = narrow.level(stored, elapsed) else { return Ok(()) };
            let now = elapsed + 7;
            let mut bucket = Bucket { time: 7, level: units, part, window };
            bucket.advance_to(&quota, now);
            let remaining = bucket.remaining(&quota);
            prop_assert_eq!(level.0, parts(&bucket));
            prop_assert!(level.0 == 0 || narrow.remaining(level) == remaining);
            match narrow.spend(level, cost) {
                Some(level) => {
                    prop_assert!(cost <= remaining);
                    let delay = bucket.drain_time(&quota, bucket.level);
                    prop_assert_eq!(narrow.delay(level, cost), delay);
                    let reset_after = bucket.reset_after(&quota, now, cost);
                    prop_assert_eq!(narrow.drain_time(level), reset_after);
                    bucket.spend(&quota, now, cost);
                    prop_assert_eq!(level.0, parts(&bucket));
                    prop_assert_eq!(narrow.remaining(level), bucket.remaining(&quota));
                    prop_assert_eq!(narrow.remaining_above(level), bucket.remaining(&quota));
                }
                None => {
                    prop_assert!(cost > remaining);
                    prop_assert_eq!(narrow.wait(level, cost), bucket.wait_for(&quota, now, cost));
                    prop_assert_eq!(narrow.drain_time(level), bucket.reset_after(&quota, now, 0));
                }
            }
        }
    }
}
