//! [`Owed`]: what was admitted without the store, and is to be charged to it.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use hashbrown::HashTable;
use hashbrown::hash_table::Entry;

use crate::algorithm::Algorithm;
use crate::charge::Charge;
use crate::policy::OnStoreFailure;
use crate::quota::Quota;
use crate::store::Part;

const SHARDS: usize = 16;

/// Debts by key and policy, no more than a cap.
#[derive(Debug)]
pub(super) struct Owed {
    shards: [Mutex<HashTable<Debt>>; SHARDS],
    hasher: RandomState,
    /// Those that are claimed among them.
    keys: AtomicUsize,
    max_keys: usize,
    dropped: AtomicU64,
}

/// Units that a key owes to the store.
#[derive(Debug)]
pub(super) struct Debt {
    key: Box<str>,
    policy: Box<str>,
    pub(super) quota: Quota,
    pub(super) units: u64,
    /// Then nothing of it counts any more.
    until: u64,
    /// There is no use in trying before.
    pub(super) not_before: u64,
    /// The pass in which it was last tried.
    tried_in: u64,
}

impl Debt {
    /// What is to be charged to the store.
    pub(super) fn charge(&self) -> Charge<'_> {
        Charge::new(&self.key, &self.quota).policy(&self.policy).cost(self.units)
    }

    fn is_of(&self, charge: &Charge<'_>) -> bool {
        *self.key == *charge.key() && *self.policy == *charge.policy_name()
    }
}

/// Debts that somebody is about to pay, each with the place of its charge. What is not paid goes back.
pub(super) struct Claims<'a> {
    owed: &'a Owed,
    pub(super) debts: Vec<(usize, Debt)>,
}

impl<'a> Claims<'a> {
    /// The same, apart for each part of the store.
    pub(super) fn by_part(mut self, part: impl Fn(&Debt) -> Part) -> Vec<(Part, Claims<'a>)> {
        let mut groups: Vec<(Part, Claims<'a>)> = Vec::new();
        for (place, debt) in self.debts.drain(..) {
            let part = part(&debt);
            match groups.iter_mut().find(|(other, _)| *other == part) {
                Some((_, group)) => group.debts.push((place, debt)),
                None => groups.push((part, Claims { owed: self.owed, debts: vec![(place, debt)] })),
            }
        }
        groups
    }
}

impl Drop for Claims<'_> {
    fn drop(&mut self) {
        self.debts.drain(..).for_each(|(_, debt)| self.owed.put_back(debt));
    }
}

impl Owed {
    pub(super) fn new(max_keys: usize) -> Self {
        Self {
            shards: [const { Mutex::new(HashTable::new()) }; SHARDS],
            hasher: RandomState::new(),
            keys: AtomicUsize::new(0),
            max_keys,
            dropped: AtomicU64::new(0),
        }
    }

    pub(super) fn keys(&self) -> usize {
        self.keys.load(Ordering::Relaxed)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.keys() == 0
    }

    pub(super) fn units(&self) -> u64 {
        let of_shard = |shard: usize| self.lock(shard).iter().map(|debt| debt.units).sum::<u64>();
        (0..SHARDS).map(of_shard).sum()
    }

    /// Units that found no place, and are never charged.
    pub(super) fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// Remembers what a charge was admitted for.
    pub(super) fn add(&self, charge: &Charge<'_>, now: u64) {
        let until = now.saturating_add(counts_for(charge.quota()));
        let hash = self.hash(charge.key(), charge.policy_name());
        let mut table = self.lock_of(hash);
        if let Some(debt) = table.find_mut(hash, |debt| debt.is_of(charge)) {
            debt.units = debt.units.saturating_add(charge.units());
            debt.until = until;
            debt.quota.clone_from(charge.quota());
            return;
        }
        if self.keys() >= self.max_keys {
            self.drop_expired(&mut table, now);
        }
        // Others may go ahead on other shards: a few too many do no harm.
        if self.keys() >= self.max_keys {
            self.dropped.fetch_add(charge.units(), Ordering::Relaxed);
            return;
        }
        let debt = Debt {
            key: charge.key().into(),
            policy: charge.policy_name().into(),
            quota: charge.quota().clone(),
            units: charge.units(),
            until,
            not_before: 0,
            tried_in: 0,
        };
        table.insert_unique(hash, debt, |debt| self.hash_of(debt));
        self.keys.fetch_add(1, Ordering::Relaxed);
    }

    /// The debts of these charges.
    pub(super) fn claim(&self, charges: &[Charge<'_>]) -> Claims<'_> {
        let local = charges.iter().enumerate().filter(|(_, charge)| charge.store_failure() == OnStoreFailure::Local);
        let debts = local.filter_map(|(place, charge)| self.take_out(charge).map(|debt| (place, debt))).collect();
        Claims { owed: self, debts }
    }

    /// Some debts of a shard that may be tried now, and were not yet in this pass. What has expired is dropped on the way.
    pub(super) fn claim_due(&self, shard: usize, pass: u64, most: usize, now: u64) -> Claims<'_> {
        let mut table = self.lock(shard);
        self.drop_expired(&mut table, now);
        let due = table.extract_if(|debt| debt.not_before <= now && debt.tried_in != pass).take(most);
        let mut debts: Vec<(usize, Debt)> = due.enumerate().collect();
        for (_, debt) in &mut debts {
            debt.tried_in = pass;
        }
        Claims { owed: self, debts }
    }

    pub(super) fn shards() -> std::ops::Range<usize> {
        0..SHARDS
    }

    /// Forgets the debt of this charge's key.
    pub(super) fn forget(&self, charge: &Charge<'_>) {
        if self.take_out(charge).is_some() {
            self.keys.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// What comes out goes back by `put_back`, or is counted off.
    fn take_out(&self, charge: &Charge<'_>) -> Option<Debt> {
        let hash = self.hash(charge.key(), charge.policy_name());
        let mut table = self.lock_of(hash);
        Some(table.find_entry(hash, |debt| debt.is_of(charge)).ok()?.remove().0)
    }

    /// Takes the charge's units off the debt of its key, if it has so many.
    pub(super) fn forgive(&self, charge: &Charge<'_>) -> bool {
        let Some(mut debt) = self.take_out(charge) else { return false };
        let enough = debt.units >= charge.units();
        if enough {
            debt.units -= charge.units();
        }
        self.put_back(debt);
        enough
    }

    fn put_back(&self, debt: Debt) {
        if debt.units == 0 {
            self.keys.fetch_sub(1, Ordering::Relaxed);
            return;
        }
        let hash = self.hash_of(&debt);
        let mut table = self.lock_of(hash);
        let same = |other: &Debt| other.key == debt.key && other.policy == debt.policy;
        match table.entry(hash, same, |debt| self.hash_of(debt)) {
            Entry::Occupied(mut newer) => {
                let newer = newer.get_mut();
                newer.units = newer.units.saturating_add(debt.units);
                newer.until = newer.until.max(debt.until);
                self.keys.fetch_sub(1, Ordering::Relaxed);
            }
            Entry::Vacant(place) => {
                place.insert(debt);
            }
        }
    }

    fn drop_expired(&self, table: &mut HashTable<Debt>, now: u64) {
        let before = table.len();
        table.retain(|debt| debt.until > now);
        self.keys.fetch_sub(before - table.len(), Ordering::Relaxed);
    }

    fn hash(&self, key: &str, policy: &str) -> u64 {
        self.hasher.hash_one((key, policy))
    }

    fn hash_of(&self, debt: &Debt) -> u64 {
        self.hash(&debt.key, &debt.policy)
    }

    fn lock_of(&self, hash: u64) -> MutexGuard<'_, HashTable<Debt>> {
        // Not the bits that choose the bucket.
        self.lock((hash >> 32) as usize % SHARDS)
    }

    fn lock(&self, shard: usize) -> MutexGuard<'_, HashTable<Debt>> {
        self.shards[shard].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// For how long a unit counts at most, in microseconds.
fn counts_for(quota: &Quota) -> u64 {
    match quota.algorithm() {
        Algorithm::SlidingLog | Algorithm::FixedWindow => quota.window_micros(),
        Algorithm::SlidingCounter => 2 * quota.window_micros(),
        Algorithm::TokenBucket | Algorithm::LeakyBucket => quota.drain_micros(),
    }
}
