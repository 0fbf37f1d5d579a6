//! [`HoldMap`]: the records of holds, by key and id.

use std::collections::BTreeMap;
use std::ops::{Bound, RangeBounds, RangeInclusive};

use spin::mutex::{SpinMutex, SpinMutexGuard};

use crate::hold::{GRACE, MAX_ENDED};
use crate::key::Fingerprint;
use crate::store::memory::capacity::{Capacity, RoomReservation};
use crate::store::memory::{LOG_ENTRY_BYTES, SHARDS};

/// Maximum number of records of a chunk.
const MAX_CHUNK: usize = 128;
/// Room that a record takes, in entries of logs.
pub(in crate::store::memory) const RECORD_ENTRIES: usize = size_of::<Record>() / LOG_ENTRY_BYTES;

/// The holds of a store, in the same shards as the counts. They are apart from them, because
/// decisions without holds do not need them.
///
/// The lock of a shard's holds is only taken while that of its counts is held, so that it is always
/// free.
#[derive(Debug)]
pub(in crate::store::memory) struct Holds(Box<[SpinMutex<HoldMap>]>);

/// The holds of one shard.
#[derive(Debug, Default)]
pub(in crate::store::memory) struct HoldMap {
    /// Records of each key, in chunks by the lowest id that belongs to them, so that no decision
    /// visits all holds of a key.
    chunks: BTreeMap<Place, Chunk>,
    /// The chunk that was swept last.
    swept: Option<Place>,
}

/// Fingerprints of a key and of an id.
type Place = (Fingerprint, Fingerprint);

#[derive(Debug, Default)]
pub(super) struct Chunk {
    /// Sorted by id.
    records: Vec<Record>,
    held: PendingReleases,
}

/// Holds whose units return at the end, and have not yet.
#[derive(Debug, Clone, Copy)]
pub(super) struct PendingReleases {
    pub(super) count: usize,
    pub(super) units: u64,
    /// The first end, and the last one.
    pub(super) first: u64,
    pub(super) last: u64,
}

/// A remembered acquire. Times are microseconds.
#[derive(Debug, Clone, Copy)]
pub(super) struct Record {
    /// Hash of the id.
    pub(super) id: Fingerprint,
    pub(super) units: u64,
    pub(super) charged_at: u64,
    /// Time to which its units return: for a bucket, when those before it have drained.
    pub(super) refund_at: u64,
    /// End of an open hold. Otherwise the units that were used.
    pub(super) end_or_used: u64,
    /// Units that remained after the acquire.
    pub(super) remaining: u64,
    /// Time until which it is remembered, times 16, plus the number of the state.
    kept_until_and_state: u64,
}

const _: () = assert!(size_of::<Record>() == 64, "at most 64 bytes per hold");

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RecordState {
    /// Not settled. At the end the units stay charged.
    Open,
    /// Not settled. At the end the units return.
    OpenUntilRelease,
    /// The units have returned: at the end, or before it because the count was reset.
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
    /// Returns the holds whose units return at the end.
    fn releasing(&self) -> impl Iterator<Item = &Record> {
        self.records.iter().filter(|record| record.releases())
    }

    /// Computes the sums, after a change of the records.
    fn sum_up(&mut self) {
        let held = self.releasing().map(|record| {
            let Record { units, end_or_used: end, .. } = *record;
            PendingReleases { count: 1, units, first: end, last: end }
        });
        self.held = held.fold(PendingReleases::default(), PendingReleases::add);
    }
}

impl Record {
    /// Creates the record of units that are charged now.
    pub(super) fn new(id: Fingerprint, units: u64, now: u64) -> Self {
        Self {
            id,
            units,
            charged_at: now,
            refund_at: now,
            end_or_used: units,
            remaining: 0,
            kept_until_and_state: 0,
        }
    }

    pub(super) fn state(&self) -> RecordState {
        RecordState::ALL[(self.kept_until_and_state & 15) as usize]
    }

    pub(super) fn kept_until(&self) -> u64 {
        self.kept_until_and_state >> 4
    }

    pub(super) fn keep(&mut self, state: RecordState, until: u64) {
        self.kept_until_and_state = until << 4 | state as u64;
    }

    /// Returns the end of a hold that is not settled.
    pub(super) fn end(&self) -> Option<u64> {
        let is_open = matches!(
            self.state(),
            RecordState::Open
                | RecordState::OpenUntilRelease
                | RecordState::Released
                | RecordState::InFlight
                | RecordState::OpenBeforeReset
        );
        is_open.then_some(self.end_or_used)
    }

    /// Returns whether its id is known. The units of an ended hold may return later than that.
    pub(super) fn is_known(&self, now: u64) -> bool {
        let until = match self.state() {
            RecordState::OpenUntilRelease | RecordState::Released | RecordState::InFlight => {
                self.end_or_used + GRACE
            }
            _ => self.kept_until(),
        };
        until > now
    }

    /// Returns whether its units return at the end, and have not yet.
    pub(super) fn releases(&self) -> bool {
        matches!(self.state(), RecordState::OpenUntilRelease | RecordState::InFlight)
    }

    pub(super) fn is_held(&self, now: u64) -> bool {
        let has_units =
            !matches!(self.state(), RecordState::Released | RecordState::OpenBeforeReset);
        has_units && self.end().is_some_and(|end| end > now)
    }
}

impl Holds {
    pub(in crate::store::memory) fn new() -> Self {
        Self(std::iter::repeat_with(SpinMutex::default).take(SHARDS).collect())
    }

    /// Returns the holds of a shard. The caller holds the lock of the shard.
    pub(in crate::store::memory) fn of_shard(&self, index: usize) -> SpinMutexGuard<'_, HoldMap> {
        self.0[index].lock()
    }

    pub(super) fn of_key(&self, fingerprint: Fingerprint) -> SpinMutexGuard<'_, HoldMap> {
        self.of_shard(fingerprint.shard_index(SHARDS))
    }
}

impl HoldMap {
    /// Returns the places of all records of a key.
    pub(super) fn places(key: Fingerprint) -> RangeInclusive<Place> {
        (key, Fingerprint::MIN)..=(key, Fingerprint::NONE)
    }

    /// Returns the chunk to which an id belongs.
    fn chunk(&self, key: Fingerprint, id: Fingerprint) -> Option<(&Place, &Chunk)> {
        self.chunks.range((key, Fingerprint::MIN)..=(key, id)).next_back()
    }

    fn chunks(&self, key: Fingerprint) -> impl Iterator<Item = &Chunk> {
        self.chunks.range(Self::places(key)).map(|(_, chunk)| chunk)
    }

    pub(super) fn get(&self, key: Fingerprint, id: Fingerprint) -> Option<Record> {
        let (_, chunk) = self.chunk(key, id)?;
        let at = chunk.records.binary_search_by_key(&id, |record| record.id).ok()?;
        Some(chunk.records[at])
    }

    /// Returns the sums of the holds of a key whose units return at the end.
    pub(super) fn held(&self, key: Fingerprint) -> PendingReleases {
        let held = self.chunks(key).map(|chunk| chunk.held);
        held.fold(PendingReleases::default(), PendingReleases::add)
    }

    /// Returns the hold that ends first.
    pub(super) fn first(&self, key: Fingerprint) -> Option<Record> {
        let chunk = self.chunks(key).min_by_key(|chunk| chunk.held.first)?;
        chunk.releasing().min_by_key(|record| record.end_or_used).copied()
    }

    /// Returns the end of the hold after which this many units are free: of the last one, if it is
    /// not among the first.
    pub(super) fn end_of(&self, key: Fingerprint, units: u64) -> u64 {
        let held = self.held(key);
        if units <= 1 {
            return held.first;
        }
        let records = self.chunks(key).flat_map(Chunk::releasing);
        let mut ends: Vec<_> = records.map(|record| (record.end_or_used, record.units)).collect();
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
    pub(super) fn set(
        &mut self,
        key: Fingerprint,
        record: Record,
        reservation: &mut RoomReservation<'_>,
    ) {
        let place = self.chunk(key, record.id).map_or((key, Fingerprint::MIN), |(place, _)| *place);
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
            let upper_records = records.split_off(MAX_CHUNK / 2);
            let mut upper = Chunk { records: upper_records, held: PendingReleases::default() };
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
    pub(super) fn retain(
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

    pub(super) fn remove(&mut self, key: Fingerprint, id: Fingerprint, capacity: &Capacity) {
        if let Some((&place, _)) = self.chunk(key, id) {
            self.retain(place..=place, capacity, |_| true, |record| record.id != id);
        }
    }

    /// Visits the holds of a key that may have ended. Removes those that `is_kept` does not name.
    /// None ends later than `latest`, after the clock stepped back.
    pub(super) fn retain_ended(
        &mut self,
        key: Fingerprint,
        now: u64,
        latest: u64,
        capacity: &Capacity,
        mut is_kept: impl FnMut(&Record) -> bool,
    ) {
        let concerns = |chunk: &Chunk| chunk.held.first <= now || chunk.held.last > latest;
        self.retain(Self::places(key), capacity, concerns, |record| {
            if record.releases() {
                record.end_or_used = record.end_or_used.min(latest);
            }
            is_kept(record)
        });
    }

    /// Removes the records of the next chunk that no longer matter. Returns whether there were any.
    pub(in crate::store::memory) fn sweep(&mut self, now: u64, capacity: &Capacity) -> bool {
        let after = self.swept.map_or(Bound::Unbounded, Bound::Excluded);
        self.swept = self.chunks.range((after, Bound::Unbounded)).next().map(|(place, _)| *place);
        self.swept.is_some_and(|place| {
            self.retain(place..=place, capacity, |_| true, |record| record.kept_until() > now)
        })
    }
}
