//! [`Backoff`]: waits between attempts, each twice as long as the one before.

use std::time::Duration;

/// Exponential backoff. A copy starts again.
#[derive(Clone, Copy)]
pub(crate) struct Backoff {
    next: Duration,
    max: Duration,
}

impl Backoff {
    pub(crate) const fn from_millis(min: u64, max: u64) -> Self {
        Self { next: Duration::from_millis(min), max: Duration::from_millis(max) }
    }

    /// Returns the wait before the next attempt.
    pub(crate) fn next_wait(&mut self) -> Duration {
        let wait = self.next;
        self.next = self.max.min(wait * 2);
        wait
    }
}
