//! [`TextTable`]: aligned columns of text, and [`TextPage`]: text with tables, or the same in
//! Markdown.

use std::io::{self, Write};

use super::style;

/// Table whose first columns are texts, aligned left, and whose others are numbers.
pub struct TextTable {
    texts: usize,
    rows: Vec<Vec<String>>,
}

impl TextTable {
    pub fn new(texts: &[&str], numbers: &[impl AsRef<str>]) -> Self {
        let names = texts.iter().map(|name| (*name).to_owned());
        let names = names.chain(numbers.iter().map(|name| name.as_ref().to_owned()));
        Self { texts: texts.len(), rows: vec![names.collect()] }
    }

    pub fn add(&mut self, row: impl IntoIterator<Item = String>) {
        self.rows.push(row.into_iter().collect());
    }

    /// Writes the table, if it has a row. Columns without any value are left out.
    pub fn write(&self, output: &mut dyn Write) -> io::Result<()> {
        let [_, values @ ..] = self.rows.as_slice() else { return Ok(()) };
        if values.is_empty() {
            return Ok(());
        }
        let width = |column: usize| {
            let is_used = values.iter().any(|row| !row[column].is_empty());
            let widths = self.rows.iter().map(|row| row[column].chars().count());
            is_used.then(|| widths.max().unwrap_or(0))
        };
        let widths: Vec<Option<usize>> = (0..self.rows[0].len()).map(width).collect();
        for (number, row) in self.rows.iter().enumerate() {
            let mut line = String::new();
            for (column, cell) in row.iter().enumerate() {
                let Some(width) = widths[column] else { continue };
                if !line.is_empty() {
                    line.push_str("  ");
                }
                let padding = " ".repeat(width - cell.chars().count());
                let is_text = column < self.texts;
                line += &if is_text { cell.clone() + &padding } else { padding + cell };
            }
            let line = line.trim_end();
            if number == 0 {
                writeln!(output, "{}{line}{}", style::HEADING, style::RESET)?;
            } else {
                writeln!(output, "{line}")?;
            }
        }
        Ok(())
    }
}

/// Form of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PageFormat {
    Terminal,
    Markdown,
    /// Body of a page; texts are escaped.
    Html,
}

/// Text with headings and tables.
pub struct TextPage<'a> {
    output: &'a mut dyn Write,
    format: PageFormat,
}

impl<'a> TextPage<'a> {
    pub fn new(output: &'a mut dyn Write, format: PageFormat) -> Self {
        Self { output, format }
    }

    /// Starts a part of the page.
    pub fn section(&mut self, text: &str) -> io::Result<()> {
        match self.format {
            PageFormat::Terminal => writeln!(self.output)?,
            PageFormat::Markdown => {}
            PageFormat::Html => return writeln!(self.output, "<h2>{}</h2>", html(text)),
        }
        self.heading(text)
    }

    pub fn heading(&mut self, text: &str) -> io::Result<()> {
        match self.format {
            PageFormat::Terminal => {
                writeln!(self.output, "{}{text}{}", style::HEADING, style::RESET)
            }
            PageFormat::Markdown => writeln!(self.output, "\n### {}\n", markdown(text)),
            PageFormat::Html => writeln!(self.output, "<h3>{}</h3>", html(text)),
        }
    }

    pub fn line(&mut self, text: &str) -> io::Result<()> {
        match self.format {
            PageFormat::Terminal => writeln!(self.output, "{text}"),
            PageFormat::Markdown => writeln!(self.output, "- {}", markdown(text.trim_start())),
            PageFormat::Html => writeln!(self.output, "<p>{}</p>", html(text)),
        }
    }

    /// Writes a text as it is, after a heading.
    pub fn code(&mut self, heading: &str, text: &str) -> io::Result<()> {
        if self.format == PageFormat::Terminal {
            writeln!(self.output)?;
        }
        self.heading(heading)?;
        match self.format {
            PageFormat::Terminal => write!(self.output, "{text}"),
            PageFormat::Markdown => writeln!(self.output, "```\n{text}```"),
            PageFormat::Html => writeln!(self.output, "<pre>{}</pre>", html(text)),
        }
    }

    /// Writes HTML of our own.
    pub fn html(&mut self, html: &str) -> io::Result<()> {
        self.output.write_all(html.as_bytes())
    }

    /// Writes a table after an empty line and its heading, if it has any.
    pub fn table(&mut self, heading: &str, table: &TextTable) -> io::Result<()> {
        if self.format != PageFormat::Html {
            writeln!(self.output)?;
        }
        if !heading.is_empty() {
            self.heading(heading)?;
        }
        let cells = |row: &[String], escape: fn(&str) -> String, between: &str| {
            row.iter().map(|cell| escape(cell)).collect::<Vec<_>>().join(between)
        };
        match self.format {
            PageFormat::Terminal => table.write(self.output),
            PageFormat::Markdown => {
                for (number, row) in table.rows.iter().enumerate() {
                    writeln!(self.output, "| {} |", cells(row, markdown, " | "))?;
                    if number == 0 {
                        let rule = |column| if column < table.texts { "---" } else { "---:" };
                        let rules: Vec<&str> = (0..row.len()).map(rule).collect();
                        writeln!(self.output, "| {} |", rules.join(" | "))?;
                    }
                }
                writeln!(self.output)
            }
            PageFormat::Html => {
                writeln!(self.output, "<div><table>")?;
                for (number, row) in table.rows.iter().enumerate() {
                    let cell = if number == 0 { "th" } else { "td" };
                    let cells = cells(row, html, &format!("</{cell}><{cell}>"));
                    writeln!(self.output, "<tr><{cell}>{cells}</{cell}></tr>")?;
                }
                writeln!(self.output, "</table></div>")
            }
        }
    }
}

/// Escapes a text for HTML and XML. Characters that XML does not allow are replaced.
pub(crate) fn html(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\n' => escaped.push('\n'),
            '\u{fffe}' | '\u{ffff}' => escaped.push(char::REPLACEMENT_CHARACTER),
            control if control.is_control() => escaped.push(char::REPLACEMENT_CHARACTER),
            other => escaped.push(other),
        }
    }
    escaped
}

/// Escapes what Markdown would read as a link, as HTML or as another cell.
fn markdown(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '<' => escaped.push_str("&lt;"),
            '&' => escaped.push_str("&amp;"),
            '\\' | '`' | '*' | '_' | '[' | ']' | '|' | '~' | '#' | '!' => {
                escaped.extend(['\\', character]);
            }
            _ => escaped.push(character),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_and_empty_ones_left_out() {
        let mut table = TextTable::new(&["", "key"], &["requests"]);
        table.add(["", "ann", "1,000"].map(str::to_owned));
        table.add(["", "ünal", "7"].map(str::to_owned));
        let mut output = anstream::StripStream::new(Vec::new());
        table.write(&mut output).expect("written");
        let text = String::from_utf8(output.into_inner()).expect("UTF-8");
        assert_eq!(text, "key   requests\nann      1,000\nünal         7\n");
    }
}
