//! What is wrong with a configuration, where, and what would be right.

use std::fmt;

use serde::de::DeserializeOwned;
use serde_saphyr::{Location, Options, Spanned};

/// A text that errors can point into.
#[derive(Debug, Clone, Copy)]
pub struct Document<'a> {
    name: &'a str,
    text: &'a str,
}

/// One error, with the line that it is about.
#[derive(Debug, Clone)]
pub struct ConfigError {
    file: String,
    place: Option<Place>,
    message: String,
}

#[derive(Debug, Clone)]
struct Place {
    line: usize,
    column: usize,
    source: String,
}

impl<'a> Document<'a> {
    /// `name` is what errors call it.
    #[must_use]
    pub fn new(name: &'a str, text: &'a str) -> Self {
        Self { name, text }
    }

    /// What it says. Nothing but comments says every default.
    pub fn parse<T: DeserializeOwned + Default>(&self) -> Result<T, ConfigError> {
        if self.text.lines().all(|line| line.trim().is_empty() || line.trim_start().starts_with('#')) {
            return Ok(T::default());
        }
        let mut options = Options::default();
        options.with_snippet = false;
        serde_saphyr::from_str_with_options(self.text, options).map_err(|error| {
            let message = error.without_snippet().to_string();
            let message = message.split(" at line ").next().unwrap_or(&message).trim().to_owned();
            self.error(error.location(), with_suggestion(&message))
        })
    }

    /// An error about this value.
    #[must_use]
    pub fn at<T>(&self, value: &Spanned<T>, message: &str) -> ConfigError {
        self.error(Some(value.referenced), message.to_owned())
    }

    /// An error about a name that is none of those allowed.
    #[must_use]
    pub fn at_name(&self, value: &Spanned<String>, message: &str) -> ConfigError {
        self.error(Some(value.referenced), with_suggestion(message))
    }

    /// An error about the whole.
    #[must_use]
    pub fn plain(&self, message: &str) -> ConfigError {
        self.error(None, message.to_owned())
    }

    fn error(&self, location: Option<Location>, message: String) -> ConfigError {
        let place = location.and_then(|location| {
            let line = usize::try_from(location.line()).ok()?;
            let column = usize::try_from(location.column()).ok()?;
            let source = self.text.lines().nth(line.checked_sub(1)?)?.to_owned();
            Some(Place { line, column, source })
        });
        ConfigError { file: self.name.to_owned(), place, message }
    }
}

/// Adds the nearest of the names that the message says would be right.
fn with_suggestion(message: &str) -> String {
    // "unknown field `limt`, expected one of name, limit", "unknown mode "shadwo": it must be one of enforce, shadow"
    let Some((before, list)) = message.split_once("one of ") else { return message.to_owned() };
    let wrong = before.split(['`', '"']).nth(1).unwrap_or_default();
    let names = list.split(", ").map(|name| name.trim_matches('`'));
    let nearest = names.map(|name| (strsim::damerau_levenshtein(wrong, name), name)).min();
    match nearest {
        Some((distance, name)) if distance > 0 && distance <= 1 + wrong.chars().count() / 3 => {
            format!("{message} (did you mean `{name}`?)")
        }
        _ => message.to_owned(),
    }
}

impl ConfigError {
    /// A file that is not there, or not to be read.
    #[must_use]
    pub fn unreadable(file: &str, reason: &str) -> Self {
        Self { file: file.to_owned(), place: None, message: format!("cannot be read: {reason}") }
    }

    /// In one line, for logs.
    #[must_use]
    pub fn line(&self) -> String {
        match &self.place {
            Some(place) => format!("{}:{}:{}: {}", self.file, place.line, place.column, self.message),
            None => format!("{}: {}", self.file, self.message),
        }
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.line())?;
        if let Some(place) = &self.place {
            let number = place.line.to_string();
            let margin = " ".repeat(number.len());
            let indent = " ".repeat(place.column.saturating_sub(1));
            // A secret may stand in any line: only the key is shown of those that can hold one.
            write!(f, "\n{margin} |\n{number} | {}\n{margin} | {indent}^", shown(&place.source))?;
        }
        Ok(())
    }
}

impl std::error::Error for ConfigError {}

/// The line, without the value of a field that may be a secret.
fn shown(source: &str) -> String {
    let secret = ["redis:", "redis://", "rediss://", "token", "password"].iter().any(|word| source.contains(word));
    match source.split_once(':') {
        Some((field, _)) if secret => format!("{field}: …"),
        _ => source.chars().take(120).collect(),
    }
}
