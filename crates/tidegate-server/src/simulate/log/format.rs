//! Recognition of the format of a file, and the parser of its lines.

use super::csv::Columns;
use super::record::{Escapes, Record};
use super::time::CombinedTime;
use super::{LogFormat, combined, json};

/// Parser of the lines of one file.
#[derive(Debug)]
pub(super) enum Parser {
    Combined(CombinedTime),
    Json,
    Csv(Columns),
}

impl Parser {
    /// Recognizes the format by a line. The first line of a CSV file is not a request.
    pub(super) fn detect(format: LogFormat, line: &[u8]) -> Option<Self> {
        let line = line.strip_prefix(b"\xef\xbb\xbf").unwrap_or(line);
        match format {
            LogFormat::Combined => Some(Self::Combined(CombinedTime::default())),
            LogFormat::Json => Some(Self::Json),
            LogFormat::Csv => Columns::parse(line).map(Self::Csv),
            LogFormat::Auto => {
                if json::parse(line).is_ok() {
                    return Some(Self::Json);
                }
                let mut times = CombinedTime::default();
                if combined::parse(line, &mut times).is_ok() {
                    return Some(Self::Combined(times));
                }
                Columns::parse(line).map(Self::Csv)
            }
        }
    }

    /// Parses the line of a record.
    pub(super) fn parse(&mut self, record: &mut Record) -> Result<(), &'static str> {
        let (fields, escapes) = match self {
            Self::Combined(times) => (combined::parse(&record.line, times)?, Escapes::Combined),
            Self::Json => (json::parse(&record.line)?, Escapes::Json),
            Self::Csv(columns) => (columns.fields(record)?, Escapes::Csv),
        };
        record.fields = fields;
        record.escapes = escapes;
        Ok(())
    }
}
