//! What the layer answers itself, and the headers on every answer.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Response, StatusCode};

use super::body::Body;
use super::fields::each_field;
use super::gate::{Admission, Line};
use super::grpc::{self, Code};
use crate::charge::ChargeError;
use crate::headers::seconds;
use crate::limiter::Error;

type OnDenied = dyn Fn(&Denial<'_>) -> Response<Bytes> + Send + Sync;
type OnError = dyn Fn(&Error) -> Response<Bytes> + Send + Sync;

/// A request that may not pass now.
#[derive(Debug, Clone, Copy)]
pub struct Denial<'a> {
    pub(super) head: &'a Parts,
    pub(super) admission: &'a Admission,
    pub(super) line: &'a Line,
}

/// How the layer answers.
#[derive(Clone)]
pub(super) struct Replies {
    pub(super) x_ratelimit_headers: bool,
    pub(super) on_denied: Arc<OnDenied>,
    pub(super) on_error: Arc<OnError>,
}

impl Default for Replies {
    fn default() -> Self {
        Self {
            x_ratelimit_headers: true,
            on_denied: Arc::new(too_many_requests),
            on_error: Arc::new(no_decision),
        }
    }
}

impl<'a> Denial<'a> {
    /// The request's head.
    #[must_use]
    pub fn head(&self) -> &'a Parts {
        self.head
    }

    /// All that was decided.
    #[must_use]
    pub fn admission(&self) -> &'a Admission {
        self.admission
    }

    /// The limit that denied; of several, the one with the longest wait.
    #[must_use]
    pub fn line(&self) -> &'a Line {
        self.line
    }

    /// Who waits so long gets in, if nobody else comes.
    #[must_use]
    pub fn retry_after(&self) -> Duration {
        self.line.decision().retry_after
    }

    /// For the client: what happened, and what to do.
    fn detail(&self) -> String {
        let name = self.line.policy();
        if self.line.key().is_none() {
            return format!("the request lacks what policy {name:?} counts by");
        }
        let quota = self.line.quota();
        let (limit, window, wait) =
            (quota.limit(), seconds(quota.window()), seconds(self.retry_after()).max(1));
        format!("policy {name:?} lets {limit} pass in {window} s: try again in {wait} s")
    }
}

impl Replies {
    pub(super) fn denied<B>(&self, denial: &Denial<'_>) -> Response<Body<B>> {
        let head = denial.head;
        let mut response = if grpc::is_spoken(&head.headers) {
            let retry_after = Some(denial.retry_after()).filter(|wait| !wait.is_zero());
            grpc::response(&head.headers, Code::ResourceExhausted, &denial.detail(), retry_after)
        } else {
            (self.on_denied)(denial).map(Body::of_layer)
        };
        self.add_headers(response.headers_mut(), denial.admission);
        response
    }

    pub(super) fn undecided<B>(&self, head: &Parts, error: &Error) -> Response<Body<B>> {
        // The operator reads the reason; the client only that it was not its fault.
        let (status, code) = class(error);
        if status.is_server_error() {
            tracing::warn!(%error, "nobody could decide about a request");
        }
        if grpc::is_spoken(&head.headers) {
            return grpc::response(&head.headers, code, &explanation(error), None);
        }
        (self.on_error)(error).map(Body::of_layer)
    }

    /// A list goes on where another layer, or the service itself, has begun it. Of the headers that
    /// hold one value, the one that is there stays: it is from somebody nearer to the work.
    pub(super) fn add_headers(&self, headers: &mut HeaderMap, admission: &Admission) {
        each_field(admission.limited(), self.x_ratelimit_headers, |name, value| {
            let is_list = matches!(name.as_str(), "ratelimit" | "ratelimit-policy");
            if is_list {
                headers.append(name, value);
            } else {
                headers.entry(name).or_insert(value);
            }
        });
    }
}

fn too_many_requests(denial: &Denial<'_>) -> Response<Bytes> {
    let mut more = String::from(",\"policy\":");
    push_json(&mut more, denial.line().policy());
    let millis = denial.retry_after().as_nanos().div_ceil(1_000_000);
    let _ = write!(more, ",\"retry_after_ms\":{millis}");
    problem(StatusCode::TOO_MANY_REQUESTS, &denial.detail(), &more)
}

fn no_decision(error: &Error) -> Response<Bytes> {
    problem(class(error).0, &explanation(error), "")
}

/// Whose fault it is.
fn class(error: &Error) -> (StatusCode, Code) {
    use ChargeError::{CostTooHigh, Key, ZeroCost};
    match error {
        Error::Store(_) => (StatusCode::SERVICE_UNAVAILABLE, Code::Unavailable),
        Error::Select(_) | Error::Charge(Key(_) | CostTooHigh { .. } | ZeroCost) => {
            (StatusCode::BAD_REQUEST, Code::InvalidArgument)
        }
        Error::Charge(_) | Error::UnknownPeer => {
            (StatusCode::INTERNAL_SERVER_ERROR, Code::Internal)
        }
    }
}

fn explanation(error: &Error) -> String {
    match class(error).1 {
        Code::InvalidArgument => error.to_string(),
        Code::Unavailable => "the limits cannot be checked now; try again in a moment".to_owned(),
        _ => "the limits of this service are not set up right".to_owned(),
    }
}

/// RFC 9457 problem details, with these members more.
fn problem(status: StatusCode, detail: &str, more: &str) -> Response<Bytes> {
    let title = status.canonical_reason().unwrap_or("Error");
    let mut json = String::with_capacity(256);
    let _ = write!(
        json,
        r#"{{"type":"about:blank","title":"{title}","status":{},"detail":"#,
        status.as_u16()
    );
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

/// A string of JSON.
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
    use std::time::Duration;

    use super::*;
    use crate::policy::Policy;
    use crate::quota::Quota;
    use crate::store::StoreError;

    fn json(response: &Response<Bytes>) -> serde_json::Value {
        serde_json::from_slice(response.body()).expect("JSON")
    }

    #[test]
    fn no_name_breaks_out_of_the_body() {
        let quota = Quota::fixed_window(1, Duration::from_secs(1)).expect("valid");
        let policy = Policy::new("a\"b\\c é", quota).expect("a name");
        let admission = Admission::new(crate::Timestamp::ZERO, vec![Line::without_key(&policy)]);
        let (head, ()) = http::Request::new(()).into_parts();
        let line = admission.denied_by().expect("denied");
        let body = json(&too_many_requests(&Denial { head: &head, admission: &admission, line }));
        assert_eq!(body["policy"], policy.name());
        assert_eq!(body["retry_after_ms"], 0);
        let mut text = String::new();
        push_json(&mut text, "line\nbreak\0");
        assert_eq!(serde_json::from_str::<String>(&text).expect("JSON"), "line\nbreak\0");
    }

    #[test]
    fn each_error_is_somebodys_fault_and_no_secret_is_told() {
        let store = Error::Store(StoreError::Unreachable("redis at 10.0.0.7".to_owned()));
        let told = no_decision(&store);
        assert_eq!(told.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert!(!json(&told)["detail"].as_str().is_some_and(|detail| detail.contains("10.0.0.7")));
        let costly = Error::Charge(ChargeError::CostTooHigh { cost: 7, most: 5 });
        assert_eq!(no_decision(&costly).status(), StatusCode::BAD_REQUEST);
        assert!(
            json(&no_decision(&costly))["detail"]
                .as_str()
                .is_some_and(|detail| detail.contains("at most 5"))
        );
        assert_eq!(no_decision(&Error::UnknownPeer).status(), StatusCode::INTERNAL_SERVER_ERROR);
    }
}
