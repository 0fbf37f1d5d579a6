//! Sessions: connections of protocols whose commands are answered in order, several at a time.
//!
//! The session handles all commands that have arrived, and its replies are sent in one write. While
//! a client does not read them, nothing is read from it.

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _, ReadBuf};
use tokio::sync::watch;
use tokio::time::Instant;

use super::closed::CloseReason;
use super::connection::{Timeouts, Watcher};
use super::guarded_stream::linger;
use super::{Accepted, ListenerConfig, drain};

/// Size of the buffer of an idle connection, of which there may be many.
const MIN_BUFFER: usize = 4 * 1024;

/// Commands of one client, and its replies.
pub(crate) trait Session: Send {
    /// Handles the commands in the input, and appends the replies.
    fn handle(
        &mut self,
        input: &mut Input,
        replies: &mut Vec<u8>,
    ) -> impl Future<Output = Step> + Send;
}

/// Next step of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// All complete commands are handled.
    Read,
    /// The replies are to be sent before the next commands are handled.
    Flush,
    /// The last reply is to be sent, and the connection closed.
    Close,
}

/// Bytes that were received and not yet handled, in a buffer of bounded size.
pub(crate) struct Input {
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    max: usize,
}

impl Input {
    /// Creates an empty buffer for up to `max` bytes.
    pub(crate) fn new(max: usize) -> Self {
        Self { buffer: vec![0; MIN_BUFFER.min(max)], start: 0, end: 0, max }
    }

    /// Returns the bytes that are not yet handled.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }

    /// Removes handled bytes from the front.
    pub(crate) fn consume(&mut self, length: usize) {
        self.start = (self.start + length).min(self.end);
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    #[cfg(test)]
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.buffer.truncate(self.end);
        self.buffer.extend_from_slice(bytes);
        self.end = self.buffer.len();
    }

    /// Reads all that has arrived, up to the size of the buffer. Returns false at the end of the
    /// stream.
    fn poll_read(
        &mut self,
        cx: &mut Context<'_>,
        mut stream: Pin<&mut impl AsyncRead>,
    ) -> Poll<io::Result<bool>> {
        let mut has_read = false;
        loop {
            self.make_room();
            let mut free = ReadBuf::new(&mut self.buffer[self.end..]);
            let size = free.capacity();
            let read = stream.as_mut().poll_read(cx, &mut free);
            let length = free.filled().len();
            self.end += length;
            match read {
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                // A full buffer may not be all.
                Poll::Ready(Ok(())) if length == size && self.buffer.len() < self.max => {
                    has_read = true;
                }
                Poll::Ready(Ok(())) => return Poll::Ready(Ok(has_read || length > 0)),
                Poll::Pending if has_read => return Poll::Ready(Ok(true)),
                Poll::Pending => {
                    if self.start == self.end && self.buffer.len() > MIN_BUFFER {
                        *self = Self::new(self.max);
                    }
                    return Poll::Pending;
                }
            }
        }
    }

    /// Makes room for more bytes: a full buffer grows to twice its size.
    fn make_room(&mut self) {
        if self.end < self.buffer.len() {
            return;
        }
        if self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        if self.end > self.buffer.len() / 2 {
            let size = (2 * self.buffer.len()).min(self.max);
            self.buffer.resize(size, 0);
        }
    }
}

/// Serves a session until it closes, and returns why, if this side closed it early. `max_input` is
/// the size of the longest command: a session closes when it has not handled that many bytes.
pub(crate) async fn serve_session<I>(
    stream: I,
    session: impl Session,
    max_input: usize,
    Accepted { place, connection }: Accepted,
    stop: watch::Receiver<bool>,
    config: &ListenerConfig,
) -> Option<CloseReason>
where
    I: AsyncRead + AsyncWrite + Unpin + Send,
{
    let _place = place;
    let timeouts = Timeouts { idle: config.idle_timeout, write: config.write_timeout };
    let mut watcher = Watcher::new(std::sync::Arc::clone(&connection), timeouts);
    // The time for a command starts with its first byte. Clients connect before they need it.
    connection.start_commands();
    connection.end_commands(None);
    let is_draining = AtomicBool::new(false);
    let mut stalled = None;
    let served = async {
        stalled = run(stream, session, max_input, &connection, &is_draining, config).await;
    };
    let start_drain = |_: Pin<&mut _>| is_draining.store(true, Ordering::Relaxed);
    let watch = |cx: &mut Context<'_>| watcher.poll(cx);
    drain::drive(served, start_drain, stop, None, &connection.age, watch).await;
    stalled.or_else(|| watcher.close_reason())
}

async fn run<I: AsyncRead + AsyncWrite + Unpin>(
    mut stream: I,
    mut session: impl Session,
    max_input: usize,
    connection: &super::connection::Connection,
    is_draining: &AtomicBool,
    config: &ListenerConfig,
) -> Option<CloseReason> {
    let mut input = Input::new(max_input);
    let mut replies = Vec::new();
    loop {
        let read = poll_fn(|cx| match input.poll_read(cx, Pin::new(&mut stream)) {
            // Commands that have arrived before the drain are answered.
            Poll::Pending if is_draining.load(Ordering::Relaxed) => Poll::Ready(Ok(false)),
            polled => polled,
        });
        if !matches!(read.await, Ok(true)) {
            return None;
        }
        let mut incomplete_since = connection.start_commands();
        loop {
            let waiting = input.bytes().len();
            let step = session.handle(&mut input, &mut replies).await;
            if input.bytes().is_empty() {
                incomplete_since = None;
            } else if step == Step::Flush
                || input.bytes().len() < waiting
                || incomplete_since.is_none()
            {
                incomplete_since = Some(Instant::now());
            }
            if step == Step::Close {
                linger(stream, &replies).await;
                return None;
            }
            if let Err(error) = send(&mut stream, &replies, config.write_timeout).await {
                let is_stalled = error.kind() == io::ErrorKind::TimedOut;
                return is_stalled.then_some(CloseReason::Stalled);
            }
            if replies.capacity() > MIN_BUFFER {
                replies = Vec::new();
            }
            replies.clear();
            if step == Step::Read {
                break;
            }
            // Others may have waited for a long pipeline.
            tokio::task::yield_now().await;
        }
        connection.end_commands(incomplete_since);
    }
}

/// Writes all replies. Fails if the client reads none of them for the time of the timeout.
async fn send(
    stream: &mut (impl AsyncWrite + Unpin),
    replies: &[u8],
    timeout: Duration,
) -> io::Result<()> {
    let mut written = 0;
    while written < replies.len() {
        let rest = &replies[written..];
        // The timer is needed only if the client does not read.
        let first = poll_fn(|cx| Poll::Ready(Pin::new(&mut *stream).poll_write(cx, rest))).await;
        let length = match first {
            Poll::Ready(length) => length?,
            Poll::Pending => tokio::time::timeout(timeout, stream.write(rest)).await??,
        };
        if length == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        written += length;
    }
    let first = poll_fn(|cx| Poll::Ready(Pin::new(&mut *stream).poll_flush(cx))).await;
    match first {
        Poll::Ready(flushed) => flushed,
        Poll::Pending => tokio::time::timeout(timeout, stream.flush()).await?,
    }
}
