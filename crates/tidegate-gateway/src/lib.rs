//! Reverse proxy with rate limits: streams requests to upstreams and their responses back.
//!
//! The rate limit is checked before any of the request body is read, and the start of the body is
//! read before the request takes a slot of an upstream.
#![allow(
    missing_docs,
    clippy::must_use_candidate,
    clippy::missing_panics_doc,
    reason = "an internal crate of the binary `tidegate`"
)]

use std::convert::Infallible;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use anyhow::Context as _;
use axum::body::Body;
use axum::response::IntoResponse as _;
use http::request::Parts;
use http::{HeaderValue, Method, Request, Response, StatusCode, Version, header};
use http_body::Body as _;
use hyper::body::Incoming;
use hyper::upgrade::OnUpgrade;
use tidegate::{Policies, RequestLease};
use tokio::sync::Semaphore;
use tower::Service;

use tidegate_config::GatewayConfig;
use tidegate_net::listener::{self, Peer};
use tidegate_service::metrics::MetricsSection;
use tidegate_service::state::ServerState;

mod access_log;
mod body;
mod client;
mod concurrency;
mod connection;
mod cors;
mod error;
mod exchange;
#[cfg(test)]
#[path = "../../tidegate/tests/support/fuzz.rs"]
#[allow(dead_code, reason = "other crates use more of it")]
mod fuzz;
mod head;
mod limit;
mod local_error;
mod metrics;
mod path;
mod read_ahead;
mod retry;
mod serve;
mod spans;
mod telemetry;
mod tunnel;
mod uploads;
mod upstreams;

use access_log::AccessLog;
use body::{Download, IdleTimeoutBody, OpenCall, RequestBody, UpstreamRequestBody};
use client::{Clients, CurrentTls};
use error::ProxyError;
use exchange::{Exchange, ObservedGateway, UpstreamCall};
use head::DroppedHeaders;
use limit::{LimitedGateway, UpstreamRateLimitHeaders};
use retry::{Attempt, FailedAttempt, Retry, RetryPolicy};
pub use serve::serve;
use telemetry::Telemetry;
use tidegate_config::UpstreamProtocol as Protocol;
use upstreams::{Upstream, Upstreams};

/// Returns the service of the gateway's listener.
fn service(
    settings: &GatewayConfig,
    state: &Arc<ServerState>,
) -> anyhow::Result<(ObservedGateway, Arc<Telemetry>)> {
    let upstreams = settings.upstreams.iter().map(Upstream::new).collect();
    let upstreams = Upstreams::new(upstreams, settings.limits)
        .context("there is no upstream: name one with --upstream")?;
    let upstreams = Arc::new(upstreams);
    let access_log = settings.access_log.as_ref().map(AccessLog::start).transpose()?;
    let telemetry = Arc::new(Telemetry::new(access_log, Arc::clone(&upstreams)));
    state.metrics.register(Arc::clone(&telemetry) as Arc<dyn MetricsSection>);
    state.set_proxy(Arc::clone(&telemetry) as Arc<dyn tidegate_service::state::Proxy>);
    let tls = CurrentTls::new(Arc::clone(state)).map_err(anyhow::Error::msg)?;
    let proxy = ReverseProxy {
        state: Arc::clone(state),
        clients: Clients::new(&tls, settings.connect_timeout, settings.header_timeout, &upstreams),
        upstreams,
        read_ahead: Arc::new(Semaphore::new(read_ahead::MAX_TOTAL_READ_AHEAD_BYTES)),
        idle_timeout: settings.idle_timeout,
        min_upload_rate: settings.min_upload_rate,
        underscore_headers: settings.underscore_headers,
    };
    let gateway = LimitedGateway::new(state, settings, Gateway(Arc::new(proxy)));
    let observed = ObservedGateway::new(gateway, Arc::clone(state), Arc::clone(&telemetry));
    Ok((observed, telemetry))
}

/// Warns about policies that never apply to the gateway. One file may configure several services,
/// so these are not errors.
fn warn_about_unused_policies(policies: &Policies) {
    for policy in policies.iter() {
        if let Some(attribute) = policy.non_http_attribute() {
            tracing::warn!(
                policy = policy.name(),
                attribute,
                "policy never applies: gateway requests do not have this attribute"
            );
        }
    }
}

/// Reverse proxy as a Tower service.
#[derive(Clone)]
pub struct Gateway(Arc<ReverseProxy>);

impl Service<listener::Request> for Gateway {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: listener::Request) -> Self::Future {
        let proxy = Arc::clone(&self.0);
        Box::pin(async move { Ok(proxy.handle(request).await) })
    }
}

struct ReverseProxy {
    state: Arc<ServerState>,
    upstreams: Arc<Upstreams>,
    clients: Clients,
    /// Bytes of bodies that may still be read ahead.
    read_ahead: Arc<Semaphore>,
    idle_timeout: Duration,
    min_upload_rate: u32,
    underscore_headers: bool,
}

impl ReverseProxy {
    async fn handle(&self, request: listener::Request) -> Response<Body> {
        let is_http1 = request.version() < Version::HTTP_2;
        let is_head = request.method() == Method::HEAD;
        self.forward(request).await.unwrap_or_else(|error| {
            tracing::debug!(reason = error.reason(), "forwarding a request failed");
            let mut response = error.into_response();
            // Over HTTP/2, hyper would send the body, and clients would reject the response.
            if is_head {
                *response.body_mut() = Body::empty();
            }
            // Close the connection: the peer and the upstream may disagree on where the next
            // request starts.
            if is_http1 && matches!(error, ProxyError::Ambiguous(_) | ProxyError::Method(_)) {
                response
                    .headers_mut()
                    .insert(header::CONNECTION, HeaderValue::from_static("close"));
            }
            response
        })
    }

    async fn forward(&self, mut request: listener::Request) -> Result<Response<Body>, ProxyError> {
        let client_upgrade = hyper::upgrade::on(&mut request);
        let (mut head, body) = request.into_parts();
        head::check(&head)?;
        let peer =
            *head.extensions.get::<Peer>().ok_or(ProxyError::Ambiguous("the peer is unknown"))?;
        let protocol = head::upgrade(head.version, &head.headers);
        let client_upgrade = protocol.is_some().then_some(client_upgrade);
        let client = {
            let active = self.state.active_guard();
            let client = head::client(&head.headers, peer, &active.client_ip);
            let dropped = DroppedHeaders {
                underscored: !self.underscore_headers,
                method_overrides: active.reads_method,
            };
            head::to_upstream(&mut head, peer, &active.client_ip, protocol, dropped);
            active.client_ip.network(client)
        };
        let is_http1 = head.version < Version::HTTP_2;
        let announces_trailers = is_http1 && head.headers.contains_key(header::TE);
        let upload = IdleTimeoutBody::new(body, self.idle_timeout, self.min_upload_rate);
        let body = read_ahead::read_ahead(&head.method, upload, &self.read_ahead).await?;
        let exchange = Exchange::of(&head.extensions).cloned();
        let lease = head.extensions.get::<RequestLease>().cloned();
        let (mut response, call) = self.send(head, body, client).await?;
        if announces_trailers {
            head::announce_grpc_trailers(response.headers_mut());
        }
        self.to_client(response, call, client_upgrade, exchange, lease)
    }

    /// Sends the request until an upstream responds, as often as the retry policy allows.
    async fn send(
        &self,
        mut head: Parts,
        mut body: Option<Box<RequestBody>>,
        client: IpAddr,
    ) -> Result<(Response<Incoming>, OpenCall), ProxyError> {
        let mut policy = RetryPolicy::new(&self.upstreams, client);
        let mut attempt = policy.first().await?;
        loop {
            let is_last = policy.is_last(&attempt, &head.method);
            let failure = match self.try_send(&attempt, &mut head, body, is_last).await {
                Ok(sent) => return Ok(sent),
                Err(failure) => failure,
            };
            (attempt, body) = policy.next(attempt, failure).await?;
            self.state.metrics.count_upstream_retry();
        }
    }

    /// Sends the request once. The headers are moved into the last attempt.
    async fn try_send(
        &self,
        attempt: &Attempt<'_>,
        head: &mut Parts,
        body: Option<Box<RequestBody>>,
        is_last: bool,
    ) -> Result<(Response<Incoming>, OpenCall), FailedAttempt> {
        let upstream = attempt.upstream;
        let target = upstream.target(&head.uri).ok_or_else(FailedAttempt::invalid_target)?;
        let call = OpenCall::start(&attempt.permit);
        let is_http2 = upstream.url.protocol == Protocol::Http2;
        let may_repeat = attempt.may_repeat(&head.method);
        let may_pause = is_http2 && head::is_grpc(&head.headers);
        let (request_body, returned_body) =
            UpstreamRequestBody::new(body, may_repeat, may_pause, call.clone());
        let mut request = Request::new(request_body);
        *request.uri_mut() = target;
        *request.method_mut() = head.method.clone();
        *request.headers_mut() =
            if is_last { std::mem::take(&mut head.headers) } else { head.headers.clone() };
        head::set_host(request.headers_mut(), upstream);
        if is_http2 {
            *request.version_mut() = Version::HTTP_2;
            request.headers_mut().remove(header::UPGRADE);
            request.headers_mut().remove(header::CONNECTION);
        }
        let recorded = UpstreamCall::start(upstream, &head.extensions, &mut request);
        let sent = self.clients.send(upstream, request, attempt.is_repeated, &call.timer).await;
        let result = sent.map_err(|error| {
            tracing::debug!(
                upstream = upstream.name(),
                error = &error as &dyn std::error::Error,
                "request to an upstream failed"
            );
            FailedAttempt {
                error: ProxyError::new(&error, upstream.url.authority.host()),
                retry: Retry::after(&error, &head.method, upstream.url.protocol),
                body: returned_body,
            }
        });
        recorded.finish(result.as_ref().map(Response::status).map_err(|failure| failure.error));
        let response = result?;
        upstream.record_success();
        Ok((response, call))
    }

    fn to_client(
        &self,
        mut response: Response<Incoming>,
        call: OpenCall,
        client_upgrade: Option<OnUpgrade>,
        exchange: Option<Arc<Exchange>>,
        lease: Option<RequestLease>,
    ) -> Result<Response<Body>, ProxyError> {
        // The listener picks the version towards the client, independent of the upstream's.
        let version = std::mem::replace(response.version_mut(), Version::HTTP_11);
        if response.status() != StatusCode::SWITCHING_PROTOCOLS {
            head::to_client(version, response.headers_mut());
            if let Some(limits) = UpstreamRateLimitHeaders::take(response.headers_mut()) {
                response.extensions_mut().insert(limits);
            }
            return Ok(response.map(|body| {
                if body.is_end_stream() {
                    Body::empty()
                } else {
                    Body::new(Download::of_call(body, self.idle_timeout, call))
                }
            }));
        }
        // An upgrade that the client did not request is a protocol error of the upstream.
        let client_upgrade = client_upgrade.ok_or(ProxyError::ConnectionLost)?;
        let upstream_upgrade = hyper::upgrade::on(&mut response);
        let tunnel = tunnel::run(client_upgrade, upstream_upgrade, self.idle_timeout, exchange);
        tokio::spawn(async move {
            tunnel.await;
            // The request was in flight for as long as its tunnel was open.
            drop((call, lease));
        });
        let headers = response.headers_mut();
        let protocol = headers.get(header::UPGRADE).cloned();
        head::to_client(version, headers);
        headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        if let Some(protocol) = protocol {
            headers.insert(header::UPGRADE, protocol);
        }
        Ok(response.map(|_| Body::empty()))
    }
}
