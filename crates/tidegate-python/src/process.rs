//! Values of one process: the runtime, and the stores with their sockets.
//!
//! A fork copies memory and file descriptors, but no threads. The child must not touch what it got
//! from its parent: a lock may be held by a thread that does not exist there, and a socket that it
//! removes from the shared epoll is removed in the parent, too. So it leaks all that, and creates
//! its own at the first use.

use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Waker};
use std::thread::Thread;
use std::time::Duration;

use arc_swap::ArcSwapOption;
use pyo3::prelude::*;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::Notify;

/// Value that each process creates for itself.
pub(crate) struct PerProcess<T>(ArcSwapOption<Owned<T>>);

struct Owned<T> {
    process: u32,
    value: Arc<T>,
}

impl<T> PerProcess<T> {
    pub(crate) const fn new() -> Self {
        Self(ArcSwapOption::const_empty())
    }

    /// Returns the value of this process, and creates it at the first call.
    pub(crate) fn get(&self, create: impl FnOnce() -> PyResult<T>) -> PyResult<Arc<T>> {
        let process = std::process::id();
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
        if current.as_ref().is_some_and(|owned| owned.process != std::process::id()) {
            std::mem::forget(current);
        }
    }
}

/// Runtime of this process. A blocking call drives it on the thread of its caller, so that the answer
/// of Redis needs no other thread. In between, and for asyncio, a thread of its own does.
pub(crate) struct Driver {
    runtime: Runtime,
    /// Number of blocking calls so far.
    blocking: AtomicU64,
    /// Number of calls that no caller drives.
    detached: AtomicU64,
    /// Asks the thread to leave the runtime to a caller.
    hand_over: Notify,
    thread: OnceLock<Thread>,
}

/// Time without blocking calls after which the thread drives the runtime again.
const DRIVE_AFTER: Duration = Duration::from_millis(10);

/// Returns the runtime of this process.
pub(crate) fn driver() -> PyResult<Arc<Driver>> {
    static DRIVER: PerProcess<Driver> = PerProcess::new();
    let driver = DRIVER.get(|| {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let (blocking, detached) = (AtomicU64::new(0), AtomicU64::new(0));
        let hand_over = Notify::new();
        Ok(Driver { runtime, blocking, detached, hand_over, thread: OnceLock::new() })
    })?;
    if driver.thread.get().is_none() {
        let background = Arc::clone(&driver);
        let thread = std::thread::Builder::new().name("tidegate".to_owned());
        let thread = thread.spawn(move || background.drive())?;
        let _ = driver.thread.set(thread.thread().clone());
    }
    Ok(driver)
}

impl Driver {
    pub(crate) fn handle(&self) -> &Handle {
        self.runtime.handle()
    }

    /// Runs a call on this thread. The GIL is not held.
    pub(crate) fn block_on<T>(&self, call: impl Future<Output = T>) -> T {
        let mut call = pin!(call);
        {
            // An answer that is there needs no driver: a process that answers from its caches must
            // not keep the thread from its work, or they would never be renewed.
            let _entered = self.runtime.enter();
            if let Poll::Ready(answer) = call.as_mut().poll(&mut Context::from_waker(Waker::noop()))
            {
                return answer;
            }
        }
        self.blocking.fetch_add(1, Ordering::Relaxed);
        self.hand_over.notify_waiters();
        self.runtime.block_on(call)
    }

    /// Starts to drive the runtime for calls that no thread waits for.
    pub(crate) fn attach(self: &Arc<Self>) -> Attached {
        if self.detached.fetch_add(1, Ordering::SeqCst) == 0
            && let Some(thread) = self.thread.get()
        {
            thread.unpark();
        }
        Attached(Arc::clone(self))
    }

    fn drive(&self) {
        loop {
            self.runtime.block_on(self.hand_over.notified());
            let mut before = u64::MAX;
            while self.detached.load(Ordering::SeqCst) == 0 {
                let calls = self.blocking.load(Ordering::Relaxed);
                if calls == before {
                    break;
                }
                before = calls;
                std::thread::park_timeout(DRIVE_AFTER);
            }
        }
    }
}

/// Keeps the runtime driven while it exists.
pub(crate) struct Attached(Arc<Driver>);

impl Attached {
    pub(crate) fn handle(&self) -> &Handle {
        self.0.handle()
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        self.0.detached.fetch_sub(1, Ordering::SeqCst);
    }
}
