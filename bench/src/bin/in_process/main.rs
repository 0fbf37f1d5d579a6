//! In process: nanoseconds a decision and bytes a key of our memory store and of its peers, and how
//! both grow.
//!
//! A binary of its own, because its allocator counts. Everything else about it is the system's, for
//! all contestants.

use std::time::Instant;

use anyhow::{Result, ensure};
use tidegate_bench::plan::Plan;
use tidegate_bench::results::Results;

use crate::contestants::{
    Admits, Contestant, Governor, Limitador, LoopAlone, Throttlecrab, Tidegate, key_of,
};
use crate::turns::{Turns, filled};
use crate::walk::{Kind, walk};

mod contestants;
mod footprint;
mod growth;
mod turns;
mod walk;

const A_MILLION: usize = 1_000_000;
/// In seconds.
const LONGEST_FILL: f64 = 45.0;

fn main() -> Result<()> {
    let plan = Plan::chosen();
    let mut results = Results::new("in-process", plan);
    for &keys in plan.keys() {
        for admits in [Admits::All, Admits::None] {
            side_by_side(plan, keys, admits, &mut results)?;
        }
    }
    results.save()?;
    let mut results = Results::new("growth", plan);
    growth::by_keys(plan, &mut results)?;
    growth::by_limit(plan, &mut results)?;
    results.save()
}

fn side_by_side(plan: Plan, keys: usize, admits: Admits, results: &mut Results) -> Result<()> {
    let mut contestants: Vec<Box<dyn Turns>> = vec![Box::new(LoopAlone)];
    enter::<Throttlecrab>(keys, admits, &mut contestants, results)?;
    enter::<Limitador>(keys, admits, &mut contestants, results)?;
    enter::<Governor>(keys, admits, &mut contestants, results)?;
    // Last, because what it holds expires, which no peer's does in the time that this takes.
    enter::<Tidegate>(keys, admits, &mut contestants, results)?;
    for kind in Kind::ALL {
        let walk = walk(kind, keys);
        for threads in [1, 2] {
            let case = format!("{keys}/{threads}/{}/{}", admits.name(), kind.name());
            let counts: Vec<usize> = contestants
                .iter_mut()
                .map(|contestant| contestant.warm_up(&walk, threads, plan.short_turn()))
                .collect();
            for round in 0..plan.rounds() {
                for turn in 0..contestants.len() {
                    // Who goes first changes.
                    let who = (turn + round) % contestants.len();
                    let contestant = &mut contestants[who];
                    let outcome = contestant.turn(&walk, threads, counts[who], round + 1);
                    let expected = if admits == Admits::All { outcome.decisions } else { 0 };
                    let name = contestant.name();
                    ensure!(
                        outcome.allowed == expected || name == LoopAlone::NAME,
                        "{name}, {case}: {} of {} allowed, and {expected} expected",
                        outcome.allowed,
                        outcome.decisions
                    );
                    results.add(&case, name, "ns", outcome.nanoseconds());
                }
            }
            print_case(&case, &contestants, results);
        }
    }
    Ok(())
}

/// Fills a contestant with its keys, unless that would take more memory than there is, or more time
/// than all the rest.
fn enter<C: Contestant + 'static>(
    keys: usize,
    admits: Admits,
    contestants: &mut Vec<Box<dyn Turns>>,
    results: &mut Results,
) -> Result<()> {
    let size = keys.to_string();
    if keys > A_MILLION {
        let at_a_million =
            |metric| results.spread("1000000", C::NAME, metric).map_or(0.0, |spread| spread.median);
        let (gigabytes, seconds) = (
            at_a_million("bytes") * keys as f64 / 1e9,
            at_a_million("fill_ns") * keys as f64 / 1e9,
        );
        // A table that grows is there twice for a moment.
        if gigabytes * 1.7e9 > available_memory() || seconds > LONGEST_FILL {
            println!(
                "{keys} keys are left out for {}: {gigabytes:.1} GB, {seconds:.0} s to fill it",
                C::NAME
            );
            if admits == Admits::All {
                results.add(&size, C::NAME, "left_out_gigabytes", gigabytes);
                results.add(&size, C::NAME, "left_out_seconds", seconds);
            }
            return Ok(());
        }
    }
    let start = Instant::now();
    let (contestant, bytes) = filled::<C>(keys, admits)?;
    if admits == Admits::All {
        results.add(&size, C::NAME, "fill_ns", start.elapsed().as_secs_f64() * 1e9 / keys as f64);
        results.add(&size, C::NAME, "bytes", bytes as f64 / keys as f64);
    }
    contestants.push(Box::new(contestant));
    Ok(())
}

fn print_case(case: &str, contestants: &[Box<dyn Turns>], results: &Results) {
    print!("{case}:");
    for contestant in contestants {
        if let Some(spread) = results.spread(case, contestant.name(), "ns") {
            print!(" {} {:.1} ns", contestant.name(), spread.median);
        }
    }
    match results.ratio("ns", (case, Governor::NAME), (case, Tidegate::NAME)) {
        Some(ratio) => println!("; against {}: {ratio}", Governor::NAME),
        None => println!(),
    }
}

fn available_memory() -> f64 {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kilobytes = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<f64>().ok());
    kilobytes.map_or(f64::INFINITY, |kilobytes| kilobytes * 1024.0)
}
