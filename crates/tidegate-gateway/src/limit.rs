//! The rate limit layer in front of the proxy.

use std::sync::Arc;

use axum::body::Body;
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, Version, header};
use tidegate::layer::{
    self, HeaderSwitches, RateLimit, RateLimitLayer, RequestLimiter, RequestParts,
};
use tidegate::{Action, PolicyDecisions, Progress, Query, QueryError, Waiting};
use tower::{Layer as _, Service};

use super::exchange::Exchange;
use super::{Gateway, cors, head, path};
use tidegate_config::{CorsConfig, GatewayConfig};
use tidegate_net::listener::{Peer, Request};
use tidegate_service::api;
use tidegate_service::state::{ActiveConfig, ServerState};

/// Limiter that decides by the active configuration.
#[derive(Clone)]
pub(crate) struct GatewayLimiter(Arc<ServerState>);

impl RequestLimiter for GatewayLimiter {
    type Snapshot = Arc<ActiveConfig>;

    fn snapshot(&self) -> Arc<ActiveConfig> {
        self.0.active()
    }

    fn start<'a>(
        &'a self,
        active: &'a Arc<ActiveConfig>,
        parts: &'a Parts,
    ) -> Result<Progress<'a>, QueryError> {
        let peer = parts.extensions.get::<Peer>().ok_or(QueryError::UnknownPeer)?;
        let request = RequestParts::new(parts, Some(peer.address.ip()), &active.client_ip);
        // The trace of the request continues in the span of its exchange, which is entered now.
        let query = Query::attributes(&request).with_lease();
        let progress = active.limiter.start(Action::Acquire, query);
        if let Some(exchange) = Exchange::of(&parts.extensions) {
            match &progress {
                Ok(Progress::Decided(decisions)) => exchange.decided(Ok(decisions)),
                Ok(Progress::Waiting(_)) => {}
                Err(error) => exchange.decided(Err(error)),
            }
        }
        progress
    }

    async fn finish<'a>(
        &'a self,
        active: &'a Arc<ActiveConfig>,
        parts: &Parts,
        waiting: Waiting<'a>,
    ) -> Result<PolicyDecisions<'a>, QueryError> {
        let result = active.limiter.finish(waiting).await;
        if let Some(exchange) = Exchange::of(&parts.extensions) {
            exchange.decided(result.as_ref());
        }
        result
    }

    async fn refund(&self, active: &Arc<ActiveConfig>, decisions: &PolicyDecisions<'_>) {
        active.limiter.refund(decisions).await;
    }

    fn header_switches(&self, active: &Arc<ActiveConfig>) -> HeaderSwitches {
        HeaderSwitches {
            x_ratelimit_headers: active.x_ratelimit_headers,
            partition_keys: active.partition_keys,
        }
    }
}

/// Gateway behind its rate limit layer.
pub(crate) struct LimitedGateway {
    state: Arc<ServerState>,
    service: RateLimit<Gateway, GatewayLimiter>,
    cors: Option<Arc<CorsConfig>>,
}

impl LimitedGateway {
    pub(super) fn new(
        state: &Arc<ServerState>,
        settings: &GatewayConfig,
        gateway: Gateway,
    ) -> Self {
        let layer = RateLimitLayer::with_request_limiter(GatewayLimiter(Arc::clone(state)))
            .partition_key(api::partition_key);
        let layer = if settings.exempt_preflight { layer.exempt_preflight() } else { layer };
        Self {
            state: Arc::clone(state),
            service: layer.layer(gateway),
            cors: settings.cors.clone().map(Arc::new),
        }
    }

    pub(super) fn call(&self, mut request: Request) -> (LimitedFuture, Finish) {
        let active = self.state.active_guard();
        path::normalize(request.uri_mut(), active.policies());
        head::remove_listed(request.headers_mut());
        let is_http1 = request.version() < Version::HTTP_2;
        let has_body = !http_body::Body::is_end_stream(request.body());
        let closes_if_denied = is_http1 && has_body;
        let closes = is_http1 && request.headers().contains_key(header::UPGRADE);
        let cors = self.cors.as_ref().map(|cors| {
            let origin = request.headers().get(header::ORIGIN).cloned();
            (Arc::clone(cors), origin)
        });
        // The proxy is always ready.
        (self.service.clone().call(request), Finish { closes, closes_if_denied, cors })
    }
}

/// Response of the rate limit layer in progress.
pub(super) type LimitedFuture = <RateLimit<Gateway, GatewayLimiter> as Service<Request>>::Future;

/// Changes to the response besides the rate limit headers, as known from its request.
pub(super) struct Finish {
    /// The bytes after an upgrade request are not checked any more (see `framing.rs`), so no other
    /// request may follow.
    closes: bool,
    /// The body of a denied request is not read to its end.
    closes_if_denied: bool,
    /// CORS settings, and the `Origin` of the request.
    cors: Option<(Arc<CorsConfig>, Option<HeaderValue>)>,
}

impl Finish {
    pub(super) fn apply(&self, response: &mut Response<layer::Body<Body>>) {
        let status = response.status();
        let closes = self.closes && status != StatusCode::SWITCHING_PROTOCOLS;
        if closes || self.closes_if_denied && status == StatusCode::TOO_MANY_REQUESTS {
            let close = HeaderValue::from_static("close");
            response.headers_mut().insert(header::CONNECTION, close);
        }
        if let Some(limits) = response.extensions_mut().remove::<UpstreamRateLimitHeaders>() {
            limits.restore(response.headers_mut());
        }
        if let Some((cors, origin)) = &self.cors {
            cors::add_headers(cors, origin.as_ref(), response);
        }
    }
}

/// Rate limit headers of an upstream. A client could not distinguish them from those of the
/// gateway, so they are only sent if the gateway adds none of the same kind.
#[derive(Debug, Clone)]
pub(super) struct UpstreamRateLimitHeaders(HeaderMap);

impl UpstreamRateLimitHeaders {
    /// Prefix of each kind of header, and a header that the gateway adds with this kind.
    const KINDS: [(&str, &str); 2] =
        [("ratelimit", "ratelimit"), ("x-ratelimit-", "x-ratelimit-limit")];

    /// Removes the headers from the response of an upstream.
    pub(super) fn take(headers: &mut HeaderMap) -> Option<Self> {
        let is_rate_limit = |name: &HeaderName| {
            Self::KINDS.iter().any(|(prefix, _)| name.as_str().starts_with(prefix))
        };
        let found = headers.iter().filter(|(name, _)| is_rate_limit(name));
        let taken: HeaderMap = found.map(|(name, value)| (name.clone(), value.clone())).collect();
        head::remove_where(headers, is_rate_limit);
        (!taken.is_empty()).then_some(Self(taken))
    }

    /// Restores the headers of each kind that the gateway did not add.
    fn restore(&self, headers: &mut HeaderMap) {
        for (prefix, added) in Self::KINDS {
            if !headers.contains_key(added) {
                let of_kind = self.0.iter().filter(|(name, _)| name.as_str().starts_with(prefix));
                for (name, value) in of_kind {
                    headers.append(name, value.clone());
                }
            }
        }
    }
}
