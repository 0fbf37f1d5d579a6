//! The proxies that people run, each with its files of `deploy/`, between a client, the real
//! service and an application.
//!
//! `make setup` installs them. Only addresses, limits and what a test is about are replaced in the
//! files.

#[path = "../support/mod.rs"]
mod support;

/// The application behind the proxy: it writes down what reaches it.
mod app;
/// One of several clients, by its address.
mod client;
/// The four that ask `/v1/forward-auth`.
mod forward_auth;
/// A proxy's files and process.
mod proxy;
/// Envoy, which asks the rate limit service.
mod rate_limit_service;
