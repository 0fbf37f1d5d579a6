//! [`DebtLedger`]: units that were admitted without the store and are to be charged to it.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hashbrown::HashTable;

use crate::algorithm::Algorithm;
use crate::charge::{Charge, OnStoreFailure};
use crate::clock::{Timestamp, micros};
use crate::quota::Quota;

const SHARDS: usize = 16;
/// Scan credit that one new key adds when the ledger is full. A scan of a shard for expired debts
/// waits until the credit covers all its entries, so that the amortized cost of a new key is
/// constant.
const SCAN_CREDIT: usize = 64;
/// Time from a request until its units are owed: longer than the usual timeout of a store.
const MAX_CALL_TIME: Duration = Duration::from_secs(5);

/// Debts by key and policy, with a maximum number of keys.
#[derive(Debug)]
pub(super) struct DebtLedger {
    shards: [Mutex<LedgerShard>; SHARDS],
    hasher: RandomState,
    keys: AtomicUsize,
    max_keys: usize,
    dropped: AtomicU64,
    /// Number of settlement passes so far.
    passes: AtomicU64,
    /// Whether a settlement pass is running.
    settling: AtomicBool,
}

#[derive(Debug)]
struct LedgerShard {
    debts: HashTable<Debt>,
    /// Lower bound of the time at which the next debt can be dropped.
    next_expiry: u64,
    /// Number of entries that the next scan may visit.
    scan_credit: usize,
    #[cfg(test)]
    scanned: usize,
}

/// Units of one key that are not charged to the store yet.
#[derive(Debug, Clone)]
pub(super) struct Debt {
    key: Box<str>,
    policy: Box<str>,
    pub(super) quota: Quota,
    pub(super) units: u64,
    /// Time at which all of its units have expired.
    until: u64,
    /// Earliest time of the next settlement.
    pub(super) not_before: u64,
    /// Number of the last settlement pass that claimed it.
    last_pass: u64,
    /// Whether a task is settling it.
    claimed: bool,
    /// Whether the answer to a call for its key was lost. Until it is settled, the key is decided
    /// locally, so that no further call is lost for it.
    pub(super) in_doubt: bool,
    /// Time by the store's clock (µs) before which none of its units was requested.
    requested_since: u64,
}

impl Debt {
    /// Returns the charge that settles the debt.
    pub(super) fn charge(&self) -> Charge<'_> {
        Charge::new(&self.key, &self.quota).with_policy(&self.policy).with_cost(self.units)
    }

    fn belongs_to(&self, charge: &Charge<'_>) -> bool {
        *self.key == *charge.key() && *self.policy == *charge.policy()
    }
}

/// Debts that this task is settling. They stay in the ledger, marked as claimed; on drop the
/// unsettled units are released.
pub(super) struct Claims {
    ledger: Arc<DebtLedger>,
    pub(super) debts: Vec<Claim>,
}

/// A debt that is being settled.
pub(super) struct Claim {
    /// Index of the charge that the debt belongs to.
    pub(super) charge_index: usize,
    /// Copy of the debt. Its `units` are those that are left to settle.
    pub(super) debt: Debt,
    /// Units at the time of the claim. The ledger may have more by now.
    claimed_units: u64,
}

/// Error of a claim: another task is settling the debt of one of the keys, or it is in doubt. The
/// store's answer for this key is unreliable until the debt is settled.
pub(super) struct Busy;

impl Claim {
    fn new(charge_index: usize, debt: &Debt) -> Self {
        Self { charge_index, debt: debt.clone(), claimed_units: debt.units }
    }
}

impl Drop for Claims {
    fn drop(&mut self) {
        self.debts.iter().for_each(|claim| self.ledger.release(claim));
    }
}

impl DebtLedger {
    pub(super) fn new(max_keys: usize) -> Self {
        Self {
            shards: [const { Mutex::new(LedgerShard::EMPTY) }; SHARDS],
            hasher: RandomState::new(),
            keys: AtomicUsize::new(0),
            max_keys,
            dropped: AtomicU64::new(0),
            passes: AtomicU64::new(0),
            settling: AtomicBool::new(false),
        }
    }

    pub(super) fn keys(&self) -> usize {
        self.keys.load(Ordering::Relaxed)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.keys() == 0
    }

    pub(super) fn units(&self) -> u64 {
        let shard_units =
            |shard: usize| self.lock(shard).debts.iter().map(|debt| debt.units).sum::<u64>();
        Self::shards().map(shard_units).sum()
    }

    /// Returns the units that were dropped because the ledger was full. They are never charged.
    pub(super) fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// Adds the units of a charge that was admitted locally, up to those that a count can have.
    /// `now` is by the local clock, `store_now` by the store's. With `in_doubt` the store may have
    /// counted them as well.
    pub(super) fn add(&self, charge: &Charge<'_>, now: u64, store_now: Timestamp, in_doubt: bool) {
        let (quota, max_units) = (charge.quota(), charge.quota().max_level());
        let until = |units: u64| now.saturating_add(max_lifetime(quota, units));
        let hash = self.hash(charge.key(), charge.policy());
        let mut shard = self.lock_of(hash);
        if let Some(debt) = shard.debts.find_mut(hash, |debt| debt.belongs_to(charge)) {
            debt.units = debt.units.saturating_add(charge.cost()).min(max_units);
            debt.until = until(debt.units);
            debt.in_doubt |= in_doubt;
            debt.quota.clone_from(quota);
            return;
        }
        if self.keys() >= self.max_keys && shard.earn_scan(now) {
            self.drop_expired(&mut shard, now);
        }
        // Concurrent callers on other shards may exceed the maximum by a few keys, which is
        // harmless.
        if self.keys() >= self.max_keys {
            self.dropped.fetch_add(charge.cost(), Ordering::Relaxed);
            return;
        }
        let units = charge.cost().min(max_units);
        let debt = Debt {
            key: charge.key().into(),
            policy: charge.policy().into(),
            quota: quota.clone(),
            units,
            until: until(units),
            not_before: 0,
            last_pass: 0,
            claimed: false,
            in_doubt,
            requested_since: store_now.as_micros().saturating_sub(micros(MAX_CALL_TIME)),
        };
        shard.next_expiry = shard.next_expiry.min(debt.until);
        shard.debts.insert_unique(hash, debt, |debt| self.hash_of(debt));
        self.keys.fetch_add(1, Ordering::Relaxed);
    }

    /// Claims the debts of these charges, to settle them in the same call.
    pub(super) fn claim(
        self: &Arc<Self>,
        charges: &[Charge<'_>],
        now: u64,
    ) -> Result<Claims, Busy> {
        let mut claims = Claims { ledger: Arc::clone(self), debts: Vec::new() };
        let local = charges
            .iter()
            .enumerate()
            .filter(|(_, charge)| charge.on_store_failure() == OnStoreFailure::Local);
        for (at, charge) in local {
            let hash = self.hash(charge.key(), charge.policy());
            let mut shard = self.lock_of(hash);
            let found =
                shard.debts.find_mut(hash, |debt| debt.belongs_to(charge) && debt.until > now);
            let Some(debt) = found else { continue };
            // Dropping `claims` releases the earlier ones.
            if debt.in_doubt || std::mem::replace(&mut debt.claimed, true) {
                return Err(Busy);
            }
            claims.debts.push(Claim::new(at, debt));
        }
        Ok(claims)
    }

    /// Claims debts of a shard that are due and were not claimed in this pass yet.
    pub(super) fn claim_due(
        self: &Arc<Self>,
        shard: usize,
        pass: u64,
        max: usize,
        now: u64,
    ) -> Claims {
        let mut shard = self.lock(shard);
        let is_due =
            |debt: &&mut Debt| debt.not_before <= now && debt.last_pass != pass && !debt.claimed;
        let claim = |(at, debt): (usize, &mut Debt)| {
            debt.last_pass = pass;
            debt.claimed = true;
            let claim = Claim::new(at, debt);
            // Units that are added during the claim are not in doubt.
            debt.in_doubt = false;
            claim
        };
        let due = shard.debts.iter_mut().filter(is_due);
        let debts = due.take(max).enumerate().map(claim).collect();
        Claims { ledger: Arc::clone(self), debts }
    }

    /// Starts a settlement pass and returns its number, or `None` if one is running.
    pub(super) fn begin_pass(&self) -> Option<u64> {
        let is_running = self.settling.swap(true, Ordering::AcqRel);
        (!is_running).then(|| self.passes.fetch_add(1, Ordering::Relaxed) + 1)
    }

    pub(super) fn end_pass(&self) {
        self.settling.store(false, Ordering::Release);
    }

    /// Drops the expired debts of a shard.
    pub(super) fn drop_expired_in(&self, shard: usize, now: u64) {
        self.drop_expired(&mut self.lock(shard), now);
    }

    pub(super) fn shards() -> std::ops::Range<usize> {
        0..SHARDS
    }

    /// Returns the numbers of all shards, in an order that depends on the pass.
    pub(super) fn shards_from(pass: u64) -> impl Iterator<Item = usize> {
        let first = usize::try_from(pass).unwrap_or(0);
        Self::shards().map(move |shard| (first + shard) % SHARDS)
    }

    /// Removes the debt of this charge's key.
    pub(super) fn remove(&self, charge: &Charge<'_>) {
        let hash = self.hash(charge.key(), charge.policy());
        let mut shard = self.lock_of(hash);
        if let Ok(entry) = shard.debts.find_entry(hash, |debt| debt.belongs_to(charge)) {
            entry.remove();
            self.keys.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Takes units of this charge out of the debt of its key, because they are refunded, and
    /// returns how many. A charge from before the debt has none there. A debt that is being settled
    /// is left alone, unless the store is known to fail.
    pub(super) fn cancel(&self, charge: &Charge<'_>, store_fails: bool) -> u64 {
        let charged_at = charge.charged_at();
        let is_owed = |debt: &Debt| {
            (store_fails || !debt.claimed)
                && (charged_at == Timestamp::ZERO || charged_at.as_micros() >= debt.requested_since)
        };
        let hash = self.hash(charge.key(), charge.policy());
        let mut shard = self.lock_of(hash);
        let found = shard.debts.find_entry(hash, |debt| debt.belongs_to(charge) && is_owed(debt));
        let Ok(mut entry) = found else { return 0 };
        let debt = entry.get_mut();
        let cancelled = debt.units.min(charge.cost());
        debt.units -= cancelled;
        if debt.units == 0 {
            entry.remove();
            self.keys.fetch_sub(1, Ordering::Relaxed);
        }
        cancelled
    }

    /// Releases a claim, and subtracts the units that were settled.
    fn release(&self, claim: &Claim) {
        let Claim { debt: left, claimed_units, .. } = claim;
        let hash = self.hash_of(left);
        let mut shard = self.lock_of(hash);
        let is_same = |other: &Debt| other.key == left.key && other.policy == left.policy;
        // A reset may have removed the debt during the claim.
        let Ok(mut entry) = shard.debts.find_entry(hash, is_same) else { return };
        let debt = entry.get_mut();
        debt.claimed = false;
        debt.in_doubt |= left.in_doubt && left.units > 0;
        debt.not_before = debt.not_before.max(left.not_before);
        debt.units = debt.units.saturating_sub(claimed_units - left.units);
        if debt.units == 0 {
            entry.remove();
            self.keys.fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn drop_expired(&self, shard: &mut LedgerShard, now: u64) {
        let len_before = shard.debts.len();
        #[cfg(test)]
        (shard.scanned += len_before);
        shard.scan_credit = 0;
        let mut next_expiry = u64::MAX;
        shard.debts.retain(|debt| {
            let keep = debt.until > now;
            if keep {
                next_expiry = next_expiry.min(debt.until);
            }
            keep
        });
        shard.next_expiry = next_expiry;
        self.keys.fetch_sub(len_before - shard.debts.len(), Ordering::Relaxed);
    }

    fn hash(&self, key: &str, policy: &str) -> u64 {
        self.hasher.hash_one((key, policy))
    }

    fn hash_of(&self, debt: &Debt) -> u64 {
        self.hash(&debt.key, &debt.policy)
    }

    fn lock_of(&self, hash: u64) -> MutexGuard<'_, LedgerShard> {
        // The hash table uses the low bits.
        self.lock((hash >> 32) as usize % SHARDS)
    }

    fn lock(&self, shard: usize) -> MutexGuard<'_, LedgerShard> {
        self.shards[shard].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl LedgerShard {
    const EMPTY: Self = Self {
        debts: HashTable::new(),
        next_expiry: u64::MAX,
        scan_credit: 0,
        #[cfg(test)]
        scanned: 0,
    };

    /// Adds the scan credit of one new key, and returns whether it covers a scan that may find an
    /// expired debt.
    fn earn_scan(&mut self, now: u64) -> bool {
        self.scan_credit = self.scan_credit.saturating_add(SCAN_CREDIT);
        self.scan_credit >= self.debts.len() && self.next_expiry <= now
    }
}

/// Returns the maximum time for which these units count, in microseconds.
fn max_lifetime(quota: &Quota, units: u64) -> u64 {
    match quota.algorithm() {
        Algorithm::SlidingLog | Algorithm::FixedWindow | Algorithm::Concurrency => {
            quota.window_micros()
        }
        Algorithm::SlidingCounter => 2 * quota.window_micros(),
        // Units that were reported beyond the burst drain after those within it.
        Algorithm::TokenBucket | Algorithm::LeakyBucket => {
            quota.drain_micros().saturating_mul(units.div_ceil(quota.burst()))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Otherwise a busy key would never be decided by the store again.
    #[test]
    fn units_owed_during_a_settlement_are_not_in_doubt() {
        let ledger = Arc::new(DebtLedger::new(10));
        let quota = Quota::fixed_window(10, Duration::from_secs(1)).expect("valid");
        let charge = Charge::new("u", &quota);
        ledger.add(&charge, 0, Timestamp::ZERO, true);
        assert!(ledger.claim(&[charge], 0).is_err(), "in doubt");
        let mut settled = 0;
        for shard in DebtLedger::shards() {
            let mut claims = ledger.claim_due(shard, 1, 10, 0);
            if let Some(claim) = claims.debts.first_mut() {
                ledger.add(&charge, 0, Timestamp::ZERO, false);
                assert!(ledger.claim(&[charge], 0).is_err(), "being settled");
                settled += std::mem::take(&mut claim.debt.units);
            }
        }
        assert_eq!((settled, ledger.units()), (1, 1));
        assert!(ledger.claim(&[charge], 0).is_ok(), "the rest is not in doubt");
        // A settlement that failed leaves the doubt.
        ledger.add(&charge, 0, Timestamp::ZERO, true);
        DebtLedger::shards().for_each(|shard| drop(ledger.claim_due(shard, 2, 10, 0)));
        assert!(ledger.claim(&[charge], 0).is_err());
    }

    /// In a full ledger the number of visited entries is bounded by the number of new keys, whether
    /// some expire or not.
    #[test]
    fn a_new_key_in_a_full_ledger_has_constant_amortized_cost() {
        const MAX_KEYS: usize = 8_000;
        let ledger = DebtLedger::new(MAX_KEYS);
        let quota = Quota::fixed_window(10, Duration::from_secs(1)).expect("valid");
        let add = |number: usize, now: u64| {
            let key = format!("user-{number}");
            ledger.add(&Charge::new(&key, &quota), now, Timestamp::ZERO, false);
        };
        let scanned =
            || DebtLedger::shards().map(|shard| ledger.lock(shard).scanned).sum::<usize>();
        for number in 0..MAX_KEYS {
            add(number, 100 * number as u64);
        }
        assert_eq!((ledger.keys(), scanned()), (MAX_KEYS, 0));
        for number in MAX_KEYS..2 * MAX_KEYS {
            add(number, 900_000);
        }
        assert_eq!((ledger.dropped(), scanned()), (MAX_KEYS as u64, 0), "nothing has expired");
        // From here on one debt expires with each new key.
        for number in 0..MAX_KEYS {
            add(2 * MAX_KEYS + number, 1_000_000 + 100 * number as u64);
        }
        let visited = scanned();
        assert!(
            visited <= MAX_KEYS * SCAN_CREDIT + MAX_KEYS,
            "{visited} entries visited for {MAX_KEYS} keys"
        );
        let dropped = ledger.dropped() - MAX_KEYS as u64;
        assert!(dropped < MAX_KEYS as u64 / 4, "{dropped} of {MAX_KEYS} were dropped");
    }
}
