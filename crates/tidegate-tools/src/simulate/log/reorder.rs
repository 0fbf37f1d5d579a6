//! [`Reorder`]: sorts the lines of a file, which a server may write some seconds after their time.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use super::record::Record;

/// Default time by which a line may be late, in microseconds.
pub(super) const DEFAULT_WINDOW: u64 = 5_000_000;
/// Maximum number of lines, and of their bytes, that are held back to be sorted. A window that the
/// user chose needs more.
const MAX_LINES: usize = 16_384;
const MAX_BYTES: usize = 16 * 1024 * 1024;
const MAX_CHOSEN_BYTES: usize = 1024 * 1024 * 1024;

/// Line that is held back: its time, its number among all lines, and its slot.
type HeldLine = (u64, u64, usize);

/// Lines that are held back until no earlier line can follow.
#[derive(Debug)]
pub(super) struct Reorder {
    window: u64,
    max_lines: usize,
    max_bytes: usize,
    slots: Vec<Record>,
    free: Vec<usize>,
    /// Lines that came in order, as nearly all do: they cost no sorting.
    in_order: VecDeque<HeldLine>,
    out_of_order: BinaryHeap<Reverse<HeldLine>>,
    bytes: usize,
    pushed: u64,
    newest: u64,
    /// Time of the last line that was released.
    released: u64,
    pub(super) reordered: u64,
    pub(super) late: u64,
}

impl Reorder {
    /// Creates an empty buffer. Lines that are in order need no window.
    pub(super) fn new(window: u64) -> Self {
        let is_chosen = window > DEFAULT_WINDOW;
        Self {
            window,
            max_lines: if is_chosen { usize::MAX } else { MAX_LINES },
            max_bytes: if is_chosen { MAX_CHOSEN_BYTES } else { MAX_BYTES },
            slots: Vec::new(),
            free: Vec::new(),
            in_order: VecDeque::new(),
            out_of_order: BinaryHeap::new(),
            bytes: 0,
            pushed: 0,
            newest: 0,
            released: 0,
            reordered: 0,
            late: 0,
        }
    }

    /// Returns an empty record to fill.
    pub(super) fn take_slot(&mut self) -> (usize, &mut Record) {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Record::default());
            self.slots.len() - 1
        });
        let record = &mut self.slots[slot];
        record.clear();
        (slot, record)
    }

    /// Returns a slot that is not needed any more.
    pub(super) fn release(&mut self, slot: usize) {
        self.free.push(slot);
    }

    pub(super) fn record(&self, slot: usize) -> &Record {
        &self.slots[slot]
    }

    /// Holds back the line in this slot. Returns by how many microseconds it came too late.
    pub(super) fn push(&mut self, slot: usize) -> u64 {
        let record = &mut self.slots[slot];
        self.bytes += record.len();
        let lateness = self.released.saturating_sub(record.time);
        record.time = record.time.max(self.released);
        let time = record.time;
        if lateness > 0 {
            self.late += 1;
        } else if time < self.newest {
            self.reordered += 1;
        }
        let entry = (time, self.pushed, slot);
        self.pushed += 1;
        if self.in_order.back().is_none_or(|last| *last < entry) {
            self.in_order.push_back(entry);
        } else {
            self.out_of_order.push(Reverse(entry));
        }
        self.newest = self.newest.max(time);
        lateness
    }

    /// Returns the time and slot of the earliest line, if no earlier one can follow.
    pub(super) fn pop(&mut self, is_at_end: bool) -> Option<(u64, usize)> {
        let first = self.in_order.front().copied();
        let other = self.out_of_order.peek().map(|Reverse(entry)| *entry);
        let (time, _, slot) = [first, other].into_iter().flatten().min()?;
        let is_ready = is_at_end
            || self.window == 0
            || self.newest - time > self.window
            || self.in_order.len() + self.out_of_order.len() >= self.max_lines
            || self.bytes >= self.max_bytes;
        if !is_ready {
            return None;
        }
        if first.is_some_and(|(_, _, first)| first == slot) {
            self.in_order.pop_front();
        } else {
            self.out_of_order.pop();
        }
        self.released = time;
        self.bytes -= self.slots[slot].len();
        Some((time, slot))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the times in the order of their release.
    fn released(reorder: &mut Reorder, times: impl IntoIterator<Item = u64>) -> Vec<u64> {
        let mut released = Vec::new();
        let mut pop = |reorder: &mut Reorder, is_at_end| {
            while let Some((time, slot)) = reorder.pop(is_at_end) {
                released.push(time);
                reorder.release(slot);
            }
        };
        for time in times {
            let (slot, record) = reorder.take_slot();
            record.time = time;
            record.push("ip", "203.0.113.9");
            reorder.push(slot);
            pop(reorder, false);
        }
        pop(reorder, true);
        released
    }

    #[test]
    fn lines_within_five_seconds_are_sorted_and_later_ones_moved() {
        let second = 1_000_000;
        let mut reorder = Reorder::new(DEFAULT_WINDOW);
        let seconds = [10, 12, 11, 15, 10, 30, 26, 14, 40].map(|time| time * second);
        let sorted = [10, 10, 11, 12, 15, 15, 26, 30, 40].map(|time| time * second);
        assert_eq!(released(&mut reorder, seconds), sorted);
        assert_eq!((reorder.reordered, reorder.late), (3, 1), "14 s came after 15 s was released");
    }

    #[test]
    fn number_of_lines_is_bounded() {
        let mut reorder = Reorder::new(DEFAULT_WINDOW);
        let count = 3 * MAX_LINES as u64;
        assert_eq!(released(&mut reorder, 0..count).len(), 3 * MAX_LINES);
        assert!(reorder.slots.len() <= MAX_LINES, "{}", reorder.slots.len());
        assert_eq!((reorder.reordered, reorder.late), (0, 0));
    }
}
