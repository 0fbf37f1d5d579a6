//! Bodies on their way through: frame by frame, never gathered; cut off where nothing comes any more.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::sync::oneshot;
use tokio::time::{Instant, Sleep};

/// When the last byte moved; shared by those who move bytes and who watches over them.
#[derive(Debug, Clone)]
pub(super) struct Activity {
    start: Instant,
    moved: Arc<Moved>,
}

#[derive(Debug, Default)]
struct Moved {
    /// In milliseconds since the start.
    last: AtomicU64,
    /// It is the client's turn to send: who waits for the upstream does not count this time.
    is_clients_turn: AtomicBool,
}

impl Activity {
    pub(super) fn now() -> Self {
        Self { start: Instant::now(), moved: Arc::default() }
    }

    pub(super) fn note(&self) {
        let passed = u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.moved.last.store(passed, Ordering::Relaxed);
        self.moved.is_clients_turn.store(false, Ordering::Relaxed);
    }

    /// Ends when nothing has moved for so long.
    pub(super) async fn ceased(&self, patience: Duration) {
        loop {
            let end = self.start + Duration::from_millis(self.moved.last.load(Ordering::Relaxed)) + patience;
            if Instant::now() < end {
                tokio::time::sleep_until(end).await;
            } else if self.moved.is_clients_turn.load(Ordering::Relaxed) {
                tokio::time::sleep(patience).await;
            } else {
                return;
            }
        }
    }
}

/// The body has stopped on its way.
#[derive(Debug, thiserror::Error)]
#[error("nothing came for {0:?}")]
pub(super) struct Stalled(Duration);

/// A body that fails when no frame has come for a while.
#[derive(Debug)]
pub(super) struct Timed {
    body: Incoming,
    patience: Duration,
    /// Made when it first has to wait; most bodies never do.
    alarm: Option<Pin<Box<Sleep>>>,
    is_waiting: bool,
}

impl Timed {
    pub(super) fn new(body: Incoming, patience: Duration) -> Self {
        Self { body, patience, alarm: None, is_waiting: false }
    }
}

impl Body for Timed {
    type Data = Bytes;
    type Error = axum::BoxError;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::BoxError>>> {
        let this = self.get_mut();
        if let Poll::Ready(frame) = Pin::new(&mut this.body).poll_frame(cx) {
            this.is_waiting = false;
            return Poll::Ready(frame.map(|frame| frame.map_err(Into::into)));
        }
        let alarm = this.alarm.get_or_insert_with(|| Box::pin(tokio::time::sleep(this.patience)));
        if !this.is_waiting {
            alarm.as_mut().reset(Instant::now() + this.patience);
            this.is_waiting = true;
        }
        alarm.as_mut().poll(cx).map(|()| Some(Err(Stalled(this.patience).into())))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The body of a request to an upstream. If nothing of it was asked for, it comes back, for another upstream.
#[derive(Debug)]
pub(super) struct Sent {
    /// None: there is no body.
    body: Option<Timed>,
    activity: Activity,
    back: Option<oneshot::Sender<Timed>>,
}

impl Sent {
    pub(super) fn new(body: Option<Timed>, activity: Activity) -> (Self, oneshot::Receiver<Timed>) {
        let (back, returned) = oneshot::channel();
        (Self { body, activity, back: Some(back) }, returned)
    }
}

impl Body for Sent {
    type Data = Bytes;
    type Error = axum::BoxError;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::BoxError>>> {
        let this = self.get_mut();
        this.back = None;
        let Some(body) = &mut this.body else { return Poll::Ready(None) };
        let polled = Pin::new(body).poll_frame(cx);
        match &polled {
            Poll::Ready(_) => this.activity.note(),
            Poll::Pending => this.activity.moved.is_clients_turn.store(true, Ordering::Relaxed),
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or_else(|| SizeHint::with_exact(0), Body::size_hint)
    }
}

impl Drop for Sent {
    fn drop(&mut self) {
        if let (Some(body), Some(back)) = (self.body.take(), self.back.take()) {
            // Nobody may wait for it any more.
            let _ = back.send(body);
        }
    }
}
