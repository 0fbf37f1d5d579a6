//! [`LineFormat`]: the format of a file, recognized by its lines.

use std::borrow::Cow;
use std::collections::BTreeSet;

use anyhow::{Context as _, ensure};

use super::columns::{Columns, W3C_FIELDS};
use super::field::{Core, Field};
use super::format::{FORMATS, FormatSyntax, TextFormat, quote_end};
use super::guess::guess;
use super::line::{LineError, LineParts};
use super::members::Members;
use super::record::Record;
use super::time::TimeParser;

/// Maximum number of words of a prefix, which syslog, containers and the like put before a line.
const MAX_PREFIX_WORDS: usize = 12;
/// Maximum number of words of a time.
const MAX_TIME_WORDS: usize = 6;
/// Names for any format, after the prefix that they put before lines.
const ANY_FORMAT: [&str; 6] = ["auto", "docker", "compose", "cri", "syslog", "journald"];

/// How much of a format a line must have to be recognized by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Strictness {
    /// All fields, and nothing else.
    Whole,
    /// A time, an address and a request.
    Start,
    /// The same, with a host name or nothing in place of the address.
    AnyAddress,
}

/// Syntax of the lines.
#[derive(Debug, Clone)]
enum Layout {
    Text(TextFormat),
    Columns(Columns),
    /// Named values. One of them may be a line of another format.
    Members(Box<Members>, Option<Box<LineFormat>>),
}

/// Format of the lines of a file.
#[derive(Debug, Clone)]
pub(super) struct LineFormat {
    /// Number of words before the line.
    prefix_words: usize,
    /// First word and number of words of the time in the prefix.
    prefix_time: Option<(usize, usize)>,
    layout: Layout,
    named: Vec<(String, Field)>,
    pub(super) times: TimeParser,
    /// Directives, if they are a guess.
    pub(super) guess: Option<String>,
}

/// Recognizes the format of files.
#[derive(Debug, Clone)]
pub(super) struct Detector {
    formats: Vec<Layout>,
    named: Vec<(String, Field)>,
    is_auto: bool,
    reads_columns: bool,
}

impl Detector {
    /// Creates a detector for `--log-format` and `--field`.
    pub(super) fn new(format: &str, fields: &[(String, String)]) -> anyhow::Result<Self> {
        let named = |(name, path): &(String, String)| {
            let path = path.replace(['"', ']'], "").replace('[', ".");
            (path.trim_start_matches('.').to_owned(), Field::of_attribute(name))
        };
        let named: Vec<(String, Field)> = fields.iter().map(named).collect();
        let name = format.to_ascii_lowercase();
        let is_auto = ANY_FORMAT.contains(&name.as_str());
        let mut detector = Self { formats: Vec::new(), named, is_auto, reads_columns: false };
        for (names, syntax) in FORMATS {
            if is_auto || names.split(' ').any(|known| known == name) {
                detector.add(syntax)?;
            }
        }
        if format.contains(['$', '%']) {
            let context = || format!("--log-format {format:?}");
            detector.add(&FormatSyntax::Text(format)).with_context(context)?;
        }
        let known = FORMATS.iter().flat_map(|(names, _)| names.split(' '));
        let known: BTreeSet<&str> = known.chain(ANY_FORMAT).collect();
        ensure!(
            detector.reads_columns || !detector.formats.is_empty(),
            "--log-format {format:?} is unknown: write directives of nginx ($remote_addr …), \
             Apache (%h …) or Envoy, or one of {}",
            known.into_iter().collect::<Vec<_>>().join(", ")
        );
        Ok(detector)
    }

    fn add(&mut self, syntax: &FormatSyntax<'_>) -> anyhow::Result<()> {
        match syntax {
            FormatSyntax::Text(text) => self.formats.push(Layout::Text(TextFormat::compile(text)?)),
            FormatSyntax::Members(syntax) => {
                let members = Box::new(Members::new(*syntax, &self.named));
                self.formats.push(Layout::Members(members, None));
            }
            FormatSyntax::Columns => self.reads_columns = true,
        }
        Ok(())
    }

    /// Recognizes the format by a line. `None`: the line is not a request of a known format.
    pub(super) fn detect(&self, line: &str) -> Option<LineFormat> {
        if self.reads_columns && line.starts_with(W3C_FIELDS) {
            return self.columns(line);
        }
        let columns = || self.columns(line).filter(|_| self.reads_columns);
        let named = || self.find(line, Strictness::AnyAddress, 0);
        self.detect_request(line)
            .or_else(columns)
            .or_else(named)
            .or_else(|| guess(line).filter(|_| self.is_auto))
    }

    /// Recognizes the format of a line among others by a request that it has.
    pub(super) fn detect_request(&self, line: &str) -> Option<LineFormat> {
        [Strictness::Whole, Strictness::Start].into_iter().find_map(|it| self.find(line, it, 0))
    }

    fn columns(&self, line: &str) -> Option<LineFormat> {
        Some(LineFormat::new(
            Layout::Columns(Columns::parse(line, |name| self.named(name))?),
            &self.named,
        ))
    }

    fn named(&self, name: &str) -> Option<Field> {
        let same = |(known, _): &&(String, Field)| known.eq_ignore_ascii_case(name);
        self.named.iter().find(same).map(|(_, field)| field.clone())
    }

    /// Finds a format that has all parts of a request in this line, after any prefix.
    fn find(&self, line: &str, strictness: Strictness, depth: usize) -> Option<LineFormat> {
        let mut words = Vec::new();
        let mut rest = line;
        while words.len() <= MAX_PREFIX_WORDS && !rest.is_empty() {
            let prefix_time = prefix_time(&words);
            for layout in &self.formats {
                let candidate = LineFormat {
                    prefix_words: words.len(),
                    prefix_time,
                    layout: layout.clone(),
                    ..LineFormat::new(layout.clone(), &self.named)
                };
                if let Some(found) = self.accepted(candidate, line, rest, strictness, depth) {
                    return Some(found);
                }
            }
            let (word, after) = split_word(rest)?;
            words.push(word);
            rest = after;
        }
        None
    }

    fn accepted(
        &self,
        mut candidate: LineFormat,
        line: &str,
        rest: &str,
        strictness: Strictness,
        depth: usize,
    ) -> Option<LineFormat> {
        let mut record = Record::default();
        match &mut candidate.layout {
            Layout::Text(format) => {
                let mut parts = LineParts::new(&mut record, false);
                let matched = format.scan(rest, &mut parts).ok()?;
                let address = parts.take(Core::Address);
                let is_address = address.is_some_and(|text| super::address(&text).is_some());
                let is_found = match strictness {
                    Strictness::Whole => matched,
                    Strictness::Start => true,
                    Strictness::AnyAddress => candidate.prefix_words == 0,
                };
                let needs_address =
                    format.has(Core::Address) && strictness != Strictness::AnyAddress;
                let is_host = !format.starts_with_host()
                    || parts.take(Core::Host).is_some_and(|host| is_host(&host));
                if !is_found || !is_host || needs_address && !is_address {
                    return None;
                }
                if format.has(Core::Time) {
                    candidate.prefix_time = None;
                }
                record.clear();
            }
            Layout::Members(members, inner) if strictness == Strictness::Whole => {
                let mut parts = LineParts::new(&mut record, false);
                members.scan(rest, &mut parts).ok()?;
                let message = parts.take(Core::Message);
                if parts
                    .finish(&mut TimeParser::default(), candidate.prefix_time.map(|_| "0"))
                    .is_err()
                {
                    let message = message.filter(|_| depth < 2)?;
                    let message = message.trim_ascii();
                    let found = [Strictness::Whole, Strictness::Start]
                        .into_iter()
                        .find_map(|it| self.find(message, it, depth + 1));
                    *inner = Some(Box::new(found.or_else(|| guess(message))?));
                } else {
                    members.learn_time();
                }
                record.clear();
            }
            _ => return None,
        }
        candidate.parse(line, &mut record, false).ok()?;
        let is_text = matches!(candidate.layout, Layout::Text(_));
        (!is_text || is_usual(&record)).then_some(candidate)
    }

    /// Returns the format of a file without a line that is a request.
    pub(super) fn fallback(&self) -> Option<LineFormat> {
        let [layout] = &self.formats[..] else { return None };
        (!self.is_auto).then(|| LineFormat::new(layout.clone(), &self.named))
    }
}

impl LineFormat {
    pub(super) fn of_text(format: TextFormat) -> Self {
        Self::new(Layout::Text(format), &[])
    }

    fn new(layout: Layout, named: &[(String, Field)]) -> Self {
        Self {
            prefix_words: 0,
            prefix_time: None,
            layout,
            named: named.to_vec(),
            times: TimeParser::default(),
            guess: None,
        }
    }

    /// Returns the names of columns that may be attributes.
    pub(super) fn other_columns(&self) -> Vec<String> {
        match &self.layout {
            Layout::Columns(columns) => columns.others(),
            _ => Vec::new(),
        }
    }

    /// Returns whether the line that named the columns is part of the format.
    pub(super) fn has_header(&self) -> bool {
        matches!(self.layout, Layout::Columns(_))
    }

    /// Reads a line into an empty record.
    pub(super) fn parse(
        &mut self,
        line: &str,
        record: &mut Record,
        only_time: bool,
    ) -> Result<(), LineError> {
        self.parse_after(line, None, record, only_time)
    }

    /// Reads a line that came with a time of its own.
    fn parse_after(
        &mut self,
        line: &str,
        time: Option<&str>,
        record: &mut Record,
        only_time: bool,
    ) -> Result<(), LineError> {
        let mut rest = line;
        let mut prefix = [""; MAX_PREFIX_WORDS];
        for word in prefix.iter_mut().take(self.prefix_words) {
            let (found, after) = split_word(rest).ok_or(LineError::Bad("it has too few words"))?;
            *word = found;
            rest = after;
        }
        let own = self.prefix_time.map(|(first, count)| time_text(&prefix[first..first + count]));
        let time = own.as_deref().or(time);
        let mut parts = LineParts::new(record, only_time);
        match &mut self.layout {
            Layout::Text(format) => {
                parts.needs_request = format.has(Core::Request) || format.has(Core::Method);
                format.scan(rest, &mut parts).map_err(LineError::Bad)?;
            }
            Layout::Columns(columns) => {
                if line.starts_with('#') {
                    if line.starts_with(W3C_FIELDS) {
                        let named = &self.named;
                        let named = |name: &str| {
                            let same =
                                |(known, _): &&(String, Field)| known.eq_ignore_ascii_case(name);
                            named.iter().find(same).map(|(_, field)| field.clone())
                        };
                        *columns = Columns::parse(line, named)
                            .ok_or(LineError::Bad("it names no column for the time"))?;
                    }
                    return Err(LineError::Comment);
                }
                parts.needs_request = false;
                columns.scan(rest, &mut parts).map_err(LineError::Bad)?;
            }
            Layout::Members(members, inner) => {
                members.scan(rest, &mut parts).map_err(LineError::Bad)?;
                if let Some(inner) = inner {
                    let message = parts.take(Core::Message);
                    let message = message.ok_or(LineError::Bad("it has no line in it"))?;
                    let outer = parts.take_time();
                    let time = outer.as_deref().or(time);
                    let record = parts.into_record();
                    record.clear();
                    return inner.parse_after(message.trim_ascii(), time, record, only_time);
                }
            }
        }
        parts.finish(&mut self.times, time)
    }
}

/// Returns whether a text is a host with a domain or a port, unlike the tag of a program.
fn is_host(text: &str) -> bool {
    let (name, port) = text.split_once(':').map_or((text, None), |(name, port)| (name, Some(port)));
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '.' || c == '-';
    let is_number = |port: &str| port.parse::<u16>().is_ok();
    name.chars().all(is_part) && port.map_or(name.contains('.'), is_number)
}

/// Returns whether the method and the target look like those of most requests.
fn is_usual(record: &Record) -> bool {
    let method = record.last("method").unwrap_or_default();
    let target = record.last("target").unwrap_or_default();
    let is_target = target.starts_with('/') || target.contains("://") || target == "*";
    method.bytes().all(|byte| byte.is_ascii_uppercase()) && (is_target || method == "CONNECT")
}

/// Splits off a word. Quotes and brackets at its start hold it together.
pub(super) fn split_word(text: &str) -> Option<(&str, &str)> {
    let text = text.trim_start_matches([' ', '\t']);
    let bytes = text.as_bytes();
    let held = match bytes.first()? {
        b'"' => quote_end(&bytes[1..]).map(|(end, _)| end + 2),
        b'[' => memchr::memchr(b']', bytes).map(|end| end + 1),
        _ => Some(0),
    };
    let held = held.unwrap_or(0);
    let end = text[held..].find([' ', '\t']).map_or(text.len(), |end| held + end);
    Some((&text[..end], text[end..].trim_start_matches([' ', '\t'])))
}

/// Returns the text of a time in words, without what syslog writes before it.
fn time_text<'l>(words: &[&'l str]) -> Cow<'l, str> {
    let bare = |word: &'l str| match word.split_once('>') {
        Some((start, rest)) if start.starts_with('<') => rest,
        _ => word,
    };
    match words {
        [word] => Cow::Borrowed(bare(word)),
        words => {
            let words: Vec<&str> = words.iter().copied().map(bare).collect();
            Cow::Owned(words.join(" "))
        }
    }
}

/// Finds the time in words: the first one, and of those the longest.
pub(super) fn prefix_time(words: &[&str]) -> Option<(usize, usize)> {
    let mut times = TimeParser::default();
    (0..words.len()).find_map(|first| {
        let counts = (1..=MAX_TIME_WORDS.min(words.len() - first)).rev();
        counts.into_iter().map(|count| (first, count)).find(|(first, count)| {
            let text = time_text(&words[*first..first + count]);
            text.len() >= 10 && times.parse(&text).is_some_and(|time| time > 100_000_000_000_000)
        })
    })
}
