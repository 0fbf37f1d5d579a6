//! Parts that the tools share: output on a terminal, requests to a service, loads.

pub(crate) mod client;
pub(crate) mod output;
pub(crate) mod percentiles;
pub(crate) mod progress;
pub(crate) mod random;
pub(crate) mod redis_info;
pub(crate) mod style;
pub(crate) mod table;
pub(crate) mod text;
