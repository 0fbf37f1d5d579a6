//! A decision of the async limiter, compared with one of the blocking limiter, in the same loop.

use std::hint::black_box;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use tidegate::{Charge, Decision, Error, Limiter, MemoryStore, Quota};
use tidegate_bench::plan::Plan;
use tidegate_bench::results::Results;

use crate::candidates::key_of;

const KEYS: usize = 1_000;

/// Adds the nanoseconds per decision of both, and how many more the async limiter takes.
pub(crate) fn run(plan: Plan, results: &mut Results) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    let limiter = Limiter::new(MemoryStore::new());
    let quota = Quota::token_bucket(1_000_000_000, Duration::from_secs(1))?;
    let keys: Vec<String> = (0..KEYS).map(key_of).collect();
    let turn = |is_async: bool| {
        if is_async {
            let acquire =
                async |key: &str| limiter.acquire(&Charge::new(black_box(key), &quota)).await;
            runtime.block_on(nanoseconds(plan, &keys, acquire))
        } else {
            let blocking = limiter.blocking();
            let acquire = async |key: &str| blocking.acquire(&Charge::new(black_box(key), &quota));
            runtime.block_on(nanoseconds(plan, &keys, acquire))
        }
    };
    // The first round warms up.
    for round in 0..=plan.rounds() {
        let is_async_first = round % 2 == 0;
        let (first, second) = (turn(is_async_first)?, turn(!is_async_first)?);
        let (in_async, blocking) = if is_async_first { (first, second) } else { (second, first) };
        if round > 0 {
            results.add("acquire", "blocking", "ns", blocking);
            results.add("acquire", "async", "ns", in_async);
            results.add("acquire", "async", "ns_more", in_async - blocking);
        }
    }
    Ok(())
}

/// Decides for the time of a turn, and returns nanoseconds per decision.
async fn nanoseconds(
    plan: Plan,
    keys: &[String],
    acquire: impl AsyncFn(&str) -> Result<Decision, Error>,
) -> Result<f64> {
    let start = Instant::now();
    let mut decisions = 0;
    while start.elapsed() < plan.in_process_turn() {
        for key in keys {
            ensure!(black_box(acquire(key).await?).allowed, "a decision was denied");
        }
        decisions += keys.len();
    }
    Ok(start.elapsed().as_secs_f64() * 1e9 / decisions as f64)
}
