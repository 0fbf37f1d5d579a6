//! The OpenAPI description: adds the server and the bounds of all values, by the constants that the
//! API checks.

use std::time::Duration;

use serde_json::{Value, json};
use tidegate::{Hold, MAX_CHARGES, MAX_KEY_BYTES, Policies, Quota};
use tidegate_config::duration;
use tidegate_config::policies::schema;
use utoipa::OpenApi;

use super::json::MAX_AGE_MS;
use super::{Api, MAX_BODY_BYTES, Operation};

/// Bounds of the fields: the type, the field, and what is added to its schema.
fn bounds() -> Vec<(&'static str, &'static str, Value)> {
    let name = json!({"minLength": 1, "maxLength": MAX_KEY_BYTES, "pattern": schema::NO_CONTROL});
    let units = json!({"minimum": 1, "maximum": Quota::MAX_LIMIT});
    let count = json!({"minimum": 0, "maximum": Quota::MAX_LIMIT});
    let wait = json!({"minimum": 0, "maximum": MAX_WAIT_MS});
    let id = json!({"minLength": 1, "maxLength": Hold::MAX_ID_BYTES, "pattern": "^[!-~]+$"});
    let ttl = |longest: Duration| json!({"minimum": Hold::MIN_TTL.as_millis(), "maximum": longest.as_millis()});
    let mut bounds = vec![
        ("QueryBody", "policy", name.clone()),
        ("QueryBody", "key", name.clone()),
        // A report or a refund may be above every limit.
        ("QueryBody", "cost", json!({"minimum": 1, "maximum": u64::MAX, "format": "uint64"})),
        ("QueryBody", "age_ms", json!({"minimum": 0, "maximum": MAX_AGE_MS})),
        ("QueryBody", "id", id.clone()),
        ("QueryBody", "id_ttl_ms", ttl(Hold::MAX_ID_TTL)),
        ("QueryBody", "ttl_ms", ttl(Hold::MAX_TTL)),
        ("QueryBody", "actual", json!({"minimum": 0, "maximum": u64::MAX, "format": "uint64"})),
        ("HoldBody", "ttl", json!({"pattern": duration::PATTERN})),
        ("HoldBody", "max_ttl", json!({"pattern": duration::PATTERN})),
        ("ReservationBody", "reservation", id),
        (
            "ReservationBody",
            "expires_after_ms",
            json!({"minimum": 0, "maximum": Hold::MAX_TTL.as_millis()}),
        ),
        ("QuotaBody", "limit", units.clone()),
        ("QuotaBody", "burst", units),
        ("QuotaBody", "window", json!({"pattern": duration::PATTERN})),
        ("QueryBody", "attributes", json!({"maxProperties": MAX_BODY_BYTES / MIN_ATTRIBUTE_BYTES})),
        ("Problem", "type", json!({"maxLength": MAX_DETAIL})),
        ("Problem", "title", json!({"maxLength": MAX_DETAIL})),
        ("Problem", "status", json!({"minimum": 400, "maximum": 599})),
        ("Problem", "detail", json!({"maxLength": MAX_DETAIL})),
        ("Problem", "source", json!({"maxLength": MAX_DETAIL})),
        ("Problem", "missing_key", json!({"maxLength": MAX_DETAIL})),
        ("ExplanationBody", "policy", name.clone()),
        ("ExplanationBody", "reason", json!({"maxLength": MAX_DETAIL})),
    ];
    for body in ["DecisionBody", "BindingBody"] {
        bounds.extend([
            (body, "policy", name.clone()),
            (body, "limit", count.clone()),
            (body, "remaining", count.clone()),
            (body, "retry_after_ms", wait.clone()),
            (body, "reset_after_ms", wait.clone()),
            (body, "delay_ms", wait.clone()),
            (body, "missing_key", json!({"maxLength": MAX_DETAIL})),
        ]);
    }
    bounds
}

/// Describes the query of each operation by its three forms. The fields of the other forms may only
/// be null.
fn split_query(api: &mut Value) {
    let query = api["components"]["schemas"]["QueryBody"].take();
    for operation in Operation::OF_API {
        let mut forms = Vec::new();
        for (name, description, target) in [
            ("PolicyQuery", "Policy and key.", &["policy", "key"][..]),
            (
                "AttributesQuery",
                "Attributes of a request, which select the policies.",
                &["attributes"],
            ),
            ("QuotaQuery", "Key and quota of the caller.", &["key", "quota"]),
        ] {
            let mut form = query.clone();
            let required = [target, operation.required()].concat();
            form["description"] = json!(description);
            form["required"] = json!(required);
            for (field, schema) in form["properties"].as_object_mut().into_iter().flatten() {
                let is_taken = |names: &[&str]| names.contains(&field.as_str());
                // Null is the second of two schemas, or of two types.
                match (is_taken(&required), schema.pointer("/oneOf/0").cloned()) {
                    (false, _) if is_taken(operation.fields()) => {}
                    (false, _) => *schema = json!({"type": "null"}),
                    (true, Some(not_null)) => *schema = not_null,
                    (true, None) => schema["type"] = schema["type"][0].clone(),
                }
            }
            let name = format!("{operation:?}{name}");
            forms.push(json!({"$ref": format!("#/components/schemas/{name}")}));
            api["components"]["schemas"][name] = form;
        }
        let body = &mut api["paths"][operation.path()]["post"]["requestBody"];
        body["content"]["application/json"]["schema"] =
            json!({"description": query["description"], "oneOf": forms});
    }
    if let Some(schemas) = api["components"]["schemas"].as_object_mut() {
        schemas.remove("QueryBody");
    }
}

/// Longest wait in milliseconds: an overdraft of ten bursts, each of which refills in 3,660 days at
/// most, and one more for the request itself.
const MAX_WAIT_MS: u64 = 11 * 3_660 * 86_400_000;

/// Length of the shortest attribute in a body: `"":"",`.
const MIN_ATTRIBUTE_BYTES: usize = 6;

/// More characters than any error message has, even one that quotes a name of the query.
const MAX_DETAIL: usize = 2 * MAX_BODY_BYTES;

/// Returns the description. The server is relative to its URL, so it is the one that the client
/// asked, and one text serves all clients.
pub(super) fn document() -> Vec<u8> {
    let mut api = serde_json::to_value(Api::openapi()).unwrap_or_default();
    api["servers"] = json!([{"url": "/"}]);
    for (body, field, bounds) in bounds() {
        let schema = &mut api["components"]["schemas"][body]["properties"][field];
        if let (Some(schema), Value::Object(bounds)) = (schema.as_object_mut(), bounds) {
            schema.extend(bounds);
        }
    }
    split_query(&mut api);
    let entry = &mut api["components"]["schemas"]["PolicyDecisionBody"]["allOf"][1];
    entry["properties"]["key"]["maxLength"] = json!(MAX_KEY_BYTES);
    let decisions = &mut api["components"]["schemas"]["DecisionsBody"]["allOf"][2];
    decisions["properties"]["decisions"]["maxItems"] = json!(MAX_CHARGES);
    decisions["properties"]["policies"]["maxItems"] = json!(Policies::MAX_EXPLAINED);
    let parameters = &mut api["paths"]["/v1/forward-auth"]["get"]["parameters"];
    for parameter in parameters.as_array_mut().into_iter().flatten() {
        if parameter["name"] == "policy" {
            parameter["schema"]["maxLength"] = json!(MAX_KEY_BYTES);
        }
    }
    serde_json::to_vec(&api).unwrap_or_default()
}
