//! Saturating conversions of durations to integers.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Returns whole milliseconds.
pub(crate) fn millis(duration: Duration) -> u64 {
    saturate(duration.as_millis())
}

/// Returns milliseconds, rounded up.
pub(crate) fn millis_rounded_up(duration: Duration) -> u64 {
    saturate(duration.as_nanos().div_ceil(1_000_000))
}

/// Returns whole microseconds.
pub(crate) fn micros(duration: Duration) -> u64 {
    saturate(duration.as_micros())
}

/// Returns microseconds, rounded up.
pub(crate) fn micros_rounded_up(duration: Duration) -> u64 {
    saturate(duration.as_nanos().div_ceil(1_000))
}

/// Returns nanoseconds.
pub(crate) fn nanos(duration: Duration) -> u64 {
    saturate(duration.as_nanos())
}

/// Returns the time since the Unix epoch; zero before it.
pub(crate) fn since_epoch(time: SystemTime) -> Duration {
    time.duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Returns milliseconds since the Unix epoch.
pub(crate) fn unix_millis(time: SystemTime) -> u64 {
    millis(since_epoch(time))
}

fn saturate(number: u128) -> u64 {
    u64::try_from(number).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn milliseconds_are_rounded_up() {
        assert_eq!(millis_rounded_up(Duration::ZERO), 0);
        assert_eq!(millis_rounded_up(Duration::from_micros(1)), 1);
        assert_eq!(millis_rounded_up(Duration::from_millis(5)), 5);
        assert_eq!(millis_rounded_up(Duration::from_micros(5_001)), 6);
    }
}
