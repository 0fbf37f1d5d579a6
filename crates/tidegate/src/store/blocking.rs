//! [`BlockingStore`]: a store that can be called without `async`.

use std::future::Future;

use super::memory::MemoryStore;
use super::{Store, StoreError};

/// Store that can be called without `async`, by
/// [`Limiter::blocking`](crate::Limiter::blocking): a [`MemoryStore`], a
/// `RedisStore`, and a `RedisStore` inside a `DenyCache` and a `Fallback`.
pub trait BlockingStore: Store + Sized {
    /// Runs a call whose answer is [pending](super::Outcome::Pending), and blocks the thread
    /// until the answer.
    fn block_on<T: Send + 'static>(
        &self,
        call: impl Future<Output = Result<T, StoreError>> + Send + 'static,
    ) -> Result<T, StoreError>;
}

impl BlockingStore for MemoryStore {
    fn block_on<T: Send + 'static>(
        &self,
        _call: impl Future<Output = Result<T, StoreError>> + Send + 'static,
    ) -> Result<T, StoreError> {
        Err(StoreError::Misconfigured("memory answers without waiting".to_owned()))
    }
}
