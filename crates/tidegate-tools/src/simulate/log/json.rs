//! Lines of JSON: those of Caddy, Traefik, the gateway of Tidegate, and nginx with the names of its
//! variables.

use std::borrow::Cow;
use std::fmt;

use serde::de::{DeserializeSeed, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::record::Record;
use super::time;

#[cfg(test)]
mod fuzz_tests;

/// Prefix of the headers of a request in the log of Traefik.
const TRAEFIK_HEADER: &str = "request_";
/// Value in place of a header that the server did not log: Caddy hides credentials this way, and
/// Traefik can.
const REDACTED: &str = "REDACTED";

const NOT_JSON: &str = "it is not a JSON object";

/// Reads the members of a line that have a use.
pub(super) fn parse(line: &str, record: &mut Record) -> Result<(), &'static str> {
    let mut times = LineTimes::default();
    let mut parser = serde_json::Deserializer::from_str(line);
    let members = MemberVisitor { role: MemberRole::Line, record, times: &mut times };
    parser.deserialize_map(members).and_then(|()| parser.end()).map_err(|_| NOT_JSON)?;
    // The start of the request is preferred to the time of its line.
    let time = times.start.or(times.line).ok_or("it has no time (ts, time or StartUTC)")?;
    let time = match time {
        LineTime::Text(text) => time::any(&text),
        LineTime::Number(number) => time::unix(number),
        LineTime::Other => None,
    };
    record.time = time.ok_or("its time is neither RFC 3339 nor seconds since 1970")?;
    match record.last("method").and(record.last("target")) {
        Some(_) => Ok(()),
        None => Err("it has no method and path of a request"),
    }
}

/// Times of a line.
#[derive(Debug, Default)]
struct LineTimes<'l> {
    start: Option<LineTime<'l>>,
    /// The first of several.
    line: Option<LineTime<'l>>,
}

#[derive(Debug)]
enum LineTime<'l> {
    Text(Cow<'l, str>),
    Number(f64),
    Other,
}

/// Use of a value.
#[derive(Debug, Clone, Copy)]
enum MemberRole<'n> {
    None,
    Line,
    /// Object of Caddy with the fields of the request.
    Request,
    /// Object of Caddy with lists of values.
    Headers,
    Header(&'n str),
    Attribute(&'static str),
    Status,
    StartTime,
    LineTime,
}

impl<'n> MemberRole<'n> {
    /// Returns the role of a member of an object that has this role.
    fn of_member(self, name: &'n str) -> Self {
        match self {
            Self::Line => match name {
                "request" => Self::Request,
                "status" | "DownstreamStatus" => Self::Status,
                "StartUTC" => Self::StartTime,
                "ts" | "time" | "time_iso8601" | "StartLocal" | "@timestamp" => Self::LineTime,
                "ClientHost" | "client" | "remote_addr" => Self::Attribute("ip"),
                "RequestMethod" | "method" | "request_method" => Self::Attribute("method"),
                "RequestPath" | "target" | "request_uri" => Self::Attribute("target"),
                "RequestHost" | "host" | "http_host" => Self::Attribute("host"),
                "referer" | "http_referer" => Self::Attribute("header.referer"),
                "user_agent" | "http_user_agent" => Self::Attribute("header.user-agent"),
                _ => name.strip_prefix(TRAEFIK_HEADER).map_or(Self::None, Self::Header),
            },
            Self::Request => match name {
                "client_ip" => Self::Attribute("ip"),
                "remote_ip" => Self::Attribute("remote_ip"),
                "method" => Self::Attribute("method"),
                "uri" => Self::Attribute("target"),
                "host" => Self::Attribute("host"),
                "headers" => Self::Headers,
                _ => Self::None,
            },
            Self::Headers => Self::Header(name),
            _ => Self::None,
        }
    }
}

/// Name of a member, borrowed unless it has escapes.
#[derive(Deserialize)]
struct MemberName<'l>(#[serde(borrow)] Cow<'l, str>);

/// Value of a member, which is added to the record by its role. A value of an unexpected type is
/// ignored.
struct MemberVisitor<'r, 'n, 'l> {
    role: MemberRole<'n>,
    record: &'r mut Record,
    times: &'r mut LineTimes<'l>,
}

impl<'l> MemberVisitor<'_, '_, 'l> {
    fn set_time(&mut self, time: LineTime<'l>) {
        match self.role {
            MemberRole::StartTime => self.times.start = Some(time),
            MemberRole::LineTime => _ = self.times.line.get_or_insert(time),
            _ => {}
        }
    }

    fn set_text(mut self, text: Cow<'l, str>) {
        match self.role {
            MemberRole::Attribute(name) => self.record.push(name, &text),
            MemberRole::Status => self.record.status = text.parse().ok(),
            MemberRole::Header(name) if text != REDACTED => self.record.push_header(name, &text),
            _ => self.set_time(LineTime::Text(text)),
        }
    }
}

impl<'de> DeserializeSeed<'de> for MemberVisitor<'_, '_, 'de> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        match self.role {
            MemberRole::None => IgnoredAny::deserialize(deserializer).map(|_| ()),
            _ => deserializer.deserialize_any(self),
        }
    }
}

impl<'de> Visitor<'de> for MemberVisitor<'_, '_, 'de> {
    type Value = ();

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("JSON")
    }

    fn visit_str<E>(self, text: &str) -> Result<(), E> {
        self.set_text(Cow::Owned(text.to_owned()));
        Ok(())
    }

    fn visit_borrowed_str<E>(self, text: &'de str) -> Result<(), E> {
        self.set_text(Cow::Borrowed(text));
        Ok(())
    }

    fn visit_f64<E>(mut self, number: f64) -> Result<(), E> {
        self.set_time(LineTime::Number(number));
        Ok(())
    }

    #[expect(clippy::cast_precision_loss, reason = "microseconds fit")]
    fn visit_u64<E>(mut self, number: u64) -> Result<(), E> {
        if matches!(self.role, MemberRole::Status) {
            self.record.status = u16::try_from(number).ok();
        }
        self.set_time(LineTime::Number(number as f64));
        Ok(())
    }

    fn visit_i64<E>(mut self, _: i64) -> Result<(), E> {
        self.set_time(LineTime::Other);
        Ok(())
    }

    fn visit_bool<E>(mut self, _: bool) -> Result<(), E> {
        self.set_time(LineTime::Other);
        Ok(())
    }

    fn visit_unit<E>(mut self) -> Result<(), E> {
        self.set_time(LineTime::Other);
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut list: A) -> Result<(), A::Error> {
        self.set_time(LineTime::Other);
        let is_header = matches!(self.role, MemberRole::Header(_));
        let role = if is_header { self.role } else { MemberRole::None };
        loop {
            let item = MemberVisitor { role, record: self.record, times: self.times };
            if list.next_element_seed(item)?.is_none() {
                return Ok(());
            }
        }
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut object: A) -> Result<(), A::Error> {
        self.set_time(LineTime::Other);
        while let Some(MemberName(name)) = object.next_key()? {
            let role = self.role.of_member(&name);
            object.next_value_seed(MemberVisitor {
                role,
                record: self.record,
                times: self.times,
            })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tidegate::Attributes as _;

    use super::*;

    fn parsed(line: &str) -> Result<Record, &'static str> {
        let mut record = Record::default();
        parse(line, &mut record).map(|()| record)
    }

    #[test]
    fn lines_that_are_no_requests_have_reasons() {
        for (line, reason) in [
            ("", NOT_JSON),
            ("[]", NOT_JSON),
            ("{", NOT_JSON),
            (r#"{"ts": 1"#, NOT_JSON),
            (r#"{"ts": 1} x"#, NOT_JSON),
            (r#"{"ts": }"#, NOT_JSON),
            (r#"{"a": [1}, "b": 2}"#, NOT_JSON),
            (r#"{"msg": "started"}"#, "it has no time"),
            (r#"{"ts": 1, "msg": "started"}"#, "it has no method and path"),
            (r#"{"ts": "noon", "method": "GET", "target": "/"}"#, "its time is neither"),
            (r#"{"ts": true, "method": "GET", "target": "/"}"#, "its time is neither"),
        ] {
            let error = parsed(line).expect_err(line);
            assert!(error.starts_with(reason), "{line}: {error}");
        }
    }

    #[test]
    fn deep_nesting_is_skipped_or_an_error() {
        let nested = |name: &str, depth: usize| {
            let (open, close) = ("[".repeat(depth), "]".repeat(depth));
            format!(r#"{{"ts":1,"method":"GET","target":"/","{name}":{open}{close}}}"#)
        };
        assert!(parsed(&nested("other", 20_000)).is_ok());
        assert!(parsed(&nested("method", 20_000)).is_ok());
        assert_eq!(parsed(&nested("request_X", 20_000)).expect_err("deep"), NOT_JSON);
    }

    #[test]
    fn headers_are_found_in_both_forms() {
        let caddy = r#"{"ts":1,"request":{"method":"GET","uri":"/","headers":
            {"X-Plan":["free","gold"],"User-Agent":["a \"b\""],"Empty":[],
             "Authorization":["REDACTED"]}}}"#;
        let record = parsed(caddy).expect("a request");
        assert_eq!(record.get("header.x-plan").as_deref(), Some("free, gold"));
        assert!(record.is_ambiguous("header.x-plan"));
        assert_eq!(record.get("header.user-agent").as_deref(), Some("a \"b\""));
        for absent in ["header.empty", "header.absent", "header.authorization"] {
            assert_eq!(record.get(absent), None, "{absent}");
        }
        let traefik = r#"{"request_User-Agent":"curl","RequestMethod":"GET","RequestPath":"/",
            "StartUTC":"2026-11-16T07:44:08Z","time":"2026-11-16T08:00:00Z"}"#;
        let record = parsed(traefik).expect("a request");
        assert_eq!(record.time, 1_794_815_048_000_000, "the start of the request");
        assert_eq!(record.get("header.user-agent").as_deref(), Some("curl"));
    }

    proptest! {
        #[test]
        fn no_text_panics(text in any::<String>()) {
            let _ = parsed(&text);
        }
    }
}
