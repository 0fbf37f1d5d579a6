//! [`Document`]: a configuration text, and [`ConfigError`]: an error with its position.

use std::fmt;

use serde::de::{
    self, Deserialize, DeserializeOwned, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor,
};
use serde_saphyr::{Error, Location, Spanned};

use super::message::{self, with_suggestion};
use super::redaction::{self, Redaction, is_name_char, without_quoted, without_userinfo};
use super::syntax;
use super::variables::{self, Lookup, WithVariables};

/// Number of characters of the longest message, and of the longest line below it.
const MAX_MESSAGE: usize = 1_000;
const MAX_LINE: usize = 120;

/// Configuration text that errors refer to.
///
/// [`load_policies`](crate::load_policies) is enough for a file of policies. A program whose file
/// has further sections parses them by a document, so that all errors have the same form, with
/// file, line and column:
///
/// ```
/// use serde::Deserialize;
/// use serde_saphyr::Spanned;
/// use tidegate_config::policies::{self, RawPaths, RawPolicy};
/// use tidegate_config::yaml::Document;
///
/// #[derive(Deserialize)]
/// #[serde(deny_unknown_fields)]
/// struct Settings {
///     listen: String,
///     #[serde(default)]
///     attributes: Vec<Spanned<String>>,
///     #[serde(default)]
///     paths: RawPaths,
///     policies: Vec<RawPolicy>,
/// }
///
/// let text = "
/// listen: 127.0.0.1:8080
/// policies:
///   - {name: per-user, key: header.x-user-id, limit: 100, window: 60s}
/// ";
/// let document = Document::new("server.yaml", text);
/// let settings: Settings = document.parse()?;
/// let (attributes, paths) = (&settings.attributes, &settings.paths);
/// let policies = policies::from_raw(&document, attributes, paths, 64, settings.policies)?;
/// assert_eq!(settings.listen, "127.0.0.1:8080");
/// assert!(policies.get("per-user").is_some());
/// # Ok::<(), tidegate_config::ConfigError>(())
/// ```
///
/// `${NAME}` in a value is replaced by that environment variable, which must be set, and
/// `${NAME:-default}` by the default if it is not; `$${` stands for `${`.
#[derive(Debug, Clone, Copy)]
pub struct Document<'a> {
    name: &'a str,
    text: &'a str,
    redaction: &'a Redaction,
    /// Source of variables; `None` if they are not replaced.
    variables: Option<Lookup>,
}

/// Error in a configuration, with the offending line.
///
/// Its `Display` has several lines, for a terminal; [`line`](Self::line) is for logs. Lines that
/// may hold secrets are masked; see [`Redaction`].
///
/// ```
/// use tidegate::Policies;
///
/// let text = "policies:\n  - {name: per-user, limit: 100, window: 60 seconds}\n";
/// let error = tidegate_config::parse_policies("limits.yaml", text).unwrap_err();
/// assert_eq!(error.file(), "limits.yaml");
/// assert_eq!(error.position(), Some((2, 42)));
/// assert!(error.line().starts_with("limits.yaml:2:42: window: "));
/// assert!(error.to_string().contains("window: 60 seconds}"));
/// ```
#[derive(Debug, Clone)]
pub struct ConfigError {
    file: String,
    position: Option<SourceLine>,
    message: String,
}

#[derive(Debug, Clone)]
struct SourceLine {
    line: usize,
    column: usize,
    /// Text of the line, with secrets masked.
    text: String,
}

/// Maximum number of values in a document.
pub(super) const MAX_NODES: usize = 2_000_000;

impl<'a> Document<'a> {
    /// Creates a document. `name` is the file name in error messages.
    #[must_use]
    pub fn new(name: &'a str, text: &'a str) -> Self {
        let variables = Some(variables::environment as Lookup);
        Self { name, text, redaction: &Redaction::DEFAULT, variables }
    }

    /// Keeps `${NAME}` in values as it is, for a machine without the variables.
    #[must_use]
    pub fn without_variables(mut self) -> Self {
        self.variables = None;
        self
    }

    /// Replaces variables that are not set by a number, which is also a text.
    pub(crate) fn offline(mut self) -> Self {
        self.variables = Some(|name| variables::environment(name).or_else(|_| Ok("1".to_owned())));
        self
    }

    /// Returns the name of the file.
    #[must_use]
    pub fn name(&self) -> &'a str {
        self.name
    }

    /// Sets the names that error messages may show; see [`Redaction`].
    #[must_use]
    pub fn with_redaction(mut self, redaction: &'a Redaction) -> Self {
        self.redaction = redaction;
        self
    }

    /// Parses the text as YAML. An empty text is an error, because a file that is being written is
    /// empty at first.
    ///
    /// # Errors
    ///
    /// The first error in the text, at its position. An unknown field has a suggestion if a similar
    /// one exists.
    pub fn parse<T: DeserializeOwned>(&self) -> Result<T, ConfigError> {
        let is_blank = self
            .text
            .lines()
            .all(|line| line.trim().is_empty() || line.trim_start().starts_with('#'));
        if is_blank || self.read::<Content>().is_ok_and(|content| content == Content::Empty) {
            return Err(self.error("is empty: `tidegate config sample` prints an example"));
        }
        self.read().map_err(|error| {
            let error = error.without_snippet();
            if let Some(cause) = syntax::cause(self.text, error) {
                let place = Some((cause.line, cause.column));
                return self.located(place, &cause.message, Redaction::line_without_unknown);
            }
            let locations = error
                .locations()
                .map(|locations| [locations.reference_location, locations.defined_location]);
            // An unknown field is named in the message; its value is never part of it.
            let is_unknown_field = matches!(error, Error::SerdeUnknownField { .. });
            let is_about_variable = variables::is_error(&error.to_string());
            let is_secret = locations.is_none_or(|locations| {
                locations.into_iter().any(|location| {
                    self.is_secret(location)
                        || (!is_unknown_field && self.is_unknown(location))
                        || (!is_about_variable && self.has_variable(location))
                })
            });
            let mut message = message::describe(error, is_secret, self.redaction);
            let place = error.location().and_then(place_of);
            if let (Some((line, column)), true) = (place, message.starts_with("must be a text")) {
                message.push_str(syntax::note_on_type(self.text, line, column));
            }
            self.located(place, &message, Redaction::line_without_unknown)
        })
    }

    fn read<T: DeserializeOwned>(&self) -> Result<T, serde_saphyr::Error> {
        // Enough for some hundred thousand overrides.
        let mut options = serde_saphyr::options! {
            budget: serde_saphyr::budget! {
                max_nodes: MAX_NODES,
                max_events: 2 * MAX_NODES,
                // Overrides may repeat one limit by its alias.
                max_aliases: MAX_NODES,
                enforce_alias_anchor_ratio: false,
            },
        };
        options.with_snippet = false;
        // As in YAML 1.2 and in JSON Schema, `yes` is a text.
        options.strict_booleans = true;
        let Some(lookup) = self.variables.filter(|_| self.text.contains("${")) else {
            return serde_saphyr::from_str_with_options(self.text, options);
        };
        serde_saphyr::with_deserializer_from_str_with_options(self.text, options, |document| {
            T::deserialize(WithVariables::new(document, lookup))
        })
    }

    /// Returns an error about this value, for checks that a type cannot express:
    ///
    /// ```
    /// use std::collections::BTreeMap;
    /// use serde_saphyr::Spanned;
    /// use tidegate_config::yaml::Document;
    ///
    /// let document = Document::new("server.yaml", "port: 70000\n");
    /// let fields: BTreeMap<String, Spanned<u64>> = document.parse()?;
    /// let error = document.error_at(&fields["port"], "must be at most 65535");
    /// assert_eq!(error.position(), Some((1, 7)));
    /// # Ok::<(), tidegate_config::ConfigError>(())
    /// ```
    #[must_use]
    pub fn error_at<T>(&self, value: &Spanned<T>, message: &str) -> ConfigError {
        let is_secret = [value.referenced, value.defined]
            .into_iter()
            .any(|location| self.is_secret(location) || self.has_variable(location));
        let message = if is_secret { without_quoted(message) } else { message.to_owned() };
        self.error_at_place(place_of(value.referenced), &message)
    }

    /// Returns an error about an unknown name, with a suggestion if the message lists similar ones.
    #[must_use]
    pub fn unknown_name_at(&self, value: &Spanned<String>, message: &str) -> ConfigError {
        self.error_at(value, &with_suggestion(message))
    }

    /// Returns an error about the whole document, without a position.
    #[must_use]
    pub fn error(&self, message: &str) -> ConfigError {
        self.error_at_place(None, message)
    }

    fn is_secret(&self, location: Location) -> bool {
        let line = usize::try_from(location.line()).unwrap_or_default();
        line.checked_sub(1).is_none_or(|line| self.redaction.may_be_secret(self.text, line))
    }

    /// Returns whether a value may contain that of a variable, which messages do not show: they
    /// quote the line, with the name of the variable.
    fn has_variable(&self, location: Location) -> bool {
        let line = usize::try_from(location.line()).unwrap_or_default();
        let line = line.checked_sub(1).and_then(|line| redaction::lines(self.text).nth(line));
        self.variables.is_some() && line.is_some_and(|line| line.contains("${"))
    }

    fn is_unknown(&self, location: Location) -> bool {
        let line = usize::try_from(location.line()).unwrap_or_default();
        line.checked_sub(1).is_none_or(|line| self.redaction.has_unknown(self.text, line))
    }

    /// Returns an error at a line and column, from 1.
    fn error_at_place(&self, place: Option<(usize, usize)>, message: &str) -> ConfigError {
        self.located(place, message, Redaction::redacted_line)
    }

    /// Returns an error with the line as `shown` returns it.
    fn located(
        &self,
        place: Option<(usize, usize)>,
        message: &str,
        shown: fn(&Redaction, &str, usize) -> String,
    ) -> ConfigError {
        let position = place.and_then(|(line, column)| {
            redaction::lines(self.text).nth(line.checked_sub(1)?)?;
            let text = shown(self.redaction, self.text, line - 1);
            let text = message::shortened(&text, MAX_LINE).into_owned();
            Some(SourceLine { line, column, text })
        });
        let field = position
            .as_ref()
            .and_then(|position| self.field_before(position))
            .filter(|field| !message.contains(field));
        let message = without_userinfo(
            &field.map_or_else(|| message.to_owned(), |field| format!("{field}: {message}")),
        );
        let message = message::shortened(&message, MAX_MESSAGE).into_owned();
        ConfigError { file: self.name.to_owned(), position, message }
    }

    /// Returns the name of the field whose value is at this position.
    fn field_before(&self, position: &SourceLine) -> Option<&'a str> {
        let line = redaction::lines(self.text).nth(position.line - 1)?;
        let (start, _) = line.char_indices().nth(position.column.checked_sub(1)?)?;
        let before = line[..start].trim_end().strip_suffix(':')?;
        let field = before.rsplit(|character| !is_name_char(character)).next()?;
        let is_shown = self.redaction.is_known_name(field)
            || !self.redaction.may_be_secret(self.text, position.line - 1);
        (is_shown && !field.is_empty()).then_some(field)
    }
}

/// Returns the line and column.
fn place_of(location: Location) -> Option<(usize, usize)> {
    Some((usize::try_from(location.line()).ok()?, usize::try_from(location.column()).ok()?))
}

/// Whether a document has any content.
#[derive(PartialEq)]
enum Content {
    Empty,
    Present,
}

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ContentVisitor;
        impl<'de> Visitor<'de> for ContentVisitor {
            type Value = Content;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a document")
            }

            fn visit_unit<E: de::Error>(self) -> Result<Content, E> {
                Ok(Content::Empty)
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Content, A::Error> {
                let mut content = Content::Empty;
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {
                    content = Content::Present;
                }
                Ok(content)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Content, A::Error> {
                while list.next_element::<IgnoredAny>()?.is_some() {}
                Ok(Content::Present)
            }
        }
        deserializer.deserialize_any(ContentVisitor)
    }
}

impl ConfigError {
    /// Creates the error for a file that is missing or cannot be read.
    #[must_use]
    pub fn unreadable(file: &str, reason: &str) -> Self {
        Self { file: file.to_owned(), position: None, message: format!("cannot be read: {reason}") }
    }

    /// Creates an error about a subject as a whole, such as a variable.
    pub(crate) fn of_subject(subject: String, message: &str) -> Self {
        Self { file: subject, position: None, message: message.to_owned() }
    }

    /// Creates the error for a file that cannot be read for this reason.
    #[must_use]
    pub fn from_io(file: &str, error: &std::io::Error) -> Self {
        if error.kind() == std::io::ErrorKind::InvalidData {
            return Self::unreadable(file, "it is not UTF-8: save it with this encoding");
        }
        Self::unreadable(file, &error.to_string())
    }

    /// Returns the error in one line, for logs: `file:line:column: message`.
    #[must_use]
    pub fn line(&self) -> String {
        match &self.position {
            Some(position) => {
                format!("{}:{}:{}: {}", self.file, position.line, position.column, self.message)
            }
            None => format!("{}: {}", self.file, self.message),
        }
    }

    /// Returns the file name.
    #[must_use]
    pub fn file(&self) -> &str {
        &self.file
    }

    /// Returns the line and column, from 1, unless the error is about the whole file.
    #[must_use]
    pub fn position(&self) -> Option<(usize, usize)> {
        self.position.as_ref().map(|position| (position.line, position.column))
    }

    /// Moves the error to another column, and to the line that `other` shows.
    pub(crate) fn moved(mut self, column: usize, other: Option<&Self>) -> Self {
        if let Some(position) = &mut self.position {
            position.column = column;
            if let Some(shown) = other.and_then(|other| other.position.as_ref()) {
                position.text.clone_from(&shown.text);
            }
        }
        self
    }

    /// Returns the message, without the file and the position.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.message
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.line())?;
        if let Some(SourceLine { line, column, text }) = &self.position {
            let number = line.to_string();
            let margin = " ".repeat(number.len());
            // A masked line may be shorter than the original.
            let column = (*column).min(text.chars().count().max(1));
            let indent = " ".repeat(column.saturating_sub(1));
            write!(f, "\n{margin} |\n{number} | {text}\n{margin} | {indent}^")?;
        }
        Ok(())
    }
}

impl std::error::Error for ConfigError {}
