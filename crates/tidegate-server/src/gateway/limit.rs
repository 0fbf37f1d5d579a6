//! The library's layer in front of the proxy, with the engine as its gate.

use std::convert::Infallible;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::Body;
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, Version, header};
use tidegate::Error;
use tidegate::tower::{self as limits, Admission, Gate, RateLimit, RateLimitLayer};
use tower::{Layer as _, Service};

use super::Gateway;
use crate::engine::Engine;
use crate::listener::{Peer, Request};

/// The engine decides: policies, counts, metrics and hot keys are those of `tidegate serve`.
#[derive(Clone)]
pub(crate) struct EngineGate(Arc<Engine>);

impl Gate for EngineGate {
    async fn admit(&self, head: &Parts) -> Result<Admission, Error> {
        let peer = head.extensions.get::<Peer>().ok_or(Error::UnknownPeer)?;
        self.0.admit(head, peer.address.ip()).await
    }

    async fn refund(&self, admission: &Admission) {
        self.0.give_back(admission).await;
    }
}

/// What passes the gate goes to the proxy.
#[derive(Clone)]
pub(crate) struct Limited {
    engine: Arc<Engine>,
    /// Which headers answers have may change with the configuration.
    with_x_headers: RateLimit<Gateway, EngineGate>,
    without_x_headers: RateLimit<Gateway, EngineGate>,
}

impl Limited {
    pub(super) fn new(engine: &Arc<Engine>, gateway: &Gateway) -> Self {
        let layer = |x_headers| {
            RateLimitLayer::with_gate(EngineGate(Arc::clone(engine)))
                .x_ratelimit_headers(x_headers)
                .layer(gateway.clone())
        };
        Self {
            engine: Arc::clone(engine),
            with_x_headers: layer(true),
            without_x_headers: layer(false),
        }
    }
}

impl Service<Request> for Limited {
    type Response = Response<limits::Body<Body>>;
    type Error = Infallible;
    type Future = Finishing;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        // The proxy always is.
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request) -> Finishing {
        let is_http1 = request.version() < Version::HTTP_2;
        let has_body = !http_body::Body::is_end_stream(request.body());
        let ends_if_denied = is_http1 && has_body;
        let ends = is_http1 && request.headers().contains_key(header::UPGRADE);
        let limited = if self.engine.live().x_ratelimit_headers {
            &mut self.with_x_headers
        } else {
            &mut self.without_x_headers
        };
        Finishing { answer: limited.call(request), ends, ends_if_denied }
    }
}

/// The answer on its way, and whether the connection ends with it.
pub(crate) struct Finishing {
    answer: <RateLimit<Gateway, EngineGate> as Service<Request>>::Future,
    /// The bytes behind a request for an upgrade are not looked at any more (see `framing.rs`): no
    /// other one may follow.
    ends: bool,
    /// A body that nobody wants is not read to its end.
    ends_if_denied: bool,
}

impl Future for Finishing {
    type Output = Result<Response<limits::Body<Body>>, Infallible>;

    fn poll(mut self: std::pin::Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.answer.as_mut().poll(cx).map_ok(|mut response| {
            let status = response.status();
            let ends = self.ends && status != StatusCode::SWITCHING_PROTOCOLS;
            if ends || self.ends_if_denied && status == StatusCode::TOO_MANY_REQUESTS {
                response
                    .headers_mut()
                    .insert(header::CONNECTION, HeaderValue::from_static("close"));
            }
            if let Some(limits) = response.extensions_mut().remove::<UpstreamsLimits>() {
                limits.give_back(response.headers_mut());
            }
            response
        })
    }
}

/// What an upstream says of limits of its own. Beside ours a client could not tell which number
/// belongs to which limit.
#[derive(Debug, Clone)]
pub(super) struct UpstreamsLimits(HeaderMap);

impl UpstreamsLimits {
    /// How the names of each kind begin, and one that is among ours if we tell of limits in this
    /// way.
    const KINDS: [(&str, &str); 2] =
        [("ratelimit", "ratelimit"), ("x-ratelimit-", "x-ratelimit-limit")];

    /// Takes them away, until it is known whether ours are told.
    pub(super) fn take(headers: &mut HeaderMap) -> Option<Self> {
        let is_one = |name: &&HeaderName| {
            Self::KINDS.iter().any(|(prefix, _)| name.as_str().starts_with(prefix))
        };
        let names: Vec<HeaderName> = headers.keys().filter(is_one).cloned().collect();
        if names.is_empty() {
            return None;
        }
        let mut taken = HeaderMap::new();
        for name in names {
            for value in headers.get_all(&name) {
                taken.append(&name, value.clone());
            }
            headers.remove(&name);
        }
        Some(Self(taken))
    }

    /// Those of a kind that we say nothing in.
    fn give_back(&self, headers: &mut HeaderMap) {
        for (prefix, ours) in Self::KINDS {
            if !headers.contains_key(ours) {
                let of_kind = self.0.iter().filter(|(name, _)| name.as_str().starts_with(prefix));
                for (name, value) in of_kind {
                    headers.append(name, value.clone());
                }
            }
        }
    }
}
