//! Bodies on their way through: frame by frame, never gathered; cut off where nothing comes any
//! more.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::sync::oneshot;
use tokio::time::{Instant, Sleep};

use super::head;
use crate::listener::{self, Taking};

/// A client of HTTP/2 that takes so much within its time goes on being served.
const PIECE: usize = 16 * 1024;
/// Who takes a piece in a small part of that time gets a larger one: many small ones take longer.
const LARGEST_PIECE: usize = 256 * 1024;

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
            let end = self.start
                + Duration::from_millis(self.moved.last.load(Ordering::Relaxed))
                + patience;
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
pub(super) struct Timed<B> {
    body: B,
    patience: Duration,
    /// Made when it first has to wait; most bodies never do.
    alarm: Option<Pin<Box<Sleep>>>,
    is_waiting: bool,
}

/// The body of a request.
pub(super) type Upload = Timed<listener::Incoming>;

impl<B> Timed<B> {
    pub(super) fn new(body: B, patience: Duration) -> Self {
        Self { body, patience, alarm: None, is_waiting: false }
    }
}

impl<B: Body<Data = Bytes, Error: Into<axum::BoxError>> + Unpin> Body for Timed<B> {
    type Data = Bytes;
    type Error = axum::BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::BoxError>>> {
        let this = self.get_mut();
        if let Poll::Ready(frame) = Pin::new(&mut this.body).poll_frame(cx) {
            this.is_waiting = false;
            let passed = |mut frame: Frame<Bytes>| {
                let _ = frame.trailers_mut().map(head::clean_trailers);
                frame
            };
            return Poll::Ready(frame.map(|frame| frame.map(passed).map_err(Into::into)));
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

/// The body of an answer, in pieces where it can be seen whether the client takes them.
#[derive(Debug)]
pub(super) struct Download {
    body: Timed<Incoming>,
    /// Of a frame that was too long.
    rest: Bytes,
    piece: usize,
    taking: Option<Arc<Taking>>,
}

impl Download {
    pub(super) fn new(body: Incoming, patience: Duration) -> Self {
        Self {
            body: Timed::new(body, patience),
            rest: Bytes::new(),
            piece: PIECE,
            taking: Taking::current(),
        }
    }
}

impl Body for Download {
    type Data = Bytes;
    type Error = axum::BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::BoxError>>> {
        let this = self.get_mut();
        let Some(taking) = &this.taking else { return Pin::new(&mut this.body).poll_frame(cx) };
        if let Some(waited) = taking.is_taken() {
            let is_soon = waited < this.body.patience / 8;
            this.piece = if is_soon { LARGEST_PIECE.min(this.piece * 2) } else { PIECE };
        }
        let mut data = std::mem::take(&mut this.rest);
        if data.is_empty() {
            match ready!(Pin::new(&mut this.body).poll_frame(cx)).transpose()?.map(Frame::into_data)
            {
                Some(Ok(frame)) => data = frame,
                Some(Err(other)) => return Poll::Ready(Some(Ok(other))),
                None => return Poll::Ready(None),
            }
        }
        this.rest = data.split_off(data.len().min(this.piece));
        taking.is_sent();
        Poll::Ready(Some(Ok(Frame::data(data))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let (mut hint, rest) = (self.body.size_hint(), self.rest.len() as u64);
        let upper = hint.upper();
        hint.set_lower(hint.lower() + rest);
        if let Some(upper) = upper {
            hint.set_upper(upper + rest);
        }
        hint
    }
}

/// The body of a request to an upstream. If nothing of it was asked for, it comes back, for another
/// upstream.
#[derive(Debug)]
pub(super) struct Sent {
    /// None: there is no body.
    body: Option<Upload>,
    activity: Activity,
    back: Option<oneshot::Sender<Upload>>,
}

impl Sent {
    pub(super) fn new(
        body: Option<Upload>,
        activity: Activity,
    ) -> (Self, oneshot::Receiver<Upload>) {
        let (back, returned) = oneshot::channel();
        (Self { body, activity, back: Some(back) }, returned)
    }
}

impl Body for Sent {
    type Data = Bytes;
    type Error = axum::BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::BoxError>>> {
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
