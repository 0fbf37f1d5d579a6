//! Blocking calls of a [`RedisStore`], which needs a Tokio runtime.
//!
//! A call runs as a task on the runtime of the store, and the caller waits for its answer on a
//! channel. Unlike [`Handle::block_on`], this does not panic inside of a runtime, and it works with
//! a runtime of a single thread.

use std::future::Future;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::runtime::{self, Handle, RuntimeFlavor};

use super::{Builder, RedisStore};
use crate::store::{BlockingStore, StoreError};

/// Time that a call may take beyond the timeout of its store, for a machine that is busy.
const BUSY_TIMEOUT: Duration = Duration::from_secs(1);
/// Time limit of a blocking connect. [`Builder::connect`] itself takes two seconds at most.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

impl RedisStore {
    /// Connects to the server at this URL in a program without a Tokio runtime, for the calls of
    /// [`Limiter::blocking`](crate::Limiter::blocking).
    ///
    /// The connection is served by a thread of its own, which all such stores of the process share.
    ///
    /// ```no_run
    /// use std::time::Duration;
    /// use tidegate::{Charge, Limiter, Quota, RedisStore};
    ///
    /// fn main() -> Result<(), Box<dyn std::error::Error>> {
    ///     let limiter = Limiter::new(RedisStore::connect_blocking("redis://127.0.0.1:6379")?);
    ///     let quota = Quota::token_bucket(10, Duration::from_secs(1))?;
    ///     let decision = limiter.blocking().acquire(&Charge::new("job", &quota))?;
    ///     println!("allowed: {}", decision.allowed);
    ///     Ok(())
    /// }
    /// ```
    pub fn connect_blocking(url: &str) -> Result<Self, StoreError> {
        Self::builder(url).connect_blocking()
    }
}

impl Builder {
    /// Connects in a program without a Tokio runtime; see [`RedisStore::connect_blocking`].
    ///
    /// # Errors
    ///
    /// Those of [`connect`](Self::connect).
    pub fn connect_blocking(self) -> Result<RedisStore, StoreError> {
        run_in_background(self.connect())
    }
}

impl BlockingStore for RedisStore {
    fn block_on<T: Send + 'static>(
        &self,
        call: impl Future<Output = Result<T, StoreError>> + Send + 'static,
    ) -> Result<T, StoreError> {
        run_on(&self.dispatcher.runtime, self.dispatcher.timeout + BUSY_TIMEOUT, call)?
    }
}

/// Runs a future on a runtime and blocks this thread until it is done, at most for `timeout`.
fn run_on<T: Send + 'static>(
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

/// Connects a store in a program without a Tokio runtime.
pub(crate) fn run_in_background<T: Send + 'static>(
    connect: impl Future<Output = Result<T, StoreError>> + Send + 'static,
) -> Result<T, StoreError> {
    run_on(&background()?, CONNECT_TIMEOUT, connect)?
}

/// Returns the runtime of stores that were connected without one: a thread that lives as long as
/// this process.
fn background() -> Result<Handle, StoreError> {
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
