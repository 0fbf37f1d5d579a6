//! Load for a store or a running service, and what it measured.
//!
//! A closed loop sends the next request when the last one is answered, so a slow target lowers the
//! rate. An open loop sends requests at their due times, whatever the target does, and measures
//! latency from these times: a stall shows in the latency of every request that was due during it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use tokio::signal::unix::{SignalKind, signal};

use self::keys::KeySpace;
use self::open_loop::OpenLoop;
use self::recorder::{Recorders, Recording};
use self::replay::Replay;
use self::target::{Answer, LoadTarget, RequestError};
use crate::tool::progress::ProgressBar;
use crate::tool::text::float;

mod closed_loop;
pub(crate) mod grpc;
pub(crate) mod http;
pub(crate) mod keys;
pub(crate) mod open_loop;
mod recorder;
pub(crate) mod replay;
pub(crate) mod report;
pub(crate) mod resp;
mod schedule;
pub(crate) mod store;
pub(crate) mod target;
mod template;
pub(crate) mod web;

pub(crate) use schedule::Arrivals;

const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);

/// Load to generate.
#[derive(Debug)]
pub(crate) struct LoadPlan {
    pub pace: Pace,
    pub keys: Arc<KeySpace>,
    pub seed: u64,
    pub warmup: Duration,
    /// Length of the measurement, unless the number of requests ends it.
    pub duration: Option<Duration>,
    /// Number of measured requests.
    pub requests: Option<u64>,
    /// Timeout of a request.
    pub timeout: Duration,
    /// Log with the requests of an open loop and their due times.
    pub replay: Option<Replay>,
}

/// When requests are sent.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Pace {
    /// Each of these callers sends a request when its last one is answered.
    Closed {
        concurrency: usize,
    },
    Open(OpenLoop),
}

/// Measured values of a run.
#[derive(Debug)]
pub(crate) struct LoadMeasurement {
    pub recording: Recording,
    /// Time in which the measured requests were asked: of an open loop until its last due time, of
    /// a closed one the mean of its callers. A late answer does not make it longer.
    pub load_time: Duration,
    /// Time from the end of the warm-up to the last answer.
    pub elapsed: Duration,
    /// CPU time of this process during the run, as the mean number of busy CPUs.
    pub busy_cpus: f64,
    /// Whether a signal ended the run.
    pub interrupted: bool,
    /// Requests of an open loop that were due but not sent.
    pub not_sent: u64,
    /// Whether a request of an open loop had to wait because too many were in flight.
    pub slots_exhausted: bool,
    /// Requests that were sent, but whose end was not awaited after the second signal.
    pub unanswered: u64,
}

/// State that all tasks of a run share.
struct LoadRun<T> {
    target: T,
    recorders: Recorders,
    timeout: Duration,
    /// Requests that are sent or due earlier belong to the warm-up, and are not recorded.
    measured_from: Instant,
    end: Option<Instant>,
    /// Time of the first signal, after which no request is sent.
    stopped_at: OnceLock<Instant>,
    /// See [`LoadMeasurement::load_time`]; set when the loop ends.
    load_time: OnceLock<Duration>,
    not_sent: AtomicU64,
    /// Whether a request of an open loop had to wait because too many were in flight.
    slots_exhausted: AtomicBool,
}

impl<T> LoadRun<T> {
    fn is_stopped(&self) -> bool {
        self.stopped_at.get().is_some()
    }

    /// Returns the latency of a request to record: that of a timeout is at least the timeout, even
    /// if the target gave up earlier.
    fn latency_of(&self, outcome: &Result<Answer, RequestError>, measured: Duration) -> Duration {
        match outcome {
            Err(error) if error.is_timeout() => measured.max(self.timeout),
            _ => measured,
        }
    }
}

/// Runs the load, with a progress bar if the standard error is a terminal. The first interrupt ends
/// the load, and the second one also the wait for the last answers.
pub(crate) async fn run<T: LoadTarget>(
    load: &LoadPlan,
    target: T,
) -> anyhow::Result<LoadMeasurement> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let start = Instant::now();
    let measured_from = start + load.warmup;
    let run = Arc::new(LoadRun {
        target,
        recorders: Recorders::new()?,
        timeout: load.timeout,
        measured_from,
        end: load.duration.map(|duration| measured_from + duration),
        stopped_at: OnceLock::new(),
        load_time: OnceLock::new(),
        not_sent: AtomicU64::new(0),
        slots_exhausted: AtomicBool::new(false),
    });
    let cpu_before = cpu_time();
    let work = async {
        match load.pace {
            Pace::Closed { concurrency } => {
                closed_loop::run(&run, load, concurrency).await;
                Ok(())
            }
            Pace::Open(open) => open_loop::run(&run, load, open, start).await,
        }
    };
    tokio::pin!(work);
    let mut progress = None;
    let mut ticks = tokio::time::interval(PROGRESS_INTERVAL);
    let mut interrupted = false;
    loop {
        tokio::select! {
            result = &mut work => {
                result?;
                break;
            }
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = ticks.tick() => {
                // The warm-up is not shown: its requests are not counted.
                if let Some(elapsed) = Instant::now().checked_duration_since(measured_from) {
                    let requests = run.recorders.requests();
                    let progress = progress.get_or_insert_with(ProgressBar::start);
                    progress.update(requests, part(load, elapsed, requests));
                }
                continue;
            }
        }
        if interrupted {
            break;
        }
        interrupted = true;
        let _ = run.stopped_at.set(Instant::now());
    }
    drop(progress);
    let end = Instant::now();
    let busy_cpus = cpu_time().saturating_sub(cpu_before).as_secs_f64()
        / end.duration_since(start).as_secs_f64().max(1e-9);
    let elapsed = end.saturating_duration_since(measured_from);
    let recording = run.recorders.total()?;
    let ended = recording.answered() + recording.failed();
    Ok(LoadMeasurement {
        load_time: run.load_time.get().copied().unwrap_or(elapsed),
        elapsed,
        busy_cpus,
        interrupted,
        not_sent: run.not_sent.load(Ordering::Relaxed),
        slots_exhausted: run.slots_exhausted.load(Ordering::Relaxed),
        unanswered: run.recorders.sent().saturating_sub(ended),
        recording,
    })
}

/// Returns the part of the measurement that is done.
fn part(load: &LoadPlan, elapsed: Duration, requests: u64) -> Option<f64> {
    let of_time = load.duration.map(|all| elapsed.as_secs_f64() / all.as_secs_f64().max(1e-9));
    let of_requests = load.requests.map(|all| float(requests) / float(all.max(1)));
    [of_time, of_requests].into_iter().flatten().reduce(f64::max)
}

/// Returns the CPU time of this process.
fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::try_from(time).unwrap_or_default()
}
