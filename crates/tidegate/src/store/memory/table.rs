//! [`Table`]: the keys of one shard, 40 bytes each, in the order of their fingerprints.
//!
//! Open addressing with linear probing, and each run kept in order: a fingerprint's home is its
//! share of the table, and it stands there or a few slots behind. So a look, for a known key or a
//! new one, goes to one place in memory and reads on from there; no list of tags stands beside it.
//! Since homes rise with fingerprints, a larger table is written in one pass from front to back,
//! which is cheap enough to grow by quarters: at least 62 % of the slots are in use.

use std::ops::RangeInclusive;

use crate::algorithm::{Kind, Logs, State};
use crate::fingerprint::Fingerprint;

/// A new key has four slots swept, so that a table is gone through before it has doubled; any other
/// decision a quarter of one. Not at once, but as a run of many slots now and then, which costs the
/// cache a fraction of so many odd ones.
const SLOTS_A_SWEEP: usize = 64;
const SWEEP_DUE: u32 = 256;
const DUE_FOR_A_NEW_KEY: u32 = 15;

/// Nearly every key stands at its home or so many slots behind it at most. Which of them it is
/// nobody can foresee: so that is counted, not branched on. Among 10,000 keys a decision takes a
/// twelfth less time for it.
const NEAR: usize = 3;
/// But not where one key is alone, nor where slots come from main memory: there a processor that
/// guesses is ahead of one that waits for what it counts.
const COUNTED: RangeInclusive<u32> = 8..=512;

#[derive(Debug, Default)]
pub(super) struct Table {
    /// As many as there are homes, and some more for the last runs. The very last one is always
    /// empty: there every search ends.
    slots: Box<[Slot]>,
    homes: u32,
    len: u32,
    /// The slot where the sweep goes on.
    hand: u32,
    /// Rises to [`SWEEP_DUE`].
    due: u32,
    pub(super) logs: Logs,
}

#[derive(Debug, Clone, Copy)]
struct Slot {
    fingerprint: Fingerprint,
    state: State,
}

const _: () = assert!(size_of::<Slot>() == 40, "at most 64 bytes a key, with the empty slots");
const _: () = assert!(
    size_of::<Table>() <= 40,
    "a shard is one cache line: lock, table and the bound of its expiries"
);

impl Slot {
    const EMPTY: Self = Self { fingerprint: Fingerprint::NONE, state: State::NONE };

    fn is_empty(&self) -> bool {
        self.fingerprint == Fingerprint::NONE
    }
}

impl Table {
    pub(super) fn len(&self) -> usize {
        self.len as usize
    }

    /// Where this key stands, or where it would have to stand.
    #[inline]
    pub(super) fn find(&self, fingerprint: Fingerprint) -> Result<usize, usize> {
        let mut at = fingerprint.share_of(self.homes);
        while let Some(slot) = self.slots.get(at) {
            // The empty fingerprint is the greatest, so this ends at the latest in the last slot.
            if slot.fingerprint >= fingerprint {
                return if slot.fingerprint == fingerprint { Ok(at) } else { Err(at) };
            }
            at += 1;
        }
        Err(at)
    }

    /// The state of this key, if it is there and of this kind, and the logs beside it:
    /// [`find`](Self::find) for what nearly every decision needs.
    #[inline]
    pub(super) fn known(
        &mut self,
        fingerprint: Fingerprint,
        kind: Kind,
    ) -> Option<(&mut State, &mut Logs)> {
        let run = self.slots.get_mut(fingerprint.share_of(self.homes)..)?;
        let near = if COUNTED.contains(&self.homes) { run.get(..NEAR)? } else { &[] };
        let before =
            near.iter().filter(|slot| slot.fingerprint.is_clearly_before(fingerprint)).count();
        let slot =
            run.get_mut(before..)?.iter_mut().find(|slot| slot.fingerprint >= fingerprint)?;
        let known = slot.fingerprint == fingerprint && slot.state.is_of(kind);
        known.then_some((&mut slot.state, &mut self.logs))
    }

    #[inline]
    pub(super) fn state(&self, at: usize) -> State {
        self.slots[at].state
    }

    #[inline]
    pub(super) fn set(&mut self, at: usize, state: State) {
        self.slots[at].state = state;
    }

    /// `at` is what [`find`](Self::find) said of this fingerprint.
    pub(super) fn insert(&mut self, at: usize, fingerprint: Fingerprint, state: State) {
        let most = self.homes - self.homes / 5;
        let end = (self.len < most).then(|| self.end_of_run(at)).flatten();
        let Some(end) = end else {
            self.rebuild(self.homes + self.homes / 4 + 4);
            let (Ok(at) | Err(at)) = self.find(fingerprint);
            return self.insert(at, fingerprint, state);
        };
        self.slots.copy_within(at..end, at + 1);
        self.slots[at] = Slot { fingerprint, state };
        self.len += 1;
        self.due += DUE_FOR_A_NEW_KEY;
    }

    /// The first empty slot from here on, but for the last one.
    fn end_of_run(&self, at: usize) -> Option<usize> {
        let end = at + self.slots[at..].iter().position(Slot::is_empty)?;
        (end + 1 < self.slots.len()).then_some(end)
    }

    pub(super) fn remove(&mut self, at: usize) {
        self.logs.forget(self.slots[at].state);
        // Who stands behind its home moves up.
        let mut end = at + 1;
        while !self.slots[end].is_empty() && self.slots[end].fingerprint.share_of(self.homes) < end
        {
            end += 1;
        }
        self.slots.copy_within(at + 1..end, at);
        self.slots[end - 1] = Slot::EMPTY;
        self.len -= 1;
    }

    /// After a decision. Now and then some steps of the hand that goes round and drops what has
    /// expired; tells how many.
    #[inline]
    pub(super) fn sweep(&mut self, now: u64) -> usize {
        self.due += 1;
        if self.due < SWEEP_DUE { 0 } else { self.sweep_a_run(now) }
    }

    #[inline(never)]
    fn sweep_a_run(&mut self, now: u64) -> usize {
        self.due = 0;
        let before = self.len();
        for _ in 0..SLOTS_A_SWEEP.min(self.slots.len()) {
            let at = self.hand as usize;
            // Who moves up into the place of one that is gone is looked at as well.
            while !self.slots[at].is_empty() && self.slots[at].state.expires_at() <= now {
                self.remove(at);
            }
            self.hand += 1;
            if self.hand as usize == self.slots.len() {
                self.hand = 0;
                // Once round: a flood that is over gives its memory back.
                if self.len < self.homes / 8 {
                    self.rebuild(2 * self.len);
                }
                if self.logs.is_sparse() {
                    self.move_logs_together();
                }
            }
        }
        before - self.len()
    }

    /// Drops what has expired. Tells how many are gone, and when the next one expires.
    pub(super) fn drop_expired(&mut self, now: u64) -> (usize, u64) {
        let (before, mut next, mut at) = (self.len(), u64::MAX, 0);
        while at < self.slots.len() {
            let slot = &self.slots[at];
            let expires_at = slot.state.expires_at();
            if !slot.is_empty() && expires_at <= now {
                self.remove(at);
                continue;
            }
            if !slot.is_empty() {
                next = next.min(expires_at);
            }
            at += 1;
        }
        (before - self.len(), next)
    }

    /// The same keys among so many homes.
    fn rebuild(&mut self, homes: u32) {
        let tail = 4 + homes as usize / 32;
        let mut slots = Vec::new();
        slots.reserve_exact(homes as usize + tail);
        for slot in self.slots.iter().filter(|slot| !slot.is_empty()) {
            let home = slot.fingerprint.share_of(homes);
            slots.resize(slots.len().max(home), Slot::EMPTY);
            slots.push(*slot);
        }
        slots.resize((slots.len() + 4).max(homes as usize + tail), Slot::EMPTY);
        (self.slots, self.homes, self.hand) = (slots.into_boxed_slice(), homes, 0);
    }

    fn move_logs_together(&mut self) {
        let mut logs = Logs::default();
        for slot in self.slots.iter_mut().filter(|slot| !slot.is_empty()) {
            slot.state = self.logs.moved(slot.state, &mut logs);
        }
        self.logs = logs;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::algorithm::{Bucket, Kept};
    use crate::quota::Quota;

    /// Some state that can be told from others by its expiry.
    fn state(expires_at: u64) -> State {
        let quota =
            Quota::token_bucket(1, std::time::Duration::from_micros(expires_at)).expect("valid");
        Bucket::default().keep(&quota, None, &mut Logs::default())
    }

    fn check(table: &mut Table, model: &BTreeMap<Fingerprint, State>) {
        assert_eq!(table.len(), model.len());
        for (&fingerprint, &state) in model {
            let at = table.find(fingerprint).expect("a key that was inserted");
            assert_eq!(table.state(at), state);
            assert_eq!(
                table.known(fingerprint, Kind::Bucket).map(|(known, _)| *known),
                Some(state)
            );
            assert!(table.known(fingerprint, Kind::Window).is_none(), "of another kind");
        }
        let used = table.slots.iter().filter(|slot| !slot.is_empty()).count();
        assert_eq!(used, model.len());
        assert!(table.slots.last().is_none_or(Slot::is_empty), "searches end");
    }

    proptest! {
        /// Few different fingerprints close together, so that runs are long and reach the end of
        /// the table.
        #[test]
        fn a_table_holds_what_a_sorted_map_would(
            steps in proptest::collection::vec((0_u64..60, 0_u64..3, any::<bool>(), 1_u64..100), 0..300),
            spread in prop_oneof![Just(0_u32), Just(50), Just(58)],
        ) {
            let (mut table, mut model) = (Table::default(), BTreeMap::new());
            for (high, low, insert, life) in steps {
                let fingerprint = Fingerprint::new(u64::MAX - (high << spread), low);
                let state = state(2_000_000 * life);
                match (table.find(fingerprint), insert) {
                    (Err(_), _) if table.known(fingerprint, Kind::Bucket).is_some() => panic!("known, but not found"),
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
            let (dropped, next) = table.drop_expired(100_000_000);
            let before = model.len();
            model.retain(|_, state| state.expires_at() > 100_000_000);
            prop_assert_eq!(dropped, before - model.len());
            prop_assert_eq!(next, model.values().map(|state| state.expires_at()).min().unwrap_or(u64::MAX));
            check(&mut table, &model);
        }
    }

    #[test]
    fn a_table_that_has_emptied_gives_its_memory_back() {
        let mut table = Table::default();
        for number in 0..10_000_u64 {
            let fingerprint = Fingerprint::new(number.wrapping_mul(0x9e37_79b9_7f4a_7c15), number);
            let (Ok(at) | Err(at)) = table.find(fingerprint);
            table.insert(at, fingerprint, state(5_000_000));
        }
        let full = table.slots.len();
        assert!((12_000..17_000).contains(&full), "{full} slots for 10,000 keys");
        let swept: usize = (0..200_000).map(|_| table.sweep(5_000_000)).sum();
        assert_eq!((swept, table.len()), (10_000, 0));
        assert!(table.slots.len() < 100, "{} slots for nothing", table.slots.len());
    }
}
