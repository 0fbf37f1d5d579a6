//! Quotes, escapes and words of lines.

use std::borrow::Cow;

use tidegate::decode_value;

/// Reads a text up to the quote that ends it; a quote inside of it has a backslash. Returns the
/// text without escapes, and what is after the quote.
pub(super) fn quoted(text: &str) -> Option<(Cow<'_, str>, &str)> {
    let bytes = text.as_bytes();
    let is_special = |byte: &u8| matches!(byte, b'"' | b'\\');
    let mut end = bytes.iter().position(is_special)?;
    let has_escapes = bytes[end] == b'\\';
    while bytes[end] == b'\\' {
        end += 2 + bytes.get(end + 2..)?.iter().position(is_special)?;
    }
    let value = &text[..end];
    Some((if has_escapes { unescaped(value) } else { value.into() }, &text[end + 1..]))
}

/// Decodes the escapes of JSON, and `\xNN` of nginx and Apache.
pub(super) fn unescaped(text: &str) -> Cow<'_, str> {
    if !text.contains('\\') {
        return Cow::Borrowed(text);
    }
    let mut plain = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('\\') {
        plain.extend_from_slice(before.as_bytes());
        let hex = |from, to| u16::from_str_radix(after.get(from..to)?, 16).ok();
        let (byte, used) = match after.bytes().next() {
            Some(b'x' | b'X') => (hex(1, 3).and_then(|byte| u8::try_from(byte).ok()), 3),
            Some(b'n') => (Some(b'\n'), 1),
            Some(b't') => (Some(b'\t'), 1),
            Some(b'r') => (Some(b'\r'), 1),
            Some(b'b') => (Some(8), 1),
            Some(b'f') => (Some(12), 1),
            Some(byte @ (b'"' | b'\\' | b'/')) => (Some(byte), 1),
            _ => (None, 0),
        };
        let low = hex(7, 11).filter(|_| after.get(5..7) == Some("\\u"));
        let units = hex(1, 5).filter(|_| after.starts_with('u')).into_iter().chain(low);
        rest = match (byte, char::decode_utf16(units).next()) {
            (Some(byte), _) => {
                plain.push(byte);
                &after[used..]
            }
            (None, Some(Ok(character))) => {
                plain.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes());
                &after[6 * character.len_utf16() - 1..]
            }
            _ => {
                plain.push(b'\\');
                after
            }
        };
    }
    plain.extend_from_slice(rest.as_bytes());
    Cow::Owned(decode_value(&plain).into_owned())
}

/// Splits off a word. Quotes and brackets at its start hold it together.
pub(super) fn split_word(text: &str) -> Option<(&str, &str)> {
    let text = text.trim_start_matches([' ', '\t']);
    let held = match text.chars().next()? {
        '"' => quoted(&text[1..]).map(|(_, after)| text.len() - after.len()),
        '\'' => text[1..].find('\'').map(|end| end + 2),
        '[' => text.find(']').map(|end| end + 1),
        _ => None,
    };
    let held = held.unwrap_or(0);
    let end = text[held..].find([' ', '\t']).map_or(text.len(), |end| held + end);
    Some((&text[..end], text[end..].trim_start_matches([' ', '\t'])))
}

/// Returns the words of a line, at most this many.
pub(super) fn words(line: &str, count: usize) -> Vec<&str> {
    let mut rest = line;
    let words = std::iter::from_fn(|| {
        let (word, after) = split_word(rest)?;
        rest = after;
        Some(word)
    });
    words.take(count).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_are_those_of_json_and_of_servers() {
        for (text, plain) in [
            (r#"a \"b\" \\ \/ \n\t"#, "a \"b\" \\ / \n\t"),
            (r"\xC3\xa9\x22 \u00e9\ud83d\ude00!", "é\"\u{20}é😀!"),
            (r"\q \x \xg1 \u12 \ud83d \ud83d\u0041", r"\q \x \xg1 \u12 \ud83d \ud83dA"),
            ("plain", "plain"),
        ] {
            assert_eq!(unescaped(text), plain, "{text}");
            assert_eq!(quoted(&format!("{text}\" x")), Some((plain.into(), " x")), "{text}");
        }
        assert_eq!((quoted(r"no end\"), quoted("no end")), (None, None));
    }
}
