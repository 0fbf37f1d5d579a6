//! Commands of `tidegate` that need no service of this process: simulate, suggest, plan, bench, top,
//! doctor, acquire, hold, health, config.
#![allow(
    missing_docs,
    clippy::must_use_candidate,
    clippy::missing_panics_doc,
    reason = "an internal crate of the binary `tidegate`"
)]

mod bench;
pub mod cli;
pub mod doctor;
#[cfg(test)]
#[path = "../../tidegate/tests/support/fuzz.rs"]
#[allow(dead_code, reason = "other crates use more of it")]
mod fuzz;
mod plan;
pub mod simulate;
mod suggest;
pub mod tool;
mod top;
