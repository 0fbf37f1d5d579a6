//! When the store is slow or gone: the breaker, the fleet, the fallback.

#[path = "../support/mod.rs"]
mod support;

mod breaker;
mod fallback;
mod flaky;
mod real_redis;
mod repayment;
