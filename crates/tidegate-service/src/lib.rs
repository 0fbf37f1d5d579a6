//! Rate limit service: the state that all front doors share, the doors (HTTP API, Envoy, Redis
//! protocol, admin), metrics, logs and reload.
#![allow(
    missing_docs,
    clippy::must_use_candidate,
    clippy::missing_panics_doc,
    reason = "an internal crate of the binary `tidegate`"
)]

mod admin;
pub mod api;
mod auth;
mod backend;
mod config_summary;
mod envoy;
mod forward_auth_parts;
#[cfg(test)]
#[path = "../../tidegate/tests/support/fuzz.rs"]
#[allow(dead_code, reason = "other crates use more of it")]
mod fuzz;
mod hot_keys;
mod journal;
pub mod logs;
pub mod metrics;
mod observer;
mod overrides;
mod ratelimit;
pub mod reload;
mod resp;
pub mod serve;
pub mod state;
