//! [`RateLimit`]: the service around a service.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use http::{Method, Request, Response, StatusCode, header};
use tokio::runtime::Handle;
use tower_service::Service;

use super::body::Body;
use super::gate::{Admission, Gate};
use super::reply::Denial;
use super::{Shared, grpc};

/// A service that lets requests pass to the one inside if the gate admits them.
///
/// The body of a denied request is not read. A request that is dropped while it waits for its turn
/// gives its place back; for that, and to wait, there must be a Tokio runtime.
pub struct RateLimit<S, G> {
    inner: S,
    shared: Arc<Shared<G>>,
}

impl<S, G> RateLimit<S, G> {
    pub(super) fn new(inner: S, shared: Arc<Shared<G>>) -> Self {
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
    G: Gate,
    B: Send + 'static,
    R: Send + 'static,
{
    type Response = Response<Body<R>>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        // The one that was asked whether it is ready is the one to be called; its clone need not
        // be.
        let clone = self.inner.clone();
        let mut ready = std::mem::replace(&mut self.inner, clone);
        if self.shared.exempt_preflight && is_preflight(&request) {
            let answer = ready.call(request);
            return Box::pin(async move { Ok(answer.await?.map(Body::of_service)) });
        }
        Box::pin(limited(Arc::clone(&self.shared), ready, request))
    }
}

async fn limited<S, G, B, R>(
    shared: Arc<Shared<G>>,
    mut ready: S,
    request: Request<B>,
) -> Result<Response<Body<R>>, S::Error>
where
    S: Service<Request<B>, Response = Response<R>>,
    G: Gate,
{
    let (head, body) = request.into_parts();
    let admission = match shared.gate.admit(&head).await {
        Ok(admission) => admission,
        Err(error) => return Ok(shared.replies.undecided(&head, &error)),
    };
    if let Some(line) = admission.denied_by() {
        return Ok(shared.replies.denied(&Denial { head: &head, admission: &admission, line }));
    }
    let admission = turn(&shared, admission).await;
    let answer = ready.call(Request::from_parts(head, body)).await;
    if shared.refunds(&answer) {
        give_back(&shared, &admission).await;
    }
    let mut response = answer?;
    shared.replies.add_headers(response.headers_mut(), &admission);
    Ok(response.map(Body::of_service))
}

impl<G> Shared<G> {
    /// A service that fails without an answer has failed like one that answers so.
    fn refunds<R, E>(&self, answer: &Result<Response<R>, E>) -> bool {
        self.refund_on.as_ref().is_some_and(|refund_on| {
            refund_on(answer.as_ref().map_or(StatusCode::INTERNAL_SERVER_ERROR, |response| {
                grpc::http_status(response.headers()).unwrap_or(response.status())
            }))
        })
    }
}

/// What a browser asks before it asks.
fn is_preflight<B>(request: &Request<B>) -> bool {
    let has = |name| request.headers().contains_key(name);
    request.method() == Method::OPTIONS
        && has(header::ORIGIN)
        && has(header::ACCESS_CONTROL_REQUEST_METHOD)
}

/// Waits until the request's turn has come.
async fn turn<G: Gate>(shared: &Arc<Shared<G>>, admission: Admission) -> Admission {
    let delay = admission.delay();
    if delay.is_zero() {
        return admission;
    }
    let mut place =
        Place { shared, admission: Some(admission), runtime: Handle::try_current().ok() };
    shared.gate.sleep(delay).await;
    place.admission.take().unwrap_or_default()
}

/// The place of a request that waits for its turn. If the request goes away before, others may have
/// it.
struct Place<'a, G: Gate> {
    shared: &'a Arc<Shared<G>>,
    admission: Option<Admission>,
    runtime: Option<Handle>,
}

impl<G: Gate> Drop for Place<'_, G> {
    fn drop(&mut self) {
        if let (Some(admission), Some(runtime)) = (self.admission.take(), &self.runtime) {
            let shared = Arc::clone(self.shared);
            runtime.spawn(async move { shared.gate.refund(&admission).await });
        }
    }
}

/// To the end, even if the request is dropped meanwhile; and before the answer, so that the
/// client's next request finds it done.
async fn give_back<G: Gate>(shared: &Arc<Shared<G>>, admission: &Admission) {
    let Ok(runtime) = Handle::try_current() else { return shared.gate.refund(admission).await };
    let (shared, admission) = (Arc::clone(shared), admission.clone());
    let _ = runtime.spawn(async move { shared.gate.refund(&admission).await }).await;
}
