//! `sliding-counter`: admits a request if cur + floor(prev × (W − e)/W) + c ≤ L, where windows are
//! aligned to the Unix epoch and e is the elapsed time of the current window.
//!
//! If the clock steps back, the windows of the key start at the step, with both counts in full, and
//! keep that offset until nothing counts any more. Aligning them earlier would admit more.

use super::{Counter, Parameters, mul_div_ceil, mul_div_rem};

#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct SlidingCounter {
    /// Start of the current window.
    pub(crate) start: u64,
    pub(crate) current: u64,
    pub(crate) previous: u64,
    /// Elapsed time of the current window, as of the last `advance_to`.
    pub(crate) elapsed: u64,
}

impl SlidingCounter {
    /// Creates a counter that a script has already advanced to the present. The count of the
    /// previous window is unknown.
    #[cfg(feature = "redis")]
    pub(super) fn in_window(current: u64, elapsed: u64) -> Self {
        Self { start: 0, current, previous: 0, elapsed }
    }

    /// Returns the units of the previous window that still count.
    #[inline]
    fn carried_over(&self, window: u64) -> u64 {
        mul_div_rem(self.previous, window - self.elapsed, window).0
    }
}

/// Returns the elapsed time of a window at which at most `room` of the `previous` units still
/// count.
fn elapsed_until(previous: u64, room: u64, window: u64) -> u64 {
    if previous <= room {
        return 0;
    }
    // floor(previous × left / window) ≤ room  ⇔  left < (room + 1) × window / previous
    window - (mul_div_ceil(room + 1, window, previous) - 1)
}

impl Counter for SlidingCounter {
    #[inline]
    fn advance_to(&mut self, quota: &Parameters, now: u64) -> bool {
        let window = quota.window();
        let stepped_back = self.start > now;
        if stepped_back {
            self.start = now;
        } else if self.start + 2 * window <= now {
            (self.previous, self.current) = (0, 0);
        } else if self.start + window <= now {
            (self.previous, self.current) = (self.current, 0);
            self.start += window;
        }
        if self.is_empty() {
            self.start = now - now % window;
        }
        self.elapsed = now - self.start;
        stepped_back
    }

    #[inline]
    fn remaining(&self, quota: &Parameters) -> u64 {
        quota.limit().saturating_sub(self.current + self.carried_over(quota.window()))
    }

    #[inline]
    fn level(&self, _quota: &Parameters) -> u64 {
        self.current
    }

    fn is_overdrawn(&self, quota: &Parameters) -> bool {
        self.current + self.carried_over(quota.window()) > quota.limit()
    }

    #[inline]
    fn wait_for(&self, quota: &Parameters, _now: u64, cost: u64) -> u64 {
        let window = quota.window();
        match quota.limit().checked_sub(self.current + cost) {
            Some(room) => elapsed_until(self.previous, room, window) - self.elapsed,
            // In the next window, the units of the current one become the previous ones.
            None => {
                window - self.elapsed + elapsed_until(self.current, quota.limit() - cost, window)
            }
        }
    }

    #[inline]
    fn reset_after(&self, quota: &Parameters, _now: u64, extra: u64) -> u64 {
        let window = quota.window();
        match self.current + extra {
            0 => elapsed_until(self.previous, 0, window).saturating_sub(self.elapsed),
            current => window - self.elapsed + elapsed_until(current, 0, window),
        }
    }

    #[inline]
    fn spend(&mut self, _quota: &Parameters, _now: u64, cost: u64) {
        self.current += cost;
    }

    fn refund(&mut self, quota: &Parameters, _now: u64, cost: u64, charged_at: u64) {
        if charged_at == 0 {
            let from_previous = cost.min(self.previous);
            self.previous -= from_previous;
            self.current = self.current.saturating_sub(cost - from_previous);
        } else if charged_at >= self.start {
            self.current = self.current.saturating_sub(cost);
        } else if charged_at + quota.window() >= self.start {
            self.previous = self.previous.saturating_sub(cost);
        }
    }

    #[inline]
    fn is_empty(&self) -> bool {
        self.current == 0 && self.previous == 0
    }
}
