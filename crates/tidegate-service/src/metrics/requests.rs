//! [`RequestMetrics`]: requests by outcome, with the durations of their decisions.
//!
//! A request that several policies judge is one request. The number of requests is that of the
//! durations, so that counting by outcome costs no further write per request.

use std::time::Duration;

use super::histogram::write_sum;
use super::{Counters, Histogram, head, write_labelled};

/// Outcome of a request that was decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestOutcome {
    /// It passed, also if no policy applies.
    Allowed,
    Denied,
    /// It passed, but a policy in shadow mode would have denied it.
    ShadowDenied,
}

impl RequestOutcome {
    pub const ALL: [Self; 3] = [Self::Allowed, Self::Denied, Self::ShadowDenied];
}

/// Names of the outcomes in metrics; the last one is that of requests that were not decided.
const OUTCOMES: [&str; 4] = ["allowed", "denied", "shadow_denied", "error"];

#[derive(Debug, Default)]
pub struct RequestMetrics {
    /// Durations by outcome.
    seconds: [Histogram; 3],
    errors: Counters<1>,
}

impl RequestMetrics {
    pub fn count(&self, outcome: RequestOutcome, duration: Duration) {
        self.seconds[outcome as usize].observe(duration);
    }

    /// Counts a request that could not be decided.
    pub fn count_error(&self) {
        self.errors.add(0, 1);
    }

    /// Returns the number of requests by outcome: allowed, denied, denied in shadow mode, errors.
    pub fn totals(&self) -> [u64; 4] {
        let [allowed, denied, shadow_denied] = self.seconds.each_ref().map(Histogram::total);
        [allowed, denied, shadow_denied, self.errors.total(0)]
    }

    /// Returns the number of requests by duration.
    pub fn durations(&self) -> Vec<u64> {
        let mut sum = self.seconds[0].counts();
        for part in &self.seconds[1..] {
            for (sum, count) in sum.iter_mut().zip(part.counts()) {
                *sum += count;
            }
        }
        sum
    }

    pub(super) fn write(&self, text: &mut String) {
        write_labelled(
            text,
            ("tidegate_requests_total", "outcome"),
            "Requests by outcome; one that several policies judge is counted once.",
            OUTCOMES.iter().zip(self.totals()),
        );
        self.write_seconds(text, "tidegate_decision_seconds", "");
    }

    /// Writes the durations under this name, with these labels.
    pub fn write_seconds(&self, text: &mut String, name: &str, labels: &str) {
        head(text, name, "histogram", "Duration of a decision.");
        write_sum(text, name, labels, &self.seconds.each_ref());
    }
}
