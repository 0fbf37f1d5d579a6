//! Connection to an upstream that remembers how far its exchanges got, for the choice whether a
//! failed request may be sent again.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use hyper_rustls::MaybeHttpsStream;
use hyper_util::client::legacy;
use hyper_util::client::legacy::connect::{Connected, Connection};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::OwnedSemaphorePermit;
use tokio_util::either::Either;

/// Progress of a connection. It is an extension of each of its responses.
#[derive(Debug, Clone, Default)]
pub(super) struct CallProgress(Arc<ProgressState>);

#[derive(Debug, Default)]
struct ProgressState {
    has_responded: AtomicBool,
    awaits_response: AtomicBool,
}

impl CallProgress {
    /// Returns the progress of the connection on which a request failed.
    pub(super) fn of(error: &legacy::Error) -> Option<Self> {
        let mut extensions = http::Extensions::new();
        error.connect_info()?.get_extras(&mut extensions);
        extensions.remove()
    }

    /// Records that a response has arrived.
    pub(super) fn record_response(&self) {
        // The load avoids a write to a cache line that several cores share.
        if !self.0.has_responded.load(Ordering::Relaxed) {
            self.0.has_responded.store(true, Ordering::Relaxed);
        }
    }

    /// Returns whether the upstream has responded to an earlier request.
    pub(super) fn has_responded(&self) -> bool {
        self.0.has_responded.load(Ordering::Relaxed)
    }

    /// Returns whether no byte has arrived since the last attempt to write.
    pub(super) fn awaits_response(&self) -> bool {
        self.0.awaits_response.load(Ordering::Relaxed)
    }
}

/// Connection by TCP, with or without TLS, or to a Unix socket.
pub(super) type UpstreamSocket = Either<TokioIo<MaybeHttpsStream<TokioIo<TcpStream>>>, UnixStream>;

/// Stream that records its [`CallProgress`].
pub(super) struct UpstreamStream {
    stream: UpstreamSocket,
    progress: CallProgress,
    /// Permit for the connection, if their number is limited. It is dropped after the stream.
    _permit: Option<OwnedSemaphorePermit>,
}

impl UpstreamStream {
    pub(super) fn new(stream: UpstreamSocket) -> Self {
        Self { stream, progress: CallProgress::default(), _permit: None }
    }

    /// Keeps the permit for the connection until it is closed.
    pub(super) fn with_permit(self, permit: Option<OwnedSemaphorePermit>) -> Self {
        Self { _permit: permit, ..self }
    }

    fn record_write(&self) {
        self.progress.0.awaits_response.store(true, Ordering::Relaxed);
    }
}

impl Connection for UpstreamStream {
    fn connected(&self) -> Connected {
        let connected = Connected::new().extra(self.progress.clone());
        match &self.stream {
            Either::Left(tcp) if tcp.connected().is_negotiated_h2() => connected.negotiated_h2(),
            _ => connected,
        }
    }
}

impl AsyncRead for UpstreamStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let polled = Pin::new(&mut self.stream).poll_read(cx, buffer);
        if buffer.filled().len() > before {
            self.progress.0.awaits_response.store(false, Ordering::Relaxed);
        }
        polled
    }
}

impl AsyncWrite for UpstreamStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.record_write();
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.record_write();
        Pin::new(&mut self.stream).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
