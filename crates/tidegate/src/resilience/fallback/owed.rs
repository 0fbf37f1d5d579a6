//! [`Owed`]: what was admitted without the store, and is to be charged to it.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use hashbrown::HashTable;

use crate::algorithm::Algorithm;
use crate::charge::Charge;
use crate::policy::OnStoreFailure;
use crate::quota::Quota;
use crate::store::Part;

const SHARDS: usize = 16;
/// Entries of a shard that one new key at the cap pays for. A scan for expired ones waits until it
/// is paid, so that a new key costs a constant number of entries.
const SCAN_CREDIT: usize = 64;

/// Debts by key and policy, no more than a cap.
#[derive(Debug)]
pub(super) struct Owed {
    shards: [Mutex<Shard>; SHARDS],
    hasher: RandomState,
    keys: AtomicUsize,
    max_keys: usize,
    dropped: AtomicU64,
}

#[derive(Debug)]
struct Shard {
    debts: HashTable<Debt>,
    /// No debt can be dropped before this time. May be too early, never too late.
    next_expiry: u64,
    /// Entries that the next scan may look at.
    scan_credit: usize,
    #[cfg(test)]
    scanned: usize,
}

/// Units that a key owes to the store.
#[derive(Debug, Clone)]
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
    /// Somebody is about to pay it.
    claimed: bool,
    /// The store may have counted it, because the answer to a call was lost. Until it is settled,
    /// its key is decided locally: another call that carries the debt could be lost, too, and count
    /// it once more.
    pub(super) in_doubt: bool,
}

impl Debt {
    /// What is to be charged to the store.
    pub(super) fn charge(&self) -> Charge<'_> {
        Charge::new(&self.key, &self.quota).with_policy(&self.policy).with_cost(self.units)
    }

    fn is_of(&self, charge: &Charge<'_>) -> bool {
        *self.key == *charge.key() && *self.policy == *charge.policy()
    }
}

/// Debts that somebody is about to pay, each with the place of its charge. They stay where they
/// are, marked; what was not paid is owed as before.
pub(super) struct Claims<'a> {
    owed: &'a Owed,
    pub(super) debts: Vec<Claim>,
}

/// A debt that is being paid: `debt.units` is what is left of it.
pub(super) struct Claim {
    pub(super) place: usize,
    pub(super) debt: Debt,
    /// What it was when it was claimed. More may be added meanwhile.
    units: u64,
}

/// Another task is paying the debt of one of these keys, or the store may have counted it
/// already: the room that the store has is not known until it is settled.
pub(super) struct Busy;

impl<'a> Claims<'a> {
    /// The same, apart for each part of the store.
    pub(super) fn by_part(mut self, part: impl Fn(&Debt) -> Part) -> Vec<(Part, Claims<'a>)> {
        let mut groups: Vec<(Part, Claims<'a>)> = Vec::new();
        for claim in self.debts.drain(..) {
            let part = part(&claim.debt);
            match groups.iter_mut().find(|(other, _)| *other == part) {
                Some((_, group)) => group.debts.push(claim),
                None => groups.push((part, Claims { owed: self.owed, debts: vec![claim] })),
            }
        }
        groups
    }
}

impl Drop for Claims<'_> {
    fn drop(&mut self) {
        self.debts.drain(..).for_each(|claim| self.owed.settle(&claim));
    }
}

impl Owed {
    pub(super) fn new(max_keys: usize) -> Self {
        Self {
            shards: [const { Mutex::new(Shard::EMPTY) }; SHARDS],
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
        let of_shard =
            |shard: usize| self.lock(shard).debts.iter().map(|debt| debt.units).sum::<u64>();
        (0..SHARDS).map(of_shard).sum()
    }

    /// Units that found no place, and are never charged.
    pub(super) fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// Adds the units of a charge that was admitted locally. `in_doubt`: the store may have counted
    /// them as well.
    pub(super) fn add(&self, charge: &Charge<'_>, now: u64, in_doubt: bool) {
        let until = now.saturating_add(counts_for(charge.quota()));
        let hash = self.hash(charge.key(), charge.policy());
        let mut shard = self.lock_of(hash);
        if let Some(debt) = shard.debts.find_mut(hash, |debt| debt.is_of(charge)) {
            debt.units = debt.units.saturating_add(charge.cost());
            debt.until = until;
            debt.in_doubt |= in_doubt;
            debt.quota.clone_from(charge.quota());
            return;
        }
        if self.keys() >= self.max_keys && shard.pay_for_scan(now) {
            self.drop_expired(&mut shard, now);
        }
        // Others may go ahead on other shards: a few too many do no harm.
        if self.keys() >= self.max_keys {
            self.dropped.fetch_add(charge.cost(), Ordering::Relaxed);
            return;
        }
        let debt = Debt {
            key: charge.key().into(),
            policy: charge.policy().into(),
            quota: charge.quota().clone(),
            units: charge.cost(),
            until,
            not_before: 0,
            tried_in: 0,
            claimed: false,
            in_doubt,
        };
        shard.next_expiry = shard.next_expiry.min(until);
        shard.debts.insert_unique(hash, debt, |debt| self.hash_of(debt));
        self.keys.fetch_add(1, Ordering::Relaxed);
    }

    /// The debts of these charges, to be paid along with them.
    pub(super) fn claim(&self, charges: &[Charge<'_>], now: u64) -> Result<Claims<'_>, Busy> {
        let mut claims = Claims { owed: self, debts: Vec::new() };
        let local = charges
            .iter()
            .enumerate()
            .filter(|(_, charge)| charge.on_store_failure() == OnStoreFailure::Local);
        for (place, charge) in local {
            let hash = self.hash(charge.key(), charge.policy());
            let mut shard = self.lock_of(hash);
            let found = shard.debts.find_mut(hash, |debt| debt.is_of(charge) && debt.until > now);
            let Some(debt) = found else { continue };
            // Dropping the claims releases those that were made before this one.
            if debt.in_doubt || std::mem::replace(&mut debt.claimed, true) {
                return Err(Busy);
            }
            claims.debts.push(Claim { place, debt: debt.clone(), units: debt.units });
        }
        Ok(claims)
    }

    /// Returns whether the debt of one of these keys is being paid, or is in doubt.
    pub(super) fn is_busy(&self, charges: &[Charge<'_>], now: u64) -> bool {
        charges.iter().filter(|charge| charge.on_store_failure() == OnStoreFailure::Local).any(
            |charge| {
                let hash = self.hash(charge.key(), charge.policy());
                let debt = |debt: &Debt| debt.is_of(charge) && debt.until > now;
                self.lock_of(hash)
                    .debts
                    .find(hash, debt)
                    .is_some_and(|debt| debt.claimed || debt.in_doubt)
            },
        )
    }

    /// Some debts of a shard that may be tried now, and were not yet in this pass.
    pub(super) fn claim_due(&self, shard: usize, pass: u64, most: usize, now: u64) -> Claims<'_> {
        let mut shard = self.lock(shard);
        let due =
            |debt: &&mut Debt| debt.not_before <= now && debt.tried_in != pass && !debt.claimed;
        let claim = |(place, debt): (usize, &mut Debt)| {
            debt.tried_in = pass;
            debt.claimed = true;
            Claim { place, debt: debt.clone(), units: debt.units }
        };
        let debts = shard.debts.iter_mut().filter(due).take(most).enumerate().map(claim).collect();
        Claims { owed: self, debts }
    }

    /// Forgets what counts no more.
    pub(super) fn drop_expired_of(&self, shard: usize, now: u64) {
        self.drop_expired(&mut self.lock(shard), now);
    }

    pub(super) fn shards() -> std::ops::Range<usize> {
        0..SHARDS
    }

    /// Forgets the debt of this charge's key.
    pub(super) fn forget(&self, charge: &Charge<'_>) {
        let hash = self.hash(charge.key(), charge.policy());
        let mut shard = self.lock_of(hash);
        if let Ok(entry) = shard.debts.find_entry(hash, |debt| debt.is_of(charge)) {
            entry.remove();
            self.keys.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Takes the charges' units off the debts of their keys, if each has so many and none is being
    /// paid: all or nothing.
    pub(super) fn forgive(&self, charges: &[Charge<'_>]) -> bool {
        let mut forgiven = 0;
        for charge in charges {
            if !self.reduce(
                charge,
                |debt| !debt.claimed && debt.units >= charge.cost(),
                charge.cost(),
            ) {
                break;
            }
            forgiven += 1;
        }
        if forgiven < charges.len() {
            for charge in &charges[..forgiven] {
                self.restore(charge);
            }
        }
        forgiven == charges.len()
    }

    /// A claim is over.
    fn settle(&self, claim: &Claim) {
        let Claim { debt: left, units, .. } = claim;
        let hash = self.hash_of(left);
        let mut shard = self.lock_of(hash);
        // It may have been forgotten meanwhile.
        let same = |other: &Debt| other.key == left.key && other.policy == left.policy;
        let Ok(mut entry) = shard.debts.find_entry(hash, same) else { return };
        let debt = entry.get_mut();
        debt.claimed = false;
        // Units that were added meanwhile may be in doubt themselves.
        debt.in_doubt = left.in_doubt || (debt.in_doubt && debt.units != *units);
        debt.not_before = debt.not_before.max(left.not_before);
        debt.units = debt.units.saturating_sub(units - left.units);
        if debt.units == 0 {
            entry.remove();
            self.keys.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Takes units off a debt that is as it should be. An entry without units stays until it
    /// expires or grows again.
    fn reduce(&self, charge: &Charge<'_>, fits: impl Fn(&Debt) -> bool, units: u64) -> bool {
        let hash = self.hash(charge.key(), charge.policy());
        let mut shard = self.lock_of(hash);
        let Shard { debts, next_expiry, .. } = &mut *shard;
        match debts.find_mut(hash, |debt| debt.is_of(charge)) {
            Some(debt) if fits(debt) => {
                debt.units -= units;
                if debt.units == 0 {
                    *next_expiry = 0;
                }
                true
            }
            _ => false,
        }
    }

    fn restore(&self, charge: &Charge<'_>) {
        let hash = self.hash(charge.key(), charge.policy());
        if let Some(debt) = self.lock_of(hash).debts.find_mut(hash, |debt| debt.is_of(charge)) {
            debt.units = debt.units.saturating_add(charge.cost());
        }
    }

    fn drop_expired(&self, shard: &mut Shard, now: u64) {
        let before = shard.debts.len();
        #[cfg(test)]
        (shard.scanned += before);
        shard.scan_credit = 0;
        let mut next_expiry = u64::MAX;
        shard.debts.retain(|debt| {
            let kept = debt.until > now && (debt.units > 0 || debt.claimed);
            // A claimed debt without units can be dropped as soon as its claim is over.
            let droppable_at = if debt.units > 0 { debt.until } else { 0 };
            if kept {
                next_expiry = next_expiry.min(droppable_at);
            }
            kept
        });
        shard.next_expiry = next_expiry;
        self.keys.fetch_sub(before - shard.debts.len(), Ordering::Relaxed);
    }

    fn hash(&self, key: &str, policy: &str) -> u64 {
        self.hasher.hash_one((key, policy))
    }

    fn hash_of(&self, debt: &Debt) -> u64 {
        self.hash(&debt.key, &debt.policy)
    }

    fn lock_of(&self, hash: u64) -> MutexGuard<'_, Shard> {
        // Not the bits that choose the bucket.
        self.lock((hash >> 32) as usize % SHARDS)
    }

    fn lock(&self, shard: usize) -> MutexGuard<'_, Shard> {
        self.shards[shard].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shard {
    const EMPTY: Self = Self {
        debts: HashTable::new(),
        next_expiry: u64::MAX,
        scan_credit: 0,
        #[cfg(test)]
        scanned: 0,
    };

    /// Adds the share of one new key, and returns whether a scan is paid for and may find
    /// something.
    fn pay_for_scan(&mut self, now: u64) -> bool {
        self.scan_credit = self.scan_credit.saturating_add(SCAN_CREDIT);
        self.scan_credit >= self.debts.len() && self.next_expiry <= now
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// At the cap, the entries that are looked at are bounded by the number of new keys, whether
    /// some expire or not.
    #[test]
    fn a_new_key_at_the_cap_costs_a_constant_number_of_entries() {
        const MAX_KEYS: usize = 8_000;
        let owed = Owed::new(MAX_KEYS);
        let quota = Quota::fixed_window(10, Duration::from_secs(1)).expect("valid");
        let add = |number: usize, now: u64| {
            owed.add(&Charge::new(&format!("user-{number}"), &quota), now, false)
        };
        let scanned = || Owed::shards().map(|shard| owed.lock(shard).scanned).sum::<usize>();
        for number in 0..MAX_KEYS {
            add(number, 100 * number as u64);
        }
        assert_eq!((owed.keys(), scanned()), (MAX_KEYS, 0));
        for number in MAX_KEYS..2 * MAX_KEYS {
            add(number, 900_000);
        }
        assert_eq!((owed.dropped(), scanned()), (MAX_KEYS as u64, 0), "nothing has expired");
        // From here on one debt expires with each new key.
        for number in 0..MAX_KEYS {
            add(2 * MAX_KEYS + number, 1_000_000 + 100 * number as u64);
        }
        let looked_at = scanned();
        assert!(
            looked_at <= MAX_KEYS * SCAN_CREDIT + MAX_KEYS,
            "{looked_at} entries for {MAX_KEYS} keys"
        );
        let dropped = owed.dropped() - MAX_KEYS as u64;
        assert!(dropped < MAX_KEYS as u64 / 4, "{dropped} of {MAX_KEYS} found no room");
    }
}
