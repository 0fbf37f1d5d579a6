//! [`MemoryStore`]: counts of one process, for millions of keys.
//!
//! Shards of an open hash table behind a mutex each. A key is hashed once, under a secret, to a
//! fingerprint: that chooses the shard and the slot, and stands for the key itself, so a slot has a
//! fixed size of 40 bytes, and a known key costs no allocation and one place in memory. Each
//! decision is a read and a write, so a plain mutex, held for some nanoseconds, is the right lock.
//!
//! Expired keys are swept some slots at a time by decisions in passing, so no thread has to run
//! beside. At the cap a new key makes room by the sweep of whole shards; if every key there still
//! counts for somebody, the new one is refused.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use spin::mutex::SpinMutexGuard;

use self::shard::{Locked, Shard};
use self::table::Table;
use super::{Action, Store, StoreError};
use crate::algorithm::{
    self, Algorithm, Bucket, Counter, Kept, Log, MAX_TIME, Step, Verdict, Window,
};
use crate::charge::Charge;
use crate::clock::{Clock, SystemClock};
use crate::decision::{Decision, Source};
use crate::fingerprint::{Fingerprint, Secret};

mod shard;
mod table;

/// Many, so that to go through one of them is short work even with millions of keys; and no more
/// than whose heads stay in the nearest cache.
const SHARDS: usize = 256;
/// Entries that a new key at the cap looks at, at most about, to find an expired one. Up to so many
/// keys the search is complete; beyond that a key may be refused while an expired one is left in a
/// shard that the next call gets to.
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
    secret: &'static Secret,
    clock: StoreClock,
    max_keys: usize,
    keys: Keys,
}

/// What is written whenever a key comes or goes, away from what every decision reads.
#[derive(Debug)]
#[repr(align(128))]
struct Keys {
    count: AtomicUsize,
    /// As in each shard, for all of them: makes a refusal at the cap cheap.
    next_expiry: AtomicU64,
    /// The shard where the next search for room begins.
    hand: AtomicUsize,
    searching: Mutex<()>,
}

/// The machine's clock is called directly: that is nearly every store's.
#[derive(Debug)]
enum StoreClock {
    System(SystemClock),
    Other(Arc<dyn Clock>),
}

impl StoreClock {
    #[inline]
    fn now(&self) -> u64 {
        match self {
            Self::System(clock) => clock.now(),
            Self::Other(clock) => clock.now(),
        }
        .min(MAX_TIME)
    }
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

    /// The cap on keys; 10,000,000 by default. At the cap a new key gets [`StoreError::Full`],
    /// unless one has expired.
    #[must_use]
    pub fn max_keys(mut self, max_keys: usize) -> Self {
        self.max_keys = max_keys;
        self
    }

    /// The store.
    #[must_use]
    pub fn build(self) -> MemoryStore {
        MemoryStore {
            shards: std::iter::repeat_with(Shard::default).take(SHARDS).collect(),
            secret: Secret::of_this_process(),
            clock: self
                .clock
                .map_or_else(|| StoreClock::System(SystemClock::new()), StoreClock::Other),
            max_keys: self.max_keys,
            keys: Keys {
                count: AtomicUsize::new(0),
                next_expiry: AtomicU64::new(u64::MAX),
                hand: AtomicUsize::new(0),
                searching: Mutex::new(()),
            },
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
        self.keys.count.load(Ordering::Relaxed)
    }

    pub(crate) fn decide_now(
        &self,
        action: Action,
        charge: &Charge<'_>,
    ) -> Result<Decision, StoreError> {
        self.decide_into(action, charge, || Ok(()))
    }

    /// Returns whether this charge's key has a count, which may have expired and not been swept
    /// yet.
    #[cfg(feature = "resilience")]
    pub(crate) fn has_count(&self, charge: &Charge<'_>) -> bool {
        let fingerprint = charge.fingerprint(self.secret);
        self.shard(fingerprint).lock().find(fingerprint).is_ok()
    }

    /// Takes as many of the charge's units as fit, if its key has a count; inserts nothing
    /// otherwise.
    #[cfg(feature = "resilience")]
    pub(crate) fn charge_if_present(&self, charge: &Charge<'_>) {
        let fingerprint = charge.fingerprint(self.secret);
        let shard = self.shard(fingerprint);
        let mut table = shard.lock();
        if table.find(fingerprint).is_err() {
            return;
        }
        let now = self.clock.now();
        let one = One {
            store: self,
            shard,
            action: Action::ChargeUpTo,
            charge,
            fingerprint,
            now,
            together: true,
        };
        one.apply(&mut table, &mut Room::new(self));
        self.sweep(&mut table, now);
    }

    /// The error is the caller's own, so that a decision is written once, where the caller wants
    /// it. Whether the charge is sound is not asked for a known key: it has been when the key came.
    #[inline]
    pub(crate) fn decide_into<E: From<StoreError>>(
        &self,
        action: Action,
        charge: &Charge<'_>,
        check: impl FnOnce() -> Result<(), E>,
    ) -> Result<Decision, E> {
        match charge.quota().algorithm() {
            Algorithm::SlidingLog => self.decide_as::<Log, E>(action, charge, check),
            Algorithm::SlidingCounter => self.decide_as::<Counter, E>(action, charge, check),
            Algorithm::FixedWindow => self.decide_as::<Window, E>(action, charge, check),
            Algorithm::TokenBucket | Algorithm::LeakyBucket => {
                self.decide_as::<Bucket, E>(action, charge, check)
            }
        }
    }

    /// An acquire for a known key, which is nearly every call, goes straight through; all else
    /// takes its time.
    #[inline(always)]
    #[expect(
        clippy::inline_always,
        reason = "a frame of its own, and what goes in and out, are a tenth of it"
    )]
    fn decide_as<C: Kept, E: From<StoreError>>(
        &self,
        action: Action,
        charge: &Charge<'_>,
        check: impl FnOnce() -> Result<(), E>,
    ) -> Result<Decision, E> {
        let fingerprint = charge.fingerprint(self.secret);
        let shard = self.shard(fingerprint);
        // Before the lock, so that the processor reads its counter while it still works on the
        // fingerprint.
        let mut now = self.clock.now();
        let mut table = shard.lock();
        if action == Action::Acquire
            && charge.can_be_admitted()
            && let Some((state, logs)) = table.known(fingerprint, C::KIND)
        {
            let (quota, before) = (charge.quota(), *state);
            if before.is_ahead_of(now) {
                // Another thread was faster. Read under the lock, times come in the order of
                // decisions.
                now = self.clock.now();
            }
            let mut count = C::load(before, logs);
            let step = Step::on(&mut count, Action::Acquire, quota, now, charge.units(), true);
            // Others wait for the lock: what a copy can be asked, it is asked afterwards.
            let settled = count.copied().ok_or_else(|| step.verdict(&count, quota, now));
            if step.written {
                count.spend(quota, now, step.spend);
                *state = count.keep(quota, Some(before), logs);
                if state.may_expire_before(before) {
                    self.expires_no_later_than(shard, state.expires_at());
                }
            } else {
                count.put_back(before, logs);
                // A limit was lowered, and the entry would expire before its bucket has drained.
                if !before.lives_for(C::KIND, quota) {
                    *state = before.living_for(C::KIND, quota);
                }
            }
            self.sweep(&mut table, now);
            drop(table);
            let verdict =
                settled.map_or_else(|verdict| verdict, |count| step.verdict(&count, quota, now));
            return Ok(verdict.into_decision(quota, Source::Store));
        }
        check()?;
        Ok(self.decide_with_care::<C>(action, charge, fingerprint, table)?)
    }

    #[cold]
    #[inline(never)]
    fn decide_with_care<'a, C: Kept>(
        &'a self,
        action: Action,
        charge: &Charge<'_>,
        fingerprint: Fingerprint,
        mut table: SpinMutexGuard<'a, Table>,
    ) -> Result<Decision, StoreError> {
        let shard = self.shard(fingerprint);
        let mut room = Room::new(self);
        loop {
            let now = self.clock.now();
            let one = One { store: self, shard, action, charge, fingerprint, now, together: true };
            if let Some(verdict) = one.apply_as::<C>(&mut table, &mut room) {
                self.sweep(&mut table, now);
                return Ok(verdict.into_decision(charge.quota(), Source::Store));
            }
            drop(table);
            self.make_room(now, 1)?;
            table = shard.lock();
        }
    }

    pub(crate) fn decide_all_now(
        &self,
        action: Action,
        charges: &[Charge<'_>],
    ) -> Result<Vec<Decision>, StoreError> {
        let fingerprints: Vec<Fingerprint> =
            charges.iter().map(|charge| charge.fingerprint(self.secret)).collect();
        let mut room = Room::new(self);
        loop {
            let mut locked = self.lock_all(&fingerprints);
            let now = self.clock.now();
            let one = |charge, fingerprint: Fingerprint, together| {
                let shard = self.shard(fingerprint);
                One { store: self, shard, action, charge, fingerprint, now, together }
            };
            let all_or_nothing = matches!(action, Action::Acquire | Action::Peek);
            let mut together = true;
            let mut missing = 0;
            for (charge, &fingerprint) in charges.iter().zip(&fingerprints) {
                let table = locked.table(fingerprint);
                missing += usize::from(table.find(fingerprint).is_err());
                together &= !all_or_nothing || one(charge, fingerprint, true).fits(table);
            }
            // All the room that may be needed, before anything is written.
            if matches!(action, Action::Acquire | Action::ChargeUpTo | Action::Report)
                && together
                && !room.reserve(missing)
            {
                drop(locked);
                self.make_room(now, missing)?;
                continue;
            }
            let pairs = charges.iter().zip(&fingerprints);
            let decisions = pairs.map(|(charge, &fingerprint)| {
                let verdict =
                    one(charge, fingerprint, together).apply(locked.table(fingerprint), &mut room);
                verdict.map(|verdict| verdict.into_decision(charge.quota(), Source::Store))
            });
            let decisions: Option<Vec<Decision>> = decisions.collect();
            if let Some(decisions) = decisions {
                // Only now: a sweep in between could take away what a later charge has counted on.
                for (_, table) in &mut locked.0 {
                    self.sweep(table, now);
                }
                return Ok(decisions);
            }
        }
    }

    /// Keeps the bounds below every expiry. The shard's first: a search takes up the common bound
    /// before it looks at the shards, so it sees the one or is lowered by the other.
    fn expires_no_later_than(&self, shard: &Shard, expires_at: u64) {
        shard.next_expiry.fetch_min(expires_at, Ordering::SeqCst);
        self.keys.next_expiry.fetch_min(expires_at, Ordering::SeqCst);
    }

    /// Drops expired keys to make room for new ones. Called with no lock held.
    fn make_room(&self, now: u64, places: usize) -> Result<(), StoreError> {
        let full = Err(StoreError::Full { cap: self.max_keys });
        // One at a time: who comes during a search would see its bound half made.
        let _searching = self.keys.searching.lock().unwrap_or_else(PoisonError::into_inner);
        if self.keys() + places <= self.max_keys {
            return Ok(());
        }
        if self.keys.next_expiry.load(Ordering::SeqCst) > now {
            return full;
        }
        // Taken up before the search, so that what is inserted meanwhile lowers it again.
        self.keys.next_expiry.store(u64::MAX, Ordering::SeqCst);
        let mut made = false;
        let mut bound = u64::MAX;
        let mut searched = 0;
        for _ in 0..SHARDS {
            let shard = &self.shards[self.keys.hand.fetch_add(1, Ordering::Relaxed) % SHARDS];
            if shard.next_expiry.load(Ordering::SeqCst) <= now {
                let (seen, dropped) = shard.drop_expired(now);
                searched += seen;
                if dropped > 0 || searched > SEARCHED_AT_THE_CAP {
                    self.keys.count.fetch_sub(dropped, Ordering::Relaxed);
                    made = dropped > 0;
                    bound = now;
                    break;
                }
            }
            bound = bound.min(shard.next_expiry.load(Ordering::SeqCst));
        }
        self.keys.next_expiry.fetch_min(bound, Ordering::SeqCst);
        if made { Ok(()) } else { full }
    }

    fn sweep(&self, table: &mut Table, now: u64) {
        let dropped = table.sweep(now);
        if dropped > 0 {
            self.keys.count.fetch_sub(dropped, Ordering::Relaxed);
        }
    }

    #[inline]
    fn shard(&self, fingerprint: Fingerprint) -> &Shard {
        &self.shards[fingerprint.remainder_of(SHARDS)]
    }

    /// Locks every shard of these keys, in ascending order, so that two callers never wait for each
    /// other in a circle.
    fn lock_all(&self, fingerprints: &[Fingerprint]) -> Locked<'_> {
        let mut indices: Vec<usize> =
            fingerprints.iter().map(|&fingerprint| fingerprint.remainder_of(SHARDS)).collect();
        indices.sort_unstable();
        indices.dedup();
        loop {
            let mut locked = Vec::with_capacity(indices.len());
            let contended =
                indices.iter().find(|&&index| match self.shards[index].try_lock_briefly() {
                    Some(table) => {
                        locked.push((index, table));
                        false
                    }
                    None => true,
                });
            let Some(&contended) = contended else { return Locked(locked) };
            // The holder was most likely preempted. Meanwhile the other shards must be free for
            // other threads, so this one waits without any lock, and starts again.
            drop(locked);
            drop(self.shards[contended].lock());
        }
    }
}

/// One charge, and what its table, which is locked, is asked.
struct One<'a> {
    store: &'a MemoryStore,
    shard: &'a Shard,
    action: Action,
    charge: &'a Charge<'a>,
    fingerprint: Fingerprint,
    now: u64,
    together: bool,
}

impl One<'_> {
    /// Whether its units could be taken.
    fn fits(self, table: &mut Table) -> bool {
        match self.charge.quota().algorithm() {
            Algorithm::SlidingLog => self.fits_as::<Log>(table),
            Algorithm::SlidingCounter => self.fits_as::<Counter>(table),
            Algorithm::FixedWindow => self.fits_as::<Window>(table),
            Algorithm::TokenBucket | Algorithm::LeakyBucket => self.fits_as::<Bucket>(table),
        }
    }

    fn fits_as<C: Kept>(self, table: &mut Table) -> bool {
        let Ok(at) = table.find(self.fingerprint) else { return true };
        let state = table.state(at);
        if !state.is_of(C::KIND) {
            return true;
        }
        let mut count = C::load(state, &mut table.logs);
        let fits = algorithm::fits(&mut count, self.charge.quota(), self.now, self.charge.units());
        count.put_back(state, &mut table.logs);
        fits
    }

    /// The action. `None`: a new key has no room.
    fn apply(self, table: &mut Table, room: &mut Room<'_>) -> Option<Verdict> {
        match self.charge.quota().algorithm() {
            Algorithm::SlidingLog => self.apply_as::<Log>(table, room),
            Algorithm::SlidingCounter => self.apply_as::<Counter>(table, room),
            Algorithm::FixedWindow => self.apply_as::<Window>(table, room),
            Algorithm::TokenBucket | Algorithm::LeakyBucket => self.apply_as::<Bucket>(table, room),
        }
    }

    fn apply_as<C: Kept>(self, table: &mut Table, room: &mut Room<'_>) -> Option<Verdict> {
        let quota = self.charge.quota();
        let found = table.find(self.fingerprint);
        if self.action == Action::Reset {
            if let Ok(at) = found {
                self.remove(table, at);
            }
            return Some(Verdict::untouched(quota));
        }
        let found = match found {
            Ok(at) if table.state(at).is_of(C::KIND) => {
                return Some(self.apply_to_known::<C>(table, at));
            }
            other => other,
        };
        let mut count = C::default();
        let outcome =
            algorithm::apply(&mut count, self.action, self.charge, self.now, self.together);
        let verdict = Some(outcome.verdict);
        if !outcome.written {
            return verdict;
        }
        match found {
            // The policy's algorithm was changed. What the old one counted says nothing to the new
            // one.
            Ok(at) => {
                self.remove(table, at);
                self.apply_as::<C>(table, room)
            }
            Err(_) if count.is_empty() => verdict,
            Err(at) => {
                if !room.reserve(1) {
                    return None;
                }
                room.take();
                let kept = count.keep(quota, None, &mut table.logs);
                self.store.expires_no_later_than(self.shard, kept.expires_at());
                table.insert(at, self.fingerprint, kept);
                verdict
            }
        }
    }

    /// The action, but for a reset, on a key that is there.
    #[inline(always)]
    #[expect(
        clippy::inline_always,
        reason = "for each way that it is called, most of it is known and falls away"
    )]
    fn apply_to_known<C: Kept>(&self, table: &mut Table, at: usize) -> Verdict {
        let quota = self.charge.quota();
        let before = table.state(at);
        let mut count = C::load(before, &mut table.logs);
        let outcome =
            algorithm::apply(&mut count, self.action, self.charge, self.now, self.together);
        if !outcome.written {
            count.put_back(before, &mut table.logs);
            if matches!(self.action, Action::Acquire | Action::ChargeUpTo | Action::Report) {
                // A limit was lowered, and the entry would expire before its bucket has drained.
                if !before.lives_for(C::KIND, quota) {
                    table.set(at, before.living_for(C::KIND, quota));
                }
            }
        } else if count.is_empty() {
            self.remove(table, at);
        } else {
            let kept = count.keep(quota, Some(before), &mut table.logs);
            if kept.may_expire_before(before) {
                self.store.expires_no_later_than(self.shard, kept.expires_at());
            }
            table.set(at, kept);
        }
        outcome.verdict
    }

    fn remove(&self, table: &mut Table, at: usize) {
        table.remove(at);
        self.store.keys.count.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Places for new keys, counted against the cap before they are filled; what was not filled goes
/// back.
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
        let Some(more) = places.checked_sub(self.places).filter(|more| *more > 0) else {
            return true;
        };
        let grow = |keys: usize| keys.checked_add(more).filter(|keys| *keys <= self.store.max_keys);
        let reserved =
            self.store.keys.count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, grow).is_ok();
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
            self.store.keys.count.fetch_sub(self.places, Ordering::Relaxed);
        }
    }
}

impl Store for MemoryStore {
    async fn decide(&self, action: Action, charge: &Charge<'_>) -> Result<Decision, StoreError> {
        self.decide_now(action, charge)
    }

    async fn decide_all(
        &self,
        action: Action,
        charges: &[Charge<'_>],
    ) -> Result<Vec<Decision>, StoreError> {
        self.decide_all_now(action, charges)
    }

    fn clock(&self) -> &dyn Clock {
        match &self.clock {
            StoreClock::System(clock) => clock,
            StoreClock::Other(clock) => &**clock,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;
    use crate::quota::Quota;

    /// While one shard is held, a decision on many shards waits for it and holds none of the
    /// others.
    #[test]
    fn a_decision_that_waits_for_one_shard_holds_no_other() {
        let store = MemoryStore::new();
        let quota = Quota::fixed_window(1_000_000, Duration::from_secs(3_600)).expect("valid");
        let keys: Vec<String> = (0..64).map(|number| format!("user-{number}")).collect();
        let charges: Vec<Charge<'_>> = keys.iter().map(|key| Charge::new(key, &quota)).collect();
        let shard = |charge: &Charge<'_>| charge.fingerprint(store.secret).remainder_of(SHARDS);
        let last = charges.iter().map(shard).max().expect("some");
        let (started, starts) = channel();
        let (done, results) = channel();
        std::thread::scope(|scope| {
            let held = store.shards[last].lock();
            scope.spawn(|| {
                started.send(()).expect("heard");
                store.decide_all_now(Action::Acquire, &charges).expect("decided");
            });
            starts.recv().expect("started");
            let (store, charges, done) = (&store, &charges, done);
            scope.spawn(move || {
                for _ in 0..200 {
                    for charge in charges.iter().filter(|charge| shard(charge) != last) {
                        store.decide_now(Action::Acquire, charge).expect("decided");
                    }
                    std::thread::yield_now();
                }
                done.send(()).expect("heard");
            });
            let decided = results.recv_timeout(Duration::from_secs(30));
            drop(held);
            decided.expect("the other shards are free");
        });
        assert!(
            charges.iter().all(|charge| store
                .decide_now(Action::Peek, charge)
                .is_ok_and(|found| found.allowed))
        );
    }
}
