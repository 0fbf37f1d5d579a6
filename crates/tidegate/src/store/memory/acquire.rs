//! The fast path of an acquire: an existing bucket, whose numbers fit 64 bits.

use std::time::Duration;

use super::MemoryStore;
use super::fingerprint::Fingerprint;
use super::state::PackedState;
use super::table::Table;
use crate::action::Action;
use crate::algorithm::{Algorithm, Bucket, NarrowLevel};
use crate::charge::Charge;
use crate::decision::Decision;
use crate::limiter::Error;
use crate::store::StoreError;

impl MemoryStore {
    /// Validates and decides an acquire.
    #[inline(never)]
    pub(crate) fn acquire_now(&self, charge: &Charge<'_>) -> Result<Decision, Error> {
        self.acquire_checked(charge, || Ok(charge.check(Action::Acquire)?))
    }

    /// Decides an acquire that `check` validates. Nearly every one is of an existing bucket, which
    /// takes a straight line of 64-bit arithmetic; see
    /// [`NarrowBucket`](crate::algorithm::NarrowBucket).
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "the decision is written only once")]
    pub(super) fn acquire_checked<E: From<StoreError>>(
        &self,
        charge: &Charge<'_>,
        check: impl FnOnce() -> Result<(), E>,
    ) -> Result<Decision, E> {
        let narrow = charge.quota().narrow();
        if !narrow.can_admit(charge.cost()) {
            return self.decide_any(Action::Acquire, charge, check);
        }
        let fingerprint = Fingerprint::of(charge, self.secret);
        let shard = self.shard(fingerprint);
        // Read the clock before the lock, so that it overlaps with the computation of the
        // fingerprint.
        let now = self.clock.now();
        let mut table = shard.lock();
        let Some((state, before)) = find_bucket(&mut table, charge, fingerprint, now) else {
            check()?;
            return Ok(self.decide_slow::<Bucket>(Action::Acquire, charge, fingerprint, table)?);
        };
        match narrow.spend(before, charge.cost()) {
            Ok(after) => {
                let (units, part) = narrow.split(after);
                *state = PackedState::bucket(now, units, part, charge.quota().template())
                    .exhausted_if(narrow.is_full(after));
                self.sweep(&mut table, now);
                drop(table);
                let remaining = narrow.burst() - units - u64::from(part > 0);
                let mut decision = Decision::allow(narrow.burst(), remaining)
                    .with_reset_after(Duration::from_micros(narrow.drain_time(after)));
                if charge.quota().algorithm() == Algorithm::LeakyBucket {
                    decision.delay = Duration::from_micros(narrow.drain_time(before));
                }
                Ok(decision)
            }
            Err(too_high) => {
                self.sweep(&mut table, now);
                drop(table);
                let retry_after = Duration::from_micros(narrow.wait(too_high));
                Ok(Decision::deny(narrow.burst(), retry_after)
                    .with_remaining(narrow.remaining(before))
                    .with_reset_after(Duration::from_micros(narrow.drain_time(before))))
            }
        }
    }
}

/// Returns the state of the charge's bucket and its level now. Returns `None` for a new key, and if
/// the numbers are not those of the charge's quota.
#[inline(always)]
#[expect(clippy::inline_always, reason = "its result would be passed in memory")]
fn find_bucket<'a>(
    table: &'a mut Table,
    charge: &Charge<'_>,
    fingerprint: Fingerprint,
    now: u64,
) -> Option<(&'a mut PackedState, NarrowLevel)> {
    let state = table.get_state_mut(fingerprint)?;
    let (time, units, part) = state.bucket_of(charge.quota().template())?;
    // If the clock stepped back, the general path reads it again.
    let level = charge.quota().narrow().level(units, part, now.checked_sub(time)?)?;
    Some((state, level))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::state::MAX_TIME;
    use super::*;
    use crate::clock::{ManualClock, Timestamp};
    use crate::quota::Quota;

    /// A quota, whose numbers are often at an edge.
    fn bucket() -> impl Strategy<Value = Quota> {
        let limit = prop_oneof![1..20_u64, Just(1 << 30), Just(Quota::MAX_LIMIT)];
        let burst = prop_oneof![1..20_u64, Just(1 << 30), Just(Quota::MAX_LIMIT)];
        let window = prop_oneof![
            Just(1_000_u64),
            1_000..5_000_u64,
            Just(1 << 20),
            Just(366 * 86_400 * 1_000_000_u64),
        ];
        let algorithm = prop_oneof![Just(Algorithm::TokenBucket), Just(Algorithm::LeakyBucket)];
        (algorithm, limit, window, burst).prop_filter_map("a valid quota", |numbers| {
            let (algorithm, limit, window, burst) = numbers;
            let quota = Quota::new(algorithm, limit, Duration::from_micros(window)).ok()?;
            Some(quota.clone().with_burst(burst).unwrap_or(quota))
        })
    }

    /// A charge after a step of the clock: by micros, or to a time.
    fn step() -> impl Strategy<Value = (usize, u64, i64, Option<u64>, bool)> {
        let by = prop_oneof![
            Just(0_i64),
            -3_000..3_000_i64,
            -5_000_000..5_000_000_i64,
            Just(366 * 86_400 * 1_000_000_i64),
        ];
        let cost = prop_oneof![Just(1_u64), 1..25_u64, Just(1 << 30), Just(Quota::MAX_LIMIT)];
        let to = prop_oneof![20 => Just(None), 1 => Just(Some(MAX_TIME)), 1 => Just(Some(0))];
        (0..3_usize, cost, by, to, prop::bool::weighted(0.1))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]

        /// Both paths give the same decisions and the same states, also when the quota changes,
        /// the clock steps back, or a report overdraws a bucket.
        #[test]
        fn fast_path_decides_like_the_general_one(
            quotas in proptest::collection::vec(bucket(), 3),
            steps in proptest::collection::vec(step(), 1..60),
        ) {
            let clock = ManualClock::new();
            let store = || MemoryStore::builder().clock(clock.clone()).build();
            let (fast, general) = (store(), store());
            for (quota, cost, by, to, is_report) in steps {
                let step = Duration::from_micros(by.unsigned_abs());
                if by < 0 { clock.step_back(step) } else { clock.advance(step) }
                if let Some(to) = to {
                    clock.set(Timestamp::from_micros(to));
                }
                // One policy name, so that all quotas share a count.
                let charge = Charge::new("user:00000042", &quotas[quota]).with_policy("p");
                let charge = charge.with_cost(cost);
                let check = || Ok(charge.check(Action::Acquire)?);
                if is_report {
                    let report = |store: &MemoryStore| store.decide_now(Action::Report, &charge);
                    prop_assert_eq!(report(&fast), report(&general));
                } else {
                    prop_assert_eq!(
                        fast.acquire_now(&charge),
                        general.decide_any::<Error>(Action::Acquire, &charge, check)
                    );
                }
                let state = |store: &MemoryStore| {
                    let fingerprint = Fingerprint::of(&charge, store.secret);
                    let table = store.shard(fingerprint).lock();
                    table.find(fingerprint).map(|at| table.state(at)).ok()
                };
                prop_assert_eq!(state(&fast), state(&general));
            }
        }
    }
}
