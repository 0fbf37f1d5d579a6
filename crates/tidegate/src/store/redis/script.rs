//! [`Script`]: decide.lua, assembled from its parts, heartbeat.lua and invalidation.lua.

use std::sync::OnceLock;

use redis::Cmd;

/// Lua script with its SHA-1 for EVALSHA.
pub(super) struct Script {
    index: usize,
    text: String,
    sha: String,
}

/// Where a call of decide.lua has its keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum KeyMode {
    /// All keys are declared in KEYS: every server accepts them.
    #[default]
    Declared,
    /// Only the first key is declared, the others are arguments. On a cluster of
    /// Redis 7 or Valkey they may be in any slots of the same node. An item with a key of another
    /// node fails alone.
    CrossSlot,
}

const DECIDE: &str = include_str!("decide.lua");
const GENERAL: &str = include_str!("general.lua");
const ARITHMETIC: &str = include_str!("arithmetic.lua");
const HEARTBEAT: &str = include_str!("heartbeat.lua");
const INVALIDATION: &str = include_str!("invalidation.lua");
/// Lua twins of the algorithms: name, text.
const ALGORITHMS: [(&str, &str); 5] = [
    ("sliding_log", include_str!("../../algorithm/sliding_log.lua")),
    ("sliding_log_packed", include_str!("../../algorithm/sliding_log_packed.lua")),
    ("sliding_counter", include_str!("../../algorithm/sliding_counter.lua")),
    ("fixed_window", include_str!("../../algorithm/fixed_window.lua")),
    ("bucket", include_str!("../../algorithm/bucket.lua")),
];
/// Line between the two parts of an algorithm's file.
const SEPARATOR: &str =
    "\n--------------------------------- general ---------------------------------\n";
/// First line of a script whose undeclared keys may be in other slots.
const CROSS_SLOT: &str = "#!lua flags=allow-cross-slot-keys\n";
/// Number of scripts.
pub(super) const SCRIPT_COUNT: usize = 4;

impl Script {
    /// Returns decide.lua.
    pub(super) fn decide(mode: KeyMode) -> &'static Self {
        static SCRIPTS: [OnceLock<Script>; 2] = [const { OnceLock::new() }; 2];
        let (index, first_line) = match mode {
            KeyMode::Declared => (0, ""),
            KeyMode::CrossSlot => (1, CROSS_SLOT),
        };
        SCRIPTS[index].get_or_init(|| Self::new(index, format!("{first_line}{}", assembled())))
    }

    fn new(index: usize, text: String) -> Self {
        let sha = redis::Script::new(&text).get_hash().to_owned();
        Self { index, text, sha }
    }

    /// Returns heartbeat.lua.
    pub(super) fn heartbeat() -> &'static Self {
        static SCRIPT: OnceLock<Script> = OnceLock::new();
        SCRIPT.get_or_init(|| Self::new(2, HEARTBEAT.to_owned()))
    }

    /// Returns invalidation.lua.
    pub(super) fn invalidation() -> &'static Self {
        static SCRIPT: OnceLock<Script> = OnceLock::new();
        SCRIPT.get_or_init(|| Self::new(3, INVALIDATION.to_owned()))
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

/// Returns decide.lua with the texts that its lines `--general`, `--arithmetic`, `--ordinary
/// <algorithm>` and `--general <algorithm>` stand for. A text in a branch that is not taken costs nothing, but a
/// function would, because Lua creates the functions of a script in each call.
fn assembled() -> String {
    let mut text = DECIDE.replace("--general\n", GENERAL).replace("--arithmetic\n", ARITHMETIC);
    for (name, algorithm) in ALGORITHMS {
        let (ordinary, general) = algorithm.split_once(SEPARATOR).unwrap_or((algorithm, ""));
        text = text
            .replace(&format!("--ordinary {name}\n"), ordinary)
            .replace(&format!("--general {name}\n"), general);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_has_all_parts() {
        let text = Script::decide(KeyMode::Declared).text();
        let missing = text.lines().find(|line| {
            let mark = line.trim_start().strip_prefix("--");
            mark.is_some_and(|mark| mark.starts_with(char::is_alphabetic))
        });
        assert_eq!(missing, None, "a part is missing");
        for (name, algorithm) in ALGORITHMS {
            assert!(algorithm.contains(SEPARATOR), "{name}.lua has two parts");
        }
        let cross_slot = Script::decide(KeyMode::CrossSlot);
        assert_eq!(cross_slot.text().strip_prefix(CROSS_SLOT), Some(text));
        let scripts = [
            Script::decide(KeyMode::Declared),
            cross_slot,
            Script::heartbeat(),
            Script::invalidation(),
        ];
        for (index, script) in scripts.iter().enumerate() {
            assert_eq!(script.index(), index);
        }
        assert_eq!(scripts.len(), SCRIPT_COUNT);
    }
}
