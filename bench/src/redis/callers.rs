//! Callers of the library: so many at a time, each waits for its decision before it asks for the
//! next.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use tidegate::{Charge, Limiter, Quota, Store};

/// For whom they ask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Users {
    /// Somebody else each time, of a million.
    Random,
    /// All for the same.
    Same,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Answers {
    pub(crate) decisions: f64,
    pub(crate) allowed: f64,
    pub(crate) per_second: f64,
    /// Of one decision, half of them within.
    pub(crate) median_micros: f64,
    /// Of one decision, 99 of 100 within.
    pub(crate) p99_micros: f64,
}

/// What one caller saw.
#[derive(Default)]
struct Seen {
    allowed: usize,
    nanoseconds: Vec<u32>,
}

pub(crate) async fn run<S: Store>(
    limiter: &Limiter<S>,
    quota: &Quota,
    users: Users,
    callers: usize,
    turn: Duration,
) -> Result<Answers> {
    let start = Instant::now();
    let quota = Arc::new(quota.clone());
    let tasks: Vec<_> = (0..callers)
        .map(|number| {
            tokio::spawn(caller(
                limiter.clone(),
                Arc::clone(&quota),
                users,
                number as u64,
                start + turn,
            ))
        })
        .collect();
    let (mut allowed, mut nanoseconds) = (0, Vec::new());
    for task in tasks {
        let seen = task.await??;
        allowed += seen.allowed;
        nanoseconds.extend(seen.nanoseconds);
    }
    let elapsed = start.elapsed().as_secs_f64();
    let decisions = nanoseconds.len();
    nanoseconds.sort_unstable();
    let percentile = |percent: usize| {
        nanoseconds.get(decisions * percent / 100).map_or(0.0, |&n| f64::from(n) / 1e3)
    };
    Ok(Answers {
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
    users: Users,
    number: u64,
    until: Instant,
) -> Result<Seen> {
    let mut seen = Seen::default();
    let mut random = (number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut name = "user:000000000000".to_owned();
    let mut asked = Instant::now();
    while asked < until {
        if users == Users::Random {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            name = format!("user:{:012}", (random >> 33) % 1_000_000);
        }
        let decision = limiter.acquire(&Charge::new(&name, &quota)).await?;
        let answered = Instant::now();
        seen.allowed += usize::from(decision.allowed);
        seen.nanoseconds.push(u32::try_from((answered - asked).as_nanos()).unwrap_or(u32::MAX));
        asked = answered;
        // A store that answers without waiting would keep the other callers, and the clock, from
        // their turn.
        tokio::task::consume_budget().await;
    }
    Ok(seen)
}
