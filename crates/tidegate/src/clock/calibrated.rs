//! [`CalibratedClock`]: the cycle counter of the CPU, calibrated against the monotonic clock.
//!
//! Reading the cycle counter takes half the time of the kernel's clock, but its rate is known only
//! approximately, which would skew every limit. Therefore the clock extrapolates from its last
//! *anchor*, a pair of monotonic time and counter value, for one millisecond at most, and then
//! takes a new anchor. In the long run it runs exactly as fast as the monotonic clock.
//!
//! Between two anchors it runs slightly slower than the measured rate, so it is rarely ahead of the
//! monotonic clock (whose rate the kernel adjusts), and only by microseconds. A new anchor is never
//! earlier than a time that was returned before. Between threads, the time can step back by the
//! latency of a cache miss, because a core reads its counter before it sees the write of another
//! core; stores tolerate that.
//!
//! A suspended machine may go on counting while its monotonic clock is stopped, and a virtual
//! machine may migrate to a host with another counter. Therefore each sample is compared with the
//! previous one: if the rate has changed, all samples are dropped, and the clock returns the
//! monotonic time until it is calibrated again.

use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// Times are in units of 1/1024 of a microsecond.
const FRACTION_BITS: u32 = 10;
/// Maximum age of an anchor.
const MAX_ANCHOR_AGE: u64 = 1_000 << FRACTION_BITS;
/// Maximum time by which an anchor is ahead of the monotonic clock.
const MAX_LEAD: u64 = 10 << FRACTION_BITS;
/// Time over which the rate is measured; a longer time would not improve it.
const RATE_INTERVAL: u64 = 500_000 << FRACTION_BITS;
/// A rate is used once its relative error is below 1 / `RATE_PRECISION`.
const RATE_PRECISION: u64 = 4_096;
/// A rate that differs by more than 1 / `MAX_RATE_CHANGE` from the one in use is that of another
/// counter.
const MAX_RATE_CHANGE: u64 = 100;
/// The rate is lowered by 1 / `RATE_MARGIN`, because crystals warm up and clocks are slewed.
const RATE_MARGIN: u64 = 32_768;

/// A clock that extrapolates the monotonic time from the cycle counter.
#[derive(Debug)]
pub(super) struct CalibratedClock<C = HardwareClocks> {
    clocks: C,
    /// Time at which the monotonic clock was at 0.
    start_time: u64,
    /// Sequence lock of the next three fields: odd during an update, 1 until the first anchor.
    sequence: AtomicU64,
    /// Counter value of the anchor.
    anchor_ticks: AtomicU64,
    /// Time of the anchor.
    anchor_time: AtomicU64,
    /// Time per tick, times 2^32.
    rate: AtomicU64,
    calibration: Mutex<Calibration>,
}

/// The two clocks that a [`CalibratedClock`] combines.
pub(super) trait RawClocks {
    /// Returns the cycle counter, if there is a reliable one.
    fn ticks(&self) -> Option<u64>;
    /// Returns the monotonic clock in nanoseconds.
    fn nanos(&self) -> u64;
}

/// The clocks of this machine.
#[derive(Debug)]
pub(super) struct HardwareClocks {
    counter: Option<quanta::Clock>,
    start: Instant,
}

/// The samples that the rate is measured from: one older than [`RATE_INTERVAL`], and one younger.
#[derive(Debug, Clone, Copy)]
struct Calibration {
    older: ClockSample,
    newer: ClockSample,
    /// The last sample, and the rate in use since.
    last: Option<(ClockSample, u64)>,
}

/// A simultaneous reading of both clocks: the monotonic clock was at `time` at some moment in the
/// `uncertainty` ticks before `ticks`.
#[derive(Debug, Clone, Copy)]
struct ClockSample {
    time: u64,
    ticks: u64,
    uncertainty: u64,
}

impl CalibratedClock {
    /// Creates a clock that is at `micros` now.
    pub(super) fn new(micros: u64) -> Self {
        Self::with_clocks(HardwareClocks::new(), micros)
    }
}

impl<C: RawClocks> CalibratedClock<C> {
    /// Creates a clock that is at `micros` when the monotonic clock is at 0.
    fn with_clocks(clocks: C, micros: u64) -> Self {
        let start_time = micros << FRACTION_BITS;
        let ticks = clocks.ticks().unwrap_or_default();
        let sample = ClockSample { time: start_time, ticks, uncertainty: 0 };
        Self {
            clocks,
            start_time,
            sequence: AtomicU64::new(1),
            anchor_ticks: AtomicU64::new(ticks),
            anchor_time: AtomicU64::new(start_time),
            rate: AtomicU64::new(0),
            calibration: Mutex::new(Calibration::new(sample)),
        }
    }

    /// Returns the time in microseconds.
    #[inline]
    pub(super) fn now(&self) -> u64 {
        let time = match self.clocks.ticks() {
            Some(ticks) => self.extrapolate(ticks).unwrap_or_else(|| self.recalibrate()),
            None => self.monotonic(),
        };
        time >> FRACTION_BITS
    }

    /// Returns the time at this counter value, if the anchor is recent enough.
    #[inline]
    fn extrapolate(&self, ticks: u64) -> Option<u64> {
        // Sequence lock: an unchanged, even sequence means that the fields were read consistently.
        let before = self.sequence.load(Ordering::Acquire);
        let anchor_ticks = self.anchor_ticks.load(Ordering::Relaxed);
        let anchor_time = self.anchor_time.load(Ordering::Relaxed);
        let rate = self.rate.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        let after = self.sequence.load(Ordering::Relaxed);
        let age = elapsed(anchor_ticks, ticks, rate);
        let is_consistent = before == after && before.is_multiple_of(2);
        (is_consistent && age < MAX_ANCHOR_AGE).then(|| anchor_time + age)
    }

    #[cold]
    fn recalibrate(&self) -> u64 {
        let mut calibration = self.calibration.lock().unwrap_or_else(PoisonError::into_inner);
        // Another thread may have recalibrated while we waited for the lock.
        let recalibrated = self.clocks.ticks().and_then(|ticks| self.extrapolate(ticks));
        if let Some(time) = recalibrated {
            return time;
        }
        // From here on, no thread extrapolates from the old anchor.
        let sequence = self.sequence.load(Ordering::Relaxed);
        self.sequence.store(sequence | 1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let sample = self.sample();
        let is_first = sequence == 1;
        let time = if is_first { sample.time } else { sample.time.max(self.latest_returned()) };
        let Some(rate) = calibration.update(sample) else { return time };
        if time - sample.time > MAX_LEAD {
            // The monotonic clock catches up within the age of an anchor.
            return time;
        }
        self.anchor_ticks.store(sample.ticks, Ordering::Relaxed);
        self.anchor_time.store(time, Ordering::Relaxed);
        self.rate.store(rate, Ordering::Relaxed);
        self.sequence.store((sequence | 1) + 1, Ordering::Release);
        time
    }

    /// Returns an upper bound on the times that were extrapolated from the current anchor. It is
    /// later than the monotonic clock only if the rate of the counter has changed, for example by a
    /// migration of the virtual machine.
    fn latest_returned(&self) -> u64 {
        let ticks = self.clocks.ticks().unwrap_or_default();
        let anchor_ticks = self.anchor_ticks.load(Ordering::Relaxed);
        let age = elapsed(anchor_ticks, ticks, self.rate.load(Ordering::Relaxed));
        self.anchor_time.load(Ordering::Relaxed) + age.min(MAX_ANCHOR_AGE)
    }

    /// Returns the more precise of two samples: a thread may be preempted between the two clocks.
    fn sample(&self) -> ClockSample {
        let first = self.sample_once();
        let second = self.sample_once();
        if first.uncertainty < second.uncertainty { first } else { second }
    }

    fn sample_once(&self) -> ClockSample {
        let before = self.clocks.ticks().unwrap_or_default();
        let time = self.monotonic();
        let ticks = self.clocks.ticks().unwrap_or_default();
        ClockSample { time, ticks, uncertainty: ticks.saturating_sub(before) }
    }

    fn monotonic(&self) -> u64 {
        let nanos = self.clocks.nanos();
        // nanos * 1024 / 1000
        self.start_time + nanos + nanos * 3 / 125
    }
}

/// Returns the time between two counter values; a huge time if `to` is before `from`.
#[inline]
fn elapsed(from: u64, to: u64, rate: u64) -> u64 {
    to.wrapping_sub(from).checked_mul(rate).map_or(u64::MAX, |elapsed| elapsed >> 32)
}

impl Calibration {
    fn new(sample: ClockSample) -> Self {
        Self { older: sample, newer: sample, last: None }
    }

    /// Adds a sample. Returns a lower bound on the time per tick, times 2^32, or `None` if it is
    /// not precise enough yet.
    fn update(&mut self, now: ClockSample) -> Option<u64> {
        if self.last.is_some_and(|(last, rate)| now.has_other_rate(last, rate)) {
            *self = Self::new(now);
            return None;
        }
        let ticks = now.ticks.saturating_sub(self.older.ticks);
        let error = self.older.uncertainty + now.uncertainty;
        let time = now.time.saturating_sub(self.older.time);
        let is_precise = ticks / RATE_PRECISION > error && time > MAX_ANCHOR_AGE / 4;
        let rate = is_precise
            .then(|| (u128::from(time) << 32) / u128::from(ticks + error + ticks / RATE_MARGIN));
        if now.time.saturating_sub(self.newer.time) > RATE_INTERVAL {
            (self.older, self.newer) = (self.newer, now);
        }
        let rate = rate.and_then(|rate| u64::try_from(rate).ok())?;
        self.last = Some((now, rate));
        Some(rate)
    }
}

impl ClockSample {
    /// Returns whether the counter has surely not run at this rate since an earlier sample.
    fn has_other_rate(self, earlier: Self, rate: u64) -> bool {
        let time = u128::from(self.time.saturating_sub(earlier.time)) << 32;
        let ticks = self.ticks.saturating_sub(earlier.ticks);
        let error = self.uncertainty + earlier.uncertainty;
        let time_of = |ticks: u64| u128::from(ticks) * u128::from(rate);
        let (least, most) = (time_of(ticks.saturating_sub(error)), time_of(ticks + error));
        let change = time / u128::from(MAX_RATE_CHANGE);
        self.ticks < earlier.ticks || least > time + change || most + change < time
    }
}

impl HardwareClocks {
    /// Uses the cycle counter only if the kernel uses it too: the kernel verifies that its rate is
    /// constant and the same on all cores.
    fn new() -> Self {
        const TRUSTED: [&str; 4] =
            ["tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter"];
        let source = std::fs::read_to_string(
            "/sys/devices/system/clocksource/clocksource0/current_clocksource",
        );
        let trusted = source.is_ok_and(|name| TRUSTED.contains(&name.trim()));
        Self { counter: trusted.then(quanta::Clock::new), start: Instant::now() }
    }
}

impl RawClocks for HardwareClocks {
    #[inline]
    fn ticks(&self) -> Option<u64> {
        self.counter.as_ref().map(quanta::Clock::raw)
    }

    fn nanos(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX / 4)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use proptest::prelude::*;

    use super::*;

    const START: u64 = 1_700_000_000_000_000;

    /// Simulated clocks: every reading advances the true time, and each clock has its own rate.
    #[derive(Debug, Default)]
    struct FakeClocks {
        /// True time in nanoseconds.
        true_time: Cell<u64>,
        /// Duration of a reading.
        read_time: Cell<u64>,
        /// Counter ticks per microsecond.
        ticks_per_micro: Cell<u64>,
        /// Ticks that the counter is ahead, since its rate changed or the machine was suspended.
        ticks_ahead: Cell<i64>,
        /// Maximum slew of the monotonic clock, in parts per million.
        slew_ppm: u64,
    }

    impl FakeClocks {
        fn read(&self) -> u64 {
            self.true_time.set(self.true_time.get() + self.read_time.get());
            self.true_time.get()
        }
    }

    impl RawClocks for FakeClocks {
        fn ticks(&self) -> Option<u64> {
            let ticks = self.read() * self.ticks_per_micro.get() / 1_000;
            Some(ticks.wrapping_add_signed(self.ticks_ahead.get()))
        }

        /// Slewed in every other tenth of a second.
        fn nanos(&self) -> u64 {
            const TENTH: u64 = 100_000_000;
            let true_time = self.read();
            let slewed = true_time / (2 * TENTH) * TENTH + (true_time % (2 * TENTH)).min(TENTH);
            true_time + slewed / 1_000_000 * self.slew_ppm
        }
    }

    proptest! {
        /// For any rates and any pauses between readings.
        #[test]
        fn clock_never_steps_back_and_stays_close_to_the_monotonic_clock(
            ticks_per_micro in 24..5_000_u64,
            slew_ppm in 0..500_u64,
            pauses in prop::collection::vec((0..3_000_000_u64, 1..300_u64), 1..500),
        ) {
            let clocks = FakeClocks {
                ticks_per_micro: Cell::new(ticks_per_micro), slew_ppm, ..FakeClocks::default() };
            let clock = CalibratedClock::with_clocks(clocks, START);
            let mut last = 0;
            for (pause, read_time) in pauses {
                clock.clocks.true_time.set(clock.clocks.true_time.get() + pause);
                clock.clocks.read_time.set(read_time);
                let before = clock.monotonic() >> FRACTION_BITS;
                let now = clock.now();
                let after = clock.monotonic() >> FRACTION_BITS;
                prop_assert!(now >= last, "{} after {}", now, last);
                prop_assert!(now <= after + 2, "{} after {}", now, after);
                prop_assert!(now + 2 >= before, "{} before {}", now, before);
                last = now;
            }
        }
    }

    /// Runs a clock for two seconds before and after `change`, which happens within an anchor's
    /// age. Returns the largest difference from the monotonic clock afterwards, in microseconds:
    /// within the first two milliseconds, and later.
    fn differences(ticks_per_micro: u64, change: impl FnOnce(&FakeClocks)) -> [u64; 2] {
        let clocks =
            FakeClocks { ticks_per_micro: Cell::new(ticks_per_micro), ..FakeClocks::default() };
        let clock = CalibratedClock::with_clocks(clocks, START);
        clock.clocks.read_time.set(20);
        let mut last = 0;
        let mut run_until = |nanos: u64| {
            let mut largest = 0;
            while clock.clocks.true_time.get() < nanos {
                clock.clocks.true_time.set(clock.clocks.true_time.get() + 10_000);
                let (now, exact) = (clock.now(), clock.monotonic() >> FRACTION_BITS);
                assert!(now >= last, "{now} after {last}");
                (largest, last) = (largest.max(now.abs_diff(exact)), now);
            }
            largest
        };
        assert!(run_until(2_000_000_000) <= 2);
        change(&clock.clocks);
        [run_until(2_002_000_000), run_until(4_000_000_000)]
    }

    #[test]
    fn clock_goes_on_after_a_suspend() {
        // The counter has run for an hour, or starts again at 0; the monotonic clock has not.
        let hour = differences(3_000, |clocks| clocks.ticks_ahead.set(3_000 * 3_600_000_000));
        assert!(hour[0] <= 1_000 && hour[1] <= 13, "{hour:?} µs");
        let restarted = differences(3_000, |clocks| clocks.ticks_ahead.set(-3_000 * 2_000_000));
        assert!(restarted[0] <= 1_000 && restarted[1] <= 13, "{restarted:?} µs");
    }

    #[test]
    fn clock_is_not_ahead_after_a_migration_to_another_counter() {
        for (before, after) in [(2_000, 2_200), (2_000, 4_000), (1_000, 5_000), (3_000, 2_000)] {
            let [first, later] = differences(before, |clocks| {
                let ticks = clocks.true_time.get() / 1_000;
                let ahead = i64::try_from(ticks * before).expect("small")
                    - i64::try_from(ticks * after).expect("small");
                clocks.ticks_per_micro.set(after);
                clocks.ticks_ahead.set(ahead);
            });
            assert!(
                first <= 1_000 && later <= 13,
                "{first} and {later} µs from {before} to {after}"
            );
        }
    }

    #[test]
    fn clock_recalibrates_once_per_millisecond() {
        let clocks = FakeClocks { ticks_per_micro: Cell::new(3_000), ..FakeClocks::default() };
        let clock = CalibratedClock::with_clocks(clocks, START);
        clock.clocks.read_time.set(20);
        let mut anchors = 0;
        let mut sequence = clock.sequence.load(Ordering::Relaxed);
        while clock.clocks.true_time.get() < 100_000_000 {
            clock.now();
            anchors += u32::from(clock.sequence.load(Ordering::Relaxed) != sequence);
            sequence = clock.sequence.load(Ordering::Relaxed);
        }
        assert!((95..=101).contains(&anchors), "{anchors} anchors in 100 ms");
    }

    /// The precision depends on the machine, but the error never exceeds the age of an anchor.
    #[test]
    fn clock_of_this_machine_follows_the_monotonic_clock_in_all_threads() {
        let clock = CalibratedClock::new(START);
        let check = || {
            for _ in 0..100_000 {
                let before = clock.monotonic();
                let now = clock.now() << FRACTION_BITS;
                let after = clock.monotonic();
                assert!(
                    now <= after + MAX_ANCHOR_AGE && now + MAX_ANCHOR_AGE >= before,
                    "{now} between {before} and {after}"
                );
            }
        };
        std::thread::scope(|scope| (0..4).for_each(|_| drop(scope.spawn(check))));
    }

    #[test]
    fn rate_is_used_once_it_is_precise_and_is_never_too_high() {
        // Three ticks per nanosecond, and an uncertainty of 300 ticks.
        let sample = |nanos: u64| ClockSample {
            time: nanos * 1_024 / 1_000,
            ticks: 3 * nanos,
            uncertainty: 300,
        };
        let mut calibration = Calibration::new(sample(0));
        assert_eq!(calibration.update(sample(10_000)), None, "ten microseconds are too short");
        let exact = (1_u64 << 32) * 1_024 / 3_000;
        for millis in [1, 10, 400, 700, 1_500, 100_000] {
            let rate = calibration.update(sample(millis * 1_000_000)).expect("long enough");
            assert!(
                rate <= exact && exact - rate < exact / (RATE_PRECISION / 2),
                "{rate} for {exact} after {millis} ms"
            );
        }
        assert!(calibration.older.time > 0, "old samples are replaced");
        let imprecise = ClockSample { uncertainty: 3_000_000_000, ..sample(101_000_000_000) };
        assert_eq!(calibration.update(imprecise), None, "preempted for a second");
    }
}
