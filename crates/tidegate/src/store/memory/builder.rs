//! [`Builder`]: the options of a [`MemoryStore`].

use std::sync::atomic::{AtomicU64, AtomicUsize};

use super::fingerprint::HashSecret;
use super::shard::Shard;
use super::{KeyStats, MemoryStore, SHARDS, StoreClock};
use crate::clock::{Clock, SystemClock};

const LOG_ENTRY_BYTES: usize = 16;
const MIN_LOG_ENTRIES: usize = 10_000;

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
    /// it returns [`StoreError::Full`](crate::StoreError::Full).
    #[must_use]
    pub fn max_keys(mut self, max_keys: usize) -> Self {
        self.max_keys = max_keys;
        self
    }

    /// Sets the maximum size of all sliding logs, which take 16 bytes per request that counts; the
    /// default is 100 bytes for each key of [`max_keys`](Self::max_keys). Beyond it, logs that have
    /// not used up their quota are evicted.
    #[must_use]
    pub fn max_log_bytes(mut self, max_log_bytes: usize) -> Self {
        self.max_log_bytes = Some(max_log_bytes);
        self
    }

    /// Builds the store.
    #[must_use]
    pub fn build(self) -> MemoryStore {
        let max_log_entries = self.max_log_entries();
        MemoryStore {
            shards: Box::new(std::array::from_fn(|_| Shard::default())),
            secret: HashSecret::global(),
            clock: self
                .clock
                .map_or_else(|| StoreClock::System(SystemClock::new()), StoreClock::Custom),
            max_keys: self.max_keys,
            max_log_entries,
            keys: KeyStats {
                count: AtomicUsize::new(0),
                next_expiry: AtomicU64::new(u64::MAX),
                eviction_cursor: AtomicUsize::new(0),
                eviction: std::sync::Mutex::new(()),
                evicted: AtomicU64::new(0),
            },
        }
    }

    /// Returns the maximum number of log entries in a shard. Each shard has at least the largest
    /// log that is usual, because keys are not spread evenly.
    fn max_log_entries(&self) -> usize {
        let bytes = self.max_log_bytes.unwrap_or_else(|| self.max_keys.saturating_mul(100));
        (bytes / LOG_ENTRY_BYTES / SHARDS).max(MIN_LOG_ENTRIES)
    }
}
