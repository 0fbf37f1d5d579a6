//! [`HotKeys`]: which keys were allowed and denied most in the last minutes, in bounded memory.
//!
//! The keys of a minute are counted by Space-Saving (Metwally, Agrawal, El Abbadi 2005): a sketch
//! has a fixed number of entries, and a new key takes over the lightest one with its count, which
//! is remembered as the newcomer's error. A key that makes up more than one part in
//! [`ENTRIES_A_SKETCH`] of what its sketch sees is always in it, however many others come by.
//!
//! It stands beside every decision, so it never waits: if a shard stays busy for longer than a
//! moment, the record is left out. Counts are of what was recorded.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::hint::spin_loop;
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

/// 1,024 entries a minute for allowed, as many for denied. Few in each of many shards: threads
/// seldom meet, and a sketch is so short that it needs no index: to search it takes some
/// nanoseconds.
const SHARDS: usize = 32;
const ENTRIES_A_SKETCH: usize = 32;
const MINUTES_KEPT: usize = 5;
const SECONDS_A_MINUTE: u64 = 60;
/// Longer keys and policy names are not recorded; the library takes none either.
const MAX_BYTES: usize = 512;
/// A record holds the lock for some nanoseconds: who fails so often has met a reader, or a thread
/// put to sleep.
const TRIES: usize = 16;

/// The heaviest allowed and denied keys of the last minutes.
pub(crate) struct HotKeys {
    shards: Box<[Shard]>,
    /// Its seed is the process's secret: attackers choose keys, and could otherwise crowd one
    /// shard.
    hasher: RandomState,
}

/// A key that came at most `count` times and at least `count - error` times.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub(crate) struct HotKey {
    pub(crate) policy: String,
    pub(crate) key: String,
    pub(crate) count: u64,
    pub(crate) error: u64,
}

/// On cache lines of its own, or a lock on one shard would slow its neighbours.
#[derive(Default)]
#[repr(align(128))]
struct Shard(Mutex<Minutes>);

/// A ring: minute n is in place n mod its length, until n + length takes it over.
type Minutes = [Minute; MINUTES_KEPT];

#[derive(Default)]
struct Minute {
    number: u64,
    allowed: Sketch,
    denied: Sketch,
}

#[derive(Default)]
struct Sketch {
    entries: Vec<Entry>,
}

#[derive(Default)]
struct Entry {
    hash: u64,
    count: u64,
    error: u64,
    /// The policy, then the key: one allocation, which the next key inherits.
    name: String,
    policy_bytes: usize,
}

impl HotKeys {
    pub(crate) fn new() -> Self {
        Self { shards: (0..SHARDS).map(|_| Shard::default()).collect(), hasher: RandomState::new() }
    }

    /// Counts a decision, at a time on any clock that goes forward. Answers whether it was
    /// recorded, not left out.
    pub(crate) fn record(&self, now_seconds: u64, policy: &str, key: &str, allowed: bool) -> bool {
        if policy.len() > MAX_BYTES || key.len() > MAX_BYTES {
            return false;
        }
        let hash = self.hasher.hash_one((policy, key));
        let Some(mut minutes) = self.shard(hash).lock_unless_busy() else { return false };
        let Some(minute) = minute_now(&mut minutes, now_seconds) else { return false };
        let sketch = if allowed { &mut minute.allowed } else { &mut minute.denied };
        sketch.add(hash, policy, key);
        true
    }

    /// The heaviest `limit` keys over the kept minutes, by how often each surely came.
    pub(crate) fn heaviest(&self, now_seconds: u64, allowed: bool, limit: usize) -> Vec<HotKey> {
        let mut keys: Vec<HotKey> = Vec::new();
        for shard in &self.shards {
            keys.extend(totals(&shard.lock(), now_seconds, allowed));
        }
        keys.sort_unstable_by(|one, other| one.rank().cmp(&other.rank()));
        keys.truncate(limit);
        keys
    }

    fn shard(&self, hash: u64) -> &Shard {
        let [byte, ..] = hash.to_le_bytes();
        &self.shards[usize::from(byte) % SHARDS]
    }
}

impl HotKey {
    fn rank(&self) -> impl Ord {
        (Reverse(self.count - self.error), Reverse(self.count), &self.policy, &self.key)
    }
}

impl Shard {
    fn lock(&self) -> MutexGuard<'_, Minutes> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_unless_busy(&self) -> Option<MutexGuard<'_, Minutes>> {
        for _ in 0..TRIES {
            match self.0.try_lock() {
                Ok(minutes) => return Some(minutes),
                Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
                Err(TryLockError::WouldBlock) => spin_loop(),
            }
        }
        None
    }
}

/// `None`: the time is so old that its place in the ring belongs to a later minute.
fn minute_now(minutes: &mut Minutes, now_seconds: u64) -> Option<&mut Minute> {
    let number = now_seconds / SECONDS_A_MINUTE;
    let minute = &mut minutes[(number % MINUTES_KEPT as u64) as usize];
    if minute.number < number {
        *minute = Minute { number, ..Minute::default() };
    }
    (minute.number == number).then_some(minute)
}

/// The counts of a shard's keys over the kept minutes.
fn totals(minutes: &Minutes, now_seconds: u64, allowed: bool) -> Vec<HotKey> {
    let oldest = (now_seconds / SECONDS_A_MINUTE).saturating_sub(MINUTES_KEPT as u64 - 1);
    let kept = minutes.iter().filter(|minute| minute.number >= oldest);
    let sketches = kept.map(|minute| if allowed { &minute.allowed } else { &minute.denied });
    // A key that a minute's sketch does not hold may have come as often as its lightest entry:
    // without this doubt, the sum could be less than what came.
    let doubt: u64 = sketches.clone().map(Sketch::lightest_count).sum();
    let mut totals: HashMap<(&str, &str), (u64, u64)> = HashMap::new();
    for sketch in sketches {
        let resolved_doubt = sketch.lightest_count();
        for entry in &sketch.entries {
            let (count, error) = totals.entry(entry.policy_and_key()).or_insert((doubt, doubt));
            *count = *count - resolved_doubt + entry.count;
            *error = *error - resolved_doubt + entry.error;
        }
    }
    totals
        .into_iter()
        .map(|((policy, key), (count, error))| HotKey {
            policy: policy.to_owned(),
            key: key.to_owned(),
            count,
            error,
        })
        .collect()
}

impl Sketch {
    fn add(&mut self, hash: u64, policy: &str, key: &str) {
        let is_it =
            |entry: &&mut Entry| entry.hash == hash && entry.policy_and_key() == (policy, key);
        if let Some(entry) = self.entries.iter_mut().find(is_it) {
            entry.count += 1;
            return;
        }
        if self.entries.len() < ENTRIES_A_SKETCH {
            self.entries.push(Entry::default());
        }
        if let Some(lightest) = self.entries.iter_mut().min_by_key(|entry| entry.count) {
            lightest.pass_to(hash, policy, key);
        }
    }

    /// A key that is not here has come so often at most.
    fn lightest_count(&self) -> u64 {
        let is_full = self.entries.len() == ENTRIES_A_SKETCH;
        self.entries.iter().map(|entry| entry.count).min().filter(|_| is_full).unwrap_or(0)
    }
}

impl Entry {
    fn policy_and_key(&self) -> (&str, &str) {
        self.name.split_at(self.policy_bytes)
    }

    /// The newcomer may have come before, up to as often as the one it replaces.
    fn pass_to(&mut self, hash: u64, policy: &str, key: &str) {
        self.hash = hash;
        self.error = self.count;
        self.count += 1;
        self.name.clear();
        self.name.reserve_exact(policy.len() + key.len());
        self.name.push_str(policy);
        self.name.push_str(key);
        self.policy_bytes = policy.len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: u64 = 1_000_000;

    fn hot(key: &str, count: u64) -> HotKey {
        HotKey { policy: "per-user".to_owned(), key: key.to_owned(), count, error: 0 }
    }

    fn record_times(hot_keys: &HotKeys, now_seconds: u64, key: &str, times: u64) {
        for _ in 0..times {
            assert!(hot_keys.record(now_seconds, "per-user", key, true));
        }
    }

    /// A different key for each number, without an order that a sketch could profit from.
    fn random_key(number: u64) -> String {
        let mixed = number
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .rotate_left(29)
            .wrapping_mul(0xbf58_476d_1ce4_e5b9);
        format!("{mixed:016x}")
    }

    #[test]
    fn few_keys_are_counted_exactly_and_the_heaviest_comes_first() {
        let hot_keys = HotKeys::new();
        for number in 1..=100_u64 {
            record_times(&hot_keys, NOW, &format!("user{number}"), number);
        }
        assert_eq!(
            hot_keys.heaviest(NOW, true, 3),
            [hot("user100", 100), hot("user99", 99), hot("user98", 98)]
        );
        assert_eq!(hot_keys.heaviest(NOW, true, 1_000).len(), 100);
        assert_eq!(hot_keys.heaviest(NOW, true, 0), []);
    }

    #[test]
    fn allowed_and_denied_are_counted_apart() {
        let hot_keys = HotKeys::new();
        record_times(&hot_keys, NOW, "both", 2);
        hot_keys.record(NOW, "per-user", "both", false);
        assert_eq!(hot_keys.heaviest(NOW, true, 10), [hot("both", 2)]);
        assert_eq!(hot_keys.heaviest(NOW, false, 10), [hot("both", 1)]);
    }

    #[test]
    fn a_key_is_one_of_its_policy_however_the_two_are_split() {
        let hot_keys = HotKeys::new();
        for (policy, key) in [("ab", "c"), ("a", "bc"), ("", "abc"), ("abc", ""), ("ab", "c")] {
            hot_keys.record(NOW, policy, key, true);
        }
        let counts = hot_keys.heaviest(NOW, true, 10);
        let counts: Vec<_> =
            counts.iter().map(|hot| (hot.policy.as_str(), hot.key.as_str(), hot.count)).collect();
        assert_eq!(counts, [("ab", "c", 2), ("", "abc", 1), ("a", "bc", 1), ("abc", "", 1)]);
    }

    #[test]
    fn a_heavy_key_among_100_000_random_ones_is_found_within_its_error() {
        let hot_keys = HotKeys::new();
        let mut heavy = 0;
        for number in 0..100_000 {
            record_times(&hot_keys, NOW, &random_key(number), 1);
            if number % 50 == 49 {
                record_times(&hot_keys, NOW, "heavy", 1);
                heavy += 1;
            }
        }
        let hottest = &hot_keys.heaviest(NOW, true, 1)[0];
        assert_eq!(hottest.key, "heavy");
        assert!((hottest.count - hottest.error..=hottest.count).contains(&heavy), "{hottest:?}");
    }

    #[test]
    fn every_count_is_within_its_error_over_several_minutes_of_crowding() {
        let hot_keys = HotKeys::new();
        let mut came: HashMap<String, u64> = HashMap::new();
        for number in 0..60_000_u64 {
            // A quarter of the traffic is keys that come again, some more often than others.
            let again = format!("again{}", (number * number / 7) % (1 + number % 997));
            let key = if number % 4 == 0 { again } else { random_key(number) };
            record_times(&hot_keys, NOW + number / 240, &key, 1);
            *came.entry(key).or_default() += 1;
        }
        let hottest = hot_keys.heaviest(NOW + 249, true, usize::MAX);
        assert!(hottest.len() > 1_000);
        for hot in &hottest {
            assert!(
                (hot.count - hot.error..=hot.count).contains(&came[&hot.key]),
                "{} times {hot:?}",
                came[&hot.key]
            );
        }
    }

    #[test]
    fn the_number_of_entries_and_their_bytes_are_bounded() {
        let hot_keys = HotKeys::new();
        for number in 0..50_000 {
            let length = usize::try_from(number % 512).expect("small");
            hot_keys.record(
                NOW + number / 100,
                "p",
                &format!("{:>length$}", random_key(number)),
                number % 2 == 0,
            );
        }
        for minute in hot_keys.shards.iter().flat_map(|shard| std::mem::take(&mut *shard.lock())) {
            for sketch in [minute.allowed, minute.denied] {
                assert!(
                    sketch.entries.len() <= ENTRIES_A_SKETCH
                        && sketch.entries.capacity() <= ENTRIES_A_SKETCH
                );
                assert!(sketch.entries.iter().all(|entry| entry.name.capacity() <= 2 * MAX_BYTES));
            }
        }
    }

    #[test]
    fn what_is_too_long_is_left_out() {
        let hot_keys = HotKeys::new();
        assert!(hot_keys.record(NOW, &"p".repeat(512), &"k".repeat(512), true));
        assert!(!hot_keys.record(NOW, "p", &"k".repeat(513), true));
        assert!(!hot_keys.record(NOW, &"p".repeat(513), "k", true));
        assert_eq!(hot_keys.heaviest(NOW, true, 10).len(), 1);
    }

    #[test]
    fn minutes_add_up_and_old_ones_fall_out() {
        let hot_keys = HotKeys::new();
        let start = NOW - NOW % 60;
        for minute in 0..5 {
            record_times(&hot_keys, start + 60 * minute, "k", 1);
        }
        for (minute, count) in [(4, 5), (5, 4), (7, 2), (8, 1)] {
            assert_eq!(hot_keys.heaviest(start + 60 * minute, true, 10), [hot("k", count)]);
        }
        assert_eq!(hot_keys.heaviest(start + 60 * 9, true, 10), []);
        record_times(&hot_keys, start + 60 * 7, "k", 1);
        assert_eq!(hot_keys.heaviest(start + 60 * 7, true, 10), [hot("k", 3)]);
    }

    #[test]
    fn a_thread_whose_time_is_a_little_late_counts_in_its_own_minute() {
        let hot_keys = HotKeys::new();
        record_times(&hot_keys, NOW + 60, "k", 1);
        record_times(&hot_keys, NOW, "k", 1);
        assert_eq!(hot_keys.heaviest(NOW + 60, true, 10), [hot("k", 2)]);
        assert!(
            !hot_keys.record(NOW - 4 * 60, "per-user", "k", true),
            "its place belongs to a later minute"
        );
    }

    #[test]
    fn a_busy_shard_never_makes_a_decision_wait() {
        let hot_keys = HotKeys::new();
        let busy: Vec<_> = hot_keys.shards.iter().map(Shard::lock).collect();
        assert!(!hot_keys.record(NOW, "per-user", "k", true));
        drop(busy);
        assert!(hot_keys.record(NOW, "per-user", "k", true));
    }

    #[test]
    fn what_many_threads_record_is_counted_exactly() {
        const OWN: [&str; 8] = ["a", "b", "c", "d", "e", "f", "g", "h"];
        let hot_keys = HotKeys::new();
        let recorded = |key| u64::from(hot_keys.record(NOW, "per-user", key, true));
        let work = |own| {
            let (mut of_own, mut of_shared) = (0, 0);
            for round in 0..5_000 {
                of_own += recorded(own);
                of_shared += recorded("shared");
                if round % 1_000 == 0 {
                    hot_keys.heaviest(NOW, true, 10);
                }
            }
            (hot(own, of_own), of_shared)
        };
        let (mut expected, of_shared): (Vec<HotKey>, Vec<u64>) = std::thread::scope(|scope| {
            let threads = OWN.map(|own| scope.spawn(move || work(own)));
            threads.into_iter().map(|thread| thread.join().expect("no panic")).unzip()
        });
        expected.push(hot("shared", of_shared.iter().sum()));
        expected.retain(|hot| hot.count > 0);
        expected.sort_by(|one, other| one.rank().cmp(&other.rank()));
        assert_eq!(hot_keys.heaviest(NOW, true, 100), expected);
    }
}
