//! Calls that no decision waits for: invalidations, heartbeats, overrides, what instances show each
//! other, and checks of nodes that fail.

pub(super) mod board;
pub(super) mod heartbeat;
pub(super) mod invalidation;
pub(super) mod overrides;
pub(super) mod probe;

/// Returns an internal key. It cannot be a user's key, in which percent signs are escaped.
fn internal_key(prefix: &str, name: &str) -> String {
    format!("{prefix}:{{%{name}}}")
}
