//! [`ScreenLine`]: a line of the view, in styled parts.

use std::fmt::Write as _;

use clap::builder::styling::Style;

use super::text;
use crate::tool::style;
use crate::tool::text::printable;

pub(super) const PLAIN: Style = Style::new();
pub(super) const DIM: Style = Style::new().dimmed();

/// One line, which is at most as wide as the terminal. All its texts are printable.
#[derive(Debug, Default, Clone)]
pub(super) struct ScreenLine {
    parts: Vec<(Style, String)>,
    width: usize,
}

impl ScreenLine {
    /// Creates a line with a label in front.
    pub(super) fn labelled(label: &str) -> Self {
        Self::default().with(style::HEADING, label)
    }

    /// Appends a text, whose characters that control a terminal become escapes.
    pub(super) fn with(mut self, style: Style, text: &str) -> Self {
        let printable = printable(text);
        self.width += text::width(&printable);
        self.parts.push((style, printable));
        self
    }

    /// Appends a text in a column of this width, on its left side.
    pub(super) fn column(self, style: Style, text: &str, width: usize) -> Self {
        self.padded(style, text, width, false)
    }

    /// Appends a text in a column of this width, on its right side.
    pub(super) fn number(self, style: Style, text: &str, width: usize) -> Self {
        self.padded(style, text, width, true)
    }

    fn padded(self, style: Style, text: &str, width: usize, is_right: bool) -> Self {
        let cut = text::cut(&printable(text), width);
        let padding = " ".repeat(width - text::width(&cut).min(width));
        let padded = if is_right { padding + &cut } else { cut + &padding };
        self.with(style, &padded)
    }

    /// Appends those texts that fit, each after two spaces.
    pub(super) fn items(mut self, items: &[(Style, String)], columns: usize) -> Self {
        for (style, item) in items {
            let longer = self.clone().with(PLAIN, "  ").with(*style, item);
            if longer.width <= columns {
                self = longer;
            }
        }
        self
    }

    /// Writes the line, cut to this number of columns.
    pub(super) fn write(&self, output: &mut String, columns: usize, has_colours: bool) {
        let mut left = columns;
        let last = self.parts.len().saturating_sub(1);
        for (index, (style, part)) in self.parts.iter().enumerate() {
            let part = text::cut(part, left);
            left -= text::width(&part);
            let part = if index == last { part.trim_end() } else { &part };
            if *style == PLAIN || !has_colours {
                output.push_str(part);
            } else {
                let _ = write!(output, "{style}{part}{style:#}");
            }
        }
    }

    #[cfg(test)]
    pub(super) fn to_text(&self) -> String {
        self.parts.iter().map(|(_, text)| text.as_str()).collect::<String>().trim_end().to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_cut_to_the_terminal_and_have_no_escape_of_a_client() {
        let line =
            ScreenLine::labelled("key ").with(style::DENIED, "\x1b[2J日本語").with(PLAIN, "xyz");
        let mut output = String::new();
        line.write(&mut output, 16, true);
        assert_eq!(output, "\x1b[1mkey \x1b[0m\x1b[1m\x1b[31m\\u{1b}[2J日…\x1b[0m");
        output.clear();
        line.write(&mut output, 80, false);
        assert_eq!(output, "key \\u{1b}[2J日本語xyz");
    }

    #[test]
    fn items_that_do_not_fit_are_left_out() {
        let items = ["store up", "a very long item", "x"].map(|text| (PLAIN, text.to_owned()));
        assert_eq!(ScreenLine::labelled("s").items(&items, 20).to_text(), "s  store up  x");
    }

    #[test]
    fn columns_have_their_width() {
        let line = ScreenLine::default().column(PLAIN, "per-user", 6).number(PLAIN, "12", 5);
        assert_eq!(line.to_text(), "per-u…   12");
        assert_eq!(
            ScreenLine::default().column(PLAIN, "日本語", 4).with(PLAIN, "|").to_text(),
            "日… |"
        );
    }
}
