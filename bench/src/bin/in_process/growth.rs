//! How the cost of a decision of ours grows, for each algorithm: with the keys in the store, and with the limit.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use tidegate::{Algorithm, Charge, Clock, Limiter, MemoryStore, Quota};
use tidegate_bench::plan::Plan;
use tidegate_bench::results::Results;

use crate::contestants::key_of;
use crate::walk::{Kind, walk};

/// So few that they stay in the cache, however many others there are in the store.
const FEW: usize = 1_000;
const WINDOW: Duration = Duration::from_secs(3_600);

/// Twice at each size: asked for any key, and only ever for a few of them. The difference is what the cache misses cost,
/// and the second alone is what a larger table costs beside them.
pub(crate) fn by_keys(plan: Plan, results: &mut Results) -> Result<()> {
    let sizes: &[usize] = match plan {
        Plan::Full => &[1_000, 10_000, 100_000, 1_000_000, 10_000_000],
        Plan::Quick => &[1_000, 10_000, 1_000_000],
    };
    for algorithm in Algorithm::ALL {
        let quota = Quota::new(algorithm, 1_000_000, WINDOW)?;
        for &keys in sizes {
            let limiter = Limiter::new(MemoryStore::new());
            for number in 0..keys {
                let key = key_of(number);
                ensure!(
                    limiter.blocking().acquire(&Charge::new(&key, &quota))?.allowed,
                    "{algorithm}: no room for a key"
                );
            }
            for (which, walk) in [("any", walk(Kind::Uniform, keys)), ("few", walk(Kind::Uniform, FEW))] {
                let mut at = 0;
                for round in 0..=plan.rounds() {
                    let count = 200_000;
                    let start = Instant::now();
                    for key in walk.iter().cycle().skip(at).take(count) {
                        ensure!(limiter.blocking().acquire(&Charge::new(key, &quota))?.allowed, "{algorithm}: denied");
                    }
                    at = (at + count) % walk.len();
                    // The first round is to get warm.
                    if round > 0 {
                        let case = format!("keys/{keys}/{which}");
                        results.add(&case, algorithm.as_str(), "ns", nanoseconds(start, count));
                    }
                }
            }
        }
        let medians = sizes.iter().map(|keys| {
            let median = |which: &str| {
                let spread = results.spread(&format!("keys/{keys}/{which}"), algorithm.as_str(), "ns");
                spread.map_or(f64::NAN, |spread| spread.median)
            };
            format!("{keys} keys {:.0} ns ({:.0} in the cache)", median("any"), median("few"))
        });
        println!("{algorithm}: {}", medians.collect::<Vec<_>>().join(", "));
    }
    Ok(())
}

/// In the steady state: L requests in every window, so that a log is full, and loses an entry with each that it gets. Time
/// is driven by hand.
pub(crate) fn by_limit(plan: Plan, results: &mut Results) -> Result<()> {
    let limits: &[u64] = match plan {
        Plan::Full => &[10, 100, 1_000, 10_000, 100_000, 1_000_000],
        Plan::Quick => &[10, 1_000, 1_000_000],
    };
    let key = key_of(0);
    for algorithm in Algorithm::ALL {
        for &limit in limits {
            let clock = ByHand(Arc::new(AtomicU64::new(1_700_000_000_000_000)));
            let limiter = Limiter::new(MemoryStore::builder().clock(clock.clone()).build());
            let quota = Quota::new(algorithm, limit, WINDOW)?;
            let charge = Charge::new(&key, &quota);
            let step = u64::try_from(WINDOW.as_micros())? / limit;
            for _ in 0..limit {
                clock.advance(step);
                limiter.blocking().acquire(&charge)?;
            }
            for round in 0..=plan.rounds() {
                let count = 100_000;
                let start = Instant::now();
                for _ in 0..count {
                    clock.advance(step);
                    std::hint::black_box(limiter.blocking().acquire(&charge)?);
                }
                if round > 0 {
                    let case = format!("limit/{limit}");
                    results.add(&case, algorithm.as_str(), "ns", nanoseconds(start, count));
                }
            }
        }
        let medians = limits.iter().map(|limit| {
            let spread = results.spread(&format!("limit/{limit}"), algorithm.as_str(), "ns");
            format!("L = {limit} {:.0} ns", spread.map_or(f64::NAN, |spread| spread.median))
        });
        println!("{algorithm}: {}", medians.collect::<Vec<_>>().join(", "));
    }
    Ok(())
}

/// A clock that costs next to nothing, unlike the library's for tests, which wakes sleepers.
#[derive(Debug, Clone)]
struct ByHand(Arc<AtomicU64>);

impl ByHand {
    fn advance(&self, micros: u64) {
        self.0.fetch_add(micros, Ordering::Relaxed);
    }
}

impl Clock for ByHand {
    fn now(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Nobody waits here.
    fn sleep(&self, _: Duration) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(std::future::pending())
    }

    fn sleep_blocking(&self, duration: Duration) {
        std::thread::sleep(duration);
    }
}

fn nanoseconds(start: Instant, count: usize) -> f64 {
    start.elapsed().as_secs_f64() * 1e9 / count as f64
}
