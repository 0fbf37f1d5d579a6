//! [`LogFile`]: the requests of one file, in the order of their times.

use std::borrow::Cow;
use std::hash::{BuildHasher as _, Hasher as _};
use std::io::{self, Read as _};
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, ensure};
use foldhash::fast::FixedState;

use tidegate::decode_value;

use super::detect::{Detector, LineFormat};
use super::guess::describe;
use super::input::{self, LineReader, LogSource, MAX_LINE_BYTES};
use super::line::LineError;
use super::record::Record;
use super::reorder::Reorder;
use super::{LineCounts, LogProgress, MAX_EXAMPLES};
use crate::simulate::report::shown;
use crate::tool::style;
use tidegate_config::duration::readable;

/// Number of lines at the start of a file by which its format is recognized, and of later lines
/// that may have another format.
const DETECTION_LINES: usize = 100;
/// Maximum number of bytes of those lines.
const DETECTION_BYTES: u64 = 1024 * 1024;
/// Maximum number of characters of a bad line that are shown.
const SHOWN_CHARACTERS: usize = 80;

/// Bytes at the start of files that some editors of Windows write.
const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

/// Start of the colours that some programs write to files, too.
const COLOUR: &str = "\u{1b}[";

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
    options: Arc<FileOptions>,
    lines: LineReader<LogSource>,
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
    hash: u64,
    /// Longest time by which a line is late.
    lateness: u64,
}

impl LogFile {
    /// Opens a file. A regular one is read once to learn the order of its lines.
    pub(super) fn open(
        path: &Path,
        index: usize,
        options: &Arc<FileOptions>,
        progress: &mut LogProgress,
    ) -> anyhow::Result<(Self, Option<FileSurvey>)> {
        let name = if path.as_os_str() == "-" { "stdin".into() } else { path.to_string_lossy() };
        let mut source = input::open(path, &progress.read)?;
        let mut start = Vec::new();
        let result = (&mut source).take(DETECTION_BYTES).read_to_end(&mut start);
        let number = start.split(|byte| *byte == b'\n').count();
        result.with_context(|| format!("{name}: line {number} cannot be read"))?;
        let mut file = Self {
            name: name.into_owned(),
            index,
            options: Arc::clone(options),
            lines: LineReader::new(Box::new(io::Cursor::new(start.clone()).chain(source))),
            formats: FileFormats { known: Vec::new(), detections: DETECTION_LINES },
            header: 0,
            reorder: Reorder::new(options.window),
            counts: LineCounts::default(),
            is_at_end: false,
            current: None,
        };
        file.recognize(&start)?;
        if !path.is_file() {
            return Ok((file, None));
        }
        let survey = file.survey(progress)?;
        file.formats.detections = DETECTION_LINES;
        file.lines = LineReader::new(input::open(path, &progress.read)?);
        file.reorder = Reorder::new(survey.lateness);
        Ok((file, Some(survey).filter(|survey| survey.lines > 0)))
    }

    /// Recognizes the format by the first lines.
    fn recognize(&mut self, start: &[u8]) -> anyhow::Result<()> {
        let is_cut = start.len() as u64 == DETECTION_BYTES;
        let whole = start.iter().rposition(|byte| *byte == b'\n').filter(|_| is_cut);
        let mut lines = LineReader::new(whole.map_or(start, |end| &start[..=end]));
        let mut first = Vec::with_capacity(DETECTION_LINES);
        while let Some(line) = lines.next()?.filter(|_| first.len() < DETECTION_LINES) {
            let is_whole = line.len() <= MAX_LINE_BYTES;
            first.push(if is_whole { decoded(line).into_owned() } else { String::new() });
        }
        let detector = &self.options.detector;
        if let Some((place, format)) = detector.detect(&first) {
            self.header = if format.has_header() { place as u64 + 1 } else { 0 };
            self.counts.other_columns = format.other_columns();
            self.formats.known.push(format);
        } else {
            self.formats.known.extend(detector.fallback());
        }
        let name = &self.name;
        let is_text = |line: &&String| !line.is_empty() && !line.starts_with('#');
        match (self.formats.known.first(), first.iter().find(is_text)) {
            (Some(LineFormat { guess: Some(guess), .. }), _) => style::print_warning(format_args!(
                "{name}: its format is read as --log-format '{guess}', which is a guess"
            )),
            (None, Some(line)) => {
                let start = shown(line, SHOWN_CHARACTERS);
                anyhow::bail!("{name}: its format is unknown: {}: {start}", describe(line));
            }
            (None, None) => ensure!(
                start.is_empty(),
                "{name}: its format is unknown: its lines are empty, or longer than {MAX_LINE_BYTES} \
                 bytes"
            ),
            _ => {}
        }
        Ok(())
    }

    /// Reads the times of all lines. The formats and spellings that it learns hold for the
    /// requests.
    fn survey(&mut self, progress: &mut LogProgress) -> anyhow::Result<FileSurvey> {
        let (mut survey, mut hasher) =
            (FileSurvey::default(), FixedState::default().build_hasher());
        let (mut record, mut newest) = (Record::default(), 0);
        loop {
            progress.count(0);
            let line = self.lines.next();
            let context = || format!("{}: line {} cannot be read", self.name, survey.lines + 1);
            let Some(line) = line.with_context(context)? else {
                return Ok(FileSurvey { hash: hasher.finish(), ..survey });
            };
            survey.lines += 1;
            survey.bytes += line.len() as u64;
            hasher.write(line);
            record.clear();
            let text = decoded(line);
            let detector = &self.options.detector;
            if survey.lines != self.header
                && !text.is_empty()
                && self.formats.parse(detector, &text, &mut record, true).is_ok()
            {
                newest = newest.max(record.time);
                survey.lateness = survey.lateness.max(newest - record.time);
            }
        }
    }

    /// Returns the names of columns that may be attributes.
    pub(super) fn other_columns(&self) -> impl Iterator<Item = &str> {
        self.counts.other_columns.iter().map(String::as_str)
    }

    /// Moves to the next request, and returns its time.
    pub(super) fn advance(&mut self) -> anyhow::Result<Option<u64>> {
        if let Some(slot) = self.current.take() {
            self.reorder.release(slot);
        }
        loop {
            let next = self.reorder.pop(self.is_at_end);
            if let Some((time, slot)) = next.with_context(|| self.unsorted())? {
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

    fn unsorted(&self) -> String {
        format!("{}: its lines cannot be sorted", self.name)
    }

    fn read_line(&mut self) -> anyhow::Result<()> {
        let number = self.counts.lines + 1;
        let line = self.lines.next();
        let line = line.with_context(|| format!("{}: line {number} cannot be read", self.name))?;
        let Some(line) = line else {
            self.is_at_end = true;
            return Ok(());
        };
        self.counts.lines = number;
        if line.len() > MAX_LINE_BYTES {
            return self.add_bad(&format!("it is longer than {MAX_LINE_BYTES} bytes"));
        }
        let text = decoded(line);
        if text.is_empty() || number == self.header {
            return Ok(());
        }
        let (slot, record) = self.reorder.take_slot();
        (record.file, record.line) = (self.index, number);
        let result = self.formats.parse(&self.options.detector, &text, record, false);
        if result.is_err() {
            self.reorder.release(slot);
        }
        match result {
            Ok(()) => {
                let late = self.reorder.push(slot).with_context(|| self.unsorted())?;
                if late > 0 && self.reorder.late == 1 {
                    let late = readable(std::time::Duration::from_micros(late));
                    style::print_warning(format_args!(
                        "{}:{number}: this line is {late} too late to be sorted into its place: \
                         see --sort-window",
                        self.name
                    ));
                }
            }
            Err(LineError::Comment) => {}
            Err(LineError::NotHttp) => self.counts.not_http += 1,
            Err(LineError::Bad(reason)) => {
                let reason = format!("{reason}: {}", shown(&text, SHOWN_CHARACTERS));
                return self.add_bad(&reason);
            }
        }
        Ok(())
    }

    #[cold]
    fn add_bad(&mut self, reason: &str) -> anyhow::Result<()> {
        self.counts.bad += 1;
        let example = format!("{}:{}: {reason}", self.name, self.counts.lines);
        ensure!(!self.options.strict, example);
        if self.counts.examples.len() < MAX_EXAMPLES {
            self.counts.examples.push(example);
        }
        Ok(())
    }
}

/// Formats of the lines of a file. Nearly all lines have the first.
#[derive(Debug)]
struct FileFormats {
    known: Vec<LineFormat>,
    /// Number of lines that may still be checked for another format.
    detections: usize,
}

impl FileFormats {
    fn parse(
        &mut self,
        detector: &Detector,
        text: &str,
        record: &mut Record,
        only_time: bool,
    ) -> Result<(), LineError> {
        let mut error = LineError::Bad("it is not a request");
        let mut doubtful = None;
        for (number, format) in self.known.iter_mut().enumerate() {
            match format.parse(text, record, only_time) {
                Err(bad @ LineError::Bad(_)) => error = if number == 0 { bad } else { error },
                Ok(()) if record.has_odd_address() => doubtful = doubtful.or(Some(number)),
                result => return result,
            }
            record.clear();
        }
        if self.detections > 0 {
            self.detections -= 1;
            if let Some(mut format) = detector.detect_request(text) {
                let result = format.parse(text, record, only_time);
                self.known.push(format);
                return result;
            }
        }
        match doubtful {
            Some(number) => self.known[number].parse(text, record, only_time),
            None => Err(error),
        }
    }
}

/// Returns the text of a line, without a byte order mark and colours of a terminal.
fn decoded(line: &[u8]) -> Cow<'_, str> {
    let mut line = line.strip_prefix(BYTE_ORDER_MARK).unwrap_or(line);
    // A file that was cut while it was written starts with NUL bytes.
    while let [0, rest @ ..] = line {
        line = rest;
    }
    let text = decode_value(line);
    let has_colours = memchr::memchr(COLOUR.as_bytes()[0], line).is_some();
    let split = if has_colours { text.split_once(COLOUR) } else { None };
    let Some((start, parts)) = split else { return text };
    let bare = |part: &str| {
        let colour = part.trim_start_matches(|c: char| c.is_ascii_digit() || c == ';');
        colour.strip_prefix('m').map_or_else(|| COLOUR.to_owned() + part, str::to_owned)
    };
    Cow::Owned(start.to_owned() + &parts.split(COLOUR).map(bare).collect::<String>())
}
