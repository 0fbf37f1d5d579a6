//! Counts shared through Redis, and local decisions while Redis is down.
//!
//! ```sh
//! REDIS_URL=redis://127.0.0.1:6379 cargo run -p tidegate --example redis_fallback
//! ```
//!
//! Stop Redis while it runs, and start it again: the source of the decisions changes, and no
//! request fails.

use std::error::Error;
use std::time::Duration;

use tidegate::{Charge, Limiter, OnStoreFailure, Quota, RedisStore};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let url = std::env::var("REDIS_URL").unwrap_or_else(|_| "redis://127.0.0.1:6379".to_owned());
    let requests = std::env::args().nth(1).map_or(Ok(5), |count| count.parse())?;

    // A deny cache and a fallback around Redis. It also starts while Redis is down.
    let limiter = Limiter::new(RedisStore::resilient(&url).await?);
    let quota = Quota::sliding_log(100, Duration::from_secs(60))?;
    // The policy while Redis is down: `Local` (the default), `Allow`, `Deny` or `Error`.
    let charge = Charge::new("user123", &quota).with_on_store_failure(OnStoreFailure::Local);

    for request in 1..=requests {
        let decision = limiter.acquire(&charge).await?;
        println!(
            "request {request}: allowed {}, {} of {} left, decided by {}",
            decision.allowed, decision.remaining, decision.limit, decision.source
        );
    }
    println!("falling back: {}", limiter.store().stats().falling_back);
    Ok(())
}
