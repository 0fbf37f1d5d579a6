//! [`Grants`]: what came of equal acquires of one charge that a script decided together, and what each of them is told.

use super::bucket::Bucket;
use super::sliding_counter::Counter;
use super::{Algorithm, Count, Verdict};
use crate::quota::Quota;

/// What the script tells of a count before it granted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Grants {
    /// How many were granted; the others, which came later, were denied.
    pub(crate) granted: u64,
    /// What remained before.
    pub(crate) remaining: u64,
    pub(crate) evidence: Evidence,
    /// Of those that were denied.
    pub(crate) retry_after: u64,
    pub(crate) reset_after: u64,
}

/// As much of the count as is needed to tell the one from the other; see `evidence` in each Lua
/// twin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Evidence {
    /// A log: all that is granted now leaves a window from now.
    Log,
    /// How long the window lasts yet.
    Window { left: u64 },
    /// The count of the current window, and how far it has come.
    Counter { current: u64, elapsed: u64 },
    /// The level in units, and in W-ths of a unit.
    Bucket { level: u64, part: u64 },
}

impl Evidence {
    /// Reads as many numbers as the algorithm's script tells.
    pub(crate) fn read<E>(
        algorithm: Algorithm,
        mut next: impl FnMut() -> Result<u64, E>,
    ) -> Result<Self, E> {
        Ok(match algorithm {
            Algorithm::SlidingLog => Self::Log,
            Algorithm::FixedWindow => Self::Window { left: next()? },
            Algorithm::SlidingCounter => Self::Counter { current: next()?, elapsed: next()? },
            Algorithm::TokenBucket | Algorithm::LeakyBucket => {
                Self::Bucket { level: next()?, part: next()? }
            }
        })
    }
}

impl Grants {
    /// What the acquire is told that came after `earlier` equal ones.
    pub(crate) fn verdict(&self, quota: &Quota, cost: u64, earlier: u64) -> Verdict {
        if earlier >= self.granted {
            return Verdict {
                allowed: false,
                remaining: self.remaining.saturating_sub(self.granted * cost),
                retry_after: self.retry_after,
                reset_after: self.reset_after,
                delay: 0,
            };
        }
        let (before, after) = (earlier * cost, (earlier + 1) * cost);
        let (reset_after, delay) = match self.evidence {
            Evidence::Log => (quota.window_micros(), 0),
            Evidence::Window { left } => (left, 0),
            Evidence::Counter { current, elapsed } => {
                (Counter::in_window(current, elapsed).reset_after(quota, elapsed, after), 0)
            }
            Evidence::Bucket { level, part } => {
                let bucket = Bucket::at_level(level + before, part);
                (bucket.reset_after(quota, 0, cost), bucket.delay(quota))
            }
        };
        Verdict {
            allowed: true,
            remaining: self.remaining.saturating_sub(after),
            retry_after: 0,
            reset_after,
            delay,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::{Count, Log, Window, apply};
    use super::*;
    use crate::charge::Charge;
    use crate::store::Action;

    const NOW: u64 = 1_700_049_612_345_678;

    /// What the twins in memory say one after the other is what is said of grants together.
    #[test]
    fn what_each_is_told_is_what_it_would_be_told_alone() {
        for algorithm in Algorithm::ALL {
            match algorithm {
                Algorithm::SlidingLog => check::<Log>(algorithm, |_, _, _| Evidence::Log),
                Algorithm::FixedWindow => check::<Window>(algorithm, |_, quota, now| {
                    Evidence::Window { left: quota.window_micros() - now % quota.window_micros() }
                }),
                Algorithm::SlidingCounter => check::<Counter>(algorithm, |counter, _, _| {
                    let (current, elapsed) = counter.current_and_elapsed();
                    Evidence::Counter { current, elapsed }
                }),
                Algorithm::TokenBucket | Algorithm::LeakyBucket => {
                    check::<Bucket>(algorithm, |bucket, _, _| {
                        let (level, part) = bucket.level_and_part();
                        Evidence::Bucket { level, part }
                    })
                }
            }
        }
    }

    /// `evidence` is what the script would tell of a count that is settled.
    fn check<C: Count + Default>(
        algorithm: Algorithm,
        evidence: impl Fn(&C, &Quota, u64) -> Evidence,
    ) {
        for (limit, cost, earlier) in [(10, 1, 0), (10, 3, 2), (7, 2, 3), (1_000_003, 17, 40)] {
            let quota =
                Quota::new(algorithm, limit, Duration::from_micros(60_000_001)).expect("valid");
            let mut count = C::default();
            for early in 0..earlier {
                apply(
                    &mut count,
                    Action::Acquire,
                    &Charge::new("k", &quota),
                    NOW + 1_000 * early,
                    true,
                );
            }
            let now = NOW + 123_457;
            let before =
                apply(&mut count, Action::Peek, &Charge::new("k", &quota), now, true).verdict;
            let remaining = before.remaining + u64::from(before.allowed);
            let evidence = evidence(&count, &quota, now);
            let mut ask = || {
                apply(&mut count, Action::Acquire, &Charge::new("k", &quota).cost(cost), now, true)
                    .verdict
            };
            let told: Vec<Verdict> = (0..12).map(|_| ask()).collect();
            let granted = told.iter().filter(|verdict| verdict.allowed).count() as u64;
            let denied = told.last().filter(|verdict| !verdict.allowed);
            let grants = Grants {
                granted,
                remaining,
                evidence,
                retry_after: denied.map_or(0, |verdict| verdict.retry_after),
                reset_after: denied.map_or(0, |verdict| verdict.reset_after),
            };
            for (rank, verdict) in (0..).zip(told) {
                assert_eq!(
                    grants.verdict(&quota, cost, rank),
                    verdict,
                    "{algorithm} {limit} {cost} {rank}"
                );
            }
        }
    }
}
