//! [`ServerClock`]: estimates a server's clock from its replies.
//!
//! A script that starts after its caller's deadline must not spend, so each call carries its
//! deadline in the server's time. Every reply contains that time `s`, which was read after the call
//! was sent (`t0`) and before the reply arrived (`t1`): the server's clock is ahead of ours by at
//! least `s - t1` and at most `s - t0`.
//!
//! We keep the highest lower bound, so that a deadline is early rather than late. A reply that
//! contradicts it shows that the server's clock was set, or drifts, and replaces the bound.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Instant;

/// Estimated clock of one server.
pub(crate) struct ServerClock {
    /// Lower bound of the difference to [`local_micros`]; `UNKNOWN` before the first reply.
    ahead: AtomicI64,
}

const UNKNOWN: i64 = i64::MIN;

/// Times of a script call, in microseconds.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ServerTimes {
    /// Time of a test's manual clock, which replaces the server's.
    pub(crate) driven: Option<u64>,
    /// Server's time after which the script does nothing.
    pub(crate) deadline: Option<i64>,
    /// Time of the store's own clock.
    pub(crate) own_now: u64,
    /// Server's time at the same instant; `None` before the first reply.
    pub(crate) server_now: Option<u64>,
}

/// Assumed maximum time between sending a call and the start of its script, in microseconds, while
/// the server's clock is unknown.
const MAX_DELAY: u64 = 1_000_000;

impl ServerTimes {
    /// Creates the times of a call from the server's clock; `own_now` reads the store's own clock,
    /// which only times of charges need.
    pub(crate) fn new(
        clock: &ServerClock,
        deadline: Instant,
        driven: Option<u64>,
        own_now: Option<impl FnOnce() -> u64>,
    ) -> Self {
        let deadline = clock.at(deadline);
        let Some(own_now) = own_now else { return Self { driven, deadline, ..Self::default() } };
        // The store's clock is read last, so that the age of a charge is overestimated rather than
        // underestimated.
        let server_now = clock.at(Instant::now()).and_then(|micros| u64::try_from(micros).ok());
        Self { driven, deadline, own_now: own_now(), server_now }
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
        Self { ahead: AtomicI64::new(UNKNOWN) }
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

    /// Returns the server's time at `instant`, rounded down; `None` before the first reply.
    pub(crate) fn at(&self, instant: Instant) -> Option<i64> {
        let ahead = self.ahead.load(Ordering::Relaxed);
        (ahead != UNKNOWN).then(|| local_micros(instant) + ahead)
    }
}

/// Converts an instant to microseconds of a monotonic clock of this process.
fn local_micros(instant: Instant) -> i64 {
    static START: OnceLock<Instant> = OnceLock::new();
    let start = *START.get_or_init(Instant::now);
    match instant.checked_duration_since(start) {
        Some(after) => i64::try_from(after.as_micros()).unwrap_or(i64::MAX / 4),
        None => -i64::try_from(start.duration_since(instant).as_micros()).unwrap_or(i64::MAX / 4),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

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
}
