//! A contestant's turn: so many decisions, by one thread or by two.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};

use crate::contestants::{Admits, Contestant, key_of};
use crate::footprint::kept_by;

/// What came of a turn.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Outcome {
    pub(crate) decisions: usize,
    pub(crate) allowed: usize,
    elapsed: Duration,
}

impl Outcome {
    /// From one decision to the next, whichever thread makes it.
    pub(crate) fn nanoseconds(&self) -> f64 {
        self.elapsed.as_secs_f64() * 1e9 / self.decisions as f64
    }
}

/// A [`Contestant`] behind a box. The loop over its decisions is compiled for each by itself.
pub(crate) trait Turns {
    fn name(&self) -> &'static str;

    /// `count` decisions a thread. Each turn goes on where the last one, its number one less,
    /// stopped.
    fn turn(&mut self, walk: &[String], threads: usize, count: usize, number: usize) -> Outcome;

    /// Gets warm, and finds out how many decisions a thread make a turn of this length.
    fn warm_up(&mut self, walk: &[String], threads: usize, turn: Duration) -> usize {
        let first = self.turn(walk, threads, 10_000.min(walk.len()), 0);
        let count = turn.as_secs_f64() / (first.elapsed.as_secs_f64() / first.decisions as f64);
        // No key may be asked for more often than it admits.
        let most = if walk.len() < 1_000_000 { 1_000_000.0 } else { 250_000.0 };
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped")]
        let count = count.clamp(1_000.0, most) as usize / threads;
        self.turn(walk, threads, count, 0);
        count
    }
}

impl<C: Contestant> Turns for C {
    fn name(&self) -> &'static str {
        C::NAME
    }

    fn turn(&mut self, walk: &[String], threads: usize, count: usize, number: usize) -> Outcome {
        let from = |thread: usize| (number * threads + thread) * count;
        if threads == 1 {
            let start = Instant::now();
            let allowed = visits(walk, from(0), count).filter(|key| self.decide_alone(key)).count();
            return Outcome { decisions: count, allowed, elapsed: start.elapsed() };
        }
        let contestant = &*self;
        let ready = Barrier::new(threads);
        let work = |thread: usize| {
            ready.wait();
            let start = Instant::now();
            let allowed =
                visits(walk, from(thread), count).filter(|key| contestant.decide(key)).count();
            (allowed, start.elapsed())
        };
        let outcomes: Vec<(usize, Duration)> = std::thread::scope(|scope| {
            let work = &work;
            let threads: Vec<_> =
                (0..threads).map(|thread| scope.spawn(move || work(thread))).collect();
            threads.into_iter().map(|thread| thread.join().expect("no contestant panics")).collect()
        });
        let allowed = outcomes.iter().map(|(allowed, _)| allowed).sum();
        let elapsed = outcomes.iter().map(|(_, elapsed)| *elapsed).max().unwrap_or_default();
        Outcome { decisions: count * threads, allowed, elapsed }
    }
}

/// `count` keys of the walk, over and over.
fn visits(walk: &[String], from: usize, count: usize) -> impl Iterator<Item = &String> {
    walk.iter().cycle().skip(from % walk.len()).take(count)
}

/// A contestant that holds its keys, and the bytes that it has allocated for them.
pub(crate) fn filled<C: Contestant>(keys: usize, admits: Admits) -> Result<(C, i64)> {
    let refuses_none = |contestant: &C| {
        (0..keys).all(|number| {
            let key = key_of(number);
            (0..admits.to_fill()).all(|_| contestant.decide(&key))
        })
    };
    let (contestant, bytes) =
        kept_by(|| C::new(keys, admits).map(|new| Some(new).filter(refuses_none)));
    let contestant = contestant?.with_context(|| format!("{} refused a new key", C::NAME))?;
    Ok((contestant, bytes))
}
