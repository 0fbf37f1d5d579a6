//! [`PackedState`]: a stored counter in 24 bytes, so that a key takes one slot of 40 bytes and no
//! pointer has to be followed.
//!
//! | word | high bits | low bits |
//! | --- | --- | --- |
//! | 0 | time, 53 | lifetime, its low 5; usage, 3; wide, 1; kind, 2 |
//! | 1 | units, 64 | |
//! | 2 | parts, 45 | lifetime, its high 19 |
//!
//! No `Quota` needs more: the maximum is 10^12 units and a window of 366 days in microseconds. The
//! units of a bucket are its level in W-ths of a unit, and its parts are the window W, so that
//! [`NarrowBucket`](crate::algorithm::NarrowBucket) needs neither. A *wide* bucket, whose level
//! would not fit 64 bits, has the whole units, a tag of the window, and the fraction.
//!
//! The [lifetime](Lifetime) is rounded up; the sweep uses it to find expired entries. The
//! [usage](Usage) decides which entries a full store evicts.

use super::logs::Logs;
use crate::algorithm::{
    Bucket, Counter, FixedWindow, Lifetime, LogGrowth, Parameters, SlidingCounter, SlidingLog,
};

/// The latest time that a state can hold: the year 2255.
pub(super) const MAX_TIME: u64 = (1 << (64 - TIME_SHIFT)) - 1;

const KIND_BITS: u32 = 2;
const WIDE: u64 = 1 << KIND_BITS;
const USAGE_SHIFT: u32 = KIND_BITS + 1;
const USAGE_BITS: u32 = 3;
const USAGE_MASK: u64 = low_bits(USAGE_BITS) << USAGE_SHIFT;
const LIFETIME_SHIFT: u32 = USAGE_SHIFT + USAGE_BITS;
const LOW_LIFETIME_BITS: u32 = 5;
const TIME_SHIFT: u32 = LIFETIME_SHIFT + LOW_LIFETIME_BITS;
const HIGH_LIFETIME_BITS: u32 = 19;
const TAG_BITS: u32 = 24;

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

/// The units of a counter in use when it was last written, in sevenths of the limit, rounded down.
/// Seven is an exhausted counter: it had no whole unit left, or has denied a request since. Such a
/// counter is never evicted before it expires: a client could free itself by a flood of keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(super) struct Usage(u64);

impl Usage {
    pub(super) const EXHAUSTED: Self = Self(low_bits(USAGE_BITS));

    /// Returns the usage with these units left.
    #[inline]
    pub(super) fn of(quota: &Parameters, remaining: u64) -> Self {
        Self(quota.used_sevenths(remaining))
    }
}

/// A counter that can be stored as a [`PackedState`]. The entries of a log are stored separately,
/// in [`Logs`].
pub(super) trait StoredCounter: Counter + Default {
    const KIND: CounterKind;

    /// Unpacks a stored counter, for a quota that may have changed since it was stored. A log is
    /// moved out of `logs`, and must be [restored](Self::restore) or packed again.
    fn unpack(state: PackedState, quota: &Parameters, logs: &mut Logs) -> Self;

    /// Packs the counter. `before` is the state that it was unpacked from.
    fn pack(
        self,
        quota: &Parameters,
        usage: Usage,
        before: Option<PackedState>,
        logs: &mut Logs,
    ) -> PackedState;

    /// Puts an unchanged counter back.
    fn restore(self, _state: PackedState, _logs: &mut Logs) {}

    /// Returns the number of entries that the memory of a log has room for.
    #[inline]
    fn allocated(&self) -> usize {
        0
    }

    /// Returns the number of entries that a log without room has to [grow](Self::grow) by before
    /// units are spent.
    #[inline]
    fn growth(&self, _quota: &Parameters, _now: u64) -> Option<LogGrowth> {
        None
    }

    fn grow(&mut self, _entries: usize) {}

    /// Returns a copy, if copying is cheap, so that the decision can be computed after the lock is
    /// released.
    fn try_copy(&self) -> Option<Self> {
        None
    }
}

impl StoredCounter for Bucket {
    const KIND: CounterKind = CounterKind::Bucket;

    #[inline]
    fn unpack(state: PackedState, quota: &Parameters, _logs: &mut Logs) -> Self {
        let (time, units, parts) = (state.time(), state.units(), state.parts());
        if state.0[0] & WIDE != 0 {
            let window = quota.window();
            let is_same = units & low_bits(TAG_BITS) == window_tag(window) && parts < window;
            let window = if is_same { window } else { 0 };
            return Self { time, level: units >> TAG_BITS, part: parts, window };
        }
        let window = parts.max(1);
        Self { time, level: units / window, part: units % window, window }
    }

    #[inline]
    fn pack(
        self,
        quota: &Parameters,
        usage: Usage,
        _before: Option<PackedState>,
        _logs: &mut Logs,
    ) -> PackedState {
        self.packed(quota, usage)
    }

    #[inline]
    fn try_copy(&self) -> Option<Self> {
        Some(*self)
    }
}

impl Bucket {
    /// Packs a bucket that was advanced with this quota.
    #[inline]
    fn packed(self, quota: &Parameters, usage: Usage) -> PackedState {
        let Self { time, level, part, .. } = self;
        debug_assert!(level < 1 << 40 && part < quota.window(), "{self:?}");
        let lifetime = bucket_lifetime(level, quota);
        let state = if quota.narrow().fits() {
            let window = quota.window();
            PackedState::new(Self::KIND, time, level * window + part, window, lifetime)
        } else {
            let units = level << TAG_BITS | window_tag(quota.window());
            let mut state = PackedState::new(Self::KIND, time, units, part, lifetime);
            state.0[0] |= WIDE;
            state
        };
        state.with_usage(usage)
    }
}

impl StoredCounter for FixedWindow {
    const KIND: CounterKind = CounterKind::Window;

    #[inline]
    fn unpack(state: PackedState, _quota: &Parameters, _logs: &mut Logs) -> Self {
        Self { start: state.time(), count: state.units() }
    }

    #[inline]
    fn pack(
        self,
        quota: &Parameters,
        usage: Usage,
        _before: Option<PackedState>,
        _logs: &mut Logs,
    ) -> PackedState {
        PackedState::new(Self::KIND, self.start, self.count, 0, quota.lifetime()).with_usage(usage)
    }

    #[inline]
    fn try_copy(&self) -> Option<Self> {
        Some(*self)
    }
}

impl StoredCounter for SlidingCounter {
    const KIND: CounterKind = CounterKind::Counter;

    #[inline]
    fn unpack(state: PackedState, _quota: &Parameters, _logs: &mut Logs) -> Self {
        Self { start: state.time(), current: state.units(), previous: state.parts(), elapsed: 0 }
    }

    #[inline]
    fn pack(
        self,
        quota: &Parameters,
        usage: Usage,
        _before: Option<PackedState>,
        _logs: &mut Logs,
    ) -> PackedState {
        PackedState::new(Self::KIND, self.start, self.current, self.previous, quota.lifetime())
            .with_usage(usage)
    }

    #[inline]
    fn try_copy(&self) -> Option<Self> {
        Some(*self)
    }
}

impl StoredCounter for SlidingLog {
    const KIND: CounterKind = CounterKind::Log;

    fn unpack(state: PackedState, _quota: &Parameters, logs: &mut Logs) -> Self {
        logs.take(state.log_index())
    }

    #[inline]
    fn pack(
        self,
        quota: &Parameters,
        usage: Usage,
        before: Option<PackedState>,
        logs: &mut Logs,
    ) -> PackedState {
        let newest = self.newest_time();
        let index = before.map_or_else(|| logs.allocate(), PackedState::log_index);
        logs.put(index, self);
        PackedState::new(Self::KIND, newest, u64::from(index), 0, quota.lifetime())
            .with_usage(usage)
    }

    fn restore(self, state: PackedState, logs: &mut Logs) {
        logs.put(state.log_index(), self);
    }

    #[inline]
    fn allocated(&self) -> usize {
        self.capacity()
    }

    #[inline]
    fn growth(&self, quota: &Parameters, now: u64) -> Option<LogGrowth> {
        self.growth_for_spending(quota, now)
    }

    fn grow(&mut self, entries: usize) {
        self.reserve(entries);
    }
}

impl PackedState {
    /// The state of an empty slot.
    pub(super) const EMPTY: Self = Self([0; 3]);

    /// Packs a counter that lives for `lifetime` from `time` on.
    #[inline]
    fn new(kind: CounterKind, time: u64, units: u64, parts: u64, lifetime: Lifetime) -> Self {
        debug_assert!(time <= MAX_TIME && parts < 1 << 45, "{time} {parts}");
        let low_lifetime = lifetime.to_bits() & low_bits(LOW_LIFETIME_BITS);
        Self([
            time << TIME_SHIFT | low_lifetime << LIFETIME_SHIFT | kind as u64,
            units,
            parts << HIGH_LIFETIME_BITS | lifetime.to_bits() >> LOW_LIFETIME_BITS,
        ])
    }

    /// Sets the usage of a new state.
    #[inline]
    fn with_usage(mut self, usage: Usage) -> Self {
        self.0[0] |= usage.0 << USAGE_SHIFT;
        self
    }

    pub(super) fn usage(self) -> Usage {
        Usage((self.0[0] & USAGE_MASK) >> USAGE_SHIFT)
    }

    /// Marks a counter that has denied a request. The counter is written only if it has no mark
    /// yet, so that denials do not write to memory.
    #[inline]
    pub(super) fn mark_exhausted(&mut self) {
        if self.0[0] & USAGE_MASK != USAGE_MASK {
            self.0[0] |= USAGE_MASK;
        }
    }

    pub(super) fn kind(self) -> CounterKind {
        const KINDS: [CounterKind; 1 << KIND_BITS] =
            [CounterKind::Log, CounterKind::Counter, CounterKind::Window, CounterKind::Bucket];
        KINDS[usize::from(self.0[0].to_le_bytes()[0]) % KINDS.len()]
    }

    pub(super) fn is_of(self, kind: CounterKind) -> bool {
        self.0[0] & low_bits(KIND_BITS) == kind as u64
    }

    /// Returns the time of the last write, or the start of the window.
    pub(super) fn time(self) -> u64 {
        self.0[0] >> TIME_SHIFT
    }

    fn units(self) -> u64 {
        self.0[1]
    }

    fn parts(self) -> u64 {
        self.0[2] >> HIGH_LIFETIME_BITS
    }

    /// Returns the time and the level of a bucket of this quota, if it fits 64 bits and has no
    /// overdraft: the bits that depend only on the quota are the same.
    #[inline]
    pub(super) fn bucket_of(&self, quota: &Parameters) -> Option<(u64, u64)> {
        let [time, level, window] = self.0;
        let Self([low, _, same_window]) = Self::empty_bucket(quota);
        let is_same =
            window == same_window && (time ^ low) & low_bits(TIME_SHIFT) & !USAGE_MASK == 0;
        is_same.then_some((time >> TIME_SHIFT, level))
    }

    /// Changes the time and the level of such a bucket.
    #[inline]
    pub(super) fn set_bucket(&mut self, quota: &Parameters, time: u64, level: u64, usage: Usage) {
        let Self([low, ..]) = Self::empty_bucket(quota);
        self.0[0] = time << TIME_SHIFT | low | usage.0 << USAGE_SHIFT;
        self.0[1] = level;
    }

    #[inline]
    fn empty_bucket(quota: &Parameters) -> Self {
        Self::new(CounterKind::Bucket, 0, 0, quota.window(), quota.lifetime())
    }

    /// Returns the index of a log in [`Logs`], which takes the place of the units.
    pub(super) fn log_index(self) -> u32 {
        u32::try_from(self.units()).unwrap_or(u32::MAX)
    }

    /// Returns the state of a log that has moved to another index.
    pub(super) fn with_log_index(self, index: u32) -> Self {
        let [time, _, parts] = self.0;
        Self([time, u64::from(index), parts])
    }

    /// Returns the time (µs) at which the entry may be evicted.
    pub(super) fn expires_at(self) -> u64 {
        self.time() + 1_000 * self.lifetime().millis()
    }

    /// Returns whether the lifetime is long enough for this quota.
    #[inline]
    pub(super) fn lives_for(self, kind: CounterKind, quota: &Parameters) -> bool {
        self.lifetime_for(kind, quota) <= self.lifetime()
    }

    /// Returns the same state with the lifetime that this quota needs.
    #[cold]
    pub(super) fn with_lifetime_for(self, kind: CounterKind, quota: &Parameters) -> Self {
        let [time, units, parts] = self.0;
        let lifetime = self.lifetime_for(kind, quota).to_bits();
        let low_mask = low_bits(LOW_LIFETIME_BITS) << LIFETIME_SHIFT;
        Self([
            time & !low_mask | lifetime << LIFETIME_SHIFT & low_mask,
            units,
            parts & !low_bits(HIGH_LIFETIME_BITS) | lifetime >> LOW_LIFETIME_BITS,
        ])
    }

    /// Returns whether the state was written later than `now`: the clock has stepped back, or
    /// another thread read the clock later and got the lock first.
    #[inline]
    pub(super) fn is_ahead_of(self, now: u64) -> bool {
        self.time() > now
    }

    #[inline]
    fn lifetime_for(self, kind: CounterKind, quota: &Parameters) -> Lifetime {
        if kind == CounterKind::Bucket {
            bucket_lifetime(Bucket::unpack(self, quota, &mut Logs::default()).level, quota)
        } else {
            quota.lifetime()
        }
    }

    fn lifetime(self) -> Lifetime {
        let low = self.0[0] >> LIFETIME_SHIFT & low_bits(LOW_LIFETIME_BITS);
        Lifetime::from_bits((self.0[2] & low_bits(HIGH_LIFETIME_BITS)) << LOW_LIFETIME_BITS | low)
    }
}

/// Returns the lifetime of a bucket. An overdrawn bucket holds up to [ten times](Parameters::max_level)
/// its burst and takes that much longer to drain.
#[inline]
fn bucket_lifetime(level: u64, quota: &Parameters) -> Lifetime {
    if level > quota.burst() { quota.overdraft_lifetime() } else { quota.lifetime() }
}

/// Returns a hash of the window, by which a wide bucket knows whether its fraction is of the same
/// window.
fn window_tag(micros: u64) -> u64 {
    micros.wrapping_mul(0x8d8e_3b13_e83b_3ab1) >> (u64::BITS - TAG_BITS)
}

const fn low_bits(count: u32) -> u64 {
    (1 << count) - 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::{Algorithm, MAX_LIMIT};

    fn bucket(limit: u64, window: u64, burst: u64) -> Parameters {
        Parameters::new(Algorithm::TokenBucket, limit, window, burst)
    }

    fn unpack(state: PackedState, quota: &Parameters) -> Bucket {
        Bucket::unpack(state, quota, &mut Logs::default())
    }

    #[test]
    fn largest_numbers_of_a_quota_fit() {
        let window = 366 * 86_400 * 1_000_000;
        let (quota, wide) = (bucket(1, window, 10), bucket(MAX_LIMIT, window, MAX_LIMIT));
        for (quota, level) in [(&quota, quota.max_level()), (&wide, MAX_LIMIT)] {
            let part = quota.window() - 1;
            let bucket = Bucket { time: MAX_TIME, level, part, window: quota.window() };
            let state = bucket.packed(quota, Usage::EXHAUSTED);
            assert_eq!(unpack(state, quota), bucket);
            assert!(state.is_of(CounterKind::Bucket) && !state.is_of(CounterKind::Window));
            let lives = MAX_TIME + quota.overdraft_lifetime().millis() * 1_000;
            assert!(state.expires_at() <= lives);
            assert!(state.bucket_of(quota).is_none());
            assert_eq!(state.usage(), Usage::EXHAUSTED);
        }
        let drain = 10 * quota.window();
        let expiry = |level| {
            let bucket = Bucket { time: 7, level, ..Bucket::default() };
            bucket.packed(&quota, Usage::default()).expires_at() - 7
        };
        let rounded_up = |micros: u64| micros..=micros + micros / 250_000;
        assert!(rounded_up(drain).contains(&expiry(quota.burst())));
        assert!(rounded_up(10 * drain).contains(&expiry(quota.burst() + 1)), "an overdraft");
    }

    #[test]
    fn a_bucket_of_its_quota_is_changed_like_a_packed_one() {
        let quota = bucket(100, 60_000_000, 100);
        let window = quota.window();
        let packed = |time, level, part, usage| {
            Bucket { time, level, part, ..Bucket::default() }.packed(&quota, usage)
        };
        let mut state = packed(1, 100, 0, Usage::EXHAUSTED);
        assert_eq!(state.bucket_of(&quota), Some((1, 100 * window)));
        for (level, usage) in [(98, Usage::of(&quota, 1)), (99, Usage::of(&quota, 0))] {
            state.set_bucket(&quota, 9, level * window + 7, usage);
            assert_eq!(state, packed(9, level, 7, usage));
        }
        assert_eq!(state.bucket_of(&bucket(100, 61_000_000, 100)), None);
        let longer = bucket(100, 60_000_000, 101);
        assert_eq!(state.bucket_of(&longer), None, "of another lifetime");
    }

    #[test]
    fn a_fraction_of_another_window_is_known_exactly() {
        let quota = |limit, seconds: u64| bucket(limit, seconds * 1_000_000, limit);
        // A hash of eight bits would be the same for 18 seconds and a day.
        for limit in [1, MAX_LIMIT] {
            let (before, after) = (quota(limit, 18), quota(limit, 86_400));
            let bucket = Bucket { part: 5, window: before.window(), ..Bucket::default() };
            let state = bucket.packed(&before, Usage::default());
            assert_eq!(unpack(state, &before).window, before.window());
            assert_ne!(unpack(state, &after).window, after.window(), "{limit}");
        }
    }

    #[test]
    fn lifetime_is_rounded_up_and_independent_of_the_numbers() {
        let quota = |micros| Parameters::new(Algorithm::SlidingCounter, 1, micros, 1);
        let lifetime = quota(1_001).lifetime();
        let state = PackedState::new(CounterKind::Counter, 7, 8, 9, lifetime);
        assert_eq!(state.expires_at(), 7 + 3_000, "two windows, in whole milliseconds");
        assert!(
            state.lives_for(CounterKind::Counter, &quota(1_500))
                && !state.lives_for(CounterKind::Counter, &quota(1_501))
        );
        let longer = state.with_lifetime_for(CounterKind::Counter, &quota(60_000_000_000));
        assert_eq!((longer.time(), longer.units(), longer.parts()), (7, 8, 9));
        assert_eq!(longer.expires_at(), 7 + 120_000_000_000);
    }
}
