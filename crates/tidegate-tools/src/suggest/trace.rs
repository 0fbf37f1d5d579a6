//! [`Trace`]: the requests of a log in a temporary file, 16 bytes each, to be read several times.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read as _, Write as _};

use tempfile::NamedTempFile;

/// Request of a trace: its time in microseconds, and the numbers of its key and of its label.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TraceEntry {
    pub(super) time: u64,
    pub(super) key: u32,
    pub(super) label: u32,
}

/// Trace that is written.
pub(super) struct TraceWriter {
    file: NamedTempFile,
    writer: BufWriter<File>,
}

/// Complete trace. Its file is removed with it.
pub(super) struct Trace(NamedTempFile);

impl TraceWriter {
    pub(super) fn new() -> io::Result<Self> {
        let file = NamedTempFile::new()?;
        let writer = BufWriter::new(file.reopen()?);
        Ok(Self { file, writer })
    }

    pub(super) fn push(&mut self, entry: TraceEntry) -> io::Result<()> {
        let TraceEntry { time, key, label } = entry;
        let number = u128::from(time) | u128::from(key) << 64 | u128::from(label) << 96;
        self.writer.write_all(&number.to_le_bytes())
    }

    pub(super) fn finish(mut self) -> io::Result<Trace> {
        self.writer.flush()?;
        Ok(Trace(self.file))
    }
}

impl Trace {
    /// Returns the requests whose label is accepted.
    pub(super) fn entries<F: Fn(u32) -> bool>(&self, accepts: F) -> io::Result<TraceReader<F>> {
        Ok(TraceReader { reader: BufReader::new(self.0.reopen()?), accepts, next: None })
    }
}

/// Cursor in a trace.
pub(super) struct TraceReader<F> {
    reader: BufReader<File>,
    accepts: F,
    next: Option<TraceEntry>,
}

impl<F: Fn(u32) -> bool> TraceReader<F> {
    /// Moves to the next request.
    #[expect(clippy::cast_possible_truncation, reason = "parts of a number")]
    pub(super) fn advance(&mut self) -> io::Result<Option<TraceEntry>> {
        if let Some(entry) = self.next.take() {
            return Ok(Some(entry));
        }
        loop {
            let mut bytes = [0; 16];
            match self.reader.read_exact(&mut bytes) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
                Err(error) => return Err(error),
            }
            let number = u128::from_le_bytes(bytes);
            let [key, label] = [64, 96].map(|shift| (number >> shift) as u32);
            let time = number as u64;
            if (self.accepts)(label) {
                return Ok(Some(TraceEntry { time, key, label }));
            }
        }
    }

    /// Moves to the next request, if it left a window of this length before `now`.
    pub(super) fn leave(&mut self, now: u64, window: u64) -> io::Result<Option<TraceEntry>> {
        self.next = self.advance()?;
        let has_left = |entry: &TraceEntry| now.saturating_sub(entry.time) >= window;
        Ok(if self.next.as_ref().is_some_and(has_left) { self.next.take() } else { None })
    }
}
