//! [`HotDenials`]: when each hot key was first and last denied, from the lists of hot keys.

use std::collections::BTreeMap;
use std::time::{Duration, Instant, SystemTime};

use crate::hot_keys::HotKey;
use crate::journal::EventKind;
use tidegate_api::duration::{millis, unix_millis};

/// Denials of the last minutes from which on a key is hot.
const MIN_DENIALS: u64 = 10;
/// Time without a denial after which the last one is an event.
const QUIET_AFTER: Duration = Duration::from_secs(60);
/// Maximum number of hot keys per minute whose denials are events. Clients choose the keys.
const MAX_STARTS_PER_MINUTE: usize = 10;

/// Denied keys of the last minutes, by policy and key.
#[derive(Default)]
pub(super) struct HotDenials {
    keys: BTreeMap<(String, String), DeniedKey>,
    /// Times of the last starts that are events.
    starts: Vec<Instant>,
}

struct DeniedKey {
    /// Denials in the last list.
    count: u64,
    /// Denials since the first one.
    total: u64,
    first: Instant,
    last: Instant,
    last_ms: u64,
    phase: Phase,
}

#[derive(PartialEq, Eq)]
enum Phase {
    /// It is not hot yet.
    New,
    /// Its first denial is an event.
    Started,
    /// Its first denial is no event, because there were too many others.
    Suppressed,
    /// It was not denied for a while.
    Quiet,
}

impl HotDenials {
    /// Takes a list of the most denied keys. Returns the events, each with its age.
    pub(super) fn update(&mut self, listed: &[HotKey], now: Instant) -> Vec<(EventKind, Duration)> {
        let mut events = Vec::new();
        self.starts.retain(|start| now.duration_since(*start) < Duration::from_secs(60));
        let mut quiet = std::mem::take(&mut self.keys);
        for hot in listed {
            let name = (hot.policy.clone(), hot.key.clone());
            let count = hot.count.saturating_sub(hot.error);
            let mut denied = quiet.remove(&name).unwrap_or_else(|| DeniedKey::new(now));
            denied.add(count, now);
            if denied.phase == Phase::New && denied.total >= MIN_DENIALS {
                denied.phase = Phase::Suppressed;
                if self.starts.len() < MAX_STARTS_PER_MINUTE {
                    self.starts.push(now);
                    denied.phase = Phase::Started;
                    let (policy, key) = name.clone();
                    let age = now.duration_since(denied.first);
                    events.push((EventKind::DenialsStarted { policy, key }, age));
                }
            }
            events.extend(denied.end(&name, now));
            self.keys.insert(name, denied);
        }
        // Those that are no longer listed.
        for (name, mut denied) in quiet {
            events.extend(denied.end(&name, now));
            if denied.phase == Phase::Started {
                self.keys.insert(name, denied);
            }
        }
        events
    }

    /// Returns the time of the last denial of a key, in Unix milliseconds.
    pub(super) fn last_ms(&self, policy: &str, key: &str) -> Option<u64> {
        self.keys.get(&(policy.to_owned(), key.to_owned())).map(|denied| denied.last_ms)
    }
}

impl DeniedKey {
    fn new(now: Instant) -> Self {
        Self { count: 0, total: 0, first: now, last: now, last_ms: 0, phase: Phase::New }
    }

    /// Takes the number of denials in the present list. It also falls, with the oldest minute.
    fn add(&mut self, count: u64, now: Instant) {
        if count > self.count {
            if self.phase == Phase::Quiet {
                *self = Self { count: self.count, ..Self::new(now) };
            }
            self.total += count - self.count;
            self.last = now;
            self.last_ms = unix_millis(SystemTime::now());
        }
        self.count = count;
    }

    /// Returns the event of the last denial, once it is long ago.
    fn end(
        &mut self,
        (policy, key): &(String, String),
        now: Instant,
    ) -> Option<(EventKind, Duration)> {
        let age = now.duration_since(self.last);
        if age < QUIET_AFTER {
            return None;
        }
        let was_started = self.phase == Phase::Started;
        self.phase = Phase::Quiet;
        let event = EventKind::DenialsEnded {
            policy: policy.clone(),
            key: key.clone(),
            denials: self.total,
            duration_ms: millis(self.last.duration_since(self.first)),
        };
        was_started.then_some((event, age))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hot(key: &str, count: u64) -> HotKey {
        HotKey { policy: "p".to_owned(), key: key.to_owned(), count, error: 0 }
    }

    fn texts(events: Vec<(EventKind, Duration)>) -> Vec<(String, u64)> {
        events.into_iter().map(|(kind, age)| (kind.to_string(), age.as_secs())).collect()
    }

    #[test]
    fn first_and_last_denial_are_events() {
        let (mut denials, start) = (HotDenials::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(texts(denials.update(&[hot("k", 4), hot("few", 1)], at(0))), []);
        let started = texts(denials.update(&[hot("k", 30), hot("few", 1)], at(2)));
        assert_eq!(started, [("p denies k".to_owned(), 2)]);
        assert!(denials.last_ms("p", "k").is_some() && denials.last_ms("p", "x").is_none());
        // The oldest minute has left the list.
        assert_eq!(texts(denials.update(&[hot("k", 7)], at(40))), []);
        assert_eq!(texts(denials.update(&[hot("k", 9)], at(50))), []);
        assert_eq!(texts(denials.update(&[hot("k", 9)], at(109))), []);
        let ended = texts(denials.update(&[hot("k", 9)], at(110)));
        assert_eq!(ended, [("p no longer denies k: 32 denials in 50s".to_owned(), 60)]);
        assert_eq!(texts(denials.update(&[hot("k", 9)], at(300))), []);
        let again = texts(denials.update(&[hot("k", 40)], at(301)));
        assert_eq!(again, [("p denies k".to_owned(), 0)]);
        let unlisted = texts(denials.update(&[], at(400)));
        assert_eq!(unlisted, [("p no longer denies k: 31 denials in 0s".to_owned(), 99)]);
        assert!(denials.keys.is_empty());
    }

    #[test]
    fn keys_that_clients_invent_cause_few_events() {
        let (mut denials, start) = (HotDenials::default(), Instant::now());
        let keys = |from: usize| (from..from + 100).map(|key| hot(&key.to_string(), 100));
        let mut count = 0;
        for second in 0..60 {
            let listed: Vec<HotKey> = keys(second * 100).collect();
            count += denials.update(&listed, start + Duration::from_secs(second as u64)).len();
        }
        assert_eq!(count, MAX_STARTS_PER_MINUTE);
    }
}
