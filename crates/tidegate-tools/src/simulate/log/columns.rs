//! [`Columns`]: comma-separated values and the like, whose first line names the columns, and the
//! extended format of the W3C, whose line `#Fields:` does.

use std::borrow::Cow;

use super::field::{Core, Field};
use super::line::LineParts;

/// Start of the line that names the columns in the extended format of the W3C.
pub(super) const W3C_FIELDS: &str = "#Fields:";
const SEPARATORS: [char; 4] = [',', '\t', ';', '|'];

/// Columns of a file.
#[derive(Debug, Clone)]
pub(super) struct Columns {
    names: Vec<String>,
    fields: Vec<Field>,
    separator: char,
    is_w3c: bool,
    /// Number of columns up to the time.
    time_end: usize,
}

impl Columns {
    /// Parses the line that names the columns. `None`: it does not.
    pub(super) fn parse(line: &str, find: impl Fn(&str) -> Option<Field>) -> Option<Self> {
        let w3c = line.strip_prefix(W3C_FIELDS).map(str::trim);
        let separator = match w3c {
            Some(_) => ' ',
            None => *SEPARATORS.iter().max_by_key(|it| line.matches(**it).count())?,
        };
        let mut names = Vec::new();
        let text = w3c.map(|names| names.replace('\t', " "));
        split(text.as_deref().unwrap_or(line), separator, |name| {
            names.push(name.trim().to_owned());
        })
        .ok()?;
        // Names of headers are case-insensitive.
        let names: Vec<String> = names
            .into_iter()
            .map(|name| if name.contains('.') { name } else { name.to_ascii_lowercase() })
            .collect();
        let is_part = |c: char| c.is_ascii_alphanumeric() || "._- ()@/".contains(c);
        let is_name = |name: &String| {
            name.chars().all(is_part) && !name.starts_with(|c: char| c.is_ascii_digit() || c == '/')
        };
        if w3c.is_none() && !names.iter().all(is_name) {
            return None;
        }
        let field = |name: &String| {
            find(name).unwrap_or_else(|| match Field::named(name) {
                Field::Skip if w3c.is_none() && !name.is_empty() => {
                    Field::Attribute(name.as_str().into())
                }
                field => field,
            })
        };
        let fields: Vec<Field> = names.iter().map(field).collect();
        let is_time = |field: &Field| matches!(field, Field::Core(Core::Time | Core::Date, _));
        let time_end = fields.iter().rposition(is_time)? + 1;
        Some(Self { names, fields, separator, is_w3c: w3c.is_some(), time_end })
    }

    /// Returns the names of the columns that may be attributes.
    pub(super) fn others(&self) -> Vec<String> {
        let is_other = |(_, field): &(&String, &Field)| matches!(field, Field::Attribute(_));
        let columns = self.names.iter().zip(&self.fields);
        if self.is_w3c {
            return Vec::new();
        }
        columns.filter(is_other).map(|(name, _)| name.clone()).collect()
    }

    /// Reads the cells of a line.
    pub(super) fn scan<'l>(
        &self,
        line: &'l str,
        parts: &mut LineParts<'l, '_>,
    ) -> Result<(), &'static str> {
        let mut count = 0;
        // CloudFront names the columns with spaces between them, and separates values by tabs.
        let is_tabbed = self.is_w3c && line.contains('\t');
        let separator = if is_tabbed { '\t' } else { self.separator };
        split(line, separator, |cell| {
            let field = self.fields.get(count).unwrap_or(&Field::Skip);
            count += 1;
            if !parts.only_time || count <= self.time_end {
                parts.add(field, cell);
            }
        })?;
        if count != self.fields.len() && !self.is_w3c {
            return Err("it does not have as many cells as the first line");
        }
        Ok(())
    }
}

/// Calls `on_cell` with the cells of a line, without their quotes.
fn split<'l>(
    line: &'l str,
    separator: char,
    mut on_cell: impl FnMut(Cow<'l, str>),
) -> Result<(), &'static str> {
    let mut rest = line;
    loop {
        let after = match rest.strip_prefix('"') {
            None => {
                let end = rest.find(separator).unwrap_or(rest.len());
                on_cell(Cow::Borrowed(&rest[..end]));
                &rest[end..]
            }
            Some(quoted) => {
                let end = doubled_quote_end(quoted).ok_or("a quote in it is not closed")?;
                let cell = &quoted[..end];
                let is_escaped = cell.contains('"');
                on_cell(if is_escaped { cell.replace("\"\"", "\"").into() } else { cell.into() });
                &quoted[end + 1..]
            }
        };
        match after.chars().next() {
            None => return Ok(()),
            Some(next) if next == separator => rest = &after[1..],
            Some(_) => return Err("it has a text after a quote"),
        }
    }
}

/// Returns the place of the quote that ends a cell. A quote inside it is doubled.
fn doubled_quote_end(quoted: &str) -> Option<usize> {
    let bytes = quoted.as_bytes();
    let mut from = 0;
    loop {
        let at = from + memchr::memchr(b'"', &bytes[from..])?;
        if bytes.get(at + 1) != Some(&b'"') {
            return Some(at);
        }
        from = at + 2;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cells(line: &str, separator: char) -> Result<Vec<String>, &'static str> {
        let mut cells = Vec::new();
        split(line, separator, |cell| cells.push(cell.into_owned())).map(|()| cells)
    }

    #[test]
    fn cells_may_have_quotes_and_separators() {
        assert_eq!(cells("1.5,/a,", ',').expect("valid"), ["1.5", "/a", ""]);
        assert_eq!(cells(r#""2","/a,""b"" ü",7"#, ',').expect("valid"), ["2", "/a,\"b\" ü", "7"]);
        assert_eq!(cells("a b\t\"c\td\"", '\t').expect("valid"), ["a b", "c\td"]);
        for line in ["1,\"/a,1", "1,/a,\"1", "\"a\"b,1", "\""] {
            assert!(cells(line, ',').is_err(), "{line}");
        }
    }

    #[test]
    fn first_line_names_the_columns() {
        let parse = |line: &str| Columns::parse(line, |_| None);
        let columns = parse("Time,ip,\"path\",header.X-User-Id,tenant").expect("columns");
        assert_eq!(columns.others(), ["header.X-User-Id", "tenant"]);
        assert!(parse("timestamp\tclient_ip\tmethod\turl").is_some());
        assert!(parse("#Fields: date time c-ip cs-method cs-uri-stem").is_some());
        for line in ["ip,path", "", "1.2.3.4 - - [time]", "time,{x}", "\"time"] {
            assert!(parse(line).is_none(), "{line}");
        }
    }
}
