//! [`Table`]: the keys of one shard, 40 bytes each, sorted by fingerprint.
//!
//! Open addressing with linear probing, where each run is sorted: the home slot of a fingerprint is
//! proportional to its value, and the key is there or a few slots later. A lookup, hit or miss,
//! reads one place in memory sequentially, without a separate array of tags. Because home slots
//! ascend with fingerprints, a table is rebuilt in one sequential pass, which is cheap enough to
//! grow by an eighth at a time: at least 72 % of the slots are in use.

use std::ops::RangeInclusive;

use super::capacity::{Capacity, Removed};
use super::logs::Logs;
use super::state::{CounterKind, PackedState};
use crate::key::Fingerprint;

/// Slots per sweep. Sweeping a run of slots now and then costs the cache less than sweeping a slot
/// per decision.
const SLOTS_PER_SWEEP: usize = 64;
/// Price of a sweep, less one; each decision pays one, so a decision pays for a quarter of a slot.
const SWEEP_PRICE: i32 = 255;
/// Additional payment of a new key. It pays for four slots, so that the whole table is swept before
/// it has doubled.
const NEW_KEY_PAYMENT: i32 = 15;

/// Nearly every key is in one of this many slots from its home on. The branch is unpredictable, so
/// count smaller fingerprints branchlessly; with 10,000 keys that makes a decision 8 % faster.
const BRANCHLESS_PROBES: usize = 3;
/// Table sizes (in home slots) that are probed branchlessly. In smaller tables the branch is
/// predictable, and in larger ones speculation hides the latency of main memory.
const BRANCHLESS_RANGE: RangeInclusive<u32> = 8..=512;

/// Number of slots that an eviction looks at.
const SAMPLE_SLOTS: usize = 64;

#[derive(Debug)]
pub(super) struct Table {
    /// The home slots, and a tail for the overflow of the last runs. The very last slot is always
    /// empty, so that every search terminates.
    slots: Box<[Slot]>,
    homes: u32,
    len: u32,
    /// Slot at which the next sweep or eviction starts.
    sweep_cursor: u32,
    /// Part of the [price](SWEEP_PRICE) of the next sweep that decisions have not paid yet.
    sweep_debt: i32,
    pub(super) logs: Logs,
}

#[derive(Debug, Clone, Copy)]
struct Slot {
    fingerprint: Fingerprint,
    state: PackedState,
}

const _: () = assert!(size_of::<Slot>() == 40, "at most 56 bytes per key, including empty slots");
const _: () =
    assert!(size_of::<Table>() <= 40, "a shard is one cache line: its lock and its table");

impl Slot {
    const EMPTY: Self = Self { fingerprint: Fingerprint::NONE, state: PackedState::EMPTY };

    fn is_empty(&self) -> bool {
        self.fingerprint == Fingerprint::NONE
    }
}

/// The entries of some slots.
#[derive(Debug)]
pub(super) struct EntrySample<R> {
    /// Number of entries.
    pub(super) entries: usize,
    /// The entry with the least rank.
    pub(super) least: Option<(R, Fingerprint)>,
    /// Whether there were expired entries, which were removed.
    pub(super) has_expired: bool,
}

impl Default for Table {
    fn default() -> Self {
        Self {
            slots: Box::default(),
            homes: 0,
            len: 0,
            sweep_cursor: 0,
            sweep_debt: SWEEP_PRICE,
            logs: Logs::default(),
        }
    }
}

impl Table {
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.len as usize
    }

    /// Returns the slot of this key, or else the slot to insert it at.
    #[inline]
    pub(super) fn find(&self, fingerprint: Fingerprint) -> Result<usize, usize> {
        let mut at = fingerprint.home_slot(self.homes);
        while let Some(slot) = self.slots.get(at) {
            // The fingerprint of an empty slot is the greatest, so the last slot ends the search.
            if slot.fingerprint >= fingerprint {
                return if slot.fingerprint == fingerprint { Ok(at) } else { Err(at) };
            }
            at += 1;
        }
        Err(at)
    }

    /// Returns the state of a key that exists with this kind of counter, and the logs: a faster
    /// [`find`](Self::find) for the common case.
    #[inline]
    pub(super) fn get_mut(
        &mut self,
        fingerprint: Fingerprint,
        kind: CounterKind,
    ) -> Option<(&mut PackedState, &mut Logs)> {
        let run = self.slots.get_mut(fingerprint.home_slot(self.homes)..)?;
        let is_branchless = BRANCHLESS_RANGE.contains(&self.homes);
        let probed = if is_branchless { run.get(..BRANCHLESS_PROBES)? } else { &[] };
        let smaller =
            probed.iter().filter(|slot| slot.fingerprint.is_clearly_before(fingerprint)).count();
        let slot =
            run.get_mut(smaller..)?.iter_mut().find(|slot| slot.fingerprint >= fingerprint)?;
        let is_match = slot.fingerprint == fingerprint && slot.state.is_of(kind);
        is_match.then_some((&mut slot.state, &mut self.logs))
    }

    /// Returns the state of a key that exists, whatever its kind. It may not find a key that shares
    /// the high half of its fingerprint with another, which [`find`](Self::find) does; two keys in
    /// 2^64 do.
    #[inline]
    pub(super) fn get_state_mut(&mut self, fingerprint: Fingerprint) -> Option<&mut PackedState> {
        let home = fingerprint.home_slot(self.homes);
        if home >= self.slots.len() {
            return None;
        }
        let run = &mut self.slots[home..];
        let (mut slot, mut rest) = if BRANCHLESS_RANGE.contains(&self.homes) {
            let probed = run.first_chunk::<BRANCHLESS_PROBES>()?;
            let is_before = |slot: &Slot| slot.fingerprint.is_clearly_before(fingerprint);
            let smaller = probed.iter().filter(|slot| is_before(slot)).count();
            run.get_mut(smaller..)?.split_first_mut()?
        } else {
            run.split_first_mut()?
        };
        while slot.fingerprint.is_clearly_before(fingerprint) {
            (slot, rest) = rest.split_first_mut()?;
        }
        (slot.fingerprint == fingerprint).then_some(&mut slot.state)
    }

    #[inline]
    pub(super) fn state(&self, at: usize) -> PackedState {
        self.slots[at].state
    }

    #[inline]
    pub(super) fn set(&mut self, at: usize, state: PackedState) {
        self.slots[at].state = state;
    }

    /// Inserts a new key at the slot that [`find`](Self::find) returned for it.
    pub(super) fn insert(&mut self, at: usize, fingerprint: Fingerprint, state: PackedState) {
        let max_len = self.homes - self.homes / 6;
        let end = (self.len < max_len).then(|| self.end_of_run(at)).flatten();
        let Some(end) = end else {
            self.rebuild(self.homes + self.homes / 8 + 4);
            let (Ok(at) | Err(at)) = self.find(fingerprint);
            return self.insert(at, fingerprint, state);
        };
        self.slots.copy_within(at..end, at + 1);
        self.slots[at] = Slot { fingerprint, state };
        self.len += 1;
        self.sweep_debt -= NEW_KEY_PAYMENT;
    }

    /// Returns the first empty slot from `at` on, unless it is the last slot of the table.
    fn end_of_run(&self, at: usize) -> Option<usize> {
        let end = at + self.slots[at..].iter().position(Slot::is_empty)?;
        (end + 1 < self.slots.len()).then_some(end)
    }

    pub(super) fn remove(&mut self, at: usize) -> Removed {
        let Slot { fingerprint, state } = self.slots[at];
        let class = fingerprint.policy_class();
        let removed = Removed { class, log_entries: self.logs.remove(state) };
        // Shift the displaced keys that follow one slot towards their home.
        let mut end = at + 1;
        while !self.slots[end].is_empty() && self.slots[end].fingerprint.home_slot(self.homes) < end
        {
            end += 1;
        }
        self.slots.copy_within(at + 1..end, at);
        self.slots[end - 1] = Slot::EMPTY;
        self.len -= 1;
        removed
    }

    /// Sweeps some slots if enough decisions were made since the last sweep.
    #[inline]
    pub(super) fn sweep(&mut self, now: u64, capacity: &Capacity) {
        self.sweep_debt -= 1;
        if self.sweep_debt < 0 {
            self.sweep_slots(now, capacity);
        }
    }

    #[cold]
    #[inline(never)]
    fn sweep_slots(&mut self, now: u64, capacity: &Capacity) {
        self.sweep_debt = SWEEP_PRICE;
        for _ in 0..SLOTS_PER_SWEEP.min(self.slots.len()) {
            self.remove_expired(self.sweep_cursor as usize, now, capacity);
            self.sweep_cursor += 1;
            if self.sweep_cursor as usize == self.slots.len() {
                self.sweep_cursor = 0;
                self.release_memory();
            }
        }
    }

    /// Removes the entry of this slot if it has expired. A removal shifts the next key into the
    /// slot, so that one is checked, too.
    fn remove_expired(&mut self, at: usize, now: u64, capacity: &Capacity) {
        while !self.slots[at].is_empty() && self.slots[at].state.expires_at() <= now {
            capacity.release(self.remove(at));
        }
    }

    /// Releases memory that a past peak of keys needed.
    fn release_memory(&mut self) {
        if self.len < self.homes / 8 {
            self.rebuild(2 * self.len);
        }
        if self.logs.is_sparse() {
            self.compact_logs();
        }
    }

    /// Removes the expired entries among some slots, and returns the least rank of the others.
    pub(super) fn sample<R: Ord>(
        &mut self,
        now: u64,
        capacity: &Capacity,
        rank: impl Fn(Fingerprint, PackedState) -> Option<R>,
    ) -> EntrySample<R> {
        // A small table is sampled as a whole. Otherwise the cursor is that of the sweep, which
        // continues after these slots.
        let is_whole = self.slots.len() <= SAMPLE_SLOTS;
        let start = if is_whole { 0 } else { self.sweep_cursor as usize };
        let end = (start + SAMPLE_SLOTS).min(self.slots.len());
        let (mut entries, mut least, before) = (0, None, self.len);
        for at in start..end {
            self.remove_expired(at, now, capacity);
            let Slot { fingerprint, state } = self.slots[at];
            if fingerprint != Fingerprint::NONE {
                entries += 1;
                let ranked = rank(fingerprint, state).map(|rank| (rank, fingerprint));
                least = least.into_iter().chain(ranked).min();
            }
        }
        if !is_whole {
            let next = if end < self.slots.len() { end } else { 0 };
            self.sweep_cursor = u32::try_from(next).unwrap_or_default();
        }
        EntrySample { entries, least, has_expired: self.len < before }
    }

    /// Rebuilds the table with this number of home slots.
    fn rebuild(&mut self, homes: u32) {
        let tail = 4 + homes as usize / 64;
        let mut slots = Vec::new();
        slots.reserve_exact(homes as usize + tail);
        for slot in self.slots.iter().filter(|slot| !slot.is_empty()) {
            let home = slot.fingerprint.home_slot(homes);
            slots.resize(slots.len().max(home), Slot::EMPTY);
            slots.push(*slot);
        }
        slots.resize((slots.len() + 4).max(homes as usize + tail), Slot::EMPTY);
        self.slots = slots.into_boxed_slice();
        self.homes = homes;
        self.sweep_cursor = 0;
    }

    fn compact_logs(&mut self) {
        let mut logs = Logs::default();
        for slot in self.slots.iter_mut().filter(|slot| !slot.is_empty()) {
            slot.state = self.logs.move_to(&mut logs, slot.state);
        }
        self.logs = logs;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::super::state::{StoredCounter as _, Usage};
    use super::*;
    use crate::algorithm::{Algorithm, Bucket, Parameters};

    /// Returns a state that is identified by its expiry.
    fn state(expires_at: u64) -> PackedState {
        let quota = Parameters::new(Algorithm::TokenBucket, 1, expires_at, 1);
        Bucket::<u64>::default().pack(&quota, Usage::default(), None, &mut Logs::default())
    }

    fn check(table: &mut Table, model: &BTreeMap<Fingerprint, PackedState>) {
        assert_eq!(table.len(), model.len());
        for (&fingerprint, &state) in model {
            let at = table.find(fingerprint).expect("a key that was inserted");
            assert_eq!(table.state(at), state);
            assert_eq!(
                table.get_mut(fingerprint, CounterKind::Bucket).map(|(state, _)| *state),
                Some(state)
            );
            assert!(table.get_mut(fingerprint, CounterKind::Window).is_none(), "of another kind");
            let found = table.get_state_mut(fingerprint).copied();
            let is_like = |other: &&Fingerprint| {
                !other.is_clearly_before(fingerprint) && !fingerprint.is_clearly_before(**other)
            };
            let is_alone = model.keys().filter(is_like).count() == 1;
            assert!(found == Some(state) || found.is_none() && !is_alone, "{found:?}");
        }
        let used = table.slots.iter().filter(|slot| !slot.is_empty()).count();
        assert_eq!(used, model.len());
        assert!(table.slots.last().is_none_or(Slot::is_empty), "the last slot terminates searches");
    }

    proptest! {
        /// Few fingerprints close together, so that runs are long and reach the end of the table.
        #[test]
        fn table_behaves_like_a_sorted_map(
            steps in proptest::collection::vec(
                (0_u64..60, 0_u64..3, any::<bool>(), 1_u64..100),
                0..300,
            ),
            spread in prop_oneof![Just(0_u32), Just(50), Just(58)],
        ) {
            let (mut table, mut model) = (Table::default(), BTreeMap::new());
            for (high, low, insert, life) in steps {
                let fingerprint = Fingerprint::new(u64::MAX - (high << spread), low);
                let state = state(2_000_000 * life);
                let is_present = table.get_mut(fingerprint, CounterKind::Bucket).is_some();
                prop_assert_eq!(table.find(fingerprint).is_ok(), is_present);
                prop_assert!(is_present || table.get_state_mut(fingerprint).is_none());
                match (table.find(fingerprint), insert) {
                    (Ok(at), true) => table.set(at, state),
                    (Err(at), true) => table.insert(at, fingerprint, state),
                    (Ok(at), false) => drop(table.remove(at)),
                    (Err(_), false) => {}
                }
                if insert {
                    model.insert(fingerprint, state);
                } else {
                    model.remove(&fingerprint);
                }
                check(&mut table, &model);
            }
            let capacity = Capacity::new(usize::MAX, 0);
            (0..table.slots.len()).for_each(|_| table.sweep_slots(100_000_000, &capacity));
            model.retain(|_, state| state.expires_at() > 100_000_000);
            check(&mut table, &model);
        }
    }

    #[test]
    fn sample_has_the_entry_with_the_least_rank_and_removes_those_that_have_expired() {
        let mut table = Table::default();
        let spread = |number: u64| Fingerprint::new(number << 58, number << 20);
        for number in 0..32 {
            let (Ok(at) | Err(at)) = table.find(spread(number));
            table.insert(at, spread(number), state(2_000_000 * (100 - number)));
        }
        let capacity = Capacity::new(usize::MAX, 0);
        let (now, unranked) = (2_000_000 * 70, state(2_000_000 * 100));
        let rank =
            |_, state: PackedState| (state != unranked).then(|| u64::MAX - state.expires_at());
        let sample = table.sample(now, &capacity, rank);
        assert_eq!((sample.entries, table.len()), (30, 30), "two of 32 have expired");
        assert!(sample.has_expired && !table.sample(now, &capacity, rank).has_expired);
        assert_eq!(sample.least.map(|(_, fingerprint)| fingerprint), Some(spread(1)));
        assert!(table.sample(now, &capacity, |_, _| None::<()>).least.is_none());
    }

    #[test]
    fn samples_of_a_large_table_cover_it() {
        let mut table = Table::default();
        for number in 0..1_000_u64 {
            let fingerprint = Fingerprint::new(number.wrapping_mul(0x9e37_79b9_7f4a_7c15), number);
            let (Ok(at) | Err(at)) = table.find(fingerprint);
            table.insert(at, fingerprint, state(5_000_000));
        }
        let (capacity, seen) = (Capacity::new(usize::MAX, 0), std::cell::RefCell::default());
        for _ in 0..table.slots.len().div_ceil(SAMPLE_SLOTS) {
            let see = |fingerprint: Fingerprint, _| {
                let seen: &std::cell::RefCell<std::collections::BTreeSet<Fingerprint>> = &seen;
                seen.borrow_mut().insert(fingerprint).then_some(())
            };
            assert!(table.sample(0, &capacity, see).entries <= SAMPLE_SLOTS);
        }
        assert_eq!(seen.borrow().len(), 1_000);
    }

    #[test]
    fn empty_table_releases_its_memory() {
        let mut table = Table::default();
        for number in 0..10_000_u64 {
            let fingerprint = Fingerprint::new(number.wrapping_mul(0x9e37_79b9_7f4a_7c15), number);
            let (Ok(at) | Err(at)) = table.find(fingerprint);
            table.insert(at, fingerprint, state(5_000_000));
        }
        let full = table.slots.len();
        assert!((12_000..14_000).contains(&full), "{full} slots for 10,000 keys");
        let capacity = Capacity::new(usize::MAX, 0);
        (0..200_000).for_each(|_| table.sweep(5_000_000, &capacity));
        assert_eq!(table.len(), 0);
        assert!(table.slots.len() < 100, "{} slots for no keys", table.slots.len());
    }
}
