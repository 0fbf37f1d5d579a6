//! Calls that no decision waits for: invalidations, heartbeats, and checks of nodes that fail.

pub(super) mod heartbeat;
pub(super) mod invalidation;
pub(super) mod permissions;
mod probe;
pub(super) mod publisher;
