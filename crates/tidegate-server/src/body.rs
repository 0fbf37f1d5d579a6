//! The body of an answer, the same from the shell and over HTTP.

use std::time::Duration;

use serde::Serialize;
use tidegate::Decision;

/// What is decided, the most restrictive decision on top.
#[derive(Debug, Serialize)]
pub(crate) struct Body<'a> {
    #[serde(flatten)]
    leading: Line<'a>,
    decisions: Vec<Line<'a>>,
}

/// One decision, durations in milliseconds.
#[derive(Debug, Clone, Copy, Serialize)]
struct Line<'a> {
    allowed: bool,
    policy: Option<&'a str>,
    limit: u64,
    remaining: u64,
    retry_after_ms: u64,
    reset_after_ms: u64,
    delay_ms: u64,
    source: &'static str,
}

impl<'a> Body<'a> {
    /// The body for the decision of one policy.
    pub(crate) fn of_one(policy: &'a str, decision: &Decision) -> Self {
        let line = Line {
            allowed: decision.allowed,
            policy: Some(policy),
            limit: decision.limit,
            remaining: decision.remaining,
            retry_after_ms: millis(decision.retry_after),
            reset_after_ms: millis(decision.reset_after),
            delay_ms: millis(decision.delay),
            source: decision.source.as_str(),
        };
        Self { leading: line, decisions: vec![line] }
    }
}

/// Rounded up, never down: who waits this long gets in.
fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_a_millisecond_is_a_whole_one() {
        assert_eq!(millis(Duration::ZERO), 0);
        assert_eq!(millis(Duration::from_micros(1)), 1);
        assert_eq!(millis(Duration::from_millis(5)), 5);
        assert_eq!(millis(Duration::from_micros(5_001)), 6);
    }
}
