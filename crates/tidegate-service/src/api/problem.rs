//! Errors of the HTTP API: RFC 9457 problem details.

use axum::body::{Body, Bytes};
use axum::response::IntoResponse;
use http::{HeaderValue, Response, StatusCode, header};
use http_body_util::Full;
use serde::Serialize;
use tidegate::headers::{QUOTA_EXCEEDED, QUOTA_EXCEEDED_TITLE};
use tidegate::{ChargeError, PolicyDecision, PolicyDecisions, QueryError, StoreError};

use crate::logs;
use tidegate_config::AuthError;

/// Error response for the client.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct Problem {
    /// about:blank if the title is the reason phrase of the status. A request that exceeds a limit
    /// has the type quota-exceeded of the IETF draft on rate limit header fields.
    #[serde(rename = "type")]
    kind: &'static str,
    title: &'static str,
    status: u16,
    /// Description of the error and how to fix it.
    detail: String,
    /// Policies that the request exceeds, for the type quota-exceeded.
    #[serde(rename = "violated-policies", skip_serializing_if = "Vec::is_empty")]
    #[schema(required = false, max_items = 128)]
    violated_policies: Vec<String>,
    /// Origin of the denial, if the request lacks the key of a policy: missing-key.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(required = false, value_type = Option<String>)]
    source: Option<DenialSource>,
    /// Attribute that the request lacks.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(required = false, value_type = Option<String>)]
    missing_key: Option<Box<str>>,
    /// Header with what would be right.
    #[serde(skip)]
    header: Option<&'static (&'static str, &'static str)>,
}

/// Origin of a denial that is not a decision of the store.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "kebab-case")]
enum DenialSource {
    MissingKey,
}

impl Problem {
    pub fn new(status: StatusCode, detail: impl Into<String>) -> Self {
        let title = status.canonical_reason().unwrap_or("Error");
        Self {
            kind: "about:blank",
            title,
            status: status.as_u16(),
            detail: detail.into(),
            violated_policies: Vec::new(),
            source: None,
            missing_key: None,
            header: None,
        }
    }

    /// Creates the problem of a request that these decisions deny.
    pub fn denied(
        status: StatusCode,
        detail: impl Into<String>,
        decisions: &PolicyDecisions<'_>,
    ) -> Self {
        let exceeded = decisions.exceeded().map(PolicyDecision::policy);
        let violated_policies: Vec<String> = exceeded.map(str::to_owned).collect();
        let missing = decisions.denied_by().and_then(PolicyDecision::missing_key);
        let problem = Self {
            source: missing.map(|_| DenialSource::MissingKey),
            missing_key: missing.map(Box::from),
            ..Self::new(status, detail)
        };
        if violated_policies.is_empty() {
            return problem;
        }
        Self { kind: QUOTA_EXCEEDED, title: QUOTA_EXCEEDED_TITLE, violated_policies, ..problem }
    }

    /// Returns the error for a compressed body; RFC 7694 defines the header.
    pub fn encoded_body() -> Self {
        let header = Some(&("accept-encoding", "identity"));
        let detail = "the body has a Content-Encoding, which is not supported: send it without";
        Self { header, ..Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, detail) }
    }

    pub fn bad_request(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, detail)
    }
}

/// Returns the explanation of a failed store for clients.
pub fn unavailable(error: &StoreError) -> &'static str {
    if error.may_have_run() {
        "the store is unavailable, and a part of the request may have been made: do not repeat it"
    } else {
        "the store is unavailable: try again later"
    }
}

impl From<AuthError> for Problem {
    fn from(error: AuthError) -> Self {
        if matches!(error, AuthError::MissingScope { .. }) {
            return Self::new(StatusCode::FORBIDDEN, error.to_string());
        }
        let header = Some(&("www-authenticate", "Bearer"));
        Self { header, ..Self::new(StatusCode::UNAUTHORIZED, error.to_string()) }
    }
}

impl From<QueryError> for Problem {
    fn from(error: QueryError) -> Self {
        let status = match &error {
            QueryError::UnknownPolicy { .. } => StatusCode::NOT_FOUND,
            QueryError::Charge(ChargeError::HoldConflict(_)) => StatusCode::CONFLICT,
            QueryError::Store(store) => {
                // The reason is only logged: it may have the addresses of servers.
                logs::store_failed(store);
                return Self::new(StatusCode::SERVICE_UNAVAILABLE, unavailable(store));
            }
            _ => StatusCode::BAD_REQUEST,
        };
        Self::new(status, error.to_string())
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response<Body> {
        self.into_http().map(Body::new)
    }
}

impl Problem {
    pub fn into_http(self) -> Response<Full<Bytes>> {
        let body = serde_json::to_vec(&self).unwrap_or_default();
        let mut response = Response::new(Full::from(body));
        *response.status_mut() =
            StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let kind = HeaderValue::from_static("application/problem+json");
        response.headers_mut().insert(header::CONTENT_TYPE, kind);
        if let Some((name, value)) = self.header {
            response.headers_mut().insert(*name, HeaderValue::from_static(value));
        }
        response
    }
}
