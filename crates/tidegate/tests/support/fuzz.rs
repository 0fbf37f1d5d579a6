//! Fuzzer on the stable toolchain: kept inputs first, then mutations of them and random sequences
//! of pieces of their grammar. A failing input is shrunk and printed.
//!
//! `FUZZ_CASES` sets the number of cases and `FUZZ_SEED` repeats a run; `make fuzz` sets both. It
//! runs every test with `fuzz` in its name, so [`run`] rejects tests of other names.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

/// Number of cases per test in `make test`.
const DEFAULT_CASES: u64 = 1_000;
/// Maximum number of attempts to remove a part of a failing input.
const MAX_SHRINKS: usize = 5_000;

/// Deterministic random numbers (`SplitMix64`).
#[derive(Debug, Clone)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number below `end`, which is at least 1.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.next() % end.max(1) as u64).unwrap_or_default()
    }

    pub(crate) fn pick<'a, T>(&mut self, choices: &'a [T]) -> &'a T {
        &choices[self.below(choices.len())]
    }

    /// Returns random pieces one after the other.
    pub(crate) fn pieces(&mut self, pieces: &[&str], max: usize) -> Vec<u8> {
        (0..self.below(max + 1)).flat_map(|_| self.piece(pieces)).collect()
    }

    fn piece(&mut self, pieces: &[&str]) -> Vec<u8> {
        match self.below(16) {
            0 => vec![self.next().to_le_bytes()[0]],
            _ => self.pick(pieces).as_bytes().to_vec(),
        }
    }

    /// Changes an input at up to six places.
    pub(crate) fn mutate<S: AsRef<[u8]>>(
        &mut self,
        input: &mut Vec<u8>,
        pieces: &[&str],
        seeds: &[S],
    ) {
        for _ in 0..self.below(7) {
            let start = self.below(input.len() + 1);
            let end = (start + self.below(8)).min(input.len());
            match self.below(8) {
                0 => drop(input.drain(start..end)),
                1 | 2 => drop(input.splice(start..start, self.piece(pieces))),
                3 => drop(input.splice(start..end, self.piece(pieces))),
                4 => {
                    let end = (start + self.below(64)).min(input.len());
                    let copies = if self.below(256) == 0 { self.below(1_000) } else { 1 };
                    let part = input[start..end].repeat(copies);
                    let at = self.below(input.len() + 1);
                    input.splice(at..at, part);
                }
                5 if start < end => input[start] = self.next().to_le_bytes()[0],
                6 if start < end => input[start] ^= 0x20,
                7 if !seeds.is_empty() => {
                    let other = self.pick(seeds).as_ref();
                    input.truncate(start);
                    input.extend_from_slice(&other[self.below(other.len() + 1)..]);
                }
                _ => {}
            }
        }
    }
}

/// Checks a property of bytes: of each seed, and of mutations of seeds and pieces.
pub(crate) fn bytes<S: AsRef<[u8]>>(seeds: &[S], pieces: &[&str], property: impl Fn(&[u8])) {
    let generate = |random: &mut Random| {
        let mut input = match random.below(2) {
            0 => random.pieces(pieces, 24),
            _ => random.pick(seeds).as_ref().to_vec(),
        };
        random.mutate(&mut input, pieces, seeds);
        input
    };
    run(seeds, 1, generate, property);
}

/// Checks a property of texts, as [`bytes`] does.
pub(crate) fn texts(seeds: &[&str], pieces: &[&str], property: impl Fn(&str)) {
    bytes(seeds, pieces, |input| property(&String::from_utf8_lossy(input)));
}

/// Checks a property of each seed, then of generated inputs. A case that takes long has a `cost`
/// above 1, by which the number of cases is divided.
pub(crate) fn run<S: AsRef<[u8]>>(
    seeds: &[S],
    cost: u64,
    generate: impl Fn(&mut Random) -> Vec<u8>,
    property: impl Fn(&[u8]),
) {
    let thread = std::thread::current();
    let name = thread.name().unwrap_or_default();
    // With one thread, tests run in the main thread, whose name says nothing.
    assert!(name == "main" || name.contains("fuzz"), "`make fuzz` does not run {name}: rename it");
    for seed in seeds {
        check(seed.as_ref(), &property, "a kept input");
    }
    let number = |name: &str| {
        let text = std::env::var(name).ok().filter(|text| !text.is_empty())?;
        Some(text.parse::<u64>().unwrap_or_else(|_| panic!("{name} must be a whole number")))
    };
    let cases = number("FUZZ_CASES").unwrap_or(DEFAULT_CASES).div_ceil(cost);
    let seed = number("FUZZ_SEED").unwrap_or_default();
    // Each test has its own sequence.
    let own = name.bytes().fold(seed, |hash, byte| Random(hash ^ u64::from(byte)).next());
    let mut random = Random(own);
    for case in 0..cases {
        let input = generate(&mut random.clone());
        random.next();
        check(&input, &property, &format!("case {case} of FUZZ_SEED={seed}"));
    }
}

/// Checks one input. A failing one is shrunk, and fails the test.
fn check(input: &[u8], property: &impl Fn(&[u8]), case: &str) {
    let Some(mut message) = failure(input, property) else { return };
    let mut smallest = input.to_vec();
    let mut attempts = 0;
    let mut size = smallest.len().div_ceil(2);
    while size > 0 && attempts < MAX_SHRINKS {
        let mut at = 0;
        let mut has_shrunk = false;
        while at < smallest.len() && attempts < MAX_SHRINKS {
            let end = (at + size).min(smallest.len());
            let shorter = [&smallest[..at], &smallest[end..]].concat();
            attempts += 1;
            match failure(&shorter, property) {
                Some(other) => (smallest, message, has_shrunk) = (shorter, other, true),
                None => at += size,
            }
        }
        if !has_shrunk {
            size /= 2;
        }
    }
    panic!(
        "{case} fails: {message}\ninput, to be kept as a seed: b\"{}\"",
        smallest.escape_ascii()
    );
}

/// Returns the message of the panic of a property, if it fails.
fn failure(input: &[u8], property: &impl Fn(&[u8])) -> Option<String> {
    thread_local!(static IS_QUIET: Cell<bool> = const { Cell::new(false) });
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let shown = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !IS_QUIET.get() {
                shown(info);
            }
        }));
    });
    IS_QUIET.set(true);
    let result = catch_unwind(AssertUnwindSafe(|| property(input)));
    IS_QUIET.set(false);
    result.err().map(|panic| message(panic.as_ref()))
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref().copied()).unwrap_or("a panic without a text").to_owned()
}
