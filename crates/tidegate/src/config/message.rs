//! What is wrong with a document, in the words of who writes one.

use serde_saphyr::Error;

use super::secrets::{MASK, is_name, without_quoted};

/// The text of an error; without anything that the document says, if it may be a secret.
pub(super) fn of(error: &Error, secret: bool) -> String {
    match error {
        Error::AliasError { error, .. } => of(error, secret),
        Error::SerdeUnknownField { field, expected, .. } => unknown(field, expected, secret),
        Error::DuplicateMappingKey { key, .. } => match key.as_deref().filter(|key| !secret || is_name(key)) {
            Some(key) => format!("the field `{key}` is there twice: take one of them out"),
            None => "this field is there twice: take one of them out".to_owned(),
        },
        Error::MultipleDocuments { .. } => {
            "a second document begins here: a configuration is one document only, without --- in between".to_owned()
        }
        Error::Eof { .. } => "ends too early".to_owned(),
        Error::Unexpected { expected, .. } => format!("must be {}", kind(expected)),
        Error::InvalidScalar { ty, .. } => format!("must be {}", kind(ty)),
        Error::InvalidBooleanStrict { .. } => format!("must be {}", kind("boolean")),
        Error::NullIntoString { .. } => "has no value: write one, or take the field out".to_owned(),
        Error::SerdeMissingField { field, .. } => format!("missing field `{field}`"),
        // What it is, never what it says: that may have come from elsewhere, by an alias.
        Error::SerdeInvalidType { unexpected, expected, .. }
        | Error::SerdeInvalidValue { unexpected, expected, .. } => {
            let found = unexpected.split(['"', '`']).next().unwrap_or_default().trim();
            let found = if found == "unit value" { "nothing" } else { found };
            format!("must be {}, not {found}", kind(expected))
        }
        Error::Message { msg, .. } | Error::ExternalMessage { msg, .. } if secret => without_quoted(msg),
        _ if secret => "this is not as it must be".to_owned(),
        _ => {
            let text = error.to_string();
            text.split(" at line ").next().unwrap_or(&text).trim().to_owned()
        }
    }
}

fn unknown(field: &str, expected: &[&str], secret: bool) -> String {
    let allowed = expected.join(", ");
    if secret && !is_name(field) {
        return format!("unknown field {MASK}, expected one of {allowed}");
    }
    with_suggestion(&format!("unknown field `{field}`, expected one of {allowed}"))
}

fn kind(name: &str) -> &str {
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

/// Adds the nearest of the names that the message says would be right.
pub(super) fn with_suggestion(message: &str) -> String {
    // "unknown field `limt`, expected one of name, limit", "unknown mode "shadwo": it must be one
    // of enforce, shadow"
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
