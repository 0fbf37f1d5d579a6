//! Limit of the requests in flight at an upstream, with a bounded queue.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Limits of each upstream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct UpstreamLimits {
    /// Maximum number of requests in flight, and of connections over HTTP/1.1.
    pub(crate) max_connections: usize,
    /// Maximum number of requests that wait.
    pub(crate) max_pending: usize,
    /// Maximum time for which a request waits.
    pub(crate) pending_timeout: Duration,
}

impl Default for UpstreamLimits {
    fn default() -> Self {
        Self { max_connections: 1024, max_pending: 1024, pending_timeout: Duration::from_secs(5) }
    }
}

/// Reason why a request is not sent to an upstream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Overload {
    QueueFull,
    QueueTimeout,
}

impl Overload {
    pub(super) const ALL: [Self; 2] = [Self::QueueFull, Self::QueueTimeout];

    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::QueueFull => "queue_full",
            Self::QueueTimeout => "queue_timeout",
        }
    }
}

/// Requests in flight at an upstream, and those that wait for a permit.
#[derive(Debug)]
pub(super) struct ConcurrencyLimit {
    requests: Arc<Semaphore>,
    pending: AtomicUsize,
    limits: UpstreamLimits,
}

/// Permit for one request in flight.
#[derive(Debug)]
pub(super) struct RequestPermit {
    _permit: OwnedSemaphorePermit,
}

/// Request that waits for a permit.
struct Pending<'l>(&'l AtomicUsize);

impl ConcurrencyLimit {
    pub(super) fn new(limits: UpstreamLimits) -> Self {
        let requests = Arc::new(Semaphore::new(limits.max_connections));
        Self { requests, pending: AtomicUsize::new(0), limits }
    }

    /// Returns a permit if one is free and no request waits for it.
    pub(super) fn try_acquire(&self) -> Option<RequestPermit> {
        let permit = Arc::clone(&self.requests).try_acquire_owned().ok()?;
        Some(RequestPermit { _permit: permit })
    }

    /// Waits for a permit, in the order of arrival.
    pub(super) async fn acquire(&self) -> Result<RequestPermit, Overload> {
        let _pending = self.start_pending().ok_or(Overload::QueueFull)?;
        let permit = Arc::clone(&self.requests).acquire_owned();
        match tokio::time::timeout(self.limits.pending_timeout, permit).await {
            Ok(Ok(permit)) => Ok(RequestPermit { _permit: permit }),
            // The semaphore is never closed.
            Ok(Err(_)) | Err(_) => Err(Overload::QueueTimeout),
        }
    }

    /// Returns the number of requests that wait.
    pub(super) fn pending(&self) -> usize {
        self.pending.load(Ordering::Relaxed)
    }

    fn start_pending(&self) -> Option<Pending<'_>> {
        let pending = Pending(&self.pending);
        let before = self.pending.fetch_add(1, Ordering::Relaxed);
        (before < self.limits.max_pending).then_some(pending)
    }
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limit(max_connections: usize, max_pending: usize) -> ConcurrencyLimit {
        let pending_timeout = Duration::from_secs(5);
        ConcurrencyLimit::new(UpstreamLimits { max_connections, max_pending, pending_timeout })
    }

    #[tokio::test(start_paused = true)]
    async fn requests_wait_in_order_and_for_a_bounded_time() {
        let limit = limit(1, 2);
        let first = limit.try_acquire().expect("a permit");
        assert!(limit.try_acquire().is_none());
        let mut second = Box::pin(limit.acquire());
        let mut third = Box::pin(limit.acquire());
        assert!(futures_util::poll!(&mut second).is_pending());
        assert!(futures_util::poll!(&mut third).is_pending());
        assert_eq!(limit.pending(), 2);
        assert_eq!(limit.acquire().await.expect_err("full"), Overload::QueueFull);
        drop(first);
        assert!(limit.try_acquire().is_none(), "the permit belongs to the first that waits");
        let permit = second.await.expect("a permit");
        assert_eq!(third.await.expect_err("late"), Overload::QueueTimeout);
        assert_eq!(limit.pending(), 0);
        drop(permit);
        assert!(limit.try_acquire().is_some());
    }

    #[tokio::test]
    async fn request_that_gives_up_leaves_its_permit() {
        let limit = limit(1, 0);
        let first = limit.try_acquire().expect("a permit");
        assert_eq!(limit.acquire().await.expect_err("full"), Overload::QueueFull);
        let limit = self::limit(1, 1);
        let permit = limit.try_acquire().expect("a permit");
        let mut waiting = Box::pin(limit.acquire());
        assert!(futures_util::poll!(&mut waiting).is_pending());
        drop(permit);
        drop(waiting);
        assert!(limit.try_acquire().is_some());
        drop(first);
    }
}
