//! [`SortedLines`]: the lines of a file in the order of their times, in bounded memory.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Seek as _, Write as _};
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

/// Maximum number of bytes of lines in memory. More are sorted in parts of a temporary file.
const MAX_BYTES: usize = 64 * 1024 * 1024;
/// Size of a read of each part.
const PART_BLOCK_BYTES: usize = 64 * 1024;

/// Line with its time and its number in the file.
pub(super) type TimedLine = (u64, u64, Vec<u8>);

/// Collects lines in any order.
#[derive(Debug, Default)]
pub(super) struct LineSorter {
    lines: Vec<(u64, u64, std::ops::Range<usize>)>,
    text: Vec<u8>,
    parts: Option<(File, Vec<u64>)>,
}

impl LineSorter {
    pub(super) fn add(&mut self, time: u64, number: u64, line: &[u8]) -> io::Result<()> {
        let start = self.text.len();
        self.text.extend_from_slice(line);
        self.lines.push((time, number, start..self.text.len()));
        if self.text.len() + self.lines.len() * 32 < MAX_BYTES { Ok(()) } else { self.spill() }
    }

    /// Writes the lines in memory as a sorted part.
    fn spill(&mut self) -> io::Result<()> {
        self.lines.sort_unstable_by_key(|(time, number, _)| (*time, *number));
        let (file, ends) = match &mut self.parts {
            Some(parts) => parts,
            None => self.parts.insert((temporary_file()?, Vec::new())),
        };
        let mut output = BufWriter::new(&mut *file);
        for (time, number, range) in self.lines.drain(..) {
            let line = &self.text[range];
            output.write_all(&time.to_le_bytes())?;
            output.write_all(&number.to_le_bytes())?;
            output.write_all(&(line.len() as u64).to_le_bytes())?;
            output.write_all(line)?;
        }
        output.flush()?;
        drop(output);
        ends.push(file.stream_position()?);
        self.text.clear();
        Ok(())
    }

    pub(super) fn finish(mut self) -> io::Result<SortedLines> {
        if self.parts.is_none() {
            self.lines.sort_unstable_by_key(|(time, number, _)| (*time, *number));
            return Ok(SortedLines::Memory { text: self.text, lines: self.lines.into_iter() });
        }
        self.spill()?;
        let (file, ends) = self.parts.unwrap_or((temporary_file()?, Vec::new()));
        let (file, mut start) = (Arc::new(file), 0);
        let mut parts = Vec::with_capacity(ends.len());
        let mut heads = BinaryHeap::new();
        for end in ends {
            let part = Part { file: Arc::clone(&file), at: start, end };
            let mut part = BufReader::with_capacity(PART_BLOCK_BYTES, part);
            if let Some(line) = read_line(&mut part)? {
                heads.push(Reverse((line, parts.len())));
            }
            parts.push(part);
            start = end;
        }
        Ok(SortedLines::Parts { parts, heads })
    }
}

/// Sorted lines, in memory or in the parts of a temporary file.
#[derive(Debug)]
pub(super) enum SortedLines {
    Memory { text: Vec<u8>, lines: std::vec::IntoIter<(u64, u64, std::ops::Range<usize>)> },
    Parts { parts: Vec<BufReader<Part>>, heads: BinaryHeap<Reverse<(TimedLine, usize)>> },
}

impl SortedLines {
    /// Returns the number and the bytes of the next line.
    pub(super) fn next(&mut self) -> io::Result<Option<(u64, Vec<u8>)>> {
        match self {
            Self::Memory { text, lines } => {
                Ok(lines.next().map(|(_, number, range)| (number, text[range].to_vec())))
            }
            Self::Parts { parts, heads } => {
                let Some(Reverse(((_, number, line), part))) = heads.pop() else { return Ok(None) };
                if let Some(next) = read_line(&mut parts[part])? {
                    heads.push(Reverse((next, part)));
                }
                Ok(Some((number, line)))
            }
        }
    }
}

/// Reader of a part of a file.
#[derive(Debug)]
pub(super) struct Part {
    file: Arc<File>,
    at: u64,
    end: u64,
}

impl Read for Part {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let rest = usize::try_from(self.end - self.at).unwrap_or(usize::MAX);
        let wanted = rest.min(buffer.len());
        let length = self.file.read_at(&mut buffer[..wanted], self.at)?;
        self.at += length as u64;
        Ok(length)
    }
}

fn read_line(part: &mut BufReader<Part>) -> io::Result<Option<TimedLine>> {
    let mut head = [[0; 8]; 3];
    if part.read(&mut head[0][..1])? == 0 {
        return Ok(None);
    }
    part.read_exact(&mut head[0][1..])?;
    part.read_exact(&mut head[1])?;
    part.read_exact(&mut head[2])?;
    let [time, number, length] = head.map(u64::from_le_bytes);
    let mut line = vec![0; usize::try_from(length).unwrap_or_default()];
    part.read_exact(&mut line)?;
    Ok(Some((time, number, line)))
}

/// Creates a file without a name, which disappears with the process.
fn temporary_file() -> io::Result<File> {
    let mut options = File::options();
    options.read(true).write(true).create_new(true);
    for number in 0..1_000 {
        let name = format!("tidegate-sort-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        match options.open(&path) {
            Ok(file) => {
                std::fs::remove_file(&path)?;
                return Ok(file);
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::ErrorKind::AlreadyExists.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_several_parts_are_sorted_by_time_and_number() {
        let mut sorter = LineSorter::default();
        let mut seed = 7_u64;
        let mut expected = Vec::new();
        for number in 1..=3_000 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let (time, line) =
                (seed >> 55, vec![b'x'; usize::try_from(seed >> 58).expect("small")]);
            sorter.add(time, number, &line).expect("memory");
            if number % 1_000 == 0 {
                sorter.spill().expect("a temporary file");
            }
            expected.push((time, number, line));
        }
        expected.sort();
        let mut sorted = sorter.finish().expect("parts");
        for (_, number, line) in expected {
            assert_eq!(sorted.next().expect("a line"), Some((number, line)));
        }
        assert_eq!(sorted.next().expect("the end"), None);
    }
}
