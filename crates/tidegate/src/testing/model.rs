//! The naive model: stores every event, recomputes everything, and finds waits by searching over
//! time.
//!
//! It shares no arithmetic with the algorithms: for each of them it only knows how many units count
//! at a given time.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use crate::algorithm::{Algorithm, MAX_CLOCK_SKEW};
use crate::charge::Charge;
use crate::clock::Timestamp;
use crate::decision::{Decision, Source};
use crate::quota::Quota;
use crate::store::Action;

mod holds;

/// A day in microseconds: blocks that were in force in the last one count.
const DAY: u64 = 86_400_000_000;

/// A slow, obviously correct implementation of all algorithms.
///
/// ```
/// use std::time::Duration;
/// use tidegate::testing::Model;
/// use tidegate::{Action, Charge, Clock, ManualClock, Quota};
///
/// let clock = ManualClock::new();
/// let quota = Quota::fixed_window(10, Duration::from_secs(60))?;
/// let charge = Charge::new("user123", &quota);
/// let decisions = Model::default().decide(Action::Acquire, &[charge], clock.now());
/// assert_eq!(decisions[0].remaining, 9);
/// # Ok::<(), tidegate::QuotaError>(())
/// ```
#[derive(Debug, Default)]
pub struct Model {
    logs: HashMap<(String, String), EventLog>,
    /// Blocks of each key, the oldest first, as (start, end).
    blocks: HashMap<(String, String), Vec<(u64, u64)>>,
    /// Holds of each key by id.
    pub(super) holds: HashMap<(String, String), BTreeMap<String, holds::ModelHold>>,
}

#[derive(Debug, Default, Clone)]
struct EventLog {
    /// Events in chronological order.
    events: Vec<ModelEvent>,
    last_write: u64,
    /// For `fixed-window` and `sliding-counter`: start of the window at the last write. Events of
    /// these algorithms have the start of their window as their time.
    window_start: u64,
    /// For `fixed-window`: end of that window, which a calendar keeps.
    window_end: u64,
}

#[derive(Debug, Clone)]
struct ModelEvent {
    time: u64,
    /// Spent units; negative for a refund.
    units: i128,
    /// Quota at the time of the event, by which a bucket drained up to the event.
    quota: Quota,
    /// Age of the charge that a refund returns to a bucket.
    age: u64,
}

impl Model {
    /// Returns the decisions for these charges at this time, one per charge, as
    /// [`Store::decide_all`](crate::Store::decide_all) does. The charges must be valid: the model
    /// does not check them.
    pub fn decide(
        &mut self,
        action: Action,
        charges: &[Charge<'_>],
        now: Timestamp,
    ) -> Vec<Decision> {
        let now = now.as_micros();
        for charge in charges {
            self.release_ended(charge, now);
        }
        let all_fit = charges.iter().all(|charge| {
            if self.repeated(action, charge, now).is_some() {
                return true;
            }
            if charge.quota().is_concurrency() {
                return self.in_flight(charge, now) + charge.cost() <= charge.quota().limit();
            }
            if self.block_rest(charge, now) > 0 {
                return false;
            }
            let stored = self.event_log(charge);
            let now = stored.without_skew(charge.quota(), now);
            let log = stored.as_of(charge.quota(), now);
            log.counted(charge.quota(), now) + u128::from(charge.cost())
                <= u128::from(charge.quota().burst())
        });
        charges.iter().map(|charge| self.decide_with_hold(action, charge, now, all_fit)).collect()
    }

    /// Returns whether the count or the blocks of this charge have expired: a store may have evicted it, and a
    /// decision on it is that of a new key.
    #[must_use]
    pub fn is_expired(&self, charge: &Charge<'_>, now: Timestamp) -> bool {
        let name = (charge.key().to_owned(), charge.policy().to_owned());
        if let Some((_, end)) = self.blocks.get(&name).and_then(|blocks| blocks.last()) {
            let history = if charge.quota().block_for().len() > 1 { DAY } else { 0 };
            if end + history <= now.as_micros() {
                return true;
            }
        }
        let stored = self.event_log(charge);
        let now = stored.without_skew(charge.quota(), now.as_micros());
        stored.as_of(charge.quota(), now).is_void(charge.quota(), now)
    }

    /// Returns whether a charge has a count.
    pub(super) fn has_count(&self, charge: &Charge<'_>) -> bool {
        let name = (charge.key().to_owned(), charge.policy().to_owned());
        self.logs.contains_key(&name) || self.blocks.contains_key(&name)
    }

    fn event_log(&self, charge: &Charge<'_>) -> EventLog {
        let name = (charge.key().to_owned(), charge.policy().to_owned());
        self.logs.get(&name).cloned().unwrap_or_default()
    }

    /// Returns the blocks of a key, as they count at `now`: the last one starts now at the latest.
    fn blocks(&self, charge: &Charge<'_>, now: u64) -> Vec<(u64, u64)> {
        let name = (charge.key().to_owned(), charge.policy().to_owned());
        let mut blocks = self.blocks.get(&name).cloned().unwrap_or_default();
        if let Some((start, _)) = blocks.last().copied().filter(|(start, _)| *start > now) {
            for (_, end) in &mut blocks {
                *end = (*end).min(now + end.saturating_sub(start));
            }
        }
        blocks
    }

    /// Returns the time until the end of the block of a key; 0 without one.
    fn block_rest(&self, charge: &Charge<'_>, now: u64) -> u64 {
        if charge.quota().block_for().is_empty() {
            return 0;
        }
        self.blocks(charge, now).last().map_or(0, |(_, end)| end.saturating_sub(now))
    }

    pub(super) fn decide_with_block(
        &mut self,
        action: Action,
        charge: &Charge<'_>,
        now: u64,
        all_fit: bool,
    ) -> Decision {
        let name = (charge.key().to_owned(), charge.policy().to_owned());
        let (lengths, rest) = (charge.quota().block_for(), self.block_rest(charge, now));
        let is_acquire = action == Action::Acquire;
        if action == Action::Reset {
            self.blocks.remove(&name);
        }
        if lengths.is_empty() || !matches!(action, Action::Acquire | Action::Peek) {
            return self.decide_one(action, charge, now, all_fit);
        }
        let mut blocks = self.blocks(charge, now);
        let decision = self.decide_one(action, charge, now, all_fit && rest == 0);
        let mut wait = Duration::from_micros(rest);
        if rest == 0 && (decision.allowed || !is_acquire) {
            return decision;
        }
        if rest == 0 {
            blocks.retain(|(_, end)| end + DAY > now);
            wait = lengths[blocks.len().min(lengths.len() - 1)];
            blocks.push((now, now + u64::try_from(wait.as_micros()).expect("at most a year")));
        } else if let Some(last) = blocks.last_mut() {
            last.0 = last.0.min(now);
        }
        if is_acquire {
            self.blocks.insert(name, blocks);
        }
        Decision {
            allowed: false,
            remaining: 0,
            retry_after: wait,
            reset_after: decision.reset_after.max(wait),
            delay: Duration::ZERO,
            ..decision
        }
    }

    pub(super) fn decide_one(
        &mut self,
        action: Action,
        charge: &Charge<'_>,
        now: u64,
        all_fit: bool,
    ) -> Decision {
        let (quota, cost) = (charge.quota(), charge.cost());
        let name = (charge.key().to_owned(), charge.policy().to_owned());
        let stored = self.event_log(charge);
        let now = stored.without_skew(quota, now);
        let mut log = stored.as_of(quota, now);
        let capacity = u128::from(quota.burst());
        let fits = log.counted(quota, now) + u128::from(cost) <= capacity;
        let mut delay = 0;
        let mut denied = false;
        let stepped_back = stored.is_ahead_of(quota, now);
        let written = match action {
            Action::Reset => {
                self.logs.remove(&name);
                log = EventLog::default();
                false
            }
            Action::Refund => {
                let has_units = !log.is_void(quota, now);
                if has_units {
                    log.refund(quota, now, cost, charge.charged_at().as_micros());
                }
                has_units
            }
            Action::Report => {
                denied = !fits;
                let room = u128::from(quota.max_level()).saturating_sub(log.recorded(quota, now));
                let taken = u128::from(cost).min(room);
                if taken > 0 {
                    log.drop_expired(quota, now);
                    log.push(now, i128::try_from(taken).expect("at most the maximum level"), quota);
                    if quota.count_denied() {
                        log.keep_newest(u128::from(quota.limit()));
                    }
                }
                taken > 0 || stepped_back
            }
            Action::ChargeUpTo => {
                let room = capacity.saturating_sub(log.counted(quota, now));
                let taken = u128::from(cost).min(room);
                if taken > 0 {
                    log.drop_expired(quota, now);
                    log.push(now, i128::try_from(taken).expect("no more than the burst"), quota);
                }
                taken > 0 || stepped_back
            }
            // Each is decided by other actions.
            Action::Commit | Action::Release | Action::Renew => false,
            Action::Acquire | Action::Peek => {
                denied = !fits;
                let spend = cost > 0 && ((fits && all_fit) || (denied && quota.count_denied()));
                if fits && all_fit && quota.algorithm() == Algorithm::LeakyBucket {
                    delay =
                        log.first_time(now, |log, time| log.bucket_level(quota, time) == 0) - now;
                }
                if spend {
                    log.drop_expired(quota, now);
                    log.push(now, i128::from(cost), quota);
                    if quota.count_denied() {
                        log.keep_newest(u128::from(quota.limit()));
                    }
                }
                action == Action::Acquire && (spend || stepped_back)
            }
        };
        if written {
            let mut stored = log.clone();
            stored.drop_expired(quota, now);
            stored.push(now, 0, quota);
            self.logs.insert(name.clone(), stored);
        }
        // After a report, `retry_after` is the wait for one unit.
        let wanted = if action == Action::Report { 1 } else { u128::from(cost) };
        let admits = |log: &EventLog, time| log.counted(quota, time) + wanted <= capacity;
        let retry_after = if denied { log.first_time(now, admits) - now } else { 0 };
        let reset_after = log.first_time(now, |log, time| log.counted(quota, time) == 0) - now;
        let remaining = capacity.saturating_sub(log.counted(quota, now));
        if written && log.is_void(quota, now) {
            self.logs.remove(&name);
        }
        Decision {
            allowed: !denied,
            limit: quota.burst(),
            remaining: u64::try_from(remaining).expect("no more than the burst"),
            retry_after: Duration::from_micros(retry_after),
            reset_after: Duration::from_micros(reset_after),
            delay: Duration::from_micros(delay),
            source: Source::Store,
            hold: None,
        }
    }
}

impl EventLog {
    /// Returns the units that count at `time`, rounded up.
    fn counted(&self, quota: &Quota, time: u64) -> u128 {
        let window = quota.window_micros();
        let sum = |counts: &dyn Fn(&ModelEvent) -> bool| {
            let units: i128 =
                self.events.iter().filter(|event| counts(event)).map(|event| event.units).sum();
            u128::try_from(units).expect("refunds never exceed charges")
        };
        match quota.algorithm() {
            Algorithm::FixedWindow if quota.calendar().is_some() => {
                sum(&|_| self.window_end > time)
            }
            Algorithm::SlidingLog | Algorithm::FixedWindow | Algorithm::Concurrency => {
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

    /// Returns the units recorded at `time`, without those of the previous window.
    fn recorded(&self, quota: &Quota, time: u64) -> u128 {
        let window = quota.window_micros();
        match quota.algorithm() {
            Algorithm::SlidingCounter => self.window_counts(window, time).0,
            _ => self.counted(quota, time),
        }
    }

    /// Returns the units of a `sliding-counter` in the window at `time` and in the previous one. At
    /// a write, all events are in one of two windows, and stay there when the window of the policy
    /// changes.
    fn window_counts(&self, window: u64, time: u64) -> (u128, u128) {
        let sum = |is_current: bool| {
            let events =
                self.events.iter().filter(|event| (event.time == self.window_start) == is_current);
            let units: i128 = events.map(|event| event.units).sum();
            u128::try_from(units).expect("refunds never exceed charges")
        };
        match (time - self.window_start) / window {
            0 => (sum(true), sum(false)),
            1 => (0, sum(true)),
            _ => (0, 0),
        }
    }

    /// Returns whether nothing counts, now or later. A sliding counter can round down to 0 and
    /// still hold units.
    fn is_void(&self, quota: &Quota, now: u64) -> bool {
        let window = quota.window_micros();
        match quota.algorithm() {
            Algorithm::SlidingCounter => self.window_counts(window, now) == (0, 0),
            _ => self.counted(quota, now) == 0,
        }
    }

    /// Returns the level of a bucket in W-ths of a unit, by replaying all events.
    fn bucket_level(&self, quota: &Quota, time: u64) -> u128 {
        let mut level = 0_u128;
        let mut at = 0;
        let mut parts = quota.window_micros();
        let mut drain = |level: u128, from: u64, to: u64, quota: &Quota| {
            // A changed window has other parts: a fraction is rounded up to a whole unit.
            let window = u128::from(quota.window_micros());
            let before = u128::from(std::mem::replace(&mut parts, quota.window_micros()));
            let level = if before == window { level } else { level.div_ceil(before) * window };
            let max_level = u128::from(quota.max_level()) * window;
            level
                .min(max_level)
                .saturating_sub(u128::from(to.saturating_sub(from)) * u128::from(quota.limit()))
        };
        for event in &self.events {
            level = drain(level, at, event.time, &event.quota);
            let units = event.units.unsigned_abs() * u128::from(event.quota.window_micros());
            let drained = u128::from(event.age) * u128::from(event.quota.limit());
            let returned = units.saturating_sub(drained);
            level = if event.units < 0 { level.saturating_sub(returned) } else { level + units };
            at = event.time;
        }
        drain(level, at, time, quota)
    }

    /// Returns `now`, or the time of the last write of a bucket if it is later by no more than the
    /// clock skew.
    fn without_skew(&self, quota: &Quota, now: u64) -> u64 {
        let is_bucket =
            matches!(quota.algorithm(), Algorithm::TokenBucket | Algorithm::LeakyBucket);
        let is_skewed =
            is_bucket && !self.events.is_empty() && self.last_write <= now + MAX_CLOCK_SKEW;
        if is_skewed { now.max(self.last_write) } else { now }
    }

    /// Returns the events as they count at `now`: stored times later than `now` count as `now`.
    fn as_of(&self, quota: &Quota, now: u64) -> Self {
        let mut log = self.clone();
        if !self.is_ahead_of(quota, now) {
            return log;
        }
        match quota.algorithm() {
            Algorithm::SlidingLog | Algorithm::Concurrency => {
                log.events.iter_mut().for_each(|event| event.time = event.time.min(now));
            }
            // The current window starts now, and the previous one moves with it.
            Algorithm::FixedWindow | Algorithm::SlidingCounter => {
                let ahead = self.window_start - now;
                log.events.iter_mut().for_each(|event| event.time -= ahead);
                log.window_start = now;
                log.window_end = log.window_end.saturating_sub(ahead);
            }
            Algorithm::TokenBucket | Algorithm::LeakyBucket => {
                let ahead = self.last_write - now;
                log.events.iter_mut().for_each(|event| event.time -= ahead);
            }
        }
        log
    }

    fn is_ahead_of(&self, quota: &Quota, now: u64) -> bool {
        match quota.algorithm() {
            _ if self.events.is_empty() => false,
            Algorithm::SlidingLog | Algorithm::Concurrency => {
                self.events.iter().any(|event| event.time > now)
            }
            Algorithm::FixedWindow | Algorithm::SlidingCounter => self.window_start > now,
            Algorithm::TokenBucket | Algorithm::LeakyBucket => self.last_write > now,
        }
    }

    /// Returns the first time from `now` on at which the test holds. It must hold ever after.
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

    /// Adds an event. Even an event of 0 units is a write: up to it, a bucket drains by its quota.
    fn push(&mut self, now: u64, units: i128, quota: &Quota) {
        let windowed =
            matches!(quota.algorithm(), Algorithm::FixedWindow | Algorithm::SlidingCounter);
        let time = if windowed { self.window_start } else { now };
        if units != 0
            || matches!(quota.algorithm(), Algorithm::TokenBucket | Algorithm::LeakyBucket)
        {
            self.events.push(ModelEvent { time, units, quota: quota.clone(), age: 0 });
        }
        self.last_write = now;
    }

    /// Drops expired events at a write, so that they do not return if the clock steps back.
    fn drop_expired(&mut self, quota: &Quota, now: u64) {
        let window = quota.window_micros();
        match quota.algorithm() {
            Algorithm::SlidingLog => self.events.retain(|event| event.time + window > now),
            Algorithm::FixedWindow if quota.calendar().is_some() => {
                let end = self.window_end;
                self.events.retain(|_| end > now);
                if self.events.is_empty()
                    && let Some(calendar) = quota.calendar()
                {
                    (self.window_start, self.window_end) = calendar.span_at(now);
                }
            }
            Algorithm::FixedWindow => {
                self.events.retain(|event| event.time + window > now);
                if self.events.is_empty() {
                    self.window_start = now / window * window;
                }
                self.window_end = self.window_start + window;
            }
            Algorithm::SlidingCounter => {
                let start = self.window_start;
                match (now - start) / window {
                    0 => {}
                    1 => self.events.retain(|event| event.time == start),
                    _ => self.events.clear(),
                }
                self.window_start += (now - start) / window * window;
                // Nothing counts any more: align the window to the epoch again.
                if self.events.is_empty() {
                    self.window_start = now / window * window;
                }
            }
            Algorithm::TokenBucket | Algorithm::LeakyBucket | Algorithm::Concurrency => {}
        }
    }

    /// Returns units of a charge made at `charged_at` (0: unknown): the oldest units that are not
    /// older than the charge.
    fn refund(&mut self, quota: &Quota, now: u64, cost: u64, charged_at: u64) {
        self.drop_expired(quota, now);
        let (window, is_known) = (quota.window_micros(), charged_at > 0);
        if matches!(quota.algorithm(), Algorithm::TokenBucket | Algorithm::LeakyBucket) {
            self.push(now, -i128::from(cost), quota);
            if let Some(event) = self.events.last_mut().filter(|_| is_known) {
                event.age = now - charged_at.min(now);
            }
            return;
        }
        // In a window algorithm, the time of an event is the start of its window.
        let is_refundable = |event: &ModelEvent| match quota.algorithm() {
            _ if !is_known => true,
            Algorithm::SlidingLog => event.time >= charged_at && charged_at + window > now,
            // The charge was made in the current window, or in the previous one.
            _ if event.time == self.window_start => charged_at >= self.window_start,
            _ => charged_at < self.window_start && charged_at + window >= self.window_start,
        };
        let refundable: Vec<bool> = self.events.iter().map(is_refundable).collect();
        let mut left = i128::from(cost);
        for (event, _) in
            self.events.iter_mut().zip(refundable).filter(|(_, refundable)| *refundable)
        {
            let returned = event.units.min(left);
            event.units -= returned;
            left -= returned;
        }
        self.events.retain(|event| event.units > 0);
    }

    /// Drops the oldest units beyond `units`.
    fn keep_newest(&mut self, units: u128) {
        let mut room = i128::try_from(units).expect("a limit");
        for event in self.events.iter_mut().rev() {
            event.units = event.units.min(room);
            room -= event.units;
        }
        self.events.retain(|event| event.units > 0);
    }
}
