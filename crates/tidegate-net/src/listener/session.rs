//! Sessions: connections of protocols whose commands are answered in order, several at a time.
//!
//! The session handles all commands that have arrived, and its replies are sent in one write. While
//! a client does not read them, nothing is read from it.

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _, ReadBuf};
use tokio::sync::watch;
use tokio::time::Instant;

use super::buffers::{BufferBudget, BufferShare, MIN_BUFFER};
use super::closed::CloseReason;
use super::connection::{Connection, Timeouts, Watcher};
use super::guarded_stream::linger;
use super::slots::Accepted;
use super::{ListenerConfig, drain};

/// Commands that a connection may handle in one poll, before it lets others run: some 50 µs.
const MAX_COMMANDS_PER_POLL: u32 = 128;

/// Commands of one client, and its replies.
pub trait Session: Send {
    /// Last reply to a client whose command is too long for the buffers that are left.
    const BUFFERS_FULL: &'static [u8];

    /// Returns the size of the longest command that the client may send now: a session closes when
    /// it has not handled that many bytes.
    fn max_input(&self) -> usize;

    /// Handles the commands in the input, and appends the replies.
    fn handle(
        &mut self,
        input: &mut Input,
        replies: &mut Vec<u8>,
        commands: &mut CommandBudget,
    ) -> impl Future<Output = SessionStep> + Send;
}

/// Number of commands that a connection may still handle in this poll.
#[derive(Debug)]
pub struct CommandBudget {
    left: u32,
}

impl Default for CommandBudget {
    fn default() -> Self {
        Self { left: MAX_COMMANDS_PER_POLL }
    }
}

impl CommandBudget {
    /// Counts a command. Returns false if others have to run first.
    pub fn take(&mut self) -> bool {
        let is_left = self.left > 0;
        self.left = self.left.saturating_sub(1);
        is_left
    }
}

/// Next step of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SessionStep {
    /// All complete commands are handled.
    Read,
    /// Others are to run before the next commands are handled.
    Yield,
    /// The same, and the replies are to be sent first.
    Flush,
    /// The last reply is to be sent, and the connection closed.
    Close,
}

/// Bytes that were received and not yet handled, in a buffer of bounded size.
pub struct Input {
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    max: usize,
    share: BufferShare,
}

impl Input {
    /// Creates an empty buffer for up to `max` bytes.
    pub fn new(max: usize, budget: &Arc<BufferBudget>) -> Self {
        let share = BufferShare::new(budget);
        Self { buffer: vec![0; MIN_BUFFER.min(max)], start: 0, end: 0, max, share }
    }

    /// Returns the bytes that are not yet handled.
    pub fn bytes(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }

    /// Removes handled bytes from the front.
    pub fn consume(&mut self, length: usize) {
        self.start = (self.start + length).min(self.end);
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    /// Appends bytes as if they had arrived: for tests of a session without a connection.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.truncate(self.end);
        self.buffer.extend_from_slice(bytes);
        self.end = self.buffer.len();
    }

    /// Reads all that has arrived, up to the size of the buffer. Returns false at the end of the
    /// stream. Fails if the buffer is full, and may not grow.
    fn poll_read(
        &mut self,
        cx: &mut Context<'_>,
        mut stream: Pin<&mut impl AsyncRead>,
    ) -> Poll<io::Result<bool>> {
        let mut has_read = false;
        loop {
            if !self.make_room() {
                let full = Err(io::ErrorKind::OutOfMemory.into());
                return Poll::Ready(if has_read { Ok(true) } else { full });
            }
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
                    let size = MIN_BUFFER.min(self.max);
                    if self.start == self.end && self.buffer.len() != size {
                        self.buffer = vec![0; size];
                        self.share.release();
                    }
                    return Poll::Pending;
                }
            }
        }
    }

    /// Makes room for more bytes: a full buffer grows to twice its size. Returns false if it may
    /// not grow.
    fn make_room(&mut self) -> bool {
        if self.end < self.buffer.len() {
            return true;
        }
        if self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let length = self.buffer.len();
        let size = (2 * length).min(self.max);
        if self.end > length / 2 && size > length && self.share.resize(size) {
            self.buffer.reserve_exact(size - length);
            self.buffer.resize(size, 0);
        }
        self.end < self.buffer.len()
    }
}

/// Serves a session until it closes, and returns why, if this side closed it early.
pub async fn serve_session<I>(
    stream: I,
    session: impl Session,
    budget: &Arc<BufferBudget>,
    accepted: Accepted,
    stop: watch::Receiver<bool>,
    config: &ListenerConfig,
) -> Option<CloseReason>
where
    I: AsyncRead + AsyncWrite + Unpin + Send,
{
    let connection = &accepted.connection;
    let timeouts = Timeouts { idle: config.idle_timeout, write: config.write_timeout };
    let mut watcher = Watcher::new(Arc::clone(connection), timeouts);
    // The time for a command starts with its first byte. Clients connect before they need it.
    connection.start_request();
    connection.end_request(None);
    let is_draining = AtomicBool::new(false);
    let mut closed = None;
    let served = async {
        closed = run(stream, session, budget, connection, &is_draining, config).await;
    };
    let start_drain = |_: Pin<&mut _>| is_draining.store(true, Ordering::Relaxed);
    let watch = |cx: &mut Context<'_>| watcher.poll(cx);
    drain::drive(served, start_drain, stop, None, &connection.age, watch).await;
    closed.or_else(|| watcher.close_reason())
}

async fn run<I: AsyncRead + AsyncWrite + Unpin, S: Session>(
    mut stream: I,
    mut session: S,
    budget: &Arc<BufferBudget>,
    connection: &Connection,
    is_draining: &AtomicBool,
    config: &ListenerConfig,
) -> Option<CloseReason> {
    let mut input = Input::new(session.max_input(), budget);
    let mut replies = Vec::new();
    let mut unread = BufferShare::new(budget);
    let mut commands = CommandBudget::default();
    loop {
        input.max = session.max_input();
        let read = poll_fn(|cx| match input.poll_read(cx, Pin::new(&mut stream)) {
            // Commands that have arrived before the drain are answered.
            Poll::Pending if is_draining.load(Ordering::Relaxed) => Poll::Ready(Ok(false)),
            polled => polled,
        });
        match read.await {
            Ok(true) => {}
            Err(error) if error.kind() == io::ErrorKind::OutOfMemory => {
                drop(input);
                linger(stream, S::BUFFERS_FULL).await;
                return Some(CloseReason::BuffersFull);
            }
            Ok(false) | Err(_) => return None,
        }
        let mut incomplete_since = connection.start_request();
        loop {
            if commands.left == 0 {
                tokio::task::yield_now().await;
                commands = CommandBudget::default();
            }
            let waiting = input.bytes().len();
            let step = session.handle(&mut input, &mut replies, &mut commands).await;
            if input.bytes().is_empty() {
                incomplete_since = None;
            } else if step == SessionStep::Flush
                || input.bytes().len() < waiting
                || incomplete_since.is_none()
            {
                incomplete_since = Some(Instant::now());
            }
            match step {
                SessionStep::Yield => {
                    commands.left = 0;
                    continue;
                }
                // Others may have waited for a long pipeline.
                SessionStep::Flush => commands.left = 0,
                SessionStep::Read => {}
                SessionStep::Close => {
                    drop(input);
                    linger(stream, &replies).await;
                    return None;
                }
            }
            if let Err(error) = send(&mut stream, &replies, &mut unread, config).await {
                return match error.kind() {
                    io::ErrorKind::TimedOut => Some(CloseReason::Stalled),
                    io::ErrorKind::OutOfMemory => Some(CloseReason::BuffersFull),
                    _ => None,
                };
            }
            if replies.capacity() > MIN_BUFFER {
                replies = Vec::new();
            }
            replies.clear();
            if step == SessionStep::Read {
                break;
            }
        }
        connection.end_request(incomplete_since);
    }
}

/// Writes all replies. Fails if the client reads none of them for the time of the timeout, or if
/// the buffers are full of replies that clients do not read.
async fn send(
    stream: &mut (impl AsyncWrite + Unpin),
    replies: &Vec<u8>,
    unread: &mut BufferShare,
    config: &ListenerConfig,
) -> io::Result<()> {
    let timeout = config.write_timeout;
    let mut written = 0;
    while written < replies.len() {
        let rest = &replies[written..];
        // The timer is needed only if the client does not read.
        let first = poll_fn(|cx| Poll::Ready(Pin::new(&mut *stream).poll_write(cx, rest))).await;
        let length = match first {
            Poll::Ready(length) => length?,
            Poll::Pending if !unread.resize(replies.capacity()) => {
                return Err(io::ErrorKind::OutOfMemory.into());
            }
            Poll::Pending => tokio::time::timeout(timeout, stream.write(rest)).await??,
        };
        if length == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        written += length;
    }
    unread.release();
    tokio::time::timeout(timeout, stream.flush()).await?
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::time::Duration;

    use tokio::io::{AsyncReadExt as _, DuplexStream, duplex};

    use super::super::slots::ConnectionSlots;
    use super::*;

    /// Longest line, and size of the buffer for it.
    const MAX_LINE: usize = 64 * 1024;

    /// Session that answers each line with its first word, a number, of `x`.
    struct Lines<'a>(&'a AtomicUsize);

    impl Session for Lines<'_> {
        const BUFFERS_FULL: &'static [u8] = b"full\n";

        fn max_input(&self) -> usize {
            MAX_LINE
        }

        async fn handle(
            &mut self,
            input: &mut Input,
            replies: &mut Vec<u8>,
            commands: &mut CommandBudget,
        ) -> SessionStep {
            while let Some(end) = input.bytes().iter().position(|byte| *byte == b'\n') {
                if !commands.take() {
                    return SessionStep::Yield;
                }
                let line = String::from_utf8_lossy(&input.bytes()[..end]);
                let number = line.split(' ').next().and_then(|word| word.parse().ok());
                replies.extend(std::iter::repeat_n(b'x', number.unwrap_or(0)));
                replies.push(b'\n');
                input.consume(end + 1);
                self.0.fetch_add(1, Ordering::Relaxed);
            }
            SessionStep::Read
        }
    }

    fn config() -> ListenerConfig {
        ListenerConfig {
            max_connections: 10,
            max_connections_per_address: 10,
            max_streams: 1,
            idle_timeout: Duration::from_secs(60),
            closed: Arc::default(),
            drain_timeout: Duration::from_secs(1),
            max_age: None,
            write_timeout: Duration::from_secs(10),
            reject_ambiguous: false,
            inline_streams: true,
            proxy_protocol: Vec::new(),
        }
    }

    /// Serves a stream, and counts its commands.
    async fn serve(
        stream: impl AsyncRead + AsyncWrite + Unpin + Send,
        budget: &Arc<BufferBudget>,
        handled: &AtomicUsize,
    ) -> Option<CloseReason> {
        let accepted = ConnectionSlots::new(1, 1).take(None).expect("a slot");
        let (_stop, stopped) = watch::channel(false);
        serve_session(stream, Lines(handled), budget, accepted, stopped, &config()).await
    }

    /// Opens a connection, and returns the side of the client.
    fn open(
        budget: &Arc<BufferBudget>,
    ) -> (DuplexStream, tokio::task::JoinHandle<Option<CloseReason>>) {
        let (client, stream) = duplex(1024);
        let budget = Arc::clone(budget);
        let served = async move { serve(stream, &budget, &AtomicUsize::new(0)).await };
        (client, tokio::spawn(served))
    }

    async fn ask(client: &mut DuplexStream, line: &str) -> String {
        client.write_all(line.as_bytes()).await.expect("sent");
        let mut reply = Vec::new();
        while reply.last() != Some(&b'\n') {
            reply.push(client.read_u8().await.expect("a reply"));
        }
        String::from_utf8(reply).expect("text")
    }

    #[tokio::test]
    async fn long_command_without_a_share_of_the_budget_is_refused() {
        let budget = BufferBudget::new(MAX_LINE + 16 * 1024);
        let (mut first, _) = open(&budget);
        let rest = "a".repeat(MAX_LINE - 100);
        first.write_all(format!("1 {rest}").as_bytes()).await.expect("sent");
        let (mut second, served) = open(&budget);
        assert_eq!(ask(&mut second, "3\n").await, "xxx\n");
        let small = format!("2 {}\n", "b".repeat(3_000));
        for _ in 0..100 {
            assert_eq!(ask(&mut second, &small).await, "xx\n", "short commands have room");
        }
        assert_eq!(ask(&mut second, &format!("2 {rest}")).await, "full\n");
        drop(second);
        assert_eq!(served.await.expect("served"), Some(CloseReason::BuffersFull));
        assert_eq!(ask(&mut first, "\n").await, "x\n");
        let (mut third, _) = open(&budget);
        assert_eq!(ask(&mut third, &format!("2 {rest}\n")).await, "xx\n", "the share is free");
    }

    #[tokio::test(start_paused = true)]
    async fn unread_replies_take_a_share_of_the_budget() {
        let budget = BufferBudget::new(100_000);
        let (mut first, stalled) = open(&budget);
        first.write_all(b"30000\n").await.expect("sent");
        let (mut second, refused) = open(&budget);
        second.write_all(b"30000\n").await.expect("sent");
        assert_eq!(refused.await.expect("served"), Some(CloseReason::BuffersFull));
        assert_eq!(stalled.await.expect("served"), Some(CloseReason::Stalled));
        let (mut third, _) = open(&budget);
        assert_eq!(ask(&mut third, "30000\n").await.len(), 30_001);
    }

    /// Client that sends commands for ever, and reads all replies.
    struct Endless {
        lines: usize,
    }

    impl AsyncRead for Endless {
        fn poll_read(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
            buffer: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            for _ in 0..self.lines.min(buffer.remaining() / 2) {
                buffer.put_slice(b"1\n");
            }
            Poll::Ready(Ok(()))
        }
    }

    impl AsyncWrite for Endless {
        fn poll_write(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
            bytes: &[u8],
        ) -> Poll<io::Result<usize>> {
            Poll::Ready(Ok(bytes.len()))
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    /// The runtime has one thread, so the number of commands shows who had to wait.
    #[tokio::test]
    async fn endless_pipelines_let_others_run() {
        let budget = BufferBudget::new(1 << 20);
        let handled = Arc::new(AtomicUsize::new(0));
        // The commands arrive by the thousand, or a few at a time.
        for lines in [20_000, 20_000, 7, 1] {
            let (budget, handled) = (Arc::clone(&budget), Arc::clone(&handled));
            tokio::spawn(async move { serve(Endless { lines }, &budget, &handled).await });
        }
        let (mut client, _) = open(&budget);
        for _ in 0..20 {
            let before = handled.load(Ordering::Relaxed);
            assert_eq!(ask(&mut client, "1\n").await, "x\n");
            let meanwhile = handled.load(Ordering::Relaxed) - before;
            let all = 4 * MAX_COMMANDS_PER_POLL as usize;
            assert!((1..=2 * all).contains(&meanwhile), "{meanwhile} commands of others");
        }
    }
}
