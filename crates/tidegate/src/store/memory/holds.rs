//! [`Holds`]: the acquires that a store remembers by their ids, and the units in flight.

use std::collections::BTreeMap;
use std::ops::{Bound, RangeBounds, RangeInclusive};

use spin::mutex::{SpinMutex, SpinMutexGuard};

#[cfg(feature = "resilience")]
use super::MemoryStore;
use super::SHARDS;
use super::capacity::{Capacity, Lack, RoomReservation};
use super::context::{ChargeContext, Fit};
use super::table::Table;
use crate::action::Action;
use crate::algorithm::{Algorithm, RawDecision};
#[cfg(feature = "resilience")]
use crate::charge::Charge;
use crate::charge::ChargeError;
use crate::clock::{Timestamp, micros};
use crate::hold::{GRACE, Hold, HoldState, HoldStatus, MAX_HOLDS};
use crate::key::Fingerprint;
use crate::store::StoreError;

/// Separates the hashes of ids from those of keys.
const ID_DOMAIN: &str = "hold";
/// Maximum number of records of a chunk.
const MAX_CHUNK: usize = 128;
/// Number of ended holds whose units one call returns, and of ends that it sorts.
const MAX_ENDED: usize = 100;
/// Time after which another call returns the units of further ended holds, in microseconds.
const RELEASE_WAIT: u64 = 1_000;
/// Room that a record takes, in entries of logs.
pub(super) const RECORD_ENTRIES: usize = size_of::<Record>() / super::LOG_ENTRY_BYTES;

/// The holds of a store, in the same shards as the counts. They are apart from them, because
/// decisions without holds do not need them.
///
/// The lock of a shard's holds is only taken while that of its counts is held, so that it is always
/// free.
#[derive(Debug)]
pub(super) struct Holds(Box<[SpinMutex<HoldMap>]>);

/// The holds of one shard.
#[derive(Debug, Default)]
pub(super) struct HoldMap {
    /// Records of each key, in chunks by the lowest id that belongs to them, so that no decision
    /// visits all holds of a key.
    chunks: BTreeMap<Place, Chunk>,
    /// The chunk that was swept last.
    swept: Option<Place>,
}

/// Fingerprints of a key and of an id.
type Place = (Fingerprint, Fingerprint);

#[derive(Debug, Default)]
struct Chunk {
    /// Sorted by id.
    records: Vec<Record>,
    held: PendingReleases,
}

/// Holds whose units return at the end, and have not yet.
#[derive(Debug, Clone, Copy)]
struct PendingReleases {
    count: usize,
    units: u64,
    /// The first end, and the last one.
    first: u64,
    last: u64,
}

/// A remembered acquire. Times are microseconds.
#[derive(Debug, Clone, Copy)]
struct Record {
    /// Hash of the id.
    id: Fingerprint,
    units: u64,
    charged_at: u64,
    /// Time to which its units return: for a bucket, when those before it have drained.
    refund_at: u64,
    /// End of an open hold. Otherwise the units that were used.
    end_or_used: u64,
    /// Units that remained after the acquire.
    remaining: u64,
    /// Time until which it is remembered, times 16, plus the number of the state.
    kept_until_and_state: u64,
}

const _: () = assert!(size_of::<Record>() == 64, "at most 64 bytes per hold");

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RecordState {
    /// Not settled. At the end the units stay charged.
    Open,
    /// Not settled. At the end the units return.
    OpenUntilRelease,
    /// The units have returned at the end.
    Released,
    Settled,
    /// Committed after its units had returned, so that those that were used were reported.
    Reported,
    Refunded,
    /// Committed under an unknown id, so that the units were reported.
    WasUnknown,
    /// Units in flight, which no rate has charged.
    InFlight,
    /// Open or settled before the count was reset: none of its units can return.
    OpenBeforeReset,
    SettledBeforeReset,
}

/// Request that the id of a reservation stands for.
enum Known {
    /// Nothing: it is a new request.
    Nothing,
    /// The same request.
    Same { remaining: u64, refund_at: u64, expires_after: u64 },
    /// A request with another cost.
    Another,
}

impl RecordState {
    const ALL: [Self; 10] = [
        Self::Open,
        Self::OpenUntilRelease,
        Self::Released,
        Self::Settled,
        Self::Reported,
        Self::Refunded,
        Self::WasUnknown,
        Self::InFlight,
        Self::OpenBeforeReset,
        Self::SettledBeforeReset,
    ];
}

/// No holds.
impl Default for PendingReleases {
    fn default() -> Self {
        Self { count: 0, units: 0, first: u64::MAX, last: 0 }
    }
}

impl PendingReleases {
    fn add(self, other: Self) -> Self {
        Self {
            count: self.count + other.count,
            units: self.units + other.units,
            first: self.first.min(other.first),
            last: self.last.max(other.last),
        }
    }
}

impl Chunk {
    /// Computes the sums, after a change of the records.
    fn sum_up(&mut self) {
        let released = self.records.iter().filter(|record| record.releases());
        let held = released.map(|record| {
            let Record { units, end_or_used: end, .. } = *record;
            PendingReleases { count: 1, units, first: end, last: end }
        });
        self.held = held.fold(PendingReleases::default(), PendingReleases::add);
    }
}

impl Record {
    fn state(&self) -> RecordState {
        RecordState::ALL[(self.kept_until_and_state & 15) as usize]
    }

    fn kept_until(&self) -> u64 {
        self.kept_until_and_state >> 4
    }

    fn keep(&mut self, state: RecordState, until: u64) {
        self.kept_until_and_state = until << 4 | state as u64;
    }

    /// Returns the end of a hold that is not settled, and whose units have not returned at its end.
    fn end(&self) -> Option<u64> {
        let is_open = matches!(
            self.state(),
            RecordState::Open
                | RecordState::OpenUntilRelease
                | RecordState::InFlight
                | RecordState::OpenBeforeReset
        );
        is_open.then_some(self.end_or_used)
    }

    /// Returns whether its id is known. The units of an ended hold may return later than that.
    fn is_known(&self, now: u64) -> bool {
        let until = match self.state() {
            RecordState::OpenUntilRelease | RecordState::Released | RecordState::InFlight => {
                self.end_or_used + GRACE
            }
            _ => self.kept_until(),
        };
        until > now
    }

    /// Returns whether its units return at the end, and have not yet.
    fn releases(&self) -> bool {
        matches!(self.state(), RecordState::OpenUntilRelease | RecordState::InFlight)
    }

    fn is_held(&self, now: u64) -> bool {
        let is_forgotten = self.state() == RecordState::OpenBeforeReset;
        !is_forgotten && self.end().is_some_and(|end| end > now)
    }
}

impl Holds {
    pub(super) fn new() -> Self {
        Self(std::iter::repeat_with(SpinMutex::default).take(SHARDS).collect())
    }

    /// Returns the holds of a shard. The caller holds the lock of the shard.
    pub(super) fn of_shard(&self, index: usize) -> SpinMutexGuard<'_, HoldMap> {
        self.0[index].lock()
    }

    fn of_key(&self, fingerprint: Fingerprint) -> SpinMutexGuard<'_, HoldMap> {
        self.of_shard(fingerprint.shard_index(SHARDS))
    }
}

impl HoldMap {
    /// Returns the places of all records of a key.
    fn places(key: Fingerprint) -> RangeInclusive<Place> {
        (key, Fingerprint::MIN)..=(key, Fingerprint::NONE)
    }

    fn get(&self, key: Fingerprint, id: Fingerprint) -> Option<Record> {
        let (_, chunk) = self.chunks.range((key, Fingerprint::MIN)..=(key, id)).next_back()?;
        let at = chunk.records.binary_search_by_key(&id, |record| record.id).ok()?;
        Some(chunk.records[at])
    }

    /// Returns the sums of the holds of a key whose units return at the end.
    fn held(&self, key: Fingerprint) -> PendingReleases {
        let chunks = self.chunks.range(Self::places(key));
        chunks.map(|(_, chunk)| chunk.held).fold(PendingReleases::default(), PendingReleases::add)
    }

    /// Returns the hold that ends first.
    fn first(&self, key: Fingerprint) -> Option<Record> {
        let chunks = self.chunks.range(Self::places(key)).map(|(_, chunk)| chunk);
        let chunk = chunks.min_by_key(|chunk| chunk.held.first)?;
        let held = chunk.records.iter().filter(|record| record.releases());
        held.min_by_key(|record| record.end_or_used).copied()
    }

    /// Returns the end of the hold after which this many units are free: of the last one, if it is
    /// not among the first.
    fn end_of(&self, key: Fingerprint, units: u64) -> u64 {
        let held = self.held(key);
        if units <= 1 {
            return held.first;
        }
        let chunks = self.chunks.range(Self::places(key));
        let records = chunks.flat_map(|(_, chunk)| &chunk.records);
        let held_records = records.filter(|record| record.releases());
        let mut ends: Vec<_> =
            held_records.map(|record| (record.end_or_used, record.units)).collect();
        if ends.len() > MAX_ENDED {
            ends.select_nth_unstable(MAX_ENDED);
            ends.truncate(MAX_ENDED);
        }
        ends.sort_unstable();
        let mut left = units;
        let frees_enough = |(_, units): &&(u64, u64)| {
            left = left.saturating_sub(*units);
            left == 0
        };
        ends.iter().find(frees_enough).map_or(held.last, |(end, _)| *end)
    }

    /// Sets a record, whose room is reserved if it is new.
    fn set(&mut self, key: Fingerprint, record: Record, reservation: &mut RoomReservation<'_>) {
        let first = (key, Fingerprint::MIN);
        let place = self.chunks.range(first..=(key, record.id)).next_back();
        let place = place.map_or(first, |(place, _)| *place);
        let chunk = self.chunks.entry(place).or_default();
        let Chunk { records, .. } = chunk;
        match records.binary_search_by_key(&record.id, |record| record.id) {
            Ok(at) => records[at] = record,
            Err(at) => {
                if records.len() == records.capacity() {
                    records.reserve_exact(records.len() / 8 + 1);
                }
                records.insert(at, record);
                reservation.resize_log(key.policy_class(), 0, RECORD_ENTRIES);
            }
        }
        if records.len() > MAX_CHUNK {
            let mut upper = Chunk {
                records: records.split_off(MAX_CHUNK / 2),
                held: PendingReleases::default(),
            };
            records.shrink_to_fit();
            upper.sum_up();
            chunk.sum_up();
            self.chunks.insert((key, upper.records[0].id), upper);
        } else {
            chunk.sum_up();
        }
    }

    /// Removes the records in the chunks of `concerns` that `is_kept` does not name. Returns
    /// whether there were any.
    fn retain(
        &mut self,
        places: impl RangeBounds<Place>,
        capacity: &Capacity,
        concerns: impl Fn(&Chunk) -> bool,
        mut is_kept: impl FnMut(&mut Record) -> bool,
    ) -> bool {
        let (mut emptied, mut has_removed) = (Vec::new(), false);
        for (place, chunk) in self.chunks.range_mut(places).filter(|(_, chunk)| concerns(chunk)) {
            let before = chunk.records.len();
            chunk.records.retain_mut(&mut is_kept);
            let count = before - chunk.records.len();
            capacity.log_entries.release(place.0.policy_class(), count * RECORD_ENTRIES);
            has_removed |= count > 0;
            if chunk.records.is_empty() {
                emptied.push(*place);
            } else if chunk.records.len() < chunk.records.capacity() / 2 {
                chunk.records.shrink_to_fit();
            }
            chunk.sum_up();
        }
        for place in emptied {
            self.chunks.remove(&place);
        }
        has_removed
    }

    fn remove(&mut self, key: Fingerprint, id: Fingerprint, capacity: &Capacity) {
        let places = (key, Fingerprint::MIN)..=(key, id);
        let place = self.chunks.range(places).next_back().map(|(place, _)| *place);
        if let Some(place) = place {
            self.retain(place..=place, capacity, |_| true, |record| record.id != id);
        }
    }

    /// Removes the records of the next chunk that no longer matter. Returns whether there were any.
    pub(super) fn sweep(&mut self, now: u64, capacity: &Capacity) -> bool {
        let after = self.swept.map_or(Bound::Unbounded, Bound::Excluded);
        self.swept = self.chunks.range((after, Bound::Unbounded)).next().map(|(place, _)| *place);
        self.swept.is_some_and(|place| {
            self.retain(place..=place, capacity, |_| true, |record| record.kept_until() > now)
        })
    }
}

impl ChargeContext<'_> {
    fn id(&self, hold: &Hold) -> Fingerprint {
        let secret = self.store.secret;
        secret.fingerprint(hold.id(), &secret.policy_sum(ID_DOMAIN))
    }

    fn is_concurrency(&self) -> bool {
        self.charge.quota().is_concurrency()
    }

    /// Returns the units of holds that have ended to the times of their charges.
    fn release_ended(&self, table: &mut Table, reservation: &mut RoomReservation<'_>) {
        let Self { store, now, fingerprint: key, .. } = *self;
        if !self.charge.quota().releases_holds() {
            return;
        }
        let mut holds = store.holds.of_key(key);
        // After the clock stepped back.
        let latest = now + self.charge.quota().holds().max_ttl_micros();
        let concerns = |chunk: &Chunk| chunk.held.first <= now || chunk.held.last > latest;
        let (is_concurrency, mut ended) = (self.is_concurrency(), Vec::new());
        holds.retain(HoldMap::places(key), &store.capacity, concerns, |record| {
            if record.releases() {
                record.end_or_used = record.end_or_used.min(latest);
                let returns = record.state() == RecordState::OpenUntilRelease;
                if record.end_or_used <= now && returns && !is_concurrency {
                    ended.push((record.end_or_used, record.refund_at, record.id));
                }
            }
            !is_concurrency || record.is_held(now)
        });
        ended.sort_unstable();
        // Those of this charge, and the first ones: the others are left to later calls.
        let own = self.charge.hold().map(|hold| self.id(hold));
        let mut left = MAX_ENDED;
        for (_, refund_at, id) in ended {
            left = left.saturating_sub(1);
            if left == 0 && own != Some(id) {
                continue;
            }
            let Some(mut record) = holds.get(key, id) else { continue };
            record.keep(RecordState::Released, record.kept_until());
            holds.set(key, record, reservation);
            self.refund(record.units, refund_at, table, reservation);
        }
    }

    /// Applies another action on the count of this charge.
    fn apply_action(
        &self,
        action: Action,
        units: u64,
        charged_at: u64,
        table: &mut Table,
        reservation: &mut RoomReservation<'_>,
    ) -> Result<RawDecision, Lack> {
        let charge = self.charge.without_hold().with_cost(units);
        let charge = charge.with_charged_at(Timestamp::from_micros(charged_at));
        let context: ChargeContext<'_> = ChargeContext { charge: &charge, action, ..*self };
        context.apply(table, reservation)
    }

    fn apply_count(
        self,
        table: &mut Table,
        reservation: &mut RoomReservation<'_>,
        starts_block: bool,
    ) -> Result<RawDecision, Lack> {
        if self.charge.quota().has_blocks() {
            self.apply_with_block(table, reservation, starts_block)
        } else {
            self.apply(table, reservation)
        }
    }

    /// Returns the state of the count.
    fn unspent(&self, table: &mut Table, reservation: &mut RoomReservation<'_>) -> RawDecision {
        let read = self.apply_action(Action::Peek, 0, 0, table, reservation);
        let read = read.unwrap_or(RawDecision::untouched(self.charge.quota().burst()));
        RawDecision { allowed: true, retry_after: 0, delay: 0, ..read }
    }

    fn refund(
        &self,
        units: u64,
        refund_at: u64,
        table: &mut Table,
        reservation: &mut RoomReservation<'_>,
    ) -> RawDecision {
        let refunded = self.apply_action(Action::Refund, units, refund_at, table, reservation);
        refunded.unwrap_or_else(|_| self.unspent(table, reservation))
    }

    /// Returns what is known of the id of a reservation.
    fn known(&self) -> Known {
        let (Some(hold), now) = (self.charge.hold(), self.now) else { return Known::Nothing };
        let found = self.store.holds.of_key(self.fingerprint).get(self.fingerprint, self.id(hold));
        let counts =
            |record: &Record| (record.state() == RecordState::InFlight) == self.is_concurrency();
        let Some(record) = found.filter(|record| record.is_known(now) && counts(record)) else {
            return Known::Nothing;
        };
        // Of units that stay charged, the id is known for longer than the hold.
        let is_alive = match record.state() {
            RecordState::Open | RecordState::OpenBeforeReset => true,
            RecordState::Settled | RecordState::SettledBeforeReset => {
                record.end_or_used > 0 || record.units == 0
            }
            _ => record.is_held(now),
        };
        match is_alive {
            false => Known::Nothing,
            true if record.units != self.charge.cost() => Known::Another,
            true => Known::Same {
                remaining: record.remaining,
                refund_at: record.refund_at,
                expires_after: record.end().map_or(0, |end| {
                    end.saturating_sub(now).min(self.charge.quota().holds().max_ttl_micros())
                }),
            },
        }
    }

    /// Returns the time until this key may have another hold that releases its units at the end.
    pub(super) fn rest(&self) -> u64 {
        let Self { charge, now, fingerprint: key, .. } = *self;
        let is_reserved = charge.hold().is_some_and(|hold| !hold.is_settled());
        if !is_reserved || !charge.quota().releases_holds() || self.is_concurrency() {
            return 0;
        }
        let held = self.store.holds.of_key(key).held(key);
        if held.count < MAX_HOLDS { 0 } else { held.first.saturating_sub(now).max(1) }
    }

    /// Returns whether the units of a charge can be spent, and whether it repeats an earlier one,
    /// after the units of holds that have ended have returned. The error is that of an id that is in
    /// use with another cost.
    pub(super) fn fit_with_hold(
        &self,
        table: &mut Table,
        reservation: &mut RoomReservation<'_>,
    ) -> Result<(Fit, bool), StoreError> {
        self.release_ended(table, reservation);
        let fit = match self.known() {
            Known::Another if self.action.is_all_or_nothing() => return Err(self.conflict()),
            Known::Same { .. } => return Ok((Fit { fits: true, log_growth: 0 }, true)),
            _ if self.is_concurrency() => Fit { fits: self.in_flight(0).allowed, log_growth: 0 },
            _ => self.fits(table),
        };
        Ok((fit, false))
    }

    /// Forgets which units may return, because the count is deleted.
    fn forget_releases(&self) {
        let Self { store, fingerprint: key, .. } = *self;
        let mut holds = store.holds.of_key(key);
        holds.retain(
            HoldMap::places(key),
            &store.capacity,
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

    /// Decides a charge that has a hold, or whose holds release units. Returns its state, too.
    pub(super) fn apply_with_hold(
        self,
        table: &mut Table,
        reservation: &mut RoomReservation<'_>,
        starts_block: bool,
    ) -> Result<(RawDecision, Option<HoldState>), Lack> {
        let reads_hold =
            !matches!(self.action, Action::Reset | Action::ChargeUpTo | Action::Report);
        let Some(hold) = self.charge.hold().filter(|_| reads_hold) else {
            if self.is_concurrency() {
                return Ok((self.apply_in_flight(reservation), None));
            }
            if self.action == Action::Reset {
                self.forget_releases();
            }
            let decision = self.apply_count(table, reservation, starts_block)?;
            return Ok((self.with_short_wait(decision), None));
        };
        match self.action {
            Action::Acquire | Action::Peek => {
                let (decision, state) = self.reserve(hold, table, reservation, starts_block)?;
                Ok((self.with_short_wait(decision), state))
            }
            Action::Commit | Action::Release | Action::Refund => {
                let (decision, status) = self.settle(hold, table, reservation)?;
                Ok((decision, Some(HoldState::of_micros(status, 0))))
            }
            Action::Renew | Action::Reset | Action::ChargeUpTo | Action::Report => {
                Ok(self.renew(hold, table, reservation))
            }
        }
    }

    /// Shortens the wait of a denial if the next calls return the units of further ended holds.
    fn with_short_wait(&self, decision: RawDecision) -> RawDecision {
        let Self { store, now, fingerprint: key, .. } = *self;
        let releases = self.charge.quota().releases_holds() && !self.is_concurrency();
        if decision.allowed || !releases || !self.action.is_all_or_nothing() {
            return decision;
        }
        let has_ended = store.holds.of_key(key).held(key).first <= now;
        let retry_after = if has_ended { RELEASE_WAIT } else { decision.retry_after };
        RawDecision { retry_after, ..decision }
    }

    fn reserve(
        self,
        hold: &Hold,
        table: &mut Table,
        reservation: &mut RoomReservation<'_>,
        starts_block: bool,
    ) -> Result<(RawDecision, Option<HoldState>), Lack> {
        let Self { store, now, fingerprint: key, charge, all_fit, action, .. } = self;
        let (id, quota) = (self.id(hold), charge.quota());
        if let Known::Same { remaining, refund_at, expires_after } = self.known() {
            let unspent = if self.is_concurrency() {
                self.in_flight(0)
            } else {
                self.unspent(table, reservation)
            };
            let is_queue = quota.algorithm() == Algorithm::LeakyBucket;
            let delay = if is_queue { refund_at.saturating_sub(now) } else { 0 };
            let remaining = if self.is_concurrency() { unspent.remaining } else { remaining };
            let decision =
                RawDecision { allowed: true, remaining, retry_after: 0, delay, ..unspent };
            let state = HoldState::of_micros(HoldStatus::Replayed, expires_after);
            return Ok((decision, Some(state)));
        }
        let (rest, terms) = (self.rest(), quota.holds());
        if rest > 0 {
            let unspent = self.unspent(table, reservation);
            let reset_after = unspent.reset_after.max(rest);
            let denied = RawDecision { allowed: false, remaining: 0, retry_after: rest, ..unspent };
            return Ok((RawDecision { reset_after, ..denied }, None));
        }
        let ttl = hold.ttl_micros(terms);
        let (decision, refund_at) = if self.is_concurrency() {
            (self.in_flight(if all_fit { now + ttl } else { 0 }), now)
        } else {
            let before = self.unspent(table, reservation);
            let is_bucket =
                matches!(quota.algorithm(), Algorithm::TokenBucket | Algorithm::LeakyBucket);
            let refund_at = if is_bucket { now + before.reset_after } else { now };
            (self.apply_count(table, reservation, starts_block)?, refund_at)
        };
        if !decision.allowed || !all_fit || action == Action::Peek {
            return Ok((decision, None));
        }
        let (state, end_or_used, kept_until, expires_after) = if hold.is_settled() {
            (RecordState::Settled, charge.cost(), now + ttl, 0)
        } else if self.is_concurrency() {
            (RecordState::InFlight, now + ttl, now + ttl, ttl)
        } else if quota.releases_holds() {
            let grace = GRACE.max(quota.drain_micros() * 2);
            (RecordState::OpenUntilRelease, now + ttl, now + ttl + grace, ttl)
        } else {
            (RecordState::Open, now + ttl, now + ttl + GRACE, ttl)
        };
        let mut record = Record {
            id,
            units: charge.cost(),
            charged_at: now,
            refund_at,
            end_or_used,
            remaining: decision.remaining,
            kept_until_and_state: 0,
        };
        record.keep(state, kept_until);
        store.holds.of_key(key).set(key, record, reservation);
        Ok((decision, Some(HoldState::of_micros(HoldStatus::Held, expires_after))))
    }

    /// Settles a hold, or returns all of its units.
    fn settle(
        &self,
        hold: &Hold,
        table: &mut Table,
        reservation: &mut RoomReservation<'_>,
    ) -> Result<(RawDecision, HoldStatus), Lack> {
        let Self { store, now, fingerprint: key, .. } = *self;
        let is_refund = self.action == Action::Refund;
        let used = if is_refund { 0 } else { self.charge.cost() };
        let id = self.id(hold);
        let found = store.holds.of_key(key).get(key, id);
        let found = found.filter(|record| record.is_known(now));
        if self.is_concurrency() {
            let status = match found {
                Some(_) => HoldStatus::Settled,
                None => HoldStatus::Unknown,
            };
            store.holds.of_key(key).remove(key, id, &store.capacity);
            return Ok((self.in_flight(0), status));
        }
        let found = found.filter(|record| record.state() != RecordState::InFlight);
        let Some(mut record) = found else {
            let decision = self.report(used, table, reservation)?;
            self.remember_report(hold, used, reservation);
            return Ok((decision, HoldStatus::Unknown));
        };
        let is_open = record.end().is_some() || record.state() == RecordState::Released;
        let kept_until = if is_open { record.end_or_used + GRACE } else { record.kept_until() };
        let (decision, state, status) = match record.state() {
            RecordState::OpenUntilRelease if record.end_or_used > now => {
                self.settle_open(used, &record, is_refund, table, reservation)?
            }
            RecordState::OpenUntilRelease
            | RecordState::Released
            | RecordState::OpenBeforeReset => {
                if record.releases() {
                    // The terms have changed since the reservation.
                    let _ = self.refund(record.units, record.refund_at, table, reservation);
                }
                let decision = self.report(used, table, reservation)?;
                (decision, RecordState::Reported, HoldStatus::Ended)
            }
            RecordState::Open => self.settle_open(used, &record, is_refund, table, reservation)?,
            RecordState::Settled if is_refund => {
                let used = record.end_or_used;
                let decision = self.refund_or_read(used, record.refund_at, table, reservation);
                (decision, RecordState::Refunded, HoldStatus::Settled)
            }
            RecordState::SettledBeforeReset if is_refund => {
                let unspent = self.unspent(table, reservation);
                (unspent, RecordState::Refunded, HoldStatus::Settled)
            }
            RecordState::Settled
            | RecordState::SettledBeforeReset
            | RecordState::Refunded
            | RecordState::InFlight => {
                return Ok((self.unspent(table, reservation), HoldStatus::Settled));
            }
            RecordState::Reported => {
                return Ok((self.unspent(table, reservation), HoldStatus::Ended));
            }
            RecordState::WasUnknown => {
                return Ok((self.unspent(table, reservation), HoldStatus::Reported));
            }
        };
        record.end_or_used = used;
        record.keep(state, kept_until);
        store.holds.of_key(key).set(key, record, reservation);
        Ok((decision, status))
    }

    /// Remembers a commit of an unknown id, so that its repetition reports nothing. It is not
    /// remembered if there is no room.
    fn remember_report(&self, hold: &Hold, used: u64, reservation: &mut RoomReservation<'_>) {
        let Self { store, now, fingerprint: key, .. } = *self;
        let room = Lack::LogEntries(RECORD_ENTRIES);
        if used == 0 || !reservation.reserve(key.policy_class(), room) {
            return;
        }
        let mut record = Record {
            id: self.id(hold),
            units: used,
            charged_at: now,
            refund_at: now,
            end_or_used: used,
            remaining: 0,
            kept_until_and_state: 0,
        };
        let max_ttl = self.charge.quota().holds().max_ttl_micros();
        record.keep(RecordState::WasUnknown, now + max_ttl + GRACE);
        store.holds.of_key(key).set(key, record, reservation);
    }

    fn settle_open(
        &self,
        used: u64,
        record: &Record,
        is_refund: bool,
        table: &mut Table,
        reservation: &mut RoomReservation<'_>,
    ) -> Result<(RawDecision, RecordState, HoldStatus), Lack> {
        let decision = if used <= record.units {
            self.refund_or_read(record.units - used, record.refund_at, table, reservation)
        } else {
            self.report(used - record.units, table, reservation)?
        };
        let state = if is_refund { RecordState::Refunded } else { RecordState::Settled };
        Ok((decision, state, HoldStatus::Settled))
    }

    fn report(
        &self,
        units: u64,
        table: &mut Table,
        reservation: &mut RoomReservation<'_>,
    ) -> Result<RawDecision, Lack> {
        if units == 0 {
            return Ok(self.unspent(table, reservation));
        }
        self.apply_action(Action::Report, units, 0, table, reservation)
    }

    fn refund_or_read(
        &self,
        units: u64,
        refund_at: u64,
        table: &mut Table,
        reservation: &mut RoomReservation<'_>,
    ) -> RawDecision {
        if units == 0 {
            return self.unspent(table, reservation);
        }
        self.refund(units, refund_at, table, reservation)
    }

    /// Extends a hold that has not ended.
    fn renew(
        &self,
        hold: &Hold,
        table: &mut Table,
        reservation: &mut RoomReservation<'_>,
    ) -> (RawDecision, Option<HoldState>) {
        let Self { store, now, fingerprint: key, .. } = *self;
        let terms = self.charge.quota().holds();
        let found = store.holds.of_key(key).get(key, self.id(hold));
        let is_of_rate = |record: &Record| record.state() != RecordState::InFlight;
        let open = found.filter(|record| record.is_held(now));
        let open = open.filter(|record| is_of_rate(record) != self.is_concurrency());
        let state = match open {
            None => HoldState::of_micros(HoldStatus::Ended, 0),
            Some(mut record) => {
                let latest = record.charged_at + terms.max_ttl_micros();
                let before = record.end_or_used;
                let extended = latest.min(now + hold.ttl_micros(terms));
                record.end_or_used = before.min(now + terms.max_ttl_micros()).max(extended);
                let kept_until = record.kept_until() + record.end_or_used - before;
                record.keep(record.state(), kept_until);
                store.holds.of_key(key).set(key, record, reservation);
                HoldState::of_micros(HoldStatus::Held, record.end_or_used - now)
            }
        };
        let decision = if self.is_concurrency() {
            self.in_flight(0)
        } else {
            self.unspent(table, reservation)
        };
        (decision, Some(state))
    }

    /// Decides on units in flight without a hold of this charge.
    fn apply_in_flight(&self, reservation: &mut RoomReservation<'_>) -> RawDecision {
        let Self { store, fingerprint: key, charge, .. } = *self;
        let mut holds = store.holds.of_key(key);
        match self.action {
            Action::Reset => {
                holds.retain(HoldMap::places(key), &store.capacity, |_| true, |_| false);
                return RawDecision::untouched(charge.quota().burst());
            }
            Action::Refund => {
                // Without an id, those that end first: it does not matter where all are equal.
                let mut left = charge.cost();
                for _ in 0..MAX_ENDED {
                    let Some(mut record) = holds.first(key).filter(|_| left > 0) else { break };
                    let taken = record.units.min(left);
                    left -= taken;
                    record.units -= taken;
                    if record.units > 0 {
                        holds.set(key, record, reservation);
                    } else {
                        holds.remove(key, record.id, &store.capacity);
                    }
                }
            }
            _ => {}
        }
        drop(holds);
        // A peek shows the state after the acquire.
        let spends = self.action == Action::Peek && self.all_fit;
        let ttl = micros(charge.quota().holds().ttl());
        self.in_flight(if spends { self.now + ttl } else { 0 })
    }

    /// Returns the decision on units in flight. `end`: that of this charge, if it is admitted and
    /// spent; otherwise 0.
    fn in_flight(&self, end: u64) -> RawDecision {
        let Self { charge, now, .. } = *self;
        let (key, limit) = (self.fingerprint, charge.quota().limit());
        let holds = self.store.holds.of_key(key);
        let PendingReleases { count, units: held, last, .. } = holds.held(key);
        let asks = matches!(self.action, Action::Acquire | Action::Peek);
        let cost = if asks { charge.cost() } else { 0 };
        let fits = held + cost <= limit && count < MAX_HOLDS || !asks;
        let freed_at = || holds.end_of(key, (held + cost).saturating_sub(limit));
        let retry_after = if fits { 0 } else { freed_at().saturating_sub(now) };
        let spent = if fits && end > 0 { cost } else { 0 };
        RawDecision {
            allowed: fits,
            remaining: if count < MAX_HOLDS { limit.saturating_sub(held + spent) } else { 0 },
            retry_after,
            reset_after: last.max(if fits { end } else { 0 }).saturating_sub(now),
            delay: 0,
        }
    }

    /// Returns the error of a reservation whose id was used with another cost.
    fn conflict(&self) -> StoreError {
        let id = self.charge.hold().map(|hold| hold.id().to_owned());
        ChargeError::HoldConflict(id.unwrap_or_default()).into()
    }
}

#[cfg(feature = "resilience")]
impl MemoryStore {
    fn record(&self, charge: &Charge<'_>, hold: &Hold) -> Option<Record> {
        let key = self.fingerprint(charge);
        let id = self.secret.fingerprint(hold.id(), &self.secret.policy_sum(ID_DOMAIN));
        let _table = self.shard(key).lock();
        let now = self.clock.now();
        self.holds.of_key(key).get(key, id).filter(|record| record.is_known(now))
    }

    /// Returns whether an acquire has the id of one that it has made.
    pub(crate) fn repeats_hold(&self, charge: &Charge<'_>) -> bool {
        let fingerprint = self.fingerprint(charge);
        let _table = self.shard(fingerprint).lock();
        let (action, now) = (Action::Acquire, self.clock.now());
        let context =
            ChargeContext { store: self, action, charge, fingerprint, now, all_fit: true };
        !matches!(context.known(), Known::Nothing)
    }

    /// Returns whether it remembers this hold.
    pub(crate) fn has_hold(&self, charge: &Charge<'_>, hold: &Hold) -> bool {
        self.record(charge, hold).is_some()
    }

    /// Returns the units that this action settles: those of an open hold, or for a refund those that
    /// were used.
    pub(crate) fn units_to_settle(
        &self,
        action: Action,
        charge: &Charge<'_>,
        hold: &Hold,
    ) -> Option<u64> {
        let record = self.record(charge, hold)?;
        match (action, record.state()) {
            (
                Action::Commit | Action::Release | Action::Refund,
                RecordState::Open | RecordState::OpenUntilRelease | RecordState::InFlight,
            ) => Some(record.units),
            (Action::Refund, RecordState::Settled) => Some(record.end_or_used),
            _ => None,
        }
    }
}
