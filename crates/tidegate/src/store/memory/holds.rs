//! [`Holds`]: the acquires that a store remembers by their ids, and the units in flight.

use spin::mutex::SpinMutexGuard;

#[cfg(feature = "resilience")]
use super::MemoryStore;
use super::capacity::{Lack, RoomReservation};
use super::context::{ChargeContext, Fit};
use super::table::Table;
use crate::action::Action;
use crate::algorithm::{Algorithm, RawDecision};
#[cfg(feature = "resilience")]
use crate::charge::Charge;
use crate::charge::ChargeError;
use crate::hold::{Hold, HoldState, HoldStatus};
use crate::key::Fingerprint;
use crate::store::StoreError;

mod in_flight;
mod rates;
mod records;

use self::records::{HoldMap, Record, RecordState};
pub(super) use self::records::{Holds, RECORD_ENTRIES};

/// Separates the hashes of ids from those of keys.
const ID_DOMAIN: &str = "hold";

/// The counts of a locked shard, and the room that is reserved for them.
pub(super) struct Counts<'t, 'r> {
    pub(super) table: &'t mut Table,
    pub(super) reservation: &'t mut RoomReservation<'r>,
}

impl<'a> ChargeContext<'a> {
    fn id(&self, hold: &Hold) -> Fingerprint {
        let secret = self.store.secret;
        secret.fingerprint(hold.id(), &secret.policy_sum(ID_DOMAIN))
    }

    fn holds(&self) -> SpinMutexGuard<'a, HoldMap> {
        self.store.holds.of_key(self.fingerprint)
    }

    /// Returns what is remembered of the hold of this charge.
    fn find(&self) -> Option<Record> {
        let found = self.holds().get(self.fingerprint, self.id(self.charge.hold()?));
        found.filter(|record| record.is_known(self.now))
    }

    fn is_concurrency(&self) -> bool {
        self.charge.quota().is_concurrency()
    }

    /// Returns the time after which no hold ends, unless the clock stepped back.
    fn latest_end(&self) -> u64 {
        self.now + self.charge.quota().holds().max_ttl_micros()
    }

    /// Returns whether a record has units in flight, or belongs to a rate, as the charge does.
    fn concerns(&self, record: &Record) -> bool {
        (record.state() == RecordState::InFlight) == self.is_concurrency()
    }

    /// Returns the state of the count.
    fn unspent(&self, counts: &mut Counts<'_, '_>) -> RawDecision {
        let read = if self.is_concurrency() {
            self.in_flight(0)
        } else {
            let read = self.apply_action(Action::Peek, 0, 0, counts);
            read.unwrap_or(RawDecision::untouched(self.charge.quota().burst()))
        };
        RawDecision { allowed: true, retry_after: 0, delay: 0, ..read }
    }

    /// Returns the acquire that has the id of this one, maybe with another cost.
    fn repeated(&self) -> Option<Record> {
        let record = self.find().filter(|record| self.concerns(record))?;
        let is_alive = match record.state() {
            // Of units that stay charged, the id is known for longer than the hold.
            RecordState::Open | RecordState::OpenBeforeReset => true,
            RecordState::Settled | RecordState::SettledBeforeReset => {
                record.end_or_used > 0 || record.units == 0
            }
            _ => record.end().is_some_and(|end| end > self.now),
        };
        is_alive.then_some(record)
    }

    /// Returns whether the units of a charge can be spent, and whether it repeats an earlier one,
    /// after the units of holds that have ended have returned. The error is that of an id that is in
    /// use with another cost.
    pub(super) fn fit_with_hold(
        &self,
        counts: &mut Counts<'_, '_>,
    ) -> Result<(Fit, bool), StoreError> {
        if self.is_concurrency() {
            self.remove_ended();
        } else if self.charge.quota().releases_holds() {
            self.release_ended(counts);
        }
        let fit = match self.repeated() {
            Some(record) if record.units == self.charge.cost() => {
                return Ok((Fit { fits: true, log_growth: 0 }, true));
            }
            Some(_) if self.action.is_all_or_nothing() => {
                let id = self.charge.hold().map(|hold| hold.id().to_owned());
                return Err(ChargeError::HoldConflict(id.unwrap_or_default()).into());
            }
            _ if self.is_concurrency() => Fit { fits: self.in_flight(0).allowed, log_growth: 0 },
            _ => self.fits(counts.table),
        };
        Ok((fit, false))
    }

    /// Decides a charge that has a hold, or whose holds release units. Returns its state, too.
    pub(super) fn apply_with_hold(
        self,
        counts: &mut Counts<'_, '_>,
        starts_block: bool,
    ) -> Result<(RawDecision, Option<HoldState>), Lack> {
        let reads_hold =
            !matches!(self.action, Action::Reset | Action::ChargeUpTo | Action::Report);
        let Some(hold) = self.charge.hold().filter(|_| reads_hold) else {
            if self.is_concurrency() {
                return Ok((self.apply_in_flight(counts), None));
            }
            if self.action == Action::Reset {
                self.forget_releases();
            }
            let decision = self.apply_with_block(counts.table, counts.reservation, starts_block)?;
            return Ok((self.with_short_wait(decision), None));
        };
        match self.action {
            Action::Acquire | Action::Peek => {
                if let Some(repeated) = self.repeat(counts) {
                    return Ok(repeated);
                }
                if self.is_concurrency() {
                    return Ok(self.reserve_in_flight(hold, counts));
                }
                let (decision, state) = self.reserve(hold, counts, starts_block)?;
                Ok((self.with_short_wait(decision), state))
            }
            Action::Commit | Action::Release | Action::Refund => {
                let (decision, status) = if self.is_concurrency() {
                    self.release(hold)
                } else {
                    self.settle(hold, counts)?
                };
                Ok((decision, Some(HoldState::of_micros(status, 0))))
            }
            Action::Renew | Action::Reset | Action::ChargeUpTo | Action::Report => {
                Ok(self.renew(hold, counts))
            }
        }
    }

    /// Returns the earlier answer, if the charge repeats a reservation.
    fn repeat(&self, counts: &mut Counts<'_, '_>) -> Option<(RawDecision, Option<HoldState>)> {
        let (record, unspent) = (self.repeated()?, self.unspent(counts));
        let is_queue = self.charge.quota().algorithm() == Algorithm::LeakyBucket;
        let delay = if is_queue { record.refund_at.saturating_sub(self.now) } else { 0 };
        let remaining = if self.is_concurrency() { unspent.remaining } else { record.remaining };
        let decision = RawDecision { remaining, delay, ..unspent };
        let end = record.end().unwrap_or(0).min(self.latest_end());
        let expires_after = end.saturating_sub(self.now);
        Some((decision, Some(HoldState::of_micros(HoldStatus::Replayed, expires_after))))
    }

    /// Extends a hold that has not ended.
    fn renew(&self, hold: &Hold, counts: &mut Counts<'_, '_>) -> (RawDecision, Option<HoldState>) {
        let now = self.now;
        let found = self.find().filter(|record| record.is_held(now) && self.concerns(record));
        let state = match found {
            None => HoldState::of_micros(HoldStatus::Ended, 0),
            Some(mut record) => {
                let terms = self.charge.quota().holds();
                let latest = record.charged_at + terms.max_ttl_micros();
                let before = record.end_or_used;
                let extended = latest.min(now + hold.ttl_micros(terms));
                record.end_or_used = before.min(self.latest_end()).max(extended);
                let kept_until = record.kept_until() + record.end_or_used - before;
                record.keep(record.state(), kept_until);
                self.holds().set(self.fingerprint, record, counts.reservation);
                HoldState::of_micros(HoldStatus::Held, record.end_or_used - now)
            }
        };
        (self.unspent(counts), Some(state))
    }
}

#[cfg(feature = "resilience")]
impl MemoryStore {
    /// Reads what is known of an acquire.
    fn read_holds<'a, T>(
        &'a self,
        charge: &'a Charge<'a>,
        read: impl FnOnce(&ChargeContext<'a>) -> T,
    ) -> T {
        let fingerprint = self.fingerprint(charge);
        let _table = self.shard(fingerprint).lock();
        let (action, now) = (Action::Acquire, self.clock.now());
        read(&ChargeContext { store: self, action, charge, fingerprint, now, all_fit: true })
    }

    /// Returns whether an acquire has the id of one that it has made.
    pub(crate) fn repeats_hold(&self, charge: &Charge<'_>) -> bool {
        self.read_holds(charge, |context| context.repeated().is_some())
    }

    /// Returns whether it remembers the hold of a charge.
    pub(crate) fn has_hold(&self, charge: &Charge<'_>) -> bool {
        self.read_holds(charge, |context| context.find().is_some())
    }

    /// Returns the units that this action settles: those of an open hold, or for a refund those that
    /// were used.
    pub(crate) fn units_to_settle(&self, action: Action, charge: &Charge<'_>) -> Option<u64> {
        let record = self.read_holds(charge, ChargeContext::find)?;
        let settles = matches!(action, Action::Commit | Action::Release | Action::Refund);
        match record.state() {
            RecordState::Open | RecordState::OpenUntilRelease | RecordState::InFlight => {
                settles.then_some(record.units)
            }
            RecordState::Settled if action == Action::Refund => Some(record.end_or_used),
            _ => None,
        }
    }
}
