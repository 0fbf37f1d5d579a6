//! [`Fingerprint`]: a 128-bit keyed hash of (key, policy), which identifies a count in memory.
//!
//! Attackers choose keys, and two keys with the same fingerprint would let an attacker exhaust the
//! limit of another client. Therefore this is a *universal* hash: the text is a vector of 64-bit
//! words, and the fingerprint is
//!
//! ```text
//! secret₀ + secret₁·word₁ + secret₂·word₂ + …  modulo the prime 2^127 − 1
//! ```
//!
//! with random secrets of 110 bits. Two different texts differ in some word, and for any values of
//! the other secrets, at most one value of that word's secret makes the sums equal. The collision
//! probability of any two texts is therefore at most 2^-109, assuming only that the secrets are
//! random and unknown; among ten million keys, a collision has a probability of about 10^-20. The
//! hash is also three times as fast as `SipHash`, because its products are independent.
//!
//! The sum is linear, and it determines the slot of a key. Two Feistel rounds, which are bijective,
//! mix it at the end, so that timing does not reveal the secrets.

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::sync::LazyLock;

use crate::charge::Charge;
use crate::key::MAX_KEY_BYTES;

/// A keyed hash of (key, policy). [`NONE`](Self::NONE) is greater than all others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Fingerprint {
    high: u64,
    low: u64,
}

impl Fingerprint {
    /// The fingerprint of an empty slot, which no key has.
    pub(super) const NONE: Self = Self { high: u64::MAX, low: u64::MAX };

    #[inline]
    pub(super) fn new(high: u64, low: u64) -> Self {
        // One bit, which no shard depends on, is clear in all but `NONE`.
        Self { high, low: low & !(1 << 30) }
    }

    /// Returns the fingerprint of a charge's key and policy.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a tenth of a decision, and called in few places")]
    pub(super) fn of(charge: &Charge<'_>, secret: &HashSecret) -> Self {
        let named;
        let policy = match charge.explicit_policy() {
            None => charge.quota().default_policy_sum(),
            Some(name) => {
                named = secret.policy_sum(name);
                &named
            }
        };
        secret.fingerprint(charge.key(), policy)
    }

    /// Returns whether the high half alone proves that this fingerprint is less than the other. It
    /// nearly always decides.
    #[inline]
    pub(super) fn is_clearly_before(self, other: Self) -> bool {
        self.high < other.high
    }

    /// Maps the fingerprint to `0..count`, independently of its order.
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "less than count")]
    pub(super) fn shard_index(self, count: usize) -> usize {
        (self.low % count as u64) as usize
    }

    /// Maps the fingerprint to `0..count`, preserving the order of fingerprints.
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "less than count")]
    pub(super) fn home_slot(self, count: u32) -> usize {
        ((u128::from(self.high) * u128::from(count)) >> 64) as usize
    }
}

/// Number of words in the longest text.
const WORDS: usize = MAX_KEY_BYTES / 8;

static GLOBAL_SECRET: LazyLock<HashSecret> = LazyLock::new(HashSecret::new);

/// The random secrets of the hash, one per word: the start, the length and words of the key, the
/// length and words of the policy.
pub(crate) struct HashSecret {
    start: Limbs,
    key_length: Limbs,
    key: [Limbs; WORDS],
    policy_length: Limbs,
    policy: [Limbs; WORDS],
    mix: [u64; 4],
    /// Hashes texts longer than any valid key. Only callers that bypass the limiter send them.
    oversized: RandomState,
}

/// The low and the high 55 bits of a secret, so that the sum of all products fits 127 bits.
type Limbs = [u64; 2];
const LIMB_BITS: u32 = 55;

impl fmt::Debug for HashSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HashSecret")
    }
}

impl HashSecret {
    fn new() -> Self {
        let mut words = RandomWords::default();
        Self {
            start: words.limbs(),
            key_length: words.limbs(),
            key: [(); WORDS].map(|()| words.limbs()),
            policy_length: words.limbs(),
            policy: [(); WORDS].map(|()| words.limbs()),
            mix: [(); 4].map(|()| words.next()),
            oversized: RandomState::new(),
        }
    }

    /// Returns the secret of this process.
    pub(crate) fn global() -> &'static Self {
        &GLOBAL_SECRET
    }

    /// Returns the policy's part of the sum, which all keys share.
    #[inline]
    pub(crate) fn policy_sum(&self, name: &str) -> PolicySum {
        let mut sum = Sum { low: self.start[0].into(), high: self.start[1].into() };
        if name.len() <= MAX_KEY_BYTES {
            sum.add_text(&self.policy_length, &self.policy, name.as_bytes());
        } else {
            sum.add_text(&self.policy_length, &self.policy, self.digest(name).as_bytes());
        }
        PolicySum(sum)
    }

    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a tenth of a decision, and called in few places")]
    #[expect(clippy::cast_possible_truncation, reason = "both halves, one by one")]
    fn fingerprint(&self, key: &str, policy: &PolicySum) -> Fingerprint {
        let text = key.as_bytes();
        // Most keys have from 9 to 16 bytes, which are two words.
        let sum = if let (true, Some(first), Some(last)) =
            (text.len().wrapping_sub(9) < 8, text.first_chunk::<8>(), text.last_chunk::<8>())
        {
            let mut sum = policy.0;
            sum.add(&self.key_length, text.len() as u64);
            sum.add(&self.key[0], u64::from_le_bytes(*first));
            sum.add(&self.key[1], u64::from_le_bytes(*last));
            sum
        } else {
            self.with_key(policy.0, key)
        };
        let sum = sum.modulo_prime();
        self.mix((sum >> 64) as u64, sum as u64)
    }

    #[inline(never)]
    fn with_key(&self, mut sum: Sum, key: &str) -> Sum {
        if key.len() <= MAX_KEY_BYTES {
            sum.add_text(&self.key_length, &self.key, key.as_bytes());
        } else {
            sum.add_text(&self.key_length, &self.key, self.digest(key).as_bytes());
        }
        sum
    }

    #[inline]
    fn mix(&self, mut high: u64, mut low: u64) -> Fingerprint {
        let [a, b, c, d] = self.mix;
        low ^= folded_product(high ^ a, b);
        high ^= folded_product(low ^ c, d);
        Fingerprint::new(high, low)
    }

    /// Returns a replacement for a text longer than any key. It cannot equal a key, because keys
    /// have no control characters.
    #[cold]
    fn digest(&self, text: &str) -> String {
        let half = |number: u8| self.oversized.hash_one((number, text));
        format!("\0{:016x}{:016x}", half(0), half(1))
    }
}

/// A source of random words.
#[derive(Debug, Default)]
struct RandomWords {
    state: RandomState,
    count: u64,
}

impl RandomWords {
    fn next(&mut self) -> u64 {
        self.count += 1;
        self.state.hash_one(self.count)
    }

    fn limbs(&mut self) -> Limbs {
        [(); 2].map(|()| self.next() >> (64 - LIMB_BITS))
    }
}

/// The policy's part of a fingerprint's sum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PolicySum(Sum);

/// A sum as low + 2^55 · high.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Sum {
    low: u128,
    high: u128,
}

impl Sum {
    /// Adds a product. It cannot overflow: 131 products of 64 and 55 bits fit 127 bits.
    #[inline]
    fn add(&mut self, secret: &Limbs, word: u64) {
        self.low = self.low.wrapping_add(u128::from(word) * u128::from(secret[0]));
        self.high = self.high.wrapping_add(u128::from(word) * u128::from(secret[1]));
    }

    /// Adds a text, eight bytes per word. The last word may overlap the previous one; because the
    /// length is a separate word, different texts still give different vectors.
    #[inline]
    fn add_text(&mut self, length: &Limbs, secrets: &[Limbs; WORDS], text: &[u8]) {
        self.add(length, text.len() as u64);
        let Some(last) = text.last_chunk::<8>() else {
            return self.add(&secrets[0], short_word(text));
        };
        let (words, _) = text.as_chunks::<8>();
        let before_last = (text.len() - 1) / 8;
        for (word, secret) in words[..before_last].iter().zip(secrets) {
            self.add(secret, u64::from_le_bytes(*word));
        }
        self.add(&secrets[before_last], u64::from_le_bytes(*last));
    }

    /// Reduces the sum to 127 bits: since 2^127 is 1 modulo the prime, the high bits are added to
    /// the low ones. The result need not be less than the prime to be unique.
    #[inline]
    fn modulo_prime(self) -> u128 {
        const SPLIT: u32 = 127 - LIMB_BITS;
        self.low + ((self.high & ((1 << SPLIT) - 1)) << LIMB_BITS) + (self.high >> SPLIT)
    }
}

/// Returns the word of a text of up to seven bytes.
#[inline]
fn short_word(text: &[u8]) -> u64 {
    text.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte))
}

#[inline]
#[expect(clippy::cast_possible_truncation, reason = "both halves of the product, folded")]
fn folded_product(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    product as u64 ^ (product >> 64) as u64
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    fn hash(secret: &HashSecret, key: &str, policy: &str) -> Fingerprint {
        secret.fingerprint(key, &secret.policy_sum(policy))
    }

    proptest! {
        #[test]
        fn different_texts_have_different_fingerprints(
            pairs in proptest::collection::hash_set(("[ab]{0,20}", "[ab]{0,20}"), 2..50),
        ) {
            let secret = HashSecret::new();
            let mut seen = HashMap::new();
            for (key, policy) in &pairs {
                let fingerprint = hash(&secret, key, policy);
                prop_assert_eq!(fingerprint, hash(&secret, key, policy));
                let other = seen.insert((fingerprint.high, fingerprint.low), (key, policy));
                prop_assert_eq!(other, None);
            }
        }
    }

    #[test]
    fn every_byte_of_a_text_matters() {
        let secret = HashSecret::new();
        for length in [1, 7, 8, 9, 15, 16, 17, 512, 513, 2_000] {
            let text = "k".repeat(length);
            for (key, policy) in [(text.as_str(), "p"), ("p", text.as_str())] {
                let fingerprint = hash(&secret, key, policy);
                assert_ne!(fingerprint, hash(&secret, policy, key));
                for at in 0..length {
                    let mut changed = text.clone();
                    changed.replace_range(at..=at, "K");
                    let changed = if key == "p" {
                        hash(&secret, key, &changed)
                    } else {
                        hash(&secret, &changed, policy)
                    };
                    assert_ne!(fingerprint, changed, "byte {at} of {length}");
                }
            }
        }
    }

    const PRIME: u128 = (1 << 127) - 1;

    /// Multiplies by doubling and adding, modulo the prime at each step.
    fn multiply(secret: Limbs, word: u64) -> u128 {
        let secret = u128::from(secret[1]) << LIMB_BITS | u128::from(secret[0]);
        (0..64).rev().fold(0, |sum, bit| {
            let doubled = sum * 2 % PRIME;
            if word >> bit & 1 == 1 { (doubled + secret) % PRIME } else { doubled }
        })
    }

    proptest! {
        #[test]
        fn the_sum_matches_its_definition(key in "\\PC{0,60}", policy in "[a-z]{0,7}") {
            let secret = HashSecret { mix: [0; 4], ..HashSecret::new() };
            let bytes = key.as_bytes();
            let mut words: Vec<u64> =
                bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
            if bytes.len() < 8 {
                words.push(short_word(bytes));
            } else if bytes.len() % 8 > 0 {
                words.push(u64::from_le_bytes(bytes[bytes.len() - 8..].try_into().expect("8")));
            }
            let lengths = multiply(secret.key_length, bytes.len() as u64)
                + multiply(secret.policy_length, policy.len() as u64);
            let mut sum = (multiply(secret.start, 1) + lengths % PRIME) % PRIME;
            sum = (sum + multiply(secret.policy[0], short_word(policy.as_bytes()))) % PRIME;
            for (word, secret) in words.iter().zip(secret.key.iter()) {
                sum = (sum + multiply(*secret, *word)) % PRIME;
            }
            let fingerprint = hash(&secret, &key, &policy);
            let found = u128::from(fingerprint.high) << 64 | u128::from(fingerprint.low);
            let with_cleared_bit = found | 1 << 30;
            prop_assert!(found % PRIME == sum || with_cleared_bit % PRIME == sum);
        }
    }

    #[test]
    fn similar_keys_spread_over_shards_and_home_slots() {
        let secret = HashSecret::new();
        let (mut shards, mut homes) = (vec![0_u32; 1_000], vec![0_u32; 1_000]);
        for number in 0..100_000 {
            let fingerprint = hash(&secret, &format!("user-{number:08}"), "per-user");
            shards[fingerprint.shard_index(1_000)] += 1;
            homes[fingerprint.home_slot(1_000)] += 1;
        }
        // About 100 each, with a standard deviation of 10.
        assert!(shards.iter().all(|count| (30..180).contains(count)), "{shards:?}");
        assert!(homes.iter().all(|count| (30..180).contains(count)), "{homes:?}");
    }

    #[test]
    fn secrets_are_random_and_hidden_from_debug_output() {
        let (first, second) = (HashSecret::new(), HashSecret::new());
        assert_ne!(hash(&first, "k", "p"), hash(&second, "k", "p"));
        assert_eq!(format!("{first:?}"), "HashSecret");
    }
}
