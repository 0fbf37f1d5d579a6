//! Calls whose answer wakes an event loop of asyncio.
//!
//! A thread of the runtime that called Python would wait for the GIL. So it only queues the answer
//! and, if the queue was empty, writes a byte to a socket that the loop reads: one wake-up for all
//! answers that arrive until the loop runs. For the same reason calls start together, once in each
//! iteration of the loop.

use std::future::Future;
use std::io::{Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Wake, Waker};

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use pyo3::intern;
use pyo3::prelude::*;

use crate::logs;
use crate::process::driver;

/// Creates the Python object of an answer, once Python may be called.
type Answer = Box<dyn FnOnce(Python<'_>) -> PyResult<Py<PyAny>> + Send>;

/// Answer for a future of asyncio.
struct Completion {
    future: Py<PyAny>,
    answer: Answer,
}

/// Answers for the futures of one event loop.
#[pyclass(frozen, module = "tidegate._tidegate")]
pub(crate) struct Completions(Arc<Queue>);

struct Queue {
    /// Calls of this iteration of the loop.
    started: Mutex<Vec<BoxFuture<'static, ()>>>,
    done: Mutex<Vec<Completion>>,
    reader: UnixStream,
    writer: UnixStream,
}

impl Queue {
    fn push(&self, completion: Completion) {
        let mut done = lock(&self.done);
        done.push(completion);
        if done.len() == 1 {
            // The socket has room: the loop reads it before the queue is empty again.
            let _ = (&self.writer).write(&[1]);
        }
    }
}

#[pymethods]
impl Completions {
    #[new]
    fn new() -> PyResult<Self> {
        let (reader, writer) = UnixStream::pair()?;
        reader.set_nonblocking(true)?;
        writer.set_nonblocking(true)?;
        Ok(Self(Arc::new(Queue {
            started: Mutex::default(),
            done: Mutex::default(),
            reader,
            writer,
        })))
    }

    fn fileno(&self) -> i32 {
        self.0.reader.as_raw_fd()
    }

    /// Starts the calls of this iteration: one wake-up of the runtime for all.
    fn submit(&self) -> PyResult<()> {
        let started = std::mem::take(&mut *lock(&self.0.started));
        driver()?.handle().spawn(async {
            for call in started {
                tokio::spawn(call);
            }
        });
        Ok(())
    }

    /// Completes the futures whose answers have arrived.
    fn drain(&self, py: Python<'_>) -> PyResult<()> {
        let _ = (&self.0.reader).read(&mut [0; 16]);
        let done = std::mem::take(&mut *lock(&self.0.done));
        for Completion { future, answer } in done {
            let future = future.bind(py);
            // Cancelled: what was charged stays charged.
            if future.call_method0(intern!(py, "done"))?.is_truthy()? {
                continue;
            }
            match answer(py) {
                Ok(answer) => future.call_method1(intern!(py, "set_result"), (answer,))?,
                Err(error) => future.call_method1(intern!(py, "set_exception"), (error,))?,
            };
        }
        logs::flush(py)
    }
}

impl Completions {
    /// Adds a call that the next [`submit`](Self::submit) starts; its answer completes `future`.
    /// Returns whether it is the first.
    pub(crate) fn start<T: Send + 'static>(
        &self,
        future: Py<PyAny>,
        call: impl Future<Output = T> + Send + 'static,
        to_python: impl FnOnce(Python<'_>, T) -> PyResult<Py<PyAny>> + Send + 'static,
    ) -> PyResult<bool> {
        let (queue, attached) = (Arc::clone(&self.0), driver()?.attach());
        let call = async move {
            let answer = call.await;
            drop(attached);
            queue.push(Completion { future, answer: Box::new(|py| to_python(py, answer)) });
        };
        let mut started = lock(&self.0.started);
        started.push(call.boxed());
        Ok(started.len() == 1)
    }

    /// Returns a waker that completes `future`.
    pub(crate) fn waker(&self, future: Py<PyAny>) -> Waker {
        Waker::from(Arc::new(FutureWaker {
            queue: Arc::clone(&self.0),
            future: Mutex::new(Some(future)),
        }))
    }
}

struct FutureWaker {
    queue: Arc<Queue>,
    future: Mutex<Option<Py<PyAny>>>,
}

impl Wake for FutureWaker {
    fn wake(self: Arc<Self>) {
        let future = lock(&self.future).take();
        if let Some(future) = future {
            self.queue.push(Completion { future, answer: Box::new(|py| Ok(py.None())) });
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
