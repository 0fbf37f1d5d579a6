//! The fault suite: real services, real Redis servers, and everything that can go wrong with them.
//!
//! Three `tidegate serve` share a store that is stopped, killed, moved, isolated or misconfigured,
//! while an open-loop client sends requests at a fixed rate and records every response with its
//! times. A checker verifies the guarantees of the design with that record. `make test-faults` runs
//! the suite and prints a table; docs/faults.md explains each row.
//!
//! Rows run one after the other, because concurrent rows would disturb each other's times.

#[path = "../support/mod.rs"]
mod support;

/// Record of a run and its checks.
mod check;
/// Stores with several nodes: replicas with Sentinels, a cluster.
mod cluster;
/// The three instances, and a fourth one that measures the delay of this machine.
mod fleet;
/// HTTP/1.1 on kept connections.
mod http;
/// The open-loop client.
mod load;
/// Commands that a server executes, by MONITOR.
mod monitor;
/// Network namespace whose packets can be dropped.
mod namespace;
/// Delay of the servers themselves.
mod ping;
/// TCP proxy that adds latency or drops data.
mod proxy;
/// Row of the table: figures and verdict.
mod row;
mod sentinel;
/// Redis processes.
mod servers;

mod rows {
    mod clock;
    mod failover;
    mod keys;
    mod network;
    mod outage;
    mod rejection;
    mod scripts;
    mod slots;
}
