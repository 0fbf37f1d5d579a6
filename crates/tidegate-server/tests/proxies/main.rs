//! Popular proxies with their files of `deploy/`, between a client, the real service and an
//! application.
//!
//! `make setup` installs them. Only addresses, limits and settings under test are replaced in the
//! files.

#[path = "../support/mod.rs"]
mod support;

/// Application behind the proxy that records its requests.
mod app;
/// Clients with different addresses.
mod client;
/// The four proxies that use `/v1/forward-auth`.
mod forward_auth;
/// Files and process of a proxy.
mod proxy;
/// TCP balancers that send PROXY headers.
mod proxy_protocol;
/// Envoy with the rate limit service.
mod rate_limit_service;
