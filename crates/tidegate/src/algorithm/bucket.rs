//! `token-bucket` and `leaky-bucket`: one level that drains at L/W; a cost c is admitted if
//! level + c ≤ B.
//!
//! In a token bucket the level is the number of missing tokens (tokens left = B − level). In a
//! leaky bucket it is the length of the queue, which is also the delay of the next request. Because
//! the level counts spent units, a changed limit keeps the counts, and an absent key is a full
//! bucket.
//!
//! The level is a whole number of units plus a fraction in W-ths of a unit. Each microsecond drains
//! L/W of a unit, which is exactly L such parts, so integer arithmetic never drifts.

use super::{Algorithm, Counter, Parameters, mul_div_rem};

/// The clock skew, in microseconds, up to which a stored time later than now does not mean that the
/// clock stepped back: each CPU core reads its own cycle counter. Storing the earlier time would
/// let the bucket drain twice for the same microsecond.
pub(crate) const MAX_CLOCK_SKEW: u64 = 1_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Bucket {
    /// Time of the level, in microseconds.
    pub(crate) time: u64,
    /// Whole units.
    pub(crate) level: u64,
    /// Fraction of a unit in W-ths, less than W.
    pub(crate) part: u64,
    /// The window W that `part` refers to, or 0 if it is unknown.
    pub(crate) window: u64,
}

impl Bucket {
    /// Creates a bucket that a script has already advanced to the present.
    #[cfg(feature = "redis")]
    pub(super) fn at_level(level: u64, part: u64) -> Self {
        Self { level, part, ..Self::default() }
    }

    /// Adapts the level to a quota that was changed since the last write, or to an overdraft.
    #[cold]
    fn adapt_to(&mut self, quota: &Parameters) {
        // The fraction is in parts of another window: round it up to a whole unit, which never
        // admits too much.
        if self.part > 0 && self.window != quota.window() {
            (self.level, self.part) = (self.level + 1, 0);
        }
        self.window = quota.window();
        // The limit was lowered.
        if self.level >= quota.max_level() {
            (self.level, self.part) = (quota.max_level(), 0);
        }
    }

    /// Returns the level rounded up to whole units.
    #[inline]
    fn occupied(&self) -> u64 {
        self.level + u64::from(self.part > 0)
    }

    /// Returns the time to drain `units` and the fraction.
    #[inline]
    pub(super) fn drain_time(&self, quota: &Parameters, units: u64) -> u64 {
        let (window, limit) = (quota.window(), quota.limit());
        // Usually all of it fits 64 bits, and one division is enough.
        if let Some(parts) =
            units.checked_mul(window).and_then(|parts| parts.checked_add(self.part))
        {
            return parts.div_ceil(limit);
        }
        let (quotient, remainder) = mul_div_rem(units, window, limit);
        quotient + (remainder + self.part).div_ceil(limit)
    }
}

impl Counter for Bucket {
    #[inline]
    fn advance_to(&mut self, quota: &Parameters, now: u64) -> bool {
        let window = quota.window();
        if self.window != window || self.level > quota.burst() {
            self.adapt_to(quota);
        }
        let stepped_back = self.time > now + MAX_CLOCK_SKEW;
        if self.time < now {
            let (mut units, parts) = mul_div_rem(now - self.time, quota.limit(), window);
            let mut part = self.part;
            if part < parts {
                part += window;
                units = units.saturating_add(1);
            }
            (self.level, self.part) = match self.level.checked_sub(units) {
                Some(level) => (level, part - parts),
                None => (0, 0),
            };
        }
        if self.time < now || stepped_back {
            self.time = now;
        }
        stepped_back
    }

    #[inline]
    fn remaining(&self, quota: &Parameters) -> u64 {
        quota.burst().saturating_sub(self.occupied())
    }

    fn level(&self) -> u64 {
        self.occupied()
    }

    #[inline]
    fn wait_for(&self, quota: &Parameters, _now: u64, cost: u64) -> u64 {
        self.drain_time(quota, self.level + cost - quota.burst())
    }

    #[inline]
    fn reset_after(&self, quota: &Parameters, _now: u64, extra: u64) -> u64 {
        self.drain_time(quota, self.level + extra)
    }

    #[inline]
    fn delay(&self, quota: &Parameters) -> u64 {
        match quota.algorithm() {
            Algorithm::LeakyBucket => self.drain_time(quota, self.level),
            _ => 0,
        }
    }

    #[inline]
    fn spend(&mut self, _quota: &Parameters, _now: u64, cost: u64) {
        self.level += cost;
    }

    /// Returns the cost minus the units that have drained since the charge.
    fn refund(&mut self, quota: &Parameters, _now: u64, cost: u64, charged_at: u64) {
        let window = quota.window();
        let age = if charged_at == 0 { 0 } else { self.time.saturating_sub(charged_at) };
        let (drained, drained_parts) = mul_div_rem(age, quota.limit(), window);
        let Some(mut units) =
            cost.checked_sub(drained.saturating_add(u64::from(drained_parts > 0)))
        else {
            return;
        };
        let parts = if drained_parts > 0 { window - drained_parts } else { 0 };
        if self.part < parts {
            self.part += window;
            units += 1;
        }
        (self.level, self.part) = match self.level.checked_sub(units) {
            Some(level) => (level, self.part - parts),
            None => (0, 0),
        };
    }

    #[inline]
    fn is_empty(&self) -> bool {
        self.level == 0 && self.part == 0
    }
}
