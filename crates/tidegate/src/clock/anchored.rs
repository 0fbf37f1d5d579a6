//! [`Anchored`]: the processor's counter, held to the monotonic clock.
//!
//! To read the counter takes half the time of asking the kernel's clock, but its rate is known only roughly, and that
//! rate would make every limit a little wrong. So it is only trusted for a millisecond: from the last *anchor*, a time of
//! the monotonic clock and the counter's value just then. After that the next caller takes a new one. In the long
//! run, this clock goes exactly as fast as the monotonic one.
//!
//! Between two anchors it goes a little slower than the counter was measured, so it is seldom ahead of the monotonic clock (whose
//! own rate the kernel changes now and then), and never by more than some microseconds; the next anchor is later than all
//! that was told before. A processor may read its counter some nanoseconds before or after
//! what stands beside it in the program, so what one thread hears may be that much earlier than what another one told it: at
//! most the microsecond before. Stores look at the time again where it matters.

use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// Times are kept in 1/1024 of a microsecond.
const FRACTION_BITS: u32 = 10;
/// How long an anchor is good for.
const SPAN: u64 = 1_000 << FRACTION_BITS;
/// A rate that was measured over this time is as good as any.
const MEASURED_OVER: u64 = 500_000 << FRACTION_BITS;
/// A measured rate may be wrong by one in so many at most.
const PRECISION: u64 = 4_096;
/// And by so much it is taken lower than it was measured: crystals warm up, and clocks are slewed.
const MARGIN: u64 = 32_768;

#[derive(Debug)]
pub(super) struct Anchored {
    counter: Counter,
    start: Instant,
    /// The time at `start`.
    start_time: u64,
    /// Even while the three below belong together; 1 until there is an anchor.
    sequence: AtomicU64,
    ticks: AtomicU64,
    time: AtomicU64,
    /// Time for each tick, times 2^32.
    rate: AtomicU64,
    measured: Mutex<Measured>,
}

/// A counter whose ticks can be trusted, or none.
#[derive(Debug)]
struct Counter(Option<quanta::Clock>);

/// What the rate is measured from: readings of more than [`MEASURED_OVER`] ago, and less.
#[derive(Debug, Clone, Copy)]
struct Measured {
    older: Reading,
    newer: Reading,
}

/// The monotonic clock was `time` at some moment in the last `within` ticks before `ticks`.
#[derive(Debug, Clone, Copy)]
struct Reading {
    time: u64,
    ticks: u64,
    within: u64,
}

impl Anchored {
    /// A clock that stands at `micros` now.
    pub(super) fn new(micros: u64) -> Self {
        let counter = Counter::of_this_machine();
        let (start, start_time) = (Instant::now(), micros << FRACTION_BITS);
        let ticks = counter.ticks().unwrap_or_default();
        let reading = Reading { time: start_time, ticks, within: 0 };
        Self {
            counter,
            start,
            start_time,
            sequence: AtomicU64::new(1),
            ticks: AtomicU64::new(ticks),
            time: AtomicU64::new(start_time),
            rate: AtomicU64::new(0),
            measured: Mutex::new(Measured { older: reading, newer: reading }),
        }
    }

    /// Microseconds.
    #[inline]
    pub(super) fn now(&self) -> u64 {
        let time = match self.counter.ticks() {
            Some(ticks) => self.extrapolated(ticks).unwrap_or_else(|| self.anchored_anew()),
            None => self.monotonic(),
        };
        time >> FRACTION_BITS
    }

    /// The time at this value of the counter, if there is an anchor that is young enough.
    #[inline]
    fn extrapolated(&self, ticks: u64) -> Option<u64> {
        // A sequence lock: if the count is the same after as before, nobody has written in between.
        let before = self.sequence.load(Ordering::Acquire);
        let anchor = self.ticks.load(Ordering::Relaxed);
        let time = self.time.load(Ordering::Relaxed);
        let rate = self.rate.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        let after = self.sequence.load(Ordering::Relaxed);
        let passed = passed(anchor, ticks, rate);
        (before == after && before.is_multiple_of(2) && passed < SPAN).then(|| time + passed)
    }

    #[cold]
    fn anchored_anew(&self) -> u64 {
        let mut measured = self.measured.lock().unwrap_or_else(PoisonError::into_inner);
        // Who has waited for another's anchor takes it.
        let taken = self.counter.ticks().and_then(|ticks| self.extrapolated(ticks));
        if let Some(time) = taken {
            return time;
        }
        // From here on nobody tells a time by the old anchor.
        let sequence = self.sequence.load(Ordering::Relaxed);
        self.sequence.store(sequence | 1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let reading = self.reading();
        let time = if sequence == 1 { reading.time } else { reading.time.max(self.latest_told()) };
        let Some(rate) = measured.rate_until(reading) else { return time };
        self.ticks.store(reading.ticks, Ordering::Relaxed);
        self.time.store(time, Ordering::Relaxed);
        self.rate.store(rate, Ordering::Relaxed);
        self.sequence.store((sequence | 1) + 1, Ordering::Release);
        time
    }

    /// No time later than this was told from the present anchor. Only if the counter's rate has changed, as on a virtual
    /// machine that was moved, is it later than the monotonic clock.
    fn latest_told(&self) -> u64 {
        let ticks = self.counter.ticks().unwrap_or_default();
        let passed = passed(self.ticks.load(Ordering::Relaxed), ticks, self.rate.load(Ordering::Relaxed));
        self.time.load(Ordering::Relaxed) + passed.min(SPAN)
    }

    /// The tightest of a few: a thread may be interrupted between the two clocks.
    fn reading(&self) -> Reading {
        let one = || {
            let before = self.counter.ticks().unwrap_or_default();
            let time = self.monotonic();
            let ticks = self.counter.ticks().unwrap_or_default();
            Reading { time, ticks, within: ticks.saturating_sub(before) }
        };
        let (first, second) = (one(), one());
        if first.within < second.within { first } else { second }
    }

    fn monotonic(&self) -> u64 {
        let nanos = u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX / 4);
        // times 1024 / 1000
        self.start_time + nanos + nanos * 3 / 125
    }
}

/// The time from one value of the counter to another. From a later one to an earlier it is very long.
#[inline]
fn passed(from: u64, to: u64, rate: u64) -> u64 {
    let passed = (u128::from(to.wrapping_sub(from)) * u128::from(rate)) >> 32;
    u64::try_from(passed).unwrap_or(u64::MAX)
}

impl Measured {
    /// Time for each tick, times 2^32, and surely no more than that; nothing if it cannot be told well enough yet.
    fn rate_until(&mut self, now: Reading) -> Option<u64> {
        let ticks = now.ticks.saturating_sub(self.older.ticks);
        let error = self.older.within + now.within;
        let time = now.time.saturating_sub(self.older.time);
        let rate = (ticks / PRECISION > error && time > SPAN / 4)
            .then(|| (u128::from(time) << 32) / u128::from(ticks + error + ticks / MARGIN));
        if now.time.saturating_sub(self.newer.time) > MEASURED_OVER {
            *self = Self { older: self.newer, newer: now };
        }
        rate.and_then(|rate| u64::try_from(rate).ok())
    }
}

impl Counter {
    /// The counter, if the kernel itself goes by it: the kernel watches whether it is even, and the same on all
    /// processors.
    fn of_this_machine() -> Self {
        const TRUSTED: [&str; 4] = ["tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter"];
        let source = std::fs::read_to_string("/sys/devices/system/clocksource/clocksource0/current_clocksource");
        let trusted = source.is_ok_and(|name| TRUSTED.contains(&name.trim()));
        Self(trusted.then(quanta::Clock::new))
    }

    #[inline]
    fn ticks(&self) -> Option<u64> {
        self.0.as_ref().map(quanta::Clock::raw)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_within_microseconds_of_the_monotonic_clock() {
        /// In a millisecond, the kernel and the hypervisor may bend the rates of their clocks by a few parts in a thousand.
        const CLOSE: u64 = 10;
        let clock = Anchored::new(1_700_000_000_000_000);
        let (mut ahead, mut behind, mut anchors) = (0, 0, 0);
        for _ in 0..300_000 {
            let sequence = clock.sequence.load(Ordering::Relaxed);
            let before = clock.monotonic() >> FRACTION_BITS;
            let now = clock.now();
            let after = clock.monotonic() >> FRACTION_BITS;
            ahead = ahead.max(now.saturating_sub(after));
            behind = behind.max(before.saturating_sub(now));
            anchors += u32::from(clock.sequence.load(Ordering::Relaxed) != sequence);
        }
        assert!(ahead <= CLOSE && behind <= CLOSE, "{ahead} µs ahead, {behind} µs behind, with {anchors} anchors");
        assert!(clock.counter.0.is_none() || anchors > 3, "{anchors} anchors");
    }

    #[test]
    fn from_one_thread_to_another_it_steps_back_by_less_than_a_microsecond() {
        let clock = Anchored::new(1_700_000_000_000_000);
        let latest = AtomicU64::new(0);
        let look = || {
            for _ in 0..100_000 {
                let seen = latest.load(Ordering::SeqCst);
                let now = clock.now();
                // Which of two microseconds it is may be a matter of nanoseconds.
                assert!(now + 1 >= seen, "{now} after {seen}");
                latest.fetch_max(now, Ordering::SeqCst);
            }
        };
        std::thread::scope(|scope| (0..4).for_each(|_| drop(scope.spawn(look))));
    }

    #[test]
    fn a_rate_is_told_once_it_is_known_well_enough_and_is_never_too_high() {
        // Three ticks in a nanosecond, and readings that are unsure by 300 of them.
        let reading = |nanos: u64| Reading { time: nanos * 1_024 / 1_000, ticks: 3 * nanos, within: 300 };
        let mut measured = Measured { older: reading(0), newer: reading(0) };
        assert_eq!(measured.rate_until(reading(10_000)), None, "ten microseconds are too short");
        let exact = (1_u64 << 32) * 1_024 / 3_000;
        for millis in [1, 10, 400, 700, 1_500, 100_000] {
            let rate = measured.rate_until(reading(millis * 1_000_000)).expect("long enough");
            assert!(rate <= exact && exact - rate < exact / (PRECISION / 2), "{rate} for {exact} after {millis} ms");
        }
        assert!(measured.older.time > 0, "an old reading is left behind");
        let unsure = Reading { within: 3_000_000_000, ..reading(101_000_000_000) };
        assert_eq!(measured.rate_until(unsure), None, "who was interrupted for a second knows nothing");
    }
}
