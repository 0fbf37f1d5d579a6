//! The fault suite: real services, real Redis servers, and everything that can go wrong with them.
//!
//! Three `tidegate serve` share a store that is stopped, killed, moved, cut off or turned against
//! them, while an open-loop client asks at a fixed rate and writes down every answer with its
//! times. A checker computes from that record what the design promises. `make test-faults` runs it
//! and prints a table; docs/faults.md tells what each row shows.
//!
//! Rows take their turn: two at once on a small machine would measure each other.

#[path = "../support/mod.rs"]
mod support;

/// The record of a run, and what it shows.
mod check;
/// The other nodes of a store: replicas with Sentinels, a cluster.
mod cluster;
/// The three instances, and a fourth one that tells how late this machine is by itself.
mod fleet;
/// A network namespace whose packets can be dropped.
mod hole;
/// HTTP/1.1 on kept connections.
mod http;
/// The open-loop client.
mod load;
/// What a server executes, as it tells it.
mod monitor;
/// A TCP proxy that adds latency, or swallows.
mod proxy;
/// How late the servers are by themselves.
mod pulse;
/// A row of the table: its turn, its figures, its verdict.
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
    mod refusal;
    mod scripts;
    mod slots;
}
