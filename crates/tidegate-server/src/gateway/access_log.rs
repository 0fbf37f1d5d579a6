//! Access log: one line per request, in the combined format of Apache and nginx or as JSON.
//!
//! Clients choose most of the logged text. All bytes that could end a field or a line are escaped,
//! so that no client can forge lines.

use std::fmt::{Display, Write as _};
use std::io::Write as _;
use std::net::IpAddr;
use std::time::Duration;

use anyhow::Context as _;
use http::{HeaderMap, HeaderValue, Method, Uri, Version, header};
use jiff::Timestamp;
use opentelemetry::trace::TraceId;
use tidegate::{PolicyDecisions, Source};

use crate::config::{AccessLogConfig, AccessLogFormat, LogDestination};
use crate::logs::LogWriter;
use crate::metrics;

/// Maximum number of bytes of a text that the client chooses. Longer ones are cut.
const MAX_FIELD_BYTES: usize = 8 * 1024;
/// Wait for more lines: a write per line would cost more than the line.
const LINGER_TIMEOUT: Duration = Duration::from_millis(20);
/// Time limit for writing the last lines during shutdown.
const STOP_TIMEOUT: Duration = Duration::from_secs(1);
/// Status of a request whose client closed the connection before the response, as in nginx.
pub(super) const CLIENT_CLOSED_REQUEST: u16 = 499;

#[derive(Debug)]
pub(crate) struct AccessLog {
    format: AccessLogFormat,
    /// Whether query strings are logged.
    query: bool,
    writer: LogWriter,
}

/// Logged parts of a request.
#[derive(Debug)]
pub(super) struct RequestFields {
    /// Time of arrival.
    time: Timestamp,
    /// `None` if the peer has no IP address.
    client: Option<IpAddr>,
    method: Method,
    uri: Uri,
    version: Version,
    host: Option<HeaderValue>,
    referer: Option<HeaderValue>,
    user_agent: Option<HeaderValue>,
    trace_id: Option<TraceId>,
}

/// Logged parts of a response.
#[derive(Debug, Default)]
pub(super) struct ResponseFields<'a> {
    pub(super) status: u16,
    /// Bytes of the body.
    pub(super) bytes: u64,
    pub(super) duration: Duration,
    pub(super) upstream: Option<&'a str>,
    pub(super) upstream_status: Option<u16>,
    pub(super) decision: Option<&'a DecisionFields>,
    /// Side that ended the response early.
    pub(super) aborted: Option<&'static str>,
}

/// Logged parts of the policies' decision.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct DecisionFields {
    outcome: &'static str,
    policy: Option<String>,
    source: Option<Source>,
}

impl DecisionFields {
    /// Returns the denial, or a denial in shadow mode, or the most restrictive decision. `None`
    /// means that no decision could be made.
    pub(super) fn new(decisions: Option<&PolicyDecisions<'_>>) -> Self {
        let Some(decisions) = decisions else {
            return Self { outcome: "error", policy: None, source: None };
        };
        let shadow = decisions.iter().find(|entry| entry.is_shadow() && entry.is_denied());
        let (outcome, entry) = match (decisions.denied_by(), shadow) {
            (Some(denial), _) => ("denied", Some(denial)),
            (None, Some(denial)) => ("shadow_denied", Some(denial)),
            (None, None) => ("allowed", decisions.binding()),
        };
        Self {
            outcome,
            policy: entry.map(|entry| entry.policy().to_owned()),
            source: entry.map(|entry| entry.decision().source),
        }
    }
}

impl RequestFields {
    pub(super) fn new<B>(
        request: &http::Request<B>,
        client: Option<IpAddr>,
        trace_id: Option<TraceId>,
    ) -> Self {
        let headers = request.headers();
        Self {
            time: Timestamp::now(),
            client,
            method: request.method().clone(),
            uri: request.uri().clone(),
            version: request.version(),
            host: host(request.uri(), headers),
            referer: headers.get(header::REFERER).cloned(),
            user_agent: headers.get(header::USER_AGENT).cloned(),
            trace_id,
        }
    }

    /// Returns the target of the request line: the path, or the host of a `CONNECT`. The authority
    /// of an absolute URL is left out, because it may contain a password.
    fn target(&self, with_query: bool) -> &str {
        match self.uri.path_and_query() {
            Some(target) if with_query => target.as_str(),
            Some(target) => target.path(),
            None => self.uri.host().unwrap_or("-"),
        }
    }

    fn protocol(&self) -> &'static str {
        match self.version {
            Version::HTTP_10 => "HTTP/1.0",
            Version::HTTP_2 => "HTTP/2.0",
            _ => "HTTP/1.1",
        }
    }
}

/// Returns the host, without a user and password.
fn host(uri: &Uri, headers: &HeaderMap) -> Option<HeaderValue> {
    let host = match uri.authority() {
        Some(authority) => HeaderValue::from_str(authority.as_str()).ok()?,
        None => headers.get(header::HOST)?.clone(),
    };
    match host.as_bytes().iter().rposition(|byte| *byte == b'@') {
        Some(at) => HeaderValue::from_bytes(&host.as_bytes()[at + 1..]).ok(),
        None => Some(host),
    }
}

impl AccessLog {
    pub(super) fn start(config: &AccessLogConfig) -> anyhow::Result<Self> {
        let writer = LogWriter::start("access-log", &config.destination, LINGER_TIMEOUT)
            .with_context(|| {
                let name = match &config.destination {
                    LogDestination::Stdout => "stdout".to_owned(),
                    LogDestination::Stderr => "stderr".to_owned(),
                    LogDestination::File(path) => path.display().to_string(),
                };
                format!("gateway.access_log: cannot open {name}")
            })?;
        Ok(Self { format: config.format, query: config.query, writer })
    }

    /// Opens the file again, after it was moved.
    pub(crate) fn reopen(&self) {
        self.writer.reopen();
    }

    /// Writes the last lines.
    pub(crate) fn stop(&self) {
        self.writer.stop(STOP_TIMEOUT);
    }

    /// Returns whether lines show the decision of the policies.
    pub(super) fn shows_decisions(&self) -> bool {
        self.format == AccessLogFormat::Json
    }

    pub(super) fn log(&self, request: &RequestFields, response: &ResponseFields<'_>) {
        let line = match self.format {
            AccessLogFormat::Combined => combined(request, response, self.query),
            AccessLogFormat::Json => json(request, response, self.query),
        };
        self.writer.send(&line);
    }

    pub(super) fn write_metrics(&self, text: &mut String) {
        let (name, help) =
            ("tidegate_access_log_lines_total", "Lines of the access log, by outcome.");
        metrics::write_labelled(text, (name, "outcome"), help, self.writer.counts());
    }
}

/// Returns a line of the combined format. The remote user is never logged.
fn combined(request: &RequestFields, response: &ResponseFields<'_>, query: bool) -> Vec<u8> {
    let mut line = Vec::with_capacity(512);
    let client = request.client.map_or_else(|| "-".to_owned(), |client| client.to_string());
    let time = request.time.strftime("%d/%b/%Y:%H:%M:%S %z");
    // Writing to a vector never fails.
    let _ = write!(line, "{client} - - [{time}] \"");
    push_escaped(&mut line, request.method.as_str().as_bytes());
    line.push(b' ');
    push_escaped(&mut line, request.target(query).as_bytes());
    let _ = write!(line, " {}\" {} {} \"", request.protocol(), response.status, response.bytes);
    push_escaped(&mut line, referer(request, query).unwrap_or(b"-"));
    line.extend_from_slice(b"\" \"");
    push_escaped(&mut line, bytes(request.user_agent.as_ref()).unwrap_or(b"-"));
    line.extend_from_slice(b"\"\n");
    line
}

fn bytes(value: Option<&HeaderValue>) -> Option<&[u8]> {
    value.map(HeaderValue::as_bytes).filter(|value| !value.is_empty())
}

fn referer(request: &RequestFields, query: bool) -> Option<&[u8]> {
    let referer = bytes(request.referer.as_ref())?;
    if query { Some(referer) } else { referer.split(|byte| *byte == b'?').next() }
}

/// Appends a text as nginx does: quotes, backslashes and all bytes that are not printable ASCII
/// become `\xNN`.
fn push_escaped(line: &mut Vec<u8>, text: &[u8]) {
    for byte in cut(text) {
        match byte {
            b'"' | b'\\' | 0..0x20 | 0x7f.. => {
                let _ = write!(line, "\\x{byte:02X}");
            }
            byte => line.push(*byte),
        }
    }
}

fn cut(text: &[u8]) -> &[u8] {
    &text[..text.len().min(MAX_FIELD_BYTES)]
}

/// Returns a JSON line. Members without a value are left out.
fn json(request: &RequestFields, response: &ResponseFields<'_>, query: bool) -> Vec<u8> {
    let mut object = JsonObject(Vec::with_capacity(768));
    object.display("time", Some(format_args!("{:.3}", request.time)));
    object.display("client", request.client);
    object.text("method", Some(request.method.as_str().as_bytes()));
    object.text("target", Some(request.target(query).as_bytes()));
    object.display("protocol", Some(request.protocol()));
    object.text("host", bytes(request.host.as_ref()));
    object.number("status", Some(response.status));
    object.number("bytes", Some(response.bytes));
    let micros = response.duration.as_micros();
    object.number("duration_ms", Some(format_args!("{}.{:03}", micros / 1_000, micros % 1_000)));
    object.text("referer", referer(request, query));
    object.text("user_agent", bytes(request.user_agent.as_ref()));
    object.text("upstream", response.upstream.map(str::as_bytes));
    object.number("upstream_status", response.upstream_status);
    if let Some(decision) = response.decision {
        object.display("decision", Some(decision.outcome));
        object.text("policy", decision.policy.as_deref().map(str::as_bytes));
        object.display("source", decision.source);
    }
    object.display("trace_id", request.trace_id);
    object.display("aborted", response.aborted);
    let JsonObject(mut line) = object;
    line.extend_from_slice(b"}\n");
    line
}

/// JSON object in progress, without its closing brace. Values that are `None` are left out.
struct JsonObject(Vec<u8>);

impl JsonObject {
    fn number(&mut self, name: &str, number: Option<impl Display>) {
        let Some(number) = number else { return };
        let start = if self.0.is_empty() { '{' } else { ',' };
        let _ = write!(self.0, "{start}\"{name}\":{number}");
    }

    /// Adds a text that needs no escapes.
    fn display(&mut self, name: &str, text: Option<impl Display>) {
        self.number(name, text.map(|text| format!("\"{text}\"")));
    }

    /// Adds a text. Control characters and the line breaks of Unicode are escaped, and bytes that
    /// are not UTF-8 become the text `\xNN`.
    fn text(&mut self, name: &str, text: Option<&[u8]>) {
        let Some(text) = text else { return };
        let mut escaped = String::with_capacity(text.len() + 8);
        for chunk in cut(text).utf8_chunks() {
            for character in chunk.valid().chars() {
                match character {
                    '"' | '\\' => escaped.extend(['\\', character]),
                    '\u{2028}' | '\u{2029}' | '\0'..' ' | '\x7f'..'\u{a0}' => {
                        let _ = write!(escaped, "\\u{:04x}", u32::from(character));
                    }
                    other => escaped.push(other),
                }
            }
            for byte in chunk.invalid() {
                let _ = write!(escaped, "\\\\x{byte:02X}");
            }
        }
        self.display(name, Some(escaped));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fuzz;

    fn request(target: &str, referer: &[u8], user_agent: &[u8]) -> RequestFields {
        let mut request = http::Request::get(target);
        for (name, value) in [("referer", referer), ("user-agent", user_agent)] {
            request = request.header(name, HeaderValue::from_bytes(value).expect("a value"));
        }
        let request = request.header("host", "a.example").body(()).expect("a request");
        let mut fields = RequestFields::new(&request, "203.0.113.9".parse().ok(), None);
        fields.time = Timestamp::from_millisecond(1_767_225_599_007).expect("a time");
        fields
    }

    fn text(line: Vec<u8>) -> String {
        String::from_utf8(line).expect("UTF-8")
    }

    #[test]
    fn lines_have_the_documented_form() {
        let request = request("/a?b=c", b"http://r/?q=secret", b"curl/8");
        let decision = DecisionFields {
            outcome: "denied",
            policy: Some("p".into()),
            source: Some(Source::Store),
        };
        let response = ResponseFields {
            status: 200,
            bytes: 5,
            duration: Duration::from_micros(1_050),
            upstream: Some("http://u"),
            upstream_status: Some(200),
            decision: Some(&decision),
            aborted: Some("client"),
        };
        assert_eq!(
            text(combined(&request, &response, true)),
            "203.0.113.9 - - [31/Dec/2025:23:59:59 +0000] \"GET /a?b=c HTTP/1.1\" 200 5 \
             \"http://r/?q=secret\" \"curl/8\"\n"
        );
        let without_query = text(combined(&request, &response, false));
        assert!(
            without_query.contains("\"GET /a HTTP/1.1\" 200 5 \"http://r/\""),
            "{without_query}"
        );
        assert_eq!(
            text(json(&request, &response, true)),
            "{\"time\":\"2025-12-31T23:59:59.007Z\",\"client\":\"203.0.113.9\",\"method\":\"GET\",\
             \"target\":\"/a?b=c\",\"protocol\":\"HTTP/1.1\",\"host\":\"a.example\",\
             \"status\":200,\"bytes\":5,\"duration_ms\":1.050,\
             \"referer\":\"http://r/?q=secret\",\"user_agent\":\"curl/8\",\
             \"upstream\":\"http://u\",\"upstream_status\":200,\"decision\":\"denied\",\
             \"policy\":\"p\",\"source\":\"store\",\"aborted\":\"client\"}\n"
        );
        assert!(!text(json(&request, &response, false)).contains("secret"));
    }

    #[test]
    fn passwords_of_targets_and_hosts_are_not_logged() {
        let request = request("http://user:secret@host/x", b"r", b"u");
        for line in [
            combined(&request, &ResponseFields::default(), true),
            json(&request, &ResponseFields::default(), true),
        ] {
            assert!(!text(line).contains("secret"));
        }
    }

    /// Reverses [`push_escaped`].
    fn unescaped(line: &[u8]) -> Vec<u8> {
        let mut parts = line.split(|byte| *byte == b'\\');
        let mut bytes = parts.next().unwrap_or_default().to_vec();
        for part in parts {
            let digits = str::from_utf8(&part[1..3]).expect("two digits");
            assert_eq!(part[0], b'x');
            bytes.push(u8::from_str_radix(digits, 16).expect("a byte"));
            bytes.extend_from_slice(&part[3..]);
        }
        bytes
    }

    /// Whatever bytes a client sends, a line is one line with its fields.
    #[test]
    fn fuzz_lines_of_the_access_log_cannot_be_forged() {
        const SEEDS: [&str; 4] =
            ["curl/8", "\" 200 5\n1.1.1.1 - - [", "\\x22\u{2028}", "é\u{85}\0"];
        const PIECES: [&str; 9] =
            ["\"", "\\", "\\x", "\n", "\u{2028}", "\u{2029}", "\u{85}", "a", "\",\"x\":\""];
        fuzz::bytes(&SEEDS, &PIECES, |agent| {
            // A header value has no line breaks, but a future caller may not check that.
            let mut line = Vec::new();
            push_escaped(&mut line, agent);
            assert!(line.iter().all(|byte| (b' '..=b'~').contains(byte) && *byte != b'"'));
            assert_eq!(unescaped(&line), cut(agent));

            let mut object = JsonObject(Vec::new());
            object.text("x", Some(agent));
            object.0.push(b'}');
            let line = String::from_utf8(object.0).expect("UTF-8");
            let breaks_lines = |c: char| c.is_control() || "\u{2028}\u{2029}".contains(c);
            assert!(!line.chars().any(breaks_lines));
            let parsed: serde_json::Value = serde_json::from_str(&line).expect("JSON");
            assert_eq!(parsed.as_object().map(serde_json::Map::len), Some(1));
            if let Ok(valid) = std::str::from_utf8(cut(agent)) {
                assert_eq!(parsed["x"].as_str(), Some(valid));
            }
        });
    }
}
