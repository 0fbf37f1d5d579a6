//! Throttling of log lines that every request could produce: one line per minute, with the number
//! of suppressed ones.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Throttle of one log line.
#[derive(Debug, Default)]
pub(super) struct LogThrottle(Mutex<ThrottleState>);

#[derive(Debug, Default)]
struct ThrottleState {
    last_logged: Option<Instant>,
    suppressed: u64,
}

impl LogThrottle {
    /// Creates a throttle that has logged nothing.
    #[must_use]
    pub(super) const fn new() -> Self {
        Self(Mutex::new(ThrottleState { last_logged: None, suppressed: 0 }))
    }

    /// Returns the number of lines suppressed since the last one, or `None` to suppress this one.
    #[must_use]
    pub(super) fn should_log(&self, now: Instant) -> Option<u64> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if state.last_logged.is_some_and(|last| now.saturating_duration_since(last) < LOG_INTERVAL)
        {
            state.suppressed += 1;
            return None;
        }
        state.last_logged = Some(now);
        Some(std::mem::take(&mut state.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_per_minute_is_logged_with_the_number_of_suppressed_ones() {
        let throttle = LogThrottle::new();
        let start = Instant::now();
        assert_eq!(throttle.should_log(start), Some(0));
        for second in 1..60 {
            assert_eq!(throttle.should_log(start + Duration::from_secs(second)), None);
        }
        assert_eq!(throttle.should_log(start + LOG_INTERVAL), Some(59));
        assert_eq!(throttle.should_log(start + LOG_INTERVAL * 3), Some(0));
    }
}
