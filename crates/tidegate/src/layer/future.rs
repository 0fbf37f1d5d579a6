//! [`ResponseFuture`]: the future of a request through the layer.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use http::Response;
use pin_project_lite::pin_project;

use super::body::Body;
use super::headers::RenderedHeaders;

/// Future in the heap.
pub(super) type Boxed<R, E> = Pin<Box<dyn Future<Output = Result<Response<Body<R>>, E>> + Send>>;

pin_project! {
    /// Future of a [`RateLimit`](super::RateLimit): `F` is that of the inner service, `R` the body
    /// of its responses and `E` its error.
    ///
    /// A request whose decision needs no wait is decided when the service is called, and this
    /// future contains that of the inner service. Any other is decided by a future in the heap.
    pub struct ResponseFuture<F, R, E> {
        #[pin]
        state: State<F, R, E>,
    }
}

pin_project! {
    #[project = Projected]
    enum State<F, R, E> {
        Called { #[pin] response: F, headers: RenderedHeaders },
        Response { response: Option<Response<Body<R>>> },
        Boxed { future: Boxed<R, E> },
    }
}

impl<F, R, E> ResponseFuture<F, R, E> {
    /// Creates the future of an admitted request, whose response gets these headers.
    pub(super) fn called(response: F, headers: RenderedHeaders) -> Self {
        Self { state: State::Called { response, headers } }
    }

    /// Creates the future of a request that the layer responds to.
    pub(super) fn of_layer(response: Response<Body<R>>) -> Self {
        Self { state: State::Response { response: Some(response) } }
    }

    pub(super) fn boxed(future: Boxed<R, E>) -> Self {
        Self { state: State::Boxed { future } }
    }
}

impl<F, R, E> fmt::Debug for ResponseFuture<F, R, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}

impl<F, R, E> Future for ResponseFuture<F, R, E>
where
    F: Future<Output = Result<Response<R>, E>>,
{
    type Output = Result<Response<Body<R>>, E>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match self.project().state.project() {
            Projected::Called { response, headers } => {
                let mut response = ready!(response.poll(context))?;
                headers.add_to(response.headers_mut());
                Poll::Ready(Ok(response.map(Body::of_service)))
            }
            Projected::Response { response } => match response.take() {
                Some(response) => Poll::Ready(Ok(response)),
                // Polled again after the response, which no caller may do.
                None => Poll::Pending,
            },
            Projected::Boxed { future } => future.as_mut().poll(context),
        }
    }
}
