//! The scripts: decide.lua, assembled from the algorithms that a call needs, and heartbeat.lua.

use std::sync::OnceLock;

use redis::Cmd;

use crate::algorithm::{Algorithm, Encoding};
use crate::quota::Quota;

/// A Lua script with its name by hash.
pub(super) struct Script {
    index: usize,
    text: String,
    sha: String,
}

const PRELUDE: &str = include_str!("prelude.lua");
const DECIDE: &str = include_str!("decide.lua");
const HEARTBEAT: &str = include_str!("heartbeat.lua");
const NEWS: &str = include_str!("news.lua");
const PIECES: [&str; 5] = [
    include_str!("../../algorithm/sliding_log.lua"),
    include_str!("../../algorithm/sliding_log_packed.lua"),
    include_str!("../../algorithm/sliding_counter.lua"),
    include_str!("../../algorithm/fixed_window.lua"),
    include_str!("../../algorithm/bucket.lua"),
];
/// decide.lua with each choice of pieces, heartbeat.lua and news.lua.
pub(super) const SCRIPTS: usize = (1 << PIECES.len()) + 2;

/// Which of the pieces are needed, one bit each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Pieces(usize);

impl Pieces {
    pub(super) fn of(quota: &Quota) -> Self {
        Self(1 << piece(quota))
    }

    pub(super) fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

fn piece(quota: &Quota) -> usize {
    match (quota.algorithm(), quota.encoding()) {
        (Algorithm::SlidingLog, Encoding::SortedSet) => 0,
        (Algorithm::SlidingLog, Encoding::Packed) => 1,
        (Algorithm::SlidingCounter, _) => 2,
        (Algorithm::FixedWindow, _) => 3,
        (Algorithm::TokenBucket | Algorithm::LeakyBucket, _) => 4,
    }
}

impl Script {
    /// The script with just the algorithms that are needed: Lua makes each function anew at every
    /// call, so those that are left out save Redis time.
    pub(super) fn with(Pieces(needed): Pieces) -> &'static Self {
        static ASSEMBLED: [OnceLock<Script>; 1 << PIECES.len()] =
            [const { OnceLock::new() }; 1 << PIECES.len()];
        ASSEMBLED[needed].get_or_init(|| Self::assemble(needed))
    }

    fn assemble(needed: usize) -> Self {
        let chosen = PIECES
            .iter()
            .enumerate()
            .filter(|(index, _)| needed & (1 << index) != 0)
            .map(|(_, piece)| piece);
        let text = [&PRELUDE]
            .into_iter()
            .chain(chosen)
            .chain([&DECIDE])
            .copied()
            .collect::<Vec<_>>()
            .join("\n");
        Self::named(needed, text)
    }

    fn named(index: usize, text: String) -> Self {
        let sha = redis::Script::new(&text).get_hash().to_owned();
        Self { index, text, sha }
    }

    /// The script of a heartbeat.
    pub(super) fn heartbeat() -> &'static Self {
        static SCRIPT: OnceLock<Script> = OnceLock::new();
        SCRIPT.get_or_init(|| Self::named(SCRIPTS - 1, HEARTBEAT.to_owned()))
    }

    /// Which counts have room again.
    pub(super) fn news() -> &'static Self {
        static SCRIPT: OnceLock<Script> = OnceLock::new();
        SCRIPT.get_or_init(|| Self::named(SCRIPTS - 2, NEWS.to_owned()))
    }

    /// Its number among [`SCRIPTS`].
    pub(super) fn index(&self) -> usize {
        self.index
    }

    pub(super) fn text(&self) -> &str {
        &self.text
    }

    /// EVALSHA, up to where the keys begin.
    pub(super) fn evalsha(&self, keys: usize) -> Cmd {
        let mut command = redis::cmd("EVALSHA");
        command.arg(&self.sha).arg(keys);
        command
    }
}
