//! [`Record`]: a log line as a request, with the attributes that the gateway would have read.

use std::borrow::Cow;

use http::HeaderMap;
use tidegate::Attributes;
use tidegate::layer::RequestParts;

use crate::simulate::TrafficRequest;

/// Request of a log line. Records are used again, so that most lines need no allocation.
#[derive(Debug, Clone, Default)]
pub struct Record {
    /// Time in microseconds since the Unix epoch.
    pub(super) time: u64,
    pub(super) cost: Option<u64>,
    /// Status of the response.
    pub(super) status: Option<u16>,
    /// Names and values of the attributes, one after the other.
    text: String,
    attributes: Vec<Attribute>,
}

/// Places of an attribute in the text of its record.
#[derive(Debug, Clone)]
struct Attribute {
    start: usize,
    value: usize,
    end: usize,
}

impl Record {
    pub(super) fn clear(&mut self) {
        self.cost = None;
        self.status = None;
        self.text.clear();
        self.attributes.clear();
    }

    /// Returns the number of bytes that the attributes take.
    pub(super) fn len(&self) -> usize {
        self.text.len()
    }

    /// Adds an attribute, `target` (a path and query) or `ip`, unless it is empty.
    pub(super) fn push(&mut self, name: &str, value: &str) {
        if !value.is_empty() {
            self.push_parts("", name, value);
        }
    }

    pub(super) fn push_header(&mut self, name: &str, value: &str) {
        self.push_parts("header.", name, value);
    }

    fn push_parts(&mut self, prefix: &str, name: &str, value: &str) {
        let start = self.text.len();
        self.text.extend([prefix, name]);
        let middle = self.text.len();
        self.text.push_str(value);
        self.attributes.push(Attribute { start, value: middle, end: self.text.len() });
    }

    /// Returns all values of an attribute.
    fn values(&self, name: &str) -> impl DoubleEndedIterator<Item = &str> {
        self.attributes.iter().filter_map(move |attribute| {
            let Attribute { start, value, end } = *attribute;
            self.text[start..value].eq_ignore_ascii_case(name).then(|| &self.text[value..end])
        })
    }

    /// Returns the last value of an attribute.
    pub(super) fn last(&self, name: &str) -> Option<&str> {
        self.values(name).next_back()
    }

    /// Returns the values of an attribute as one, as HTTP joins them.
    fn joined(&self, name: &str) -> Option<Cow<'_, str>> {
        let mut values = self.values(name);
        let first = values.next()?;
        Some(values.fold(Cow::Borrowed(first), |all, value| Cow::Owned(format!("{all}, {value}"))))
    }

    /// Returns the target, and before it the host that a request to a proxy has.
    fn target(&self) -> Option<(Option<&str>, &str)> {
        let target = self.last("target")?;
        let Some((_, rest)) = target.split_once("://").filter(|_| !target.starts_with('/')) else {
            return Some((None, target));
        };
        let (authority, rest) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
        Some((Some(authority), rest))
    }

    fn path(&self) -> Option<&str> {
        let (authority, target) = self.target()?;
        let path = target.split(['?', '#']).next()?;
        Some(if path.is_empty() && authority.is_some() { "/" } else { path })
    }

    /// Returns the host. The request line takes precedence over the header, as in the gateway.
    fn host(&self) -> Option<Cow<'_, str>> {
        let authority = self.target().and_then(|(authority, _)| authority);
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
        let target = self.target().map(|(_, target)| target);
        read(&RequestParts::forwarded(&headers, String::new()).with_path_and_query(target))
    }
}

impl Attributes for Record {
    fn get(&self, name: &str) -> Option<Cow<'_, str>> {
        match name {
            "method" => self.last(name).map(Cow::Borrowed),
            "path" => self.path().map(Cow::Borrowed),
            "host" => self.host(),
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
        // The peer, if the server does not log the client behind it.
        self.last("ip").or_else(|| self.last("remote_ip")).map(Cow::Borrowed)
    }

    fn cost(&self) -> Option<u64> {
        self.cost
    }

    fn status(&self) -> Option<u16> {
        self.status
    }
}
