//! `fixed-window`: admits a request if the count of the current window plus the cost is at most L.
//!
//! Windows are aligned to the Unix epoch; `calendar_window.rs` has those of a calendar. If the clock steps back, the key gets one window that
//! starts at the step instead, so that its count stays in force for exactly one window.

use super::{Counter, Parameters};

#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct FixedWindow {
    pub(crate) start: u64,
    pub(crate) count: u64,
}

impl Counter for FixedWindow {
    #[inline]
    fn advance_to(&mut self, quota: &Parameters, now: u64) -> bool {
        let window = quota.window();
        let stepped_back = self.start > now;
        if stepped_back {
            self.start = now;
        } else if self.start + window <= now {
            *self = Self { start: now - now % window, count: 0 };
        }
        stepped_back
    }

    #[inline]
    fn remaining(&self, quota: &Parameters) -> u64 {
        quota.limit().saturating_sub(self.count)
    }

    #[inline]
    fn level(&self, _quota: &Parameters) -> u64 {
        self.count
    }

    #[inline]
    fn wait_for(&self, quota: &Parameters, now: u64, _cost: u64) -> u64 {
        self.start + quota.window() - now
    }

    #[inline]
    fn reset_after(&self, quota: &Parameters, now: u64, extra: u64) -> u64 {
        if self.count + extra == 0 { 0 } else { self.start + quota.window() - now }
    }

    #[inline]
    fn spend(&mut self, _quota: &Parameters, _now: u64, cost: u64) {
        self.count += cost;
    }

    /// Returns the units, unless the charge was made in an earlier window.
    fn refund(&mut self, _quota: &Parameters, _now: u64, cost: u64, charged_at: u64) {
        if charged_at > 0 && charged_at < self.start {
            return;
        }
        self.count = self.count.saturating_sub(cost);
    }

    #[inline]
    fn is_empty(&self) -> bool {
        self.count == 0
    }
}
