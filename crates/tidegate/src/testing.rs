//! The conformance suite: drives any [`Store`] against a naive model, and tells the first
//! difference.
//!
//! A seed makes a sequence of steps (acquire, `acquire_all`, peek, refund, reset, take, report;
//! time that passes by interesting amounts; a clock that steps back; limits that change). Every
//! field of every decision must equal the model's. A sequence that fails is shortened to the steps
//! that matter before it is shown.
//!
//! ```
//! use tidegate::testing::conformance;
//! use tidegate::{Limiter, MemoryStore};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() {
//! // A store of your own goes here. It is made anew for each sequence, on the clock that the suite moves.
//! conformance(0..20, async |clock| Limiter::new(MemoryStore::builder().clock(clock).build())).await;
//! # }
//! ```

use std::fmt::Write as _;
use std::time::Duration;

use crate::charge::Charge;
use crate::clock::{Clock, ManualClock};
use crate::decision::Decision;
use crate::limiter::Limiter;
use crate::store::{Action, Store};

mod model;
mod sequence;

pub use model::Model;
use sequence::{Sequence, Step};

/// Runs the sequence of each seed on a store of its own.
///
/// # Panics
///
/// If a decision differs from the model's: with the seed, and the shortest sequence that still
/// shows it.
pub async fn conformance<S: Store>(
    seeds: impl IntoIterator<Item = u64>,
    mut make: impl AsyncFnMut(ManualClock) -> Limiter<S>,
) {
    for seed in seeds {
        check(seed, Sequence::from_seed(seed), &mut make).await;
    }
}

/// The same for logs that grow to hundreds of requests: few steps are enough for the other
/// algorithms, not for these.
///
/// # Panics
///
/// As [`conformance`].
pub async fn conformance_of_long_logs<S: Store>(
    seeds: impl IntoIterator<Item = u64>,
    mut make: impl AsyncFnMut(ManualClock) -> Limiter<S>,
) {
    for seed in seeds {
        check(seed, Sequence::of_long_log(seed), &mut make).await;
    }
}

async fn check<S: Store>(
    seed: u64,
    sequence: Sequence,
    make: &mut impl AsyncFnMut(ManualClock) -> Limiter<S>,
) {
    if let Err(difference) = run(&sequence, make).await {
        let (shortest, difference) = shorten(sequence, difference, make).await;
        panic!("seed {seed} does not conform:\n{shortest}{difference}");
    }
}

/// Leaves out steps as long as there is still a difference.
async fn shorten<S: Store>(
    mut sequence: Sequence,
    mut difference: String,
    make: &mut impl AsyncFnMut(ManualClock) -> Limiter<S>,
) -> (Sequence, String) {
    let mut chunk = sequence.steps.len().div_ceil(2);
    loop {
        let mut at = 0;
        while at < sequence.steps.len() {
            let mut shorter = sequence.clone();
            shorter.steps.drain(at..(at + chunk).min(sequence.steps.len()));
            match run(&shorter, make).await {
                Err(still) => (sequence, difference) = (shorter, still),
                Ok(()) => at += chunk,
            }
        }
        if chunk == 1 {
            return (sequence, difference);
        }
        chunk = chunk.div_ceil(2);
    }
}

async fn run<S: Store>(
    sequence: &Sequence,
    make: &mut impl AsyncFnMut(ManualClock) -> Limiter<S>,
) -> Result<(), String> {
    let clock = ManualClock::new();
    let limiter = make(clock.clone()).await;
    let mut model = Model::default();
    let mut retry_after = Duration::ZERO;
    let mut decided_at: Vec<u64> = Vec::new();
    for (index, step) in sequence.steps.iter().enumerate() {
        let (action, charges) = match step {
            Step::Advance(advance) => {
                clock.advance(advance.duration(retry_after));
                // A count that the shortest window of its policy no longer needs may have expired
                // or not.
                for charge in sequence.charges_of_changed_windows() {
                    if model.nothing_counts(&charge, clock.now()) {
                        model.decide(Action::Reset, &[charge], clock.now());
                        limiter.reset(&charge).await.map_err(|error| error.to_string())?;
                    }
                }
                continue;
            }
            Step::Back(duration) => {
                // What has expired may be forgotten or not, as the store likes. Forget it
                // everywhere first.
                for charge in sequence.all_charges() {
                    if model.nothing_counts(&charge, clock.now()) {
                        model.decide(Action::Reset, &[charge], clock.now());
                        limiter.reset(&charge).await.map_err(|error| error.to_string())?;
                    }
                }
                clock.step_back(*duration);
                continue;
            }
            Step::Decide(action, charges) => (*action, charges),
        };
        let charged_at =
            |charged: usize| decided_at.iter().rev().nth(charged).copied().unwrap_or_default();
        let charge = |part: &sequence::Part| {
            sequence.charge(part).with_charged_at(part.charged.map(charged_at).unwrap_or_default())
        };
        let charges: Vec<Charge<'_>> = charges.iter().map(charge).collect();
        decided_at.push(clock.now());
        let expected = model.decide(action, &charges, clock.now());
        let found = decide(&limiter, action, &charges).await?;
        if found != expected {
            let mut text = format!("at step {index}, {action:?}:\n");
            for (expected, found) in expected.iter().zip(&found) {
                let mark = if expected == found { "same" } else { "DIFFERS" };
                let _ = writeln!(text, "  {mark}\n    model {expected:?}\n    store {found:?}");
            }
            return Err(text);
        }
        retry_after = Decision::most_restrictive(&found)
            .map_or(Duration::ZERO, |decision| decision.retry_after);
    }
    Ok(())
}

async fn decide<S: Store>(
    limiter: &Limiter<S>,
    action: Action,
    charges: &[Charge<'_>],
) -> Result<Vec<Decision>, String> {
    let single = |result: Result<Decision, crate::Error>| result.map(|decision| vec![decision]);
    let decisions = match (action, charges) {
        (Action::Acquire, [charge]) => single(limiter.acquire(charge).await),
        (Action::Peek, [charge]) => single(limiter.decide(action, charge).await),
        (Action::Refund, [charge]) => single(limiter.refund(charge).await),
        (Action::Reset, [charge]) => single(limiter.reset(charge).await),
        // Not for users of a limiter: only of a store.
        (Action::Report, [charge]) => single(limiter.report(charge).await),
        (Action::Take, [charge]) => {
            single(limiter.store().decide(action, charge).await.map_err(crate::Error::Store))
        }
        (Action::Take | Action::Report, charges) => {
            limiter.store().decide_all(action, charges).await.map_err(crate::Error::Store)
        }
        (Action::Peek, charges) => limiter.decide_all(action, charges).await,
        (_, charges) => limiter.acquire_all(charges).await,
    };
    decisions.map_err(|error| format!("{action:?} failed: {error}"))
}
