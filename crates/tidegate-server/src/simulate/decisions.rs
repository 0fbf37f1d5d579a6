//! Decisions as JSON lines: the body that the HTTP API answers to each request.

use std::io::{self, Write};

use super::ReplayResult;
use crate::api::json;

/// Writes the line of one request.
pub(crate) fn write_line(output: &mut dyn Write, result: &ReplayResult<'_>) -> io::Result<()> {
    match result {
        Ok(decisions) => output.write_all(&json::decisions_body(decisions))?,
        Err(error) => {
            let line = serde_json::json!({ "error": error.to_string() });
            write!(output, "{line}")?;
        }
    }
    output.write_all(b"\n")
}
