//! Policies from a YAML file, in the format of the service's configuration.
//!
//! ```sh
//! cargo run -p tidegate --example policies_file -- tidegate.yaml
//! ```
//!
//! Without a file it uses the policies below.

use std::collections::BTreeMap;
use std::error::Error;

use tidegate::{Limiter, MemoryStore, PolicyDecision, PolicyLimiter, Query};

const POLICIES: &str = "
policies:
  - name: login
    match: {path: /login, method: POST}
    key: [ip]
    limit: 3
    window: 60s
  - name: per-user
    key: [header.x-user-id]
    algorithm: token-bucket
    limit: 100
    window: 1s
";

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let policies = match std::env::args().nth(1) {
        Some(file) => tidegate_config::load_policies(file)?,
        None => tidegate_config::parse_policies("built-in", POLICIES)?,
    };
    let limiter = PolicyLimiter::new(Limiter::new(MemoryStore::new()), policies);

    let request = [("method", "POST"), ("path", "/login"), ("ip", "203.0.113.9")];
    let request = BTreeMap::from(request.map(|(name, value)| (name.into(), value.into())));
    for attempt in 1..=4 {
        let decisions = limiter.acquire(Query::attributes(&request)).await?;
        let binding = decisions.binding().map(PolicyDecision::policy);
        println!("attempt {attempt}: allowed {}, by {binding:?}", decisions.is_allowed());
    }
    Ok(())
}
