//! Parts of the JSON Schema that the types alone do not express: what YAML accepts as a text, and
//! rules between fields. Formats of texts, such as names, are left to `config check`.

use schemars::transform::{Transform, transform_subschemas};
use schemars::{Schema, SchemaGenerator, json_schema};
use serde_json::{Map, Value, json};

use crate::yaml::duration;
use tidegate::{ATTRIBUTE_NAMES, Algorithm, Encoding, Quota};

/// Text without control characters, at least one character long.
pub const NO_CONTROL: &str = r"^[^\u0000-\u001f\u007f-\u009f]+$";

/// Types of a text in YAML: a plain `5` or `true` is accepted as a text.
const TEXT_TYPES: [&str; 3] = ["string", "number", "boolean"];

/// Returns the schema of a text or a list of texts, at least one. A fraction alone would lose
/// zeros: `1.10`.
pub(crate) fn texts(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": ["string", "integer", "boolean", "array"],
        "items": {"type": TEXT_TYPES},
        "minItems": 1
    })
}

/// Returns the schema of a day of the month, or of a weekday.
pub(crate) fn anchor_day(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": ["string", "integer"], "minimum": 1, "maximum": 31})
}

/// Returns the schema of a status, a class of statuses, or a list of them, at least one.
pub(crate) fn statuses(_: &mut SchemaGenerator) -> Schema {
    let status = json!({
        "type": ["string", "integer"],
        "pattern": "^[1-5]([0-9]{2}|xx|XX)$",
        "minimum": 100,
        "maximum": 599
    });
    json_schema!({"anyOf": [status, {"type": "array", "items": status, "minItems": 1}]})
}

/// Returns the schema of the name of a header.
pub(crate) fn header_name(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": TEXT_TYPES, "pattern": "^[-!#$%&'*+.^_`|~0-9A-Za-z]+$"})
}

/// Returns the schema of the attributes of a key.
pub(crate) fn key_attributes(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": ["string", "array"], "items": {"type": TEXT_TYPES}})
}

/// Returns the schema of a duration or a list of durations.
pub(crate) fn block_lengths(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": ["string", "array", "null"],
        "pattern": duration::PATTERN,
        "items": {"type": "string", "pattern": duration::PATTERN},
        "minItems": 1,
        "maxItems": Quota::MAX_BLOCKS
    })
}

/// Returns the schema of the conditions of a policy. Editors suggest the built-in attributes.
pub(crate) fn conditions(generator: &mut SchemaGenerator) -> Schema {
    let texts = texts(generator);
    let built_in: Map<String, Value> = ATTRIBUTE_NAMES
        .map(|name| (name.to_owned(), texts.clone().to_value()))
        .into_iter()
        .collect();
    json_schema!({"type": "object", "properties": built_in, "additionalProperties": texts})
}

/// Returns the schema of the exceptions of a policy.
pub(crate) fn exemptions(generator: &mut SchemaGenerator) -> Schema {
    let mut entry = conditions(generator);
    entry.insert("minProperties".to_owned(), json!(1));
    json_schema!({"type": "array", "items": entry})
}

/// Adds the rules between the algorithm of a policy and its other fields.
pub(crate) fn add_policy_rules(schema: &mut Schema) {
    // The limits of the policy and of its overrides.
    let with_limits = |limits: Value| {
        let overrides = json!({"items": {"properties": limits}});
        let mut fields = limits.as_object().cloned().unwrap_or_default();
        fields.insert("overrides".to_owned(), overrides);
        if let Some(limit) = limits.get("limit") {
            let by_value = json!({"additionalProperties": limit, "properties": {"other": limit}});
            fields.insert("limits".to_owned(), by_value);
        }
        fields
    };
    let with_fields = |mut fields: Map<String, Value>, others: Value| {
        fields.extend(others.as_object().cloned().unwrap_or_default());
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
    let concurrency = [Algorithm::Concurrency.as_str()];
    let of_hold = json!({"properties": {"on_expire": {"not": {"const": "charge"}}}});
    let rules = json!([
        {
            "if": is_one_of("algorithm", &concurrency),
            "then": {"properties": with_fields(
                with_limits(json!({
                    "limit": {"maximum": Quota::MAX_CONCURRENCY},
                    "window": absent()
                })),
                json!({"block_for": absent(), "hold": of_hold})
            )},
            "else": {"properties": {"window": {"type": ["string", "object"]}}, "required": ["window"]}
        },
        {
            "if": is_one_of("algorithm", &[Algorithm::FixedWindow.as_str()]),
            "else": {"properties": with_limits(json!({"window": {"not": {"type": "object"}}}))}
        },
        {
            "if": is_one_of("algorithm", &others),
            "then": {"properties": {"count_denied": absent()}},
            "else": {"properties": with_limits(json!({"limit": {"maximum": Quota::MAX_LOG_LIMIT}}))}
        },
        {
            "if": {"properties": {"count_denied": {"const": true}}, "required": ["count_denied"]},
            "then": {"properties": {"block_for": absent(), "lanes": absent()}}
        },
        {
            "if": {"properties": {"lanes": {"type": "object"}}, "required": ["lanes"]},
            "then": {"properties": {"block_for": absent()}}
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
            "if": {"required": ["limit"]},
            "then": {"properties": {"limit": {"type": "integer"}, "limits": absent()}},
            "else": {"properties": {"limits": {"type": "object"}}, "required": ["limits"]}
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
