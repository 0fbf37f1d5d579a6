//! When the store is slow, gone or under attack: each of these is a [`Store`](crate::Store) around
//! a store, or serves one.
//!
//! * [`Breaker`] stops asking a store that fails, and looks by itself when it is back.
//! * [`Fallback`] answers in the store's place: by this instance's share in memory, by letting
//!   pass, or by denying. What it admits is charged to the store afterwards.
//! * [`DenyCache`] answers a denial again, for as long as it holds, so that who hammers costs the
//!   store nothing.
//! * [`Fleet`] knows how many instances share the store, so that the shares of all add up to the
//!   limit.
//!
//! ```no_run
//! use tidegate::{Breaker, DenyCache, Fallback, Limiter, RedisStore};
//!
//! # async fn connect() -> Result<(), tidegate::StoreError> {
//! let redis = RedisStore::connect("redis://127.0.0.1:6379").await?;
//! let limiter = Limiter::new(Fallback::new(DenyCache::new(Breaker::new(redis))));
//! # Ok(())
//! # }
//! ```
//!
//! Around a store with a deadline, an answer is never later than that. A fleet cut off from its
//! store admits at most the limit in a window; in the window in which the store fails, what the
//! store had admitted comes on top.

use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

pub mod breaker;
pub mod deny_cache;
pub mod fallback;
pub mod fleet;

pub use breaker::Breaker;
pub use deny_cache::DenyCache;
pub use fallback::Fallback;
pub use fleet::Fleet;

/// Good enough for names and jitter: each state is seeded from the system's randomness.
pub(crate) fn random() -> u64 {
    RandomState::new().hash_one(0_u8)
}

/// From half the duration to one and a half: many instances must not come all at once.
pub(crate) fn jittered(duration: Duration) -> Duration {
    let [byte, ..] = random().to_le_bytes();
    duration / 2 + duration * u32::from(byte) / 256
}
