//! [`Connection`]: the limiter of this process, which may have to connect first.

use std::sync::Arc;
use std::time::Duration;

use pyo3::prelude::*;
use tidegate::store::redis::Builder;
use tidegate::{DenyCache, Fallback, Limiter, StoreError};
use tokio::sync::OnceCell;

use crate::process::{Driver, driver};
use crate::store::AnyStore;

/// Time for which the first call of a process waits for the connection. Afterwards Redis counts as
/// down, until it is connected in the background.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

pub(crate) type AnyLimiter = Limiter<AnyStore>;

/// Limiter of this process, which may have to connect first.
#[derive(Clone)]
pub(crate) enum Connection {
    Ready(AnyLimiter),
    Pending { builder: Arc<Builder>, connected: Arc<OnceCell<AnyLimiter>>, driver: Arc<Driver> },
}

impl Connection {
    /// Connects, at the first call of the process.
    pub(crate) async fn limiter(self) -> Result<AnyLimiter, StoreError> {
        match self {
            Self::Ready(limiter) => Ok(limiter),
            Self::Pending { builder, connected, driver } => {
                connected.get_or_try_init(|| connect(&builder, driver)).await.cloned()
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
        let driver = self.driver()?;
        Ok(match self {
            Self::Ready(limiter) if matches!(limiter.store(), AnyStore::Memory(_)) => {
                driver.block_on(call)
            }
            _ => py.detach(|| driver.block_on(call)),
        })
    }

    pub(crate) fn limiter_blocking(self) -> Result<AnyLimiter, StoreError> {
        match self {
            Self::Ready(limiter) => Ok(limiter),
            Self::Pending { ref driver, .. } => Arc::clone(driver).block_on(self.limiter()),
        }
    }
}

/// Waits for the connection, and leaves it to the background if Redis does not answer.
async fn connect(builder: &Builder, driver: Arc<Driver>) -> Result<AnyLimiter, StoreError> {
    let redis = match tokio::time::timeout(CONNECT_TIMEOUT, builder.clone().connect()).await {
        Ok(Err(error @ StoreError::Misconfigured(_))) => return Err(error),
        Ok(Ok(redis)) => redis,
        // The fallback logs it with the first decision.
        Ok(Err(_)) | Err(_) => builder.clone().connect_in_background()?,
    };
    let store = Fallback::new(DenyCache::new(redis));
    Ok(Limiter::new(AnyStore::Redis { store, driver }))
}
