//! Buffers of messages that arrive in several chunks, within a budget of memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::rejection::Rejection;

/// Maximum number of buffered bytes of one connection: several messages of the maximum size.
const MAX_CONNECTION_BYTES: usize = 20 * 1024 * 1024;
/// Maximum number of buffered bytes of all connections.
const MAX_TOTAL_BYTES: usize = 256 * 1024 * 1024;

/// Bytes of a message that do not count, so that a usual message is decided while others use up the
/// budget. The number of streams bounds their sum to 4 MiB per connection.
const UNCOUNTED_BYTES: usize = 16 * 1024;

/// Bytes that messages of all connections hold.
#[derive(Debug, Clone, Default)]
pub(super) struct TotalBytes(Arc<AtomicUsize>);

/// Bytes that the messages of one connection hold, which are part of the total.
#[derive(Debug, Default)]
pub(super) struct ConnectionBytes {
    total: TotalBytes,
    own: AtomicUsize,
}

/// Bytes of one message. They count until the buffer is dropped, which is after the decision: the
/// decoded message is as large as its bytes.
#[derive(Debug)]
pub(super) struct MessageBuffer<'a> {
    connection: &'a ConnectionBytes,
    pub(super) bytes: Vec<u8>,
    reserved: usize,
}

impl TotalBytes {
    pub(super) fn connection(&self) -> ConnectionBytes {
        ConnectionBytes { total: self.clone(), own: AtomicUsize::new(0) }
    }
}

impl ConnectionBytes {
    pub(super) fn buffer(&self) -> MessageBuffer<'_> {
        MessageBuffer { connection: self, bytes: Vec::new(), reserved: 0 }
    }

    fn reserve(&self, bytes: usize) -> Result<(), Rejection> {
        let (max, scope) = (MAX_CONNECTION_BYTES, "connection");
        try_add(&self.own, bytes, max)
            .then_some(())
            .ok_or(Rejection::BufferedBytes { max, scope })?;
        if try_add(&self.total.0, bytes, MAX_TOTAL_BYTES) {
            return Ok(());
        }
        self.own.fetch_sub(bytes, Ordering::Relaxed);
        Err(Rejection::BufferedBytes { max: MAX_TOTAL_BYTES, scope: "listener" })
    }

    fn release(&self, bytes: usize) {
        self.own.fetch_sub(bytes, Ordering::Relaxed);
        self.total.0.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// Adds to a counter unless the sum exceeds the maximum.
fn try_add(counter: &AtomicUsize, bytes: usize, max: usize) -> bool {
    let add = |held: usize| held.checked_add(bytes).filter(|sum| *sum <= max);
    counter.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).is_ok()
}

impl MessageBuffer<'_> {
    /// Appends a chunk, if the budget has room for it.
    pub(super) fn extend(&mut self, chunk: &[u8]) -> Result<(), Rejection> {
        let needed = self.bytes.len() + chunk.len();
        let missing = needed.saturating_sub(UNCOUNTED_BYTES).saturating_sub(self.reserved);
        if missing > 0 {
            self.connection.reserve(missing)?;
            self.reserved += missing;
        }
        self.bytes.extend_from_slice(chunk);
        Ok(())
    }
}

impl Drop for MessageBuffer<'_> {
    fn drop(&mut self) {
        if self.reserved > 0 {
            self.connection.release(self.reserved);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_share_the_budgets_of_connection_and_listener() {
        let total = TotalBytes::default();
        let chunk = vec![0; MAX_CONNECTION_BYTES / 4 + UNCOUNTED_BYTES];
        let one_too_many = &chunk[..=UNCOUNTED_BYTES];
        let first = total.connection();
        let mut buffers: Vec<_> = (0..4).map(|_| first.buffer()).collect();
        for buffer in &mut buffers {
            buffer.extend(&chunk).expect("within the budget");
        }
        let mut more = first.buffer();
        let over = Rejection::BufferedBytes { max: MAX_CONNECTION_BYTES, scope: "connection" };
        assert_eq!(more.extend(one_too_many), Err(over));
        more.extend(&chunk[..UNCOUNTED_BYTES]).expect("a small message needs no room");
        drop(buffers);
        more.extend(b"x").expect("the bytes were released");
        drop(more);
        assert_eq!(first.own.load(Ordering::Relaxed), 0);

        let others: Vec<_> = (0..16).map(|_| total.connection()).collect();
        for other in &others {
            other.reserve(MAX_TOTAL_BYTES / 16).expect("within the budget");
        }
        let over = Rejection::BufferedBytes { max: MAX_TOTAL_BYTES, scope: "listener" };
        assert_eq!(first.buffer().extend(one_too_many), Err(over));
        others[0].release(1);
        first.buffer().extend(one_too_many).expect("one byte was released");
        assert_eq!(total.0.load(Ordering::Relaxed), MAX_TOTAL_BYTES - 1);
    }
}
