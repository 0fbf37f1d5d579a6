//! [`RequestLimiter`]: decides HTTP requests for a layer.

use std::future::Future;
use std::time::Duration;

use http::request::Parts;

use crate::limiter::Error;
use crate::policy::PolicyDecisions;

/// Decides HTTP requests for a [`RateLimitLayer`](super::RateLimitLayer). Clones share their counts.
///
/// The built-in ones are [`QuotaGate`](super::QuotaGate) and [`PolicyGate`](super::PolicyGate).
/// Implement it for policies that can be replaced while the layer runs.
pub trait RequestLimiter: Clone + Send + Sync + 'static {
    /// Configuration that the decisions on one request borrow from; `()` if it never changes.
    type Snapshot: Clone + Send + Sync + 'static;

    /// Returns the current configuration.
    fn snapshot(&self) -> Self::Snapshot;

    /// Decides a request by its head and, if it is allowed, takes the units. The body has not been
    /// read.
    fn acquire<'a>(
        &'a self,
        snapshot: &'a Self::Snapshot,
        parts: &Parts,
    ) -> impl Future<Output = Result<PolicyDecisions<'a>, Error>> + Send;

    /// Returns the units that an admitted request took.
    fn refund(
        &self,
        snapshot: &Self::Snapshot,
        decisions: &PolicyDecisions<'_>,
    ) -> impl Future<Output = ()> + Send;

    /// Sleeps until the turn of an admitted request.
    fn sleep(&self, delay: Duration) -> impl Future<Output = ()> + Send {
        tokio::time::sleep(delay)
    }
}
