//! One request and its response, from arrival to the last byte, for metrics, access log and spans.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use http::{Extensions, Method, Request, Response, StatusCode, header};
use http_body::{Body as HttpBody, Frame, SizeHint};
use tidegate::{Error, PolicyDecisions, layer};
use tower::Service;
use tracing::Span;

use super::access_log::{CLIENT_CLOSED_REQUEST, DecisionFields, RequestFields, ResponseFields};
use super::error::ProxyError;
use super::head;
use super::limit::{Finish, LimitedFuture, LimitedGateway};
use super::metrics::{Aborted, UpstreamMetrics};
use super::spans;
use super::telemetry::Telemetry;
use super::upstreams::Upstream;
use crate::listener::{self, Peer};
use crate::logs;
use crate::state::ServerState;

/// Record of a request. Every part that works on the request holds a reference; when the last one
/// is dropped, the request has ended, and it is counted and logged.
#[derive(Debug)]
pub(super) struct Exchange {
    telemetry: Arc<Telemetry>,
    start: Instant,
    span: Span,
    is_head: bool,
    /// `None` without an access log.
    request: Option<Box<RequestFields>>,
    state: Mutex<ExchangeState>,
}

#[derive(Debug, Default)]
struct ExchangeState {
    status: Option<StatusCode>,
    bytes: u64,
    aborted: Option<Aborted>,
    /// Duration of a request that ended before its connection, which became a tunnel.
    duration: Option<Duration>,
    /// Number of requests sent to upstreams.
    sent: u32,
    upstream: Option<InFlight>,
    upstream_status: Option<StatusCode>,
    decision: Option<DecisionFields>,
}

impl Exchange {
    fn start(
        telemetry: &Arc<Telemetry>,
        state: &ServerState,
        request: &listener::Request,
    ) -> Arc<Self> {
        let start = Instant::now();
        telemetry.metrics.start();
        let peer = request.extensions().get::<Peer>().copied();
        let client =
            || Some(head::client(request.headers(), peer?, &state.active_guard().client_ip));
        let span = spans::server(request, peer, client);
        let fields = telemetry.access_log().map(|_| {
            let trace = logs::trace_id(&span, request.headers());
            Box::new(RequestFields::new(request, client(), trace))
        });
        Arc::new(Self {
            telemetry: Arc::clone(telemetry),
            start,
            span,
            is_head: request.method() == Method::HEAD,
            request: fields,
            state: Mutex::default(),
        })
    }

    /// Returns the record of a request.
    pub(super) fn of(extensions: &Extensions) -> Option<&Arc<Self>> {
        extensions.get()
    }

    /// Records what the policies decided.
    pub(super) fn decided(&self, result: Result<&PolicyDecisions<'_>, &Error>) {
        if self.telemetry.access_log().is_some_and(super::AccessLog::shows_decisions) {
            self.state().decision = Some(DecisionFields::new(result.ok()));
        }
    }

    /// Adds bytes that a tunnel sent to the client.
    pub(super) fn add_bytes(&self, bytes: u64) {
        self.state().bytes += bytes;
    }

    fn state(&self) -> MutexGuard<'_, ExchangeState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn respond(
        self: Arc<Self>,
        mut response: Response<layer::Body<Body>>,
    ) -> Response<ObservedBody> {
        let status = response.status();
        let mut state = self.state();
        state.status = Some(status);
        if status == StatusCode::SWITCHING_PROTOCOLS {
            state.duration = Some(self.start.elapsed());
        }
        drop(state);
        // Such a response has no body, whatever the length of the one it describes. hyper leaves
        // the body out over HTTP/1.1 only.
        let has_body = !self.is_head
            && !status.is_informational()
            && ![StatusCode::NO_CONTENT, StatusCode::NOT_MODIFIED].contains(&status);
        let described = response.body().size_hint().exact().filter(|_| self.is_head);
        if let Some(length) = described.filter(|length| *length > 0) {
            response.headers_mut().entry(header::CONTENT_LENGTH).or_insert(length.into());
        }
        response.map(|body| ObservedBody {
            body,
            exchange: self,
            bytes: 0,
            is_complete: !has_body,
            has_failed: false,
        })
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        let code = state.status.map_or(CLIENT_CLOSED_REQUEST, |status| status.as_u16());
        if state.status.is_none() {
            state.aborted = Some(Aborted::Client);
        }
        let duration = self.start.elapsed();
        self.telemetry.metrics.observe(state.duration.unwrap_or(duration));
        self.telemetry.metrics.finish(code, state.aborted);
        spans::end_server(&self.span, state.status, state.aborted);
        if let (Some(log), Some(request)) = (self.telemetry.access_log(), &self.request) {
            log.log(
                request,
                &ResponseFields {
                    status: code,
                    bytes: state.bytes,
                    duration,
                    upstream: state.upstream.as_ref().map(|upstream| upstream.0.url.as_str()),
                    upstream_status: state.upstream_status.map(|status| status.as_u16()),
                    decision: state.decision.as_ref(),
                    aborted: state.aborted.map(Aborted::as_str),
                },
            );
        }
    }
}

/// Request in flight at an upstream.
#[derive(Debug)]
struct InFlight(Arc<UpstreamMetrics>);

impl InFlight {
    fn new(metrics: &Arc<UpstreamMetrics>) -> Self {
        metrics.start();
        Self(Arc::clone(metrics))
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// Request to an upstream, up to the head of its response.
#[derive(Debug)]
pub(super) struct UpstreamCall<'u> {
    metrics: &'u UpstreamMetrics,
    exchange: Option<Arc<Exchange>>,
    start: Instant,
    span: Span,
}

impl<'u> UpstreamCall<'u> {
    /// Starts the call and adds its trace headers to the request. `client_request` are the
    /// extensions of the client's request.
    pub(super) fn start<B>(
        upstream: &'u Upstream,
        client_request: &Extensions,
        request: &mut Request<B>,
    ) -> Self {
        let exchange = Exchange::of(client_request).cloned();
        let mut resends = 0;
        if let Some(exchange) = &exchange {
            let mut state = exchange.state();
            resends = state.sent;
            state.sent += 1;
            state.upstream = Some(InFlight::new(&upstream.metrics));
        }
        let span = spans::client(upstream, resends, request);
        Self { metrics: &upstream.metrics, exchange, start: Instant::now(), span }
    }

    pub(super) fn finish(self, result: Result<StatusCode, ProxyError>) {
        spans::end_client(&self.span, result);
        match result {
            Ok(status) => {
                self.metrics.count_response(status, self.start.elapsed());
                if let Some(exchange) = &self.exchange {
                    exchange.state().upstream_status = Some(status);
                }
            }
            Err(ProxyError::LocalResource(resource)) => {
                resource.log();
                if let Some(exchange) = &self.exchange {
                    exchange.telemetry.metrics.count_local_error(resource);
                }
            }
            Err(error) => self.metrics.count_error(error),
        }
    }
}

/// Gateway whose requests are counted, logged and traced.
///
/// hyper clones it for each request, which is a single counter.
#[derive(Clone)]
pub(crate) struct ObservedGateway(Arc<ObservedState>);

struct ObservedState {
    gateway: LimitedGateway,
    state: Arc<ServerState>,
    telemetry: Arc<Telemetry>,
}

impl ObservedGateway {
    pub(super) fn new(
        gateway: LimitedGateway,
        state: Arc<ServerState>,
        telemetry: Arc<Telemetry>,
    ) -> Self {
        Self(Arc::new(ObservedState { gateway, state, telemetry }))
    }
}

impl Service<listener::Request> for ObservedGateway {
    type Response = Response<ObservedBody>;
    type Error = Infallible;
    type Future = ObservedFuture;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        // The proxy is always ready.
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, mut request: listener::Request) -> ObservedFuture {
        let ObservedState { gateway, state, telemetry } = &*self.0;
        let exchange = Exchange::start(telemetry, state, &request);
        request.extensions_mut().insert(Arc::clone(&exchange));
        // A decision in memory is made here, so its span needs the parent, too.
        let (response, finish) = {
            let _entered = exchange.span.enter();
            gateway.call(request)
        };
        ObservedFuture { response, finish, exchange: Some(exchange) }
    }
}

/// Response in progress.
pub(crate) struct ObservedFuture {
    response: LimitedFuture,
    finish: Finish,
    /// `None` once the response is complete.
    exchange: Option<Arc<Exchange>>,
}

impl Future for ObservedFuture {
    type Output = Result<Response<ObservedBody>, Infallible>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        let Some(exchange) = &this.exchange else { return Poll::Pending };
        // Makes the span the parent of those of the decision and of the upstream.
        let result = {
            let _entered = exchange.span.enter();
            ready!(Pin::new(&mut this.response).poll(cx))
        };
        match (result, this.exchange.take()) {
            (Ok(mut response), Some(exchange)) => {
                this.finish.apply(&mut response);
                Poll::Ready(Ok(exchange.respond(response)))
            }
            _ => Poll::Pending,
        }
    }
}

/// Body of a response, which counts its bytes.
#[derive(Debug)]
pub(crate) struct ObservedBody {
    body: layer::Body<Body>,
    exchange: Arc<Exchange>,
    bytes: u64,
    is_complete: bool,
    /// Whether the upstream failed to send the rest.
    has_failed: bool,
}

impl HttpBody for ObservedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let this = self.get_mut();
        if this.is_complete {
            return Poll::Ready(None);
        }
        let frame = ready!(Pin::new(&mut this.body).poll_frame(cx));
        match &frame {
            None => this.is_complete = true,
            Some(Ok(frame)) => this.bytes += frame.data_ref().map_or(0, |data| data.len() as u64),
            Some(Err(_)) => this.has_failed = true,
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.is_complete || self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        if self.is_complete { SizeHint::with_exact(0) } else { self.body.size_hint() }
    }
}

impl Drop for ObservedBody {
    fn drop(&mut self) {
        // hyper drops a body of known length without asking for its end.
        let is_complete = self.is_end_stream();
        let mut state = self.exchange.state();
        state.bytes += self.bytes;
        state.aborted = match (self.has_failed, is_complete) {
            (true, _) => Some(Aborted::Upstream),
            (false, false) => Some(Aborted::Client),
            (false, true) => None,
        };
    }
}
