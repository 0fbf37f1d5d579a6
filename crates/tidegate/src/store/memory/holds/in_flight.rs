//! Units in flight: their count is that of their holds.

use super::Counts;
use super::records::{HoldMap, PendingReleases, Record, RecordState};
use crate::action::Action;
use crate::algorithm::RawDecision;
use crate::clock::micros;
use crate::hold::{Hold, HoldState, HoldStatus, MAX_ENDED, MAX_HOLDS};
use crate::store::memory::context::ChargeContext;

impl ChargeContext<'_> {
    /// Removes the holds that have ended.
    pub(super) fn remove_ended(&self) {
        let (now, latest) = (self.now, self.latest_end());
        let is_held = |record: &Record| record.is_held(now);
        self.holds().retain_ended(self.fingerprint, now, latest, &self.store.capacity, is_held);
    }

    pub(super) fn reserve_in_flight(
        &self,
        hold: &Hold,
        counts: &mut Counts<'_, '_>,
    ) -> (RawDecision, Option<HoldState>) {
        let ttl = hold.ttl_micros(self.charge.quota().holds());
        let end = self.now + ttl;
        let decision = self.in_flight(if self.all_fit { end } else { 0 });
        if !decision.allowed || !self.all_fit || self.action == Action::Peek {
            return (decision, None);
        }
        let mut record = Record::new(self.id(hold), self.charge.cost(), self.now);
        (record.end_or_used, record.remaining) = (end, decision.remaining);
        record.keep(RecordState::InFlight, end);
        self.holds().set(self.fingerprint, record, counts.reservation);
        (decision, Some(HoldState::of_micros(HoldStatus::Held, ttl)))
    }

    /// Releases the units of a hold.
    pub(super) fn release(&self, hold: &Hold) -> (RawDecision, HoldStatus) {
        let found = self.find();
        self.holds().remove(self.fingerprint, self.id(hold), &self.store.capacity);
        let status = found.map_or(HoldStatus::Unknown, |_| HoldStatus::Settled);
        (self.in_flight(0), status)
    }

    /// Decides on units in flight without a hold of this charge.
    pub(super) fn apply_in_flight(&self, counts: &mut Counts<'_, '_>) -> RawDecision {
        let Self { store, fingerprint: key, charge, .. } = *self;
        match self.action {
            Action::Reset => {
                self.holds().retain(HoldMap::places(key), &store.capacity, |_| true, |_| false);
                return RawDecision::untouched(charge.quota().burst());
            }
            Action::Refund => {
                // Without an id, those that end first: it does not matter where all are equal.
                let (mut left, mut holds) = (charge.cost(), self.holds());
                for _ in 0..MAX_ENDED {
                    let Some(mut record) = holds.first(key).filter(|_| left > 0) else { break };
                    let taken = record.units.min(left);
                    left -= taken;
                    record.units -= taken;
                    if record.units > 0 {
                        holds.set(key, record, counts.reservation);
                    } else {
                        holds.remove(key, record.id, &store.capacity);
                    }
                }
            }
            _ => {}
        }
        // A peek shows the state after the acquire.
        let spends = self.action == Action::Peek && self.all_fit;
        let ttl = micros(charge.quota().holds().ttl());
        self.in_flight(if spends { self.now + ttl } else { 0 })
    }

    /// Returns the decision on units in flight. `end`: that of this charge, if it is admitted and
    /// spent; otherwise 0.
    pub(super) fn in_flight(&self, end: u64) -> RawDecision {
        let Self { charge, now, .. } = *self;
        let (key, limit) = (self.fingerprint, charge.quota().limit());
        let holds = self.holds();
        let PendingReleases { count, units: held, last, .. } = holds.held(key);
        let asks = matches!(self.action, Action::Acquire | Action::Peek);
        let cost = if asks { charge.cost() } else { 0 };
        // A peek of cost 0 asks for no further hold.
        let is_full = count >= MAX_HOLDS && !(asks && cost == 0);
        let fits = held + cost <= limit && !is_full || !asks;
        let freed_at = || holds.end_of(key, (held + cost).saturating_sub(limit));
        let retry_after = if fits { 0 } else { freed_at().saturating_sub(now) };
        let spent = if fits && end > 0 { cost } else { 0 };
        RawDecision {
            allowed: fits,
            remaining: if is_full { 0 } else { limit.saturating_sub(held + spent) },
            retry_after,
            reset_after: last.max(if fits { end } else { 0 }).saturating_sub(now),
            delay: 0,
        }
    }
}
