//! [`DenyCache`]: repeats a denial by the store until its `retry_after` has passed.
//!
//! An entry is the store's answer to one request, with all of its charges. It is forgotten as soon
//! as one of its counts may have changed: by any other call through this cache that may have
//! charged or returned units, and by a refund or reset of another instance, through the
//! [invalidations](SharedStore::invalidations), which are polled several times per second while
//! entries are in use. Entries are ignored once the last successful poll is older than one second,
//! and live for five seconds at most; that of a block lives until its end.

use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::task::AbortHandle;

use self::table::{CacheQuery, CacheSecret, CachedDenial, CountVersions, DenialTable};
use crate::charge::Charge;
use crate::clock::Clock;
use crate::decision::{Decision, Source};
use crate::store::invalidation::{CountId, Cursor, Invalidations};
use crate::store::{Action, Outcome, SharedStore, Store, StoreError};

mod poller;
mod table;

/// A cache of denials around a store: a denial is repeated without a call for as long as it surely
/// holds.
///
/// A denied client that keeps retrying then costs the store no calls. A decision of the cache has
/// [`Source::DenyCache`]. Its `retry_after` and `reset_after` decrease as
/// time passes. Its `remaining` is that of the denial: the exact number if the request lacks one
/// unit only, as one of cost 1 does, and else a lower bound that is at most one second old.
///
/// * An entry is a denial of exactly one request: the keys, policies, quotas and costs of all
///   charges. An acquire or a peek of the same charges repeats all decisions of the store, a peek
///   only if every charge is denied. Any other request is decided by the store.
/// * It holds for less time than the store said, until the first of its charges would be allowed,
///   so no cached denial could have been an admission.
/// * An admission, report, refund or reset through this cache drops the entries of its counts, and
///   so does a call that is not answered. A refund or reset through another instance takes effect
///   within a second. While invalidations cannot be polled, or without a Tokio runtime to poll
///   them on, the store is called instead.
/// * Units that another instance charges are not visible until the entry expires: it still denies
///   nothing that the store would admit, but `retry_after` is too short if the other instance was
///   admitted with a smaller cost, or reported units, since the denial.
/// * The denial of a key that is [blocked](crate::Quota::with_block_for) is repeated until the end
///   of the block, if an acquire has received it. Other limits of the same request then show a lower
///   bound of the units that are left.
/// * A quota that counts denied requests is not cached, because each denial changes its count.
/// * A change without an invalidation takes effect when the entry expires, after five seconds at
///   most, or at the end of a block: a direct call to the wrapped memory store, a key deleted in Redis by hand, a different
///   quota on the same count in another process. (A flushed store, or one that lost invalidations
///   in a failover, is detected.)
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
    secret: CacheSecret,
    versions: CountVersions,
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
    /// Sets the maximum number of cached decisions, one for each charge of a denied request;
    /// 100,000 by default, which take about 12 MB. With 0 nothing is cached.
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
            secret: CacheSecret::new(),
            versions: CountVersions::new(),
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

    /// Returns the number of cached denials, including stale ones that were not evicted yet.
    #[must_use]
    pub fn entries(&self) -> usize {
        self.inner.table.entries()
    }

    /// Drops all cached denials.
    pub fn clear(&self) {
        self.inner.clear();
    }
}

impl<S: SharedStore> DenyCacheCore<S> {
    fn now(&self) -> u64 {
        self.store.clock().now().as_micros()
    }

    /// Returns the query for a request, or `None` if its denial may not be repeated.
    fn query(&self, action: Action, charges: &[Charge<'_>]) -> Option<CacheQuery> {
        let is_cacheable = matches!(action, Action::Acquire | Action::Peek)
            && !charges.iter().any(may_be_free_earlier);
        is_cacheable.then(|| {
            let now = self.now();
            // Before the versions: a poll changes versions first, and makes entries fresh then.
            let is_fresh = self.is_fresh(now);
            let mut version = self.versions.common();
            let add = |count| version += self.versions.of(count);
            let request = self.secret.hash(charges, |charge| self.store.epoch_of(charge), add);
            CacheQuery { request, version, now, is_fresh }
        })
    }

    /// Finds the cached denial of a request, and returns what `read` makes of it.
    fn find<T>(
        &self,
        action: Action,
        query: &CacheQuery,
        read: impl FnOnce(&CachedDenial) -> T,
    ) -> Option<T> {
        if !query.is_fresh {
            return None;
        }
        let found = self.table.find(query, |denial| {
            (action == Action::Acquire || denial.is_of_all_charges()).then(|| read(denial))
        });
        if found.is_some() {
            self.mark_used();
        }
        found
    }

    fn is_fresh(&self, now: u64) -> bool {
        now < self.fresh_until.load(Ordering::Acquire)
    }

    /// Caches a denial by the store. Any other answer means that units may have been charged or
    /// returned.
    fn on_answer(
        self: &Arc<Self>,
        query: Option<CacheQuery>,
        guard: Option<ChangeGuard<'_>>,
        charges: &[Charge<'_>],
        decisions: &[Decision],
    ) {
        let is_denied = decisions.iter().any(|decision| !decision.allowed)
            && decisions.iter().all(|decision| decision.source == Source::Store);
        // An acquire must reach the store to start a block, whatever a peek has seen.
        let is_peek_before_block =
            guard.is_none() && charges.iter().any(|charge| charge.quota().has_blocks());
        let Some(query) = query.filter(|_| is_denied && !is_peek_before_block) else { return };
        if let Some(guard) = guard {
            guard.cancel();
        }
        let received = self.now().max(query.now);
        if let Some(denial) = CachedDenial::new(query, received, charges, decisions) {
            self.table.insert(denial);
            self.mark_used();
        }
        if self.has_invalidations && !self.is_fresh(received) {
            self.ensure_poller();
        }
    }

    /// Marks the cache as used. All threads share the flag, so it is written only when it changes.
    fn mark_used(&self) {
        if !self.used.load(Ordering::Relaxed) {
            self.used.store(true, Ordering::Relaxed);
        }
    }

    /// Drops all entries, and keeps denials that are in flight now from becoming entries.
    fn clear(&self) {
        self.versions.change_all();
        self.table.clear();
    }
}

/// Returns whether a denial may end before its wait, or the charge was admitted before.
fn may_be_free_earlier(charge: &Charge<'_>) -> bool {
    let quota = charge.quota();
    charge.hold().is_some() || quota.count_denied() || quota.releases_holds()
}

/// Changes the versions of the counts of a call when the call ends, which drops their entries. It
/// does so in `drop`, so that a failed or cancelled call, which may have run, is covered.
struct ChangeGuard<'a> {
    versions: &'a CountVersions,
    charges: &'a [Charge<'a>],
}

impl<'a> ChangeGuard<'a> {
    /// Returns `None` for an action that changes no counts.
    fn begin(
        versions: &'a CountVersions,
        action: Action,
        charges: &'a [Charge<'a>],
    ) -> Option<Self> {
        (action != Action::Peek).then(|| Self { versions, charges })
    }

    /// Ends a call that has changed nothing.
    fn cancel(mut self) {
        self.charges = &[];
    }
}

impl Drop for ChangeGuard<'_> {
    fn drop(&mut self) {
        self.charges.iter().for_each(|charge| self.versions.change(CountId::of(charge)));
    }
}

impl<S: SharedStore> Store for DenyCache<S> {
    fn decide(
        &self,
        action: Action,
        charge: &Charge<'_>,
    ) -> Outcome<impl Future<Output = Result<Decision, StoreError>> + Send> {
        Outcome::Pending(async move {
            let inner = &self.inner;
            let charges = std::slice::from_ref(charge);
            let query = inner.query(action, charges);
            if let Some(query) = &query {
                let read = |denial: &CachedDenial| denial.decision(0, charge.quota(), query.now);
                if let Some(decision) = inner.find(action, query, read) {
                    return Ok(decision);
                }
            }
            let guard = ChangeGuard::begin(&inner.versions, action, charges);
            let decision = inner.store.decide(action, charge).await?;
            inner.on_answer(query, guard, charges, std::slice::from_ref(&decision));
            Ok(decision)
        })
    }

    fn decide_all(
        &self,
        action: Action,
        charges: &[Charge<'_>],
    ) -> Outcome<impl Future<Output = Result<Vec<Decision>, StoreError>> + Send> {
        Outcome::Pending(async move {
            let inner = &self.inner;
            let query = inner.query(action, charges);
            if let Some(query) = &query {
                let read = |denial: &CachedDenial| {
                    let quotas = charges.iter().map(Charge::quota).enumerate();
                    quotas.map(|(at, quota)| denial.decision(at, quota, query.now)).collect()
                };
                if let Some(decisions) = inner.find(action, query, read) {
                    return Ok(decisions);
                }
            }
            let guard = ChangeGuard::begin(&inner.versions, action, charges);
            let decisions = inner.store.decide_all(action, charges).await?;
            inner.on_answer(query, guard, charges, &decisions);
            Ok(decisions)
        })
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
