//! Errors in rules, and warnings about them.

use std::fmt;

use serde_saphyr::Location;
use tidegate::QuotaError;

use super::Unit;
use super::fields::Note;
use super::raw::{MAX_FILE_BYTES, MAX_NODES, MAX_TEXT_BYTES};
use crate::warning::ConfigWarning;

/// Maximum number of warnings: more would only fill the log.
const MAX_WARNINGS: usize = 100;

/// Error in a file, with its location and how to fix it.
#[derive(Debug, thiserror::Error)]
#[error("{location}: {kind}")]
pub struct RulesError {
    /// File and line, or the field of the configuration.
    pub(super) location: String,
    pub(super) kind: RulesErrorKind,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum RulesErrorKind {
    #[error("has {0} bytes: at most {MAX_FILE_BYTES} are allowed")]
    TooLarge(usize),
    #[error("there are more than {MAX_NODES} descriptors")]
    TooManyDescriptors,
    #[error("{field} has {length} bytes: at most {MAX_TEXT_BYTES} are allowed")]
    TextTooLong { field: &'static str, length: usize },
    #[error("{field}{message}")]
    Yaml { field: String, message: String },
    #[error("domain is missing or empty: write the domain that Envoy's rate limit filter sends")]
    MissingDomain,
    #[error("key is missing or empty: a descriptor needs the key of an entry")]
    MissingKey,
    #[error("descriptor {path:?} is already defined at {first}: merge the two")]
    DuplicateDescriptor { path: String, first: String },
    #[error("share_threshold needs a wildcard to share: write a value with a *, such as files/*")]
    NoWildcardToShare,
    #[error("rate_limit.unit is missing: it must be one of {}", Unit::names())]
    MissingUnit,
    #[error("unit: {0:?} is not a unit: it must be one of {names}", names = Unit::names())]
    UnknownUnit(String),
    #[error("rate_limit has both unlimited and the unit {}: remove one of them", .0.as_str())]
    UnlimitedWithUnit(Unit),
    #[error("rate_limit.{field}: {error}")]
    Quota { field: &'static str, error: QuotaError },
    #[error(
        "rate_limit.replaces has an entry without a name: write the name of the rule to replace"
    )]
    MissingReplacedName,
    #[error("rate_limit.replaces has the rule's own name {0:?}: a rule cannot replace itself")]
    ReplacesItself(String),
    #[error("no rule is named {name:?}: {known}")]
    UnknownRule { name: String, known: String },
}

/// Location in a file.
#[derive(Clone, Copy)]
pub(super) struct FileLocation<'a> {
    pub(super) file: &'a str,
    pub(super) location: Location,
}

impl FileLocation<'_> {
    pub(super) fn error(&self, kind: RulesErrorKind) -> RulesError {
        RulesError { location: self.to_string(), kind }
    }
}

impl fmt::Display for FileLocation<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.location.line() {
            0 => f.write_str(self.file),
            line => write!(f, "{}:{line}", self.file),
        }
    }
}

/// Warnings about all files.
#[derive(Default)]
pub(super) struct Warnings {
    list: Vec<ConfigWarning>,
    omitted: usize,
}

impl Warnings {
    /// Adds the notes on a file. Aliases repeat a part of it, so equal ones are added once.
    pub(super) fn add(&mut self, file: &str, notes: Vec<Note>) {
        for Note { location, kind } in notes {
            let line = Some(location.line()).filter(|line| *line > 0);
            let warning = ConfigWarning { file: file.to_owned(), line, message: kind.to_string() };
            if self.list.contains(&warning) {
                continue;
            }
            if self.list.len() < MAX_WARNINGS {
                self.list.push(warning);
            } else {
                self.omitted += 1;
            }
        }
    }

    pub(super) fn into_list(mut self) -> Vec<ConfigWarning> {
        if let (Some(last), 1..) = (self.list.last(), self.omitted) {
            let message = format!("{} more warnings are not shown", self.omitted);
            self.list.push(ConfigWarning { file: last.file.clone(), line: None, message });
        }
        self.list
    }
}
