//! [`State`]: what is kept of a count, in 24 bytes, so that a key in memory is 40 bytes and no pointer to follow.
//!
//! | word | high bits | low bits |
//! | --- | --- | --- |
//! | 0 | time, 53 | window tag, 8; kind, 3 |
//! | 1 | units, 40 | lifetime, its high 24 |
//! | 2 | parts, 45 | lifetime, its low 19 |
//!
//! A `Quota` allows nothing that needs more: 10^12 units, windows of 366 days in microseconds. The
//! lifetime is in milliseconds, rounded up: it only tells the sweep when the state is as good as
//! none.

use super::Count;
use super::sliding_log::Logs;
use crate::quota::Quota;

/// The latest time that a state can hold: the year 2255.
pub(crate) const MAX_TIME: u64 = (1 << (64 - TIME_SHIFT)) - 1;

const KIND_BITS: u32 = 3;
const TIME_SHIFT: u32 = KIND_BITS + 8;
const LOW_LIFETIME_BITS: u32 = 19;
const HIGH_LIFETIME_BITS: u32 = 24;

/// Which count a state is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Log = 1,
    Counter = 2,
    Window = 3,
    Bucket = 4,
}

/// What is kept of a count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct State([u64; 3]);

/// A count that can be kept in a [`State`]; a log has its entries beside it.
pub(crate) trait Kept: Count + Default {
    const KIND: Kind;

    /// The count that was kept. A log is taken out of its place, and must be [put
    /// back](Self::put_back) or kept anew.
    fn load(state: State, logs: &mut Logs) -> Self;

    /// How it is kept from now on; `before` is the state that it was loaded from.
    fn keep(self, quota: &Quota, before: Option<State>, logs: &mut Logs) -> State;

    /// Nothing was written.
    fn put_back(self, _state: State, _logs: &mut Logs) {}

    /// One to ask once the lock on the other is gone, if it is some numbers and no more.
    fn copied(&self) -> Option<Self> {
        None
    }
}

impl State {
    /// Nothing at all.
    pub(crate) const NONE: Self = Self([0; 3]);

    /// A state from whose `time` on the quota's lifetime counts.
    #[inline]
    pub(super) fn new(kind: Kind, time: u64, units: u64, parts: u64, quota: &Quota) -> Self {
        debug_assert!(
            time <= MAX_TIME && units < 1 << 40 && parts < 1 << 45,
            "{time} {units} {parts}"
        );
        let is_bucket = kind == Kind::Bucket;
        let millis =
            if is_bucket { bucket_lifetime(units, quota) } else { quota.lifetime_millis() };
        let tag = if is_bucket { quota.window_tag() } else { 0 };
        Self([
            time << TIME_SHIFT | u64::from(tag) << KIND_BITS | kind as u64,
            units << HIGH_LIFETIME_BITS | millis >> LOW_LIFETIME_BITS,
            parts << LOW_LIFETIME_BITS | millis & low_bits(LOW_LIFETIME_BITS),
        ])
    }

    pub(crate) fn is_of(self, kind: Kind) -> bool {
        self.0[0] & low_bits(KIND_BITS) == kind as u64
    }

    /// Of the window that the parts of a bucket are measured by.
    pub(super) fn window_tag(self) -> u8 {
        (self.0[0] >> KIND_BITS).to_le_bytes()[0]
    }

    pub(crate) fn time(self) -> u64 {
        self.0[0] >> TIME_SHIFT
    }

    pub(super) fn units(self) -> u64 {
        self.0[1] >> HIGH_LIFETIME_BITS
    }

    pub(super) fn with_units(self, units: u64) -> Self {
        let [time, before, parts] = self.0;
        Self([time, units << HIGH_LIFETIME_BITS | before & low_bits(HIGH_LIFETIME_BITS), parts])
    }

    pub(super) fn parts(self) -> u64 {
        self.0[2] >> LOW_LIFETIME_BITS
    }

    /// From then on the state is as good as none.
    pub(crate) fn expires_at(self) -> u64 {
        self.time() + 1_000 * self.lifetime_millis()
    }

    /// Whether it is kept for as long as this quota needs it, or longer.
    #[inline]
    pub(crate) fn lives_for(self, kind: Kind, quota: &Quota) -> bool {
        self.lifetime_for(kind, quota) <= self.lifetime_millis()
    }

    /// The same state, kept for as long as this quota needs it.
    pub(crate) fn living_for(self, kind: Kind, quota: &Quota) -> Self {
        let [time, units, parts] = self.0;
        let millis = self.lifetime_for(kind, quota);
        Self([
            time,
            units & !low_bits(HIGH_LIFETIME_BITS) | millis >> LOW_LIFETIME_BITS,
            parts & !low_bits(LOW_LIFETIME_BITS) | millis & low_bits(LOW_LIFETIME_BITS),
        ])
    }

    /// Whether it was written later than `now`: the clock has stepped back, or this time was read
    /// before that one.
    #[inline]
    pub(crate) fn is_ahead_of(self, now: u64) -> bool {
        self.time() > now
    }

    /// Whether it may expire before the other.
    #[inline]
    pub(crate) fn may_expire_before(self, other: Self) -> bool {
        self.time() < other.time() || self.lifetime_millis() < other.lifetime_millis()
    }

    #[inline]
    fn lifetime_for(self, kind: Kind, quota: &Quota) -> u64 {
        if kind == Kind::Bucket {
            bucket_lifetime(self.units(), quota)
        } else {
            quota.lifetime_millis()
        }
    }

    fn lifetime_millis(self) -> u64 {
        (self.0[1] & low_bits(HIGH_LIFETIME_BITS)) << LOW_LIFETIME_BITS
            | self.0[2] & low_bits(LOW_LIFETIME_BITS)
    }
}

/// A bucket that holds more than its burst, at most [ten times](Quota::max_level) as much, takes
/// longer to drain.
#[inline]
fn bucket_lifetime(level: u64, quota: &Quota) -> u64 {
    let lifetime = quota.lifetime_millis();
    if level > quota.burst() { 10 * lifetime } else { lifetime }
}

const fn low_bits(count: u32) -> u64 {
    (1 << count) - 1
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_largest_numbers_that_a_quota_allows_are_kept() {
        let window = Duration::from_secs(366 * 86_400);
        let quota =
            Quota::token_bucket(1, window).and_then(|quota| quota.with_burst(10)).expect("valid");
        let parts = quota.window_micros() - 1;
        let state = State::new(Kind::Bucket, MAX_TIME, Quota::MAX_LIMIT, parts, &quota);
        assert_eq!(
            (state.time(), state.units(), state.parts()),
            (MAX_TIME, Quota::MAX_LIMIT, parts)
        );
        assert_eq!(
            state.expires_at(),
            MAX_TIME + 100 * quota.window_micros(),
            "an overdraft takes longer to drain"
        );
        let full = State::new(Kind::Bucket, MAX_TIME, quota.burst(), 0, &quota);
        assert_eq!(full.expires_at(), MAX_TIME + 10 * quota.window_micros());
        assert!(state.is_of(Kind::Bucket) && !state.is_of(Kind::Window));
    }

    #[test]
    fn a_lifetime_is_rounded_up_and_leaves_the_numbers_alone() {
        let quota =
            |micros| Quota::sliding_counter(1, Duration::from_micros(micros)).expect("valid");
        let state = State::new(Kind::Counter, 7, 8, 9, &quota(1_001));
        assert_eq!(state.expires_at(), 7 + 3_000, "two windows, in whole milliseconds");
        assert!(
            state.lives_for(Kind::Counter, &quota(1_500))
                && !state.lives_for(Kind::Counter, &quota(1_501))
        );
        let longer = state.living_for(Kind::Counter, &quota(60_000_000_000));
        assert_eq!((longer.time(), longer.units(), longer.parts()), (7, 8, 9));
        assert_eq!(longer.expires_at(), 7 + 120_000_000_000);
        assert!(state.may_expire_before(longer) && !longer.may_expire_before(state));
    }
}
