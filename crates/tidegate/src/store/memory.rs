//! [`MemoryStore`]: counts of one process, for millions of keys.
//!
//! Shards of a hash table behind a mutex each. A key is hashed once, with a secret seed, to 128 bits: they choose the shard and
//! the bucket, and stand for the key itself, so an entry has a fixed size and a known key costs no allocation.
//! Each decision is a read and a write, so a plain mutex, held for some nanoseconds, is the right lock.
//!
//! Expired keys are swept a few buckets for each write, so no thread has to run beside. At the cap a new key makes room
//! by the sweep of whole shards; if every key there still counts for somebody, the new one is refused.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hashbrown::HashTable;
use siphasher::sip128::{Hasher128, SipHasher13};

use super::{Action, Store, StoreError};
use crate::algorithm::{Outcome, State, Verdict};
use crate::charge::Charge;
use crate::clock::{Clock, SystemClock};
use crate::decision::{Decision, Source};
use crate::quota::Quota;

/// Many, so that to go through one of them is short work even with millions of keys.
const SHARDS: usize = 1024;
/// Every so many writes to a shard, a run of its buckets is swept: four a write, so that a table is gone through before
/// it has doubled, but as a run, which costs the cache a fraction of four odd buckets at each write.
const WRITES_A_SWEEP: u32 = 16;
const BUCKETS_A_SWEEP: usize = 64;
/// Entries that a new key at the cap looks at, at most about, to find an expired one. Up to so many keys the search is
/// complete; beyond that a key may be refused while an expired one is left in a shard that the next call gets to.
const SEARCHED_AT_THE_CAP: usize = 16_384;

/// Counts of one process.
///
/// ```
/// use tidegate::{Limiter, MemoryStore};
///
/// let limiter = Limiter::new(MemoryStore::builder().max_keys(100_000).build());
/// assert_eq!(limiter.store().keys(), 0);
/// ```
#[derive(Debug)]
pub struct MemoryStore {
    shards: Box<[Shard]>,
    seed: (u64, u64),
    clock: Arc<dyn Clock>,
    keys: AtomicUsize,
    max_keys: usize,
    /// As in each shard, for all of them: makes a refusal at the cap cheap.
    next_expiry: AtomicU64,
    /// The shard where the next search for room begins.
    hand: AtomicUsize,
    searching: Mutex<()>,
}

/// On cache lines of its own, or a lock on one shard would slow its neighbours.
#[derive(Debug)]
#[repr(align(128))]
struct Shard {
    table: Mutex<Table>,
    /// No key of the shard expires before this time. May be too early, never too late.
    next_expiry: AtomicU64,
}

#[derive(Debug, Default)]
struct Table {
    entries: HashTable<Entry>,
    /// The bucket where the sweep goes on.
    hand: usize,
    writes: u32,
}

#[derive(Debug)]
struct Entry {
    fingerprint: u128,
    expires_at: u64,
    state: State,
}

/// Options of a [`MemoryStore`].
#[derive(Debug)]
pub struct Builder {
    clock: Option<Arc<dyn Clock>>,
    max_keys: usize,
}

impl Builder {
    /// The clock to go by; the machine's by default.
    #[must_use]
    pub fn clock(mut self, clock: impl Clock) -> Self {
        self.clock = Some(Arc::new(clock));
        self
    }

    /// The cap on keys; 10,000,000 by default. At the cap a new key gets [`StoreError::Full`], unless one has expired.
    #[must_use]
    pub fn max_keys(mut self, max_keys: usize) -> Self {
        self.max_keys = max_keys;
        self
    }

    /// The store.
    #[must_use]
    pub fn build(self) -> MemoryStore {
        let random = RandomState::new();
        let shard = || Shard { table: Mutex::default(), next_expiry: AtomicU64::new(u64::MAX) };
        MemoryStore {
            shards: std::iter::repeat_with(shard).take(SHARDS).collect(),
            // Keys are chosen by attackers: the seed is the process's secret.
            seed: (random.hash_one(1_u8), random.hash_one(2_u8)),
            clock: self.clock.unwrap_or_else(|| Arc::new(SystemClock::new())),
            keys: AtomicUsize::new(0),
            max_keys: self.max_keys,
            next_expiry: AtomicU64::new(u64::MAX),
            hand: AtomicUsize::new(0),
            searching: Mutex::new(()),
        }
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

impl MemoryStore {
    /// An empty store on the machine's clock, for up to 10,000,000 keys.
    #[must_use]
    pub fn new() -> Self {
        Self::builder().build()
    }

    /// A store with options.
    #[must_use]
    pub fn builder() -> Builder {
        Builder { clock: None, max_keys: 10_000_000 }
    }

    /// How many keys it holds, expired ones that are not swept yet among them.
    #[must_use]
    pub fn keys(&self) -> usize {
        self.keys.load(Ordering::Relaxed)
    }

    pub(crate) fn decide_now(&self, action: Action, charge: &Charge<'_>) -> Result<Decision, StoreError> {
        let fingerprint = self.fingerprint(charge);
        let shard = self.shard(fingerprint);
        let mut room = Room::new(self);
        loop {
            let mut table = shard.lock();
            // Read under the lock: then times come in the order of decisions.
            let now = self.clock.now();
            if let Some(verdict) = self.apply(shard, &mut table, action, charge, fingerprint, now, true, &mut room) {
                self.sweep(&mut table, now);
                return Ok(verdict.into_decision(charge.quota(), Source::Store));
            }
            drop(table);
            self.make_room(now, 1)?;
        }
    }

    pub(crate) fn decide_all_now(&self, action: Action, charges: &[Charge<'_>]) -> Result<Vec<Decision>, StoreError> {
        let fingerprints: Vec<u128> = charges.iter().map(|charge| self.fingerprint(charge)).collect();
        let mut room = Room::new(self);
        loop {
            let mut locked = self.lock_all(&fingerprints);
            let now = self.clock.now();
            let all_or_nothing = matches!(action, Action::Acquire | Action::Peek);
            let mut together = true;
            let mut missing = 0;
            for (charge, &fingerprint) in charges.iter().zip(&fingerprints) {
                let table = locked.table(fingerprint);
                let found = table.entries.find_mut(bucket_hash(fingerprint), |entry| entry.fingerprint == fingerprint);
                if found.is_none() {
                    missing += 1;
                }
                if all_or_nothing {
                    let quota = charge.quota();
                    together &= match found.filter(|entry| entry.state.is_of(quota.algorithm())) {
                        Some(entry) => entry.state.fits(quota, now, charge.units()),
                        None => true,
                    };
                }
            }
            // All the room that may be needed, before anything is written.
            if matches!(action, Action::Acquire | Action::Take) && together && !room.reserve(missing) {
                drop(locked);
                self.make_room(now, missing)?;
                continue;
            }
            let decide = |(charge, &fingerprint): (&Charge<'_>, &u128)| {
                let shard = self.shard(fingerprint);
                let table = locked.table(fingerprint);
                let verdict = self.apply(shard, table, action, charge, fingerprint, now, together, &mut room);
                verdict.map(|verdict| verdict.into_decision(charge.quota(), Source::Store))
            };
            let decisions: Option<Vec<Decision>> = charges.iter().zip(&fingerprints).map(decide).collect();
            if let Some(decisions) = decisions {
                // Only now: a sweep in between could take away what a later charge has counted on.
                for (_, table) in &mut locked.0 {
                    self.sweep(table, now);
                }
                return Ok(decisions);
            }
        }
    }

    /// The action on one entry of a locked table. `None`: a new key has no room.
    #[expect(clippy::too_many_arguments, reason = "the loop variables of the two callers, in one place")]
    fn apply(
        &self,
        shard: &Shard,
        table: &mut Table,
        action: Action,
        charge: &Charge<'_>,
        fingerprint: u128,
        now: u64,
        together: bool,
        room: &mut Room<'_>,
    ) -> Option<Verdict> {
        let quota = charge.quota();
        let hash = bucket_hash(fingerprint);
        let act = |state: &mut State| match action {
            Action::Reset => Outcome { verdict: Verdict::untouched(quota), written: false },
            _ => state.apply(action, quota, now, charge.units(), together),
        };
        let Ok(mut found) = table.entries.find_entry(hash, |entry| entry.fingerprint == fingerprint) else {
            let mut state = State::new(quota.algorithm());
            let outcome = act(&mut state);
            if outcome.written && !state.is_empty() {
                if !room.reserve(1) {
                    return None;
                }
                room.take();
                let entry = Entry { fingerprint, expires_at: state.expires_at(quota), state };
                self.expires_no_later_than(shard, entry.expires_at);
                table.entries.insert_unique(hash, entry, |entry| bucket_hash(entry.fingerprint));
            }
            return Some(outcome.verdict);
        };
        if action == Action::Reset {
            found.remove();
            self.keys.fetch_sub(1, Ordering::Relaxed);
            return Some(Verdict::untouched(quota));
        }
        let entry = found.get_mut();
        if !entry.state.is_of(quota.algorithm()) {
            // The policy's algorithm was changed. What the old one counted says nothing to the new one.
            let mut state = State::new(quota.algorithm());
            let outcome = act(&mut state);
            if outcome.written {
                entry.state = state;
                self.written(shard, found, quota);
            }
            return Some(outcome.verdict);
        }
        let outcome = act(&mut entry.state);
        if outcome.written {
            self.written(shard, found, quota);
        } else if matches!(action, Action::Acquire | Action::Take) {
            // A limit was lowered, and the entry would expire before its bucket has drained.
            entry.expires_at = entry.expires_at.max(entry.state.expires_at(quota));
        }
        Some(outcome.verdict)
    }

    /// After a write: the entry's new expiry, or its end.
    fn written(&self, shard: &Shard, mut found: hashbrown::hash_table::OccupiedEntry<'_, Entry>, quota: &Quota) {
        let entry = found.get_mut();
        if entry.state.is_empty() {
            found.remove();
            self.keys.fetch_sub(1, Ordering::Relaxed);
            return;
        }
        let expires_at = entry.state.expires_at(quota);
        if expires_at < entry.expires_at {
            self.expires_no_later_than(shard, expires_at);
        }
        entry.expires_at = expires_at;
    }

    /// Keeps the bounds below every expiry. The shard's first: a search takes up the common bound before it looks at the
    /// shards, so it sees the one or is lowered by the other.
    fn expires_no_later_than(&self, shard: &Shard, expires_at: u64) {
        shard.next_expiry.fetch_min(expires_at, Ordering::SeqCst);
        self.next_expiry.fetch_min(expires_at, Ordering::SeqCst);
    }

    /// Drops expired keys to make room for new ones. Called with no lock held.
    fn make_room(&self, now: u64, places: usize) -> Result<(), StoreError> {
        let full = Err(StoreError::Full { cap: self.max_keys });
        // One at a time: who comes during a search would see its bound half made.
        let _searching = self.searching.lock().unwrap_or_else(PoisonError::into_inner);
        if self.keys() + places <= self.max_keys {
            return Ok(());
        }
        if self.next_expiry.load(Ordering::SeqCst) > now {
            return full;
        }
        // Taken up before the search, so that what is inserted meanwhile lowers it again.
        self.next_expiry.store(u64::MAX, Ordering::SeqCst);
        let mut made = false;
        let mut bound = u64::MAX;
        let mut searched = 0;
        for _ in 0..SHARDS {
            let shard = &self.shards[self.hand.fetch_add(1, Ordering::Relaxed) % SHARDS];
            if shard.next_expiry.load(Ordering::SeqCst) <= now {
                let (seen, dropped) = shard.drop_expired(now);
                searched += seen;
                if dropped > 0 || searched > SEARCHED_AT_THE_CAP {
                    self.keys.fetch_sub(dropped, Ordering::Relaxed);
                    made = dropped > 0;
                    bound = now;
                    break;
                }
            }
            bound = bound.min(shard.next_expiry.load(Ordering::SeqCst));
        }
        self.next_expiry.fetch_min(bound, Ordering::SeqCst);
        if made { Ok(()) } else { full }
    }

    /// Now and then some steps of the hand that goes round and drops what has expired.
    fn sweep(&self, table: &mut Table, now: u64) {
        table.writes = table.writes.wrapping_add(1);
        if !table.writes.is_multiple_of(WRITES_A_SWEEP) {
            return;
        }
        let buckets = table.entries.num_buckets();
        for _ in 0..BUCKETS_A_SWEEP.min(buckets) {
            table.hand = if table.hand + 1 < buckets { table.hand + 1 } else { 0 };
            // Once round: a flood that is over gives its memory back.
            if table.hand == 0 && table.entries.len() < table.entries.capacity() / 8 {
                let room = 2 * table.entries.len();
                table.entries.shrink_to(room, |entry| bucket_hash(entry.fingerprint));
                break;
            }
            if let Ok(found) = table.entries.get_bucket_entry(table.hand)
                && found.get().expires_at <= now
            {
                found.remove();
                self.keys.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }

    fn fingerprint(&self, charge: &Charge<'_>) -> u128 {
        let mut hasher = SipHasher13::new_with_keys(self.seed.0, self.seed.1);
        hasher.write(charge.key().as_bytes());
        // No UTF-8 text has this byte, so a key and a policy cannot flow into each other.
        hasher.write_u8(0xff);
        hasher.write(charge.policy_name().as_bytes());
        hasher.finish128().as_u128()
    }

    fn shard(&self, fingerprint: u128) -> &Shard {
        &self.shards[shard_index(fingerprint)]
    }

    /// Locks every shard of these keys, in their order: two callers never wait for each other in a circle.
    fn lock_all(&self, fingerprints: &[u128]) -> Locked<'_> {
        let mut indices: Vec<usize> = fingerprints.iter().map(|&fingerprint| shard_index(fingerprint)).collect();
        indices.sort_unstable();
        indices.dedup();
        Locked(indices.into_iter().map(|index| (index, self.shards[index].lock())).collect())
    }
}

/// The high half chooses the shard, the low half the bucket.
#[expect(clippy::cast_possible_truncation, reason = "some bits of the high half")]
fn shard_index(fingerprint: u128) -> usize {
    ((fingerprint >> 64) as usize) % SHARDS
}

#[expect(clippy::cast_possible_truncation, reason = "the low half is the bucket's hash")]
fn bucket_hash(fingerprint: u128) -> u64 {
    fingerprint as u64
}

impl Shard {
    fn lock(&self) -> MutexGuard<'_, Table> {
        // A panic elsewhere cannot leave an entry half written: states are written whole.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many entries there were, and how many of them have expired and are gone.
    fn drop_expired(&self, now: u64) -> (usize, usize) {
        let mut table = self.lock();
        let seen = table.entries.len();
        let mut next = u64::MAX;
        table.entries.retain(|entry| {
            let keep = entry.expires_at > now;
            if keep {
                next = next.min(entry.expires_at);
            }
            keep
        });
        self.next_expiry.store(next, Ordering::SeqCst);
        (seen, seen - table.entries.len())
    }
}

struct Locked<'a>(Vec<(usize, MutexGuard<'a, Table>)>);

impl Locked<'_> {
    fn table(&mut self, fingerprint: u128) -> &mut Table {
        let index = shard_index(fingerprint);
        let at = self.0.partition_point(|(locked, _)| *locked < index);
        &mut self.0[at].1
    }
}

/// Places for new keys, counted against the cap before they are filled; what was not filled goes back.
struct Room<'a> {
    store: &'a MemoryStore,
    places: usize,
}

impl<'a> Room<'a> {
    fn new(store: &'a MemoryStore) -> Self {
        Self { store, places: 0 }
    }

    /// Has, or gets, this many places.
    fn reserve(&mut self, places: usize) -> bool {
        let Some(more) = places.checked_sub(self.places).filter(|more| *more > 0) else { return true };
        let grow = |keys: usize| keys.checked_add(more).filter(|keys| *keys <= self.store.max_keys);
        let reserved = self.store.keys.fetch_update(Ordering::Relaxed, Ordering::Relaxed, grow).is_ok();
        if reserved {
            self.places = places;
        }
        reserved
    }

    /// A place is filled.
    fn take(&mut self) {
        self.places -= 1;
    }
}

impl Drop for Room<'_> {
    fn drop(&mut self) {
        if self.places > 0 {
            self.store.keys.fetch_sub(self.places, Ordering::Relaxed);
        }
    }
}

impl Store for MemoryStore {
    async fn decide(&self, action: Action, charge: &Charge<'_>) -> Result<Decision, StoreError> {
        self.decide_now(action, charge)
    }

    async fn decide_all(&self, action: Action, charges: &[Charge<'_>]) -> Result<Vec<Decision>, StoreError> {
        self.decide_all_now(action, charges)
    }

    fn clock(&self) -> &dyn Clock {
        &*self.clock
    }
}
