//! [`Parameters`]: the numbers of a quota, as the algorithms need them, with those that are
//! computed once.

use super::{Algorithm, NarrowBucket, mul_div_ceil};

/// The largest limit and burst; see [`Quota::MAX_LIMIT`](crate::Quota::MAX_LIMIT).
pub(crate) const MAX_LIMIT: u64 = 1_000_000_000_000;

/// The numbers of a quota. Times are microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Parameters {
    algorithm: Algorithm,
    count_denied: bool,
    limit: u64,
    window: u64,
    burst: u64,
    drain: u64,
    narrow: NarrowBucket,
    sevenths: u64,
    lifetime: Lifetime,
    overdraft_lifetime: Lifetime,
}

/// Bits behind the point of the factor of [`Parameters::used_sevenths`].
const SEVENTHS_FRACTION_BITS: u32 = 40;

impl Parameters {
    /// Computes the numbers of a quota. The burst of an algorithm without one is the limit.
    pub(crate) fn new(algorithm: Algorithm, limit: u64, window: u64, burst: u64) -> Self {
        let is_bucket = matches!(algorithm, Algorithm::TokenBucket | Algorithm::LeakyBucket);
        let drain = mul_div_ceil(burst, window, limit);
        let windows = if algorithm == Algorithm::SlidingCounter { 2 } else { 1 };
        let millis = drain.saturating_mul(windows).div_ceil(1_000);
        let narrow =
            if is_bucket { NarrowBucket::new(limit, window, burst) } else { NarrowBucket::NONE };
        Self {
            algorithm,
            count_denied: false,
            limit,
            window,
            burst,
            drain,
            narrow,
            sevenths: (7 << SEVENTHS_FRACTION_BITS) / (burst + 1),
            lifetime: Lifetime::from_millis(millis),
            overdraft_lifetime: Lifetime::from_millis(millis.saturating_mul(10)),
        }
    }

    pub(crate) fn with_count_denied(self, count_denied: bool) -> Self {
        Self { count_denied, ..self }
    }

    #[inline]
    pub(crate) fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    #[inline]
    pub(crate) fn count_denied(&self) -> bool {
        self.count_denied
    }

    #[inline]
    pub(crate) fn limit(&self) -> u64 {
        self.limit
    }

    #[inline]
    pub(crate) fn window(&self) -> u64 {
        self.window
    }

    #[inline]
    pub(crate) fn burst(&self) -> u64 {
        self.burst
    }

    /// Returns the time in which a full bucket drains; for the other algorithms, the window.
    #[inline]
    pub(crate) fn drain(&self) -> u64 {
        self.drain
    }

    /// Returns the maximum number of units that can be recorded for a key.
    #[inline]
    pub(crate) fn max_level(&self) -> u64 {
        (10 * self.burst).min(MAX_LIMIT)
    }

    /// Returns the numbers of a bucket for 64-bit arithmetic.
    #[inline]
    pub(crate) fn narrow(&self) -> &NarrowBucket {
        &self.narrow
    }

    /// Returns the sevenths of the burst that are in use with these units left, rounded down: up to
    /// 6, and 7 without a whole unit left.
    #[inline]
    pub(crate) fn used_sevenths(&self, remaining: u64) -> u64 {
        if remaining == 0 {
            return 7;
        }
        // A multiplication instead of a division.
        ((self.burst - remaining) * self.sevenths) >> SEVENTHS_FRACTION_BITS
    }

    /// Returns the idle time-to-live of a count.
    #[inline]
    pub(crate) fn lifetime(&self) -> Lifetime {
        self.lifetime
    }

    /// Returns the idle time-to-live of a bucket with an overdraft.
    #[inline]
    pub(crate) fn overdraft_lifetime(&self) -> Lifetime {
        self.overdraft_lifetime
    }
}

/// A time in milliseconds in 24 bits, rounded up by less than 4 millionths: 19 bits, and 5 for the
/// power of two that they are multiplied with. Longer lifetimes are greater.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Lifetime(u64);

impl Lifetime {
    const NUMBER_BITS: u32 = 19;

    pub(crate) fn from_millis(millis: u64) -> Self {
        let bits = u64::BITS - millis.leading_zeros();
        let power = bits.saturating_sub(Self::NUMBER_BITS);
        let number = millis.div_ceil(1 << power);
        // Rounding up may take one bit more, which is that of the next power.
        let rounded_up = number >> Self::NUMBER_BITS;
        let (power, number) = (u64::from(power) + rounded_up, number >> rounded_up);
        Self(power << Self::NUMBER_BITS | number)
    }

    pub(crate) fn millis(self) -> u64 {
        (self.0 & ((1 << Self::NUMBER_BITS) - 1)) << (self.0 >> Self::NUMBER_BITS)
    }

    /// Returns the 24 bits.
    #[inline]
    pub(crate) fn to_bits(self) -> u64 {
        self.0
    }

    #[inline]
    pub(crate) fn from_bits(bits: u64) -> Self {
        Self(bits)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn usage_is_in_sevenths_and_exhausted_without_a_whole_unit() {
        let usages = |limit, remaining: &[u64]| -> Vec<u64> {
            let numbers = Parameters::new(Algorithm::FixedWindow, limit, 60_000_000, limit);
            remaining.iter().map(|remaining| numbers.used_sevenths(*remaining)).collect()
        };
        assert_eq!(usages(1, &[1, 0]), [0, 7]);
        assert_eq!(usages(2, &[2, 1, 0]), [0, 2, 7]);
        assert_eq!(usages(100, &[100, 86, 85, 50, 2, 1, 0]), [0, 0, 1, 3, 6, 6, 7]);
        assert_eq!(usages(MAX_LIMIT, &[MAX_LIMIT, MAX_LIMIT / 2, 1, 0]), [0, 3, 6, 7]);
    }

    proptest! {
        #[test]
        fn a_lifetime_is_rounded_up_by_less_than_four_millionths(
            (one, other) in (0..1_u64 << 43, 0..1_u64 << 43),
            (shift, other_shift) in (0..43_u32, 0..43_u32),
        ) {
            let (one, other) = (one >> shift, other >> other_shift);
            let lifetime = Lifetime::from_millis(one);
            prop_assert!((one..=one + one / 250_000).contains(&lifetime.millis()), "{one}");
            prop_assert!(lifetime.to_bits() < 1 << 24);
            let order = lifetime.cmp(&Lifetime::from_millis(other));
            prop_assert_eq!(order, lifetime.millis().cmp(&Lifetime::from_millis(other).millis()));
        }
    }
}
