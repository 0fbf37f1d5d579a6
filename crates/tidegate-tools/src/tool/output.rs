//! Output of a result: text for people, or JSON for programs.

use std::fmt::Display;
use std::io::{self, Write};

/// Prints the JSON if there is one, or else the text. Colours are removed if the output is not a
/// terminal.
pub fn print(
    json: Option<impl Display>,
    write_text: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> io::Result<()> {
    let mut output = anstream::stdout().lock();
    match json {
        Some(json) => writeln!(output, "{json}")?,
        None => write_text(&mut output)?,
    }
    output.flush()
}
