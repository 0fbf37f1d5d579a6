//! [`Record`]: a log line as a request, with the attributes that the gateway would have read.

use std::borrow::Cow;

use http::HeaderMap;
use serde::{Deserialize, Serialize};
use tidegate::Attributes;
use tidegate::layer::RequestParts;

use crate::simulate::{TrafficRequest, address};

/// Request of a log line. Records are used again, so that most lines need no allocation.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Record {
    /// Time in microseconds since the Unix epoch.
    pub(super) time: u64,
    pub(super) cost: Option<u64>,
    /// Status of the response, and its size.
    pub(super) status: Option<u16>,
    pub(super) bytes: Option<u64>,
    /// Index of its file, and the number of its line from 1.
    pub(super) file: usize,
    pub(super) line: u64,
    /// Names and values of the attributes, one after the other.
    text: String,
    attributes: Vec<Attribute>,
}

/// Places of an attribute in the text of its record.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Attribute {
    start: usize,
    value: usize,
    end: usize,
}

impl Record {
    /// Returns the index of its file among those of the [`LogReader`](super::LogReader).
    pub fn file(&self) -> usize {
        self.file
    }

    /// Returns the number of its line in its file, from 1.
    pub fn line(&self) -> u64 {
        self.line
    }

    /// Returns the names and values of all attributes; `target` is the path with its query.
    pub fn attributes(&self) -> impl Iterator<Item = (&str, &str)> {
        self.attributes.iter().map(|&Attribute { start, value, end }| {
            (&self.text[start..value], &self.text[value..end])
        })
    }

    pub(super) fn clear(&mut self) {
        self.cost = None;
        self.status = None;
        self.bytes = None;
        self.text.clear();
        self.attributes.clear();
    }

    /// Returns the number of bytes that it takes in memory.
    pub(super) fn size(&self) -> usize {
        size_of::<Self>() + self.text.len() + size_of_val(&self.attributes[..])
    }

    /// Adds an attribute, `target` (a path and query) or `ip`, unless it is empty.
    pub(super) fn push(&mut self, name: &str, value: &str) {
        if value.is_empty() {
            return;
        }
        let start = self.text.len();
        self.text.push_str(name);
        let middle = self.text.len();
        self.text.push_str(value);
        self.attributes.push(Attribute { start, value: middle, end: self.text.len() });
    }

    /// Returns all values of an attribute.
    pub(super) fn values(&self, name: &str) -> impl DoubleEndedIterator<Item = &str> {
        self.attributes.iter().filter_map(move |attribute| {
            let Attribute { start, value, end } = *attribute;
            self.text[start..value].eq_ignore_ascii_case(name).then(|| &self.text[value..end])
        })
    }

    /// Returns the last value of an attribute.
    pub(super) fn last(&self, name: &str) -> Option<&str> {
        self.values(name).next_back()
    }

    /// Returns whether the address is another text, as of a client whose name was looked up, or of
    /// a line in another format.
    pub(super) fn has_odd_address(&self) -> bool {
        self.last("ip").is_some_and(|ip| address(ip).is_none())
    }

    /// Returns the values of an attribute as one, as HTTP joins them.
    fn joined(&self, name: &str) -> Option<Cow<'_, str>> {
        let mut values = self.values(name);
        let first = values.next()?;
        Some(values.fold(Cow::Borrowed(first), |all, value| Cow::Owned(format!("{all}, {value}"))))
    }

    /// Returns the path with its query, as it is written.
    pub fn target(&self) -> Option<&str> {
        self.split_target().map(|(_, target)| target)
    }

    /// Returns the target, and before it the host that a request to a proxy has.
    fn split_target(&self) -> Option<(Option<&str>, &str)> {
        let target = self.last("target")?;
        let Some((_, rest)) = target.split_once("://").filter(|_| !target.starts_with('/')) else {
            return Some((None, target));
        };
        let (authority, rest) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
        Some((Some(authority), rest))
    }

    fn path(&self) -> Option<&str> {
        let (authority, target) = self.split_target()?;
        let path = target.split(['?', '#']).next()?;
        Some(if path.is_empty() && authority.is_some() { "/" } else { path })
    }

    /// Returns the host. The request line takes precedence over the header, as in the gateway.
    fn host(&self) -> Option<Cow<'_, str>> {
        let authority = self.split_target().and_then(|(authority, _)| authority);
        let host = authority.and_then(|authority| authority.rsplit('@').next());
        host.or_else(|| self.last("host")).map(tidegate::normalize_host)
    }

    /// Calls `read` with the query and cookies of this request.
    fn with_parts<T>(&self, read: impl FnOnce(&RequestParts<'_>) -> T) -> T {
        let mut headers = HeaderMap::new();
        let cookie = self.joined("header.cookie").and_then(|cookie| cookie.parse().ok());
        if let Some(cookie) = cookie {
            headers.insert(http::header::COOKIE, cookie);
        }
        let parts = RequestParts::forwarded(&headers, String::new());
        read(&parts.with_path_and_query(self.target()))
    }
}

impl Attributes for Record {
    fn get(&self, name: &str) -> Option<Cow<'_, str>> {
        match name {
            "method" => self.last(name).map(Cow::Borrowed),
            "path" => self.path().map(Cow::Borrowed),
            "host" => self.host(),
            "status" => self.status.map(|status| Cow::Owned(status.to_string())),
            "bytes" => self.bytes.map(|bytes| Cow::Owned(bytes.to_string())),
            _ => self.joined(name).or_else(|| match name.split_once('.')? {
                ("query" | "cookie", _) => {
                    self.with_parts(|parts| parts.get(name).map(|it| Cow::Owned(it.into_owned())))
                }
                _ => None,
            }),
        }
    }

    fn is_ambiguous(&self, name: &str) -> bool {
        match name.split_once('.') {
            Some(("header", header)) => {
                !header.eq_ignore_ascii_case("cookie") && self.values(name).nth(1).is_some()
            }
            Some(("query" | "cookie", _)) => self.with_parts(|parts| parts.is_ambiguous(name)),
            _ => false,
        }
    }
}

impl TrafficRequest for Record {
    fn time(&self) -> u64 {
        self.time
    }

    fn address(&self) -> Option<Cow<'_, str>> {
        self.last("ip").map(Cow::Borrowed)
    }

    fn forwarded(&self) -> [Option<Cow<'_, str>>; 2] {
        ["header.x-forwarded-for", "header.forwarded"].map(|name| self.joined(name))
    }

    fn cost(&self) -> Option<u64> {
        self.cost
    }

    fn status(&self) -> Option<u16> {
        self.status
    }

    fn line(&self) -> Option<(usize, u64)> {
        Some((self.file, self.line))
    }
}
