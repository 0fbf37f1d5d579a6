//! Open loop: a thread sends each request at its due time, and latency is measured from that time.
//!
//! The requests in flight are bounded. While there are too many, the next one waits, and so does
//! everything after it: nothing is skipped, and no queue grows, because due times are computed.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::keys::KeySequence;
use super::replay::ReplayedRequests;
use super::schedule::{Arrivals, Schedule};
use super::target::LoadTarget;
use super::{LoadPlan, LoadRun};
use tidegate_api::duration::nanos;

/// Time between two checks of whether the run was stopped.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);
/// Time after the end in which requests that were due before it are still sent, if they need not
/// wait for a slot: the generator was late.
const MAX_LATE_START: Duration = Duration::from_secs(5);
/// Time after the end in which a request still waits for a slot.
const MAX_LATE_SLOT: Duration = Duration::from_millis(100);

/// Rate and bound of an open loop.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OpenLoop {
    /// Mean requests per second.
    pub rate: f64,
    pub arrivals: Arrivals,
    pub max_in_flight: usize,
}

/// Sends all requests, and waits for their answers.
pub(super) async fn run<T: LoadTarget>(
    run: &Arc<LoadRun<T>>,
    load: &LoadPlan,
    open: OpenLoop,
    start: Instant,
) -> anyhow::Result<()> {
    let slots = Arc::new(Semaphore::new(open.max_in_flight));
    let source = match &load.replay {
        Some(replay) => RequestSource::Log(Box::new(replay.open()?)),
        None => RequestSource::Generated {
            schedule: Schedule::new(open.rate, open.arrivals, load.seed),
            keys: load.keys.sequence(load.seed, 0),
        },
    };
    let dispatcher = ArrivalDispatcher {
        run: Arc::clone(run),
        start,
        handle: Handle::current(),
        slots: Arc::clone(&slots),
        left: load.requests,
        slot_free_since: start,
        number: 0,
    };
    tokio::task::spawn_blocking(move || dispatcher.send_all(source)).await??;
    // Each task has a slot until its answer is recorded.
    let _ = slots.acquire_many(u32::try_from(open.max_in_flight)?).await?;
    Ok(())
}

/// Requests in the order of their due times.
enum RequestSource {
    Generated { schedule: Schedule, keys: KeySequence },
    Log(Box<ReplayedRequests>),
}

impl RequestSource {
    /// Returns the due time of the next request.
    fn next(&mut self) -> anyhow::Result<Option<Duration>> {
        match self {
            Self::Generated { schedule, .. } => Ok(schedule.next()),
            Self::Log(requests) => requests.next(),
        }
    }

    /// Returns the key of the request that was due last.
    fn key(&mut self) -> String {
        match self {
            Self::Generated { keys, .. } => {
                let mut key = String::new();
                keys.next_into(&mut key);
                key
            }
            Self::Log(requests) => requests.key.clone(),
        }
    }
}

struct ArrivalDispatcher<T> {
    run: Arc<LoadRun<T>>,
    start: Instant,
    handle: Handle,
    slots: Arc<Semaphore>,
    /// Measured requests that are left.
    left: Option<u64>,
    /// End of the last wait for a slot.
    slot_free_since: Instant,
    number: usize,
}

impl<T: LoadTarget> ArrivalDispatcher<T> {
    fn send_all(mut self, mut source: RequestSource) -> anyhow::Result<()> {
        precise_sleeps();
        let end = self.run.end;
        while let Some(due) = source.next()?.map(|offset| self.start + offset) {
            if end.is_some_and(|end| due >= end) || self.left == Some(0) {
                self.set_load_end(end.map_or(due, |end| end.min(due)));
                return Ok(());
            }
            self.wait_until(due);
            let Some(slot) = self.slot() else {
                self.set_load_end(Instant::now());
                let not_sent = self.count_not_sent(due, source)?;
                self.run.not_sent.store(not_sent, Ordering::Relaxed);
                return Ok(());
            };
            self.send(due, slot, source.key());
        }
        // The end of a log.
        self.set_load_end(Instant::now());
        Ok(())
    }

    fn set_load_end(&self, end: Instant) {
        let _ = self.run.load_time.set(end.saturating_duration_since(self.run.measured_from));
    }

    /// Waits until a time, or until the run is stopped.
    fn wait_until(&self, time: Instant) {
        while let Some(wait) = time.checked_duration_since(Instant::now())
            && !wait.is_zero()
            && !self.run.is_stopped()
        {
            std::thread::sleep(wait.min(CHECK_INTERVAL));
        }
    }

    /// Waits until fewer requests are in flight. Returns `None` if the run ends before.
    fn slot(&mut self) -> Option<OwnedSemaphorePermit> {
        let end = self.run.end;
        let is_over = end.is_some_and(|end| Instant::now() > end + MAX_LATE_START);
        if self.run.is_stopped() || is_over {
            return None;
        }
        if let Ok(slot) = Arc::clone(&self.slots).try_acquire_owned() {
            return Some(slot);
        }
        self.run.slots_exhausted.store(true, Ordering::Relaxed);
        let last = end.map(|end| end + MAX_LATE_SLOT);
        while !self.run.is_stopped() {
            let left = last.map(|last| last.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                break;
            }
            let wait = left.map_or(CHECK_INTERVAL, |left| left.min(CHECK_INTERVAL));
            let slot = Arc::clone(&self.slots).acquire_owned();
            let slot = self.handle.block_on(async { tokio::time::timeout(wait, slot).await });
            if let Ok(Ok(slot)) = slot {
                self.slot_free_since = Instant::now();
                return Some(slot);
            }
        }
        None
    }

    fn send(&mut self, due: Instant, slot: OwnedSemaphorePermit, key: String) {
        self.number = self.number.wrapping_add(1);
        let number = self.number;
        let is_measured = due >= self.run.measured_from;
        if is_measured {
            self.run.recorders.count_sent(number);
            self.left = self.left.map(|left| left.saturating_sub(1));
        }
        let is_late = due < self.slot_free_since;
        // A request that waited for a slot was delayed by the target until then.
        let could_start = due.max(self.slot_free_since);
        let run = Arc::clone(&self.run);
        self.handle.spawn(async move {
            let generator_delay = could_start.elapsed();
            let outcome = run.target.acquire(&key).await;
            if is_measured {
                let latency = run.latency_of(&outcome, due.elapsed());
                run.recorders.record(number, |part| {
                    part.add(outcome, latency);
                    part.generator_delay.saturating_record(nanos(generator_delay).max(1));
                    part.sent_late += u64::from(is_late);
                });
            }
            drop(slot);
        });
    }

    /// Returns the number of measured requests from this one on that were due when the run was
    /// stopped or ended.
    fn count_not_sent(&self, first: Instant, mut source: RequestSource) -> anyhow::Result<u64> {
        let stopped = self.run.stopped_at.get().copied().unwrap_or_else(Instant::now);
        let last = self.run.end.map_or(stopped, |end| end.min(stopped));
        let (mut count, mut next) = (0_u64, Some(first));
        while let Some(due) = next.filter(|due| *due < last) {
            count += u64::from(due >= self.run.measured_from);
            next = source.next()?.map(|offset| self.start + offset);
        }
        Ok(self.left.map_or(count, |left| count.min(left)))
    }
}

/// Lets this thread wake at the time that it asked for. By default Linux may wake it 50
/// microseconds later.
#[cfg(target_os = "linux")]
fn precise_sleeps() {
    let _ = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1));
}

#[cfg(not(target_os = "linux"))]
fn precise_sleeps() {}
