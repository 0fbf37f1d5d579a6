//! Counts in Redis from a program without `async`, such as a batch job or a pool of threads.
//!
//! ```sh
//! REDIS_URL=redis://127.0.0.1:6379 cargo run -p tidegate --example blocking_redis
//! ```

use std::error::Error;
use std::thread;
use std::time::Duration;

use tidegate::{Charge, Limiter, Quota, RedisStore};

fn main() -> Result<(), Box<dyn Error>> {
    let url = std::env::var("REDIS_URL").unwrap_or_else(|_| "redis://127.0.0.1:6379".to_owned());
    // With a deny cache and a fallback: RedisStore::builder(&url).resilient_blocking()?
    let limiter = Limiter::new(RedisStore::connect_blocking(&url)?);
    let quota = Quota::token_bucket(10, Duration::from_secs(1))?;

    // All threads share the connection and the limit.
    thread::scope(|scope| {
        for worker in 1..=3 {
            let (limiter, quota) = (limiter.clone(), &quota);
            scope.spawn(move || {
                let charge = Charge::new("batch-job", quota);
                match limiter.blocking().wait(&charge, Duration::from_secs(5)) {
                    Ok(decision) => println!("worker {worker}: allowed {}", decision.allowed),
                    Err(error) => println!("worker {worker}: {error}"),
                }
            });
        }
    });
    Ok(())
}
