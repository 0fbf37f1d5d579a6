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

/// Trace of requests. Its file is removed with it.
pub(super) struct Trace(BufWriter<NamedTempFile>);

/// Cursor among the requests of a trace whose label is accepted.
pub(super) struct TraceReader<F> {
    reader: BufReader<File>,
    accepts: F,
    next: Option<TraceEntry>,
}

impl Trace {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self(BufWriter::new(NamedTempFile::new()?)))
    }

    pub(super) fn push(&mut self, TraceEntry { time, key, label }: TraceEntry) -> io::Result<()> {
        let number = u128::from(time) | u128::from(key) << 64 | u128::from(label) << 96;
        self.0.write_all(&number.to_le_bytes())
    }

    /// Completes the file.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }

    pub(super) fn entries<F: Fn(u32) -> bool>(&self, accepts: F) -> io::Result<TraceReader<F>> {
        let reader = BufReader::new(self.0.get_ref().reopen()?);
        Ok(TraceReader { reader, accepts, next: None })
    }
}

impl<F: Fn(u32) -> bool> TraceReader<F> {
    /// Moves to the next request.
    #[expect(clippy::cast_possible_truncation, reason = "parts of a number")]
    pub(super) fn advance(&mut self) -> io::Result<Option<TraceEntry>> {
        if let Some(entry) = self.next.take() {
            return Ok(Some(entry));
        }
        let mut bytes = [0; 16];
        loop {
            match self.reader.read_exact(&mut bytes) {
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
                result => result?,
            }
            let number = u128::from_le_bytes(bytes);
            let [key, label] = [64, 96].map(|shift| (number >> shift) as u32);
            if (self.accepts)(label) {
                return Ok(Some(TraceEntry { time: number as u64, key, label }));
            }
        }
    }

    /// Moves to the next request, if it left a window of this length before `now`.
    pub(super) fn leave(&mut self, now: u64, window: u64) -> io::Result<Option<TraceEntry>> {
        self.next = self.advance()?;
        Ok(self.next.take_if(|entry| now.saturating_sub(entry.time) >= window))
    }
}
