//! The body of a request, which may be answered before it was read.

use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use axum::body::Bytes;
use http::Version;
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt as _;
use hyper::service::Service as HyperService;
use tokio::runtime::Handle;

use super::Request;

/// A client of HTTP/2 that is answered in the middle of its body may send on for so long, and so
/// much is read. If its stream ended at once, some (curl 7.88) would tell of that instead of the
/// answer. Flow control lets in no more than its window.
const LINGER: Duration = Duration::from_secs(1);
const LINGER_BYTES: usize = 64 * 1024;

/// The body of a request. Left unread, it lingers where HTTP/2 needs that; for HTTP/1.1 `wire.rs`
/// does the same.
#[derive(Debug)]
pub(crate) struct Incoming {
    /// Always there until it is dropped.
    body: Option<hyper::body::Incoming>,
    lingers: bool,
}

impl Body for Incoming {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<hyper::Result<Frame<Bytes>>>> {
        match &mut self.body {
            Some(body) => Pin::new(body).poll_frame(cx),
            None => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or_else(|| SizeHint::with_exact(0), Body::size_hint)
    }
}

impl Drop for Incoming {
    fn drop(&mut self) {
        let Some(body) = self.body.take().filter(|body| self.lingers && !body.is_end_stream())
        else {
            return;
        };
        let mut rest = Box::pin(discard(body));
        // Often the end is there already, and nobody has looked.
        let is_over = rest.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready();
        if let (false, Ok(runtime)) = (is_over, Handle::try_current()) {
            runtime.spawn(async move { tokio::time::timeout(LINGER, rest).await });
        }
    }
}

/// Reads on to the end, if that is near, and then only keeps the stream.
async fn discard(mut body: hyper::body::Incoming) {
    let mut left = LINGER_BYTES;
    while let Some(Ok(frame)) = body.frame().await {
        left = left.saturating_sub(frame.data_ref().map_or(0, Bytes::len));
        if left == 0 && !body.is_end_stream() {
            std::future::pending::<()>().await;
        }
    }
}

/// A service that gets such bodies.
pub(super) struct Lingering<S>(pub(super) S);

impl<S: HyperService<Request>> HyperService<hyper::Request<hyper::body::Incoming>>
    for Lingering<S>
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn call(&self, request: hyper::Request<hyper::body::Incoming>) -> S::Future {
        let lingers = request.version() == Version::HTTP_2;
        self.0.call(request.map(|body| Incoming { body: Some(body), lingers }))
    }
}
