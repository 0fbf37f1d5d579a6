//! [`Key`]: whose count it is, and how it is written in Redis.

/// The longest key, and the longest policy name, in bytes.
pub const MAX_KEY_BYTES: usize = 512;

/// Whose count it is: a user, an address, a tenant. From 1 to 512 bytes of UTF-8 without control
/// characters; braces, colons and anything else are welcome.
///
/// ```
/// use tidegate::Key;
///
/// assert!(Key::new("2001:db8::1").is_ok());
/// assert!(Key::new("").is_err());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Key<'a>(&'a str);

/// Why this text is no key (or no policy name).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KeyError {
    /// Nothing at all.
    #[error("is empty: it must have from 1 to {MAX_KEY_BYTES} bytes")]
    Empty,
    /// More than [`MAX_KEY_BYTES`].
    #[error("has {0} bytes: at most {MAX_KEY_BYTES} are allowed")]
    TooLong(usize),
    /// A control character, such as a line break.
    #[error(
        "has the control character {character:?} at byte {at}: any other UTF-8 text is allowed"
    )]
    Control {
        /// The character.
        character: char,
        /// Where it stands.
        at: usize,
    },
}

impl<'a> Key<'a> {
    /// Checks the text.
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

    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &'a str {
        self.0
    }
}

/// Whether the text is a [`Key`] that is plain ASCII. Nearly every key is, and this is what every
/// request pays: so eight bytes at a time, and the last eight may take in some that were looked at
/// before.
#[inline]
pub(crate) fn is_plain_key(text: &str) -> bool {
    fn is_plain(word: [u8; 8]) -> bool {
        let word = u64::from_le_bytes(word);
        let each = |byte: u8| u64::from_ne_bytes([byte; 8]);
        // The high bit of a byte is set in the first for 0x7f and above, and in the last for what
        // is below 0x20 (or, by a borrow, above one that is).
        (word.wrapping_add(each(0x01)) | word | word.wrapping_sub(each(0x20))) & each(0x80) == 0
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

/// `<prefix>:{<key>}:<policy>`.
///
/// The braces make the key alone the hash tag, so all policies of one key live in one slot of a
/// cluster. Inside the key, braces (and the escape itself) are escaped: then the first `}` is ours,
/// a user cannot choose the tag, and no two different (key, policy) pairs are written alike.
#[cfg(any(feature = "redis", test))]
pub(crate) fn redis_key(prefix: &str, key: &str, policy: &str) -> String {
    let mut text = String::with_capacity(prefix.len() + key.len() + policy.len() + 4);
    write_redis_key(&mut text, prefix, key, policy);
    text
}

/// The same, at the end of a text.
#[cfg(any(feature = "redis", test))]
pub(crate) fn write_redis_key(text: &mut String, prefix: &str, key: &str, policy: &str) {
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
    text.push_str("}:");
    text.push_str(policy);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn each_bad_key_gets_its_own_error() {
        assert_eq!(Key::new(""), Err(KeyError::Empty));
        assert!(Key::new(&"k".repeat(512)).is_ok());
        assert_eq!(Key::new(&"k".repeat(513)), Err(KeyError::TooLong(513)));
        assert_eq!(Key::new("a\nb"), Err(KeyError::Control { character: '\n', at: 1 }));
        assert_eq!(Key::new("é\u{7f}"), Err(KeyError::Control { character: '\u{7f}', at: 2 }));
        assert_eq!(Key::new("\0"), Err(KeyError::Control { character: '\0', at: 0 }));
        for fine in ["a b", "{user}", "a:b:c", "2001:db8::1", "ключ", "%7B", "}:x"] {
            assert!(Key::new(fine).is_ok(), "{fine}");
        }
    }

    #[test]
    fn a_key_is_readable_in_redis_and_cannot_choose_its_hash_tag() {
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
        fn two_pairs_never_share_a_redis_key(
            key in "[a{}:%7BD]{1,6}", policy in "[a{}:%7BD]{1,6}",
            other_key in "[a{}:%7BD]{1,6}", other_policy in "[a{}:%7BD]{1,6}",
        ) {
            let same = (&key, &policy) == (&other_key, &other_policy);
            prop_assert_eq!(redis_key("p", &key, &policy) == redis_key("p", &other_key, &other_policy), same);
        }

        #[test]
        fn the_hash_tag_is_the_whole_escaped_key(key in "\\PC{1,20}", policy in "\\PC{1,20}") {
            let text = redis_key("p", &key, &policy);
            let open = text.find('{').expect("an opening brace");
            let close = open + text[open..].find('}').expect("a closing brace");
            let tag = text[open + 1..close].replace("%7D", "}").replace("%7B", "{").replace("%25", "%");
            prop_assert_eq!(tag, key);
        }

        #[test]
        fn any_bytes_are_a_key_or_a_clear_error(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
            let text = String::from_utf8_lossy(&bytes);
            let good = !text.is_empty() && text.len() <= MAX_KEY_BYTES && !text.chars().any(char::is_control);
            prop_assert_eq!(Key::new(&text).is_ok(), good);
            let plain = good && text.bytes().all(|byte| (b' '..=b'~').contains(&byte));
            prop_assert_eq!(is_plain_key(&text), plain);
        }

        #[test]
        fn one_odd_byte_is_found_wherever_it_stands(length in 1_usize..40, at in 0_usize..40, byte in 0_u8..0x80) {
            let mut text = vec![b'k'; length];
            text[at % length] = byte;
            let text = String::from_utf8(text).expect("ASCII");
            prop_assert_eq!(is_plain_key(&text), (0x20..0x7f).contains(&byte));
        }
    }
}
