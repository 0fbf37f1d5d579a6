//! How the cost of a decision of ours grows, for each algorithm: with the keys in the store, and
//! with the limit.

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
/// In a turn.
const DECISIONS: usize = 200_000;
/// So long that it hardly ever ends while this runs.
const WINDOW: Duration = Duration::from_secs(86_400);

/// Twice at each size: asked for any key, and only ever for a few of them. The difference is what
/// the cache misses cost, and the second alone is what a larger table costs beside them.
pub(crate) fn by_keys(plan: Plan, results: &mut Results) -> Result<()> {
    let sizes: &[usize] = match plan {
        Plan::Full => &[1_000, 10_000, 100_000, 1_000_000, 10_000_000],
        Plan::Quick => &[1_000, 10_000, 1_000_000],
    };
    let few = walk(Kind::Uniform, FEW);
    let walks: Vec<Vec<String>> = sizes.iter().map(|&keys| walk(Kind::Uniform, keys)).collect();
    for algorithm in Algorithm::ALL {
        let quota = roomy(algorithm)?;
        let limiters =
            sizes.iter().map(|&keys| filled(keys, &quota)).collect::<Result<Vec<_>>>()?;
        for round in 0..=plan.rounds() {
            for ((keys, limiter), any) in sizes.iter().zip(&limiters).zip(&walks) {
                for (which, walk) in [("any", any), ("few", &few)] {
                    let from = round * DECISIONS % walk.len();
                    let start = Instant::now();
                    for key in walk.iter().cycle().skip(from).take(DECISIONS) {
                        ensure!(
                            limiter.blocking().acquire(&Charge::new(key, &quota))?.allowed,
                            "{algorithm}: denied"
                        );
                    }
                    // The first round is to get warm.
                    if round > 0 {
                        let case = format!("keys/{keys}/{which}");
                        results.add(&case, algorithm.as_str(), "ns", nanoseconds(start));
                    }
                }
            }
        }
        for (keys, limiter) in sizes.iter().zip(&limiters) {
            ensure!(
                limiter.store().keys() == *keys,
                "{algorithm}: of {keys} keys some have expired"
            );
        }
        let medians = sizes.iter().map(|keys| {
            let median = |which: &str| {
                let spread =
                    results.spread(&format!("keys/{keys}/{which}"), algorithm.as_str(), "ns");
                spread.map_or(f64::NAN, |spread| spread.median)
            };
            format!("{keys} keys {:.0} ns ({:.0} in the cache)", median("any"), median("few"))
        });
        println!("{algorithm}: {}", medians.collect::<Vec<_>>().join(", "));
    }
    Ok(())
}

/// Admits all that is asked here, and forgets no key in that time: a bucket would, had it a unit
/// back in milliseconds.
fn roomy(algorithm: Algorithm) -> Result<Quota> {
    Ok(match algorithm {
        Algorithm::TokenBucket | Algorithm::LeakyBucket => {
            Quota::new(algorithm, 1, Duration::from_secs(300))?.with_burst(1_000_000)?
        }
        _ => Quota::new(algorithm, 1_000_000, WINDOW)?,
    })
}

fn filled(keys: usize, quota: &Quota) -> Result<Limiter> {
    let limiter = Limiter::new(MemoryStore::new());
    for number in 0..keys {
        let key = key_of(number);
        ensure!(
            limiter.blocking().acquire(&Charge::new(&key, quota))?.allowed,
            "no room for {key}"
        );
    }
    Ok(limiter)
}

/// In the steady state: L requests in every window, so that a log is full, and loses an entry with
/// each that it gets. Time is driven by hand.
pub(crate) fn by_limit(plan: Plan, results: &mut Results) -> Result<()> {
    let limits: &[u64] = match plan {
        Plan::Full => &[10, 100, 1_000, 10_000, 100_000, 1_000_000],
        Plan::Quick => &[10, 1_000, 1_000_000],
    };
    let key = key_of(0);
    for algorithm in Algorithm::ALL {
        let mut stores = Vec::new();
        for &limit in limits {
            let clock = ByHand(Arc::new(AtomicU64::new(1_700_000_000_000_000)));
            let limiter = Limiter::new(MemoryStore::builder().clock(clock.clone()).build());
            stores.push((limit, Quota::new(algorithm, limit, WINDOW)?, clock, limiter));
        }
        for round in 0..=plan.rounds() {
            for (limit, quota, clock, limiter) in &stores {
                let charge = Charge::new(&key, quota);
                let step = u64::try_from(WINDOW.as_micros())? / limit;
                let decide = || {
                    clock.advance(step);
                    limiter.blocking().acquire(&charge)
                };
                if round == 0 {
                    for _ in 0..*limit {
                        decide()?;
                    }
                    continue;
                }
                let start = Instant::now();
                for _ in 0..DECISIONS {
                    std::hint::black_box(decide()?);
                }
                results.add(
                    &format!("limit/{limit}"),
                    algorithm.as_str(),
                    "ns",
                    nanoseconds(start),
                );
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
    fn now(&self) -> tidegate::Timestamp {
        tidegate::Timestamp::from_micros(self.0.load(Ordering::Relaxed))
    }

    /// Nobody waits here.
    fn sleep(&self, _: Duration) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(std::future::pending())
    }

    fn sleep_blocking(&self, duration: Duration) {
        std::thread::sleep(duration);
    }
}

/// Of one of [`DECISIONS`].
fn nanoseconds(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1e9 / DECISIONS as f64
}
