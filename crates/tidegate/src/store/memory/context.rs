//! [`ChargeContext`]: one charge applied to its locked table, and [`KeyReservation`]: room for new
//! keys.

use std::sync::atomic::Ordering;

use super::MemoryStore;
use super::fingerprint::Fingerprint;
use super::logs::Logs;
use super::shard::Shard;
use super::state::{CounterKind, PackedState, StoredCounter};
use super::table::Table;
use crate::action::Action;
use crate::algorithm::{
    self, Algorithm, Bucket, FixedWindow, RawDecision, SlidingCounter, SlidingLog,
};
use crate::charge::Charge;

/// A charge and everything that is needed to apply it to its locked table.
pub(super) struct ChargeContext<'a> {
    pub(super) store: &'a MemoryStore,
    pub(super) shard: &'a Shard,
    pub(super) action: Action,
    pub(super) charge: &'a Charge<'a>,
    pub(super) fingerprint: Fingerprint,
    pub(super) now: u64,
    /// Whether all charges of an all-or-nothing group fit.
    pub(super) all_fit: bool,
}

/// Counter of a key whose policy had another algorithm, at the rate of the quota of today.
struct AnotherCounter {
    /// Units in use, up to the limit.
    units: u64,
    /// Time until it has room for the charge.
    retry_after: u64,
    reset_after: u64,
}

impl ChargeContext<'_> {
    /// Returns whether the units can be spent.
    #[inline]
    pub(super) fn fits(self, table: &mut Table) -> bool {
        match self.charge.quota().algorithm() {
            Algorithm::SlidingLog => self.fits_as::<SlidingLog>(table),
            Algorithm::SlidingCounter => self.fits_as::<SlidingCounter>(table),
            Algorithm::FixedWindow => self.fits_as::<FixedWindow>(table),
            Algorithm::TokenBucket | Algorithm::LeakyBucket => self.fits_as::<Bucket>(table),
        }
    }

    fn fits_as<C: StoredCounter>(self, table: &mut Table) -> bool {
        let Ok(at) = table.find(self.fingerprint) else { return true };
        let state = table.state(at);
        if !state.is_of(C::KIND) {
            let another = self.another(state, &mut table.logs);
            let mut counter = self.taken_over::<C>(&another);
            return algorithm::fits(
                &mut counter,
                self.charge.quota(),
                self.now,
                self.charge.cost(),
            );
        }
        let mut counter = C::unpack(state, &mut table.logs);
        let fits = algorithm::fits(&mut counter, self.charge.quota(), self.now, self.charge.cost());
        counter.restore(state, &mut table.logs);
        fits
    }

    /// Applies the action. Returns `None` if the store has no room for a new key.
    pub(super) fn apply(
        self,
        table: &mut Table,
        reservation: &mut KeyReservation<'_>,
    ) -> Option<RawDecision> {
        match self.charge.quota().algorithm() {
            Algorithm::SlidingLog => self.apply_as::<SlidingLog>(table, reservation),
            Algorithm::SlidingCounter => self.apply_as::<SlidingCounter>(table, reservation),
            Algorithm::FixedWindow => self.apply_as::<FixedWindow>(table, reservation),
            Algorithm::TokenBucket | Algorithm::LeakyBucket => {
                self.apply_as::<Bucket>(table, reservation)
            }
        }
    }

    pub(super) fn apply_as<C: StoredCounter>(
        self,
        table: &mut Table,
        reservation: &mut KeyReservation<'_>,
    ) -> Option<RawDecision> {
        let quota = self.charge.quota();
        let found = table.find(self.fingerprint);
        if self.action == Action::Reset {
            if let Ok(at) = found {
                self.remove(table, at);
            }
            return Some(RawDecision::untouched(quota));
        }
        let at = match found {
            Ok(at) if table.state(at).is_of(C::KIND) => {
                return Some(self.apply_to_existing::<C>(table, at));
            }
            Ok(at) => return Some(self.apply_to_another::<C>(table, at)),
            Err(at) => at,
        };
        let mut counter = C::default();
        let applied =
            algorithm::apply(&mut counter, self.action, self.charge, self.now, self.all_fit);
        let decision = Some(applied.decision);
        if !applied.written || counter.is_empty() {
            return decision;
        }
        if !reservation.reserve(1) {
            return None;
        }
        reservation.use_one();
        let state = counter.pack(quota, None, &mut table.logs);
        self.store.lower_next_expiry(self.shard, state.expires_at());
        table.insert(at, self.fingerprint, state);
        decision
    }

    /// Applies the action, which is not a reset, to an existing key.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "most of it is removed when the action is a constant")]
    fn apply_to_existing<C: StoredCounter>(&self, table: &mut Table, at: usize) -> RawDecision {
        let quota = self.charge.quota();
        let before = table.state(at);
        let mut counter = C::unpack(before, &mut table.logs);
        let applied =
            algorithm::apply(&mut counter, self.action, self.charge, self.now, self.all_fit);
        if !applied.written {
            counter.restore(before, &mut table.logs);
            if matches!(self.action, Action::Acquire | Action::ChargeUpTo | Action::Report) {
                // The limit was lowered: the entry would expire before its bucket has drained.
                if !before.lives_for(C::KIND, quota) {
                    table.set(at, before.with_lifetime_for(C::KIND, quota));
                }
            }
        } else if counter.is_empty() {
            self.remove(table, at);
        } else {
            let state = counter.pack(quota, Some(before), &mut table.logs);
            if state.may_expire_before(before) {
                self.store.lower_next_expiry(self.shard, state.expires_at());
            }
            table.set(at, state);
        }
        applied.decision
    }

    /// Applies the action, which is not a reset, to a key whose policy had another algorithm.
    #[cold]
    fn apply_to_another<C: StoredCounter>(&self, table: &mut Table, at: usize) -> RawDecision {
        let quota = self.charge.quota();
        let before = table.state(at);
        let another = self.another(before, &mut table.logs);
        let mut counter = self.taken_over::<C>(&another);
        let reset_after = another.reset_after;
        if self.action == Action::Refund {
            // The units have lost their times, so none are returned.
            let remaining = counter.remaining(quota);
            return RawDecision { remaining, reset_after, ..RawDecision::untouched(quota) };
        }
        let applied =
            algorithm::apply(&mut counter, self.action, self.charge, self.now, self.all_fit);
        let decision = applied.decision;
        if applied.written {
            table.logs.remove(before);
            let state = counter.pack(quota, None, &mut table.logs);
            self.store.lower_next_expiry(self.shard, state.expires_at());
            table.set(at, state);
            return decision;
        }
        if self.action == Action::Peek && decision.allowed && self.all_fit && self.charge.cost() > 0
        {
            // The state after this charge.
            return decision;
        }
        // Nothing is spent, so the times are those of the other algorithm.
        if decision.allowed {
            return RawDecision { reset_after, ..decision };
        }
        let retry_after = another.retry_after;
        // A cache of denials derives the level of a bucket from this, which must not be too high.
        let reset_after = if C::KIND == CounterKind::Bucket { retry_after } else { reset_after };
        RawDecision { retry_after, reset_after, ..decision }
    }

    /// Returns a counter with the units that another algorithm has in use: they count as used now.
    fn taken_over<C: StoredCounter>(&self, another: &AnotherCounter) -> C {
        let mut counter = C::default();
        counter.advance_to(self.charge.quota(), self.now);
        if another.units > 0 {
            counter.spend(self.charge.quota(), self.now, another.units);
        }
        counter
    }

    fn another(&self, state: PackedState, logs: &mut Logs) -> AnotherCounter {
        match state.kind() {
            CounterKind::Log => self.another_as::<SlidingLog>(state, logs),
            CounterKind::Counter => self.another_as::<SlidingCounter>(state, logs),
            CounterKind::Window => self.another_as::<FixedWindow>(state, logs),
            CounterKind::Bucket => self.another_as::<Bucket>(state, logs),
        }
    }

    fn another_as<O: StoredCounter>(&self, state: PackedState, logs: &mut Logs) -> AnotherCounter {
        let quota = self.charge.quota();
        let capacity = if O::KIND == CounterKind::Bucket { quota.burst() } else { quota.limit() };
        let mut counter = O::unpack(state, logs);
        counter.advance_to(quota, self.now);
        let remaining = counter.remaining(quota);
        // It has room for this charge once it has room for this many units.
        let cost = (self.charge.cost() + capacity).saturating_sub(quota.burst());
        let retry_after = if cost > remaining && cost <= capacity {
            counter.wait_for(quota, self.now, cost)
        } else {
            0
        };
        let another = AnotherCounter {
            units: capacity.saturating_sub(remaining),
            retry_after,
            reset_after: counter.reset_after(quota, self.now, 0),
        };
        counter.restore(state, logs);
        another
    }

    fn remove(&self, table: &mut Table, at: usize) {
        table.remove(at);
        self.store.keys.count.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Room for new keys, counted against the maximum before they are inserted. Unused room is released
/// on drop.
pub(super) struct KeyReservation<'a> {
    store: &'a MemoryStore,
    reserved: usize,
}

impl<'a> KeyReservation<'a> {
    pub(super) fn new(store: &'a MemoryStore) -> Self {
        Self { store, reserved: 0 }
    }

    /// Grows the reservation to this many keys. Returns false if the store is full.
    pub(super) fn reserve(&mut self, keys: usize) -> bool {
        let Some(more) = keys.checked_sub(self.reserved).filter(|more| *more > 0) else {
            return true;
        };
        let max_keys = self.store.max_keys;
        let grow = |count: usize| count.checked_add(more).filter(|count| *count <= max_keys);
        let is_reserved =
            self.store.keys.count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, grow).is_ok();
        if is_reserved {
            self.reserved = keys;
        }
        is_reserved
    }

    /// Uses the room for one key.
    fn use_one(&mut self) {
        self.reserved -= 1;
    }
}

impl Drop for KeyReservation<'_> {
    fn drop(&mut self) {
        if self.reserved > 0 {
            self.store.keys.count.fetch_sub(self.reserved, Ordering::Relaxed);
        }
    }
}
