//! [`DenialLog`]: log lines of denied requests, sampled and bounded in their rate.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use tidegate::{PolicyDecision, ShowKeys};

use tidegate_api::duration::millis_rounded_up;
use tidegate_config::LogDenials;
use tidegate_config::key_hash;

/// Logger of denied requests.
pub struct DenialLog {
    config: LogDenials,
    /// Number of denied requests, by which they are sampled.
    denials: AtomicU64,
    second: Mutex<Second>,
}

/// Lines of the current second.
struct Second {
    start: Instant,
    logged: u64,
    /// Number of sampled lines that the rate has suppressed since the last line.
    suppressed: u64,
}

/// Odd multiplier with well-mixed high bits, so that the numbers of a sequence are spread evenly
/// over all values: 2^64 divided by the golden ratio.
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;

impl DenialLog {
    pub fn new(config: LogDenials) -> Self {
        let second = Second { start: Instant::now(), logged: 0, suppressed: 0 };
        Self { config, denials: AtomicU64::new(0), second: Mutex::new(second) }
    }

    /// Logs the decision that denied a request, unless it is not sampled or there are too many.
    pub fn log(&self, denial: &PolicyDecision<'_>, show_keys: ShowKeys, now: Instant) {
        let Some(suppressed) = self.should_log(now) else { return };
        let key = denial.key().map(|key| match show_keys {
            ShowKeys::Plain => key.to_owned(),
            ShowKeys::Hashed => key_hash::of(key),
        });
        let decision = denial.decision();
        tracing::info!(
            policy = denial.policy(),
            key,
            missing_key = denial.missing_key(),
            cost = denial.cost(),
            limit = decision.limit,
            remaining = decision.remaining,
            retry_after_ms = millis_rounded_up(decision.retry_after),
            source = decision.source.as_str(),
            suppressed,
            "request denied"
        );
    }

    /// Returns the number of lines suppressed since the last one, or `None` for no line.
    fn should_log(&self, now: Instant) -> Option<u64> {
        let number = self.denials.fetch_add(1, Ordering::Relaxed);
        if !is_sampled(number, self.config.ratio) {
            return None;
        }
        let mut second = self.second.lock().unwrap_or_else(PoisonError::into_inner);
        if now.saturating_duration_since(second.start).as_secs() > 0 {
            second.start = now;
            second.logged = 0;
        }
        if second.logged == self.config.max_per_second {
            second.suppressed += 1;
            return None;
        }
        second.logged += 1;
        Some(std::mem::take(&mut second.suppressed))
    }
}

/// Returns whether the denial of this number is in the sample. The first one always is.
#[expect(clippy::cast_precision_loss, reason = "a ratio needs no more digits")]
fn is_sampled(number: u64, ratio: f32) -> bool {
    (number.wrapping_mul(SPREAD) as f64) < f64::from(ratio) * 2_f64.powi(64)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn ratio_of_denials_is_sampled() {
        for (ratio, expected) in [(1.0, 1_000), (0.25, 250), (0.01, 10), (0.0, 0)] {
            let sampled = (0..1_000).filter(|number| is_sampled(*number, ratio)).count();
            assert!(sampled.abs_diff(expected) <= 2, "{ratio}: {sampled}");
        }
        assert!(is_sampled(0, 0.001), "the first denial shows that the log works");
    }

    #[test]
    fn lines_of_a_second_are_bounded_and_the_others_counted() {
        let log = DenialLog::new(LogDenials { ratio: 1.0, max_per_second: 2 });
        let start = Instant::now();
        let later = start + Duration::from_secs(2);
        let logged: Vec<_> = (0..5).map(|_| log.should_log(start)).collect();
        assert_eq!(logged, [Some(0), Some(0), None, None, None]);
        assert_eq!(log.should_log(later), Some(3));
        assert_eq!(log.should_log(later), Some(0));
        assert_eq!(log.should_log(later), None);
    }
}
