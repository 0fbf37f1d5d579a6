//! [`SlotMoves`]: slots that have a new owner, for the log. While a cluster is resharded, slots move
//! one by one, so that they are collected and logged together.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::{Duration, Instant};

/// Slots that have moved since the last log line.
#[derive(Default)]
pub(crate) struct SlotMoves {
    /// Slots by their old and new owner.
    pending: BTreeMap<(String, String), Vec<u16>>,
    logged_at: Option<Instant>,
}

/// Minimum time between two logs.
const LOG_INTERVAL: Duration = Duration::from_secs(10);
/// Maximum number of ranges in one log line.
const MAX_RANGES: usize = 8;

impl SlotMoves {
    /// Adds a slot. An owner is `None` if no node serves the slot.
    pub(crate) fn add(&mut self, slot: u16, from: Option<String>, to: Option<String>) {
        let name = |owner: Option<String>| owner.unwrap_or_else(|| "no node".to_owned());
        self.pending.entry((name(from), name(to))).or_default().push(slot);
    }

    /// Takes the slots that have moved, unless some were just taken. The caller logs them without
    /// its lock, because a log line may block.
    pub(crate) fn take_due(&mut self, now: Instant) -> BTreeMap<(String, String), Vec<u16>> {
        let is_recent = |at: Instant| now.duration_since(at) < LOG_INTERVAL;
        if self.pending.is_empty() || self.logged_at.is_some_and(is_recent) {
            return BTreeMap::new();
        }
        self.logged_at = Some(now);
        std::mem::take(&mut self.pending)
    }
}

/// Logs slots that have moved.
pub(crate) fn log(moves: BTreeMap<(String, String), Vec<u16>>) {
    for ((from, to), mut slots) in moves {
        let (count, slots) = (slots.len(), ranges(&mut slots));
        tracing::info!(from, to, count, slots, "slots have a new owner");
    }
}

/// Returns slots as text, such as `7 100-199`.
fn ranges(slots: &mut Vec<u16>) -> String {
    slots.sort_unstable();
    slots.dedup();
    let mut text = String::new();
    let runs = slots.chunk_by(|one, next| one + 1 == *next);
    for (index, run) in runs.enumerate() {
        let (first, last) = (run[0], run[run.len() - 1]);
        let space = if index == 0 { "" } else { " " };
        let _ = match index {
            MAX_RANGES => write!(text, " …"),
            _ if first == last => write!(text, "{space}{first}"),
            _ => write!(text, "{space}{first}-{last}"),
        };
        if index == MAX_RANGES {
            break;
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_that_move_one_by_one_are_logged_together() {
        let (mut moves, start) = (SlotMoves::default(), Instant::now());
        let (a, b) = (|| Some("a".to_owned()), || Some("b".to_owned()));
        moves.add(7, a(), b());
        let first = moves.take_due(start);
        assert_eq!(first[&("a".to_owned(), "b".to_owned())], [7], "at once");
        for slot in [102, 100, 101, 100, 9] {
            moves.add(slot, a(), b());
        }
        moves.add(5, b(), None);
        assert!(moves.take_due(start + LOG_INTERVAL / 2).is_empty(), "too soon");
        let mut later = moves.take_due(start + LOG_INTERVAL);
        let mut slots = later.remove(&("a".to_owned(), "b".to_owned())).expect("moved");
        assert_eq!(ranges(&mut slots), "9 100-102");
        assert_eq!(later[&("b".to_owned(), "no node".to_owned())], [5]);
        assert!(moves.take_due(start + 9 * LOG_INTERVAL).is_empty(), "nothing has moved");
    }

    #[test]
    fn a_log_line_has_a_maximum_length() {
        let mut slots: Vec<u16> = (0..100).map(|number| 2 * number).collect();
        assert_eq!(ranges(&mut slots), "0 2 4 6 8 10 12 14 …");
    }
}
