//! [`ServerClock`]: estimates a server's clock from its replies.
//!
//! A script that starts after its caller's deadline must not spend, so each call carries its
//! deadline in the server's time. Every reply contains that time `s`, which was read after the call
//! was sent (`t0`) and before the reply arrived (`t1`): the server's clock is ahead of ours by at
//! least `s - t1` and at most `s - t0`.
//!
//! We keep the highest lower bound, so that a deadline is early rather than late. A reply that
//! contradicts it shows that the server's clock was set, or drifts, and replaces the bound.
//!
//! Where scripts must not call TIME, their time is an estimate, from replies to TIME as a command:
//! the middle of the two bounds, which is wrong by half a round trip at most.

use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Estimated clock of one server.
pub(crate) struct ServerClock {
    /// Lower bound of the difference to [`local_micros`]; `UNKNOWN` before the first reply.
    ahead: AtomicI64,
    sample: Mutex<Option<Sample>>,
}

/// The best reply to TIME, in microseconds.
#[derive(Clone, Copy)]
struct Sample {
    /// Difference to [`local_micros`].
    ahead: i64,
    /// Half of the round trip.
    error: i64,
    /// Local time of this reply, and of the last one that agreed with it.
    taken_at: i64,
    confirmed_at: i64,
}

/// Server's time as estimated, in microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Estimate {
    pub(crate) now: i64,
    /// Maximum error in both directions.
    pub(crate) max_error: i64,
}

const UNKNOWN: i64 = i64::MIN;
/// Time for which a reply to TIME is good for estimates.
const SAMPLE_TTL: Duration = Duration::from_secs(10);

/// Times of a script call, in microseconds.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ServerTimes {
    /// Time of a test's manual clock, which replaces the server's.
    pub(crate) driven: Option<u64>,
    /// Server's time after which the script does nothing.
    pub(crate) deadline: Option<i64>,
    /// Estimated time for a script that does not read the server's.
    pub(crate) estimated: Option<i64>,
    /// Time of the store's own clock.
    pub(crate) own_now: u64,
    /// Server's time at the same instant; `None` before the first reply.
    pub(crate) server_now: Option<u64>,
}

/// Assumed maximum time between sending a call and the start of its script, in microseconds, while
/// the server's clock is unknown.
const MAX_DELAY: u64 = 1_000_000;

/// Assumed maximum error of other instances' estimates beyond that of our own, in microseconds. A
/// machine that is busy reads its replies late.
const MAX_ESTIMATE_ERROR: i64 = 100_000;

impl ServerTimes {
    /// Creates the times of a call from the server's clock; `own_now` reads the store's own clock,
    /// which only times of charges need.
    pub(crate) fn new(
        clock: &ServerClock,
        deadline: Instant,
        estimate: Option<Estimate>,
        driven: Option<u64>,
        own_now: Option<impl FnOnce() -> u64>,
    ) -> Self {
        let (deadline, estimated) = (clock.at(deadline), estimate.map(|estimate| estimate.now));
        let times = Self { driven, deadline, estimated, ..Self::default() };
        let Some(own_now) = own_now else { return times };
        // The charge was made at another estimate, perhaps of another instance, which may have been
        // too early.
        let server_now = match estimate {
            Some(estimate) => Some(estimate.now - 2 * estimate.max_error - MAX_ESTIMATE_ERROR),
            None => clock.at(Instant::now()),
        };
        // The store's clock is read last, so that the age of a charge is overestimated rather than
        // underestimated.
        let server_now = server_now.and_then(|micros| u64::try_from(micros).ok());
        Self { own_now: own_now(), server_now, ..times }
    }

    /// Returns the time of the server, or of the store's own clock before its first reply.
    pub(crate) fn server_micros(&self) -> u64 {
        self.driven.or(self.server_now).unwrap_or(self.own_now)
    }

    /// Converts the time of a charge to the server's clock, rounded down; 0 stays 0 (unknown).
    /// Before the server's first reply the result is negative: the age of the charge.
    pub(crate) fn to_server_time(self, charged_at: u64) -> i64 {
        let signed = |micros: u64| i64::try_from(micros).unwrap_or(i64::MAX);
        if charged_at == 0 || self.driven.is_some() {
            return signed(charged_at);
        }
        let age = self.own_now.saturating_sub(charged_at);
        // Add a thousandth, because two NTP clocks may drift apart by that much.
        let max_age = age + age / 1_000;
        match self.server_now {
            // The charge of a leaky bucket may start to drain in the future.
            Some(server) if charged_at > self.own_now => {
                signed(server.saturating_add(charged_at - self.own_now))
            }
            Some(server) => signed(server.saturating_sub(max_age).max(1)),
            None => -signed(max_age.saturating_add(MAX_DELAY)),
        }
    }
}

impl ServerClock {
    pub(crate) fn new() -> Self {
        Self { ahead: AtomicI64::new(UNKNOWN), sample: Mutex::default() }
    }

    /// Records the server's time in the reply to a call.
    pub(crate) fn observe(&self, server_micros: i64, sent: Instant, received: Instant) {
        let upper_bound = server_micros - local_micros(sent);
        let lower_bound = server_micros - local_micros(received);
        let ahead = self.ahead.load(Ordering::Relaxed);
        if ahead < lower_bound || ahead > upper_bound {
            self.ahead.store(lower_bound, Ordering::Relaxed);
        }
    }

    /// Records the reply to TIME as a command.
    pub(crate) fn add_sample(&self, server_micros: i64, sent: Instant, received: Instant) {
        self.observe(server_micros, sent, received);
        let (sent, now) = (local_micros(sent), local_micros(received));
        let error = (now - sent + 1) / 2;
        let ahead = server_micros - (sent + error);
        let mut best = self.sample.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *best {
            // It agrees with the new one, and is still more exact.
            Some(best)
                if best.error_at(now) < error
                    && (ahead - best.ahead).abs() <= error + best.error_at(now) =>
            {
                best.confirmed_at = now;
            }
            _ => *best = Some(Sample { ahead, error, taken_at: now, confirmed_at: now }),
        }
    }

    /// Returns the estimate of the server's time now; `None` without a recent reply to TIME.
    pub(crate) fn estimate(&self, now: Instant) -> Option<Estimate> {
        let sample = (*self.sample.lock().unwrap_or_else(PoisonError::into_inner))?;
        let now = local_micros(now);
        let is_recent = now - sample.confirmed_at <= signed_micros(SAMPLE_TTL);
        let estimate = Estimate { now: now + sample.ahead, max_error: sample.error_at(now) };
        is_recent.then_some(estimate)
    }

    /// Returns the server's time at `instant`, rounded down; `None` before the first reply.
    pub(crate) fn at(&self, instant: Instant) -> Option<i64> {
        let ahead = self.ahead.load(Ordering::Relaxed);
        (ahead != UNKNOWN).then(|| local_micros(instant) + ahead)
    }
}

impl Sample {
    /// Returns the maximum error at a local time: two NTP clocks drift apart by a thousandth at most.
    fn error_at(&self, local: i64) -> i64 {
        self.error + (local - self.taken_at).max(0) / 1_000
    }
}

fn signed_micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX / 4)
}

/// Converts an instant to microseconds of a monotonic clock of this process.
pub(in crate::store::redis) fn local_micros(instant: Instant) -> i64 {
    static START: OnceLock<Instant> = OnceLock::new();
    let start = *START.get_or_init(Instant::now);
    match instant.checked_duration_since(start) {
        Some(after) => signed_micros(after),
        None => -signed_micros(start.duration_since(instant)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOON: i64 = 1_700_000_000_000_000;

    #[test]
    fn the_time_of_a_charge_is_rounded_down() {
        let times = ServerTimes {
            own_now: 5_000_000,
            server_now: Some(9_000_000),
            ..ServerTimes::default()
        };
        assert_eq!(times.to_server_time(0), 0, "unknown");
        assert_eq!(
            times.to_server_time(4_000_000),
            9_000_000 - 1_001_000,
            "a second ago, and a thousandth"
        );
        assert_eq!(times.to_server_time(6_000_000), 10_000_000, "drains in the future");
        assert_eq!(times.to_server_time(1), 9_000_000 - 5_004_998);
        let early = ServerTimes { server_now: None, ..times };
        assert_eq!(early.to_server_time(4_000_000), -2_001_000, "an age, plus the maximum delay");
        let driven = ServerTimes { driven: Some(7), ..early };
        assert_eq!(driven.to_server_time(4_000_000), 4_000_000, "a test has one clock");
    }

    #[test]
    fn the_fastest_reply_is_the_best_estimate_until_one_contradicts_it() {
        let clock = ServerClock::new();
        let start = Instant::now();
        let after = |millis| start + Duration::from_millis(millis);
        assert_eq!(clock.at(start), None);
        // Sent at 0 ms, received at 10 ms: the server's noon was in between.
        clock.observe(NOON, after(0), after(10));
        assert_eq!(clock.at(after(10)), Some(NOON));
        // A faster reply: noon was at 5 ms at the latest.
        clock.observe(NOON, after(4), after(5));
        assert_eq!(clock.at(after(5)), Some(NOON));
        // A slower reply changes nothing.
        clock.observe(NOON + 15_000, after(10), after(90));
        assert_eq!(clock.at(after(5)), Some(NOON));
        // Set back by a minute, then forward by an hour.
        clock.observe(NOON - 60_000_000, after(100), after(101));
        assert_eq!(clock.at(after(101)), Some(NOON - 60_000_000));
        clock.observe(NOON + 3_600_000_000, after(200), after(201));
        assert_eq!(clock.at(after(201)), Some(NOON + 3_600_000_000));
    }

    #[test]
    fn an_estimate_is_wrong_by_half_a_round_trip_and_the_drift_since() {
        let clock = ServerClock::new();
        // After the start of the local clock, so that all times are rounded down.
        let start = Instant::now() + Duration::from_secs(1);
        let after = |millis| start + Duration::from_millis(millis);
        let estimate = |millis| {
            let found: Option<Estimate> = clock.estimate(after(millis));
            found.map(|found| (found.now - NOON, found.max_error))
        };
        assert_eq!(estimate(0), None, "no reply yet");
        clock.add_sample(NOON, after(0), after(4));
        assert_eq!(estimate(4), Some((2_000, 2_000)));
        assert_eq!(estimate(1_004), Some((1_002_000, 3_000)), "a thousandth of a second");
        // A slower reply that agrees changes nothing but the age.
        clock.add_sample(NOON + 9_002_000, after(9_000), after(9_030));
        assert_eq!(estimate(9_004), Some((9_002_000, 11_000)));
        assert_eq!(estimate(19_030).map(|(now, _)| now), Some(19_028_000), "confirmed at 9.03 s");
        assert_eq!(estimate(19_031), None, "too old");
        // A more exact one replaces it, and so does one that contradicts it.
        clock.add_sample(NOON + 19_990_000, after(20_000), after(20_002));
        assert_eq!(estimate(20_002), Some((19_991_000, 1_000)));
        clock.add_sample(NOON - 60_000_000, after(21_000), after(21_100));
        assert_eq!(estimate(21_100), Some((-59_950_000, 50_000)));
    }
}
