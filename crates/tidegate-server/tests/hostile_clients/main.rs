//! Connections of hostile clients, on every listener of the real service.

#[path = "../support/mod.rs"]
mod support;

#[path = "../gateway/frames.rs"]
mod frames;

/// Connections that take all of a thread.
mod fairness;
/// Frames that cost work and bring none.
mod floods;
/// Idle connections, and connections beyond the maximum.
mod places;
/// Requests that keep an upstream busy.
mod slots;
/// Clients that do not read their responses.
mod stalled;

use frames::field;
use support::Service;

/// Returns the HPACK encoding of a request without a body.
fn request_fields(method: &str, path: &str) -> Vec<u8> {
    [
        field(":method", method),
        field(":scheme", "http"),
        field(":path", path),
        field(":authority", "localhost"),
    ]
    .concat()
}

/// Returns a `listen` section with free ports and more fields.
fn listen(fields: &str) -> String {
    let ports = "http: '127.0.0.1:0', grpc: '127.0.0.1:0', admin: '127.0.0.1:0'";
    format!("listen: {{{ports}, {fields}}}\n")
}

/// Waits until the service has counted its closed connections. It counts one after the client can
/// see the end.
fn wait_until_closed(service: &Service, reason: &str, count: u64) {
    let line = format!("tidegate_connections_closed_total{{reason=\"{reason}\"}} {count}\n");
    service.wait_until(&line, |service| service.admin("/metrics").body.contains(&line));
}
