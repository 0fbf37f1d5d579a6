//! What is wrong with a configuration, where, and what would be right.

use std::fmt;

use serde::de::DeserializeOwned;
use serde_saphyr::{Location, Options, Spanned};

/// A text that errors can point into.
#[derive(Debug, Clone, Copy)]
pub(super) struct Document<'a> {
    name: &'a str,
    text: &'a str,
}

/// One error, with the line that it is about.
#[derive(Debug, Clone)]
pub(crate) struct ConfigError {
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
    pub(super) fn new(name: &'a str, text: &'a str) -> Self {
        Self { name, text }
    }

    pub(super) fn parse<T: DeserializeOwned + Default>(&self) -> Result<T, ConfigError> {
        // Nothing but comments is a configuration with every default.
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
    pub(super) fn at<T>(&self, value: &Spanned<T>, message: &str) -> ConfigError {
        self.error(Some(value.referenced), message.to_owned())
    }

    /// An error about a name that is none of those allowed.
    pub(super) fn at_name(&self, value: &Spanned<String>, message: &str) -> ConfigError {
        self.error(Some(value.referenced), with_suggestion(message))
    }

    /// An error about the whole.
    pub(super) fn plain(&self, message: &str) -> ConfigError {
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
    pub(super) fn unreadable(file: &str, reason: &str) -> Self {
        Self { file: file.to_owned(), place: None, message: format!("cannot be read: {reason}") }
    }

    /// In one line, for logs.
    pub(crate) fn line(&self) -> String {
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

#[cfg(test)]
mod tests {
    use crate::config::Config;

    fn error(text: &str) -> String {
        Config::parse("tidegate.yaml", text).expect_err("wrong").to_string()
    }

    #[test]
    fn an_error_shows_file_line_field_and_the_nearest_right_name() {
        let text = error("policies:\n  - name: a\n    limt: 5\n    window: 60s\n");
        assert!(text.starts_with("tidegate.yaml:3:5: unknown field `limt`"), "{text}");
        assert!(text.contains("did you mean `limit`?"), "{text}");
        assert!(text.ends_with("  |\n3 |     limt: 5\n  |     ^"), "{text}");
    }

    #[test]
    fn what_parses_but_cannot_work_is_shown_in_its_place_too() {
        let policy = |lines: &str| format!("policies:\n  - name: a\n    limit: 5\n    window: 60s\n{lines}");
        for (text, place, message) in [
            (policy("").replace("limit: 5", "limit: 0"), "tidegate.yaml:3:12:", "from 1 to 1000000000000"),
            (policy("").replace("60s", "60"), "tidegate.yaml:4:13:", "write it like 500ms"),
            (policy("    algorithm: tokn-bucket\n"), "tidegate.yaml:5:16:", "did you mean `token-bucket`?"),
            (policy("    burst: 9\n"), "tidegate.yaml:5:12:", "has no burst"),
            (policy("    mode: shadwo\n"), "tidegate.yaml:5:11:", "did you mean `shadow`?"),
            (policy("    cost: 6\n"), "tidegate.yaml:2:11:", "at most 5 at once"),
            (policy("    name: b\n"), "tidegate.yaml:5:5:", "duplicate"),
            (policy("  - name: a\n    limit: 5\n    window: 60s\n"), "tidegate.yaml:", "used twice"),
            ("listen: {http: localhost}\n".to_owned(), "tidegate.yaml:1:16:", "127.0.0.1:8080"),
            ("listen: {admin: 0.0.0.0:9}\n".to_owned(), "tidegate.yaml:", "auth.admin_token"),
            ("policies: 5\n".to_owned(), "tidegate.yaml:1", "sequence"),
        ] {
            let found = error(&text);
            assert!(found.starts_with(place) && found.contains(message), "{text}\n{found}");
        }
    }

    #[test]
    fn no_error_shows_a_secret() {
        for text in [
            "store: {redis: 'redis://:hunter2@h', prefx: x}\n",
            "auth: {api_token: hunter2, admin_tokn: hunter2}\n",
            "auth:\n  api_token: [hunter2]\n",
            "store:\n  redis: {a: hunter2}\n",
        ] {
            let found = error(text);
            assert!(!found.contains("hunter2"), "{found}");
        }
    }
}
