//! Commands of the Redis protocol: names, arguments, and their descriptions for `COMMAND`.

use std::sync::atomic::{AtomicU64, Ordering};

use super::reply::Writer;
use crate::metrics::{Counters, MetricsSection, write_labelled, write_numbers};

/// Description of a command.
struct CommandEntry {
    command: Command,
    name: &'static str,
    /// Number of arguments with the name; negative for at least that many.
    arity: i64,
    /// Position of the key; 0 without one.
    key: i64,
    /// Arguments, as errors and `COMMAND DOCS` show them.
    arguments: &'static str,
    summary: &'static str,
}

/// Declares the commands: the enum, and the table of its entries in the same order.
macro_rules! commands {
    ($($command:ident $name:literal arity $arity:literal key $key:literal
        ($arguments:expr) $summary:literal;)*) => {
        /// Command that is supported.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(super) enum Command {
            $($command,)*
        }

        const COMMANDS: [CommandEntry; [$($name),*].len()] = [$(CommandEntry {
            command: Command::$command,
            name: $name,
            arity: $arity,
            key: $key,
            arguments: $arguments,
            summary: $summary,
        },)*];
    };
}

const DECIDE: &str = "policy key [COST n] [WITHNAMES] | KEY key QUOTA algorithm limit window \
                      [BURST b] [COST n] [WITHNAMES]";
const ACQUIRE: &str = "policy key [COST n] [ID id [TTL ms]] [WITHNAMES] | KEY key QUOTA algorithm \
                       limit window [BURST b] [COST n] [ID id [TTL ms]] [WITHNAMES]";
const RESERVE: &str = "policy key [COST n] [TTL ms] [ID id] [WITHNAMES] | KEY key QUOTA algorithm \
                       limit window [BURST b] [COST n] [TTL ms] [ID id] [WITHNAMES]";
const COMMIT: &str = "policy key id actual [WITHNAMES] | KEY key QUOTA algorithm limit window id \
                      actual [BURST b] [WITHNAMES]";
const RENEW: &str = "policy key id ttl [WITHNAMES] | KEY key QUOTA algorithm limit window id ttl \
                     [BURST b] [WITHNAMES]";
const REFUND: &str = "policy key AGE ms [COST n] [WITHNAMES] | policy key ID id [WITHNAMES] | \
                      KEY key QUOTA algorithm limit window AGE ms [BURST b] [COST n] [WITHNAMES]";
const RESET: &str = "policy key [WITHNAMES] | KEY key QUOTA algorithm limit window [BURST b] \
                     [WITHNAMES]";
const OVERRIDE: &str = "SET policy key [LIMIT n] [WINDOW duration] [BURST b] [MODE unlimited|block] \
                        EXPIRES duration|never REASON text | DEL policy key [REASON text] | LIST \
                        [policy]";
const THROTTLE: &str = "key max_burst count period [quantity]";
const CLIENT: &str = "GETNAME | HELP | ID | INFO | SETINFO attribute value | SETNAME name | \
                      TRACKING ON|OFF …";

commands! {
    Acquire "TG.ACQUIRE" arity -3 key 2
        (ACQUIRE) "Decides a request and, if it is allowed, charges its units.";
    Peek "TG.PEEK" arity -3 key 2
        (DECIDE) "Returns the decision of TG.ACQUIRE without a charge.";
    Refund "TG.REFUND" arity -5 key 2
        (REFUND) "Returns the units of an earlier charge of this age or id.";
    Report "TG.REPORT" arity -3 key 2
        (DECIDE) "Records units that were used already, even beyond the limit.";
    Reserve "TG.RESERVE" arity -3 key 2
        (RESERVE) "Charges units until a commit settles those that were used.";
    Commit "TG.COMMIT" arity -5 key 2
        (COMMIT) "Settles a reservation; 0 units cancel it.";
    Renew "TG.RENEW" arity -5 key 2 (RENEW) "Extends a reservation that has not ended.";
    Reset "TG.RESET" arity -3 key 2 (RESET) "Deletes the count of a key.";
    Override "TG.OVERRIDE" arity -2 key 0
        (OVERRIDE) "Changes the limit of a key, or of all keys with *, for a while.";
    CellThrottle "CL.THROTTLE" arity -5 key 1 (THROTTLE) "Limits a key as redis-cell does.";
    CrabThrottle "THROTTLE" arity -5 key 1 (THROTTLE) "Limits a key as throttlecrab does.";
    Auth "AUTH" arity -2 key 0 ("[name] token") "Authenticates the connection.";
    Client "CLIENT" arity -2 key 0 (CLIENT) "Names the connection.";
    Commands "COMMAND" arity -1 key 0
        ("[COUNT | DOCS [name …] | INFO [name …] | LIST]") "Describes the commands.";
    Config "CONFIG" arity -2 key 0
        ("GET name [name …]") "Returns the settings that clients ask for.";
    Discard "DISCARD" arity 1 key 0 ("") "Forgets the commands after MULTI.";
    Echo "ECHO" arity 2 key 0 ("message") "Returns the message.";
    Exec "EXEC" arity 1 key 0 ("") "Runs the commands after MULTI.";
    Hello "HELLO" arity -1 key 0
        ("[2|3 [AUTH user token] [SETNAME name]]") "Chooses the version of the protocol.";
    Info "INFO" arity -1 key 0 ("[section …]") "Describes the server.";
    Multi "MULTI" arity 1 key 0 ("") "Starts to queue commands for EXEC.";
    Ping "PING" arity -1 key 0 ("[message]") "Returns PONG, or the message.";
    Quit "QUIT" arity -1 key 0 ("") "Closes the connection.";
    Readonly "READONLY" arity 1 key 0 ("") "Does nothing: there are no replicas.";
    Readwrite "READWRITE" arity 1 key 0 ("") "Does nothing: there are no replicas.";
    ResetSession "RESET" arity 1 key 0 ("") "Resets the connection to its first state.";
    Select "SELECT" arity 2 key 0 ("0") "Selects the only database.";
}

impl Command {
    /// Finds a command by its name, whose case does not matter. The most frequent one is the first.
    pub(super) fn find(name: &[u8]) -> Option<Self> {
        let mut entries = COMMANDS.iter();
        let found = entries.find(|entry| entry.name.as_bytes().eq_ignore_ascii_case(name));
        found.map(|entry| entry.command)
    }

    fn entry(self) -> &'static CommandEntry {
        &COMMANDS[self as usize]
    }

    /// Returns the error for a wrong number of arguments.
    pub(super) fn usage_error(self) -> String {
        let (name, usage) = (self.entry().name.to_ascii_lowercase(), self.usage());
        format!("ERR wrong number of arguments for '{name}' command: {usage}")
    }

    /// Returns the name with the arguments.
    pub(super) fn usage(self) -> String {
        let CommandEntry { name, arguments, .. } = self.entry();
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

/// Returns the commands of these names, `None` for an unknown one; without names, all commands.
fn named<'a>(names: impl Iterator<Item = &'a [u8]>) -> Vec<Option<Command>> {
    let found: Vec<_> = names.map(Command::find).collect();
    if found.is_empty() {
        COMMANDS.iter().map(|entry| Some(entry.command)).collect()
    } else {
        found
    }
}

/// Writes the reply of `COMMAND` or `COMMAND INFO name …`.
pub(super) fn write_info<'a>(writer: &mut Writer<'_>, names: impl Iterator<Item = &'a [u8]>) {
    let shown = named(names);
    writer.array(shown.len());
    for command in shown {
        let Some(command) = command else {
            writer.null();
            continue;
        };
        let CommandEntry { name, arity, key, .. } = command.entry();
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
    let shown: Vec<Command> = named(names).into_iter().flatten().collect();
    writer.map(shown.len());
    for command in shown {
        let CommandEntry { name, summary, key, .. } = command.entry();
        writer.bulk(name.to_ascii_lowercase());
        writer.map(3);
        writer.pair("summary", format!("{summary} {}", command.usage()));
        writer.pair("since", env!("CARGO_PKG_VERSION"));
        writer.pair("group", if *key > 0 { "generic" } else { "connection" });
    }
}

/// Numbers of the Redis protocol, for metrics.
#[derive(Debug, Default)]
pub(crate) struct RespCounters {
    connections: AtomicU64,
    /// Calls of each command, and error replies.
    counters: Counters<{ COMMANDS.len() + 1 }>,
}

impl MetricsSection for RespCounters {
    fn write_metrics(&self, text: &mut String) {
        #[rustfmt::skip]
        let numbers = [
            ("tidegate_resp_connections", "gauge",
                "Open connections of Redis clients.", self.connections()),
            ("tidegate_resp_errors_total", "counter",
                "Error replies to Redis clients.", self.errors()),
        ];
        write_numbers(text, &numbers);
        let help = "Commands of Redis clients, by command.";
        write_labelled(text, ("tidegate_resp_commands_total", "command"), help, self.commands());
    }
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
    pub(crate) fn connections(&self) -> u64 {
        self.connections.load(Ordering::Relaxed)
    }

    /// Returns each command with the number of its calls.
    pub(crate) fn commands(&self) -> impl Iterator<Item = (String, u64)> {
        let names = COMMANDS.iter().map(|entry| entry.name.to_ascii_lowercase());
        names.zip(self.counters.totals())
    }

    /// Returns the number of error replies.
    pub(crate) fn errors(&self) -> u64 {
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
        }
        assert_eq!(Command::find(b"GET"), None);
        assert_eq!(Command::find(b"A-VERY-LONG-NAME"), None);
    }
}
