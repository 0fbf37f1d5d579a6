//! Listeners: Unix sockets, the PROXY protocol and the age of connections.

#[path = "../support/mod.rs"]
mod support;

/// Connections that have reached their maximum age.
mod age;
/// Addresses of clients in PROXY headers.
mod proxy_protocol;
/// Unix sockets, with curl.
mod unix;
