//! CORS headers, so that scripts in browsers can read the responses of the gateway.
//!
//! The gateway does not know what the upstream would have answered. Its own responses have the
//! configured headers, and those of the upstream keep theirs.

use axum::body::Body;
use http::{HeaderMap, HeaderValue, Response, header};
use tidegate::layer;

use tidegate_config::{AllowedOrigins, CorsConfig};

/// Marks a response that the proxy made itself, in the extensions of the response.
#[derive(Debug, Clone, Copy)]
pub(super) struct OwnResponse;

/// Adds the headers to the response to a request with this `Origin`.
pub(super) fn add_headers(
    cors: &CorsConfig,
    origin: Option<&HeaderValue>,
    response: &mut Response<layer::Body<Body>>,
) {
    let is_own =
        response.body().is_of_layer() || response.extensions().get::<OwnResponse>().is_some();
    let headers = response.headers_mut();
    if is_own {
        add_to_own(cors, origin, headers);
    } else if headers.contains_key(header::ACCESS_CONTROL_ALLOW_ORIGIN) {
        // Browsers join the lines of this list.
        headers.append(header::ACCESS_CONTROL_EXPOSE_HEADERS, cors.expose_headers.clone());
    }
}

fn add_to_own(cors: &CorsConfig, origin: Option<&HeaderValue>, headers: &mut HeaderMap) {
    let allowed = match &cors.allowed {
        AllowedOrigins::Any => origin.map(|_| HeaderValue::from_static("*")),
        AllowedOrigins::Listed(origins) => {
            // A cache must not answer one origin with the response to another.
            headers.append(header::VARY, HeaderValue::from_static("Origin"));
            origin.filter(|origin| origins.contains(origin)).cloned()
        }
    };
    let Some(allowed) = allowed else { return };
    headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, allowed);
    if cors.allow_credentials {
        let value = HeaderValue::from_static("true");
        headers.insert(header::ACCESS_CONTROL_ALLOW_CREDENTIALS, value);
    }
    headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, cors.expose_headers.clone());
}
