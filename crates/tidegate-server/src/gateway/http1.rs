//! Exchanges with an upstream over HTTP/1.1, in the task of the client's request.
//!
//! hyper's connection is a future. A task of its own for it would be woken for each request, and
//! would wake the client's task for each response, often on another core. Here the request polls
//! the connection, and then the body of the response does.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::Bytes;
use http::{Request, Response};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use hyper::client::conn::TrySendError;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::time::Sleep;

use super::body::{IdleTimer, UpstreamRequestBody};
use super::connection::{Progress, UpstreamStream};
use super::pool::Connections;
use super::wakes::Wakes;

/// Maximum number of headers in a response. Beyond its default of 100, hyper allocates space for
/// all of them with each response, so only some connections accept as many.
const MAX_HEADERS: usize = 256;
/// Maximum length of a body that is read in the task of the client's request. For longer ones, two
/// tasks are faster: one reads while the other one writes.
const MAX_INLINE_BYTES: usize = 64 * 1024;

type Driver = Pin<Box<dyn Future<Output = hyper::Result<()>> + Send>>;

/// Connection to an upstream. It makes progress only while it is polled.
pub(super) struct Http1Connection {
    sender: SendRequest<UpstreamRequestBody>,
    /// `None` when the connection is closed.
    driver: Option<Driver>,
    pub(super) progress: Progress,
    /// Whether more than 100 headers in a response are accepted.
    pub(super) takes_many_headers: bool,
    /// Waker of hyper's part, the same for all tasks that use the connection.
    wakes: Arc<Wakes>,
    /// Timer for the head of a response. It is not reset for each request: when it expires, the
    /// deadline of the present one is looked up.
    timer: Pin<Box<Sleep>>,
    pool: Arc<Connections>,
}

impl std::fmt::Debug for Http1Connection {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Http1Connection").finish_non_exhaustive()
    }
}

/// Reason why a request on a connection has no response.
pub(super) enum Failure {
    /// Nothing of the request was sent, because the connection was closed.
    Unsent(Box<Request<UpstreamRequestBody>>, hyper::Error),
    Failed(hyper::Error),
    /// The upstream did not respond in time.
    Timeout,
}

impl Http1Connection {
    pub(super) async fn handshake(
        stream: UpstreamStream,
        pool: Arc<Connections>,
        takes_many_headers: bool,
        header_timeout: Duration,
    ) -> hyper::Result<Box<Self>> {
        let progress = stream.progress();
        let mut builder = http1::Builder::new();
        if takes_many_headers {
            builder.max_headers(MAX_HEADERS);
        }
        let (sender, connection) = builder
            // A proxy corrects these two in responses (RFC 9112, 5.1 and 5.2).
            .allow_spaces_after_header_name_in_responses(true)
            .allow_obsolete_multiline_headers_in_responses(true)
            .handshake(TokioIo::new(stream))
            .await?;
        Ok(Box::new(Self {
            sender,
            driver: Some(Box::pin(connection.with_upgrades())),
            progress,
            takes_many_headers,
            wakes: Arc::default(),
            timer: Box::pin(tokio::time::sleep(header_timeout)),
            pool,
        }))
    }

    /// Sends a request, and returns the response once its head has arrived.
    pub(super) async fn send(
        mut self: Box<Self>,
        request: Request<UpstreamRequestBody>,
        timer: &IdleTimer,
        timeout: Duration,
    ) -> Result<Response<UpstreamBody>, Failure> {
        let is_long =
            request.body().size_hint().upper().is_none_or(|it| it > MAX_INLINE_BYTES as u64);
        let mut response = pin!(self.sender.try_send_request(request));
        if is_long {
            self.detach();
            let result = tokio::select! {
                result = response => Some(result),
                () = timer.expired(timeout) => None,
            };
            return Self::response(result, UpstreamBody::detached);
        }
        let result = poll_fn(|cx| {
            self.poll_turn(cx, |this, cx| {
                this.poll_driver(cx);
                if let Poll::Ready(result) = response.as_mut().poll(cx) {
                    return Poll::Ready(Some(result));
                }
                timer.poll_expired(timeout, this.timer.as_mut(), cx).map(|()| None)
            })
        })
        .await;
        Self::response(result, |incoming| {
            let mut body = UpstreamBody::new(incoming, self);
            // The client may read nothing of the response before it has sent its body.
            if timer.is_uploading() {
                body.detach();
            }
            body
        })
    }

    fn response(
        result: Option<Result<Response<Incoming>, TrySendError<Request<UpstreamRequestBody>>>>,
        body: impl FnOnce(Incoming) -> UpstreamBody,
    ) -> Result<Response<UpstreamBody>, Failure> {
        match result {
            Some(Ok(response)) => Ok(response.map(body)),
            Some(Err(mut error)) => Err(match error.take_message() {
                Some(request) => Failure::Unsent(Box::new(request), error.into_error()),
                None => Failure::Failed(error.into_error()),
            }),
            None => Err(Failure::Timeout),
        }
    }

    /// Polls hyper's part.
    fn poll_driver(&mut self, cx: &mut Context<'_>) {
        if let Some(driver) = &mut self.driver
            && driver.as_mut().poll(cx).is_ready()
        {
            // A request that hyper has not taken fails when this is dropped.
            self.driver = None;
        }
    }

    /// Polls with the waker of the connection, until nothing more can be done without a wait.
    fn poll_turn<T>(
        &mut self,
        cx: &mut Context<'_>,
        mut poll: impl FnMut(&mut Self, &mut Context<'_>) -> Poll<T>,
    ) -> Poll<T> {
        let wakes = Arc::clone(&self.wakes);
        wakes.poll_turn(cx, |cx| poll(self, cx))
    }

    /// Leaves the connection to the next request, once it has completed the present one.
    fn finish(self: Box<Self>) {
        if self.driver.is_none() || self.sender.is_closed() {
            return;
        }
        if self.sender.is_ready() {
            let pool = Arc::clone(&self.pool);
            pool.put(self);
        } else {
            self.detach();
        }
    }

    /// Continues in a task of its own.
    fn detach(mut self: Box<Self>) {
        tokio::spawn(async move {
            poll_fn(|cx| {
                self.poll_turn(cx, |this, cx| {
                    this.poll_driver(cx);
                    let is_done = this.driver.is_none() || this.sender.is_ready();
                    if is_done { Poll::Ready(()) } else { Poll::Pending }
                })
            })
            .await;
            if self.driver.is_some() {
                let pool = Arc::clone(&self.pool);
                pool.put(self);
            }
        });
    }
}

/// Body of a response, which polls its connection.
#[derive(Debug)]
pub(super) struct UpstreamBody {
    incoming: Incoming,
    /// `None` once the body has ended, or if the connection has a task of its own.
    connection: Option<Box<Http1Connection>>,
    /// Number of bytes that were read in the task of the client's request.
    inline_bytes: usize,
}

impl UpstreamBody {
    /// Returns the body of a response on a connection that has a task of its own.
    pub(super) fn detached(incoming: Incoming) -> Self {
        Self { incoming, connection: None, inline_bytes: 0 }
    }

    fn new(incoming: Incoming, connection: Box<Http1Connection>) -> Self {
        let mut body = Self { incoming, connection: Some(connection), inline_bytes: 0 };
        if body.incoming.is_end_stream() {
            body.finish();
        } else if body.incoming.size_hint().lower() > MAX_INLINE_BYTES as u64 {
            body.detach();
        }
        body
    }

    /// Lets the connection continue in a task of its own.
    fn detach(&mut self) {
        if let Some(connection) = self.connection.take() {
            connection.detach();
        }
    }

    fn finish(&mut self) {
        if let Some(connection) = self.connection.take() {
            connection.finish();
        }
    }
}

impl Body for UpstreamBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<hyper::Result<Frame<Bytes>>>> {
        let this = self.get_mut();
        let Self { incoming, connection: Some(connection), .. } = this else {
            return Pin::new(&mut this.incoming).poll_frame(cx);
        };
        let frame = ready!(connection.poll_turn(cx, |connection, cx| {
            // hyper reads as much as the body asks for.
            if let Poll::Ready(frame) = Pin::new(&mut *incoming).poll_frame(cx) {
                return Poll::Ready(frame);
            }
            connection.poll_driver(cx);
            Pin::new(&mut *incoming).poll_frame(cx)
        }));
        if frame.is_none() || this.incoming.is_end_stream() {
            this.finish();
        } else {
            let data = frame.as_ref().and_then(|frame| frame.as_ref().ok()?.data_ref());
            this.inline_bytes += data.map_or(0, Bytes::len);
            if this.inline_bytes > MAX_INLINE_BYTES {
                this.detach();
            }
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.incoming.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.incoming.size_hint()
    }
}
