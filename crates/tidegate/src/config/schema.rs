//! Parts of the JSON Schema that the types alone do not express: patterns, and rules between fields.
//!
//! The expressions use only the syntax that ECMA 262 and the validators of other languages share.

use std::borrow::Cow;

use schemars::transform::{Transform, transform_subschemas};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde_json::{Map, Value, json};

use super::duration;
use super::policy::POLICY_FAILURES;
use crate::algorithm::{Algorithm, Encoding};
use crate::key::MAX_KEY_BYTES;
use crate::policy::{ATTRIBUTE_NAMES, ATTRIBUTE_PREFIXES, NOT_IN_HOSTS, OnStoreFailure};
use crate::quota::{MAX_WINDOW, MIN_WINDOW, Quota};

/// Text without control characters, at least one character long.
pub const NO_CONTROL: &str = r"^[^\u0000-\u001f\u007f-\u009f]+$";

/// Characters of a name: no spaces and no control characters.
const NAME: &str = r"[^\s\u0000-\u001f\u007f-\u009f]";

/// Characters of the name of a header: RFC 9110 calls them `tchar`.
pub const HEADER_NAME: &str = r"[0-9A-Za-z!#$%&'*+.^_`|~-]";

/// Types of a text in YAML: a plain `5` or `true` is accepted as a text.
pub const TEXT_TYPES: [&str; 3] = ["string", "number", "boolean"];

/// Types of a single text or a list of texts. A fraction alone would lose zeros: `1.10`.
pub const TEXTS_TYPES: [&str; 4] = ["string", "integer", "boolean", "array"];

/// Returns the regular expression of the decimal numbers from `min` to `max`.
#[must_use]
pub fn number_pattern(min: u64, max: u64) -> String {
    let mut parts = Vec::new();
    let mut low = min;
    while low <= max {
        let length = low.to_string().len();
        let longest = 10_u64.checked_pow(u32::try_from(length).unwrap_or(u32::MAX));
        let high = longest.map_or(max, |next| max.min(next - 1));
        parts.push(digits_pattern(low.to_string().as_bytes(), high.to_string().as_bytes()));
        let Some(next) = high.checked_add(1) else { break };
        low = next;
    }
    format!("0*(?:{})", parts.join("|"))
}

/// Returns the regular expression of the numbers between two numbers of the same length.
fn digits_pattern(low: &[u8], high: &[u8]) -> String {
    let ([first_low, rest_low @ ..], [first_high, rest_high @ ..]) = (low, high) else {
        return String::new();
    };
    let (first_low, first_high) = (char::from(*first_low), char::from(*first_high));
    let is_full =
        rest_low.iter().all(|digit| *digit == b'0') && rest_high.iter().all(|digit| *digit == b'9');
    let any = |first: char, last: char| {
        let first = if first == last { first.to_string() } else { format!("[{first}-{last}]") };
        match rest_low.len() {
            0 => first,
            length => format!("{first}[0-9]{{{length}}}"),
        }
    };
    if is_full {
        return any(first_low, first_high);
    }
    if first_low == first_high {
        return format!("{first_low}{}", digits_pattern(rest_low, rest_high));
    }
    let (zeros, nines) = (vec![b'0'; rest_low.len()], vec![b'9'; rest_low.len()]);
    let mut parts = vec![format!("{first_low}{}", digits_pattern(rest_low, &nines))];
    let next = |digit: char, step: i8| char::from((digit as u8).wrapping_add_signed(step));
    if next(first_low, 1) < first_high {
        parts.push(any(next(first_low, 1), next(first_high, -1)));
    }
    parts.push(format!("{first_high}{}", digits_pattern(&zeros, rest_high)));
    format!("(?:{})", parts.join("|"))
}

/// Returns an expression that matches these words in either case.
fn any_case(words: &[&str]) -> String {
    let letter = |letter: char| format!("[{letter}{}]", letter.to_ascii_uppercase());
    let words = words.iter().map(|word| word.chars().map(letter).collect::<String>());
    words.collect::<Vec<_>>().join("|")
}

/// Returns the expression of the custom attributes, without anchors: all names that are not built
/// in.
fn custom_attribute() -> String {
    let prefixes = any_case(&ATTRIBUTE_PREFIXES);
    let names = any_case(&ATTRIBUTE_NAMES);
    format!(r"(?!(?:{names}|{prefixes})$|(?:{prefixes})\.){NAME}+")
}

/// Returns the expression of the attributes that a policy may use. Whether a custom one is declared
/// is beyond a schema.
fn attribute_pattern() -> String {
    let names = ATTRIBUTE_NAMES.join("|");
    let others: Vec<&str> =
        ATTRIBUTE_PREFIXES.into_iter().filter(|prefix| *prefix != "header").collect();
    let others = others.join("|");
    let custom = custom_attribute();
    format!(r"^(?:{names}|header\.{HEADER_NAME}+|(?:{others})\.{NAME}+|{custom})$")
}

/// Expression of what may be an address, or a pattern of some, but not an IPv4 network.
const ADDRESS: &str = "^[^/]*$|:.*/";

/// Returns the expression of the patterns of hosts.
fn host_pattern() -> String {
    let escaped = |it: &char| format!(r"\u{:04x}", u32::from(*it));
    format!("^[^{}]*$", NOT_IN_HOSTS.iter().map(escaped).collect::<String>())
}

/// Returns the schema of a text that matches an expression, or a list of such texts.
fn texts_schema(pattern: &str) -> Value {
    let items = json!({"type": TEXT_TYPES, "pattern": pattern});
    json!({"type": TEXTS_TYPES, "pattern": pattern, "items": items, "minItems": 1})
}

/// Defines a type that only has a schema.
macro_rules! schema_type {
    ($(#[$doc:meta])* $name:ident, $schema:expr) => {
        $(#[$doc])*
        #[derive(Debug)]
        pub struct $name;

        impl JsonSchema for $name {
            fn inline_schema() -> bool {
                true
            }

            fn schema_name() -> Cow<'static, str> {
                stringify!($name).into()
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                $schema
            }
        }
    };
}

schema_type!(
    /// Schema of the name of a policy.
    PolicyName,
    json_schema!({"type": TEXT_TYPES, "pattern": NO_CONTROL, "maxLength": MAX_KEY_BYTES})
);
schema_type!(
    /// Schema of the list of custom attributes.
    CustomAttributes,
    json_schema!({
        "type": "array",
        "items": {"type": TEXT_TYPES, "pattern": format!("^{}$", custom_attribute())},
        "uniqueItems": true
    })
);
schema_type!(
    /// Schema of an attribute that a policy uses.
    AttributeName,
    json_schema!({"type": TEXT_TYPES, "pattern": attribute_pattern()})
);
schema_type!(
    /// Schema of the attributes of a key.
    KeyAttributes,
    json_schema!({
        "type": ["string", "array"],
        "pattern": attribute_pattern(),
        "items": {"type": TEXT_TYPES, "pattern": attribute_pattern()}
    })
);
schema_type!(
    /// Schema of a text or a list of texts, at least one.
    Texts,
    json_schema!({"type": TEXTS_TYPES, "items": {"type": TEXT_TYPES}, "minItems": 1})
);
schema_type!(
    /// Schema of the conditions of a policy.
    Matches,
    json_schema!({
        "type": "object",
        "propertyNames": {"pattern": attribute_pattern()},
        "properties": {
            "ip": texts_schema(ADDRESS),
            "method": texts_schema("^[0-9A-Za-z*_-]+$"),
            "path": texts_schema(r"^(?!\^|!/|[0-9A-Za-z+.-]+://)"),
            "host": texts_schema(&host_pattern())
        },
        "additionalProperties": {
            "type": TEXTS_TYPES, "items": {"type": TEXT_TYPES}, "minItems": 1
        }
    })
);
schema_type!(
    /// Schema of the decision of a policy while the store is unavailable.
    PolicyFailure,
    json_schema!({"type": "string", "enum": POLICY_FAILURES.map(OnStoreFailure::as_str)})
);
schema_type!(
    /// Schema of the window of a quota.
    Window,
    json_schema!({"type": "string", "pattern": window_pattern()})
);

/// Returns the expression of the windows of a quota.
#[must_use]
pub fn window_pattern() -> String {
    let [min, max] = [MIN_WINDOW, MAX_WINDOW].map(std::time::Duration::from_micros);
    duration::pattern(min, max)
}

/// Adds the rules between the algorithm of a policy and its other fields.
pub(super) fn add_policy_rules(schema: &mut Schema) {
    // The limits of the policy and of its overrides.
    let with_limits = |limits: Value| {
        let overrides = json!({"items": {"properties": limits}});
        let mut fields = limits.as_object().cloned().unwrap_or_default();
        fields.insert("overrides".to_owned(), overrides);
        fields
    };
    let absent = || json!({"type": "null"});
    let others = Algorithm::ALL.into_iter().filter(|name| *name != Algorithm::SlidingLog);
    let others: Vec<&str> = others.map(Algorithm::as_str).collect();
    let counter = Algorithm::SlidingCounter.as_str();
    let without_encoding: Vec<&str> =
        others.iter().copied().filter(|name| *name != counter).collect();
    let except = |encoding: Encoding| json!({"not": {"enum": [encoding.as_str()]}});
    let buckets = [Algorithm::TokenBucket.as_str(), Algorithm::LeakyBucket.as_str()];
    let is_one_of = |field: &str, names: &[&str]| json!({"properties": {field: {"enum": names}}, "required": [field]});
    let rules = json!([
        {
            "if": is_one_of("algorithm", &others),
            "then": {"properties": {"count_denied": absent()}},
            "else": {"properties": with_limits(json!({"limit": {"maximum": Quota::MAX_LOG_LIMIT}}))}
        },
        {
            "if": is_one_of("algorithm", &without_encoding),
            "then": {"properties": {"encoding": absent()}}
        },
        {
            "if": is_one_of("algorithm", &[counter]),
            "then": {"properties": {"encoding": except(Encoding::SortedSet)}},
            "else": {"properties": {"encoding": except(Encoding::Hash)}}
        },
        {
            "if": is_one_of("algorithm", &buckets),
            "else": {"properties": with_limits(json!({"burst": absent()}))}
        },
        {
            "if": is_one_of("encoding", &[Encoding::SortedSet.as_str()]),
            "then": {
                "properties":
                    with_limits(json!({"limit": {"maximum": Quota::MAX_SORTED_SET_LIMIT}}))
            }
        },
        {
            "if": {
                "properties": {"overrides": {"type": "array", "minItems": 1}},
                "required": ["overrides"]
            },
            "then": {"properties": {"key": {"minItems": 1}}, "required": ["key"]}
        },
        {
            "if": {"properties": {"key": {"enum": ["ip", ["ip"]]}}, "required": ["key"]},
            "then": {
                "properties": {
                    "overrides": {
                        "items": {
                            "properties": {
                                "key": {"pattern": ADDRESS, "items": {"pattern": ADDRESS}}
                            }
                        }
                    }
                }
            }
        }
    ]);
    schema.insert("allOf".to_owned(), rules);
}

/// Adjusts a schema to what YAML and this parser accept: a section or list without a value is
/// empty, and a text may be written without quotes even if it looks like a number.
#[derive(Debug)]
pub struct YamlForms;

impl Transform for YamlForms {
    fn transform(&mut self, schema: &mut Schema) {
        transform_subschemas(self, schema);
        let Some(fields) = schema.as_object_mut() else { return };
        let is_free = ["pattern", "enum", "const"].iter().all(|name| !fields.contains_key(*name));
        if let Some(kind) = fields.get_mut("type").filter(|_| is_free) {
            accept_plain_scalars(kind);
        }
        let required = fields.get("required").cloned().unwrap_or_default();
        let is_required = |name: &String| {
            required.as_array().is_some_and(|names| names.iter().any(|other| other == name))
        };
        if let Some(Value::Object(properties)) = fields.get_mut("properties") {
            let optional = properties.iter_mut().filter(|(name, _)| !is_required(name));
            for field in optional.filter_map(|(_, field)| field.as_object_mut()) {
                accept_no_value(field);
            }
        }
    }
}

fn accept_plain_scalars(kind: &mut Value) {
    if kind == "string" {
        *kind = json!(TEXT_TYPES);
    } else if *kind == json!(["string", "null"]) {
        *kind = json!(["string", "number", "boolean", "null"]);
    }
}

fn accept_no_value(field: &mut Map<String, Value>) {
    if let Some(target) = field.remove("$ref") {
        field.insert("anyOf".to_owned(), json!([{"$ref": target}, {"type": "null"}]));
    } else if let Some(kind) = field.get_mut("type")
        && (kind == "array" || kind == "object")
    {
        *kind = json!([kind.take(), "null"]);
    }
}
