//! [`Fingerprint`]: 128 bits that stand for a (key, policy), under a secret of the store.
//!
//! Keys are chosen by attackers, and who could make two of them share a fingerprint could use up another's limit. So
//! this is a *strongly universal* hash, not one that only mixes well: the text is a vector of 64-bit words, and each half of
//! the fingerprint is the upper half of a sum mod 2^128,
//!
//! ```text
//! (secret₀ + secret₁·word₁ + secret₂·word₂ + …) / 2^64
//! ```
//!
//! with its own random secrets of 128 bits. For any two different texts, whoever chose them, the chance that a half is
//! the same is 2^-64, and for both 2^-128: that is a theorem (multilinear hashing; Lemire and Kaser, *Strongly universal
//! string hashing is fast*, 2014), with no assumption but that the secrets are random and not known. Among ten million keys
//! two share a fingerprint with a chance of about 10^-25. It is also faster than `SipHash`, for the products do not wait for
//! each other.
//!
//! The sums themselves are linear, and where a key stands in the table follows from its fingerprint. So that nobody can learn
//! the secrets from what takes longer, two Feistel steps, which keep different sums different, mix them at the end.

use std::fmt;
use std::hash::{BuildHasher, RandomState};

use super::SHARDS;
use crate::key::MAX_KEY_BYTES;

/// What stands for a (key, policy). Greater than all is [`NONE`](Self::NONE).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Fingerprint {
    high: u64,
    low: u64,
}

impl Fingerprint {
    /// No key's.
    pub(super) const NONE: Self = Self { high: u64::MAX, low: u64::MAX };

    pub(super) fn new(high: u64, low: u64) -> Self {
        Self { high, low: low.min(u64::MAX - 1) }
    }

    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "a remainder of SHARDS")]
    pub(super) fn shard(self) -> usize {
        (self.low % SHARDS as u64) as usize
    }

    /// From 0 to `count`, in the order of fingerprints.
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "less than count")]
    pub(super) fn share_of(self, count: u32) -> usize {
        ((u128::from(self.high) * u128::from(count)) >> 64) as usize
    }
}

/// The words of the longest text.
const WORDS: usize = MAX_KEY_BYTES / 8;

/// The secrets of a store.
pub(super) struct Secret {
    /// For each word its multipliers, one for each half: the start, the lengths, the key's words and the policy's.
    start: Pair,
    lengths: Pair,
    key: Box<[Pair; WORDS]>,
    policy: Box<[Pair; WORDS]>,
    mix: [u64; 4],
    /// For texts longer than any key, which only who goes past the limiter can send.
    longer: RandomState,
}

type Pair = [u128; 2];

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

impl Secret {
    pub(super) fn new() -> Self {
        let random = RandomState::new();
        let mut count = 0_u64;
        let mut word = || {
            count += 1;
            random.hash_one(count)
        };
        let mut pair = || [(); 2].map(|()| u128::from(word()) << 64 | u128::from(word()));
        let (start, lengths) = (pair(), pair());
        let (key, policy) = (Box::new([(); WORDS].map(|()| pair())), Box::new([(); WORDS].map(|()| pair())));
        Self { start, lengths, key, policy, mix: [(); 4].map(|()| word()), longer: RandomState::new() }
    }

    #[inline]
    pub(super) fn fingerprint(&self, key: &str, policy: &str) -> Fingerprint {
        if key.len() > MAX_KEY_BYTES || policy.len() > MAX_KEY_BYTES {
            return self.fingerprint_of_longer(key, policy);
        }
        self.fingerprint_of(key.as_bytes(), policy.as_bytes())
    }

    #[inline]
    fn fingerprint_of(&self, key: &[u8], policy: &[u8]) -> Fingerprint {
        let mut sum = self.start;
        let lengths = (key.len() as u64) << 32 | policy.len() as u64;
        add(&mut sum, self.lengths, lengths);
        add_text(&mut sum, &self.key, key);
        add_text(&mut sum, &self.policy, policy);
        self.mixed((sum[0] >> 64) as u64, (sum[1] >> 64) as u64)
    }

    #[inline]
    fn mixed(&self, mut high: u64, mut low: u64) -> Fingerprint {
        let [a, b, c, d] = self.mix;
        low ^= folded(high ^ a, b);
        high ^= folded(low ^ c, d);
        Fingerprint::new(high, low)
    }

    #[cold]
    fn fingerprint_of_longer(&self, key: &str, policy: &str) -> Fingerprint {
        let half = |number: u8| self.longer.hash_one((number, key, policy));
        self.mixed(half(0), half(1))
    }
}

/// Each eight bytes a word. The last word may take in bytes of the one before: with the length, which is a word of its own,
/// two different texts are still two different vectors.
#[inline]
fn add_text(sum: &mut Pair, secrets: &[Pair; WORDS], text: &[u8]) {
    let Some(last) = text.last_chunk::<8>() else {
        return add(sum, secrets[0], short_word(text));
    };
    let (words, rest) = text.as_chunks::<8>();
    let mut secrets = secrets.iter();
    for (word, secret) in words.iter().zip(&mut secrets) {
        add(sum, *secret, u64::from_le_bytes(*word));
    }
    if !rest.is_empty()
        && let Some(secret) = secrets.next()
    {
        add(sum, *secret, u64::from_le_bytes(*last));
    }
}

/// Up to seven bytes.
#[inline]
fn short_word(text: &[u8]) -> u64 {
    text.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte))
}

#[inline]
fn add(sum: &mut Pair, secret: Pair, word: u64) {
    for (sum, secret) in sum.iter_mut().zip(secret) {
        *sum = sum.wrapping_add(secret.wrapping_mul(u128::from(word)));
    }
}

#[inline]
#[expect(clippy::cast_possible_truncation, reason = "both halves of the product, folded")]
fn folded(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    product as u64 ^ (product >> 64) as u64
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn different_texts_have_different_fingerprints(
            pairs in proptest::collection::hash_set(("[ab]{0,20}", "[ab]{0,20}"), 2..50),
        ) {
            let secret = Secret::new();
            let mut seen = HashMap::new();
            for (key, policy) in &pairs {
                let fingerprint = secret.fingerprint(key, policy);
                prop_assert_eq!(fingerprint, secret.fingerprint(key, policy));
                let other = seen.insert((fingerprint.high, fingerprint.low), (key, policy));
                prop_assert_eq!(other, None);
            }
        }
    }

    #[test]
    fn every_byte_of_a_text_of_any_length_tells() {
        let secret = Secret::new();
        for length in [1, 7, 8, 9, 15, 16, 17, 512, 513, 2_000] {
            let text = "k".repeat(length);
            for (key, policy) in [(text.as_str(), "p"), ("p", text.as_str())] {
                let fingerprint = secret.fingerprint(key, policy);
                assert_ne!(fingerprint, secret.fingerprint(policy, key));
                for at in 0..length {
                    let mut changed = text.clone();
                    changed.replace_range(at..=at, "K");
                    let changed = if key == "p" { secret.fingerprint(key, &changed) } else { secret.fingerprint(&changed, policy) };
                    assert_ne!(fingerprint, changed, "byte {at} of {length}");
                }
            }
        }
    }

    #[test]
    fn the_sums_are_those_of_the_theorem() {
        let secret = Secret { mix: [0; 4], ..Secret::new() };
        let words = [u64::from_le_bytes(*b"user-000"), u64::from_le_bytes(*b"00000042")];
        let half = |half: usize| {
            let lengths = secret.lengths[half].wrapping_mul(13 << 32 | 3);
            let first = secret.key[0][half].wrapping_mul(words[0].into());
            let second = secret.key[1][half].wrapping_mul(words[1].into());
            let policy = secret.policy[0][half].wrapping_mul(u128::from(u32::from_le_bytes(*b"api\0")));
            let sum = [lengths, first, second, policy].iter().fold(secret.start[half], |sum, one| sum.wrapping_add(*one));
            u64::try_from(sum >> 64).expect("64 bits")
        };
        assert_eq!(secret.fingerprint("user-00000042", "api"), Fingerprint::new(half(0), half(1)));
    }

    #[test]
    fn keys_that_look_alike_spread_over_shards_and_homes() {
        let secret = Secret::new();
        let (mut shards, mut homes) = (vec![0_u32; SHARDS], vec![0_u32; 1_000]);
        for number in 0..100_000 {
            let fingerprint = secret.fingerprint(&format!("user-{number:08}"), "per-user");
            shards[fingerprint.shard()] += 1;
            homes[fingerprint.share_of(1_000)] += 1;
        }
        // About 98 and 100 each, with a deviation of 10.
        assert!(shards.iter().all(|count| (30..180).contains(count)), "{shards:?}");
        assert!(homes.iter().all(|count| (30..180).contains(count)), "{homes:?}");
    }

    #[test]
    fn two_stores_have_two_secrets_and_show_neither() {
        let (one, other) = (Secret::new(), Secret::new());
        assert_ne!(one.fingerprint("k", "p"), other.fingerprint("k", "p"));
        assert_eq!(format!("{one:?}"), "Secret");
    }
}
