//! Holds of a rate, whose units are charged by the algorithm of the policy.

use super::Counts;
use super::records::{HoldMap, Record, RecordState};
use crate::action::Action;
use crate::algorithm::{Algorithm, RawDecision};
use crate::clock::Timestamp;
use crate::hold::{GRACE, Hold, HoldState, HoldStatus, MAX_ENDED, MAX_HOLDS};
use crate::store::memory::capacity::Lack;
use crate::store::memory::context::ChargeContext;

/// Time after which another call returns the units of further ended holds, in microseconds.
const RELEASE_WAIT: u64 = 1_000;

impl ChargeContext<'_> {
    /// Returns the units of holds that have ended to the times of their charges.
    pub(super) fn release_ended(&self, counts: &mut Counts<'_, '_>) {
        let Self { store, now, fingerprint: key, .. } = *self;
        let (mut holds, mut ended) = (self.holds(), Vec::new());
        holds.retain_ended(key, now, self.latest_end(), &store.capacity, |record| {
            if record.state() == RecordState::OpenUntilRelease && record.end_or_used <= now {
                ended.push((record.end_or_used, record.refund_at, record.id));
            }
            true
        });
        ended.sort_unstable();
        // Those of this charge, and the first ones: the others are left to later calls.
        let own = self.charge.hold().map(|hold| self.id(hold));
        for (index, (_, refund_at, id)) in ended.into_iter().enumerate() {
            if index >= MAX_ENDED && own != Some(id) {
                continue;
            }
            let Some(mut record) = holds.get(key, id) else { continue };
            record.keep(RecordState::Released, record.kept_until());
            holds.set(key, record, counts.reservation);
            self.refund(record.units, refund_at, counts);
        }
    }

    /// Forgets which units may return, because the count is deleted.
    pub(super) fn forget_releases(&self) {
        let places = HoldMap::places(self.fingerprint);
        self.holds().retain(
            places,
            &self.store.capacity,
            |_| true,
            |record| {
                let state = match record.state() {
                    RecordState::Open => RecordState::OpenBeforeReset,
                    RecordState::OpenUntilRelease => RecordState::Released,
                    RecordState::Settled => RecordState::SettledBeforeReset,
                    other => other,
                };
                record.keep(state, record.kept_until());
                true
            },
        );
    }

    /// Applies another action on the count of this charge.
    pub(super) fn apply_action(
        &self,
        action: Action,
        units: u64,
        charged_at: u64,
        counts: &mut Counts<'_, '_>,
    ) -> Result<RawDecision, Lack> {
        let charge = self.charge.without_hold().with_cost(units);
        let charge = charge.with_charged_at(Timestamp::from_micros(charged_at));
        let context: ChargeContext<'_> = ChargeContext { charge: &charge, action, ..*self };
        context.apply(counts.table, counts.reservation)
    }

    fn refund(&self, units: u64, refund_at: u64, counts: &mut Counts<'_, '_>) -> RawDecision {
        let refunded = if units > 0 {
            self.apply_action(Action::Refund, units, refund_at, counts).ok()
        } else {
            None
        };
        refunded.unwrap_or_else(|| self.unspent(counts))
    }

    fn report(&self, units: u64, counts: &mut Counts<'_, '_>) -> Result<RawDecision, Lack> {
        if units == 0 {
            return Ok(self.unspent(counts));
        }
        self.apply_action(Action::Report, units, 0, counts)
    }

    /// Returns the time until this key may have another hold that releases its units at the end.
    pub(in crate::store::memory) fn rest(&self) -> u64 {
        let is_reserved = self.charge.hold().is_some_and(|hold| !hold.is_settled());
        if !is_reserved || !self.charge.quota().releases_holds() || self.is_concurrency() {
            return 0;
        }
        let held = self.holds().held(self.fingerprint);
        if held.count < MAX_HOLDS { 0 } else { held.first.saturating_sub(self.now).max(1) }
    }

    /// Shortens the wait of a denial if the next calls return the units of further ended holds.
    pub(super) fn with_short_wait(&self, decision: RawDecision) -> RawDecision {
        let releases = self.charge.quota().releases_holds();
        if decision.allowed || !releases || !self.action.is_all_or_nothing() {
            return decision;
        }
        let has_ended = self.holds().held(self.fingerprint).first <= self.now;
        let retry_after = if has_ended { RELEASE_WAIT } else { decision.retry_after };
        RawDecision { retry_after, ..decision }
    }

    /// Reserves units, of which no record is known.
    pub(super) fn reserve(
        self,
        hold: &Hold,
        counts: &mut Counts<'_, '_>,
        starts_block: bool,
    ) -> Result<(RawDecision, Option<HoldState>), Lack> {
        let Self { now, charge, .. } = self;
        let (quota, rest, before) = (charge.quota(), self.rest(), self.unspent(counts));
        if rest > 0 {
            let reset_after = before.reset_after.max(rest);
            let denied = RawDecision { allowed: false, remaining: 0, retry_after: rest, ..before };
            return Ok((RawDecision { reset_after, ..denied }, None));
        }
        let decision = self.apply_with_block(counts.table, counts.reservation, starts_block)?;
        if !decision.allowed || !self.all_fit || self.action == Action::Peek {
            return Ok((decision, None));
        }
        let ttl = hold.ttl_micros(quota.holds());
        let mut record = Record::new(self.id(hold), charge.cost(), now);
        record.remaining = decision.remaining;
        if matches!(quota.algorithm(), Algorithm::TokenBucket | Algorithm::LeakyBucket) {
            record.refund_at = now + before.reset_after;
        }
        let expires_after = if hold.is_settled() {
            record.keep(RecordState::Settled, now + ttl);
            0
        } else {
            record.end_or_used = now + ttl;
            if quota.releases_holds() {
                let grace = GRACE.max(quota.drain_micros() * 2);
                record.keep(RecordState::OpenUntilRelease, now + ttl + grace);
            } else {
                record.keep(RecordState::Open, now + ttl + GRACE);
            }
            ttl
        };
        self.holds().set(self.fingerprint, record, counts.reservation);
        Ok((decision, Some(HoldState::of_micros(HoldStatus::Held, expires_after))))
    }

    /// Settles a hold, or returns all of its units.
    pub(super) fn settle(
        &self,
        hold: &Hold,
        counts: &mut Counts<'_, '_>,
    ) -> Result<(RawDecision, HoldStatus), Lack> {
        let now = self.now;
        let is_refund = self.action == Action::Refund;
        let used = if is_refund { 0 } else { self.charge.cost() };
        let Some(mut record) = self.find().filter(|record| self.concerns(record)) else {
            let decision = self.report(used, counts)?;
            self.remember_report(hold, used, counts);
            return Ok((decision, HoldStatus::Unknown));
        };
        let kept_until = record.end().map_or(record.kept_until(), |end| end + GRACE);
        let has_ended = record.releases() && record.end_or_used <= now;
        let (decision, state, status) = match record.state() {
            RecordState::Open | RecordState::OpenUntilRelease if !has_ended => {
                let decision = if used <= record.units {
                    self.refund(record.units - used, record.refund_at, counts)
                } else {
                    self.report(used - record.units, counts)?
                };
                let state = if is_refund { RecordState::Refunded } else { RecordState::Settled };
                (decision, state, HoldStatus::Settled)
            }
            RecordState::Open
            | RecordState::OpenUntilRelease
            | RecordState::Released
            | RecordState::OpenBeforeReset => {
                if has_ended {
                    // The terms have changed since the reservation.
                    let _ = self.refund(record.units, record.refund_at, counts);
                }
                let decision = self.report(used, counts)?;
                (decision, RecordState::Reported, HoldStatus::Ended)
            }
            RecordState::Settled | RecordState::SettledBeforeReset if is_refund => {
                let is_left = record.state() == RecordState::Settled;
                let units = if is_left { record.end_or_used } else { 0 };
                let decision = self.refund(units, record.refund_at, counts);
                (decision, RecordState::Refunded, HoldStatus::Settled)
            }
            settled => {
                let status = match settled {
                    RecordState::Reported => HoldStatus::Ended,
                    RecordState::WasUnknown => HoldStatus::Reported,
                    _ => HoldStatus::Settled,
                };
                return Ok((self.unspent(counts), status));
            }
        };
        record.end_or_used = used;
        record.keep(state, kept_until);
        self.holds().set(self.fingerprint, record, counts.reservation);
        Ok((decision, status))
    }

    /// Remembers a commit of an unknown id, so that its repetition reports nothing. It is not
    /// remembered if there is no room.
    fn remember_report(&self, hold: &Hold, used: u64, counts: &mut Counts<'_, '_>) {
        let room = Lack::LogEntries(super::RECORD_ENTRIES);
        if used == 0 || !counts.reservation.reserve(self.fingerprint.policy_class(), room) {
            return;
        }
        let mut record = Record::new(self.id(hold), used, self.now);
        record.keep(RecordState::WasUnknown, self.latest_end() + GRACE);
        self.holds().set(self.fingerprint, record, counts.reservation);
    }
}
