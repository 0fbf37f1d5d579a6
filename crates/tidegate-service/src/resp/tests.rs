//! Sessions in virtual time: replies, and `CL.THROTTLE` against the naive model.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use tidegate::testing::Model;
use tidegate::{Action, Charge, Clock as _, ManualClock, MemoryStore, Quota};

use super::RespShared;
use super::session::RespSession;
use crate::fuzz::{self, Random};
use crate::state::ServerState;
use tidegate_config::Config;
use tidegate_net::listener::{BufferBudget, CommandBudget, Input, Peer, Session as _, SessionStep};

mod holds;
mod overrides;
mod tokens;

const POLICIES: &str = "policies:
  - {name: per-user, limit: 2, window: 60s}
  - {name: observed, limit: 1, window: 60s, mode: shadow}
";

fn input() -> Input {
    Input::new(1 << 20, &BufferBudget::new(1 << 20))
}

struct Conversation {
    session: RespSession,
    clock: ManualClock,
}

impl Conversation {
    fn new(config: &str) -> Self {
        Self::start(config, &BufferBudget::new(1 << 20), false)
    }

    fn with_budget(config: &str, budget: &Arc<BufferBudget>) -> Self {
        Self::start(config, budget, false)
    }

    /// Starts a conversation on a listener that other hosts can reach, or not.
    fn start(config: &str, budget: &Arc<BufferBudget>, is_remote: bool) -> Self {
        let clock = ManualClock::new();
        let store = MemoryStore::builder().clock(clock.clone()).build();
        let config = Config::parse("test.yaml", config).expect("valid");
        let state = Arc::new(ServerState::on_memory(config, store));
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 1));
        let peer = Peer { address, tls: false };
        let counters = Arc::default();
        let shared = Arc::new(RespShared { budget: Arc::clone(budget), counters });
        Self { session: RespSession::new(state, &shared, peer, is_remote), clock }
    }

    /// Sends bytes and returns the replies.
    fn send(&mut self, bytes: &[u8]) -> (String, SessionStep) {
        let mut input = input();
        input.push(bytes);
        let mut replies = Vec::new();
        let step = self.step(&mut input, &mut replies);
        (String::from_utf8(replies).expect("only text in these tests"), step)
    }

    /// Sends lines, and returns all replies, their line breaks as spaces.
    fn finish(&mut self, lines: &str) -> String {
        let mut input = input();
        input.push(format!("{lines}\r\n").as_bytes());
        let mut all = Vec::new();
        while self.step(&mut input, &mut all) != SessionStep::Read {}
        String::from_utf8(all).expect("text").trim_end().replace("\r\n", " ")
    }

    /// Handles input once, and appends the replies.
    fn step(&mut self, input: &mut Input, all: &mut Vec<u8>) -> SessionStep {
        let mut replies = Vec::new();
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        let step = runtime.block_on(self.session.handle(
            input,
            &mut replies,
            &mut CommandBudget::default(),
        ));
        all.extend(replies);
        step
    }

    /// Sends a line and returns the reply, its line breaks as spaces.
    fn ask(&mut self, line: &str) -> String {
        let (reply, step) = self.send(format!("{line}\r\n").as_bytes());
        assert_ne!(step, SessionStep::Close, "{line}: {reply}");
        reply.trim_end().replace("\r\n", " ")
    }
}

#[test]
fn future_of_a_session_is_small() {
    let mut client = Conversation::new(POLICIES);
    let (mut input, mut replies, mut budget) = (input(), Vec::new(), CommandBudget::default());
    let size = size_of_val(&client.session.handle(&mut input, &mut replies, &mut budget));
    assert!(size <= 256, "{size} bytes for each of many connections");
}

#[test]
fn decisions_are_the_same_arrays_in_both_versions() {
    let mut client = Conversation::new(POLICIES);
    assert_eq!(client.ask("TG.ACQUIRE per-user ann"), "*6 :1 :2 :1 :0 :60000 :0");
    assert_eq!(client.ask("tg.peek per-user ann"), "*6 :1 :2 :0 :0 :60000 :0");
    assert_eq!(client.ask("TG.REPORT per-user ann COST 5"), "*6 :0 :2 :0 :60000 :60000 :0");
    assert_eq!(client.ask("TG.ACQUIRE per-user ann"), "*6 :0 :2 :0 :60000 :60000 :0");
    assert_eq!(client.ask("TG.RESET per-user ann"), "*6 :1 :2 :2 :0 :0 :0");
    assert!(client.ask("HELLO 3").starts_with("%7 $6 server $5 redis"));
    client.clock.advance(Duration::from_millis(100));
    assert_eq!(client.ask("TG.ACQUIRE per-user ann COST 2"), "*6 :1 :2 :0 :0 :60000 :0");
    assert_eq!(client.ask("TG.REFUND per-user ann AGE 0"), "*6 :1 :2 :1 :0 :60000 :0");
    assert!(client.ask("CL.THROTTLE ann 1 1 1").starts_with("*5 :0"));
    // A policy in shadow mode denies nothing.
    client.ask("HELLO 2");
    client.ask("TG.ACQUIRE observed ann");
    assert_eq!(client.ask("TG.ACQUIRE observed ann"), "*6 :1 :1 :0 :0 :60000 :0");
}

#[test]
fn names_of_fields_are_on_request() {
    let mut client = Conversation::new(POLICIES);
    let named = "$7 allowed :1 $5 limit :2 $9 remaining :1 $14 retry_after_ms :0 \
                 $14 reset_after_ms :60000 $8 delay_ms :0";
    for (version, start) in [("2", "*12"), ("3", "%6")] {
        client.ask(&format!("HELLO {version}"));
        for options in ["WITHNAMES COST 1", "COST 1 withnames"] {
            client.ask("TG.RESET per-user ann");
            let reply = client.ask(&format!("TG.ACQUIRE per-user ann {options}"));
            assert_eq!(reply, format!("{start} {named}"));
        }
        let reset = client.ask("TG.RESET per-user ann WITHNAMES");
        assert!(reset.starts_with(&format!("{start} $7 allowed :1")), "{reset}");
    }
    let quota = client.ask("TG.ACQUIRE KEY ann QUOTA token-bucket 10 1s WITHNAMES BURST 3");
    assert!(quota.starts_with("%6 $7 allowed :1 $5 limit :3"), "{quota}");
}

#[test]
fn transaction_is_queued_and_run() {
    let mut client = Conversation::new(POLICIES);
    for (line, reply) in [
        ("MULTI", "+OK"),
        ("TG.ACQUIRE per-user ann", "+QUEUED"),
        ("", ""),
        ("TG.ACQUIRE per-user ann COST x", "+QUEUED"),
        ("ECHO 'a b'", "+QUEUED"),
        ("HELLO 3", "+QUEUED"),
        ("DISCARD", "+OK"),
        ("TG.PEEK per-user ann", "*6 :1 :2 :1 :0 :60000 :0"),
        ("MULTI", "+OK"),
        ("MULTI", "-ERR MULTI calls can not be nested: send EXEC or DISCARD first"),
        ("TG.ACQUIRE per-user ann", "+QUEUED"),
        ("TG.ACQUIRE per-user ann COST x", "+QUEUED"),
        ("ECHO 'a b'", "+QUEUED"),
    ] {
        assert_eq!(client.ask(line), reply, "{line}");
    }
    let reply = client.finish("EXEC\r\nPING\r\nMULTI\r\nEXEC\r\nTG.PEEK per-user ann");
    let expected = "*3 *6 :1 :2 :1 :0 :60000 :0 -ERR COST 'x' is not a whole number from 0 to \
                    18446744073709551615 $3 a b +PONG +OK *0 *6 :1 :2 :0 :0 :60000 :0";
    assert_eq!(reply, expected, "an error of one command leaves the others");
    for line in ["EXEC", "DISCARD"] {
        assert_eq!(client.ask(line), format!("-ERR {line} without MULTI"));
    }
}

#[test]
fn rejected_command_aborts_the_transaction() {
    let tokens = "auth: {api_token: secret, admin_token: root}\n";
    let mut client = Conversation::new(&format!("{tokens}{POLICIES}"));
    assert!(client.ask("MULTI").starts_with("-NOAUTH"));
    client.ask("AUTH secret");
    let long = format!("ECHO {}", "x".repeat(60_000));
    for (rejected, error) in [
        ("GET a", "-ERR unknown command 'GET'"),
        ("WATCH a", "-ERR unknown command 'WATCH': there is nothing to watch"),
        ("TG.ACQUIRE per-user", "-ERR wrong number of arguments for 'tg.acquire'"),
        ("TG.RESET per-user ann", "-NOPERM"),
        (&long, "-ERR the transaction has more than 131072 bytes"),
    ] {
        assert_eq!(client.ask("MULTI"), "+OK");
        assert_eq!(client.ask("TG.ACQUIRE per-user ann"), "+QUEUED");
        let replies = (0..4).map(|_| client.ask(rejected)).collect::<Vec<_>>();
        assert!(replies.iter().any(|reply| reply.starts_with(error)), "{replies:?}");
        assert_eq!(client.ask("TG.ACQUIRE per-user ann"), "+QUEUED");
        assert!(client.ask("EXEC").starts_with("-EXECABORT Transaction discarded"));
    }
    assert!(client.ask("TG.PEEK per-user ann").starts_with("*6 :1 :2 :1 "), "no charge");
    client.ask("MULTI");
    assert_eq!(client.ask("RESET"), "+RESET");
    assert!(client.ask("EXEC").starts_with("-NOAUTH"), "RESET ends a transaction, too");
}

#[test]
fn long_transaction_is_answered_in_parts() {
    let mut client = Conversation::new(POLICIES);
    let docs = client.finish("COMMAND DOCS").len();
    client.finish(&format!("MULTI{}", "\r\nCOMMAND DOCS".repeat(4_000)));
    let (mut input, mut replies) = (input(), Vec::new());
    input.push(b"EXEC\r\nPING\r\n");
    let mut total = 0;
    while client.step(&mut input, &mut replies) != SessionStep::Read {
        assert!(replies.len() < 80_000, "{} bytes", replies.len());
        total += replies.len();
        replies.clear();
    }
    assert!(total > 4_000 * docs, "{total} bytes");
    assert!(replies.ends_with(b"+PONG\r\n"));
}

#[test]
fn transactions_share_a_budget() {
    let budget = BufferBudget::new(100_000);
    let [mut first, mut second] = [(); 2].map(|()| Conversation::with_budget(POLICIES, &budget));
    let long = format!("ECHO {}", "x".repeat(40_000));
    assert_eq!(first.finish(&format!("MULTI\r\n{long}")), "+OK +QUEUED");
    assert_eq!(second.finish("MULTI\r\nPING"), "+OK +QUEUED", "a small one needs no share");
    let full = "-ERR the buffers of all connections are full";
    assert!(second.ask(&long).starts_with(full));
    assert!(second.ask("EXEC").starts_with("-EXECABORT"));
    assert!(first.finish("EXEC").ends_with("xxx"));
    assert_eq!(second.finish(&format!("MULTI\r\n{long}\r\nDISCARD")), "+OK +QUEUED +OK");
    assert_eq!(first.finish(&format!("MULTI\r\n{long}")), "+OK +QUEUED", "nothing is lost");
}

#[test]
fn client_that_has_not_authenticated_sends_short_commands() {
    let config = format!("auth: {{api_token: secret}}\n{POLICIES}");
    let name = "x".repeat(960);
    let many = "PING 1 2 3 4 5 6 7 8 9 10\n".to_owned();
    for (start, is_closed) in [
        ("*11\r\n".to_owned(), true),
        ("*2\r\n$4\r\nECHO\r\n$60000\r\n".to_owned(), true),
        ("*1\r\n$4\r\nECHO".to_owned(), false),
        (name.repeat(2), true),
        (name.clone(), false),
        (many.clone(), true),
        ("HELLO 3 AUTH default wrong SETNAME name\r\n".to_owned(), false),
        (format!("AUTH default {name}\r\n"), false),
    ] {
        let mut client = Conversation::new(&config);
        let (reply, step) = client.send(start.as_bytes());
        assert_eq!(step == SessionStep::Close, is_closed, "{start}: {reply}");
        assert_eq!(reply.contains("unauthenticated command: at most 1024 bytes"), is_closed);
        assert_eq!(client.session.max_input(), 1024 + 64);
    }
    // The token may come with the first long command.
    let mut client = Conversation::new(&config);
    let long = "y".repeat(30_000);
    let reply = client.finish(&format!("AUTH secret\r\nECHO {long}\r\n{}", many.trim_end()));
    assert!(reply.starts_with("+OK $30000 yyy") && reply.contains("'ping' command"), "{reply}");
    assert_eq!(client.session.max_input(), 64 * 1024 + 64);
    assert_eq!(client.ask("RESET"), "+RESET");
    assert_eq!(client.session.max_input(), 1024 + 64);
}

#[test]
fn pipeline_is_handled_in_turns() {
    let mut client = Conversation::new(POLICIES);
    let (mut input, mut replies) = (input(), Vec::new());
    input.push(&b"PING\r\n".repeat(300));
    let mut steps = Vec::new();
    for turn in 1..=3 {
        steps.push(client.step(&mut input, &mut replies));
        assert_eq!(replies.len(), "+PONG\r\n".len() * 300.min(turn * 128));
    }
    assert_eq!(steps, [SessionStep::Yield, SessionStep::Yield, SessionStep::Read]);
}

#[test]
fn errors_of_handshakes_are_not_counted() {
    let tokens = "auth: {api_token: secret}\n";
    let mut client = Conversation::new(&format!("{tokens}{POLICIES}"));
    let errors = |client: &Conversation| client.session.metrics().errors();
    client.ask("AUTH secret");
    for line in [
        "CLIENT MAINT_NOTIFICATIONS ON",
        "CLIENT TRACKINGINFO",
        "HELLO 4",
        "HELLO 3 UNKNOWN option",
        "COMMAND GETKEYS",
        "CONFIG SET a b",
    ] {
        assert!(client.ask(line).starts_with('-'), "{line}");
    }
    assert_eq!(errors(&client), 0);
    for (count, line) in [
        (1, "HELLO 3 AUTH default wrong"),
        (2, "GET a"),
        (3, "TG.ACQUIRE per-usr ann"),
        (4, "AUTH wrong"),
        (5, "SELECT 1"),
    ] {
        assert!(client.ask(line).starts_with('-'), "{line}");
        assert_eq!(errors(&client), count, "{line}");
    }
}

#[test]
fn key_that_is_not_text_fails_its_command_only() {
    let mut client = Conversation::new(POLICIES);
    let acquire = |key: &[u8]| {
        let length = key.len();
        let head = format!("*3\r\n$10\r\nTG.ACQUIRE\r\n$8\r\nper-user\r\n${length}\r\n");
        [head.as_bytes(), key, b"\r\n"].concat()
    };
    let is_error = |bytes: &[&[u8]], client: &mut Conversation| {
        let (replies, step) = client.send(&bytes.concat());
        assert_eq!(step, SessionStep::Read);
        let replies = replies.replace("*6\r\n", "|*").replace("-ERR", "|-ERR");
        let replies = replies.split('|').skip(1);
        replies.map(|reply| reply.contains("the key is not UTF-8")).collect::<Vec<_>>()
    };
    let (ann, jose, broken) = (acquire(b"ann"), acquire("José".as_bytes()), acquire(b"a\xff"));
    assert_eq!(is_error(&[&ann, &broken, &jose], &mut client), [false, true, false]);
    // The end of the input is in the middle of a character.
    let part = &jose[..jose.len() - 3];
    assert_eq!(is_error(&[&ann, &jose, part], &mut client), [false, false]);
    // Two halves of a character are not text, even next to each other.
    let halves = [acquire(b"Jos\xc3"), acquire(b"\xa9")];
    assert_eq!(is_error(&[&ann, &halves[0], &halves[1]], &mut client), [false, true, true]);
}

#[test]
fn caller_can_bring_a_quota() {
    let mut client = Conversation::new(POLICIES);
    let quota = "KEY ann QUOTA token-bucket 10 1s BURST 3";
    assert_eq!(client.ask(&format!("TG.ACQUIRE {quota} COST 2")), "*6 :1 :3 :1 :0 :200 :0");
    assert_eq!(client.ask(&format!("TG.ACQUIRE {quota} cost 2")), "*6 :0 :3 :1 :100 :200 :0");
    client.clock.advance(Duration::from_millis(100));
    assert_eq!(client.ask(&format!("TG.ACQUIRE {quota} COST 2")), "*6 :1 :3 :0 :0 :300 :0");
    let queue = "TG.ACQUIRE KEY bob QUOTA leaky-bucket 10 1s";
    assert_eq!(client.ask(queue), "*6 :1 :10 :9 :0 :100 :0");
    assert_eq!(client.ask(queue), "*6 :1 :10 :8 :0 :200 :100");
    // A policy may be called KEY.
    let mut client = Conversation::new("policies: [{name: KEY, limit: 1, window: 1s}]\n");
    assert!(client.ask("TG.ACQUIRE KEY QUOTA").starts_with("*6 :1"));
}

#[test]
fn errors_say_what_would_be_right() {
    let mut client = Conversation::new(POLICIES);
    for (line, code, hint) in [
        ("TG.ACQUIRE per-usr ann", "-ERR", "did you mean \"per-user\"?"),
        ("TG.ACQUIRE per-user", "-ERR wrong number of arguments for 'tg.acquire'", "policy key"),
        ("TG.ACQUIRE per-user ann COST", "-ERR wrong number", "[COST n]"),
        ("TG.ACQUIRE per-user ann COST x", "-ERR", "COST 'x' is not a whole number"),
        ("TG.ACQUIRE per-user ann COST 0", "-ERR", "a cost is at least 1"),
        ("TG.ACQUIRE per-user ann COST 3", "-ERR", "at most 2 at once"),
        ("TG.ACQUIRE per-user ann COST 1 COST 1", "-ERR syntax error", "twice"),
        ("TG.ACQUIRE per-user ann BURST 1", "-ERR syntax error near 'BURST'", "TG.ACQUIRE policy"),
        ("TG.ACQUIRE per-user ann AGE 1", "-ERR syntax error near 'AGE'", "TG.ACQUIRE policy"),
        ("TG.REFUND per-user ann AGE 999999999999", "-ERR", "the longest time"),
        ("TG.REFUND per-user ann", "-ERR", "TG.REFUND policy key AGE ms"),
        ("TG.REFUND per-user ann COST 2", "-ERR", "needs the age of its charge, or its id"),
        ("TG.RESET per-user ann COST 1", "-ERR syntax error", "TG.RESET policy key"),
        ("TG.ACQUIRE KEY ann QUOTA", "-ERR wrong number", "QUOTA algorithm limit window"),
        ("TG.ACQUIRE KEY ann QUOTA gcra 1 1s", "-ERR", "token-bucket"),
        ("TG.ACQUIRE KEY ann QUOTA fixed-window 0 1s", "-ERR quota", "from 1 to"),
        ("TG.ACQUIRE KEY ann QUOTA fixed-window 1 1", "-ERR window", "500ms, 60s"),
        ("TG.ACQUIRE per-user \"a\\xffb\"", "-ERR", "not UTF-8"),
        ("TG.ACQUIRE per-user \"a\\nb\"", "-ERR the key", "control character"),
        ("CL.THROTTLE ann 1 1", "-ERR wrong number of arguments", "max_burst count period"),
        ("CL.THROTTLE ann 1 1 1 1 1", "-ERR wrong number of arguments", "max_burst count period"),
        ("CL.THROTTLE ann -1 1 1", "-ERR", "max_burst '-1' is not a whole number"),
        ("CL.THROTTLE ann 1 0 1", "-ERR", "count is 0: it must be at least 1"),
        ("CL.THROTTLE ann 1 1 0", "-ERR", "period is 0: it must be at least 1"),
        ("THROTTLE ann 0 1 1", "-ERR", "max_burst is 0: it must be at least 1"),
        ("CL.THROTTLE ann 1 1 99999999999999999999", "-ERR", "is not a whole number"),
        ("CL.THROTTLE ann 18446744073709551615 1 1", "-ERR quota", "from 1 to"),
        ("GET user:1", "-ERR unknown command 'GET'", "TG.ACQUIRE, TG.PEEK"),
        ("WATCH a", "-ERR unknown command 'WATCH'", "nothing to watch"),
        ("TG.ACQUIRE per-user ann WITHNAMES COST", "-ERR wrong number", "[WITHNAMES]"),
        ("SELECT 1", "-ERR DB index is out of range", "database 0"),
        ("PING a b", "-ERR wrong number of arguments for 'ping'", "PING [message]"),
        ("HELLO 4", "-NOPROTO", "2 or 3"),
        ("HELLO 3 SETNAME", "-ERR syntax error", "SETNAME name"),
        ("CLIENT SETNAME \"a b\"", "-ERR", "cannot contain spaces"),
        ("CLIENT REPLY OFF", "-ERR", "SETNAME name"),
        ("CONFIG SET a b", "-ERR", "CONFIG GET name"),
        ("COMMAND GETKEYS", "-ERR", "COUNT"),
        ("AUTH secret", "-ERR AUTH called without any password", "auth.api_token"),
    ] {
        let reply = client.ask(line);
        assert!(reply.starts_with(code), "{line}: {reply}");
        assert!(reply.contains(hint), "{line}: {reply}");
    }
}

#[test]
fn clients_connect_as_usual() {
    let mut client = Conversation::new(POLICIES);
    for (line, reply) in [
        ("PING", "+PONG"),
        ("ping hello", "$5 hello"),
        ("ECHO 'a b'", "$3 a b"),
        ("SELECT 0", "+OK"),
        ("CLIENT SETINFO LIB-NAME redis-py", "+OK"),
        ("CLIENT SETNAME worker-1", "+OK"),
        ("CLIENT GETNAME", "$8 worker-1"),
        ("CONFIG GET save appendonly", "*4 $10 appendonly $2 no $4 save $0"),
        ("CONFIG GET no-such-setting", "*0"),
        ("CLIENT TRACKING ON OPTIN", "+OK"),
        ("READONLY", "+OK"),
        ("READWRITE", "+OK"),
        ("COMMAND COUNT", ":27"),
        (
            "COMMAND INFO cl.throttle nothing",
            "*2 *10 $11 cl.throttle :-5 *1 +fast :1 :1 :1 *1 +@fast *0 *0 *0 $-1",
        ),
        ("RESET", "+RESET"),
        ("CLIENT GETNAME", "$0"),
    ] {
        assert_eq!(client.ask(line).trim_end(), reply, "{line}");
    }
    assert!(client.ask("INFO").contains("redis_version:7."));
    assert!(client.ask("COMMAND DOCS tg.acquire").contains("TG.ACQUIRE policy key"));
    assert!(client.ask("CLIENT INFO").contains("addr=127.0.0.1:1"));
    assert_eq!(client.send(b"QUIT\r\nPING\r\n"), ("+OK\r\n".to_owned(), SessionStep::Close));
}

/// Tokens of the short forms, and two with a name.
const TOKENS: &str = "auth:
  api_token: secret
  admin_token: root
  tokens:
    - {name: ci, token: refunds, scopes: [refund]}
    - {name: grafana, token: reads, scopes: [read]}
";

#[test]
fn compatible_commands_answer_as_their_projects_document() {
    let mut client = Conversation::new("policies: []\n");
    // The table of redis-cell's own test: time, quantity, and the reply.
    for (millis, quantity, reply) in [
        (0, 6, "*5 :1 :5 :5 :-1 :0"),
        (0, 1, "*5 :0 :5 :4 :-1 :1"),
        (0, 1, "*5 :0 :5 :3 :-1 :2"),
        (0, 1, "*5 :0 :5 :2 :-1 :3"),
        (0, 1, "*5 :0 :5 :1 :-1 :4"),
        (0, 1, "*5 :0 :5 :0 :-1 :5"),
        (0, 1, "*5 :1 :5 :0 :1 :5"),
        (3_000, 1, "*5 :0 :5 :2 :-1 :3"),
        (100, 1, "*5 :0 :5 :1 :-1 :4"),
        (900, 1, "*5 :0 :5 :1 :-1 :4"),
        (4_000, 1, "*5 :0 :5 :4 :-1 :1"),
        (1_500, 1, "*5 :0 :5 :4 :-1 :1"),
        (0, 0, "*5 :0 :5 :4 :-1 :1"),
        (0, 2, "*5 :0 :5 :2 :-1 :3"),
        (0, 5, "*5 :1 :5 :2 :3 :3"),
    ] {
        client.clock.advance(Duration::from_millis(millis));
        assert_eq!(client.ask(&format!("CL.THROTTLE foo 4 1 1 {quantity}")), reply, "{millis}");
    }
    // The example of throttlecrab's documentation.
    assert_eq!(client.ask("THROTTLE user:123 10 100 60"), "*5 :1 :10 :9 :1 :0");
    // A burst of 1 admits one, however long the key was idle.
    for _ in 0..3 {
        assert_eq!(client.ask("THROTTLE one 1 1 1"), "*5 :1 :1 :0 :1 :0");
        assert_eq!(client.ask("THROTTLE one 1 1 1"), "*5 :0 :1 :0 :1 :1");
        client.clock.advance(Duration::from_secs(100));
    }
    assert_eq!(client.ask("THROTTLE one 1 1 1 2"), "*5 :0 :1 :1 :0 :-1");
    // The wait of a denial is never 0, even for a microsecond.
    assert_eq!(client.ask("CL.THROTTLE fast 0 1000000 1"), "*5 :0 :1 :0 :-1 :1");
    assert_eq!(client.ask("CL.THROTTLE fast 0 1000000 1"), "*5 :1 :1 :0 :1 :1");
    // Other numbers keep the count.
    assert_eq!(client.ask("CL.THROTTLE moved 1 1 60 2"), "*5 :0 :2 :0 :-1 :120");
    assert_eq!(client.ask("CL.THROTTLE moved 4 1 60 4"), "*5 :1 :5 :3 :60 :120");
}

/// Returns the reply that the model expects.
fn expected(model: &mut Model, key: &str, numbers: [u64; 4], clock: &ManualClock) -> String {
    let [max_burst, count, period, quantity] = numbers;
    let quota = Quota::token_bucket(count, Duration::from_secs(period)).expect("valid");
    let quota = quota.with_burst(max_burst + 1).expect("valid");
    let is_possible = quantity <= quota.burst();
    let cost = if is_possible { quantity } else { 0 };
    let charge = Charge::new(key, &quota).with_policy("cl.throttle").with_cost(cost);
    let action = if cost == 0 { Action::Peek } else { Action::Acquire };
    let decision = model.decide(action, &[charge], clock.now())[0];
    let allowed = decision.allowed && is_possible;
    let seconds = |duration: Duration| duration.as_nanos().div_ceil(1_000_000_000);
    let retry_after = match (allowed, is_possible) {
        (false, true) => seconds(decision.retry_after).to_string(),
        _ => "-1".to_owned(),
    };
    format!(
        "*5 :{} :{} :{} :{retry_after} :{}",
        u8::from(!allowed),
        quota.burst(),
        decision.remaining,
        seconds(decision.reset_after)
    )
}

#[test]
fn fuzz_cl_throttle_decides_as_the_model() {
    let generate = |random: &mut Random| (0..200).map(|_| random.next().to_le_bytes()[0]).collect();
    fuzz::run::<&[u8]>(&[], 20, generate, |bytes| {
        let mut client = Conversation::new("policies: []\n");
        let mut model = Model::default();
        for step in bytes.chunks_exact(4) {
            let [key, numbers, quantity, pause] = [step[0], step[1], step[2], step[3]];
            let key = ["ann", "bob"][usize::from(key % 2)];
            // Most commands of a key have the same numbers, as in a real service.
            let [max_burst, count, period] = match numbers % 8 {
                0 => [u64::from(numbers / 64), u64::from(numbers / 8 % 4) + 1, 7],
                1 => [0, 1, 1],
                _ => [4, 3, 2],
            };
            let quantity = [1, 1, 1, 2, 0, 5, 6, 3][usize::from(quantity % 8)];
            let numbers = [max_burst, count, period, quantity];
            let line = format!("CL.THROTTLE {key} {max_burst} {count} {period} {quantity}");
            let reply = client.ask(&line);
            assert_eq!(reply, expected(&mut model, key, numbers, &client.clock), "{line}");
            client.clock.advance(Duration::from_micros(u64::from(pause) * 7_919));
        }
    });
}

#[test]
fn fuzz_sessions_answer_any_bytes() {
    let seeds = [
        "*3\r\n$10\r\nTG.ACQUIRE\r\n$8\r\nper-user\r\n$3\r\nann\r\nPING\r\n",
        "TG.REFUND KEY a QUOTA token-bucket 1 1s BURST 1 COST 1 AGE 1\r\nHELLO 3 AUTH a b\r\n",
        "MULTI\r\nPING\r\nTG.ACQUIRE per-user ann WITHNAMES\r\nEXEC\r\nMULTI\r\nDISCARD\r\n",
        "TG.RESERVE KEY a QUOTA concurrency 5 ID a TTL 9000\r\nTG.COMMIT per-user ann a 1\r\n",
        "TG.RENEW KEY a QUOTA fixed-window 1 1s a 9000\r\nTG.REFUND per-user ann ID a\r\n",
        "CL.THROTTLE a 1 2 3 4\r\nTHROTTLE a 1 2 3 4\r\nCOMMAND DOCS\r\nINFO\r\nCLIENT INFO\r\n",
    ];
    let pieces = [
        "\r\n",
        "*3\r\n",
        "$3\r\nann\r\n",
        "TG.ACQUIRE ",
        "TG.RESET ",
        "TG.RESERVE per-user ann ",
        "TG.COMMIT per-user ann ",
        "TG.RENEW ",
        "ID ",
        "TTL ",
        "concurrency 5 ",
        "KEY ",
        "QUOTA ",
        "COST ",
        "AGE ",
        "per-user ",
        "HELLO 3\r\n",
        "18446744073709551615 ",
        "-1 ",
        "0 ",
        "1s ",
        "AUTH ",
        "MULTI\r\n",
        "EXEC\r\n",
        "WITHNAMES ",
        "CL.THROTTLE ",
        "CONFIG GET *\r\n",
        "leaky-bucket ",
        "\"\\xff\" ",
    ];
    fuzz::bytes(&seeds, &pieces, |bytes| {
        let mut client = Conversation::new(POLICIES);
        let mut input = input();
        input.push(bytes);
        let mut replies = Vec::new();
        let mut step = SessionStep::Flush;
        while step == SessionStep::Flush {
            step = client.step(&mut input, &mut replies);
        }
        assert!(replies.is_empty() || replies.ends_with(b"\r\n"));
        if step == SessionStep::Close {
            let is_error = replies.windows(20).any(|part| part == b"-ERR Protocol error:");
            assert!(is_error || replies.ends_with(b"+OK\r\n"), "{replies:?}");
        }
    });
}
