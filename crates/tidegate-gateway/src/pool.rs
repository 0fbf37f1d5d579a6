//! Connections to an upstream over HTTP/1.1: their limit, and those that are idle.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::futures::Notified;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

use super::http1::Http1Connection;

/// Maximum number of idle connections to an upstream.
const MAX_IDLE_CONNECTIONS: usize = 1024;
/// Time between two searches for connections to close. It is also the unit of their idle time, so
/// that no request has to read the clock.
const CLEAN_INTERVAL: Duration = Duration::from_millis(500);
/// Idle connections are closed before most servers close them, after five seconds: a request that
/// meets a connection closed by the server must be sent again, or fails.
const MAX_IDLE_TICKS: u64 = 8;

/// Connections to one upstream.
#[derive(Debug)]
pub(super) struct Connections {
    /// Connections have permits of their own, because a connection outlives its request: it is
    /// idle, or is being closed.
    permits: Arc<Semaphore>,
    idle: Mutex<Idle>,
    /// Wakes requests that wait for a permit when a connection has become idle.
    returned: Notify,
    has_many_headers: AtomicBool,
}

#[derive(Debug, Default)]
struct Idle {
    /// Connections with the tick since which they are idle. The last one was used last.
    all: Vec<(Box<Http1Connection>, u64)>,
    tick: u64,
    /// Whether a task closes old connections.
    has_cleaner: bool,
}

impl Connections {
    pub(super) fn new(max: usize) -> Self {
        Self {
            permits: Arc::new(Semaphore::new(max)),
            idle: Mutex::default(),
            returned: Notify::new(),
            has_many_headers: AtomicBool::new(false),
        }
    }

    fn idle(&self) -> MutexGuard<'_, Idle> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the idle connection that was used last, of those that take as many headers as needed.
    pub(super) fn take(&self, needs_many_headers: bool) -> Option<Box<Http1Connection>> {
        let mut idle = self.idle();
        let suits = |(connection, _): &(Box<Http1Connection>, u64)| {
            connection.takes_many_headers || !needs_many_headers
        };
        let index = idle.all.iter().rposition(suits)?;
        Some(idle.all.remove(index).0)
    }

    /// Returns whether the upstream has sent a response with more than 100 headers.
    pub(super) fn has_many_headers(&self) -> bool {
        self.has_many_headers.load(Ordering::Relaxed)
    }

    pub(super) fn set_many_headers(&self) {
        self.has_many_headers.store(true, Ordering::Relaxed);
    }

    /// Adds a connection that has no request any more.
    pub(super) fn put(self: &Arc<Self>, connection: Box<Http1Connection>) {
        let mut idle = self.idle();
        if idle.all.len() >= MAX_IDLE_CONNECTIONS {
            return;
        }
        let tick = idle.tick;
        idle.all.push((connection, tick));
        let needs_cleaner = !std::mem::replace(&mut idle.has_cleaner, true);
        drop(idle);
        self.returned.notify_one();
        if needs_cleaner {
            tokio::spawn(Self::clean(Arc::downgrade(self)));
        }
    }

    /// Closes connections that are idle for too long, until all are closed.
    async fn clean(connections: Weak<Self>) {
        loop {
            tokio::time::sleep(CLEAN_INTERVAL).await;
            let Some(connections) = connections.upgrade() else { return };
            let mut idle = connections.idle();
            idle.tick += 1;
            let oldest = idle.tick - MAX_IDLE_TICKS.min(idle.tick);
            // Connections are added and taken at the end, so their ticks are in order.
            let count = idle.all.partition_point(|(_, since)| *since < oldest);
            let expired: Vec<_> = idle.all.drain(..count).collect();
            idle.has_cleaner = !idle.all.is_empty();
            let is_done = !idle.has_cleaner;
            drop(idle);
            // Closing them takes a while.
            drop(expired);
            if is_done {
                return;
            }
        }
    }

    /// Closes the idle connections.
    pub(super) fn clear(&self) {
        let all = std::mem::take(&mut self.idle().all);
        drop(all);
    }

    /// Returns a permit to open a connection, if there is one.
    pub(super) fn try_permit(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.permits).try_acquire_owned().ok()
    }

    /// Waits for a permit to open a connection, which another one leaves when it is closed.
    pub(super) async fn permit(&self) -> Option<OwnedSemaphorePermit> {
        // The semaphore is never closed.
        Arc::clone(&self.permits).acquire_owned().await.ok()
    }

    /// Completes when a connection has become idle after this call.
    pub(super) fn returned(&self) -> Notified<'_> {
        self.returned.notified()
    }
}
