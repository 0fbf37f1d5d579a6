//! `token-bucket` and `leaky-bucket`: one level that drains at L/W, and admits when level + c ≤ B.
//!
//! For a token bucket the level is what is missing from it; tokens left = B − level. For a leaky
//! bucket it is the queue, and what is ahead in the queue is the delay. Counting what was taken,
//! rather than what is left, keeps the counts when a limit changes, and makes an absent key a full
//! bucket.
//!
//! The level is a whole number of units and a part in W-ths of a unit. In a microsecond it drains
//! by L/W of a unit, that is by L such parts: integers all the way, so nothing drifts.

use super::{Count, Kept, Kind, Logs, State, mul_div_rem};
use crate::algorithm::Algorithm;
use crate::quota::Quota;

/// How far ahead of the present a stored time may be without the clock having stepped back, in
/// microseconds: each processor reads its own counter. To write such a time back would let the
/// bucket drain twice for the same microsecond.
pub(crate) const MAX_CLOCK_SKEW: u64 = 1_000;

#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Bucket {
    /// When the level was as it is written here.
    time: u64,
    /// Whole units.
    level: u64,
    /// W-ths of a unit, fewer than W.
    part: u64,
    /// Of the window that the part is measured by.
    window_tag: u8,
}

impl Bucket {
    /// One that was settled elsewhere, in a script.
    #[cfg(feature = "redis")]
    pub(super) fn at_level(level: u64, part: u64) -> Self {
        Self { level, part, ..Self::default() }
    }

    #[cfg(all(test, feature = "redis"))]
    pub(super) fn level_and_part(&self) -> (u64, u64) {
        (self.level, self.part)
    }

    /// The quota is another one than at the last write, or more is recorded than the burst.
    #[cold]
    fn adapt_to(&mut self, quota: &Quota) {
        // The part of a unit is in parts of another window: a whole unit is never too little.
        if self.part > 0
            && (self.window_tag != quota.window_tag() || self.part >= quota.window_micros())
        {
            (self.level, self.part) = (self.level + 1, 0);
        }
        self.window_tag = quota.window_tag();
        // The limit was lowered.
        if self.level >= quota.max_level() {
            (self.level, self.part) = (quota.max_level(), 0);
        }
    }

    /// A part of a unit takes the room of a whole one.
    #[inline]
    fn occupied(&self) -> u64 {
        self.level + u64::from(self.part > 0)
    }

    /// How long until `units` fewer whole units are in the bucket than its level now: to drain
    /// `units` and the part.
    #[inline]
    fn drain_time(&self, quota: &Quota, units: u64) -> u64 {
        let (window, limit) = (quota.window_micros(), quota.limit());
        // Most of the time all of it fits 64 bits, and one division will do.
        if let Some(parts) =
            units.checked_mul(window).and_then(|parts| parts.checked_add(self.part))
        {
            return parts.div_ceil(limit);
        }
        let (quotient, rest) = mul_div_rem(units, window, limit);
        quotient + (rest + self.part).div_ceil(limit)
    }
}

impl Count for Bucket {
    #[inline]
    fn settle(&mut self, quota: &Quota, now: u64) -> bool {
        let window = quota.window_micros();
        if self.window_tag != quota.window_tag()
            || self.part >= window
            || self.level > quota.burst()
        {
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
    fn remaining(&self, quota: &Quota) -> u64 {
        quota.burst().saturating_sub(self.occupied())
    }

    fn level(&self) -> u64 {
        self.occupied()
    }

    #[inline]
    fn wait_for(&self, quota: &Quota, _now: u64, cost: u64) -> u64 {
        self.drain_time(quota, self.level + cost - quota.burst())
    }

    #[inline]
    fn reset_after(&self, quota: &Quota, _now: u64, extra: u64) -> u64 {
        self.drain_time(quota, self.level + extra)
    }

    #[inline]
    fn delay(&self, quota: &Quota) -> u64 {
        match quota.algorithm() {
            Algorithm::LeakyBucket => self.drain_time(quota, self.level),
            _ => 0,
        }
    }

    #[inline]
    fn spend(&mut self, _quota: &Quota, _now: u64, cost: u64) {
        self.level += cost;
    }

    /// The cost less what has drained since the charge.
    fn refund(&mut self, quota: &Quota, _now: u64, cost: u64, charged_at: u64) {
        let window = quota.window_micros();
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

impl Kept for Bucket {
    const KIND: Kind = Kind::Bucket;

    #[inline]
    fn load(state: State, _logs: &mut Logs) -> Self {
        Self {
            time: state.time(),
            level: state.units(),
            part: state.parts(),
            window_tag: state.window_tag(),
        }
    }

    #[inline]
    fn keep(self, quota: &Quota, _before: Option<State>, _logs: &mut Logs) -> State {
        State::new(Self::KIND, self.time, self.level, self.part, quota)
    }

    #[inline]
    fn copied(&self) -> Option<Self> {
        Some(*self)
    }
}
