//! Sequence of keys for the decisions of a turn.

use crate::key_of;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Distribution {
    Uniform,
    /// Exponent 1: key n occurs n times less often than the first key.
    Zipf,
}

impl Distribution {
    pub(crate) const ALL: [Self; 2] = [Self::Uniform, Self::Zipf];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Uniform => "uniform",
            Self::Zipf => "zipf",
        }
    }
}

/// Returns the length of a sequence: long enough that a turn does not find its keys in the cache.
fn length(keys: usize) -> usize {
    match keys {
        1 => 4_096,
        ..=100_000 => 131_072,
        _ => 2_097_152,
    }
}

/// Returns the keys in the order of the decisions. The strings are in the same order in memory, so
/// that reading a key causes no additional cache miss, as for a request that was just received.
pub(crate) fn key_sequence(distribution: Distribution, keys: usize) -> Vec<String> {
    let mut random = Random(0x7165_6761);
    let next = |_| {
        let uniform = random.unit();
        let key = match distribution {
            Distribution::Uniform => uniform * keys as f64,
            // Inverse of the cumulative distribution, which is a logarithm.
            Distribution::Zipf => (keys as f64 + 1.0).powf(uniform) - 1.0,
        };
        key_of(as_index(key).min(keys - 1))
    };
    (0..length(keys)).map(next).collect()
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "between zero and some millions"
)]
fn as_index(number: f64) -> usize {
    number as usize
}

/// `SplitMix64` with a fixed seed: the same sequence in every run.
struct Random(u64);

impl Random {
    /// Returns a number in [0, 1).
    fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^= mixed >> 31;
        (mixed >> 11) as f64 / (1_u64 << 53) as f64
    }
}
