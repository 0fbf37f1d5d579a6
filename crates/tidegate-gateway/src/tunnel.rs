//! Tunnel after an upgrade, such as to WebSocket: copies bytes in both directions until one side
//! closes or the idle timeout expires.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

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
    let mut client = TrackedStream::new(client, &idle_timer);
    let mut upstream = TrackedStream::new(upstream, &idle_timer);
    tokio::select! {
        // A connection error of either side simply ends the tunnel.
        _ = tokio::io::copy_bidirectional(&mut client, &mut upstream) => {}
        () = idle_timer.expired(idle_timeout) => tracing::debug!("idle upgraded connection closed"),
    }
    if let Some(exchange) = exchange {
        exchange.add_bytes(client.written);
    }
}

/// Stream that resets the idle timer on every read, and counts the bytes written.
struct TrackedStream {
    stream: TokioIo<Upgraded>,
    idle_timer: IdleTimer,
    written: u64,
}

impl TrackedStream {
    fn new(stream: Upgraded, idle_timer: &IdleTimer) -> Self {
        Self { stream: TokioIo::new(stream), idle_timer: idle_timer.clone(), written: 0 }
    }
}

impl AsyncRead for TrackedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.stream).poll_read(cx, buffer);
        if polled.is_ready() {
            self.idle_timer.reset();
        }
        polled
    }
}

impl AsyncWrite for TrackedStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write(cx, bytes);
        if let Poll::Ready(Ok(length)) = polled {
            self.written += length as u64;
        }
        polled
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
