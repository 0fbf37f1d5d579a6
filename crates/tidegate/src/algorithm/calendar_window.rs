//! `fixed-window` in the periods of a calendar: a count stays in force until the end of its period,
//! even if the calendar changes.
//!
//! If the clock steps back, the key gets one window that starts at the step, as long as its period.

use super::{Counter, FixedWindow, Parameters};

#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct CalendarWindow {
    pub(crate) inner: FixedWindow,
    /// Length of the window.
    pub(crate) length: u64,
}

impl CalendarWindow {
    /// Returns the time until the window ends.
    fn rest(&self, now: u64) -> u64 {
        self.inner.start + self.length - now
    }
}

impl Counter for CalendarWindow {
    fn advance_to(&mut self, quota: &Parameters, now: u64) -> bool {
        let stepped_back = self.inner.start > now;
        if stepped_back {
            self.inner.start = now;
        } else if self.inner.start + self.length <= now {
            let inner = FixedWindow { start: quota.period_start(), count: 0 };
            *self = Self { inner, length: quota.window() };
        }
        stepped_back
    }

    fn remaining(&self, quota: &Parameters) -> u64 {
        self.inner.remaining(quota)
    }

    fn level(&self, quota: &Parameters) -> u64 {
        self.inner.level(quota)
    }

    fn wait_for(&self, _quota: &Parameters, now: u64, _cost: u64) -> u64 {
        self.rest(now)
    }

    fn reset_after(&self, _quota: &Parameters, now: u64, extra: u64) -> u64 {
        if self.inner.count + extra == 0 { 0 } else { self.rest(now) }
    }

    fn spend(&mut self, quota: &Parameters, now: u64, cost: u64) {
        self.inner.spend(quota, now, cost);
    }

    fn refund(&mut self, quota: &Parameters, now: u64, cost: u64, charged_at: u64) {
        self.inner.refund(quota, now, cost, charged_at);
    }

    fn is_empty(&self) -> bool {
        self.inner.is_empty()
    }
}
