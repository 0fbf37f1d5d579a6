//! What belongs to one process: the runtime, and the stores with their sockets.
//!
//! A fork copies memory and file descriptors, but no threads. The child must not touch what it got
//! from its parent: a lock may be held by a thread that does not exist there, and a socket that it
//! removes from the shared epoll is removed in the parent, too. So it leaks all that, and creates
//! its own at the first use.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arc_swap::ArcSwapOption;
use pyo3::prelude::*;
use tokio::runtime::{Builder, Handle, Runtime};

/// Number of forks between the first process and this one.
static FORKS: AtomicU64 = AtomicU64::new(0);

/// Called by Python in the child of a fork.
#[pyfunction]
pub(crate) fn _after_fork() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

fn process() -> u64 {
    FORKS.load(Ordering::Relaxed)
}

/// Value that each process creates for itself.
pub(crate) struct PerProcess<T>(ArcSwapOption<Owned<T>>);

struct Owned<T> {
    process: u64,
    value: Arc<T>,
}

impl<T> PerProcess<T> {
    pub(crate) const fn new() -> Self {
        Self(ArcSwapOption::const_empty())
    }

    /// Returns the value of this process, and creates it first if there is none.
    pub(crate) fn get(&self, create: impl FnOnce() -> PyResult<T>) -> PyResult<Arc<T>> {
        let process = process();
        let current = self.0.load();
        if let Some(owned) = current.as_ref().filter(|owned| owned.process == process) {
            return Ok(Arc::clone(&owned.value));
        }
        let created = Arc::new(Owned { process, value: Arc::new(create()?) });
        let previous = self.0.compare_and_swap(&*current, Some(Arc::clone(&created)));
        match &*previous {
            // Another thread was faster.
            Some(owned) if owned.process == process => Ok(Arc::clone(&owned.value)),
            parents => {
                std::mem::forget(parents.clone());
                Ok(Arc::clone(&created.value))
            }
        }
    }
}

impl<T> Drop for PerProcess<T> {
    fn drop(&mut self) {
        let current = self.0.load_full();
        if current.as_ref().is_some_and(|owned| owned.process != process()) {
            std::mem::forget(current);
        }
    }
}

/// Returns the runtime of this process: one thread, which never calls Python.
pub(crate) fn runtime() -> PyResult<Handle> {
    static RUNTIME: PerProcess<Runtime> = PerProcess::new();
    let runtime = RUNTIME.get(|| {
        let builder = &mut Builder::new_multi_thread();
        Ok(builder.worker_threads(1).thread_name("tidegate").enable_all().build()?)
    })?;
    Ok(runtime.handle().clone())
}
