//! `tidegate serve` over the network.

#[path = "../support/mod.rs"]
mod support;

/// Requests and responses of the API.
mod api;
/// Life in a container.
mod containers;
/// Reservations and ids.
mod holds;
/// Startup, reload and shutdown.
mod lifecycle;
/// Metrics of the nodes of a cluster.
mod nodes;
/// Tokens, admin API, shared counters and outages of Redis.
mod operations;
/// Shutdown without failed requests.
mod shutdown;
/// Named tokens: their scopes, failures, reload and log lines.
mod tokens;

use serde_json::{Value, json};

const POLICIES: &str = "
policies:
  - name: per-user
    match: {path: /api/**}
    key: [header.x-user-id]
    limit: 3
    window: 1h
    overrides:
      - {key: acme, limit: 1000}
  - name: writes
    match: {path: /api/**, method: [POST, PUT]}
    key: [header.x-user-id]
    algorithm: token-bucket
    limit: 1
    window: 1h
  - name: watched
    match: {path: /watched}
    mode: shadow
    limit: 1
    window: 1h
  - name: known-only
    match: {path: /members}
    key: header.x-member
    missing_key: deny
    limit: 5
    window: 1h
  - name: heavy
    match: {path: /heavy}
    cost: {attribute: header.x-cost, default: 2, max: 8}
    limit: 10
    window: 1h
";

fn attributes(pairs: &[(&str, &str)]) -> Value {
    let attributes: serde_json::Map<String, Value> =
        pairs.iter().map(|(name, value)| ((*name).to_owned(), json!(value))).collect();
    json!({"attributes": attributes})
}
