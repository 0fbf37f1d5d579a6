//! Parts of the JSON Schema that the types alone do not express: short patterns of texts, and rules
//! between fields. Only `config check` knows all of an address or a URL; `schema_tests.rs` compares
//! both.

use crate::policies::schema::YamlForms;
use schemars::transform::{RecursiveTransform, Transform as _};
use schemars::{Schema, SchemaGenerator, json_schema};
use serde_json::{Value, json};

use super::raw::RawConfig;

/// Address to listen on.
pub(super) const ADDRESS: &str = "^unix:/|:[0-9]+$";
/// Host and port of a server.
pub(super) const AUTHORITY: &str = "^[^@]+:[0-9]+$";
/// Permissions of a file, in octal.
pub(super) const PERMISSIONS: &str = "^0?[0-7]{3}$";
/// Address or network of proxies.
pub(super) const NETWORK: &str = "^[0-9A-Fa-f.:]+(?:/[0-9]+)?$";
/// URL of a Redis server, node or Sentinel.
pub(super) const REDIS_URL: &str = r"^(?:rediss?|valkeys?|unix|redis\+unix|valkey\+unix)://";
/// URL of an upstream.
pub(super) const UPSTREAM: &str = "^(?:unix:/|(?:[hH][tT][tT][pP][sS]?|h2c?)://)";
/// Origin of scripts, or `*`.
pub(super) const ORIGIN: &str = r"^(?:\*|[A-Za-z][0-9A-Za-z+.-]*://[^/]+)$";
/// Permission of a token.
pub(super) const SCOPE: &str = "^(?:acquire|refund|reset|read)$";

/// Returns the JSON Schema of the configuration.
pub(super) fn config_schema() -> Schema {
    let mut schema = schemars::schema_for!(RawConfig);
    // A file that is being written is empty at first.
    schema.insert("minProperties".to_owned(), json!(1));
    YamlForms.transform(&mut schema);
    RecursiveTransform(allow_variables).transform(&mut schema);
    schema
}

/// Allows variables, whose values are not known here, in texts that must match a pattern.
fn allow_variables(schema: &mut Schema) {
    if let Some(Value::String(pattern)) = schema.get_mut("pattern") {
        pattern.push_str(r"|\$\{[A-Za-z_]");
    }
}

/// Returns the schema of the URL of a Redis server, or those of some nodes of a cluster.
pub(super) fn redis_urls(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": ["string", "array"],
        "pattern": REDIS_URL,
        "items": {"type": "string", "pattern": REDIS_URL},
        "minItems": 1
    })
}

/// Returns a function that adds rules to a schema.
pub(super) fn rules<const N: usize>(rules: [Value; N]) -> impl FnMut(&mut Schema) {
    move |schema| drop(schema.insert("allOf".to_owned(), json!(rules[..])))
}

/// Returns the condition that a field has a value.
pub(super) fn has(field: &str) -> Value {
    json!({"required": [field], "properties": {field: {"not": {"type": "null"}}}})
}

/// Returns the rule that a field needs one of others.
pub(super) fn needs(field: &str, others: &[&str]) -> Value {
    let others: Vec<Value> = others.iter().map(|other| has(other)).collect();
    json!({"if": has(field), "then": {"anyOf": others}})
}

/// Returns the rule that two fields exclude each other.
pub(super) fn excludes(field: &str, other: &str) -> Value {
    json!({"if": {"required": [field]}, "then": {"properties": {other: {"type": "null"}}}})
}

/// Forbids `*` beside other origins, and with credentials.
pub(super) fn add_cors_rules(schema: &mut Schema) {
    let without_any = json!({"items": {"not": {"const": "*"}}});
    let credentials = json!({"allow_credentials": {"const": true}});
    rules([
        json!({
            "if": {"properties": {"allow_origins": {"contains": {"const": "*"}}}},
            "then": {"properties": {"allow_origins": {"maxItems": 1}}}
        }),
        json!({
            "if": {"required": ["allow_credentials"], "properties": credentials},
            "then": {"properties": {"allow_origins": without_any, "expose_headers": without_any}}
        }),
    ])(schema);
}
