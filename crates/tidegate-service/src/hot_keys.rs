//! [`HotKeys`]: the keys that were allowed, denied, and denied in shadow mode most in the last
//! minutes, in bounded memory.
//!
//! The keys of a minute are counted by Space-Saving (Metwally, Agrawal, El Abbadi 2005): a sketch
//! has a fixed number of entries, and a new key replaces the one with the lowest count. It inherits
//! that count, which is also its maximum error. A key with more than one in [`SKETCH_ENTRIES`] of
//! the decisions of a sketch is therefore always in it.
//!
//! Recording is part of every decision, so it never blocks: if the lock of a shard stays busy, the
//! decision is not recorded. Each core has shards of its own, so that the counts of a hot key are
//! not on a cache line that all cores write; readers add them up.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::hash::{BuildHasher as _, Hasher as _};
use std::hint::spin_loop;
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread;

use foldhash::fast::RandomState;
use tidegate::Timestamp;

use crate::metrics::RequestOutcome;
use crate::metrics::counters::stripe;

/// Many shards with few entries each: a linear search of a sketch takes only nanoseconds. There are
/// 1,024 entries per minute for each outcome, of each stripe.
const SHARDS: usize = 32;
/// Maximum number of stripes, each of which takes up to 1.5 MB with keys of 30 bytes.
const MAX_STRIPES: usize = 16;
const SKETCH_ENTRIES: usize = 32;
const MAX_MINUTES: usize = 5;
const SECONDS_PER_MINUTE: u64 = 60;
/// Longer keys and policy names are not recorded. The library rejects them as well.
const MAX_BYTES: usize = 512;
/// Number of attempts to lock a shard. A record holds the lock for nanoseconds, so more failures
/// mean that the holder is a reader or was preempted.
const SPIN_LIMIT: usize = 16;

/// Most frequent keys of the last minutes, by outcome.
pub struct HotKeys {
    /// Shards of each stripe.
    stripes: Box<[Box<[HotKeyShard]>]>,
    /// Randomly seeded, because attackers choose keys. Keys with equal hashes would only share a
    /// shard, whose size and time are bounded, so the hash need not be a cryptographic one.
    hasher: RandomState,
}

/// Key that was seen at most `count` times and at least `count - error` times.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize, utoipa::ToSchema)]
pub struct HotKey {
    pub policy: String,
    pub key: String,
    pub count: u64,
    pub error: u64,
}

/// Shard on its own cache lines, to avoid false sharing between the locks.
#[derive(Default)]
#[repr(align(128))]
struct HotKeyShard(Mutex<Minutes>);

/// Ring buffer: minute n is at index n modulo its length.
type Minutes = [Minute; MAX_MINUTES];

#[derive(Default)]
struct Minute {
    number: u64,
    /// By outcome.
    sketches: [Sketch; 3],
}

/// Entries of a sketch, in arrays by field: nearly every search reads only the tags.
#[derive(Default)]
struct Sketch {
    /// Part of the hash of each key.
    tags: Vec<u32>,
    counts: Vec<u64>,
    entries: Vec<SketchEntry>,
}

#[derive(Default)]
struct SketchEntry {
    error: u64,
    /// Policy and key in one allocation, which is reused for the next key.
    name: String,
    policy_bytes: usize,
}

/// Returns the time of a store's clock in seconds.
pub(crate) fn seconds(time: Timestamp) -> u64 {
    time.as_micros() / 1_000_000
}

impl HotKeys {
    pub fn new() -> Self {
        let stripes = thread::available_parallelism().map_or(1, usize::from).clamp(1, MAX_STRIPES);
        let shards = || (0..SHARDS).map(|_| HotKeyShard::default()).collect();
        Self { stripes: (0..stripes).map(|_| shards()).collect(), hasher: RandomState::default() }
    }

    /// Counts a decision at a time of any monotonic clock. Returns false if it was not recorded.
    pub fn record(
        &self,
        now_seconds: u64,
        policy: &str,
        key: &str,
        outcome: RequestOutcome,
    ) -> bool {
        if policy.len() > MAX_BYTES || key.len() > MAX_BYTES {
            return false;
        }
        // Names with the same text, split elsewhere, share a hash but no entry.
        let mut hasher = self.hasher.build_hasher();
        hasher.write(key.as_bytes());
        hasher.write(policy.as_bytes());
        let hash = hasher.finish();
        let [shard, _, _, _, tag @ ..] = hash.to_le_bytes();
        let stripe = stripe();
        let shards = match self.stripes.get(stripe) {
            Some(shards) => shards,
            None => &self.stripes[stripe % self.stripes.len()],
        };
        let shard = &shards[usize::from(shard) % SHARDS];
        let Some(mut minutes) = shard.try_lock() else { return false };
        let Some(minute) = minute_at(&mut minutes, now_seconds) else { return false };
        minute.sketches[outcome as usize].add(u32::from_le_bytes(tag), policy, key);
        true
    }

    /// Returns the `limit` most frequent keys of the last minutes, by their guaranteed count.
    pub fn heaviest(&self, now_seconds: u64, outcome: RequestOutcome, limit: usize) -> Vec<HotKey> {
        let mut keys: Vec<HotKey> = self.totals(now_seconds, outcome).flatten().collect();
        keys.sort_unstable_by(|one, other| one.rank().cmp(&other.rank()));
        keys.truncate(limit);
        keys
    }

    /// Returns a key of the last minutes that a predicate on its policy and key accepts.
    pub fn find(&self, now_seconds: u64, is_wanted: impl Fn(&str, &str) -> bool) -> Option<String> {
        let outcomes = RequestOutcome::ALL.into_iter();
        let mut keys = outcomes.flat_map(|outcome| self.totals(now_seconds, outcome).flatten());
        keys.find(|hot| is_wanted(&hot.policy, &hot.key)).map(|hot| hot.key)
    }

    /// Iterates over the total counts of the keys of each shard, over all stripes.
    fn totals(
        &self,
        now_seconds: u64,
        outcome: RequestOutcome,
    ) -> impl Iterator<Item = Vec<HotKey>> {
        (0..SHARDS).map(move |shard| {
            let parts: Vec<_> = self.stripes.iter().map(|shards| shards[shard].lock()).collect();
            totals(&parts, now_seconds, outcome)
        })
    }
}

impl HotKey {
    fn rank(&self) -> impl Ord {
        (Reverse(self.count - self.error), Reverse(self.count), &self.policy, &self.key)
    }
}

impl HotKeyShard {
    fn lock(&self) -> MutexGuard<'_, Minutes> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the shard, or returns `None` after a short spin.
    fn try_lock(&self) -> Option<MutexGuard<'_, Minutes>> {
        for _ in 0..SPIN_LIMIT {
            match self.0.try_lock() {
                Ok(minutes) => return Some(minutes),
                Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
                Err(TryLockError::WouldBlock) => spin_loop(),
            }
        }
        None
    }
}

/// Returns the current minute; `None` if its slot already belongs to a later minute.
fn minute_at(minutes: &mut Minutes, now_seconds: u64) -> Option<&mut Minute> {
    let number = now_seconds / SECONDS_PER_MINUTE;
    let minute = &mut minutes[(number % MAX_MINUTES as u64) as usize];
    if minute.number < number {
        *minute = Minute { number, ..Minute::default() };
    }
    (minute.number == number).then_some(minute)
}

/// Returns the total counts of a shard's keys over the last minutes.
fn totals(
    parts: &[MutexGuard<'_, Minutes>],
    now_seconds: u64,
    outcome: RequestOutcome,
) -> Vec<HotKey> {
    let oldest = (now_seconds / SECONDS_PER_MINUTE).saturating_sub(MAX_MINUTES as u64 - 1);
    let recent =
        parts.iter().flat_map(|minutes| minutes.iter()).filter(|minute| minute.number >= oldest);
    let sketches = recent.map(|minute| &minute.sketches[outcome as usize]);
    // A key that is missing in a sketch may have been seen as often as its lowest count. Starting
    // with the sum of these keeps each total an upper bound.
    let max_missed: u64 = sketches.clone().map(Sketch::max_missed).sum();
    let mut totals: HashMap<(&str, &str), (u64, u64)> = HashMap::new();
    for sketch in sketches {
        let missed_here = sketch.max_missed();
        for (entry, seen) in sketch.entries.iter().zip(&sketch.counts) {
            let (count, error) =
                totals.entry(entry.policy_and_key()).or_insert((max_missed, max_missed));
            *count = *count - missed_here + seen;
            *error = *error - missed_here + entry.error;
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
    fn add(&mut self, tag: u32, policy: &str, key: &str) {
        if let Some(index) = self.find(tag, policy, key) {
            self.counts[index] += 1;
            return;
        }
        let index = if self.entries.len() < SKETCH_ENTRIES {
            self.tags.push(tag);
            self.counts.push(0);
            self.entries.push(SketchEntry::default());
            self.entries.len() - 1
        } else {
            self.lightest()
        };
        // The new key may have been seen before, up to as often as the one that it replaces.
        self.tags[index] = tag;
        self.entries[index].replace(self.counts[index], policy, key);
        self.counts[index] += 1;
    }

    fn find(&self, tag: u32, policy: &str, key: &str) -> Option<usize> {
        let is_key =
            |(index, known): &(usize, &u32)| **known == tag && self.entries[*index].is(policy, key);
        self.tags.iter().enumerate().find(is_key).map(|(index, _)| index)
    }

    /// Returns the first entry with the lowest count.
    fn lightest(&self) -> usize {
        let counts = self.counts.iter().enumerate();
        counts.min_by_key(|(_, count)| **count).map_or(0, |(index, _)| index)
    }

    /// Returns the maximum number of times that a key without an entry was seen.
    fn max_missed(&self) -> u64 {
        let is_full = self.entries.len() == SKETCH_ENTRIES;
        self.counts.iter().copied().min().filter(|_| is_full).unwrap_or(0)
    }
}

impl SketchEntry {
    fn policy_and_key(&self) -> (&str, &str) {
        self.name.split_at(self.policy_bytes)
    }

    fn is(&self, policy: &str, key: &str) -> bool {
        let (known_policy, known_key) = self.name.as_bytes().split_at(self.policy_bytes);
        known_key == key.as_bytes() && known_policy == policy.as_bytes()
    }

    fn replace(&mut self, error: u64, policy: &str, key: &str) {
        self.error = error;
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
    use RequestOutcome::{Allowed, Denied};

    const NOW: u64 = 1_000_000;

    fn hot(key: &str, count: u64) -> HotKey {
        HotKey { policy: "per-user".to_owned(), key: key.to_owned(), count, error: 0 }
    }

    fn record_times(hot_keys: &HotKeys, now_seconds: u64, key: &str, times: u64) {
        for _ in 0..times {
            assert!(hot_keys.record(now_seconds, "per-user", key, Allowed));
        }
    }

    /// Returns a different key for each number, in random order.
    fn random_key(number: u64) -> String {
        let mixed = number
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .rotate_left(29)
            .wrapping_mul(0xbf58_476d_1ce4_e5b9);
        format!("{mixed:016x}")
    }

    #[test]
    fn few_keys_are_counted_exactly_and_sorted_by_count() {
        let hot_keys = HotKeys::new();
        for number in 1..=100_u64 {
            record_times(&hot_keys, NOW, &format!("user{number}"), number);
        }
        assert_eq!(
            hot_keys.heaviest(NOW, Allowed, 3),
            [hot("user100", 100), hot("user99", 99), hot("user98", 98)]
        );
        assert_eq!(hot_keys.heaviest(NOW, Allowed, 1_000).len(), 100);
        assert_eq!(hot_keys.heaviest(NOW, Allowed, 0), []);
    }

    #[test]
    fn allowed_and_denied_are_counted_separately() {
        let hot_keys = HotKeys::new();
        record_times(&hot_keys, NOW, "both", 2);
        hot_keys.record(NOW, "per-user", "both", Denied);
        assert_eq!(hot_keys.heaviest(NOW, Allowed, 10), [hot("both", 2)]);
        assert_eq!(hot_keys.heaviest(NOW, Denied, 10), [hot("both", 1)]);
    }

    #[test]
    fn policy_and_key_are_distinguished() {
        let hot_keys = HotKeys::new();
        for (policy, key) in [("ab", "c"), ("a", "bc"), ("", "abc"), ("abc", ""), ("ab", "c")] {
            hot_keys.record(NOW, policy, key, Allowed);
        }
        let counts = hot_keys.heaviest(NOW, Allowed, 10);
        let counts: Vec<_> =
            counts.iter().map(|hot| (hot.policy.as_str(), hot.key.as_str(), hot.count)).collect();
        assert_eq!(counts, [("ab", "c", 2), ("", "abc", 1), ("a", "bc", 1), ("abc", "", 1)]);
    }

    #[test]
    fn heavy_key_among_100_000_random_ones_is_found_within_its_error() {
        let hot_keys = HotKeys::new();
        let mut heavy = 0;
        for number in 0..100_000 {
            record_times(&hot_keys, NOW, &random_key(number), 1);
            if number % 50 == 49 {
                record_times(&hot_keys, NOW, "heavy", 1);
                heavy += 1;
            }
        }
        let hottest = &hot_keys.heaviest(NOW, Allowed, 1)[0];
        assert_eq!(hottest.key, "heavy");
        assert!((hottest.count - hottest.error..=hottest.count).contains(&heavy), "{hottest:?}");
    }

    #[test]
    fn every_count_is_within_its_error_with_full_sketches() {
        let hot_keys = HotKeys::new();
        let mut actual: HashMap<String, u64> = HashMap::new();
        for number in 0..60_000_u64 {
            // A quarter of the traffic is recurring keys, with different frequencies.
            let recurring = format!("recurring{}", (number * number / 7) % (1 + number % 997));
            let key = if number % 4 == 0 { recurring } else { random_key(number) };
            record_times(&hot_keys, NOW + number / 240, &key, 1);
            *actual.entry(key).or_default() += 1;
        }
        let hottest = hot_keys.heaviest(NOW + 249, Allowed, usize::MAX);
        assert!(hottest.len() > 1_000);
        for hot in &hottest {
            assert!(
                (hot.count - hot.error..=hot.count).contains(&actual[&hot.key]),
                "{} times {hot:?}",
                actual[&hot.key]
            );
        }
    }

    #[test]
    fn number_and_size_of_entries_are_bounded() {
        let hot_keys = HotKeys::new();
        for number in 0..50_000 {
            let length = usize::try_from(number % 512).expect("small");
            hot_keys.record(
                NOW + number / 100,
                "p",
                &format!("{:>length$}", random_key(number)),
                RequestOutcome::ALL[usize::try_from(number % 3).expect("small")],
            );
        }
        for minute in
            hot_keys.stripes.iter().flatten().flat_map(|shard| std::mem::take(&mut *shard.lock()))
        {
            for sketch in minute.sketches {
                assert!(
                    sketch.entries.len() <= SKETCH_ENTRIES
                        && sketch.entries.capacity() <= SKETCH_ENTRIES
                );
                assert!(sketch.entries.iter().all(|entry| entry.name.capacity() <= 2 * MAX_BYTES));
            }
        }
    }

    #[test]
    fn long_keys_and_policies_are_not_recorded() {
        let hot_keys = HotKeys::new();
        assert!(hot_keys.record(NOW, &"p".repeat(512), &"k".repeat(512), Allowed));
        assert!(!hot_keys.record(NOW, "p", &"k".repeat(513), Allowed));
        assert!(!hot_keys.record(NOW, &"p".repeat(513), "k", Allowed));
        assert_eq!(hot_keys.heaviest(NOW, Allowed, 10).len(), 1);
    }

    #[test]
    fn minutes_add_up_and_old_ones_expire() {
        let hot_keys = HotKeys::new();
        let start = NOW - NOW % 60;
        for minute in 0..5 {
            record_times(&hot_keys, start + 60 * minute, "k", 1);
        }
        for (minute, count) in [(4, 5), (5, 4), (7, 2), (8, 1)] {
            assert_eq!(hot_keys.heaviest(start + 60 * minute, Allowed, 10), [hot("k", count)]);
        }
        assert_eq!(hot_keys.heaviest(start + 60 * 9, Allowed, 10), []);
        record_times(&hot_keys, start + 60 * 7, "k", 1);
        assert_eq!(hot_keys.heaviest(start + 60 * 7, Allowed, 10), [hot("k", 3)]);
    }

    #[test]
    fn late_records_count_in_their_own_minute() {
        let hot_keys = HotKeys::new();
        record_times(&hot_keys, NOW + 60, "k", 1);
        record_times(&hot_keys, NOW, "k", 1);
        assert_eq!(hot_keys.heaviest(NOW + 60, Allowed, 10), [hot("k", 2)]);
        assert!(
            !hot_keys.record(NOW - 4 * 60, "per-user", "k", Allowed),
            "its slot belongs to a later minute"
        );
    }

    #[test]
    fn busy_shard_never_blocks_a_decision() {
        let hot_keys = HotKeys::new();
        let busy: Vec<_> = hot_keys.stripes.iter().flatten().map(HotKeyShard::lock).collect();
        assert!(!hot_keys.record(NOW, "per-user", "k", Allowed));
        drop(busy);
        assert!(hot_keys.record(NOW, "per-user", "k", Allowed));
    }

    #[test]
    fn concurrent_records_are_counted_exactly() {
        const KEYS: [&str; 8] = ["a", "b", "c", "d", "e", "f", "g", "h"];
        let hot_keys = HotKeys::new();
        let record = |key| u64::from(hot_keys.record(NOW, "per-user", key, Allowed));
        let work = |key| {
            let mut own_count = 0;
            let mut shared_count = 0;
            for round in 0..5_000 {
                own_count += record(key);
                shared_count += record("shared");
                if round % 1_000 == 0 {
                    hot_keys.heaviest(NOW, Allowed, 10);
                }
            }
            (hot(key, own_count), shared_count)
        };
        let (mut expected, shared_counts): (Vec<HotKey>, Vec<u64>) = std::thread::scope(|scope| {
            let threads = KEYS.map(|key| scope.spawn(move || work(key)));
            threads.into_iter().map(|thread| thread.join().expect("no panic")).unzip()
        });
        expected.push(hot("shared", shared_counts.iter().sum()));
        expected.retain(|hot| hot.count > 0);
        expected.sort_by(|one, other| one.rank().cmp(&other.rank()));
        assert_eq!(hot_keys.heaviest(NOW, Allowed, 100), expected);
    }
}
