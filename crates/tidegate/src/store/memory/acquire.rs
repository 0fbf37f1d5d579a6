//! The fast path of an acquire: an existing bucket, whose numbers fit 64 bits.

use std::time::Duration;

use spin::mutex::SpinMutexGuard;

use super::MemoryStore;
use super::state::Usage;
use super::table::Table;
use crate::action::Action;
use crate::algorithm::{Algorithm, Bucket, MAX_CLOCK_SKEW, Parameters};
use crate::charge::Charge;
use crate::decision::Decision;
use crate::key::{Fingerprint, PolicyRef};
use crate::quota::Quota;
use crate::store::StoreError;

impl MemoryStore {
    /// Validates and decides an acquire.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "the caller computes only the fields that it uses")]
    pub(crate) fn acquire_now(&self, charge: &Charge<'_>) -> Result<Decision, StoreError> {
        let (quota, cost) = (charge.quota(), charge.cost());
        if charge.hold().is_some() {
            charge.check(Action::Acquire)?;
            return self.decide_extended(Action::Acquire, charge);
        }
        if !quota.parameters().admits_in_64_bits(cost) {
            // The parts of the charge are passed in registers, so that the compiler can keep a
            // charge that the caller has just created out of memory.
            return by_field(self.acquire_any(charge.key(), quota, cost, charge.explicit_policy()));
        }
        let named;
        let policy = match charge.explicit_policy() {
            None => quota.default_policy(),
            Some(name) => {
                named = PolicyRef::new(name, self.secret);
                &named
            }
        };
        self.acquire_bucket(charge.key(), quota, cost, policy)
    }

    #[inline(never)]
    fn acquire_any(
        &self,
        key: &str,
        quota: &Quota,
        cost: u64,
        policy: Option<&str>,
    ) -> Result<Decision, StoreError> {
        let charge = Charge::of_parts(key, quota, cost, policy);
        self.decide_any(Action::Acquire, &charge, || charge.check(Action::Acquire))
    }

    /// Decides an acquire of a bucket. Nearly every one is of an existing key, which need not be
    /// validated again, and was written with this quota.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "the frame of a call is a tenth of a decision")]
    fn acquire_bucket(
        &self,
        key: &str,
        quota: &Quota,
        cost: u64,
        policy: &PolicyRef<'_>,
    ) -> Result<Decision, StoreError> {
        let parameters = quota.parameters();
        let mut now = self.clock.now();
        let fingerprint = self.secret.fingerprint(key, policy.sum());
        let mut table = self.shard(fingerprint).lock();
        'slow: {
            let Some(state) = table.get_state_mut(fingerprint) else { break 'slow };
            let Some(Bucket { time, parts }) = state.bucket_of(parameters) else { break 'slow };
            let capacity = parameters.capacity_in_64_bits();
            if parts > capacity {
                // The burst was lowered.
                break 'slow;
            }
            if time > now {
                // The clock stepped back; or another thread got the lock first, and this is its
                // time.
                if time - now > MAX_CLOCK_SKEW {
                    break 'slow;
                }
                now = time;
            }
            let Some(drained) = (now - time).checked_mul(parameters.limit()) else { break 'slow };
            let before = parts.saturating_sub(drained);
            let after = before + cost * parameters.window();
            if after > capacity {
                state.mark_exhausted();
                table.sweep(now, &self.capacity);
                drop(table);
                return Ok(denied(parameters, before, after - capacity));
            }
            let remaining = parameters.burst() - parameters.window_reciprocal().divide_up(after);
            let bucket = Bucket { time: now, parts: after };
            state.set_bucket(parameters, &bucket, Usage::of(parameters, remaining));
            table.sweep(now, &self.capacity);
            drop(table);
            return Ok(allowed(parameters, cost, after, remaining));
        }
        by_field(self.acquire_slow(key, quota, cost, policy.name(), fingerprint, table))
    }

    /// Decides an acquire of a new bucket, or of one whose numbers are not those of the quota.
    #[cold]
    #[inline(never)]
    fn acquire_slow<'a>(
        &'a self,
        key: &str,
        quota: &Quota,
        cost: u64,
        policy: Option<&str>,
        fingerprint: Fingerprint,
        table: SpinMutexGuard<'a, Table>,
    ) -> Result<Decision, StoreError> {
        let charge = Charge::of_parts(key, quota, cost, policy);
        charge.check(Action::Acquire)?;
        self.decide_slow::<Bucket<u64>>(Action::Acquire, &charge, fingerprint, table)
    }
}

/// Returns the same result, which has no hold, with its fields one by one: otherwise the compiler
/// would keep the usual decisions in memory, too, where this one is.
#[inline(always)]
#[expect(clippy::inline_always, reason = "it has no instructions of its own")]
fn by_field(result: Result<Decision, StoreError>) -> Result<Decision, StoreError> {
    let Decision { allowed, limit, remaining, retry_after, reset_after, delay, source, .. } =
        result?;
    let hold = None;
    Ok(Decision { allowed, limit, remaining, retry_after, reset_after, delay, source, hold })
}

/// Returns the decision that has raised the level by `cost` to `after`.
#[inline(always)]
#[expect(clippy::inline_always, reason = "the call would keep the decision in memory")]
fn allowed(quota: &Parameters, cost: u64, after: u64, remaining: u64) -> Decision {
    let drain_time = |parts| Duration::from_micros(quota.limit_reciprocal().divide_up(parts));
    let mut decision =
        Decision::allow(quota.burst(), remaining).with_reset_after(drain_time(after));
    if quota.algorithm() == Algorithm::LeakyBucket {
        let before = after - cost * quota.window();
        decision.delay = if before == 0 { Duration::ZERO } else { drain_time(before) };
    }
    decision
}

/// Returns the denial of a cost that would have raised the level from `before`, which is not 0,
/// above the burst by `excess`.
#[inline(always)]
#[expect(clippy::inline_always, reason = "the call would keep the decision in memory")]
fn denied(quota: &Parameters, before: u64, excess: u64) -> Decision {
    let drain_time = |parts| Duration::from_micros(quota.limit_reciprocal().divide_up(parts));
    let level = quota.window_reciprocal().divide_up(before);
    Decision::deny(quota.burst(), drain_time(excess))
        .with_remaining(quota.burst() - level)
        .with_reset_after(drain_time(before))
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
                let check = || charge.check(Action::Acquire);
                if is_report {
                    let report = |store: &MemoryStore| store.decide_now(Action::Report, &charge);
                    prop_assert_eq!(report(&fast), report(&general));
                } else {
                    prop_assert_eq!(
                        fast.acquire_now(&charge),
                        general.decide_any(Action::Acquire, &charge, check)
                    );
                }
                let state = |store: &MemoryStore| {
                    let fingerprint = store.fingerprint(&charge);
                    let table = store.shard(fingerprint).lock();
                    table.find(fingerprint).map(|at| table.state(at)).ok()
                };
                prop_assert_eq!(state(&fast), state(&general));
            }
        }
    }
}
