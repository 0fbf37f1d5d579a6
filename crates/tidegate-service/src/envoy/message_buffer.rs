//! Buffers of messages that arrive in several chunks, within a budget of memory.

use std::sync::Arc;

use super::rejection::Rejection;
use tidegate_net::listener::BufferBudget;

/// Maximum number of buffered bytes of one connection: several messages of the maximum size.
const MAX_CONNECTION_BYTES: usize = 20 * 1024 * 1024;
/// Maximum number of buffered bytes of all connections.
const MAX_TOTAL_BYTES: usize = 256 * 1024 * 1024;

/// Bytes of a message that do not count, so that a small message is decided while others use up the
/// budget. The number of streams bounds their sum to 4 MiB per connection.
const UNCOUNTED_BYTES: usize = 16 * 1024;

/// Budget of the messages of one connection, which is part of that of all connections.
#[derive(Debug)]
pub(super) struct ConnectionBudget {
    total: Arc<BufferBudget>,
    own: Arc<BufferBudget>,
}

/// Bytes of one message. They count until the buffer is dropped, which is after the decision: the
/// decoded message is as large as its bytes.
#[derive(Debug)]
pub(super) struct MessageBuffer<'a> {
    connection: &'a ConnectionBudget,
    pub(super) bytes: Vec<u8>,
    reserved: usize,
}

/// Returns the budget of all connections.
pub(super) fn total_budget() -> Arc<BufferBudget> {
    BufferBudget::new(MAX_TOTAL_BYTES)
}

impl ConnectionBudget {
    pub(super) fn new(total: &Arc<BufferBudget>) -> Self {
        Self { total: Arc::clone(total), own: BufferBudget::new(MAX_CONNECTION_BYTES) }
    }

    pub(super) fn buffer(&self) -> MessageBuffer<'_> {
        MessageBuffer { connection: self, bytes: Vec::new(), reserved: 0 }
    }

    fn reserve(&self, bytes: usize) -> Result<(), Rejection> {
        if !self.own.take(bytes) {
            let (max, scope) = (MAX_CONNECTION_BYTES, "connection");
            return Err(Rejection::BufferedBytes { max, scope });
        }
        if !self.total.take(bytes) {
            self.own.release(bytes);
            return Err(Rejection::BufferedBytes { max: MAX_TOTAL_BYTES, scope: "listener" });
        }
        Ok(())
    }

    fn release(&self, bytes: usize) {
        self.own.release(bytes);
        self.total.release(bytes);
    }
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
        let total = total_budget();
        let chunk = vec![0; MAX_CONNECTION_BYTES / 4 + UNCOUNTED_BYTES];
        let one_too_many = &chunk[..=UNCOUNTED_BYTES];
        let first = ConnectionBudget::new(&total);
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
        assert!(first.own.take(MAX_CONNECTION_BYTES), "all bytes were released");
        first.own.release(MAX_CONNECTION_BYTES);

        let others: Vec<_> = (0..16).map(|_| ConnectionBudget::new(&total)).collect();
        for other in &others {
            other.reserve(MAX_TOTAL_BYTES / 16).expect("within the budget");
        }
        let over = Rejection::BufferedBytes { max: MAX_TOTAL_BYTES, scope: "listener" };
        assert_eq!(first.buffer().extend(one_too_many), Err(over));
        others[0].release(1);
        first.buffer().extend(one_too_many).expect("one byte was released");
        assert!(total.take(1) && !total.take(1), "one byte is left");
    }
}
