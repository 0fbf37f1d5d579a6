//! Tests of the wrappers around a store: breaker, deny cache, fallback and fleet.

#[path = "../support/mod.rs"]
mod support;

mod breaker;
mod deny_cache;
mod deny_cache_oracle;
mod deny_cache_races;
mod fallback;
mod flaky;
mod holds;
mod invalidations;
mod lost_answers;
mod real_redis;
mod settlement;
