//! Client connection that closes when its watcher says so, times out when the client does not read,
//! and rejects ambiguous HTTP/1.1 framing.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadBuf};
use tokio::time::Sleep;

use super::ListenerConfig;
use super::authority::AuthorityFilter;
use super::closed::CloseReason;
use super::connection::Connection;
use super::framing::Framing;
use super::slots::Accepted;

/// First bytes of an HTTP/2 connection.
const HTTP2_PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Bytes that hyper gets in place of rejected ones: a NUL anywhere in a head makes it respond with
/// 400, and the empty line completes the head.
const INVALID_HEAD: &[u8] = b"\0\r\n\r\n";
/// Time and bytes that a client may go on sending after an early response. Closing the connection
/// immediately could discard the response.
const LINGER_TIMEOUT: Duration = Duration::from_secs(1);
const MAX_LINGER_BYTES: u64 = 256 * 1024;

pub(super) struct GuardedStream<S: AsyncRead + AsyncWrite + Unpin + Send + 'static> {
    /// `None` only during drop.
    stream: Option<S>,
    connection: Arc<Connection>,
    /// For HTTP/2 on a Unix socket.
    authority: Option<AuthorityFilter>,
    framing: Option<Framing>,
    /// Whether the framing is ambiguous: the socket is no longer read.
    is_rejected: bool,
    /// Number of preface bytes received, while the protocol version is unknown.
    preface_matched: Option<usize>,
    /// Bytes to return from reads before those of the client: frames, or [`INVALID_HEAD`].
    inserted: Vec<u8>,
    /// Frames to write before those of hyper.
    outbox: Vec<u8>,
    write_timeout: Duration,
    /// Runs while the client does not read.
    write_timer: Option<Pin<Box<Sleep>>>,
    /// Held for the lifetime of the connection, also after an upgrade. `None` only during drop.
    accepted: Option<Accepted>,
}

impl<S: AsyncRead + AsyncWrite + Unpin + Send + 'static> GuardedStream<S> {
    pub(super) fn new(stream: S, accepted: Accepted, config: &ListenerConfig) -> Self {
        Self {
            stream: Some(stream),
            connection: Arc::clone(&accepted.connection),
            authority: accepted.is_unix.then(AuthorityFilter::default),
            framing: config.reject_ambiguous.then(Framing::default),
            is_rejected: false,
            preface_matched: Some(0),
            inserted: Vec::new(),
            outbox: Vec::new(),
            write_timeout: config.write_timeout,
            write_timer: None,
            accepted: Some(accepted),
        }
    }

    fn stream(&mut self) -> io::Result<Pin<&mut S>> {
        self.stream.as_mut().map(Pin::new).ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// Checks received bytes and returns how many of them are accepted.
    fn inspect(&mut self, mut bytes: &mut [u8]) -> usize {
        let accepted = self.framing.as_mut().map_or(bytes.len(), |framing| framing.check(bytes));
        if accepted < bytes.len() {
            self.is_rejected = true;
            self.inserted.extend(INVALID_HEAD);
        }
        if let Some(matched) = self.preface_matched {
            let expected = &HTTP2_PREFACE[matched..];
            let length = expected.len().min(bytes.len());
            let is_match = expected[..length] == bytes[..length];
            let is_partial = is_match && length < expected.len();
            self.preface_matched = is_partial.then_some(matched + length);
            if is_match && !is_partial {
                self.connection.start_http2();
                bytes = &mut bytes[length..];
            }
        }
        if !bytes.is_empty() {
            if let (Some(authority), true) = (&mut self.authority, self.connection.is_http2()) {
                authority.filter(bytes);
            }
            self.connection.receive(bytes);
        }
        accepted
    }

    /// Moves inserted bytes into the buffer, as far as it has room.
    fn put_inserted(&mut self, buffer: &mut ReadBuf<'_>) {
        let length = self.inserted.len().min(buffer.remaining());
        buffer.put_slice(&self.inserted[..length]);
        self.inserted.drain(..length);
    }

    /// Writes the frames to insert. Fails if the connection has to close; its last frame is written
    /// if that is possible without a wait.
    fn poll_inserted(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        let (inserted, closes) = self.connection.take_inserted();
        self.inserted.extend(inserted.received);
        self.outbox.extend(inserted.sent);
        if closes || !self.outbox.is_empty() {
            let _ = self.poll_outbox(cx)?;
        }
        if closes { Err(io::ErrorKind::ConnectionAborted.into()) } else { Ok(()) }
    }

    fn poll_outbox(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.outbox.is_empty() {
            let outbox = std::mem::take(&mut self.outbox);
            let polled = self.stream()?.poll_write(cx, &outbox);
            self.outbox = outbox;
            let written = ready!(self.with_write_timeout(cx, polled))?;
            self.outbox.drain(..written);
        }
        Poll::Ready(Ok(()))
    }

    /// Turns a write that has been pending for too long into an error.
    fn with_write_timeout<T>(
        &mut self,
        cx: &mut Context<'_>,
        polled: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if polled.is_ready() {
            if self.write_timer.take().is_some() {
                self.connection.resume_writing();
            }
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
        if !self.is_rejected {
            self.poll_inserted(cx)?;
        }
        if self.is_rejected || !self.inserted.is_empty() {
            self.put_inserted(buffer);
            return Poll::Ready(Ok(()));
        }
        let before = buffer.filled().len();
        ready!(self.stream()?.poll_read(cx, buffer))?;
        let accepted = self.inspect(&mut buffer.filled_mut()[before..]);
        buffer.set_filled(before + accepted);
        self.put_inserted(buffer);
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin + Send + 'static> AsyncWrite for GuardedStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_outbox(cx))?;
        let polled = self.stream()?.poll_write(cx, bytes);
        if let (Poll::Ready(Ok(length)), true) = (&polled, self.connection.is_http2()) {
            self.connection.send(std::iter::once(bytes), *length);
        }
        self.with_write_timeout(cx, polled)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_outbox(cx))?;
        let polled = self.stream()?.poll_write_vectored(cx, slices);
        if let (Poll::Ready(Ok(length)), true) = (&polled, self.connection.is_http2()) {
            self.connection.send(slices.iter().map(|slice| &**slice), *length);
        }
        self.with_write_timeout(cx, polled)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.as_ref().is_some_and(AsyncWrite::is_write_vectored)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_outbox(cx))?;
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
        let is_sending = self.framing.as_ref().is_some_and(Framing::is_in_body)
            || self.connection.closing().is_some_and(CloseReason::is_abuse);
        if let (Some(stream), true, Ok(runtime)) =
            (self.stream.take(), is_sending, tokio::runtime::Handle::try_current())
        {
            let accepted = self.accepted.take();
            runtime.spawn(async move {
                let _accepted = accepted;
                linger(stream, b"").await;
            });
        }
    }
}

/// Sends the last bytes, and reads for a while what the client still sends, so that it gets them.
pub(super) async fn linger(mut stream: impl AsyncRead + AsyncWrite + Unpin, last: &[u8]) {
    let rest = async {
        stream.write_all(last).await?;
        stream.shutdown().await?;
        let mut rest = stream.take(MAX_LINGER_BYTES);
        tokio::io::copy(&mut rest, &mut tokio::io::sink()).await
    };
    let _ = tokio::time::timeout(LINGER_TIMEOUT, rest).await;
}
