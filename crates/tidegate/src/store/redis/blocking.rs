//! Blocking calls of stores that need a Tokio runtime.
//!
//! A call runs as a task on the runtime of the store, and the caller waits for its answer on a
//! channel. Unlike [`Handle::block_on`], this does not panic inside of a runtime, and it works with
//! a runtime of a single thread.

use std::future::Future;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::runtime::{self, Handle, RuntimeFlavor};

use super::BlockingStore;
use crate::resilience::{DenyCache, Fallback};
use crate::store::redis::RedisStore;
use crate::store::{SharedStore, StoreError};

/// Time that a call may take beyond the timeout of its store, for a machine that is busy.
const BUSY_TIMEOUT: Duration = Duration::from_secs(1);

/// Store whose calls run on a Tokio runtime.
pub(crate) trait OnRuntime {
    /// Returns the runtime in which the store was connected.
    fn runtime(&self) -> &Handle;

    /// Returns the timeout of a call.
    fn call_timeout(&self) -> Duration;
}

impl<S: SharedStore + OnRuntime> OnRuntime for DenyCache<S> {
    fn runtime(&self) -> &Handle {
        self.store().runtime()
    }

    fn call_timeout(&self) -> Duration {
        self.store().call_timeout()
    }
}

impl<S: SharedStore + OnRuntime> OnRuntime for Fallback<S> {
    fn runtime(&self) -> &Handle {
        self.store().runtime()
    }

    fn call_timeout(&self) -> Duration {
        self.store().call_timeout()
    }
}

macro_rules! blocking_on_runtime {
    ($([$($generics:tt)*] $store:ty;)*) => {$(
        impl<$($generics)*> BlockingStore for $store {
            fn block_on<T: Send + 'static>(
                &self,
                call: impl Future<Output = Result<T, StoreError>> + Send + 'static,
            ) -> Result<T, StoreError> {
                run_on(self.runtime(), self.call_timeout() + BUSY_TIMEOUT, call)?
            }
        }
    )*};
}

blocking_on_runtime! {
    [] RedisStore;
    [S: SharedStore + OnRuntime] DenyCache<S>;
    [S: SharedStore + OnRuntime] Fallback<S>;
}

/// Runs a future on a runtime and blocks this thread until it is done, at most for `timeout`.
pub(crate) fn run_on<T: Send + 'static>(
    runtime: &Handle,
    timeout: Duration,
    future: impl Future<Output = T> + Send + 'static,
) -> Result<T, StoreError> {
    let (sender, receiver) = sync_channel(1);
    let task = runtime.spawn(async move {
        // The caller may have stopped waiting.
        let _ = sender.send(future.await);
    });
    receiver.recv_timeout(timeout).map_err(|error| match error {
        RecvTimeoutError::Disconnected => {
            StoreError::Unreachable("the Tokio runtime of this store has ended".to_owned())
        }
        RecvTimeoutError::Timeout => {
            task.abort();
            let current = Handle::try_current().map(|current| current.runtime_flavor());
            if matches!(current, Ok(RuntimeFlavor::CurrentThread)) {
                let message = "a blocking call occupies the thread that its store runs on: use \
                               the async call there, or a store by connect_blocking";
                return StoreError::Misconfigured(message.to_owned());
            }
            StoreError::Timeout(timeout).answer_lost()
        }
    })
}

/// Returns the runtime of stores that were connected without one: a thread that lives as long as
/// this process.
pub(crate) fn background() -> Result<Handle, StoreError> {
    static BACKGROUND: Mutex<Option<Handle>> = Mutex::new(None);
    let mut started = BACKGROUND.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(runtime) = &*started {
        return Ok(runtime.clone());
    }
    let failed = |error: std::io::Error| {
        StoreError::Unreachable(format!("the background thread cannot start: {error}"))
    };
    let runtime = runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
    let handle = runtime.handle().clone();
    std::thread::Builder::new()
        .name("tidegate-redis".to_owned())
        .spawn(move || runtime.block_on(std::future::pending::<()>()))
        .map_err(failed)?;
    *started = Some(handle.clone());
    Ok(handle)
}
