//! Normal form of the values that requests count by: another spelling of the same value must not
//! be another key.

use std::borrow::Cow;

use super::KeySource;
use super::key_source::SourceKind;
use super::path::normalize_host;

/// Start of a cookie that Express parses as JSON, so that `j:"X"` is `X`.
const JSON_COOKIE: &str = "j:";

/// Authentication schemes in their usual spelling. Their names are case-insensitive (RFC 9110,
/// 11.1).
const SCHEMES: [&str; 6] = ["Bearer", "Basic", "Digest", "Negotiate", "DPoP", "Token"];

impl KeySource {
    /// Returns the normal form of a value of this attribute. A path is normalized before.
    pub(super) fn normalize<'v>(&self, value: Cow<'v, str>) -> Cow<'v, str> {
        let normalize: fn(&str) -> Cow<'_, str> = match self.kind() {
            SourceKind::Host => normalize_host,
            SourceKind::Method => method,
            SourceKind::Authorization => credentials,
            SourceKind::Header | SourceKind::Query => |value| Cow::Borrowed(trimmed(value)),
            SourceKind::Cookie => cookie_value,
            SourceKind::Ip | SourceKind::Path | SourceKind::Other => return value,
        };
        match value {
            Cow::Borrowed(value) => normalize(value),
            Cow::Owned(value) => match normalize(&value) {
                Cow::Borrowed(same) if same.len() == value.len() => Cow::Owned(value),
                normal => Cow::Owned(normal.into_owned()),
            },
        }
    }

    /// Returns whether servers read this value, which is in its normal form, differently.
    pub(super) fn is_ambiguous_value(&self, value: &str) -> bool {
        match self.kind() {
            SourceKind::Authorization => is_odd_base64(value),
            SourceKind::Cookie => value.starts_with(JSON_COOKIE),
            _ => false,
        }
    }
}

/// Decodes the value of a header, a cookie or a parameter, as attributes of a request have it: as
/// UTF-8. If the bytes are not, each byte beyond ASCII becomes the character U+0100 +
/// byte: different values stay different, and none becomes a control character, which no key may
/// have. The two spaces of Latin-1 stay spaces, because frameworks trim them.
#[must_use]
pub fn decode_value(bytes: &[u8]) -> Cow<'_, str> {
    let character = |byte: &u8| match byte {
        0x00..=0x7f => char::from(*byte),
        0x85 => '\u{2028}',
        0xa0 => '\u{a0}',
        _ => char::from_u32(0x100 + u32::from(*byte)).unwrap_or(char::REPLACEMENT_CHARACTER),
    };
    match str::from_utf8(bytes) {
        Ok(text) => Cow::Borrowed(text),
        Err(_) => Cow::Owned(bytes.iter().map(character).collect()),
    }
}

/// Returns a value without the spaces around it. HTTP/1.1 removes some, and frameworks also those
/// beyond ASCII: Django reads the value as UTF-8, `FastAPI` as Latin-1.
pub(crate) fn trimmed(value: &str) -> &str {
    value.trim()
}

/// Returns a method in upper case: Django and Flask read `get` as `GET`.
fn method(value: &str) -> Cow<'_, str> {
    if value.bytes().any(|byte| byte.is_ascii_lowercase()) {
        Cow::Owned(value.to_ascii_uppercase())
    } else {
        Cow::Borrowed(value)
    }
}

/// Splits credentials into their scheme and the rest, at the first spaces.
fn scheme_and_rest(value: &str) -> Option<(&str, &str)> {
    let (scheme, rest) = trimmed(value).split_once(char::is_whitespace)?;
    Some((scheme, trimmed(rest)))
}

/// Returns credentials with the usual spelling of their scheme and one space: servers accept
/// `bearer  X` for `Bearer X`.
fn credentials(value: &str) -> Cow<'_, str> {
    let value = trimmed(value);
    let Some((scheme, rest)) = scheme_and_rest(value) else { return Cow::Borrowed(value) };
    let known = SCHEMES.iter().find(|known| scheme.eq_ignore_ascii_case(known));
    let scheme_is_usual = match known {
        Some(known) => scheme == *known,
        None => !scheme.bytes().any(|byte| byte.is_ascii_uppercase()),
    };
    let has_one_space = value[scheme.len()..].strip_prefix(' ') == Some(rest);
    if scheme_is_usual && has_one_space {
        return Cow::Borrowed(value);
    }
    let scheme = known.map_or_else(|| scheme.to_ascii_lowercase(), |known| (*known).to_owned());
    Cow::Owned(format!("{scheme} {rest}"))
}

/// Returns whether these are `Basic` credentials that are not written as the standard says. Servers
/// ignore other characters, padding and unused bits, each in its own way.
fn is_odd_base64(value: &str) -> bool {
    let Some((scheme, text)) = scheme_and_rest(value) else { return false };
    if !scheme.eq_ignore_ascii_case("Basic") {
        return false;
    }
    let digits = text.strip_suffix("==").or_else(|| text.strip_suffix('=')).unwrap_or(text);
    let is_digit = |byte: u8| byte.is_ascii_alphanumeric() || b"+/".contains(&byte);
    // A last digit without unused bits that are set.
    let last_digits: &[u8] = match text.len() - digits.len() {
        0 => return !text.len().is_multiple_of(4) || !digits.bytes().all(is_digit),
        1 => b"AEIMQUYcgkosw048",
        _ => b"AQgw",
    };
    !text.len().is_multiple_of(4)
        || !digits.bytes().all(is_digit)
        || !digits.bytes().last().is_some_and(|last| last_digits.contains(&last))
}

/// Returns the value of a cookie as frameworks read it: without spaces and quotes around it, and
/// with its escapes decoded. Some frameworks do not decode, so for them two values may share a
/// count; the other way round, one value would have several counts.
fn cookie_value(value: &str) -> Cow<'_, str> {
    let value = trimmed(value);
    let quoted = value.strip_prefix('"').and_then(|rest| rest.strip_suffix('"'));
    let has_backslashes = quoted.is_some_and(|inner| inner.contains('\\'));
    let inner = quoted.unwrap_or(value);
    if !has_backslashes && !inner.contains('%') {
        return Cow::Borrowed(inner);
    }
    let bytes = if has_backslashes { without_backslashes(inner) } else { inner.into() };
    Cow::Owned(decode_value(&percent_decoded(bytes)).into_owned())
}

/// Decodes the escapes of a quoted value: `\130` and `\X`.
fn without_backslashes(quoted: &str) -> Vec<u8> {
    let mut decoded = Vec::with_capacity(quoted.len());
    let mut rest = quoted.as_bytes();
    while let [first, after @ ..] = rest {
        let (byte, used) = match (first, after) {
            (b'\\', [a, b, c, ..]) if digits(8, &[*a, *b, *c]).is_some() => {
                (digits(8, &[*a, *b, *c]).unwrap_or(*first), 3)
            }
            (b'\\', [escaped, ..]) => (*escaped, 1),
            _ => (*first, 0),
        };
        decoded.push(byte);
        rest = &after[used..];
    }
    decoded
}

/// Decodes percent codes until none is left. Some frameworks decode once, some not at all, and some
/// only if all codes are valid; what each of them reads has the same final form.
fn percent_decoded(mut bytes: Vec<u8>) -> Vec<u8> {
    // Number of decoded bytes, at the start of the list.
    let mut decoded = 0;
    for at in 0..bytes.len() {
        bytes[decoded] = bytes[at];
        decoded += 1;
        // A decoded byte may complete another code.
        while let [.., b'%', high, low] = bytes[..decoded]
            && let Some(code) = digits(16, &[high, low])
        {
            decoded -= 2;
            bytes[decoded - 1] = code;
        }
    }
    bytes.truncate(decoded);
    bytes
}

/// Returns the byte that these digits stand for.
fn digits(radix: u32, digits: &[u8]) -> Option<u8> {
    let digits = digits.iter().map(|digit| char::from(*digit).to_digit(radix));
    let value = digits.reduce(|value, digit| Some(value? * radix + digit?))??;
    u8::try_from(value).ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn normal(attribute: &str, value: &str) -> String {
        let source: KeySource = attribute.parse().expect("an attribute");
        source.normalize(Cow::Borrowed(value)).into_owned()
    }

    /// Decodes the percent codes of a value once, if all are ASCII.
    fn form_decoded_once(value: &str) -> String {
        let mut decoded = String::new();
        let mut rest = value;
        while let Some(at) = rest.find('%') {
            let code = rest.get(at + 1..at + 3).map(str::as_bytes);
            let byte = code.and_then(|code| digits(16, code)).filter(u8::is_ascii);
            decoded.push_str(&rest[..at]);
            decoded.push(byte.map_or('%', char::from));
            rest = &rest[at + if byte.is_some() { 3 } else { 1 }..];
        }
        decoded + rest
    }

    #[test]
    fn spellings_of_a_value_have_one_normal_form() {
        for (attribute, value, expected) in [
            ("header.x-user-id", " ann\t", "ann"),
            ("header.x-user-id", "ann lee", "ann lee"),
            ("header.authorization", "Bearer X", "Bearer X"),
            ("header.authorization", "bearer X", "Bearer X"),
            ("header.authorization", "BEARER \t X ", "Bearer X"),
            ("header.authorization", "AWS4 a  b", "aws4 a  b"),
            ("header.authorization", "X", "X"),
            ("header.authorization", "Bearer\u{2028}X\u{a0}", "Bearer X"),
            ("cookie.session", "X", "X"),
            ("cookie.session", " \"X\" ", "X"),
            ("cookie.session", "\"a\\\"b\\130\"", "a\"bX"),
            ("cookie.session", "X\u{a0}", "X"),
            ("cookie.session", "\u{2003}X\u{a0}", "X"),
            ("cookie.session", "\"\\045\\065\\070\"", "X"),
            ("cookie.session", "%58%2", "X%2"),
            ("cookie.session", "%2558%25zz", "X%zz"),
            ("cookie.session", "%5%38", "X"),
            ("cookie.session", "%58%FF", "Xǿ"),
            ("cookie.session", "\"a\\04541\"", "aA"),
            ("cookie.session", "a\\b", "a\\b"),
            ("cookie.session", "\"", "\""),
            ("host", "API.example:80", "api.example"),
            ("host", "api.example:80.", "api.example"),
            ("query.q", " a ", "a"),
            ("header.x-user-id", "phƠ", "phƠ"),
            ("header.x-user-id", "phƅ ", "phƅ"),
        ] {
            assert_eq!(normal(attribute, value), expected, "{attribute} {value}");
        }
    }

    #[test]
    fn values_that_servers_read_differently_are_ambiguous() {
        let ambiguous = |attribute: &str, value: &str| {
            let source: KeySource = attribute.parse().expect("an attribute");
            source.is_ambiguous_value(&source.normalize(Cow::Borrowed(value)))
        };
        // `ann:b`, `ann:` and `ann:bc`, and what servers may read as one of them.
        for usual in ["YW5uOmI=", "YW5uOg==", "YW5uOmJj", ""] {
            assert!(!ambiguous("header.authorization", &format!("Basic  {usual}")), "{usual}");
        }
        for odd in
            ["YW5uOmJ=", "YW5uOmI", "YW5uOh==", "YW5u.OmI=", "YW 5uOmI=", "YW-_", "====", "="]
        {
            assert!(ambiguous("header.authorization", &format!("basic {odd}")), "{odd}");
            assert!(!ambiguous("header.authorization", &format!("Bearer {odd}")), "{odd}");
            assert!(!ambiguous("header.x-user-id", &format!("Basic {odd}")), "{odd}");
        }
        for json in ["j:\"X\"", "j%3A%22X%22", " \"j:[1]\""] {
            assert!(ambiguous("cookie.session", json), "{json}");
        }
        assert!(!ambiguous("cookie.session", "s:j:"));
    }

    proptest! {
        #[test]
        fn normal_form_of_a_cookie_is_that_of_its_decoded_value(value in "[%2358acf]{0,20}") {
            let decoded = form_decoded_once(&value);
            prop_assert_eq!(normal("cookie.c", &decoded), normal("cookie.c", &value));
        }

        #[test]
        fn normal_form_of_credentials_is_stable(value in "[ \tbBeEaArRx]{0,12}") {
            let once = normal("header.authorization", &value);
            prop_assert_eq!(normal("header.authorization", &once), once);
        }

        #[test]
        fn no_cookie_panics(value in "[\"%\\\\058fé ;=]{0,12}") {
            normal("cookie.c", &value);
        }
    }
}
