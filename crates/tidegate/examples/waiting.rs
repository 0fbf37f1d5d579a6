//! A client that waits for its turn instead of being denied: ten requests per second to each host.
//!
//! ```sh
//! cargo run -p tidegate --example waiting
//! ```

use std::error::Error;
use std::time::{Duration, Instant};

use tidegate::{Charge, Limiter, MemoryStore, Quota};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let limiter = Limiter::new(MemoryStore::new());
    let quota = Quota::token_bucket(10, Duration::from_secs(1))?.with_burst(2)?;
    let charge = Charge::new("example.com", &quota);
    let start = Instant::now();

    for page in 1..=6 {
        // Sleeps exactly as long as the limit requires, at most two seconds.
        let decision = limiter.wait(&charge, Duration::from_secs(2)).await?;
        assert!(decision.allowed);
        println!("page {page} after {} ms", start.elapsed().as_millis());
    }

    // A wait that would be too long is denied at once, and takes no units.
    let denied = limiter.wait(&charge, Duration::from_millis(1)).await?;
    println!("allowed within 1 ms: {}, retry after {:?}", denied.allowed, denied.retry_after);
    Ok(())
}
