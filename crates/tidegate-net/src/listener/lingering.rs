//! Request bodies that may still be arriving after the response was sent.

use std::pin::Pin;
use std::task::{Context, Poll, Wake as _, Waker};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt as _;
use tokio::runtime::Handle;

use super::wakers::hold_wake;

/// Time during which an HTTP/2 stream stays open after an early response. Some clients (curl 7.88)
/// report a reset stream instead of the response they received.
const LINGER_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum number of bytes to discard, above the size of any message of the API.
const MAX_LINGER_BYTES: usize = 8 * 1024 * 1024;

/// Body of a request. On drop, the unread rest of an HTTP/2 body is discarded for up to
/// [`LINGER_TIMEOUT`]; for HTTP/1.1, `guarded_stream.rs` does this.
#[derive(Debug)]
pub struct LingeringBody {
    /// `None` only during drop.
    body: Option<hyper::body::Incoming>,
    lingers: bool,
}

impl LingeringBody {
    pub(super) fn new(body: hyper::body::Incoming, lingers: bool) -> Self {
        Self { body: Some(body), lingers }
    }
}

impl Body for LingeringBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<hyper::Result<Frame<Bytes>>>> {
        let Self { body: Some(body), lingers } = &mut *self else { return Poll::Ready(None) };
        if *lingers {
            return Pin::new(body).poll_frame(cx);
        }
        // hyper wakes the connection for the next chunk of HTTP/1.1 also after the last one, which
        // would be a second poll for every request with a body.
        let (polled, held) = hold_wake(|| Pin::new(&mut *body).poll_frame(cx));
        let is_last = polled.is_ready() && body.is_end_stream();
        if let (Some(waker), false) = (held, is_last) {
            waker.wake();
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

impl Drop for LingeringBody {
    fn drop(&mut self) {
        let Some(body) = self.body.take().filter(|body| self.lingers && !body.is_end_stream())
        else {
            return;
        };
        let mut rest = Box::pin(discard(body));
        // The end has often arrived already. Then no task is needed.
        let is_complete = rest.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready();
        if let (false, Ok(runtime)) = (is_complete, Handle::try_current()) {
            runtime.spawn(async move { tokio::time::timeout(LINGER_TIMEOUT, rest).await });
        }
    }
}

/// Reads up to [`MAX_LINGER_BYTES`], and then resets the stream. It always reads: unread bytes take
/// up the flow control window of the connection and would stall its other streams.
async fn discard(mut body: hyper::body::Incoming) {
    let mut left = MAX_LINGER_BYTES;
    while let Some(Ok(frame)) = body.frame().await {
        left = left.saturating_sub(frame.data_ref().map_or(0, Bytes::len));
        if left == 0 {
            return;
        }
    }
}
