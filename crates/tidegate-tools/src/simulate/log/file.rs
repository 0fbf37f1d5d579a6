//! [`LogFile`]: the requests of one file, in the order of their times.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use anyhow::{Context as _, ensure};

use tidegate::decode_value;

use super::detect::{Detector, LineFormat};
use super::guess::describe;
use super::input::{self, LineReader, LogLine, LogSource, MAX_LINE_BYTES};
use super::line::LineError;
use super::record::Record;
use super::reorder::{DEFAULT_WINDOW, Reorder};
use super::sort::{LineSorter, SortedLines};
use super::{LineCounts, MAX_EXAMPLES};
use crate::simulate::report::shown;
use crate::tool::style;
use tidegate_config::duration::readable;

/// Number of lines at the start of a file by which its format is recognized, and of later lines
/// that may have another format.
const DETECTION_LINES: usize = 100;
/// Maximum number of characters of a bad line that are shown.
const SHOWN_CHARACTERS: usize = 80;

/// Bytes at the start of files that some editors of Windows write.
const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

/// Options for all files.
#[derive(Debug)]
pub(super) struct FileOptions {
    pub(super) detector: Detector,
    pub(super) strict: bool,
    /// Time by which lines of a pipe may be late.
    pub(super) window: u64,
}

pub(super) struct LogFile {
    pub(super) name: String,
    index: usize,
    is_regular: bool,
    options: Arc<FileOptions>,
    lines: FileLines,
    formats: FileFormats,
    /// Number of the line that names the columns.
    header: u64,
    reorder: Reorder,
    counts: LineCounts,
    is_at_end: bool,
    /// Slot of the current request.
    current: Option<usize>,
}

/// Facts about a regular file, which is read once before its requests are. Two files with the same
/// facts have the same lines.
#[derive(Debug, PartialEq, Eq, Hash, Default)]
pub(super) struct FileSurvey {
    lines: u64,
    bytes: u64,
    first: u64,
    last: u64,
}

impl LogFile {
    /// Opens a file. A regular one is read once to learn the order of its lines.
    pub(super) fn open(
        path: &Path,
        index: usize,
        options: &Arc<FileOptions>,
        read: &Arc<AtomicU64>,
    ) -> anyhow::Result<(Self, FileSurvey)> {
        let name = if path.as_os_str() == "-" { "stdin".into() } else { path.to_string_lossy() };
        let is_regular = path.is_file();
        let survey_bytes = Arc::default();
        let source = input::open(path, if is_regular { &survey_bytes } else { read })?;
        let mut file = Self {
            name: name.into_owned(),
            index,
            is_regular,
            options: Arc::clone(options),
            lines: FileLines::new(source),
            formats: FileFormats { known: Vec::new(), detections: DETECTION_LINES },
            header: 0,
            reorder: Reorder::new(if is_regular { DEFAULT_WINDOW } else { options.window }),
            counts: LineCounts::default(),
            is_at_end: false,
            current: None,
        };
        file.recognize()?;
        if !is_regular {
            return Ok((file, FileSurvey::default()));
        }
        let survey = file.survey()?;
        file.lines = FileLines::new(input::open(path, read)?);
        let Reorder { late, reordered, .. } = file.reorder;
        if late > 0 {
            file.sort().with_context(|| format!("{}: it cannot be sorted", file.name))?;
            file.counts.reordered = late + reordered;
        }
        file.reorder = Reorder::new(if late == 0 && reordered > 0 { DEFAULT_WINDOW } else { 0 });
        Ok((file, survey))
    }

    /// Reads the first lines until one has a known format.
    fn recognize(&mut self) -> anyhow::Result<()> {
        let mut first_unknown = None;
        let mut read = VecDeque::new();
        while read.len() < DETECTION_LINES && self.formats.known.is_empty() {
            let name = &self.name;
            let line = self.lines.next();
            let line =
                line.with_context(|| format!("{name}: line {} cannot be read", read.len() + 1))?;
            let Some((number, line)) = line else { break };
            let LogLine::Text(bytes) = line else {
                read.push_back(None);
                continue;
            };
            read.push_back(Some(bytes.to_vec()));
            let text = decoded(bytes);
            match self.options.detector.detect(&text) {
                Some(format) => {
                    let is_header = format.has_header() && !text.starts_with('#');
                    self.header = if is_header { number } else { 0 };
                    self.counts.other_columns = format.other_columns();
                    self.formats.known.push(format);
                }
                None if text.is_empty() || text.starts_with('#') => {}
                None => _ = first_unknown.get_or_insert_with(|| text.into_owned()),
            }
        }
        self.lines.unread(read);
        if self.formats.known.is_empty() {
            self.formats.known.extend(self.options.detector.fallback());
        }
        let name = &self.name;
        if let (Some(line), []) = (&first_unknown, &self.formats.known[..]) {
            let start = shown(line, SHOWN_CHARACTERS);
            anyhow::bail!("{name}: its format is unknown: {}: {start}", describe(line));
        }
        ensure!(
            !self.formats.known.is_empty() || self.lines.pending.is_empty(),
            "{name}: its format is unknown: no line is shorter than {MAX_LINE_BYTES} bytes"
        );
        if let Some(guess) = self.formats.known.first().and_then(|format| format.guess.as_ref()) {
            style::print_warning(format_args!(
                "{name}: its format is read as --log-format '{guess}', which is a guess"
            ));
        }
        Ok(())
    }

    /// Reads the times of all lines.
    fn survey(&mut self) -> anyhow::Result<FileSurvey> {
        let mut survey = FileSurvey { first: u64::MAX, ..FileSurvey::default() };
        let mut formats = self.formats.known.clone();
        let name = &self.name;
        loop {
            let line = self.lines.next();
            let line =
                line.with_context(|| format!("{name}: line {} cannot be read", survey.lines + 1))?;
            let Some((number, line)) = line else { break };
            survey.lines = number;
            let LogLine::Text(bytes) = line else { continue };
            survey.bytes += bytes.len() as u64;
            let (slot, record) = self.reorder.take_slot();
            match time(&mut formats, bytes, record) {
                Some(time) if number != self.header => {
                    survey.first = survey.first.min(time);
                    survey.last = survey.last.max(time);
                    self.reorder.push(slot);
                }
                _ => self.reorder.release(slot),
            }
            while let Some((_, slot)) = self.reorder.pop(false) {
                self.reorder.release(slot);
            }
        }
        Ok(survey)
    }

    /// Sorts all lines. Those without a time stay behind the line before them.
    fn sort(&mut self) -> anyhow::Result<()> {
        let mut sorter = LineSorter::default();
        let mut formats = self.formats.known.clone();
        let mut record = Record::default();
        let mut last = 0;
        while let Some((number, line)) = self.lines.next()? {
            match line {
                LogLine::Text(bytes) => {
                    last = time(&mut formats, bytes, &mut record).unwrap_or(last);
                    let is_header = number == self.header || bytes.starts_with(b"#");
                    sorter.add(if is_header { 0 } else { last }, number, bytes)?;
                }
                // It has more bytes than any line that is read.
                LogLine::TooLong => sorter.add(last, number, &vec![b' '; MAX_LINE_BYTES + 1])?,
            }
        }
        self.lines.sorted = Some(sorter.finish()?);
        Ok(())
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

    /// Returns whether it may have requests.
    pub(super) fn has_requests(&self) -> bool {
        !self.formats.known.is_empty() && self.is_regular
    }

    pub(super) fn into_counts(self) -> LineCounts {
        let Reorder { reordered, late, .. } = self.reorder;
        LineCounts { reordered: reordered + self.counts.reordered, late, ..self.counts }
    }

    fn read_line(&mut self) -> anyhow::Result<()> {
        let line = self.lines.next();
        let number = self.counts.lines + 1;
        let line = line.with_context(|| format!("{}: line {number} cannot be read", self.name))?;
        let Some((number, line)) = line else {
            self.is_at_end = true;
            return Ok(());
        };
        self.counts.lines += 1;
        let text = match line {
            LogLine::Text(bytes) if bytes.len() <= MAX_LINE_BYTES => decoded(bytes),
            _ => {
                return self.add_bad(
                    number,
                    &format!("it is longer than {MAX_LINE_BYTES} bytes"),
                    None,
                );
            }
        };
        if text.is_empty() || number == self.header {
            return Ok(());
        }
        let (slot, record) = self.reorder.take_slot();
        (record.file, record.line) = (self.index, number);
        match self.formats.parse(&self.options.detector, &text, record) {
            Ok(()) => {
                let lateness = self.reorder.push(slot);
                if lateness > 0 && self.reorder.late == 1 {
                    let late = readable(std::time::Duration::from_micros(lateness));
                    style::print_warning(format_args!(
                        "{}:{number}: this line is {late} too late to be sorted into its place: \
                         see --sort-window",
                        self.name
                    ));
                }
                Ok(())
            }
            Err(error) => {
                self.reorder.release(slot);
                match error {
                    LineError::Comment => {}
                    LineError::NotHttp => self.counts.not_http += 1,
                    LineError::Bad(reason) => {
                        let line = shown(&text, SHOWN_CHARACTERS);
                        return self.add_bad(number, reason, Some(line));
                    }
                }
                Ok(())
            }
        }
    }

    #[cold]
    fn add_bad(&mut self, number: u64, reason: &str, line: Option<String>) -> anyhow::Result<()> {
        self.counts.bad += 1;
        if self.counts.examples.len() < MAX_EXAMPLES || self.options.strict {
            let line = line.map(|line| format!(": {line}")).unwrap_or_default();
            let example = format!("{}:{number}: {reason}{line}", self.name);
            ensure!(!self.options.strict, example);
            self.counts.examples.push(example);
        }
        Ok(())
    }
}

/// Formats of the lines of a file. Nearly all lines have the first.
#[derive(Debug)]
struct FileFormats {
    known: Vec<LineFormat>,
    /// Number of lines that may still be looked at for another format.
    detections: usize,
}

impl FileFormats {
    fn parse(
        &mut self,
        detector: &Detector,
        text: &str,
        record: &mut Record,
    ) -> Result<(), LineError> {
        let mut error = LineError::Bad("it is not a request");
        for at in 0..self.known.len() {
            match self.known[at].parse(text, record, false) {
                Err(bad @ LineError::Bad(_)) => {
                    record.clear();
                    error = if at == 0 { bad } else { error };
                }
                result => {
                    self.known.swap(0, at);
                    return result;
                }
            }
        }
        if self.detections > 0 {
            self.detections -= 1;
            if let Some(mut format) = detector.detect_request(text) {
                let result = format.parse(text, record, false);
                self.known.insert(0, format);
                return result;
            }
        }
        Err(error)
    }
}

/// Lines of a file with their numbers: in their own order, or in that of their times.
struct FileLines {
    /// Lines that were read to recognize the format; `None` is too long.
    pending: VecDeque<Option<Vec<u8>>>,
    reader: LineReader<LogSource>,
    sorted: Option<SortedLines>,
    held: Vec<u8>,
    number: u64,
}

impl FileLines {
    fn new(source: LogSource) -> Self {
        let reader = LineReader::new(source);
        Self { pending: VecDeque::new(), reader, sorted: None, held: Vec::new(), number: 0 }
    }

    /// Starts again with lines that were read.
    fn unread(&mut self, lines: VecDeque<Option<Vec<u8>>>) {
        self.pending = lines;
        self.number = 0;
    }

    fn next(&mut self) -> io::Result<Option<(u64, LogLine<'_>)>> {
        if let Some(sorted) = &mut self.sorted {
            let Some((number, line)) = sorted.next()? else { return Ok(None) };
            self.held = line;
            return Ok(Some((number, LogLine::Text(&self.held))));
        }
        self.number += 1;
        match self.pending.pop_front() {
            Some(Some(line)) => {
                self.held = line;
                Ok(Some((self.number, LogLine::Text(&self.held))))
            }
            Some(None) => Ok(Some((self.number, LogLine::TooLong))),
            None => Ok(self.reader.next()?.map(|line| (self.number, line))),
        }
    }
}

/// Returns the time of a line.
fn time(formats: &mut [LineFormat], line: &[u8], record: &mut Record) -> Option<u64> {
    let text = decoded(line);
    let is_read = formats.iter_mut().any(|format| {
        record.clear();
        format.parse(&text, record, true).is_ok()
    });
    is_read.then_some(record.time)
}

/// Returns the text of a line, without a byte order mark.
fn decoded(line: &[u8]) -> Cow<'_, str> {
    decode_value(line.strip_prefix(BYTE_ORDER_MARK).unwrap_or(line))
}
