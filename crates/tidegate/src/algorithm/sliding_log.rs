//! `sliding-log`: admits when the units admitted in (now − W, now], plus the cost, are at most L.
//! Exact.
//!
//! An entry holds its time and the running total of all units up to it. The units between two
//! entries are then a subtraction and every question a binary search: a cost of 10,000 is one entry
//! and a few steps.

use std::collections::VecDeque;

use super::{Count, Kept, Kind, State};
use crate::quota::Quota;

#[derive(Debug, Default)]
pub(crate) struct Log {
    /// In the order of time, and of totals.
    entries: VecDeque<Entry>,
    /// The running total before the first entry.
    base: u64,
    /// Where the window begins in `entries`, as of the last `settle`.
    first: usize,
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    time: u64,
    total: u64,
}

impl Log {
    /// The running total before the window.
    fn settled_base(&self) -> u64 {
        self.first.checked_sub(1).map_or(self.base, |before| self.entries[before].total)
    }

    fn last_total(&self) -> u64 {
        self.entries.back().map_or(self.base, |entry| entry.total)
    }

    fn units(&self) -> u64 {
        self.last_total() - self.settled_base()
    }

    /// The first entry from `from` on for which this does not hold, as `partition_point` would say.
    /// It is mostly close: so steps that double, before the halving.
    #[inline]
    fn first_without(&self, from: usize, holds: impl Fn(&Entry) -> bool) -> usize {
        let (mut start, mut step) = (from, 1);
        while self.entries.get(start + step - 1).is_some_and(&holds) {
            start += step;
            step *= 2;
        }
        let mut end = self.entries.len().min(start + step - 1);
        while start < end {
            let middle = start.midpoint(end);
            if holds(&self.entries[middle]) {
                start = middle + 1;
            } else {
                end = middle;
            }
        }
        start
    }

    /// Drops what has left the window; what lies in the future becomes one entry at `now`.
    fn write_down(&mut self, now: u64) {
        self.base = self.settled_base();
        self.entries.drain(..self.first);
        self.first = 0;
        if self.entries.back().is_some_and(|entry| entry.time > now) {
            let total = self.last_total();
            let later = self.entries.partition_point(|entry| entry.time <= now);
            self.entries.truncate(later);
            self.push(now, total);
        }
    }

    fn push(&mut self, time: u64, total: u64) {
        match self.entries.back_mut() {
            Some(last) if last.time == time => last.total = total,
            _ => self.entries.push_back(Entry { time, total }),
        }
    }

    /// How long until the oldest `units` have left the window.
    fn wait_until_gone(&self, quota: &Quota, now: u64, units: u64) -> u64 {
        if units > self.units() {
            return quota.window_micros();
        }
        let target = self.settled_base() + units;
        let last_to_leave = self.first_without(self.first, |entry| entry.total < target);
        self.entries[last_to_leave].time.min(now) + quota.window_micros() - now
    }

    /// Removes up to `cost` units from the first entry on that is not older than `since`.
    fn remove(&mut self, since: u64, cost: u64) {
        let start = self.entries.partition_point(|entry| entry.time < since);
        let before = start.checked_sub(1).map_or(self.base, |at| self.entries[at].total);
        let removed = cost.min(self.last_total() - before);
        let end = self.entries.partition_point(|entry| entry.total <= before + removed);
        self.entries.drain(start..end);
        // The totals on one side have to follow: on the shorter one.
        if start < self.entries.len() - start {
            self.base += removed;
            self.entries.range_mut(..start).for_each(|entry| entry.total += removed);
        } else {
            self.entries.range_mut(start..).for_each(|entry| entry.total -= removed);
        }
    }

    /// The memory follows what is in the window, not what once was.
    fn shrink(&mut self) {
        let len = self.entries.len();
        if self.entries.capacity() > 4 * len.max(4) {
            self.entries.shrink_to(2 * len);
        }
    }
}

impl Count for Log {
    fn settle(&mut self, quota: &Quota, now: u64) -> bool {
        let window = quota.window_micros();
        let gone = |entry: &Entry| entry.time + window <= now;
        self.first = self.first_without(0, gone);
        self.entries.back().is_some_and(|entry| entry.time > now)
    }

    fn remaining(&self, quota: &Quota) -> u64 {
        quota.limit().saturating_sub(self.units())
    }

    fn level(&self) -> u64 {
        self.units()
    }

    fn wait_for(&self, quota: &Quota, now: u64, cost: u64) -> u64 {
        self.wait_until_gone(quota, now, (self.units() + cost).saturating_sub(quota.limit()))
    }

    /// If this denial counts as well, its own units are the newest, and have to leave last.
    fn retry_after(&self, quota: &Quota, now: u64, cost: u64) -> u64 {
        let counted = if quota.count_denied() { cost } else { 0 };
        self.wait_until_gone(quota, now, self.units() + counted + cost - quota.limit())
    }

    fn reset_after(&self, quota: &Quota, now: u64, extra: u64) -> u64 {
        if extra > 0 {
            return quota.window_micros();
        }
        match self.entries.back() {
            Some(newest) if self.units() > 0 => newest.time.min(now) + quota.window_micros() - now,
            _ => 0,
        }
    }

    fn spend(&mut self, quota: &Quota, now: u64, cost: u64) {
        self.write_down(now);
        if cost > 0 {
            self.push(now, self.last_total() + cost);
            // Only denials that count get here with more than the limit. The newest L units say all
            // that matters.
            if quota.count_denied() && self.units() > quota.limit() {
                self.base = self.last_total() - quota.limit();
                let base = self.base;
                let surplus = self.entries.partition_point(|entry| entry.total <= base);
                self.entries.drain(..surplus);
            }
        }
        self.shrink();
    }

    fn refund(&mut self, quota: &Quota, now: u64, cost: u64, charged_at: u64) {
        self.write_down(now);
        if charged_at == 0 || charged_at + quota.window_micros() > now {
            self.remove(charged_at, cost);
        }
        self.shrink();
    }

    fn is_empty(&self) -> bool {
        self.units() == 0
    }
}

impl Kept for Log {
    const KIND: Kind = Kind::Log;

    fn load(state: State, logs: &mut Logs) -> Self {
        logs.take(place(state))
    }

    #[inline]
    fn keep(self, quota: &Quota, before: Option<State>, logs: &mut Logs) -> State {
        let newest = self.entries.back().map_or(0, |entry| entry.time);
        let place = before.map_or_else(|| logs.place(), place);
        logs.put(place, self);
        State::new(Self::KIND, newest, u64::from(place), 0, quota)
    }

    fn put_back(self, state: State, logs: &mut Logs) {
        logs.put(place(state), self);
    }
}

/// Where the log of this state stands.
fn place(state: State) -> u32 {
    u32::try_from(state.units()).unwrap_or(u32::MAX)
}

/// The logs of many keys, each in a place of its own. Nothing is allocated while there is none.
#[derive(Debug, Default)]
pub(crate) struct Logs(Option<Box<Places>>);

#[derive(Debug, Default)]
struct Places {
    logs: Vec<Log>,
    free: Vec<u32>,
}

impl Logs {
    /// The key of this state is forgotten.
    pub(crate) fn forget(&mut self, state: State) {
        if state.is_of(Kind::Log)
            && let Some(places) = &mut self.0
        {
            places.logs[place(state) as usize] = Log::default();
            places.free.push(place(state));
            if places.free.len() == places.logs.len() {
                self.0 = None;
            }
        }
    }

    /// Whether most places stand empty, so that it is worth the trouble to [move](Self::moved) the
    /// others together.
    pub(crate) fn is_sparse(&self) -> bool {
        self.0.as_ref().is_some_and(|places| places.free.len() > places.logs.len() / 2 + 8)
    }

    /// Moves the log of this state to another set of logs, and tells the state from then on.
    pub(crate) fn moved(&mut self, state: State, to: &mut Logs) -> State {
        if !state.is_of(Kind::Log) {
            return state;
        }
        let place = to.place();
        to.put(place, self.take(self::place(state)));
        state.with_units(u64::from(place))
    }

    fn place(&mut self) -> u32 {
        let places = self.0.get_or_insert_default();
        places.free.pop().unwrap_or_else(|| {
            places.logs.push(Log::default());
            // No shard has room for so many.
            u32::try_from(places.logs.len() - 1).unwrap_or(u32::MAX)
        })
    }

    fn take(&mut self, place: u32) -> Log {
        self.0
            .as_mut()
            .map_or_else(Log::default, |places| std::mem::take(&mut places.logs[place as usize]))
    }

    fn put(&mut self, place: u32, log: Log) {
        if let Some(places) = &mut self.0 {
            places.logs[place as usize] = log;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_search_by_doubling_steps_finds_what_a_partition_point_is() {
        for len in 0..70_u64 {
            let log = Log {
                entries: (0..len).map(|time| Entry { time, total: time }).collect(),
                ..Log::default()
            };
            for bound in 0..=len + 1 {
                let holds = |entry: &Entry| entry.time < bound;
                for from in 0..=log.entries.partition_point(holds) {
                    assert_eq!(
                        log.first_without(from, holds),
                        log.entries.partition_point(holds),
                        "{len} {bound} {from}"
                    );
                }
            }
        }
    }
}
