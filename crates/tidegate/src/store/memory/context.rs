//! [`ChargeContext`]: one charge applied to its locked table.

use super::capacity::{Lack, RoomReservation};
use super::logs::Logs;
use super::state::{CounterKind, PackedState, StoredCounter, Usage};
use super::table::Table;
use super::{MemoryStore, by_counter};
use crate::action::Action;
use crate::algorithm::{
    self, Algorithm, Bucket, CalendarWindow, FixedWindow, Operation, Parameters, RawDecision,
    SlidingCounter, SlidingLog,
};
use crate::charge::Charge;
use crate::key::{Fingerprint, PolicyClass};

/// A charge and everything that is needed to apply it to its locked table.
#[derive(Clone, Copy)]
pub(super) struct ChargeContext<'a> {
    pub(super) store: &'a MemoryStore,
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

/// Whether the units of a charge can be spent.
pub(super) struct Fit {
    pub(super) fits: bool,
    /// Number of entries that its log has to grow by before that.
    pub(super) log_growth: usize,
}

impl<'a> ChargeContext<'a> {
    fn quota(&self) -> &'a Parameters {
        self.charge.quota().parameters()
    }

    fn operation(&self) -> Operation<'a> {
        Operation {
            action: self.action,
            quota: self.quota(),
            cost: self.charge.cost(),
            charged_at: self.charge.charged_at().as_micros(),
            now: self.now,
            all_fit: self.all_fit,
        }
    }

    /// Returns whether the units can be spent.
    #[inline]
    pub(super) fn fits(self, table: &mut Table) -> Fit {
        if self.quota().period_start() > 0 {
            return self.fits_as::<CalendarWindow>(table);
        }
        by_counter!(self.quota(), self.fits_as(table))
    }

    fn fits_as<C: StoredCounter>(self, table: &mut Table) -> Fit {
        let (quota, cost) = (self.quota(), self.charge.cost());
        let growth = |counter: &C| counter.growth(quota, self.now).map_or(0, |growth| growth.least);
        let Ok(at) = table.find(self.fingerprint) else {
            return Fit { fits: true, log_growth: growth(&C::default()) };
        };
        let state = table.state(at);
        if !state.is_of(C::KIND) {
            let another = self.another(state, &mut table.logs);
            let mut counter = self.taken_over(C::default(), &another);
            let fits = algorithm::fits(&mut counter, quota, self.now, cost);
            return Fit { fits, log_growth: growth(&C::default()) };
        }
        let mut counter = C::unpack(state, quota, &mut table.logs);
        let fits = algorithm::fits(&mut counter, quota, self.now, cost);
        let log_growth = growth(&counter);
        counter.restore(state, &mut table.logs);
        Fit { fits, log_growth }
    }

    /// Applies the action, or returns the room that it lacks.
    pub(super) fn apply(
        self,
        table: &mut Table,
        reservation: &mut RoomReservation<'_>,
    ) -> Result<RawDecision, Lack> {
        if self.quota().period_start() > 0 {
            return self.apply_as::<CalendarWindow>(table, reservation);
        }
        by_counter!(self.quota(), self.apply_as(table, reservation))
    }

    pub(super) fn apply_as<C: StoredCounter>(
        self,
        table: &mut Table,
        reservation: &mut RoomReservation<'_>,
    ) -> Result<RawDecision, Lack> {
        let quota = self.quota();
        let found = table.find(self.fingerprint);
        if self.action == Action::Reset {
            if let Ok(at) = found {
                self.store.capacity.release(table.remove(at));
            }
            return Ok(RawDecision::untouched(quota.burst()));
        }
        let at = match found {
            Ok(at) if table.state(at).is_of(C::KIND) => {
                return self.apply_to_existing::<C>(table, at, reservation);
            }
            Ok(at) => return self.apply_to_another::<C>(table, at, reservation),
            Err(at) => at,
        };
        let mut counter = self.new_counter::<C>(reservation)?;
        let applied = algorithm::apply(&mut counter, &self.operation());
        if !applied.written || counter.is_empty() {
            return Ok(applied.decision);
        }
        let lack = Lack::Keys(1);
        if !reservation.reserve(self.class(), lack) {
            return Err(lack);
        }
        reservation.use_key(self.class());
        reservation.resize_log(self.class(), 0, counter.allocated());
        let state = counter.pack(quota, self.usage(&applied.decision), None, &mut table.logs);
        table.insert(at, self.fingerprint, state);
        Ok(applied.decision)
    }

    fn class(&self) -> PolicyClass {
        self.fingerprint.policy_class()
    }

    /// Returns the usage after a decision. A denial makes a counter exhausted, even if there are
    /// units left for a smaller cost.
    fn usage(&self, decision: &RawDecision) -> Usage {
        Usage::of(self.quota(), if decision.allowed { decision.remaining } else { 0 })
    }

    /// Returns whether the action spends units of a counter with these left.
    fn spends(&self, remaining: u64) -> bool {
        match self.action {
            Action::Acquire if self.charge.cost() > remaining => self.quota().count_denied(),
            Action::Acquire => self.all_fit,
            Action::ChargeUpTo => remaining > 0 && self.charge.cost() > 0,
            Action::Report => true,
            Action::Peek
            | Action::Refund
            | Action::Reset
            | Action::Commit
            | Action::Release
            | Action::Renew => false,
        }
    }

    /// Returns a new counter, whose log has room for the units that the action spends.
    fn new_counter<C: StoredCounter>(
        &self,
        reservation: &mut RoomReservation<'_>,
    ) -> Result<C, Lack> {
        let mut counter = C::default();
        if C::KIND == CounterKind::Log && self.spends(self.quota().limit()) {
            self.grow_log(&mut counter, reservation)?;
        }
        Ok(counter)
    }

    /// Grows a log that has no room for an entry.
    fn grow_log<C: StoredCounter>(
        &self,
        counter: &mut C,
        reservation: &mut RoomReservation<'_>,
    ) -> Result<(), Lack> {
        if let Some(growth) = counter.growth(self.quota(), self.now) {
            counter.grow(reservation.reserve_growth(self.class(), growth)?);
        }
        Ok(())
    }

    /// Applies the action, which is not a reset, to an existing key.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "most of it is removed when the action is a constant")]
    fn apply_to_existing<C: StoredCounter>(
        &self,
        table: &mut Table,
        at: usize,
        reservation: &mut RoomReservation<'_>,
    ) -> Result<RawDecision, Lack> {
        let quota = self.quota();
        let before = table.state(at);
        let mut counter = C::unpack(before, quota, &mut table.logs);
        let allocated = counter.allocated();
        if C::KIND == CounterKind::Log {
            counter.advance_to(quota, self.now);
            if self.spends(counter.remaining(quota))
                && let Err(lack) = self.grow_log(&mut counter, reservation)
            {
                counter.restore(before, &mut table.logs);
                return Err(lack);
            }
        }
        let applied = algorithm::apply(&mut counter, &self.operation());
        reservation.resize_log(self.class(), allocated, counter.allocated());
        if !applied.written {
            counter.restore(before, &mut table.logs);
            if matches!(self.action, Action::Acquire | Action::ChargeUpTo | Action::Report) {
                // The limit was lowered: the entry would expire before its bucket has drained.
                if !before.lives_for(C::KIND, quota) {
                    table.set(at, before.with_lifetime_for(C::KIND, quota));
                }
            }
            self.mark_denied(table, at, &applied.decision);
            return Ok(applied.decision);
        }
        let (is_empty, usage) = (counter.is_empty(), self.usage(&applied.decision));
        let state = counter.pack(quota, usage, Some(before), &mut table.logs);
        table.set(at, state);
        if is_empty {
            self.store.capacity.release(table.remove(at));
        }
        Ok(applied.decision)
    }

    /// Marks a key whose acquire was denied, so that it is not evicted.
    fn mark_denied(&self, table: &mut Table, at: usize, decision: &RawDecision) {
        if self.action == Action::Acquire && !decision.allowed {
            let mut state = table.state(at);
            state.mark_exhausted();
            table.set(at, state);
        }
    }

    /// Applies the action, which is not a reset, to a key whose policy had another algorithm.
    #[cold]
    fn apply_to_another<C: StoredCounter>(
        &self,
        table: &mut Table,
        at: usize,
        reservation: &mut RoomReservation<'_>,
    ) -> Result<RawDecision, Lack> {
        let quota = self.quota();
        let before = table.state(at);
        let another = self.another(before, &mut table.logs);
        let mut counter = self.taken_over(self.new_counter::<C>(reservation)?, &another);
        let reset_after = another.reset_after;
        if self.action == Action::Refund {
            // The units have lost their times, so none are returned.
            let remaining = counter.remaining(quota);
            return Ok(RawDecision {
                remaining,
                reset_after,
                ..RawDecision::untouched(quota.burst())
            });
        }
        let applied = algorithm::apply(&mut counter, &self.operation());
        let decision = applied.decision;
        if applied.written {
            let replaced = table.logs.remove(before);
            reservation.resize_log(self.class(), replaced, counter.allocated());
            let state = counter.pack(quota, self.usage(&decision), None, &mut table.logs);
            table.set(at, state);
            return Ok(decision);
        }
        self.mark_denied(table, at, &decision);
        if self.action == Action::Peek && decision.allowed && self.all_fit && self.charge.cost() > 0
        {
            // The state after this charge.
            return Ok(decision);
        }
        // Nothing is spent, so the times are those of the other algorithm.
        if decision.allowed {
            return Ok(RawDecision { reset_after, ..decision });
        }
        let retry_after = another.retry_after;
        // A cache of denials derives the level of a bucket from this, which must not be too high.
        let reset_after = if C::KIND == CounterKind::Bucket { retry_after } else { reset_after };
        Ok(RawDecision { retry_after, reset_after, ..decision })
    }

    /// Adds the units that another algorithm has in use to a new counter: they count as used now.
    fn taken_over<C: StoredCounter>(&self, mut counter: C, another: &AnotherCounter) -> C {
        counter.advance_to(self.quota(), self.now);
        if another.units > 0 {
            counter.spend(self.quota(), self.now, another.units);
        }
        counter
    }

    fn another(&self, state: PackedState, logs: &mut Logs) -> AnotherCounter {
        match state.kind() {
            CounterKind::Log => self.another_as::<SlidingLog>(state, logs),
            CounterKind::Counter => self.another_as::<SlidingCounter>(state, logs),
            CounterKind::Window => self.another_as::<FixedWindow>(state, logs),
            CounterKind::Bucket => self.another_as::<Bucket<u128>>(state, logs),
        }
    }

    fn another_as<O: StoredCounter>(&self, state: PackedState, logs: &mut Logs) -> AnotherCounter {
        let quota = self.quota();
        let capacity = if O::KIND == CounterKind::Bucket { quota.burst() } else { quota.limit() };
        let mut counter = O::unpack(state, quota, logs);
        counter.advance_to(quota, self.now);
        let remaining = counter.remaining(quota);
        // A report waits for one unit, whatever it has recorded.
        let cost = if self.action == Action::Report { 1 } else { self.charge.cost() };
        // It has room for this charge once it has room for this many units.
        let cost = (cost + capacity).saturating_sub(quota.burst());
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
}
