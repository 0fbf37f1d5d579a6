//! Command line interface of the tools, one file per command.

pub mod acquire;
mod admin;
pub mod bench;
pub mod config;
pub mod doctor;
pub mod health;
pub mod hold;
pub mod overrides;
pub mod plan;
mod quota;
pub mod redis;
pub mod simulate;
pub mod top;
