//! [`Grants`]: the result of equal acquires of one charge, which a script decides with one read and
//! one write, and the decision of each of them.

use super::{Algorithm, Bucket, Counter, Parameters, RawDecision, SlidingCounter};

/// The result of equal acquires of one charge, as the script reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Grants {
    /// Number of granted acquires; the later ones were denied.
    pub(crate) granted: u64,
    /// Units that remained before the first acquire.
    pub(crate) remaining: u64,
    /// Counter before the first acquire.
    pub(crate) snapshot: CounterSnapshot,
    /// `retry_after` of the denied acquires.
    pub(crate) retry_after: u64,
    /// `reset_after` of the denied acquires.
    pub(crate) reset_after: u64,
}

/// The part of a counter that determines the decision of each of several equal acquires: see
/// `snapshot` in each Lua twin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CounterSnapshot {
    /// A log: units granted now leave the window one window from now.
    Log,
    /// The time until the window ends.
    Window { left: u64 },
    /// The count of the current window, and its elapsed time.
    Counter { current: u64, elapsed: u64 },
    /// The level in whole units, and its fraction in W-ths of a unit.
    Bucket { level: u64, part: u64 },
}

impl CounterSnapshot {
    /// Reads the numbers that the algorithm's script replies with.
    pub(crate) fn read<E>(
        algorithm: Algorithm,
        mut next: impl FnMut() -> Result<u64, E>,
    ) -> Result<Self, E> {
        Ok(match algorithm {
            Algorithm::SlidingLog => Self::Log,
            // Units in flight are never granted together.
            Algorithm::FixedWindow | Algorithm::Concurrency => Self::Window { left: next()? },
            Algorithm::SlidingCounter => Self::Counter { current: next()?, elapsed: next()? },
            Algorithm::TokenBucket | Algorithm::LeakyBucket => {
                Self::Bucket { level: next()?, part: next()? }
            }
        })
    }
}

impl Grants {
    /// Returns the decision of the acquire that follows `preceding` equal ones.
    pub(crate) fn decision(&self, quota: &Parameters, cost: u64, preceding: u64) -> RawDecision {
        if preceding >= self.granted {
            return RawDecision {
                allowed: false,
                remaining: self.remaining.saturating_sub(self.granted * cost),
                retry_after: self.retry_after,
                reset_after: self.reset_after,
                delay: 0,
            };
        }
        let (before, after) = (preceding * cost, (preceding + 1) * cost);
        let (reset_after, delay) = match self.snapshot {
            CounterSnapshot::Log => (quota.window(), 0),
            CounterSnapshot::Window { left } => (left, 0),
            CounterSnapshot::Counter { current, elapsed } => {
                (SlidingCounter::in_window(current, elapsed).reset_after(quota, elapsed, after), 0)
            }
            CounterSnapshot::Bucket { level, part } => {
                let parts = Bucket::<u128>::parts_of(quota, level + before, part);
                let bucket = Bucket { time: 0, parts };
                (bucket.reset_after(quota, 0, cost), bucket.delay(quota))
            }
        };
        RawDecision {
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
    use super::super::{FixedWindow, Operation, SlidingLog, apply};
    use super::*;
    use crate::action::Action;

    const NOW: u64 = 1_700_049_612_345_678;

    #[test]
    fn a_batch_decides_like_the_same_acquires_one_by_one() {
        for algorithm in Algorithm::RATES {
            match algorithm {
                Algorithm::SlidingLog => {
                    check::<SlidingLog>(algorithm, |_, _, _| CounterSnapshot::Log);
                }
                Algorithm::FixedWindow => check::<FixedWindow>(algorithm, |_, quota, now| {
                    let window = quota.window();
                    CounterSnapshot::Window { left: window - now % window }
                }),
                Algorithm::SlidingCounter => check::<SlidingCounter>(algorithm, |counter, _, _| {
                    CounterSnapshot::Counter { current: counter.current, elapsed: counter.elapsed }
                }),
                Algorithm::TokenBucket | Algorithm::LeakyBucket => {
                    check::<Bucket<u64>>(algorithm, |bucket, quota, _| CounterSnapshot::Bucket {
                        level: bucket.parts / quota.window(),
                        part: bucket.parts % quota.window(),
                    });
                }
                Algorithm::Concurrency => unreachable!("not a rate"),
            }
        }
    }

    /// `snapshot` returns the script's report about an advanced counter.
    fn check<C: Counter + Default>(
        algorithm: Algorithm,
        snapshot: impl Fn(&C, &Parameters, u64) -> CounterSnapshot,
    ) {
        for (limit, cost, earlier) in [(10, 1, 0), (10, 3, 2), (7, 2, 3), (1_000_003, 17, 40)] {
            let quota = Parameters::new(algorithm, limit, 60_000_001, limit);
            let mut counter = C::default();
            let mut decide = |action, cost, now| {
                let operation =
                    Operation { action, quota: &quota, cost, charged_at: 0, now, all_fit: true };
                (apply(&mut counter, &operation).decision, snapshot(&counter, &quota, now))
            };
            for number in 0..earlier {
                decide(Action::Acquire, 1, NOW + 1_000 * number);
            }
            let now = NOW + 123_457;
            let (peeked, snapshot) = decide(Action::Peek, 1, now);
            let remaining = peeked.remaining + u64::from(peeked.allowed);
            let decisions: Vec<RawDecision> =
                (0..12).map(|_| decide(Action::Acquire, cost, now).0).collect();
            let granted = decisions.iter().filter(|decision| decision.allowed).count() as u64;
            let denied = decisions.last().filter(|decision| !decision.allowed);
            let grants = Grants {
                granted,
                remaining,
                snapshot,
                retry_after: denied.map_or(0, |decision| decision.retry_after),
                reset_after: denied.map_or(0, |decision| decision.reset_after),
            };
            for (rank, expected) in (0..).zip(decisions) {
                assert_eq!(
                    grants.decision(&quota, cost, rank),
                    expected,
                    "{algorithm} {limit} {cost} {rank}"
                );
            }
        }
    }
}
