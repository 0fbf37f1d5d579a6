//! [`Parameters`]: the numbers of a quota, as the algorithms need them, with those that are
//! computed once.

use super::{Algorithm, Reciprocal, mul_div_ceil};

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
    /// The burst, or 0 if an acquire may depend on more than its count.
    fast_burst: u64,
    drain: u64,
    /// The burst of a bucket that fits 64 bits; otherwise 0.
    narrow_burst: u64,
    /// The same in W-ths of a unit.
    narrow_capacity: u64,
    window_reciprocal: Reciprocal,
    limit_reciprocal: Reciprocal,
    sevenths: u64,
    lifetime: Lifetime,
    overdraft_lifetime: Lifetime,
    window_with_lifetime: u64,
    /// Start of the window of a calendar, which is not aligned to the epoch; otherwise 0.
    period_start: u64,
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
        // Eleven times the burst, an overdraft and a cost, must be less than 2^63.
        let fits = is_bucket && burst.saturating_mul(window) < 1 << 59;
        let lifetime = Lifetime::from_millis(millis);
        Self {
            algorithm,
            count_denied: false,
            limit,
            window,
            burst,
            fast_burst: burst,
            drain,
            narrow_burst: if fits { burst } else { 0 },
            narrow_capacity: if fits { burst * window } else { 0 },
            window_reciprocal: Reciprocal::new(window),
            limit_reciprocal: Reciprocal::new(limit),
            sevenths: (7 << SEVENTHS_FRACTION_BITS) / (burst + 1),
            lifetime,
            overdraft_lifetime: Lifetime::from_millis(millis.saturating_mul(10)),
            window_with_lifetime: window << Lifetime::NUMBER_BITS | lifetime.number,
            period_start: 0,
        }
    }

    /// Returns the numbers of a fixed window that is this period of a calendar.
    pub(crate) fn in_period(&self, start: u64, end: u64) -> Self {
        let window = end.saturating_sub(start).max(1);
        let parameters = Self::new(self.algorithm, self.limit, window, self.burst);
        Self { period_start: start.max(1), ..parameters.without_fast_path() }
    }

    pub(crate) fn with_count_denied(self, count_denied: bool) -> Self {
        Self { count_denied, ..self }
    }

    /// Returns the numbers of a quota whose acquires no fast path decides.
    pub(crate) fn without_fast_path(self) -> Self {
        Self { fast_burst: 0, narrow_burst: 0, narrow_capacity: 0, ..self }
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

    /// Returns the start of the window of a calendar; otherwise 0.
    #[inline]
    pub(crate) fn period_start(&self) -> u64 {
        self.period_start
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

    /// Returns whether this is a bucket whose levels fit 64 bits.
    #[inline]
    pub(crate) fn fits_64_bits(&self) -> bool {
        self.narrow_burst > 0
    }

    /// Returns whether this is a bucket whose levels fit 64 bits, and which can admit this cost.
    #[inline]
    pub(crate) fn admits_in_64_bits(&self, cost: u64) -> bool {
        cost.wrapping_sub(1) < self.narrow_burst
    }

    /// Returns whether a fast path can admit this cost.
    #[inline]
    pub(crate) fn admits_on_fast_path(&self, cost: u64) -> bool {
        cost.wrapping_sub(1) < self.fast_burst
    }

    /// Returns the burst of a bucket that fits 64 bits, in W-ths of a unit.
    #[inline]
    pub(crate) fn capacity_in_64_bits(&self) -> u64 {
        self.narrow_capacity
    }

    #[inline]
    pub(crate) fn window_reciprocal(&self) -> &Reciprocal {
        &self.window_reciprocal
    }

    #[inline]
    pub(crate) fn limit_reciprocal(&self) -> &Reciprocal {
        &self.limit_reciprocal
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

    /// Returns the window and the number of the lifetime in one word, as a bucket stores them.
    #[inline]
    pub(crate) fn window_with_lifetime(&self) -> u64 {
        self.window_with_lifetime
    }

    /// Returns the idle time-to-live of a bucket with an overdraft.
    #[inline]
    pub(crate) fn overdraft_lifetime(&self) -> Lifetime {
        self.overdraft_lifetime
    }
}

/// A time in milliseconds as a number of 19 bits and a power of two of 5, rounded up by less than 4
/// millionths. Longer lifetimes are greater.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Lifetime {
    pub(crate) power: u64,
    pub(crate) number: u64,
}

impl Lifetime {
    pub(crate) const POWER_BITS: u32 = 5;
    pub(crate) const NUMBER_BITS: u32 = 19;

    /// Returns the lifetime of a window in microseconds.
    pub(crate) fn of(window: u64) -> Self {
        Self::from_millis(window.div_ceil(1_000))
    }

    fn from_millis(millis: u64) -> Self {
        let bits = u64::BITS - millis.leading_zeros();
        let power = bits.saturating_sub(Self::NUMBER_BITS);
        let number = millis.div_ceil(1 << power);
        // Rounding up may take one bit more, which is that of the next power.
        let rounded_up = number >> Self::NUMBER_BITS;
        Self { power: u64::from(power) + rounded_up, number: number >> rounded_up }
    }

    pub(crate) fn millis(self) -> u64 {
        self.number << self.power
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
            prop_assert!(lifetime.power < 1 << 5 && lifetime.number < 1 << 19);
            let order = lifetime.cmp(&Lifetime::from_millis(other));
            prop_assert_eq!(order, lifetime.millis().cmp(&Lifetime::from_millis(other).millis()));
        }
    }
}
