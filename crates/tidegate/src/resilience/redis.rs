//! Redis with a deny cache and a fallback, in one call.

use std::future::Future;

use super::{DenyCache, Fallback};
use crate::store::redis::{Builder, RedisStore, run_in_background};
use crate::store::{BlockingStore, SharedStore, StoreError};

/// Redis with a deny cache and a fallback; see [`RedisStore::resilient`].
pub type ResilientRedis = Fallback<DenyCache<RedisStore>>;

impl RedisStore {
    /// Returns a store for production: Redis at this URL, with a [`DenyCache`] and a [`Fallback`],
    /// both with their defaults.
    ///
    /// * If Redis is down at the start, this waits for it, two seconds at most, and the store
    ///   connects as soon as it is up. Until then, and during any later outage, the failure policy of each charge decides: by default this
    ///   process's share of the limit.
    /// * A denied client that keeps retrying is answered without a call.
    ///
    /// ```no_run
    /// use std::time::Duration;
    /// use tidegate::{Charge, Limiter, Quota, RedisStore};
    ///
    /// # async fn decide() -> Result<(), Box<dyn std::error::Error>> {
    /// let limiter = Limiter::new(RedisStore::resilient("redis://127.0.0.1:6379").await?);
    /// let quota = Quota::sliding_log(100, Duration::from_secs(60))?;
    /// let decision = limiter.acquire(&Charge::new("user123", &quota)).await?;
    /// println!("{} of {} left, by {:?}", decision.remaining, decision.limit, decision.source);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// [`Builder::resilient`] is the same for a cluster, for sentinels and with other options.
    ///
    /// # Errors
    ///
    /// [`StoreError::Misconfigured`] if the URL is invalid.
    ///
    /// # Panics
    ///
    /// Panics outside of a Tokio runtime.
    pub async fn resilient(url: &str) -> Result<ResilientRedis, StoreError> {
        Self::builder(url).resilient().await
    }
}

impl Builder {
    /// Connects, and adds a [`DenyCache`] and a [`Fallback`]; see [`RedisStore::resilient`].
    ///
    /// ```no_run
    /// use tidegate::{Limiter, RedisStore};
    ///
    /// # async fn connect() -> Result<(), tidegate::StoreError> {
    /// let nodes = ["redis://10.0.0.1:6379", "redis://10.0.0.2:6379"];
    /// let limiter = Limiter::new(RedisStore::cluster(nodes).prefix("api").resilient().await?);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`StoreError::Misconfigured`] if an option is invalid.
    ///
    /// # Panics
    ///
    /// Panics outside of a Tokio runtime.
    pub async fn resilient(self) -> Result<ResilientRedis, StoreError> {
        let store = match self.clone().connect().await {
            Err(error @ StoreError::Misconfigured(_)) => return Err(error),
            Err(error) => {
                tracing::warn!(%error, "Redis is unavailable, deciding locally until it recovers");
                self.connect_in_background()?
            }
            Ok(store) => store,
        };
        Ok(Fallback::new(DenyCache::new(store)))
    }

    /// Connects in a program without a Tokio runtime, and adds a [`DenyCache`] and a [`Fallback`];
    /// see [`RedisStore::resilient`].
    ///
    /// ```no_run
    /// use tidegate::{Limiter, RedisStore};
    ///
    /// # fn main() -> Result<(), tidegate::StoreError> {
    /// let redis = RedisStore::builder("redis://127.0.0.1:6379").resilient_blocking()?;
    /// let limiter = Limiter::new(redis);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`StoreError::Misconfigured`] if an option is invalid.
    pub fn resilient_blocking(self) -> Result<ResilientRedis, StoreError> {
        run_in_background(self.resilient())
    }
}

impl<S: SharedStore + BlockingStore> BlockingStore for DenyCache<S> {
    fn block_on<T: Send + 'static>(
        &self,
        call: impl Future<Output = Result<T, StoreError>> + Send + 'static,
    ) -> Result<T, StoreError> {
        self.store().block_on(call)
    }
}

impl<S: SharedStore + BlockingStore> BlockingStore for Fallback<S> {
    fn block_on<T: Send + 'static>(
        &self,
        call: impl Future<Output = Result<T, StoreError>> + Send + 'static,
    ) -> Result<T, StoreError> {
        self.store().block_on(call)
    }
}
