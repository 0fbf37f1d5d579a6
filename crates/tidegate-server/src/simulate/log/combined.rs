//! Lines of nginx's and Apache's combined and common formats.

use super::record::{Fields, Span};
use super::time::CombinedTime;

/// Finds the fields of
/// `203.0.113.9 - - [16/Nov/2026:07:44:08 +0000] "GET / HTTP/1.1" 200 5 "referer" "agent"`.
/// The common format ends after the size, and further fields after the agent are ignored.
pub(super) fn parse(line: &[u8], times: &mut CombinedTime) -> Result<Fields, &'static str> {
    let address_end = memchr::memchr(b' ', line).ok_or("it has no fields")?;
    let bracket = memchr::memchr(b'[', &line[address_end..]).ok_or("it has no time in brackets")?;
    let time_start = address_end + bracket + 1;
    let time_length =
        memchr::memchr(b']', &line[time_start..]).ok_or("it has no time in brackets")?;
    let time_end = time_start + time_length;
    let time = times.parse(&line[time_start..time_end]);
    let time = time.ok_or("its time is not like 16/Nov/2026:07:44:08 +0000")?;
    let mut rest = Rest { line, at: time_end + 1 };
    let request = rest.quoted().ok_or("it has no request in quotes")?;
    let (method, target) = request_line(line, request).ok_or("its request is not HTTP")?;
    let mut fields = Fields {
        time,
        address: Span::new(0..address_end),
        method: Span::new(method),
        target: Span::new(target),
        ..Fields::default()
    };
    // Status and size.
    if rest.skip_word()
        && rest.skip_word()
        && let Some(referer) = rest.quoted()
    {
        fields.referer = Span::new(referer);
        fields.user_agent = rest.quoted().map(Span::new).unwrap_or_default();
    }
    Ok(fields)
}

/// Unread part of a line.
struct Rest<'l> {
    line: &'l [u8],
    at: usize,
}

impl Rest<'_> {
    /// Returns the place of a text in quotes after one space. A quote inside it has a backslash.
    fn quoted(&mut self) -> Option<std::ops::Range<usize>> {
        if !self.line.get(self.at..)?.starts_with(b" \"") {
            return None;
        }
        let start = self.at + 2;
        let mut at = start;
        loop {
            at += memchr::memchr2(b'"', b'\\', self.line.get(at..)?)?;
            if self.line[at] == b'"' {
                self.at = at + 1;
                return Some(start..at);
            }
            at += 2;
        }
    }

    /// Skips a space and a word.
    fn skip_word(&mut self) -> bool {
        let rest = self.line.get(self.at..).unwrap_or_default();
        let Some((b' ', word)) = rest.split_first() else { return false };
        let length = memchr::memchr(b' ', word).unwrap_or(word.len());
        self.at += 1 + length;
        length > 0
    }
}

/// Returns the places of the method and the target. The target may have spaces, which nginx logs as
/// the client sent them.
fn request_line(
    line: &[u8],
    request: std::ops::Range<usize>,
) -> Option<(std::ops::Range<usize>, std::ops::Range<usize>)> {
    let text = &line[request.clone()];
    let method = memchr::memchr(b' ', text)?;
    let is_method = method > 0 && text[..method].iter().all(|byte| is_token(*byte));
    let rest = &text[method + 1..];
    let end = match memchr::memrchr(b' ', rest) {
        Some(space) if rest[space + 1..].starts_with(b"HTTP/") => space,
        // HTTP/0.9 has no version.
        _ => rest.len(),
    };
    let start = request.start + method + 1;
    (is_method && end > 0).then(|| (request.start..request.start + method, start..start + end))
}

fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(line: &str) -> Result<[String; 5], &'static str> {
        let fields = parse(line.as_bytes(), &mut CombinedTime::default())?;
        let Fields { address, method, target, referer, user_agent, .. } = fields;
        let text = |span: Span| String::from_utf8_lossy(span.of(line.as_bytes())).into_owned();
        Ok([address, method, target, referer, user_agent].map(text))
    }

    #[test]
    fn fields_are_found_in_variants_of_the_format() {
        let start = "203.0.113.9 - ann [16/Nov/2026:07:44:08 +0000]";
        for (rest, expected) in [
            (
                r#" "GET /a?b=1 HTTP/1.1" 200 5 "http://x/" "curl/8""#,
                ["GET", "/a?b=1", "http://x/", "curl/8"],
            ),
            (r#" "GET / HTTP/1.1" 200 5"#, ["GET", "/", "", ""]),
            (r#" "GET / HTTP/1.1" 200 - "-" "-" 12 "x""#, ["GET", "/", "-", "-"]),
            (r#" "POST /a b HTTP/1.1" 400 5 "-" "-""#, ["POST", "/a b", "-", "-"]),
            (
                r#" "GET /\"q\" HTTP/1.1" 200 5 "-" "a \"b\" c\\""#,
                ["GET", r#"/\"q\""#, "-", r#"a \"b\" c\\"#],
            ),
            (r#" "GET /" 200 5 "-" "-""#, ["GET", "/", "-", "-"]),
        ] {
            let found = fields(&format!("{start}{rest}")).expect("a request");
            assert_eq!(found[0], "203.0.113.9");
            assert_eq!(found[1..], expected, "{rest}");
        }
    }

    #[test]
    fn lines_that_are_no_requests_have_reasons() {
        let time = "1.2.3.4 - - [16/Nov/2026:07:44:08 +0000]";
        for (line, reason) in [
            (String::new(), "it has no fields"),
            ("hello world".to_owned(), "it has no time in brackets"),
            ("1.2.3.4 - - [16/Nov/2026:07:44:08 +0000".to_owned(), "it has no time in brackets"),
            ("1.2.3.4 - - [yesterday] \"GET / HTTP/1.1\"".to_owned(), "its time is not like"),
            (time.to_owned(), "it has no request in quotes"),
            (format!("{time} \"GET / HTT"), "it has no request in quotes"),
            (format!("{time} \"GET / HTTP/1.1\\"), "it has no request in quotes"),
            (format!("{time} \"-\" 400 0 \"-\" \"-\""), "its request is not HTTP"),
            (format!(r#"{time} "\x16\x03\x01 x" 400 0 "-" "-""#), "its request is not HTTP"),
        ] {
            let error = fields(&line).expect_err(&line);
            assert!(error.starts_with(reason), "{line}: {error}");
        }
    }
}
