//! Tidegate decides, exactly and fast, whether a request may pass now: inside one process, or
//! shared by a whole fleet through Redis.
//!
//! ```
//! use std::time::Duration;
//! use tidegate::{Charge, Limiter, MemoryStore, Quota};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let limiter = Limiter::new(MemoryStore::new());
//! let quota = Quota::sliding_log(100, Duration::from_secs(60))?;
//!
//! let decision = limiter.acquire(&Charge::new("user123", &quota)).await?;
//! assert!(decision.allowed);
//! assert_eq!(decision.remaining, 99);
//! # Ok(())
//! # }
//! ```
//!
//! A denial is an answer, `Ok(Decision)`, never an error: an error means that nobody could decide.
//!
//! # The path of a request
//!
//! The modules below stand in the order in which a request meets them: a [`Quota`] (an algorithm
//! with its numbers), a key (whose count it is) and a cost make a [`Charge`]; a [`Limiter`] checks
//! it and hands it to a [`Store`], which applies the [`Algorithm`] and answers with a [`Decision`].
//!
//! # Which store
//!
//! * [`MemoryStore`]: one process. Needs no runtime: [`Limiter::blocking`] has the same calls
//!   without `async`.
//! * `RedisStore` (feature `redis`): all processes that share one Redis share the counts, by atomic
//!   Lua scripts.
//! * `Breaker` and `Fallback` (feature `resilience`) around a store that may fail: nobody waits for
//!   it, and decisions come from this process's share until it is back. `DenyCache`: a denial is
//!   not asked for twice.
//!
//! # In front of a service
//!
//! The feature `tower` has a layer for axum, tonic, hyper and whatever else speaks Tower: see the
//! module `tower`.
//!
//! # Time in tests
//!
//! [`ManualClock`] moves only when a test moves it, so no test has to sleep:
//!
//! ```
//! use std::time::Duration;
//! use tidegate::{Charge, Limiter, ManualClock, MemoryStore, Quota};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let clock = ManualClock::new();
//! let limiter = Limiter::new(MemoryStore::builder().clock(clock.clone()).build());
//! let quota = Quota::fixed_window(1, Duration::from_secs(1))?;
//! let charge = Charge::new("user123", &quota);
//!
//! assert!(limiter.blocking().acquire(&charge)?.allowed);
//! let denied = limiter.blocking().acquire(&charge)?;
//! assert!(!denied.allowed);
//! clock.advance(denied.retry_after);
//! assert!(limiter.blocking().acquire(&charge)?.allowed);
//! # Ok(())
//! # }
//! ```

// The path of a request. First the client and the limits that apply:
mod client_ip;

mod policy;

#[cfg(feature = "config")]
pub mod config;

// The query:
mod quota;

mod key;

mod action;
mod charge;

// The limiter, its stores and the algorithms:
mod limiter;

pub mod store;

#[cfg(feature = "resilience")]
pub mod resilience;

mod algorithm;

// The answer:
mod decision;

pub mod headers;

// In front of a service, all of it in one:
#[cfg(feature = "tower")]
pub mod layer;

// Beside the path:
mod clock;
mod enum_names;
#[cfg(feature = "resilience")]
mod random;
#[cfg(feature = "testing")]
pub mod testing;

/// The README's examples compile and run.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;

pub use algorithm::{Algorithm, Encoding};
pub use charge::{Charge, ChargeError, MAX_CHARGES};
pub use client_ip::{ClientIp, Ipv6PrefixError, Resolved};
pub use clock::{Clock, ManualClock, SystemClock, Timestamp};
pub use decision::{Decision, Decisions, Denied, Source};
pub use enum_names::UnknownName;
pub use key::{Key, KeyError, MAX_KEY_BYTES};
pub use limiter::{Blocking, Error, Limiter};
pub use policy::{
    AttributeError, Attributes, Cost, DEFAULT_QUERY_TIMEOUT, Enforcement, KeySource, MissingKey,
    Mode, Observer, OnStoreFailure, Policies, Policy, PolicyBuilder, PolicyDecision,
    PolicyDecisions, PolicyError, PolicyLimiter, PreparedCharge, Query, SelectError, Selected,
    Selection, TRACE_TARGET, normalize_host, normalize_path,
};
pub use quota::{Quota, QuotaError};
#[cfg(feature = "resilience")]
pub use resilience::{Breaker, DenyCache, Fallback, Fleet};
pub use store::memory::MemoryStore;
#[cfg(feature = "redis")]
pub use store::redis::RedisStore;
pub use store::{Action, ShardId, SharedStore, Store, StoreError};
