//! Growth of the cost of a Tidegate decision per algorithm: with the number of keys in the store,
//! and with the limit.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use tidegate::{Algorithm, Charge, Clock, Limiter, MemoryStore, Quota, Timestamp};
use tidegate_bench::plan::Plan;
use tidegate_bench::results::Results;

use crate::candidates::key_of;
use crate::key_sequence::{Distribution, key_sequence};

/// Number of keys that stay in the CPU cache, independent of the number of keys in the store.
const CACHED_KEYS: usize = 1_000;
/// Decisions per turn.
const DECISIONS: usize = 200_000;
/// Window that is longer than the measurement.
const WINDOW: Duration = Duration::from_secs(86_400);

/// Measures each size twice: with decisions for all keys, and with decisions for a few keys that
/// stay in the cache. The second shows the cost of a larger table without cache misses; the
/// difference is the cost of cache misses.
pub(crate) fn by_keys(plan: Plan, results: &mut Results) -> Result<()> {
    let sizes: &[usize] = match plan {
        Plan::Full => &[1_000, 10_000, 100_000, 1_000_000, 10_000_000],
        Plan::Quick => &[1_000, 10_000, 1_000_000],
    };
    let cached = key_sequence(Distribution::Uniform, CACHED_KEYS);
    let sequences: Vec<Vec<String>> =
        sizes.iter().map(|&keys| key_sequence(Distribution::Uniform, keys)).collect();
    for algorithm in windowed() {
        let quota = unlimited_quota(algorithm)?;
        let limiters =
            sizes.iter().map(|&keys| filled_limiter(keys, &quota)).collect::<Result<Vec<_>>>()?;
        for round in 0..=plan.rounds() {
            for ((keys, limiter), all) in sizes.iter().zip(&limiters).zip(&sequences) {
                for (which, sequence) in [("all", all), ("cached", &cached)] {
                    let from = round * DECISIONS % sequence.len();
                    let start = Instant::now();
                    for key in sequence.iter().cycle().skip(from).take(DECISIONS) {
                        ensure!(
                            limiter.blocking().acquire(&Charge::new(key, &quota))?.allowed,
                            "{algorithm}: denied"
                        );
                    }
                    // The first round is a warm-up.
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
                "{algorithm}: some of {keys} keys have expired"
            );
        }
        let medians = sizes.iter().map(|keys| {
            let median = |which: &str| {
                let spread =
                    results.spread(&format!("keys/{keys}/{which}"), algorithm.as_str(), "ns");
                spread.map_or(f64::NAN, |spread| spread.median)
            };
            format!("{keys} keys {:.0} ns ({:.0} cached)", median("all"), median("cached"))
        });
        println!("{algorithm}: {}", medians.collect::<Vec<_>>().join(", "));
    }
    Ok(())
}

/// Returns the algorithms that have a window.
fn windowed() -> impl Iterator<Item = Algorithm> {
    Algorithm::ALL.into_iter().filter(|algorithm| *algorithm != Algorithm::Concurrency)
}

/// Returns a quota that admits all requests of this benchmark and evicts no key during it. A bucket
/// with a short refill interval would be evicted when it is full.
fn unlimited_quota(algorithm: Algorithm) -> Result<Quota> {
    Ok(match algorithm {
        Algorithm::TokenBucket | Algorithm::LeakyBucket => {
            Quota::new(algorithm, 1, Duration::from_secs(300))?.with_burst(1_000_000)?
        }
        _ => Quota::new(algorithm, 1_000_000, WINDOW)?,
    })
}

fn filled_limiter(keys: usize, quota: &Quota) -> Result<Limiter> {
    // One policy may use 16 of 17 parts of a store.
    let store = MemoryStore::builder().max_keys((keys + keys / 8).max(10_000_000)).build();
    let limiter = Limiter::new(store);
    for number in 0..keys {
        let key = key_of(number);
        ensure!(limiter.blocking().acquire(&Charge::new(&key, quota))?.allowed, "{key} was denied");
    }
    Ok(limiter)
}

/// Measures the steady state with L requests per window: a log is full, and each new entry replaces
/// an expired one. The clock is advanced by the benchmark.
pub(crate) fn by_limit(plan: Plan, results: &mut Results) -> Result<()> {
    let limits: &[u64] = match plan {
        Plan::Full => &[10, 100, 1_000, 10_000, 100_000, 1_000_000],
        Plan::Quick => &[10, 1_000, 1_000_000],
    };
    let key = key_of(0);
    for algorithm in windowed() {
        let mut stores = Vec::new();
        for &limit in limits {
            let clock = SteppedClock(Arc::new(AtomicU64::new(1_700_000_000_000_000)));
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
                        let _ = decide()?;
                    }
                    continue;
                }
                let start = Instant::now();
                for _ in 0..DECISIONS {
                    let _ = std::hint::black_box(decide()?);
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

/// Manual clock with minimal overhead; unlike `ManualClock`, it does not wake sleeping tasks.
#[derive(Debug, Clone)]
struct SteppedClock(Arc<AtomicU64>);

impl SteppedClock {
    fn advance(&self, micros: u64) {
        self.0.fetch_add(micros, Ordering::Relaxed);
    }
}

impl Clock for SteppedClock {
    fn now(&self) -> Timestamp {
        Timestamp::from_micros(self.0.load(Ordering::Relaxed))
    }

    /// Never completes: the benchmark does not sleep on this clock.
    fn sleep(&self, _: Duration) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(std::future::pending())
    }

    fn sleep_blocking(&self, duration: Duration) {
        std::thread::sleep(duration);
    }
}

/// Returns the time per decision of a turn.
fn nanoseconds(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1e9 / DECISIONS as f64
}
