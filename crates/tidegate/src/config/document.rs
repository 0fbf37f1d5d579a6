//! What is wrong with a configuration, where, and what would be right.

use std::fmt;

use serde::de::{
    self, Deserialize, DeserializeOwned, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor,
};
use serde_saphyr::{Location, Options, Spanned};

use super::message::{self, with_suggestion};
use super::secrets::{self, is_name, is_of_name, may_be_secret, without_quoted, without_userinfo};

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
    /// As it may be shown.
    source: String,
}

impl<'a> Document<'a> {
    /// `name` is what errors call it.
    #[must_use]
    pub fn new(name: &'a str, text: &'a str) -> Self {
        Self { name, text }
    }

    /// What it says. Nothing at all is no configuration: a file that is being written is empty at
    /// first.
    pub fn parse<T: DeserializeOwned>(&self) -> Result<T, ConfigError> {
        let nothing = self
            .text
            .lines()
            .all(|line| line.trim().is_empty() || line.trim_start().starts_with('#'));
        if nothing || self.read::<Content>().is_ok_and(|content| content == Content::Nothing) {
            return Err(
                self.plain("is empty, which is no configuration: `tidegate config sample` prints one to start from")
            );
        }
        self.read().map_err(|error| {
            let places = error
                .locations()
                .map(|places| [places.reference_location, places.defined_location]);
            let secret =
                places.is_none_or(|places| places.into_iter().any(|place| self.is_secret(place)));
            self.error(error.location(), &message::of(error.without_snippet(), secret))
        })
    }

    fn read<T: DeserializeOwned>(&self) -> Result<T, serde_saphyr::Error> {
        let mut options = Options::default();
        options.with_snippet = false;
        serde_saphyr::from_str_with_options(self.text, options)
    }

    /// An error about this value.
    #[must_use]
    pub fn at<T>(&self, value: &Spanned<T>, message: &str) -> ConfigError {
        let secret = self.is_secret(value.referenced) || self.is_secret(value.defined);
        let message = if secret { without_quoted(message) } else { message.to_owned() };
        self.error(Some(value.referenced), &message)
    }

    /// An error about a name that is none of those allowed.
    #[must_use]
    pub fn at_name(&self, value: &Spanned<String>, message: &str) -> ConfigError {
        self.at(value, &with_suggestion(message))
    }

    /// An error about the whole.
    #[must_use]
    pub fn plain(&self, message: &str) -> ConfigError {
        self.error(None, message)
    }

    fn is_secret(&self, location: Location) -> bool {
        let line = usize::try_from(location.line()).unwrap_or_default();
        line.checked_sub(1).is_none_or(|line| may_be_secret(self.text, line))
    }

    fn error(&self, location: Option<Location>, message: &str) -> ConfigError {
        let place = location.and_then(|location| {
            let line = usize::try_from(location.line()).ok()?;
            let column = usize::try_from(location.column()).ok()?;
            secrets::lines(self.text).nth(line.checked_sub(1)?)?;
            Some(Place { line, column, source: secrets::shown(self.text, line - 1) })
        });
        let field = place
            .as_ref()
            .and_then(|place| self.field_before(place))
            .filter(|field| !message.contains(field));
        let message = without_userinfo(
            &field.map_or_else(|| message.to_owned(), |field| format!("{field}: {message}")),
        );
        ConfigError { file: self.name.to_owned(), place, message }
    }

    /// The name of the field whose value stands there.
    fn field_before(&self, place: &Place) -> Option<&'a str> {
        let line = secrets::lines(self.text).nth(place.line - 1)?;
        let (start, _) = line.char_indices().nth(place.column.checked_sub(1)?)?;
        let before = line[..start].trim_end().strip_suffix(':')?;
        let field = before.rsplit(|character| !is_of_name(character)).next()?;
        let shown = is_name(field) || !may_be_secret(self.text, place.line - 1);
        (shown && !field.is_empty()).then_some(field)
    }
}

/// Whether a document says anything.
#[derive(PartialEq)]
enum Content {
    Nothing,
    Something,
}

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Look;
        impl<'de> Visitor<'de> for Look {
            type Value = Content;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a document")
            }

            fn visit_unit<E: de::Error>(self) -> Result<Content, E> {
                Ok(Content::Nothing)
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Content, A::Error> {
                let mut content = Content::Nothing;
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {
                    content = Content::Something;
                }
                Ok(content)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Content, A::Error> {
                while list.next_element::<IgnoredAny>()?.is_some() {}
                Ok(Content::Something)
            }
        }
        deserializer.deserialize_any(Look)
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
            Some(place) => {
                format!("{}:{}:{}: {}", self.file, place.line, place.column, self.message)
            }
            None => format!("{}: {}", self.file, self.message),
        }
    }

    /// What it calls the file.
    #[must_use]
    pub fn file(&self) -> &str {
        &self.file
    }

    /// Line and column, from 1, if it is about a part of the file.
    #[must_use]
    pub fn position(&self) -> Option<(usize, usize)> {
        self.place.as_ref().map(|place| (place.line, place.column))
    }

    /// What is wrong.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.message
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.line())?;
        if let Some(place) = &self.place {
            let number = place.line.to_string();
            let margin = " ".repeat(number.len());
            // Where a line is masked, it may be shorter than it was.
            let column = place.column.min(place.source.chars().count().max(1));
            let indent = " ".repeat(column.saturating_sub(1));
            write!(f, "\n{margin} |\n{number} | {}\n{margin} | {indent}^", place.source)?;
        }
        Ok(())
    }
}

impl std::error::Error for ConfigError {}
