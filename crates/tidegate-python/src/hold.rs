//! `Hold`: the id of an acquire that is remembered; `Held`: units in flight, which are renewed.

use std::sync::{Arc, Mutex, PoisonError};

use futures_util::future::join_all;
use pyo3::prelude::*;
use tidegate::{Action, Charge, Error, Permit, PolicyDecisions};

use crate::aio::Completions;
use crate::connection::AnyLimiter;
use crate::decision::Decisions;
use crate::error::{limiter_error, value_error};
use crate::logs;
use crate::process::driver;
use crate::quota::seconds;
use crate::store::AnyStore;

/// Id of an acquire. With a lease it is that of a permit.
#[pyclass(frozen, module = "tidegate._tidegate")]
pub(crate) struct Hold(pub(crate) Arc<tidegate::Hold>);

#[pymethods]
impl Hold {
    #[new]
    #[pyo3(signature = (id = None, *, ttl = None, id_ttl = None))]
    pub(crate) fn new(id: Option<&str>, ttl: Option<f64>, id_ttl: Option<f64>) -> PyResult<Self> {
        let hold = id.map_or_else(|| Ok(tidegate::Hold::random()), tidegate::Hold::new);
        let mut hold = hold.map_err(value_error)?;
        if let Some(ttl) = ttl {
            hold = hold.with_ttl(seconds(ttl)?).map_err(value_error)?;
        }
        if let Some(ttl) = id_ttl {
            hold = hold.settled(seconds(ttl)?).map_err(value_error)?;
        }
        Ok(Self(Arc::new(hold)))
    }

    #[staticmethod]
    fn lease() -> Self {
        Self(Arc::new(tidegate::Hold::lease()))
    }

    #[getter]
    fn id(&self) -> &str {
        self.0.id()
    }
}

/// Permits of one request.
pub(crate) struct Permits {
    permits: Mutex<Vec<Permit<AnyStore>>>,
    /// Process that renews them; `None` if they are in memory, which a fork copies.
    owner: Option<u32>,
}

impl Permits {
    /// Keeps what a request has in flight until it is dropped; or all of its units, which then are
    /// in flight, too.
    pub(crate) async fn of(
        limiter: &AnyLimiter,
        decisions: &PolicyDecisions<'_>,
        holds_all: bool,
    ) -> Result<Self, Error> {
        let owner = match limiter.store() {
            AnyStore::Memory(_) => None,
            AnyStore::Redis { .. } => Some(std::process::id()),
        };
        let mut permits = Vec::new();
        let hold = decisions.hold().filter(|_| decisions.is_allowed());
        for entry in decisions {
            let decision = entry.decision();
            let (Some((hold, _)), Some(_)) = (hold, decision.hold) else { continue };
            let (Some(key), Some(quota)) = (entry.key(), entry.quota()) else { continue };
            if !holds_all && !quota.is_concurrency() {
                continue;
            }
            let charge = Charge::new(key, quota).with_policy(entry.policy());
            let charge = charge.with_cost(entry.cost()).with_hold(hold);
            if owner.is_none() {
                // Once is enough, because memory ends with its process: a thread that renewed it
                // would hold its locks while another one forks.
                let longest = hold.clone().with_ttl(quota.holds().max_ttl());
                let longest = longest.map_err(tidegate::ChargeError::Hold)?;
                let renewed = limiter.decide(Action::Renew, &charge.with_hold(&longest)).await;
                let _ = renewed?;
            }
            permits.push(limiter.permit(&charge, decision));
        }
        Ok(Self { permits: Mutex::new(permits), owner })
    }

    /// Takes the permits. Those of a parent process are leaked, with its sockets and locks.
    fn take(&self) -> Vec<Permit<AnyStore>> {
        let mut permits = self.permits.lock().unwrap_or_else(PoisonError::into_inner);
        let permits = std::mem::take(&mut *permits);
        if self.owner.is_some_and(|owner| owner != std::process::id()) {
            std::mem::forget(permits);
            return Vec::new();
        }
        permits
    }
}

impl Drop for Permits {
    fn drop(&mut self) {
        drop(self.take());
    }
}

async fn release(permits: Vec<Permit<AnyStore>>) -> Result<(), Error> {
    join_all(permits.into_iter().map(Permit::release)).await.into_iter().collect()
}

/// Units in flight, until they are released or the object is deleted.
#[pyclass(frozen, module = "tidegate._tidegate")]
pub(crate) struct Held {
    decisions: Py<Decisions>,
    permits: Permits,
}

impl Held {
    pub(crate) fn new(
        py: Python<'_>,
        decisions: PolicyDecisions<'static>,
        permits: Permits,
    ) -> PyResult<Self> {
        Ok(Self { decisions: Py::new(py, Decisions::from(decisions))?, permits })
    }
}

#[pymethods]
impl Held {
    #[getter]
    fn decisions(&self, py: Python<'_>) -> Py<Decisions> {
        self.decisions.clone_ref(py)
    }

    /// Releases the units, and returns when they are free.
    fn release(&self, py: Python<'_>) -> PyResult<()> {
        let permits = self.permits.take();
        // Those in memory are free when they are dropped.
        if permits.is_empty() || self.permits.owner.is_none() {
            return Ok(());
        }
        let driver = driver()?;
        let released = py.detach(|| driver.block_on(release(permits)));
        logs::flush(py);
        released.map_err(limiter_error)
    }

    fn _start_release(
        &self,
        completions: &Completions,
        future: &Bound<'_, PyAny>,
    ) -> PyResult<bool> {
        completions.start(future, release(self.permits.take()), |py, released| {
            released.map_err(limiter_error).map(|()| py.None())
        })
    }
}
