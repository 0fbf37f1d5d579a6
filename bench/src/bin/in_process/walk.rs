//! Which key is asked for next.

use crate::key_of;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Uniform,
    /// Key n is asked for n times less often than the first: exponent 1.
    Zipf,
}

impl Kind {
    pub(crate) const ALL: [Self; 2] = [Self::Uniform, Self::Zipf];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Uniform => "uniform",
            Self::Zipf => "zipf",
        }
    }
}

/// Long enough that what a turn touches is in no cache from the turns before, and no longer.
fn length(keys: usize) -> usize {
    match keys {
        1 => 4_096,
        ..=100_000 => 131_072,
        _ => 2_097_152,
    }
}

/// Keys in the order in which they are asked for. The names lie in that order in memory: like those
/// of requests that just came in, they cost no cache miss of their own.
pub(crate) fn walk(kind: Kind, keys: usize) -> Vec<String> {
    let mut random = Random(0x7165_6761);
    let next = |_| {
        let uniform = random.unit();
        let key = match kind {
            Kind::Uniform => uniform * keys as f64,
            // The inverse of the distribution function, which is a logarithm.
            Kind::Zipf => (keys as f64 + 1.0).powf(uniform) - 1.0,
        };
        key_of(as_index(key).min(keys - 1))
    };
    (0..length(keys)).map(next).collect()
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "from zero to some millions"
)]
fn as_index(number: f64) -> usize {
    number as usize
}

/// `SplitMix64`: the same walk in every run.
struct Random(u64);

impl Random {
    /// From 0 to 1, without 1.
    fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^= mixed >> 31;
        (mixed >> 11) as f64 / (1_u64 << 53) as f64
    }
}
