//! Commands of the Redis protocol: names, arguments, and their descriptions for `COMMAND`.

use std::sync::atomic::{AtomicU64, Ordering};

use super::reply::Writer;
use crate::metrics::Counters;

/// Command that is supported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Command {
    Acquire,
    Peek,
    Refund,
    Report,
    Reset,
    CellThrottle,
    CrabThrottle,
    Auth,
    Client,
    Commands,
    Config,
    Discard,
    Echo,
    Exec,
    Hello,
    Info,
    Multi,
    Ping,
    Quit,
    Readonly,
    Readwrite,
    ResetSession,
    Select,
}

/// Description of a command.
struct Entry {
    command: Command,
    name: &'static str,
    /// Arguments, as errors and `COMMAND DOCS` show them.
    arguments: &'static str,
    summary: &'static str,
    /// Number of arguments with the name; negative for at least that many.
    arity: i64,
    /// Position of the key; 0 without one.
    key: i64,
}

/// Longest name.
const MAX_NAME: usize = 12;

const COMMANDS: [Entry; 23] = [
    Entry {
        command: Command::Acquire,
        name: "TG.ACQUIRE",
        arguments: "policy key [COST n] [WITHNAMES] | KEY key QUOTA algorithm limit window \
                    [BURST b] [COST n] [WITHNAMES]",
        summary: "Decides a request and, if it is allowed, charges its units.",
        arity: -3,
        key: 2,
    },
    Entry {
        command: Command::Peek,
        name: "TG.PEEK",
        arguments: "policy key [COST n] [WITHNAMES] | KEY key QUOTA algorithm limit window \
                    [BURST b] [COST n] [WITHNAMES]",
        summary: "Returns the decision of TG.ACQUIRE without a charge.",
        arity: -3,
        key: 2,
    },
    Entry {
        command: Command::Refund,
        name: "TG.REFUND",
        arguments: "policy key AGE ms [COST n] [WITHNAMES] | KEY key QUOTA algorithm limit window \
                    AGE ms [BURST b] [COST n] [WITHNAMES]",
        summary: "Returns the units of an earlier charge of this age.",
        arity: -5,
        key: 2,
    },
    Entry {
        command: Command::Report,
        name: "TG.REPORT",
        arguments: "policy key [COST n] [WITHNAMES] | KEY key QUOTA algorithm limit window \
                    [BURST b] [COST n] [WITHNAMES]",
        summary: "Records units that were used already, even beyond the limit.",
        arity: -3,
        key: 2,
    },
    Entry {
        command: Command::Reset,
        name: "TG.RESET",
        arguments: "policy key [WITHNAMES] | KEY key QUOTA algorithm limit window [BURST b] \
                    [WITHNAMES]",
        summary: "Deletes the count of a key.",
        arity: -3,
        key: 2,
    },
    Entry {
        command: Command::CellThrottle,
        name: "CL.THROTTLE",
        arguments: "key max_burst count period [quantity]",
        summary: "Limits a key as redis-cell does.",
        arity: -5,
        key: 1,
    },
    Entry {
        command: Command::CrabThrottle,
        name: "THROTTLE",
        arguments: "key max_burst count period [quantity]",
        summary: "Limits a key as throttlecrab does.",
        arity: -5,
        key: 1,
    },
    Entry {
        command: Command::Auth,
        name: "AUTH",
        arguments: "[name] token",
        summary: "Authenticates the connection.",
        arity: -2,
        key: 0,
    },
    Entry {
        command: Command::Client,
        name: "CLIENT",
        arguments: "GETNAME | HELP | ID | INFO | SETINFO attribute value | SETNAME name | \
                    TRACKING ON|OFF …",
        summary: "Names the connection.",
        arity: -2,
        key: 0,
    },
    Entry {
        command: Command::Commands,
        name: "COMMAND",
        arguments: "[COUNT | DOCS [name …] | INFO [name …] | LIST]",
        summary: "Describes the commands.",
        arity: -1,
        key: 0,
    },
    Entry {
        command: Command::Config,
        name: "CONFIG",
        arguments: "GET name [name …]",
        summary: "Returns the settings that clients ask for.",
        arity: -2,
        key: 0,
    },
    Entry {
        command: Command::Discard,
        name: "DISCARD",
        arguments: "",
        summary: "Forgets the commands after MULTI.",
        arity: 1,
        key: 0,
    },
    Entry {
        command: Command::Echo,
        name: "ECHO",
        arguments: "message",
        summary: "Returns the message.",
        arity: 2,
        key: 0,
    },
    Entry {
        command: Command::Exec,
        name: "EXEC",
        arguments: "",
        summary: "Runs the commands after MULTI.",
        arity: 1,
        key: 0,
    },
    Entry {
        command: Command::Hello,
        name: "HELLO",
        arguments: "[2|3 [AUTH user token] [SETNAME name]]",
        summary: "Chooses the version of the protocol.",
        arity: -1,
        key: 0,
    },
    Entry {
        command: Command::Info,
        name: "INFO",
        arguments: "[section …]",
        summary: "Describes the server.",
        arity: -1,
        key: 0,
    },
    Entry {
        command: Command::Multi,
        name: "MULTI",
        arguments: "",
        summary: "Starts to queue commands for EXEC.",
        arity: 1,
        key: 0,
    },
    Entry {
        command: Command::Ping,
        name: "PING",
        arguments: "[message]",
        summary: "Returns PONG, or the message.",
        arity: -1,
        key: 0,
    },
    Entry {
        command: Command::Quit,
        name: "QUIT",
        arguments: "",
        summary: "Closes the connection.",
        arity: -1,
        key: 0,
    },
    Entry {
        command: Command::Readonly,
        name: "READONLY",
        arguments: "",
        summary: "Does nothing: there are no replicas.",
        arity: 1,
        key: 0,
    },
    Entry {
        command: Command::Readwrite,
        name: "READWRITE",
        arguments: "",
        summary: "Does nothing: there are no replicas.",
        arity: 1,
        key: 0,
    },
    Entry {
        command: Command::ResetSession,
        name: "RESET",
        arguments: "",
        summary: "Resets the connection to its first state.",
        arity: 1,
        key: 0,
    },
    Entry {
        command: Command::Select,
        name: "SELECT",
        arguments: "0",
        summary: "Selects the only database.",
        arity: 2,
        key: 0,
    },
];

impl Command {
    /// Finds a command by its name, whose case does not matter.
    pub(super) fn find(name: &[u8]) -> Option<Self> {
        // As nearly every client writes it.
        if name == b"TG.ACQUIRE" {
            return Some(Self::Acquire);
        }
        let mut buffer = [0; MAX_NAME];
        let upper = buffer.get_mut(..name.len())?;
        upper.copy_from_slice(name);
        upper.make_ascii_uppercase();
        Some(match &*upper {
            b"TG.ACQUIRE" => Self::Acquire,
            b"CL.THROTTLE" => Self::CellThrottle,
            b"THROTTLE" => Self::CrabThrottle,
            b"TG.PEEK" => Self::Peek,
            b"TG.REFUND" => Self::Refund,
            b"TG.REPORT" => Self::Report,
            b"TG.RESET" => Self::Reset,
            b"AUTH" => Self::Auth,
            b"CLIENT" => Self::Client,
            b"COMMAND" => Self::Commands,
            b"CONFIG" => Self::Config,
            b"DISCARD" => Self::Discard,
            b"ECHO" => Self::Echo,
            b"EXEC" => Self::Exec,
            b"HELLO" => Self::Hello,
            b"INFO" => Self::Info,
            b"MULTI" => Self::Multi,
            b"PING" => Self::Ping,
            b"QUIT" => Self::Quit,
            b"READONLY" => Self::Readonly,
            b"READWRITE" => Self::Readwrite,
            b"RESET" => Self::ResetSession,
            b"SELECT" => Self::Select,
            _ => return None,
        })
    }

    fn entry(self) -> &'static Entry {
        &COMMANDS[self as usize]
    }

    /// Returns the error for a wrong number of arguments.
    pub(super) fn usage_error(self) -> String {
        let (name, usage) = (self.entry().name.to_ascii_lowercase(), self.usage());
        format!("ERR wrong number of arguments for '{name}' command: {usage}")
    }

    /// Returns the name with the arguments.
    pub(super) fn usage(self) -> String {
        let Entry { name, arguments, .. } = self.entry();
        format!("{name} {arguments}").trim_end().to_owned()
    }

    /// Returns whether the command has a valid number of arguments.
    pub(super) fn accepts(self, arguments: usize) -> bool {
        let given = i64::try_from(arguments).unwrap_or(i64::MAX);
        let arity = self.entry().arity;
        if arity < 0 { given >= -arity } else { given == arity }
    }

    /// Returns whether the command works without authentication.
    pub(super) fn is_public(self) -> bool {
        matches!(self, Self::Auth | Self::Hello | Self::Quit | Self::ResetSession)
    }

    /// Returns whether the command waits for `EXEC` after a `MULTI`.
    pub(super) fn is_queued(self) -> bool {
        let is_control = matches!(self, Self::Multi | Self::Exec | Self::Discard);
        !is_control && !matches!(self, Self::Quit | Self::ResetSession)
    }

    /// Returns whether clients try forms of the command to learn what a server supports.
    pub(super) fn is_handshake(self) -> bool {
        matches!(self, Self::Client | Self::Commands | Self::Config | Self::Hello)
    }
}

/// Returns the error for an unknown command, which names the supported ones.
pub(super) fn unknown(name: &[u8]) -> String {
    let hint = match name.to_ascii_uppercase().as_slice() {
        b"WATCH" | b"UNWATCH" => "there is nothing to watch, because each command is atomic; ",
        b"EVAL" | b"EVALSHA" | b"SCRIPT" | b"FCALL" => "scripts are not needed: use TG.ACQUIRE; ",
        b"GET" | b"SET" | b"DEL" | b"INCR" | b"EXPIRE" => "Tidegate stores no other keys; ",
        _ => "",
    };
    let shown = shown(name);
    let names: Vec<&str> = COMMANDS.iter().map(|entry| entry.name).collect();
    format!("ERR unknown command '{shown}': {hint}the commands are {}", names.join(", "))
}

/// Returns an argument for an error, shortened and without control characters.
pub(super) fn shown(argument: &[u8]) -> String {
    const MAX_SHOWN: usize = 64;
    let text = String::from_utf8_lossy(argument);
    let mut shown: String = text.chars().take(MAX_SHOWN).collect();
    if shown.len() < text.len() {
        shown.push('…');
    }
    shown.replace(char::is_control, "?")
}

/// Writes the reply of `COMMAND COUNT`.
pub(super) fn write_count(writer: &mut Writer<'_>) {
    writer.integer(i64::try_from(COMMANDS.len()).unwrap_or(i64::MAX));
}

/// Writes the reply of `COMMAND LIST`.
pub(super) fn write_names(writer: &mut Writer<'_>) {
    writer.array(COMMANDS.len());
    for entry in &COMMANDS {
        writer.bulk(entry.name.to_ascii_lowercase());
    }
}

/// Writes the reply of `COMMAND` or `COMMAND INFO name …`.
pub(super) fn write_info<'a>(writer: &mut Writer<'_>, names: impl Iterator<Item = &'a [u8]>) {
    let mut shown: Vec<Option<Command>> = names.map(Command::find).collect();
    if shown.is_empty() {
        shown = COMMANDS.iter().map(|entry| Some(entry.command)).collect();
    }
    writer.array(shown.len());
    for command in shown {
        let Some(command) = command else {
            writer.null();
            continue;
        };
        let Entry { name, arity, key, .. } = command.entry();
        writer.array(10);
        writer.bulk(name.to_ascii_lowercase());
        writer.integer(*arity);
        writer.set(1);
        writer.simple("fast");
        writer.integer(*key);
        writer.integer(*key);
        writer.integer(i64::from(*key > 0));
        writer.set(1);
        writer.simple("@fast");
        // No tips, no other positions of keys, and no descriptions of subcommands.
        for _ in 0..3 {
            writer.array(0);
        }
    }
}

/// Writes the reply of `COMMAND DOCS [name …]`.
pub(super) fn write_docs<'a>(writer: &mut Writer<'_>, names: impl Iterator<Item = &'a [u8]>) {
    let mut shown: Vec<Command> = Vec::new();
    let mut is_filtered = false;
    for name in names {
        is_filtered = true;
        shown.extend(Command::find(name));
    }
    if !is_filtered {
        shown = COMMANDS.iter().map(|entry| entry.command).collect();
    }
    writer.map(shown.len());
    for command in shown {
        let Entry { name, summary, key, .. } = command.entry();
        writer.bulk(name.to_ascii_lowercase());
        writer.map(3);
        writer.bulk("summary");
        writer.bulk(format!("{summary} {}", command.usage()));
        writer.bulk("since");
        writer.bulk(env!("CARGO_PKG_VERSION"));
        writer.bulk("group");
        writer.bulk(if *key > 0 { "generic" } else { "connection" });
    }
}

/// Numbers of the Redis protocol, for metrics.
#[derive(Debug, Default)]
pub struct RespCounters {
    connections: AtomicU64,
    /// Calls of each command, and error replies.
    counters: Counters<{ COMMANDS.len() + 1 }>,
}

/// Index of the error replies.
const ERRORS: usize = COMMANDS.len();

impl RespCounters {
    pub(super) fn open(&self) {
        self.connections.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn close(&self) {
        self.connections.fetch_sub(1, Ordering::Relaxed);
    }

    pub(super) fn count(&self, command: Command) {
        self.counters.add(command as usize, 1);
    }

    pub(super) fn count_error(&self) {
        self.counters.add(ERRORS, 1);
    }

    /// Returns the number of open connections.
    pub fn connections(&self) -> u64 {
        self.connections.load(Ordering::Relaxed)
    }

    /// Returns each command with the number of its calls.
    pub fn commands(&self) -> impl Iterator<Item = (String, u64)> {
        let names = COMMANDS.iter().map(|entry| entry.name.to_ascii_lowercase());
        names.zip(self.counters.totals())
    }

    /// Returns the number of error replies.
    pub fn errors(&self) -> u64 {
        self.counters.total(ERRORS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_is_in_the_order_of_the_commands() {
        for (index, entry) in COMMANDS.iter().enumerate() {
            assert_eq!(entry.command as usize, index, "{}", entry.name);
            assert_eq!(Command::find(entry.name.as_bytes()), Some(entry.command));
            assert_eq!(Command::find(entry.name.to_lowercase().as_bytes()), Some(entry.command));
            assert!(entry.name.len() <= MAX_NAME);
        }
        assert_eq!(Command::find(b"GET"), None);
        assert_eq!(Command::find(b"A-VERY-LONG-NAME"), None);
    }
}
