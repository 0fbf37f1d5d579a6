//! Decisions on several charges at once, with the shards of all keys locked.

use super::capacity::{Lack, RoomReservation};
use super::context::ChargeContext;
use super::holds::{Counts, RECORD_ENTRIES};
use super::shard::LockedShards;
use super::{MemoryStore, SHARDS};
use crate::action::Action;
use crate::charge::Charge;
use crate::decision::{Decision, Source};
use crate::key::Fingerprint;
use crate::quota::Quota;
use crate::store::StoreError;

impl MemoryStore {
    /// Decides several charges, without `async`.
    pub(crate) fn decide_all_now(
        &self,
        action: Action,
        charges: &[Charge<'_>],
    ) -> Result<Vec<Decision>, StoreError> {
        // A reset concerns the ids of all requests.
        if action == Action::Reset || charges.iter().any(Charge::is_extended) {
            self.decide_all_as::<true>(action, charges)
        } else {
            self.decide_all_as::<false>(action, charges)
        }
    }

    /// Decides several charges; `EXTENDED`: some of them have holds or blocks.
    fn decide_all_as<const EXTENDED: bool>(
        &self,
        action: Action,
        charges: &[Charge<'_>],
    ) -> Result<Vec<Decision>, StoreError> {
        let fingerprints: Vec<Fingerprint> =
            charges.iter().map(|charge| self.fingerprint(charge)).collect();
        let mut starts_blocks = EXTENDED && action == Action::Acquire;
        let mut reservation = RoomReservation::new(self);
        loop {
            let mut locked = self.lock_all(&fingerprints);
            let now = self.clock.now();
            let quotas = in_periods(charges, now);
            let in_periods: Option<Vec<Charge<'_>>> = quotas.as_ref().map(|quotas| {
                charges.iter().zip(quotas).map(|(charge, quota)| charge.with_quota(quota)).collect()
            });
            let charges = in_periods.as_deref().unwrap_or(charges);
            let context = |charge, fingerprint: Fingerprint, all_fit| ChargeContext {
                store: self,
                action,
                charge,
                fingerprint,
                now,
                all_fit,
            };
            let is_all_or_nothing = matches!(action, Action::Acquire | Action::Peek);
            let (mut all_fit, mut new_keys, mut new_blocks) = (true, 0, 0);
            // Entries that logs have to grow by: if all charges fit, and because denials count.
            let (mut growth, mut growth_of_denials) = (0, 0);
            // Of the keys that need room, one of the policy that has taken the most.
            let mut needs_room: Option<Fingerprint> = None;
            for (charge, &fingerprint) in charges.iter().zip(&fingerprints) {
                let table = locked.table(fingerprint);
                let charge_context = context(charge, fingerprint, true);
                let (fit, is_repeated) = if EXTENDED {
                    let reservation = &mut reservation;
                    charge_context.fit_with_hold(&mut Counts { table, reservation })?
                } else {
                    (charge_context.fits(table), false)
                };
                let is_new = table.find(fingerprint).is_err();
                let is_concurrency = charge.quota().is_concurrency();
                let block = EXTENDED.then(|| charge_context.block());
                let is_full = || charge_context.rest() > 0;
                let is_blocked =
                    !is_repeated && block.is_some_and(|block| block.rest > 0 || is_full());
                if fit.fits && !is_blocked || !is_all_or_nothing {
                    growth += fit.log_growth;
                } else {
                    all_fit = false;
                    growth_of_denials +=
                        fit.log_growth * usize::from(charge.quota().count_denied());
                }
                let is_reserved = action == Action::Acquire && charge.hold().is_some();
                growth += RECORD_ENTRIES * usize::from(is_reserved && fit.fits && !is_repeated);
                new_keys += usize::from(is_new && !is_concurrency);
                let is_new_block =
                    !fit.fits && starts_blocks && block.is_some_and(|block| block.is_new);
                new_blocks += usize::from(is_new_block);
                if is_new || growth > 0 || fit.log_growth > 0 || is_new_block {
                    let taken = |key: &Fingerprint| self.capacity.keys.taken_by(key.policy_class());
                    needs_room = needs_room.into_iter().chain([fingerprint]).max_by_key(taken);
                }
            }
            // Reserve all room before anything is written.
            let may_spend = matches!(
                action,
                Action::Acquire | Action::ChargeUpTo | Action::Report | Action::Commit
            );
            if may_spend && let Some(fingerprint) = needs_room {
                let (keys, growth) = if all_fit { (new_keys, growth) } else { (new_blocks, 0) };
                let lacks = [Lack::Keys(keys), Lack::LogEntries(growth + growth_of_denials)];
                let class = fingerprint.policy_class();
                if let Some(lack) =
                    lacks.into_iter().find(|lack| !reservation.reserve(class, *lack))
                {
                    drop(locked);
                    match self.make_room(fingerprint, lack, now, &mut reservation) {
                        // A key that is denied by its count is denied without room for a block.
                        Err(_) if new_blocks > 0 => starts_blocks = false,
                        made => made?,
                    }
                    continue;
                }
            }
            let mut decisions = Vec::with_capacity(charges.len());
            for (charge, &fingerprint) in charges.iter().zip(&fingerprints) {
                let table = locked.table(fingerprint);
                let context = context(charge, fingerprint, all_fit);
                let decided = if EXTENDED {
                    let reservation = &mut reservation;
                    context.apply_with_hold(&mut Counts { table, reservation }, starts_blocks)
                } else {
                    context.apply(table, &mut reservation).map(|decision| (decision, None))
                };
                // The reservation has room for everything.
                let Ok((decision, hold)) = decided else { break };
                let decision = decision.into_decision(charge.quota().burst(), Source::Store);
                decisions.push(Decision { hold, ..decision });
            }
            if decisions.len() == charges.len() {
                // Sweep last: a later charge relies on the entries that the first pass has seen.
                self.sweep::<EXTENDED>(&mut locked, now);
                return Ok(decisions);
            }
        }
    }

    fn sweep<const EXTENDED: bool>(&self, locked: &mut LockedShards<'_>, now: u64) {
        for (index, table) in &mut locked.0 {
            table.sweep(now, &self.capacity);
            if EXTENDED {
                self.blocks.of_shard(*index).sweep(now, false, &self.capacity);
                self.holds.of_shard(*index).sweep(now, &self.capacity);
            }
        }
    }

    /// Locks the shards of these keys, in ascending order to avoid deadlocks.
    fn lock_all(&self, fingerprints: &[Fingerprint]) -> LockedShards<'_> {
        let mut indices: Vec<usize> =
            fingerprints.iter().map(|&fingerprint| fingerprint.shard_index(SHARDS)).collect();
        indices.sort_unstable();
        indices.dedup();
        loop {
            let mut locked = Vec::with_capacity(indices.len());
            let contended =
                indices.iter().find(|&&index| match self.shards[index].try_lock_briefly() {
                    Some(table) => {
                        locked.push((index, table));
                        false
                    }
                    None => true,
                });
            let Some(&contended) = contended else { return LockedShards(locked) };
            // The holder was most likely preempted: wait for it without holding any lock, so that
            // other threads can use the other shards, then start again.
            drop(locked);
            drop(self.shards[contended].lock());
        }
    }
}

/// Returns the quotas with the numbers of this time, if any has a calendar.
fn in_periods(charges: &[Charge<'_>], now: u64) -> Option<Vec<Quota>> {
    let has_calendar = charges.iter().any(|charge| charge.quota().calendar().is_some());
    let in_period = |charge: &Charge<'_>| {
        let quota = charge.quota();
        quota.in_period_at(now).unwrap_or_else(|| quota.clone())
    };
    has_calendar.then(|| charges.iter().map(in_period).collect())
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;

    #[test]
    fn decision_that_waits_for_a_shard_holds_no_other_shard() {
        let store = MemoryStore::new();
        let quota = Quota::fixed_window(1_000_000, Duration::from_secs(3_600)).expect("valid");
        let keys: Vec<String> = (0..64).map(|number| format!("user-{number}")).collect();
        let charges: Vec<Charge<'_>> = keys.iter().map(|key| Charge::new(key, &quota)).collect();
        let shard = |charge: &Charge<'_>| store.fingerprint(charge).shard_index(SHARDS);
        let last = charges.iter().map(shard).max().expect("some");
        let (started, starts) = channel();
        let (done, results) = channel();
        std::thread::scope(|scope| {
            let held = store.shards[last].lock();
            scope.spawn(|| {
                started.send(()).expect("a receiver");
                store.decide_all_now(Action::Acquire, &charges).expect("decided");
            });
            starts.recv().expect("started");
            let (store, charges, done) = (&store, &charges, done);
            scope.spawn(move || {
                for _ in 0..200 {
                    for charge in charges.iter().filter(|charge| shard(charge) != last) {
                        let _ = store.decide_now(Action::Acquire, charge).expect("decided");
                    }
                    std::thread::yield_now();
                }
                done.send(()).expect("a receiver");
            });
            let decided = results.recv_timeout(Duration::from_secs(30));
            drop(held);
            decided.expect("the other shards are free");
        });
        assert!(charges.iter().all(|charge| {
            store.decide_now(Action::Peek, charge).is_ok_and(|decision| decision.allowed)
        }));
    }
}
