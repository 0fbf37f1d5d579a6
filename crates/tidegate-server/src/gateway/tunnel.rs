//! After an upgrade, such as to WebSocket: bytes both ways, until one side ends it or both fall
//! silent.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::body::Activity;

/// Carries bytes between the two sides once both have gone over.
pub(super) async fn carry(client: OnUpgrade, upstream: OnUpgrade, patience: Duration) {
    let (Ok(client), Ok(upstream)) = tokio::join!(client, upstream) else { return };
    let activity = Activity::now();
    let mut client = Noted { stream: TokioIo::new(client), activity: activity.clone() };
    let mut upstream = Noted { stream: TokioIo::new(upstream), activity: activity.clone() };
    tokio::select! {
        // Who broke off is no affair of ours.
        _ = tokio::io::copy_bidirectional(&mut client, &mut upstream) => {}
        () = activity.ceased(patience) => tracing::debug!("an upgraded connection fell silent and is closed"),
    }
}

/// Notes when something was read.
struct Noted<S> {
    stream: S,
    activity: Activity,
}

impl<S: AsyncRead + Unpin> AsyncRead for Noted<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.stream).poll_read(cx, buffer);
        if polled.is_ready() {
            self.activity.note();
        }
        polled
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Noted<S> {
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
