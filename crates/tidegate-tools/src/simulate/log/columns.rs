//! [`Columns`]: comma-separated values and the like, whose first line names the columns, and the
//! extended format of the W3C, whose line `#Fields:` does.

use std::borrow::Cow;

use super::field::{Core, Field, FieldNames};
use super::line::{LineError, LineParts};

/// Start of the line that names the columns in the extended format of the W3C.
pub(super) const W3C_FIELDS: &str = "#Fields:";
const SEPARATORS: [char; 4] = [',', '\t', ';', '|'];

/// Columns of a file.
#[derive(Debug, Clone)]
pub(super) struct Columns {
    given: FieldNames,
    names: Vec<String>,
    fields: Vec<Field>,
    separator: char,
    is_w3c: bool,
    /// Number of columns up to the time.
    time_end: usize,
}

impl Columns {
    /// Parses the line that names the columns. `None`: it does not.
    pub(super) fn parse(line: &str, given: &FieldNames) -> Option<Self> {
        let w3c = line.strip_prefix(W3C_FIELDS).map(|names| names.trim().replace('\t', " "));
        let is_w3c = w3c.is_some();
        let count = |separator: &char| line.matches(*separator).count();
        let separator = if is_w3c { ' ' } else { SEPARATORS.into_iter().max_by_key(count)? };
        let mut names: Vec<String> = Vec::new();
        split(w3c.as_deref().unwrap_or(line), separator, |name| {
            let name = name.trim();
            // Names of headers are case-insensitive.
            let has_kind = name.contains('.');
            names.push(if has_kind { name.to_owned() } else { name.to_ascii_lowercase() });
        })
        .ok()?;
        let is_part = |c: char| c.is_ascii_alphanumeric() || "._- ()@/".contains(c);
        let is_name = |name: &String| {
            name.chars().all(is_part) && !name.starts_with(|c: char| c.is_ascii_digit() || c == '/')
        };
        if !is_w3c && !names.iter().all(is_name) {
            return None;
        }
        let field = |name: &String| match given.get(name).unwrap_or_else(|| Field::named(name)) {
            Field::Skip if !is_w3c && !name.is_empty() => Field::Attribute(name.as_str().into()),
            field => field,
        };
        let fields: Vec<Field> = names.iter().map(field).collect();
        let is_time = |field: &Field| matches!(field, Field::Core(Core::Time | Core::Date, _));
        let time_end = fields.iter().rposition(is_time)? + 1;
        Some(Self { given: given.clone(), names, fields, separator, is_w3c, time_end })
    }

    /// Returns the names of the columns that may be attributes.
    pub(super) fn others(&self) -> Vec<String> {
        let is_other = |(_, field): &(&String, &Field)| matches!(field, Field::Attribute(_));
        let columns = self.names.iter().zip(&self.fields).filter(|_| !self.is_w3c);
        columns.filter(is_other).map(|(name, _)| name.clone()).collect()
    }

    /// Returns whether the columns are named by the first line instead of a comment.
    pub(super) fn has_header(&self) -> bool {
        !self.is_w3c
    }

    /// Reads the cells of a line.
    pub(super) fn scan<'l>(
        &mut self,
        line: &'l str,
        parts: &mut LineParts<'l, '_>,
    ) -> Result<(), LineError> {
        if line.starts_with('#') {
            if line.starts_with(W3C_FIELDS) {
                let columns = Self::parse(line, &self.given);
                *self = columns.ok_or(LineError::Bad("it names no column for the time"))?;
            }
            return Err(LineError::Comment);
        }
        let mut count = 0;
        // CloudFront names the columns with spaces between them, and separates values by tabs.
        let is_tabbed = self.is_w3c && line.contains('\t');
        let separator = if is_tabbed { '\t' } else { self.separator };
        split(line, separator, |cell| {
            let field = self.fields.get(count).unwrap_or(&Field::Skip);
            count += 1;
            if !parts.only_time || count <= self.time_end {
                // IIS writes + for the blanks of headers. Addresses of pages have none.
                let may_have_blanks = self.is_w3c
                    && !is_tabbed
                    && cell.contains('+')
                    && matches!(field, Field::Attribute(name) if !name.ends_with("referer"));
                parts
                    .add(field, if may_have_blanks { cell.replace('+', " ").into() } else { cell });
            }
        })?;
        if count != self.fields.len() && !self.is_w3c {
            return Err(LineError::Bad("it does not have as many cells as the first line"));
        }
        Ok(())
    }
}

/// Calls `on_cell` with the cells of a line, without their quotes. A quote inside of them is
/// doubled.
fn split<'l>(
    line: &'l str,
    separator: char,
    mut on_cell: impl FnMut(Cow<'l, str>),
) -> Result<(), LineError> {
    let mut rest = line;
    loop {
        let after = match rest.strip_prefix('"') {
            None => {
                let end = rest.find(separator).unwrap_or(rest.len());
                on_cell(rest[..end].into());
                &rest[end..]
            }
            Some(quoted) => {
                let mut end = 0;
                let is_doubled = loop {
                    let quote = quoted[end..].find('"');
                    end += quote.ok_or(LineError::Bad("a quote in it is not closed"))?;
                    if !quoted[end + 1..].starts_with('"') {
                        break quoted[..end].contains('"');
                    }
                    end += 2;
                };
                let cell = &quoted[..end];
                on_cell(if is_doubled { cell.replace("\"\"", "\"").into() } else { cell.into() });
                &quoted[end + 1..]
            }
        };
        match after.strip_prefix(separator) {
            Some(next) => rest = next,
            None if after.is_empty() => return Ok(()),
            None => return Err(LineError::Bad("it has a text after a quote")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cells(line: &str, separator: char) -> Result<Vec<String>, LineError> {
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
        let parse = |line: &str| Columns::parse(line, &FieldNames::default());
        let columns = parse("Time,ip,\"path\",header.X-User-Id,tenant").expect("columns");
        assert_eq!(columns.others(), ["header.X-User-Id", "tenant"]);
        assert!(parse("timestamp\tclient_ip\tmethod\turl").is_some());
        assert!(parse("#Fields: date time c-ip cs-method cs-uri-stem").is_some());
        for line in ["ip,path", "", "1.2.3.4 - - [time]", "time,{x}", "\"time"] {
            assert!(parse(line).is_none(), "{line}");
        }
    }
}
