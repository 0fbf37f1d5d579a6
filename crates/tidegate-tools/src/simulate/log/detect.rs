//! [`LineFormat`]: the format of a file, recognized by its lines.

use std::borrow::Cow;
use std::collections::BTreeSet;

use anyhow::{Context as _, ensure};

use super::columns::{Columns, W3C_FIELDS};
use super::field::{Core, FieldNames};
use super::format::{FORMATS, TextFormat};
use super::guess::guess;
use super::line::{LineError, LineParts};
use super::members::{Members, Syntax};
use super::record::Record;
use super::scan::split_word;
use super::time::TimeParser;

/// Maximum number of words of a prefix, which syslog, containers and the like put before a line.
const MAX_PREFIX_WORDS: usize = 12;
/// Maximum number of words of a time.
const MAX_TIME_WORDS: usize = 6;
/// Maximum number of lines that are in a member of another.
const MAX_DEPTH: usize = 2;
/// Names for any format, after the prefix that they put before lines.
const ANY_FORMAT: [&str; 6] = ["auto", "docker", "compose", "cri", "syslog", "journald"];

/// Syntax of the lines.
#[derive(Debug, Clone)]
enum Layout {
    Text(TextFormat),
    Columns(Columns),
    Members(Box<Members>),
}

/// Format of the lines of a file.
#[derive(Debug, Clone)]
pub(super) struct LineFormat {
    /// Number of words before the line.
    prefix_words: usize,
    /// First word and number of words of the time in the prefix.
    prefix_time: Option<(usize, usize)>,
    layout: Layout,
    /// Format of the line that a member has.
    inner: Option<Box<LineFormat>>,
    /// How many of a method and a target a request must have.
    required: usize,
    times: TimeParser,
    /// Directives, if they are a guess.
    pub(super) guess: Option<String>,
}

/// Recognizes the format of files.
#[derive(Debug, Clone)]
pub(super) struct Detector {
    formats: Vec<Layout>,
    given: FieldNames,
    is_auto: bool,
    reads_columns: bool,
}

impl Detector {
    /// Creates a detector for `--log-format` and `--field`.
    pub(super) fn new(format: &str, fields: &[(String, String)]) -> anyhow::Result<Self> {
        let name = format.to_ascii_lowercase();
        let is_auto = ANY_FORMAT.contains(&name.as_str());
        let given = FieldNames::new(fields);
        let mut detector = Self { formats: Vec::new(), given, is_auto, reads_columns: false };
        for (names, known) in FORMATS {
            if is_auto || names.split(' ').any(|it| it == name) {
                detector.add(known)?;
            }
        }
        if format.contains(['$', '%']) {
            let context = || format!("--log-format {format:?}");
            detector.add(format).with_context(context)?;
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

    fn add(&mut self, format: &str) -> anyhow::Result<()> {
        let members = |syntax| Layout::Members(Box::new(Members::new(syntax, self.given.clone())));
        let layout = match format {
            "json" => members(Syntax::Json),
            "ltsv" => members(Syntax::Ltsv),
            "logfmt" => members(Syntax::Logfmt),
            "csv" => {
                self.reads_columns = true;
                return Ok(());
            }
            directives => Layout::Text(TextFormat::compile(directives)?),
        };
        self.formats.push(layout);
        Ok(())
    }

    /// Recognizes the format by one of the first lines: by a request with an address, by names of
    /// columns, by any request, or by a guess.
    pub(super) fn detect(&self, lines: &[String]) -> Option<(usize, LineFormat)> {
        let find = |detect: &dyn Fn(&str) -> Option<LineFormat>| {
            let mut lines = lines.iter().enumerate();
            lines.find_map(|(place, line)| Some((place, detect(line)?)))
        };
        find(&|line| self.detect_certain(line))
            .or_else(|| find(&|line| self.best(line, &[], line, None)))
            .or_else(|| find(&|line| guess(line).filter(|_| self.is_auto)))
    }

    fn detect_certain(&self, line: &str) -> Option<LineFormat> {
        let columns = || {
            let columns = Columns::parse(line, &self.given).filter(|_| self.reads_columns)?;
            Some(LineFormat::new(Layout::Columns(columns), &self.given))
        };
        if self.reads_columns && line.starts_with(W3C_FIELDS) {
            return columns();
        }
        self.detect_request(line).or_else(columns)
    }

    /// Recognizes the format of a line among others by a request that it has.
    pub(super) fn detect_request(&self, line: &str) -> Option<LineFormat> {
        self.find(line, 0)
    }

    /// Finds the format after the shortest prefix.
    fn find(&self, line: &str, depth: usize) -> Option<LineFormat> {
        let (mut prefix, mut rest) = (Vec::new(), line);
        while prefix.len() <= MAX_PREFIX_WORDS && !rest.is_empty() {
            if let Some(found) = self.best(line, &prefix, rest, Some(depth)) {
                return Some(found);
            }
            let (word, after) = split_word(rest)?;
            prefix.push(word);
            rest = after;
        }
        None
    }

    /// Finds the format that fits best after a prefix. Without a depth, the
    /// client may have a host name or no address.
    fn best(
        &self,
        line: &str,
        prefix: &[&str],
        rest: &str,
        depth: Option<usize>,
    ) -> Option<LineFormat> {
        let prefix_time = prefix_time(prefix);
        let mut best = (0, None);
        for layout in &self.formats {
            let mut format = LineFormat {
                prefix_words: prefix.len(),
                prefix_time,
                ..LineFormat::new(layout.clone(), &self.given)
            };
            let fit = self.fit(&mut format, line, rest, depth).unwrap_or(0);
            if fit > best.0 {
                best = (fit, Some(format));
            }
        }
        best.1
    }

    /// Returns how well a format fits a line, if it is a request in this format.
    fn fit(
        &self,
        format: &mut LineFormat,
        line: &str,
        rest: &str,
        depth: Option<usize>,
    ) -> Option<usize> {
        let mut record = Record::default();
        let mut parts = LineParts::new(&mut record, false);
        let fit = format.layout.scan(rest, &mut parts).ok()?;
        let message = parts.take(Core::Message);
        if let Layout::Text(text) = &format.layout {
            let is_address = |text: Cow<'_, str>| {
                text.split(',').all(|hop| super::address(hop.trim()).is_some())
            };
            let lacks_address = match depth {
                None => !text.may_lack_address(),
                Some(_) if text.has(&[Core::Address]) => {
                    !parts.take(Core::Address).is_some_and(is_address)
                }
                // Without an address, the start of the line says little.
                Some(_) => !text.is_complete(fit),
            };
            let is_host = |text: Cow<'_, str>| is_host(&text);
            let lacks_host =
                text.starts_with_host() && !parts.take(Core::Host).is_some_and(is_host);
            if lacks_address || lacks_host {
                return None;
            }
            if text.has(&[Core::Time]) {
                format.prefix_time = None;
            }
        }
        record.clear();
        let is_request = format.parse(line, &mut record, false).is_ok();
        if matches!(format.layout, Layout::Text(_)) {
            return (is_request && is_usual(&record)).then_some(fit);
        }
        let depth = depth.filter(|depth| is_request || *depth < MAX_DEPTH)?;
        if !is_request {
            let message = message?;
            let inner = self.find(message.trim_ascii(), depth + 1);
            format.inner = Some(Box::new(inner.or_else(|| guess(message.trim_ascii()))?));
            record.clear();
            format.parse(line, &mut record, false).ok()?;
        }
        Some(fit)
    }

    /// Returns the format of a file without a line that is a request.
    pub(super) fn fallback(&self) -> Option<LineFormat> {
        let [layout] = &self.formats[..] else { return None };
        (!self.is_auto).then(|| LineFormat::new(layout.clone(), &self.given))
    }
}

impl Layout {
    /// Reads the values of a line, and returns how well it fits.
    fn scan<'l>(
        &mut self,
        line: &'l str,
        parts: &mut LineParts<'l, '_>,
    ) -> Result<usize, LineError> {
        match self {
            Self::Text(format) => format.scan(line, parts).map_err(LineError::Bad),
            Self::Columns(columns) => columns.scan(line, parts).map(|()| usize::MAX),
            Self::Members(members) => {
                members.scan(line, parts).map_err(LineError::Bad).map(|()| usize::MAX)
            }
        }
    }
}

impl LineFormat {
    pub(super) fn of_text(format: TextFormat) -> Self {
        Self::new(Layout::Text(format), &FieldNames::default())
    }

    fn new(layout: Layout, given: &FieldNames) -> Self {
        let required = match &layout {
            Layout::Columns(_) => 0,
            Layout::Members(_) if !given.is_empty() => 1,
            Layout::Text(format) if !format.has(&[Core::Request, Core::Method]) => 1,
            _ => 2,
        };
        Self {
            prefix_words: 0,
            prefix_time: None,
            layout,
            inner: None,
            required,
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

    /// Returns whether the line by which it was recognized names the columns, and is no comment.
    pub(super) fn has_header(&self) -> bool {
        matches!(&self.layout, Layout::Columns(columns) if columns.has_header())
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
            let split = split_word(rest).ok_or(LineError::Bad("it has too few words"))?;
            (*word, rest) = split;
        }
        let own = self.prefix_time.map(|(first, count)| time_text(&prefix[first..first + count]));
        let time = own.as_deref().or(time);
        let mut parts = LineParts::new(record, only_time);
        self.layout.scan(rest, &mut parts)?;
        let Some(inner) = &mut self.inner else {
            return parts.finish(&mut self.times, time, self.required);
        };
        let message = parts.take(Core::Message).ok_or(LineError::Bad("it has no line in it"))?;
        let outer = parts.take_time();
        let record = parts.into_record();
        record.clear();
        inner.parse_after(message.trim_ascii(), outer.as_deref().or(time), record, only_time)
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

/// Returns the text of a time in words, without what syslog writes before it.
fn time_text<'l>(words: &[&'l str]) -> Cow<'l, str> {
    let bare = |word: &'l str| match word.split_once('>') {
        Some((start, rest)) if start.starts_with('<') => rest,
        _ => word,
    };
    match words {
        [word] => Cow::Borrowed(bare(word)),
        words => Cow::Owned(words.iter().copied().map(bare).collect::<Vec<_>>().join(" ")),
    }
}

/// Finds the time in words: the first one, and of those the longest.
pub(super) fn prefix_time(words: &[&str]) -> Option<(usize, usize)> {
    let mut times = TimeParser::default();
    // The hyphen of an absent value is not part of a time.
    let is_part = |word: &str| {
        let bare = word.trim_start_matches(['[', '<', '(', '"', '+', '-']);
        bare.starts_with(|c: char| c.is_ascii_alphanumeric())
    };
    (0..words.len()).find_map(|first| {
        let counts = (1..=MAX_TIME_WORDS.min(words.len() - first)).rev();
        counts.into_iter().map(|count| (first, count)).find(|(first, count)| {
            let text = time_text(&words[*first..first + count]);
            is_part(words[*first])
                && is_part(words[first + count - 1])
                && text.len() > 10
                && times.parse(&text).is_some_and(|time| time > 100_000_000_000_000)
        })
    })
}
