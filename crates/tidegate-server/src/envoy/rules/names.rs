//! How descriptors and rules are named: as keys of the store, and in metrics.

use std::fmt::Write as _;

use siphasher::sip128::SipHasher24;
use tidegate::{Algorithm, MAX_KEY_BYTES};

use super::Unit;

/// Names the count of a descriptor, fit for a key of the store. What separates the parts is escaped
/// inside them, so two different descriptors never get the same one, whichever domains and rules
/// they belong to.
pub(crate) fn counter_key<'a>(
    domain: &str,
    entries: impl IntoIterator<Item = (&'a str, &'a str)>,
) -> String {
    // Nearly every key fits.
    let mut text = String::with_capacity(64);
    let separates = |character| matches!(character, '%' | '|' | '=');
    push_escaped(&mut text, domain, separates);
    for (key, value) in entries {
        text.push('|');
        push_escaped(&mut text, key, separates);
        text.push('=');
        push_escaped(&mut text, value, separates);
    }
    shortened(text)
}

/// As ratelimit names its statistics: `domain.key_value.key`.
pub(crate) fn metric_name<'a>(
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

/// The policy that limits count under which requests bring themselves.
pub(crate) fn override_name(algorithm: Algorithm, unit: Unit) -> String {
    format!("override-{algorithm}-{}", unit.as_str())
}

pub(super) fn printable(path: &str) -> String {
    let mut text = String::new();
    push_escaped(&mut text, path, |_| false);
    shortened(text)
}

fn push_escaped(text: &mut String, part: &str, separates: impl Fn(char) -> bool) {
    // Nearly every part is plain, and is looked at byte by byte, which is much faster.
    if part.bytes().all(|byte| matches!(byte, b' '..=b'~') && !separates(char::from(byte))) {
        text.push_str(part);
        return;
    }
    for character in part.chars() {
        if character.is_control() || separates(character) {
            for byte in character.encode_utf8(&mut [0; 4]).bytes() {
                let _ = write!(text, "%{byte:02X}");
            }
        } else {
            text.push(character);
        }
    }
}

/// Keeps what fits of a text that is too long, and a hash of all of it. `%~` is no escape, so no
/// other key looks alike.
fn shortened(text: String) -> String {
    if text.len() <= MAX_KEY_BYTES {
        return text;
    }
    // No secret seeds it: all processes that share a store must come to the same key.
    let hash = SipHasher24::new().hash(text.as_bytes()).as_u128();
    let mut end = MAX_KEY_BYTES - "%~".len() - 32;
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}%~{hash:032x}", &text[..end])
}

pub(super) fn composite(key: &str, value: &str) -> String {
    if value.is_empty() { key.to_owned() } else { format!("{key}_{value}") }
}
