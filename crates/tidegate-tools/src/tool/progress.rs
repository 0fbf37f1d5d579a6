//! [`ProgressBar`]: a line on the terminal with the rate and the remaining time.

use std::io::{IsTerminal as _, Write as _};
use std::time::{Duration, Instant};

use super::text::{float, grouped, whole};
use tidegate_config::duration::readable;

/// Calls between two looks at the clock.
const CALLS_PER_CHECK: u64 = 4_096;
const UPDATE_INTERVAL: Duration = Duration::from_millis(200);
const BAR_WIDTH: usize = 24;

/// Progress bar on the standard error, if that is a terminal.
pub struct ProgressBar {
    is_shown: bool,
    start: Instant,
    updated: Instant,
    calls: u64,
    requests: u64,
}

impl ProgressBar {
    pub fn start() -> Self {
        let now = Instant::now();
        let is_shown = std::io::stderr().is_terminal();
        Self { is_shown, start: now, updated: now, calls: 0, requests: 0 }
    }

    /// Counts requests, or none for other work. `part` returns the part of the work that is done,
    /// from 0 to 1, if it is known.
    pub fn count(&mut self, requests: u64, part: impl FnOnce() -> Option<f64>) {
        self.calls += 1;
        self.requests += requests;
        if !self.is_shown || !self.calls.is_multiple_of(CALLS_PER_CHECK) {
            return;
        }
        if self.updated.elapsed() >= UPDATE_INTERVAL {
            self.update(self.requests, part());
        }
    }

    /// Shows the number of requests, and the part of the work that is done, if it is known.
    pub fn update(&mut self, requests: u64, part: Option<f64>) {
        if self.is_shown {
            self.updated = Instant::now();
            let line = line(requests, self.updated.duration_since(self.start), part);
            // An output that cannot be written must not end the work.
            let _ = write!(std::io::stderr(), "\r\x1b[2K{line}");
        }
    }
}

impl Drop for ProgressBar {
    fn drop(&mut self) {
        if self.updated != self.start {
            let _ = write!(std::io::stderr(), "\r\x1b[2K");
        }
    }
}

fn line(requests: u64, elapsed: Duration, part: Option<f64>) -> String {
    let seconds = elapsed.as_secs_f64().max(1e-9);
    let rate = grouped(whole(float(requests) / seconds));
    let done = format!("{} requests, {rate} per second", grouped(requests));
    let Some(part) = part.map(|part| part.clamp(0.0, 1.0)) else { return done };
    let filled = whole(part * float(BAR_WIDTH as u64));
    let filled = usize::try_from(filled).unwrap_or(BAR_WIDTH);
    let bar = "#".repeat(filled) + &"-".repeat(BAR_WIDTH - filled);
    let left = if part > 0.0 { seconds * (1.0 - part) / part } else { 0.0 };
    let left = readable(Duration::from_secs(whole(left.min(1e9)) + 1));
    format!("[{bar}] {:3.0} %  {done}, {left} left", part * 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_has_the_rate_and_the_remaining_time() {
        let elapsed = Duration::from_secs(2);
        assert_eq!(
            line(3_000_000, elapsed, Some(0.25)),
            "[######------------------]  25 %  3,000,000 requests, 1,500,000 per second, 7s left"
        );
        assert_eq!(line(10, elapsed, None), "10 requests, 5 per second");
    }
}
