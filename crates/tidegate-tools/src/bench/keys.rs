//! [`KeySpace`]: the keys of a run, and how often each is used.

use std::fmt::Write as _;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::Arc;

use crate::tool::random::{SeededRandom, Zipf};

/// Text in an attribute or a descriptor that stands for the key.
pub(crate) const KEY: &str = "{key}";

/// How requests are spread over the keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum KeyDistribution {
    /// All keys equally often
    Uniform,
    /// A few keys have most of the requests: key k has a share of 1 / k^S (see --zipf)
    Zipf,
    /// One key has all requests
    Hot,
}

/// Keys of a run: a random name of the run, so that runs do not share counts, and a number.
#[derive(Debug)]
pub(crate) struct KeySpace {
    pub count: u64,
    pub distribution: KeyDistribution,
    /// Exponent of Zipf's law.
    pub zipf: Option<f64>,
    /// Text that all keys of this run start with.
    pub prefix: String,
    /// Digits of a number. All keys are equally long, see [`Template`](super::template::Template).
    digits: usize,
    numbers: Zipf,
}

/// Keys of one caller.
pub(crate) struct KeySequence {
    space: Arc<KeySpace>,
    random: SeededRandom,
}

impl KeySpace {
    pub(crate) fn new(keys: u64, distribution: KeyDistribution, exponent: f64) -> Self {
        let count = if distribution == KeyDistribution::Hot { 1 } else { keys };
        let zipf = (distribution == KeyDistribution::Zipf).then_some(exponent);
        let run = RandomState::new().hash_one(std::process::id()) >> 32;
        Self {
            count,
            distribution,
            zipf,
            prefix: format!("bench-{run:08x}-"),
            digits: (count - 1).to_string().len(),
            numbers: Zipf::new(count, zipf.unwrap_or(0.0)),
        }
    }

    /// Returns a text that is as long as a key, but differs from all keys.
    pub(crate) fn placeholder(&self) -> String {
        self.prefix.clone() + &"#".repeat(self.digits)
    }

    /// Returns the key with this number.
    pub(crate) fn key(&self, number: u64) -> String {
        let mut key = String::new();
        self.write(number, &mut key);
        key
    }

    fn write(&self, number: u64, key: &mut String) {
        key.clear();
        key.push_str(&self.prefix);
        let _ = write!(key, "{number:0width$}", width = self.digits);
    }

    /// Returns the keys of a caller. The same seed and caller have the same numbers.
    pub(crate) fn sequence(self: &Arc<Self>, seed: u64, caller: u64) -> KeySequence {
        // Seeds of neighbours give unrelated sequences, because the generator mixes them.
        let seed = seed.wrapping_add(caller.wrapping_mul(0xd1b5_4a32_d192_ed03));
        KeySequence { space: Arc::clone(self), random: SeededRandom::new(seed) }
    }
}

impl KeySequence {
    /// Replaces `key` by the next one.
    pub(crate) fn next_into(&mut self, key: &mut String) {
        let number = self.space.numbers.sample(&mut self.random);
        self.space.write(number, key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(distribution: KeyDistribution, seed: u64, caller: u64) -> Vec<String> {
        let space = Arc::new(KeySpace::new(1_000, distribution, 1.0));
        let mut sequence = space.sequence(seed, caller);
        let mut key = String::new();
        let next = |_| {
            sequence.next_into(&mut key);
            assert_eq!(key.len(), space.placeholder().len());
            key.strip_prefix(&space.prefix).expect("a key of this run").to_owned()
        };
        (0..50).map(next).collect()
    }

    #[test]
    fn same_seed_and_caller_have_the_same_keys() {
        for distribution in [KeyDistribution::Uniform, KeyDistribution::Zipf] {
            let keys = numbers(distribution, 1, 0);
            assert_eq!(keys, numbers(distribution, 1, 0));
            assert_ne!(keys, numbers(distribution, 2, 0));
            assert_ne!(keys, numbers(distribution, 1, 1));
        }
        assert!(numbers(KeyDistribution::Hot, 1, 0).iter().all(|key| key == "0"));
    }

    #[test]
    fn runs_do_not_share_keys() {
        let space = || KeySpace::new(10, KeyDistribution::Uniform, 0.0);
        assert_ne!(space().key(3), space().key(3));
    }
}
