//! [`Breaker`]: stops calling a store that fails, so that no request waits for it.
//!
//! While the circuit is closed, calls go to the store and their results are counted with a few
//! atomic operations. While it is open, calls fail at once, except for one now and then, which finds
//! out whether the store has recovered. A `RedisStore` needs no breaker: each of its nodes has a
//! circuit.

use std::future::Future;
use std::pin::{Pin, pin};
use std::time::Duration;

use tokio::time::timeout;

use crate::charge::Charge;
use crate::clock::Clock;
use crate::decision::Decision;
use crate::store::circuit::{Circuit, CircuitOptions, CircuitState, failure};
use crate::store::invalidation::{Cursor, Invalidations};
use crate::store::{Action, Outcome, SharedStore, Store, StoreError};

/// A circuit breaker around a store of your own: calls fail at once while the store is failing.
///
/// The circuit opens after five failures in a row, or when at least five calls of the last second
/// failed and they are half of its calls or more. A failure is [`StoreError::Timeout`],
/// [`Unreachable`](StoreError::Unreachable), [`AnswerLost`](StoreError::AnswerLost) or
/// [`Refused`](StoreError::Refused); any other error is an answer of a working store. While the
/// circuit is open, calls return [`StoreError::Open`] with the last failure. Several times per
/// second one call is made nevertheless; two successful ones in a row close the circuit.
///
/// ```
/// use std::time::Duration;
/// use tidegate::{Breaker, Charge, Limiter, MemoryStore, Quota};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let breaker = Breaker::builder(MemoryStore::new()) // or your own store
///     .timeout(Duration::from_millis(100))
///     .failure_threshold(10)
///     .build();
/// let limiter = Limiter::new(breaker);
/// let quota = Quota::token_bucket(10, Duration::from_secs(1))?;
///
/// assert!(limiter.acquire(&Charge::new("user123", &quota)).await?.allowed);
/// assert!(!limiter.store().state().open);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Breaker<S> {
    store: S,
    circuit: Circuit,
    timeout: Option<Duration>,
}

/// Builder of a [`Breaker`].
///
/// ```
/// use std::time::Duration;
/// use tidegate::{Breaker, MemoryStore};
///
/// let breaker = Breaker::builder(MemoryStore::new()) // or your own store
///     .failure_threshold(3)
///     .probe_interval(Duration::from_secs(1))
///     .build();
/// assert!(!breaker.state().open);
/// ```
#[derive(Debug)]
pub struct Builder<S> {
    store: S,
    options: CircuitOptions,
    timeout: Option<Duration>,
}

impl<S: Store> Builder<S> {
    /// Sets the timeout of a call, which then fails with [`StoreError::Timeout`] and counts as a
    /// failure. By default calls have no timeout here.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Sets the mean interval between two calls to a failing store; 200 ms by default. The actual
    /// intervals are jittered by up to a half.
    #[must_use]
    pub fn probe_interval(mut self, interval: Duration) -> Self {
        self.options.probe_interval = interval;
        self
    }

    /// Sets the number of failures that open the circuit: in a row, or within one second if they
    /// are at least half of the calls. 5 by default; 0 counts as 1.
    #[must_use]
    pub fn failure_threshold(mut self, failures: u32) -> Self {
        self.options.failure_threshold = failures.max(1);
        self
    }

    /// Creates the breaker, with its circuit closed.
    #[must_use]
    pub fn build(self) -> Breaker<S> {
        let Self { store, options, timeout } = self;
        Breaker { store, circuit: Circuit::new(options), timeout }
    }
}

impl<S: Store> Breaker<S> {
    /// Creates a breaker around this store with the default options.
    #[must_use]
    pub fn new(store: S) -> Self {
        Self::builder(store).build()
    }

    /// Returns a builder with the default options.
    #[must_use]
    pub fn builder(store: S) -> Builder<S> {
        Builder { store, options: CircuitOptions::default(), timeout: None }
    }

    /// Returns the wrapped store.
    #[must_use]
    pub fn store(&self) -> &S {
        &self.store
    }

    /// Returns the state of the circuit.
    #[must_use]
    pub fn state(&self) -> CircuitState {
        self.circuit.state()
    }

    /// Awaits a call, unless the circuit is open, and counts the result. The call is pinned by the
    /// caller because moving the future would copy it.
    async fn guarded<T>(
        &self,
        call: Pin<&mut impl Future<Output = Result<T, StoreError>>>,
    ) -> Result<T, StoreError> {
        let is_probe = self.circuit.is_open();
        if is_probe && !self.circuit.takes_probe() {
            return Err(self.circuit.open_error());
        }
        let result = match self.timeout {
            Some(limit) => {
                let lost = || Err(StoreError::Timeout(limit).answer_lost());
                timeout(limit, call).await.unwrap_or_else(|_| lost())
            }
            None => call.await,
        };
        let failure = failure(result.as_ref().map(|_| ()));
        // At debug level only: the callers get the error, and a fallback logs a warning.
        if is_probe {
            if self.circuit.record_probe(failure) {
                tracing::debug!("circuit closed");
            }
        } else if self.circuit.record(failure) {
            tracing::debug!(?failure, "circuit opened");
        }
        result
    }
}

impl<S: Store> Store for Breaker<S> {
    fn decide(
        &self,
        action: Action,
        charge: &Charge<'_>,
    ) -> Outcome<impl Future<Output = Result<Decision, StoreError>> + Send> {
        Outcome::Pending(async move {
            self.guarded(pin!(self.store.decide(action, charge).into_future())).await
        })
    }

    fn decide_all(
        &self,
        action: Action,
        charges: &[Charge<'_>],
    ) -> Outcome<impl Future<Output = Result<Vec<Decision>, StoreError>> + Send> {
        Outcome::Pending(async move {
            self.guarded(pin!(self.store.decide_all(action, charges).into_future())).await
        })
    }

    fn clock(&self) -> &dyn Clock {
        self.store.clock()
    }
}

impl<S: SharedStore> SharedStore for Breaker<S> {
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
