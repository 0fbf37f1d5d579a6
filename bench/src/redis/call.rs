//! [`CallTemplate`]: a call of a script that is sent again and again, for other users.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use ::redis::Cmd;
use anyhow::{Context, Result, ensure};
use tidegate::{Charge, Limiter, Quota, RedisStore};
use tokio::runtime::Runtime;

use super::Redis;
use super::naive::{Published, Structure};
use crate::generator::{Protocol, Request};

/// Words of a call, with the places of the users' numbers.
pub(crate) struct CallTemplate {
    words: Vec<Vec<u8>>,
    /// Offset of the user's number in each key. The keys are the words from [`FIRST_KEY`].
    in_key: Vec<usize>,
    /// The call as it is sent, and the offset of each user's number in it.
    encoded: Vec<u8>,
    in_encoded: Vec<usize>,
    keys_per_decision: usize,
}

/// `EVALSHA hash number-of-keys key …`
const FIRST_KEY: usize = 3;
/// Number of digits of a user's number.
const DIGITS: usize = 12;

/// Returns the name of a user, for example `fleet:000000000042`. Each set of users has other keys.
pub(crate) fn user_name(set: &str, number: u64) -> String {
    let mut name = [set.as_bytes(), b":000000000000"].concat();
    let digits = name.len() - DIGITS;
    // Faster than `format!`, which would be a tenth of the CPU time of a client.
    write_digits(&mut name[digits..], number);
    String::from_utf8(name).unwrap_or_default()
}

impl CallTemplate {
    /// Creates a template from the words of a call whose keys contain names of users of this set.
    fn new(words: Vec<Vec<u8>>, set: &str) -> Result<Self> {
        let keys = words.get(FIRST_KEY - 1).and_then(|count| std::str::from_utf8(count).ok());
        let keys: usize = keys.context("a script call has no number of keys")?.parse()?;
        let set = format!("{set}:").into_bytes();
        let mut encoded = format!("*{}\r\n", words.len()).into_bytes();
        let (mut in_key, mut in_encoded) = (Vec::new(), Vec::new());
        for (index, word) in words.iter().enumerate() {
            encoded.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
            if (FIRST_KEY..FIRST_KEY + keys).contains(&index) {
                let name = word.windows(set.len()).position(|part| part == set);
                let number = name.context("a key without the name of a user")? + set.len();
                ensure!(number + DIGITS <= word.len(), "a key without the number of a user");
                in_key.push(number);
                in_encoded.push(encoded.len() + number);
            }
            encoded.extend_from_slice(word);
            encoded.extend_from_slice(b"\r\n");
        }
        Ok(Self { words, in_key, encoded, in_encoded, keys_per_decision: 1 })
    }

    /// Creates the call of a naive script.
    pub(crate) fn naive(
        redis: &Redis,
        structure: Structure,
        set: &str,
        limit: u64,
        window: Duration,
    ) -> Result<Self> {
        let hash = structure.load_naive_script(&mut redis.connection()?)?;
        let key = structure.naive_key(&user_name(set, 0));
        let (limit, window) = (limit.to_string(), window.as_micros().to_string());
        let words = ["EVALSHA", &hash, "1", &key, &limit, &window];
        Self::new(words.map(|word| word.as_bytes().to_vec()).into(), set)
    }

    /// Creates the call of a published algorithm.
    pub(crate) fn published(
        redis: &Redis,
        published: &Published,
        set: &str,
        limit: u64,
        window: Duration,
    ) -> Result<Self> {
        let mut load = ::redis::cmd("SCRIPT");
        let hash: String =
            load.arg("LOAD").arg(published.script).query(&mut redis.connection()?)?;
        let keys = published.keys.iter().map(|key| format!("{key}:{}", user_name(set, 0)));
        let words = ["EVALSHA".to_owned(), hash, published.keys.len().to_string()].into_iter();
        let words = words.chain(keys).chain((published.arguments)(limit, window));
        let call = Self::new(words.map(String::into_bytes).collect(), set)?;
        Ok(Self { keys_per_decision: published.keys.len(), ..call })
    }

    /// Records the largest call that the library sends when this number of callers start at once.
    pub(crate) fn record(
        redis: &Redis,
        runtime: &Runtime,
        quota: &Quota,
        set: &str,
        callers: u64,
    ) -> Result<Self> {
        // The deadline in the recorded call must not pass before the end of the suite.
        let store = RedisStore::builder(&redis.url()).timeout(Duration::from_secs(3_600));
        let limiter = Limiter::new(runtime.block_on(store.connect())?);
        // The first decisions load the script.
        runtime.block_on(acquire_at_once(&limiter, quota, set, callers))?;
        let mut socket = TcpStream::connect(("127.0.0.1", redis.port()))?;
        socket.set_read_timeout(Some(Duration::from_secs(5)))?;
        socket.write_all(b"MONITOR\r\n")?;
        let mut lines = BufReader::new(socket).split(b'\n');
        let first = lines.next().transpose()?.unwrap_or_default();
        ensure!(first.starts_with(b"+OK"), "MONITOR was rejected");
        runtime.block_on(acquire_at_once(&limiter, quota, set, callers))?;
        let (mut recorded, mut largest) = (0, None::<Self>);
        while recorded < callers {
            let line = lines.next().context("MONITOR ended")?.context("MONITOR shows no call")?;
            let words = monitored_words(&line);
            if !words.first().is_some_and(|word| word.eq_ignore_ascii_case(b"evalsha")) {
                continue;
            }
            let call = Self::new(words, set)?;
            recorded += call.decisions() as u64;
            if largest.as_ref().is_none_or(|largest| largest.decisions() < call.decisions()) {
                largest = Some(call);
            }
        }
        largest.context("no call was recorded")
    }

    /// Returns the words of a call with one key, in which a placeholder of twelve characters is in
    /// place of the user's number.
    pub(crate) fn words_with(&self, placeholder: &str) -> Vec<Vec<u8>> {
        let mut words = self.words.clone();
        for (key, &number) in words[FIRST_KEY..].iter_mut().zip(&self.in_key) {
            key[number..number + DIGITS].copy_from_slice(placeholder.as_bytes());
        }
        words
    }

    /// Returns the number of decisions of a call.
    pub(crate) fn decisions(&self) -> usize {
        self.in_key.len() / self.keys_per_decision
    }

    /// Returns the keys of a call for a user.
    pub(crate) fn keys(&self, user: u64) -> Vec<Vec<u8>> {
        let mut digits = [0; DIGITS];
        write_digits(&mut digits, user);
        let words = self.words_with(std::str::from_utf8(&digits).unwrap_or_default());
        words[FIRST_KEY..FIRST_KEY + self.in_key.len()].to_vec()
    }

    /// Returns the call as a request of the load generator.
    pub(crate) fn request(&self, port: u16) -> Request {
        let (users, same_users) = (self.in_encoded.clone(), self.keys_per_decision);
        Request { users, same_users, ..Request::new(port, Protocol::Resp, self.encoded.clone()) }
    }

    /// Returns the call for other users as a command of the Redis client.
    pub(crate) fn command(&self, mut next_user: impl FnMut() -> u64) -> Cmd {
        let mut command = Cmd::new();
        for (index, word) in self.words.iter().enumerate() {
            let key = index.checked_sub(FIRST_KEY).and_then(|key| self.in_key.get(key));
            if let Some(&number) = key {
                let mut word = word.clone();
                write_digits(&mut word[number..number + DIGITS], next_user());
                command.arg(word);
            } else {
                command.arg(word.as_slice());
            }
        }
        command
    }
}

pub(crate) fn write_digits(digits: &mut [u8], mut number: u64) {
    for digit in digits.iter_mut().rev() {
        *digit = b'0' + u8::try_from(number % 10).unwrap_or_default();
        number /= 10;
    }
}

/// Makes a decision for each of several users at once.
async fn acquire_at_once(
    limiter: &Limiter<RedisStore>,
    quota: &Quota,
    set: &str,
    callers: u64,
) -> Result<()> {
    let quota = Arc::new(quota.clone());
    let acquire = |number| {
        let (limiter, quota, name) = (limiter.clone(), Arc::clone(&quota), user_name(set, number));
        tokio::spawn(async move { limiter.acquire(&Charge::new(&name, &quota)).await })
    };
    let tasks: Vec<_> = (0..callers).map(acquire).collect();
    for task in tasks {
        ensure!(task.await??.allowed, "a decision to be recorded was denied");
    }
    Ok(())
}

/// Returns the words of a line of MONITOR, such as
/// `+1700000000.123456 [0 127.0.0.1:4711] "EVALSHA" "3f…" "1" …`.
fn monitored_words(line: &[u8]) -> Vec<Vec<u8>> {
    let Some(start) = line.windows(2).position(|part| part == b"] ") else { return Vec::new() };
    let mut bytes = line[start + 2..].iter().copied();
    let mut words = Vec::new();
    while bytes.by_ref().any(|byte| byte == b'"') {
        let mut word = Vec::new();
        while let Some(byte) = bytes.next().filter(|byte| *byte != b'"') {
            word.push(if byte == b'\\' { unescaped(&mut bytes) } else { byte });
        }
        words.push(word);
    }
    words
}

/// Returns the byte after a backslash: `\n`, `\x00`, or the byte itself.
fn unescaped(bytes: &mut impl Iterator<Item = u8>) -> u8 {
    let mut next = || bytes.next().unwrap_or_default();
    match next() {
        b'n' => b'\n',
        b'r' => b'\r',
        b't' => b'\t',
        b'a' => 7,
        b'b' => 8,
        b'x' => {
            let digits = [next(), next()];
            let text = std::str::from_utf8(&digits).unwrap_or_default();
            u8::from_str_radix(text, 16).unwrap_or_default()
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_monitor_are_unescaped() {
        let line = br#"+17.5 [0 127.0.0.1:47] "EVALSHA" "a\"b\\" "\x00\n\xff" """#;
        let expected: [&[u8]; 4] = [b"EVALSHA", b"a\"b\\", b"\0\n\xff", b""];
        assert_eq!(monitored_words(line), expected);
    }

    #[test]
    fn names_of_users_have_the_same_length() {
        assert_eq!(user_name("fleet", 42), "fleet:000000000042");
    }

    #[test]
    fn a_template_replaces_the_users() {
        let words = ["EVALSHA", "hash", "2", "t:{s:000000000000}:p", "t:{s:000000000001}:p", "9"];
        let call = CallTemplate::new(words.map(|word| word.as_bytes().to_vec()).into(), "s");
        let call = call.expect("a call");
        assert_eq!(call.decisions(), 2);
        let (mut bytes, mut next) = (Vec::new(), 40);
        call.request(0).push(&mut bytes, 0, || {
            next += 1;
            next
        });
        let text = "*6\r\n$7\r\nEVALSHA\r\n$4\r\nhash\r\n$1\r\n2\r\n$20\r\nt:{s:000000000041}:p\r\n\
                    $20\r\nt:{s:000000000042}:p\r\n$1\r\n9\r\n";
        assert_eq!(String::from_utf8_lossy(&bytes), text);
        assert_eq!(call.command(|| 40 + 1).get_packed_command().len(), bytes.len());
    }
}
