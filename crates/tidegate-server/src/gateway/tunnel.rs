//! Tunnel after an upgrade, such as to WebSocket: copies bytes in both directions until one side
//! closes or the idle timeout expires.

use std::sync::Arc;
use std::time::Duration;

use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio_util::io::{InspectReader, InspectWriter};

use super::body::IdleTimer;
use super::exchange::Exchange;

/// Runs the tunnel once both sides have completed the upgrade. The request ends with it.
pub(super) async fn run(
    client: OnUpgrade,
    upstream: OnUpgrade,
    idle_timeout: Duration,
    exchange: Option<Arc<Exchange>>,
) {
    let (Ok(client), Ok(upstream)) = tokio::join!(client, upstream) else { return };
    let idle_timer = IdleTimer::start();
    let mut written = 0;
    let client = InspectReader::new(TokioIo::new(client), |_| idle_timer.reset());
    let mut client = InspectWriter::new(client, |bytes| written += bytes.len() as u64);
    let mut upstream = InspectReader::new(TokioIo::new(upstream), |_| idle_timer.reset());
    tokio::select! {
        // A connection error of either side simply ends the tunnel.
        _ = tokio::io::copy_bidirectional(&mut client, &mut upstream) => {}
        () = idle_timer.expired(idle_timeout) => tracing::debug!("idle upgraded connection closed"),
    }
    if let Some(exchange) = exchange {
        exchange.add_bytes(written);
    }
}
