//! Store of the service: memory, or Redis with a deny cache and a fallback.

use std::pin::{Pin, pin};
use std::slice::from_ref;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures_util::future::Either;
use serde::Serialize;
use tidegate::store::invalidation::{Cursor, Invalidations};
use tidegate::store::redis::NodeHealth;
use tidegate::{
    Action, Charge, Clock, Decision, DenyCache, Fallback, Fleet, MemoryStore, Outcome, RedisStore,
    SharedStore, Store, StoreError,
};
use tracing::Instrument as _;

use crate::logs::TRACE;
use crate::metrics::{Metrics, MetricsSection, write_numbers};
use tidegate_config::{RedisConfig, StoreConfig};

mod redis_metrics;

/// Store of the service.
#[expect(clippy::large_enum_variant, reason = "a process has only one backend")]
pub enum Backend {
    Memory(MemoryBackend),
    Redis(RedisBackend),
}

/// Memory, which records its errors and, in traces, its calls. The time of a call is that of the
/// decision.
pub struct MemoryBackend {
    store: MemoryStore,
    metrics: Arc<Metrics>,
    /// Time of the last charge without room.
    last_full: Mutex<Option<Instant>>,
}

/// Redis and its wrappers, from the outside in: the fallback decides locally, the deny cache
/// repeats denials, and the instrumented store records calls in metrics and traces.
pub struct RedisBackend {
    fallback: Fallback<CachedRedis>,
    timeout: Duration,
}

/// Availability of Redis to this process.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, utoipa::ToSchema)]
pub struct StoreHealth {
    pub state: StoreState,
    primaries: usize,
    pub primaries_unavailable: usize,
    /// Part of the slots of a cluster whose keys cannot be decided. Without a cluster it is 0 or 1.
    pub slots_unavailable_ratio: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum StoreState {
    Up,
    /// Some slots of a cluster are unavailable.
    PartlyDown,
    Down,
}

/// Time for which memory that has rejected a charge is reported as full.
const FULL_TTL: Duration = Duration::from_secs(10);

type CachedRedis = DenyCache<InstrumentedStore<RedisStore>>;

/// Store that records each call in metrics and traces.
pub struct InstrumentedStore<S> {
    store: S,
    metrics: Arc<Metrics>,
}

impl MetricsSection for Backend {
    fn write_metrics(&self, text: &mut String) {
        write_memory(text, self.memory_store());
        let is_up = self.redis().is_none_or(RedisBackend::is_up);
        let help = "Whether the store is available.";
        write_numbers(text, &[("tidegate_store_up", "gauge", help, u64::from(is_up))]);
        if let Some(redis) = self.redis() {
            redis_metrics::write(text, redis);
        }
    }
}

/// Writes the metrics of the counts in this process.
fn write_memory(text: &mut String, memory: &MemoryStore) {
    let count = |number: usize| u64::try_from(number).unwrap_or(u64::MAX);
    #[rustfmt::skip]
    let numbers = [
        ("tidegate_memory_keys", "gauge",
            "Keys in the memory of this process.", count(memory.keys())),
        ("tidegate_memory_max_keys", "gauge",
            "Keys that the memory of this process has room for.", count(memory.max_keys())),
        ("tidegate_memory_evicted_keys_total", "counter",
            "Keys within their quota that full memory forgot to make room for new ones.",
            memory.evicted_keys()),
    ];
    write_numbers(text, &numbers);
}

impl Backend {
    /// Creates the store. If Redis is unavailable, it is used as soon as it recovers.
    pub async fn start(config: &StoreConfig, metrics: &Arc<Metrics>) -> Result<Self, StoreError> {
        let metrics = Arc::clone(metrics);
        match config {
            StoreConfig::Memory(settings) => {
                let store = MemoryStore::builder().max_keys(settings.max_keys).build();
                Ok(Self::Memory(MemoryBackend::new(store, metrics)))
            }
            StoreConfig::Redis(config) => {
                Ok(Self::Redis(RedisBackend::start(config, metrics).await?))
            }
        }
    }

    #[cfg(test)]
    pub fn memory(store: MemoryStore, metrics: Arc<Metrics>) -> Self {
        Self::Memory(MemoryBackend::new(store, metrics))
    }

    /// Returns the timeout for all store calls of one request. Memory needs none.
    pub fn timeout(&self) -> Option<Duration> {
        self.redis().map(|redis| redis.timeout)
    }

    /// Returns the counts in the memory of this process: all of them, or those of the fallback.
    pub fn memory_store(&self) -> &MemoryStore {
        match self {
            Self::Memory(memory) => &memory.store,
            Self::Redis(redis) => redis.fallback.local(),
        }
    }

    /// Returns whether the store is memory, and had no room for a charge in the last seconds.
    pub fn is_full(&self) -> bool {
        match self {
            Self::Memory(memory) => {
                let last = *memory.last_full.lock().unwrap_or_else(PoisonError::into_inner);
                last.is_some_and(|last| last.elapsed() < FULL_TTL)
            }
            Self::Redis(_) => false,
        }
    }

    /// Takes the passwords and certificates of a configuration for new connections to Redis.
    pub fn renew_credentials(&self, config: &StoreConfig) -> Result<(), StoreError> {
        match (self, config) {
            (Self::Redis(redis), StoreConfig::Redis(config)) => {
                redis.store().renew_credentials(&config.builder())
            }
            _ => Ok(()),
        }
    }

    pub fn redis(&self) -> Option<&RedisBackend> {
        match self {
            Self::Redis(redis) => Some(redis),
            Self::Memory(_) => None,
        }
    }
}

/// Large futures are boxed, so that the future of a request stays small.
impl Store for Backend {
    fn decide(
        &self,
        action: Action,
        charge: &Charge<'_>,
    ) -> Outcome<impl Future<Output = Result<Decision, StoreError>> + Send> {
        match self {
            Self::Memory(memory) => {
                let _entered = store_span(action, 1).entered();
                let decided = memory.store.decide(action, charge).map(move |decided| {
                    decided.or_else(|error| {
                        let error = memory.counted(error);
                        let decided = memory.store.fall_back(action, from_ref(charge), error);
                        decided.map(|decisions| decisions[0])
                    })
                });
                either(decided)
            }
            Self::Redis(redis) => {
                let decided = redis.fallback.decide(action, charge).into_future();
                Outcome::Pending(Either::Right(Box::pin(decided)))
            }
        }
    }

    fn decide_all(
        &self,
        action: Action,
        charges: &[Charge<'_>],
    ) -> Outcome<impl Future<Output = Result<Vec<Decision>, StoreError>> + Send> {
        match self {
            Self::Memory(memory) => {
                let _entered = store_span(action, charges.len()).entered();
                let decided = memory.store.decide_all(action, charges).map(move |decided| {
                    decided.or_else(|error| {
                        memory.store.fall_back(action, charges, memory.counted(error))
                    })
                });
                either(decided)
            }
            Self::Redis(redis) => {
                let decided = redis.fallback.decide_all(action, charges).into_future();
                Outcome::Pending(Either::Right(Box::pin(decided)))
            }
        }
    }

    fn fall_back(
        &self,
        action: Action,
        charges: &[Charge<'_>],
        error: StoreError,
    ) -> Result<Vec<Decision>, StoreError> {
        match self {
            Self::Memory(_) => Err(error),
            Self::Redis(redis) => redis.fallback.fall_back(action, charges, error),
        }
    }

    fn clock(&self) -> &dyn Clock {
        match self {
            Self::Memory(memory) => memory.store.clock(),
            Self::Redis(redis) => redis.fallback.clock(),
        }
    }
}

/// Gives the answers of memory the type of those of Redis.
fn either<F: Future, R: Future<Output = F::Output>>(outcome: Outcome<F>) -> Outcome<Either<F, R>> {
    match outcome {
        Outcome::Ready(answer) => Outcome::Ready(answer),
        Outcome::Pending(future) => Outcome::Pending(Either::Left(future)),
    }
}

/// Returns the span of a call to a store. Only signed integers are exported as numbers.
fn store_span(action: Action, charges: usize) -> tracing::Span {
    let charges = i64::try_from(charges).unwrap_or(i64::MAX);
    tracing::debug_span!(target: TRACE, "store", ?action, charges)
}

impl MemoryBackend {
    fn new(store: MemoryStore, metrics: Arc<Metrics>) -> Self {
        Self { store, metrics, last_full: Mutex::new(None) }
    }

    #[cold]
    fn counted(&self, error: StoreError) -> StoreError {
        self.metrics.count_store_error(&error);
        if matches!(error, StoreError::Full { .. }) {
            let now = Some(Instant::now());
            *self.last_full.lock().unwrap_or_else(PoisonError::into_inner) = now;
        }
        error
    }
}

impl RedisBackend {
    async fn start(config: &RedisConfig, metrics: Arc<Metrics>) -> Result<Self, StoreError> {
        let store = match config.builder().connect().await {
            Ok(store) => store,
            Err(error @ StoreError::Misconfigured(_)) => return Err(error),
            Err(error) => {
                // A fleet must be able to start, or to restart, while Redis is unavailable.
                tracing::warn!(
                    %error,
                    "Redis is unavailable: each policy's on_store_failure decides until it recovers"
                );
                if config.settings.instances.is_none() && config.settings.heartbeat {
                    let assumed = Fleet::ASSUMED_INSTANCES;
                    tracing::warn!(
                        "store.instances is not set: until Redis is available, this instance \
                         assumes that {assumed} instances share each limit, and `local` admits \
                         1/{assumed} of it; set store.instances to the number of instances"
                    );
                }
                config.builder().connect_in_background()?
            }
        };
        let fleet = match config.settings.instances {
            Some(instances) => Fleet::new().with_min_instances(instances),
            None => Fleet::new(),
        };
        let local = MemoryStore::builder().max_keys(config.settings.max_keys).build();
        Ok(Self::around(InstrumentedStore { store, metrics }, config.timeout(), fleet, local))
    }

    fn around(
        store: InstrumentedStore<RedisStore>,
        timeout: Duration,
        fleet: Fleet,
        local: MemoryStore,
    ) -> Self {
        let cached = DenyCache::new(store);
        Self { fallback: Fallback::builder(cached).fleet(fleet).local(local).build(), timeout }
    }

    pub fn fallback(&self) -> &Fallback<CachedRedis> {
        &self.fallback
    }

    pub fn deny_cache(&self) -> &CachedRedis {
        self.fallback.store()
    }

    pub fn store(&self) -> &RedisStore {
        &self.deny_cache().store().store
    }

    /// Returns whether Redis decides: every primary is connected, no circuit is open, and the
    /// fallback is not in use.
    pub fn is_up(&self) -> bool {
        let nodes = self.store().nodes();
        let mut deciding = nodes.iter().filter(|node| node.primary).peekable();
        deciding.peek().is_some()
            && deciding.all(|node| node.connected && !node.circuit.open)
            && !self.fallback().stats().falling_back
    }

    /// Returns which part of Redis is available.
    pub fn health(&self) -> StoreHealth {
        let nodes = self.store().nodes();
        let primaries = || nodes.iter().filter(|node| node.primary);
        let available = || primaries().filter(|node| node.connected && !node.circuit.open);
        let served = available().map(|node| f64::from(node.slots)).sum::<f64>();
        let slots_unavailable_ratio = 1.0 - served / f64::from(NodeHealth::ALL_SLOTS);
        let is_part = slots_unavailable_ratio > 0.0 && slots_unavailable_ratio < 1.0;
        StoreHealth {
            state: match (self.is_up(), is_part) {
                (true, _) => StoreState::Up,
                (false, true) => StoreState::PartlyDown,
                (false, false) => StoreState::Down,
            },
            primaries: primaries().count(),
            primaries_unavailable: primaries().count() - available().count(),
            slots_unavailable_ratio,
        }
    }
}

impl<S: Store> InstrumentedStore<S> {
    async fn instrumented<T>(
        &self,
        action: Action,
        charges: usize,
        call: Pin<&mut impl Future<Output = Result<T, StoreError>>>,
    ) -> Result<T, StoreError> {
        let start = Instant::now();
        let span = store_span(action, charges);
        let result = if span.is_disabled() { call.await } else { call.instrument(span).await };
        // With an open circuit there was no call.
        if !matches!(result, Err(StoreError::Open(_))) {
            self.metrics.count_store_call(start.elapsed(), result.as_ref().err());
        }
        result
    }
}

impl<S: Store> Store for InstrumentedStore<S> {
    fn decide(
        &self,
        action: Action,
        charge: &Charge<'_>,
    ) -> Outcome<impl Future<Output = Result<Decision, StoreError>> + Send> {
        Outcome::Pending(async move {
            self.instrumented(action, 1, pin!(self.store.decide(action, charge).into_future()))
                .await
        })
    }

    fn decide_all(
        &self,
        action: Action,
        charges: &[Charge<'_>],
    ) -> Outcome<impl Future<Output = Result<Vec<Decision>, StoreError>> + Send> {
        Outcome::Pending(async move {
            self.instrumented(
                action,
                charges.len(),
                pin!(self.store.decide_all(action, charges).into_future()),
            )
            .await
        })
    }

    fn clock(&self) -> &dyn Clock {
        self.store.clock()
    }
}

impl<S: SharedStore> SharedStore for InstrumentedStore<S> {
    async fn heartbeat(&self, instance: &str) -> Result<Vec<String>, StoreError> {
        self.store.heartbeat(instance).await
    }

    fn invalidations(
        &self,
        since: &Cursor,
    ) -> Option<impl Future<Output = Result<Invalidations, StoreError>> + Send> {
        self.store.invalidations(since)
    }

    fn epoch_of(&self, charge: &Charge<'_>) -> u64 {
        self.store.epoch_of(charge)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn future_of_a_memory_decision_is_small() {
        let quota = tidegate::Quota::fixed_window(1, Duration::from_secs(1)).expect("valid");
        let charge = Charge::new("k", &quota);
        let backend = Backend::memory(MemoryStore::new(), Arc::default());
        assert!(size_of_val(&backend.decide(Action::Acquire, &charge)) <= 256);
        assert!(
            size_of_val(&backend.decide_all(Action::Acquire, std::slice::from_ref(&charge))) <= 256
        );
    }

    #[tokio::test]
    async fn future_of_a_redis_decision_is_small() {
        let quota = tidegate::Quota::fixed_window(1, Duration::from_secs(1)).expect("valid");
        let charge = Charge::new("k", &quota);
        let store =
            RedisStore::builder("redis://127.0.0.1:1").connect_in_background().expect("valid");
        let store = InstrumentedStore { store, metrics: Arc::default() };
        let timeout = Duration::from_millis(100);
        let redis = RedisBackend::around(store, timeout, Fleet::new(), MemoryStore::new());
        let size = size_of_val(&redis.fallback.decide(Action::Acquire, &charge));
        assert!(size <= 1_040, "{size}");
        let charges = std::slice::from_ref(&charge);
        let size = size_of_val(&redis.fallback.decide_all(Action::Acquire, charges));
        assert!(size <= 1_600, "{size}");
    }
}
