//! Random numbers that are the same on every platform: integer arithmetic, and the functions of
//! the `libm` crate instead of those of the system.

/// Maximum number of keys of a load.
pub(crate) const MAX_KEYS: u64 = 100_000_000;
/// Maximum exponent of Zipf's law.
pub(crate) const MAX_ZIPF: f64 = 10.0;

/// The generator xoshiro256++ (Blackman and Vigna), seeded by splitmix64.
#[derive(Debug, Clone)]
pub(crate) struct SeededRandom([u64; 4]);

impl SeededRandom {
    pub(crate) fn new(seed: u64) -> Self {
        let mut state = seed;
        Self(std::array::from_fn(|_| {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            mixed ^ (mixed >> 31)
        }))
    }

    fn next(&mut self) -> u64 {
        let state = &mut self.0;
        let result = state[0].wrapping_add(state[3]).rotate_left(23).wrapping_add(state[0]);
        let shifted = state[1] << 17;
        state[2] ^= state[0];
        state[3] ^= state[1];
        state[1] ^= state[2];
        state[0] ^= state[3];
        state[2] ^= shifted;
        state[3] = state[3].rotate_left(45);
        result
    }

    /// Returns a number from 0 up to, but not including, 1.
    #[expect(clippy::cast_precision_loss, reason = "53 bits")]
    pub(crate) fn uniform(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Returns a number with an exponential distribution and mean 1.
    pub(crate) fn exponential(&mut self) -> f64 {
        -libm::log(1.0 - self.uniform())
    }
}

/// Distribution of keys by Zipf's law: key k has a share proportional to 1 / (k + 1)^s. It needs no
/// table (rejection-inversion, Hörmann and Derflinger 1996).
#[derive(Debug)]
pub(crate) struct Zipf {
    keys: f64,
    exponent: f64,
    integral_start: f64,
    integral_end: f64,
    shortcut: f64,
}

impl Zipf {
    #[expect(clippy::cast_precision_loss, reason = "fewer keys than 2^53")]
    pub(crate) fn new(keys: u64, exponent: f64) -> Self {
        let keys = keys as f64;
        let mut zipf =
            Self { keys, exponent, integral_start: 0.0, integral_end: 0.0, shortcut: 0.0 };
        zipf.integral_start = zipf.integral(1.5) - 1.0;
        zipf.integral_end = zipf.integral(keys + 0.5);
        zipf.shortcut = 2.0 - zipf.inverse_integral(zipf.integral(2.5) - zipf.density(2.0));
        zipf
    }

    /// Returns a key from 0.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "from 0 to the number of keys"
    )]
    pub(crate) fn sample(&self, random: &mut SeededRandom) -> u64 {
        if self.keys <= 1.0 {
            return 0;
        }
        if self.exponent == 0.0 {
            return (random.uniform() * self.keys) as u64;
        }
        loop {
            let span = self.integral_start - self.integral_end;
            let height = self.integral_end + random.uniform() * span;
            let position = self.inverse_integral(height);
            let rank = libm::floor(position + 0.5).clamp(1.0, self.keys);
            let is_inside = rank - position <= self.shortcut
                || height >= self.integral(rank + 0.5) - self.density(rank);
            if is_inside {
                return (rank - 1.0) as u64;
            }
        }
    }

    fn density(&self, rank: f64) -> f64 {
        libm::exp(-self.exponent * libm::log(rank))
    }

    fn integral(&self, rank: f64) -> f64 {
        let log = libm::log(rank);
        exp_minus_1_over((1.0 - self.exponent) * log) * log
    }

    fn inverse_integral(&self, area: f64) -> f64 {
        let scaled = (area * (1.0 - self.exponent)).max(-1.0);
        libm::exp(log_1_plus_over(scaled) * area)
    }
}

/// Returns ln(1 + x) / x.
fn log_1_plus_over(x: f64) -> f64 {
    if x.abs() > 1e-8 { libm::log1p(x) / x } else { 1.0 - x * (0.5 - x / 3.0) }
}

/// Returns (e^x − 1) / x.
fn exp_minus_1_over(x: f64) -> f64 {
    if x.abs() > 1e-8 { libm::expm1(x) / x } else { 1.0 + x * 0.5 * (1.0 + x / 3.0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generator_is_that_of_its_authors() {
        // The first numbers for the state 1, 2, 3, 4 of the reference implementation.
        let mut random = SeededRandom([1, 2, 3, 4]);
        assert_eq!([random.next(), random.next()], [41_943_041, 58_720_359]);
    }

    #[test]
    #[expect(clippy::cast_precision_loss, reason = "small numbers")]
    fn shares_of_keys_follow_the_law() {
        for exponent in [0.0, 0.8, 1.0, 2.0] {
            let zipf = Zipf::new(20, exponent);
            let mut random = SeededRandom::new(7);
            let mut counts = [0_u32; 20];
            let samples = 200_000;
            for _ in 0..samples {
                counts[usize::try_from(zipf.sample(&mut random)).expect("a key")] += 1;
            }
            let weight = |rank: usize| (rank as f64 + 1.0).powf(-exponent);
            let total: f64 = (0..20).map(weight).sum();
            for (rank, count) in counts.iter().enumerate() {
                let expected = weight(rank) / total * f64::from(samples);
                let deviation = (f64::from(*count) - expected).abs();
                // Six standard deviations: the seed is fixed, so the test has one result.
                assert!(deviation < 6.0 * expected.sqrt() + 3.0, "{exponent} {rank} {count}");
            }
        }
    }
}
