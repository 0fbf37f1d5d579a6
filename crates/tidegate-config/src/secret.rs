//! [`Secret`]: text that is never printed.

use std::fmt;
use std::io::Read as _;
use std::path::Path;

/// Maximum size of a file with a secret.
const MAX_SECRET_BYTES: u64 = 4_096;

/// Text that is never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// Reads a file that contains only the text, with or without a final line break.
    pub fn read(file: &Path) -> Result<Self, String> {
        let unreadable = |error: std::io::Error| format!("cannot be read: {error}");
        let opened = std::fs::File::open(file).map_err(unreadable)?;
        let mut text = String::new();
        let mut limited = opened.take(MAX_SECRET_BYTES + 1);
        limited.read_to_string(&mut text).map_err(unreadable)?;
        if text.len() as u64 > MAX_SECRET_BYTES {
            return Err(format!("has more than {MAX_SECRET_BYTES} bytes: write only the secret"));
        }
        let text = text.strip_suffix('\n').unwrap_or(&text);
        match text.strip_suffix('\r').unwrap_or(text) {
            blank if blank.trim().is_empty() => {
                Err("is empty: write the secret into it".to_owned())
            }
            text => Ok(Self::new(text)),
        }
    }

    /// Returns the text, which callers must not print.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(secret)")
    }
}
