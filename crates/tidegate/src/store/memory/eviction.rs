//! Eviction: room for a charge in a full store.

use std::cmp::Reverse;
use std::sync::atomic::Ordering;

use super::capacity::{Lack, RoomReservation};
use super::state::{CounterKind, PackedState, Usage};
use super::{MemoryStore, SHARDS};
use crate::key::Fingerprint;
use crate::store::StoreError;

/// Approximate number of entries that an eviction looks at, in samples of several shards. Beyond a
/// store of this size, a charge can be rejected although there is an expired key; the next call
/// continues where this one has stopped.
const MAX_EVICTION_SCAN: usize = 512;
/// Number of entries of which the one with the least rank is evicted. In a small store they are
/// those of several shards.
const EVICTION_SAMPLE: usize = 32;

impl MemoryStore {
    /// Grows the reservation by what the charge of this key lacks: by the room of expired keys, or
    /// else by that of evicted ones. The caller must not hold any shard lock.
    #[cold]
    pub(super) fn make_room(
        &self,
        fingerprint: Fingerprint,
        lack: Lack,
        now: u64,
        reservation: &mut RoomReservation<'_>,
    ) -> Result<(), StoreError> {
        let full = StoreError::Full { cap: self.max_keys() };
        let can_fit = match lack {
            Lack::Keys(keys) => keys <= self.capacity.keys.max(),
            Lack::LogEntries(entries) => entries <= self.capacity.log_entries.max(),
        };
        if !can_fit {
            return Err(full);
        }
        let class = fingerprint.policy_class();
        let (mut scanned, mut shards) = (0, 0);
        let (mut entries, mut least) = (0, None);
        // Keys that are evicted once their room is enough: a charge without room forgets none.
        let (mut victims, mut room) = (Vec::new(), 0);
        while scanned < MAX_EVICTION_SCAN {
            let index = self.capacity.eviction_cursor.fetch_add(1, Ordering::Relaxed) % SHARDS;
            let rank = |other: Fingerprint, state| {
                let is_new = !victims.contains(&other);
                self.eviction_rank(fingerprint, lack, other, state).filter(|_| is_new)
            };
            let mut table = self.shards[index].lock();
            let sample = table.sample(now, &self.capacity, rank);
            let has_ended = self.blocks.of_shard(index).sweep(now, true, &self.capacity)
                | self.holds.of_shard(index).sweep(now, &self.capacity);
            drop(table);
            // An empty shard counts too, so that the loop ends.
            scanned += sample.entries.max(1);
            shards += 1;
            if (sample.has_expired || has_ended) && reservation.reserve(class, lack) {
                return Ok(());
            }
            entries += sample.entries;
            least = least.into_iter().chain(sample.least).min();
            let is_enough = entries >= EVICTION_SAMPLE || shards % SHARDS == 0;
            if !is_enough && scanned < MAX_EVICTION_SCAN {
                continue;
            }
            entries = 0;
            let Some((_, victim)) = least.take() else { continue };
            room += self.room_of(victim, lack);
            victims.push(victim);
            let missing = reservation.missing(class, lack);
            if room < missing {
                continue;
            }
            if missing > 0 {
                for victim in victims.drain(..) {
                    self.evict(fingerprint, victim, lack, reservation);
                }
                room = 0;
            }
            if reservation.reserve(class, lack) {
                return Ok(());
            }
        }
        Err(full)
    }

    /// Returns the room that the eviction of a key would make.
    fn room_of(&self, victim: Fingerprint, lack: Lack) -> usize {
        let table = self.shard(victim).lock();
        let Ok(at) = table.find(victim) else { return 0 };
        match lack {
            Lack::Keys(_) => 1,
            Lack::LogEntries(_) => table.logs.capacity_of(table.state(at)),
        }
    }

    /// Evicts a key for the reservation of another, unless it may not be evicted any more.
    fn evict(
        &self,
        fingerprint: Fingerprint,
        victim: Fingerprint,
        lack: Lack,
        reservation: &mut RoomReservation<'_>,
    ) {
        let mut table = self.shard(victim).lock();
        let Ok(at) = table.find(victim) else { return };
        if self.eviction_rank(fingerprint, lack, victim, table.state(at)).is_some() {
            reservation.reuse(table.remove(at), lack);
            self.capacity.evicted.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns the rank of another key that may be evicted for this one, the least first: of the
    /// policy that has taken the most room, then of the least usage, then of the oldest last write.
    /// A policy that has taken less loses none, so a flood on one policy does not empty another. The
    /// size of a log does not matter, and neither does the time until a key expires.
    fn eviction_rank(
        &self,
        fingerprint: Fingerprint,
        lack: Lack,
        other: Fingerprint,
        state: PackedState,
    ) -> Option<(Reverse<usize>, Usage, u64)> {
        let frees_room = match lack {
            Lack::Keys(_) => true,
            Lack::LogEntries(_) => state.is_of(CounterKind::Log) && other != fingerprint,
        };
        if !frees_room || state.usage() == Usage::EXHAUSTED {
            return None;
        }
        let room = match lack {
            Lack::Keys(_) => &self.capacity.keys,
            Lack::LogEntries(_) => &self.capacity.log_entries,
        };
        let (class, other_class) = (fingerprint.policy_class(), other.policy_class());
        let taken_by_other = room.taken_by(other_class);
        let may_evict = class == other_class || taken_by_other > room.taken_by(class);
        may_evict.then(|| (Reverse(taken_by_other), state.usage(), state.time()))
    }
}
