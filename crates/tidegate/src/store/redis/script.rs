//! [`Script`]: decide.lua, assembled from its parts, heartbeat.lua and invalidation.lua.

use std::sync::OnceLock;

use redis::Cmd;

use super::resp;

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
/// Number of bytes of an EVALSHA command without keys and arguments, at most.
const EVALSHA_BYTES: usize = 128;
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

    /// Starts an EVALSHA command with these numbers of keys and arguments, which follow. `capacity`
    /// is the number of their bytes.
    pub(super) fn encode_evalsha(&self, keys: usize, arguments: usize, capacity: usize) -> Vec<u8> {
        let mut command = Vec::with_capacity(EVALSHA_BYTES + capacity);
        resp::push_head(&mut command, 3 + keys + arguments);
        resp::push_word(&mut command, b"EVALSHA");
        resp::push_word(&mut command, self.sha.as_bytes());
        resp::push_word(&mut command, keys.to_string().as_bytes());
        command
    }

    /// Returns an encoded EVALSHA command of this script as EVAL with its text.
    pub(super) fn with_text(&self, evalsha: &[u8]) -> Vec<u8> {
        let head = evalsha.iter().position(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        let mut command = evalsha[..head].to_vec();
        resp::push_word(&mut command, b"EVAL");
        resp::push_word(&mut command, self.text.as_bytes());
        let (mut name, mut sha) = (Vec::new(), Vec::new());
        resp::push_word(&mut name, b"EVALSHA");
        resp::push_word(&mut sha, self.sha.as_bytes());
        command.extend(evalsha.iter().skip(head + name.len() + sha.len()));
        command
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

    #[test]
    fn a_call_by_hash_becomes_one_with_the_text() {
        let script = Script::decide(KeyMode::Declared);
        let mut by_hash = script.encode_evalsha(1, 1, 0);
        resp::push_word(&mut by_hash, b"key");
        resp::push_word(&mut by_hash, b"argument");
        let same = script.evalsha(1).arg("key").arg("argument").get_packed_command();
        assert_eq!(by_hash, same);
        let mut with_text = redis::cmd("EVAL");
        with_text.arg(script.text()).arg(1).arg("key").arg("argument");
        assert_eq!(script.with_text(&by_hash), with_text.get_packed_command());
    }
}
