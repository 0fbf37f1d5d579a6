//! Choices by a seed, for generated requests: the same seed makes the same requests.

use std::time::{SystemTime, UNIX_EPOCH};

/// Generator of choices (`SplitMix64`).
pub(crate) struct Seeded(u64);

impl Seeded {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number below `end`.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.next() % end as u64).expect("below a usize")
    }

    /// Returns true once in `times`.
    pub(crate) fn once_in(&mut self, times: usize) -> bool {
        self.below(times) == 0
    }

    pub(crate) fn pick<'t, T: ?Sized>(&mut self, items: &[&'t T]) -> &'t T {
        items[self.below(items.len())]
    }
}

/// Returns the number of cases: `FUZZ_CASES`, or the usual number.
pub(crate) fn cases(usual: usize) -> usize {
    number("FUZZ_CASES").map_or(usual, |cases| usize::try_from(cases).expect("a usize"))
}

/// Returns the seed: `FUZZ_SEED`, or a new one if `FUZZ_CASES` is set, or always the same. Prints
/// it, and cargo shows it if the test fails.
pub(crate) fn seed() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
    let new = || u64::from(now.subsec_nanos()) ^ now.as_secs();
    let seed = number("FUZZ_SEED")
        .unwrap_or_else(|| if number("FUZZ_CASES").is_some() { new() } else { 1 });
    println!("repeat with FUZZ_SEED={seed}");
    seed
}

fn number(variable: &str) -> Option<u64> {
    let value = std::env::var(variable).ok().filter(|value| !value.is_empty())?;
    Some(value.parse().unwrap_or_else(|error| panic!("{variable}={value}: {error}")))
}
