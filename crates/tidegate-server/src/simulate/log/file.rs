//! [`LogFile`]: the requests of one file, in the order of their times.

use std::path::Path;

use anyhow::{Context as _, ensure};

use tidegate::internals::text;

use super::format::LineParser;
use super::input::{LineReader, LogLine, LogSource, MAX_LINE_BYTES};
use super::record::Record;
use super::reorder::Reorder;
use super::{AccessLogs, LineCounts, LogFileFormat, MAX_EXAMPLES};
use crate::simulate::report::shown;

/// Number of lines at the start of a file by which its format is recognized.
const DETECTION_LINES: u64 = 100;
/// Maximum number of characters of a bad line that are shown.
const SHOWN_CHARACTERS: usize = 80;

/// Bytes at the start of files that some editors of Windows write.
const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

pub(super) struct LogFile {
    pub(super) name: String,
    lines: LineReader<LogSource>,
    format: LogFileFormat,
    strict: bool,
    parser: Option<LineParser>,
    reorder: Reorder,
    counts: LineCounts,
    is_at_end: bool,
    /// Slot of the current request.
    current: Option<usize>,
}

impl LogFile {
    pub(super) fn new(path: &Path, source: LogSource, options: &AccessLogs) -> Self {
        let is_stdin = path.as_os_str() == "-";
        Self {
            name: if is_stdin { "stdin".to_owned() } else { path.display().to_string() },
            lines: LineReader::new(source),
            format: options.format,
            strict: options.strict,
            parser: None,
            reorder: Reorder::default(),
            counts: LineCounts::default(),
            is_at_end: false,
            current: None,
        }
    }

    /// Moves to the next request, and returns its time.
    pub(super) fn advance(&mut self) -> anyhow::Result<Option<u64>> {
        if let Some(slot) = self.current.take() {
            self.reorder.release(slot);
        }
        loop {
            if let Some((time, slot)) = self.reorder.pop(self.is_at_end) {
                self.current = Some(slot);
                return Ok(Some(time));
            }
            if self.is_at_end {
                return Ok(None);
            }
            self.read_line()?;
        }
    }

    /// Returns the current request.
    pub(super) fn current(&self) -> Option<&Record> {
        Some(self.reorder.record(self.current?))
    }

    pub(super) fn into_counts(self) -> LineCounts {
        let Reorder { reordered, late, .. } = self.reorder;
        LineCounts { reordered, late, ..self.counts }
    }

    fn read_line(&mut self) -> anyhow::Result<()> {
        let number = self.counts.lines + 1;
        let line = self.lines.next();
        let line = line.with_context(|| format!("{}: line {number} cannot be read", self.name))?;
        let Some(line) = line else {
            self.is_at_end = true;
            ensure!(self.parser.is_some() || self.counts.lines == 0, self.unknown_format());
            return Ok(());
        };
        self.counts.lines = number;
        let line = match line {
            LogLine::Text(bytes) => text(bytes.strip_prefix(BYTE_ORDER_MARK).unwrap_or(bytes)),
            LogLine::TooLong => {
                return self.add_bad(&format!("it is longer than {MAX_LINE_BYTES} bytes"), None);
            }
        };
        if line.is_empty() {
            return Ok(());
        }
        if self.parser.is_none() {
            self.parser = LineParser::detect(self.format, &line);
            if let Some(LineParser::Csv(columns)) = &self.parser {
                self.counts.other_columns = columns.others();
                return Ok(());
            }
        }
        let Some(parser) = &mut self.parser else {
            let line = shown(&line, SHOWN_CHARACTERS);
            let may_follow = number < DETECTION_LINES && self.format == LogFileFormat::Auto;
            ensure!(may_follow, self.unknown_format());
            return self.add_bad("its format is unknown", Some(line));
        };
        let (slot, record) = self.reorder.take_slot();
        match parser.parse(&line, record) {
            Ok(()) => {
                self.reorder.push(slot);
                Ok(())
            }
            Err(reason) => {
                self.reorder.release(slot);
                let line = shown(&line, SHOWN_CHARACTERS);
                self.add_bad(reason, Some(line))
            }
        }
    }

    #[cold]
    fn add_bad(&mut self, reason: &str, line: Option<String>) -> anyhow::Result<()> {
        self.counts.bad += 1;
        if self.counts.examples.len() < MAX_EXAMPLES || self.strict {
            let line = line.map(|line| format!(": {line}")).unwrap_or_default();
            let example = format!("{}:{}: {reason}{line}", self.name, self.counts.lines);
            ensure!(!self.strict, example);
            self.counts.examples.push(example);
        }
        Ok(())
    }

    fn unknown_format(&self) -> String {
        let name = &self.name;
        match self.format {
            LogFileFormat::Csv => {
                format!("{name}: its first line must name the columns, such as time,ip,method,path")
            }
            _ => format!(
                "{name}: its format is unknown: write the combined format of nginx or Apache, JSON \
                 lines of Caddy or Traefik, or CSV whose first line names the columns (time,ip,…)"
            ),
        }
    }
}
