//! [`MemoryStore`]: the counts of one process, for millions of keys.
//!
//! The store is a sharded hash table with open addressing and one mutex per shard. A key is hashed
//! once, with a secret, to a fingerprint, which selects the shard and the slot and replaces the key
//! itself. A slot has a fixed size of 40 bytes, so a decision on an existing key allocates nothing
//! and touches one place in memory. Every decision reads and writes, so a plain mutex, held for
//! some nanoseconds, is the right lock.
//!
//! Decisions sweep expired keys in passing, some slots at a time; there is no background thread. A
//! full store looks at samples of its keys, for an expired one, or else for one to evict that has
//! not used up its quota. It rejects a new key if it finds neither.

use std::future::{Future, Ready};
use std::sync::atomic::Ordering;
use std::time::Duration;

use spin::mutex::SpinMutexGuard;

use self::blocks::Blocks;
pub use self::builder::Builder;
use self::capacity::{Capacity, RoomReservation};
use self::context::ChargeContext;
use self::holds::Holds;
use self::shard::Shard;
use self::state::{CounterKind, MAX_TIME, StoredCounter, Usage};
use self::table::Table;
use super::{Outcome, Store, StoreError};
use crate::action::Action;
use crate::algorithm::{
    Algorithm, Bucket, FixedWindow, Operation, Plan, SlidingCounter, SlidingLog,
};
use crate::charge::{Charge, ChargeError, OnStoreFailure};
use crate::clock::{Clock, SystemClock};
use crate::decision::{Decision, Source};
use crate::key::{Fingerprint, HashSecret};

mod acquire;
mod blocks;
mod builder;
mod capacity;
mod context;
mod eviction;
mod group;
mod holds;
mod logs;
mod shard;
mod state;
mod table;

/// Calls a method with the type of the counter that a quota has: the arithmetic of a bucket is
/// chosen here, once.
macro_rules! by_counter {
    ($quota:expr, $self:ident.$method:ident($($argument:expr),*)) => {
        match $quota.algorithm() {
            Algorithm::SlidingLog => $self.$method::<SlidingLog>($($argument),*),
            Algorithm::SlidingCounter => $self.$method::<SlidingCounter>($($argument),*),
            // Units in flight are decided by their holds, before a counter is chosen.
            Algorithm::FixedWindow | Algorithm::Concurrency => {
                $self.$method::<FixedWindow>($($argument),*)
            }
            Algorithm::TokenBucket | Algorithm::LeakyBucket if $quota.fits_64_bits() => {
                $self.$method::<Bucket<u64>>($($argument),*)
            }
            Algorithm::TokenBucket | Algorithm::LeakyBucket => {
                $self.$method::<Bucket<u128>>($($argument),*)
            }
        }
    };
}
use by_counter;

/// Number of shards: enough that scanning one is fast even with millions of keys, and few enough
/// that all shard headers stay in the L1 cache.
const SHARDS: usize = 256;
/// Size of an entry of a sliding log.
const LOG_ENTRY_BYTES: usize = 16;

/// Store that keeps its counts in the memory of this process.
///
/// It needs no runtime and never blocks on I/O; [`Limiter::blocking`](crate::Limiter::blocking) has
/// its calls without `async`. Counts are lost when the process ends, and other processes do not see
/// them: with N instances behind a load balancer, a client gets up to N times the limit.
///
/// A key takes 40 bytes, and that of a `sliding-log` also 16 bytes per request that counts.
/// Expired keys are removed in passing.
///
/// A full store makes room for a new key: it forgets a key that has not used up its quota, and that
/// key starts again with its whole quota. Of a sample of keys, it is one of the policy with the
/// most keys, with the least of its quota in use, and then with the oldest last request. A key at
/// its limit, or whose last request was denied, is never forgotten before it expires. If there are
/// only such keys, the new one gets [`StoreError::Full`].
///
/// Policies share the store: one policy alone gets up to 16/17 of it, and a policy takes room from
/// those with more keys than its own. So a flood of keys on one policy neither frees a client at
/// its limit nor empties the counts of another policy.
///
/// A block ([`Quota::with_block_for`](crate::Quota::with_block_for)) takes the room of one key, and
/// is never forgotten before its end. A full store forgets the blocks that have ended, so that the
/// next block of such a key is as long as a first one. Without room for a block, none starts: the
/// key is denied by its count.
///
/// The entries of sliding logs have a [maximum of their own](Builder::max_log_bytes), shared in the same way.
/// A charge whose log has no room gets [`StoreError::Full`], and nothing is forgotten.
///
/// ```
/// use tidegate::{Limiter, MemoryStore};
///
/// let limiter = Limiter::new(MemoryStore::builder().max_keys(100_000).build());
/// assert_eq!(limiter.store().keys(), 0);
/// ```
#[derive(Debug)]
pub struct MemoryStore {
    shards: Box<[Shard; SHARDS]>,
    secret: &'static HashSecret,
    clock: StoreClock,
    capacity: Capacity,
    blocks: Blocks,
    holds: Holds,
}

/// The clock of a store. The system clock, which nearly every store has, is called without dynamic
/// dispatch.
#[derive(Debug)]
enum StoreClock {
    System(SystemClock),
    Custom(Box<dyn Clock>),
}

impl StoreClock {
    /// Returns the time in microseconds, limited to the latest time of a state.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "holds call it, too, but every decision does")]
    fn now(&self) -> u64 {
        match self {
            Self::System(clock) => clock.now(),
            Self::Custom(clock) => clock.now(),
        }
        .as_micros()
        .min(MAX_TIME)
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

impl MemoryStore {
    /// Creates an empty store on the system clock, for up to 10,000,000 keys.
    #[must_use]
    pub fn new() -> Self {
        Self::builder().build()
    }

    /// Returns a builder for a store with options.
    #[must_use]
    pub fn builder() -> Builder {
        Builder::new()
    }

    /// Returns the number of keys, including expired keys that are not swept yet. It does not lock
    /// the store, so it is cheap enough for a metric.
    #[must_use]
    pub fn keys(&self) -> usize {
        self.capacity.keys.taken()
    }

    /// Returns the maximum number of keys.
    #[must_use]
    pub fn max_keys(&self) -> usize {
        self.capacity.keys.max()
    }

    /// Returns the size of all entries of sliding logs, in bytes. It does not lock the store.
    #[must_use]
    pub fn log_bytes(&self) -> usize {
        self.capacity.log_entries.taken() * LOG_ENTRY_BYTES
    }

    /// Returns the maximum size of all entries of sliding logs, in bytes. A limit needs 16 bytes
    /// per unit for each key that uses it up, if every request costs one unit.
    #[must_use]
    pub fn max_log_bytes(&self) -> usize {
        self.capacity.log_entries.max().saturating_mul(LOG_ENTRY_BYTES)
    }

    /// Returns the number of keys that a full store has forgotten although they still counted. If
    /// it grows, the store needs a higher maximum, or someone floods it with keys.
    #[must_use]
    pub fn evicted_keys(&self) -> u64 {
        self.capacity.evicted.load(Ordering::Relaxed)
    }

    /// Decides one charge, without `async`.
    #[cfg(any(feature = "resilience", test))]
    pub(crate) fn decide_now(
        &self,
        action: Action,
        charge: &Charge<'_>,
    ) -> Result<Decision, StoreError> {
        if action == Action::Acquire && charge.quota().parameters().admits_in_64_bits(charge.cost())
        {
            match self.acquire_now(charge) {
                // The charge was not validated: that is up to the caller.
                Err(StoreError::Invalid(_)) => {}
                decided => return decided,
            }
        }
        self.decide_any(action, charge, || Ok(()))
    }

    /// Returns whether this charge's key has a count, which may have expired and not been swept
    /// yet.
    #[cfg(feature = "resilience")]
    pub(crate) fn has_count(&self, charge: &Charge<'_>) -> bool {
        let fingerprint = self.fingerprint(charge);
        self.shard(fingerprint).lock().find(fingerprint).is_ok()
    }

    /// Spends as many of the charge's units as fit, if its key has a count. Inserts nothing
    /// otherwise.
    #[cfg(feature = "resilience")]
    pub(crate) fn charge_if_present(&self, charge: &Charge<'_>) {
        let fingerprint = self.fingerprint(charge);
        let mut table = self.shard(fingerprint).lock();
        if table.find(fingerprint).is_err() {
            return;
        }
        let now = self.clock.now();
        let quota = charge.quota().in_period_at(now);
        let in_period = quota.as_ref().map(|quota| charge.with_quota(quota));
        let charge = in_period.as_ref().unwrap_or(charge);
        let action = Action::ChargeUpTo;
        let context =
            ChargeContext { store: self, action, charge, fingerprint, now, all_fit: true };
        // Without room for a longer log, the units are not counted.
        let _ = context.apply(&mut table, &mut RoomReservation::new(self));
        table.sweep(now, &self.capacity);
    }

    /// Decides a charge that `check` validates, by the general arithmetic. An acquire of an existing
    /// key skips the check, because the key was checked when it was inserted.
    #[inline]
    fn decide_any(
        &self,
        action: Action,
        charge: &Charge<'_>,
        check: impl FnOnce() -> Result<(), ChargeError>,
    ) -> Result<Decision, StoreError> {
        if charge.hold().is_some() {
            return self.decide_extended(action, charge);
        }
        by_counter!(charge.quota().parameters(), self.decide_as(action, charge, check))
    }

    /// Decides a charge that has a hold, or whose quota has blocks or a calendar, or releases holds.
    #[cold]
    #[inline(never)]
    fn decide_extended(&self, action: Action, charge: &Charge<'_>) -> Result<Decision, StoreError> {
        let decisions = self.decide_all_now(action, std::slice::from_ref(charge))?;
        Ok(decisions[0])
    }

    /// Decides an acquire of an existing key, which is nearly every call, on a fast path, and
    /// everything else on the slow path.
    #[inline(always)]
    #[expect(
        clippy::inline_always,
        reason = "the call frame and its arguments would be a tenth of a decision"
    )]
    fn decide_as<C: StoredCounter>(
        &self,
        action: Action,
        charge: &Charge<'_>,
        check: impl FnOnce() -> Result<(), ChargeError>,
    ) -> Result<Decision, StoreError> {
        let fingerprint = self.fingerprint(charge);
        // Read the clock before the lock, so that it overlaps with the computation of the
        // fingerprint.
        let mut now = self.clock.now();
        let mut table = self.shard(fingerprint).lock();
        'slow: {
            if action != Action::Acquire
                || !charge.quota().parameters().admits_on_fast_path(charge.cost())
            {
                break 'slow;
            }
            let Some((state, logs)) = table.get_mut(fingerprint, C::KIND) else { break 'slow };
            let (quota, before) = (charge.quota().parameters(), *state);
            if before.is_ahead_of(now) {
                // Another thread got the lock first. Under the lock, times are in the order of
                // decisions.
                now = self.clock.now();
            }
            let mut counter = C::unpack(before, quota, logs);
            let operation = Operation {
                action: Action::Acquire,
                quota,
                cost: charge.cost(),
                charged_at: 0,
                now,
                all_fit: true,
            };
            let plan = Plan::new(&mut counter, &operation);
            let must_grow = plan.spend > 0 && counter.growth(quota, now).is_some();
            // Keep the critical section short: if a copy is cheap, compute the decision from it
            // after the lock is released.
            let copy = match counter.try_copy() {
                Some(copy) => Ok(copy),
                None => Err(plan.decision(&counter, quota, now)),
            };
            if plan.written && !must_grow {
                let allocated = counter.allocated();
                counter.spend(quota, now, plan.spend);
                let released = allocated - counter.allocated();
                self.capacity.log_entries.release(fingerprint.policy_class(), released);
                let usage = Usage::of(quota, plan.remaining_after());
                *state = counter.pack(quota, usage, Some(before), logs);
            } else {
                counter.restore(before, logs);
                if must_grow {
                    break 'slow;
                }
                // The limit was lowered: the entry would expire before its bucket has drained.
                if !before.lives_for(C::KIND, quota) {
                    *state = before.with_lifetime_for(C::KIND, quota);
                }
                // An acquire that spends nothing is denied.
                state.mark_exhausted();
            }
            table.sweep(now, &self.capacity);
            drop(table);
            // A closure would be a call.
            let decision = match copy {
                Ok(copy) => plan.decision(&copy, quota, now),
                Err(decision) => decision,
            };
            return Ok(decision.into_decision(quota.burst(), Source::Store));
        }
        check()?;
        self.decide_slow::<C>(action, charge, fingerprint, table)
    }

    #[cold]
    #[inline(never)]
    fn decide_slow<'a, C: StoredCounter>(
        &'a self,
        action: Action,
        charge: &Charge<'_>,
        fingerprint: Fingerprint,
        mut table: SpinMutexGuard<'a, Table>,
    ) -> Result<Decision, StoreError> {
        // The numbers of a calendar depend on the time.
        let has_calendar = C::KIND == CounterKind::Window && charge.quota().calendar().is_some();
        if charge.is_extended() || has_calendar || action == Action::Reset {
            drop(table);
            return self.decide_extended(action, charge);
        }
        let mut reservation = RoomReservation::new(self);
        loop {
            let now = self.clock.now();
            let context =
                ChargeContext { store: self, action, charge, fingerprint, now, all_fit: true };
            let lack = match context.apply_as::<C>(&mut table, &mut reservation) {
                Ok(decision) => {
                    table.sweep(now, &self.capacity);
                    return Ok(decision.into_decision(charge.quota().burst(), Source::Store));
                }
                Err(lack) => lack,
            };
            drop(table);
            self.make_room(fingerprint, lack, now, &mut reservation)?;
            table = self.shard(fingerprint).lock();
        }
    }

    /// Returns the fingerprint of a charge's key and policy.
    #[inline]
    fn fingerprint(&self, charge: &Charge<'_>) -> Fingerprint {
        match charge.explicit_policy() {
            None => self.secret.fingerprint(charge.key(), charge.quota().default_policy().sum()),
            Some(name) => self.secret.fingerprint(charge.key(), &self.secret.policy_sum(name)),
        }
    }

    #[inline]
    fn shard(&self, fingerprint: Fingerprint) -> &Shard {
        &self.shards[fingerprint.shard_index(SHARDS)]
    }
}

impl Store for MemoryStore {
    const VALIDATES_ACQUIRES: bool = true;

    #[inline(always)]
    #[expect(clippy::inline_always, reason = "the caller computes only the fields that it uses")]
    fn decide(
        &self,
        action: Action,
        charge: &Charge<'_>,
    ) -> Outcome<impl Future<Output = Result<Decision, StoreError>> + Send> {
        Outcome::<Ready<_>>::Ready(if action == Action::Acquire {
            self.acquire_now(charge)
        } else {
            self.decide_any(action, charge, || Ok(()))
        })
    }

    fn decide_all(
        &self,
        action: Action,
        charges: &[Charge<'_>],
    ) -> Outcome<impl Future<Output = Result<Vec<Decision>, StoreError>> + Send> {
        Outcome::<Ready<_>>::Ready(self.decide_all_now(action, charges))
    }

    /// Decides charges for which there is no room, by the failure policy of each. There is no other
    /// store, so `local` is the error, too.
    fn fall_back(
        &self,
        action: Action,
        charges: &[Charge<'_>],
        error: StoreError,
    ) -> Result<Vec<Decision>, StoreError> {
        let decides = matches!(error, StoreError::Full { .. })
            && matches!(action, Action::Acquire | Action::Peek);
        let decide = |charge: &Charge<'_>| {
            let burst = charge.quota().burst();
            match charge.on_store_failure() {
                OnStoreFailure::Allow if decides => {
                    Ok(Decision::allow(burst, burst).with_source(Source::Allow))
                }
                OnStoreFailure::Deny if decides => {
                    let denied = Decision::deny(burst, Duration::from_secs(1));
                    Ok(denied.with_reset_after(Duration::ZERO).with_source(Source::Deny))
                }
                _ => Err(error.clone()),
            }
        };
        charges.iter().map(decide).collect()
    }

    fn clock(&self) -> &dyn Clock {
        match &self.clock {
            StoreClock::System(clock) => clock,
            StoreClock::Custom(clock) => &**clock,
        }
    }
}

#[cfg(test)]
mod tests;
