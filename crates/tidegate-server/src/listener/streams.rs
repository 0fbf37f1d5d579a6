//! Where the streams of an HTTP/2 connection are answered: each on a task of its own, or all on the
//! connection's.
//!
//! A task for an answer costs more than a small answer. And where each is on a task of its own, the
//! connection is woken for each, and writes them one by one; together they are written with one
//! call to the system.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use hyper::rt::Executor;
use tokio::task::coop::cooperative;

use super::taking;

type Stream = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Where hyper brings the streams of one connection.
#[derive(Clone)]
pub(super) enum Streams {
    /// Each on a task of its own, which ends when its client takes nothing of the answer for so
    /// long.
    Apart(Duration),
    /// All on the connection's: those that have come since it looked last.
    Together(Arc<Mutex<Vec<Stream>>>),
}

/// A connection that answers its streams itself.
pub(super) struct Answering<C> {
    connection: Pin<Box<C>>,
    streams: Streams,
    under_way: FuturesUnordered<Stream>,
}

impl Streams {
    pub(super) fn together() -> Self {
        Self::Together(Arc::default())
    }

    /// Drives the connection whose streams these are.
    pub(super) fn answer<C: Future>(self, connection: C) -> Answering<C> {
        Answering {
            connection: Box::pin(connection),
            streams: self,
            under_way: FuturesUnordered::new(),
        }
    }

    fn new_ones(&self) -> Option<MutexGuard<'_, Vec<Stream>>> {
        match self {
            Self::Apart(_) => None,
            Self::Together(streams) => Some(streams.lock().unwrap_or_else(PoisonError::into_inner)),
        }
    }
}

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for Streams {
    fn execute(&self, stream: F) {
        match self {
            Self::Apart(patience) => drop(tokio::spawn(taking::watched(stream, *patience))),
            Self::Together(streams) => {
                // Only as many in a row as tokio lets a task do: others wait for the same thread.
                let stream: Stream = Box::pin(cooperative(stream));
                streams.lock().unwrap_or_else(PoisonError::into_inner).push(stream);
            }
        }
    }
}

impl<C: Future> Future for Answering<C> {
    type Output = C::Output;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<C::Output> {
        let Self { connection, streams, under_way } = self.get_mut();
        loop {
            // It takes in what has come, and sends what was answered in the round before.
            if let Poll::Ready(end) = connection.as_mut().poll(context) {
                return Poll::Ready(end);
            }
            let new = streams
                .new_ones()
                .map(|mut streams| std::mem::take(&mut *streams))
                .unwrap_or_default();
            let mut is_idle = new.is_empty();
            for mut stream in new {
                // Nobody needs to be woken: what is not there at once is asked again, below.
                if stream.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending() {
                    under_way.push(stream);
                }
            }
            while let Poll::Ready(Some(())) = under_way.poll_next_unpin(context) {
                is_idle = false;
            }
            if is_idle {
                return Poll::Pending;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test]
    async fn what_waits_for_nothing_is_there_in_the_first_round_and_the_rest_when_it_is_woken() {
        let streams = Streams::together();
        let (question, asked) = oneshot::channel();
        let (answer, answered) = oneshot::channel();
        let rounds = Arc::new(AtomicUsize::new(0));
        let (ended, mut end) = oneshot::channel::<()>();
        streams.execute(async {
            answer.send(asked.await.expect("a question")).expect("somebody waits")
        });
        streams.execute(async { question.send(7).expect("somebody waits") });
        let connection = {
            let rounds = Arc::clone(&rounds);
            std::future::poll_fn(move |context| {
                rounds.fetch_add(1, Ordering::Relaxed);
                Pin::new(&mut end).poll(context).map(|_| ())
            })
        };
        let connection = tokio::spawn(streams.answer(connection));
        assert_eq!(answered.await, Ok(7));
        assert_eq!(
            rounds.load(Ordering::Relaxed),
            2,
            "one to take both in, one to send what both have answered"
        );
        drop(ended);
        connection.await.expect("no panic");
    }

    #[tokio::test]
    async fn one_connection_does_not_keep_the_thread_to_itself() {
        const ALL: usize = 1_000;
        let streams = Streams::together();
        let done = Arc::new(AtomicUsize::new(0));
        for _ in 0..ALL {
            let done = Arc::clone(&done);
            streams.execute(async move {
                done.fetch_add(1, Ordering::Relaxed);
            });
        }
        let connection = tokio::spawn(streams.answer(std::future::pending::<()>()));
        tokio::task::yield_now().await;
        let at_once = done.load(Ordering::Relaxed);
        assert!((1..ALL).contains(&at_once), "{at_once}");
        for _ in 0..ALL {
            tokio::task::yield_now().await;
        }
        assert_eq!(done.load(Ordering::Relaxed), ALL);
        connection.abort();
    }
}
