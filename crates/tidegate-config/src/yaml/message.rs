//! Parser errors in words for the author of a configuration.

use std::borrow::Cow;

use serde_saphyr::Error;
use serde_saphyr::budget::BudgetBreach;

use super::document::MAX_NODES;
use super::redaction::{MASK, Redaction, without_quoted};

/// Number of characters of an unknown name that are shown.
const MAX_NAME: usize = 64;

/// Names that other programs use, with ours; `mode: shadow` is a field with its value. Of several
/// with one name, the first that is allowed counts.
const SYNONYMS: [(&str, &str); 45] = [
    ("period", "window"),
    ("interval", "window"),
    ("duration", "window"),
    ("per", "window"),
    ("unit", "window"),
    ("rate", "limit"),
    ("max", "limit"),
    ("count", "limit"),
    ("quota", "limit"),
    ("requests", "limit"),
    ("max_requests", "limit"),
    ("requests_per_unit", "limit"),
    ("capacity", "burst"),
    ("max_burst", "burst"),
    ("remote_addr", "ip"),
    ("binary_remote_addr", "ip"),
    ("client_ip", "ip"),
    ("remote_address", "ip"),
    ("source_ip", "ip"),
    ("url", "path"),
    ("uri", "path"),
    ("route", "path"),
    ("endpoint", "path"),
    ("user_agent", "header.user-agent"),
    ("gcra", "token-bucket"),
    ("sliding_window", "sliding-log"),
    ("sliding_window_log", "sliding-log"),
    ("sliding_window_counter", "sliding-counter"),
    ("dry_run", "shadow"),
    ("log_only", "shadow"),
    ("report_only", "shadow"),
    ("dry_run", "mode: shadow"),
    ("log_only", "mode: shadow"),
    ("shadow", "mode: shadow"),
    ("shadow_mode", "mode: shadow"),
    ("redis", "store"),
    ("rules", "policies"),
    ("rate_limits", "policies"),
    ("exclude", "unless"),
    ("except", "unless"),
    ("skip", "unless"),
    ("when", "match"),
    ("group_by", "key"),
    ("open", "allow"),
    ("closed", "deny"),
];

/// Returns the text of an error. If the value may be a secret, the text does not quote it.
pub(crate) fn describe(error: &Error, is_secret: bool, redaction: &Redaction) -> String {
    match error {
        Error::AliasError { error, .. } => describe(error, is_secret, redaction),
        Error::SerdeUnknownField { field, expected, .. } => {
            let is_synonym = SYNONYMS.iter().any(|(name, _)| *name == plain(field));
            let is_shown = !is_secret || is_synonym || redaction.is_known_name(field);
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
        Error::Budget {
            breach: BudgetBreach::Nodes { .. } | BudgetBreach::Events { .. }, ..
        } => {
            format!("the file has more than {MAX_NODES} values, which is the most of a file")
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

/// Returns a name in the spelling of [`SYNONYMS`].
fn plain(name: &str) -> String {
    name.trim_start_matches('$').to_ascii_lowercase().replace('-', "_")
}

/// Adds the allowed name of the same meaning, or the most similar one, that the message lists.
pub(crate) fn with_suggestion(message: &str) -> String {
    // For example: unknown field `limt`, expected one of name, limit
    let list = message.split_once("one of ").filter(|_| !message.contains("did you mean"));
    let Some((before, list)) = list else { return message.to_owned() };
    let unknown = before.split(['`', '"']).nth(1).unwrap_or_default();
    let names = list.split(", ").map(|name| name.trim_matches('`'));
    let is_allowed = |meant: &str| {
        let name = meant.split([':', '.']).next().unwrap_or_default();
        names.clone().any(|it| it == meant || it.split('.').next() == Some(name))
    };
    let written = plain(unknown);
    let mut synonyms = SYNONYMS.iter().filter(|(name, _)| *name == written);
    if let Some((_, meant)) = synonyms.find(|(_, meant)| is_allowed(meant)) {
        return format!("{message} (did you mean `{meant}`?)");
    }
    let nearest = names.map(|name| (strsim::damerau_levenshtein(unknown, name), name)).min();
    match nearest {
        Some((distance, name)) if distance > 0 && distance <= 1 + unknown.chars().count() / 3 => {
            format!("{message} (did you mean `{name}`?)")
        }
        _ => message.to_owned(),
    }
}
