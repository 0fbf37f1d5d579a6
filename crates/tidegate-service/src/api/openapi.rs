//! The OpenAPI description: adds the server and the bounds of all values, by the constants that the
//! API checks.

use serde_json::{Value, json};
use tidegate::{MAX_CHARGES, MAX_KEY_BYTES, Policies, Quota};
use tidegate_config::duration;
use tidegate_config::policies::schema;
use utoipa::OpenApi;

use super::json::MAX_AGE_MS;
use super::{Api, MAX_BODY_BYTES};

/// Bounds of the fields: the type, the field, and what is added to its schema.
fn bounds() -> Vec<(&'static str, &'static str, Value)> {
    let name = json!({"minLength": 1, "maxLength": MAX_KEY_BYTES, "pattern": schema::NO_CONTROL});
    let units = json!({"minimum": 1, "maximum": Quota::MAX_LIMIT});
    let count = json!({"minimum": 0, "maximum": Quota::MAX_LIMIT});
    let wait = json!({"minimum": 0, "maximum": MAX_WAIT_MS});
    let mut bounds = vec![
        ("QueryBody", "policy", name.clone()),
        ("QueryBody", "key", name.clone()),
        // A report or a refund may be above every limit.
        ("QueryBody", "cost", json!({"minimum": 1, "maximum": u64::MAX, "format": "uint64"})),
        ("QueryBody", "age_ms", json!({"minimum": 0, "maximum": MAX_AGE_MS})),
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

/// Describes a query by its three forms. The fields of the other forms may only be null.
fn split_query(schemas: &mut Value) {
    let query = schemas["QueryBody"].take();
    let mut forms = Vec::new();
    for (name, description, required) in [
        ("PolicyQuery", "Policy and key.", &["policy", "key"][..]),
        ("AttributesQuery", "Attributes of a request, which select the policies.", &["attributes"]),
        ("QuotaQuery", "Key and quota of the caller.", &["key", "quota"]),
    ] {
        let mut form = query.clone();
        form["description"] = json!(description);
        form["required"] = json!(required);
        for field in ["policy", "key", "attributes", "quota"] {
            let schema = &mut form["properties"][field];
            // Null is the second of two schemas, or of two types.
            match (required.contains(&field), schema.pointer("/oneOf/0").cloned()) {
                (false, _) => *schema = json!({"type": "null"}),
                (true, Some(not_null)) => *schema = not_null,
                (true, None) => schema["type"] = schema["type"][0].clone(),
            }
        }
        schemas[name] = form;
        forms.push(json!({"$ref": format!("#/components/schemas/{name}")}));
    }
    schemas["QueryBody"] = json!({"description": query["description"], "oneOf": forms});
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
    split_query(&mut api["components"]["schemas"]);
    let entry = &mut api["components"]["schemas"]["PolicyDecisionBody"]["allOf"][1];
    entry["properties"]["key"]["maxLength"] = json!(MAX_KEY_BYTES);
    let decisions = &mut api["components"]["schemas"]["DecisionsBody"]["allOf"][1];
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
