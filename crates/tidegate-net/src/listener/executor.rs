//! Executor for the streams of an HTTP/2 connection: one task per stream, or all inline on the
//! connection's task.
//!
//! Spawning a task costs more than a small response. With one task per stream, the connection is
//! also woken and flushed once per response; inline, many responses share one write.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use hyper::rt::Executor;
use tokio::task::coop::cooperative;

type StreamFuture = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Executor that hyper hands the streams of one connection to.
#[derive(Clone)]
pub(super) enum StreamExecutor {
    /// One task per stream.
    Spawn,
    /// All streams on the connection's task. Holds those that hyper added since the last poll.
    Inline(Arc<Mutex<Vec<StreamFuture>>>),
}

/// Connection that polls its own streams.
pub(super) struct InlineConnection<C> {
    connection: Pin<Box<C>>,
    executor: StreamExecutor,
    in_flight: FuturesUnordered<StreamFuture>,
}

impl StreamExecutor {
    pub(super) fn inline() -> Self {
        Self::Inline(Arc::default())
    }

    /// Drives a connection together with its inline streams.
    pub(super) fn drive<C: Future>(self, connection: C) -> InlineConnection<C> {
        InlineConnection {
            connection: Box::pin(connection),
            executor: self,
            in_flight: FuturesUnordered::new(),
        }
    }

    fn take_new_streams(&self) -> Vec<StreamFuture> {
        match self {
            Self::Spawn => Vec::new(),
            Self::Inline(streams) => std::mem::take(&mut *lock(streams)),
        }
    }
}

fn lock(streams: &Mutex<Vec<StreamFuture>>) -> MutexGuard<'_, Vec<StreamFuture>> {
    streams.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for StreamExecutor {
    fn execute(&self, stream: F) {
        match self {
            Self::Spawn => drop(tokio::spawn(stream)),
            // `cooperative` makes each stream count against the task's poll budget, so one busy
            // connection cannot monopolize its thread.
            Self::Inline(streams) => lock(streams).push(Box::pin(cooperative(stream))),
        }
    }
}

impl<C: Future> Future for InlineConnection<C> {
    type Output = C::Output;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<C::Output> {
        let Self { connection, executor, in_flight } = self.get_mut();
        loop {
            // Reads new requests and writes the responses of the previous round.
            if let Poll::Ready(output) = connection.as_mut().poll(context) {
                return Poll::Ready(output);
            }
            let new = executor.take_new_streams();
            let mut is_idle = new.is_empty();
            for mut stream in new {
                // A no-op waker is fine: `FuturesUnordered` polls pending streams again below.
                if stream.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending() {
                    in_flight.push(stream);
                }
            }
            while let Poll::Ready(Some(())) = in_flight.poll_next_unpin(context) {
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
    async fn dependent_streams_complete_in_one_round() {
        let executor = StreamExecutor::inline();
        let (request_sender, request) = oneshot::channel();
        let (response_sender, response) = oneshot::channel();
        let rounds = Arc::new(AtomicUsize::new(0));
        let (close_sender, mut close) = oneshot::channel::<()>();
        executor.execute(async {
            response_sender.send(request.await.expect("a request")).expect("a receiver");
        });
        executor.execute(async { request_sender.send(7).expect("a receiver") });
        let connection = {
            let rounds = Arc::clone(&rounds);
            std::future::poll_fn(move |context| {
                rounds.fetch_add(1, Ordering::Relaxed);
                Pin::new(&mut close).poll(context).map(|_| ())
            })
        };
        let connection = tokio::spawn(executor.drive(connection));
        assert_eq!(response.await, Ok(7));
        assert_eq!(
            rounds.load(Ordering::Relaxed),
            2,
            "one round to read both requests, one to write both responses"
        );
        drop(close_sender);
        connection.await.expect("no panic");
    }

    #[tokio::test]
    async fn busy_connection_yields_its_thread() {
        const ALL: usize = 1_000;
        let executor = StreamExecutor::inline();
        let done = Arc::new(AtomicUsize::new(0));
        for _ in 0..ALL {
            let done = Arc::clone(&done);
            executor.execute(async move {
                done.fetch_add(1, Ordering::Relaxed);
            });
        }
        let connection = tokio::spawn(executor.drive(std::future::pending::<()>()));
        tokio::task::yield_now().await;
        let first_round = done.load(Ordering::Relaxed);
        assert!((1..ALL).contains(&first_round), "{first_round}");
        for _ in 0..ALL {
            tokio::task::yield_now().await;
        }
        assert_eq!(done.load(Ordering::Relaxed), ALL);
        connection.abort();
    }
}
