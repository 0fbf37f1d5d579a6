//! Maximum rate of Redis with Tidegate's script and one decision per call: `redis-benchmark` with
//! 50 clients and pipelines of 16 calls.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpStream;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tidegate::{Charge, Limiter, Quota, RedisStore};
use tokio::runtime::Runtime;

use super::Redis;
use crate::process::run_tool;

/// The call that the library sends for a decision, with a random key.
pub(crate) struct Ceiling {
    arguments: Vec<String>,
}

/// Deadline that never passes, and that Lua represents exactly.
const MAX_DEADLINE: &str = "9007199254740991";

impl Ceiling {
    /// Records the call of the library for a decision, with MONITOR.
    pub(crate) fn record(redis: &Redis, runtime: &Runtime, quota: &Quota) -> Result<Self> {
        let name = "user:monitored";
        let charge = Charge::new(name, quota);
        let limiter = Limiter::new(runtime.block_on(RedisStore::connect(&redis.url()))?);
        // The first decision loads the script.
        let _ = runtime.block_on(limiter.acquire(&charge))?;
        let mut socket = TcpStream::connect(("127.0.0.1", redis.port()))?;
        socket.set_read_timeout(Some(Duration::from_secs(5)))?;
        socket.write_all(b"MONITOR\r\n")?;
        let mut lines = BufReader::new(socket).lines();
        ensure!(lines.next().transpose()?.as_deref() == Some("+OK"), "MONITOR was rejected");
        let _ = runtime.block_on(limiter.acquire(&charge))?;
        let key = limiter.store().redis_key(&charge);
        for line in lines {
            let words = quoted_words(&line?);
            if words.first().is_some_and(|word| word.eq_ignore_ascii_case("evalsha"))
                && words.contains(&key)
            {
                return Ok(Self {
                    arguments: words
                        .iter()
                        .map(|word| benchmark_argument(word, &key, name))
                        .collect(),
                });
            }
        }
        Err(anyhow::anyhow!("MONITOR shows no EVALSHA"))
    }

    /// Runs redis-benchmark with a number of requests and returns the decisions per second.
    pub(crate) fn run(&self, redis: &Redis, requests: f64) -> Result<f64> {
        let text = run_tool(
            Command::new("redis-benchmark")
                .args([
                    "-p",
                    &redis.port().to_string(),
                    "-c",
                    "50",
                    "-P",
                    "16",
                    "-r",
                    "1000000",
                    "--csv",
                    "-n",
                ])
                .arg(format!("{requests:.0}"))
                .args(&self.arguments),
        )?;
        // "test","rps","avg_latency_ms",… and the values in the next line.
        let rate = text.lines().last().and_then(|line| line.split("\",\"").nth(1)?.parse().ok());
        rate.with_context(|| format!("redis-benchmark: {text}"))
    }
}

/// Replaces the key by a random one, and the deadline by one that never passes.
fn benchmark_argument(word: &str, key: &str, name: &str) -> String {
    if word == key {
        return word.replace(name, "user:__rand_int__");
    }
    // The only number of this size in the arguments is the deadline, in microseconds.
    match word.parse::<u64>() {
        Ok(number) if number > 1_000_000_000_000_000 => MAX_DEADLINE.to_owned(),
        _ => word.to_owned(),
    }
}

/// Returns the quoted words of a line of MONITOR, such as
/// `+1700000000.123456 [0 127.0.0.1:4711] "EVALSHA" "3f…" "1" …`.
fn quoted_words(line: &str) -> Vec<String> {
    let Some((_, mut rest)) = line.split_once("] ") else { return Vec::new() };
    let mut words = Vec::new();
    while let Some(after_quote) = rest.strip_prefix('"') {
        let Some(end) = after_quote.find('"') else { break };
        words.push(after_quote[..end].to_owned());
        rest = after_quote[end + 1..].trim_start();
    }
    words
}
