//! [`Body`]: that of the inner service, or of a response of the layer.

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Frame, SizeHint};
use pin_project_lite::pin_project;

use crate::policy::RequestLease;

pin_project! {
    /// Body of a response: that of the inner service, or of a response of the layer itself.
    ///
    /// It is an [`http_body::Body`] if the body of the inner service is one whose data can be made
    /// from [`Bytes`], as that of axum, tonic and hyper can. A body of the layer is one frame of
    /// known length without trailers. The body of the inner service is passed on unchanged:
    ///
    /// ```
    /// use std::convert::Infallible;
    /// use std::time::Duration;
    /// use bytes::Bytes;
    /// use http::{Request, Response};
    /// use http_body_util::{BodyExt as _, Full};
    /// use tidegate::layer::RateLimitLayer;
    /// use tidegate::{Limiter, MemoryStore, Quota};
    /// use tower::{Layer as _, ServiceExt as _, service_fn};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let quota = Quota::fixed_window(1, Duration::from_secs(60))?;
    /// let layer = RateLimitLayer::new(Limiter::new(MemoryStore::new()), quota);
    /// let service = layer.layer(service_fn(async |_request: Request<()>| {
    ///     Ok::<_, Infallible>(Response::new(Full::new(Bytes::from("hello"))))
    /// }));
    ///
    /// let admitted = service.clone().oneshot(Request::new(())).await?;
    /// assert_eq!(admitted.into_body().collect().await?.to_bytes(), "hello");
    /// let denied = service.oneshot(Request::new(())).await?;
    /// let problem = denied.into_body().collect().await?.to_bytes();
    /// assert!(problem.ends_with(br#""violated-policies":["fixed-window-60s"]}"#));
    /// # Ok(())
    /// # }
    /// ```
    #[derive(Debug)]
    pub struct Body<B> {
        #[pin]
        kind: Kind<B>,
        // Units that the request holds until this body has ended.
        lease: Option<RequestLease>,
    }
}

pin_project! {
    #[project = Projected]
    #[derive(Debug)]
    enum Kind<B> {
        Service { #[pin] body: B },
        Call { #[pin] body: B, on_trailers: Option<OnTrailers> },
        Layer { bytes: Bytes },
    }
}

/// Closure that is called with the trailers of a body, before they are sent.
pub(super) struct OnTrailers(pub(super) Box<dyn FnOnce(&HeaderMap) + Send + Sync>);

impl fmt::Debug for OnTrailers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OnTrailers")
    }
}

impl<B> Body<B> {
    /// Returns whether the layer itself made the response, because it denied the request or could
    /// not decide it.
    #[must_use]
    pub fn is_of_layer(&self) -> bool {
        matches!(self.kind, Kind::Layer { .. })
    }

    pub(super) fn of_service(body: B) -> Self {
        Self { kind: Kind::Service { body }, lease: None }
    }

    /// Creates the body of a gRPC call, whose status is in its trailers.
    pub(super) fn of_call(body: B, on_trailers: OnTrailers) -> Self {
        Self { kind: Kind::Call { body, on_trailers: Some(on_trailers) }, lease: None }
    }

    pub(super) fn of_layer(bytes: Bytes) -> Self {
        Self { kind: Kind::Layer { bytes }, lease: None }
    }

    pub(super) fn with_lease(self, lease: Option<RequestLease>) -> Self {
        Self { lease, ..self }
    }

    /// Returns the length of a body of the layer.
    pub(super) fn layer_length(&self) -> Option<usize> {
        match &self.kind {
            Kind::Service { .. } | Kind::Call { .. } => None,
            Kind::Layer { bytes } => Some(bytes.len()),
        }
    }
}

type FrameResult<B> = Result<Frame<<B as http_body::Body>::Data>, <B as http_body::Body>::Error>;

impl<B> http_body::Body for Body<B>
where
    B: http_body::Body,
    B::Data: From<Bytes>,
{
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        let this = self.project();
        let mut kind = this.kind;
        let frame = ready!(kind.as_mut().poll_frame(context));
        // With the last frame, so that the client's next request finds the units released.
        let is_data = matches!(&frame, Some(Ok(frame)) if frame.is_data());
        if this.lease.is_some() && (!is_data || kind.is_end_stream()) {
            *this.lease = None;
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.kind.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Kind::Service { body } | Kind::Call { body, .. } => body.size_hint(),
            Kind::Layer { bytes } => SizeHint::with_exact(bytes.len() as u64),
        }
    }
}

impl<B> Kind<B>
where
    B: http_body::Body,
    B::Data: From<Bytes>,
{
    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<FrameResult<B>>> {
        match self.project() {
            Projected::Service { body } => body.poll_frame(context),
            Projected::Call { body, on_trailers } => {
                let frame = ready!(body.poll_frame(context));
                if let Some(Ok(frame)) = &frame
                    && let Some(trailers) = frame.trailers_ref()
                    && let Some(OnTrailers(on_trailers)) = on_trailers.take()
                {
                    on_trailers(trailers);
                }
                Poll::Ready(frame)
            }
            Projected::Layer { bytes } if bytes.is_empty() => Poll::Ready(None),
            Projected::Layer { bytes } => {
                Poll::Ready(Some(Ok(Frame::data(std::mem::take(bytes).into()))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Service { body } | Self::Call { body, .. } => body.is_end_stream(),
            Self::Layer { bytes } => bytes.is_empty(),
        }
    }
}
