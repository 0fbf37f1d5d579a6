//! [`DenialTable`]: the cached denials, in a set-associative table of fixed size.
//!
//! All entries of a count are in one small set, so that every operation touches a handful of
//! entries. The choice of the set depends on a secret of the process: a client cannot choose keys
//! that evict the entries of another client.

use std::num::NonZeroU64;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::entry::{DenialEntry, QuotaSnapshot, StoreDenial, is_bucket};
use super::key::{EntryHashSecret, EntryKey, KeyHash};
use crate::charge::Charge;
use crate::decision::Decision;
use crate::quota::Quota;
use crate::store::invalidation::CountId;

/// Maximum number of entries in a set.
const WAYS: usize = 8;
const SHARDS: usize = 64;
/// Maximum number of costs of one count that have an entry each. Another cost is denied by the
/// entry of the next lower cost, and its `retry_after` may then be too short.
const MAX_COSTS: usize = 3;

#[derive(Debug)]
pub(super) struct DenialTable {
    shards: Box<[Mutex<CacheShard>]>,
    ways: usize,
    entries: AtomicUsize,
    secret: EntryHashSecret,
}

#[derive(Debug)]
struct CacheShard {
    sets: Box<[Vec<DenialEntry>]>,
    /// Incremented whenever an entry of this shard may have become wrong. A denial with a lease of
    /// an earlier generation is not cached.
    generation: u64,
    /// Serial number of the latest entry.
    serial: NonZeroU64,
}

/// Right to cache the answer of the store after a miss. It becomes void when units of the count may
/// have been freed since the miss.
#[derive(Debug, Clone, Copy)]
pub(super) struct Lease {
    pub(super) key: EntryKey,
    generation: u64,
    epoch: u64,
    /// Whether there are entries whose waits become too short if this request is admitted.
    has_others: bool,
    /// Serial number of the bucket entry with this very cost whose wait is over.
    bucket_entry: Option<NonZeroU64>,
    /// Whether the request is already counted in that entry.
    pub(super) counted: bool,
}

/// A charge that is looked up.
#[derive(Clone, Copy)]
pub(super) struct CacheQuery<'a> {
    pub(super) key: EntryKey,
    pub(super) charge: &'a Charge<'a>,
    /// Epoch of the store for this charge.
    pub(super) epoch: u64,
    pub(super) now: u64,
    /// Hash of the request, if it has several charges.
    pub(super) request: Option<u128>,
    /// Whether the action is an acquire.
    pub(super) spends: bool,
}

/// Result of [`DenialTable::find`]: a cached denial, with the snapshot of its request if there is
/// one; or a lease to cache the answer of the store.
pub(super) type FindResult = Result<(Decision, Option<Vec<QuotaSnapshot>>), Lease>;

impl CacheShard {
    fn new(sets: usize) -> Self {
        Self {
            sets: std::iter::repeat_with(Vec::new).take(sets).collect(),
            generation: 0,
            serial: NonZeroU64::MIN,
        }
    }

    /// Lets a request through to the store.
    fn lease(&mut self, query: &CacheQuery<'_>, set: usize) -> Lease {
        let CacheQuery { key, charge, epoch, now, .. } = *query;
        let is_bucket = is_bucket(charge.quota());
        let mut lease = Lease {
            key,
            generation: self.generation,
            epoch,
            has_others: false,
            bucket_entry: None,
            counted: false,
        };
        for entry in self.sets[set].iter_mut().filter(|entry| entry.key.hash == key.hash) {
            if is_bucket && entry.cost == charge.cost() {
                if entry.epoch == epoch && now < entry.expires_at() {
                    lease.bucket_entry = Some(entry.serial);
                    // With several charges, another one may deny, so this one may not be spent.
                    lease.counted = query.spends && query.request.is_none();
                    if lease.counted {
                        entry.count_request(charge.quota(), charge.cost());
                    }
                }
            } else {
                lease.has_others = true;
                if query.spends && charge.quota().count_denied() {
                    entry.extend(now);
                }
            }
        }
        lease
    }
}

impl DenialTable {
    pub(super) fn new(max_entries: usize) -> Self {
        let sets = (max_entries / WAYS).max(1);
        let shards = SHARDS.min(sets);
        let shard = || Mutex::new(CacheShard::new(sets / shards));
        Self {
            shards: std::iter::repeat_with(shard).take(shards).collect(),
            ways: WAYS.min(max_entries),
            entries: AtomicUsize::new(0),
            secret: EntryHashSecret::new(),
        }
    }

    /// Returns the number of entries, including expired ones.
    pub(super) fn entries(&self) -> usize {
        self.entries.load(Ordering::Relaxed)
    }

    pub(super) fn key(&self, charge: &Charge<'_>) -> EntryKey {
        self.secret.key(charge)
    }

    /// Hashes all charges of a request, with their costs.
    pub(super) fn request_hash(
        &self,
        charges: &[Charge<'_>],
        keys: impl Iterator<Item = EntryKey>,
    ) -> u128 {
        self.secret.request_hash(charges, keys)
    }

    /// Finds the denial that holds for this charge, or else returns a lease.
    pub(super) fn find(&self, query: &CacheQuery<'_>) -> FindResult {
        let (mut shard, set) = self.lock(query.key.count);
        let Some(entry) = find_entry(&mut shard.sets[set], query) else {
            return Err(shard.lease(query, set));
        };
        entry.used = true;
        let snapshot =
            entry.snapshot.as_ref().filter(|snapshot| query.request == Some(snapshot.request));
        Ok((
            entry.decision(query.charge, query.now),
            snapshot.map(|snapshot| snapshot.quotas.to_vec()),
        ))
    }

    /// Returns a lease without a lookup.
    pub(super) fn lease(&self, query: &CacheQuery<'_>) -> Lease {
        let (mut shard, set) = self.lock(query.key.count);
        shard.lease(query, set)
    }

    /// Counts a cached denial that the store must record later. Returns whether it is the first one
    /// since the last record.
    pub(super) fn count_denial(&self, query: &CacheQuery<'_>) -> bool {
        let (mut shard, set) = self.lock(query.key.count);
        let Some(entry) = find_entry(&mut shard.sets[set], query) else { return false };
        let is_first = entry.units == 0;
        entry.units = entry.units.saturating_add(query.charge.cost());
        is_first
    }

    /// Takes the units of cached denials that the store has not recorded yet.
    pub(super) fn take_unrecorded(&self, key: EntryKey) -> u64 {
        let (mut shard, set) = self.lock(key.count);
        take_units(&mut shard.sets[set], key.hash)
    }

    /// Updates the entries after the store has admitted a charge: their waits are longer now.
    pub(super) fn on_admitted(&self, lease: Lease, charge: &Charge<'_>) {
        let EntryKey { count, hash } = lease.key;
        let keeps_own = is_bucket(charge.quota());
        if lease.has_others {
            let is_own = |entry: &DenialEntry| keeps_own && entry.cost == charge.cost();
            self.drop_if(count, false, |entry| entry.key.hash == hash && !is_own(entry));
        }
        if let (Some(serial), false) = (lease.bucket_entry, lease.counted) {
            let (mut shard, set) = self.lock(count);
            if let Some(entry) = shard.sets[set].iter_mut().find(|entry| entry.serial == serial) {
                entry.count_request(charge.quota(), charge.cost());
            }
        }
    }

    /// Drops the entry in which an unanswered request was counted: its `until` is not certain any
    /// more.
    pub(super) fn on_unanswered(&self, lease: Lease) {
        if let (Some(serial), true) = (lease.bucket_entry, lease.counted) {
            self.drop_if(lease.key.count, false, |entry| entry.serial == serial);
        }
    }

    /// Caches a denial, unless its lease is void.
    pub(super) fn insert(&self, lease: Lease, quota: &Quota, denial: StoreDenial) {
        let now = denial.received;
        let (mut shard, set) = self.lock(lease.key.count);
        if shard.generation != lease.generation || self.ways == 0 {
            drop(shard);
            return self.on_unanswered(lease);
        }
        shard.serial = shard.serial.saturating_add(1);
        let serial = shard.serial;
        let entry = DenialEntry::new(lease.key, lease.epoch, serial, quota, denial);
        let Some(mut entry) = entry else { return };
        let set = &mut shard.sets[set];
        let len_before = set.len();
        if is_bucket(quota) && set.iter().any(|other| supersedes(other, &entry)) {
            return;
        }
        if quota.count_denied() {
            // Denials that were counted during the call.
            entry.units = take_units(set, lease.key.hash);
        }
        let is_same_key = |other: &DenialEntry| other.key.hash == lease.key.hash;
        // The new entry covers or replaces these.
        set.retain(|other| {
            let is_covered = other.cost >= entry.cost && other.until <= entry.until;
            !(is_same_key(other) && (is_covered || other.cost == entry.cost))
        });
        if set.iter().filter(|other| is_same_key(other)).count() >= MAX_COSTS {
            evict_first_to_expire(set, is_same_key);
        } else if set.len() >= self.ways {
            make_room(set, now);
        }
        set.push(entry);
        if set.len() > len_before {
            self.entries.fetch_add(set.len() - len_before, Ordering::Relaxed);
        } else {
            self.entries.fetch_sub(len_before - set.len(), Ordering::Relaxed);
        }
    }

    /// Drops all entries of a count, because units of it may have been freed.
    pub(super) fn invalidate(&self, count: CountId) {
        self.drop_if(count, true, |entry| entry.key.count == count);
    }

    /// Drops the entries of other quotas on the same count. The store may convert the count to this
    /// quota, which can free units that the other quota still counted.
    pub(super) fn drop_other_quotas(&self, key: EntryKey) {
        self.drop_if(key.count, false, |entry| {
            entry.key.count == key.count && entry.key.hash != key.hash
        });
    }

    /// Drops all entries, because units of any count may have been freed.
    pub(super) fn clear(&self) {
        for shard in &self.shards {
            let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            shard.generation += 1;
            let dropped: usize = shard.sets.iter().map(Vec::len).sum();
            // New vectors instead of `clear`, to free the memory of a past flood.
            shard.sets.iter_mut().for_each(|set| *set = Vec::new());
            self.entries.fetch_sub(dropped, Ordering::Relaxed);
        }
    }

    /// Drops entries of a count. With `voids_leases` the outstanding leases of the shard become
    /// void even if no entry is dropped.
    fn drop_if(&self, count: CountId, voids_leases: bool, is_wrong: impl Fn(&DenialEntry) -> bool) {
        let (mut shard, set) = self.lock(count);
        let set = &mut shard.sets[set];
        let len_before = set.len();
        set.retain(|entry| !is_wrong(entry));
        let dropped = len_before - set.len();
        if voids_leases || dropped > 0 {
            shard.generation += 1;
            self.entries.fetch_sub(dropped, Ordering::Relaxed);
        }
    }

    /// Locks the shard of a count, and returns the index of its set.
    fn lock(&self, count: CountId) -> (MutexGuard<'_, CacheShard>, usize) {
        let [shard_bits, set_bits] = self.secret.shard_and_set(count);
        let shard = scale(shard_bits, self.shards.len());
        let shard = self.shards[shard].lock().unwrap_or_else(PoisonError::into_inner);
        let set = scale(set_bits, shard.sets.len());
        (shard, set)
    }
}

/// Finds the entry that denies a charge: the one of the same cost, or, for a count with many costs,
/// the one of a lower cost with the longest wait.
fn find_entry<'a>(
    set: &'a mut [DenialEntry],
    query: &CacheQuery<'_>,
) -> Option<&'a mut DenialEntry> {
    let cost = query.charge.cost();
    let holds = |entry: &DenialEntry| {
        entry.key.hash == query.key.hash
            && entry.cost <= cost
            && entry.epoch == query.epoch
            && query.now < entry.until
    };
    let (mut longest, mut lower): (Option<usize>, usize) = (None, 0);
    for (at, entry) in set.iter().enumerate().filter(|(_, entry)| holds(entry)) {
        if entry.cost == cost {
            return Some(&mut set[at]);
        }
        lower += 1;
        if longest.is_none_or(|best| set[best].until < entry.until) {
            longest = Some(at);
        }
    }
    longest.filter(|_| lower >= MAX_COSTS).map(|at| &mut set[at])
}

/// Returns whether an entry of a bucket is better than a new one. Their calls were in flight at the
/// same time, and the one that holds longer has counted later requests.
fn supersedes(other: &DenialEntry, new: &DenialEntry) -> bool {
    other.key.hash == new.key.hash
        && other.cost == new.cost
        && other.epoch == new.epoch
        && new.sent < other.received
        && other.until > new.until
}

/// Takes the unrecorded units of all entries of a key.
fn take_units(set: &mut [DenialEntry], hash: KeyHash) -> u64 {
    let entries = set.iter_mut().filter(|entry| entry.key.hash == hash);
    entries.map(|entry| std::mem::take(&mut entry.units)).fold(0, u64::saturating_add)
}

/// Evicts the expired entries, or else one that was not used since the last eviction.
fn make_room(set: &mut Vec<DenialEntry>, now: u64) {
    if set.iter().any(|entry| entry.until <= now) {
        set.retain(|entry| entry.until > now);
        return;
    }
    if set.iter().all(|entry| entry.used) {
        for entry in set.iter_mut() {
            entry.used = false;
        }
    }
    evict_first_to_expire(set, |entry| !entry.used);
}

/// Evicts the candidate that expires first.
fn evict_first_to_expire(set: &mut Vec<DenialEntry>, is_candidate: impl Fn(&DenialEntry) -> bool) {
    let candidates = set.iter().enumerate().filter(|(_, entry)| is_candidate(entry));
    if let Some((at, _)) = candidates.min_by_key(|(_, entry)| entry.until) {
        set.swap_remove(at);
    }
}

/// Maps the upper half of these bits to a number below `size`.
fn scale(bits: u64, size: usize) -> usize {
    usize::try_from(((bits >> 32) * size as u64) >> 32).unwrap_or(0)
}
