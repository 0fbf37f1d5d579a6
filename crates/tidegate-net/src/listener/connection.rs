//! Activity of one connection. The stream and the service report it; the watcher decides by it
//! when the connection has to close.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::task::AtomicWaker;
use tokio::time::{Instant, Sleep};

use super::closed::CloseReason;
use super::drain::ConnectionAge;
use super::http2::{self, Http2};
use super::slots::ConnectionSlots;

/// Time for a TLS handshake and for a complete request head, from its first byte.
pub(super) const HEADER_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum time between two checks.
const MAX_CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// Requests that a connection may start in one poll, before it lets others run. Pipelined requests
/// and parallel streams are otherwise served as long as there are any.
const HTTP1_REQUEST_BUDGET: u32 = 4;
const HTTP2_REQUEST_BUDGET: u32 = 32;

/// Timeouts of a connection.
#[derive(Debug, Clone, Copy)]
pub(super) struct Timeouts {
    pub(super) idle: Duration,
    pub(super) write: Duration,
}

/// State that the parts of a connection share.
pub(super) struct Connection {
    state: Mutex<ConnectionState>,
    is_http2: AtomicBool,
    /// Whether the connection has to close or has frames to insert, so that most reads need no
    /// lock.
    needs_attention: AtomicBool,
    pub(super) slots: Arc<ConnectionSlots>,
    /// Index of its slot.
    pub(super) slot: usize,
    pub(super) age: ConnectionAge,
    /// Requests that were started in the current poll.
    started: AtomicU32,
    /// Wakes the task of the connection.
    task: AtomicWaker,
}

struct ConnectionState {
    protocol: ProtocolState,
    closing: Option<CloseReason>,
    /// Frames to insert in front of further ones: to hyper as if from the client, and to the
    /// client.
    inserted: Inserted,
}

#[derive(Debug, Default)]
pub(super) struct Inserted {
    pub(super) received: Vec<u8>,
    pub(super) sent: Vec<u8>,
}

enum ProtocolState {
    /// HTTP/1.1, or not yet known; or a session, whose commands are like requests.
    Http1 {
        in_flight: u32,
        /// End of the last response.
        idle_since: Instant,
        /// First byte of an incomplete request head; of the first request, the start of the
        /// connection.
        head_since: Option<Instant>,
    },
    Http2 {
        frames: Box<Http2>,
        idle_since: Option<Instant>,
    },
}

/// Next step with a connection.
#[derive(Debug, PartialEq, Eq)]
enum Check {
    Continue,
    /// No request is in flight for too long.
    Idle,
    Close(CloseReason),
}

impl Connection {
    pub(super) fn new(slots: Arc<ConnectionSlots>, slot: usize) -> Self {
        let now = Instant::now();
        let protocol =
            ProtocolState::Http1 { in_flight: 0, idle_since: now, head_since: Some(now) };
        let state = ConnectionState { protocol, closing: None, inserted: Inserted::default() };
        Self {
            state: Mutex::new(state),
            is_http2: AtomicBool::new(false),
            needs_attention: AtomicBool::new(false),
            slots,
            slot,
            age: ConnectionAge::default(),
            started: AtomicU32::new(0),
            task: AtomicWaker::new(),
        }
    }

    fn state(&self) -> MutexGuard<'_, ConnectionState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that the client's preface is that of HTTP/2.
    pub(super) fn start_http2(&self) {
        let now = Instant::now();
        let frames = Box::new(Http2::new(now));
        self.state().protocol = ProtocolState::Http2 { frames, idle_since: Some(now) };
        self.is_http2.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_http2(&self) -> bool {
        self.is_http2.load(Ordering::Relaxed)
    }

    /// Records bytes from the client.
    pub(super) fn receive(&self, bytes: &[u8]) {
        let mut state = self.state();
        let ConnectionState { protocol, closing, .. } = &mut *state;
        match protocol {
            ProtocolState::Http1 { in_flight: 0, head_since: head_since @ None, .. } => {
                *head_since = Some(Instant::now());
            }
            ProtocolState::Http1 { .. } => {}
            ProtocolState::Http2 { frames, idle_since } => {
                let is_flood = frames.receive(bytes).is_err();
                self.update_idle(frames, idle_since, *closing);
                if is_flood {
                    closing.get_or_insert(CloseReason::ControlFrames);
                    self.needs_attention.store(true, Ordering::Release);
                    self.task.wake();
                }
            }
        }
    }

    /// Records bytes to the client.
    pub(super) fn send<'a>(&self, pieces: impl Iterator<Item = &'a [u8]>, mut length: usize) {
        let mut state = self.state();
        let ConnectionState { protocol, closing, .. } = &mut *state;
        if let ProtocolState::Http2 { frames, idle_since } = protocol {
            for piece in pieces {
                let part = piece.len().min(length);
                frames.send(&piece[..part]);
                length -= part;
            }
            self.update_idle(frames, idle_since, *closing);
        }
    }

    fn update_idle(
        &self,
        frames: &Http2,
        idle_since: &mut Option<Instant>,
        closing: Option<CloseReason>,
    ) {
        if frames.has_open_streams() == idle_since.is_some() {
            *idle_since = (!frames.has_open_streams()).then(Instant::now);
            self.mark_slot(*idle_since, closing);
        }
    }

    /// Marks the slot, unless it may belong to another connection already.
    fn mark_slot(&self, idle_since: Option<Instant>, closing: Option<CloseReason>) {
        if closing.is_none() {
            self.slots.mark(self.slot, idle_since);
        }
    }

    /// Records that the client reads the rest of a response after a wait.
    pub(super) fn resume_writing(&self) {
        if let ProtocolState::Http1 { idle_since, .. } = &mut self.state().protocol {
            *idle_since = Instant::now();
        }
    }

    /// Records a request, or that a session handles what it has received. Returns since when its
    /// head was incomplete.
    pub(super) fn start_request(&self) -> Option<Instant> {
        let mut state = self.state();
        let ConnectionState { protocol, closing, .. } = &mut *state;
        let ProtocolState::Http1 { in_flight, head_since, .. } = protocol else { return None };
        *in_flight += 1;
        self.mark_slot(None, *closing);
        head_since.take()
    }

    /// Records that the response is sent, and since when the next head is incomplete.
    pub(super) fn end_request(&self, incomplete_since: Option<Instant>) {
        let mut state = self.state();
        let ConnectionState { protocol, closing, .. } = &mut *state;
        if let ProtocolState::Http1 { in_flight, idle_since, head_since } = protocol {
            *in_flight = in_flight.saturating_sub(1);
            *idle_since = Instant::now();
            *head_since = incomplete_since;
            self.mark_slot(Some(*idle_since), *closing);
        }
    }

    /// Starts a poll, in which a limited number of requests may start.
    pub(super) fn reset_budget(&self) {
        self.started.store(0, Ordering::Relaxed);
    }

    /// Returns whether a request may start now, or has to wait for the next poll of its connection.
    pub(super) fn take_budget(&self) -> bool {
        let max = if self.is_http2() { HTTP2_REQUEST_BUDGET } else { HTTP1_REQUEST_BUDGET };
        // Only the task of the connection starts requests.
        let started = self.started.load(Ordering::Relaxed);
        self.started.store(started.saturating_add(1), Ordering::Relaxed);
        started < max
    }

    /// Closes the connection at its next poll.
    pub(super) fn close(&self, reason: CloseReason) {
        self.state().closing.get_or_insert(reason);
        self.needs_attention.store(true, Ordering::Release);
        self.task.wake();
    }

    pub(super) fn closing(&self) -> Option<CloseReason> {
        self.state().closing
    }

    /// Completes when the connection has to close.
    pub(super) fn poll_closing(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.task.register(cx.waker());
        if self.closing().is_some() { Poll::Ready(()) } else { Poll::Pending }
    }

    /// Returns the frames that can be inserted now, and whether the connection closes after them.
    pub(super) fn take_inserted(&self) -> (Inserted, bool) {
        if !self.needs_attention.load(Ordering::Acquire) {
            return (Inserted::default(), false);
        }
        let mut state = self.state();
        let ConnectionState { protocol, closing, inserted } = &mut *state;
        let ProtocolState::Http2 { frames, .. } = protocol else {
            return (Inserted::default(), closing.is_some());
        };
        let mut taken = Inserted::default();
        if frames.may_insert_received() {
            taken.received = std::mem::take(&mut inserted.received);
        }
        if frames.may_insert_sent() {
            taken.sent = std::mem::take(&mut inserted.sent);
            if let Some(reason) = closing {
                taken.sent.extend(frames.goaway(reason.is_abuse()));
            }
        }
        let is_done = closing.is_none() && inserted.received.is_empty() && inserted.sent.is_empty();
        self.needs_attention.store(!is_done, Ordering::Release);
        (taken, closing.is_some())
    }

    fn check(&self, now: Instant, timeouts: Timeouts) -> Check {
        let mut state = self.state();
        let ConnectionState { protocol, inserted, closing } = &mut *state;
        // A client in the middle of a frame would keep its streams.
        if !inserted.received.is_empty() || !inserted.sent.is_empty() {
            return Check::Close(CloseReason::Stalled);
        }
        match protocol {
            ProtocolState::Http1 { in_flight: 1.., .. } => Check::Continue,
            ProtocolState::Http1 { head_since: Some(since), .. } => {
                if now.duration_since(*since) < HEADER_TIMEOUT {
                    return Check::Continue;
                }
                Check::Close(CloseReason::HeaderTimeout)
            }
            ProtocolState::Http1 { idle_since, .. } => {
                let is_idle = now.duration_since(*idle_since) >= timeouts.idle;
                if is_idle { Check::Close(CloseReason::Idle) } else { Check::Continue }
            }
            ProtocolState::Http2 { idle_since: Some(since), .. } => {
                let is_idle = now.duration_since(*since) >= timeouts.idle;
                if is_idle { Check::Idle } else { Check::Continue }
            }
            ProtocolState::Http2 { frames, idle_since: idle_since @ None } => {
                let stalled = frames.check(now, timeouts.write);
                if stalled.closes {
                    return Check::Close(CloseReason::Stalled);
                }
                for stream in stalled.streams {
                    tracing::debug!(stream, "client stopped reading its response, stream reset");
                    inserted.received.extend(http2::reset(stream));
                    inserted.sent.extend(http2::reset(stream));
                    self.needs_attention.store(true, Ordering::Release);
                }
                self.update_idle(frames, idle_since, *closing);
                Check::Continue
            }
        }
    }
}

/// Request that is in flight.
pub(super) struct RequestGuard(Arc<Connection>);

impl RequestGuard {
    pub(super) fn new(connection: &Arc<Connection>) -> Self {
        connection.start_request();
        Self(Arc::clone(connection))
    }

    /// Leaves the connection busy after this request.
    pub(super) fn keep_busy(self) {
        self.0.start_request();
    }
}

impl Drop for RequestGuard {
    fn drop(&mut self) {
        self.0.end_request(None);
    }
}

/// Regular check of one connection.
pub(super) struct Watcher {
    connection: Arc<Connection>,
    timeouts: Timeouts,
    interval: Duration,
    timer: std::pin::Pin<Box<Sleep>>,
    /// Time at which an idle connection was asked to close.
    draining_since: Option<Instant>,
}

/// Decision of the watcher.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    Continue,
    /// Accept no further requests, then close.
    Drain,
    Close,
}

impl Watcher {
    /// Returns why the connection was closed, if this side closed it.
    pub(super) fn close_reason(&self) -> Option<CloseReason> {
        let drained = self.draining_since.map(|_| CloseReason::Idle);
        self.connection.closing().or(drained)
    }

    pub(super) fn new(connection: Arc<Connection>, timeouts: Timeouts) -> Self {
        let interval = MAX_CHECK_INTERVAL.min(timeouts.idle / 4).min(timeouts.write / 4);
        Self {
            connection,
            timeouts,
            interval,
            timer: Box::pin(tokio::time::sleep(interval)),
            draining_since: None,
        }
    }

    /// Checks the connection. To be called at first, and after a wake by the given context.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Verdict {
        if self.connection.poll_closing(cx).is_ready() {
            return Verdict::Close;
        }
        while self.timer.as_mut().poll(cx).is_ready() {
            let now = Instant::now();
            self.timer.as_mut().reset(now + self.interval);
            match self.connection.check(now, self.timeouts) {
                Check::Continue => {}
                Check::Idle => match self.draining_since {
                    None => {
                        self.draining_since = Some(now);
                        return Verdict::Drain;
                    }
                    Some(since) if now.duration_since(since) < HEADER_TIMEOUT => {}
                    Some(_) => {
                        self.connection.close(CloseReason::Idle);
                        return Verdict::Close;
                    }
                },
                Check::Close(reason) => {
                    self.connection.close(reason);
                    return Verdict::Close;
                }
            }
        }
        Verdict::Continue
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use super::*;

    const TIMEOUTS: Timeouts =
        Timeouts { idle: Duration::from_secs(60), write: Duration::from_secs(30) };

    fn connection() -> Arc<Connection> {
        let accepted = ConnectionSlots::new(1, 1).take(None).expect("a slot");
        Arc::clone(&accepted.connection)
    }

    /// Returns the first verdict and the time until then.
    async fn verdict(watcher: &mut Watcher, within: Duration) -> Option<(Verdict, Duration)> {
        let start = Instant::now();
        while start.elapsed() < within {
            let verdict = watcher.poll(&mut Context::from_waker(Waker::noop()));
            if verdict != Verdict::Continue {
                return Some((verdict, start.elapsed()));
            }
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        None
    }

    #[tokio::test(start_paused = true)]
    async fn http1_connection_has_time_for_a_head_and_between_requests() {
        let connection = connection();
        let mut watcher = Watcher::new(Arc::clone(&connection), TIMEOUTS);
        let hour = Duration::from_secs(3_600);
        connection.receive(b"GET");
        let request = RequestGuard::new(&connection);
        assert_eq!(verdict(&mut watcher, hour).await, None, "a request is in flight");
        drop(request);
        assert_eq!(verdict(&mut watcher, TIMEOUTS.idle / 2).await, None);
        connection.resume_writing();
        assert_eq!(verdict(&mut watcher, TIMEOUTS.idle * 9 / 10).await, None);
        let (idle, _) = verdict(&mut watcher, TIMEOUTS.idle / 2).await.expect("a verdict");
        assert_eq!((idle, watcher.close_reason()), (Verdict::Close, Some(CloseReason::Idle)));
    }

    #[tokio::test(start_paused = true)]
    async fn upgraded_connection_stays_busy() {
        let connection = connection();
        let mut watcher = Watcher::new(Arc::clone(&connection), TIMEOUTS);
        RequestGuard::new(&connection).keep_busy();
        connection.receive(b"a message");
        assert_eq!(verdict(&mut watcher, TIMEOUTS.idle * 10).await, None);
        assert_eq!(Arc::strong_count(&connection), 2, "of the watcher and the test");
    }

    #[tokio::test(start_paused = true)]
    async fn poll_has_a_limited_number_of_requests() {
        let connection = connection();
        let started = || (0..100).filter(|_| connection.take_budget()).count();
        assert_eq!((started(), started()), (4, 0));
        connection.reset_budget();
        assert_eq!(started(), 4);
        connection.start_http2();
        connection.reset_budget();
        assert_eq!((started(), started()), (32, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn incomplete_head_is_not_waited_for() {
        for has_request in [false, true] {
            let connection = connection();
            let mut watcher = Watcher::new(Arc::clone(&connection), TIMEOUTS);
            if has_request {
                drop(RequestGuard::new(&connection));
                assert_eq!(verdict(&mut watcher, Duration::from_secs(30)).await, None);
                connection.receive(b"GET");
            }
            let (closed, after) = verdict(&mut watcher, TIMEOUTS.idle).await.expect("a verdict");
            assert_eq!(closed, Verdict::Close);
            assert_eq!(watcher.close_reason(), Some(CloseReason::HeaderTimeout));
            let range = HEADER_TIMEOUT..=HEADER_TIMEOUT + MAX_CHECK_INTERVAL;
            assert!(range.contains(&after), "{after:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn idle_http2_connection_is_drained_then_closed() {
        let connection = connection();
        connection.start_http2();
        let mut watcher = Watcher::new(Arc::clone(&connection), TIMEOUTS);
        assert_eq!(verdict(&mut watcher, TIMEOUTS.idle).await, None);
        let (drained, _) = verdict(&mut watcher, MAX_CHECK_INTERVAL * 2).await.expect("a verdict");
        assert_eq!(drained, Verdict::Drain);
        // A request that crossed the GOAWAY is completed.
        connection.receive(&[0, 0, 0, 1, 5, 0, 0, 0, 1]);
        assert_eq!(verdict(&mut watcher, TIMEOUTS.idle * 2).await, None);
        connection.send(std::iter::once(&[0, 0, 0, 1, 5, 0, 0, 0, 1][..]), 9);
        let (closed, _) = verdict(&mut watcher, TIMEOUTS.idle * 2).await.expect("a verdict");
        assert_eq!((closed, watcher.close_reason()), (Verdict::Close, Some(CloseReason::Idle)));
    }

    #[tokio::test(start_paused = true)]
    async fn reset_that_cannot_be_inserted_closes_the_connection() {
        let connection = connection();
        connection.start_http2();
        let mut watcher = Watcher::new(Arc::clone(&connection), TIMEOUTS);
        // Settings without a window, then a request, and the start of a further frame.
        connection.receive(&[0, 0, 6, 4, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0]);
        connection.receive(&[0, 0, 0, 1, 5, 0, 0, 0, 1, 0, 0]);
        connection.send(std::iter::once(&[0, 0, 0, 1, 4, 0, 0, 0, 1][..]), 9);
        let (last, _) = verdict(&mut watcher, TIMEOUTS.write * 3).await.expect("a verdict");
        assert_eq!(last, Verdict::Close);
        assert_eq!(watcher.close_reason(), Some(CloseReason::Stalled));
        let (inserted, closes) = connection.take_inserted();
        assert!(closes && inserted.received.is_empty(), "{inserted:?}");
        assert!(inserted.sent.ends_with(&[0, 0, 0, 1, 0, 0, 0, 11]), "GOAWAY: {inserted:?}");
    }
}
