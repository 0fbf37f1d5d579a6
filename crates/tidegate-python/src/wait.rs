//! `Wait`: a wait for units, of a thread or of an event loop.

use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::Duration;

use pyo3::prelude::*;
use tidegate::Error;

use crate::aio::Completions;
use crate::decision::Decision;
use crate::error::limiter_error;
use crate::logs;
use crate::process::{Attached, driver};
use crate::quota::Quota;

/// Interval at which a blocking wait looks for signals, such as that of Ctrl-C.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(50);

type PendingDecision = Pin<Box<dyn Future<Output = Result<tidegate::Decision, Error>> + Send>>;

/// Wait for units. It is polled only with the GIL held: a fork, which needs the GIL, too, then never
/// copies a lock of the memory store that is held.
#[pyclass(frozen, module = "tidegate._tidegate")]
pub(crate) struct Wait {
    decision: Mutex<PendingDecision>,
    attached: Attached,
    quota: Py<Quota>,
    policy: Option<String>,
}

#[pymethods]
impl Wait {
    /// Returns the decision, or `None` if `future` will be completed when there is more to do.
    fn poll(
        &self,
        py: Python<'_>,
        completions: &Completions,
        future: &Bound<'_, PyAny>,
    ) -> PyResult<Option<Decision>> {
        self.poll_by(py, &completions.waker(future)?)
    }

    /// Blocks until the decision.
    fn block(&self, py: Python<'_>) -> PyResult<Decision> {
        let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
        loop {
            if let Some(decision) = self.poll_by(py, &waker)? {
                return Ok(decision);
            }
            py.detach(|| std::thread::park_timeout(SIGNAL_INTERVAL));
            py.check_signals()?;
        }
    }
}

impl Wait {
    pub(crate) fn new(
        decision: impl Future<Output = Result<tidegate::Decision, Error>> + Send + 'static,
        quota: Py<Quota>,
        policy: Option<String>,
    ) -> PyResult<Self> {
        let attached = driver()?.attach();
        Ok(Self { decision: Mutex::new(Box::pin(decision)), attached, quota, policy })
    }

    fn poll_by(&self, py: Python<'_>, waker: &Waker) -> PyResult<Option<Decision>> {
        let _entered = self.attached.handle().enter();
        let mut decision = self.decision.lock().unwrap_or_else(PoisonError::into_inner);
        let Poll::Ready(decided) = decision.as_mut().poll(&mut Context::from_waker(waker)) else {
            return Ok(None);
        };
        logs::flush(py);
        let answer = decided.map_err(limiter_error)?;
        let (quota, policy) = (Some(self.quota.clone_ref(py)), self.policy.as_deref());
        Ok(Some(Decision { answer, quota, policy: policy.map(Into::into), is_shadow: false }))
    }
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}
