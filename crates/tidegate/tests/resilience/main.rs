//! When the store is slow or gone: the breaker, the fleet, the fallback. And the cache of its
//! denials.

#[path = "../support/mod.rs"]
mod support;

mod breaker;
mod deny_cache;
mod fallback;
mod flaky;
mod news;
mod real_redis;
mod repayment;
