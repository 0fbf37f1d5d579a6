//! Histograms of durations.

use std::fmt::Write as _;
use std::time::Duration;

use super::{Counters, head};
use tidegate_api::duration;

/// Upper bound of a bucket, in microseconds and as a label in seconds.
type Bound = (u64, &'static str);

/// Histogram of durations.
#[derive(Debug)]
pub struct Histogram {
    bounds: &'static [Bound],
    /// Values in each bucket, and the sum in nanoseconds.
    counters: Counters<{ MAX_BUCKETS + 1 }>,
}

/// Maximum number of buckets.
const MAX_BUCKETS: usize = 23;
const NANOS: usize = MAX_BUCKETS;

/// Bounds of all histograms.
const BOUNDS: &[Bound] = &[
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
    (2_500_000, "2.5"),
    (5_000_000, "5"),
    (10_000_000, "10"),
    (30_000_000, "30"),
    (60_000_000, "60"),
];
const DECISION_BUCKETS: usize = 16;

/// Histogram for decisions, with buckets from 10 µs to 1 s.
impl Default for Histogram {
    fn default() -> Self {
        Self::new(&BOUNDS[..DECISION_BUCKETS])
    }
}

impl Histogram {
    /// Creates a histogram for requests to an application, with buckets from 1 ms to 60 s.
    pub fn of_requests() -> Self {
        Self::new(&BOUNDS[6..])
    }

    fn new(bounds: &'static [Bound]) -> Self {
        Self { bounds, counters: Counters::default() }
    }

    pub fn observe(&self, duration: Duration) {
        let micros = duration::micros_rounded_up(duration);
        self.counters.add(self.bounds.partition_point(|(bound, _)| *bound < micros), 1);
        self.counters.add(NANOS, duration::nanos(duration));
    }

    /// Returns the number of durations in each bucket; the last one has no upper bound.
    pub fn counts(&self) -> Vec<u64> {
        (0..=self.bounds.len()).map(|bucket| self.counters.total(bucket)).collect()
    }

    /// Returns the number of durations.
    pub fn total(&self) -> u64 {
        self.counts().iter().sum()
    }

    /// Writes a metric without labels.
    pub fn write(&self, text: &mut String, name: &str, help: &str) {
        head(text, name, "histogram", help);
        self.write_series(text, name, "");
    }

    /// Writes the series with these labels, such as `upstream="…"`.
    pub fn write_series(&self, text: &mut String, name: &str, labels: &str) {
        write_sum(text, name, labels, &[self]);
    }
}

/// Writes the sum of several histograms, which have the same bounds, as one series.
pub fn write_sum(text: &mut String, name: &str, labels: &str, parts: &[&Histogram]) {
    let bounds = parts.first().map_or(&[][..], |part| part.bounds);
    let labelled = bounds.iter().map(|(_, label)| *label).chain(["+Inf"]);
    let sum = |index| parts.iter().map(|part| part.counters.total(index)).sum::<u64>();
    let counts = (0..=bounds.len()).map(sum);
    let nanos = sum(NANOS);
    let seconds = Duration::from_nanos(nanos).as_secs_f64();
    write_buckets(text, name, labels, labelled.zip(counts), seconds);
}

/// Writes a series of buckets, given by the bound and the number of values in each.
pub fn write_buckets(
    text: &mut String,
    name: &str,
    labels: &str,
    buckets: impl Iterator<Item = (impl std::fmt::Display, u64)>,
    sum: f64,
) {
    let mut count = 0;
    let comma = if labels.is_empty() { "" } else { "," };
    for (bound, values) in buckets {
        count += values;
        let _ = writeln!(text, "{name}_bucket{{{labels}{comma}le=\"{bound}\"}} {count}");
    }
    let labels = if labels.is_empty() { String::new() } else { format!("{{{labels}}}") };
    let _ = writeln!(text, "{name}_sum{labels} {sum}\n{name}_count{labels} {count}");
}

/// Upper bounds of the buckets for decisions, in milliseconds.
pub fn decision_bounds_ms() -> Vec<f64> {
    let millis = |micros: u64| Duration::from_micros(micros).as_secs_f64() * 1_000.0;
    BOUNDS[..DECISION_BUCKETS].iter().map(|(bound, _)| millis(*bound)).collect()
}

/// Returns a quantile of the values in these buckets, interpolated within its bucket as
/// Prometheus does; `None` without values. A value beyond the last bound counts as that bound.
#[expect(clippy::cast_precision_loss, reason = "a quantile is an estimate")]
pub fn quantile(bounds: &[f64], counts: &[u64], quantile: f64) -> Option<f64> {
    let total: u64 = counts.iter().sum();
    if total == 0 {
        return None;
    }
    let rank = quantile * total as f64;
    let mut before = 0.0;
    let mut lower = 0.0;
    for (count, upper) in counts.iter().zip(bounds) {
        let count = *count as f64;
        if count > 0.0 && before + count >= rank {
            return Some(lower + (upper - lower) * (rank - before) / count);
        }
        before += count;
        lower = *upper;
    }
    bounds.last().copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_cumulative_and_include_their_bound() {
        let histogram = Histogram::default();
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
    fn quantiles_are_interpolated_within_their_bucket() {
        let bounds = [1.0, 2.0, 4.0];
        assert_eq!(quantile(&bounds, &[0, 0, 0, 0], 0.5), None);
        assert_eq!(quantile(&bounds, &[10, 0, 0, 0], 0.5), Some(0.5));
        assert_eq!(quantile(&bounds, &[50, 40, 10, 0], 0.5), Some(1.0));
        assert_eq!(quantile(&bounds, &[50, 40, 10, 0], 0.95), Some(3.0));
        assert_eq!(quantile(&bounds, &[0, 0, 0, 7], 0.99), Some(4.0), "beyond the last bound");
        assert_eq!(decision_bounds_ms().first(), Some(&0.01));
    }

    #[test]
    fn sum_of_histograms_is_one_series() {
        let parts = [Histogram::default(), Histogram::default()];
        parts[0].observe(Duration::from_micros(5));
        parts[1].observe(Duration::from_secs(2));
        let mut text = String::new();
        write_sum(&mut text, "x", "", &[&parts[0], &parts[1]]);
        assert!(text.contains("x_bucket{le=\"1e-05\"} 1\n"), "{text}");
        assert!(text.ends_with("x_sum 2.000005\nx_count 2\n"), "{text}");
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
