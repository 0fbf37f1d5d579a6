//! [`LineParts`]: the parts of one line, of which a record is made.

use std::borrow::Cow;

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
    /// The line is a comment or names the columns.
    Comment,
}

/// Parts that a scanner found in a line. Attributes go to the record at once.
#[derive(Debug)]
pub(super) struct LineParts<'l, 'r> {
    core: [Option<(u8, Cow<'l, str>)>; Core::COUNT],
    record: &'r mut Record,
    /// Whether only the time is needed.
    pub(super) only_time: bool,
    /// Whether a line without a method or a path is not a request.
    pub(super) needs_request: bool,
}

impl<'l, 'r> LineParts<'l, 'r> {
    pub(super) fn new(record: &'r mut Record, only_time: bool) -> Self {
        Self { core: [const { None }; Core::COUNT], record, only_time, needs_request: true }
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
            Field::Attribute(name) => self.record.push(name, &value),
            Field::Core(core, rank) => {
                // An empty request tells that the client did not send one.
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

    /// Makes the record of the parts. `time` is that of an envelope.
    pub(super) fn finish(
        mut self,
        times: &mut TimeParser,
        time: Option<&str>,
    ) -> Result<(), LineError> {
        let own_time = self.take_time();
        let text = own_time.as_deref().or(time).ok_or(LineError::Bad("it has no time"))?;
        let time = times.parse(text).or_else(|| times.parse(time?));
        self.record.time = time.ok_or(LineError::Bad("its time cannot be read"))?;
        if self.only_time {
            return Ok(());
        }
        self.finish_request()?;
        let address = self.take(Core::Address);
        let host = self.take(Core::Host);
        if let Some(address) = address {
            self.record.push("ip", &address);
        }
        if let Some(host) = host {
            self.record.push("host", &host);
        }
        if let Some(user) = self.take(Core::User) {
            self.record.push("remote_user", &user);
        }
        let forwarded = self.take(Core::Forwarded);
        let last_hop = |list: &&str| {
            list.rsplit(',').next().and_then(|hop| super::address(hop.trim())).is_some()
        };
        if let Some(list) = forwarded.as_deref().filter(last_hop) {
            self.record.push("header.x-forwarded-for", list);
        }
        self.record.status = self.take(Core::Status).and_then(|status| status.parse().ok());
        self.record.bytes = self.take(Core::Bytes).and_then(|bytes| bytes.parse().ok());
        let cost = self.take(Core::Cost).map(|cost| cost.trim().parse());
        self.record.cost =
            cost.transpose().map_err(|_| LineError::Bad("its cost is not a number"))?;
        Ok(())
    }

    /// Adds the method and the target.
    fn finish_request(&mut self) -> Result<(), LineError> {
        let (method, target) = (self.take(Core::Method), self.take(Core::Target));
        let line = self.take(Core::Request);
        let line = line.as_deref();
        let split = line.and_then(request_line);
        let method = method.as_deref().or(split.map(|(method, _)| method));
        let target = target.as_deref().or(split.map(|(_, target)| target));
        let is_empty = |text: &str| text.is_empty() || text == "-";
        if !self.needs_request && line.is_none() && (method.is_none() || target.is_none()) {
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

fn is_token(method: &str) -> bool {
    let is_token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    !method.is_empty() && method != "-" && method.bytes().all(is_token)
}

/// Returns the method and the target. The target may have spaces, which nginx logs as the client
/// sent them.
pub(super) fn request_line(request: &str) -> Option<(&str, &str)> {
    let (method, rest) = request.split_once(' ')?;
    let target = match rest.rsplit_once(' ') {
        Some((target, version)) if version.starts_with("HTTP/") => target,
        // HTTP/0.9 has no version.
        _ => rest,
    };
    (is_token(method) && !target.is_empty()).then_some((method, target))
}
