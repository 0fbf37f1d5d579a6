//! Parts that the tools share: output on a terminal, requests to a service, loads.

pub mod client;
pub mod output;
pub mod percentiles;
pub mod progress;
pub mod random;
pub mod redis_info;
pub mod style;
pub mod table;
pub mod text;
