//! `sliding-log`: admits when the units admitted in (now − W, now], plus the cost, are at most L. Exact.
//!
//! An entry holds its time and the running total of all units up to it. The units between two entries are then a
//! subtraction and every question a binary search: a cost of 10,000 is one entry and a few steps.

use std::collections::VecDeque;

use super::Count;
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
        self.first = match self.entries.front() {
            Some(oldest) if gone(oldest) => self.entries.partition_point(gone),
            _ => 0,
        };
        self.entries.back().is_some_and(|entry| entry.time > now)
    }

    fn remaining(&self, quota: &Quota) -> u64 {
        quota.limit().saturating_sub(self.units())
    }

    fn retry_after(&self, quota: &Quota, now: u64, cost: u64) -> u64 {
        // If this denial counts as well, its own units are the newest, and have to leave last.
        let counted = if quota.count_denied() { cost } else { 0 };
        let must_leave = self.units() + counted + cost - quota.limit();
        if must_leave > self.units() {
            return quota.window_micros();
        }
        let target = self.settled_base() + must_leave;
        let last_to_leave = self.entries.partition_point(|entry| entry.total < target);
        self.entries[last_to_leave].time.min(now) + quota.window_micros() - now
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
            // Only denials that count get here with more than the limit. The newest L units say all that matters.
            if quota.count_denied() && self.units() > quota.limit() {
                self.base = self.last_total() - quota.limit();
                let base = self.base;
                let surplus = self.entries.partition_point(|entry| entry.total <= base);
                self.entries.drain(..surplus);
            }
        }
        self.shrink();
    }

    fn refund(&mut self, _quota: &Quota, now: u64, cost: u64) {
        self.write_down(now);
        let target = self.base + self.units().saturating_sub(cost);
        if target == self.base {
            self.entries.clear();
        } else {
            let newest = self.entries.partition_point(|entry| entry.total < target);
            self.entries[newest].total = target;
            self.entries.truncate(newest + 1);
        }
        self.shrink();
    }

    fn is_empty(&self) -> bool {
        self.units() == 0
    }

    fn expires_at(&self, quota: &Quota) -> u64 {
        self.entries.back().map_or(0, |newest| newest.time + quota.window_micros())
    }
}
