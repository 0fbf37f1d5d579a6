//! [`Key`]: the identity that a limit counts, and its name in Redis.

mod fingerprint;

pub(crate) use fingerprint::{Fingerprint, HashSecret, PolicyClass, PolicyRef};

/// The maximum length of a key and of a policy name, in bytes.
pub const MAX_KEY_BYTES: usize = 512;

/// The identity that a limit counts: a user, an address, a tenant.
///
/// A key has from 1 to 512 bytes of UTF-8 without control characters; all other characters, such as
/// braces and colons, are allowed.
///
/// ```
/// use tidegate::Key;
///
/// assert!(Key::new("2001:db8::1").is_ok());
/// assert!(Key::new("").is_err());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Key<'a>(&'a str);

/// The reason why a text is not a valid key or policy name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KeyError {
    /// The text is empty.
    #[error("is empty: it must have from 1 to {MAX_KEY_BYTES} bytes")]
    Empty,
    /// The text is longer than [`MAX_KEY_BYTES`].
    #[error("has {0} bytes: at most {MAX_KEY_BYTES} are allowed")]
    TooLong(usize),
    /// The text has a control character, such as a line break.
    #[error(
        "has the control character {character:?} at byte {at}: any other UTF-8 text is allowed"
    )]
    Control {
        /// The character.
        character: char,
        /// Its byte offset.
        at: usize,
    },
}

impl<'a> Key<'a> {
    /// Creates a key from a valid text.
    pub fn new(text: &'a str) -> Result<Self, KeyError> {
        if text.is_empty() {
            return Err(KeyError::Empty);
        }
        if text.len() > MAX_KEY_BYTES {
            return Err(KeyError::TooLong(text.len()));
        }
        match text.char_indices().find(|(_, character)| character.is_control()) {
            Some((at, character)) => Err(KeyError::Control { character, at }),
            None => Ok(Self(text)),
        }
    }

    /// Returns the text.
    #[must_use]
    pub fn as_str(&self) -> &'a str {
        self.0
    }
}

/// Returns whether the text is a valid [`Key`] of printable ASCII. Nearly every key is, and every
/// request pays for this check, so it reads eight bytes at a time; the last eight may overlap the
/// previous ones.
#[inline]
pub(crate) fn is_plain_key(text: &str) -> bool {
    fn is_plain(word: [u8; 8]) -> bool {
        let word = u64::from_le_bytes(word);
        let repeat = |byte: u8| u64::from_ne_bytes([byte; 8]);
        // The addition sets the high bit of a byte of 0x7f, and the subtraction that of a byte
        // below 0x20 (a borrow may also set it in the byte above).
        let high_bits = word.wrapping_add(repeat(0x01)) | word | word.wrapping_sub(repeat(0x20));
        high_bits & repeat(0x80) == 0
    }
    let text = text.as_bytes();
    match text.last_chunk::<8>() {
        Some(last) => {
            is_plain(*last)
                && text.len() <= MAX_KEY_BYTES
                && text.as_chunks::<8>().0.iter().all(|word| is_plain(*word))
        }
        None => !text.is_empty() && text.iter().all(|byte| (0x20..0x7f).contains(byte)),
    }
}

/// Returns the name of a count in Redis: `<prefix>:{<key>}:<policy>`.
///
/// The braces make the key the hash tag, so all policies of one key are in one slot of a cluster.
/// Braces and the escape character are escaped inside the key, so that a client cannot choose the
/// tag, and different (key, policy) pairs never share a name.
#[cfg(any(feature = "redis", test))]
pub(crate) fn redis_key(prefix: &str, key: &str, policy: &str) -> String {
    let mut text = String::with_capacity(prefix.len() + key.len() + policy.len() + 4);
    write_redis_key(&mut text, prefix, key, "", policy);
    text
}

/// Appends the name of a count in Redis to a text. The mark of the format follows the brace: no
/// name without a mark is equal, whatever the key and the policy are.
#[cfg(any(feature = "redis", test))]
pub(crate) fn write_redis_key(
    text: &mut String,
    prefix: &str,
    key: &str,
    format_mark: &str,
    policy: &str,
) {
    text.push_str(prefix);
    text.push_str(":{");
    if key.bytes().any(|byte| b"%{}".contains(&byte)) {
        for character in key.chars() {
            match character {
                '%' => text.push_str("%25"),
                '{' => text.push_str("%7B"),
                '}' => text.push_str("%7D"),
                other => text.push(other),
            }
        }
    } else {
        text.push_str(key);
    }
    text.push('}');
    text.push_str(format_mark);
    text.push(':');
    // No name of a count is that of a hold, which ends in `:h` or has `:h:` and its id.
    if policy.ends_with(":h") || [":h:", "%25", "%3A"].iter().any(|part| policy.contains(part)) {
        text.push_str(&policy.replace('%', "%25").replace(":h", "%3Ah"));
    } else {
        text.push_str(policy);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn invalid_keys_have_specific_errors() {
        assert_eq!(Key::new(""), Err(KeyError::Empty));
        assert!(Key::new(&"k".repeat(512)).is_ok());
        assert_eq!(Key::new(&"k".repeat(513)), Err(KeyError::TooLong(513)));
        assert_eq!(Key::new("a\nb"), Err(KeyError::Control { character: '\n', at: 1 }));
        assert_eq!(Key::new("é\u{7f}"), Err(KeyError::Control { character: '\u{7f}', at: 2 }));
        assert_eq!(Key::new("\0"), Err(KeyError::Control { character: '\0', at: 0 }));
        for valid in ["a b", "{user}", "a:b:c", "2001:db8::1", "ключ", "%7B", "}:x"] {
            assert!(Key::new(valid).is_ok(), "{valid}");
        }
    }

    #[test]
    fn redis_key_is_readable_and_escapes_its_hash_tag() {
        assert_eq!(redis_key("rate_limit", "user123", "per-user"), "rate_limit:{user123}:per-user");
        assert_eq!(
            redis_key("rate_limit", "2001:db8::1", "per-ip"),
            "rate_limit:{2001:db8::1}:per-ip"
        );
        assert_eq!(redis_key("p", "{tag}x", "q"), "p:{%7Btag%7Dx}:q");
        assert_ne!(redis_key("p", "{", "q"), redis_key("p", "%7B", "q"));
        assert_ne!(redis_key("p", "a", "b}:c"), redis_key("p", "a}:b", "c"));
    }

    proptest! {
        #[test]
        fn different_pairs_have_different_redis_keys(
            key in "[a{}:%7BD]{1,6}", policy in "[a{}:%7BD]{1,6}",
            other_key in "[a{}:%7BD]{1,6}", other_policy in "[a{}:%7BD]{1,6}",
        ) {
            let same = (&key, &policy) == (&other_key, &other_policy);
            let (first, second) =
                (redis_key("p", &key, &policy), redis_key("p", &other_key, &other_policy));
            prop_assert_eq!(first == second, same);
        }

        #[test]
        fn no_count_has_the_name_of_a_hold(
            policy in "(a|:h|:|%|25|3A|h){1,6}", other in "(a|:h|:|%|25|3A|h){1,6}",
            id in "(a|:h|:|%|h){1,4}",
        ) {
            let (name, other_name) = (redis_key("p", "k", &policy), redis_key("p", "k", &other));
            prop_assert_eq!(name == other_name, policy == other);
            prop_assert_ne!(format!("{name}:h"), other_name.as_str());
            prop_assert_ne!(format!("{name}:h:{id}"), other_name);
        }

        #[test]
        fn the_hash_tag_is_the_whole_escaped_key(key in "\\PC{1,20}", policy in "\\PC{1,20}") {
            let text = redis_key("p", &key, &policy);
            let open = text.find('{').expect("an opening brace");
            let close = open + text[open..].find('}').expect("a closing brace");
            let tag = text[open + 1..close].replace("%7D", "}").replace("%7B", "{");
            prop_assert_eq!(tag.replace("%25", "%"), key);
        }

        #[test]
        fn plain_key_check_agrees_with_key_validation(
            bytes in proptest::collection::vec(any::<u8>(), 0..600),
        ) {
            let text = String::from_utf8_lossy(&bytes);
            let has_valid_length = (1..=MAX_KEY_BYTES).contains(&text.len());
            let is_valid = has_valid_length && !text.chars().any(char::is_control);
            prop_assert_eq!(Key::new(&text).is_ok(), is_valid);
            let is_plain = is_valid && text.bytes().all(|byte| (b' '..=b'~').contains(&byte));
            prop_assert_eq!(is_plain_key(&text), is_plain);
        }

        #[test]
        fn plain_key_check_finds_an_invalid_byte_at_any_offset(
            length in 1_usize..40,
            at in 0_usize..40,
            byte in 0_u8..0x80,
        ) {
            let mut text = vec![b'k'; length];
            text[at % length] = byte;
            let text = String::from_utf8(text).expect("ASCII");
            prop_assert_eq!(is_plain_key(&text), (0x20..0x7f).contains(&byte));
        }
    }
}
