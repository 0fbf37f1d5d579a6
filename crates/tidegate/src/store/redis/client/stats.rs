//! Latency and size of the calls to Redis, for operators.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

/// Distribution of values: their number by upper bound, for a histogram.
///
/// ```no_run
/// use tidegate::RedisStore;
///
/// /// Returns the number of calls to a node that took longer than a millisecond.
/// fn slow_calls(store: &RedisStore) -> Option<u64> {
///     let nodes = store.nodes();
///     let latency = &nodes.first()?.latency;
///     let is_slow = |(bound, count): (Option<u64>, u64)| {
///         if bound.is_none_or(|bound| bound > 1_000) { count } else { 0 }
///     };
///     Some(latency.iter().map(is_slow).sum())
/// }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Distribution {
    bounds: &'static [u64],
    counts: Vec<u64>,
    sum: u64,
}

impl Distribution {
    /// Iterates over the buckets: the upper bound, which belongs to the bucket, and the number of
    /// values above the bound before. The last bucket has no upper bound.
    pub fn iter(&self) -> impl Iterator<Item = (Option<u64>, u64)> {
        let bounds = self.bounds.iter().copied().map(Some).chain([None]);
        bounds.zip(self.counts.iter().copied())
    }

    /// Returns the sum of all values.
    #[must_use]
    pub fn sum(&self) -> u64 {
        self.sum
    }
}

/// Bounds of latencies in microseconds.
const LATENCIES: &[u64] = &[
    10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000,
    500_000, 1_000_000,
];
/// Bounds of the number of decisions in one call.
const CALL_SIZES: &[u64] = &[1, 2, 4, 8, 16, 32, 64, 128, 256];

/// Counters of a [`Distribution`].
#[derive(Debug)]
pub(crate) struct BucketCounters {
    bounds: &'static [u64],
    counts: Box<[AtomicU64]>,
    sum: AtomicU64,
}

impl BucketCounters {
    fn new(bounds: &'static [u64]) -> Self {
        let counts = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        Self { bounds, counts, sum: AtomicU64::new(0) }
    }

    /// Creates the counters of the decisions per call.
    pub(crate) fn of_call_sizes() -> Self {
        Self::new(CALL_SIZES)
    }

    pub(crate) fn record(&self, value: u64) {
        let bucket = self.bounds.partition_point(|bound| *bound < value);
        self.counts[bucket].fetch_add(1, Ordering::Relaxed);
        self.sum.fetch_add(value, Ordering::Relaxed);
    }

    pub(crate) fn read(&self) -> Distribution {
        let counts = self.counts.iter().map(|count| count.load(Ordering::Relaxed)).collect();
        Distribution { bounds: self.bounds, counts, sum: self.sum.load(Ordering::Relaxed) }
    }
}

/// Calls of one node.
pub(crate) struct NodeCalls {
    /// In microseconds.
    latency: BucketCounters,
    in_flight: AtomicUsize,
}

/// Call in flight. Its latency is recorded when it ends, also if its caller no longer waits.
pub(crate) struct TimedCall<'a> {
    calls: &'a NodeCalls,
    sent: Instant,
    received: Option<Instant>,
}

impl NodeCalls {
    pub(crate) fn new() -> Self {
        Self { latency: BucketCounters::new(LATENCIES), in_flight: AtomicUsize::new(0) }
    }

    pub(crate) fn start(&self, sent: Instant) -> TimedCall<'_> {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        TimedCall { calls: self, sent, received: None }
    }

    pub(crate) fn latency(&self) -> Distribution {
        self.latency.read()
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Relaxed)
    }
}

impl TimedCall<'_> {
    /// Ends the call with the time at which its replies have arrived.
    pub(crate) fn end(mut self, received: Instant) {
        self.received = Some(received);
    }
}

impl Drop for TimedCall<'_> {
    fn drop(&mut self) {
        let received = self.received.unwrap_or_else(Instant::now);
        let latency = received.saturating_duration_since(self.sent);
        self.calls.latency.record(u64::try_from(latency.as_micros()).unwrap_or(u64::MAX));
        self.calls.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn call_whose_caller_has_gone_is_recorded_and_no_longer_in_flight() {
        let calls = NodeCalls::new();
        let sent = Instant::now();
        let answered = calls.start(sent);
        let abandoned = calls.start(sent);
        assert_eq!(calls.in_flight(), 2);
        answered.end(sent + Duration::from_micros(100));
        drop(abandoned);
        assert_eq!(calls.in_flight(), 0);
        let latency = calls.latency();
        assert_eq!(latency.iter().map(|(_, count)| count).sum::<u64>(), 2);
        assert!(latency.iter().any(|(bound, count)| bound == Some(100) && count > 0));
        assert!(latency.sum() >= 100);
    }
}
