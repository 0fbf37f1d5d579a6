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

use std::net::{SocketAddr, TcpStream};

use frames::field;
use support::{Service, TEST_TIMEOUT};

/// Connects from an address of this host.
fn connect_from(source: &str, address: &str) -> TcpStream {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let stream = runtime.expect("a runtime").block_on(async {
        let socket = tokio::net::TcpSocket::new_v4().expect("a socket");
        socket.bind(SocketAddr::new(source.parse().expect("an address"), 0)).expect("loopback");
        let stream = socket.connect(address.parse().expect("an address")).await;
        stream.expect("the service listens").into_std().expect("a socket")
    });
    stream.set_nonblocking(false).expect("a socket");
    stream.set_read_timeout(Some(TEST_TIMEOUT)).expect("a timeout");
    stream
}

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
