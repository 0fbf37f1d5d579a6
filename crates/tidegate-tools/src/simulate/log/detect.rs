//! [`LineFormat`]: the format of a file, recognized by its lines.

use std::borrow::Cow;
use std::fmt::Write as _;

use anyhow::{Context as _, bail};

use super::columns::{Columns, W3C_FIELDS};
use super::field::{Core, Field};
use super::format::{FORMATS, TextFormat, quote_end};
use super::line::{LineError, LineParts, request_line};
use super::members::{Members, Syntax};
use super::record::Record;
use super::time::TimeParser;

/// Maximum number of words of a prefix, which syslog, containers and the like put before a line.
const MAX_PREFIX_WORDS: usize = 12;
/// Maximum number of words of a line that are looked at to guess its format.
const MAX_GUESS_WORDS: usize = 64;
/// Maximum number of words of a time.
const MAX_TIME_WORDS: usize = 6;
const METHODS: [&str; 9] =
    ["GET", "POST", "PUT", "HEAD", "DELETE", "PATCH", "OPTIONS", "CONNECT", "TRACE"];

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
    Members(Members, Option<Box<LineFormat>>),
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
    is_named: bool,
    reads_columns: bool,
}

impl Detector {
    /// Creates a detector for `--log-format` and `--field`.
    pub(super) fn new(format: &str, fields: &[(String, String)]) -> anyhow::Result<Self> {
        let named = |(name, path): &(String, String)| {
            let path = path.replace(['"', ']'], "").replace("[", ".");
            (path.trim_start_matches('.').to_owned(), Field::of_attribute(name))
        };
        let named: Vec<(String, Field)> = fields.iter().map(named).collect();
        let members = |syntax| Layout::Members(Members::new(syntax, &named), None);
        let text = |text: &str| TextFormat::compile(text).map(Layout::Text);
        let (mut formats, mut reads_columns) = (Vec::new(), false);
        let name = format.to_ascii_lowercase();
        match name.as_str() {
            "auto" | "docker" | "cri" | "compose" | "syslog" | "journald" => {
                formats.push(members(Syntax::Json));
                for (_, directives) in FORMATS {
                    formats.push(text(directives)?);
                }
                formats.extend([members(Syntax::Ltsv), members(Syntax::Logfmt)]);
                reads_columns = true;
            }
            "json" | "caddy" | "cloudflare" | "envoy-json" | "gcp" | "azure" => {
                formats.push(members(Syntax::Json));
            }
            "traefik" => formats.extend([members(Syntax::Json), text(FORMATS[1].1)?]),
            "istio" | "envoy" => {
                for (_, directives) in
                    FORMATS.iter().filter(|(it, _)| ["envoy", "istio"].contains(it))
                {
                    formats.push(text(directives)?);
                }
                formats.push(members(Syntax::Json));
            }
            "logfmt" | "heroku" => formats.push(members(Syntax::Logfmt)),
            "ltsv" => formats.push(members(Syntax::Ltsv)),
            "csv" | "tsv" | "w3c" | "iis" | "cloudfront" => reads_columns = true,
            "common" | "apache" | "nginx" | "gunicorn" | "morgan" => {
                formats.push(text(FORMATS[1].1)?)
            }
            directives if format.contains(['$', '%']) => {
                _ = directives;
                formats.push(text(format).with_context(|| format!("--log-format {format:?}"))?);
            }
            name => match FORMATS.iter().find(|(known, _)| *known == name) {
                Some((_, directives)) => formats.push(text(directives)?),
                None => bail!(
                    "--log-format {name:?} is unknown: write directives of nginx ($remote_addr …), \
                     Apache (%h …) or Envoy, or one of auto, combined, json, csv, {}",
                    known_names()
                ),
            },
        }
        Ok(Self { formats, named, is_named: name != "auto", reads_columns })
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
            .or_else(|| guess(line).filter(|_| !self.is_named))
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
                let is_host =
                    !format.starts_with_host() || parts.take(Core::Host).is_some_and(is_host);
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
        self.is_named.then(|| LineFormat::new(layout.clone(), &self.named))
    }
}

impl LineFormat {
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
            Layout::Text(format) => _ = format.scan(rest, &mut parts).map_err(LineError::Bad)?,
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
fn is_host(text: Cow<'_, str>) -> bool {
    let (name, port) =
        text.split_once(':').map_or((&*text, None), |(name, port)| (name, Some(port)));
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '.' || c == '-';
    let is_port = |port: &str| !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    name.chars().all(is_part) && port.map_or(name.contains('.'), is_port)
}

/// Returns whether the method and the target look like those of most requests.
fn is_usual(record: &Record) -> bool {
    let method = record.last("method").unwrap_or_default();
    let target = record.last("target").unwrap_or_default();
    let is_target = target.starts_with('/') || target.contains("://") || target == "*";
    method.bytes().all(|byte| byte.is_ascii_uppercase()) && (is_target || method == "CONNECT")
}

/// Splits off a word. Quotes and brackets at its start hold it together.
fn split_word(text: &str) -> Option<(&str, &str)> {
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
fn prefix_time(words: &[&str]) -> Option<(usize, usize)> {
    let mut times = TimeParser::default();
    (0..words.len()).find_map(|first| {
        let counts = (1..=MAX_TIME_WORDS.min(words.len() - first)).rev();
        counts.into_iter().map(|count| (first, count)).find(|(first, count)| {
            let text = time_text(&words[*first..first + count]);
            text.len() >= 10 && times.parse(&text).is_some_and(|time| time > 100_000_000_000_000)
        })
    })
}

/// Guesses the directives of a line that has a time, an address and a request.
fn guess(line: &str) -> Option<LineFormat> {
    [' ', '|', '\t', ';', ','].into_iter().find_map(|separator| guess_words(line, separator))
}

fn guess_words(line: &str, separator: char) -> Option<LineFormat> {
    let mut words = Vec::new();
    let mut rest = line;
    while words.len() < MAX_GUESS_WORDS && !rest.is_empty() {
        let (word, after) = if separator == ' ' {
            split_word(rest)?
        } else {
            rest.split_once(separator).unwrap_or((rest, ""))
        };
        words.push(word.trim());
        rest = after;
    }
    if words.len() < 3 {
        return None;
    }
    let mut names: Vec<Option<&str>> = vec![None; words.len()];
    let bare = |word: &'_ str| word.trim_matches(['"', '[', ']', '\'', '(', ')']).to_owned();
    let (time, time_words) = prefix_time(&words)?;
    let is_method = |word: &str| METHODS.contains(&word);
    let is_target = |word: &str| word.starts_with('/') || word.contains("://") || word == "*";
    let is_request = |word: &String| {
        request_line(word).is_some_and(|(method, target)| is_method(method) && is_target(target))
    };
    let plain: Vec<String> = words.iter().map(|word| bare(word)).collect();
    let request = plain.iter().position(is_request);
    let method = plain.windows(2).position(|pair| is_method(&pair[0]) && is_target(&pair[1]));
    let after = match (request, method) {
        (Some(request), _) => {
            names[request] = Some("$request");
            request
        }
        (None, Some(method)) => {
            names[method] = Some("$method");
            names[method + 1] = Some("$target");
            method + 1
        }
        (None, None) => {
            let method = plain.iter().position(|word| is_method(word))?;
            let target = plain.iter().position(|word| is_target(word))?;
            names[method] = Some("$method");
            names[target] = Some("$target");
            target.max(method)
        }
    };
    names[time..time + time_words].fill(Some(""));
    names[time] = Some("$time");
    let free = |names: &[Option<&str>], at: usize| names[at].is_none();
    let address =
        (0..words.len()).find(|at| free(&names, *at) && super::address(&plain[*at]).is_some());
    if let Some(at) = address {
        names[at] = Some("$remote_addr");
    }
    let is_list = |text: &String| text.split(',').all(|hop| super::address(hop.trim()).is_some());
    let start = address.map_or(0, |at| at + 1);
    let list = (start..words.len())
        .find(|at| free(&names, *at) && is_list(&plain[*at]) && words[*at].starts_with('"'));
    if let Some(at) = list {
        names[at] = Some("$http_x_forwarded_for");
    }
    let is_status = |word: &String| {
        word.len() == 3 && word.parse().is_ok_and(|status: u16| (100..600).contains(&status))
    };
    let status = (after + 1..words.len()).chain(0..after);
    if let Some(at) = status.into_iter().find(|at| free(&names, *at) && is_status(&plain[*at])) {
        names[at] = Some("$status");
    }
    let is_agent =
        |word: &String| ["Mozilla/", "curl/", "python-"].iter().any(|it| word.starts_with(it));
    if let Some(at) = (0..words.len()).find(|at| free(&names, *at) && is_agent(&plain[*at])) {
        names[at] = Some("$http_user_agent");
    }
    let mut directives = String::new();
    let last = names.iter().rposition(|name| name.is_some_and(|name| !name.is_empty()))?;
    for (at, word) in words.iter().enumerate().take(last + 1) {
        if names[at] == Some("") {
            continue;
        }
        if at > 0 {
            directives.push(separator);
        }
        // Quotes and brackets around a value stay in the format.
        let (start, end) = match (word.chars().next()?, word.chars().next_back()?) {
            (open @ ('"' | '[' | '(' | '\''), close @ ('"' | ']' | ')' | '\''))
                if word.len() > 1 =>
            {
                (open.to_string(), close.to_string())
            }
            _ => (String::new(), String::new()),
        };
        let name = names[at].unwrap_or("$_");
        let name =
            if at == time && time_words > 1 { &format!("${{time:{time_words}}}") } else { name };
        let _ = write!(directives, "{start}{name}{end}");
    }
    let format = TextFormat::compile(&directives).ok()?;
    let mut found = LineFormat::new(Layout::Text(format), &[]);
    found.guess = Some(directives);
    let mut record = Record::default();
    found.parse(line, &mut record, false).is_ok().then_some(found)
}

/// Describes a line whose format is unknown, and the flags that would read it.
pub(super) fn describe(line: &str) -> String {
    let mut record = Record::default();
    let mut members = Members::new(Syntax::Json, &[]);
    let mut parts = LineParts::new(&mut record, false);
    if members.scan(line, &mut parts).is_ok() {
        let mut names: Vec<&str> = members.names().collect();
        names.sort_unstable();
        let names = names.into_iter().take(20).collect::<Vec<_>>().join(", ");
        let missing = [
            ("time", parts.take_time().is_none()),
            ("method", parts.take(Core::Method).or(parts.take(Core::Request)).is_none()),
            ("target", parts.take(Core::Target).is_none()),
        ];
        let flags: Vec<String> = missing
            .iter()
            .filter(|(_, is_missing)| *is_missing)
            .map(|(name, _)| format!("--field {name}=.NAME"))
            .collect();
        return format!(
            "it is JSON with the members {names}: say which ones have the request, with {}",
            flags.join(" ")
        );
    }
    let mut words = Vec::new();
    let mut rest = line;
    while let Some((word, after)) = split_word(rest).filter(|_| words.len() < MAX_GUESS_WORDS) {
        words.push(word);
        rest = after;
    }
    let bare = |word: &&str| word.trim_matches(['"', '[', ']']).to_owned();
    let has = |found: bool, what: &'static str| if found { what } else { "" };
    let found = [
        has(prefix_time(&words).is_some(), "a time"),
        has(words.iter().any(|word| super::address(&bare(word)).is_some()), "an address"),
        has(words.iter().any(|word| request_line(&bare(word)).is_some()), "a request"),
    ];
    let found: Vec<&str> = found.into_iter().filter(|text| !text.is_empty()).collect();
    let found = if found.is_empty() {
        "neither a time nor a request".to_owned()
    } else {
        format!("only {}", found.join(" and "))
    };
    format!(
        "its {} words have {found}: describe them with --log-format, such as \
         '$remote_addr [$time_local] \"$request\" $status', or name columns in its first line \
         (time,ip,method,path)",
        words.len()
    )
}

/// Returns the names that `--log-format` has.
pub(super) fn known_names() -> String {
    let texts = FORMATS.iter().map(|(name, _)| *name);
    let others = [
        "common",
        "caddy",
        "traefik",
        "envoy-json",
        "cloudflare",
        "iis",
        "cloudfront",
        "docker",
        "cri",
        "logfmt",
        "ltsv",
    ];
    texts.chain(others).filter(|name| *name != "combined").collect::<Vec<_>>().join(", ")
}
