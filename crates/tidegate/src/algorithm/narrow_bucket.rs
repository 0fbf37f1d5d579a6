//! [`NarrowBucket`]: the arithmetic of a bucket in 64 bits and without a division.
//!
//! The level is one number, in W-ths of a unit: a microsecond drains L of them. The decisions are
//! those of [`Bucket`](super::Bucket), which handles every other case: a quota that is too large
//! for 64 bits, an overdraft, a changed quota, a clock that stepped back.

/// The numbers of a bucket, precomputed once per quota.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NarrowBucket {
    burst: u64,
    /// The burst in W-ths of a unit.
    capacity: u64,
    /// W; 0 if the numbers do not fit, so that no fraction is below it.
    window: Reciprocal,
    limit: Reciprocal,
}

/// A level in W-ths of a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NarrowLevel(u64);

impl NarrowBucket {
    pub(crate) fn new(limit: u64, window: u64, burst: u64) -> Self {
        // Half of the range stays free for the sum of a level and a cost.
        let capacity = burst.checked_mul(window).filter(|capacity| *capacity < 1 << 62);
        let window = if capacity.is_some() { window } else { 0 };
        Self {
            burst,
            capacity: capacity.unwrap_or(0),
            window: Reciprocal::new(window),
            limit: Reciprocal::new(limit),
        }
    }

    /// Returns a stored level after `elapsed` microseconds. Returns `None` for numbers that only
    /// [`Bucket`](super::Bucket) handles.
    #[inline]
    pub(crate) fn level(&self, units: u64, part: u64, elapsed: u64) -> Option<NarrowLevel> {
        // A fraction of another window, whose tag is the same by chance, may be larger.
        if units > self.burst || part >= self.window.divisor {
            return None;
        }
        let parts = units * self.window.divisor + part;
        let drained = elapsed.checked_mul(self.limit.divisor)?;
        (parts <= self.capacity).then_some(NarrowLevel(parts.saturating_sub(drained)))
    }

    /// Returns the level with the cost, which is at most the burst, if there is room for it.
    #[inline]
    pub(crate) fn spend(&self, level: NarrowLevel, cost: u64) -> Result<NarrowLevel, NarrowLevel> {
        let spent = NarrowLevel(level.0 + cost * self.window.divisor);
        if spent.0 <= self.capacity { Ok(spent) } else { Err(spent) }
    }

    /// Returns the whole units of a level and the rest, in W-ths of a unit.
    #[inline]
    pub(crate) fn split(&self, level: NarrowLevel) -> (u64, u64) {
        self.window.div_rem(level.0)
    }

    /// Returns the time until a level has drained.
    #[inline]
    pub(crate) fn drain_time(&self, level: NarrowLevel) -> u64 {
        // Rounded up; the sum fits, because both are below 2^63.
        self.limit.div(level.0 + (self.limit.divisor - 1))
    }

    /// Returns the time until a level that is too high by a cost has room for it.
    #[inline]
    pub(crate) fn wait(&self, too_high: NarrowLevel) -> u64 {
        self.drain_time(NarrowLevel(too_high.0 - self.capacity))
    }
}

/// A divisor and its inverse: a multiplication instead of a division.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Reciprocal {
    divisor: u64,
    /// (2^64 − 1) / divisor, rounded down.
    inverse: u64,
}

impl Reciprocal {
    fn new(divisor: u64) -> Self {
        Self { divisor, inverse: u64::MAX.checked_div(divisor).unwrap_or(0) }
    }

    #[inline]
    fn div(self, number: u64) -> u64 {
        self.div_rem(number).0
    }

    /// Returns the quotient and the remainder. The inverse is too small by less than one unit in
    /// its last place (or by one, for a power of two), so the quotient is exact or one too small.
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "the high half of a product")]
    fn div_rem(self, number: u64) -> (u64, u64) {
        let quotient = ((u128::from(number) * u128::from(self.inverse)) >> 64) as u64;
        let remainder = number - quotient * self.divisor;
        let is_low = remainder >= self.divisor;
        (quotient + u64::from(is_low), if is_low { remainder - self.divisor } else { remainder })
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
            let divisor = divisor.max(1);
            let multiple = (number / divisor * divisor).saturating_add(near).saturating_sub(1);
            for number in [number, multiple, u64::MAX] {
                let expected = (number / divisor, number % divisor);
                prop_assert_eq!(Reciprocal::new(divisor).div_rem(number), expected);
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
            let narrow = quota.narrow();
            let Some(level) = narrow.level(units, part, elapsed) else { return Ok(()) };
            let now = elapsed + 7;
            let mut bucket =
                Bucket { time: 7, level: units, part, window_tag: quota.window_tag() };
            bucket.advance_to(&quota, now);
            let remaining = bucket.remaining(&quota);
            match narrow.spend(level, cost) {
                Ok(level) => {
                    prop_assert!(cost <= remaining);
                    prop_assert_eq!(narrow.drain_time(level), bucket.reset_after(&quota, now, cost));
                    bucket.spend(&quota, now, cost);
                    prop_assert_eq!(narrow.split(level), (bucket.level, bucket.part));
                }
                Err(too_high) => {
                    prop_assert!(cost > remaining);
                    prop_assert_eq!(narrow.wait(too_high), bucket.wait_for(&quota, now, cost));
                    prop_assert_eq!(narrow.drain_time(level), bucket.reset_after(&quota, now, 0));
                    prop_assert_eq!(narrow.split(level), (bucket.level, bucket.part));
                }
            }
        }
    }
}
