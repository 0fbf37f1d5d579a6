//! [`Script`]: decide.lua, assembled from the algorithms that a call needs, heartbeat.lua and
//! invalidation.lua.

use std::sync::OnceLock;

use redis::Cmd;

use crate::algorithm::{Algorithm, Encoding};
use crate::quota::Quota;

/// Lua script with its SHA-1 for EVALSHA.
pub(super) struct Script {
    index: usize,
    text: String,
    sha: String,
}

const PRELUDE: &str = include_str!("prelude.lua");
const DECIDE: &str = include_str!("decide.lua");
const HEARTBEAT: &str = include_str!("heartbeat.lua");
const INVALIDATION: &str = include_str!("invalidation.lua");
const ALGORITHM_PARTS: [&str; 5] = [
    include_str!("../../algorithm/sliding_log.lua"),
    include_str!("../../algorithm/sliding_log_packed.lua"),
    include_str!("../../algorithm/sliding_counter.lua"),
    include_str!("../../algorithm/fixed_window.lua"),
    include_str!("../../algorithm/bucket.lua"),
];
/// Number of scripts: decide.lua with each set of algorithms, heartbeat.lua and invalidation.lua.
pub(super) const SCRIPT_COUNT: usize = (1 << ALGORITHM_PARTS.len()) + 2;

/// Set of algorithms that a script needs, one bit for each of [`ALGORITHM_PARTS`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct ScriptParts(usize);

impl ScriptParts {
    pub(super) fn of(quota: &Quota) -> Self {
        Self(1 << part_index(quota))
    }

    pub(super) fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

fn part_index(quota: &Quota) -> usize {
    match (quota.algorithm(), quota.encoding()) {
        (Algorithm::SlidingLog, Encoding::SortedSet) => 0,
        (Algorithm::SlidingLog, Encoding::Packed) => 1,
        (Algorithm::SlidingCounter, _) => 2,
        (Algorithm::FixedWindow, _) => 3,
        (Algorithm::TokenBucket | Algorithm::LeakyBucket, _) => 4,
    }
}

impl Script {
    /// Returns decide.lua with only these algorithms. Lua creates every function of a script in
    /// each call, so a smaller script saves Redis time.
    pub(super) fn with(ScriptParts(needed): ScriptParts) -> &'static Self {
        static ASSEMBLED: [OnceLock<Script>; 1 << ALGORITHM_PARTS.len()] =
            [const { OnceLock::new() }; 1 << ALGORITHM_PARTS.len()];
        ASSEMBLED[needed].get_or_init(|| Self::assemble(needed))
    }

    fn assemble(needed: usize) -> Self {
        let parts = ALGORITHM_PARTS
            .iter()
            .enumerate()
            .filter(|(index, _)| needed & (1 << index) != 0)
            .map(|(_, part)| part);
        let text = [&PRELUDE]
            .into_iter()
            .chain(parts)
            .chain([&DECIDE])
            .copied()
            .collect::<Vec<_>>()
            .join("\n");
        Self::new(needed, text)
    }

    fn new(index: usize, text: String) -> Self {
        let sha = redis::Script::new(&text).get_hash().to_owned();
        Self { index, text, sha }
    }

    /// Returns heartbeat.lua.
    pub(super) fn heartbeat() -> &'static Self {
        static SCRIPT: OnceLock<Script> = OnceLock::new();
        SCRIPT.get_or_init(|| Self::new(SCRIPT_COUNT - 1, HEARTBEAT.to_owned()))
    }

    /// Returns invalidation.lua.
    pub(super) fn invalidation() -> &'static Self {
        static SCRIPT: OnceLock<Script> = OnceLock::new();
        SCRIPT.get_or_init(|| Self::new(SCRIPT_COUNT - 2, INVALIDATION.to_owned()))
    }

    /// Returns its index, below [`SCRIPT_COUNT`].
    pub(super) fn index(&self) -> usize {
        self.index
    }

    pub(super) fn text(&self) -> &str {
        &self.text
    }

    /// Returns an EVALSHA command, up to the number of keys.
    pub(super) fn evalsha(&self, keys: usize) -> Cmd {
        let mut command = redis::cmd("EVALSHA");
        command.arg(&self.sha).arg(keys);
        command
    }
}
