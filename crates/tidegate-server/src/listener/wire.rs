//! The bytes of a client's connection: watched over so that one that stands still does not stay,
//! and no request is read in two ways.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, ReadBuf};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Sleep;

use super::Manner;
use super::framing::Framing;

/// What tells HTTP/2 from HTTP/1.1.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// What hyper gets instead of bytes that are refused. It answers a NUL with 400 wherever in a head
/// it stands, but does not look before the head is complete.
const REFUSAL: &[u8] = b"\0\r\n\r\n";
/// A client that is answered in the middle of its body may send so much more, for so long, and is
/// not listened to: if the connection broke at once, the answer could be lost with it.
const LINGER: Duration = Duration::from_secs(1);
const LINGER_BYTES: u64 = 256 * 1024;

pub(super) struct Wire<S: AsyncRead + AsyncWrite + Unpin + Send + 'static> {
    /// Always there until it is dropped.
    stream: Option<S>,
    framing: Option<Framing>,
    /// What is left to be told of a refusal; nothing is read any more.
    refusal: Option<&'static [u8]>,
    /// How much of the preface has come, as long as it may be one. hyper's own time starts only
    /// behind it.
    undecided: Option<usize>,
    head_alarm: Pin<Box<Sleep>>,
    patience: Duration,
    /// The client does not take what it is sent.
    write_alarm: Option<Pin<Box<Sleep>>>,
    /// Among the connections that there may be, also after an upgrade.
    _place: OwnedSemaphorePermit,
}

impl<S: AsyncRead + AsyncWrite + Unpin + Send + 'static> Wire<S> {
    /// The first bytes come within `head_time`; what is sent is taken within the manner's time.
    pub(super) fn new(
        stream: S,
        place: OwnedSemaphorePermit,
        head_time: Duration,
        manner: Manner,
    ) -> Self {
        Self {
            _place: place,
            stream: Some(stream),
            framing: manner.strict.then(Framing::default),
            refusal: None,
            undecided: Some(0),
            head_alarm: Box::pin(tokio::time::sleep(head_time)),
            patience: manner.write_time,
            write_alarm: None,
        }
    }

    fn stream(&mut self) -> io::Result<Pin<&mut S>> {
        self.stream.as_mut().map(Pin::new).ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// How many of these bytes pass.
    fn look_at(&mut self, bytes: &[u8]) -> usize {
        if let Some(matched) = self.undecided {
            let expected = &PREFACE[matched..];
            let length = expected.len().min(bytes.len());
            let goes_on = expected[..length] == bytes[..length] && length < expected.len();
            self.undecided = goes_on.then_some(matched + length);
        }
        let passed = self.framing.as_mut().map_or(bytes.len(), |framing| framing.check(bytes));
        if passed < bytes.len() {
            self.refusal = Some(REFUSAL);
        }
        passed
    }

    fn refuse(&mut self, buffer: &mut ReadBuf<'_>) {
        if let Some(left) = &mut self.refusal {
            let (now, later) = left.split_at(left.len().min(buffer.remaining()));
            buffer.put_slice(now);
            *left = later;
        }
    }

    /// Fails what has waited too long to be written.
    fn or_stalled<T>(
        &mut self,
        cx: &mut Context<'_>,
        polled: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if polled.is_ready() {
            self.write_alarm = None;
            return polled;
        }
        let alarm =
            self.write_alarm.get_or_insert_with(|| Box::pin(tokio::time::sleep(self.patience)));
        alarm.as_mut().poll(cx).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin + Send + 'static> AsyncRead for Wire<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.refusal.is_some() {
            self.refuse(buffer);
            return Poll::Ready(Ok(()));
        }
        let before = buffer.filled().len();
        let polled = self.stream()?.poll_read(cx, buffer);
        if polled.is_pending() && self.undecided.is_some() {
            ready!(self.head_alarm.as_mut().poll(cx));
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        let passed = self.look_at(&buffer.filled()[before..]);
        buffer.set_filled(before + passed);
        self.refuse(buffer);
        polled
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin + Send + 'static> AsyncWrite for Wire<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let polled = self.stream()?.poll_write(cx, bytes);
        self.or_stalled(cx, polled)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let polled = self.stream()?.poll_write_vectored(cx, slices);
        self.or_stalled(cx, polled)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.as_ref().is_some_and(AsyncWrite::is_write_vectored)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = self.stream()?.poll_flush(cx);
        self.or_stalled(cx, polled)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = self.stream()?.poll_shutdown(cx);
        self.or_stalled(cx, polled)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin + Send + 'static> Drop for Wire<S> {
    fn drop(&mut self) {
        let is_sending = self.framing.as_ref().is_some_and(Framing::is_in_body);
        if let (Some(stream), true, Ok(runtime)) =
            (self.stream.take(), is_sending, tokio::runtime::Handle::try_current())
        {
            runtime.spawn(async move {
                let mut rest = stream.take(LINGER_BYTES);
                let _ = tokio::time::timeout(
                    LINGER,
                    tokio::io::copy(&mut rest, &mut tokio::io::sink()),
                )
                .await;
            });
        }
    }
}
