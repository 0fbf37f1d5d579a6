//! [`Block`]: the time for which a key is denied after it has exceeded a limit with `block_for`.

use std::time::Duration;

use super::RawDecision;

/// Time after its end for which a block counts for the length of the next one. Microseconds.
const HISTORY: u64 = 86_400_000_000;

/// The last block of a key, which may have ended. Times are microseconds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Block {
    start: u64,
    end: u64,
    /// Ends of the blocks before it that counted when it started, the newest first.
    earlier_ends: Vec<u64>,
    /// Whether it counts for the length of the next one.
    has_history: bool,
}

impl Block {
    /// Starts a block, whose length is that for the number of blocks before it.
    pub(crate) fn start(previous: Option<&Self>, lengths: &[Duration], now: u64) -> Self {
        let ends = previous
            .into_iter()
            .flat_map(|block| [&block.end].into_iter().chain(&block.earlier_ends));
        let mut earlier_ends: Vec<u64> =
            ends.copied().filter(|end| end.saturating_add(HISTORY) > now).collect();
        let last = lengths.len().saturating_sub(1);
        earlier_ends.truncate(last);
        let length = lengths.get(earlier_ends.len()).map_or(0, Duration::as_micros);
        let length = u64::try_from(length).unwrap_or(u64::MAX);
        Self { start: now, end: now.saturating_add(length), earlier_ends, has_history: last > 0 }
    }

    /// Returns the time until the end.
    pub(crate) fn rest(&self, now: u64) -> u64 {
        self.end.saturating_sub(now)
    }

    /// Returns the time from which on it has no effect.
    pub(crate) fn expires_at(&self) -> u64 {
        if self.has_history { self.end.saturating_add(HISTORY) } else { self.end }
    }

    /// Returns the block as it counts at `now` if the clock has stepped back: it starts now.
    pub(crate) fn after_step_back(&self, now: u64) -> Option<Self> {
        let ahead = self.start.checked_sub(now).filter(|ahead| *ahead > 0)?;
        let earlier_ends = self.earlier_ends.iter().map(|end| now.min(*end)).collect();
        Some(Self { start: now, end: self.end - ahead, earlier_ends, ..*self })
    }
}

impl RawDecision {
    /// Returns the denial of a key that is blocked for this time, given the decision without it.
    pub(crate) fn blocked(self, rest: u64) -> Self {
        let reset_after = self.reset_after.max(rest);
        Self { allowed: false, remaining: 0, retry_after: rest, reset_after, delay: 0 }
    }
}
