//! [`Wire`]: commands and their replies on one socket.
//!
//! A caller writes its commands itself, so that they leave without a detour through another task.
//! The [`Driver`] reads the replies, wakes the callers, and writes what the socket did not take at
//! once. Replies have the order of the commands.

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::resp::{self, Command, RedisError, Value};

/// Open socket, which its callers share.
#[derive(Clone)]
pub(crate) struct Wire {
    state: Arc<Mutex<WireState>>,
}

/// Task that reads the replies of a wire. It completes when the connection is closed, and closes it
/// when it is dropped.
pub(crate) struct Driver {
    state: Arc<Mutex<WireState>>,
    /// Wakers of the calls whose replies have arrived. Kept, so that it is allocated once.
    to_wake: Vec<Waker>,
}

/// Commands that were sent together. Resolves to their replies.
pub(crate) struct Call {
    state: Arc<Mutex<WireState>>,
    number: u64,
    /// Whether the connection was open, so that the commands may have reached the server.
    sent: bool,
    done: bool,
}

pub(crate) trait ByteStream: AsyncRead + AsyncWrite + Unpin + Send {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send> ByteStream for T {}

struct WireState {
    /// `None` once the connection is closed.
    stream: Option<Box<dyn ByteStream>>,
    /// Why the connection was closed.
    error: Option<RedisError>,
    /// Commands that the socket has not taken yet.
    unsent: Vec<u8>,
    /// Whether TLS has bytes that the socket has not taken yet.
    unflushed: bool,
    /// Buffer of received bytes, and how many of them are there.
    buffer: Vec<u8>,
    received: usize,
    /// Calls in the order of their commands: first those that are answered.
    calls: VecDeque<WaitingCall>,
    answered: usize,
    /// Number of the first call.
    first: u64,
    /// The socket always wakes the driver, even if a caller has used it.
    driver: Waker,
}

/// Call that waits for its replies.
struct WaitingCall {
    /// Number of replies that have not arrived yet.
    missing: usize,
    replies: Vec<Value>,
    waker: Option<Waker>,
    /// Whether its caller has the replies, or has gone.
    abandoned: bool,
}

const BUFFER: usize = 16 * 1_024;
/// Number of calls in flight from which on a further one is left to the driver, which writes
/// several of them at once.
const MAX_DIRECT: usize = 2;

impl Wire {
    pub(crate) fn new(stream: impl ByteStream + 'static) -> (Self, Driver) {
        let state = Arc::new(Mutex::new(WireState {
            stream: Some(Box::new(stream)),
            error: None,
            unsent: Vec::new(),
            unflushed: false,
            buffer: vec![0; BUFFER],
            received: 0,
            calls: VecDeque::new(),
            answered: 0,
            first: 0,
            driver: Waker::noop().clone(),
        }));
        (Self { state: Arc::clone(&state) }, Driver { state, to_wake: Vec::new() })
    }

    /// Sends commands at once. The error of a single command is its reply.
    pub(crate) fn send(&self, commands: &[Command]) -> Call {
        self.call(&resp::encode(commands), commands.len())
    }

    /// Sends encoded commands that have this number of replies.
    pub(crate) fn call(&self, commands: &[u8], replies: usize) -> Call {
        let mut to_wake = Vec::new();
        let mut state = lock(&self.state);
        let number = state.first + state.calls.len() as u64;
        let sent = state.stream.is_some();
        if sent {
            state.calls.push_back(WaitingCall {
                missing: replies,
                replies: Vec::with_capacity(replies),
                waker: None,
                abandoned: false,
            });
            state.write(commands, &mut to_wake);
        }
        drop(state);
        to_wake.into_iter().for_each(Waker::wake);
        Call { state: Arc::clone(&self.state), number, sent, done: false }
    }
}

impl Call {
    /// Returns whether the commands may have reached the server.
    pub(crate) fn is_sent(&self) -> bool {
        self.sent
    }
}

impl WireState {
    /// Writes commands after those that are not sent yet.
    fn write(&mut self, commands: &[u8], to_wake: &mut Vec<Waker>) {
        let is_direct = self.unsent.is_empty() && self.calls.len() - self.answered <= MAX_DIRECT;
        let Self { stream: Some(stream), driver, .. } = self else { return };
        if !is_direct {
            self.unsent.extend_from_slice(commands);
            to_wake.push(driver.clone());
            return;
        }
        let mut context = Context::from_waker(driver);
        match poll_write_some(stream, &mut context, commands) {
            Ok(Written { length, flushed }) => {
                self.unflushed = !flushed;
                self.unsent.extend_from_slice(&commands[length..]);
            }
            Err(error) => self.close(error.into(), to_wake),
        }
    }

    /// Writes what is not sent yet, and reads replies. Ready once the connection is closed.
    fn poll(&mut self, context: &mut Context<'_>, to_wake: &mut Vec<Waker>) -> Poll<()> {
        if !self.driver.will_wake(context.waker()) {
            self.driver.clone_from(context.waker());
        }
        let result = ready!(self.poll_stream(context, to_wake));
        if let Err(error) = result {
            self.close(error, to_wake);
        }
        Poll::Ready(())
    }

    fn poll_stream(
        &mut self,
        context: &mut Context<'_>,
        to_wake: &mut Vec<Waker>,
    ) -> Poll<Result<(), RedisError>> {
        let Some(stream) = &mut self.stream else { return Poll::Ready(Ok(())) };
        if !self.unsent.is_empty() || self.unflushed {
            let Written { length, flushed } = poll_write_some(stream, context, &self.unsent)?;
            self.unflushed = !flushed;
            self.unsent.drain(..length);
        }
        loop {
            let Some(stream) = &mut self.stream else { return Poll::Ready(Ok(())) };
            let mut free = ReadBuf::new(&mut self.buffer[self.received..]);
            ready!(Pin::new(stream).poll_read(context, &mut free))?;
            let length = free.filled().len();
            if length == 0 {
                return Poll::Ready(Err(closed()));
            }
            self.received += length;
            self.take_replies(to_wake)?;
            if self.received == self.buffer.len() {
                self.buffer.resize(2 * self.received, 0);
            }
        }
    }

    /// Gives the complete replies in the buffer to their calls.
    fn take_replies(&mut self, to_wake: &mut Vec<Waker>) -> Result<(), RedisError> {
        let mut start = 0;
        while let Some((reply, length)) = resp::parse(&self.buffer[start..self.received])? {
            start += length;
            let Some(call) = self.calls.get_mut(self.answered) else {
                // A server that has too many clients says so before the first command.
                reply.into_result()?;
                return Err(unexpected("a reply to no command"));
            };
            call.replies.push(reply);
            call.missing = call.missing.saturating_sub(1);
            if call.missing == 0 {
                to_wake.extend(call.waker.take());
                self.answered += 1;
            }
        }
        self.buffer.copy_within(start..self.received, 0);
        self.received -= start;
        self.remove_abandoned();
        Ok(())
    }

    /// Removes calls from the front whose replies no caller waits for.
    fn remove_abandoned(&mut self) {
        while self.answered > 0 && self.calls.front().is_some_and(|call| call.abandoned) {
            self.calls.pop_front();
            self.answered -= 1;
            self.first += 1;
        }
    }

    fn close(&mut self, error: RedisError, to_wake: &mut Vec<Waker>) {
        if self.stream.take().is_none() {
            return;
        }
        self.error = Some(error);
        to_wake.extend(self.calls.iter_mut().filter_map(|call| call.waker.take()));
        to_wake.push(self.driver.clone());
    }

    /// Returns the replies of a call, or leaves its waker.
    fn poll_call(&mut self, number: u64, waker: &Waker) -> Poll<Result<Vec<Value>, RedisError>> {
        let index = usize::try_from(number - self.first).unwrap_or(usize::MAX);
        let error = || self.error.clone().unwrap_or_else(closed);
        let Some(call) = self.calls.get_mut(index) else { return Poll::Ready(Err(error())) };
        if index < self.answered {
            let replies = std::mem::take(&mut call.replies);
            call.abandoned = true;
            self.remove_abandoned();
            return Poll::Ready(Ok(replies));
        }
        if self.stream.is_none() {
            return Poll::Ready(Err(error()));
        }
        match &mut call.waker {
            Some(current) => current.clone_from(waker),
            none => *none = Some(waker.clone()),
        }
        Poll::Pending
    }
}

impl Future for Call {
    type Output = Result<Vec<Value>, RedisError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let result = ready!(lock(&self.state).poll_call(self.number, context.waker()));
        self.done = true;
        Poll::Ready(result)
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        if self.done {
            return;
        }
        let mut state = lock(&self.state);
        let index = usize::try_from(self.number - state.first).unwrap_or(usize::MAX);
        if let Some(call) = state.calls.get_mut(index) {
            call.abandoned = true;
            call.waker = None;
        }
        state.remove_abandoned();
    }
}

impl Future for Driver {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let Self { state, to_wake } = &mut *self;
        let closed = lock(state).poll(context, to_wake);
        to_wake.drain(..).for_each(Waker::wake);
        closed
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        let Self { state, to_wake } = self;
        lock(state).close(closed(), to_wake);
        to_wake.drain(..).for_each(Waker::wake);
    }
}

fn lock(state: &Mutex<WireState>) -> MutexGuard<'_, WireState> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Result of a write.
struct Written {
    length: usize,
    flushed: bool,
}

/// Writes as many bytes as the socket takes. If it does not take all, it wakes the context later.
fn poll_write_some(
    stream: &mut Box<dyn ByteStream>,
    context: &mut Context<'_>,
    bytes: &[u8],
) -> io::Result<Written> {
    let mut length = 0;
    while length < bytes.len() {
        match Pin::new(&mut *stream).poll_write(context, &bytes[length..])? {
            Poll::Ready(0) => return Err(io::ErrorKind::WriteZero.into()),
            Poll::Ready(written) => length += written,
            Poll::Pending => break,
        }
    }
    let flushed = Pin::new(stream).poll_flush(context)?.is_ready();
    Ok(Written { length, flushed })
}

fn closed() -> RedisError {
    io::Error::from(io::ErrorKind::BrokenPipe).into()
}

fn unexpected(reason: &'static str) -> RedisError {
    io::Error::new(io::ErrorKind::InvalidData, reason).into()
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};

    use super::*;

    /// Opens a wire whose socket takes this number of bytes at a time.
    fn open(capacity: usize) -> (Wire, DuplexStream) {
        let (ours, theirs) = duplex(capacity);
        let (wire, driver) = Wire::new(ours);
        tokio::spawn(driver);
        (wire, theirs)
    }

    async fn receive(server: &mut DuplexStream, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        server.read_exact(&mut bytes).await.expect("received");
        bytes
    }

    #[tokio::test]
    async fn replies_reach_their_calls_even_if_one_has_gone() {
        let (wire, mut server) = open(1_024);
        let (first, gone, last) =
            (wire.call(b"one", 1), wire.call(b"two", 2), wire.call(b"three", 1));
        drop(gone);
        assert_eq!(receive(&mut server, 11).await, b"onetwothree");
        server.write_all(b"+1\r\n+2\r\n:2\r\n$5\r\nth").await.expect("sent");
        assert_eq!(first.await, Ok(vec![Value::String(b"1".to_vec())]));
        server.write_all(b"ree\r\n").await.expect("sent");
        assert_eq!(last.await, Ok(vec![Value::String(b"three".to_vec())]));
    }

    #[tokio::test]
    async fn more_than_the_socket_takes_is_sent_and_received_bit_by_bit() {
        let (wire, mut server) = open(64);
        let calls: Vec<Call> = (0_u8..5).map(|number| wire.call(&vec![number; 1_000], 1)).collect();
        for number in 0_u8..5 {
            assert_eq!(receive(&mut server, 1_000).await, vec![number; 1_000]);
        }
        // Larger than the buffer.
        let reply = vec![b'x'; 3 * BUFFER];
        tokio::spawn(async move {
            for _ in 0..5 {
                let head = format!("${}\r\n", reply.len());
                let bytes = [head.as_bytes(), reply.as_slice(), b"\r\n"].concat();
                server.write_all(&bytes).await.expect("sent");
            }
        });
        for call in calls {
            assert_eq!(call.await, Ok(vec![Value::String(vec![b'x'; 3 * BUFFER])]));
        }
    }

    #[tokio::test]
    async fn calls_fail_when_the_connection_ends() {
        let (wire, server) = open(1_024);
        let call = wire.call(b"one", 1);
        drop(server);
        assert!(call.await.is_err_and(|error| matches!(error, RedisError::Io(..))));
        assert!(wire.call(b"two", 1).await.is_err_and(|error| matches!(error, RedisError::Io(..))));

        let (wire, mut server) = open(1_024);
        let call = wire.call(b"one", 1);
        server.write_all(b"HTTP/1.1 400 Bad Request\r\n").await.expect("sent");
        assert!(call.await.is_err(), "not Redis");

        let (wire, mut server) = open(1_024);
        server.write_all(b"-ERR max number of clients reached\r\n").await.expect("sent");
        tokio::task::yield_now().await;
        let error = wire.call(b"one", 1).await.expect_err("closed");
        assert_eq!(error.to_string(), "ERR max number of clients reached");
    }

    #[tokio::test]
    async fn dropping_the_driver_closes_the_socket() {
        let (ours, mut server) = duplex(1_024);
        let (wire, driver) = Wire::new(ours);
        let call = wire.call(b"one", 1);
        drop(driver);
        assert!(call.await.is_err());
        let mut received = Vec::new();
        server.read_to_end(&mut received).await.expect("closed");
        assert_eq!(received, b"one");
    }
}
