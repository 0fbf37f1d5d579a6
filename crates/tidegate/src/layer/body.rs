//! [`Body`]: that of the inner service, or of a response of the layer.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Frame, SizeHint};
use pin_project_lite::pin_project;

pin_project! {
    /// Body of a response: that of the inner service, or of a response of the layer itself.
    #[derive(Debug)]
    pub struct Body<B> {
        #[pin]
        kind: Kind<B>,
    }
}

pin_project! {
    #[project = Projected]
    #[derive(Debug)]
    enum Kind<B> {
        Service { #[pin] body: B },
        Layer { bytes: Bytes },
    }
}

impl<B> Body<B> {
    pub(super) fn of_service(body: B) -> Self {
        Self { kind: Kind::Service { body } }
    }

    pub(super) fn of_layer(bytes: Bytes) -> Self {
        Self { kind: Kind::Layer { bytes } }
    }
}

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
        match self.project().kind.project() {
            Projected::Service { body } => body.poll_frame(context),
            Projected::Layer { bytes } if bytes.is_empty() => Poll::Ready(None),
            Projected::Layer { bytes } => {
                Poll::Ready(Some(Ok(Frame::data(std::mem::take(bytes).into()))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            Kind::Service { body } => body.is_end_stream(),
            Kind::Layer { bytes } => bytes.is_empty(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Kind::Service { body } => body.size_hint(),
            Kind::Layer { bytes } => SizeHint::with_exact(bytes.len() as u64),
        }
    }
}
