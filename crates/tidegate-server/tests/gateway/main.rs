//! `tidegate gateway` over the wire, in front of real servers.

#[path = "../support/mod.rs"]
mod support;

/// What the client and the upstream see of each other.
mod forwarding;
/// Streams of HTTP/2: answered before they are read, and not taken.
mod http2;
/// A large body, many requests, a long life.
mod load;
/// Requests that could be read in two ways, byte by byte.
mod smuggling;
/// Who is slow, silent or gone.
mod trouble;
/// An upstream whose bytes can be looked at.
mod upstream;
/// TLS and HTTP/2, on both sides.
mod versions;
/// After an upgrade.
mod websocket;
