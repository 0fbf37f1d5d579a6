//! Streaming bodies with idle timeouts. Only the start of a request's body is buffered.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::sync::{OwnedSemaphorePermit, oneshot};
use tokio::time::{Instant, Sleep};

use super::concurrency::RequestPermit;
use super::head;
use super::uploads::ActiveUpload;
use crate::duration;
use crate::listener;

/// Timer that expires when no bytes moved for a while. Clones share their state.
#[derive(Debug, Clone)]
pub(super) struct IdleTimer {
    start: Instant,
    state: Arc<IdleState>,
}

#[derive(Debug, Default)]
struct IdleState {
    /// Milliseconds from the start to the last activity.
    last_activity: AtomicU64,
    /// Whether the proxy is waiting for the client's body. That time does not count against the
    /// upstream.
    waits_for_client: AtomicBool,
    /// Whether the upstream's response has started and has not ended.
    is_responding: AtomicBool,
}

impl IdleTimer {
    pub(super) fn start() -> Self {
        Self { start: Instant::now(), state: Arc::default() }
    }

    /// Records that bytes moved.
    pub(super) fn reset(&self) {
        let elapsed = duration::millis(self.start.elapsed());
        self.state.last_activity.store(elapsed, Ordering::Relaxed);
        self.state.waits_for_client.store(false, Ordering::Relaxed);
    }

    /// Records that the upstream's response has started, or has ended.
    pub(super) fn set_responding(&self, is_responding: bool) {
        self.state.is_responding.store(is_responding, Ordering::Relaxed);
    }

    /// Completes when no bytes have moved for `timeout`.
    pub(super) async fn expired(&self, timeout: Duration) {
        let mut deadline = self.start + timeout;
        loop {
            tokio::time::sleep_until(deadline).await;
            let last_activity = self.state.last_activity.load(Ordering::Relaxed);
            deadline = self.start + Duration::from_millis(last_activity) + timeout;
            let now = Instant::now();
            if now >= deadline {
                if !self.state.waits_for_client.load(Ordering::Relaxed) {
                    return;
                }
                deadline = now + timeout;
            }
        }
    }
}

/// Error of a body that stalled, or that was slower than its minimum rate, for longer than the idle
/// timeout.
#[derive(Debug, thiserror::Error)]
#[error("too little data received within {0:?}")]
pub(super) struct TooSlow(Duration);

/// Body that fails when no frame arrives within the idle timeout. With a minimum rate, each byte
/// only pays for a part of the time, so that a body which arrives in drops fails, too.
#[derive(Debug)]
pub(super) struct IdleTimeoutBody<B> {
    body: B,
    timeout: Duration,
    /// Bytes per second; 0 for no minimum.
    min_rate: u32,
    /// Whether the minimum does not apply at present.
    may_pause: bool,
    /// Time for which this body may still wait. The time between the polls, in which the receiver
    /// has no room for data, does not count.
    allowance: Duration,
    /// Created on the first wait: most bodies never need a timer.
    timer: Option<Pin<Box<Sleep>>>,
    waits_since: Option<Instant>,
    /// Response that ends with this body.
    _response: Option<OpenResponse>,
}

/// Body of a client's request.
pub(super) type Upload = IdleTimeoutBody<listener::LingeringBody>;

impl<B> IdleTimeoutBody<B> {
    pub(super) fn new(body: B, timeout: Duration, min_rate: u32) -> Self {
        Self {
            body,
            timeout,
            min_rate,
            may_pause: false,
            allowance: timeout,
            timer: None,
            waits_since: None,
            _response: None,
        }
    }

    fn has_min_rate(&self) -> bool {
        self.min_rate > 0 && !self.may_pause
    }

    /// Adjusts the allowance after a wait, at the end of which this number of bytes arrived.
    fn end_wait(&mut self, bytes: usize) {
        let waited = self.waits_since.take().map(|since| since.elapsed()).unwrap_or_default();
        self.allowance = if self.has_min_rate() {
            let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
            let paid = Duration::from_secs(1).saturating_mul(bytes) / self.min_rate;
            self.timeout.min(self.allowance.saturating_sub(waited).saturating_add(paid))
        } else {
            self.timeout
        };
    }
}

impl<B: Body<Data = Bytes, Error: Into<axum::BoxError>> + Unpin> Body for IdleTimeoutBody<B> {
    type Data = Bytes;
    type Error = axum::BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::BoxError>>> {
        let this = self.get_mut();
        if let Poll::Ready(frame) = Pin::new(&mut this.body).poll_frame(cx) {
            let data = match &frame {
                Some(Ok(frame)) => frame.data_ref(),
                _ => None,
            };
            this.end_wait(data.map_or(0, Bytes::len));
            let with_clean_trailers = |mut frame: Frame<Bytes>| {
                let _ = frame.trailers_mut().map(head::clean_trailers);
                frame
            };
            return Poll::Ready(
                frame.map(|frame| frame.map(with_clean_trailers).map_err(Into::into)),
            );
        }
        let limit = if this.has_min_rate() { this.allowance } else { this.timeout };
        let timer = this.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep(limit)));
        let since = *this.waits_since.get_or_insert_with(|| {
            let now = Instant::now();
            timer.as_mut().reset(now + limit);
            now
        });
        ready!(timer.as_mut().poll(cx));
        // The minimum rate may have ceased to apply during the wait.
        if timer.deadline() < since + limit {
            timer.as_mut().reset(since + limit);
            ready!(timer.as_mut().poll(cx));
        }
        Poll::Ready(Some(Err(TooSlow(this.timeout).into())))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Body of an upstream's response.
pub(super) type Download = IdleTimeoutBody<Incoming>;

impl Download {
    /// Returns the body of a response, which is a part of its call.
    pub(super) fn of_call(body: Incoming, timeout: Duration, call: OpenCall) -> Self {
        call.timer.set_responding(true);
        Self { _response: Some(OpenResponse(call)), ..Self::new(body, timeout, 0) }
    }
}

/// Response of a call that has not ended.
#[derive(Debug)]
struct OpenResponse(OpenCall);

impl Drop for OpenResponse {
    fn drop(&mut self) {
        self.0.timer.set_responding(false);
    }
}

/// Maximum size of a body that can be sent again after it was sent.
const MAX_RECORDED_BYTES: usize = 64 * 1024;

/// Body of a client's request that can be sent again, as long as all that was sent of it is
/// recorded.
#[derive(Debug)]
pub(super) struct RequestBody {
    /// Data that was read ahead, or by an earlier attempt. It comes before the rest of the upload.
    start: Bytes,
    /// Permits for the bytes of the start, if it was collected.
    memory: Option<OwnedSemaphorePermit>,
    upload: Upload,
    /// Copy of the data that this attempt has sent, `None` if it is incomplete. Clones of the
    /// frames would keep whole read buffers in memory.
    recorded: Option<Vec<u8>>,
    max_recorded: usize,
}

impl RequestBody {
    /// Returns the body with the start that was read ahead.
    pub(super) fn new(upload: Upload, start: Bytes, memory: Option<OwnedSemaphorePermit>) -> Self {
        Self { start, memory, upload, recorded: Some(Vec::new()), max_recorded: 0 }
    }

    /// Returns the body for another attempt.
    fn rewound(mut self: Box<Self>) -> Option<Box<Self>> {
        let recorded = self.recorded.replace(Vec::new())?;
        if !recorded.is_empty() {
            self.start = recorded.into();
        }
        Some(self)
    }

    fn record(&mut self, data: Option<&Bytes>) {
        let length = self.recorded.as_ref().map_or(0, Vec::len);
        let room = self.max_recorded.saturating_sub(length);
        match (data, &mut self.recorded) {
            (Some(data), Some(recorded)) if data.len() <= room => recorded.extend_from_slice(data),
            _ => self.recorded = None,
        }
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = axum::BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::BoxError>>> {
        let this = self.get_mut();
        if !this.start.is_empty() {
            let data = std::mem::take(&mut this.start);
            this.memory = None;
            this.record(Some(&data));
            return Poll::Ready(Some(Ok(Frame::data(data))));
        }
        if this.upload.is_end_stream() {
            return Poll::Ready(None);
        }
        let frame = ready!(Pin::new(&mut this.upload).poll_frame(cx));
        // The end of the body is found again by the next attempt.
        if let Some(frame) = &frame {
            this.record(frame.as_ref().ok().and_then(Frame::data_ref));
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.start.is_empty() && self.upload.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        with_more(self.upload.size_hint(), self.start.len())
    }
}

/// Adds bytes to a hint.
fn with_more(mut hint: SizeHint, bytes: usize) -> SizeHint {
    let bytes = bytes as u64;
    // The upper bound first: it must never be below the lower one.
    if let Some(upper) = hint.upper() {
        hint.set_upper(upper + bytes);
    }
    hint.set_lower(hint.lower() + bytes);
    hint
}

/// Request in flight at an upstream. Its bodies hold a clone each; the permit is free when both have
/// ended.
#[derive(Debug, Clone)]
pub(super) struct OpenCall {
    pub(super) timer: IdleTimer,
    permit: Arc<RequestPermit>,
}

impl OpenCall {
    pub(super) fn start(permit: &Arc<RequestPermit>) -> Self {
        Self { timer: IdleTimer::start(), permit: Arc::clone(permit) }
    }
}

/// Body of one attempt to send a request to an upstream. When it is dropped, the client's body is
/// handed back for another attempt, if it can be sent again.
#[derive(Debug)]
pub(super) struct UpstreamRequestBody {
    /// `None` if the request has no body. Boxed, because hyper moves requests several times.
    body: Option<Box<RequestBody>>,
    call: OpenCall,
    /// Whether the client may send less than the minimum rate.
    may_pause: bool,
    /// `None` if the whole body had arrived.
    upload: Option<ActiveUpload>,
    returned: Option<oneshot::Sender<Box<RequestBody>>>,
}

/// Error of an upload that was ended because it was slow and other requests waited.
#[derive(Debug, thiserror::Error)]
#[error("slow upload ended, because other requests wait for the upstream")]
pub(super) struct SlowUpload;

impl UpstreamRequestBody {
    /// Returns the body, and the receiver that gets the client's body back, if there is one. Unless
    /// the request `may_repeat`, it only gets a body of which nothing was sent.
    pub(super) fn new(
        body: Option<Box<RequestBody>>,
        may_repeat: bool,
        may_pause: bool,
        call: OpenCall,
    ) -> (Self, Option<oneshot::Receiver<Box<RequestBody>>>) {
        let Some(mut body) = body else {
            return (Self { body: None, call, may_pause, upload: None, returned: None }, None);
        };
        body.max_recorded = if may_repeat { MAX_RECORDED_BYTES } else { 0 };
        let is_complete = body.upload.is_end_stream();
        let upload = (!is_complete).then(|| call.permit.uploads().start());
        let (sender, receiver) = oneshot::channel();
        let returned = Some(sender);
        (Self { body: Some(body), call, may_pause, upload, returned }, Some(receiver))
    }
}

impl Body for UpstreamRequestBody {
    type Data = Bytes;
    type Error = axum::BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::BoxError>>> {
        let this = self.get_mut();
        let Some(body) = &mut this.body else { return Poll::Ready(None) };
        let IdleTimer { state, .. } = &this.call.timer;
        let may_pause = this.may_pause || state.is_responding.load(Ordering::Relaxed);
        body.upload.may_pause = may_pause;
        let polled = Pin::new(body).poll_frame(cx);
        let progress = this.upload.as_ref().map(|upload| &upload.progress);
        match &polled {
            Poll::Ready(frame) => {
                this.call.timer.reset();
                if let (Some(progress), Some(Ok(frame))) = (progress, frame) {
                    progress.receive(frame.data_ref().map_or(0, Bytes::len));
                }
            }
            Poll::Pending => {
                state.waits_for_client.store(true, Ordering::Relaxed);
                if may_pause {
                    progress.inspect(|progress| progress.receive(0));
                } else if progress.is_some_and(|progress| progress.poll_ended(cx).is_ready()) {
                    // The request is not sent again.
                    this.returned = None;
                    return Poll::Ready(Some(Err(SlowUpload.into())));
                }
            }
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_deref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_deref().map_or_else(|| SizeHint::with_exact(0), Body::size_hint)
    }
}

impl Drop for UpstreamRequestBody {
    fn drop(&mut self) {
        if let (Some(body), Some(returned)) = (self.body.take(), self.returned.take())
            && let Some(body) = body.rewound()
        {
            // The receiver is gone if the upstream has responded, or if the request was cancelled.
            let _ = returned.send(body);
        }
    }
}
