//! Speed at which the client of an HTTP/2 stream reads. hyper polls the response body only after
//! the client made room for the previous chunk, so the body can measure it.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

tokio::task_local! {
    static CURRENT: Arc<WriteProgress>;
}

/// Progress of one stream's client in reading its response.
#[derive(Debug, Default)]
pub(crate) struct WriteProgress {
    /// Send time of the chunk that the client has not consumed yet.
    unread_since: Mutex<Option<Instant>>,
}

impl WriteProgress {
    /// Returns the progress of the current stream; `None` for HTTP/1.1 and for inline streams.
    pub(crate) fn current() -> Option<Arc<Self>> {
        CURRENT.try_with(Arc::clone).ok()
    }

    /// Records that a chunk was handed to the connection.
    pub(crate) fn mark_sent(&self) {
        self.replace(Some(Instant::now()));
    }

    /// Records that the client consumed the last chunk and returns how long that took.
    pub(crate) fn mark_consumed(&self) -> Option<Duration> {
        self.replace(None).map(|sent| sent.elapsed())
    }

    fn replace(&self, unread_since: Option<Instant>) -> Option<Instant> {
        let mut current = self.unread_since.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut *current, unread_since)
    }
}

/// Runs a stream with a progress of its own.
pub(super) fn with_progress<F: Future>(stream: F) -> impl Future<Output = F::Output> {
    CURRENT.scope(Arc::default(), stream)
}
