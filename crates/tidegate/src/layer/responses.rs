//! Responses that the layer sends itself, and the headers that it adds to every response.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::request::Parts;
use http::{HeaderValue, Response, StatusCode};

use super::body::Body;
use super::grpc::{self, Code};
use super::headers::RenderedHeaders;
use super::log_throttle::LogThrottle;
use super::request_limiter::HeaderSwitches;
use crate::charge::ChargeError;
use crate::decision::Source;
use crate::headers::{QUOTA_EXCEEDED, QUOTA_EXCEEDED_TITLE, seconds};
use crate::policy::{PathError, PolicyDecision, PolicyDecisions, QueryError, SelectError};

type OnDenied = dyn Fn(&Denial<'_>) -> Response<Bytes> + Send + Sync;
type PartitionKey = dyn Fn(&PolicyDecision<'_>) -> Option<[u8; 16]> + Send + Sync;
type OnError = dyn Fn(&QueryError) -> Response<Bytes> + Send + Sync;

/// Denied request, from which [`RateLimitLayer::on_denied`] builds its response.
///
/// The layer adds the rate limit headers to that response, including `Retry-After`. gRPC clients
/// get the status `RESOURCE_EXHAUSTED` instead, whatever the closure returns.
///
/// ```
/// use std::convert::Infallible;
/// use std::time::Duration;
/// use http::{Request, Response, StatusCode};
/// use tidegate::layer::{Denial, RateLimitLayer};
/// use tidegate::{Limiter, MemoryStore, Quota};
/// use tower::{Layer as _, ServiceExt as _, service_fn};
///
/// /// Redirects browsers to a page that explains the limit.
/// fn explain(denial: &Denial<'_>) -> Response<&'static [u8]> {
///     let policy = denial.denied_by().policy();
///     let wait = denial.retry_after().as_secs() + 1;
///     Response::builder()
///         .status(StatusCode::SEE_OTHER)
///         .header("location", format!("/slow-down?policy={policy}&wait={wait}"))
///         .body(&b""[..])
///         .unwrap()
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let quota = Quota::fixed_window(1, Duration::from_secs(60))?;
/// let limiter = Limiter::new(MemoryStore::new());
/// let layer = RateLimitLayer::new(limiter, quota).policy("site").on_denied(explain);
/// let service = layer.layer(service_fn(async |_request: Request<()>| {
///     Ok::<_, Infallible>(Response::new("hello"))
/// }));
///
/// assert_eq!(service.clone().oneshot(Request::new(())).await?.status(), StatusCode::OK);
/// let denied = service.oneshot(Request::new(())).await?;
/// assert_eq!(denied.status(), StatusCode::SEE_OTHER);
/// assert!(denied.headers().contains_key("retry-after"));
/// # Ok(())
/// # }
/// ```
///
/// [`RateLimitLayer::on_denied`]: super::RateLimitLayer::on_denied
#[derive(Debug, Clone, Copy)]
pub struct Denial<'a> {
    pub(super) parts: &'a Parts,
    pub(super) decisions: &'a PolicyDecisions<'a>,
    pub(super) denied_by: &'a PolicyDecision<'a>,
}

/// How the layer responds.
#[derive(Clone)]
pub(super) struct Responses {
    pub(super) x_ratelimit_headers: bool,
    pub(super) partition_key: Option<Arc<PartitionKey>>,
    pub(super) on_denied: Arc<OnDenied>,
    pub(super) on_error: Arc<OnError>,
}

impl Default for Responses {
    fn default() -> Self {
        Self {
            x_ratelimit_headers: true,
            partition_key: None,
            on_denied: Arc::new(too_many_requests),
            on_error: Arc::new(no_decision),
        }
    }
}

impl<'a> Denial<'a> {
    /// Returns the head of the request: its method, URI, headers and extensions. The body has not
    /// been read.
    #[must_use]
    pub fn parts(&self) -> &'a Parts {
        self.parts
    }

    /// Returns the decisions of all limits on the request, including those that allowed it and
    /// those in shadow mode.
    pub fn decisions(&self) -> &'a PolicyDecisions<'a> {
        self.decisions
    }

    /// Returns the decision that denied the request; of several, the one with the longest wait.
    #[must_use]
    pub fn denied_by(&self) -> &'a PolicyDecision<'a> {
        self.denied_by
    }

    /// Returns the wait after which the request would be admitted if no other request arrived.
    /// Zero if no wait helps, because the request lacks the key of a policy that requires it.
    #[must_use]
    pub fn retry_after(&self) -> Duration {
        self.denied_by.decision().retry_after
    }

    /// Returns the explanation for the client.
    fn detail(&self) -> String {
        let name = self.denied_by.policy();
        let Some(quota) = self.denied_by.quota().filter(|_| self.denied_by.key().is_some()) else {
            let key = self.denied_by.missing_key().unwrap_or("the key");
            return format!("the request lacks {key}, by which policy {name:?} counts: send it");
        };
        if self.denied_by.decision().source == Source::Override {
            return format!("an override of the policy {name:?} blocks this key");
        }
        if quota.is_concurrency() {
            let limit = quota.limit();
            return format!(
                "policy {name:?} allows {limit} in flight: try again when one has ended"
            );
        }
        let (limit, wait) = (quota.limit(), seconds(self.retry_after()).max(1));
        let window = match quota.calendar() {
            Some(calendar) => format!("this {}", calendar.unit()),
            None => format!("{} s", seconds(quota.window())),
        };
        format!("policy {name:?} allows {limit} in {window}: try again in {wait} s")
    }
}

impl Responses {
    pub(super) fn denied<B>(
        &self,
        denial: &Denial<'_>,
        switches: HeaderSwitches,
    ) -> Response<Body<B>> {
        let parts = denial.parts;
        let mut response = if grpc::is_grpc(&parts.headers) {
            let retry_after = Some(denial.retry_after()).filter(|wait| !wait.is_zero());
            grpc::response(&parts.headers, Code::ResourceExhausted, &denial.detail(), retry_after)
        } else {
            (self.on_denied)(denial).map(Body::of_layer)
        };
        self.headers(denial.decisions, switches).add_to(response.headers_mut());
        response
    }

    pub(super) fn error_response<B>(&self, parts: &Parts, error: &QueryError) -> Response<Body<B>> {
        // Only the operator sees the reason: it may name servers.
        let (status, code) = class(error);
        if status.is_server_error() {
            static THROTTLE: LogThrottle = LogThrottle::new();
            if let Some(suppressed) = THROTTLE.should_log(Instant::now()) {
                tracing::warn!(%error, suppressed, "request not decided (logged once per minute)");
            }
        }
        if grpc::is_grpc(&parts.headers) {
            return grpc::response(&parts.headers, code, &explanation(error), None);
        }
        (self.on_error)(error).map(Body::of_layer)
    }

    /// Returns the headers of a response.
    pub(super) fn headers(
        &self,
        decisions: &PolicyDecisions<'_>,
        switches: HeaderSwitches,
    ) -> RenderedHeaders {
        let with_x_headers = self.x_ratelimit_headers && switches.x_ratelimit_headers;
        match &self.partition_key {
            Some(partition_key) if switches.partition_keys => {
                let states = decisions.header_states_with(|entry| partition_key(entry));
                RenderedHeaders::new(states, with_x_headers)
            }
            _ => RenderedHeaders::new(decisions.header_states(), with_x_headers),
        }
    }
}

fn too_many_requests(denial: &Denial<'_>) -> Response<Bytes> {
    let mut more = String::from(",\"policy\":");
    push_json(&mut more, denial.denied_by().policy());
    let millis = denial.retry_after().as_nanos().div_ceil(1_000_000);
    let _ = write!(more, ",\"retry_after_ms\":{millis}");
    let mut exceeded = denial.decisions().exceeded().peekable();
    let status = StatusCode::TOO_MANY_REQUESTS;
    if let Some(key) = denial.denied_by().missing_key() {
        let _ = write!(more, ",\"source\":\"{}\",\"missing_key\":", Source::MissingKey);
        push_json(&mut more, key);
    }
    if exceeded.peek().is_none() {
        return problem(status, blank(status), &denial.detail(), &more);
    }
    more.push_str(",\"violated-policies\":");
    let mut separator = '[';
    for entry in exceeded {
        more.push(separator);
        push_json(&mut more, entry.policy());
        separator = ',';
    }
    more.push(']');
    problem(status, (QUOTA_EXCEEDED, QUOTA_EXCEEDED_TITLE), &denial.detail(), &more)
}

fn no_decision(error: &QueryError) -> Response<Bytes> {
    let status = class(error).0;
    problem(status, blank(status), &explanation(error), "")
}

/// Returns the statuses of an error: of the client, the store or the setup.
fn class(error: &QueryError) -> (StatusCode, Code) {
    use ChargeError::{CostTooHigh, Key, ZeroCost};
    match error {
        QueryError::Store(_) => (StatusCode::SERVICE_UNAVAILABLE, Code::Unavailable),
        QueryError::Select(SelectError::Path(PathError::TooLong(_))) => {
            (StatusCode::URI_TOO_LONG, Code::InvalidArgument)
        }
        QueryError::Select(_) | QueryError::Charge(Key(_) | CostTooHigh { .. } | ZeroCost) => {
            (StatusCode::BAD_REQUEST, Code::InvalidArgument)
        }
        QueryError::Charge(_) | QueryError::UnknownPeer | QueryError::UnknownPolicy { .. } => {
            (StatusCode::INTERNAL_SERVER_ERROR, Code::Internal)
        }
    }
}

fn explanation(error: &QueryError) -> String {
    match class(error).1 {
        Code::InvalidArgument => error.to_string(),
        Code::Unavailable => "the limits cannot be checked now: try again in a moment".to_owned(),
        _ => "the limits of this service are misconfigured".to_owned(),
    }
}

/// Returns the type and title of a problem that has nothing to say beyond its status.
fn blank(status: StatusCode) -> (&'static str, &'static str) {
    ("about:blank", status.canonical_reason().unwrap_or("Error"))
}

/// Returns RFC 9457 problem details, with more members.
fn problem(
    status: StatusCode,
    (kind, title): (&str, &str),
    detail: &str,
    more: &str,
) -> Response<Bytes> {
    let mut json = String::with_capacity(256);
    let status_code = status.as_u16();
    let _ = write!(json, r#"{{"type":"{kind}","title":"{title}","status":{status_code},"detail":"#);
    push_json(&mut json, detail);
    json.push_str(more);
    json.push('}');
    let mut response = Response::new(Bytes::from(json));
    *response.status_mut() = status;
    response
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
    response
}

/// Appends a JSON string.
fn push_json(json: &mut String, text: &str) {
    json.push('"');
    for character in text.chars() {
        match character {
            '"' | '\\' => json.extend(['\\', character]),
            '\0'..=' ' if character != ' ' => {
                let _ = write!(json, "\\u{:04x}", u32::from(character));
            }
            _ => json.push(character),
        }
    }
    json.push('"');
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::time::Duration;

    use super::*;
    use crate::limiter::Limiter;
    use crate::policy::{MissingKey, Policies, Policy, PolicyLimiter, Query};
    use crate::quota::Quota;
    use crate::store::StoreError;
    use crate::store::memory::MemoryStore;

    fn json(response: &Response<Bytes>) -> serde_json::Value {
        serde_json::from_slice(response.body()).expect("JSON")
    }

    #[tokio::test]
    async fn policy_name_cannot_break_out_of_the_body() {
        let quota = Quota::fixed_window(1, Duration::from_secs(1)).expect("valid");
        let name = "a\"b\\c é";
        let policy = Policy::builder(name, quota).key(["header.x"]).missing_key(MissingKey::Deny);
        let policies = Policies::new(vec![policy.build().expect("valid")]).expect("one policy");
        let limiter = PolicyLimiter::new(Limiter::new(MemoryStore::new()), policies);
        let attributes = BTreeMap::<String, String>::new();
        let decisions = limiter.acquire(Query::attributes(&attributes)).await.expect("decided");
        let (parts, ()) = http::Request::new(()).into_parts();
        let denied_by = decisions.denied_by().expect("denied");
        let denial = Denial { parts: &parts, decisions: &decisions, denied_by };
        let body = json(&too_many_requests(&denial));
        assert_eq!(body["policy"], name);
        assert_eq!(body["retry_after_ms"], 0);
        // A missing key exceeds no quota.
        assert_eq!(body["type"], "about:blank");
        assert_eq!(body.get("violated-policies"), None);
        assert_eq!(
            (&body["source"], &body["missing_key"]),
            (&"missing-key".into(), &"header.x".into())
        );
        let detail = body["detail"].as_str().expect("a detail");
        assert!(detail.starts_with("the request lacks header.x, by which policy"), "{detail}");
        let mut text = String::new();
        push_json(&mut text, "line\nbreak\0");
        assert_eq!(serde_json::from_str::<String>(&text).expect("JSON"), "line\nbreak\0");
    }

    #[test]
    fn error_has_the_status_of_its_cause_and_shows_no_secret() {
        let store = QueryError::Store(StoreError::Unreachable("redis at 10.0.0.7".to_owned()));
        let response = no_decision(&store);
        assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
        let detail = json(&response)["detail"].as_str().map(str::to_owned).expect("a detail");
        assert!(!detail.contains("10.0.0.7"), "{detail}");
        let costly = QueryError::Charge(ChargeError::CostTooHigh { cost: 7, most: 5 });
        assert_eq!(no_decision(&costly).status(), StatusCode::BAD_REQUEST);
        let detail = json(&no_decision(&costly))["detail"].as_str().map(str::to_owned);
        assert!(detail.is_some_and(|detail| detail.contains("at most 5")));
        assert_eq!(
            no_decision(&QueryError::UnknownPeer).status(),
            StatusCode::INTERNAL_SERVER_ERROR
        );
    }
}
