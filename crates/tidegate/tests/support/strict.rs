//! A proxy in front of a real Redis, with the restrictions of managed services and of compatible
//! servers. It repeats what their documentation says (`docs/redis.md` has the addresses), and shows
//! nothing else of them.

#![allow(dead_code, reason = "each test binary uses its own part")]

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

#[path = "strict_modes.rs"]
mod modes;

use super::server::Redis;
pub(crate) use modes::{ClusterView, Databases, Restrictions, ScriptCache};

/// Reason of a refusal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    CrossSlot,
    UndeclaredKey,
    Time,
    NoKeys,
    LiteralKeys,
    Arguments,
    NoScript,
    Database,
    Cluster,
    AbsentCommand,
}

/// A real Redis with a strict proxy in front. The threads of the proxy end with the process.
pub(crate) struct StrictServer {
    redis: Redis,
    port: u16,
    shared: Arc<Shared>,
}

/// State of all connections.
struct Shared {
    restrictions: Mutex<Restrictions>,
    /// Loaded scripts by SHA-1.
    scripts: Mutex<HashMap<Vec<u8>, LoadedScript>>,
    lua: Mutex<Option<Lua>>,
    refusals: [AtomicU64; 10],
    /// Number of EVALSHA and EVAL calls.
    calls: AtomicU64,
    /// Largest number of words of a command.
    max_words: AtomicU64,
    port: u16,
}

/// Script that runs instead of the loaded one, because it checks commands.
#[derive(Clone)]
struct LoadedScript {
    sha: Vec<u8>,
    text: String,
}

/// Lua 5.4 that runs lua54.lua. It also ends with its input, at the end of the test.
struct Lua {
    process: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl StrictServer {
    pub(crate) fn start(restrictions: Restrictions) -> Self {
        Self::in_front_of(Redis::start(), restrictions)
    }

    pub(crate) fn in_front_of(redis: Redis, restrictions: Restrictions) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
        let port = listener.local_addr().expect("bound").port();
        let shared = Arc::new(Shared {
            restrictions: Mutex::new(restrictions),
            scripts: Mutex::default(),
            lua: Mutex::default(),
            refusals: Default::default(),
            calls: AtomicU64::new(0),
            max_words: AtomicU64::new(0),
            port,
        });
        let (server, accepted) = (redis.port(), Arc::clone(&shared));
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let shared = Arc::clone(&accepted);
                std::thread::spawn(move || forward(&client, server, &shared));
            }
        });
        Self { redis, port, shared }
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Returns the server behind the proxy.
    pub(crate) fn redis(&self) -> &Redis {
        &self.redis
    }

    /// Returns the number of commands that were refused for this reason.
    pub(crate) fn refusals(&self, reason: Refusal) -> u64 {
        self.shared.refusals[reason as usize].load(Ordering::Relaxed)
    }

    /// Returns the number of script calls, with those that were refused.
    pub(crate) fn calls(&self) -> u64 {
        self.shared.calls.load(Ordering::Relaxed)
    }

    /// Returns the number of words of the longest command.
    pub(crate) fn max_words(&self) -> u64 {
        self.shared.max_words.load(Ordering::Relaxed)
    }

    /// Changes the restrictions, as an upgrade of a service does. All scripts are forgotten.
    pub(crate) fn restrict(&self, restrictions: Restrictions) {
        lock(&self.shared.scripts).clear();
        *lock(&self.shared.restrictions) = restrictions;
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Connection to the server behind the proxy.
struct Upstream<'a> {
    stream: &'a TcpStream,
    replies: BufReader<&'a TcpStream>,
}

impl Upstream<'_> {
    /// Sends a command, and returns the bytes of its reply.
    fn ask(&mut self, words: &[Vec<u8>]) -> Option<Vec<u8>> {
        self.stream.write_all(&encoded(words)).ok()?;
        message(&mut self.replies).map(|(bytes, _)| bytes)
    }
}

fn encoded(words: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
    for word in words {
        bytes.extend(format!("${}\r\n", word.len()).into_bytes());
        bytes.extend(word);
        bytes.extend(b"\r\n");
    }
    bytes
}

impl Lua {
    fn start() -> Self {
        let mut process = Command::new("lua5.4")
            .args(["-e", concat!("\n", include_str!("lua54.lua"))])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("lua5.4 ({error}): install it with `make setup`"));
        let input = process.stdin.take().expect("piped");
        let output = BufReader::new(process.stdout.take().expect("piped"));
        Self { process, input, output }
    }

    /// Runs a script with these words after its text. Returns the bytes of its reply.
    fn run(
        &mut self,
        text: &str,
        words: &[Vec<u8>],
        mut answer: impl FnMut(&[Vec<u8>]) -> Option<Vec<u8>>,
    ) -> Option<Vec<u8>> {
        let request = [&[text.as_bytes().to_vec()], words].concat();
        self.input.write_all(&encoded(&request)).ok()?;
        while *self.output.fill_buf().ok()?.first()? == b'*' {
            let (_, command) = message(&mut self.output)?;
            self.input.write_all(&answer(&command)?).ok()?;
        }
        self.output.read_until(b'\n', &mut Vec::new()).ok()?;
        message(&mut self.output).map(|(reply, _)| reply)
    }
}

impl Drop for Lua {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Forwards commands one by one until a connection is closed.
fn forward(mut client: &TcpStream, server: u16, shared: &Shared) {
    let Ok(stream) = TcpStream::connect((Ipv4Addr::LOCALHOST, server)) else { return };
    let _ = (client.set_nodelay(true), stream.set_nodelay(true));
    let mut upstream = Upstream { stream: &stream, replies: BufReader::new(&stream) };
    let mut commands = BufReader::new(client);
    while let Some((_, words)) = message(&mut commands) {
        shared.max_words.fetch_max(words.len() as u64, Ordering::Relaxed);
        let restrictions = lock(&shared.restrictions).clone();
        let Some(reply) = shared.reply(&restrictions, words, &mut upstream) else { return };
        if client.write_all(&reply).is_err() {
            return;
        }
    }
}

/// Reads one message of the Redis protocol. Returns its bytes, and its bulk strings.
fn message(from: &mut impl BufRead) -> Option<(Vec<u8>, Vec<Vec<u8>>)> {
    let (mut bytes, mut words, mut missing) = (Vec::new(), Vec::new(), 1);
    while missing > 0 {
        missing -= 1;
        let start = bytes.len();
        from.read_until(b'\n', &mut bytes).ok().filter(|length| *length > 0)?;
        let line = std::str::from_utf8(&bytes[start..]).ok()?.trim_end();
        let length: i64 = line.get(1..)?.parse().unwrap_or(0);
        match line.as_bytes()[0] {
            b'*' | b'~' | b'>' => missing += length.max(0),
            b'%' | b'|' => missing += 2 * length.max(0),
            b'$' | b'=' | b'!' if length >= 0 => {
                let start = bytes.len();
                bytes.resize(start + usize::try_from(length).ok()? + 2, 0);
                from.read_exact(&mut bytes[start..]).ok()?;
                words.push(bytes[start..bytes.len() - 2].to_vec());
            }
            _ => {}
        }
    }
    Some((bytes, words))
}

impl Shared {
    fn refuse(&self, reason: Refusal, text: &str) -> Vec<u8> {
        self.refusals[reason as usize].fetch_add(1, Ordering::Relaxed);
        format!("-{text}\r\n").into_bytes()
    }

    /// Answers a command, by the server or by a refusal. Returns `None` if the server is gone.
    fn reply(
        &self,
        rules: &Restrictions,
        words: Vec<Vec<u8>>,
        upstream: &mut Upstream<'_>,
    ) -> Option<Vec<u8>> {
        let upper = |word: &Vec<u8>| String::from_utf8_lossy(word).to_ascii_uppercase();
        let command = upper(&words[0]);
        let subcommand = words.get(1).map(upper).unwrap_or_default();
        if rules.max_arguments > 0 && words.len() > rules.max_arguments {
            return Some(self.refuse(Refusal::Arguments, "ERR too many arguments"));
        }
        let both = format!("{command} {subcommand}");
        if rules.absent.iter().any(|absent| *absent == command || *absent == both) {
            let text = format!("ERR unknown command '{command}', with args beginning with: ");
            return Some(self.refuse(Refusal::AbsentCommand, &text));
        }
        match (command.as_str(), subcommand.as_str()) {
            ("SELECT", database) if database != "0" => match rules.databases {
                Databases::All => upstream.ask(&words),
                Databases::OnlyZero => {
                    let text = "ERR SELECT is not allowed in cluster mode";
                    Some(self.refuse(Refusal::Database, text))
                }
                Databases::Ignored => Some(b"+OK\r\n".to_vec()),
            },
            ("CLUSTER", _) => match rules.cluster {
                ClusterView::Real => upstream.ask(&words),
                ClusterView::Refused(text) => Some(self.refuse(Refusal::Cluster, text)),
                ClusterView::OneNode => Some(self.one_node(&subcommand)),
            },
            // No slot of the virtual node ever moves.
            ("ASKING", _) if matches!(rules.cluster, ClusterView::OneNode) => {
                Some(b"+OK\r\n".to_vec())
            }
            ("INFO", _) => Some(Self::info(rules, upstream.ask(&words)?)),
            ("TIME", _) if rules.integer_time => Some(integers(&upstream.ask(&words)?)),
            ("SCRIPT", "LOAD") => self.load(rules, &words[2], upstream),
            ("SCRIPT", "FLUSH") => {
                lock(&self.scripts).clear();
                upstream.ask(&words)
            }
            ("EVAL" | "EVALSHA", _) => self.run_script(rules, words, command == "EVAL", upstream),
            _ => upstream.ask(&words),
        }
    }

    /// Answers CLUSTER as a virtual node that owns all slots.
    fn one_node(&self, subcommand: &str) -> Vec<u8> {
        let (id, port) = ("a".repeat(40), self.port);
        let text = match subcommand {
            "SLOTS" => {
                let node = format!("*3\r\n$9\r\n127.0.0.1\r\n:{port}\r\n$40\r\n{id}\r\n");
                return format!("*1\r\n*3\r\n:0\r\n:16383\r\n{node}").into_bytes();
            }
            "INFO" => "cluster_state:ok\r\ncluster_slots_ok:16384\r\ncluster_size:1\r\n".to_owned(),
            "NODES" => {
                let flags = "myself,master - 0 0 1 connected 0-16383";
                format!("{id} 127.0.0.1:{port}@{port} {flags}\n")
            }
            _ => return self.refuse(Refusal::Cluster, "ERR unknown subcommand of CLUSTER"),
        };
        bulk(&text)
    }

    fn info(rules: &Restrictions, reply: Vec<u8>) -> Vec<u8> {
        let text = String::from_utf8_lossy(&reply).into_owned();
        let Some((_, body)) = text.split_once("\r\n").filter(|_| text.starts_with('$')) else {
            return reply;
        };
        let is_absent = |line: &&str| {
            line.split_once(':').is_some_and(|(field, _)| rules.absent_info.contains(&field))
        };
        let lines: Vec<&str> = body.split("\r\n").filter(|line| !is_absent(line)).collect();
        let mut body = lines.join("\r\n");
        if matches!(rules.cluster, ClusterView::OneNode) {
            // Redis calls it redis_mode, Valkey server_mode.
            body = body.replace("_mode:standalone", "_mode:cluster");
            body = body.replace("cluster_enabled:0", "cluster_enabled:1");
        }
        bulk(body.strip_suffix("\r\n").unwrap_or(&body))
    }

    /// Loads a script, and another one that checks the calls of its commands.
    fn load(
        &self,
        rules: &Restrictions,
        text: &[u8],
        upstream: &mut Upstream<'_>,
    ) -> Option<Vec<u8>> {
        let text = String::from_utf8_lossy(text).into_owned();
        if let Some(refusal) = rules.literal_keys.filter(|_| !names_keys_literally(&text)) {
            return Some(self.refuse(Refusal::LiteralKeys, refusal));
        }
        let mut load = |text: &str| {
            upstream.ask(&[b"SCRIPT".to_vec(), b"LOAD".to_vec(), text.as_bytes().to_vec()])
        };
        let reply = load(&text)?;
        if reply.starts_with(b"$") {
            let text = if rules.replaces_scripts() { checked(rules, &text) } else { text };
            let runs = load(&text)?;
            assert!(runs.starts_with(b"$"), "{}", String::from_utf8_lossy(&runs));
            let script = LoadedScript { sha: sha(&runs), text };
            lock(&self.scripts).insert(sha(&reply), script);
        }
        Some(reply)
    }

    fn run_script(
        &self,
        rules: &Restrictions,
        mut words: Vec<Vec<u8>>,
        has_text: bool,
        upstream: &mut Upstream<'_>,
    ) -> Option<Vec<u8>> {
        let call = self.calls.fetch_add(1, Ordering::Relaxed) + 1;
        let number = words.get(2).and_then(|word| std::str::from_utf8(word).ok()?.parse().ok());
        let number: usize = number.unwrap_or(0);
        let keys = words.get(3..3 + number).unwrap_or_default();
        if let Some(text) = rules.no_keys.filter(|_| keys.is_empty()) {
            return Some(self.refuse(Refusal::NoKeys, text));
        }
        if let Some(text) = rules.cross_slot
            && keys.windows(2).any(|pair| slot(&pair[0]) != slot(&pair[1]))
        {
            return Some(self.refuse(Refusal::CrossSlot, text));
        }
        let wanted = if has_text {
            let reply = self.load(rules, &words[1], upstream)?;
            if !reply.starts_with(b"$") {
                return Some(reply);
            }
            sha(&reply)
        } else {
            words[1].to_ascii_lowercase()
        };
        let runs = lock(&self.scripts).get(&wanted).cloned();
        let forgets = !has_text && rules.script_cache.forgets(call);
        let Some(runs) = runs.filter(|_| !forgets) else {
            let text = "NOSCRIPT No matching script. Please use EVAL.";
            return Some(self.refuse(Refusal::NoScript, text));
        };
        let reply = if rules.lua_5_4 {
            let mut lua = lock(&self.lua);
            lua.get_or_insert_with(Lua::start).run(&runs.text, &words[2..], |command| {
                let reply = upstream.ask(command)?;
                let is_time = command[0].eq_ignore_ascii_case(b"TIME") && rules.integer_time;
                Some(if is_time { integers(&reply) } else { reply })
            })?
        } else {
            words[0] = b"EVALSHA".to_vec();
            words[1] = runs.sha;
            upstream.ask(&words)?
        };
        for (text, reason) in [
            (rules.undeclared_keys, Refusal::UndeclaredKey),
            (rules.time_in_scripts, Refusal::Time),
        ] {
            let text = text.unwrap_or_default().as_bytes();
            if !text.is_empty() && reply.windows(text.len()).any(|part| part == text) {
                self.refusals[reason as usize].fetch_add(1, Ordering::Relaxed);
            }
        }
        Some(reply)
    }
}

fn bulk(text: &str) -> Vec<u8> {
    format!("${}\r\n{text}\r\n", text.len()).into_bytes()
}

/// Returns a list of texts as one of integers.
fn integers(reply: &[u8]) -> Vec<u8> {
    let (_, texts) = message(&mut &*reply).expect("a list");
    let number = |text: &Vec<u8>| format!(":{}\r\n", String::from_utf8_lossy(text));
    let numbers: String = texts.iter().map(number).collect();
    format!("*{}\r\n{numbers}", texts.len()).into_bytes()
}

/// Returns the SHA-1 in the reply to SCRIPT LOAD.
fn sha(reply: &[u8]) -> Vec<u8> {
    reply.splitn(2, |byte| *byte == b'\n').nth(1).unwrap_or_default().trim_ascii_end().to_vec()
}

/// Returns a script whose `redis.call` and `redis.pcall` check each command first. The added text
/// is in the first line, so that errors have the right line numbers.
fn checked(rules: &Restrictions, script: &str) -> String {
    let prelude = PRELUDE
        .replace("UNDECLARED", &rules.undeclared_keys.map_or("false".to_owned(), quoted))
        .replace("TIME_ERROR", &rules.time_in_scripts.map_or("false".to_owned(), quoted))
        .replace('\n', " ");
    // A first line with flags must stay the first one.
    match script.split_once('\n') {
        Some((flags, rest)) if flags.starts_with("#!") => format!("{flags}\n{prelude}{rest}"),
        _ => format!("{prelude}{script}"),
    }
}

fn quoted(text: &str) -> String {
    format!("\"{text}\"")
}

const PRELUDE: &str = r"
local redis = (function(server, undeclared, time_error)
  local declared = {}
  for _, key in ipairs(KEYS) do declared[key] = true end
  local function refusal(command, key)
    if string.upper(command) == 'TIME' then return time_error and {err = time_error} end
    return undeclared and not declared[key] and {err = undeclared .. tostring(key)}
  end
  return setmetatable({
    call = function(...)
      local refused = refusal(...)
      if refused then error(refused) end
      return server.call(...)
    end,
    pcall = function(...) return refusal(...) or server.pcall(...) end,
  }, {__index = server})
end)(redis, UNDECLARED, TIME_ERROR)
";

/// Returns whether each call of a command in a script has `KEYS[…]` as its key, as far as the text
/// shows.
fn names_keys_literally(script: &str) -> bool {
    let code: Vec<&str> =
        script.lines().map(|line| line.split("--").next().unwrap_or_default()).collect();
    let code = code.join("\n");
    let calls = code.match_indices("redis.call").chain(code.match_indices("redis.pcall"));
    calls.into_iter().all(|(position, name)| {
        // Without arguments it is a variable for the function.
        let Some(arguments) = code[position + name.len()..].trim_start().strip_prefix('(') else {
            return false;
        };
        let end = arguments.find([',', ')']).unwrap_or(arguments.len());
        match arguments[end..].strip_prefix(',') {
            None => true,
            Some(key) => {
                let index = key.trim_start().strip_prefix("KEYS[").unwrap_or_default();
                index
                    .split_once(']')
                    .is_some_and(|(_, rest)| rest.trim_start().starts_with([',', ')']))
            }
        }
    })
}

/// Returns the slot of a key: CRC16 (XMODEM) of its hash tag.
fn slot(key: &[u8]) -> u16 {
    let tag = key.iter().position(|byte| *byte == b'{').and_then(|open| {
        let rest = &key[open + 1..];
        let close = rest.iter().position(|byte| *byte == b'}').filter(|close| *close > 0)?;
        Some(&rest[..close])
    });
    tag.unwrap_or(key).iter().fold(0_u16, |crc, byte| {
        (0..8).fold(crc ^ (u16::from(*byte) << 8), |crc, _| {
            if crc & 0x8000 == 0 { crc << 1 } else { (crc << 1) ^ 0x1021 }
        })
    }) % 16_384
}
