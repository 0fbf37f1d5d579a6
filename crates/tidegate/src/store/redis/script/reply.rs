//! [`ReplyReader`]: the doubles in the reply of decide.lua.

use crate::store::StoreError;

/// Reads the reply of the script, number by number.
pub(crate) struct ReplyReader<'a> {
    rest: &'a [u8],
}

impl<'a> ReplyReader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    pub(crate) fn is_at_end(&self) -> bool {
        self.rest.is_empty()
    }

    /// Reads a whole number that is not negative.
    pub(crate) fn number(&mut self) -> Result<u64, StoreError> {
        let (bytes, rest) = self.rest.split_first_chunk().ok_or_else(too_short)?;
        self.rest = rest;
        let number = f64::from_le_bytes(*bytes);
        if !(0.0..=MAX_NUMBER).contains(&number) || number.fract() != 0.0 {
            return Err(unexpected("a wrong number"));
        }
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked")]
        Ok(number as u64)
    }

    /// Reads the error of an item, if it has one instead of numbers.
    pub(crate) fn error(&mut self) -> Result<Option<String>, StoreError> {
        if !self.rest.starts_with(&(-1_f64).to_le_bytes()) {
            return Ok(None);
        }
        self.rest = &self.rest[8..];
        let length = usize::try_from(self.number()?).unwrap_or(usize::MAX);
        let (text, rest) = self.rest.split_at_checked(length).ok_or_else(too_short)?;
        self.rest = rest;
        Ok(Some(String::from_utf8_lossy(text).into_owned()))
    }
}

/// The largest number up to which a double represents every integer.
const MAX_NUMBER: f64 = 9_007_199_254_740_992.0;

fn too_short() -> StoreError {
    unexpected("too short")
}

pub(crate) fn unexpected(reason: &str) -> StoreError {
    StoreError::Refused(format!("unexpected reply of the script: {reason}"))
}
