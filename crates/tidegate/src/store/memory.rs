//! [`MemoryStore`]: the counts of one process, for millions of keys.
//!
//! The store is a sharded hash table with open addressing and one mutex per shard. A key is hashed
//! once, with a secret, to a fingerprint, which selects the shard and the slot and replaces the key
//! itself. A slot has a fixed size of 40 bytes, so a decision on an existing key allocates nothing
//! and touches one place in memory. Every decision reads and writes, so a plain mutex, held for
//! some nanoseconds, is the right lock.
//!
//! Decisions sweep expired keys in passing, some slots at a time; there is no background thread. A
//! full store scans whole shards for expired keys, and else evicts a key that has not used up its
//! quota. It rejects a new key if all keys that it looks at have.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use spin::mutex::SpinMutexGuard;

pub use self::builder::Builder;
use self::context::{ChargeContext, KeyReservation};
use self::fingerprint::{Fingerprint, HashSecret};
use self::shard::Shard;
use self::state::{CounterKind, MAX_TIME, PackedState, StoredCounter};
use self::table::Table;
use super::{Store, StoreError};
use crate::action::Action;
use crate::algorithm::{Algorithm, Bucket, FixedWindow, Plan, SlidingCounter, SlidingLog};
use crate::charge::Charge;
use crate::clock::{Clock, SystemClock};
use crate::decision::{Decision, Source};
use crate::limiter::Error;

mod acquire;
mod builder;
mod context;
pub(crate) mod fingerprint;
mod group;
mod logs;
mod shard;
pub(crate) mod state;
mod table;

/// Number of shards: enough that scanning one is fast even with millions of keys, and few enough
/// that all shard headers stay in the L1 cache.
const SHARDS: usize = 256;
/// Approximate number of entries that a new key scans for an expired one when the store is full. In
/// a larger store, a key can be rejected although another shard has an expired one; the next call
/// continues the scan there.
const MAX_EVICTION_SCAN: usize = 16_384;

/// Store that keeps its counts in the memory of this process.
///
/// It needs no runtime and never blocks on I/O; [`Limiter::blocking`](crate::Limiter::blocking) has
/// its calls without `async`. Counts are lost when the process ends, and other processes do not see
/// them: with N instances behind a load balancer, a client gets up to N times the limit.
///
/// A key takes 40 bytes, and that of a `sliding-log` also 16 bytes per request that counts.
/// Expired keys are removed in passing.
///
/// A full store makes room for a new key: it forgets a key that has not used up its quota, of a
/// sample the one that expires first, and that key starts again with its whole quota. A flood of
/// keys therefore neither locks out new clients nor frees a client that is at its limit. If all
/// sampled keys are at their limit, the new one gets [`StoreError::Full`]. The entries of sliding
/// logs have a limit of their own, by default 100 bytes for each key of the maximum.
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
    max_keys: usize,
    /// Maximum number of log entries in a shard.
    max_log_entries: usize,
    keys: KeyStats,
}

/// State that inserts and removals of keys write, on cache lines apart from the fields that every
/// decision reads.
#[derive(Debug)]
#[repr(align(128))]
struct KeyStats {
    count: AtomicUsize,
    /// Lower bound on the expiry of all keys, which makes rejections by a full store cheap.
    next_expiry: AtomicU64,
    /// Shard at which the next eviction scan starts.
    eviction_cursor: AtomicUsize,
    /// Held during an eviction scan.
    eviction: Mutex<()>,
    /// Number of keys that were evicted although they still counted.
    evicted: AtomicU64,
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
    #[inline]
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
        self.keys.count.load(Ordering::Relaxed)
    }

    /// Returns the maximum number of keys.
    #[must_use]
    pub fn max_keys(&self) -> usize {
        self.max_keys
    }

    /// Returns the number of keys that a full store has forgotten although they still counted. If
    /// it grows, the store needs a higher maximum, or someone floods it with keys.
    #[must_use]
    pub fn evicted_keys(&self) -> u64 {
        self.keys.evicted.load(Ordering::Relaxed)
    }

    /// Decides one charge, without `async`.
    pub(crate) fn decide_now(
        &self,
        action: Action,
        charge: &Charge<'_>,
    ) -> Result<Decision, StoreError> {
        if action == Action::Acquire && charge.quota().narrow().can_admit(charge.cost()) {
            match self.acquire_now(charge) {
                Ok(decision) => return Ok(decision),
                Err(Error::Store(error)) => return Err(error),
                // The charge was not validated: that is up to the caller.
                Err(_) => {}
            }
        }
        self.decide_any(action, charge, || Ok(()))
    }

    /// Returns whether this charge's key has a count, which may have expired and not been swept
    /// yet.
    #[cfg(feature = "resilience")]
    pub(crate) fn has_count(&self, charge: &Charge<'_>) -> bool {
        let fingerprint = Fingerprint::of(charge, self.secret);
        self.shard(fingerprint).lock().find(fingerprint).is_ok()
    }

    /// Spends as many of the charge's units as fit, if its key has a count. Inserts nothing
    /// otherwise.
    #[cfg(feature = "resilience")]
    pub(crate) fn charge_if_present(&self, charge: &Charge<'_>) {
        let fingerprint = Fingerprint::of(charge, self.secret);
        let shard = self.shard(fingerprint);
        let mut table = shard.lock();
        if table.find(fingerprint).is_err() {
            return;
        }
        let now = self.clock.now();
        let context = ChargeContext {
            store: self,
            shard,
            action: Action::ChargeUpTo,
            charge,
            fingerprint,
            now,
            all_fit: true,
        };
        context.apply(&mut table, &mut KeyReservation::new(self));
        self.sweep(&mut table, now);
    }

    /// Decides a charge that `check` validates, by the general arithmetic. An acquire of an existing
    /// key skips the check, because the key was checked when it was inserted. The error type is the
    /// caller's, so that the result is written only once.
    #[inline]
    pub(crate) fn decide_any<E: From<StoreError>>(
        &self,
        action: Action,
        charge: &Charge<'_>,
        check: impl FnOnce() -> Result<(), E>,
    ) -> Result<Decision, E> {
        match charge.quota().algorithm() {
            Algorithm::SlidingLog => self.decide_as::<SlidingLog, E>(action, charge, check),
            Algorithm::SlidingCounter => self.decide_as::<SlidingCounter, E>(action, charge, check),
            Algorithm::FixedWindow => self.decide_as::<FixedWindow, E>(action, charge, check),
            Algorithm::TokenBucket | Algorithm::LeakyBucket => {
                self.decide_as::<Bucket, E>(action, charge, check)
            }
        }
    }

    /// Decides an acquire of an existing key, which is nearly every call, on a fast path, and
    /// everything else on the slow path.
    #[inline(always)]
    #[expect(
        clippy::inline_always,
        reason = "the call frame and its arguments would be a tenth of a decision"
    )]
    fn decide_as<C: StoredCounter, E: From<StoreError>>(
        &self,
        action: Action,
        charge: &Charge<'_>,
        check: impl FnOnce() -> Result<(), E>,
    ) -> Result<Decision, E> {
        let fingerprint = Fingerprint::of(charge, self.secret);
        let shard = self.shard(fingerprint);
        // Read the clock before the lock, so that it overlaps with the computation of the
        // fingerprint.
        let mut now = self.clock.now();
        let mut table = shard.lock();
        if action == Action::Acquire
            && charge.can_be_admitted()
            && let Some((state, logs)) = table.get_mut(fingerprint, C::KIND)
        {
            let (quota, before) = (charge.quota(), *state);
            if before.is_ahead_of(now) {
                // Another thread got the lock first. Under the lock, times are in the order of
                // decisions.
                now = self.clock.now();
            }
            let mut counter = C::unpack(before, logs);
            let plan = Plan::new(&mut counter, Action::Acquire, quota, now, charge.cost(), true);
            // Keep the critical section short: if a copy is cheap, compute the decision from it
            // after the lock is released.
            let copy = counter.try_copy().ok_or_else(|| plan.decision(&counter, quota, now));
            if plan.written {
                counter.spend(quota, now, plan.spend);
                *state = counter.pack(quota, Some(before), logs);
                if state.may_expire_before(before) {
                    self.lower_next_expiry(shard, state.expires_at());
                }
            } else {
                counter.restore(before, logs);
                // The limit was lowered: the entry would expire before its bucket has drained.
                if !before.lives_for(C::KIND, quota) {
                    *state = before.with_lifetime_for(C::KIND, quota);
                }
            }
            self.sweep(&mut table, now);
            if C::KIND == CounterKind::Log && table.logs.entry_count() > self.max_log_entries {
                self.evict_logs(&mut table, fingerprint);
            }
            drop(table);
            let decision =
                copy.map_or_else(|decision| decision, |copy| plan.decision(&copy, quota, now));
            return Ok(decision.into_decision(quota, Source::Store));
        }
        check()?;
        Ok(self.decide_slow::<C>(action, charge, fingerprint, table)?)
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
        let shard = self.shard(fingerprint);
        let mut reservation = KeyReservation::new(self);
        loop {
            let now = self.clock.now();
            let context = ChargeContext {
                store: self,
                shard,
                action,
                charge,
                fingerprint,
                now,
                all_fit: true,
            };
            if let Some(decision) = context.apply_as::<C>(&mut table, &mut reservation) {
                self.sweep(&mut table, now);
                if table.logs.entry_count() > self.max_log_entries {
                    self.evict_logs(&mut table, fingerprint);
                }
                return Ok(decision.into_decision(charge.quota(), Source::Store));
            }
            drop(table);
            self.make_room(now, 1)?;
            table = shard.lock();
        }
    }

    /// Lowers the bounds on the next expiry to `expires_at`. The shard's bound goes first: an
    /// eviction scan resets the store's bound before it reads the shards, so it either sees the new
    /// bound of the shard, or its own result is lowered afterwards.
    fn lower_next_expiry(&self, shard: &Shard, expires_at: u64) {
        shard.next_expiry.fetch_min(expires_at, Ordering::SeqCst);
        self.keys.next_expiry.fetch_min(expires_at, Ordering::SeqCst);
    }

    /// Evicts keys to make room for `new_keys`. The caller must not hold any shard lock.
    fn make_room(&self, now: u64, new_keys: usize) -> Result<(), StoreError> {
        // One scan at a time: during a scan the bound on the next expiry is incomplete.
        let _eviction = self.keys.eviction.lock().unwrap_or_else(PoisonError::into_inner);
        if self.keys() + new_keys <= self.max_keys {
            return Ok(());
        }
        let can_fit = new_keys <= self.max_keys;
        if can_fit && (self.evict_expired(now) || self.evict_unexhausted(new_keys)) {
            return Ok(());
        }
        Err(StoreError::Full { cap: self.max_keys })
    }

    /// Evicts keys that have not used up their quota, nearest to their expiry. Returns whether
    /// there is room for `new_keys`.
    fn evict_unexhausted(&self, new_keys: usize) -> bool {
        let mut total_scanned = 0;
        while total_scanned < MAX_EVICTION_SCAN {
            let index = self.keys.eviction_cursor.fetch_add(1, Ordering::Relaxed) % SHARDS;
            let (scanned, removed) = self.shards[index].evict();
            // An empty shard counts too, so that the loop ends.
            total_scanned += scanned.max(1);
            self.record_evicted(removed);
            if self.keys() + new_keys <= self.max_keys {
                return true;
            }
        }
        false
    }

    fn record_evicted(&self, removed: usize) {
        self.keys.count.fetch_sub(removed, Ordering::Relaxed);
        self.keys.evicted.fetch_add(u64::try_from(removed).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Evicts logs of a shard that has too many entries, except for the one just written.
    #[cold]
    #[inline(never)]
    fn evict_logs(&self, table: &mut Table, written: Fingerprint) {
        let written = table.find(written).map(|at| table.state(at)).ok();
        let is_other_log =
            |state: PackedState| state.is_of(CounterKind::Log) && Some(state) != written;
        let (_, removed) = table.evict(is_other_log);
        self.record_evicted(removed);
    }

    /// Evicts expired keys. Returns whether there were any.
    fn evict_expired(&self, now: u64) -> bool {
        if self.keys.next_expiry.load(Ordering::SeqCst) > now {
            return false;
        }
        // Reset the bound before the scan, so that concurrent inserts lower it again.
        self.keys.next_expiry.store(u64::MAX, Ordering::SeqCst);
        let mut has_room = false;
        let mut bound = u64::MAX;
        let mut total_scanned = 0;
        for _ in 0..SHARDS {
            let index = self.keys.eviction_cursor.fetch_add(1, Ordering::Relaxed) % SHARDS;
            let shard = &self.shards[index];
            if shard.next_expiry.load(Ordering::SeqCst) <= now {
                let (scanned, removed) = shard.remove_expired(now);
                total_scanned += scanned;
                if removed > 0 || total_scanned > MAX_EVICTION_SCAN {
                    self.keys.count.fetch_sub(removed, Ordering::Relaxed);
                    has_room = removed > 0;
                    bound = now;
                    break;
                }
            }
            bound = bound.min(shard.next_expiry.load(Ordering::SeqCst));
        }
        self.keys.next_expiry.fetch_min(bound, Ordering::SeqCst);
        has_room
    }

    #[inline]
    fn sweep(&self, table: &mut Table, now: u64) {
        let removed = table.sweep(now);
        if removed > 0 {
            self.keys.count.fetch_sub(removed, Ordering::Relaxed);
        }
    }

    #[inline]
    fn shard(&self, fingerprint: Fingerprint) -> &Shard {
        &self.shards[fingerprint.shard_index(SHARDS)]
    }
}

impl Store for MemoryStore {
    #[inline]
    async fn acquire(&self, charge: &Charge<'_>) -> Result<Decision, Error> {
        self.acquire_now(charge)
    }

    async fn decide(&self, action: Action, charge: &Charge<'_>) -> Result<Decision, StoreError> {
        self.decide_now(action, charge)
    }

    async fn decide_all(
        &self,
        action: Action,
        charges: &[Charge<'_>],
    ) -> Result<Vec<Decision>, StoreError> {
        self.decide_all_now(action, charges)
    }

    fn clock(&self) -> &dyn Clock {
        match &self.clock {
            StoreClock::System(clock) => clock,
            StoreClock::Custom(clock) => &**clock,
        }
    }

    #[inline]
    fn decide_at_once(
        &self,
        action: Action,
        charge: &Charge<'_>,
    ) -> Option<Result<Decision, Error>> {
        Some(if action == Action::Acquire {
            self.acquire_now(charge)
        } else {
            self.decide_any(action, charge, || Ok(charge.check(action)?))
        })
    }

    fn decides_at_once(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::quota::Quota;

    #[test]
    fn entries_of_logs_are_bounded_and_no_exhausted_log_is_evicted() {
        let mut store = MemoryStore::new();
        store.max_log_entries = 100;
        let now = |key: &str, quota: &Quota| {
            store.decide_now(Action::Acquire, &Charge::new(key, quota)).expect("decided").allowed
        };
        let day = Duration::from_secs(86_400);
        let quota = Quota::sliding_log(50, day).expect("valid");
        let small = Quota::sliding_log(3, day).expect("valid");
        assert!((0..3).all(|_| now("victim", &small)));
        for round in 0..40 {
            for key in 0..2_000 {
                // Entries of one microsecond would be one entry.
                let _ = (now(&format!("key-{key}"), &quota), round);
            }
        }
        for shard in store.shards.iter() {
            let entries = shard.lock().logs.entry_count();
            assert!(entries <= 100 + 1, "{entries} entries in a shard");
        }
        assert!(store.evicted_keys() > 0);
        assert!(!now("victim", &small), "the log at its limit is still there");
    }
}
