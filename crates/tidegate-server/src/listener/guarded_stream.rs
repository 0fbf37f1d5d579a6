//! Client connection that times out when it stalls and rejects ambiguous HTTP/1.1 framing.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, ReadBuf};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Sleep;

use super::ListenerConfig;
use super::framing::Framing;

/// First bytes of an HTTP/2 connection.
const HTTP2_PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Bytes that hyper gets in place of rejected ones: a NUL anywhere in a head makes it respond with
/// 400, and the empty line completes the head.
const INVALID_HEAD: &[u8] = b"\0\r\n\r\n";
/// Time and bytes that a client may go on sending after an early response. Closing the connection
/// at once could discard the response.
const LINGER_TIMEOUT: Duration = Duration::from_secs(1);
const MAX_LINGER_BYTES: u64 = 256 * 1024;

pub(super) struct GuardedStream<S: AsyncRead + AsyncWrite + Unpin + Send + 'static> {
    /// `None` only during drop.
    stream: Option<S>,
    framing: Option<Framing>,
    /// Rest of [`INVALID_HEAD`] to return from reads. Once set, the socket is no longer read.
    rejection: Option<&'static [u8]>,
    /// Number of preface bytes received, while the protocol version is unknown. hyper's own header
    /// timeout starts only after that.
    preface_matched: Option<usize>,
    header_timer: Pin<Box<Sleep>>,
    write_timeout: Duration,
    /// Runs while the client does not read.
    write_timer: Option<Pin<Box<Sleep>>>,
    /// Held for the lifetime of the connection, also after an upgrade.
    _permit: OwnedSemaphorePermit,
}

impl<S: AsyncRead + AsyncWrite + Unpin + Send + 'static> GuardedStream<S> {
    /// Guards a stream whose protocol version must be known within `header_timeout`.
    pub(super) fn new(
        stream: S,
        permit: OwnedSemaphorePermit,
        header_timeout: Duration,
        config: ListenerConfig,
    ) -> Self {
        Self {
            _permit: permit,
            stream: Some(stream),
            framing: config.reject_ambiguous.then(Framing::default),
            rejection: None,
            preface_matched: Some(0),
            header_timer: Box::pin(tokio::time::sleep(header_timeout)),
            write_timeout: config.write_timeout,
            write_timer: None,
        }
    }

    fn stream(&mut self) -> io::Result<Pin<&mut S>> {
        self.stream.as_mut().map(Pin::new).ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// Checks received bytes and returns how many of them are accepted.
    fn inspect(&mut self, bytes: &[u8]) -> usize {
        if let Some(matched) = self.preface_matched {
            let expected = &HTTP2_PREFACE[matched..];
            let length = expected.len().min(bytes.len());
            let is_partial = expected[..length] == bytes[..length] && length < expected.len();
            self.preface_matched = is_partial.then_some(matched + length);
        }
        let accepted = self.framing.as_mut().map_or(bytes.len(), |framing| framing.check(bytes));
        if accepted < bytes.len() {
            self.rejection = Some(INVALID_HEAD);
        }
        accepted
    }

    /// Copies the rest of the rejection into the buffer, if any.
    fn put_rejection(&mut self, buffer: &mut ReadBuf<'_>) {
        if let Some(left) = &mut self.rejection {
            let (now, later) = left.split_at(left.len().min(buffer.remaining()));
            buffer.put_slice(now);
            *left = later;
        }
    }

    /// Turns a write that has been pending for too long into an error.
    fn with_write_timeout<T>(
        &mut self,
        cx: &mut Context<'_>,
        polled: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if polled.is_ready() {
            self.write_timer = None;
            return polled;
        }
        let timer = self
            .write_timer
            .get_or_insert_with(|| Box::pin(tokio::time::sleep(self.write_timeout)));
        timer.as_mut().poll(cx).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin + Send + 'static> AsyncRead for GuardedStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.rejection.is_some() {
            self.put_rejection(buffer);
            return Poll::Ready(Ok(()));
        }
        let before = buffer.filled().len();
        let polled = self.stream()?.poll_read(cx, buffer);
        if polled.is_pending() && self.preface_matched.is_some() {
            ready!(self.header_timer.as_mut().poll(cx));
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        let accepted = self.inspect(&buffer.filled()[before..]);
        buffer.set_filled(before + accepted);
        self.put_rejection(buffer);
        polled
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin + Send + 'static> AsyncWrite for GuardedStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let polled = self.stream()?.poll_write(cx, bytes);
        self.with_write_timeout(cx, polled)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let polled = self.stream()?.poll_write_vectored(cx, slices);
        self.with_write_timeout(cx, polled)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.as_ref().is_some_and(AsyncWrite::is_write_vectored)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = self.stream()?.poll_flush(cx);
        self.with_write_timeout(cx, polled)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = self.stream()?.poll_shutdown(cx);
        self.with_write_timeout(cx, polled)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin + Send + 'static> Drop for GuardedStream<S> {
    fn drop(&mut self) {
        let is_sending = self.framing.as_ref().is_some_and(Framing::is_in_body);
        if let (Some(stream), true, Ok(runtime)) =
            (self.stream.take(), is_sending, tokio::runtime::Handle::try_current())
        {
            runtime.spawn(async move {
                let mut rest = stream.take(MAX_LINGER_BYTES);
                let _ = tokio::time::timeout(
                    LINGER_TIMEOUT,
                    tokio::io::copy(&mut rest, &mut tokio::io::sink()),
                )
                .await;
            });
        }
    }
}
