//! [`Table`]: the keys of one shard, 40 bytes each, sorted by fingerprint.
//!
//! Open addressing with linear probing, where each run is sorted: the home slot of a fingerprint is
//! proportional to its value, and the key is there or a few slots later. A lookup, hit or miss,
//! reads one place in memory sequentially, without a separate array of tags. Because home slots
//! ascend with fingerprints, a table is rebuilt in one sequential pass, which is cheap enough to
//! grow by an eighth at a time: at least 72 % of the slots are in use.

use std::ops::RangeInclusive;

use super::fingerprint::Fingerprint;
use super::logs::Logs;
use super::state::{CounterKind, PackedState};

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

/// Number of entries of which an eviction removes the one that expires first.
const EVICTION_SAMPLE: usize = 64;

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
    assert!(size_of::<Table>() <= 40, "a shard is one cache line: lock, table and next expiry");

impl Slot {
    const EMPTY: Self = Self { fingerprint: Fingerprint::NONE, state: PackedState::EMPTY };

    fn is_empty(&self) -> bool {
        self.fingerprint == Fingerprint::NONE
    }
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

    pub(super) fn remove(&mut self, at: usize) {
        self.logs.remove(self.slots[at].state);
        // Shift the displaced keys that follow one slot towards their home.
        let mut end = at + 1;
        while !self.slots[end].is_empty() && self.slots[end].fingerprint.home_slot(self.homes) < end
        {
            end += 1;
        }
        self.slots.copy_within(at + 1..end, at);
        self.slots[end - 1] = Slot::EMPTY;
        self.len -= 1;
    }

    /// Sweeps some slots if enough decisions were made since the last sweep. Returns the number of
    /// removed keys.
    #[inline]
    pub(super) fn sweep(&mut self, now: u64) -> usize {
        self.sweep_debt -= 1;
        if self.sweep_debt >= 0 { 0 } else { self.sweep_slots(now) }
    }

    #[cold]
    #[inline(never)]
    fn sweep_slots(&mut self, now: u64) -> usize {
        self.sweep_debt = SWEEP_PRICE;
        let before = self.len();
        for _ in 0..SLOTS_PER_SWEEP.min(self.slots.len()) {
            let at = self.sweep_cursor as usize;
            // A removal shifts the next key into this slot, so check the slot again.
            while !self.slots[at].is_empty() && self.slots[at].state.expires_at() <= now {
                self.remove(at);
            }
            self.sweep_cursor += 1;
            if self.sweep_cursor as usize == self.slots.len() {
                self.sweep_cursor = 0;
                self.release_memory();
            }
        }
        before - self.len()
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

    /// Removes expired keys. Returns their number, and the earliest expiry of the others.
    pub(super) fn remove_expired(&mut self, now: u64) -> (usize, u64) {
        let before = self.len();
        let mut next_expiry = u64::MAX;
        let mut at = 0;
        while at < self.slots.len() {
            let slot = &self.slots[at];
            let expires_at = slot.state.expires_at();
            if !slot.is_empty() && expires_at <= now {
                self.remove(at);
                continue;
            }
            if !slot.is_empty() {
                next_expiry = next_expiry.min(expires_at);
            }
            at += 1;
        }
        (before - self.len(), next_expiry)
    }

    /// Removes the entry that expires first among some entries that `may_evict` accepts, which have
    /// not used up their quota. Returns the number of entries scanned and removed.
    pub(super) fn evict(&mut self, may_evict: impl Fn(PackedState) -> bool) -> (usize, usize) {
        let mut soonest: Option<(u64, usize)> = None;
        let mut scanned = 0;
        for _ in 0..self.slots.len() {
            // Shared with the sweep, which continues after these slots.
            let at = self.sweep_cursor as usize;
            self.sweep_cursor = if at + 1 < self.slots.len() { self.sweep_cursor + 1 } else { 0 };
            let state = self.slots[at].state;
            if self.slots[at].is_empty() {
                continue;
            }
            scanned += 1;
            if !state.is_exhausted() && may_evict(state) {
                soonest = soonest.into_iter().chain([(state.expires_at(), at)]).min();
            }
            if scanned == EVICTION_SAMPLE {
                break;
            }
        }
        if let Some((_, at)) = soonest {
            self.remove(at);
        }
        (scanned, usize::from(soonest.is_some()))
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

    use super::super::state::StoredCounter as _;
    use super::*;
    use crate::algorithm::Bucket;
    use crate::quota::Quota;

    /// Returns a state that is identified by its expiry.
    fn state(expires_at: u64) -> PackedState {
        let quota =
            Quota::token_bucket(1, std::time::Duration::from_micros(expires_at)).expect("valid");
        Bucket::default().pack(&quota, None, &mut Logs::default())
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
                    (Ok(at), false) => table.remove(at),
                    (Err(_), false) => {}
                }
                if insert {
                    model.insert(fingerprint, state);
                } else {
                    model.remove(&fingerprint);
                }
                check(&mut table, &model);
            }
            let (removed, next_expiry) = table.remove_expired(100_000_000);
            let before = model.len();
            model.retain(|_, state| state.expires_at() > 100_000_000);
            prop_assert_eq!(removed, before - model.len());
            let earliest = model.values().map(|state| state.expires_at()).min();
            prop_assert_eq!(next_expiry, earliest.unwrap_or(u64::MAX));
            check(&mut table, &model);
        }
    }

    #[test]
    fn eviction_removes_the_entry_that_expires_first_unless_it_is_exhausted() {
        let mut table = Table::default();
        let spread = |number: u64| Fingerprint::new(number << 58, number);
        for number in 0..32 {
            let (Ok(at) | Err(at)) = table.find(spread(number));
            table.insert(at, spread(number), state(2_000_000 * (100 - number)));
        }
        let quota = Quota::token_bucket(1, std::time::Duration::from_secs(1)).expect("valid");
        let full = Bucket { level: 1, ..Bucket::default() }.pack(&quota, None, &mut table.logs);
        let at = table.find(spread(7)).expect("a key");
        table.set(at, full);
        for number in (0..32).rev().filter(|number| *number != 7) {
            assert!(table.find(spread(number)).is_ok());
            assert_eq!(table.evict(|_| true).1, 1);
            assert!(table.find(spread(number)).is_err(), "{number}");
        }
        assert_eq!(table.evict(|_| true), (1, 0), "only the exhausted one is left");
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
        let swept: usize = (0..200_000).map(|_| table.sweep(5_000_000)).sum();
        assert_eq!((swept, table.len()), (10_000, 0));
        assert!(table.slots.len() < 100, "{} slots for no keys", table.slots.len());
    }
}
