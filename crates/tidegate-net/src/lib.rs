//! Connections of Tidegate's servers: sockets, TLS, limits and timeouts against slow and hostile
//! clients, drain. This crate knows bytes and HTTP messages, not rate limits.
#![allow(
    missing_docs,
    clippy::must_use_candidate,
    clippy::missing_panics_doc,
    reason = "an internal crate of the binary `tidegate`"
)]

mod address;
mod body_reader;
mod file_limit;
#[cfg(test)]
#[path = "../../tidegate/tests/support/fuzz.rs"]
#[allow(dead_code, reason = "other crates use more of it")]
mod fuzz;
pub mod listener;
mod log_throttle;
pub mod tls;

pub use address::{ListenAddress, ListenAddressError};
pub use body_reader::{BODY_TIMEOUT, BodyError, BodyReader};
pub use file_limit::raise_file_limit;
pub use log_throttle::LogThrottle;
