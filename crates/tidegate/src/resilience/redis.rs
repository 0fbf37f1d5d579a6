//! Stores in one call: with a deny cache and a fallback, and for programs without a runtime.

use std::time::Duration;

use super::{Builder, RedisStore};
use crate::limiter::runtime::{background, run_on};
use crate::resilience::{DenyCache, Fallback};
use crate::store::StoreError;

/// Time limit of a blocking connect. [`Builder::connect`] itself takes two seconds at most.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

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

    /// Connects in a program without a Tokio runtime; see [`RedisStore::connect_blocking`].
    ///
    /// # Errors
    ///
    /// Those of [`connect`](Self::connect).
    pub fn connect_blocking(self) -> Result<RedisStore, StoreError> {
        run_on(&background()?, CONNECT_TIMEOUT, self.connect())?
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
        run_on(&background()?, CONNECT_TIMEOUT, self.resilient())?
    }
}
