//! Tunnel after an upgrade, such as to WebSocket: copies bytes in both directions until one side
//! closes or the idle timeout expires.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::body::IdleTimer;

/// Runs the tunnel once both sides have completed the upgrade.
pub(super) async fn run(client: OnUpgrade, upstream: OnUpgrade, idle_timeout: Duration) {
    let (Ok(client), Ok(upstream)) = tokio::join!(client, upstream) else { return };
    let idle_timer = IdleTimer::start();
    let mut client = TrackedStream { stream: TokioIo::new(client), idle_timer: idle_timer.clone() };
    let mut upstream =
        TrackedStream { stream: TokioIo::new(upstream), idle_timer: idle_timer.clone() };
    tokio::select! {
        // A connection error of either side simply ends the tunnel.
        _ = tokio::io::copy_bidirectional(&mut client, &mut upstream) => {}
        () = idle_timer.expired(idle_timeout) => tracing::debug!("idle upgraded connection closed"),
    }
}

/// Stream that resets the idle timer on every read.
struct TrackedStream<S> {
    stream: S,
    idle_timer: IdleTimer,
}

impl<S: AsyncRead + Unpin> AsyncRead for TrackedStream<S> {
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

impl<S: AsyncWrite + Unpin> AsyncWrite for TrackedStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
