//! Concurrent callers of the library. Each caller waits for its decision before the next request.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use tidegate::{Charge, Limiter, Quota, Store};

use super::call::user_name;
use super::random::Random;

/// Keys of the callers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CallerKeys {
    /// A random one of a million keys in each request.
    Random,
    /// The same key in all requests.
    Hot,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct CallersResult {
    pub(crate) decisions: f64,
    pub(crate) allowed: f64,
    pub(crate) per_second: f64,
    /// Median latency of a decision.
    pub(crate) median_micros: f64,
    /// 99th percentile of the latency of a decision.
    pub(crate) p99_micros: f64,
}

/// Results of one caller.
#[derive(Default)]
struct CallerResult {
    allowed: usize,
    nanoseconds: Vec<u32>,
}

pub(crate) async fn run<S: Store>(
    limiter: &Limiter<S>,
    quota: &Quota,
    keys: CallerKeys,
    callers: usize,
    duration: Duration,
) -> Result<CallersResult> {
    let start = Instant::now();
    let quota = Arc::new(quota.clone());
    let tasks: Vec<_> = (0..callers)
        .map(|number| {
            tokio::spawn(caller(
                limiter.clone(),
                Arc::clone(&quota),
                keys,
                number as u64,
                start + duration,
            ))
        })
        .collect();
    let (mut allowed, mut nanoseconds) = (0, Vec::new());
    for task in tasks {
        let result = task.await??;
        allowed += result.allowed;
        nanoseconds.extend(result.nanoseconds);
    }
    let elapsed = start.elapsed().as_secs_f64();
    let decisions = nanoseconds.len();
    nanoseconds.sort_unstable();
    let percentile = |percent: usize| {
        nanoseconds.get(decisions * percent / 100).map_or(0.0, |&n| f64::from(n) / 1e3)
    };
    Ok(CallersResult {
        decisions: decisions as f64,
        allowed: allowed as f64,
        per_second: decisions as f64 / elapsed,
        median_micros: percentile(50),
        p99_micros: percentile(99),
    })
}

async fn caller<S: Store>(
    limiter: Limiter<S>,
    quota: Arc<Quota>,
    keys: CallerKeys,
    number: u64,
    until: Instant,
) -> Result<CallerResult> {
    let mut result = CallerResult::default();
    let mut random = Random::new(number);
    let mut name = user_name("user", 0);
    let mut started = Instant::now();
    while started < until {
        if keys == CallerKeys::Random {
            name = user_name("user", random.below(1_000_000));
        }
        let decision = limiter.acquire(&Charge::new(&name, &quota)).await?;
        let finished = Instant::now();
        result.allowed += usize::from(decision.allowed);
        result.nanoseconds.push(u32::try_from((finished - started).as_nanos()).unwrap_or(u32::MAX));
        started = finished;
        // A store that answers without waiting would starve the other callers and the timer.
        tokio::task::consume_budget().await;
    }
    Ok(result)
}
