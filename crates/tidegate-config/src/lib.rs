//! Configuration of Tidegate: YAML to validated policies, rules, listeners and stores. Errors show
//! the line and suggest a fix.
#![allow(
    missing_docs,
    clippy::must_use_candidate,
    clippy::missing_panics_doc,
    reason = "an internal crate of the binary `tidegate`"
)]

mod config;
pub mod envoy;
#[cfg(test)]
#[path = "../../tidegate/tests/support/fuzz.rs"]
#[allow(dead_code, reason = "other crates use more of it")]
mod fuzz;
pub mod key_hash;
pub mod policies;
mod ratelimit;
mod secret;
mod tokens;
mod warning;
pub mod yaml;

pub use config::{
    AccessLogConfig, AccessLogFormat, AllowedHosts, AllowedOrigins, Config, ConfigOrigin,
    CorsConfig, EnvironmentConfig, EnvoyConfig, GatewayConfig, Listen, LogDenials, LogDestination,
    RedisConfig, RedisTopology, SAMPLE, StoreConfig, StoreNeeds, TOKEN_VARIABLES, UpstreamLimits,
    UpstreamProtocol, UpstreamUrl, UpstreamUrlError, XdsConfig, XdsTls, rule_files,
};
pub use policies::{load as load_policies, parse as parse_policies};
pub use ratelimit::{ALGORITHM_VARIABLE, RatelimitSettings, TraceSettings};
pub use secret::Secret;
pub use tokens::{AuthError, Scope, Token, Tokens};
pub use warning::{ConfigWarning, OPEN_LISTENER};
pub use yaml::{ConfigError, duration};
