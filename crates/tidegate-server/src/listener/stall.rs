//! Detects HTTP/2 clients that stop reading: per-stream flow control hides the stall from the
//! socket, so `guarded_stream.rs` cannot see it. hyper polls the response body only after the
//! client consumed the previous chunk, so the body reports the progress.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, ready};
use std::time::Duration;

use tokio::time::{Instant, Sleep, sleep_until};

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
        std::mem::replace(&mut *self.lock(), unread_since)
    }

    fn unread_since(&self) -> Option<Instant> {
        *self.lock()
    }

    fn lock(&self) -> MutexGuard<'_, Option<Instant>> {
        self.unread_since.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Runs a stream and drops it when its client has not consumed a chunk within `timeout`. Dropping
/// resets the stream and releases its resources, such as a connection to an upstream.
pub(super) async fn with_stall_timeout(stream: impl Future<Output = ()>, timeout: Duration) {
    let progress = Arc::<WriteProgress>::default();
    let mut stream = pin!(CURRENT.scope(Arc::clone(&progress), stream));
    // Created on the first wait: most streams never need a timer.
    let mut timer: Option<Pin<Box<Sleep>>> = None;
    poll_fn(|cx| {
        if stream.as_mut().poll(cx).is_ready() {
            return Poll::Ready(());
        }
        let Some(unread_since) = progress.unread_since() else { return Poll::Pending };
        let deadline = unread_since + timeout;
        let timer = timer.get_or_insert_with(|| Box::pin(sleep_until(deadline)));
        loop {
            ready!(timer.as_mut().poll(cx));
            // The timer may still be set for an earlier chunk.
            if timer.deadline() >= deadline {
                tracing::debug!("client stopped reading its response, stream reset");
                return Poll::Ready(());
            }
            timer.as_mut().reset(deadline);
        }
    })
    .await;
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(10);

    #[tokio::test(start_paused = true)]
    async fn only_an_unread_chunk_ends_a_stream() {
        let start = Instant::now();
        let slow = async {
            let progress = WriteProgress::current().expect("the stream has a stall timeout");
            tokio::time::sleep(TIMEOUT * 5).await;
            for _ in 0..5 {
                progress.mark_sent();
                tokio::time::sleep(TIMEOUT * 9 / 10).await;
                progress.mark_consumed();
            }
            progress.mark_sent();
            std::future::pending::<()>().await;
        };
        with_stall_timeout(slow, TIMEOUT).await;
        let elapsed = start.elapsed().as_millis() / 100;
        assert_eq!(
            elapsed,
            50 * 10 + 5 * 90 + 100,
            "a late first chunk and a slow client are not stalls"
        );
        with_stall_timeout(async {}, TIMEOUT).await;
        assert!(WriteProgress::current().is_none());
    }
}
