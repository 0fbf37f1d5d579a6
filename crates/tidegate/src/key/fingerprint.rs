//! [`Fingerprint`]: a 128-bit keyed hash of (key, policy), which identifies a count in memory.
//!
//! Attackers choose keys, and two keys with the same fingerprint would let an attacker exhaust the
//! limit of another client. Therefore this is a *universal* hash: the text is a vector of 64-bit
//! words, and the fingerprint is a sum modulo the prime p = 2^127 − 1 with random secrets. In
//! general, it is
//!
//! ```text
//! secret₀ + secret₁·word₁ + secret₂·word₂ + …
//! ```
//!
//! with secrets of 114 bits. Two different texts differ in some word, and for any values of the
//! other secrets, at most one value of that word's secret makes the sums equal.
//!
//! Most keys have from 8 to 16 bytes of ASCII. Their two words x and y, which are less than 2^63,
//! take half as many multiplications, with secrets a, b, c, d of 61 bits, and one for each length:
//!
//! ```text
//! secret(length) + (x + a)·(y + b) + 2^64·(x + c)·(y + d)
//! ```
//!
//! If another key of this length has a different y, with the difference e, then the sums differ by
//! e·(a + 2^64·c) and a number that does not depend on a and c. At most one of the 2^122 values of
//! a + 2^64·c makes that 0 modulo p. The same holds for x with b and d. Keys of different lengths,
//! and keys of both forms, differ by a secret of 126 bits.
//!
//! A sum is stored without its multiple of 2^128, which is at most 2, and without eleven bits: one
//! is for empty slots, and the class of the policy takes the place of the lowest ten. So there are
//! up to 5·3·2047 differences modulo p for which two fingerprints are equal, and the collision
//! probability of any two texts is at most 30705·2^-114, less than 2^-99, assuming only that the
//! secrets are random and unknown. Among ten million keys, a collision has a probability of about
//! 10^-16.
//!
//! The sum determines the shard and the slot of a key. A Feistel round, which is bijective, mixes
//! the half that they depend on, so that timing does not reveal the secrets.

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::ops::RangeInclusive;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

use super::MAX_KEY_BYTES;

/// A keyed hash of (key, policy). [`NONE`](Self::NONE) is greater than all others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Fingerprint {
    high: u64,
    low: u64,
}

impl Fingerprint {
    /// The lowest one.
    pub(crate) const MIN: Self = Self { high: 0, low: 0 };
    /// The fingerprint of an empty slot, which no key has.
    pub(crate) const NONE: Self = Self { high: u64::MAX, low: u64::MAX };

    #[cfg(test)]
    pub(crate) fn new(high: u64, low: u64) -> Self {
        Self { high, low: low & !NONE_BIT }
    }

    /// Returns the class of the policy.
    #[inline]
    pub(crate) fn policy_class(self) -> PolicyClass {
        PolicyClass((self.low & CLASS_MASK) as usize)
    }

    /// Returns whether the high half alone proves that this fingerprint is less than the other. It
    /// nearly always decides.
    #[inline]
    pub(crate) fn is_clearly_before(self, other: Self) -> bool {
        self.high < other.high
    }

    /// Maps the fingerprint to `0..count` by the low bits of its high half; its order depends on
    /// the high bits.
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "less than count")]
    pub(crate) fn shard_index(self, count: usize) -> usize {
        (self.high % count as u64) as usize
    }

    /// Maps the fingerprint to `0..count`, preserving the order of fingerprints.
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "less than count")]
    pub(crate) fn home_slot(self, count: u32) -> usize {
        ((u128::from(self.high) * u128::from(count)) >> 64) as usize
    }
}

/// The number of a policy, below [`COUNT`](Self::COUNT), whose keys have an allowance of their own.
/// Beyond some hundred policies in one process, some share a class.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PolicyClass(pub(crate) usize);

impl PolicyClass {
    pub(crate) const COUNT: usize = 1 << 10;
}

/// The bits of the low half that are the class of the policy.
const CLASS_MASK: u64 = PolicyClass::COUNT as u64 - 1;
/// A bit of the low half that is clear in all fingerprints but [`Fingerprint::NONE`].
const NONE_BIT: u64 = 1 << 30;
/// Number of classes that a policy may have, from its hash on.
const MAX_CLASS_PROBES: u64 = 16;
/// Number of words in the longest text.
const WORDS: usize = MAX_KEY_BYTES / 8;
/// Lengths of keys with two words.
const PAIR_LENGTHS: RangeInclusive<usize> = 8..=16;

static GLOBAL_SECRET: LazyLock<HashSecret> = LazyLock::new(HashSecret::new);

/// The random secrets of the hash.
pub(crate) struct HashSecret {
    pair: PairSecret,
    /// Of a key of two words, by its length. There are more than lengths, so that no index is out
    /// of bounds.
    pair_lengths: [u128; 32],
    mix: [u64; 2],
    start: Limbs,
    key_length: Limbs,
    key: [Limbs; WORDS],
    policy_length: Limbs,
    policy: [Limbs; WORDS],
    /// The policy of each class: a part of its sum, or 0 while the class is free.
    classes: [AtomicU64; PolicyClass::COUNT],
    /// Hashes texts longer than any valid key. Only callers that bypass the limiter send them.
    oversized: RandomState,
}

/// The numbers that are added to two words before they are multiplied.
struct PairSecret {
    a: u64,
    b: u64,
    c: u64,
    d: u64,
}

/// The low and the high 57 bits of a secret, secret₀ + 2^64·secret₁, so that the sum of all products
/// of a text fits 128 bits.
type Limbs = [u64; 2];
const LIMB_BITS: u32 = 57;
/// Bits of the numbers that are added to a word of 63 bits, so that a product fits 127 bits.
const PAIR_BITS: u32 = 61;

impl fmt::Debug for HashSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HashSecret")
    }
}

impl HashSecret {
    fn new() -> Self {
        let mut words = RandomWords::default();
        Self {
            pair: words.pair(),
            pair_lengths: [(); 32].map(|()| words.wide()),
            mix: [(); 2].map(|()| words.next()),
            start: words.limbs(),
            key_length: words.limbs(),
            key: [(); WORDS].map(|()| words.limbs()),
            policy_length: words.limbs(),
            policy: [(); WORDS].map(|()| words.limbs()),
            classes: [const { AtomicU64::new(0) }; PolicyClass::COUNT],
            oversized: RandomState::new(),
        }
    }

    /// Returns the secret of this process.
    pub(crate) fn global() -> &'static Self {
        &GLOBAL_SECRET
    }

    /// Returns the policy's part of the sum, which all keys share, and the policy's class.
    pub(crate) fn policy_sum(&self, name: &str) -> PolicySum {
        let mut sum = Sum { low: self.start[0].into(), high: self.start[1].into() };
        if name.len() <= MAX_KEY_BYTES {
            sum.add_text(&self.policy_length, &self.policy, name.as_bytes());
        } else {
            sum.add_text(&self.policy_length, &self.policy, self.digest(name).as_bytes());
        }
        let sum = sum.modulo_prime();
        PolicySum { sum, class: self.class_of(sum) }
    }

    /// Returns the class of a policy, the same one each time. Its first use takes a class that is
    /// free, and keeps it.
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "any bits of a hash")]
    fn class_of(&self, sum: u128) -> u64 {
        // The sum is linear: names that count up would be close to each other.
        let mut hash = sum as u64 ^ (sum >> 64) as u64;
        for factor in [0xff51_afd7_ed55_8ccd, 0xc4ce_b9fe_1a85_ec53] {
            hash = (hash ^ hash >> 33).wrapping_mul(factor);
        }
        let (home, policy) = (hash >> 40, hash | 1);
        for probe in 0..MAX_CLASS_PROBES {
            let class = home.wrapping_add(probe) & CLASS_MASK;
            let slot = &self.classes[class as usize];
            let mut found = slot.load(Ordering::Relaxed);
            if found == 0 {
                let taken = slot.compare_exchange(0, policy, Ordering::Relaxed, Ordering::Relaxed);
                found = taken.err().unwrap_or(policy);
            }
            if found == policy {
                return class;
            }
        }
        home & CLASS_MASK
    }

    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a fifth of a decision, and called in few places")]
    #[expect(clippy::cast_possible_truncation, reason = "both halves, one by one")]
    pub(crate) fn fingerprint(&self, key: &str, policy: &PolicySum) -> Fingerprint {
        let sum = self.key_sum(key.as_bytes()).wrapping_add(policy.sum);
        let low = sum as u64 & !(NONE_BIT | CLASS_MASK) | policy.class;
        let [a, b] = self.mix;
        Fingerprint { high: (sum >> 64) as u64 ^ folded_product(low ^ a, b), low }
    }

    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a fifth of a decision, and called in few places")]
    fn key_sum(&self, key: &[u8]) -> u128 {
        if let (true, Some(first), Some(last)) =
            (PAIR_LENGTHS.contains(&key.len()), key.first_chunk::<8>(), key.last_chunk::<8>())
        {
            let (first, last) = (u64::from_le_bytes(*first), u64::from_le_bytes(*last));
            if (first | last) < 1 << 63 {
                let length = self.pair_lengths[key.len() % self.pair_lengths.len()];
                return self.pair.sum(first, last).wrapping_add(length);
            }
        }
        self.any_key_sum(key)
    }

    #[cold]
    #[inline(never)]
    fn any_key_sum(&self, key: &[u8]) -> u128 {
        let mut sum = Sum { low: 0, high: 0 };
        if key.len() <= MAX_KEY_BYTES {
            sum.add_text(&self.key_length, &self.key, key);
        } else {
            sum.add_text(&self.key_length, &self.key, self.digest(key).as_bytes());
        }
        sum.modulo_prime()
    }

    /// Returns a replacement for a text longer than any key. It cannot equal a key, because keys
    /// have no control characters.
    #[cold]
    fn digest(&self, text: impl AsRef<[u8]>) -> String {
        let half = |number: u8| self.oversized.hash_one((number, text.as_ref()));
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

    fn pair(&mut self) -> PairSecret {
        let [a, b, c, d] = [(); 4].map(|()| self.next() >> (64 - PAIR_BITS));
        PairSecret { a, b, c, d }
    }

    /// Returns a number of 126 bits.
    fn wide(&mut self) -> u128 {
        u128::from(self.next() >> 2) << 64 | u128::from(self.next())
    }
}

impl PairSecret {
    /// Returns the sum of two words below 2^63.
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "both parts of 127 bits")]
    fn sum(&self, first: u64, last: u64) -> u128 {
        let product =
            |a: u64, b: u64| u128::from(first.wrapping_add(a)) * u128::from(last.wrapping_add(b));
        let (low, high) = (product(self.a, self.b), product(self.c, self.d));
        // As `Sum::modulo_prime`, for less than 127 bits.
        let folded = u128::from(high as u64 & !(1 << 63)) << 64;
        low.wrapping_add(folded | u128::from((high >> 63) as u64))
    }
}

/// The policy's part of a fingerprint's sum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PolicySum {
    sum: u128,
    class: u64,
}

/// The policy of a charge: its part of the sum, and its name unless it is that of the quota.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PolicyRef<'a> {
    sum: PolicySum,
    name: Option<&'a str>,
}

impl<'a> PolicyRef<'a> {
    #[inline]
    pub(crate) fn new(name: &'a str, secret: &HashSecret) -> Self {
        Self { sum: secret.policy_sum(name), name: Some(name) }
    }

    /// Creates the default policy of a quota.
    pub(crate) fn default_of_quota(name: &str) -> Self {
        Self { sum: HashSecret::global().policy_sum(name), name: None }
    }

    #[inline]
    pub(crate) fn sum(&self) -> &PolicySum {
        &self.sum
    }

    #[inline]
    pub(crate) fn name(&self) -> Option<&'a str> {
        self.name
    }
}

/// A sum as low + 2^64 · high.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Sum {
    low: u128,
    high: u128,
}

impl Sum {
    /// Adds a product. It cannot overflow: 66 products of 64 and 57 bits fit 128 bits.
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

    /// Reduces the sum: since 2^127 is 1 modulo the prime, the high bits are added to the low ones.
    /// The result need not be less than the prime to be unique. An overflow drops a multiple of
    /// 2^128.
    #[inline]
    fn modulo_prime(self) -> u128 {
        let folded = self.high << 65 >> 1;
        self.low.wrapping_add(folded).wrapping_add(self.high >> 63)
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
    use std::collections::{HashMap, HashSet};

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

    #[test]
    fn hundreds_of_policies_have_classes_of_their_own() {
        let secret = HashSecret::new();
        let class = |number: usize| secret.policy_sum(&format!("policy-{number}")).class;
        let classes: Vec<u64> = (0..300).map(class).collect();
        let different: HashSet<u64> = classes.iter().copied().collect();
        assert_eq!(different.len(), 300);
        // Others do not change them, and get one, too, though it may be that of another policy.
        assert!((0..10_000).map(class).all(|class| class < PolicyClass::COUNT as u64));
        assert_eq!((0..300).map(class).collect::<Vec<_>>(), classes);
    }

    const PRIME: u128 = (1 << 127) - 1;

    /// Multiplies by doubling and adding, modulo the prime at each step.
    fn multiply(number: u128, word: u64) -> u128 {
        (0..64).rev().fold(0, |sum, bit| {
            let doubled = sum * 2 % PRIME;
            if word >> bit & 1 == 1 { (doubled + number) % PRIME } else { doubled }
        })
    }

    fn whole(secret: Limbs) -> u128 {
        u128::from(secret[1]) << 64 | u128::from(secret[0])
    }

    /// Returns the sum of a text by the general definition.
    fn linear_sum(length: Limbs, secrets: &[Limbs], text: &[u8]) -> u128 {
        let mut words: Vec<u64> =
            text.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
        if text.len() < 8 {
            words.push(short_word(text));
        } else if !text.len().is_multiple_of(8) {
            words.push(u64::from_le_bytes(text[text.len() - 8..].try_into().expect("8")));
        }
        let products = words.iter().zip(secrets).map(|(word, secret)| (*secret, *word));
        products
            .chain([(length, text.len() as u64)])
            .fold(0, |sum, (secret, word)| (sum + multiply(whole(secret), word)) % PRIME)
    }

    /// Returns the sum of an ASCII text of two words.
    fn pair_sum(secret: &HashSecret, text: &[u8]) -> u128 {
        let (first, last) = (text.first_chunk::<8>(), text.last_chunk::<8>());
        let word = |chunk: Option<&[u8; 8]>| u64::from_le_bytes(*chunk.expect("8 bytes"));
        let (x, y) = (word(first), word(last));
        let PairSecret { a, b, c, d } = secret.pair;
        let low = multiply(u128::from(x + a), y + b);
        let high = multiply(multiply(u128::from(x + c), y + d), 1 << 63) * 2;
        ((low + high % PRIME) % PRIME + secret.pair_lengths[text.len()]) % PRIME
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]

        #[test]
        fn the_sum_matches_its_definition(
            key in prop_oneof!["\\PC{0,60}", "[ -~]{0,40}", "[ -~]{8,16}", "[~é]{1,16}"],
            policy in "\\PC{0,30}",
        ) {
            let secret = HashSecret { mix: [0; 2], ..HashSecret::new() };
            let text = key.as_bytes();
            let is_pair = PAIR_LENGTHS.contains(&text.len())
                && text[7] < 0x80
                && text[text.len() - 1] < 0x80;
            let key_sum = if is_pair {
                pair_sum(&secret, text)
            } else {
                linear_sum(secret.key_length, &secret.key, text)
            };
            let policy_sum = linear_sum(secret.policy_length, &secret.policy, policy.as_bytes());
            let sum = ((key_sum + policy_sum) % PRIME + whole(secret.start)) % PRIME;
            let fingerprint = hash(&secret, &key, &policy);
            let found = u128::from(fingerprint.high) << 64 | u128::from(fingerprint.low);
            // 2^128 is 2 modulo the prime, and what is stored need not be less than the prime.
            let stored = |multiple: u128| {
                let least = (sum + PRIME - 2 * multiple) % PRIME;
                (0..=2).filter_map(move |primes| least.checked_add(primes * PRIME))
            };
            let class = u128::from(secret.policy_sum(&policy).class);
            let replaced = u128::from(NONE_BIT | CLASS_MASK);
            prop_assert_eq!(found & replaced, class);
            prop_assert!(
                (0..=2).flat_map(stored).any(|sum| (sum ^ found) & !replaced == 0),
                "{found} for {sum}"
            );
        }
    }

    #[test]
    fn the_largest_sums_are_correct_modulo_the_prime() {
        let most = (1 << LIMB_BITS) - 1;
        let mut sum = Sum { low: 0, high: 0 };
        (0..66).for_each(|_| sum.add(&[most; 2], u64::MAX));
        let product = multiply(whole([most; 2]), u64::MAX);
        let exact = (0..66).fold(0, |sum, _| (sum + product) % PRIME);
        let is_sum = |multiple: u128| (sum.modulo_prime() % PRIME + 2 * multiple) % PRIME == exact;
        assert!((0..=2).any(is_sum));
        let most = (1 << PAIR_BITS) - 1;
        let pair = PairSecret { a: most, b: most, c: most, d: most };
        let word = (1 << 63) - 1;
        let product = multiply(u128::from(word + most), word + most);
        let exact = (product + multiply(product, 1 << 63) * 2 % PRIME) % PRIME;
        assert_eq!(pair.sum(word, word) % PRIME, exact);
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
