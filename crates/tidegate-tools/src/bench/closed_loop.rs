//! Closed loop: each caller waits for its answer before the next request.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::task::JoinSet;

use super::keys::KeySequence;
use super::target::LoadTarget;
use super::{LoadPlan, LoadRun};

/// Runs all callers until the end.
pub(super) async fn run<T: LoadTarget>(run: &Arc<LoadRun<T>>, load: &LoadPlan, concurrency: usize) {
    let left = load.requests.map(|requests| Arc::new(AtomicU64::new(requests)));
    let mut callers = JoinSet::new();
    for number in 0..concurrency {
        let keys = load.keys.sequence(load.seed, number as u64);
        callers.spawn(caller(Arc::clone(run), number, keys, left.clone()));
    }
    let (mut busy, mut count) = (Duration::ZERO, 0_u32);
    while let Some(caller) = callers.join_next().await {
        // A caller for whom no request was left did not take part.
        if let Ok(Some(time)) = caller {
            busy += time;
            count += 1;
        }
    }
    if let Some(mean) = busy.checked_div(count) {
        let _ = run.load_time.set(mean);
    }
}

/// Sends requests until the end. Returns the time until its last measured answer, if there is one.
async fn caller<T: LoadTarget>(
    run: Arc<LoadRun<T>>,
    number: usize,
    mut keys: KeySequence,
    left: Option<Arc<AtomicU64>>,
) -> Option<Duration> {
    let mut key = String::new();
    let mut busy = None;
    while !run.is_stopped() {
        // A target that answers without waiting would never let the other callers run.
        tokio::task::coop::consume_budget().await;
        keys.next_into(&mut key);
        let sent = Instant::now();
        if run.end.is_some_and(|end| sent >= end) {
            break;
        }
        let is_measured = sent >= run.measured_from;
        if is_measured && left.as_deref().is_some_and(|left| !take_one(left)) {
            break;
        }
        if is_measured {
            run.recorders.count_sent(number);
        }
        let outcome = run.target.acquire(&key).await;
        if is_measured {
            let latency = run.latency_of(&outcome, sent.elapsed());
            run.recorders.record(number, |part| part.add(outcome, latency));
            busy = Some(run.measured_from.elapsed());
        }
    }
    busy
}

/// Takes one of the requests that are left.
fn take_one(left: &AtomicU64) -> bool {
    let next = |left: u64| left.checked_sub(1);
    left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).is_ok()
}
