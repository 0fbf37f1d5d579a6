//! Where counts live: in memory, or in Redis behind a breaker, a deny cache and a fallback.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tidegate::store::news::{Mark, News};
use tidegate::{
    Action, Breaker, Charge, Clock, Decision, DenyCache, Error, Fallback, Fleet, Limiter,
    MemoryStore, OnStoreFailure, Part, RedisStore, Source, Store, StoreError, Timestamp,
};
use tracing::Instrument as _;

use crate::config::{RedisConfig, StoreConfig};
use crate::logs::TRACE;
use crate::metrics::Metrics;

pub(crate) enum Counts {
    Memory { limiter: Limiter<MemoryStore>, metrics: Arc<Metrics> },
    Redis(Redis),
}

/// From the outside in: what decides in Redis's place, what remembers its denials, what stops
/// asking while it fails, what counts the calls, Redis.
pub(crate) struct Redis {
    limiter: Limiter<Fallback<Guarded>>,
    /// Without what decides in its place: for callers who have their own word for that.
    strict: Limiter<Guarded>,
    timeout: Duration,
}

type Guarded = Arc<DenyCache<Breaker<Observed>>>;

/// Redis, each call in metrics and traces.
pub(crate) struct Observed {
    store: RedisStore,
    metrics: Arc<Metrics>,
}

impl Counts {
    /// Connects. Redis may be away: it is used from when it is there.
    pub(crate) async fn start(
        config: &StoreConfig,
        metrics: &Arc<Metrics>,
    ) -> Result<Self, StoreError> {
        let metrics = Arc::clone(metrics);
        match config {
            StoreConfig::Memory { max_keys } => {
                let store = MemoryStore::builder().max_keys(*max_keys).build();
                Ok(Self::Memory { limiter: Limiter::new(store), metrics })
            }
            StoreConfig::Redis(config) => Ok(Self::Redis(Redis::start(config, metrics).await?)),
        }
    }

    /// A decision by whoever can make it.
    ///
    /// What waits for Redis is large, and on the heap: inside of a request's future it would be
    /// copied with every request, on memory too, and take longer than the decision.
    pub(crate) async fn decide(
        &self,
        action: Action,
        charge: &Charge<'_>,
    ) -> Result<Decision, Error> {
        match self {
            Self::Memory { limiter, metrics } => {
                let _span =
                    tracing::debug_span!(target: TRACE, "store", ?action, charges = 1).entered();
                let start = Instant::now();
                let decided = limiter.blocking().decide(action, charge);
                metrics.count_store_call(start.elapsed(), store_error(&decided));
                decided.or_else(|error| when_full(action, charge, error))
            }
            Self::Redis(redis) => Box::pin(redis.limiter.decide(action, charge)).await,
        }
    }

    /// One decision for each charge. With acquire, all or nothing.
    pub(crate) async fn decide_all(
        &self,
        action: Action,
        charges: &[Charge<'_>],
    ) -> Result<Vec<Decision>, Error> {
        match self {
            _ if charges.is_empty() => Ok(Vec::new()),
            Self::Memory { limiter, metrics } => {
                let _span =
                    tracing::debug_span!(target: TRACE, "store", ?action, charges = charges.len())
                        .entered();
                let start = Instant::now();
                let decided = limiter.blocking().decide_all(action, charges);
                metrics.count_store_call(start.elapsed(), store_error(&decided));
                decided.or_else(|error| {
                    charges.iter().map(|charge| when_full(action, charge, error.clone())).collect()
                })
            }
            Self::Redis(redis) => Box::pin(redis.limiter.decide_all(action, charges)).await,
        }
    }

    /// As [`Self::decide_all`], but a store that cannot decide is an error.
    pub(crate) async fn decide_all_or_fail(
        &self,
        action: Action,
        charges: &[Charge<'_>],
    ) -> Result<Vec<Decision>, Error> {
        match self {
            Self::Redis(redis) if !charges.is_empty() => {
                Box::pin(redis.strict.decide_all(action, charges)).await
            }
            _ => self.decide_all(action, charges).await,
        }
    }

    /// As [`Self::decide`], but a store that cannot decide is an error.
    pub(crate) async fn decide_or_fail(
        &self,
        action: Action,
        charge: &Charge<'_>,
    ) -> Result<Decision, Error> {
        match self {
            Self::Redis(redis) => Box::pin(redis.strict.decide(action, charge)).await,
            Self::Memory { .. } => self.decide(action, charge).await,
        }
    }

    /// When a request that came at `start` must have its answer. Memory answers at once.
    pub(crate) fn deadline(&self, start: Instant) -> Option<Instant> {
        self.redis().map(|redis| start + redis.timeout)
    }

    /// The time by the store's clock, in microseconds.
    pub(crate) fn now(&self) -> Timestamp {
        match self {
            Self::Memory { limiter, .. } => limiter.store().clock().now(),
            Self::Redis(redis) => redis.limiter.store().clock().now(),
        }
    }

    pub(crate) fn memory_keys(&self) -> usize {
        match self {
            Self::Memory { limiter, .. } => limiter.store().keys(),
            Self::Redis(redis) => redis.limiter.store().local().keys(),
        }
    }

    pub(crate) fn redis(&self) -> Option<&Redis> {
        match self {
            Self::Redis(redis) => Some(redis),
            Self::Memory { .. } => None,
        }
    }
}

impl Redis {
    async fn start(config: &RedisConfig, metrics: Arc<Metrics>) -> Result<Self, StoreError> {
        let store = match config.builder().connect().await {
            Ok(store) => store,
            Err(error @ StoreError::Misconfigured(_)) => return Err(error),
            Err(error) => {
                // A fleet must be able to start, or to start again, while its Redis is away.
                tracing::warn!(%error, "Redis is away: decisions come from each policy's on_store_failure until it is there");
                if config.instances.is_none() {
                    let assumed = Fleet::ASSUMED_INSTANCES;
                    tracing::warn!(
                        "store.instances is not set: until Redis is there, this instance assumes that {assumed} share each \
                         limit, and `local` admits 1/{assumed} of it; set store.instances to the number of instances"
                    );
                }
                config.builder().connect_in_background()?
            }
        };
        let fleet = match config.instances {
            Some(instances) => Fleet::new().expecting(instances),
            None => Fleet::new(),
        };
        let local = MemoryStore::builder().max_keys(config.max_keys).build();
        Ok(Self::around(Observed { store, metrics }, config.timeout(), fleet, local))
    }

    fn around(store: Observed, timeout: Duration, fleet: Fleet, local: MemoryStore) -> Self {
        // The store keeps its own, and must be the first to notice; this one is for charges that
        // several nodes decide one after the other.
        let all = timeout + Duration::from_millis(25);
        let breaker = Breaker::builder(store).deadline(all).probe_deadline(timeout);
        let guarded = Arc::new(DenyCache::new(breaker.build()));
        let fallback = Fallback::builder(Arc::clone(&guarded)).fleet(fleet).local(local).build();
        Self { limiter: Limiter::new(fallback), strict: Limiter::new(guarded), timeout }
    }

    pub(crate) fn fallback(&self) -> &Fallback<Guarded> {
        self.limiter.store()
    }

    pub(crate) fn breaker(&self) -> &Breaker<Observed> {
        self.deny_cache().store()
    }

    pub(crate) fn deny_cache(&self) -> &DenyCache<Breaker<Observed>> {
        self.strict.store()
    }

    pub(crate) fn store(&self) -> &RedisStore {
        &self.breaker().store().store
    }

    /// Whether decisions come from Redis: every node that decides is connected, none is given up,
    /// and none failed just now.
    pub(crate) fn is_up(&self) -> bool {
        let nodes = self.store().nodes();
        let mut deciding = nodes.iter().filter(|node| node.primary).peekable();
        deciding.peek().is_some()
            && deciding.all(|node| node.connected)
            && !self.fallback().stats().falling_back
            && self.breaker().states().iter().all(|part| !part.open)
    }
}

impl Observed {
    async fn observed<T>(
        &self,
        action: Action,
        charges: usize,
        call: Pin<&mut impl Future<Output = Result<T, StoreError>>>,
    ) -> Result<T, StoreError> {
        let start = Instant::now();
        let span = tracing::debug_span!(target: TRACE, "store", ?action, charges);
        let result = if span.is_disabled() { call.await } else { call.instrument(span).await };
        self.metrics.count_store_call(start.elapsed(), result.as_ref().err());
        result
    }
}

impl Store for Observed {
    async fn decide(&self, action: Action, charge: &Charge<'_>) -> Result<Decision, StoreError> {
        self.observed(action, 1, pin!(self.store.decide(action, charge))).await
    }

    async fn decide_all(
        &self,
        action: Action,
        charges: &[Charge<'_>],
    ) -> Result<Vec<Decision>, StoreError> {
        self.observed(action, charges.len(), pin!(self.store.decide_all(action, charges))).await
    }

    fn clock(&self) -> &dyn Clock {
        self.store.clock()
    }

    fn part(&self, charge: &Charge<'_>) -> Part {
        self.store.part(charge)
    }

    async fn probe(&self, part: Part) -> Result<(), StoreError> {
        self.store.probe(part).await
    }

    async fn announce(&self, instance: &str) -> Result<Vec<String>, StoreError> {
        self.store.announce(instance).await
    }

    fn news(&self, since: &Mark) -> Option<impl Future<Output = Result<News, StoreError>> + Send> {
        self.store.news(since)
    }

    fn epoch(&self) -> u64 {
        self.store.epoch()
    }

    fn epoch_of(&self, charge: &Charge<'_>) -> u64 {
        self.store.epoch_of(charge)
    }
}

fn store_error<T>(result: &Result<T, Error>) -> Option<&StoreError> {
    match result {
        Err(Error::Store(error)) => Some(error),
        _ => None,
    }
}

/// Memory that is full has no other memory to go to: only `allow` and `deny` say something then.
fn when_full(action: Action, charge: &Charge<'_>, error: Error) -> Result<Decision, Error> {
    let full = matches!(error, Error::Store(StoreError::Full { .. }));
    let allowed = match charge.on_store_failure() {
        OnStoreFailure::Allow if full => true,
        OnStoreFailure::Deny if full => false,
        _ => return Err(error),
    };
    if !matches!(action, Action::Acquire | Action::Peek) {
        return Err(error);
    }
    Ok(Decision {
        allowed,
        limit: charge.quota().limit(),
        remaining: if allowed { charge.quota().burst() } else { 0 },
        retry_after: Duration::from_secs(u64::from(!allowed)),
        reset_after: Duration::ZERO,
        delay: Duration::ZERO,
        source: if allowed { Source::Allow } else { Source::Deny },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_request_carries_along_is_small() {
        let quota = tidegate::Quota::fixed_window(1, Duration::from_secs(1)).expect("valid");
        let charge = Charge::new("k", &quota);
        let counts =
            Counts::Memory { limiter: Limiter::new(MemoryStore::new()), metrics: Arc::default() };
        assert!(size_of_val(&counts.decide(Action::Acquire, &charge)) <= 256);
        assert!(
            size_of_val(&counts.decide_all(Action::Acquire, std::slice::from_ref(&charge))) <= 256
        );
    }

    #[tokio::test]
    async fn what_waits_for_redis_is_small_too() {
        let quota = tidegate::Quota::fixed_window(1, Duration::from_secs(1)).expect("valid");
        let charge = Charge::new("k", &quota);
        let store =
            RedisStore::builder("redis://127.0.0.1:1").connect_in_background().expect("valid");
        let observed = Observed { store, metrics: Arc::default() };
        let redis =
            Redis::around(observed, Duration::from_millis(100), Fleet::new(), MemoryStore::new());
        assert!(size_of_val(&redis.limiter.decide(Action::Acquire, &charge)) <= 1_024);
        assert!(
            size_of_val(&redis.limiter.decide_all(Action::Acquire, std::slice::from_ref(&charge)))
                <= 1_536
        );
    }
}
