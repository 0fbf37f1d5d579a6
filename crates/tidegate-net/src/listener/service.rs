//! Service of one connection: reports its requests, and lets other connections run between them.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use http::{HeaderValue, StatusCode, Version, header};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use hyper::service::Service as HyperService;
use pin_project_lite::pin_project;

use super::Request;
use super::connection::{Connection, RequestGuard};
use super::lingering::LingeringBody;

/// Service around that of a front door.
pub(super) struct ConnectionService<S> {
    pub(super) service: S,
    pub(super) connection: Arc<Connection>,
    /// Whether HTTP/2 streams run on the connection's task.
    pub(super) inline_streams: bool,
}

pin_project! {
    /// Request of a connection.
    pub(super) struct RequestFuture<F> {
        #[pin]
        response: F,
        // Connection for whose next poll the request waits.
        waits_for: Option<Arc<Connection>>,
        guard: Option<RequestGuard>,
        // Whether the connection closes after the response.
        closes: bool,
    }
}

pin_project! {
    /// Body of a response, which completes the request when it is dropped.
    pub(super) struct ResponseBody<B> {
        #[pin]
        body: B,
        guard: Option<RequestGuard>,
    }
}

impl<S, B> HyperService<hyper::Request<Incoming>> for ConnectionService<S>
where
    S: HyperService<Request, Response = http::Response<B>>,
{
    type Response = http::Response<ResponseBody<B>>;
    type Error = S::Error;
    type Future = RequestFuture<S::Future>;

    fn call(&self, request: hyper::Request<Incoming>) -> Self::Future {
        let is_http2 = request.version() == Version::HTTP_2;
        let has_budget = !is_http2 || self.inline_streams;
        RequestFuture {
            // The frames show the requests of HTTP/2.
            guard: (!is_http2).then(|| RequestGuard::new(&self.connection)),
            closes: self.connection.age.closes_after(request.version()),
            waits_for: has_budget.then(|| Arc::clone(&self.connection)),
            response: self.service.call(request.map(|body| LingeringBody::new(body, is_http2))),
        }
    }
}

impl<B, E, F: Future<Output = Result<http::Response<B>, E>>> Future for RequestFuture<F> {
    type Output = Result<http::Response<ResponseBody<B>>, E>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        if let Some(connection) = this.waits_for {
            if !connection.take_budget() {
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            *this.waits_for = None;
        }
        let mut response = ready!(this.response.poll(cx))?;
        let mut guard = this.guard.take();
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            // An upgraded connection is in use until it closes.
            if let Some(guard) = guard.take() {
                guard.keep_busy();
            }
        } else if *this.closes {
            response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        Poll::Ready(Ok(response.map(|body| ResponseBody { body, guard })))
    }
}

impl<B: Body> Body for ResponseBody<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        self.project().body.poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
