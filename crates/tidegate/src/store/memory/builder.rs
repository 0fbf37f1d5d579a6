//! [`Builder`]: the options of a [`MemoryStore`].

use super::blocks::Blocks;
use super::capacity::Capacity;
use super::holds::Holds;
use super::shard::Shard;
use super::{LOG_ENTRY_BYTES, MemoryStore, StoreClock};
use crate::clock::{Clock, SystemClock};
use crate::key::HashSecret;

/// The default maximum of log bytes for each key, and at least.
const LOG_BYTES_PER_KEY: usize = 100;
const MIN_DEFAULT_LOG_BYTES: usize = 32 << 20;

/// Options of a [`MemoryStore`], made by [`MemoryStore::builder`].
///
/// ```
/// use tidegate::{ManualClock, MemoryStore};
///
/// let clock = ManualClock::new();
/// let store = MemoryStore::builder().clock(clock.clone()).max_keys(1_000_000).build();
/// assert_eq!(store.keys(), 0);
/// ```
#[derive(Debug)]
pub struct Builder {
    clock: Option<Box<dyn Clock>>,
    max_keys: usize,
    max_log_bytes: Option<usize>,
}

impl Builder {
    pub(super) fn new() -> Self {
        Self { clock: None, max_keys: 10_000_000, max_log_bytes: None }
    }

    /// Sets the clock; the default is a [`SystemClock`].
    #[must_use]
    pub fn clock(mut self, clock: impl Clock) -> Self {
        self.clock = Some(Box::new(clock));
        self
    }

    /// Sets the maximum number of keys; the default is 10,000,000. A full store evicts a key for
    /// each new one: an expired key, or else one that has not used up its quota. If it finds none,
    /// it returns [`StoreError::Full`](crate::StoreError::Full). One policy alone takes up to 16/17
    /// of the maximum; the rest is for others.
    #[must_use]
    pub fn max_keys(mut self, max_keys: usize) -> Self {
        self.max_keys = max_keys;
        self
    }

    /// Sets the maximum size of the entries of all sliding logs; the default is 100 bytes for each
    /// key of [`max_keys`](Self::max_keys), and at least 32 MiB. A log takes 16 bytes per request
    /// that counts, and up to twice that while it grows, but no more than its limit needs.
    ///
    /// Beyond the maximum, logs that have not used up their quota are evicted, as keys are. If that
    /// does not make room, the charge gets [`StoreError::Full`](crate::StoreError::Full): a limit
    /// whose log does not fit is never exceeded, but it is not reached, either.
    #[must_use]
    pub fn max_log_bytes(mut self, max_log_bytes: usize) -> Self {
        self.max_log_bytes = Some(max_log_bytes);
        self
    }

    /// Builds the store.
    #[must_use]
    pub fn build(self) -> MemoryStore {
        let max_log_bytes = self.max_log_bytes.unwrap_or_else(|| {
            self.max_keys.saturating_mul(LOG_BYTES_PER_KEY).max(MIN_DEFAULT_LOG_BYTES)
        });
        MemoryStore {
            shards: Box::new(std::array::from_fn(|_| Shard::default())),
            secret: HashSecret::global(),
            clock: self
                .clock
                .map_or_else(|| StoreClock::System(SystemClock::new()), StoreClock::Custom),
            capacity: Capacity::new(self.max_keys, max_log_bytes / LOG_ENTRY_BYTES),
            blocks: Blocks::new(),
            holds: Holds::new(),
        }
    }
}
