//! Normal form of the values that requests count by: another spelling of the same value must not
//! be another key.

use std::borrow::Cow;

use super::KeySource;
use super::path::normalize_host;

/// Authentication schemes in their usual spelling. Their names are case-insensitive (RFC 9110,
/// 11.1).
const SCHEMES: [&str; 6] = ["Bearer", "Basic", "Digest", "Negotiate", "DPoP", "Token"];

impl KeySource {
    /// Returns the normal form of a value of this attribute. A path is normalized before.
    pub(super) fn normalize<'v>(&self, value: Cow<'v, str>) -> Cow<'v, str> {
        let normalize: fn(&str) -> Cow<'_, str> = match self.as_str() {
            "host" => normalize_host,
            "header.authorization" | "header.proxy-authorization" => credentials,
            name if name.starts_with("header.") => |value| Cow::Borrowed(trimmed(value)),
            name if name.starts_with("cookie.") => cookie_value,
            _ => return value,
        };
        match value {
            Cow::Borrowed(value) => normalize(value),
            Cow::Owned(value) => match normalize(&value) {
                Cow::Borrowed(same) if same.len() == value.len() => Cow::Owned(value),
                normal => Cow::Owned(normal.into_owned()),
            },
        }
    }
}

/// Returns a value without the spaces around it, which HTTP/1.1 removes.
fn trimmed(value: &str) -> &str {
    value.trim_matches([' ', '\t'])
}

/// Returns credentials with the usual spelling of their scheme and one space: servers accept
/// `bearer  X` for `Bearer X`.
fn credentials(value: &str) -> Cow<'_, str> {
    let value = trimmed(value);
    let Some((scheme, rest)) = value.split_once([' ', '\t']) else { return Cow::Borrowed(value) };
    let rest = trimmed(rest);
    let known = SCHEMES.iter().find(|known| scheme.eq_ignore_ascii_case(known));
    let scheme_is_usual = match known {
        Some(known) => scheme == *known,
        None => !scheme.bytes().any(|byte| byte.is_ascii_uppercase()),
    };
    if scheme_is_usual && scheme.len() + 1 + rest.len() == value.len() && !value.contains('\t') {
        return Cow::Borrowed(value);
    }
    let scheme = known.map_or_else(|| scheme.to_ascii_lowercase(), |known| (*known).to_owned());
    Cow::Owned(format!("{scheme} {rest}"))
}

/// Returns the value of a cookie as frameworks read it: without spaces and quotes around it, and
/// with its escapes decoded. Some frameworks do not decode, so for them two values may share a
/// count; the other way round, one value would have several counts.
fn cookie_value(value: &str) -> Cow<'_, str> {
    // Python and JavaScript also remove spaces beyond ASCII.
    let value = value.trim();
    let quoted = value.strip_prefix('"').and_then(|rest| rest.strip_suffix('"'));
    let has_backslashes = quoted.is_some_and(|inner| inner.contains('\\'));
    let inner = quoted.unwrap_or(value);
    if !has_backslashes && !inner.contains('%') {
        return Cow::Borrowed(inner);
    }
    // Backslashes first: a framework that decodes only them must see one value of `%41` and
    // `\04541`.
    let unquoted = if has_backslashes { decoded(inner, backslash_code) } else { None };
    match decoded(unquoted.as_deref().unwrap_or(inner), percent_code) {
        Some(value) => Cow::Owned(value),
        None => unquoted.map_or(Cow::Borrowed(inner), Cow::Owned),
    }
}

/// Decodes the codes in a text. The text is not UTF-8 then if the result is `None`: its bytes stay
/// encoded, so that different values stay different.
fn decoded(text: &str, code_at: fn(&[u8]) -> Option<(u8, usize)>) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some(first) = rest.first() {
        let (byte, used) = code_at(rest).unwrap_or((*first, 1));
        bytes.push(byte);
        rest = &rest[used..];
    }
    String::from_utf8(bytes).ok()
}

/// Returns the byte of a percent code at the start, and its length.
fn percent_code(bytes: &[u8]) -> Option<(u8, usize)> {
    let [b'%', high, low, ..] = bytes else { return None };
    Some((digits(16, &[*high, *low])?, 3))
}

/// Returns the byte of a backslash and what it escapes at the start, and their length.
fn backslash_code(bytes: &[u8]) -> Option<(u8, usize)> {
    match bytes {
        [b'\\', a, b, c, ..] if digits(8, &[*a, *b, *c]).is_some() => {
            Some((digits(8, &[*a, *b, *c])?, 4))
        }
        [b'\\', escaped, ..] => Some((*escaped, 2)),
        _ => None,
    }
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
            ("cookie.session", "X", "X"),
            ("cookie.session", " \"X\" ", "X"),
            ("cookie.session", "\"a\\\"b\\130\"", "a\"bX"),
            ("cookie.session", "%58%2", "X%2"),
            ("cookie.session", "%FF", "%FF"),
            ("cookie.session", "\"a\\04541\"", "aA"),
            ("cookie.session", "\u{a0}X\u{2003}", "X"),
            ("cookie.session", "a\\b", "a\\b"),
            ("cookie.session", "\"", "\""),
            ("host", "API.example:80", "api.example"),
            ("host", "api.example:80.", "api.example"),
            ("query.q", " a ", " a "),
        ] {
            assert_eq!(normal(attribute, value), expected, "{attribute} {value}");
        }
    }

    proptest! {
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
