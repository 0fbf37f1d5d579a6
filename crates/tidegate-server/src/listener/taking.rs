//! Whether a client of HTTP/2 takes its answer. Its flow control stops one stream and no bytes of
//! the connection, so that `wire.rs` sees nothing of it; and hyper asks the answer's body for no
//! more until the last piece is taken.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Poll, ready};
use std::time::Duration;

use tokio::time::{Instant, Sleep, sleep_until};

tokio::task_local! {
    static CURRENT: Arc<Taking>;
}

/// How the client of one stream takes its answer; told by the body of that, which knows when it is
/// asked for more.
#[derive(Debug, Default)]
pub(crate) struct Taking {
    /// Since when a piece has been waiting to be taken.
    waiting: Mutex<Option<Instant>>,
}

impl Taking {
    /// Of the stream that is answered here. None for HTTP/1.1, and where streams are not watched.
    pub(crate) fn current() -> Option<Arc<Self>> {
        CURRENT.try_with(Arc::clone).ok()
    }

    /// A piece is on its way.
    pub(crate) fn is_sent(&self) {
        self.set(Some(Instant::now()));
    }

    /// More is asked for. How long the last piece has waited.
    pub(crate) fn is_taken(&self) -> Option<Duration> {
        self.set(None).map(|waiting| waiting.elapsed())
    }

    fn set(&self, waiting: Option<Instant>) -> Option<Instant> {
        std::mem::replace(
            &mut *self.waiting.lock().unwrap_or_else(PoisonError::into_inner),
            waiting,
        )
    }

    fn waiting(&self) -> Option<Instant> {
        *self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A stream that is dropped, and so reset, when a piece of its answer has not been taken for so
/// long. With it goes all that it holds, such as a connection to an upstream.
pub(super) async fn watched(stream: impl Future<Output = ()>, patience: Duration) {
    let taking = Arc::<Taking>::default();
    let mut stream = pin!(CURRENT.scope(Arc::clone(&taking), stream));
    // Made when a piece first has to wait; most never do.
    let mut alarm: Option<Pin<Box<Sleep>>> = None;
    poll_fn(|cx| {
        if stream.as_mut().poll(cx).is_ready() {
            return Poll::Ready(());
        }
        let Some(waiting) = taking.waiting() else { return Poll::Pending };
        let end = waiting + patience;
        let alarm = alarm.get_or_insert_with(|| Box::pin(sleep_until(end)));
        loop {
            ready!(alarm.as_mut().poll(cx));
            // It may have been set for a piece before this one.
            if alarm.deadline() >= end {
                tracing::debug!("a client takes nothing of its answer: the stream is ended");
                return Poll::Ready(());
            }
            alarm.as_mut().reset(end);
        }
    })
    .await;
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(10);

    #[tokio::test(start_paused = true)]
    async fn only_a_piece_that_is_not_taken_ends_a_stream() {
        let start = Instant::now();
        let slow = async {
            let taking = Taking::current().expect("it is watched");
            tokio::time::sleep(PATIENCE * 5).await;
            for _ in 0..5 {
                taking.is_sent();
                tokio::time::sleep(PATIENCE * 9 / 10).await;
                taking.is_taken();
            }
            taking.is_sent();
            std::future::pending::<()>().await;
        };
        watched(slow, PATIENCE).await;
        let passed = start.elapsed().as_millis() / 100;
        assert_eq!(
            passed,
            50 * 10 + 5 * 90 + 100,
            "waiting for a first piece, or slowly for more, is no stop"
        );
        watched(async {}, PATIENCE).await;
        assert!(Taking::current().is_none());
    }
}
