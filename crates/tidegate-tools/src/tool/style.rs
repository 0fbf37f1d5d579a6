//! Colours of the output. `anstream` removes them if the output is not a terminal.

use std::fmt::Display;

use clap::builder::styling::{AnsiColor, Reset, Style, Styles};

pub const ALLOWED: Style = AnsiColor::Green.on_default().bold();
pub const DENIED: Style = AnsiColor::Red.on_default().bold();
pub const ERROR: Style = AnsiColor::Red.on_default().bold();
pub const WARNING: Style = AnsiColor::Yellow.on_default().bold();
pub const NOTE: Style = AnsiColor::Cyan.on_default();
pub const HEADING: Style = Style::new().bold();
pub const RESET: Reset = Reset;

pub const HELP: Styles = Styles::styled()
    .header(AnsiColor::Green.on_default().bold())
    .usage(AnsiColor::Green.on_default().bold())
    .literal(AnsiColor::Cyan.on_default().bold())
    .placeholder(AnsiColor::Cyan.on_default());

/// Prints a warning to the standard error.
pub fn print_warning(message: impl Display) {
    anstream::eprintln!("{WARNING}warning:{RESET} {message}");
}
