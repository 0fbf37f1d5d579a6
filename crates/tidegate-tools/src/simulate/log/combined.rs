//! Lines of nginx's and Apache's combined and common formats.

use std::borrow::Cow;

use tidegate::decode_value;

use super::record::Record;
use super::time;

const NO_TIME: &str = "it has no time in brackets";

/// Reads the fields of
/// `203.0.113.9 - - [16/Nov/2026:07:44:08 +0000] "GET / HTTP/1.1" 200 5 "referer" "agent"`.
/// The common format ends after the size, and further fields after the agent are ignored.
pub(super) fn parse(line: &str, record: &mut Record) -> Result<(), &'static str> {
    let (address, rest) = line.split_once(' ').ok_or("it has no fields")?;
    let (_, rest) = rest.split_once('[').ok_or(NO_TIME)?;
    let (time, rest) = rest.split_once(']').ok_or(NO_TIME)?;
    let time = time::combined(time);
    record.time = time.ok_or("its time is not like 16/Nov/2026:07:44:08 +0000")?;
    let (request, rest) = quoted(rest).ok_or("it has no request in quotes")?;
    let (method, target) = request_line(request).ok_or("its request is not HTTP")?;
    record.push("ip", address);
    record.push("method", method);
    record.push("target", &unescaped(target));
    // The words are the status and the size.
    let (status, rest) = word(rest).unzip();
    record.status = status.and_then(|status| status.parse().ok());
    let rest = rest.and_then(word).map(|(_, rest)| rest);
    let Some((referer, rest)) = rest.and_then(quoted) else { return Ok(()) };
    let agent = quoted(rest).map(|(agent, _)| agent);
    for (name, value) in [("header.referer", Some(referer)), ("header.user-agent", agent)] {
        if let Some(value) = value.filter(|value| *value != "-") {
            record.push(name, &unescaped(value));
        }
    }
    Ok(())
}

/// Splits off a text in quotes after one space. A quote inside it has a backslash.
fn quoted(rest: &str) -> Option<(&str, &str)> {
    let rest = rest.strip_prefix(" \"")?;
    let mut is_escaped = false;
    let end = rest.bytes().position(|byte| {
        let is_end = byte == b'"' && !is_escaped;
        is_escaped = byte == b'\\' && !is_escaped;
        is_end
    })?;
    Some((&rest[..end], &rest[end + 1..]))
}

/// Splits off a word after one space.
fn word(rest: &str) -> Option<(&str, &str)> {
    let word = rest.strip_prefix(' ')?;
    let length = word.find(' ').unwrap_or(word.len());
    (length > 0).then(|| word.split_at(length))
}

/// Returns the method and the target. The target may have spaces, which nginx logs as the client
/// sent them.
fn request_line(request: &str) -> Option<(&str, &str)> {
    let (method, rest) = request.split_once(' ')?;
    let is_token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    let target = match rest.rsplit_once(' ') {
        Some((target, version)) if version.starts_with("HTTP/") => target,
        // HTTP/0.9 has no version.
        _ => rest,
    };
    let is_request = !method.is_empty() && method.bytes().all(is_token) && !target.is_empty();
    is_request.then_some((method, target))
}

/// Decodes `\xNN`, and a backslash before another character.
fn unescaped(escaped: &str) -> Cow<'_, str> {
    if !escaped.contains('\\') {
        return Cow::Borrowed(escaped);
    }
    let mut plain = Vec::with_capacity(escaped.len());
    let mut rest = escaped.as_bytes();
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
    Cow::Owned(decode_value(&plain).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(line: &str) -> Result<[String; 5], &'static str> {
        let mut record = Record::default();
        parse(line, &mut record)?;
        let names = ["ip", "method", "target", "header.referer", "header.user-agent"];
        Ok(names.map(|name| record.last(name).unwrap_or_default().to_owned()))
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
            (r#" "GET / HTTP/1.1" 200 - "-" "-" 12 "x""#, ["GET", "/", "", ""]),
            (r#" "POST /a b HTTP/1.1" 400 5 "-" "-""#, ["POST", "/a b", "", ""]),
            (
                r#" "GET /\"q\" HTTP/1.1" 200 5 "-" "a \"b\" c\\ \xC3\xBC \xff""#,
                ["GET", r#"/"q""#, "", "a \"b\" c\\ \u{1c3}\u{1bc} \u{1ff}"],
            ),
            (r#" "GET /" 200 5 "\xC3\xBC" "-""#, ["GET", "/", "ü", ""]),
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
