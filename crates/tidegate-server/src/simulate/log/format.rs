//! Recognition of the format of a file, and the parser of its lines.

use super::csv::Columns;
use super::record::Record;
use super::{LogFileFormat, combined, json};

/// Parser of the lines of one file.
#[derive(Debug)]
pub(super) enum LineParser {
    Combined,
    Json,
    Csv(Columns),
}

impl LineParser {
    /// Recognizes the format by a line. The first line of a CSV file is not a request.
    pub(super) fn detect(format: LogFileFormat, line: &str) -> Option<Self> {
        let record = &mut Record::default();
        match format {
            LogFileFormat::Combined => Some(Self::Combined),
            LogFileFormat::Json => Some(Self::Json),
            LogFileFormat::Auto if json::parse(line, record).is_ok() => Some(Self::Json),
            LogFileFormat::Auto if combined::parse(line, record).is_ok() => Some(Self::Combined),
            LogFileFormat::Auto | LogFileFormat::Csv => Columns::parse(line).map(Self::Csv),
        }
    }

    /// Reads a line into an empty record.
    pub(super) fn parse(&mut self, line: &str, record: &mut Record) -> Result<(), &'static str> {
        match self {
            Self::Combined => combined::parse(line, record),
            Self::Json => json::parse(line, record),
            Self::Csv(columns) => columns.read(line, record),
        }
    }
}
