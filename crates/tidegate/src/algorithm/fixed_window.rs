//! `fixed-window`: admits when the count in the window of the clock, plus the cost, is at most L.
//!
//! Windows are aligned to the epoch. Only after a clock has stepped back does a key get one window
//! that is not: it begins at the step, so that what counted goes on counting for one window, no
//! more and no less.

use super::{Count, Kept, Kind, Logs, State};
use crate::quota::Quota;

#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Window {
    start: u64,
    count: u64,
}

impl Count for Window {
    #[inline]
    fn settle(&mut self, quota: &Quota, now: u64) -> bool {
        let window = quota.window_micros();
        let stepped_back = self.start > now;
        if stepped_back {
            self.start = now;
        } else if self.start + window <= now {
            *self = Self { start: now - now % window, count: 0 };
        }
        stepped_back
    }

    #[inline]
    fn remaining(&self, quota: &Quota) -> u64 {
        quota.limit().saturating_sub(self.count)
    }

    #[inline]
    fn level(&self) -> u64 {
        self.count
    }

    #[inline]
    fn wait_for(&self, quota: &Quota, now: u64, _cost: u64) -> u64 {
        self.start + quota.window_micros() - now
    }

    #[inline]
    fn reset_after(&self, quota: &Quota, now: u64, extra: u64) -> u64 {
        if self.count + extra == 0 { 0 } else { self.start + quota.window_micros() - now }
    }

    #[inline]
    fn spend(&mut self, _quota: &Quota, _now: u64, cost: u64) {
        self.count += cost;
    }

    /// A charge of an earlier window has nothing left to return.
    fn refund(&mut self, _quota: &Quota, _now: u64, cost: u64, charged_at: u64) {
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

impl Kept for Window {
    const KIND: Kind = Kind::Window;

    #[inline]
    fn load(state: State, _logs: &mut Logs) -> Self {
        Self { start: state.time(), count: state.units() }
    }

    #[inline]
    fn keep(self, quota: &Quota, _before: Option<State>, _logs: &mut Logs) -> State {
        State::new(Self::KIND, self.start, self.count, 0, quota)
    }

    #[inline]
    fn copied(&self) -> Option<Self> {
        Some(*self)
    }
}
