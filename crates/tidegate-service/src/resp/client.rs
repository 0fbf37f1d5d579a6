//! Client of a connection: its authentication, its name, and the commands that decide nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::RespShared;
use super::command::{self, Command, RespCounters, shown};
use super::frame::{Arguments, FrameError, Limits};
use super::overrides;
use super::reply::{RespReply, RespVersion, Writer};
use super::request::{self, CommandQuery, QuotaCache};
use super::transaction::{Queued, Transaction};
use crate::auth::AuthListener;
use crate::state::{ActiveConfig, Caller, ServerState};
use tidegate_api::operation::Operation;
use tidegate_config::{Scope, Token};
use tidegate_net::listener::{Peer, SessionStep};

/// Version of Redis whose protocol is supported. Clients choose features by it.
const REDIS_VERSION: &str = "7.0.0";
/// Maximum length of the name of a client.
const MAX_NAME_BYTES: usize = 256;
/// Number of wrong tokens after which a connection is closed.
const MAX_FAILED_AUTHS: u32 = 3;
const NOAUTH: &str = "NOAUTH Authentication required: AUTH token, with auth.api_token or one of \
                      auth.tokens";
/// Settings that clients ask for when they connect.
const SETTINGS: [(&str, &str); 5] = [
    ("appendonly", "no"),
    ("databases", "1"),
    ("maxmemory", "0"),
    ("proto-max-bulk-len", "65536"),
    ("save", ""),
];

/// Client of one connection.
pub(super) struct Client {
    pub(super) state: Arc<ServerState>,
    peer: Peer,
    id: u64,
    name: String,
    pub(super) protocol: RespVersion,
    /// Token that the client has authenticated with.
    token: Option<Arc<Token>>,
    failed_auths: u32,
    /// Whether other hosts may be able to connect to the listener.
    is_remote: bool,
    quotas: QuotaCache,
    pub(super) shared: Arc<RespShared>,
    /// Commands since `MULTI`.
    transaction: Option<Transaction>,
    /// Commands of an `EXEC` that are still to be run.
    pub(super) executing: Option<Queued>,
}

impl Client {
    pub(super) fn new(
        state: Arc<ServerState>,
        shared: &Arc<RespShared>,
        peer: Peer,
        is_remote: bool,
    ) -> Self {
        static NEXT_ID: AtomicU64 = AtomicU64::new(1);
        Self {
            state,
            peer,
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            name: String::new(),
            protocol: RespVersion::default(),
            token: None,
            failed_auths: 0,
            is_remote,
            quotas: QuotaCache::default(),
            shared: Arc::clone(shared),
            transaction: None,
            executing: None,
        }
    }

    /// Returns the limits of the next command.
    pub(super) fn limits(&self, active: &ActiveConfig) -> Limits {
        if self.lacks_token(active) { Limits::Unauthenticated } else { Limits::Full }
    }

    fn lacks_token(&self, active: &ActiveConfig) -> bool {
        active.tokens.of_api().is_some() && self.token.is_none()
    }

    /// Handles a command that decides nothing or waits for `EXEC`, and returns the next step.
    pub(super) fn handle(
        &mut self,
        active: &ActiveConfig,
        arguments: Arguments<'_, '_>,
        replies: &mut Vec<u8>,
    ) -> SessionStep {
        let Some(name) = arguments.get(0) else { return SessionStep::Read };
        let found = Command::find(name);
        let mut writer = Writer { bytes: replies, protocol: self.protocol };
        let answered = match found {
            None => self.abort(command::unknown(name)),
            Some(command) if self.transaction.is_some() && command.is_queued() => {
                self.queue(active, command, arguments, &mut writer)
            }
            Some(command) => {
                self.counters().count(command);
                self.answer(active, command, arguments, &mut writer)
            }
        };
        answered.unwrap_or_else(|error| {
            let is_expected = found.is_some_and(Command::is_handshake)
                && !error.starts_with("NOAUTH")
                && !error.starts_with("WRONGPASS");
            if !is_expected {
                self.counters().count_error();
            }
            Writer { bytes: replies, protocol: self.protocol }.error(&error);
            if self.failed_auths < MAX_FAILED_AUTHS {
                SessionStep::Read
            } else {
                SessionStep::Close
            }
        })
    }

    /// Queues a command for `EXEC`.
    fn queue(
        &mut self,
        active: &ActiveConfig,
        command: Command,
        arguments: Arguments<'_, '_>,
        writer: &mut Writer<'_>,
    ) -> Result<SessionStep, String> {
        let checked = self.check(active, command, arguments);
        let queued = match &mut self.transaction {
            Some(transaction) => checked.and_then(|()| transaction.push(arguments)),
            None => checked,
        };
        match queued {
            Ok(()) => writer.simple("QUEUED"),
            Err(error) => return self.abort(error),
        }
        Ok(SessionStep::Read)
    }

    /// Aborts the transaction, if there is one, because of an error.
    fn abort(&mut self, error: String) -> Result<SessionStep, String> {
        self.transaction.iter_mut().for_each(Transaction::abort);
        Err(error)
    }

    /// Returns the query of a command that decides, or its error; `None` for other commands, and
    /// for those that wait for `EXEC`.
    pub(super) fn request<'a>(
        &mut self,
        active: &ActiveConfig,
        arguments: Arguments<'a, '_>,
    ) -> Option<Result<CommandQuery<'a>, String>> {
        let command = Command::find(arguments.get(0)?)?;
        let operation = request::operation(command)?;
        if self.transaction.is_some() {
            return None;
        }
        self.counters().count(command);
        if let Err(error) = self.check(active, command, arguments) {
            return Some(Err(error));
        }
        let mut request = request::parse(command, operation, arguments, &mut self.quotas);
        if operation == Operation::Reset
            && let Ok(request) = &mut request
        {
            let caller = Caller { peer: self.peer.address, token: self.token.clone() };
            request.caller = Some(caller);
        }
        Some(request)
    }

    /// Runs a command that changes or lists overrides, and writes its reply. Returns false for any
    /// other command, and for one that waits for `EXEC`.
    pub(super) async fn run_override(
        &self,
        active: &ActiveConfig,
        arguments: Arguments<'_, '_>,
        replies: &mut Vec<u8>,
    ) -> bool {
        let command = arguments.get(0).and_then(Command::find);
        if command != Some(Command::Override) || self.transaction.is_some() {
            return false;
        }
        self.counters().count(Command::Override);
        let request = self
            .check(active, Command::Override, arguments)
            .and_then(|()| overrides::parse(arguments));
        let reply = match request {
            Ok(request) => {
                let caller = Caller { peer: self.peer.address, token: self.token.clone() };
                overrides::run(&self.state, active, &caller, request).await
            }
            Err(error) => Err(error),
        };
        let mut writer = Writer { bytes: replies, protocol: self.protocol };
        match reply {
            Ok(reply) => overrides::write(&mut writer, &reply),
            Err(error) => {
                self.counters().count_error();
                writer.error(&error);
            }
        }
        true
    }

    /// Writes a reply.
    pub(super) fn write(&self, reply: &RespReply, replies: &mut Vec<u8>) {
        if matches!(reply, RespReply::Error(_)) {
            self.counters().count_error();
        }
        Writer { bytes: replies, protocol: self.protocol }.reply(reply);
    }

    /// Writes the error of a broken frame, after which nothing can be read.
    pub(super) fn reject(&self, error: &FrameError, replies: &mut Vec<u8>) -> SessionStep {
        self.write(&RespReply::Error(format!("ERR Protocol error: {error}")), replies);
        SessionStep::Close
    }

    fn counters(&self) -> &RespCounters {
        &self.shared.counters
    }

    /// Writes the reply to a command that decides nothing.
    fn answer(
        &mut self,
        active: &ActiveConfig,
        command: Command,
        arguments: Arguments<'_, '_>,
        writer: &mut Writer<'_>,
    ) -> Result<SessionStep, String> {
        self.check(active, command, arguments)?;
        let argument = |index| arguments.get(index).unwrap_or_default();
        match command {
            Command::Ping if arguments.len() > 2 => return Err(command.usage_error()),
            Command::Ping if arguments.len() == 2 => writer.bulk(argument(1)),
            Command::Ping => writer.simple("PONG"),
            Command::Echo => writer.bulk(argument(1)),
            Command::Select if argument(1) == b"0" => writer.simple("OK"),
            Command::Select => {
                return Err("ERR DB index is out of range: there is only database 0".to_owned());
            }
            Command::Quit => {
                writer.simple("OK");
                return Ok(SessionStep::Close);
            }
            Command::ResetSession => {
                self.protocol = RespVersion::default();
                self.token = None;
                self.transaction = None;
                self.name.clear();
                writer.protocol = self.protocol;
                writer.simple("RESET");
            }
            Command::Auth => {
                let (user, token) = match arguments.len() {
                    2 => (None, argument(1)),
                    3 => (Some(argument(1)), argument(2)),
                    _ => return Err(command.usage_error()),
                };
                self.authenticate(active, user, token)?;
                writer.simple("OK");
            }
            Command::Hello => self.hello(active, arguments, writer)?,
            Command::Client => self.client(arguments, writer)?,
            Command::Commands => describe(arguments, writer)?,
            Command::Config => settings(arguments, writer)?,
            Command::Info => writer.bulk(self.info()),
            Command::Readonly | Command::Readwrite => writer.simple("OK"),
            Command::Multi if self.transaction.is_some() => {
                return Err("ERR MULTI calls can not be nested: send EXEC or DISCARD first".into());
            }
            Command::Multi => {
                self.transaction = Some(Transaction::new(&self.shared.budget));
                writer.simple("OK");
            }
            Command::Discard => {
                self.transaction.take().ok_or("ERR DISCARD without MULTI")?;
                writer.simple("OK");
            }
            Command::Exec => {
                let transaction = self.transaction.take().ok_or("ERR EXEC without MULTI")?;
                let (count, queued) = transaction.finish()?;
                writer.array(count);
                self.executing = (count > 0).then_some(queued);
                return Ok(SessionStep::Flush);
            }
            Command::Acquire
            | Command::Peek
            | Command::Refund
            | Command::Report
            | Command::Reserve
            | Command::Commit
            | Command::Renew
            | Command::Reset
            | Command::Override
            | Command::CellThrottle
            | Command::CrabThrottle => {}
        }
        Ok(SessionStep::Read)
    }

    /// Returns an error unless the client may use a command, and it has enough arguments.
    fn check(
        &self,
        active: &ActiveConfig,
        command: Command,
        arguments: Arguments<'_, '_>,
    ) -> Result<(), String> {
        self.check_access(active, command)?;
        if command.accepts(arguments.len()) { Ok(()) } else { Err(command.usage_error()) }
    }

    /// Returns an error unless the client may use a command. A reset needs its scope if there is a
    /// token for the admin listener, or if other hosts can connect.
    fn check_access(&self, active: &ActiveConfig, command: Command) -> Result<(), String> {
        if command.is_public() {
            return Ok(());
        }
        if self.lacks_token(active) {
            return Err(NOAUTH.to_owned());
        }
        let operation = match request::operation(command) {
            Some(operation) => operation,
            // Both change what others are allowed.
            None if command == Command::Override => Operation::Reset,
            None => return Ok(()),
        };
        let is_reset = operation == Operation::Reset;
        let needs_reset = is_reset && (self.is_remote || active.tokens.of_admin().is_some());
        if !needs_reset && (is_reset || active.tokens.of_api().is_none()) {
            return Ok(());
        }
        match &self.token {
            Some(token) => token
                .check(Scope::of_action(operation.action()))
                .map_err(|error| format!("NOPERM this user has no permissions: {error}")),
            None => Err("NOPERM this user has no permissions: AUTH with a token that has the \
                         scope reset, such as auth.admin_token"
                .to_owned()),
        }
    }

    /// Checks a token. A client without a name for it sends the user `default`.
    fn authenticate(
        &mut self,
        active: &ActiveConfig,
        user: Option<&[u8]>,
        given: &[u8],
    ) -> Result<(), String> {
        if active.tokens.is_empty() {
            return Err("ERR AUTH called without any password configured: set auth.api_token, or \
                        connect without a password"
                .to_owned());
        }
        let is_user = |token: &&Arc<Token>| match user {
            None | Some(b"default") => true,
            Some(b"admin") if token.name() == "admin_token" => true,
            Some(user) => token.name().as_bytes() == user,
        };
        let Some(token) = active.tokens.find(given).filter(is_user) else {
            self.failed_auths += 1;
            self.state.metrics.auth_failures.count(AuthListener::Resp, self.peer.address);
            return Err("WRONGPASS invalid username-password pair: send AUTH token, or AUTH name \
                        token with a name of auth.tokens"
                .to_owned());
        };
        self.token = Some(Arc::clone(token));
        Ok(())
    }

    /// Answers `HELLO [2|3 [AUTH user token] [SETNAME name]]`.
    fn hello(
        &mut self,
        active: &ActiveConfig,
        arguments: Arguments<'_, '_>,
        writer: &mut Writer<'_>,
    ) -> Result<(), String> {
        let protocol = match arguments.get(1) {
            None => self.protocol,
            Some(b"2") => RespVersion::Resp2,
            Some(b"3") => RespVersion::Resp3,
            Some(_) => return Err("NOPROTO unsupported protocol version: send 2 or 3".to_owned()),
        };
        let mut index = 2;
        let mut name = None;
        while let Some(option) = arguments.get(index) {
            let value = |offset| arguments.get(index + offset);
            if let (true, Some(user), Some(token)) =
                (option.eq_ignore_ascii_case(b"AUTH"), value(1), value(2))
            {
                self.authenticate(active, Some(user), token)?;
                index += 3;
            } else if let (true, Some(given)) = (option.eq_ignore_ascii_case(b"SETNAME"), value(1))
            {
                name = Some(client_name(given)?);
                index += 2;
            } else {
                let (option, usage) = (shown(option), Command::Hello.usage());
                return Err(format!("ERR syntax error near '{option}': {usage}"));
            }
        }
        if self.lacks_token(active) {
            return Err(
                "NOAUTH HELLO must be called with the client already authenticated: HELLO \
                        3 AUTH default token, with auth.api_token"
                    .to_owned(),
            );
        }
        self.protocol = protocol;
        self.name = name.unwrap_or_else(|| std::mem::take(&mut self.name));
        writer.protocol = protocol;
        writer.map(7);
        writer.pair("server", "redis");
        writer.pair("version", REDIS_VERSION);
        writer.bulk("proto");
        writer.integer(protocol.number());
        writer.bulk("id");
        writer.integer(i64::try_from(self.id).unwrap_or(i64::MAX));
        writer.pair("mode", "standalone");
        writer.pair("role", "master");
        writer.bulk("modules");
        writer.array(0);
        Ok(())
    }

    /// Answers `CLIENT …`.
    fn client(
        &mut self,
        arguments: Arguments<'_, '_>,
        writer: &mut Writer<'_>,
    ) -> Result<(), String> {
        let subcommand = arguments.get(1).unwrap_or_default().to_ascii_uppercase();
        match (subcommand.as_slice(), arguments.len()) {
            (b"SETNAME", 3) => {
                self.name = client_name(arguments.get(2).unwrap_or_default())?;
                writer.simple("OK");
            }
            // The name and version of the client's library are of no use here.
            // Nothing that a client caches can change, so tracking needs no messages.
            (b"SETINFO", 4) | (b"NO-EVICT" | b"NO-TOUCH", 3) | (b"TRACKING", 3..) => {
                writer.simple("OK");
            }
            (b"GETNAME", 2) => writer.bulk(&self.name),
            (b"ID", 2) => writer.integer(i64::try_from(self.id).unwrap_or(i64::MAX)),
            (b"INFO", 2) => {
                let user = self.token.as_ref().map_or("default", |token| token.name());
                writer.bulk(format!(
                    "id={} addr={} name={} db=0 user={user} resp={}\n",
                    self.id,
                    self.peer.address,
                    self.name,
                    self.protocol.number()
                ));
            }
            (b"HELP", 2) => {
                writer.array(1);
                writer.simple(&Command::Client.usage());
            }
            _ => return Err(unknown_subcommand(Command::Client, arguments)),
        }
        Ok(())
    }

    fn info(&self) -> String {
        let counters = self.counters();
        format!(
            "# Server\r\nredis_version:{REDIS_VERSION}\r\nredis_mode:standalone\r\n\
             server_name:tidegate\r\ntidegate_version:{}\r\nprocess_id:{}\r\n\
             uptime_in_seconds:{}\r\n\r\n\
             # Clients\r\nconnected_clients:{}\r\n\r\n\
             # Persistence\r\nloading:0\r\n\r\n\
             # Stats\r\ntotal_commands_processed:{}\r\n\r\n\
             # Replication\r\nrole:master\r\nconnected_slaves:0\r\n",
            env!("CARGO_PKG_VERSION"),
            std::process::id(),
            self.state.uptime(),
            counters.connections(),
            counters.commands().map(|(_, count)| count).sum::<u64>(),
        )
    }
}

/// Validates the name of a client. It is a word, because `CLIENT INFO` has several in a line.
fn client_name(bytes: &[u8]) -> Result<String, String> {
    let is_word = bytes.len() <= MAX_NAME_BYTES && bytes.iter().all(u8::is_ascii_graphic);
    let text = std::str::from_utf8(bytes).ok().filter(|_| is_word);
    text.map(str::to_owned).ok_or_else(|| {
        format!(
            "ERR Client names cannot contain spaces, newlines or special characters: use at most \
             {MAX_NAME_BYTES} letters, digits and punctuation marks"
        )
    })
}

/// Answers `COMMAND …`.
fn describe(arguments: Arguments<'_, '_>, writer: &mut Writer<'_>) -> Result<(), String> {
    match arguments.get(1).map(<[u8]>::to_ascii_uppercase).as_deref() {
        None | Some(b"INFO") => command::write_info(writer, arguments.from(2)),
        Some(b"COUNT") => command::write_count(writer),
        Some(b"DOCS") => command::write_docs(writer, arguments.from(2)),
        Some(b"LIST") => command::write_names(writer),
        Some(_) => return Err(unknown_subcommand(Command::Commands, arguments)),
    }
    Ok(())
}

/// Answers `CONFIG GET name …`.
fn settings(arguments: Arguments<'_, '_>, writer: &mut Writer<'_>) -> Result<(), String> {
    let is_get = arguments.get(1).is_some_and(|word| word.eq_ignore_ascii_case(b"GET"));
    if !is_get || arguments.len() < 3 {
        return Err(unknown_subcommand(Command::Config, arguments));
    }
    let is_named = |name: &str| {
        let mut names = arguments.from(2);
        names.any(|given| given == b"*" || given.eq_ignore_ascii_case(name.as_bytes()))
    };
    let found: Vec<_> = SETTINGS.iter().filter(|(name, _)| is_named(name)).collect();
    writer.map(found.len());
    for (name, value) in found {
        writer.pair(name, value);
    }
    Ok(())
}

fn unknown_subcommand(command: Command, arguments: Arguments<'_, '_>) -> String {
    let (given, usage) = (shown(arguments.get(1).unwrap_or_default()), command.usage());
    format!("ERR unknown subcommand or wrong number of arguments for '{given}': {usage}")
}
