//! [`Recorders`]: counts and latencies of a run.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hdrhistogram::Histogram;

use super::target::{Answer, RequestError};
use tidegate_api::duration::nanos;

/// Longest latency that is distinguished: an hour, in nanoseconds.
const MAX_LATENCY: u64 = 3_600_000_000_000;
/// Digits to which latencies are exact.
const DIGITS: u8 = 3;

/// Counts and latencies. Tasks use different parts, so that they rarely wait for each other.
#[derive(Debug)]
pub(super) struct Recorders(Vec<RecorderPart>);

#[derive(Debug)]
struct RecorderPart {
    sent: AtomicU64,
    recording: Mutex<Recording>,
}

/// Counts and latencies of requests.
#[derive(Debug)]
pub(crate) struct Recording {
    pub allowed: u64,
    pub denied: u64,
    /// Allowed requests to which no policy applied.
    pub unlimited: u64,
    pub errors: BTreeMap<Cow<'static, str>, ErrorCount>,
    /// Latencies in nanoseconds of the requests that were answered or timed out.
    pub latency: Histogram<u64>,
    /// Delays of an open loop that the generator caused, in nanoseconds.
    pub generator_delay: Histogram<u64>,
    /// Requests of an open loop that waited because too many were in flight.
    pub sent_late: u64,
}

/// Number of errors of one kind, with the message of the first.
#[derive(Debug)]
pub(crate) struct ErrorCount {
    pub count: u64,
    pub example: String,
}

impl Recording {
    fn new() -> anyhow::Result<Self> {
        Ok(Self {
            allowed: 0,
            denied: 0,
            unlimited: 0,
            errors: BTreeMap::new(),
            latency: Histogram::new_with_bounds(1, MAX_LATENCY, DIGITS)?,
            generator_delay: Histogram::new_with_bounds(1, MAX_LATENCY, DIGITS)?,
            sent_late: 0,
        })
    }

    /// Records the outcome of a request, and its latency if it was answered or timed out: without
    /// timeouts, the percentiles would be those of the requests that went well.
    pub(super) fn add(&mut self, outcome: Result<Answer, RequestError>, latency: Duration) {
        let error = match outcome {
            Ok(answer) => {
                match answer {
                    Answer::Allowed => self.allowed += 1,
                    Answer::Unlimited => {
                        self.allowed += 1;
                        self.unlimited += 1;
                    }
                    Answer::Denied => self.denied += 1,
                }
                return self.latency.saturating_record(nanos(latency).max(1));
            }
            Err(error) => error,
        };
        if error.is_timeout() {
            self.latency.saturating_record(nanos(latency).max(1));
        }
        let RequestError { kind, message } = error;
        let new = || ErrorCount { count: 0, example: message };
        self.errors.entry(kind).or_insert_with(new).count += 1;
    }

    pub(crate) fn answered(&self) -> u64 {
        self.allowed + self.denied
    }

    pub(crate) fn failed(&self) -> u64 {
        self.errors.values().map(|error| error.count).sum()
    }

    /// Returns the requests that failed before the timeout, whose latency is not among the others.
    pub(crate) fn failed_early(&self) -> u64 {
        (self.answered() + self.failed()).saturating_sub(self.latency.len())
    }

    fn merge(&mut self, other: &Self) -> anyhow::Result<()> {
        self.allowed += other.allowed;
        self.denied += other.denied;
        self.unlimited += other.unlimited;
        self.sent_late += other.sent_late;
        for (kind, error) in &other.errors {
            let new = || ErrorCount { count: 0, example: error.example.clone() };
            self.errors.entry(kind.clone()).or_insert_with(new).count += error.count;
        }
        self.latency.add(&other.latency)?;
        self.generator_delay.add(&other.generator_delay)?;
        Ok(())
    }
}

impl RecorderPart {
    fn recording(&self) -> MutexGuard<'_, Recording> {
        self.recording.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Recorders {
    pub(super) fn new() -> anyhow::Result<Self> {
        let parts = std::thread::available_parallelism().map_or(4, usize::from).clamp(2, 16);
        let part = |_| {
            let recording = Mutex::new(Recording::new()?);
            Ok(RecorderPart { sent: AtomicU64::new(0), recording })
        };
        Ok(Self((0..parts).map(part).collect::<anyhow::Result<_>>()?))
    }

    fn part(&self, task: usize) -> &RecorderPart {
        &self.0[task % self.0.len()]
    }

    /// Counts a request of a task whose outcome is not known yet.
    pub(super) fn count_sent(&self, task: usize) {
        self.part(task).sent.fetch_add(1, Ordering::Relaxed);
    }

    /// Records something in the part of a task.
    pub(super) fn record(&self, task: usize, record: impl FnOnce(&mut Recording)) {
        record(&mut self.part(task).recording());
    }

    /// Returns the number of requests that were sent.
    pub(super) fn sent(&self) -> u64 {
        self.0.iter().map(|part| part.sent.load(Ordering::Relaxed)).sum()
    }

    /// Returns the number of requests that have ended.
    pub(super) fn requests(&self) -> u64 {
        let count = |part: &RecorderPart| {
            let recording = part.recording();
            recording.answered() + recording.failed()
        };
        self.0.iter().map(count).sum()
    }

    /// Returns the sum of all parts.
    pub(super) fn total(&self) -> anyhow::Result<Recording> {
        let mut total = Recording::new()?;
        for part in &self.0 {
            total.merge(&part.recording())?;
        }
        Ok(total)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_add_up_and_errors_are_counted_by_kind() {
        let recorders = Recorders::new().expect("valid bounds");
        for task in 0..100 {
            let outcome = match task % 4 {
                0 => Ok(Answer::Allowed),
                1 => Ok(Answer::Unlimited),
                2 => Ok(Answer::Denied),
                _ => Err(RequestError::new("timeout", format!("request {task}"))),
            };
            let latency = Duration::from_micros(u64::try_from(task).expect("small"));
            recorders.record(task, |part| part.add(outcome, latency));
        }
        assert_eq!(recorders.requests(), 100);
        let total = recorders.total().expect("equal bounds");
        assert_eq!((total.allowed, total.denied, total.unlimited), (50, 25, 25));
        assert_eq!((total.answered(), total.failed()), (75, 25));
        assert_eq!(total.errors["timeout"].count, 25);
        assert_eq!((total.latency.len(), total.failed_early()), (100, 0));
        assert_eq!(total.latency.max() / 1_000, 99);
        let refused = Err(RequestError::new("refused", "no"));
        recorders.record(0, |part| part.add(refused, Duration::ZERO));
        let total = recorders.total().expect("equal bounds");
        assert_eq!((total.latency.len(), total.failed_early()), (100, 1));
    }

    #[test]
    fn an_endless_latency_is_recorded_as_the_longest() {
        let recorders = Recorders::new().expect("valid bounds");
        recorders.record(0, |part| part.add(Ok(Answer::Allowed), Duration::MAX));
        let total = recorders.total().expect("equal bounds");
        assert!(total.latency.max() >= MAX_LATENCY);
    }
}
