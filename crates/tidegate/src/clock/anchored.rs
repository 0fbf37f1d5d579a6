//! [`Anchored`]: the processor's counter, held to the monotonic clock.
//!
//! To read the counter takes half the time of asking the kernel's clock, but its rate is known only
//! roughly, and that rate would make every limit a little wrong. So it is only trusted for a
//! millisecond: from the last *anchor*, a time of the monotonic clock and the counter's value just
//! then. After that the next caller takes a new one. In the long run, this clock goes exactly as
//! fast as the monotonic one.
//!
//! Between two anchors it goes a little slower than the counter was measured, so it is seldom ahead
//! of the monotonic clock (whose own rate the kernel changes now and then), and never by more than
//! some microseconds; the next anchor is later than all that was told before. Only from thread to
//! thread may it step back a little: a processor reads its counter while it still waits for the
//! memory that another one wrote, so it may tell a time from before it heard of a later one, by as
//! long as that memory takes to come. Stores expect it: no state goes back in time.

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
pub(super) struct Anchored<C = Machine> {
    clocks: C,
    /// The time when the monotonic clock stood at 0.
    start_time: u64,
    /// Even while the three below belong together; 1 until there is an anchor.
    sequence: AtomicU64,
    ticks: AtomicU64,
    time: AtomicU64,
    /// Time for each tick, times 2^32.
    rate: AtomicU64,
    measured: Mutex<Measured>,
}

/// The two clocks that it is made of.
pub(super) trait Clocks {
    /// The counter, if there is one whose ticks can be trusted.
    fn ticks(&self) -> Option<u64>;
    /// The monotonic clock.
    fn nanos(&self) -> u64;
}

/// Those of this machine.
#[derive(Debug)]
pub(super) struct Machine {
    counter: Option<quanta::Clock>,
    start: Instant,
}

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
        Self::of(Machine::new(), micros)
    }
}

impl<C: Clocks> Anchored<C> {
    /// A clock that stands at `micros` when the monotonic one stands at 0.
    fn of(clocks: C, micros: u64) -> Self {
        let start_time = micros << FRACTION_BITS;
        let ticks = clocks.ticks().unwrap_or_default();
        let reading = Reading { time: start_time, ticks, within: 0 };
        Self {
            clocks,
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
        let time = match self.clocks.ticks() {
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
        let taken = self.clocks.ticks().and_then(|ticks| self.extrapolated(ticks));
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

    /// No time later than this was told from the present anchor. Only if the counter's rate has
    /// changed, as on a virtual machine that was moved, is it later than the monotonic clock.
    fn latest_told(&self) -> u64 {
        let ticks = self.clocks.ticks().unwrap_or_default();
        let passed =
            passed(self.ticks.load(Ordering::Relaxed), ticks, self.rate.load(Ordering::Relaxed));
        self.time.load(Ordering::Relaxed) + passed.min(SPAN)
    }

    /// The tightest of a few: a thread may be interrupted between the two clocks.
    fn reading(&self) -> Reading {
        let one = || {
            let before = self.clocks.ticks().unwrap_or_default();
            let time = self.monotonic();
            let ticks = self.clocks.ticks().unwrap_or_default();
            Reading { time, ticks, within: ticks.saturating_sub(before) }
        };
        let (first, second) = (one(), one());
        if first.within < second.within { first } else { second }
    }

    fn monotonic(&self) -> u64 {
        let nanos = self.clocks.nanos();
        // times 1024 / 1000
        self.start_time + nanos + nanos * 3 / 125
    }
}

/// The time from one value of the counter to another. From a later one to an earlier it is very
/// long.
#[inline]
fn passed(from: u64, to: u64, rate: u64) -> u64 {
    to.wrapping_sub(from).checked_mul(rate).map_or(u64::MAX, |passed| passed >> 32)
}

impl Measured {
    /// Time for each tick, times 2^32, and surely no more than that; nothing if it cannot be told
    /// well enough yet.
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

impl Machine {
    /// The counter only if the kernel itself goes by it: the kernel watches whether it is even, and
    /// the same on all processors.
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

impl Clocks for Machine {
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

    /// Both clocks by hand: the true time goes on with every look, and each of the two goes by its
    /// own rate.
    #[derive(Debug, Default)]
    struct ByHand {
        /// Nanoseconds.
        truth: Cell<u64>,
        /// How long a look takes.
        look: Cell<u64>,
        /// The counter's ticks in a microsecond.
        ticks: u64,
        /// By how many parts in a million the monotonic clock goes faster than the truth, at worst.
        slewed: u64,
    }

    impl ByHand {
        fn look(&self) -> u64 {
            self.truth.set(self.truth.get() + self.look.get());
            self.truth.get()
        }
    }

    impl Clocks for ByHand {
        fn ticks(&self) -> Option<u64> {
            Some(self.look() * self.ticks / 1_000)
        }

        /// Slewed in every other tenth of a second.
        fn nanos(&self) -> u64 {
            const TENTH: u64 = 100_000_000;
            let truth = self.look();
            let slewed = truth / (2 * TENTH) * TENTH + (truth % (2 * TENTH)).min(TENTH);
            truth + slewed / 1_000_000 * self.slewed
        }
    }

    proptest! {
        /// Whatever the rates, and however long a thread is kept from looking.
        #[test]
        fn it_never_steps_back_and_is_within_microseconds_of_the_monotonic_clock(
            ticks in 24..5_000_u64,
            slewed in 0..500_u64,
            pauses in prop::collection::vec((0..3_000_000_u64, 1..300_u64), 1..500),
        ) {
            let clock = Anchored::of(ByHand { ticks, slewed, ..ByHand::default() }, START);
            let mut told = 0;
            for (pause, look) in pauses {
                clock.clocks.truth.set(clock.clocks.truth.get() + pause);
                clock.clocks.look.set(look);
                let before = clock.monotonic() >> FRACTION_BITS;
                let now = clock.now();
                let after = clock.monotonic() >> FRACTION_BITS;
                prop_assert!(now >= told, "{} after {}", now, told);
                prop_assert!(now <= after + 2 && now + 2 >= before, "{} between {} and {}", now, before, after);
                told = now;
            }
        }
    }

    #[test]
    fn it_goes_by_its_anchors_and_takes_a_new_one_each_millisecond() {
        let clock = Anchored::of(ByHand { ticks: 3_000, ..ByHand::default() }, START);
        clock.clocks.look.set(20);
        let (mut anchors, mut anchor) = (0, clock.sequence.load(Ordering::Relaxed));
        while clock.clocks.truth.get() < 100_000_000 {
            clock.now();
            anchors += u32::from(clock.sequence.load(Ordering::Relaxed) != anchor);
            anchor = clock.sequence.load(Ordering::Relaxed);
        }
        assert!((95..=101).contains(&anchors), "{anchors} anchors in 100 ms");
    }

    /// How closely depends on the machine; if it strayed further than an anchor lasts, it would be
    /// wrong on any.
    #[test]
    fn on_this_machine_several_threads_are_told_the_monotonic_clock() {
        let clock = Anchored::new(START);
        let look = || {
            for _ in 0..100_000 {
                let before = clock.monotonic();
                let now = clock.now() << FRACTION_BITS;
                let after = clock.monotonic();
                assert!(
                    now <= after + SPAN && now + SPAN >= before,
                    "{now} between {before} and {after}"
                );
            }
        };
        std::thread::scope(|scope| (0..4).for_each(|_| drop(scope.spawn(look))));
    }

    #[test]
    fn a_rate_is_told_once_it_is_known_well_enough_and_is_never_too_high() {
        // Three ticks in a nanosecond, and readings that are unsure by 300 of them.
        let reading =
            |nanos: u64| Reading { time: nanos * 1_024 / 1_000, ticks: 3 * nanos, within: 300 };
        let mut measured = Measured { older: reading(0), newer: reading(0) };
        assert_eq!(measured.rate_until(reading(10_000)), None, "ten microseconds are too short");
        let exact = (1_u64 << 32) * 1_024 / 3_000;
        for millis in [1, 10, 400, 700, 1_500, 100_000] {
            let rate = measured.rate_until(reading(millis * 1_000_000)).expect("long enough");
            assert!(
                rate <= exact && exact - rate < exact / (PRECISION / 2),
                "{rate} for {exact} after {millis} ms"
            );
        }
        assert!(measured.older.time > 0, "an old reading is left behind");
        let unsure = Reading { within: 3_000_000_000, ..reading(101_000_000_000) };
        assert_eq!(
            measured.rate_until(unsure),
            None,
            "who was interrupted for a second knows nothing"
        );
    }
}
