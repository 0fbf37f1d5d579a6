//! In-process comparison of the memory store with similar libraries: nanoseconds per decision,
//! bytes per key, and how both grow.
//!
//! This is a separate binary because it installs a counting allocator, which uses the system
//! allocator for all candidates.

use std::time::Instant;

use anyhow::{Result, ensure};
use tidegate_bench::plan::Plan;
use tidegate_bench::results::Results;

use crate::bare_table::BareTable;
use crate::candidates::{
    Candidate, EmptyLoop, Governor, Limitador, Scenario, Throttlecrab, Tidegate, key_of,
};
use crate::key_sequence::{Distribution, key_sequence};
use crate::turns::{DynCandidate, filled};

mod bare_table;
mod candidates;
mod footprint;
mod growth;
mod in_async;
mod key_sequence;
mod layer;
mod turns;

const MILLION: usize = 1_000_000;
/// Maximum time to fill a store, in seconds; candidates that take longer are skipped.
const MAX_FILL_SECONDS: f64 = 45.0;

fn main() -> Result<()> {
    let plan = Plan::from_env();
    layer::run(plan)?;
    if std::env::args().nth(1).as_deref() == Some("layer") {
        return Ok(());
    }
    let mut results = Results::new("in-process", plan);
    for &keys in plan.keys() {
        for scenario in [Scenario::Allowed, Scenario::Denied] {
            compare(plan, keys, scenario, &mut results)?;
        }
    }
    results.save()?;
    let mut results = Results::new("growth", plan);
    growth::by_keys(plan, &mut results)?;
    growth::by_limit(plan, &mut results)?;
    results.save()
}

fn compare(plan: Plan, keys: usize, scenario: Scenario, results: &mut Results) -> Result<()> {
    let mut candidates: Vec<Box<dyn DynCandidate>> = vec![Box::new(EmptyLoop)];
    add_candidate::<Throttlecrab>(keys, scenario, &mut candidates, results)?;
    add_candidate::<Limitador>(keys, scenario, &mut candidates, results)?;
    add_candidate::<Governor>(keys, scenario, &mut candidates, results)?;
    add_candidate::<BareTable>(keys, scenario, &mut candidates, results)?;
    // Last, because its keys expire; those of the other libraries do not during the measurement.
    add_candidate::<Tidegate>(keys, scenario, &mut candidates, results)?;
    for distribution in Distribution::ALL {
        let sequence = key_sequence(distribution, keys);
        for threads in [1, 2] {
            let case = format!("{keys}/{threads}/{}/{}", scenario.name(), distribution.name());
            let counts: Vec<usize> = candidates
                .iter_mut()
                .map(|candidate| candidate.warm_up(&sequence, threads, plan.in_process_turn()))
                .collect();
            for round in 0..plan.rounds() {
                for turn in 0..candidates.len() {
                    // Rotate the order of the candidates in each round.
                    let index = (turn + round) % candidates.len();
                    let candidate = &mut candidates[index];
                    let outcome = candidate.turn(&sequence, threads, counts[index], round + 1);
                    let expected =
                        if scenario == Scenario::Allowed { outcome.decisions } else { 0 };
                    let name = candidate.name();
                    ensure!(
                        outcome.allowed == expected || name == EmptyLoop::NAME,
                        "{name}, {case}: {} of {} allowed, expected {expected}",
                        outcome.allowed,
                        outcome.decisions
                    );
                    results.add(&case, name, "ns", outcome.nanoseconds());
                }
            }
            print_case(&case, &candidates, results);
        }
    }
    Ok(())
}

/// Fills a candidate with its keys and adds it to the comparison, unless that would exceed the
/// available memory or [`MAX_FILL_SECONDS`].
fn add_candidate<C: Candidate + 'static>(
    keys: usize,
    scenario: Scenario,
    candidates: &mut Vec<Box<dyn DynCandidate>>,
    results: &mut Results,
) -> Result<()> {
    let size = keys.to_string();
    if keys > MILLION {
        let at_a_million =
            |metric| results.spread("1000000", C::NAME, metric).map_or(0.0, |spread| spread.median);
        let (gigabytes, seconds) = (
            at_a_million("bytes") * keys as f64 / 1e9,
            at_a_million("fill_ns") * keys as f64 / 1e9,
        );
        // While a table grows, the old and the new one exist at the same time.
        if gigabytes * 1.7e9 > available_memory() || seconds > MAX_FILL_SECONDS {
            println!(
                "{}: skipping {keys} keys ({gigabytes:.1} GB, {seconds:.0} s to fill)",
                C::NAME
            );
            if scenario == Scenario::Allowed {
                results.add(&size, C::NAME, "skipped_gigabytes", gigabytes);
                results.add(&size, C::NAME, "skipped_seconds", seconds);
            }
            return Ok(());
        }
    }
    let start = Instant::now();
    let (candidate, bytes) = filled::<C>(keys, scenario)?;
    if scenario == Scenario::Allowed {
        results.add(&size, C::NAME, "fill_ns", start.elapsed().as_secs_f64() * 1e9 / keys as f64);
        results.add(&size, C::NAME, "bytes", bytes as f64 / keys as f64);
    }
    candidates.push(Box::new(candidate));
    Ok(())
}

fn print_case(case: &str, candidates: &[Box<dyn DynCandidate>], results: &Results) {
    print!("{case}:");
    for candidate in candidates {
        if let Some(spread) = results.spread(case, candidate.name(), "ns") {
            print!(" {} {:.1} ns", candidate.name(), spread.median);
        }
    }
    for other in [Governor::NAME, BareTable::NAME] {
        if let Some(ratio) = results.ratio("ns", (case, other), (case, Tidegate::NAME)) {
            print!("; ratio to {other}: {ratio}");
        }
    }
    println!();
}

fn available_memory() -> f64 {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kilobytes = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<f64>().ok());
    kilobytes.map_or(f64::INFINITY, |kilobytes| kilobytes * 1024.0)
}
