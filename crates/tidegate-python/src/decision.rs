//! `Decision`: the answer to one charge; `Decisions`: the answer to a request with several limits.

use std::sync::atomic::{AtomicBool, Ordering};

use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyIterator, PyList};
use tidegate::headers::{PolicyState, for_each_header};
use tidegate::{PolicyDecision, PolicyDecisions};

use crate::quota::Quota;

#[pyclass(frozen, module = "tidegate")]
pub(crate) struct Decision {
    pub(crate) answer: tidegate::Decision,
    /// `None` if the request was denied without a count.
    pub(crate) quota: Option<Py<Quota>>,
    /// Name that was set; otherwise that of the quota.
    pub(crate) policy: Option<Box<str>>,
    pub(crate) is_shadow: bool,
}

#[pymethods]
impl Decision {
    fn __bool__(&self) -> bool {
        self.answer.allowed
    }

    #[getter]
    fn allowed(&self) -> bool {
        self.answer.allowed
    }

    #[getter]
    fn limit(&self) -> u64 {
        self.answer.limit
    }

    #[getter]
    fn remaining(&self) -> u64 {
        self.answer.remaining
    }

    #[getter]
    fn retry_after(&self) -> f64 {
        self.answer.retry_after.as_secs_f64()
    }

    #[getter]
    fn reset_after(&self) -> f64 {
        self.answer.reset_after.as_secs_f64()
    }

    #[getter]
    fn delay(&self) -> f64 {
        self.answer.delay.as_secs_f64()
    }

    #[getter]
    fn source(&self) -> &'static str {
        self.answer.source.as_str()
    }

    #[getter]
    fn hold_status(&self) -> Option<&'static str> {
        self.answer.hold.map(|hold| hold.status.as_str())
    }

    #[getter]
    fn expires_after(&self) -> f64 {
        self.answer.hold.map_or(0.0, |hold| hold.expires_after().as_secs_f64())
    }

    #[getter]
    fn policy(&self) -> &str {
        let of_quota = || self.quota.as_ref().map(|quota| quota.get().0.default_policy_name());
        self.policy.as_deref().or_else(of_quota).unwrap_or_default()
    }

    #[getter]
    fn quota(&self, py: Python<'_>) -> Option<Py<Quota>> {
        self.quota.as_ref().map(|quota| quota.clone_ref(py))
    }

    #[getter]
    fn shadow(&self) -> bool {
        self.is_shadow
    }

    #[pyo3(signature = (*, x_ratelimit_headers = true))]
    fn headers<'py>(
        &self,
        py: Python<'py>,
        x_ratelimit_headers: bool,
    ) -> PyResult<Bound<'py, PyDict>> {
        let states = self
            .quota
            .iter()
            .map(|quota| PolicyState::new(self.policy(), &quota.get().0, self.answer));
        to_headers(py, states, x_ratelimit_headers)
    }

    fn __repr__(&self) -> String {
        let Self { answer, .. } = self;
        let state = if answer.allowed {
            "allowed".to_owned()
        } else {
            format!("denied, retry_after={}", self.retry_after())
        };
        format!(
            "<Decision {state}, {} of {} left, policy {:?}, source {}>",
            answer.remaining,
            answer.limit,
            self.policy(),
            answer.source
        )
    }
}

impl Decision {
    fn of_entry(py: Python<'_>, entry: &PolicyDecision<'_>) -> PyResult<Py<Self>> {
        let quota = entry.quota().cloned().map(|quota| Py::new(py, Quota(quota))).transpose()?;
        Py::new(
            py,
            Self {
                answer: entry.decision(),
                quota,
                policy: Some(entry.policy().into()),
                is_shadow: entry.is_shadow(),
            },
        )
    }
}

#[pyclass(frozen, module = "tidegate")]
pub(crate) struct Decisions {
    decisions: PolicyDecisions<'static>,
    is_refunded: AtomicBool,
}

impl From<PolicyDecisions<'static>> for Decisions {
    fn from(decisions: PolicyDecisions<'static>) -> Self {
        Self { decisions, is_refunded: AtomicBool::new(false) }
    }
}

impl Decisions {
    /// Returns the decisions to refund, or those of policies that `refund_on` this status. Only
    /// the first call that refunds something returns any.
    pub(crate) fn to_refund(&self, status: Option<u16>) -> PolicyDecisions<'static> {
        let decisions = match status {
            Some(status) => self.decisions.refunded_on(status),
            None => self.decisions.clone(),
        };
        let is_repeated = !decisions.is_empty() && self.is_refunded.swap(true, Ordering::Relaxed);
        if is_repeated { PolicyDecisions::default() } else { decisions }
    }
}

#[pymethods]
impl Decisions {
    fn __bool__(&self) -> bool {
        self.decisions.is_allowed()
    }

    #[getter]
    fn allowed(&self) -> bool {
        self.decisions.is_allowed()
    }

    fn __len__(&self) -> usize {
        self.decisions.iter().len()
    }

    fn __getitem__(&self, py: Python<'_>, position: isize) -> PyResult<Py<Decision>> {
        let entries = self.decisions.iter();
        let position = usize::try_from(position)
            .ok()
            .or_else(|| entries.len().checked_sub(position.unsigned_abs()));
        let entry = position.and_then(|position| entries.as_slice().get(position));
        Decision::of_entry(py, entry.ok_or_else(|| PyIndexError::new_err("no such decision"))?)
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyIterator>> {
        let entries = self.decisions.iter().map(|entry| Decision::of_entry(py, entry));
        PyList::new(py, entries.collect::<PyResult<Vec<_>>>()?)?.try_iter()
    }

    #[getter]
    fn binding(&self, py: Python<'_>) -> PyResult<Option<Py<Decision>>> {
        self.decisions.binding().map(|entry| Decision::of_entry(py, entry)).transpose()
    }

    #[getter]
    fn denied_by(&self, py: Python<'_>) -> PyResult<Option<Py<Decision>>> {
        self.decisions.denied_by().map(|entry| Decision::of_entry(py, entry)).transpose()
    }

    #[getter]
    fn hold_id(&self) -> Option<&str> {
        self.decisions.hold().map(|(hold, _)| hold.id())
    }

    #[getter]
    fn hold_status(&self) -> Option<&'static str> {
        self.decisions.hold().map(|(_, state)| state.status.as_str())
    }

    #[getter]
    fn expires_after(&self) -> f64 {
        self.decisions.hold().map_or(0.0, |(_, state)| state.expires_after().as_secs_f64())
    }

    #[getter]
    fn exceeded(&self) -> Vec<&str> {
        self.decisions.exceeded().map(PolicyDecision::policy).collect()
    }

    #[getter]
    fn missing_key(&self) -> Option<&str> {
        self.decisions.denied_by()?.missing_key()
    }

    #[getter]
    fn delay(&self) -> f64 {
        self.decisions.delay().as_secs_f64()
    }

    #[pyo3(signature = (*, x_ratelimit_headers = true))]
    fn headers<'py>(
        &self,
        py: Python<'py>,
        x_ratelimit_headers: bool,
    ) -> PyResult<Bound<'py, PyDict>> {
        to_headers(py, self.decisions.header_states(), x_ratelimit_headers)
    }

    fn __repr__(&self) -> String {
        let state = if self.decisions.is_allowed() { "allowed" } else { "denied" };
        let policies: Vec<&str> = self.decisions.iter().map(PolicyDecision::policy).collect();
        format!("<Decisions {state}, by {policies:?}>")
    }
}

fn to_headers<'py, 'a>(
    py: Python<'py>,
    states: impl Iterator<Item = PolicyState<'a>> + Clone,
    with_x_headers: bool,
) -> PyResult<Bound<'py, PyDict>> {
    let headers = PyDict::new(py);
    let mut result = Ok(());
    for_each_header(states, with_x_headers, |name, value| {
        if result.is_ok() {
            result = headers.set_item(name, value);
        }
    });
    result.map(|()| headers)
}
