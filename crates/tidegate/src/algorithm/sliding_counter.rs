//! `sliding-counter`: admits when cur + floor(prev × (W − e)/W) + c ≤ L, where windows are aligned
//! to the epoch and e is how far the present one has come.
//!
//! Only after a clock has stepped back are a key's windows not aligned: they begin at the step,
//! with both counts in full, and keep that rhythm until nothing counts any more. Any other rhythm
//! would let more through.

use super::{Count, Kept, Kind, Logs, State, mul_div_ceil, mul_div_rem};
use crate::quota::Quota;

#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Counter {
    /// When the current window began.
    start: u64,
    current: u64,
    previous: u64,
    /// How far the window has come, as of the last `settle`.
    elapsed: u64,
}

impl Counter {
    /// One that was settled elsewhere, in a script; what is left of the previous window is not
    /// known.
    #[cfg(feature = "redis")]
    pub(super) fn in_window(current: u64, elapsed: u64) -> Self {
        Self { start: 0, current, previous: 0, elapsed }
    }

    #[cfg(all(test, feature = "redis"))]
    pub(super) fn current_and_elapsed(&self) -> (u64, u64) {
        (self.current, self.elapsed)
    }

    /// What still counts of the previous window.
    #[inline]
    fn carried(&self, window: u64) -> u64 {
        mul_div_rem(self.previous, window - self.elapsed, window).0
    }
}

/// How far a window must have come until at most `room` of the `previous` units still count.
fn elapsed_until(previous: u64, room: u64, window: u64) -> u64 {
    if previous <= room {
        return 0;
    }
    // floor(previous × left / window) ≤ room  ⇔  left < (room + 1) × window / previous
    window - (mul_div_ceil(room + 1, window, previous) - 1)
}

impl Count for Counter {
    #[inline]
    fn settle(&mut self, quota: &Quota, now: u64) -> bool {
        let window = quota.window_micros();
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
    fn remaining(&self, quota: &Quota) -> u64 {
        quota.limit().saturating_sub(self.current + self.carried(quota.window_micros()))
    }

    #[inline]
    fn level(&self) -> u64 {
        self.current
    }

    fn is_overdrawn(&self, quota: &Quota) -> bool {
        self.current + self.carried(quota.window_micros()) > quota.limit()
    }

    #[inline]
    fn wait_for(&self, quota: &Quota, _now: u64, cost: u64) -> u64 {
        let window = quota.window_micros();
        match quota.limit().checked_sub(self.current + cost) {
            Some(room) => elapsed_until(self.previous, room, window) - self.elapsed,
            // Not before the next window, in which what is current now is the previous.
            None => {
                window - self.elapsed + elapsed_until(self.current, quota.limit() - cost, window)
            }
        }
    }

    #[inline]
    fn reset_after(&self, quota: &Quota, _now: u64, extra: u64) -> u64 {
        let window = quota.window_micros();
        match self.current + extra {
            0 => elapsed_until(self.previous, 0, window).saturating_sub(self.elapsed),
            current => window - self.elapsed + elapsed_until(current, 0, window),
        }
    }

    #[inline]
    fn spend(&mut self, _quota: &Quota, _now: u64, cost: u64) {
        self.current += cost;
    }

    fn refund(&mut self, quota: &Quota, _now: u64, cost: u64, charged_at: u64) {
        if charged_at == 0 {
            let from_previous = cost.min(self.previous);
            self.previous -= from_previous;
            self.current = self.current.saturating_sub(cost - from_previous);
        } else if charged_at >= self.start {
            self.current = self.current.saturating_sub(cost);
        } else if charged_at + quota.window_micros() >= self.start {
            self.previous = self.previous.saturating_sub(cost);
        }
    }

    #[inline]
    fn is_empty(&self) -> bool {
        self.current == 0 && self.previous == 0
    }
}

impl Kept for Counter {
    const KIND: Kind = Kind::Counter;

    #[inline]
    fn load(state: State, _logs: &mut Logs) -> Self {
        Self { start: state.time(), current: state.units(), previous: state.parts(), elapsed: 0 }
    }

    #[inline]
    fn keep(self, quota: &Quota, _before: Option<State>, _logs: &mut Logs) -> State {
        State::new(Self::KIND, self.start, self.current, self.previous, quota)
    }

    #[inline]
    fn copied(&self) -> Option<Self> {
        Some(*self)
    }
}
