//! One turn of a candidate: a number of decisions, by one or two threads.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};

use crate::candidates::{Candidate, Scenario, key_of};
use crate::footprint::measure_allocated;

/// Result of a turn.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Outcome {
    pub(crate) decisions: usize,
    pub(crate) allowed: usize,
    elapsed: Duration,
}

impl Outcome {
    /// Returns the time from one decision to the next, over all threads.
    pub(crate) fn nanoseconds(&self) -> f64 {
        self.elapsed.as_secs_f64() * 1e9 / self.decisions as f64
    }
}

/// Object-safe view of a [`Candidate`]. The loop over decisions is compiled for each candidate.
pub(crate) trait DynCandidate {
    fn name(&self) -> &'static str;

    /// Makes `count` decisions per thread. Turn `number` continues the sequence where turn
    /// `number - 1` stopped.
    fn turn(&mut self, sequence: &[String], threads: usize, count: usize, number: usize)
    -> Outcome;

    /// Warms up, and returns the number of decisions per thread for a turn of this duration.
    fn warm_up(&mut self, sequence: &[String], threads: usize, turn: Duration) -> usize {
        let first = self.turn(sequence, threads, 10_000.min(sequence.len()), 0);
        let count = turn.as_secs_f64() / (first.elapsed.as_secs_f64() / first.decisions as f64);
        // Keys must stay below their limit.
        let max = if sequence.len() < 1_000_000 { 1_000_000.0 } else { 250_000.0 };
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped")]
        let count = count.clamp(1_000.0, max) as usize / threads;
        self.turn(sequence, threads, count, 0);
        count
    }
}

impl<C: Candidate> DynCandidate for C {
    fn name(&self) -> &'static str {
        C::NAME
    }

    fn turn(
        &mut self,
        sequence: &[String],
        threads: usize,
        count: usize,
        number: usize,
    ) -> Outcome {
        let from = |thread: usize| (number * threads + thread) * count;
        if threads == 1 {
            let start = Instant::now();
            let allowed = cyclic_keys(sequence, from(0), count)
                .filter(|key| self.decide_exclusive(key))
                .count();
            return Outcome { decisions: count, allowed, elapsed: start.elapsed() };
        }
        let candidate = &*self;
        let ready = Barrier::new(threads);
        let work = |thread: usize| {
            ready.wait();
            let start = Instant::now();
            let allowed = cyclic_keys(sequence, from(thread), count)
                .filter(|key| candidate.decide(key))
                .count();
            (allowed, start.elapsed())
        };
        let outcomes: Vec<(usize, Duration)> = std::thread::scope(|scope| {
            let work = &work;
            let threads: Vec<_> =
                (0..threads).map(|thread| scope.spawn(move || work(thread))).collect();
            threads
                .into_iter()
                .map(|thread| thread.join().expect("candidates do not panic"))
                .collect()
        });
        let allowed = outcomes.iter().map(|(allowed, _)| allowed).sum();
        let elapsed = outcomes.iter().map(|(_, elapsed)| *elapsed).max().unwrap_or_default();
        Outcome { decisions: count * threads, allowed, elapsed }
    }
}

/// Returns `count` keys of the sequence, which is repeated.
fn cyclic_keys(sequence: &[String], from: usize, count: usize) -> impl Iterator<Item = &String> {
    sequence.iter().cycle().skip(from % sequence.len()).take(count)
}

/// Returns a candidate that holds its keys, and the number of bytes that it has allocated.
pub(crate) fn filled<C: Candidate>(keys: usize, scenario: Scenario) -> Result<(C, i64)> {
    let admits_all_keys = |candidate: &C| {
        (0..keys).all(|number| {
            let key = key_of(number);
            (0..scenario.requests_per_key()).all(|_| candidate.decide(&key))
        })
    };
    let (candidate, bytes) =
        measure_allocated(|| C::new(keys, scenario).map(|new| Some(new).filter(admits_all_keys)));
    let candidate = candidate?.with_context(|| format!("{} denied a new key", C::NAME))?;
    Ok((candidate, bytes))
}
