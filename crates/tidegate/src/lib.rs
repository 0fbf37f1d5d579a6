//! Tidegate is a rate limiter: it decides, exactly and fast, whether a request may pass now. Counts
//! are kept inside one process, or shared by a whole fleet through Redis.
//!
//! # Quick start
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
//! if decision.allowed {
//!     println!("{} of {} left", decision.remaining, decision.limit);
//! } else {
//!     println!("denied, retry after {:?}", decision.retry_after);
//! }
//! # assert_eq!(decision.remaining, 99);
//! # Ok(())
//! # }
//! ```
//!
//! A denial is an answer, `Ok(Decision)`. An `Err` means that the request could not be decided: the
//! charge is invalid, or the store failed.
//!
//! # The path of a request
//!
//! | step | types | modules | question |
//! | --- | --- | --- | --- |
//! | 1 | [`Attributes`], [`ClientIp`] | `client_ip`, `layer` | Which client, which path? |
//! | 2 | [`Policies`] | `policy`, `config` | Which limits apply? |
//! | 3 | [`Quota`], [`Key`], [`Charge`] | `quota`, `key`, `charge` | Whose count, how many units? |
//! | 4 | [`Limiter`] | `limiter` | Is the charge valid? |
//! | 5 | [`Store`], [`Algorithm`] | [`store`], `resilience`, `algorithm` | Does it fit? |
//! | 6 | [`Decision`] | `decision`, [`headers`] | May the request pass, or when? |
//!
//! A program that knows its keys and quotas starts at step 3, as in the example above. A
//! [`PolicyLimiter`] does all steps for requests with attributes, and `layer::RateLimitLayer`
//! (feature `tower`) for HTTP requests.
//!
//! # Choosing an algorithm
//!
//! [`Quota::sliding_log`] is exact, and a good default for limits of up to some thousand requests.
//! [`Quota::token_bucket`] allows bursts above a constant rate and takes constant memory.
//! [`Quota::leaky_bucket`] delays requests instead of denying them. [`Quota`] compares all five.
//!
//! # Choosing a store
//!
//! * [`MemoryStore`] is for one process. It needs no runtime: [`Limiter::blocking`] has the same
//!   calls without `async`, which also work on Redis.
//! * `RedisStore` (feature `redis`) is for a fleet: all processes on one Redis, cluster or
//!   sentinel-monitored primary share the counts, by atomic Lua scripts.
//! * Your own [`Store`], checked by the conformance suite of the module `testing` (feature
//!   `testing`).
//!
//! A store that can fail belongs inside the wrappers of the module `resilience` (a feature, too).
//! `Fallback` decides by this process's share of the limit until the store has recovered, and
//! `DenyCache` answers denied clients without a call; `Breaker` is for a store of your own:
//!
//! ```no_run
//! use tidegate::{DenyCache, Fallback, Limiter, RedisStore};
//!
//! # async fn connect() -> Result<(), tidegate::StoreError> {
//! let limiter = Limiter::new(RedisStore::resilient("redis://127.0.0.1:6379").await?);
//!
//! // The same, with options of its own:
//! let redis = RedisStore::connect("redis://127.0.0.1:6379").await?;
//! let limiter = Limiter::new(Fallback::new(DenyCache::new(redis)));
//! # Ok(())
//! # }
//! ```
//!
//! # Policies
//!
//! A [`Policy`] is a named limit on some requests: its conditions, its key and its quota. A
//! [`PolicyLimiter`] selects the policies that apply to a request and decides them all or nothing,
//! so a request that one policy denies takes no units of the others. Policies are built in code, or
//! loaded from a YAML file by the crate `tidegate-config`.
//!
//! ```
//! use std::collections::BTreeMap;
//! use std::time::Duration;
//! use tidegate::{Limiter, MemoryStore, Policies, Policy, PolicyLimiter, Query, Quota};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let minute = Duration::from_secs(60);
//! let login = Policy::builder("login", Quota::sliding_log(5, minute)?)
//!     .matches("path", ["/login"])
//!     .key(["ip"])
//!     .build()?;
//! let total = Policy::builder("total", Quota::token_bucket(10_000, minute)?).build()?;
//! let policies = Policies::new(vec![login, total])?;
//! let limiter = PolicyLimiter::new(Limiter::new(MemoryStore::new()), policies);
//!
//! let request = [("path", "/login"), ("ip", "203.0.113.9")];
//! let request = BTreeMap::from(request.map(|(name, value)| (name.into(), value.into())));
//! let decisions = limiter.acquire(Query::attributes(&request)).await?;
//! assert!(decisions.is_allowed());
//! assert_eq!(decisions.binding().map(|entry| entry.policy()), Some("login"));
//! # Ok(())
//! # }
//! ```
//!
//! # In front of a service
//!
//! The module `layer` (feature `tower`) has a layer for axum, tonic, hyper and any other Tower
//! service. It answers denied requests with 429, or `RESOURCE_EXHAUSTED` in gRPC, and adds the
//! `RateLimit` headers to all responses:
//!
//! ```
//! # use std::time::Duration;
//! use axum::{Router, routing::get};
//! use tidegate::layer::RateLimitLayer;
//! use tidegate::{KeySource, Limiter, MemoryStore, Quota};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let quota = Quota::sliding_log(100, Duration::from_secs(60))?;
//! let layer = RateLimitLayer::new(Limiter::new(MemoryStore::new()), quota)
//!     .by(KeySource::header("x-user-id")?);
//! let app: Router = Router::new().route("/", get(async || "hello")).layer(layer);
//! # let _ = app;
//! # Ok(())
//! # }
//! ```
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
//!
//! # Features
//!
//! No feature is enabled by default.
//!
//! | feature | adds |
//! | --- | --- |
//! | `redis` | `RedisStore` and the module `store::redis`; implies `resilience` |
//! | `resilience` | `Breaker`, `DenyCache`, `Fallback` and `Fleet` |
//! | `tower` | the module `layer`: a Tower layer for HTTP and gRPC services |
//! | `schema` | the JSON Schema of enums such as [`Algorithm`] |
//! | `testing` | the module `testing`: the conformance suite for implementations of [`Store`] |
//!
//! Async waits of the [`SystemClock`], and everything in `redis`, `resilience` and `tower`, run on
//! Tokio.

// The path of a request. First the client and the limits that apply:
mod client_ip;

mod policy;

// The query:
mod calendar;
mod quota;

mod hold;
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

// All of it in front of a service:
#[cfg(feature = "tower")]
pub mod layer;

// Used by all steps:
mod clock;
mod enum_names;
mod join;
mod random;
#[cfg(feature = "testing")]
pub mod testing;

/// Guides whose examples compile and run.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/holds.md")]
#[doc = include_str!("../../../docs/library.md")]
#[doc = include_str!("../../../docs/migrating.md")]
struct Guides;

/// The README's examples compile and run.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;

pub use algorithm::{Algorithm, Encoding};
pub use calendar::{Calendar, CalendarError, CalendarUnit};
pub use charge::{Charge, ChargeError, MAX_CHARGES, OnStoreFailure};
pub use client_ip::{ClientIp, Ipv6PrefixError, Resolved};
pub use clock::{Clock, ManualClock, SystemClock, Timestamp};
pub use decision::{Decision, Decisions, Denied, Source};
pub use enum_names::UnknownName;
pub use hold::{Hold, HoldError, HoldState, HoldStatus, HoldTerms, OnExpire};
pub use key::{Key, KeyError, MAX_KEY_BYTES};
pub use limiter::{Blocking, Error, Limiter, Permit, Reservation};
pub use policy::{
    ATTRIBUTE_NAMES, AttributeError, AttributeNames, Attributes, Cost, DEFAULT_QUERY_TIMEOUT,
    Enforcement, Explanation, KeySource, MissingKey, Mode, Observer, OverriddenQuota,
    OverrideEffect, OverrideKey, PathError, PathRules, PathSpelling, Policies, Policy,
    PolicyBuilder, PolicyDecision, PolicyDecisions, PolicyError, PolicyLimiter, PolicyPart,
    PreparedCharge, Progress, Query, QueryError, RequestLease, RuntimeOverride, RuntimeOverrides,
    SelectError, Selection, ShowKeys, StatusSet, TRACE_TARGET, Waiting, decode_value,
    normalize_host, normalize_path,
};
pub use quota::{Quota, QuotaError};
#[cfg(feature = "redis")]
pub use resilience::ResilientRedis;
#[cfg(feature = "resilience")]
pub use resilience::{Breaker, DenyCache, Fallback, Fleet};
pub use store::memory::MemoryStore;
#[cfg(feature = "redis")]
pub use store::redis::RedisStore;
pub use store::{Action, BlockingStore, Outcome, SharedStore, Store, StoreError};
