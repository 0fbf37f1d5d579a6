//! [`RateLimit`]: the service around a service.

use std::fmt;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, header};
use tokio::runtime::Handle;
use tower_service::Service;

use super::body::{Body, OnTrailers};
use super::future::ResponseFuture;
use super::headers::RenderedHeaders;
use super::request_limiter::RequestLimiter;
use super::responses::Denial;
use super::{LayerState, grpc};
use crate::policy::{PolicyDecisions, Progress, QueryError, RequestLease, Waiting, whole_number};

/// Service that passes admitted requests to the inner service.
///
/// [`RateLimitLayer`](super::RateLimitLayer) creates it, by `Router::layer` of axum, a
/// `ServiceBuilder` of Tower, or directly:
///
/// ```
/// use std::convert::Infallible;
/// use std::time::Duration;
/// use http::{Request, Response, StatusCode};
/// use tidegate::layer::RateLimitLayer;
/// use tidegate::{KeySource, Limiter, MemoryStore, Quota};
/// use tower::{Layer as _, ServiceExt as _, service_fn};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let quota = Quota::sliding_log(1, Duration::from_secs(60))?;
/// let layer = RateLimitLayer::new(Limiter::new(MemoryStore::new()), quota)
///     .policy("per-user")
///     .by(KeySource::header("x-user-id")?);
/// let service = layer.layer(service_fn(async |_request: Request<()>| {
///     Ok::<_, Infallible>(Response::new("hello"))
/// }));
///
/// let request = || Request::get("/").header("x-user-id", "ann").body(());
/// let admitted = service.clone().oneshot(request()?).await?;
/// assert_eq!(admitted.headers()["ratelimit"], r#""per-user";r=0;t=60"#);
/// let denied = service.oneshot(request()?).await?;
/// assert_eq!(denied.status(), StatusCode::TOO_MANY_REQUESTS);
/// # Ok(())
/// # }
/// ```
///
/// * The service is ready when the inner service is ready. A denied request does not call it, and
///   neither a denied nor a delayed one holds a slot of it.
/// * Its error is that of the inner service. A denial and a failing store are responses.
/// * The inner service must be `Clone`, as in every Tower layer that calls it from a future.
/// * The body of a denied request is not read.
/// * A request that is dropped while it waits for its turn in a `leaky-bucket` returns its units;
///   that, and the wait, need a Tokio runtime.
pub struct RateLimit<S, G> {
    inner: S,
    shared: Arc<LayerState<G>>,
}

impl<S, G> RateLimit<S, G> {
    pub(super) fn new(inner: S, shared: Arc<LayerState<G>>) -> Self {
        Self { inner, shared }
    }
}

impl<S: fmt::Debug, G> fmt::Debug for RateLimit<S, G> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RateLimit").field("inner", &self.inner).finish_non_exhaustive()
    }
}

impl<S: Clone, G> Clone for RateLimit<S, G> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), shared: Arc::clone(&self.shared) }
    }
}

impl<S, G, B, R> Service<Request<B>> for RateLimit<S, G>
where
    S: Service<Request<B>, Response = Response<R>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Send,
    G: RequestLimiter,
    B: Send + 'static,
    R: Send + 'static,
{
    type Response = Response<Body<R>>;
    type Error = S::Error;
    type Future = ResponseFuture<S::Future, R, S::Error>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(context)
    }

    #[inline]
    fn call(&mut self, request: Request<B>) -> Self::Future {
        let shared = &*self.shared;
        if shared.exempt_preflight && is_preflight(&request) {
            return ResponseFuture::called(self.inner.call(request), RenderedHeaders::default());
        }
        self.call_limited(request)
    }
}

impl<S: Clone, G> RateLimit<S, G> {
    fn call_limited<B, R>(&mut self, request: Request<B>) -> ResponseFuture<S::Future, R, S::Error>
    where
        S: Service<Request<B>, Response = Response<R>> + Send + 'static,
        S::Future: Send,
        S::Error: Send,
        G: RequestLimiter,
        B: Send + 'static,
        R: Send + 'static,
    {
        let shared = &self.shared;
        let (parts, body) = request.into_parts();
        let snapshot = shared.limiter.snapshot();
        let decided = match shared.limiter.start(&snapshot, &parts) {
            Ok(Progress::Waiting(waiting)) => {
                let (shared, waiting) = (Arc::clone(shared), waiting.into_owned());
                let (ready, request) = (self.take_ready(), (parts, body));
                let call = call_waiting(shared, snapshot, waiting, ready, request);
                return ResponseFuture::boxed(Box::pin(call));
            }
            Ok(Progress::Decided(decisions)) => Ok(decisions),
            Err(error) => Err(error),
        };
        match decided {
            Ok(decisions) if shared.is_admission(&decisions) => {
                let headers = shared.headers(&snapshot, &decisions);
                drop(decisions);
                ResponseFuture::called(self.inner.call(Request::from_parts(parts, body)), headers)
            }
            decided => match shared.admitted(&snapshot, &parts, decided) {
                Ok(decisions) => {
                    let (shared, decisions) = (Arc::clone(shared), decisions.into_owned());
                    let ready = self.take_ready();
                    ResponseFuture::boxed(Box::pin(async move {
                        let request = (parts, body);
                        call_admitted(&shared, &snapshot, decisions, ready, request).await
                    }))
                }
                Err(response) => {
                    // A slot of the inner service, such as that of a concurrency limit, is
                    // released, not kept until the next request.
                    drop(self.take_ready());
                    ResponseFuture::of_layer(response)
                }
            },
        }
    }

    /// Returns the instance that was polled ready, for a future that calls it; its clone, which
    /// stays, may not be.
    fn take_ready(&mut self) -> S {
        let clone = self.inner.clone();
        std::mem::replace(&mut self.inner, clone)
    }
}

async fn call_waiting<S, G, B, R>(
    shared: Arc<LayerState<G>>,
    snapshot: G::Snapshot,
    waiting: Waiting<'static>,
    ready: S,
    request: (Parts, B),
) -> Result<Response<Body<R>>, S::Error>
where
    S: Service<Request<B>, Response = Response<R>> + Clone,
    G: RequestLimiter,
{
    let decided = shared.limiter.finish(&snapshot, &request.0, waiting).await;
    match shared.admitted(&snapshot, &request.0, decided) {
        Ok(decisions) => call_admitted(&shared, &snapshot, decisions, ready, request).await,
        Err(response) => Ok(response),
    }
}

async fn call_admitted<S, G, B, R>(
    shared: &Arc<LayerState<G>>,
    snapshot: &G::Snapshot,
    mut decisions: PolicyDecisions<'_>,
    mut ready: S,
    (mut parts, body): (Parts, B),
) -> Result<Response<Body<R>>, S::Error>
where
    S: Service<Request<B>, Response = Response<R>> + Clone,
    G: RequestLimiter,
{
    let is_delayed = !decisions.delay().is_zero();
    if is_delayed {
        // A delayed request must not hold a slot of the inner service: it takes one when its delay
        // is over.
        let clone = ready.clone();
        drop(std::mem::replace(&mut ready, clone));
        decisions = wait_for_turn(shared, snapshot, decisions).await;
    }
    let lease = decisions.lease().cloned();
    if let Some(lease) = &lease {
        parts.extensions.insert(lease.clone());
    }
    let result = async {
        if is_delayed {
            poll_fn(|context| ready.poll_ready(context)).await?;
        }
        ready.call(Request::from_parts(parts, body)).await
    };
    let result = result.await;
    let status = status_of(&result);
    if let Some(refunds) = status.and_then(|status| shared.refunds(&decisions, status)) {
        refund(shared, snapshot, refunds).await;
    }
    let mut response = result?;
    if let Some(lease) = &lease {
        response = shared.settle(lease, response).await;
    }
    shared.headers(snapshot, &decisions).add_to(response.headers_mut());
    if status.is_some() || (shared.refund_on.is_none() && !decisions.awaits_status()) {
        return Ok(response.map(|body| Body::of_service(body).with_lease(lease)));
    }
    let (shared, snapshot) = (Arc::clone(shared), snapshot.clone());
    let decisions = decisions.into_owned();
    let on_trailers = OnTrailers(Box::new(move |trailers| {
        let status = grpc::http_status(trailers);
        let refunds = status.and_then(|status| shared.refunds(&decisions, status));
        if let (Some(refunds), Ok(runtime)) = (refunds, Handle::try_current()) {
            runtime.spawn(async move { shared.limiter.refund(&snapshot, &refunds).await });
        }
    }));
    Ok(response.map(|body| Body::of_call(body, on_trailers).with_lease(lease)))
}

/// Returns the status by which to refund a request; `None` for a gRPC call that has it in its
/// trailers. An error without a response counts as a status of 500.
fn status_of<R, E>(result: &Result<Response<R>, E>) -> Option<StatusCode> {
    let Ok(response) = result else { return Some(StatusCode::INTERNAL_SERVER_ERROR) };
    let (status, headers) = (response.status(), response.headers());
    let is_grpc = status == StatusCode::OK && grpc::is_grpc(headers);
    if is_grpc { grpc::http_status(headers) } else { Some(status) }
}

/// Removes the body of the layer's own response to a HEAD request. Over HTTP/2, hyper would send
/// it, and clients would reject the response.
fn without_body_for_head<R>(method: &Method, response: Response<Body<R>>) -> Response<Body<R>> {
    if method != Method::HEAD {
        return response;
    }
    let (mut parts, body) = response.into_parts();
    if let Some(length) = body.layer_length() {
        parts.headers.insert(header::CONTENT_LENGTH, HeaderValue::from(length));
    }
    Response::from_parts(parts, Body::of_layer(Bytes::new()))
}

impl<G: RequestLimiter> LayerState<G> {
    /// Returns whether the request is admitted, and only its headers are left to be added: it has
    /// not to wait for its turn, and will not be refunded.
    fn is_admission(&self, decisions: &PolicyDecisions<'_>) -> bool {
        self.refund_on.is_none()
            && decisions.is_allowed()
            && decisions.delay().is_zero()
            && decisions.lease().is_none()
            && !decisions.awaits_status()
    }

    /// Settles the units that the response has used.
    async fn settle<R>(&self, lease: &RequestLease, response: Response<R>) -> Response<R> {
        let (parts, body) = response.into_parts();
        let units = self.settle.as_ref().and_then(|settle| settle(&parts));
        let used = |header: Option<&str>| match header {
            Some(name) => number_in(&parts.headers, name),
            None => units,
        };
        lease.settle(used).await;
        Response::from_parts(parts, body)
    }

    /// Returns the decisions of a request that is admitted, or the response to any other.
    #[expect(clippy::result_large_err, reason = "the error is a response")]
    fn admitted<'a, R>(
        &self,
        snapshot: &G::Snapshot,
        parts: &Parts,
        decided: Result<PolicyDecisions<'a>, QueryError>,
    ) -> Result<PolicyDecisions<'a>, Response<Body<R>>> {
        let response = match decided {
            Err(error) => self.responses.error_response(parts, &error),
            Ok(decisions) => match decisions.denied_by() {
                None => return Ok(decisions),
                Some(denied_by) => {
                    let denial = Denial { parts, decisions: &decisions, denied_by };
                    self.responses.denied(&denial, self.limiter.header_switches(snapshot))
                }
            },
        };
        Err(without_body_for_head(&parts.method, response))
    }

    /// Returns the headers of the response to an admitted request.
    fn headers(&self, snapshot: &G::Snapshot, decisions: &PolicyDecisions<'_>) -> RenderedHeaders {
        self.responses.headers(decisions, self.limiter.header_switches(snapshot))
    }

    /// Returns the decisions to refund after a response with this status, if there are any.
    fn refunds<'a>(
        &self,
        decisions: &PolicyDecisions<'a>,
        status: StatusCode,
    ) -> Option<PolicyDecisions<'a>> {
        let refunds = match &self.refund_on {
            Some(refund_on) if refund_on(status) => decisions.clone(),
            _ => decisions.refunded_on(status.as_u16()),
        };
        Some(refunds).filter(|refunds| !refunds.is_empty())
    }
}

/// Returns the number in a header, if it is one whole number.
fn number_in(headers: &HeaderMap, name: &str) -> Option<u64> {
    let mut values = headers.get_all(name).iter();
    let value = values.next().filter(|_| values.next().is_none())?;
    whole_number(value.to_str().ok()?.trim())
}

/// Returns whether this is a CORS preflight request.
fn is_preflight<B>(request: &Request<B>) -> bool {
    let has = |name| request.headers().contains_key(name);
    request.method() == Method::OPTIONS
        && has(header::ORIGIN)
        && has(header::ACCESS_CONTROL_REQUEST_METHOD)
}

/// Waits for the delay of an admitted request.
async fn wait_for_turn<'a, G: RequestLimiter>(
    shared: &'a Arc<LayerState<G>>,
    snapshot: &'a G::Snapshot,
    decisions: PolicyDecisions<'a>,
) -> PolicyDecisions<'a> {
    let delay = decisions.delay();
    let runtime = Handle::try_current().ok();
    let mut place = QueuePlace { shared, snapshot, decisions: Some(decisions), runtime };
    shared.limiter.sleep(delay).await;
    place.decisions.take().unwrap_or_default()
}

/// Place of a waiting request in the queue. Dropped before its turn, it refunds the request.
struct QueuePlace<'a, G: RequestLimiter> {
    shared: &'a Arc<LayerState<G>>,
    snapshot: &'a G::Snapshot,
    decisions: Option<PolicyDecisions<'a>>,
    runtime: Option<Handle>,
}

impl<G: RequestLimiter> Drop for QueuePlace<'_, G> {
    fn drop(&mut self) {
        if let (Some(decisions), Some(runtime)) = (self.decisions.take(), &self.runtime) {
            let (shared, snapshot) = (Arc::clone(self.shared), self.snapshot.clone());
            let decisions = decisions.into_owned();
            runtime.spawn(async move { shared.limiter.refund(&snapshot, &decisions).await });
        }
    }
}

/// Refunds a request in a task, so that the refund completes even if the request is dropped; and
/// awaits it, so that the client's next request sees the refund.
async fn refund<G: RequestLimiter>(
    shared: &Arc<LayerState<G>>,
    snapshot: &G::Snapshot,
    decisions: PolicyDecisions<'_>,
) {
    let Ok(runtime) = Handle::try_current() else {
        return shared.limiter.refund(snapshot, &decisions).await;
    };
    let (shared, snapshot, decisions) =
        (Arc::clone(shared), snapshot.clone(), decisions.into_owned());
    let _ = runtime.spawn(async move { shared.limiter.refund(&snapshot, &decisions).await }).await;
}
