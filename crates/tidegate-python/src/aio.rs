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
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Wake, Waker};

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::logs;
use crate::process::driver;

/// Creates the Python object of an answer, once Python may be called.
type Answer = Box<dyn FnOnce(Python<'_>) -> PyResult<Py<PyAny>> + Send>;

/// Answer for a future of asyncio.
struct Completion {
    call: u64,
    answer: Answer,
}

/// Calls of one event loop, and their answers.
#[pyclass(frozen, module = "tidegate._tidegate")]
pub(crate) struct Completions {
    queue: Arc<Queue>,
    /// Futures by the number of their call. They refer to the loop, which owns this object: the
    /// garbage collector has to see them, or a loop that ends with open calls is never freed.
    futures: Py<PyDict>,
    calls: AtomicU64,
}

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
    fn new(py: Python<'_>) -> PyResult<Self> {
        let (reader, writer) = UnixStream::pair()?;
        reader.set_nonblocking(true)?;
        writer.set_nonblocking(true)?;
        let (started, done) = (Mutex::default(), Mutex::default());
        let queue = Arc::new(Queue { started, done, reader, writer });
        Ok(Self { queue, futures: PyDict::new(py).unbind(), calls: AtomicU64::new(0) })
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.futures)
    }

    fn fileno(&self) -> i32 {
        self.queue.reader.as_raw_fd()
    }

    /// Starts the calls of this iteration: one wake-up of the runtime for all.
    fn submit(&self) -> PyResult<()> {
        let started = std::mem::take(&mut *lock(&self.queue.started));
        driver()?.handle().spawn(async {
            for call in started {
                tokio::spawn(call);
            }
        });
        Ok(())
    }

    /// Completes the futures whose answers have arrived.
    fn drain(&self, py: Python<'_>) -> PyResult<()> {
        let _ = (&self.queue.reader).read(&mut [0; 16]);
        let done = std::mem::take(&mut *lock(&self.queue.done));
        // An interrupt ends one of them; the others get their answers nevertheless.
        let mut result = Ok(());
        for completion in done {
            result = result.and(self.complete(py, completion));
        }
        logs::flush(py);
        result
    }
}

impl Completions {
    fn complete(&self, py: Python<'_>, completion: Completion) -> PyResult<()> {
        let pop = intern!(py, "pop");
        let future = self.futures.bind(py).call_method1(pop, (completion.call,))?;
        // Cancelled: what was charged stays charged.
        if future.call_method0(intern!(py, "done"))?.is_truthy()? {
            return Ok(());
        }
        match (completion.answer)(py) {
            Ok(answer) => future.call_method1(intern!(py, "set_result"), (answer,)),
            Err(error) => future.call_method1(intern!(py, "set_exception"), (error,)),
        }
        .map(drop)
    }

    /// Returns the number of the call that completes `future`.
    fn add(&self, future: &Bound<'_, PyAny>) -> PyResult<u64> {
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        self.futures.bind(future.py()).set_item(call, future)?;
        Ok(call)
    }

    /// Adds a call that the next [`submit`](Self::submit) starts; its answer completes `future`.
    /// Returns whether it is the first.
    pub(crate) fn start<T: Send + 'static>(
        &self,
        future: &Bound<'_, PyAny>,
        call: impl Future<Output = T> + Send + 'static,
        to_python: impl FnOnce(Python<'_>, T) -> PyResult<Py<PyAny>> + Send + 'static,
    ) -> PyResult<bool> {
        let (queue, attached) = (Arc::clone(&self.queue), driver()?.attach());
        let number = self.add(future)?;
        let call = async move {
            let answer = call.await;
            drop(attached);
            queue.push(Completion { call: number, answer: Box::new(|py| to_python(py, answer)) });
        };
        let mut started = lock(&self.queue.started);
        started.push(call.boxed());
        Ok(started.len() == 1)
    }

    /// Returns a waker that completes `future` when it is woken or dropped.
    pub(crate) fn waker(&self, future: &Bound<'_, PyAny>) -> PyResult<Waker> {
        let (queue, call) = (Arc::clone(&self.queue), Mutex::new(Some(self.add(future)?)));
        Ok(Waker::from(Arc::new(FutureWaker { queue, call })))
    }
}

struct FutureWaker {
    queue: Arc<Queue>,
    call: Mutex<Option<u64>>,
}

impl FutureWaker {
    fn complete(&self) {
        if let Some(call) = lock(&self.call).take() {
            self.queue.push(Completion { call, answer: Box::new(|py| Ok(py.None())) });
        }
    }
}

impl Wake for FutureWaker {
    fn wake(self: Arc<Self>) {
        self.complete();
    }
}

impl Drop for FutureWaker {
    fn drop(&mut self) {
        self.complete();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
