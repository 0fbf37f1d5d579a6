//! Start of a request's body, which is read before the request takes a slot of an upstream: a client
//! that does not send its body takes none.

use std::sync::Arc;

use axum::body::Bytes;
use http::Method;
use http_body::{Body, Frame};
use http_body_util::BodyExt as _;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::body::{IdleTimeoutBody, RequestBody, TooSlow, Upload};
use super::error::ProxyError;

/// Number of bytes of a body that are read before the request takes a slot of an upstream.
const MAX_READ_AHEAD_BYTES: usize = 64 * 1024;
/// Maximum size of incomplete starts of all bodies.
pub(super) const MAX_TOTAL_READ_AHEAD_BYTES: usize = 64 * 1024 * 1024;
/// Maximum number of empty frames before the first data of a body of unknown length.
const MAX_EMPTY_FRAMES: usize = 16;

/// Returns the body to forward, if the request has one. A GET or HEAD whose body has no length is
/// an error, because hyper's client would send the request without it.
pub(super) async fn read_ahead(
    method: &Method,
    mut upload: Upload,
    memory: &Arc<Semaphore>,
) -> Result<Option<Box<RequestBody>>, ProxyError> {
    if upload.is_end_stream() {
        return Ok(None);
    }
    let has_length = upload.size_hint().exact().is_some();
    if has_length || ![Method::GET, Method::HEAD].contains(method) {
        let (start, memory) = read_start(&mut upload, memory).await?;
        return Ok(Some(Box::new(RequestBody::new(upload, start, memory))));
    }
    for _ in 0..MAX_EMPTY_FRAMES {
        match next_frame(&mut upload).await? {
            None => return Ok(None),
            Some(frame) if frame.data_ref().is_none_or(Bytes::is_empty) => {}
            Some(_) => break,
        }
    }
    Err(ProxyError::LengthRequired)
}

/// Reads all of a short body, or the first part of a long one. Nothing is read of a body without a
/// length, because its client may wait for the response first. `memory` has a permit for each byte;
/// the reading ends when there are no more of them.
async fn read_start<B>(
    upload: &mut IdleTimeoutBody<B>,
    memory: &Arc<Semaphore>,
) -> Result<(Bytes, Option<OwnedSemaphorePermit>), ProxyError>
where
    B: Body<Data = Bytes, Error: Into<axum::BoxError>> + Unpin,
{
    let length = upload.size_hint().exact().unwrap_or(0);
    let wanted = usize::try_from(length).unwrap_or(usize::MAX).min(MAX_READ_AHEAD_BYTES);
    let mut permits: Option<OwnedSemaphorePermit> = None;
    let mut start = Vec::new();
    while start.len() < wanted {
        let Some(frame) = next_frame(upload).await? else { break };
        let Ok(data) = frame.into_data() else { break };
        if start.is_empty() && data.len() >= wanted {
            return Ok((data, None));
        }
        // A slice of the frame would keep the whole read buffer in memory.
        start.extend_from_slice(&data);
        let bytes = u32::try_from(data.len()).unwrap_or(u32::MAX);
        match (Arc::clone(memory).try_acquire_many_owned(bytes), &mut permits) {
            (Ok(more), Some(permits)) => permits.merge(more),
            (Ok(more), None) => permits = Some(more),
            (Err(_), _) => break,
        }
    }
    Ok((start.into(), permits))
}

async fn next_frame<B>(upload: &mut IdleTimeoutBody<B>) -> Result<Option<Frame<Bytes>>, ProxyError>
where
    B: Body<Data = Bytes, Error: Into<axum::BoxError>> + Unpin,
{
    upload.frame().await.transpose().map_err(|error| {
        if error.is::<TooSlow>() {
            ProxyError::RequestBodyTimeout
        } else {
            ProxyError::RequestBodyBroken
        }
    })
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::pin::Pin;
    use std::task::{Context, Poll};
    use std::time::Duration;

    use futures_util::stream::{self, BoxStream, StreamExt as _};
    use http_body::SizeHint;

    use super::*;

    /// Body of a known length, whose client sends only these parts of it.
    struct Stalled(BoxStream<'static, usize>, u64);

    impl Body for Stalled {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            let frame = |bytes| Ok(Frame::data(Bytes::from(vec![0; bytes])));
            self.0.poll_next_unpin(cx).map(|bytes| bytes.map(frame))
        }

        fn size_hint(&self) -> SizeHint {
            SizeHint::with_exact(self.1)
        }
    }

    async fn read(
        memory: &Arc<Semaphore>,
        length: u64,
        parts: &'static [usize],
    ) -> Result<(usize, Option<OwnedSemaphorePermit>), ProxyError> {
        let parts = stream::iter(parts.iter().copied()).chain(stream::pending()).boxed();
        let timeout = Duration::from_secs(60);
        let mut upload = IdleTimeoutBody::new(Stalled(parts, length), timeout, 0);
        let (start, permits) = read_start(&mut upload, memory).await?;
        Ok((start.len(), permits))
    }

    #[tokio::test(start_paused = true)]
    async fn start_of_a_body_is_read_as_far_as_memory_permits() {
        let memory = Arc::new(Semaphore::new(100_000));
        let (length, permits) = read(&memory, 200_000, &[40_000, 40_000]).await.expect("a start");
        assert_eq!((length, memory.available_permits()), (80_000, 20_000));
        let (length, without) = read(&memory, 60_000, &[30_000]).await.expect("a start");
        assert_eq!(length, 30_000, "nothing more is read");
        assert!(without.is_none());
        drop(permits);
        assert_eq!(memory.available_permits(), 100_000);
        // A body that arrives as a whole is not copied.
        let (length, without) = read(&memory, 10, &[10]).await.expect("a body");
        assert_eq!(length, 10);
        assert!(without.is_none());
        let stalled = read(&memory, 10, &[9]).await.map(|(length, _)| length);
        assert_eq!(stalled, Err(ProxyError::RequestBodyTimeout));
        assert_eq!(memory.available_permits(), 100_000);
    }
}
