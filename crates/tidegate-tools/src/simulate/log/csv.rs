//! Comma-separated values (RFC 4180). The names of the columns are attributes, and `time`, `target`
//! and `cost`.

use super::record::Record;
use super::time;

/// Columns of a file.
#[derive(Debug)]
pub(super) struct Columns {
    names: Vec<String>,
    time: usize,
    cost: Option<usize>,
    status: Option<usize>,
    /// Columns of the attributes that have a field in every request.
    fields: Vec<(&'static str, usize)>,
    cells: Cells,
}

impl Columns {
    /// Parses the first line. `None`: it does not have the names of columns.
    pub(super) fn parse(line: &str) -> Option<Self> {
        let mut cells = Cells::new();
        let name = |cell: &str| {
            let text = cell.trim();
            // Names of headers are case-insensitive.
            if text.contains('.') { text.to_owned() } else { text.to_ascii_lowercase() }
        };
        let names: Vec<String> = cells.split(line).ok()?.map(name).collect();
        let is_part = |c: char| c.is_ascii_alphanumeric() || "._- ".contains(c);
        if !names.iter().all(|name| name.chars().all(is_part)) {
            return None;
        }
        let find = |wanted: &[&str]| names.iter().position(|name| wanted.contains(&name.as_str()));
        let fields = [
            ("ip", find(&["ip", "client", "remote_addr"])),
            ("method", find(&["method"])),
            ("target", find(&["target", "path", "uri"])),
            ("host", find(&["host"])),
        ];
        Some(Self {
            time: find(&["time", "timestamp", "ts"])?,
            cost: find(&["cost"]),
            status: find(&["status"]),
            fields: fields.into_iter().filter_map(|(name, at)| Some((name, at?))).collect(),
            names,
            cells,
        })
    }

    /// Returns the names of the columns that have no field of their own.
    pub(super) fn others(&self) -> Vec<String> {
        let is_other = |(position, _): &(usize, &String)| {
            let is_field = self.fields.iter().any(|(_, field)| field == position);
            *position != self.time && self.cost != Some(*position) && !is_field
        };
        self.names.iter().enumerate().filter(is_other).map(|(_, name)| name.clone()).collect()
    }

    /// Reads the cells of a line.
    pub(super) fn read(&mut self, line: &str, record: &mut Record) -> Result<(), &'static str> {
        let cells: Vec<&str> = self.cells.split(line)?.collect();
        if cells.len() != self.names.len() {
            return Err("it does not have as many cells as the first line");
        }
        let time = time::any(cells[self.time]);
        record.time = time.ok_or("its time is neither RFC 3339 nor seconds since 1970")?;
        record.cost = match self.cost.map(|cost| cells[cost].trim()) {
            None | Some("") => None,
            Some(text) => Some(text.parse().map_err(|_| "its cost is not a number")?),
        };
        record.status = self.status.and_then(|status| cells[status].trim().parse().ok());
        for (name, cell) in self.names.iter().zip(&cells) {
            record.push(name, cell);
        }
        // The fields may have other names in the file.
        for (name, position) in &self.fields {
            record.push(name, cells[*position]);
        }
        Ok(())
    }
}

/// Cells of a line, without their quotes.
#[derive(Debug)]
struct Cells {
    reader: Box<csv_core::Reader>,
    text: Vec<u8>,
    ends: Vec<usize>,
}

impl Cells {
    fn new() -> Self {
        let end = csv_core::Terminator::Any(b'\n');
        let reader = csv_core::ReaderBuilder::new().terminator(end).build();
        Self { reader: Box::new(reader), text: Vec::new(), ends: Vec::new() }
    }

    fn split(&mut self, line: &str) -> Result<impl Iterator<Item = &str>, &'static str> {
        self.reader.reset();
        self.text.resize(line.len() + 1, 0);
        self.ends.resize(line.len() + 1, 0);
        let (_, _, length, count) =
            self.reader.read_record(line.as_bytes(), &mut self.text, &mut self.ends);
        // A line break inside quotes does not end the record.
        let (end, _, _, last) =
            self.reader.read_record(b"\n", &mut self.text[length..], &mut self.ends[count..]);
        if end != csv_core::ReadRecordResult::Record {
            return Err("a quote in it is not closed");
        }
        let text = str::from_utf8(&self.text[..length]).unwrap_or_default();
        let mut start = 0;
        Ok(self.ends[..count + last].iter().map(move |end| {
            let cell = text.get(start..*end).unwrap_or_default();
            start = *end;
            cell
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_line_names_the_columns() {
        let columns = Columns::parse("\u{feff}Time,ip,\"path\",header.X-User-Id,status");
        let mut columns = columns.expect("columns");
        assert_eq!(columns.others(), ["header.X-User-Id", "status"]);
        let mut record = Record::default();
        columns.read("1,1.2.3.4,/a,ann,200", &mut record).expect("a request");
        let names = ["ip", "target", "header.x-user-id", "status"];
        let found = names.map(|name| record.last(name).unwrap_or_default());
        assert_eq!(found, ["1.2.3.4", "/a", "ann", "200"]);
        for line in ["ip,path", "", "1.2.3.4 - - [time]", "time,{x}", "\"time"] {
            assert!(Columns::parse(line).is_none(), "{line}");
        }
    }

    #[test]
    fn cells_may_have_quotes_and_commas() {
        let mut columns = Columns::parse("time,path,cost").expect("columns");
        let mut fields = |line: &str| {
            let mut record = Record::default();
            columns.read(line, &mut record)?;
            let path = record.last("target").unwrap_or_default().to_owned();
            Ok::<_, &'static str>((record.time, path, record.cost))
        };
        assert_eq!(fields("1.5,/a,").expect("valid"), (1_500_000, "/a".to_owned(), None));
        let quoted = fields(r#""2","/a,""b"" ü",7"#).expect("valid");
        assert_eq!(quoted, (2_000_000, r#"/a,"b" ü"#.to_owned(), Some(7)));
        assert_eq!(fields("1,\r,2").expect("valid"), (1_000_000, "\r".to_owned(), Some(2)));
        for (line, reason) in [
            ("1,/a", "it does not have as many cells"),
            ("1,\"/a,1", "a quote in it is not closed"),
            ("1,/a,\"1", "a quote in it is not closed"),
            ("noon,/a,1", "its time is neither"),
            ("1,/a,many", "its cost is not a number"),
        ] {
            let error = fields(line).expect_err(line);
            assert!(error.starts_with(reason), "{line}: {error}");
            assert!(fields("1,/a,1").is_ok(), "a bad line does not change the next one");
        }
    }
}
