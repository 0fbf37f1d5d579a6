//! Histograms of durations.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::head;
use crate::duration;

/// Upper bound of a bucket, in microseconds and as a label in seconds.
type Bound = (u64, &'static str);

/// Histogram of durations.
#[derive(Debug)]
pub(crate) struct Histogram {
    bounds: &'static [Bound],
    buckets: Box<[AtomicU64]>,
    nanos: AtomicU64,
}

/// Buckets for decisions, from 10 µs to 1 s.
const DECISION_BOUNDS: &[Bound] = &[
    (10, "1e-05"),
    (25, "2.5e-05"),
    (50, "5e-05"),
    (100, "0.0001"),
    (250, "0.00025"),
    (500, "0.0005"),
    (1_000, "0.001"),
    (2_500, "0.0025"),
    (5_000, "0.005"),
    (10_000, "0.01"),
    (25_000, "0.025"),
    (50_000, "0.05"),
    (100_000, "0.1"),
    (250_000, "0.25"),
    (500_000, "0.5"),
    (1_000_000, "1"),
];

/// Buckets for requests to an application, from 1 ms to 60 s.
const REQUEST_BOUNDS: &[Bound] = &[
    (1_000, "0.001"),
    (2_500, "0.0025"),
    (5_000, "0.005"),
    (10_000, "0.01"),
    (25_000, "0.025"),
    (50_000, "0.05"),
    (100_000, "0.1"),
    (250_000, "0.25"),
    (500_000, "0.5"),
    (1_000_000, "1"),
    (2_500_000, "2.5"),
    (5_000_000, "5"),
    (10_000_000, "10"),
    (30_000_000, "30"),
    (60_000_000, "60"),
];

impl Histogram {
    /// Creates a histogram for decisions, with buckets from 10 µs to 1 s.
    pub(crate) fn of_decisions() -> Self {
        Self::new(DECISION_BOUNDS)
    }

    /// Creates a histogram for requests to an application, with buckets from 1 ms to 60 s.
    pub(crate) fn of_requests() -> Self {
        Self::new(REQUEST_BOUNDS)
    }

    fn new(bounds: &'static [Bound]) -> Self {
        let buckets = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        Self { bounds, buckets, nanos: AtomicU64::new(0) }
    }

    pub(crate) fn observe(&self, duration: Duration) {
        let micros = duration::micros_rounded_up(duration);
        let bucket = self.bounds.partition_point(|(bound, _)| *bound < micros);
        self.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        self.nanos.fetch_add(duration::nanos(duration), Ordering::Relaxed);
    }

    /// Writes a metric without labels.
    pub(crate) fn write(&self, text: &mut String, name: &str, help: &str) {
        head(text, name, "histogram", help);
        self.write_series(text, name, "");
    }

    /// Writes the series with these labels, such as `upstream="…"`.
    pub(crate) fn write_series(&self, text: &mut String, name: &str, labels: &str) {
        let mut count = 0;
        let comma = if labels.is_empty() { "" } else { "," };
        for (bucket, bound) in
            self.buckets.iter().zip(self.bounds.iter().map(|(_, bound)| *bound).chain(["+Inf"]))
        {
            count += bucket.load(Ordering::Relaxed);
            let _ = writeln!(text, "{name}_bucket{{{labels}{comma}le=\"{bound}\"}} {count}");
        }
        let seconds = Duration::from_nanos(self.nanos.load(Ordering::Relaxed)).as_secs_f64();
        let labels = if labels.is_empty() { String::new() } else { format!("{{{labels}}}") };
        let _ = writeln!(text, "{name}_sum{labels} {seconds}\n{name}_count{labels} {count}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_cumulative_and_include_their_bound() {
        let histogram = Histogram::of_decisions();
        for micros in [1, 10, 11, 1_000_000, 1_000_001] {
            histogram.observe(Duration::from_micros(micros));
        }
        let mut text = String::new();
        histogram.write(&mut text, "x", "y");
        assert!(text.contains("x_bucket{le=\"1e-05\"} 2\n"), "{text}");
        assert!(text.contains("x_bucket{le=\"2.5e-05\"} 3\n"), "{text}");
        assert!(
            text.contains("x_bucket{le=\"1\"} 4\n") && text.contains("x_bucket{le=\"+Inf\"} 5\n"),
            "{text}"
        );
        assert!(text.contains("x_count 5\n") && text.contains("x_sum 2.000023\n"), "{text}");
    }

    #[test]
    fn labels_precede_the_bound() {
        let histogram = Histogram::of_requests();
        histogram.observe(Duration::from_secs(61));
        let mut text = String::new();
        histogram.write_series(&mut text, "x", "a=\"b\"");
        assert!(text.contains("x_bucket{a=\"b\",le=\"60\"} 0\n"), "{text}");
        assert!(text.contains("x_bucket{a=\"b\",le=\"+Inf\"} 1\n"), "{text}");
        assert!(text.ends_with("x_sum{a=\"b\"} 61\nx_count{a=\"b\"} 1\n"), "{text}");
    }
}
