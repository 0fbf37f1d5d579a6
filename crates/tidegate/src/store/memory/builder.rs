//! [`Builder`]: the options of a [`MemoryStore`].

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize};

use super::fingerprint::HashSecret;
use super::shard::Shard;
use super::{KeyStats, MemoryStore, SHARDS, StoreClock};
use crate::clock::{Clock, SystemClock};

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
    clock: Option<Arc<dyn Clock>>,
    max_keys: usize,
}

impl Builder {
    pub(super) fn new() -> Self {
        Self { clock: None, max_keys: 10_000_000 }
    }

    /// Sets the clock; the default is a [`SystemClock`].
    #[must_use]
    pub fn clock(mut self, clock: impl Clock) -> Self {
        self.clock = Some(Arc::new(clock));
        self
    }

    /// Sets the maximum number of keys; the default is 10,000,000. A full store evicts an expired
    /// key for each new one, or else returns [`StoreError::Full`](crate::StoreError::Full).
    #[must_use]
    pub fn max_keys(mut self, max_keys: usize) -> Self {
        self.max_keys = max_keys;
        self
    }

    /// Builds the store.
    #[must_use]
    pub fn build(self) -> MemoryStore {
        MemoryStore {
            shards: std::iter::repeat_with(Shard::default).take(SHARDS).collect(),
            secret: HashSecret::global(),
            clock: self
                .clock
                .map_or_else(|| StoreClock::System(SystemClock::new()), StoreClock::Custom),
            max_keys: self.max_keys,
            keys: KeyStats {
                count: AtomicUsize::new(0),
                next_expiry: AtomicU64::new(u64::MAX),
                eviction_cursor: AtomicUsize::new(0),
                eviction: std::sync::Mutex::new(()),
            },
        }
    }
}
