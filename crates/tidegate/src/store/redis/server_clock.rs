//! [`ServerClock`]: what a server's clock shows, as far as its replies tell.
//!
//! A script that waited too long must not spend: its caller has gone. So each call carries its
//! deadline in the server's time. Every reply brings that time `s`. It was read after the call left
//! (`t0`) and before the reply came (`t1`), so the server's clock is ahead of ours by at least `s -
//! t1` and at most `s - t0`. We keep the highest lower bound: by it a deadline is early rather than
//! late. A reply that contradicts it shows that the server's clock was set back (or drifts), and
//! replaces it.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Instant;

pub(super) struct ServerClock {
    /// How far the server's clock is ahead of [`local_micros`], at least. No reply yet:
    /// `NOTHING_KNOWN`.
    ahead: AtomicI64,
}

const NOTHING_KNOWN: i64 = i64::MIN;

/// The times that a script call carries, in the server's microseconds.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ServerTimes {
    /// The script's time, if tests drive it.
    pub(super) driven: Option<u64>,
    /// Later than this the script does nothing.
    pub(super) deadline: Option<i64>,
    /// The store's own clock, and the server's at the same moment; `None` before the first reply.
    pub(super) own_now: u64,
    pub(super) server_now: Option<u64>,
}

/// How long a call may take at most until its script runs, where the server's clock is not known
/// yet.
const MAX_DELAY: u64 = 1_000_000;

impl ServerTimes {
    /// `clock` is the server's; `own_now` reads the store's own clock.
    pub(super) fn new(
        clock: &ServerClock,
        deadline: Instant,
        driven: Option<u64>,
        own_now: impl FnOnce() -> u64,
    ) -> Self {
        // The store's clock is read last: an age by it is then too long rather than too short.
        let server_now = clock.at(Instant::now()).and_then(|micros| u64::try_from(micros).ok());
        Self { driven, deadline: clock.at(deadline), own_now: own_now(), server_now }
    }

    /// The time of a charge by the server's clock, or a little earlier, from its time by the
    /// store's own clock; 0 if that is unknown. Before the server's first reply it is negative: how
    /// long ago the charge was made.
    pub(super) fn of_charge(&self, charged_at: u64) -> i64 {
        let signed = |micros: u64| i64::try_from(micros).unwrap_or(i64::MAX);
        if charged_at == 0 || self.driven.is_some() {
            return signed(charged_at);
        }
        let age = self.own_now.saturating_sub(charged_at);
        // NTP lets two clocks run apart by up to a thousandth.
        let at_most = age + age / 1_000;
        match self.server_now {
            // A bucket's charge may begin to drain later than now: then nothing of it has drained
            // yet.
            Some(server) if charged_at > self.own_now => {
                signed(server.saturating_add(charged_at - self.own_now))
            }
            Some(server) => signed(server.saturating_sub(at_most).max(1)),
            None => -signed(at_most.saturating_add(MAX_DELAY)),
        }
    }
}

impl ServerClock {
    pub(super) fn new() -> Self {
        Self { ahead: AtomicI64::new(NOTHING_KNOWN) }
    }

    /// A reply to what left at `sent` and came back at `received` says that it was `server_micros`.
    pub(super) fn heard(&self, server_micros: i64, sent: Instant, received: Instant) {
        let (most, least) =
            (server_micros - local_micros(sent), server_micros - local_micros(received));
        let ahead = self.ahead.load(Ordering::Relaxed);
        if ahead < least || ahead > most {
            self.ahead.store(least, Ordering::Relaxed);
        }
    }

    /// What the server's clock shows at `instant`, or a little less; `None` before the first reply.
    pub(super) fn at(&self, instant: Instant) -> Option<i64> {
        let ahead = self.ahead.load(Ordering::Relaxed);
        (ahead != NOTHING_KNOWN).then(|| local_micros(instant) + ahead)
    }
}

/// Microseconds on a monotonic clock of this process.
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
    fn a_charges_time_is_never_later_than_it_was_by_the_servers_clock() {
        let times = ServerTimes {
            own_now: 5_000_000,
            server_now: Some(9_000_000),
            ..ServerTimes::default()
        };
        assert_eq!(times.of_charge(0), 0, "unknown");
        assert_eq!(
            times.of_charge(4_000_000),
            9_000_000 - 1_001_000,
            "a second ago, and a thousandth"
        );
        assert_eq!(times.of_charge(6_000_000), 10_000_000, "yet to begin to drain");
        assert_eq!(times.of_charge(1), 9_000_000 - 5_004_998);
        let early = ServerTimes { server_now: None, ..times };
        assert_eq!(
            early.of_charge(4_000_000),
            -2_001_000,
            "an age, with the time until the script runs"
        );
        let driven = ServerTimes { driven: Some(7), ..early };
        assert_eq!(driven.of_charge(4_000_000), 4_000_000, "tests have one clock");
    }

    #[test]
    fn the_quickest_reply_tells_most_and_a_contradiction_starts_anew() {
        let clock = ServerClock::new();
        let start = Instant::now();
        let after = |millis| start + Duration::from_millis(millis);
        assert_eq!(clock.at(start), None);
        // Sent at 0, received at 10 ms: the server's noon was then, or up to 10 ms earlier.
        clock.heard(NOON, after(0), after(10));
        assert_eq!(clock.at(after(10)), Some(NOON));
        // A quicker reply: noon was at 5 ms at the latest.
        clock.heard(NOON, after(4), after(5));
        assert_eq!(clock.at(after(5)), Some(NOON));
        // A slower one tells nothing new.
        clock.heard(NOON + 15_000, after(10), after(90));
        assert_eq!(clock.at(after(5)), Some(NOON));
        // Set back by a minute, then forward by an hour.
        clock.heard(NOON - 60_000_000, after(100), after(101));
        assert_eq!(clock.at(after(101)), Some(NOON - 60_000_000));
        clock.heard(NOON + 3_600_000_000, after(200), after(201));
        assert_eq!(clock.at(after(201)), Some(NOON + 3_600_000_000));
    }
}
