//! [`LineParts`]: the parts of one line, of which a record is made.

use std::borrow::Cow;
use std::net::SocketAddrV4;

use percent_encoding::percent_decode_str;

use super::address;
use super::field::{Core, Field};
use super::record::Record;
use super::time::TimeParser;

/// Minimum length of a time. A shorter text is a duration, unless there is no other.
pub(super) const MIN_TIME_LENGTH: usize = 10;
/// Value in place of a header that the server did not log: Caddy hides credentials this way, and
/// Traefik can.
const REDACTED: &str = "REDACTED";

/// Reason why a line is not a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LineError {
    /// The line does not have the format of the file.
    Bad(&'static str),
    /// The server logged something that is not HTTP, such as TLS sent to a plain port.
    NotHttp,
    /// The line is a comment, names the columns, or repeats another.
    Comment,
}

/// Parts that a scanner found in a line. Attributes go to the record at once.
#[derive(Debug)]
pub(super) struct LineParts<'l, 'r> {
    core: [Option<(u8, Cow<'l, str>)>; Core::COUNT],
    record: &'r mut Record,
    /// Whether only the time is needed.
    pub(super) only_time: bool,
}

impl<'l, 'r> LineParts<'l, 'r> {
    pub(super) fn new(record: &'r mut Record, only_time: bool) -> Self {
        Self { core: [const { None }; Core::COUNT], record, only_time }
    }

    pub(super) fn into_record(self) -> &'r mut Record {
        self.record
    }

    /// Adds a part. Empty ones and `-` are absent.
    pub(super) fn add(&mut self, field: &Field, value: Cow<'l, str>) {
        let is_absent = value.is_empty() || value == "-";
        match field {
            Field::Skip => {}
            Field::Attribute(_) if is_absent || value == REDACTED || self.only_time => {}
            Field::Attribute(name) if name.ends_with("user-agent") => {
                self.record.push(name, &user_agent(&value));
            }
            Field::Attribute(name) => self.record.push(name, &value),
            Field::Core(core, rank) => {
                // An empty request means that the client did not send one.
                let is_request = matches!(core, Core::Request | Core::Method | Core::Target);
                let is_weak = *core == Core::Time && value.len() < MIN_TIME_LENGTH;
                let rank = rank + if is_weak { 10 } else { 0 };
                let slot = &mut self.core[*core as usize];
                let is_better = slot.as_ref().is_none_or(|(known, _)| rank < *known);
                if is_better && (is_request || !is_absent) {
                    *slot = Some((rank, value));
                }
            }
        }
    }

    pub(super) fn take(&mut self, core: Core) -> Option<Cow<'l, str>> {
        self.core[core as usize].take().map(|(_, value)| value)
    }

    /// Returns the text of the time. Some formats have the date in another column.
    pub(super) fn take_time(&mut self) -> Option<Cow<'l, str>> {
        match (self.take(Core::Date), self.take(Core::Time)) {
            (Some(date), Some(time)) if time.len() <= 15 && time.contains(':') => {
                Some(Cow::Owned(format!("{date} {time}")))
            }
            (date, time) => time.or(date),
        }
    }

    /// Makes the record of the parts. `time` is that of an envelope, and `required` says how many
    /// of a method and a target it must have.
    pub(super) fn finish(
        mut self,
        times: &mut TimeParser,
        time: Option<&str>,
        required: usize,
    ) -> Result<(), LineError> {
        let own_time = self.take_time();
        let text = own_time.as_deref().or(time).ok_or(LineError::Bad("it has no time"))?;
        let is_date = |text: &str| text.len() <= 10 && text.contains(['-', '/']);
        let mut parse = |text: &str| times.parse(text).filter(|_| !is_date(text));
        let time = parse(text).or_else(|| parse(time?));
        self.record.time = time.ok_or(LineError::Bad("its time cannot be read"))?;
        if self.only_time {
            return Ok(());
        }
        // Caddy logs requests that fail twice.
        if self.take(Core::Logger).is_some_and(|name| name.starts_with("http.log.error")) {
            return Err(LineError::Comment);
        }
        self.finish_request(required)?;
        let last_hop = |list: &str| list.rsplit(',').next().and_then(|hop| address(hop.trim()));
        // One address of IPv4 with a port is that of an upstream.
        let is_hops =
            |list: &str| last_hop(list).is_some() && list.parse::<SocketAddrV4>().is_err();
        let forwarded = self.take(Core::Forwarded).filter(|list| is_hops(list));
        let (hops, client) = match self.take(Core::Address) {
            Some(list) if list.contains(',') => (Some(list), None),
            client => (forwarded, client),
        };
        for (name, value) in [
            ("ip", client),
            ("host", self.take(Core::Host)),
            ("remote_user", self.take(Core::User)),
            ("header.x-forwarded-for", hops),
        ] {
            self.record.push(name, value.as_deref().unwrap_or_default());
        }
        self.record.status = self.take(Core::Status).and_then(|status| status.parse().ok());
        self.record.bytes = self.take(Core::Bytes).and_then(|bytes| bytes.parse().ok());
        let cost = self.take(Core::Cost).map(|cost| cost.trim().parse());
        self.record.cost =
            cost.transpose().map_err(|_| LineError::Bad("its cost is not a number"))?;
        Ok(())
    }

    /// Adds the method and the target.
    fn finish_request(&mut self, required: usize) -> Result<(), LineError> {
        let (method, target) = (self.take(Core::Method), self.take(Core::Target));
        let line = self.take(Core::Request);
        let line = line.as_deref();
        let split = line.and_then(request_line);
        // Some formats call the method a request.
        let verb = line.filter(|line| target.is_some() && is_token(line));
        let method = method.as_deref().or(split.map(|(method, _)| method)).or(verb);
        let target = target.as_deref().or(split.map(|(_, target)| target));
        let is_empty = |text: &str| text.is_empty() || text == "-";
        let count = usize::from(method.is_some()) + usize::from(target.is_some());
        if line.is_none() && count < 2 && count >= required {
            self.record.push("method", method.unwrap_or_default());
            self.record.push("target", target.unwrap_or_default());
            return Ok(());
        }
        let (Some(method), Some(target)) = (method, target) else {
            return Err(match line.or(method).or(target) {
                Some(_) if line.is_some() => LineError::NotHttp,
                Some(empty) if is_empty(empty) => LineError::NotHttp,
                _ => LineError::Bad("it has no method and path of a request"),
            });
        };
        if is_empty(target) || !is_token(method) {
            return Err(LineError::NotHttp);
        }
        self.record.push("method", method);
        match self.core[Core::Query as usize].take() {
            Some((_, query)) if !target.contains('?') => {
                let query = query.strip_prefix('?').unwrap_or(&query);
                self.record.push("target", &format!("{target}?{query}"));
            }
            _ => self.record.push("target", target),
        }
        Ok(())
    }
}

/// Decodes a user agent: `CloudFront` encodes blanks, and Akamai slashes, too.
fn user_agent(text: &str) -> Cow<'_, str> {
    if text.contains(' ') || !text.contains("%2") {
        return Cow::Borrowed(text);
    }
    let text = if text.contains("%2F") { text.replace('+', " ") } else { text.to_owned() };
    Cow::Owned(percent_decode_str(&text).decode_utf8_lossy().into_owned())
}

fn is_token(method: &str) -> bool {
    let is_token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    !method.is_empty() && method != "-" && method.bytes().all(is_token)
}

/// Returns whether a text is a version as Hypercorn writes it.
fn is_version(text: &str) -> bool {
    ["1.0", "1.1", "2", "3"].contains(&text)
}

/// Returns the method and the target. The target may have spaces, which nginx logs as the client
/// sent them.
pub(super) fn request_line(request: &str) -> Option<(&str, &str)> {
    let (method, rest) = request.split_once(' ')?;
    let target = match rest.rsplit_once(' ') {
        Some((target, version)) if version.starts_with("HTTP/") || is_version(version) => target,
        // HTTP/0.9 has no version.
        _ => rest,
    };
    (is_token(method) && !target.is_empty()).then_some((method, target))
}
