//! [`Template`]: an encoded message in which only the key changes.

use bytes::Bytes;
use memchr::memmem;

/// Message with a key in some places. All keys have the same length, so lengths in the encoding stay
/// valid.
#[derive(Debug)]
pub(super) struct Template {
    message: Vec<u8>,
    places: Vec<usize>,
}

impl Template {
    /// Creates a template from a message that has the placeholder in place of the key.
    pub(super) fn new(message: Vec<u8>, placeholder: &str) -> Self {
        let places = memmem::find_iter(&message, placeholder.as_bytes()).collect();
        Self { message, places }
    }

    /// Returns whether the key is part of the message.
    pub(super) fn has_key(&self) -> bool {
        !self.places.is_empty()
    }

    /// Returns the message with this key.
    pub(super) fn with_key(&self, key: &str) -> Bytes {
        let mut message = self.message.clone();
        for &place in &self.places {
            message[place..place + key.len()].copy_from_slice(key.as_bytes());
        }
        Bytes::from(message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_placeholder_is_replaced() {
        let template = Template::new(br#"{"key":"k-##","path":"/k-##"}"#.to_vec(), "k-##");
        assert!(template.has_key());
        assert_eq!(template.with_key("k-07"), r#"{"key":"k-07","path":"/k-07"}"#);
        assert!(!Template::new(b"{}".to_vec(), "k-##").has_key());
    }
}
