//! Load generator for script calls: connections that each keep a pipeline of calls in flight, like
//! `redis-benchmark`, but with binary arguments and checked replies.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::call::CallTemplate;
use super::random::Random;

/// Users of the calls.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Users {
    /// A random one of this many in each decision.
    Random(u64),
    /// One after the other.
    InOrder,
}

/// Number of connections, of the calls that each has in flight, and of all calls.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ScriptLoad {
    pub(crate) connections: usize,
    pub(crate) pipeline: usize,
    pub(crate) calls: u64,
}

impl ScriptLoad {
    /// Sends the calls, and returns the calls per second. An error of a script fails the load.
    pub(crate) async fn run(
        self,
        port: u16,
        call: &Arc<CallTemplate>,
        users: Users,
    ) -> Result<f64> {
        let left = Arc::new(AtomicU64::new(self.calls));
        let next_user = Arc::new(AtomicU64::new(0));
        let mut sockets = Vec::new();
        for _ in 0..self.connections {
            let socket = TcpStream::connect(("127.0.0.1", port)).await?;
            socket.set_nodelay(true)?;
            sockets.push(socket);
        }
        let start = Instant::now();
        let run = |(number, socket)| {
            let mut random = Random::new(number as u64);
            let next_user = Arc::clone(&next_user);
            let next_user = move || match users {
                Users::Random(count) => random.below(count),
                Users::InOrder => next_user.fetch_add(1, Ordering::Relaxed),
            };
            let (call, left) = (Arc::clone(call), Arc::clone(&left));
            tokio::spawn(self.run_connection(socket, call, left, next_user))
        };
        let connections: Vec<_> = sockets.into_iter().enumerate().map(run).collect();
        for connection in connections {
            connection.await??;
        }
        Ok(self.calls as f64 / start.elapsed().as_secs_f64())
    }

    async fn run_connection(
        self,
        mut socket: TcpStream,
        call: Arc<CallTemplate>,
        left: Arc<AtomicU64>,
        mut next_user: impl FnMut() -> u64,
    ) -> Result<()> {
        let (mut out, mut input) = (Vec::new(), Vec::with_capacity(65_536));
        loop {
            let taken = left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
                Some(left.saturating_sub(self.pipeline as u64))
            });
            let mut waiting = taken.unwrap_or_else(|left| left).min(self.pipeline as u64);
            if waiting == 0 {
                return Ok(());
            }
            out.clear();
            for _ in 0..waiting {
                call.encode(&mut out, &mut next_user);
            }
            socket.write_all(&out).await?;
            input.clear();
            let mut parsed = 0;
            while waiting > 0 {
                ensure!(socket.read_buf(&mut input).await? > 0, "Redis closed the connection");
                while let Some(length) = reply_length(&input[parsed..])? {
                    parsed += length;
                    waiting -= 1;
                }
            }
        }
    }
}

/// Returns the length of the first reply; `None` if it is incomplete.
fn reply_length(input: &[u8]) -> Result<Option<usize>> {
    // A reply of N elements is followed by them.
    let (mut at, mut replies) = (0, 1_usize);
    while replies > 0 {
        let Some(line) = input[at..].windows(2).position(|end| end == b"\r\n") else {
            return Ok(None);
        };
        let text = std::str::from_utf8(&input[at..at + line]).context("a reply")?;
        at += line + 2;
        replies -= 1;
        let length = || text[1..].parse::<usize>().with_context(|| format!("reply {text}"));
        match text.as_bytes().first() {
            Some(b':' | b'+') => {}
            Some(b'$') => at += length()? + 2,
            Some(b'*') => replies += length()?,
            _ => bail!("Redis answered {text}"),
        }
        if at > input.len() {
            return Ok(None);
        }
    }
    Ok(Some(at))
}

#[cfg(test)]
mod tests {
    use super::reply_length;

    #[test]
    fn the_length_of_a_reply_includes_its_elements() {
        let replies = b"*3\r\n:1\r\n$2\r\nab\r\n*1\r\n:5\r\n:7\r\n";
        assert_eq!(reply_length(replies).expect("a reply"), Some(replies.len() - 4));
        for end in 0..replies.len() - 4 {
            assert_eq!(reply_length(&replies[..end]).expect("incomplete"), None, "{end}");
        }
        assert!(reply_length(b"-ERR no\r\n").is_err());
    }
}
