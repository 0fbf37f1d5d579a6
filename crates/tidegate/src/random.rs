//! Random numbers for names, hash seeds and jitter. None of them is a secret.

use std::hash::{BuildHasher, RandomState};
#[cfg(feature = "resilience")]
use std::time::Duration;

/// Returns a random number, derived from the operating system's randomness.
pub(crate) fn random_u64() -> u64 {
    RandomState::new().hash_one(0_u8)
}

#[cfg(feature = "resilience")]
/// Returns a random duration from 0.5 to 1.5 times this one, so that instances that wait for the
/// same event do not act at the same time.
pub(crate) fn jittered(duration: Duration) -> Duration {
    let [byte, ..] = random_u64().to_le_bytes();
    duration / 2 + duration * u32::from(byte) / 256
}

#[cfg(all(test, feature = "resilience"))]
mod tests {
    use super::*;

    #[test]
    fn jitter_stays_between_a_half_and_one_and_a_half() {
        let second = Duration::from_secs(1);
        let jittered: Vec<Duration> = (0..1_000).map(|_| jittered(second)).collect();
        assert!(jittered.iter().all(|wait| (second / 2..second * 3 / 2).contains(wait)));
        assert!(jittered.iter().any(|wait| *wait < second * 3 / 4));
        assert!(jittered.iter().any(|wait| *wait > second * 5 / 4));
    }
}
