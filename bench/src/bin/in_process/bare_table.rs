//! A bare sharded table as a lower bound: the work that no limiter with keys can avoid.
//!
//! It hashes the key, locks one of 256 shards, reads the clock of Tidegate, finds the key, which is
//! inline, and updates one number. It has no sweep, no bound on its size, no check of the key, no
//! other algorithm, and answers only yes or no.

use std::hash::{BuildHasher as _, RandomState};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context as _, Result};
use tidegate::{Clock as _, SystemClock};

use crate::candidates::{Candidate, Scenario, key_of};

const SHARDS: usize = 256;
const KEY_BYTES: usize = 16;
/// Number of secrets to try; one of a hundred does not suit.
const ATTEMPTS: usize = 20;

pub(crate) struct BareTable {
    shards: Box<[Shard]>,
    clock: SystemClock,
    secrets: Secrets,
    /// Microseconds per unit.
    interval: u64,
    /// Microseconds that a full bucket is ahead of the clock.
    tolerance: u64,
}

/// Secrets of the hash.
struct Secrets([u64; 2]);

#[repr(align(64))]
struct Shard(Mutex<Box<[Slot]>>);

/// A key, which is zero in an empty slot, and the time at which its bucket is empty.
#[derive(Debug, Clone, Copy)]
struct Slot {
    key: [u64; 2],
    empty_at: u64,
}

impl Candidate for BareTable {
    const NAME: &'static str = "bare table";

    fn new(keys: usize, scenario: Scenario) -> Result<Self> {
        let (seconds, burst) = scenario.bucket(keys);
        // Shards do not fill evenly.
        let slots = (keys / SHARDS * 3 / 2 + 64).next_power_of_two();
        let empty = Slot { key: [0; 2], empty_at: 0 };
        let shard = || Shard(Mutex::new(vec![empty; slots].into_boxed_slice()));
        let secrets = || {
            let random = RandomState::new();
            Secrets([random.hash_one(0), random.hash_one(1)])
        };
        // With a few secrets, so weak a hash would fill a shard, and a search in it would not end.
        let is_even = |secrets: &Secrets| secrets.fullest_shard(keys) <= slots / 8 * 7;
        let secrets = std::iter::repeat_with(secrets).take(ATTEMPTS).find(is_even);
        Ok(Self {
            shards: std::iter::repeat_with(shard).take(SHARDS).collect(),
            clock: SystemClock::new(),
            secrets: secrets.context("no secrets distribute the keys evenly")?,
            interval: seconds * 1_000_000,
            tolerance: seconds * 1_000_000 * u64::from(burst),
        })
    }

    fn decide(&self, key: &String) -> bool {
        let key = inline(key);
        let hash = self.secrets.hash(key);
        let shard = &self.shards[shard_of(hash)];
        let now = self.clock.now().as_micros();
        let mut slots = shard.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mask = slots.len() - 1;
        let mut at = (hash >> 8) as usize & mask;
        while slots[at].key != key {
            if slots[at].key == [0; 2] {
                slots[at].key = key;
                break;
            }
            at = (at + 1) & mask;
        }
        let empty_at = slots[at].empty_at.max(now) + self.interval;
        let is_allowed = empty_at <= now + self.tolerance;
        if is_allowed {
            slots[at].empty_at = empty_at;
        }
        is_allowed
    }
}

impl Secrets {
    /// Returns the number of keys in the fullest shard.
    fn fullest_shard(&self, keys: usize) -> usize {
        let mut counts = [0; SHARDS];
        for number in 0..keys {
            counts[shard_of(self.hash(inline(&key_of(number))))] += 1;
        }
        counts.into_iter().max().unwrap_or_default()
    }

    fn hash(&self, [first, last]: [u64; 2]) -> u64 {
        let Self([a, b]) = self;
        let product = u128::from(first ^ a) * u128::from(last ^ b);
        #[expect(clippy::cast_possible_truncation, reason = "both halves, folded")]
        let folded = product as u64 ^ (product >> 64) as u64;
        folded
    }
}

fn shard_of(hash: u64) -> usize {
    usize::from(hash.to_le_bytes()[0])
}

/// Returns a key of up to 16 bytes, with zeros at its end.
fn inline(key: &str) -> [u64; 2] {
    let mut bytes = [0; KEY_BYTES];
    bytes[..key.len()].copy_from_slice(key.as_bytes());
    let (words, _) = bytes.as_chunks::<8>();
    [u64::from_le_bytes(words[0]), u64::from_le_bytes(words[1])]
}
