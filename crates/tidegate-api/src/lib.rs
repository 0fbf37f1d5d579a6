//! Wire types of Tidegate, declared once: the messages of Envoy's rate limit service and of
//! discovery, the bodies and operations of the APIs, and the conversions of durations to the
//! integers of the bodies.
#![allow(
    missing_docs,
    clippy::must_use_candidate,
    clippy::missing_panics_doc,
    reason = "an internal crate of the binary `tidegate`"
)]

pub mod admin;
pub mod duration;
#[cfg(test)]
#[path = "../../tidegate/tests/support/fuzz.rs"]
#[allow(dead_code, reason = "other crates use more of it")]
mod fuzz;
pub mod json;
pub mod operation;
mod proto;

pub use proto::{envoy, google};

/// Descriptors of the messages of Envoy, for gRPC reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/rls.bin"));
