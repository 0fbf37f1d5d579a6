//! [`LogFile`]: the requests of one file, in the order of their times.

use std::path::Path;

use anyhow::{Context as _, bail};

use super::csv::Columns;
use super::format::Parser;
use super::input::{Line, LineReader, MAX_LINE_BYTES, Source};
use super::record::LogRequest;
use super::reorder::Reorder;
use super::{AccessLogs, LineCounts, LogFormat, MAX_EXAMPLES};

/// Number of lines at the start of a file by which its format is recognized.
const DETECTION_LINES: u64 = 100;
/// Maximum number of characters of a bad line that are shown.
const SHOWN_CHARACTERS: usize = 80;

pub(super) struct LogFile {
    name: String,
    lines: LineReader<Source>,
    format: LogFormat,
    strict: bool,
    parser: Option<Parser>,
    reorder: Reorder,
    counts: LineCounts,
    is_at_end: bool,
    /// Slot of the current request.
    current: Option<usize>,
}

impl LogFile {
    pub(super) fn new(path: &Path, source: Source, options: &AccessLogs) -> Self {
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

    pub(super) fn name(&self) -> &str {
        &self.name
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

    /// Returns the current request, to be decided at `time`.
    pub(super) fn current(&self, time: u64) -> Option<LogRequest<'_>> {
        let record = self.reorder.record(self.current?);
        Some(LogRequest { record, columns: self.columns(), time })
    }

    fn columns(&self) -> Option<&Columns> {
        match &self.parser {
            Some(Parser::Csv(columns)) => Some(columns),
            _ => None,
        }
    }

    pub(super) fn counts(&self) -> LineCounts {
        LineCounts {
            lines: self.counts.lines,
            bad: self.counts.bad,
            examples: self.counts.examples.clone(),
            reordered: self.reorder.reordered,
            late: self.reorder.late,
            other_columns: self.counts.other_columns.clone(),
        }
    }

    fn read_line(&mut self) -> anyhow::Result<()> {
        let number = self.counts.lines + 1;
        let line = self.lines.next();
        let line = line.with_context(|| format!("{}: line {number} cannot be read", self.name))?;
        let text = match line {
            None => {
                self.is_at_end = true;
                if self.parser.is_none() && self.counts.lines > 0 {
                    bail!("{}", self.unknown_format());
                }
                return Ok(());
            }
            Some(Line::Text(text)) => text,
            Some(Line::TooLong) => {
                self.counts.lines = number;
                let reason = format!("it is longer than {MAX_LINE_BYTES} bytes");
                return self.add_bad(&reason, b"");
            }
        };
        self.counts.lines = number;
        if text.is_empty() {
            return Ok(());
        }
        if self.parser.is_none() {
            self.parser = Parser::detect(self.format, text);
            match &self.parser {
                None if number >= DETECTION_LINES || self.format != LogFormat::Auto => {
                    bail!("{}", self.unknown_format());
                }
                None => {
                    let text = text.to_vec();
                    return self.add_bad("its format is unknown", &text);
                }
                Some(Parser::Csv(columns)) => {
                    self.counts.other_columns = columns.others();
                    return Ok(());
                }
                Some(_) => {}
            }
        }
        let Some(parser) = &mut self.parser else { return Ok(()) };
        let (slot, record) = self.reorder.take_slot();
        record.line.extend_from_slice(text);
        match parser.parse(record) {
            Ok(()) => {
                self.reorder.push(slot);
                Ok(())
            }
            Err(reason) => {
                let text = std::mem::take(&mut record.line);
                self.reorder.release(slot);
                self.add_bad(reason, &text)
            }
        }
    }

    #[cold]
    fn add_bad(&mut self, reason: &str, text: &[u8]) -> anyhow::Result<()> {
        self.counts.bad += 1;
        if self.counts.examples.len() < MAX_EXAMPLES || self.strict {
            let example = format!("{}:{}: {reason}{}", self.name, self.counts.lines, shown(text));
            if self.strict {
                bail!("{example}");
            }
            self.counts.examples.push(example);
        }
        Ok(())
    }

    fn unknown_format(&self) -> String {
        let name = &self.name;
        match self.format {
            LogFormat::Csv => {
                format!("{name}: its first line must name the columns, such as time,ip,method,path")
            }
            _ => format!(
                "{name}: its format is unknown: write the combined format of nginx or Apache, JSON \
                 lines of Caddy or Traefik, or CSV whose first line names the columns (time,ip,…)"
            ),
        }
    }
}

/// Returns the start of a bad line, with control characters escaped.
fn shown(text: &[u8]) -> String {
    if text.is_empty() {
        return String::new();
    }
    let text = String::from_utf8_lossy(&text[..text.len().min(4 * SHOWN_CHARACTERS)]);
    let mut shown: String =
        text.chars().take(SHOWN_CHARACTERS).flat_map(char::escape_debug).collect();
    if text.chars().count() > SHOWN_CHARACTERS {
        shown.push('…');
    }
    format!(": {shown}")
}
