//! [`DenyCache`]: repeats a denial by the store until its `retry_after` has passed.
//!
//! Units become available earlier only by a refund, a reset or a raised limit. A refund or reset
//! drops the entries of its counts: at once if it goes through this cache, and otherwise through
//! the [invalidations](SharedStore::invalidations), which are polled several times per second while
//! entries are in use. Entries are ignored once the last successful poll is older than one second,
//! and live for five seconds at most. A raised limit is a different quota, and an entry applies
//! only to the quota that it was made for.

use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::task::AbortHandle;

use self::lookup::{CountedRequest, InvalidationGuard, Lookup};
use self::table::DenialTable;
use crate::charge::Charge;
use crate::clock::Clock;
use crate::decision::Decision;
use crate::store::invalidation::{Cursor, Invalidations};
use crate::store::{Action, SharedStore, Store, StoreError};

mod entry;
mod key;
mod lookup;
mod poller;
mod table;
mod unrecorded;

/// A cache of denials around a store: a denial is repeated without a call for as long as it surely
/// holds.
///
/// A denied client that keeps retrying then costs the store no calls. A decision of the cache has
/// [`Source::DenyCache`](crate::Source::DenyCache). Its `retry_after` and `reset_after` decrease as
/// time passes; its `remaining` is that of the denial, for a bucket plus the units drained since.
/// Admissions by other instances are not visible here, so `retry_after` may be too short.
///
/// * A cached denial applies to acquires and peeks with the same key, policy, quota and cost, and
///   for less time than the store said, so no cached denial could have been an admission. A count
///   that is requested with many different costs is also denied by the entry of a lower cost.
/// * A request of several charges is denied if one of them is. The other decisions repeat those of
///   the store when it denied the same request; if it never did, they show untouched quotas.
/// * A denial by a quota that counts denied requests is cached for up to 100 ms, and its
///   `retry_after` does not decrease, because each denial counts. The denials of these 100 ms, at
///   most the limit, are recorded in the store before its next decision.
/// * A refund or reset through this cache takes effect at once, and one through another instance
///   within a second. While invalidations cannot be polled, or without a Tokio runtime to poll
///   them on, the store is called instead.
/// * A change without an invalidation takes effect when the entry expires, after five seconds at
///   most: a direct call to the wrapped memory store, a key deleted in Redis by hand, a different
///   quota on the same count in another process. (A flushed store, or one that lost invalidations
///   in a failover, is detected.)
/// * The entry of a bucket stays useful after its `retry_after`: the cache lets as many units
///   through to the store as can have drained by then, and denies the rest.
/// * The number of entries is bounded. Entries that were not used recently are evicted first.
///
/// ```
/// use std::time::Duration;
/// use tidegate::{Charge, DenyCache, Limiter, MemoryStore, Quota, Source};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let limiter = Limiter::new(DenyCache::new(MemoryStore::new())); // or RedisStore::connect(…)
/// let quota = Quota::sliding_log(1, Duration::from_secs(60))?;
/// let charge = Charge::new("user123", &quota);
///
/// let charged_at = limiter.now();
/// assert!(limiter.acquire(&charge).await?.allowed);
/// assert_eq!(limiter.acquire(&charge).await?.source, Source::Store);
/// assert_eq!(limiter.acquire(&charge).await?.source, Source::DenyCache);
/// limiter.refund(&charge.with_charged_at(charged_at)).await?;
/// assert!(limiter.acquire(&charge).await?.allowed);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct DenyCache<S> {
    inner: Arc<DenyCacheCore<S>>,
}

#[derive(Debug)]
struct DenyCacheCore<S> {
    store: S,
    table: DenialTable,
    /// Whether the store publishes invalidations, which must be polled then.
    has_invalidations: bool,
    /// Time by the store's clock (µs) until which entries may be used.
    fresh_until: AtomicU64,
    /// Whether an entry was used or inserted since the last poll.
    used: AtomicBool,
    poller: Mutex<Option<AbortHandle>>,
}

/// Builder of a [`DenyCache`].
///
/// ```
/// use tidegate::{DenyCache, MemoryStore};
///
/// let cache = DenyCache::builder(MemoryStore::new()).max_entries(10_000).build();
/// assert_eq!(cache.entries(), 0);
/// ```
#[derive(Debug)]
pub struct Builder<S> {
    store: S,
    max_entries: usize,
}

impl<S: SharedStore> Builder<S> {
    /// Sets the maximum number of cached denials; 100,000 by default, which take about 13 MB. With
    /// 0 nothing is cached.
    #[must_use]
    pub fn max_entries(mut self, entries: usize) -> Self {
        self.max_entries = entries;
        self
    }

    /// Creates the cache.
    #[must_use]
    pub fn build(self) -> DenyCache<S> {
        let has_invalidations = self.store.invalidations(&Cursor::default()).is_some();
        let inner = DenyCacheCore {
            store: self.store,
            table: DenialTable::new(self.max_entries),
            has_invalidations,
            fresh_until: AtomicU64::new(if has_invalidations { 0 } else { u64::MAX }),
            used: AtomicBool::new(false),
            poller: Mutex::default(),
        };
        DenyCache { inner: Arc::new(inner) }
    }
}

impl<S: SharedStore> DenyCache<S> {
    /// Creates an empty cache around this store with the default options.
    #[must_use]
    pub fn new(store: S) -> Self {
        Self::builder(store).build()
    }

    /// Returns a builder with the default options.
    #[must_use]
    pub fn builder(store: S) -> Builder<S> {
        Builder { store, max_entries: 100_000 }
    }

    /// Returns the wrapped store.
    #[must_use]
    pub fn store(&self) -> &S {
        &self.inner.store
    }

    /// Returns the number of cached denials, including expired ones that were not evicted yet.
    #[must_use]
    pub fn entries(&self) -> usize {
        self.inner.table.entries()
    }

    /// Drops all cached denials.
    pub fn clear(&self) {
        self.inner.table.clear();
    }
}

impl<S: SharedStore> Store for DenyCache<S> {
    async fn decide(&self, action: Action, charge: &Charge<'_>) -> Result<Decision, StoreError> {
        let inner = &self.inner;
        let (leases, sent, unrecorded) = match inner.lookup(action, charge) {
            Lookup::Hit(decision) => return Ok(decision),
            Lookup::Miss { leases, sent, unrecorded } => (leases, sent, unrecorded),
        };
        if let Some(record) = inner.record_all(std::slice::from_ref(charge), unrecorded) {
            record.await;
        }
        let invalidation =
            InvalidationGuard::begin(&inner.table, action, std::slice::from_ref(charge));
        let counted = CountedRequest::begin(&inner.table, &leases);
        let decision = inner.store.decide(action, charge).await?;
        counted.answered(&decision);
        drop(invalidation);
        let decisions = std::slice::from_ref(&decision);
        inner.on_answer(action, sent, leases.as_slice(), std::slice::from_ref(charge), decisions);
        Ok(decision)
    }

    async fn decide_all(
        &self,
        action: Action,
        charges: &[Charge<'_>],
    ) -> Result<Vec<Decision>, StoreError> {
        let inner = &self.inner;
        let (leases, sent, unrecorded) = match inner.lookup_all(action, charges) {
            Lookup::Hit(decisions) => return Ok(decisions),
            Lookup::Miss { leases, sent, unrecorded } => (leases, sent, unrecorded),
        };
        if let Some(record) = inner.record_all(charges, unrecorded) {
            record.await;
        }
        let invalidation = InvalidationGuard::begin(&inner.table, action, charges);
        let decisions = inner.store.decide_all(action, charges).await?;
        drop(invalidation);
        inner.on_answer(action, sent, leases.as_slice(), charges, &decisions);
        Ok(decisions)
    }

    fn clock(&self) -> &dyn Clock {
        self.inner.store.clock()
    }
}

impl<S: SharedStore> SharedStore for DenyCache<S> {
    async fn heartbeat(&self, instance: &str) -> Result<Vec<String>, StoreError> {
        self.inner.store.heartbeat(instance).await
    }

    fn invalidations(
        &self,
        since: &Cursor,
    ) -> Option<impl Future<Output = Result<Invalidations, StoreError>> + Send> {
        self.inner.store.invalidations(since)
    }

    fn epoch(&self) -> u64 {
        self.inner.store.epoch()
    }

    fn epoch_of(&self, charge: &Charge<'_>) -> u64 {
        self.inner.store.epoch_of(charge)
    }
}

impl<S> Drop for DenyCache<S> {
    fn drop(&mut self) {
        let poller = self.inner.poller.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(poller) = poller {
            poller.abort();
        }
    }
}
