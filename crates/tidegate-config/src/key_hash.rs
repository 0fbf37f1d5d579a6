//! Hashes of keys that are credentials, for operators: `sha256:` and 16 hexadecimal digits.
//!
//! There is no salt, so that an operator can look up a key: `printf %s KEY | sha256sum`.

use std::fmt::Write as _;

use ring::digest::{SHA256, digest};

const PREFIX: &str = "sha256:";
/// Bytes of the hash that are shown: enough to distinguish the keys of one service.
const SHOWN_BYTES: usize = 8;
const SHORT_DIGITS: usize = 8;

/// Returns the hash of a key.
pub fn of(key: &str) -> String {
    of_bytes(key.as_bytes())
}

/// Returns the hash of any content, in the same form.
pub fn of_bytes(content: &[u8]) -> String {
    let hash = digest(&SHA256, content);
    let mut shown = PREFIX.to_owned();
    for byte in &hash.as_ref()[..SHOWN_BYTES] {
        let _ = write!(shown, "{byte:02x}");
    }
    shown
}

/// Returns a hash of eight digits: enough to see that a text has changed, and too short to find a
/// secret by trying values.
pub fn short(text: &str) -> String {
    let hash = of(text);
    hash[PREFIX.len()..PREFIX.len() + SHORT_DIGITS].to_owned()
}

/// Returns whether a text has the form of a hash.
pub fn is_hash(text: &str) -> bool {
    text.len() == PREFIX.len() + 2 * SHOWN_BYTES && text.starts_with(PREFIX)
}

#[cfg(test)]
mod tests {
    #[test]
    fn hash_is_the_start_of_the_sha_256() {
        // printf %s abc | sha256sum
        assert_eq!(super::of("abc"), "sha256:ba7816bf8f01cfea");
        assert_eq!(super::short("abc"), "ba7816bf");
        assert!(super::is_hash("sha256:ba7816bf8f01cfea") && !super::is_hash("sha256:ba"));
    }
}
