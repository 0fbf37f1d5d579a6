use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::servers::Server;

/// Read commands, which a script may use where it must not write.
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

/// Keys without counters.
const OTHERS: [&str; 2] = ["{%alive}", "{%news}"];

/// Commands that a server executes from now on, by MONITOR.
pub(crate) struct Monitor {
    lines: Arc<Mutex<Vec<(Instant, String)>>>,
}

impl Monitor {
    pub(crate) fn of(server: &Server) -> Self {
        let mut stream =
            TcpStream::connect(("127.0.0.1", server.port)).expect("the server listens");
        stream.write_all(b"MONITOR\r\n").expect("sent");
        let mut reader = BufReader::new(stream);
        let mut line = String::new();
        reader.read_line(&mut line).expect("a response");
        assert_eq!(line, "+OK\r\n");
        let lines = Arc::new(Mutex::new(Vec::new()));
        let sink = Arc::clone(&lines);
        let start = (Instant::now(), SystemTime::now());
        // Ends when the server closes the connection.
        std::thread::spawn(move || {
            for line in reader.lines().map_while(Result::ok) {
                // The time of the server, because a resumed server may still deliver earlier
                // commands.
                let at = executed(&line, start).unwrap_or_else(Instant::now);
                sink.lock().expect("no panic").push((at, line));
            }
        });
        Self { lines }
    }

    /// Returns the writes of scripts that started after this moment, except for heartbeats and
    /// invalidations. SIGSTOP may interrupt a script, which then continues with SIGCONT.
    pub(crate) fn written_after(&self, moment: Instant) -> Vec<String> {
        let lines = self.lines.lock().expect("no panic");
        // The call of a script comes before its commands.
        let mut started = None;
        let after = lines.iter().filter(|(at, line)| {
            if is_call(line) {
                started = Some(*at);
            }
            started.unwrap_or(*at) >= moment
        });
        let after = after.map(|(_, line)| line);
        let counts = after
            .filter(|line| line.contains(" lua] ") && !OTHERS.iter().any(|key| line.contains(key)));
        counts.filter(|line| !READS.contains(&command(line).as_str())).cloned().collect()
    }

    /// Returns the times of all script calls.
    fn calls(&self) -> Vec<Instant> {
        let lines = self.lines.lock().expect("no panic");
        lines.iter().filter(|(_, line)| is_call(line)).map(|(at, _)| *at).collect()
    }

    /// Returns the number of script calls after this moment.
    pub(crate) fn calls_after(&self, moment: Instant) -> usize {
        self.calls().iter().filter(|at| **at >= moment).count()
    }

    pub(crate) fn last_call(&self) -> Option<Instant> {
        self.calls().last().copied()
    }
}

fn is_call(line: &str) -> bool {
    matches!(command(line).as_str(), "evalsha" | "eval" | "fcall")
}

/// Returns the execution time of a line, by the clock of the server, which is this machine's.
fn executed(line: &str, (start, then): (Instant, SystemTime)) -> Option<Instant> {
    let seconds: f64 = line.trim_start_matches('+').split(' ').next()?.parse().ok()?;
    let since_start = Duration::try_from_secs_f64(seconds)
        .ok()?
        .checked_sub(then.duration_since(UNIX_EPOCH).ok()?);
    Some(start + since_start.unwrap_or_default())
}

/// Returns the command of a line: `zadd` for `1700000000.123456 [0 lua] "ZADD" …`.
fn command(line: &str) -> String {
    let word = line.split_once("] \"").and_then(|(_, rest)| rest.split('"').next());
    word.unwrap_or_default().to_ascii_lowercase()
}
