//! Limit of the requests in flight at an upstream, with a bounded queue.
//!
//! A client is an address, or a network of IPv6 addresses. One client may use what no other needs,
//! but the last sixteenth of the slots, and of the queue, is for clients that have less than a
//! quarter. Those that wait take turns.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;

use tidegate_config::UpstreamLimits;

use super::uploads::Uploads;

/// Time between two attempts of a waiting request to end a slow upload.
const END_UPLOAD_INTERVAL: Duration = Duration::from_millis(250);

/// Reason why a request is not sent to an upstream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Overload {
    QueueFull,
    QueueTimeout,
    /// Its body arrived slowly while other requests waited.
    SlowUpload,
}

impl Overload {
    pub(super) const ALL: [Self; 3] = [Self::QueueFull, Self::QueueTimeout, Self::SlowUpload];

    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::QueueFull => "queue_full",
            Self::QueueTimeout => "queue_timeout",
            Self::SlowUpload => "slow_upload",
        }
    }
}

/// Requests in flight at an upstream, and those that wait for a permit.
#[derive(Debug)]
pub(super) struct ConcurrencyLimit {
    limits: UpstreamLimits,
    state: Mutex<State>,
    uploads: Arc<Uploads>,
}

#[derive(Debug, Default)]
struct State {
    in_flight: usize,
    pending: usize,
    /// Clients with requests.
    clients: HashMap<IpAddr, ClientRequests>,
    /// Clients with pending requests, in the order of their turns.
    turns: BTreeMap<u64, IpAddr>,
    /// Number of the next turn, or of the next pending request.
    next: u64,
}

#[derive(Debug, Default)]
struct ClientRequests {
    in_flight: usize,
    /// Pending requests in the order of arrival.
    waiters: BTreeMap<u64, oneshot::Sender<RequestPermit>>,
    /// Key of the client in the turns, if it has pending requests.
    turn: u64,
}

/// Permit for one request in flight.
#[derive(Debug)]
pub(super) struct RequestPermit {
    limit: Arc<ConcurrencyLimit>,
    client: IpAddr,
}

/// Request that waits for a permit.
struct PendingRequest<'l> {
    limit: &'l ConcurrencyLimit,
    client: IpAddr,
    waiter: u64,
}

/// Returns whether a client that has `own` of the `used` places may have another one.
fn has_room(max: usize, used: usize, own: usize) -> bool {
    let reserved = max / 16;
    used < max && (used < max - reserved || own < max / 4)
}

impl ConcurrencyLimit {
    pub(super) fn new(limits: UpstreamLimits) -> Self {
        Self { limits, state: Mutex::default(), uploads: Arc::default() }
    }

    /// Returns a permit if one is free for this client.
    pub(super) fn try_acquire(self: &Arc<Self>, client: IpAddr) -> Option<RequestPermit> {
        let is_taken = self.state().take(client, self.limits.max_connections);
        is_taken.then(|| self.permit(client))
    }

    /// Waits for a permit. Clients that wait take turns.
    pub(super) async fn acquire(
        self: &Arc<Self>,
        client: IpAddr,
    ) -> Result<RequestPermit, Overload> {
        let UpstreamLimits { max_connections, max_pending, pending_timeout } = self.limits;
        let (waiter, mut permit) = {
            let mut state = self.state();
            if state.take(client, max_connections) {
                return Ok(self.permit(client));
            }
            state.enqueue(client, max_pending).ok_or(Overload::QueueFull)?
        };
        let _pending = PendingRequest { limit: self, client, waiter };
        let deadline = Instant::now() + pending_timeout;
        loop {
            self.uploads.end_slowest();
            let next = deadline.min(Instant::now() + END_UPLOAD_INTERVAL);
            match tokio::time::timeout_at(next, &mut permit).await {
                Ok(Ok(permit)) => return Ok(permit),
                Err(_) if next < deadline => {}
                // The sender is only dropped by this request.
                Ok(Err(_)) | Err(_) => return Err(Overload::QueueTimeout),
            }
        }
    }

    /// Returns the number of requests that wait.
    pub(super) fn pending(&self) -> usize {
        self.state().pending
    }

    fn permit(self: &Arc<Self>, client: IpAddr) -> RequestPermit {
        RequestPermit { limit: Arc::clone(self), client }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Counts a request in flight, if there is a place for it.
    fn take(&mut self, client: IpAddr, max: usize) -> bool {
        let entry = self.clients.entry(client).or_default();
        let is_free = has_room(max, self.in_flight, entry.in_flight);
        if is_free {
            entry.in_flight += 1;
            self.in_flight += 1;
        }
        self.forget_idle(client);
        is_free
    }

    /// Adds a request to the queue, and returns its number.
    fn enqueue(
        &mut self,
        client: IpAddr,
        max: usize,
    ) -> Option<(u64, oneshot::Receiver<RequestPermit>)> {
        let entry = self.clients.entry(client).or_default();
        if !has_room(max, self.pending, entry.waiters.len()) {
            self.forget_idle(client);
            return None;
        }
        let number = self.next;
        self.next += 1;
        self.pending += 1;
        if entry.waiters.is_empty() {
            entry.turn = number;
            self.turns.insert(number, client);
        }
        let (sender, receiver) = oneshot::channel();
        entry.waiters.insert(number, sender);
        Some((number, receiver))
    }

    /// Removes a request that waits no more. It may have a permit already.
    fn dequeue(&mut self, client: IpAddr, waiter: u64) {
        let Some(entry) = self.clients.get_mut(&client) else { return };
        if entry.waiters.remove(&waiter).is_some() {
            self.pending -= 1;
            if entry.waiters.is_empty() {
                self.turns.remove(&entry.turn);
            }
        }
        self.forget_idle(client);
    }

    fn release(&mut self, client: IpAddr) {
        if let Some(entry) = self.clients.get_mut(&client) {
            entry.in_flight -= 1;
            self.in_flight -= 1;
        }
        self.forget_idle(client);
    }

    /// Counts the next pending request as in flight, if there is a place for one.
    fn next_granted(&mut self, max: usize) -> Option<(IpAddr, oneshot::Sender<RequestPermit>)> {
        let may_take = |client: &IpAddr| {
            let own = self.clients.get(client).map_or(0, |client| client.in_flight);
            has_room(max, self.in_flight, own)
        };
        let (&turn, &client) = self.turns.iter().find(|(_, client)| may_take(client))?;
        self.turns.remove(&turn);
        let entry = self.clients.get_mut(&client)?;
        let (_, waiter) = entry.waiters.pop_first()?;
        if !entry.waiters.is_empty() {
            entry.turn = self.next;
            self.turns.insert(self.next, client);
            self.next += 1;
        }
        self.pending -= 1;
        self.in_flight += 1;
        entry.in_flight += 1;
        Some((client, waiter))
    }

    fn forget_idle(&mut self, client: IpAddr) {
        let is_idle = |entry: &ClientRequests| entry.in_flight == 0 && entry.waiters.is_empty();
        if self.clients.get(&client).is_some_and(is_idle) {
            self.clients.remove(&client);
        }
    }
}

impl RequestPermit {
    /// Returns the uploads to the upstream.
    pub(super) fn uploads(&self) -> &Arc<Uploads> {
        &self.limit.uploads
    }
}

impl Drop for RequestPermit {
    fn drop(&mut self) {
        let limit = &self.limit;
        let max = limit.limits.max_connections;
        let mut state = limit.state();
        state.release(self.client);
        while let Some((client, waiter)) = state.next_granted(max) {
            // A request that is gone drops its permit, which needs the lock.
            drop(state);
            let _ = waiter.send(limit.permit(client));
            state = limit.state();
        }
    }
}

impl Drop for PendingRequest<'_> {
    fn drop(&mut self) {
        self.limit.state().dequeue(self.client, self.waiter);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::poll;

    use super::*;

    const ONE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));
    const OTHER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 2));

    fn limit(max_connections: usize, max_pending: usize) -> Arc<ConcurrencyLimit> {
        let pending_timeout = Duration::from_secs(5);
        let limits = UpstreamLimits { max_connections, max_pending, pending_timeout };
        Arc::new(ConcurrencyLimit::new(limits))
    }

    fn assert_unused(limit: &ConcurrencyLimit) {
        let state = limit.state();
        assert_eq!((state.in_flight, state.pending), (0, 0));
        assert!(state.clients.is_empty() && state.turns.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn requests_wait_in_order_and_for_a_bounded_time() {
        let limit = limit(1, 2);
        let first = limit.try_acquire(ONE).expect("a permit");
        assert!(limit.try_acquire(ONE).is_none());
        let mut second = Box::pin(limit.acquire(ONE));
        let mut third = Box::pin(limit.acquire(ONE));
        assert!(poll!(&mut second).is_pending());
        assert!(poll!(&mut third).is_pending());
        assert_eq!(limit.pending(), 2);
        assert_eq!(limit.acquire(ONE).await.expect_err("full"), Overload::QueueFull);
        drop(first);
        assert!(limit.try_acquire(ONE).is_none(), "the permit belongs to the first that waits");
        let permit = second.await.expect("a permit");
        assert_eq!(third.await.expect_err("late"), Overload::QueueTimeout);
        assert_eq!(limit.pending(), 0);
        drop(permit);
        assert_unused(&limit);
    }

    #[tokio::test]
    async fn request_that_gives_up_leaves_its_permit() {
        let limit = limit(1, 0);
        let first = limit.try_acquire(ONE).expect("a permit");
        assert_eq!(limit.acquire(ONE).await.expect_err("full"), Overload::QueueFull);
        drop(first);
        assert_unused(&limit);
        let limit = self::limit(1, 1);
        for has_permit in [true, false] {
            let permit = limit.try_acquire(ONE).expect("a permit");
            let mut waiting = Box::pin(limit.acquire(OTHER));
            assert!(poll!(&mut waiting).is_pending());
            let mut permit = Some(permit);
            if has_permit {
                permit = None;
            }
            drop(waiting);
            drop(permit);
            assert_unused(&limit);
        }
    }

    #[tokio::test]
    async fn clients_take_turns() {
        let limit = limit(1, 8);
        let permit = limit.try_acquire(ONE).expect("a permit");
        let mut first = Box::pin(limit.acquire(ONE));
        let mut second = Box::pin(limit.acquire(ONE));
        let mut third = Box::pin(limit.acquire(OTHER));
        assert!(poll!(&mut first).is_pending() && poll!(&mut second).is_pending());
        assert!(poll!(&mut third).is_pending());
        drop(permit);
        drop(first.await.expect("a permit"));
        assert!(poll!(&mut second).is_pending());
        drop(third.await.expect("a permit"));
        drop(second.await.expect("a permit"));
        assert_unused(&limit);
    }

    #[tokio::test]
    async fn one_client_leaves_a_sixteenth_to_others() {
        let limit = limit(32, 32);
        let mut permits = Vec::new();
        while let Some(permit) = limit.try_acquire(ONE) {
            permits.push(permit);
        }
        assert_eq!(permits.len(), 30);
        let mut pending = Vec::new();
        loop {
            let mut waiting = Box::pin(limit.acquire(ONE));
            if poll!(&mut waiting).is_ready() {
                break;
            }
            pending.push(waiting);
        }
        assert_eq!(pending.len(), 30);
        let others = [limit.try_acquire(OTHER), limit.try_acquire(OTHER)];
        assert!(others.iter().all(Option::is_some) && limit.try_acquire(OTHER).is_none());
        let mut other = Box::pin(limit.acquire(OTHER));
        assert!(poll!(&mut other).is_pending(), "the queue has room for it");
        // The first client has too many for what it left to others.
        drop(others);
        drop(other.await.expect("a permit"));
        assert!(poll!(&mut pending[0]).is_pending());
        permits.clear();
        assert!(poll!(&mut pending[29]).is_ready());
        drop(pending);
        assert_unused(&limit);
    }
}
