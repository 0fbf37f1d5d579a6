//! Where the streams of an HTTP/2 connection are answered.

use std::task::{Context, Waker};

use hyper::rt::Executor;
use tokio::task::coop::cooperative;

/// Each on a task of its own; or, where most answers are there at once, on the connection's as far as they come. A task
/// for an answer that waits for nothing costs more than the answer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Streams {
    pub(super) at_once: bool,
}

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for Streams {
    fn execute(&self, stream: F) {
        if !self.at_once {
            tokio::spawn(stream);
            return;
        }
        // Only as many in a row as tokio lets a task do: others wait for the same thread.
        let mut stream = Box::pin(cooperative(stream));
        // Nobody needs to be woken: what is not there yet is asked again by its own task.
        if stream.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending() {
            tokio::spawn(stream);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::sync::oneshot;

    use super::*;

    const AT_ONCE: Streams = Streams { at_once: true };

    #[tokio::test]
    async fn what_waits_for_nothing_is_there_at_once_and_the_rest_later() {
        let (question, asked) = oneshot::channel();
        let (answer, mut answered) = oneshot::channel();
        AT_ONCE.execute(async { answer.send(asked.await.expect("a question")).expect("somebody waits") });
        assert!(answered.try_recv().is_err());
        AT_ONCE.execute(async { question.send(7).expect("somebody waits") });
        assert_eq!(answered.await, Ok(7));
    }

    #[tokio::test]
    async fn one_connection_does_not_keep_the_thread_to_itself() {
        const ALL: usize = 1_000;
        let done = Arc::new(AtomicUsize::new(0));
        for _ in 0..ALL {
            let done = Arc::clone(&done);
            AT_ONCE.execute(async move {
                done.fetch_add(1, Ordering::Relaxed);
            });
        }
        let at_once = done.load(Ordering::Relaxed);
        assert!((1..ALL).contains(&at_once), "{at_once}");
        for _ in 0..ALL {
            tokio::task::yield_now().await;
        }
        assert_eq!(done.load(Ordering::Relaxed), ALL);
    }
}
