//! [`Capacity`]: the room of a store for keys and for entries of logs, and the part of it that each
//! policy may take.
//!
//! A policy may take up to [`MAX_SHARE`] times the room that it leaves free, as the queues of a
//! switch share its buffer (dynamic thresholds). So one policy alone gets 16/17 of the store, the
//! next one that much of the rest, and a flood on one never takes the last room of all others.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use super::MemoryStore;
use crate::algorithm::LogGrowth;
use crate::key::PolicyClass;

/// Multiple of the free room that a policy may take.
const MAX_SHARE: usize = 16;

/// The room of a store. It is on cache lines apart from the fields that every decision reads.
#[derive(Debug)]
#[repr(align(128))]
pub(super) struct Capacity {
    pub(super) keys: Room,
    pub(super) log_entries: Room,
    /// Shard at which the next eviction starts.
    pub(super) eviction_cursor: AtomicUsize,
    /// Number of keys that were evicted although they still counted.
    pub(super) evicted: AtomicU64,
}

/// Room of one kind, with the amount that is taken by all policies and by each class of them.
#[derive(Debug)]
pub(super) struct Room {
    max: usize,
    taken: AtomicUsize,
    by_class: Box<[AtomicUsize; PolicyClass::COUNT]>,
}

/// The room that a removed key has taken. It must be [released](Capacity::release), or
/// [reused](RoomReservation::reuse) for another key.
#[derive(Debug)]
#[must_use]
pub(super) struct Removed {
    pub(super) class: PolicyClass,
    pub(super) log_entries: usize,
}

/// The room that a charge lacks: the [reservation](RoomReservation) must grow to this amount.
#[derive(Debug, Clone, Copy)]
pub(super) enum Lack {
    Keys(usize),
    LogEntries(usize),
}

impl Capacity {
    pub(super) fn new(max_keys: usize, max_log_entries: usize) -> Self {
        Self {
            keys: Room::new(max_keys),
            log_entries: Room::new(max_log_entries),
            eviction_cursor: AtomicUsize::new(0),
            evicted: AtomicU64::new(0),
        }
    }

    /// Releases the room of a removed key.
    #[expect(clippy::needless_pass_by_value, reason = "the same room must not be used twice")]
    pub(super) fn release(&self, removed: Removed) {
        self.keys.release(removed.class, 1);
        self.log_entries.release(removed.class, removed.log_entries);
    }
}

impl Room {
    fn new(max: usize) -> Self {
        let by_class = Box::new([const { AtomicUsize::new(0) }; PolicyClass::COUNT]);
        Self { max, taken: AtomicUsize::new(0), by_class }
    }

    pub(super) fn max(&self) -> usize {
        self.max
    }

    /// Returns the room that is taken, including reservations.
    pub(super) fn taken(&self) -> usize {
        self.taken.load(Ordering::Relaxed)
    }

    /// Returns the room that the policies of a class have taken.
    pub(super) fn taken_by(&self, class: PolicyClass) -> usize {
        self.by_class[class.0].load(Ordering::Relaxed)
    }

    #[cfg(test)]
    pub(super) fn taken_by_all(&self) -> usize {
        self.by_class.iter().map(|taken| taken.load(Ordering::Relaxed)).sum()
    }

    /// Returns the room that a class may take.
    fn available_to(&self, class: PolicyClass) -> usize {
        let free = self.max.saturating_sub(self.taken());
        free.min(free.saturating_mul(MAX_SHARE).saturating_sub(self.taken_by(class)))
    }

    /// Takes room, which is counted for its class only when it is [used](Self::count). Returns
    /// whether there is that much, and this class may take it.
    fn try_take(&self, class: PolicyClass, amount: usize) -> bool {
        let take = |taken: usize| {
            let free = self.max.checked_sub(taken)?;
            let by_class = self.taken_by(class).saturating_add(amount);
            let may_take = amount <= free && by_class <= free.saturating_mul(MAX_SHARE);
            may_take.then(|| taken + amount)
        };
        self.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok()
    }

    fn restore(&self, amount: usize) {
        self.taken.fetch_sub(amount, Ordering::Relaxed);
    }

    fn count(&self, class: PolicyClass, amount: usize) {
        self.by_class[class.0].fetch_add(amount, Ordering::Relaxed);
    }

    fn discount(&self, class: PolicyClass, amount: usize) {
        self.by_class[class.0].fetch_sub(amount, Ordering::Relaxed);
    }

    pub(super) fn release(&self, class: PolicyClass, amount: usize) {
        if amount > 0 {
            self.discount(class, amount);
            self.restore(amount);
        }
    }
}

/// Room for a charge, taken before anything is written. Unused room is released on drop.
pub(super) struct RoomReservation<'a> {
    capacity: &'a Capacity,
    keys: usize,
    log_entries: usize,
}

impl<'a> RoomReservation<'a> {
    pub(super) fn new(store: &'a MemoryStore) -> Self {
        Self { capacity: &store.capacity, keys: 0, log_entries: 0 }
    }

    /// Returns the room of a kind, the reserved part of it, and the part that is wanted.
    fn of_kind(&mut self, lack: Lack) -> (&'a Room, &mut usize, usize) {
        match lack {
            Lack::Keys(keys) => (&self.capacity.keys, &mut self.keys, keys),
            Lack::LogEntries(entries) => {
                (&self.capacity.log_entries, &mut self.log_entries, entries)
            }
        }
    }

    /// Returns the room that evictions must make, so that the reservation can grow.
    pub(super) fn missing(&mut self, class: PolicyClass, lack: Lack) -> usize {
        let (room, reserved, wanted) = self.of_kind(lack);
        wanted.saturating_sub(*reserved).saturating_sub(room.available_to(class))
    }

    /// Grows the reservation by what it lacks. Returns false if there is no room.
    pub(super) fn reserve(&mut self, class: PolicyClass, lack: Lack) -> bool {
        let (room, reserved, wanted) = self.of_kind(lack);
        let is_reserved = *reserved >= wanted || room.try_take(class, wanted - *reserved);
        if is_reserved {
            *reserved = wanted.max(*reserved);
        }
        is_reserved
    }

    /// Reserves entries for a log that has to grow. Returns their number.
    pub(super) fn reserve_growth(
        &mut self,
        class: PolicyClass,
        growth: LogGrowth,
    ) -> Result<usize, Lack> {
        // Other logs of the charges share what is reserved already.
        let is_reserved = self.log_entries >= growth.least;
        if !is_reserved && self.reserve(class, Lack::LogEntries(growth.best)) {
            return Ok(growth.best);
        }
        let least = Lack::LogEntries(growth.least);
        if self.reserve(class, least) { Ok(growth.least) } else { Err(least) }
    }

    /// Adds the room of an evicted key to the reservation, as far as it lacks that kind. It does
    /// not become free in between: another policy could take it.
    #[expect(clippy::needless_pass_by_value, reason = "the same room must not be used twice")]
    pub(super) fn reuse(&mut self, evicted: Removed, lack: Lack) {
        let Removed { class, log_entries } = evicted;
        let Capacity { keys: key_room, log_entries: log_room, .. } = self.capacity;
        match lack {
            Lack::Keys(_) => {
                key_room.discount(class, 1);
                self.keys += 1;
                log_room.release(class, log_entries);
            }
            Lack::LogEntries(_) => {
                key_room.release(class, 1);
                log_room.discount(class, log_entries);
                self.log_entries += log_entries;
            }
        }
    }

    /// Uses the room for one key.
    pub(super) fn use_key(&mut self, class: PolicyClass) {
        self.keys -= 1;
        self.capacity.keys.count(class, 1);
    }

    /// Counts a log whose memory had room for `before` entries, and now has room for `after`.
    pub(super) fn resize_log(&mut self, class: PolicyClass, before: usize, after: usize) {
        let room = &self.capacity.log_entries;
        if after > before {
            self.log_entries = self.log_entries.saturating_sub(after - before);
            room.count(class, after - before);
        } else {
            room.release(class, before - after);
        }
    }
}

impl Drop for RoomReservation<'_> {
    fn drop(&mut self) {
        if self.keys > 0 {
            self.capacity.keys.restore(self.keys);
        }
        if self.log_entries > 0 {
            self.capacity.log_entries.restore(self.log_entries);
        }
    }
}
