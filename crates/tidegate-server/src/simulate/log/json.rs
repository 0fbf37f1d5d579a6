//! Lines of JSON: those of Caddy, Traefik, the gateway of Tidegate, and nginx with the names of its
//! variables.
//!
//! A line is scanned once for the places of a few members. Nothing is decoded unless a policy needs
//! it.

use std::borrow::Cow;

use super::record::{Fields, Span};
use super::time;

/// Prefix of the headers of a request in the log of Traefik.
const TRAEFIK_HEADER: &[u8] = b"request_";
/// Maximum depth of objects and lists.
const MAX_DEPTH: usize = 32;

/// Length of a string up to which it is read byte by byte.
const SHORT_BYTES: usize = 24;

const NOT_JSON: &str = "it is not a JSON object";

/// Value of a member.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Value {
    /// Text between the quotes.
    Text(Span),
    /// Number, true, false or null.
    Literal(Span),
    Object(Span),
    List(Span),
}

impl Value {
    fn text(self) -> Span {
        match self {
            Self::Text(span) => span,
            _ => Span::default(),
        }
    }

    fn object(self) -> Span {
        match self {
            Self::Object(span) => span,
            _ => Span::default(),
        }
    }
}

/// Finds the fields of a line.
pub(super) fn parse(line: &[u8]) -> Result<Fields, &'static str> {
    let mut fields = Fields::default();
    let mut time = None;
    let (mut client, mut remote) = (Span::default(), Span::default());
    let mut scanner = Scanner { bytes: line, at: 0 };
    scanner.members(|scanner, name| {
        if name == b"request" && scanner.peek() == Some(b'{') {
            return scanner.members(|scanner, name| {
                let value = scanner.value()?;
                match name {
                    b"client_ip" => client = value.text(),
                    b"remote_ip" => remote = value.text(),
                    b"method" => fields.method = value.text(),
                    b"uri" => fields.target = value.text(),
                    b"host" => fields.host = value.text(),
                    b"headers" => fields.headers = value.object(),
                    _ => {}
                }
                Ok(())
            });
        }
        let value = scanner.value()?;
        match name {
            // The start of the request is preferred to the time of its line.
            b"StartUTC" => time = Some(value),
            b"ts" | b"time" | b"time_iso8601" | b"StartLocal" | b"@timestamp" => {
                time = time.or(Some(value));
            }
            b"ClientHost" | b"client" | b"remote_addr" => remote = value.text(),
            b"RequestMethod" | b"method" | b"request_method" => fields.method = value.text(),
            b"RequestPath" | b"target" | b"request_uri" => fields.target = value.text(),
            b"RequestHost" | b"host" | b"http_host" => fields.host = value.text(),
            b"referer" | b"http_referer" => fields.referer = value.text(),
            b"user_agent" | b"http_user_agent" => fields.user_agent = value.text(),
            _ => {}
        }
        Ok(())
    })?;
    scanner.end()?;
    fields.address = if client == Span::default() { remote } else { client };
    fields.time = match time.ok_or("it has no time (ts, time or StartUTC)")? {
        Value::Text(span) => time::any(span.of(line)),
        Value::Literal(span) => time::unix(span.of(line)),
        _ => None,
    }
    .ok_or("its time is neither RFC 3339 nor seconds since 1970")?;
    if fields.method == Span::default() || fields.target == Span::default() {
        return Err("it has no method and path of a request");
    }
    Ok(fields)
}

/// Values of a header.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct HeaderValues<'l>(Vec<Cow<'l, str>>);

impl<'l> HeaderValues<'l> {
    /// Returns the values as one, as HTTP joins them.
    pub(super) fn joined(mut self) -> Option<Cow<'l, str>> {
        match self.0.len() {
            0 => None,
            1 => self.0.pop(),
            _ => Some(Cow::Owned(self.0.join(", "))),
        }
    }

    pub(super) fn is_repeated(&self) -> bool {
        self.0.len() > 1
    }
}

/// Finds a header in the object of Caddy, or in the members of Traefik.
pub(super) fn header<'l>(line: &'l [u8], headers: Span, name: &str) -> HeaderValues<'l> {
    let mut values = HeaderValues::default();
    let is_caddy = headers != Span::default();
    let range = if is_caddy { headers.range() } else { 0..line.len() };
    let mut scanner = Scanner { bytes: &line[..range.end], at: range.start };
    // The line was scanned before, so this has no error.
    let _ = scanner.members(|scanner, member| {
        let value = scanner.value()?;
        let member = if is_caddy { Some(member) } else { member.strip_prefix(TRAEFIK_HEADER) };
        if !member.is_some_and(|member| member.eq_ignore_ascii_case(name.as_bytes())) {
            return Ok(());
        }
        match value {
            Value::Text(span) => values.0.push(unescaped(span.of(line))),
            Value::List(span) => {
                let mut list = Scanner { bytes: &line[..span.range().end], at: span.range().start };
                list.items(|item| {
                    if let Value::Text(span) = item {
                        values.0.push(unescaped(span.of(line)));
                    }
                })?;
            }
            _ => {}
        }
        Ok(())
    });
    values
}

/// Returns the text of a string, given without its quotes.
pub(super) fn unescaped(inner: &[u8]) -> Cow<'_, str> {
    match str::from_utf8(inner) {
        Ok(text) if !text.contains('\\') => Cow::Borrowed(text),
        _ => {
            let quoted = [b"\"", inner, b"\""].concat();
            let decoded = serde_json::from_slice::<String>(&quoted);
            Cow::Owned(decoded.unwrap_or_else(|_| String::from_utf8_lossy(inner).into_owned()))
        }
    }
}

struct Scanner<'l> {
    bytes: &'l [u8],
    at: usize,
}

impl<'l> Scanner<'l> {
    /// Calls `on_member` with the name of each member of the object that starts here. It reads the
    /// value.
    fn members(
        &mut self,
        mut on_member: impl FnMut(&mut Self, &'l [u8]) -> Result<(), &'static str>,
    ) -> Result<(), &'static str> {
        self.expect(b'{')?;
        if self.peek() == Some(b'}') {
            self.at += 1;
            return Ok(());
        }
        loop {
            self.skip_spaces();
            let name = self.string()?;
            self.expect(b':')?;
            on_member(self, name.of(self.bytes))?;
            if !self.has_next(b'}')? {
                return Ok(());
            }
        }
    }

    /// Calls `on_item` with each value of the list that starts here.
    fn items(&mut self, mut on_item: impl FnMut(Value)) -> Result<(), &'static str> {
        self.expect(b'[')?;
        if self.peek() == Some(b']') {
            self.at += 1;
            return Ok(());
        }
        loop {
            let value = self.value()?;
            on_item(value);
            if !self.has_next(b']')? {
                return Ok(());
            }
        }
    }

    fn value(&mut self) -> Result<Value, &'static str> {
        let first = self.peek().ok_or(NOT_JSON)?;
        let start = self.at;
        match first {
            b'"' => self.string().map(Value::Text),
            b'{' | b'[' => {
                self.skip_nested()?;
                let span = Span::new(start..self.at);
                Ok(if first == b'{' { Value::Object(span) } else { Value::List(span) })
            }
            _ => {
                let is_literal = |byte: &u8| byte.is_ascii_alphanumeric() || b"+-.".contains(byte);
                self.at += self.bytes[start..].iter().take_while(|byte| is_literal(byte)).count();
                if self.at == start {
                    return Err(NOT_JSON);
                }
                Ok(Value::Literal(Span::new(start..self.at)))
            }
        }
    }

    /// Skips an object or list, with all that it contains.
    fn skip_nested(&mut self) -> Result<(), &'static str> {
        let mut closing = [0_u8; MAX_DEPTH];
        let mut depth = 0;
        loop {
            match self.bytes.get(self.at).ok_or(NOT_JSON)? {
                b'"' => {
                    self.string()?;
                    continue;
                }
                open @ (b'{' | b'[') => {
                    *closing.get_mut(depth).ok_or("its JSON is nested too deep")? =
                        if *open == b'{' { b'}' } else { b']' };
                    depth += 1;
                }
                close @ (b'}' | b']') => {
                    depth -= 1;
                    if closing[depth] != *close {
                        return Err(NOT_JSON);
                    }
                    if depth == 0 {
                        self.at += 1;
                        return Ok(());
                    }
                }
                _ => {}
            }
            self.at += 1;
        }
    }

    /// Reads a string, and returns the place of its text.
    fn string(&mut self) -> Result<Span, &'static str> {
        if self.bytes.get(self.at) != Some(&b'"') {
            return Err(NOT_JSON);
        }
        let start = self.at + 1;
        let mut at = start;
        loop {
            match self.bytes.get(at).ok_or(NOT_JSON)? {
                b'"' => {
                    self.at = at + 1;
                    return Ok(Span::new(start..at));
                }
                b'\\' => at += 2,
                // A search costs more than it saves for a short name.
                _ if at - start < SHORT_BYTES => at += 1,
                _ => at += memchr::memchr2(b'"', b'\\', &self.bytes[at..]).ok_or(NOT_JSON)?,
            }
        }
    }

    /// Reads a comma, or the end of the object or list.
    fn has_next(&mut self, end: u8) -> Result<bool, &'static str> {
        let byte = self.peek().ok_or(NOT_JSON)?;
        self.at += 1;
        match byte {
            b',' => Ok(true),
            byte if byte == end => Ok(false),
            _ => Err(NOT_JSON),
        }
    }

    fn expect(&mut self, byte: u8) -> Result<(), &'static str> {
        if self.peek() != Some(byte) {
            return Err(NOT_JSON);
        }
        self.at += 1;
        Ok(())
    }

    fn end(&mut self) -> Result<(), &'static str> {
        if self.peek().is_some() { Err(NOT_JSON) } else { Ok(()) }
    }

    /// Returns the next byte after spaces.
    fn peek(&mut self) -> Option<u8> {
        self.skip_spaces();
        self.bytes.get(self.at).copied()
    }

    fn skip_spaces(&mut self) {
        while self.bytes.get(self.at).is_some_and(|byte| b" \t\r\n".contains(byte)) {
            self.at += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

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
            let error = parse(line.as_bytes()).expect_err(line);
            assert!(error.starts_with(reason), "{line}: {error}");
        }
        let deep = format!("{{\"a\": {}", "[".repeat(1_000));
        assert_eq!(parse(deep.as_bytes()).expect_err("deep"), "its JSON is nested too deep");
    }

    #[test]
    fn headers_are_found_in_both_forms() {
        let caddy = br#"{"ts":1,"request":{"method":"GET","uri":"/","headers":
            {"X-Plan":["free","gold"],"User-Agent":["a \"b\""],"Empty":[]}}}"#;
        let fields = parse(caddy).expect("a request");
        let get = |name: &str| header(caddy, fields.headers, name);
        assert_eq!(get("x-plan").joined().as_deref(), Some("free, gold"));
        assert!(get("x-plan").is_repeated());
        assert_eq!(get("user-agent").joined().as_deref(), Some("a \"b\""));
        assert_eq!(get("empty").joined(), None);
        assert_eq!(get("absent").joined(), None);
        let traefik = br#"{"request_User-Agent":"curl","RequestMethod":"GET","RequestPath":"/",
            "StartUTC":"2026-11-16T07:44:08Z","time":"2026-11-16T08:00:00Z"}"#;
        let fields = parse(traefik).expect("a request");
        assert_eq!(fields.time, 1_794_815_048_000_000, "the start of the request");
        let agent = header(traefik, fields.headers, "user-agent").joined();
        assert_eq!(agent.as_deref(), Some("curl"));
    }

    proptest! {
        /// The scanner accepts what a full parser accepts.
        #[test]
        fn scanner_accepts_all_objects(
            text in r#"\{("[a-z\\"{}\[\]]{0,6}":|"ts":|1|-2\.5|null|\{|\}|\[|\]|,| |"x"){0,12}\}"#,
        ) {
            let full = serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(&text);
            let mut scanner = Scanner { bytes: text.as_bytes(), at: 0 };
            let mut count = 0;
            let result = scanner.members(|scanner, _| {
                count += 1;
                scanner.value().map(|_| ())
            });
            let result = result.and_then(|()| scanner.end());
            if let Ok(object) = full {
                prop_assert!(result.is_ok(), "{text}");
                prop_assert!(count >= object.len());
            }
        }

        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            let _ = parse(&bytes);
            let _ = header(&bytes, Span::default(), "x");
        }
    }
}
