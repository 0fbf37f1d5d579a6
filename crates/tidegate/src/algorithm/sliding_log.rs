//! `sliding-log`: admits a request if the units admitted in (now − W, now] plus the cost are at
//! most L. Exact.
//!
//! An entry holds its time and the running total of all units up to it. The units between two
//! entries are one subtraction, every query is a binary search, and a cost of 10,000 is one entry.

use std::collections::VecDeque;

use super::{Counter, Parameters};

#[derive(Debug, Default)]
pub(crate) struct SlidingLog {
    /// Entries in ascending order of time and of totals.
    entries: VecDeque<LogEntry>,
    /// Running total before the first entry.
    base: u64,
    /// Index of the first entry in the window, as of the last `advance_to`.
    first: usize,
}

#[derive(Debug, Clone, Copy)]
struct LogEntry {
    time: u64,
    total: u64,
}

/// The number of entries that a log without room has to grow by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LogGrowth {
    /// Enough for now, where memory is scarce.
    pub(crate) least: usize,
    /// Rarely enough that the copies of a log cost little.
    pub(crate) best: usize,
}

/// Number of entries of the first allocation.
const MIN_GROWTH: usize = 4;

impl SlidingLog {
    /// Returns the time of the newest entry, or 0 for an empty log.
    #[inline]
    pub(crate) fn newest_time(&self) -> u64 {
        self.entries.back().map_or(0, |entry| entry.time)
    }

    /// Returns the number of entries that the allocated memory has room for.
    #[inline]
    pub(crate) fn capacity(&self) -> usize {
        self.entries.capacity()
    }

    /// Returns by how much to grow before units are spent now, if there is no room for an entry. A
    /// log doubles, but not beyond the entries that its limit needs. The log must have been
    /// advanced to `now`, because its older entries make room.
    #[inline]
    pub(crate) fn growth_for_spending(&self, quota: &Parameters, now: u64) -> Option<LogGrowth> {
        let len = self.entries.len();
        if self.first > 0 || len < self.capacity() {
            return None;
        }
        let is_merged = self.entries.back().is_some_and(|entry| entry.time == now);
        if is_merged { None } else { Some(growth(len, quota)) }
    }

    /// Allocates memory for more entries.
    pub(crate) fn reserve(&mut self, entries: usize) {
        self.entries.reserve_exact(entries);
    }

    /// Returns the running total before the window.
    fn window_base(&self) -> u64 {
        self.first.checked_sub(1).map_or(self.base, |before| self.entries[before].total)
    }

    fn last_total(&self) -> u64 {
        self.entries.back().map_or(self.base, |entry| entry.total)
    }

    fn units(&self) -> u64 {
        self.last_total() - self.window_base()
    }

    /// Returns the partition point of `holds`, searching from `from` on. The result is usually
    /// close to `from`, so this is a galloping search: steps that double, then a binary search.
    #[inline]
    fn partition_point_from(&self, from: usize, holds: impl Fn(&LogEntry) -> bool) -> usize {
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

    /// Drops entries that have left the window, and merges entries of the future into one at `now`.
    fn normalize(&mut self, now: u64) {
        self.base = self.window_base();
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
            _ => self.entries.push_back(LogEntry { time, total }),
        }
    }

    /// Returns the time until the oldest `units` have left the window.
    fn wait_until_gone(&self, quota: &Parameters, now: u64, units: u64) -> u64 {
        if units > self.units() {
            return quota.window();
        }
        let target = self.window_base() + units;
        let last_to_leave = self.partition_point_from(self.first, |entry| entry.total < target);
        self.entries[last_to_leave].time.min(now) + quota.window() - now
    }

    /// Removes up to `cost` units, starting at the first entry that is not older than `since`.
    fn remove(&mut self, since: u64, cost: u64) {
        let start = self.entries.partition_point(|entry| entry.time < since);
        let before = start.checked_sub(1).map_or(self.base, |at| self.entries[at].total);
        let removed = cost.min(self.last_total() - before);
        let end = self.entries.partition_point(|entry| entry.total <= before + removed);
        self.entries.drain(start..end);
        // Adjust the running totals on the shorter side of the gap.
        if start < self.entries.len() - start {
            self.base += removed;
            self.entries.range_mut(..start).for_each(|entry| entry.total += removed);
        } else {
            self.entries.range_mut(start..).for_each(|entry| entry.total -= removed);
        }
    }

    /// Releases memory that the entries in the window no longer need.
    fn shrink(&mut self) {
        let len = self.entries.len();
        if self.entries.capacity() > 4 * len.max(4) {
            self.entries.shrink_to(2 * len);
        }
    }
}

#[cold]
fn growth(len: usize, quota: &Parameters) -> LogGrowth {
    let limit = usize::try_from(quota.limit()).unwrap_or(usize::MAX);
    let best = len.min(limit.saturating_sub(len)).max(MIN_GROWTH);
    LogGrowth { least: best.min(4 * MIN_GROWTH + len / 64), best }
}

impl Counter for SlidingLog {
    fn advance_to(&mut self, quota: &Parameters, now: u64) -> bool {
        let window = quota.window();
        let has_left = |entry: &LogEntry| entry.time + window <= now;
        self.first = self.partition_point_from(0, has_left);
        self.entries.back().is_some_and(|entry| entry.time > now)
    }

    fn remaining(&self, quota: &Parameters) -> u64 {
        quota.limit().saturating_sub(self.units())
    }

    fn level(&self, _quota: &Parameters) -> u64 {
        self.units()
    }

    fn wait_for(&self, quota: &Parameters, now: u64, cost: u64) -> u64 {
        self.wait_until_gone(quota, now, (self.units() + cost).saturating_sub(quota.limit()))
    }

    /// A denial that counts adds its own units, which are the newest and leave last.
    fn retry_after(&self, quota: &Parameters, now: u64, cost: u64) -> u64 {
        let counted = if quota.count_denied() { cost } else { 0 };
        self.wait_until_gone(quota, now, self.units() + counted + cost - quota.limit())
    }

    fn reset_after(&self, quota: &Parameters, now: u64, extra: u64) -> u64 {
        if extra > 0 {
            return quota.window();
        }
        match self.entries.back() {
            Some(newest) if self.units() > 0 => newest.time.min(now) + quota.window() - now,
            _ => 0,
        }
    }

    fn spend(&mut self, quota: &Parameters, now: u64, cost: u64) {
        self.normalize(now);
        if cost > 0 {
            self.push(now, self.last_total() + cost);
            // Only counted denials exceed the limit here, and only the newest L units matter.
            if quota.count_denied() && self.units() > quota.limit() {
                self.base = self.last_total() - quota.limit();
                let base = self.base;
                let surplus = self.entries.partition_point(|entry| entry.total <= base);
                self.entries.drain(..surplus);
            }
        }
        self.shrink();
    }

    fn refund(&mut self, quota: &Parameters, now: u64, cost: u64, charged_at: u64) {
        self.normalize(now);
        if charged_at == 0 || charged_at + quota.window() > now {
            self.remove(charged_at, cost);
        }
        self.shrink();
    }

    fn is_empty(&self) -> bool {
        self.units() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn galloping_search_finds_the_partition_point() {
        for len in 0..70_u64 {
            let log = SlidingLog {
                entries: (0..len).map(|time| LogEntry { time, total: time }).collect(),
                ..SlidingLog::default()
            };
            for bound in 0..=len + 1 {
                let holds = |entry: &LogEntry| entry.time < bound;
                for from in 0..=log.entries.partition_point(holds) {
                    assert_eq!(
                        log.partition_point_from(from, holds),
                        log.entries.partition_point(holds),
                        "{len} {bound} {from}"
                    );
                }
            }
        }
    }
}
