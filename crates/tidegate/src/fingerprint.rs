//! [`Fingerprint`]: 128 bits that stand for a (key, policy) in the memory of this process, under its secret.
//!
//! Keys are chosen by attackers, and who could make two of them share a fingerprint could use up
//! another's limit. So this is a *universal* hash, not one that only mixes well: the text is a
//! vector of 64-bit words, and the fingerprint is
//!
//! ```text
//! secret₀ + secret₁·word₁ + secret₂·word₂ + …  modulo the prime 2^127 − 1
//! ```
//!
//! with random secrets of 110 bits. Two different texts differ in some word; whatever the other
//! secrets are, there is one value at most of this word's secret for which the sums are the same.
//! So for any two texts, whoever chose them, the chance to share a fingerprint is 2^-110 at most,
//! with no assumption but that the secrets are random and not known. Among ten million keys two
//! share one with a chance of about 10^-20. It is also three times as fast as `SipHash`: the
//! products do not wait for each other.
//!
//! The sum itself is linear, and where a key stands in the table follows from its fingerprint. So
//! that nobody can learn the secrets from what takes longer, two Feistel steps, which keep
//! different sums different, mix it at the end.

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::sync::LazyLock;

use crate::key::MAX_KEY_BYTES;

/// What stands for a (key, policy). Greater than all is [`NONE`](Self::NONE).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Fingerprint {
    high: u64,
    low: u64,
}

impl Fingerprint {
    /// No key's.
    pub(crate) const NONE: Self = Self { high: u64::MAX, low: u64::MAX };

    pub(crate) fn new(high: u64, low: u64) -> Self {
        Self { high, low: low.min(u64::MAX - 1) }
    }

    /// Whether their first halves tell that it comes before the other. They nearly always do.
    #[inline]
    pub(crate) fn is_clearly_before(self, other: Self) -> bool {
        self.high < other.high
    }

    /// From 0 to `count`, without regard to the order of fingerprints.
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "less than count")]
    pub(crate) fn remainder_of(self, count: usize) -> usize {
        (self.low % count as u64) as usize
    }

    /// From 0 to `count`, in the order of fingerprints.
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "less than count")]
    pub(crate) fn share_of(self, count: u32) -> usize {
        ((u128::from(self.high) * u128::from(count)) >> 64) as usize
    }
}

/// The words of the longest text.
const WORDS: usize = MAX_KEY_BYTES / 8;

static SECRET: LazyLock<Secret> = LazyLock::new(Secret::new);

/// The secrets of this process.
pub(crate) struct Secret {
    /// One for each word: the start, the key's length and words, the policy's length and words.
    start: Limbs,
    key_length: Limbs,
    key: Box<[Limbs; WORDS]>,
    policy_length: Limbs,
    policy: Box<[Limbs; WORDS]>,
    mix: [u64; 4],
    /// For texts longer than any key, which only who goes past the limiter can send.
    longer: RandomState,
}

/// The low and the high 55 bits of a secret. So all products of a text can be added up in 127 bits.
type Limbs = [u64; 2];
const LIMB_BITS: u32 = 55;

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

impl Secret {
    pub(crate) fn new() -> Self {
        let random = RandomState::new();
        let mut count = 0_u64;
        let mut word = || {
            count += 1;
            random.hash_one(count)
        };
        let mut limbs = || [(); 2].map(|()| word() >> (64 - LIMB_BITS));
        let (start, key_length, policy_length) = (limbs(), limbs(), limbs());
        let (key, policy) =
            (Box::new([(); WORDS].map(|()| limbs())), Box::new([(); WORDS].map(|()| limbs())));
        let mix = [(); 4].map(|()| word());
        Self { start, key_length, key, policy_length, policy, mix, longer: RandomState::new() }
    }

    /// The secret of this process.
    pub(crate) fn of_this_process() -> &'static Self {
        &SECRET
    }

    /// The part of the sum that is the policy's: the same for all keys.
    #[inline]
    pub(crate) fn policy(&self, name: &str) -> PolicySum {
        let mut sum = Sum { low: self.start[0].into(), high: self.start[1].into() };
        if name.len() <= MAX_KEY_BYTES {
            sum.add_text(&self.policy_length, &self.policy, name.as_bytes());
        } else {
            sum.add_text(&self.policy_length, &self.policy, self.digest(name).as_bytes());
        }
        PolicySum(sum)
    }

    #[inline(always)]
    #[expect(
        clippy::inline_always,
        reason = "a tenth of what a decision takes, and its one caller is the decision"
    )]
    #[expect(clippy::cast_possible_truncation, reason = "both halves, one by one")]
    pub(crate) fn fingerprint(&self, key: &str, policy: &PolicySum) -> Fingerprint {
        if key.len() > MAX_KEY_BYTES {
            return self.fingerprint_of_longer(key, policy);
        }
        let mut sum = policy.0;
        sum.add_text(&self.key_length, &self.key, key.as_bytes());
        let sum = sum.modulo_prime();
        self.mixed((sum >> 64) as u64, sum as u64)
    }

    #[cold]
    fn fingerprint_of_longer(&self, key: &str, policy: &PolicySum) -> Fingerprint {
        self.fingerprint(&self.digest(key), policy)
    }

    #[inline]
    fn mixed(&self, mut high: u64, mut low: u64) -> Fingerprint {
        let [a, b, c, d] = self.mix;
        low ^= folded(high ^ a, b);
        high ^= folded(low ^ c, d);
        Fingerprint::new(high, low)
    }

    /// Stands for a text longer than any key. Keys have no control characters, so it is like none
    /// of them.
    #[cold]
    fn digest(&self, text: &str) -> String {
        let half = |number: u8| self.longer.hash_one((number, text));
        format!("\0{:016x}{:016x}", half(0), half(1))
    }
}

/// The part of a fingerprint's sum that is the policy's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PolicySum(Sum);

/// low + 2^55 · high
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Sum {
    low: u128,
    high: u128,
}

impl Sum {
    /// 131 products of 64 and 55 bits fit 127: nothing overflows.
    #[inline]
    fn add(&mut self, secret: &Limbs, word: u64) {
        self.low = self.low.wrapping_add(u128::from(word) * u128::from(secret[0]));
        self.high = self.high.wrapping_add(u128::from(word) * u128::from(secret[1]));
    }

    /// Each eight bytes a word. The last word may take in bytes of the one before: with the length,
    /// which is a word of its own, two different texts are still two different vectors.
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

    /// 2^127 is 1 modulo the prime: what is above is added below, until all of it fits. It need not
    /// be less than the prime to tell what is different.
    #[inline]
    fn modulo_prime(self) -> u128 {
        const SPLIT: u32 = 127 - LIMB_BITS;
        self.low + ((self.high & ((1 << SPLIT) - 1)) << LIMB_BITS) + (self.high >> SPLIT)
    }
}

/// Up to seven bytes.
#[inline]
fn short_word(text: &[u8]) -> u64 {
    text.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte))
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

    fn of(secret: &Secret, key: &str, policy: &str) -> Fingerprint {
        secret.fingerprint(key, &secret.policy(policy))
    }

    proptest! {
        #[test]
        fn different_texts_have_different_fingerprints(
            pairs in proptest::collection::hash_set(("[ab]{0,20}", "[ab]{0,20}"), 2..50),
        ) {
            let secret = Secret::new();
            let mut seen = HashMap::new();
            for (key, policy) in &pairs {
                let fingerprint = of(&secret, key, policy);
                prop_assert_eq!(fingerprint, of(&secret, key, policy));
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
                let fingerprint = of(&secret, key, policy);
                assert_ne!(fingerprint, of(&secret, policy, key));
                for at in 0..length {
                    let mut changed = text.clone();
                    changed.replace_range(at..=at, "K");
                    let changed = if key == "p" {
                        of(&secret, key, &changed)
                    } else {
                        of(&secret, &changed, policy)
                    };
                    assert_ne!(fingerprint, changed, "byte {at} of {length}");
                }
            }
        }
    }

    const PRIME: u128 = (1 << 127) - 1;

    /// By the schoolbook: times two and plus, modulo the prime at each step.
    fn times(secret: Limbs, word: u64) -> u128 {
        let secret = u128::from(secret[1]) << LIMB_BITS | u128::from(secret[0]);
        (0..64).rev().fold(0, |sum, bit| {
            let doubled = sum * 2 % PRIME;
            if word >> bit & 1 == 1 { (doubled + secret) % PRIME } else { doubled }
        })
    }

    proptest! {
        #[test]
        fn the_sum_is_the_one_of_the_proof(key in "\\PC{0,60}", policy in "[a-z]{0,7}") {
            let secret = Secret { mix: [0; 4], ..Secret::new() };
            let bytes = key.as_bytes();
            let mut words: Vec<u64> = bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().expect("8"))).collect();
            if bytes.len() < 8 {
                words.push(short_word(bytes));
            } else if bytes.len() % 8 > 0 {
                words.push(u64::from_le_bytes(bytes[bytes.len() - 8..].try_into().expect("8")));
            }
            let lengths = times(secret.key_length, bytes.len() as u64) + times(secret.policy_length, policy.len() as u64);
            let mut sum = (times(secret.start, 1) + lengths % PRIME) % PRIME;
            sum = (sum + times(secret.policy[0], short_word(policy.as_bytes()))) % PRIME;
            for (word, secret) in words.iter().zip(secret.key.iter()) {
                sum = (sum + times(*secret, *word)) % PRIME;
            }
            let fingerprint = of(&secret, &key, &policy);
            prop_assert_eq!((u128::from(fingerprint.high) << 64 | u128::from(fingerprint.low)) % PRIME, sum);
        }
    }

    #[test]
    fn keys_that_look_alike_spread_over_shards_and_homes() {
        let secret = Secret::new();
        let (mut shards, mut homes) = (vec![0_u32; 1_000], vec![0_u32; 1_000]);
        for number in 0..100_000 {
            let fingerprint = of(&secret, &format!("user-{number:08}"), "per-user");
            shards[fingerprint.remainder_of(1_000)] += 1;
            homes[fingerprint.share_of(1_000)] += 1;
        }
        // About 100 each, with a deviation of 10.
        assert!(shards.iter().all(|count| (30..180).contains(count)), "{shards:?}");
        assert!(homes.iter().all(|count| (30..180).contains(count)), "{homes:?}");
    }

    #[test]
    fn two_secrets_are_different_and_are_not_shown() {
        let (one, other) = (Secret::new(), Secret::new());
        assert_ne!(of(&one, "k", "p"), of(&other, "k", "p"));
        assert_eq!(format!("{one:?}"), "Secret");
    }
}
