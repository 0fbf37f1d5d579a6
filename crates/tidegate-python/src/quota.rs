//! `Quota`: an algorithm with its limit and window, written like `100/minute`.

use std::time::Duration;

use pyo3::exceptions::PyOverflowError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use tidegate::{Algorithm, Encoding, HoldTerms, OnExpire};
use tidegate_config::duration;

use crate::error::value_error;

#[pyclass(frozen, eq, hash, module = "tidegate")]
#[derive(PartialEq, Eq, Clone)]
pub(crate) struct Quota(pub(crate) tidegate::Quota);

#[pymethods]
impl Quota {
    #[new]
    #[pyo3(signature = (rate, *, algorithm = "sliding-log", burst = None, encoding = None,
        count_denied = false, block_for = None, hold_ttl = None, hold_max_ttl = None,
        on_expire = "charge"))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    fn new(
        rate: &str,
        algorithm: &str,
        burst: Option<Units>,
        encoding: Option<&str>,
        count_denied: bool,
        block_for: Option<Vec<f64>>,
        hold_ttl: Option<f64>,
        hold_max_ttl: Option<f64>,
        on_expire: &str,
    ) -> PyResult<Self> {
        let algorithm: Algorithm = algorithm.parse().map_err(value_error)?;
        let in_flight = parse_limit(rate).filter(|_| algorithm == Algorithm::Concurrency);
        let parsed = in_flight.map(|limit| (limit, Duration::ZERO)).or_else(|| parse_rate(rate));
        let (limit, window) = parsed.ok_or_else(|| {
            value_error(format!(
                "{rate:?} is not a rate: write it like 100/minute, 10/second, 5/15m or \
                 1000 per day; a window is a second, minute, hour, day or week, or a duration such \
                 as 500ms or 1h30m"
            ))
        })?;
        let quota = tidegate::Quota::new(algorithm, limit, window);
        let mut quota = quota.map_err(value_error)?.with_holds(terms(
            hold_ttl,
            hold_max_ttl,
            on_expire.parse().map_err(value_error)?,
        )?);
        if let Some(Units(burst)) = burst {
            quota = quota.with_burst(burst).map_err(value_error)?;
        }
        if let Some(encoding) = encoding {
            let encoding: Encoding = encoding.parse().map_err(value_error)?;
            quota = quota.with_encoding(encoding).map_err(value_error)?;
        }
        if count_denied {
            quota = quota.with_count_denied(true).map_err(value_error)?;
        }
        if let Some(lengths) = block_for {
            let lengths: Vec<_> = lengths.into_iter().map(seconds).collect::<PyResult<_>>()?;
            quota = quota.with_block_for(&lengths).map_err(value_error)?;
        }
        Ok(Self(quota))
    }

    /// Units in flight, which count until they are released.
    #[staticmethod]
    #[pyo3(signature = (limit, *, hold_ttl = None, hold_max_ttl = None))]
    fn concurrency(
        limit: Units,
        hold_ttl: Option<f64>,
        hold_max_ttl: Option<f64>,
    ) -> PyResult<Self> {
        let quota = tidegate::Quota::concurrency(limit.0).map_err(value_error)?;
        Ok(Self(quota.with_holds(terms(hold_ttl, hold_max_ttl, OnExpire::default())?)))
    }

    #[getter]
    fn limit(&self) -> u64 {
        self.0.limit()
    }

    #[getter]
    fn window(&self) -> Option<f64> {
        (!self.0.is_concurrency()).then(|| self.0.window().as_secs_f64())
    }

    #[getter]
    fn burst(&self) -> u64 {
        self.0.burst()
    }

    #[getter]
    fn algorithm(&self) -> &'static str {
        self.0.algorithm().as_str()
    }

    /// Name that charges without a policy count under.
    #[getter]
    fn policy(&self) -> &str {
        self.0.default_policy_name()
    }

    /// Arguments for pickle and copy.
    fn __getnewargs_ex__<'py>(&self, py: Python<'py>) -> PyResult<((String,), Bound<'py, PyDict>)> {
        let quota = &self.0;
        let options = PyDict::new(py);
        options.set_item("algorithm", quota.algorithm().as_str())?;
        if quota.burst() != quota.limit() {
            options.set_item("burst", quota.burst())?;
        }
        if matches!(quota.algorithm(), Algorithm::SlidingLog | Algorithm::SlidingCounter) {
            options.set_item("encoding", quota.encoding().as_str())?;
        }
        if quota.count_denied() {
            options.set_item("count_denied", true)?;
        }
        if !quota.block_for().is_empty() {
            let lengths: Vec<f64> = quota.block_for().iter().map(Duration::as_secs_f64).collect();
            options.set_item("block_for", lengths)?;
        }
        let (terms, default) = (quota.holds(), HoldTerms::default());
        if (terms.ttl(), terms.max_ttl()) != (default.ttl(), default.max_ttl()) {
            options.set_item("hold_ttl", terms.ttl().as_secs_f64())?;
            options.set_item("hold_max_ttl", terms.max_ttl().as_secs_f64())?;
        }
        if terms.on_expire() != default.on_expire() {
            options.set_item("on_expire", terms.on_expire().as_str())?;
        }
        let rate = if quota.is_concurrency() {
            quota.limit().to_string()
        } else {
            format!("{}/{}", quota.limit(), self.exact_window())
        };
        Ok(((rate,), options))
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let ((rate,), options) = self.__getnewargs_ex__(py)?;
        let options: Vec<String> = options
            .iter()
            .map(|(name, value)| Ok(format!(", {name}={}", value.repr()?)))
            .collect::<PyResult<_>>()?;
        Ok(format!("Quota({rate:?}{})", options.concat()))
    }
}

impl Quota {
    fn exact_window(&self) -> String {
        let micros = self.0.window().as_micros();
        let units =
            [(86_400_000_000, "d"), (3_600_000_000, "h"), (60_000_000, "m"), (1_000_000, "s")];
        let exact = units.into_iter().find(|(unit, _)| micros.is_multiple_of(*unit));
        let (unit, name) = exact.unwrap_or((1, "us"));
        format!("{}{name}", micros / unit)
    }
}

impl std::hash::Hash for Quota {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        (self.0.limit(), self.0.window(), self.0.burst()).hash(state);
    }
}

/// Returns how long holds live, and what happens at their end.
fn terms(ttl: Option<f64>, max_ttl: Option<f64>, on_expire: OnExpire) -> PyResult<HoldTerms> {
    let (ttl, max_ttl) = (ttl.map(seconds).transpose()?, max_ttl.map(seconds).transpose()?);
    let terms = HoldTerms::with_defaults(ttl, max_ttl).map_err(value_error)?;
    Ok(terms.with_on_expire(on_expire))
}

fn parse_limit(limit: &str) -> Option<u64> {
    limit.trim().replace('_', "").parse().ok()
}

/// Parses a limit and a window, such as `100/minute`, `5/15m` and `10 per 2 hours`.
fn parse_rate(rate: &str) -> Option<(u64, Duration)> {
    let (limit, window) = rate.split_once('/').or_else(|| rate.split_once(" per "))?;
    let limit = parse_limit(limit)?;
    let window = window.trim().to_ascii_lowercase();
    let number = window.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let unit = match &window[number.len()..] {
        "second" | "seconds" => 1,
        "minute" | "minutes" => 60,
        "hour" | "hours" => 3_600,
        "day" | "days" => 86_400,
        "week" | "weeks" => 7 * 86_400,
        unit if number.is_empty() => {
            return Some((limit, duration::parse(&format!("1{unit}")).ok()?));
        }
        _ => return Some((limit, duration::parse(&window).ok()?)),
    };
    let number: u64 = if number.is_empty() { 1 } else { number.trim_end().parse().ok()? };
    Some((limit, Duration::from_secs(number.checked_mul(unit)?)))
}

/// Converts seconds of Python.
pub(crate) fn seconds(seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds)
        .map(|duration| {
            Duration::from_micros(
                u64::try_from(duration.as_nanos().div_ceil(1_000)).unwrap_or(u64::MAX),
            )
        })
        .map_err(|_| value_error(format!("{seconds} is not a number of seconds from 0")))
}

/// Number of units. A number that no quota can have is a `ValueError`.
#[derive(Clone, Copy)]
pub(crate) struct Units(pub(crate) u64);

impl<'py> FromPyObject<'_, 'py> for Units {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        object.extract().map(Self).map_err(|error: PyErr| {
            if error.is_instance_of::<PyOverflowError>(object.py()) {
                let max = tidegate::Quota::MAX_LIMIT;
                return value_error(format!("the number must be from 1 to {max}"));
            }
            error
        })
    }
}
