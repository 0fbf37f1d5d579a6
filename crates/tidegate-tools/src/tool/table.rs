//! [`TextTable`]: aligned columns of text.

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
