//! Command line interface of the tools, one file per command.

pub mod acquire;
pub mod bench;
pub mod config;
pub mod doctor;
pub mod health;
pub mod hold;
pub mod plan;
mod quota;
pub mod redis;
pub mod simulate;
pub mod top;
