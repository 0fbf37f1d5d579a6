//! [`RequestLimiter`]: decides HTTP requests for a layer.

use std::future::Future;
use std::time::Duration;

use http::request::Parts;

use crate::policy::{PolicyDecisions, Progress, QueryError, Waiting};

/// Rate limit headers of one response that can be switched off. A header is sent if both the layer
/// and its limiter enable it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeaderSwitches {
    /// `X-RateLimit-*`, which
    /// [`RateLimitLayer::x_ratelimit_headers`](super::RateLimitLayer::x_ratelimit_headers) enables.
    pub x_ratelimit_headers: bool,
    /// Partition keys, which
    /// [`RateLimitLayer::partition_key`](super::RateLimitLayer::partition_key) enables.
    pub partition_keys: bool,
}

impl Default for HeaderSwitches {
    fn default() -> Self {
        Self { x_ratelimit_headers: true, partition_keys: true }
    }
}

/// Decides HTTP requests for a [`RateLimitLayer`](super::RateLimitLayer). Clones share their
/// counts.
///
/// The built-in ones are [`QuotaRequestLimiter`](super::QuotaRequestLimiter) and
/// [`PolicyRequestLimiter`](super::PolicyRequestLimiter). Implement it for policies that can be
/// replaced while the layer runs:
///
/// ```
/// use std::convert::Infallible;
/// use std::sync::{Arc, RwLock};
/// use std::time::Duration;
/// use http::request::Parts;
/// use http::{Request, Response, StatusCode};
/// use tidegate::layer::{RateLimitLayer, RequestLimiter, RequestParts};
/// use tidegate::{Action, ClientIp, QueryError, Limiter, MemoryStore, Policies, Policy};
/// use tidegate::{PolicyDecisions, PolicyLimiter, Progress, Query, Quota, Waiting};
/// use tower::{Layer as _, ServiceExt as _, service_fn};
///
/// #[derive(Clone)]
/// struct Reloadable {
///     current: Arc<RwLock<PolicyLimiter>>,
///     client_ip: Arc<ClientIp>,
/// }
///
/// impl Reloadable {
///     /// Replaces the policies. The store, and so the counts, stay the same.
///     fn reload(&self, policies: Policies) {
///         let mut current = self.current.write().unwrap();
///         let limiter = current.limiter().clone();
///         *current = PolicyLimiter::new(limiter, policies);
///     }
/// }
///
/// impl RequestLimiter for Reloadable {
///     type Snapshot = PolicyLimiter;
///
///     fn snapshot(&self) -> PolicyLimiter {
///         self.current.read().unwrap().clone()
///     }
///
///     fn start<'a>(
///         &'a self,
///         snapshot: &'a PolicyLimiter,
///         parts: &'a Parts,
///     ) -> Result<Progress<'a>, QueryError> {
///         let request = RequestParts::new(parts, None, &self.client_ip);
///         snapshot.start(Action::Acquire, Query::attributes(&request).with_lease())
///     }
///
///     async fn finish<'a>(
///         &'a self,
///         snapshot: &'a PolicyLimiter,
///         _parts: &Parts,
///         waiting: Waiting<'a>,
///     ) -> Result<PolicyDecisions<'a>, QueryError> {
///         snapshot.finish(waiting).await
///     }
///
///     async fn refund(&self, snapshot: &PolicyLimiter, decisions: &PolicyDecisions<'_>) {
///         snapshot.refund(decisions).await;
///     }
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let limiter = PolicyLimiter::new(Limiter::new(MemoryStore::new()), Policies::default());
/// let limits =
///     Reloadable { current: Arc::new(RwLock::new(limiter)), client_ip: Arc::default() };
/// let layer = RateLimitLayer::with_request_limiter(limits.clone());
/// let service = layer.layer(service_fn(async |_request: Request<()>| {
///     Ok::<_, Infallible>(Response::new("hello"))
/// }));
/// assert_eq!(service.clone().oneshot(Request::new(())).await?.status(), StatusCode::OK);
///
/// let quota = Quota::fixed_window(1, Duration::from_secs(60))?;
/// limits.reload(Policies::new(vec![Policy::builder("all", quota).build()?])?);
/// assert_eq!(service.clone().oneshot(Request::new(())).await?.status(), StatusCode::OK);
/// let denied = service.oneshot(Request::new(())).await?;
/// assert_eq!(denied.status(), StatusCode::TOO_MANY_REQUESTS);
/// # Ok(())
/// # }
/// ```
pub trait RequestLimiter: Clone + Send + Sync + 'static {
    /// Configuration that the decisions on one request borrow from; `()` if it never changes. Its
    /// clones should be cheap, such as an `Arc`: a refund after a dropped request needs one.
    type Snapshot: Clone + Send + Sync + 'static;

    /// Returns the current configuration. The layer calls it once per request, so that all steps of
    /// a request use the same configuration.
    fn snapshot(&self) -> Self::Snapshot;

    /// Decides a request by its head and, if it is allowed, takes the units. The body has not been
    /// read. A decision that waits for the store is completed by [`finish`](Self::finish).
    ///
    /// A query [with a lease](crate::Query::with_lease) holds what the request has in flight; without
    /// it, units in flight are held until their holds end.
    ///
    /// An empty [`PolicyDecisions`] means that no limit applies. An error becomes the response of
    /// [`RateLimitLayer::on_error`](super::RateLimitLayer::on_error).
    fn start<'a>(
        &'a self,
        snapshot: &'a Self::Snapshot,
        parts: &'a Parts,
    ) -> Result<Progress<'a>, QueryError>;

    /// Completes a decision that waits for the store.
    fn finish<'a>(
        &'a self,
        snapshot: &'a Self::Snapshot,
        parts: &Parts,
        waiting: Waiting<'a>,
    ) -> impl Future<Output = Result<PolicyDecisions<'a>, QueryError>> + Send;

    /// Returns the units that an admitted request took, because
    /// [`RateLimitLayer::refund_on`](super::RateLimitLayer::refund_on) accepts the status of its
    /// response, or because the client disconnected while the request waited for its turn.
    fn refund(
        &self,
        snapshot: &Self::Snapshot,
        decisions: &PolicyDecisions<'_>,
    ) -> impl Future<Output = ()> + Send;

    /// Returns which of the rate limit headers that the layer is configured to send the response
    /// gets: all, unless this is implemented for a configuration that is replaced.
    fn header_switches(&self, _snapshot: &Self::Snapshot) -> HeaderSwitches {
        HeaderSwitches::default()
    }

    /// Sleeps until the turn of an admitted request, by default on the clock of Tokio. The built-in
    /// gates sleep on the clock of the store, so that a `ManualClock` controls them.
    fn sleep(&self, delay: Duration) -> impl Future<Output = ()> + Send {
        tokio::time::sleep(delay)
    }
}
