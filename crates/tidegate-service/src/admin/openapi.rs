//! `GET /openapi.json`: description of the admin API.

use std::sync::LazyLock;

use axum::body::Bytes;
use axum::response::IntoResponse;
use http::header;
use serde_json::{Value, json};
use utoipa::OpenApi;

use super::{
    events, fleet, health, history, hot_keys, live, lookup, overrides, policies, reset, status,
};
use crate::api::BearerToken;

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Tidegate: admin API",
        description = "State of this instance, the counts of keys, their reset, and overrides of \
                       limits. Fields may be added to responses."
    ),
    paths(
        health::healthz,
        health::readyz,
        super::all_metrics,
        status::handle,
        history::handle,
        live::handle,
        policies::handle,
        hot_keys::handle,
        fleet::view::handle,
        events::handle,
        lookup::handle,
        reset::handle,
        overrides::set,
        overrides::list,
        overrides::remove,
        overrides::audit
    ),
    modifiers(&BearerToken),
    security((), ("token" = []))
)]
struct AdminApi;

/// Description, which all responses share.
static DOCUMENT: LazyLock<Bytes> = LazyLock::new(|| {
    let mut api = serde_json::to_value(AdminApi::openapi()).unwrap_or_default();
    // Relative to its URL, so it is the listener that the client asked.
    api["servers"] = json!([{"url": "/"}]);
    for (_, schema) in api["components"]["schemas"].as_object_mut().into_iter().flatten() {
        let parts = schema.get_mut("allOf").and_then(Value::as_array_mut);
        parts.into_iter().flatten().for_each(allow_absence);
    }
    serde_json::to_vec(&api).unwrap_or_default().into()
});

/// Describes optional fields at the level of their parent: without them, it is still an object.
fn allow_absence(part: &mut Value) {
    if let Some(fields) = part.pointer("/oneOf/0") {
        *part = json!({"anyOf": [fields, {"type": "object"}]});
    }
}

pub(super) async fn handle() -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "application/json")], DOCUMENT.clone())
}
