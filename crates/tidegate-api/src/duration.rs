//! Saturating conversions of durations to integers.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Returns whole milliseconds.
pub fn millis(duration: Duration) -> u64 {
    saturate(duration.as_millis())
}

/// Returns milliseconds, rounded up.
pub fn millis_rounded_up(duration: Duration) -> u64 {
    whole(duration, 1_000, duration.subsec_nanos().div_ceil(1_000_000))
}

/// Returns whole microseconds.
pub fn micros(duration: Duration) -> u64 {
    saturate(duration.as_micros())
}

/// Returns microseconds, rounded up.
pub fn micros_rounded_up(duration: Duration) -> u64 {
    whole(duration, 1_000_000, duration.subsec_nanos().div_ceil(1_000))
}

/// Returns nanoseconds.
pub fn nanos(duration: Duration) -> u64 {
    whole(duration, 1_000_000_000, duration.subsec_nanos())
}

/// Returns the time since the Unix epoch; zero before it.
pub fn since_epoch(time: SystemTime) -> Duration {
    time.duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Returns milliseconds since the Unix epoch.
pub fn unix_millis(time: SystemTime) -> u64 {
    millis(since_epoch(time))
}

/// Returns a number of parts of a second, without a division of 128 bits.
fn whole(duration: Duration, parts_per_second: u64, rest: u32) -> u64 {
    duration.as_secs().saturating_mul(parts_per_second).saturating_add(u64::from(rest))
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
        assert_eq!(millis_rounded_up(Duration::from_nanos(1_999_000_001)), 2_000);
        assert_eq!(millis_rounded_up(Duration::MAX), u64::MAX);
        assert_eq!(micros_rounded_up(Duration::from_nanos(2_000_000_001)), 2_000_001);
        assert_eq!(nanos(Duration::MAX), u64::MAX);
    }
}
