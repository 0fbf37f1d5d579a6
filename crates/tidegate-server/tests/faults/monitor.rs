use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::servers::Server;

/// Commands that read: a script may use these where it must not write.
const READS: [&str; 18] = [
    "time",
    "get",
    "mget",
    "hget",
    "hmget",
    "hgetall",
    "zcard",
    "zrange",
    "zscore",
    "zcount",
    "zrangebyscore",
    "zrevrange",
    "zrank",
    "type",
    "exists",
    "strlen",
    "getrange",
    "pttl",
];

/// Keys that count for nobody.
const OTHERS: [&str; 2] = ["{%alive}", "{%news}"];

/// All that a server executes from now on, by its MONITOR.
pub(crate) struct Monitor {
    lines: Arc<Mutex<Vec<(Instant, String)>>>,
}

impl Monitor {
    pub(crate) fn of(server: &Server) -> Self {
        let mut stream =
            TcpStream::connect(("127.0.0.1", server.port)).expect("our own server listens");
        stream.write_all(b"MONITOR\r\n").expect("sent");
        let mut reader = BufReader::new(stream);
        let mut line = String::new();
        reader.read_line(&mut line).expect("an answer");
        assert_eq!(line, "+OK\r\n");
        let lines = Arc::new(Mutex::new(Vec::new()));
        let sink = Arc::clone(&lines);
        let start = (Instant::now(), SystemTime::now());
        // Ends with the server.
        std::thread::spawn(move || {
            for line in reader.lines().map_while(Result::ok) {
                // Not when it came: a server that is stopped may have something to tell when it
                // wakes up, from before.
                let at = executed(&line, start).unwrap_or_else(Instant::now);
                sink.lock().expect("no panic").push((at, line));
            }
        });
        Self { lines }
    }

    /// What scripts wrote after this moment, but for signs of life and news, which count for
    /// nobody.
    pub(crate) fn written_after(&self, moment: Instant) -> Vec<String> {
        let lines = self.lines.lock().expect("no panic");
        let after = lines.iter().filter(|(at, _)| *at >= moment).map(|(_, line)| line);
        let counts = after
            .filter(|line| line.contains(" lua] ") && !OTHERS.iter().any(|key| line.contains(key)));
        counts.filter(|line| !READS.contains(&command(line).as_str())).cloned().collect()
    }

    /// When each call of a script was executed.
    fn calls(&self) -> Vec<Instant> {
        let lines = self.lines.lock().expect("no panic");
        let is_call = |line: &str| matches!(command(line).as_str(), "evalsha" | "eval" | "fcall");
        lines.iter().filter(|(_, line)| is_call(line)).map(|(at, _)| *at).collect()
    }

    /// Calls of scripts that were executed after this moment.
    pub(crate) fn calls_after(&self, moment: Instant) -> usize {
        self.calls().iter().filter(|at| **at >= moment).count()
    }

    pub(crate) fn last_call(&self) -> Option<Instant> {
        self.calls().last().copied()
    }
}

/// When a line was executed, by the server's clock, which is this machine's.
fn executed(line: &str, (start, then): (Instant, SystemTime)) -> Option<Instant> {
    let seconds: f64 = line.trim_start_matches('+').split(' ').next()?.parse().ok()?;
    let since_start = Duration::try_from_secs_f64(seconds)
        .ok()?
        .checked_sub(then.duration_since(UNIX_EPOCH).ok()?);
    Some(start + since_start.unwrap_or_default())
}

/// `1700000000.123456 [0 lua] "ZADD" …` is a zadd.
fn command(line: &str) -> String {
    let word = line.split_once("] \"").and_then(|(_, rest)| rest.split('"').next());
    word.unwrap_or_default().to_ascii_lowercase()
}
