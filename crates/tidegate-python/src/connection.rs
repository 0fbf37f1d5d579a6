//! [`Connection`]: the limiter of this process, which may have to connect first.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use pyo3::prelude::*;
use tidegate::store::redis::Builder;
use tidegate::{DenyCache, Fallback, Fleet, Limiter, ManualClock, MemoryStore, StoreError};
use tokio::sync::OnceCell;

use crate::process::{Driver, driver};
use crate::store::AnyStore;

/// Time for which the first call of a process waits for the connection. Afterwards Redis counts as
/// down, until it is connected in the background.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

pub(crate) type AnyLimiter = Limiter<AnyStore>;

/// Options of a limiter on Redis.
pub(crate) struct Settings {
    pub(crate) builder: Builder,
    /// Least number of instances that share the limits during an outage.
    pub(crate) instances: Option<usize>,
    /// Maximum number of keys that are decided locally.
    pub(crate) max_keys: Option<usize>,
}

/// Limiter of this process, which may have to connect first.
#[derive(Clone)]
pub(crate) enum Connection {
    Ready(AnyLimiter),
    Pending { settings: Arc<Settings>, connected: Arc<OnceCell<AnyLimiter>>, driver: Arc<Driver> },
}

impl Connection {
    /// Connects, at the first call of the process.
    pub(crate) async fn limiter(self) -> Result<AnyLimiter, StoreError> {
        match self {
            Self::Ready(limiter) => Ok(limiter),
            Self::Pending { settings, connected, driver } => {
                connected.get_or_try_init(|| connect(&settings, driver)).await.cloned()
            }
        }
    }

    pub(crate) fn driver(&self) -> PyResult<Arc<Driver>> {
        match self {
            Self::Pending { driver, .. } => Ok(Arc::clone(driver)),
            Self::Ready(limiter) => match limiter.store() {
                AnyStore::Redis { driver, .. } => Ok(Arc::clone(driver)),
                AnyStore::Memory(_) => driver(),
            },
        }
    }

    /// Runs a call on this thread, without the GIL if it may wait for Redis.
    pub(crate) fn block_on<T: Send>(
        self,
        py: Python<'_>,
        call: impl Future<Output = T> + Send,
    ) -> PyResult<T> {
        let mut call = pin!(call);
        // Memory answers at once, without the runtime, which would renew permits in it.
        if let Self::Ready(limiter) = &self
            && matches!(limiter.store(), AnyStore::Memory(_))
            && let Some(answer) = call.as_mut().now_or_never()
        {
            return Ok(answer);
        }
        let driver = self.driver()?;
        Ok(py.detach(|| driver.block_on(call)))
    }

    pub(crate) fn limiter_blocking(self) -> Result<AnyLimiter, StoreError> {
        match self {
            Self::Ready(limiter) => Ok(limiter),
            Self::Pending { ref driver, .. } => Arc::clone(driver).block_on(self.limiter()),
        }
    }
}

/// Creates the store of counts, or of local decisions, in memory.
pub(crate) fn memory(max_keys: Option<usize>, clock: Option<ManualClock>) -> MemoryStore {
    let mut memory = MemoryStore::builder();
    if let Some(clock) = clock {
        memory = memory.clock(clock);
    }
    if let Some(max_keys) = max_keys {
        memory = memory.max_keys(max_keys);
    }
    memory.build()
}

/// Waits for the connection, and leaves it to the background if Redis does not answer.
async fn connect(settings: &Settings, driver: Arc<Driver>) -> Result<AnyLimiter, StoreError> {
    let builder = settings.builder.clone();
    let redis = match tokio::time::timeout(CONNECT_TIMEOUT, builder.clone().connect()).await {
        Ok(Ok(redis)) => redis,
        // The fallback logs it with the first decision.
        Ok(Err(_)) | Err(_) => builder.connect_in_background()?,
    };
    let mut fallback =
        Fallback::builder(DenyCache::new(redis)).local(memory(settings.max_keys, None));
    if let Some(instances) = settings.instances {
        fallback = fallback.fleet(Fleet::new().with_min_instances(instances));
    }
    Ok(Limiter::new(AnyStore::Redis { store: fallback.build(), driver }))
}
