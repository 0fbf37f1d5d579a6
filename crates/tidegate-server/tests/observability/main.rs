//! The admin API of a running service: what an operator sees and changes.

#[path = "../support/mod.rs"]
mod support;

/// Files of the dashboard.
mod dashboard;
/// Stream of live events.
mod live;
/// Log lines of denied requests and of resets.
mod logs;
/// Look-up of one key.
mod lookup;
/// Nodes of Redis, outages and the fallback.
mod redis;
/// Result of the last reload.
mod reloads;
/// Requests by outcome, history, policies, hot keys and explained decisions.
mod requests;

use serde_json::{Value, json};
use support::Service;

/// Returns the value of a metric line that starts with this text.
fn metric(service: &Service, start: &str) -> f64 {
    let metrics = service.admin("/metrics").body;
    let value = metrics.lines().find_map(|line| line.strip_prefix(start)?.trim().parse().ok());
    value.unwrap_or_else(|| panic!("no {start} in {metrics}"))
}

fn acquire(service: &Service, pairs: &[(&str, &str)]) -> u16 {
    service.acquire(&attributes(pairs)).status
}

fn attributes(pairs: &[(&str, &str)]) -> Value {
    let pairs = pairs.iter().map(|(name, value)| ((*name).to_owned(), json!(value)));
    json!({"attributes": pairs.collect::<serde_json::Map<String, Value>>()})
}
