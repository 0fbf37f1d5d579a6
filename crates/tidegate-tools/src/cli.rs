//! Command line interface of the tools, one file per command.

pub mod acquire;
pub mod admin;
pub mod bench;
pub mod config;
pub mod doctor;
pub mod events;
pub mod fleet;
pub mod health;
pub mod hold;
pub mod lookup;
pub mod overrides;
pub mod plan;
mod quota;
pub mod redis;
pub mod reset;
pub mod simulate;
pub mod suggest;
pub mod top;
