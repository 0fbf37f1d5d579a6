//! Wrappers that keep a service working while its store is slow, unreachable or under attack.
//!
//! * [`Fallback`] decides while the store cannot: by this instance's share of the limit in memory,
//!   or by failing open or closed. Units that it admits are charged to the store afterwards.
//! * [`DenyCache`] repeats a denial for as long as it surely holds, so that a denied client that
//!   keeps retrying costs the store no calls.
//! * [`Fleet`] tracks the instances that share the store, so that their shares add up to the limit.
//! * [`Breaker`] stops calling a store of your own that fails. A `RedisStore` needs none: each of
//!   its nodes has a circuit.
//!
//! Fallback and deny cache are a [`Store`](crate::Store) around a
//! [`SharedStore`](crate::SharedStore) and can be nested:
//!
//! ```no_run
//! use tidegate::{DenyCache, Fallback, Limiter, RedisStore};
//!
//! # async fn connect() -> Result<(), tidegate::StoreError> {
//! let redis = RedisStore::connect("redis://127.0.0.1:6379").await?;
//! let limiter = Limiter::new(Fallback::new(DenyCache::new(redis)));
//! // The same in one call, which also starts while Redis is down:
//! let limiter = Limiter::new(RedisStore::resilient("redis://127.0.0.1:6379").await?);
//! # Ok(())
//! # }
//! ```
//!
//! Around a store with a timeout, no decision takes longer than that timeout. A fleet that is cut
//! off from its store admits at most the limit per window. In the window in which the store fails,
//! it also admits at most the limit on top of the units that the store has admitted before.

pub mod breaker;
pub mod deny_cache;
pub mod fallback;
pub mod fleet;
#[cfg(feature = "redis")]
mod redis;

pub use crate::store::circuit::CircuitState;
pub use breaker::Breaker;
pub use deny_cache::DenyCache;
pub use fallback::Fallback;
pub use fleet::Fleet;
#[cfg(feature = "redis")]
pub use redis::ResilientRedis;
