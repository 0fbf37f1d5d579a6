//! Stalls of the runtime: a worker that is blocked inside a poll delays every request that it has
//! accepted.
//!
//! A worker updates its busy time at least every [`EVENT_INTERVAL`](crate::serve::EVENT_INTERVAL)
//! polls. A thread samples it: a worker that is not parked, and whose busy time does not grow, has
//! spent that time in very few polls.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::runtime::RuntimeMetrics;

use super::write_numbers;
use tidegate_net::LogThrottle;

const SAMPLE_INTERVAL: Duration = Duration::from_millis(50);
/// A stall is shown for one to two of these intervals.
const ROTATION_INTERVAL: Duration = Duration::from_secs(60);
/// Duration from which a stall is logged.
const LOG_STALL_AFTER: Duration = Duration::from_secs(1);

/// Longest stall (ms) of the current and of the previous interval.
static LONGEST: [AtomicU64; 2] = [AtomicU64::new(0), AtomicU64::new(0)];

/// State of a worker at the last sample that differed.
#[derive(Debug, Clone, Copy)]
struct WorkerSample {
    parks: u64,
    busy: Duration,
    at: Instant,
}

impl WorkerSample {
    fn of(metrics: &RuntimeMetrics, worker: usize, at: Instant) -> Self {
        let parks = metrics.worker_park_unpark_count(worker);
        Self { parks, busy: metrics.worker_total_busy_duration(worker), at }
    }

    /// Takes a newer sample. Returns for how long the worker has been stalled.
    fn update(&mut self, newer: Self) -> Duration {
        // It counts parks and unparks.
        let is_running = newer.parks.is_multiple_of(2);
        if is_running && (newer.parks, newer.busy) == (self.parks, self.busy) {
            return newer.at.duration_since(self.at);
        }
        *self = newer;
        Duration::ZERO
    }
}

/// Starts the thread that samples the workers of a runtime, which ends with the process.
pub fn start(metrics: RuntimeMetrics) -> std::io::Result<()> {
    std::thread::Builder::new().name("stalls".to_owned()).spawn(move || sample(&metrics))?;
    Ok(())
}

fn sample(metrics: &RuntimeMetrics) {
    let mut rotated = Instant::now();
    let mut workers: Vec<WorkerSample> = (0..metrics.num_workers())
        .map(|worker| WorkerSample::of(metrics, worker, rotated))
        .collect();
    let throttle = LogThrottle::new();
    loop {
        std::thread::sleep(SAMPLE_INTERVAL);
        let now = Instant::now();
        if now.duration_since(rotated) >= ROTATION_INTERVAL {
            rotated = now;
            LONGEST[1].store(LONGEST[0].swap(0, Ordering::Relaxed), Ordering::Relaxed);
        }
        for (worker, last) in workers.iter_mut().enumerate() {
            let stall = last.update(WorkerSample::of(metrics, worker, now));
            let millis = u64::try_from(stall.as_millis()).unwrap_or(u64::MAX);
            LONGEST[0].fetch_max(millis, Ordering::Relaxed);
            if stall >= LOG_STALL_AFTER
                && let Some(suppressed) = throttle.should_log(now)
            {
                tracing::warn!(
                    ?stall,
                    suppressed,
                    "a worker of the runtime is blocked: requests wait (logged once per minute)"
                );
            }
        }
    }
}

/// Appends the metric.
pub(super) fn write(text: &mut String) {
    let help = "Longest time that a worker was blocked, in the last 1 to 2 minutes.";
    let millis = LONGEST.iter().map(|longest| longest.load(Ordering::Relaxed)).max();
    let seconds = Duration::from_millis(millis.unwrap_or(0)).as_secs_f64();
    write_numbers(text, &[("tidegate_longest_stall_seconds", "gauge", help, seconds)]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worker_that_runs_without_progress_is_stalled() {
        let start = Instant::now();
        let sample = |parks: u64, busy: u64, millis: u64| WorkerSample {
            parks,
            busy: Duration::from_millis(busy),
            at: start + Duration::from_millis(millis),
        };
        let mut last = sample(2, 5, 0);
        assert_eq!(last.update(sample(2, 5, 50)), Duration::from_millis(50));
        assert_eq!(last.update(sample(2, 5, 100)), Duration::from_millis(100));
        assert_eq!(last.update(sample(2, 6, 150)), Duration::ZERO, "it made progress");
        assert_eq!(last.update(sample(3, 6, 200)), Duration::ZERO);
        assert_eq!(last.update(sample(3, 6, 250)), Duration::ZERO, "it is parked");
    }

    #[test]
    fn blocked_worker_of_a_real_runtime_is_seen() {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .build()
            .expect("a runtime");
        let metrics = runtime.metrics();
        let (started, starts) = std::sync::mpsc::channel();
        let (release, released) = std::sync::mpsc::channel::<()>();
        runtime.spawn(async move {
            started.send(()).expect("a receiver");
            let _ = released.recv();
        });
        starts.recv().expect("started");
        let start = Instant::now();
        let mut last = WorkerSample::of(&metrics, 0, start);
        let later = start + Duration::from_secs(3);
        assert_eq!(last.update(WorkerSample::of(&metrics, 0, later)), Duration::from_secs(3));
        release.send(()).expect("a receiver");
    }
}
