//! The gateway: hands requests on to upstreams and their answers back, as they come.
//!
//! In front stands the limit, which is asked before anything of the body is read.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use anyhow::Context as _;
use axum::body::Body;
use axum::response::IntoResponse as _;
use http::request::Parts;
use http::{HeaderValue, Request, Response, StatusCode, Version, header};
use http_body::Body as _;
use hyper::body::Incoming;
use hyper::upgrade::OnUpgrade;
use tidegate::Policies;
use tower::Service;

use crate::config::GatewayConfig;
use crate::engine::Engine;
use crate::listener::{self, Peer};

mod body;
mod client;
mod head;
mod limit;
mod path;
mod refusal;
mod tunnel;
mod upstreams;

use body::{Activity, Download, Sent, Timed, Upload};
use client::Clients;
use limit::{LimitedGateway, UpstreamRateLimitHeaders};
use refusal::Refusal;
pub(crate) use upstreams::Upstream;
use upstreams::{Speaks, Upstreams};

/// What answers the gateway's listener.
pub(crate) fn service(
    settings: &GatewayConfig,
    engine: &Arc<Engine>,
) -> anyhow::Result<LimitedGateway> {
    let upstreams =
        settings.upstreams.iter().map(|text| text.parse()).collect::<Result<Vec<Upstream>, _>>()?;
    let upstreams =
        Upstreams::new(upstreams).context("there is no upstream: --upstream names one")?;
    let tls = client::tls(settings.ca.as_deref()).map_err(anyhow::Error::msg)?;
    let proxy = Proxy {
        engine: Arc::clone(engine),
        upstreams,
        clients: Clients::new(tls, settings.connect_timeout),
        header_timeout: settings.header_timeout,
        idle_timeout: settings.idle_timeout,
    };
    Ok(LimitedGateway::new(engine, &Gateway(Arc::new(proxy))))
}

/// Warns about policies for other front doors: one file may serve several, but a limit that never
/// applies must not surprise.
pub(crate) fn warn_of_unused_policies(policies: &Policies) {
    for policy in policies.iter() {
        if let Some(attribute) = policy.non_http_attribute() {
            tracing::warn!(
                policy = policy.name(),
                attribute,
                "no request to the gateway has an attribute of this policy"
            );
        }
    }
}

/// The reverse proxy, as a service.
#[derive(Clone)]
pub(crate) struct Gateway(Arc<Proxy>);

impl Service<listener::Request> for Gateway {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: listener::Request) -> Self::Future {
        let proxy = Arc::clone(&self.0);
        Box::pin(async move { Ok(proxy.answer(request).await) })
    }
}

struct Proxy {
    engine: Arc<Engine>,
    upstreams: Upstreams,
    clients: Clients,
    header_timeout: Duration,
    idle_timeout: Duration,
}

impl Proxy {
    async fn answer(&self, request: listener::Request) -> Response<Body> {
        let is_http1 = request.version() < Version::HTTP_2;
        self.forward(request).await.unwrap_or_else(|refusal| {
            tracing::debug!(reason = refusal.reason(), "a request could not be handed on");
            let mut response = refusal.into_response();
            // Who sends such a thing once may be understood otherwise with what follows, too.
            if is_http1 && matches!(refusal, Refusal::Ambiguous(_) | Refusal::Method(_)) {
                response
                    .headers_mut()
                    .insert(header::CONNECTION, HeaderValue::from_static("close"));
            }
            response
        })
    }

    async fn forward(&self, mut request: listener::Request) -> Result<Response<Body>, Refusal> {
        let client_side = hyper::upgrade::on(&mut request);
        let (mut head, body) = request.into_parts();
        head::check(&head)?;
        let peer = *head.extensions.get::<Peer>().ok_or(Refusal::Ambiguous("nobody sent it"))?;
        let upgrade = head::upgrade(head.version, &head.headers);
        let client_side = upgrade.is_some().then_some(client_side);
        head::to_upstream(&mut head, peer, &self.engine.active().client_ip, upgrade);
        let body = (!body.is_end_stream()).then(|| Timed::new(body, self.idle_timeout));
        let answer = self.ask(head, body).await?;
        self.hand_back(answer, client_side)
    }

    /// Asks one upstream after the other, until one is reached.
    async fn ask(
        &self,
        mut head: Parts,
        mut body: Option<Upload>,
    ) -> Result<Response<Incoming>, Refusal> {
        let has_body = body.is_some();
        let mut last = Refusal::Unreachable;
        let mut candidates = self.upstreams.candidates().peekable();
        while let Some(upstream) = candidates.next() {
            let uri = upstream
                .uri(&head.uri)
                .ok_or(Refusal::Ambiguous("the request's target is no path"))?;
            let activity = Activity::now();
            let (sent, mut returned) = Sent::new(body.take(), activity.clone());
            let mut request = Request::new(sent);
            *request.uri_mut() = uri;
            *request.method_mut() = head.method.clone();
            *request.headers_mut() = if candidates.peek().is_some() {
                head.headers.clone()
            } else {
                std::mem::take(&mut head.headers)
            };
            head::name_host(request.headers_mut(), upstream);
            if upstream.speaks == Speaks::Http2 {
                *request.version_mut() = Version::HTTP_2;
                request.headers_mut().remove(header::UPGRADE);
                request.headers_mut().remove(header::CONNECTION);
            }
            let answer = tokio::select! {
                answer = self.clients.of(upstream.speaks).request(request) => answer.map_err(|error| {
                    tracing::debug!(upstream = %upstream.authority, error = &error as &dyn std::error::Error, "no answer");
                    Refusal::of(&error)
                }),
                () = activity.ceased(self.header_timeout) => Err(Refusal::NoAnswer),
            };
            match answer {
                Ok(answer) => {
                    upstream.has_answered();
                    return Ok(answer);
                }
                Err(refusal) => {
                    if refusal.is_upstreams() {
                        self.upstreams.has_failed(upstream, refusal.reason());
                    }
                    // Only what surely was not sent is sent to another.
                    body = returned.try_recv().ok();
                    if !matches!(refusal, Refusal::Unreachable | Refusal::ConnectTimeout)
                        || has_body != body.is_some()
                    {
                        return Err(refusal);
                    }
                    last = refusal;
                }
            }
        }
        Err(if self.upstreams.all_out() { Refusal::NoneLeft } else { last })
    }

    fn hand_back(
        &self,
        mut answer: Response<Incoming>,
        client_side: Option<OnUpgrade>,
    ) -> Result<Response<Body>, Refusal> {
        // What the upstream speaks is its affair: the client is spoken to as it speaks.
        let version = std::mem::replace(answer.version_mut(), Version::HTTP_11);
        if answer.status() != StatusCode::SWITCHING_PROTOCOLS {
            head::to_client(version, answer.headers_mut());
            if let Some(limits) = UpstreamRateLimitHeaders::take(answer.headers_mut()) {
                answer.extensions_mut().insert(limits);
            }
            let timed = |body| Body::new(Download::new(body, self.idle_timeout));
            return Ok(
                answer.map(|body| if body.is_end_stream() { Body::empty() } else { timed(body) })
            );
        }
        // An upgrade that nobody asked for.
        let client_side = client_side.ok_or(Refusal::Broken)?;
        let upstream_side = hyper::upgrade::on(&mut answer);
        tokio::spawn(tunnel::carry(client_side, upstream_side, self.idle_timeout));
        let headers = answer.headers_mut();
        let protocol = headers.get(header::UPGRADE).cloned();
        head::to_client(version, headers);
        headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        if let Some(protocol) = protocol {
            headers.insert(header::UPGRADE, protocol);
        }
        Ok(answer.map(|_| Body::empty()))
    }
}
