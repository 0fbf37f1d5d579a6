//! [`PackedState`]: a stored counter in 24 bytes, so that a key takes one slot of 40 bytes and no
//! pointer has to be followed.
//!
//! | word | high bits | low bits |
//! | --- | --- | --- |
//! | 0 | time, 53 | usage, 3; wide, 1; kind, 2; power of the lifetime, 5 |
//! | 1 | units, 64 | |
//! | 2 | parts, 45 | number of the lifetime, 19 |
//!
//! No `Quota` needs more: the maximum is 10^12 units and a window of 366 days in microseconds. The
//! units of a bucket are its level in W-ths of a unit, and its parts are the window W, as are those
//! of a fixed window. A *wide* bucket, whose level would not fit 64 bits, has the whole units, a tag
//! of the window, and the fraction.
//!
//! The [lifetime](Lifetime) is rounded up; the sweep uses it to find expired entries. The
//! [usage](Usage) decides which entries a full store evicts.

use super::logs::Logs;
use crate::algorithm::{
    Bucket, CalendarWindow, Counter, FixedWindow, Lifetime, LogGrowth, Parameters, Parts,
    SlidingCounter, SlidingLog,
};

/// The latest time that a state can hold: the year 2255.
pub(super) const MAX_TIME: u64 = (1 << (64 - TIME_SHIFT)) - 1;

const KIND_SHIFT: u32 = Lifetime::POWER_BITS;
const KIND_BITS: u32 = 2;
const KIND_MASK: u64 = low_bits(KIND_BITS) << KIND_SHIFT;
const WIDE: u64 = 1 << (KIND_SHIFT + KIND_BITS);
const USAGE_SHIFT: u32 = KIND_SHIFT + KIND_BITS + 1;
const USAGE_BITS: u32 = 3;
const USAGE_MASK: u64 = low_bits(USAGE_BITS) << USAGE_SHIFT;
const TIME_SHIFT: u32 = USAGE_SHIFT + USAGE_BITS;
const TAG_BITS: u32 = 24;

/// The type of a stored counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CounterKind {
    Bucket = 0,
    Log = 1,
    Counter = 2,
    Window = 3,
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

impl<N: StoredParts> StoredCounter for Bucket<N> {
    const KIND: CounterKind = CounterKind::Bucket;

    #[inline]
    fn unpack(state: PackedState, quota: &Parameters, _logs: &mut Logs) -> Self {
        let is_wide = state.0[0] & WIDE != 0;
        let parts = if !is_wide && state.parts() == quota.window() {
            N::product(state.units(), 1)
        } else {
            parts_of_another(state, quota, is_wide)
        };
        let bucket = Self { time: state.time(), parts };
        if bucket.has_overdraft(quota) {
            let max = Self::parts_of(quota, quota.max_level(), 0);
            return Self { parts: parts.min(max), ..bucket };
        }
        bucket
    }

    #[inline]
    fn pack(
        self,
        quota: &Parameters,
        usage: Usage,
        _before: Option<PackedState>,
        _logs: &mut Logs,
    ) -> PackedState {
        self.parts.packed(self.time, quota, bucket_lifetime(&self, quota)).with_usage(usage)
    }

    #[inline]
    fn try_copy(&self) -> Option<Self> {
        Some(*self)
    }
}

/// Returns the level of a bucket that a different quota, or one beyond 64 bits, has written.
#[cold]
fn parts_of_another<N: Parts>(state: PackedState, quota: &Parameters, is_wide: bool) -> N {
    let (units, fraction, is_same_window) = if is_wide {
        let tag = state.units() & low_bits(TAG_BITS);
        let is_same = tag == window_tag(quota.window()) && state.parts() < quota.window();
        (state.units() >> TAG_BITS, state.parts(), is_same)
    } else {
        let window = state.parts().max(1);
        (state.units() / window, state.units() % window, window == quota.window())
    };
    // A fraction of another window is rounded up to a whole unit, which never admits too much.
    let (units, fraction) =
        if is_same_window { (units, fraction) } else { (units + u64::from(fraction > 0), 0) };
    Bucket::<N>::parts_of(quota, units, fraction)
}

/// The level of a bucket, as it is stored.
pub(super) trait StoredParts: Parts {
    fn packed(self, time: u64, quota: &Parameters, lifetime: Lifetime) -> PackedState;
}

impl StoredParts for u64 {
    #[inline]
    fn packed(self, time: u64, quota: &Parameters, lifetime: Lifetime) -> PackedState {
        PackedState::new(CounterKind::Bucket, time, self, quota.window(), lifetime)
    }
}

impl StoredParts for u128 {
    fn packed(self, time: u64, quota: &Parameters, lifetime: Lifetime) -> PackedState {
        let window = Self::from(quota.window());
        let [level, fraction] =
            [self / window, self % window].map(|part| u64::try_from(part).unwrap_or(u64::MAX));
        debug_assert!(level < 1 << 40, "{self}");
        let units = level << TAG_BITS | window_tag(quota.window());
        let mut state = PackedState::new(CounterKind::Bucket, time, units, fraction, lifetime);
        state.0[0] |= WIDE;
        state
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
        PackedState::new(Self::KIND, self.start, self.count, quota.window(), quota.lifetime())
            .with_usage(usage)
    }

    #[inline]
    fn try_copy(&self) -> Option<Self> {
        Some(*self)
    }
}

/// Stored like a fixed window, so that a count stays in force if a policy gets a calendar.
impl StoredCounter for CalendarWindow {
    const KIND: CounterKind = CounterKind::Window;

    fn unpack(state: PackedState, quota: &Parameters, logs: &mut Logs) -> Self {
        Self { inner: FixedWindow::unpack(state, quota, logs), length: state.parts() }
    }

    fn pack(
        self,
        _quota: &Parameters,
        usage: Usage,
        _before: Option<PackedState>,
        _logs: &mut Logs,
    ) -> PackedState {
        let (FixedWindow { start, count }, length) = (self.inner, self.length);
        PackedState::new(Self::KIND, start, count, length, Lifetime::of(length)).with_usage(usage)
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
        Self([
            time << TIME_SHIFT | (kind as u64) << KIND_SHIFT | lifetime.power,
            units,
            parts << Lifetime::NUMBER_BITS | lifetime.number,
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
            [CounterKind::Bucket, CounterKind::Log, CounterKind::Counter, CounterKind::Window];
        KINDS[usize::from(self.0[0].to_le_bytes()[0] >> KIND_SHIFT) % KINDS.len()]
    }

    pub(super) fn is_of(self, kind: CounterKind) -> bool {
        self.0[0] & KIND_MASK == (kind as u64) << KIND_SHIFT
    }

    /// Returns the time of the last write, or the start of the window.
    pub(super) fn time(self) -> u64 {
        self.0[0] >> TIME_SHIFT
    }

    fn units(self) -> u64 {
        self.0[1]
    }

    fn parts(self) -> u64 {
        self.0[2] >> Lifetime::NUMBER_BITS
    }

    /// Returns a bucket that was written with this quota, which fits 64 bits, and has no overdraft:
    /// the bits that depend only on the quota are the same.
    #[inline]
    pub(super) fn bucket_of(&self, quota: &Parameters) -> Option<Bucket<u64>> {
        let [time, parts, window] = self.0;
        let low = Self::low_bits_of_bucket(quota);
        let is_same = window == quota.window_with_lifetime() && time & low_bits(USAGE_SHIFT) == low;
        is_same.then_some(Bucket { time: time >> TIME_SHIFT, parts })
    }

    /// Changes such a bucket.
    #[inline]
    pub(super) fn set_bucket(&mut self, quota: &Parameters, bucket: &Bucket<u64>, usage: Usage) {
        let low = Self::low_bits_of_bucket(quota);
        self.0[0] = bucket.time << TIME_SHIFT | low | usage.0 << USAGE_SHIFT;
        self.0[1] = bucket.parts;
    }

    #[inline]
    fn low_bits_of_bucket(quota: &Parameters) -> u64 {
        (CounterKind::Bucket as u64) << KIND_SHIFT | quota.lifetime().power
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
        let lifetime = self.lifetime_for(kind, quota);
        let power_mask = low_bits(Lifetime::POWER_BITS);
        Self([
            time & !power_mask | lifetime.power,
            units,
            parts & !low_bits(Lifetime::NUMBER_BITS) | lifetime.number,
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
            bucket_lifetime(&Bucket::<u128>::unpack(self, quota, &mut Logs::default()), quota)
        } else {
            quota.lifetime()
        }
    }

    fn lifetime(self) -> Lifetime {
        Lifetime {
            power: self.0[0] & low_bits(Lifetime::POWER_BITS),
            number: self.0[2] & low_bits(Lifetime::NUMBER_BITS),
        }
    }
}

/// Returns the lifetime of a bucket. An overdrawn bucket holds up to
/// [ten times](Parameters::max_level) its burst and takes that much longer to drain.
#[inline]
fn bucket_lifetime<N: Parts>(bucket: &Bucket<N>, quota: &Parameters) -> Lifetime {
    if bucket.has_overdraft(quota) { quota.overdraft_lifetime() } else { quota.lifetime() }
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

    fn pack<N: StoredParts>(bucket: Bucket<N>, quota: &Parameters, usage: Usage) -> PackedState {
        bucket.pack(quota, usage, None, &mut Logs::default())
    }

    fn unpack<N: StoredParts>(state: PackedState, quota: &Parameters) -> Bucket<N> {
        Bucket::unpack(state, quota, &mut Logs::default())
    }

    #[test]
    fn largest_numbers_of_a_quota_fit() {
        let window = 366 * 86_400 * 1_000_000;
        let (quota, wide) = (bucket(1, window, 10), bucket(MAX_LIMIT, window, MAX_LIMIT));
        let narrow = Bucket { time: MAX_TIME, parts: Bucket::<u64>::parts_of(&quota, u64::MAX, 0) };
        assert_eq!(unpack(pack(narrow, &quota, Usage::EXHAUSTED), &quota), narrow);
        for quota in [&quota, &wide] {
            let parts = Bucket::<u128>::parts_of(quota, quota.max_level() - 1, quota.window() - 1);
            let bucket = Bucket { time: MAX_TIME, parts };
            let state = pack(bucket, quota, Usage::EXHAUSTED);
            assert_eq!(unpack(state, quota), bucket);
            assert!(state.is_of(CounterKind::Bucket) && !state.is_of(CounterKind::Window));
            let lives = MAX_TIME + quota.overdraft_lifetime().millis() * 1_000;
            assert!(state.expires_at() <= lives);
            assert!(state.bucket_of(quota).is_none());
            assert_eq!(state.usage(), Usage::EXHAUSTED);
        }
        let drain = 10 * quota.window();
        let expiry = |level| {
            let parts = Bucket::<u64>::parts_of(&quota, level, 0);
            pack(Bucket { time: 7, parts }, &quota, Usage::default()).expires_at() - 7
        };
        let rounded_up = |micros: u64| micros..=micros + micros / 250_000;
        assert!(rounded_up(drain).contains(&expiry(quota.burst())));
        assert!(rounded_up(10 * drain).contains(&expiry(quota.burst() + 1)), "an overdraft");
    }

    #[test]
    fn a_bucket_of_its_quota_is_changed_like_a_packed_one() {
        let quota = bucket(100, 60_000_000, 100);
        let window = quota.window();
        let packed = |time, parts: u64, usage| pack(Bucket { time, parts }, &quota, usage);
        let mut state = packed(1, 100 * window, Usage::EXHAUSTED);
        assert_eq!(state.bucket_of(&quota), Some(Bucket { time: 1, parts: 100 * window }));
        for (level, usage) in [(98, Usage::of(&quota, 1)), (99, Usage::of(&quota, 0))] {
            state.set_bucket(&quota, &Bucket { time: 9, parts: level * window + 7 }, usage);
            assert_eq!(state, packed(9, level * window + 7, usage));
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
            let state = if before.fits_64_bits() {
                pack(Bucket { time: 0, parts: 5_u64 }, &before, Usage::default())
            } else {
                pack(Bucket { time: 0, parts: 5_u128 }, &before, Usage::default())
            };
            assert_eq!(unpack::<u128>(state, &before).parts, 5);
            let rounded_up = u128::from(after.window());
            assert_eq!(unpack::<u128>(state, &after).parts, rounded_up, "{limit}");
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
