//! Names of descriptors and rules: keys of the store and names in metrics.

use std::fmt::Write as _;

use siphasher::sip128::SipHasher24;
use tidegate::{Algorithm, MAX_KEY_BYTES};

use super::Unit;

/// Returns the key of the counter of a descriptor. Separators inside the parts are escaped, so two
/// different descriptors never have the same key, in any domain.
pub fn counter_key<'a>(
    domain: &str,
    entries: impl IntoIterator<Item = (&'a str, &'a str)>,
) -> String {
    // Nearly every key fits into this capacity.
    let mut text = String::with_capacity(64);
    let is_separator = |character| matches!(character, '%' | '|' | '=');
    push_escaped(&mut text, domain, is_separator);
    for (key, value) in entries {
        text.push('|');
        push_escaped(&mut text, key, is_separator);
        text.push('=');
        push_escaped(&mut text, value, is_separator);
    }
    shortened(text)
}

/// Domain of a descriptor, and the keys and values of its entries.
pub type CounterParts = (String, Vec<(String, String)>);

/// Returns the descriptor of a counter's key; `None` if it is not one, or was shortened.
pub fn parse_counter_key(key: &str) -> Option<CounterParts> {
    let mut parts = key.split('|');
    let domain = unescaped(parts.next()?)?;
    let entry = |part: &str| {
        let (key, value) = part.split_once('=')?;
        Some((unescaped(key)?, unescaped(value)?))
    };
    let entries = parts.map(entry).collect::<Option<Vec<_>>>()?;
    (!entries.is_empty()).then_some((domain, entries))
}

/// Reverses [`push_escaped`].
fn unescaped(part: &str) -> Option<String> {
    let mut pieces = part.split('%');
    let mut bytes = pieces.next()?.as_bytes().to_vec();
    for piece in pieces {
        let (code, rest) = piece.split_at_checked(2)?;
        bytes.push(u8::from_str_radix(code, 16).ok()?);
        bytes.extend_from_slice(rest.as_bytes());
    }
    String::from_utf8(bytes).ok()
}

/// Returns the name in metrics, in the format of ratelimit's statistics: `domain.key_value.key`.
pub fn metric_name<'a>(
    domain: &str,
    entries: impl IntoIterator<Item = (&'a str, &'a str)>,
) -> String {
    let mut path = domain.to_owned();
    for (key, value) in entries {
        path.push('.');
        path.push_str(&composite(key, value));
    }
    printable(&path)
}

/// Returns the name of the policy for limits in requests.
pub fn override_name(algorithm: Algorithm, unit: Unit) -> String {
    format!("override-{algorithm}-{}", unit.as_str())
}

/// Escapes control characters and bounds the length.
pub(super) fn printable(path: &str) -> String {
    let mut text = String::new();
    push_escaped(&mut text, path, |_| false);
    shortened(text)
}

fn push_escaped(text: &mut String, part: &str, is_separator: impl Fn(char) -> bool) {
    // Nearly every part is printable ASCII; checking its bytes is much faster.
    if part.bytes().all(|byte| matches!(byte, b' '..=b'~') && !is_separator(char::from(byte))) {
        text.push_str(part);
        return;
    }
    for character in part.chars() {
        if character.is_control() || is_separator(character) {
            for byte in character.encode_utf8(&mut [0; 4]).bytes() {
                let _ = write!(text, "%{byte:02X}");
            }
        } else {
            text.push(character);
        }
    }
}

/// Replaces the end of a text that is too long with a hash of the text. `%~` is not an escape, so
/// no other key can be equal.
fn shortened(text: String) -> String {
    if text.len() <= MAX_KEY_BYTES {
        return text;
    }
    // The hash has no random seed: all processes that share a store must derive the same key.
    let hash = SipHasher24::new().hash(text.as_bytes()).as_u128();
    let mut end = MAX_KEY_BYTES - "%~".len() - 32;
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}%~{hash:032x}", &text[..end])
}

/// Returns the name of a node below its parent.
pub(super) fn composite(key: &str, value: &str) -> String {
    if value.is_empty() { key.to_owned() } else { format!("{key}_{value}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_of_a_counter_is_parsed_into_its_descriptor() {
        for entries in
            [vec![("path", "/api/x")], vec![("a|b", "c=d"), ("é%", "\u{1}"), ("empty", "")]]
        {
            let key = counter_key("do|main", entries.iter().copied());
            let (domain, parsed) = parse_counter_key(&key).expect("a descriptor");
            let parsed = parsed.iter().map(|(key, value)| (key.as_str(), value.as_str()));
            assert!(domain == "do|main" && parsed.eq(entries), "{key}");
        }
        let long = counter_key("domain", [("key", "v".repeat(600).as_str())]);
        for other in ["ann", "a|b", "a|b=%4", "a|b=%zz", "%C3|a=b", &long] {
            assert_eq!(parse_counter_key(other), None, "{other}");
        }
    }
}
