//! [`Reorder`]: sorts the requests of a file, which a server may write long after their times.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Seek as _, Write as _};

use serde_json::de::IoRead;
use serde_json::{Deserializer, StreamDeserializer};

use super::record::Record;

/// Maximum number of bytes of requests in memory. More are written to temporary files.
const MAX_BYTES: usize = 32 * 1024 * 1024;

/// Request that is held back: its time, its line, its slot, and the file that it was read from.
type HeldRequest = (u64, u64, usize, Option<usize>);
/// Sorted requests in a temporary file.
type SortedFile = StreamDeserializer<'static, IoRead<BufReader<File>>, Record>;

/// Requests that are held back until no earlier one can follow.
pub(super) struct Reorder {
    window: u64,
    max_bytes: usize,
    slots: Vec<Record>,
    free: Vec<usize>,
    held: BinaryHeap<Reverse<HeldRequest>>,
    /// Bytes of those in memory.
    bytes: usize,
    /// `None` for those that were read to their end.
    files: Vec<Option<SortedFile>>,
    newest: u64,
    /// Time of the last request that was released.
    released: u64,
    pub(super) reordered: u64,
    pub(super) late: u64,
}

impl Reorder {
    /// Creates an empty buffer for requests that are late by at most this many microseconds.
    pub(super) fn new(window: u64) -> Self {
        Self {
            window,
            max_bytes: MAX_BYTES,
            slots: Vec::new(),
            free: Vec::new(),
            held: BinaryHeap::new(),
            bytes: 0,
            files: Vec::new(),
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

    /// Holds back the request in this slot. Returns by how many microseconds it came too late.
    pub(super) fn push(&mut self, slot: usize) -> io::Result<u64> {
        let record = &mut self.slots[slot];
        self.bytes += record.size();
        let lateness = self.released.saturating_sub(record.time);
        record.time = record.time.max(self.released);
        if lateness > 0 {
            self.late += 1;
        } else if record.time < self.newest {
            self.reordered += 1;
        }
        self.newest = self.newest.max(record.time);
        self.held.push(Reverse((record.time, record.line, slot, None)));
        if self.bytes >= self.max_bytes {
            self.spill()?;
        }
        Ok(lateness)
    }

    /// Returns the time and slot of the earliest request, if no earlier one can follow.
    pub(super) fn pop(&mut self, is_at_end: bool) -> io::Result<Option<(u64, usize)>> {
        let Some(Reverse((time, _, slot, file))) = self.held.peek().copied() else {
            return Ok(None);
        };
        if !is_at_end && self.newest - time < self.window {
            return Ok(None);
        }
        self.held.pop();
        match file {
            Some(file) => self.read(file)?,
            None => self.bytes -= self.slots[slot].size(),
        }
        self.released = time;
        Ok(Some((time, slot)))
    }

    /// Writes the requests in memory to a file.
    fn spill(&mut self) -> io::Result<()> {
        let mut file = BufWriter::new(tempfile::tempfile()?);
        let mut heads = Vec::new();
        while let Some(Reverse(request)) = self.held.pop() {
            let (_, _, slot, source) = request;
            if source.is_some() {
                heads.push(Reverse(request));
                continue;
            }
            serde_json::to_writer(&mut file, &self.slots[slot])?;
            file.write_all(b"\n")?;
            self.free.push(slot);
        }
        self.held.extend(heads);
        self.bytes = 0;
        let mut file = file.into_inner()?;
        file.rewind()?;
        self.files.push(Some(Deserializer::from_reader(BufReader::new(file)).into_iter()));
        self.read(self.files.len() - 1)
    }

    /// Holds back the next request of a file.
    fn read(&mut self, file: usize) -> io::Result<()> {
        let record = self.files[file].as_mut().and_then(Iterator::next).transpose()?;
        let Some(record) = record else {
            self.files[file] = None;
            return Ok(());
        };
        let (time, line) = (record.time, record.line);
        let (slot, free) = self.take_slot();
        *free = record;
        self.held.push(Reverse((time, line, slot, Some(file))));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the times in the order of their release.
    fn released(reorder: &mut Reorder, times: impl IntoIterator<Item = u64>) -> Vec<u64> {
        let mut released = Vec::new();
        let mut pop = |reorder: &mut Reorder, is_at_end| {
            while let Some((time, slot)) = reorder.pop(is_at_end).expect("a file") {
                let record = reorder.record(slot);
                assert!(record.last("path").is_some_and(|path| path.ends_with(" \"\n")));
                assert!(record.line > 0 && record.status == Some(200));
                released.push(time);
                reorder.release(slot);
            }
        };
        for (number, time) in times.into_iter().enumerate() {
            let (slot, record) = reorder.take_slot();
            (record.time, record.line, record.status) = (time, number as u64 + 1, Some(200));
            record.push("path", &format!("/{number} \"\n"));
            reorder.push(slot).expect("a file");
            pop(reorder, false);
        }
        pop(reorder, true);
        released
    }

    #[test]
    fn requests_within_five_seconds_are_sorted_and_later_ones_moved() {
        let second = 1_000_000;
        let mut reorder = Reorder::new(5 * second);
        let seconds = [10, 12, 11, 15, 10, 30, 25, 14, 40].map(|time| time * second);
        let sorted = [10, 10, 11, 12, 15, 25, 25, 30, 40].map(|time| time * second);
        assert_eq!(released(&mut reorder, seconds), sorted);
        assert_eq!((reorder.reordered, reorder.late), (3, 1), "14 s came after 25 s was released");
    }

    #[test]
    fn memory_is_bounded_and_order_is_not() {
        let mut seed = 7_u64;
        let mut random = || {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            seed >> 50
        };
        let times: Vec<u64> = (0..20_000).map(|_| random()).collect();
        let mut sorted = times.clone();
        sorted.sort_unstable();
        let mut reorder = Reorder { max_bytes: 300_000, ..Reorder::new(u64::MAX) };
        assert_eq!(released(&mut reorder, times), sorted);
        assert_eq!(reorder.late, 0);
        assert!(reorder.slots.len() < 3_000, "{}", reorder.slots.len());
        // Requests in order need neither memory nor files.
        let mut reorder = Reorder::new(0);
        assert_eq!(released(&mut reorder, 0..20_000).len(), 20_000);
        assert_eq!((reorder.slots.len(), reorder.files.len()), (1, 0));
    }
}
