//! Listeners: Unix sockets and the age of connections.

#[path = "../support/mod.rs"]
mod support;

/// Connections that have reached their maximum age.
mod age;
/// Unix sockets, with curl.
mod unix;
