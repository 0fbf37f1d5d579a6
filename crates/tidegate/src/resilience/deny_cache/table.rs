//! [`DenialTable`]: the cached denials, in a set-associative table of fixed size.
//!
//! The set of a request follows from its hash, which depends on a secret of the process: a client
//! cannot choose keys that evict the entries of another client. An entry is valid for one version of
//! its counts ([`CountVersions`]).

use std::hash::Hasher;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use siphasher::sip128::{Hasher128, SipHasher13};

use crate::algorithm::RawDecision;
use crate::charge::Charge;
use crate::clock::micros;
use crate::decision::{Decision, Source};
use crate::quota::Quota;
use crate::random::random_u64;
use crate::store::invalidation::CountId;

/// Maximum number of decisions in a set. The denial of a request with more charges has a set of
/// its own.
const WAYS: usize = 8;
/// Longest time for which a denial is repeated, whatever its `retry_after`, unless the key is
/// blocked. It bounds how long a lost invalidation has an effect.
const MAX_DENIAL_TTL: Duration = Duration::from_secs(5);
/// Longest time for which a denial is repeated if more units than it shows may become free before
/// it ends: those of a limit that allows the request, or fewer than the request needs.
const MAX_INEXACT_TTL: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct DenialTable {
    sets: Box<[Mutex<Vec<CachedDenial>>]>,
    ways: usize,
    entries: AtomicUsize,
}

/// A request as the cache sees it before it calls the store.
#[derive(Debug, Clone, Copy)]
pub(super) struct CacheQuery {
    pub(super) request: RequestHash,
    /// Version of the counts of the request.
    pub(super) version: u64,
    /// Time by the store's clock (µs).
    pub(super) now: u64,
    /// Whether entries may be used.
    pub(super) is_fresh: bool,
}

/// A denial by the store: its decisions on all charges of one request.
#[derive(Debug)]
pub(super) struct CachedDenial {
    request: RequestHash,
    version: u64,
    /// Whether it was used since the last eviction.
    used: bool,
    /// Time before which all decisions surely hold.
    until: u64,
    /// Time at which the store had answered.
    received: u64,
    decisions: Box<[RawDecision]>,
}

impl CachedDenial {
    /// Returns `None` for a denial that ends too soon to be useful. It holds until the first of
    /// its charges would be allowed; the store decided after `query.now`, when it was called.
    pub(super) fn new(
        query: CacheQuery,
        received: u64,
        charges: &[Charge<'_>],
        decisions: &[Decision],
    ) -> Option<Self> {
        let denied = decisions.iter().filter(|decision| !decision.allowed);
        let retry_after = denied.map(|decision| micros(decision.retry_after)).min()?;
        let remains_exact = charges.iter().zip(decisions).all(|(charge, decision)| {
            let lacks_one = !decision.allowed && charge.cost() <= decision.remaining + 1;
            lacks_one || decision.reset_after.is_zero()
        });
        let is_blocked = charges
            .iter()
            .zip(decisions)
            .any(|(charge, decision)| !decision.allowed && charge.quota().has_blocks());
        let max_ttl = match (is_blocked, remains_exact) {
            (true, _) => Duration::MAX,
            (false, true) => MAX_DENIAL_TTL,
            (false, false) => MAX_INEXACT_TTL,
        };
        let ttl = certain_part(retry_after).min(micros(max_ttl));
        let raw = |decision: &Decision| RawDecision {
            allowed: decision.allowed,
            remaining: decision.remaining,
            retry_after: micros(decision.retry_after),
            reset_after: micros(decision.reset_after),
            delay: micros(decision.delay),
        };
        (ttl > 0).then(|| Self {
            request: query.request,
            version: query.version,
            used: false,
            until: query.now.saturating_add(ttl),
            received,
            decisions: decisions.iter().map(raw).collect(),
        })
    }

    /// Returns the decision on a charge, at this time. Waits are counted from the answer of the
    /// store, so that a client that waits is admitted.
    pub(super) fn decision(&self, charge: usize, quota: &Quota, now: u64) -> Decision {
        let passed = now.saturating_sub(self.received);
        let at_denial = self.decisions[charge];
        let reset_after = at_denial.reset_after.saturating_sub(passed);
        let retry_after = at_denial.retry_after.saturating_sub(passed);
        let remaining = if reset_after == 0 { quota.burst() } else { at_denial.remaining };
        let raw = RawDecision { remaining, retry_after, reset_after, ..at_denial };
        raw.into_decision(quota.burst(), Source::DenyCache)
    }

    /// Returns whether every charge is denied.
    pub(super) fn is_of_all_charges(&self) -> bool {
        self.decisions.iter().all(|decision| !decision.allowed)
    }
}

impl DenialTable {
    pub(super) fn new(max_entries: usize) -> Self {
        let sets = (max_entries / WAYS).max(1);
        Self {
            sets: std::iter::repeat_with(Mutex::default).take(sets).collect(),
            ways: WAYS.min(max_entries),
            entries: AtomicUsize::new(0),
        }
    }

    /// Returns the number of entries, including stale ones.
    pub(super) fn entries(&self) -> usize {
        self.entries.load(Ordering::Relaxed)
    }

    /// Finds the denial that still holds for this request, and returns what `read` makes of it.
    pub(super) fn find<T>(
        &self,
        query: &CacheQuery,
        read: impl FnOnce(&CachedDenial) -> Option<T>,
    ) -> Option<T> {
        let mut set = self.lock(query.request);
        let denial = set.iter_mut().find(|denial| denial.request == query.request)?;
        if denial.version != query.version || query.now >= denial.until {
            return None;
        }
        denial.used = true;
        read(denial)
    }

    /// Inserts a denial instead of an earlier one of the same request, unless that has a later
    /// version.
    pub(super) fn insert(&self, denial: CachedDenial) {
        if self.ways == 0 {
            return;
        }
        let mut set = self.lock(denial.request);
        let is_same = |other: &CachedDenial| other.request == denial.request;
        if set.iter().any(|other| is_same(other) && other.version > denial.version) {
            return;
        }
        let len_before = set.len();
        set.retain(|other| !is_same(other));
        while !set.is_empty() && size_of_set(&set) + denial.decisions.len() > self.ways {
            evict_one(&mut set, denial.received);
        }
        set.push(denial);
        // Adds first, because another thread may subtract at any time.
        self.entries.fetch_add(set.len(), Ordering::Relaxed);
        self.entries.fetch_sub(len_before, Ordering::Relaxed);
    }

    /// Drops all entries, and frees their memory.
    pub(super) fn clear(&self) {
        for set in &self.sets {
            let dropped = std::mem::take(&mut *lock(set));
            self.entries.fetch_sub(dropped.len(), Ordering::Relaxed);
        }
    }

    fn lock(&self, RequestHash([hash, _]): RequestHash) -> MutexGuard<'_, Vec<CachedDenial>> {
        let set = hash % self.sets.len() as u64;
        lock(&self.sets[usize::try_from(set).unwrap_or(0)])
    }
}

fn lock(set: &Mutex<Vec<CachedDenial>>) -> MutexGuard<'_, Vec<CachedDenial>> {
    set.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the number of decisions in a set.
fn size_of_set(set: &[CachedDenial]) -> usize {
    set.iter().map(|denial| denial.decisions.len()).sum()
}

/// Evicts the entry that ends first, of those that have ended or were not used since the last
/// eviction if there is one.
fn evict_one(set: &mut Vec<CachedDenial>, now: u64) {
    let in_use = |denial: &CachedDenial| denial.used && now < denial.until;
    let first = set.iter().enumerate().min_by_key(|(_, denial)| (in_use(denial), denial.until));
    let Some(at) = first.map(|(at, _)| at) else { return };
    if in_use(&set.swap_remove(at)) {
        for denial in set {
            denial.used = false;
        }
    }
}

/// Returns the part of a wait that surely passes by the store's clock. NTP changes the speed of a
/// clock by up to one part in 2,000, so two clocks may drift apart by one part in 1,000.
fn certain_part(wait: u64) -> u64 {
    wait - wait.div_ceil(1_000)
}

/// Number of bytes of an encoded charge beside its key and policy: a separator, five numbers, and
/// the kind of the quota.
const FIXED_BYTES: usize = 1 + 5 * 8 + 3;
/// Longest encoding of a charge that needs no allocation.
const MAX_STACK_BYTES: usize = 192;

/// Hash of all charges of a request: key, policy, quota, cost and the epoch of each. It has 128
/// bits, without the alignment of `u128`, which would enlarge the futures that hold it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct RequestHash(pub(super) [u64; 2]);

/// Random keys of the hashes, so that a client cannot choose keys that collide.
#[derive(Debug)]
pub(super) struct CacheSecret([u64; 2]);

impl CacheSecret {
    pub(super) fn new() -> Self {
        Self(std::array::from_fn(|_| random_u64()))
    }

    /// Hashes a request, and passes the count of each charge to `on_count`.
    pub(super) fn hash(
        &self,
        charges: &[Charge<'_>],
        epoch_of: impl Fn(&Charge<'_>) -> u64,
        mut on_count: impl FnMut(CountId),
    ) -> RequestHash {
        let mut hash_charge = |charge: &Charge<'_>| {
            let (count, hash) = self.hash_charge(charge, epoch_of(charge));
            on_count(count);
            hash
        };
        if let [charge] = charges {
            return hash_charge(charge);
        }
        let mut hasher = SipHasher13::new_with_keys(self.0[1], self.0[0]);
        for charge in charges {
            let RequestHash(words) = hash_charge(charge);
            for word in words {
                hasher.write_u64(word);
            }
        }
        let hash = hasher.finish128();
        RequestHash([hash.h1, hash.h2])
    }

    fn hash_charge(&self, charge: &Charge<'_>, epoch: u64) -> (CountId, RequestHash) {
        let (key, policy, quota) =
            (charge.key().as_bytes(), charge.policy().as_bytes(), charge.quota());
        // Encoding everything into one buffer and hashing it once is the fastest way by far.
        let length = key.len() + 1 + policy.len();
        let (mut on_stack, mut on_heap) = ([0; MAX_STACK_BYTES], Vec::new());
        let bytes = match on_stack.get_mut(..length + FIXED_BYTES) {
            Some(bytes) => bytes,
            None => {
                on_heap.resize(length + FIXED_BYTES, 0);
                &mut on_heap
            }
        };
        bytes[..key.len()].copy_from_slice(key);
        // This byte occurs in no UTF-8 text, so it separates the key from the policy.
        bytes[key.len()] = 0xff;
        bytes[key.len() + 1..length].copy_from_slice(policy);
        bytes[length] = 0xff;
        let numbers = [quota.limit(), quota.window_micros(), quota.burst(), charge.cost(), epoch];
        let option = u8::from(quota.count_denied()) + 2 * u8::from(quota.has_blocks());
        let kind = [quota.algorithm() as u8, quota.encoding() as u8, option];
        for (field, number) in bytes[length + 1..].chunks_exact_mut(8).zip(numbers) {
            field.copy_from_slice(&number.to_le_bytes());
        }
        bytes[length + FIXED_BYTES - kind.len()..].copy_from_slice(&kind);
        let hash = SipHasher13::new_with_keys(self.0[0], self.0[1]).hash(bytes);
        (CountId::of_bytes(&bytes[..length]), RequestHash([hash.h1, hash.h2]))
    }
}

/// Number of slots of versions. With 100,000 admissions per second, a slot changes about once per second.
const VERSION_SLOTS: usize = 1 << 17;

/// Versions of counts. The version of a count changes whenever units of it may have been charged
/// or returned.
///
/// Counts share slots, so a version may also change because of another count: that only costs a
/// call to the store.
#[derive(Debug)]
pub(super) struct CountVersions {
    slots: Box<[AtomicU32]>,
    /// Number of changes of all counts.
    common: AtomicU32,
}

impl CountVersions {
    pub(super) fn new() -> Self {
        let slots = std::iter::repeat_with(AtomicU32::default).take(VERSION_SLOTS).collect();
        Self { slots, common: AtomicU32::default() }
    }

    /// Returns the version that all counts have in common. The version of a request is the sum of
    /// it and of those of its counts: each only grows, so the sum grows if any of them changes.
    pub(super) fn common(&self) -> u64 {
        u64::from(self.common.load(Ordering::Acquire))
    }

    /// Returns the version of a count.
    pub(super) fn of(&self, count: CountId) -> u64 {
        u64::from(self.slot(count).load(Ordering::Acquire))
    }

    /// Changes the version of a count.
    pub(super) fn change(&self, count: CountId) {
        self.slot(count).fetch_add(1, Ordering::AcqRel);
    }

    /// Changes the versions of all counts.
    pub(super) fn change_all(&self) {
        self.common.fetch_add(1, Ordering::AcqRel);
    }

    fn slot(&self, CountId(count): CountId) -> &AtomicU32 {
        &self.slots[usize::try_from(count % VERSION_SLOTS as u64).unwrap_or(0)]
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn requests_differ_by_every_part_of_each_charge() {
        let quota = |limit| Quota::token_bucket(limit, Duration::from_secs(60)).expect("valid");
        let (one, two, burst) = (quota(1), quota(2), quota(1).with_burst(2).expect("a bucket"));
        let leaky = Quota::leaky_bucket(1, Duration::from_secs(60)).expect("valid");
        let (long, longer) = ("k".repeat(512), "k".repeat(513));
        let secret = CacheSecret::new();
        let mut charges = Vec::new();
        for quota in [&one, &two, &burst, &leaky] {
            for (key, policy) in
                [("ab", "c"), ("a", "bc"), (&long, "c"), (&longer, "c"), (&long, &long)]
            {
                let charge = Charge::new(key, quota).with_policy(policy);
                charges.extend([charge, charge.with_cost(2)]);
            }
        }
        let mut seen = std::collections::HashSet::new();
        for charge in &charges {
            for epoch in [0, 1] {
                let mut counts = Vec::new();
                let hash = secret.hash(&[*charge], |_| epoch, |count| counts.push(count));
                assert_eq!(counts, [CountId::of(charge)]);
                assert!(seen.insert(hash));
            }
        }
        for others in [&charges[..2], &charges[1..3], &charges[..3], &[charges[1], charges[0]]] {
            assert!(seen.insert(secret.hash(others, |_| 0, |_| ())));
        }
    }
}
