//! Reads small request bodies chunk by chunk, within a timeout.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use http_body::Body;
use tokio::time::Sleep;

/// Time in which a client must send a whole body.
pub const BODY_TIMEOUT: Duration = Duration::from_secs(10);

/// Body that is being read.
pub struct BodyReader<B> {
    body: B,
    /// Runs from the first wait on.
    timeout: Option<Pin<Box<Sleep>>>,
}

/// Reason why a body could not be read.
pub enum BodyError<E> {
    TimedOut,
    Failed(E),
}

impl<B: Body<Data = Bytes> + Unpin> BodyReader<B> {
    pub fn new(body: B) -> Self {
        Self { body, timeout: None }
    }

    /// Returns the next chunk, or `None` at the end. Trailers are an empty chunk.
    pub async fn next_chunk(&mut self) -> Result<Option<Bytes>, BodyError<B::Error>> {
        let frame = poll_fn(|cx| match Pin::new(&mut self.body).poll_frame(cx) {
            Poll::Ready(frame) => Poll::Ready(Ok(frame)),
            // Nearly every body arrives with its head and needs no timer.
            Poll::Pending => {
                let sleep = || Box::pin(tokio::time::sleep(BODY_TIMEOUT));
                let timeout = self.timeout.get_or_insert_with(sleep);
                timeout.as_mut().poll(cx).map(|()| Err(BodyError::TimedOut))
            }
        });
        let Some(frame) = frame.await? else { return Ok(None) };
        Ok(Some(frame.map_err(BodyError::Failed)?.into_data().unwrap_or_default()))
    }

    /// Whether the body is known to have ended: `false` if that is still unknown.
    pub fn is_end(&self) -> bool {
        self.body.is_end_stream()
    }
}
