//! [`Script`]: decide.lua with the files that it includes, with holds and calendars and without,
//! heartbeat.lua, invalidation.lua, overrides.lua and board.lua, each with the server's clock and
//! with an estimated one.

use std::sync::LazyLock;

pub(super) mod call;
#[cfg(test)]
mod instruction_tests;
pub(super) mod reply;
pub(super) mod requests;

/// Version of the forms in which scripts keep counts. A release that cannot read the values of the one before it, or that writes
/// values which that one cannot read, has another version, and so other names of counts. During an
/// upgrade each version then counts for itself, and a key is admitted at most twice its limit.
pub const FORMAT: u32 = 1;

/// Returns the mark of a format in names of counts and instances. The first one has none.
pub(super) fn format_mark(format: u32) -> String {
    if format == 1 { String::new() } else { format!("v{format}") }
}

/// Lua script with its SHA-1 for EVALSHA.
pub(super) struct Script {
    /// Its place in [`SCRIPTS`].
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

/// Parts of decide.lua that only some calls need.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Parts {
    pub(super) holds: bool,
    pub(super) calendars: bool,
}

/// Clock of decisions on Redis: [`Builder::clock`](super::Builder::clock) chooses it, and
/// [`NodeHealth::clock`](super::NodeHealth::clock) shows the one in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ClockSource {
    /// Scripts call `TIME`.
    #[default]
    Server,
    /// The store runs `TIME` as a command once per second, and scripts get the server's time as it
    /// estimates it. The error is half a round trip at most, plus the drift of two clocks in a
    /// second.
    Estimated,
}

const DECIDE: &str = include_str!("script/decide.lua");
const HEARTBEAT: &str = include_str!("coordination/heartbeat.lua");
const INVALIDATION: &str = include_str!("coordination/invalidation.lua");
const OVERRIDES: &str = include_str!("coordination/overrides.lua");
const BOARD: &str = include_str!("coordination/board.lua");
/// Files that decide.lua includes, by name: general.lua before those that it includes itself.
const INCLUDED: [(&str, &str); 14] = [
    CLOCK,
    ("general.lua", include_str!("script/general.lua")),
    ("arithmetic.lua", include_str!("script/arithmetic.lua")),
    ("block.lua", include_str!("../../algorithm/block.lua")),
    ("bucket.lua", include_str!("../../algorithm/bucket.lua")),
    ("bucket.fast.lua", include_str!("../../algorithm/bucket.fast.lua")),
    ("fixed_window.lua", include_str!("../../algorithm/fixed_window.lua")),
    ("fixed_window.fast.lua", include_str!("../../algorithm/fixed_window.fast.lua")),
    ("sliding_counter.lua", include_str!("../../algorithm/sliding_counter.lua")),
    ("sliding_counter.fast.lua", include_str!("../../algorithm/sliding_counter.fast.lua")),
    ("sliding_log.lua", include_str!("../../algorithm/sliding_log.lua")),
    ("sliding_log.fast.lua", include_str!("../../algorithm/sliding_log.fast.lua")),
    ("sliding_log_packed.lua", include_str!("../../algorithm/sliding_log_packed.lua")),
    ("sliding_log_packed.fast.lua", include_str!("../../algorithm/sliding_log_packed.fast.lua")),
];
/// Files of holds. Calls without holds have a script without them: the garbage collector visits all
/// of a script, which would make each of its decisions 4 % longer.
const HOLDS: [(&str, &str); 6] = [
    ("hold.fast.lua", include_str!("../../algorithm/hold.fast.lua")),
    ("hold.record.lua", include_str!("../../algorithm/hold.record.lua")),
    ("hold.denied.lua", include_str!("../../algorithm/hold.denied.lua")),
    ("hold.after.lua", include_str!("../../algorithm/hold.after.lua")),
    ("hold.lua", include_str!("../../algorithm/hold.lua")),
    ("concurrency.lua", include_str!("../../algorithm/concurrency.lua")),
];
/// Files of calendar quotas, which calls without them do not have, either.
const CALENDARS: [(&str, &str); 2] = [
    ("calendar.lua", include_str!("../../algorithm/calendar.lua")),
    ("calendar.fast.lua", include_str!("../../algorithm/calendar.fast.lua")),
];
const CLOCK: (&str, &str) = ("clock.lua", include_str!("script/clock.lua"));
const ESTIMATED_CLOCK: &str = include_str!("script/clock.estimated.lua");
const ESTIMATED_EXPIRY: &str = include_str!("script/expiry.estimated.lua");
/// The time in scripts of coordination, and the same from the last argument.
const TIME: &str = "redis.call('TIME')";
const TIME_ARGUMENT: &str = "{string.match(ARGV[#ARGV], '^(%d+) (%d+)$')}";
/// First line of a script whose undeclared keys may be in other slots.
const CROSS_SLOT: &str = "#!lua flags=allow-cross-slot-keys\n";
/// Number of scripts.
pub(super) const SCRIPT_COUNT: usize = 2 * (DECIDE_COUNT + OWN.len());
/// Variants of decide.lua: in both modes, with each set of parts.
const DECIDE_COUNT: usize = 8;
/// Scripts of the store's own keys.
const OWN: [&str; 4] = [HEARTBEAT, INVALIDATION, OVERRIDES, BOARD];
/// The variants of decide.lua, then the scripts of own keys; then all of them with an estimated
/// clock.
static SCRIPTS: LazyLock<[Script; SCRIPT_COUNT]> = LazyLock::new(|| {
    let mut texts = Vec::with_capacity(SCRIPT_COUNT / 2);
    for (calendars, holds) in [(false, false), (false, true), (true, false), (true, true)] {
        let text = assembled(Parts { holds, calendars });
        let cross_slot = format!("{CROSS_SLOT}{text}");
        texts.extend([text, cross_slot]);
    }
    texts.extend(OWN.map(str::to_owned));
    std::array::from_fn(|index| {
        let text = &texts[index % texts.len()];
        let text = if index < texts.len() {
            text.clone()
        } else {
            let (flags, text) = match text.strip_prefix(CROSS_SLOT) {
                Some(rest) => (CROSS_SLOT, rest),
                None => ("", text.as_str()),
            };
            let text = text.replace(CLOCK.1, ESTIMATED_CLOCK).replace(TIME, TIME_ARGUMENT);
            format!("{flags}{ESTIMATED_EXPIRY}{text}")
        };
        let sha = sha1_smol::Sha1::from(&text).digest().to_string();
        Script { index, text, sha }
    })
});

impl Script {
    /// Returns decide.lua with these parts.
    pub(super) fn decide(mode: KeyMode, parts: Parts) -> &'static Self {
        let parts = usize::from(parts.holds) + 2 * usize::from(parts.calendars);
        &SCRIPTS[mode as usize + 2 * parts]
    }

    /// Returns the variant of this script for a clock.
    pub(super) fn with_clock(&self, clock: ClockSource) -> &'static Self {
        let variants = SCRIPT_COUNT / 2;
        &SCRIPTS[self.index % variants + variants * clock as usize]
    }

    /// Returns heartbeat.lua.
    pub(super) fn heartbeat() -> &'static Self {
        &SCRIPTS[DECIDE_COUNT]
    }

    /// Returns invalidation.lua.
    pub(super) fn invalidation() -> &'static Self {
        &SCRIPTS[DECIDE_COUNT + 1]
    }

    /// Returns overrides.lua.
    pub(super) fn overrides() -> &'static Self {
        &SCRIPTS[DECIDE_COUNT + 2]
    }

    /// Returns board.lua.
    pub(super) fn board() -> &'static Self {
        &SCRIPTS[DECIDE_COUNT + 3]
    }

    /// Returns its index, below [`SCRIPT_COUNT`].
    pub(super) fn index(&self) -> usize {
        self.index
    }

    pub(super) fn text(&self) -> &str {
        &self.text
    }

    /// Returns the first words of a call: by EVALSHA, or by EVAL with the text.
    pub(super) fn first_words(&self, with_text: bool) -> [&str; 2] {
        if with_text { ["EVAL", &self.text] } else { ["EVALSHA", &self.sha] }
    }
}

/// Returns decide.lua with the files that it includes. A text in a branch that is not taken costs
/// nothing, but a function would, because Lua creates the functions of a script in each call.
fn assembled(parts: Parts) -> String {
    let include = |text: String, (name, file): &(&str, &str)| {
        text.replace(&format!("include('{name}')\n"), file)
    };
    let text = INCLUDED.iter().fold(DECIDE.to_owned(), include);
    let holds = HOLDS.iter().map(|file| (file, parts.holds));
    let calendars = CALENDARS.iter().map(|file| (file, parts.calendars));
    holds.chain(calendars).fold(text, |text, (&(name, file), is_part)| {
        let include = format!("include('{name}')");
        if is_part {
            // The rest of the line of an include runs after the file.
            return text.replace(&include, file);
        }
        let lines = text.lines().filter(|line| !line.trim_start().starts_with(&include));
        lines.fold(String::new(), |text, line| {
            text + line
                + "
"
        })
    })
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::process::{Command, Stdio};

    use super::*;
    use crate::store::redis::client::resp;

    #[test]
    fn estimated_scripts_take_the_time_from_their_arguments() {
        for script in &SCRIPTS[..SCRIPT_COUNT / 2] {
            let estimated = script.with_clock(ClockSource::Estimated);
            assert!(script.text().contains(TIME) && !estimated.text().contains("'TIME'"));
            assert_eq!(estimated.index(), script.index() + SCRIPT_COUNT / 2);
            assert_eq!(estimated.with_clock(ClockSource::Server).index(), script.index());
        }
    }

    #[test]
    fn a_script_has_all_parts() {
        let all = [(false, false), (false, true), (true, false), (true, true)];
        let scripts = all.map(|(calendars, holds)| {
            let parts = Parts { holds, calendars };
            let text = Script::decide(KeyMode::Declared, parts).text();
            assert!(!text.contains("include("), "a file is missing");
            for (name, file) in INCLUDED {
                let last_line = file.lines().last().expect("a line");
                assert!(text.contains(last_line), "{name} is not included");
            }
            for (files, is_part) in [(&HOLDS[..], holds), (&CALENDARS[..], calendars)] {
                let found = files.iter().filter(|(_, file)| text.contains(file));
                assert_eq!(found.count(), if is_part { files.len() } else { 0 });
            }
            let cross_slot = Script::decide(KeyMode::CrossSlot, parts);
            assert_eq!(cross_slot.text().strip_prefix(CROSS_SLOT), Some(text));
            [Script::decide(KeyMode::Declared, parts), cross_slot]
        });
        let mut scripts = scripts.concat();
        scripts.extend([Script::heartbeat(), Script::invalidation()]);
        scripts.extend([Script::overrides(), Script::board()]);
        for (index, script) in scripts.iter().enumerate() {
            assert_eq!(script.index(), index);
        }
        assert_eq!(scripts.len(), SCRIPT_COUNT / 2);
    }

    /// The heads of the files say which variables of their includer they use. Here luacheck sees
    /// all files together, and finds those that no file has, and those that no file uses.
    #[test]
    fn variables_of_a_file_are_those_of_its_includer() {
        let config = concat!(env!("CARGO_MANIFEST_DIR"), "/../../.luacheckrc");
        let mut luacheck = Command::new("luacheck")
            .args(["--config", config, "--no-max-line-length", "--no-color", "-"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("luacheck is installed by `make setup`");
        let parts = Parts { holds: true, calendars: true };
        let text = Script::decide(KeyMode::Declared, parts).text();
        let is_code = |line: &&str| !line.starts_with("-- luacheck:");
        let code: Vec<&str> = text.lines().filter(is_code).collect();
        let mut input = luacheck.stdin.take().expect("piped");
        input.write_all(code.join("\n").as_bytes()).expect("luacheck reads it");
        drop(input);
        let output = luacheck.wait_with_output().expect("luacheck ends");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    }

    #[test]
    fn a_call_is_by_hash_or_with_the_text() {
        let script = Script::decide(KeyMode::Declared, Parts::default());
        for (with_text, name, first) in
            [(false, "EVALSHA", &script.sha), (true, "EVAL", &script.text)]
        {
            let mut call = Vec::new();
            resp::Command::new("1").arg("key").encode(&script.first_words(with_text), &mut call);
            let expected = redis::cmd(name).arg(first).arg(1).arg("key").get_packed_command();
            assert_eq!(call, expected);
        }
    }
}
