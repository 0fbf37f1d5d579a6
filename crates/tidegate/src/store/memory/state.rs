//! [`PackedState`]: a stored counter in 24 bytes, so that a key takes one slot of 40 bytes and no
//! pointer has to be followed.
//!
//! | word | high bits | low bits |
//! | --- | --- | --- |
//! | 0 | time, 53 | window tag, 8; exhausted, 1; kind, 2 |
//! | 1 | units, 40 | lifetime, its high 24 |
//! | 2 | parts, 45 | lifetime, its low 19 |
//!
//! No `Quota` needs more: the maximum is 10^12 units and a window of 366 days in microseconds. The
//! lifetime is in milliseconds, rounded up; the sweep uses it to find expired entries.

use super::logs::Logs;
use crate::algorithm::{Bucket, Counter, FixedWindow, SlidingCounter, SlidingLog};
use crate::quota::Quota;

/// The latest time that a state can hold: the year 2255.
pub(super) const MAX_TIME: u64 = (1 << (64 - TIME_SHIFT)) - 1;

const KIND_BITS: u32 = 2;
const EXHAUSTED: u64 = 1 << KIND_BITS;
const TAG_SHIFT: u32 = KIND_BITS + 1;
const TIME_SHIFT: u32 = TAG_SHIFT + 8;
const LOW_LIFETIME_BITS: u32 = 19;
const HIGH_LIFETIME_BITS: u32 = 24;

/// The type of a stored counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CounterKind {
    Log = 0,
    Counter = 1,
    Window = 2,
    Bucket = 3,
}

/// A counter packed into three words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct PackedState([u64; 3]);

/// The low bits of a bucket without an overdraft, which depend only on its quota.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct BucketTemplate([u64; 3]);

impl BucketTemplate {
    pub(crate) fn new(quota: &Quota) -> Self {
        Self(PackedState::new(CounterKind::Bucket, 0, 0, 0, quota).0)
    }
}

/// A counter that can be stored as a [`PackedState`]. The entries of a log are stored separately,
/// in [`Logs`].
pub(super) trait StoredCounter: Counter + Default {
    const KIND: CounterKind;

    /// Unpacks a stored counter. A log is moved out of `logs`, and must be
    /// [restored](Self::restore) or packed again.
    fn unpack(state: PackedState, logs: &mut Logs) -> Self;

    /// Packs the counter. `before` is the state that it was unpacked from.
    fn pack(self, quota: &Quota, before: Option<PackedState>, logs: &mut Logs) -> PackedState;

    /// Puts an unchanged counter back.
    fn restore(self, _state: PackedState, _logs: &mut Logs) {}

    /// Returns a copy, if copying is cheap, so that the decision can be computed after the lock is
    /// released.
    fn try_copy(&self) -> Option<Self> {
        None
    }
}

impl StoredCounter for Bucket {
    const KIND: CounterKind = CounterKind::Bucket;

    #[inline]
    fn unpack(state: PackedState, _logs: &mut Logs) -> Self {
        Self {
            time: state.time(),
            level: state.units(),
            part: state.parts(),
            window_tag: state.window_tag(),
        }
    }

    #[inline]
    fn pack(self, quota: &Quota, _before: Option<PackedState>, _logs: &mut Logs) -> PackedState {
        PackedState::new(Self::KIND, self.time, self.level, self.part, quota)
            .exhausted_if(self.level >= quota.burst())
    }

    #[inline]
    fn try_copy(&self) -> Option<Self> {
        Some(*self)
    }
}

impl StoredCounter for FixedWindow {
    const KIND: CounterKind = CounterKind::Window;

    #[inline]
    fn unpack(state: PackedState, _logs: &mut Logs) -> Self {
        Self { start: state.time(), count: state.units() }
    }

    #[inline]
    fn pack(self, quota: &Quota, _before: Option<PackedState>, _logs: &mut Logs) -> PackedState {
        PackedState::new(Self::KIND, self.start, self.count, 0, quota)
            .exhausted_if(self.count >= quota.limit())
    }

    #[inline]
    fn try_copy(&self) -> Option<Self> {
        Some(*self)
    }
}

impl StoredCounter for SlidingCounter {
    const KIND: CounterKind = CounterKind::Counter;

    #[inline]
    fn unpack(state: PackedState, _logs: &mut Logs) -> Self {
        Self { start: state.time(), current: state.units(), previous: state.parts(), elapsed: 0 }
    }

    #[inline]
    fn pack(self, quota: &Quota, _before: Option<PackedState>, _logs: &mut Logs) -> PackedState {
        PackedState::new(Self::KIND, self.start, self.current, self.previous, quota)
            .exhausted_if(self.current + self.previous >= quota.limit())
    }

    #[inline]
    fn try_copy(&self) -> Option<Self> {
        Some(*self)
    }
}

impl StoredCounter for SlidingLog {
    const KIND: CounterKind = CounterKind::Log;

    fn unpack(state: PackedState, logs: &mut Logs) -> Self {
        logs.take(state.log_index())
    }

    #[inline]
    fn pack(self, quota: &Quota, before: Option<PackedState>, logs: &mut Logs) -> PackedState {
        let newest = self.newest_time();
        let is_exhausted = self.level() >= quota.limit();
        let index = before.map_or_else(|| logs.allocate(), PackedState::log_index);
        logs.put(index, self);
        PackedState::new(Self::KIND, newest, u64::from(index), 0, quota).exhausted_if(is_exhausted)
    }

    fn restore(self, state: PackedState, logs: &mut Logs) {
        logs.put(state.log_index(), self);
    }
}

impl PackedState {
    /// The state of an empty slot.
    pub(super) const EMPTY: Self = Self([0; 3]);

    /// Packs a counter that lives for the quota's lifetime from `time` on.
    #[inline]
    fn new(kind: CounterKind, time: u64, units: u64, parts: u64, quota: &Quota) -> Self {
        debug_assert!(
            time <= MAX_TIME && units < 1 << 40 && parts < 1 << 45,
            "{time} {units} {parts}"
        );
        let is_bucket = kind == CounterKind::Bucket;
        let millis =
            if is_bucket { bucket_lifetime(units, quota) } else { quota.lifetime_millis() };
        let tag = if is_bucket { quota.window_tag() } else { 0 };
        Self([
            time << TIME_SHIFT | u64::from(tag) << TAG_SHIFT | kind as u64,
            units << HIGH_LIFETIME_BITS | millis >> LOW_LIFETIME_BITS,
            parts << LOW_LIFETIME_BITS | millis & low_bits(LOW_LIFETIME_BITS),
        ])
    }

    /// Marks a counter that has used up its quota.
    #[inline]
    pub(super) fn exhausted_if(mut self, is_exhausted: bool) -> Self {
        self.0[0] |= u64::from(is_exhausted) * EXHAUSTED;
        self
    }

    /// Returns whether the quota was used up when the counter was last written. Such an entry is
    /// never evicted before it expires: a client could make room for itself by a flood of keys.
    pub(super) fn is_exhausted(self) -> bool {
        self.0[0] & EXHAUSTED != 0
    }

    pub(super) fn kind(self) -> CounterKind {
        const KINDS: [CounterKind; 1 << KIND_BITS] =
            [CounterKind::Log, CounterKind::Counter, CounterKind::Window, CounterKind::Bucket];
        KINDS[usize::from(self.0[0].to_le_bytes()[0]) % KINDS.len()]
    }

    pub(super) fn is_of(self, kind: CounterKind) -> bool {
        self.0[0] & low_bits(KIND_BITS) == kind as u64
    }

    /// Returns the tag of the window that the parts of a bucket refer to.
    fn window_tag(self) -> u8 {
        (self.0[0] >> TAG_SHIFT).to_le_bytes()[0]
    }

    fn time(self) -> u64 {
        self.0[0] >> TIME_SHIFT
    }

    fn units(self) -> u64 {
        self.0[1] >> HIGH_LIFETIME_BITS
    }

    fn parts(self) -> u64 {
        self.0[2] >> LOW_LIFETIME_BITS
    }

    /// Returns the time, units and fraction of a bucket with this template.
    #[inline]
    pub(super) fn bucket_of(self, template: &BucketTemplate) -> Option<(u64, u64, u64)> {
        let [time, units, parts] = self.0;
        let [low_time, low_units, low_parts] = template.0;
        let difference = (time ^ low_time) & low_bits(TIME_SHIFT) & !EXHAUSTED
            | (units ^ low_units) & low_bits(HIGH_LIFETIME_BITS)
            | (parts ^ low_parts) & low_bits(LOW_LIFETIME_BITS);
        (difference == 0).then_some((self.time(), self.units(), self.parts()))
    }

    /// Packs a bucket that [`bucket_of`](Self::bucket_of) has unpacked.
    #[inline]
    pub(super) fn bucket(time: u64, units: u64, parts: u64, template: &BucketTemplate) -> Self {
        let [low_time, low_units, low_parts] = template.0;
        Self([
            time << TIME_SHIFT | low_time,
            units << HIGH_LIFETIME_BITS | low_units,
            parts << LOW_LIFETIME_BITS | low_parts,
        ])
    }

    /// Returns the index of a log in [`Logs`], which takes the place of the units.
    pub(super) fn log_index(self) -> u32 {
        u32::try_from(self.units()).unwrap_or(u32::MAX)
    }

    /// Returns the state of a log that has moved to another index.
    pub(super) fn with_log_index(self, index: u32) -> Self {
        let [time, before, parts] = self.0;
        let units = u64::from(index) << HIGH_LIFETIME_BITS;
        Self([time, units | before & low_bits(HIGH_LIFETIME_BITS), parts])
    }

    /// Returns the time (µs) at which the entry may be evicted.
    pub(super) fn expires_at(self) -> u64 {
        self.time() + 1_000 * self.lifetime_millis()
    }

    /// Returns whether the lifetime is long enough for this quota.
    #[inline]
    pub(super) fn lives_for(self, kind: CounterKind, quota: &Quota) -> bool {
        self.lifetime_for(kind, quota) <= self.lifetime_millis()
    }

    /// Returns the same state with the lifetime that this quota needs.
    #[cold]
    pub(super) fn with_lifetime_for(self, kind: CounterKind, quota: &Quota) -> Self {
        let [time, units, parts] = self.0;
        let millis = self.lifetime_for(kind, quota);
        Self([
            time,
            units & !low_bits(HIGH_LIFETIME_BITS) | millis >> LOW_LIFETIME_BITS,
            parts & !low_bits(LOW_LIFETIME_BITS) | millis & low_bits(LOW_LIFETIME_BITS),
        ])
    }

    /// Returns whether the state was written later than `now`: the clock has stepped back, or
    /// another thread read the clock later and got the lock first.
    #[inline]
    pub(super) fn is_ahead_of(self, now: u64) -> bool {
        self.time() > now
    }

    /// Returns whether this state may expire before the other.
    #[inline]
    pub(super) fn may_expire_before(self, other: Self) -> bool {
        self.time() < other.time() || self.lifetime_millis() < other.lifetime_millis()
    }

    #[inline]
    fn lifetime_for(self, kind: CounterKind, quota: &Quota) -> u64 {
        if kind == CounterKind::Bucket {
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

/// Returns the lifetime of a bucket. An overdrawn bucket holds up to [ten times](Quota::max_level)
/// its burst and takes that much longer to drain.
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
    fn largest_numbers_of_a_quota_fit() {
        let window = Duration::from_secs(366 * 86_400);
        let quota =
            Quota::token_bucket(1, window).and_then(|quota| quota.with_burst(10)).expect("valid");
        let parts = quota.window_micros() - 1;
        let state =
            PackedState::new(CounterKind::Bucket, MAX_TIME, Quota::MAX_LIMIT, parts, &quota);
        assert_eq!(
            (state.time(), state.units(), state.parts()),
            (MAX_TIME, Quota::MAX_LIMIT, parts)
        );
        assert_eq!(
            state.expires_at(),
            MAX_TIME + 100 * quota.window_micros(),
            "an overdraft takes longer to drain"
        );
        let full = PackedState::new(CounterKind::Bucket, MAX_TIME, quota.burst(), 0, &quota);
        assert_eq!(full.expires_at(), MAX_TIME + 10 * quota.window_micros());
        assert!(state.is_of(CounterKind::Bucket) && !state.is_of(CounterKind::Window));
    }

    #[test]
    fn lifetime_is_rounded_up_and_independent_of_the_numbers() {
        let quota =
            |micros| Quota::sliding_counter(1, Duration::from_micros(micros)).expect("valid");
        let state = PackedState::new(CounterKind::Counter, 7, 8, 9, &quota(1_001));
        assert_eq!(state.expires_at(), 7 + 3_000, "two windows, in whole milliseconds");
        assert!(
            state.lives_for(CounterKind::Counter, &quota(1_500))
                && !state.lives_for(CounterKind::Counter, &quota(1_501))
        );
        let longer = state.with_lifetime_for(CounterKind::Counter, &quota(60_000_000_000));
        assert_eq!((longer.time(), longer.units(), longer.parts()), (7, 8, 9));
        assert_eq!(longer.expires_at(), 7 + 120_000_000_000);
        assert!(state.may_expire_before(longer) && !longer.may_expire_before(state));
    }
}
