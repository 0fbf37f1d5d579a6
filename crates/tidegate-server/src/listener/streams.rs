//! Where the streams of an HTTP/2 connection are answered.

use std::task::{Context, Waker};

use hyper::rt::Executor;

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
        let mut stream = Box::pin(stream);
        // Nobody needs to be woken: what is not there yet is asked again by its own task.
        if stream.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending() {
            tokio::spawn(stream);
        }
    }
}
