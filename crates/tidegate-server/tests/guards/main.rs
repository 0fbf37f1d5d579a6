//! Guards of the operators' listeners and secrets, attacked over the network.

#[path = "../support/mod.rs"]
mod support;

/// Requests that web pages make a browser send.
mod browsers;
/// TLS of the admin listener and revoked client certificates.
mod certificates;
/// Listeners that other hosts can reach.
mod exposure;
/// Credentials that are keys.
mod keys;
/// Passwords of Redis outside of the process list.
mod redis_password;

const POLICY: &str = "policies: [{name: p, limit: 1, window: 1h}]\n";
