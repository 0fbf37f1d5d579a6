//! [`Record`]: a line with the places of its fields; [`LogRequest`]: its attributes.

use std::borrow::Cow;
use std::ops::Range;

use http::HeaderMap;
use tidegate::Attributes;
use tidegate::internals::text;
use tidegate::layer::RequestParts;

use super::csv::Columns;
use super::json;
use crate::simulate::TrafficRequest;

/// Value in place of a header that the server did not log: Caddy hides credentials this way, and
/// Traefik can.
const REDACTED: &str = "REDACTED";

/// Place of a field in its line. The default is that of an absent field.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Span {
    start: u32,
    end: u32,
}

impl Span {
    pub(super) fn new(range: Range<usize>) -> Self {
        let number = |index| u32::try_from(index).unwrap_or(u32::MAX);
        Self { start: number(range.start), end: number(range.end) }
    }

    pub(super) fn of(self, line: &[u8]) -> &[u8] {
        line.get(self.start as usize..self.end as usize).unwrap_or_default()
    }

    pub(super) fn range(self) -> Range<usize> {
        self.start as usize..self.end as usize
    }

    fn is_absent(self) -> bool {
        self.end <= self.start
    }
}

/// How the text of a field is escaped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Escapes {
    /// `\xNN`, and a backslash before a quote or backslash.
    #[default]
    Combined,
    /// Those of JSON.
    Json,
    /// Quotes around the text, and two quotes for one.
    Csv,
}

/// Fields of a line.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Fields {
    pub(super) time: u64,
    pub(super) address: Span,
    pub(super) method: Span,
    /// Path and query.
    pub(super) target: Span,
    pub(super) host: Span,
    pub(super) referer: Span,
    pub(super) user_agent: Span,
    /// JSON object of the headers, with lists of values.
    pub(super) headers: Span,
    pub(super) cost: Option<u64>,
}

/// Line that was parsed. Records are used again, so that a line needs no allocation.
#[derive(Debug, Default)]
pub(super) struct Record {
    pub(super) line: Vec<u8>,
    pub(super) fields: Fields,
    pub(super) escapes: Escapes,
    /// Cells of a line of CSV.
    pub(super) cells: Vec<Span>,
}

impl Record {
    fn text(&self, span: Span) -> Option<Cow<'_, str>> {
        if span.is_absent() {
            return None;
        }
        Some(unescaped(span.of(&self.line), self.escapes))
    }

    /// Returns the text of a field for which the combined format writes `-` if it is absent.
    fn text_or_dash(&self, span: Span) -> Option<Cow<'_, str>> {
        self.text(span).filter(|text| self.escapes != Escapes::Combined || text != "-")
    }
}

/// Returns the text that a field stands for.
fn unescaped(bytes: &[u8], escapes: Escapes) -> Cow<'_, str> {
    match escapes {
        Escapes::Combined if memchr::memchr(b'\\', bytes).is_some() => {
            Cow::Owned(text(&combined_unescaped(bytes)).into_owned())
        }
        Escapes::Json if memchr::memchr(b'\\', bytes).is_some() => json::unescaped(bytes),
        Escapes::Csv => match bytes {
            [b'"', inner @ .., b'"'] => match text(inner) {
                plain if !plain.contains("\"\"") => plain,
                quoted => Cow::Owned(quoted.replace("\"\"", "\"")),
            },
            plain => text(plain),
        },
        _ => text(bytes),
    }
}

fn combined_unescaped(bytes: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(bytes.len());
    let mut rest = bytes;
    while let [first, after @ ..] = rest {
        let hex = |at: usize| after.get(at).and_then(|byte| char::from(*byte).to_digit(16));
        let (byte, used) = match (first, after) {
            (b'\\', [b'x' | b'X', ..]) => match hex(1).zip(hex(2)) {
                Some((high, low)) => (u8::try_from(high * 16 + low).unwrap_or(b'?'), 3),
                None => (b'\\', 0),
            },
            (b'\\', [b'n', ..]) => (b'\n', 1),
            (b'\\', [b't', ..]) => (b'\t', 1),
            (b'\\', [b'r', ..]) => (b'\r', 1),
            (b'\\', [escaped @ (b'"' | b'\\'), ..]) => (*escaped, 1),
            (other, _) => (*other, 0),
        };
        plain.push(byte);
        rest = &after[used..];
    }
    plain
}

/// Request of a log line, with the attributes that the gateway would have read.
#[derive(Debug)]
pub(crate) struct LogRequest<'a> {
    pub(super) record: &'a Record,
    pub(super) columns: Option<&'a Columns>,
    /// Time, not before that of earlier lines.
    pub(super) time: u64,
}

impl LogRequest<'_> {
    fn cell(&self, name: &str) -> Option<Cow<'_, str>> {
        let position = self.columns?.position(name)?;
        self.record.text(*self.record.cells.get(position)?).filter(|text| !text.is_empty())
    }

    /// Returns the target without the scheme and host that a request to a proxy has.
    fn target(&self) -> Option<Cow<'_, str>> {
        let target = self.record.text(self.record.fields.target)?;
        match authority(&target) {
            None => Some(target),
            Some(authority) => {
                let start = target.find(authority).unwrap_or(0) + authority.len();
                let rest = &target[start..];
                let slash = if rest.starts_with('/') { "" } else { "/" };
                Some(Cow::Owned(format!("{slash}{rest}")))
            }
        }
    }

    fn host(&self) -> Option<Cow<'_, str>> {
        let target = self.record.text(self.record.fields.target);
        // The request line takes precedence over the header, as in the gateway.
        if let Some(authority) = target.as_deref().and_then(authority) {
            let host = authority.rsplit('@').next().unwrap_or(authority);
            return Some(Cow::Owned(tidegate::normalize_host(host).into_owned()));
        }
        let host = self.record.text(self.record.fields.host)?;
        Some(Cow::Owned(tidegate::normalize_host(&host).into_owned()))
    }

    fn header(&self, name: &str) -> Option<Cow<'_, str>> {
        let fields = &self.record.fields;
        let known = match name {
            _ if name.eq_ignore_ascii_case("user-agent") => {
                self.record.text_or_dash(fields.user_agent)
            }
            _ if name.eq_ignore_ascii_case("referer") => self.record.text_or_dash(fields.referer),
            _ => None,
        };
        let found = known.or_else(|| match self.record.escapes {
            Escapes::Json => json::header(&self.record.line, fields.headers, name).joined(),
            _ => None,
        });
        found.filter(|value| value != REDACTED)
    }

    /// Calls `read` with the query and cookies of this request.
    fn with_parts<T>(&self, read: impl FnOnce(&RequestParts<'_>) -> T) -> T {
        let mut headers = HeaderMap::new();
        let cookie = self.header("cookie").and_then(|cookie| cookie.parse().ok());
        if let Some(cookie) = cookie {
            headers.insert(http::header::COOKIE, cookie);
        }
        let target = self.target();
        let parts = RequestParts::forwarded(&headers, String::new());
        read(&parts.with_path_and_query(target.as_deref()))
    }
}

/// Returns the host of a target with a scheme.
fn authority(target: &str) -> Option<&str> {
    if target.starts_with('/') {
        return None;
    }
    let (_, rest) = target.split_once("://")?;
    Some(rest.split(['/', '?', '#']).next().unwrap_or(rest))
}

impl Attributes for LogRequest<'_> {
    fn get(&self, name: &str) -> Option<Cow<'_, str>> {
        if let Some(value) = self.cell(name) {
            return Some(value);
        }
        match name {
            "method" => self.record.text(self.record.fields.method),
            "path" => match self.target()? {
                Cow::Borrowed(target) => target.split(['?', '#']).next().map(Cow::Borrowed),
                Cow::Owned(target) => {
                    target.split(['?', '#']).next().map(|path| Cow::Owned(path.to_owned()))
                }
            },
            "host" => self.host(),
            _ => match name.split_once('.')? {
                ("header", name) => self.header(name),
                ("query" | "cookie", _) => {
                    self.with_parts(|parts| parts.get(name).map(|it| Cow::Owned(it.into_owned())))
                }
                _ => None,
            },
        }
    }

    fn is_ambiguous(&self, name: &str) -> bool {
        match name.split_once('.') {
            Some(("header", name)) if self.record.escapes == Escapes::Json => {
                let headers = self.record.fields.headers;
                !name.eq_ignore_ascii_case("cookie")
                    && json::header(&self.record.line, headers, name).is_repeated()
            }
            Some(("query" | "cookie", _)) => self.with_parts(|parts| parts.is_ambiguous(name)),
            _ => false,
        }
    }
}

impl TrafficRequest for LogRequest<'_> {
    fn time(&self) -> u64 {
        self.time
    }

    fn address(&self) -> Option<Cow<'_, str>> {
        self.record.text(self.record.fields.address)
    }

    fn cost(&self) -> Option<u64> {
        self.record.fields.cost
    }
}
