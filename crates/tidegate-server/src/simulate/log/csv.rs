//! Comma-separated values (RFC 4180). The names of the columns are attributes, and `time`, `target`
//! and `cost`.

use super::record::{Fields, Record, Span};
use super::time;

/// Columns of a file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Columns {
    names: Vec<String>,
    time: usize,
    address: Option<usize>,
    method: Option<usize>,
    target: Option<usize>,
    host: Option<usize>,
    cost: Option<usize>,
}

impl Columns {
    /// Parses the first line. `None`: it does not have the names of columns.
    pub(super) fn parse(line: &[u8]) -> Option<Self> {
        let line = line.strip_prefix(b"\xef\xbb\xbf").unwrap_or(line);
        let mut cells = Vec::new();
        split(line, &mut cells).ok()?;
        let name = |cell: &Span| {
            let text = String::from_utf8_lossy(cell.of(line)).trim().trim_matches('"').to_owned();
            // Names of headers are case-insensitive.
            if text.contains('.') { text } else { text.to_ascii_lowercase() }
        };
        let names: Vec<String> = cells.iter().map(name).collect();
        let is_name = |name: &String| {
            let is_part = |c: char| c.is_ascii_alphanumeric() || "._- ".contains(c);
            name.chars().all(is_part)
        };
        if !names.iter().all(is_name) {
            return None;
        }
        let find = |wanted: &[&str]| names.iter().position(|name| wanted.contains(&name.as_str()));
        Some(Self {
            time: find(&["time", "timestamp", "ts"])?,
            address: find(&["ip", "client", "remote_addr"]),
            method: find(&["method"]),
            target: find(&["target", "path", "uri"]),
            host: find(&["host"]),
            cost: find(&["cost"]),
            names,
        })
    }

    /// Returns the position of the column of an attribute that has no field of its own.
    pub(super) fn position(&self, attribute: &str) -> Option<usize> {
        let is_special = matches!(attribute, "ip" | "method" | "path" | "host");
        if is_special {
            return None;
        }
        self.names.iter().position(|name| name.eq_ignore_ascii_case(attribute))
    }

    /// Returns the names of the columns that have no field of their own.
    pub(super) fn others(&self) -> Vec<String> {
        let special = [self.address, self.method, self.target, self.host, self.cost];
        let is_other = |(position, _): &(usize, &String)| {
            *position != self.time && !special.contains(&Some(*position))
        };
        self.names.iter().enumerate().filter(is_other).map(|(_, name)| name.clone()).collect()
    }

    /// Finds the fields of a line.
    pub(super) fn fields(&self, record: &mut Record) -> Result<Fields, &'static str> {
        split(&record.line, &mut record.cells)?;
        if record.cells.len() != self.names.len() {
            return Err("it does not have as many cells as the first line");
        }
        let cell = |position: Option<usize>| {
            position.map(|position| record.cells[position]).unwrap_or_default()
        };
        let unquoted = |cell: Span| {
            let text = cell.of(&record.line).trim_ascii();
            text.strip_prefix(b"\"").and_then(|rest| rest.strip_suffix(b"\"")).unwrap_or(text)
        };
        let time = time::any(unquoted(record.cells[self.time]));
        let cost = match unquoted(cell(self.cost)) {
            b"" => None,
            text => {
                let number = str::from_utf8(text).ok().and_then(|text| text.parse().ok());
                Some(number.ok_or("its cost is not a number")?)
            }
        };
        Ok(Fields {
            time: time.ok_or("its time is neither RFC 3339 nor seconds since 1970")?,
            address: cell(self.address),
            method: cell(self.method),
            target: cell(self.target),
            host: cell(self.host),
            cost,
            ..Fields::default()
        })
    }
}

/// Finds the cells of a line. Those in quotes keep them.
fn split(line: &[u8], cells: &mut Vec<Span>) -> Result<(), &'static str> {
    cells.clear();
    let mut start = 0;
    loop {
        let mut at = start;
        if line.get(start) == Some(&b'"') {
            at = quoted_end(line, start).ok_or("a quote in it is not closed")?;
            if line.get(at).is_some_and(|byte| *byte != b',') {
                return Err("a quoted cell in it does not end with a comma");
            }
        }
        let end = memchr::memchr(b',', &line[at..]).map_or(line.len(), |comma| at + comma);
        cells.push(Span::new(start..end));
        if end == line.len() {
            return Ok(());
        }
        start = end + 1;
    }
}

/// Returns the end of a cell in quotes.
fn quoted_end(line: &[u8], start: usize) -> Option<usize> {
    let mut at = start + 1;
    loop {
        at += memchr::memchr(b'"', line.get(at..)?)? + 1;
        if line.get(at) != Some(&b'"') {
            return Some(at);
        }
        at += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_line_names_the_columns() {
        let columns = Columns::parse(b"\xef\xbb\xbfTime,ip,\"path\",header.X-User-Id,status");
        let columns = columns.expect("columns");
        assert_eq!((columns.time, columns.address, columns.target), (0, Some(1), Some(2)));
        assert_eq!(columns.position("header.x-user-id"), Some(3));
        assert_eq!(columns.position("path"), None, "it has a field of its own");
        assert_eq!(columns.others(), ["header.X-User-Id", "status"]);
        for line in ["ip,path", "", "1.2.3.4 - - [time]", "time,{x}", "\"time"] {
            assert_eq!(Columns::parse(line.as_bytes()), None, "{line}");
        }
    }

    #[test]
    fn cells_may_have_quotes_and_commas() {
        let columns = Columns::parse(b"time,path,cost").expect("columns");
        let fields = |line: &str| {
            let mut record = Record { line: line.as_bytes().to_vec(), ..Record::default() };
            let fields = columns.fields(&mut record)?;
            let path = String::from_utf8_lossy(fields.target.of(&record.line)).into_owned();
            Ok::<_, &'static str>((fields.time, path, fields.cost))
        };
        assert_eq!(fields("1.5,/a,").expect("valid"), (1_500_000, "/a".to_owned(), None));
        let quoted = fields(r#""2","/a,""b""",7"#).expect("valid");
        assert_eq!(quoted, (2_000_000, r#""/a,""b""""#.to_owned(), Some(7)));
        for (line, reason) in [
            ("1,/a", "it does not have as many cells"),
            ("1,\"/a,1", "a quote in it is not closed"),
            ("1,\"/a\"b,1", "a quoted cell in it"),
            ("noon,/a,1", "its time is neither"),
            ("1,/a,many", "its cost is not a number"),
        ] {
            let error = fields(line).expect_err(line);
            assert!(error.starts_with(reason), "{line}: {error}");
        }
    }
}
