//! Connections that this side closed or refused, counted by reason.

use std::sync::atomic::{AtomicU64, Ordering};

/// Reason why a connection was closed or refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CloseReason {
    /// No request for `listen.idle_timeout`.
    Idle,
    /// No complete request head in time.
    HeaderTimeout,
    /// The client does not read its responses.
    Stalled,
    /// Too many control frames without requests.
    ControlFrames,
    /// Idle, and closed for a new connection.
    Evicted,
    /// Refused: all slots are taken by busy connections.
    Full,
    /// Refused: all slots of this address are taken by busy connections.
    FullForAddress,
    /// The buffers of all connections are full, and this one needs more.
    BuffersFull,
    /// From a balancer of `listen.proxy_protocol`, without a valid header.
    ProxyHeader,
}

impl CloseReason {
    /// Labels in metrics, in the order of the variants.
    const LABELS: [&str; 9] = [
        "idle",
        "header_timeout",
        "stalled",
        "control_frames",
        "evicted",
        "max_connections",
        "max_connections_per_address",
        "buffers_full",
        "proxy_header",
    ];

    /// Returns whether the client is at fault.
    pub(super) fn is_abuse(self) -> bool {
        matches!(self, Self::Stalled | Self::ControlFrames)
    }

    fn label(self) -> &'static str {
        Self::LABELS[self as usize]
    }
}

/// Numbers of closed and refused connections.
#[derive(Debug, Default)]
pub struct ClosedConnections([AtomicU64; CloseReason::LABELS.len()]);

impl ClosedConnections {
    pub(super) fn count(&self, reason: CloseReason) {
        tracing::debug!(reason = reason.label(), "connection closed");
        self.0[reason as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Returns each label with its number.
    pub fn counts(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let counts = self.0.iter().map(|counter| counter.load(Ordering::Relaxed));
        CloseReason::LABELS.into_iter().zip(counts)
    }
}
