//! The naive model: keeps every event, recomputes from scratch, and finds waits by trying times.
//!
//! It shares no arithmetic with the algorithms. All it knows of each is how many units count at a
//! given time.

use std::collections::HashMap;
use std::time::Duration;

use crate::algorithm::{Algorithm, MAX_CLOCK_SKEW};
use crate::charge::Charge;
use crate::decision::{Decision, Source};
use crate::quota::Quota;
use crate::store::Action;

/// What a limiter must answer, worked out the slow way.
#[derive(Debug, Default)]
pub struct Model {
    histories: HashMap<(String, String), History>,
}

#[derive(Debug, Default, Clone)]
struct History {
    /// In the order in which they happened.
    events: Vec<Event>,
    last_write: u64,
    /// Of `fixed-window` and `sliding-counter`: when the window began that was current at the last
    /// write. Its events, and those of the one before, have the beginning of their window for their
    /// time.
    window_start: u64,
}

#[derive(Debug, Clone)]
struct Event {
    time: u64,
    /// Negative: given back.
    units: i128,
    /// What was in force then; a bucket drained by it up to this event.
    quota: Quota,
    /// Of units returned to a bucket: for how long they have drained.
    aged: u64,
}

impl Model {
    /// The decisions for these charges at this time (microseconds).
    pub fn decide(&mut self, action: Action, charges: &[Charge<'_>], now: u64) -> Vec<Decision> {
        let together = charges.iter().all(|charge| {
            let stored = self.history(charge);
            let now = stored.without_skew(charge.quota(), now);
            let history = stored.seen_from(charge.quota(), now);
            history.counting(charge.quota(), now) + u128::from(charge.cost())
                <= u128::from(charge.quota().burst())
        });
        charges.iter().map(|charge| self.decide_one(action, charge, now, together)).collect()
    }

    /// Whether this charge's key could as well be forgotten.
    #[must_use]
    pub fn nothing_counts(&self, charge: &Charge<'_>, now: u64) -> bool {
        let stored = self.history(charge);
        let now = stored.without_skew(charge.quota(), now);
        stored.seen_from(charge.quota(), now).is_void(charge.quota(), now)
    }

    fn history(&self, charge: &Charge<'_>) -> History {
        let name = (charge.key().to_owned(), charge.policy().to_owned());
        self.histories.get(&name).cloned().unwrap_or_default()
    }

    fn decide_one(
        &mut self,
        action: Action,
        charge: &Charge<'_>,
        now: u64,
        together: bool,
    ) -> Decision {
        let (quota, cost) = (charge.quota(), charge.cost());
        let name = (charge.key().to_owned(), charge.policy().to_owned());
        let stored = self.history(charge);
        let now = stored.without_skew(quota, now);
        let mut seen = stored.seen_from(quota, now);
        let capacity = u128::from(quota.burst());
        let fits = seen.counting(quota, now) + u128::from(cost) <= capacity;
        let mut delay = 0;
        let mut denied = false;
        let stepped_back = stored.is_ahead_of(quota, now);
        let written = match action {
            Action::Reset => {
                self.histories.remove(&name);
                seen = History::default();
                false
            }
            Action::Refund => {
                let something = !seen.is_void(quota, now);
                if something {
                    seen.give_back(quota, now, cost, charge.charged_at());
                }
                something
            }
            Action::Report => {
                denied = !fits;
                let room = u128::from(quota.max_level()).saturating_sub(seen.recorded(quota, now));
                let taken = u128::from(cost).min(room);
                if taken > 0 {
                    seen.forget_what_is_gone(quota, now);
                    seen.push(
                        now,
                        i128::try_from(taken).expect("no more than the highest level"),
                        quota,
                    );
                    if quota.count_denied() {
                        seen.keep_newest(u128::from(quota.limit()));
                    }
                }
                taken > 0 || stepped_back
            }
            Action::Take => {
                let room = capacity.saturating_sub(seen.counting(quota, now));
                let taken = u128::from(cost).min(room);
                if taken > 0 {
                    seen.forget_what_is_gone(quota, now);
                    seen.push(now, i128::try_from(taken).expect("no more than the burst"), quota);
                }
                taken > 0 || stepped_back
            }
            Action::Acquire | Action::Peek => {
                denied = !fits;
                let spend = cost > 0 && ((fits && together) || (denied && quota.count_denied()));
                if fits && together && quota.algorithm() == Algorithm::LeakyBucket {
                    delay = seen
                        .first_time(now, |history, time| history.bucket_level(quota, time) == 0)
                        - now;
                }
                if spend {
                    seen.forget_what_is_gone(quota, now);
                    seen.push(now, i128::from(cost), quota);
                    if quota.count_denied() {
                        seen.keep_newest(u128::from(quota.limit()));
                    }
                }
                action == Action::Acquire && (spend || stepped_back)
            }
        };
        if written {
            let mut kept = seen.clone();
            kept.forget_what_is_gone(quota, now);
            kept.push(now, 0, quota);
            self.histories.insert(name.clone(), kept);
        }
        // A report asks when one unit is free again.
        let wanted = if action == Action::Report { 1 } else { u128::from(cost) };
        let admits = |history: &History, time| history.counting(quota, time) + wanted <= capacity;
        let retry_after = if denied { seen.first_time(now, admits) - now } else { 0 };
        let reset_after =
            seen.first_time(now, |history, time| history.counting(quota, time) == 0) - now;
        let remaining = capacity.saturating_sub(seen.counting(quota, now));
        if written && seen.is_void(quota, now) {
            self.histories.remove(&name);
        }
        Decision {
            allowed: !denied,
            limit: quota.limit(),
            remaining: u64::try_from(remaining).expect("no more than the burst"),
            retry_after: Duration::from_micros(retry_after),
            reset_after: Duration::from_micros(reset_after),
            delay: Duration::from_micros(delay),
            source: Source::Store,
        }
    }
}

impl History {
    /// Units that count at `time`, a part of a unit as a whole one.
    fn counting(&self, quota: &Quota, time: u64) -> u128 {
        let window = quota.window_micros();
        let sum = |counts: &dyn Fn(&Event) -> bool| {
            let units: i128 =
                self.events.iter().filter(|event| counts(event)).map(|event| event.units).sum();
            u128::try_from(units).expect("never more given back than taken")
        };
        match quota.algorithm() {
            Algorithm::SlidingLog | Algorithm::FixedWindow => {
                sum(&|event| event.time + window > time)
            }
            Algorithm::SlidingCounter => {
                let (current, previous) = self.window_counts(window, time);
                let elapsed = (time - self.window_start) % window;
                current + previous * u128::from(window - elapsed) / u128::from(window)
            }
            Algorithm::TokenBucket | Algorithm::LeakyBucket => {
                self.bucket_level(quota, time).div_ceil(u128::from(window))
            }
        }
    }

    /// Units recorded at `time`, without those of the window before the current one.
    fn recorded(&self, quota: &Quota, time: u64) -> u128 {
        let window = quota.window_micros();
        match quota.algorithm() {
            Algorithm::SlidingCounter => self.window_counts(window, time).0,
            _ => self.counting(quota, time),
        }
    }

    /// Of a `sliding-counter`: the units of the window at `time`, and of the one before it. At a
    /// write the events are those of two windows; when the policy's window is changed, they stay in
    /// them.
    fn window_counts(&self, window: u64, time: u64) -> (u128, u128) {
        let sum = |is_current: bool| {
            let events =
                self.events.iter().filter(|event| (event.time == self.window_start) == is_current);
            let units: i128 = events.map(|event| event.units).sum();
            u128::try_from(units).expect("never more returned than taken")
        };
        match (time - self.window_start) / window {
            0 => (sum(true), sum(false)),
            1 => (0, sum(true)),
            _ => (0, 0),
        }
    }

    /// Nothing counts, nor will it. (A sliding counter may round down to nothing and still hold
    /// some units.)
    fn is_void(&self, quota: &Quota, now: u64) -> bool {
        let window = quota.window_micros();
        match quota.algorithm() {
            Algorithm::SlidingCounter => self.window_counts(window, now) == (0, 0),
            _ => self.counting(quota, now) == 0,
        }
    }

    /// The level of a bucket in W-ths of a unit, by living through all events again.
    fn bucket_level(&self, quota: &Quota, time: u64) -> u128 {
        let mut level = 0_u128;
        let mut at = 0;
        let mut parts = quota.window_micros();
        let mut drained = |level: u128, from: u64, to: u64, quota: &Quota| {
            // Another window has other parts: a part of a unit becomes a whole one.
            let window = u128::from(quota.window_micros());
            let before = u128::from(std::mem::replace(&mut parts, quota.window_micros()));
            let level = if before == window { level } else { level.div_ceil(before) * window };
            let highest = u128::from(quota.max_level()) * window;
            level
                .min(highest)
                .saturating_sub(u128::from(to.saturating_sub(from)) * u128::from(quota.limit()))
        };
        for event in &self.events {
            level = drained(level, at, event.time, &event.quota);
            let units = event.units.unsigned_abs() * u128::from(event.quota.window_micros());
            let aged = u128::from(event.aged) * u128::from(event.quota.limit());
            let returned = units.saturating_sub(aged);
            level = if event.units < 0 { level.saturating_sub(returned) } else { level + units };
            at = event.time;
        }
        drained(level, at, time, quota)
    }

    /// A bucket that was written a moment later than now: then it is that moment now.
    fn without_skew(&self, quota: &Quota, now: u64) -> u64 {
        let is_bucket =
            matches!(quota.algorithm(), Algorithm::TokenBucket | Algorithm::LeakyBucket);
        let skewed =
            is_bucket && !self.events.is_empty() && self.last_write <= now + MAX_CLOCK_SKEW;
        if skewed { now.max(self.last_write) } else { now }
    }

    /// A stored time later than now counts as now.
    fn seen_from(&self, quota: &Quota, now: u64) -> Self {
        let mut seen = self.clone();
        if !self.is_ahead_of(quota, now) {
            return seen;
        }
        match quota.algorithm() {
            Algorithm::SlidingLog => {
                seen.events.iter_mut().for_each(|event| event.time = event.time.min(now))
            }
            // Counts of windows move with the current one, which begins now; a level as it was last
            // written.
            Algorithm::FixedWindow | Algorithm::SlidingCounter => {
                let ahead = self.window_start - now;
                seen.events.iter_mut().for_each(|event| event.time -= ahead);
                seen.window_start = now;
            }
            Algorithm::TokenBucket | Algorithm::LeakyBucket => {
                let ahead = self.last_write - now;
                seen.events.iter_mut().for_each(|event| event.time -= ahead);
            }
        }
        seen
    }

    fn is_ahead_of(&self, quota: &Quota, now: u64) -> bool {
        match quota.algorithm() {
            _ if self.events.is_empty() => false,
            Algorithm::SlidingLog => self.events.iter().any(|event| event.time > now),
            Algorithm::FixedWindow | Algorithm::SlidingCounter => self.window_start > now,
            Algorithm::TokenBucket | Algorithm::LeakyBucket => self.last_write > now,
        }
    }

    /// The first time from `now` on at which the test holds, as it does from then on.
    fn first_time(&self, now: u64, test: impl Fn(&Self, u64) -> bool) -> u64 {
        let mut step = 1;
        while !test(self, now + step) {
            step *= 2;
        }
        let (mut low, mut high) = (now, now + step);
        while low < high {
            let middle = low + (high - low) / 2;
            if test(self, middle) {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        low
    }

    /// An event of no units still is a write: a bucket has drained by this quota up to it.
    fn push(&mut self, now: u64, units: i128, quota: &Quota) {
        let windowed =
            matches!(quota.algorithm(), Algorithm::FixedWindow | Algorithm::SlidingCounter);
        let time = if windowed { self.window_start } else { now };
        if units != 0
            || matches!(quota.algorithm(), Algorithm::TokenBucket | Algorithm::LeakyBucket)
        {
            self.events.push(Event { time, units, quota: quota.clone(), aged: 0 });
        }
        self.last_write = now;
    }

    /// At a write, what no longer counts is forgotten for good, even if the clock should step back
    /// later.
    fn forget_what_is_gone(&mut self, quota: &Quota, now: u64) {
        let window = quota.window_micros();
        match quota.algorithm() {
            Algorithm::SlidingLog => self.events.retain(|event| event.time + window > now),
            Algorithm::FixedWindow => {
                self.events.retain(|event| event.time + window > now);
                if self.events.is_empty() {
                    self.window_start = now / window * window;
                }
            }
            Algorithm::SlidingCounter => {
                let start = self.window_start;
                match (now - start) / window {
                    0 => {}
                    1 => self.events.retain(|event| event.time == start),
                    _ => self.events.clear(),
                }
                self.window_start += (now - start) / window * window;
                // Nothing counts any more: aligned to the epoch again.
                if self.events.is_empty() {
                    self.window_start = now / window * window;
                }
            }
            Algorithm::TokenBucket | Algorithm::LeakyBucket => {}
        }
    }

    /// Returns units of a charge made at `charged_at` (0: unknown): the oldest first that are not
    /// older than it.
    fn give_back(&mut self, quota: &Quota, now: u64, cost: u64, charged_at: u64) {
        self.forget_what_is_gone(quota, now);
        let (window, known) = (quota.window_micros(), charged_at > 0);
        if matches!(quota.algorithm(), Algorithm::TokenBucket | Algorithm::LeakyBucket) {
            self.push(now, -i128::from(cost), quota);
            if let Some(event) = self.events.last_mut().filter(|_| known) {
                event.aged = now - charged_at.min(now);
            }
            return;
        }
        // A window's events have the beginning of their window for their time.
        let refundable = |event: &Event| match quota.algorithm() {
            _ if !known => true,
            Algorithm::SlidingLog => event.time >= charged_at && charged_at + window > now,
            // A charge of the current window, or of the one before.
            _ if event.time == self.window_start => charged_at >= self.window_start,
            _ => charged_at < self.window_start && charged_at + window >= self.window_start,
        };
        let refundable: Vec<bool> = self.events.iter().map(refundable).collect();
        let mut left = i128::from(cost);
        for (event, _) in
            self.events.iter_mut().zip(refundable).filter(|(_, refundable)| *refundable)
        {
            let taken = event.units.min(left);
            event.units -= taken;
            left -= taken;
        }
        self.events.retain(|event| event.units > 0);
    }

    /// Of more than `units`, the oldest are forgotten.
    fn keep_newest(&mut self, units: u128) {
        let mut room = i128::try_from(units).expect("a limit");
        for event in self.events.iter_mut().rev() {
            event.units = event.units.min(room);
            room -= event.units;
        }
        self.events.retain(|event| event.units > 0);
    }
}
