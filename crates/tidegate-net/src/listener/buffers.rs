//! Memory of the buffers of all connections of a listener.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Size of a buffer that every connection may have, whatever the others use.
pub const MIN_BUFFER: usize = 4 * 1024;

/// Number of bytes that larger buffers may take together, such as those of all connections.
#[derive(Debug)]
pub struct BufferBudget {
    left: AtomicUsize,
}

impl BufferBudget {
    pub fn new(max: usize) -> Arc<Self> {
        Arc::new(Self { left: AtomicUsize::new(max) })
    }

    /// Takes bytes. Returns false, and takes none, if too few are left.
    #[must_use]
    pub fn take(&self, bytes: usize) -> bool {
        self.left.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(bytes)).is_ok()
    }

    pub fn release(&self, bytes: usize) {
        self.left.fetch_add(bytes, Relaxed);
    }
}

/// Part of the budget that one buffer takes, until it is dropped.
#[derive(Debug)]
pub struct BufferShare {
    budget: Arc<BufferBudget>,
    bytes: usize,
}

impl BufferShare {
    /// Creates the share of a small buffer, which takes nothing.
    pub fn new(budget: &Arc<BufferBudget>) -> Self {
        Self { budget: Arc::clone(budget), bytes: 0 }
    }

    /// Changes the size of the buffer. Returns false, and changes nothing, if too little is left.
    #[must_use]
    pub fn resize(&mut self, size: usize) -> bool {
        let bytes = if size > MIN_BUFFER { size } else { 0 };
        if bytes > self.bytes && !self.budget.take(bytes - self.bytes) {
            return false;
        }
        if bytes < self.bytes {
            self.budget.release(self.bytes - bytes);
        }
        self.bytes = bytes;
        true
    }

    /// Returns all bytes to the budget.
    pub fn release(&mut self) {
        if self.bytes > 0 {
            self.budget.release(std::mem::take(&mut self.bytes));
        }
    }
}

impl Drop for BufferShare {
    fn drop(&mut self) {
        self.release();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_buffers_share_a_budget_and_small_ones_need_none() {
        let budget = BufferBudget::new(100_000);
        let left = || budget.left.load(Relaxed);
        let mut shares = [(); 3].map(|()| BufferShare::new(&budget));
        let [first, second, small] = &mut shares;
        assert!(first.resize(64_000) && second.resize(36_000));
        assert_eq!(left(), 0);
        assert!(small.resize(MIN_BUFFER) && !small.resize(MIN_BUFFER + 1));
        assert!(!second.resize(36_001), "and keeps what it has");
        assert!(first.resize(32_000) && second.resize(68_000));
        assert!(first.resize(0) && small.resize(MIN_BUFFER + 1));
        assert_eq!(left(), 32_000 - MIN_BUFFER - 1);
        drop(shares);
        assert_eq!(left(), 100_000);
    }
}
