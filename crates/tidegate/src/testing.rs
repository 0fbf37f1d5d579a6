//! The conformance suite: compares any [`Store`] with a naive model, and reports the first
//! difference.
//!
//! A seed generates a sequence of steps: acquire, `acquire_all`, peek, refund, reset, partial
//! charge, report, clock advances to edge cases, clock steps back, changed limits, and limits with
//! blocks. Every field of every decision must equal the decision of the model. A failing sequence is
//! shrunk before it is printed.
//!
//! The store must decide by the [`ManualClock`] that the suite passes in. A store whose server has
//! its own time, such as Redis, needs a test mode in which the client sends the time.
//!
//! ```
//! use tidegate::testing::conformance;
//! use tidegate::{Limiter, MemoryStore};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() {
//! // Create your own store here: one per sequence, on the clock that the suite advances.
//! let new_limiter =
//!     async |clock| Limiter::new(MemoryStore::builder().clock(clock).build());
//! conformance(0..20, new_limiter).await;
//! # }
//! ```

use std::fmt::Write as _;
use std::time::Duration;

use crate::algorithm::Algorithm;
use crate::charge::Charge;
use crate::clock::{Clock, ManualClock, Timestamp};
use crate::decision::{Decision, Decisions};
use crate::limiter::Limiter;
use crate::store::{Action, Store};

mod model;
mod sequence;

pub use model::Model;
use sequence::{Sequence, Step};

/// Runs the sequence of each seed on a new store, which `new_limiter` creates. The same seed
/// always has the same sequence.
///
/// A wrapper of a store can be tested in the same way as a store:
///
/// ```
/// use tidegate::testing::conformance;
/// use tidegate::{Action, Charge, Clock, Decision, Limiter};
/// use tidegate::{MemoryStore, Outcome, Store, StoreError};
///
/// /// Converts the names of policies, or logs, or measures.
/// struct Wrapper(MemoryStore);
///
/// impl Store for Wrapper {
///     fn decide(
///         &self,
///         action: Action,
///         charge: &Charge<'_>,
///     ) -> Outcome<impl Future<Output = Result<Decision, StoreError>> + Send> {
///         self.0.decide(action, charge)
///     }
///
///     fn decide_all(
///         &self,
///         action: Action,
///         charges: &[Charge<'_>],
///     ) -> Outcome<impl Future<Output = Result<Vec<Decision>, StoreError>> + Send> {
///         self.0.decide_all(action, charges)
///     }
///
///     fn clock(&self) -> &dyn Clock {
///         self.0.clock()
///     }
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// let new_limiter =
///     async |clock| Limiter::new(Wrapper(MemoryStore::builder().clock(clock).build()));
/// conformance(0..20, new_limiter).await;
/// # }
/// ```
///
/// # Panics
///
/// Panics if a decision differs from the decision of the model. The message has the seed and the
/// shrunk sequence.
pub async fn conformance<S: Store>(
    seeds: impl IntoIterator<Item = u64>,
    mut new_limiter: impl AsyncFnMut(ManualClock) -> Limiter<S>,
) {
    for seed in seeds {
        let sequence = Sequence::from_seed(seed, &Algorithm::RATES);
        let sequence = sequence.with_calendars(seed).with_blocks(seed);
        check(seed, sequence, &mut new_limiter).await;
    }
}

/// Runs [`conformance`] with quotas of these algorithms only, and without blocks and calendars, for a
/// store that has no others. Such a store should answer other quotas, and those with
/// [`block_for`](crate::Quota::block_for) or a [`calendar`](crate::Quota::calendar), with
/// [`StoreError::Misconfigured`](crate::StoreError::Misconfigured).
///
/// ```
/// use tidegate::testing::conformance_of;
/// use tidegate::{Algorithm, Limiter, MemoryStore};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// let algorithms = [Algorithm::FixedWindow, Algorithm::TokenBucket];
/// let new_limiter =
///     async |clock| Limiter::new(MemoryStore::builder().clock(clock).build());
/// conformance_of(&algorithms, 0..20, new_limiter).await;
/// # }
/// ```
///
/// # Panics
///
/// Panics like [`conformance`], and if `algorithms` is empty.
pub async fn conformance_of<S: Store>(
    algorithms: &[Algorithm],
    seeds: impl IntoIterator<Item = u64>,
    mut new_limiter: impl AsyncFnMut(ManualClock) -> Limiter<S>,
) {
    assert!(!algorithms.is_empty(), "no algorithm is given: name at least one");
    for seed in seeds {
        check(seed, Sequence::from_seed(seed, algorithms), &mut new_limiter).await;
    }
}

/// Runs [`conformance`] with sequences in which logs grow to hundreds of requests. The short
/// sequences are enough for the other algorithms only.
///
/// ```
/// use tidegate::testing::conformance_of_long_logs;
/// use tidegate::{Limiter, MemoryStore};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// let new_limiter =
///     async |clock| Limiter::new(MemoryStore::builder().clock(clock).build());
/// conformance_of_long_logs(0..2, new_limiter).await;
/// # }
/// ```
///
/// # Panics
///
/// Panics like [`conformance`].
pub async fn conformance_of_long_logs<S: Store>(
    seeds: impl IntoIterator<Item = u64>,
    mut new_limiter: impl AsyncFnMut(ManualClock) -> Limiter<S>,
) {
    for seed in seeds {
        check(seed, Sequence::of_long_log(seed), &mut new_limiter).await;
    }
}

/// Runs [`conformance`] with sequences of [holds](crate::Hold): reservations, their commits,
/// renewals and refunds, ids that are charged once, and units in flight.
///
/// ```
/// use tidegate::testing::conformance_of_holds;
/// use tidegate::{Limiter, MemoryStore};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// let new_limiter =
///     async |clock| Limiter::new(MemoryStore::builder().clock(clock).build());
/// conformance_of_holds(0..20, new_limiter).await;
/// # }
/// ```
///
/// # Panics
///
/// Panics like [`conformance`].
pub async fn conformance_of_holds<S: Store>(
    seeds: impl IntoIterator<Item = u64>,
    mut new_limiter: impl AsyncFnMut(ManualClock) -> Limiter<S>,
) {
    for seed in seeds {
        let sequence = Sequence::of_holds(seed).with_calendars(seed).with_blocks(seed);
        check(seed, sequence, &mut new_limiter).await;
    }
}

async fn check<S: Store>(
    seed: u64,
    sequence: Sequence,
    new_limiter: &mut impl AsyncFnMut(ManualClock) -> Limiter<S>,
) {
    if let Err(difference) = run(&sequence, new_limiter).await {
        let (shrunk, difference) = shrink(sequence, difference, new_limiter).await;
        panic!("seed {seed} does not conform:\n{shrunk}{difference}");
    }
}

/// Removes steps as long as the sequence still fails.
async fn shrink<S: Store>(
    mut sequence: Sequence,
    mut difference: String,
    new_limiter: &mut impl AsyncFnMut(ManualClock) -> Limiter<S>,
) -> (Sequence, String) {
    let mut chunk = sequence.steps.len().div_ceil(2);
    loop {
        let mut at = 0;
        while at < sequence.steps.len() {
            let mut shorter = sequence.clone();
            shorter.steps.drain(at..(at + chunk).min(sequence.steps.len()));
            match run(&shorter, new_limiter).await {
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
    new_limiter: &mut impl AsyncFnMut(ManualClock) -> Limiter<S>,
) -> Result<(), String> {
    let clock = ManualClock::new();
    let limiter = new_limiter(clock.clone()).await;
    let mut model = Model::default();
    let mut retry_after = Duration::ZERO;
    let mut decided_at: Vec<Timestamp> = Vec::new();
    let (mut has_reset, mut has_rewound) = (false, false);
    for (index, step) in sequence.steps.iter().enumerate() {
        let (action, charges) = match step {
            Step::Advance(advance) => {
                clock.advance(advance.duration(retry_after));
                // A count that the shortest window of its policy no longer needs may have expired
                // or not.
                let charges = sequence.charges_of_changed_windows();
                has_reset |= reset_expired(&limiter, &mut model, &clock, charges).await?;
                continue;
            }
            // A store may have forgotten a hold that would be known again.
            Step::Rewind(_) if model.has_ended_holds(clock.now()) => continue,
            Step::Rewind(duration) => {
                // A store may have evicted an expired count or not, so remove it everywhere first.
                let charges = sequence.all_charges();
                has_reset |= reset_expired(&limiter, &mut model, &clock, charges).await?;
                // A store may compare the times of holds with those of resets, before and after.
                let may_reset = has_reset || sequence.charges_of_changed_windows().next().is_some();
                if !(may_reset && sequence.has_holds()) {
                    clock.step_back(*duration);
                    has_rewound = true;
                }
                continue;
            }
            Step::Decide(Action::Reset, _) if has_rewound && sequence.has_holds() => continue,
            Step::Decide(action, charges) => (*action, charges),
        };
        let charged_at =
            |charged: usize| decided_at.iter().rev().nth(charged).copied().unwrap_or_default();
        let charge = |spec: &sequence::ChargeSpec| {
            let charged_at = spec.refunded.map(charged_at).unwrap_or_default();
            sequence.charge(spec).with_charged_at(charged_at)
        };
        let charges: Vec<Charge<'_>> = charges.iter().map(charge).collect();
        decided_at.push(clock.now());
        // An acquire of concurrency needs a hold. A release without one may take any of those that
        // end together.
        let mut in_flight = charges.iter().filter(|charge| charge.quota().is_concurrency());
        if match action {
            Action::Acquire | Action::Refund => in_flight.any(|charge| charge.hold().is_none()),
            // A store may know the time of a unit by its end, which is earlier after a step back.
            Action::Renew => has_rewound && in_flight.next().is_some(),
            _ => false,
        } {
            continue;
        }
        let conflicts = |charge: &Charge<'_>| model.is_conflict(action, charge, clock.now());
        if let Some(conflict) = charges.iter().position(conflicts) {
            // Holds that have ended are released first.
            let now = clock.now().as_micros();
            charges[..=conflict].iter().for_each(|charge| model.release_ended(charge, now));
            match decide(&limiter, action, &charges).await {
                Err(error) if error.contains("is in use with another cost") => continue,
                found => return Err(format!("at step {index}: not a conflict: {found:?}")),
            }
        }
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
        if action == Action::Reset {
            has_reset = true;
            clock.advance(AFTER_RESET);
        }
        retry_after = Decisions::from(found)
            .binding()
            .map_or(Duration::ZERO, |decision| decision.retry_after);
    }
    Ok(())
}

/// A store may take a hold of the same microsecond for one from before the reset.
const AFTER_RESET: Duration = Duration::from_micros(1);

/// Resets the counts of the charges that no longer count for anything. Returns whether there were
/// any.
async fn reset_expired<'a, S: Store>(
    limiter: &Limiter<S>,
    model: &mut Model,
    clock: &ManualClock,
    charges: impl Iterator<Item = Charge<'a>>,
) -> Result<bool, String> {
    let mut has_reset = false;
    for charge in charges {
        if charge.quota().is_concurrency() || !model.has_count(&charge) {
            continue;
        }
        if model.is_expired(&charge, clock.now()) {
            let _ = model.decide(Action::Reset, &[charge], clock.now());
            limiter.reset(&charge).await.map_err(|error| error.to_string())?;
            has_reset = true;
        }
    }
    if has_reset {
        clock.advance(AFTER_RESET);
    }
    Ok(has_reset)
}

async fn decide<S: Store>(
    limiter: &Limiter<S>,
    action: Action,
    charges: &[Charge<'_>],
) -> Result<Vec<Decision>, String> {
    let single = |result: Result<Decision, crate::Error>| result.map(|decision| vec![decision]);
    let decisions = match (action, charges) {
        (Action::Acquire, [charge]) => single(limiter.acquire(charge).await),
        (Action::Peek | Action::Reset, [charge]) => single(limiter.decide(action, charge).await),
        (Action::Report, [charge]) => single(limiter.report(charge).await),
        // A limiter has no method for a partial charge, and requires the time of a refund.
        (Action::ChargeUpTo | Action::Refund, [charge]) => {
            single(limiter.store().decide(action, charge).await.map_err(crate::Error::Store))
        }
        (Action::Peek, charges) => limiter.decide_all(action, charges).await.map(Vec::from),
        (
            Action::ChargeUpTo
            | Action::Report
            | Action::Commit
            | Action::Release
            | Action::Renew
            | Action::Refund,
            charges,
        ) => limiter.store().decide_all(action, charges).await.map_err(crate::Error::Store),
        (_, charges) => limiter.acquire_all(charges).await.map(Vec::from),
    };
    decisions.map_err(|error| format!("{action:?} failed: {error}"))
}
