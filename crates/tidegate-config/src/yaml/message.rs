//! Parser errors in words for the author of a configuration.

use std::borrow::Cow;

use serde_saphyr::Error;

use super::redaction::{MASK, Redaction, without_quoted};

/// Number of characters of an unknown name that are shown.
const MAX_NAME: usize = 64;

/// Returns the text of an error. If the value may be a secret, the text does not quote it.
pub(crate) fn describe(error: &Error, is_secret: bool, redaction: &Redaction) -> String {
    match error {
        Error::AliasError { error, .. } => describe(error, is_secret, redaction),
        Error::SerdeUnknownField { field, expected, .. } => {
            let is_shown = !is_secret || redaction.is_known_name(field);
            unknown_field(field, expected, is_shown)
        }
        Error::DuplicateMappingKey { key, .. } => {
            match key.as_deref().filter(|key| !is_secret || redaction.is_known_name(key)) {
                Some(key) => format!("the field `{key}` is there twice: remove one of them"),
                None => "this field is there twice: remove one of them".to_owned(),
            }
        }
        Error::MultipleDocuments { .. } => {
            "a second document starts here: a configuration is one document, without ---".to_owned()
        }
        Error::Eof { .. } => "ends unexpectedly".to_owned(),
        Error::Unexpected { expected, .. } => format!("must be {}", kind_name(expected)),
        Error::InvalidScalar { ty, .. } => format!("must be {}", kind_name(ty)),
        Error::InvalidBooleanStrict { .. } => format!("must be {}", kind_name("boolean")),
        Error::NullIntoString { .. } => "has no value: add one, or remove the field".to_owned(),
        Error::SerdeMissingField { field, .. } => format!("missing field `{field}`"),
        // Name the type, never the value: an alias may refer to a secret elsewhere.
        Error::SerdeInvalidType { unexpected, expected, .. }
        | Error::SerdeInvalidValue { unexpected, expected, .. } => {
            let found = unexpected.split(['"', '`']).next().unwrap_or_default().trim();
            let found = if found == "unit value" { "nothing" } else { found };
            format!("must be {}, not {found}", kind_name(expected))
        }
        Error::Message { msg, .. } | Error::ExternalMessage { msg, .. } if is_secret => {
            without_quoted(msg)
        }
        _ if is_secret => "has an invalid value".to_owned(),
        _ => {
            let text = error.to_string();
            text.split(" at line ").next().unwrap_or(&text).trim().to_owned()
        }
    }
}

fn unknown_field(field: &str, expected: &[&str], is_shown: bool) -> String {
    let allowed = expected.join(", ");
    if !is_shown {
        return format!("unknown field {MASK}, expected one of {allowed}");
    }
    let field = shortened(field, MAX_NAME);
    with_suggestion(&format!("unknown field `{field}`, expected one of {allowed}"))
}

/// Returns the start of a text. A missing quote or brace can make the rest of a file one value.
pub(crate) fn shortened(text: &str, max_characters: usize) -> Cow<'_, str> {
    match text.char_indices().nth(max_characters) {
        Some((end, _)) => Cow::Owned(format!("{}{MASK}", &text[..end])),
        None => Cow::Borrowed(text),
    }
}

fn kind_name(name: &str) -> &str {
    match name {
        "mapping start" | "map" => "fields, each as `name: value`",
        "sequence start" | "seq" => "a list",
        "string scalar" | "string" => "a text",
        "boolean" => "true or false",
        integer if integer.starts_with(['u', 'i']) && integer[1..].parse::<u8>().is_ok() => {
            "a whole number"
        }
        other => other,
    }
}

/// Adds the most similar of the allowed names that the message lists.
pub(crate) fn with_suggestion(message: &str) -> String {
    // For example: unknown field `limt`, expected one of name, limit
    let Some((before, list)) = message.split_once("one of ") else { return message.to_owned() };
    let unknown = before.split(['`', '"']).nth(1).unwrap_or_default();
    let names = list.split(", ").map(|name| name.trim_matches('`'));
    let nearest = names.map(|name| (strsim::damerau_levenshtein(unknown, name), name)).min();
    match nearest {
        Some((distance, name)) if distance > 0 && distance <= 1 + unknown.chars().count() / 3 => {
            format!("{message} (did you mean `{name}`?)")
        }
        _ => message.to_owned(),
    }
}
