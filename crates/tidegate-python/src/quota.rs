//! `Quota`: an algorithm with its limit and window, written like `100/minute`.

use std::time::Duration;

use pyo3::prelude::*;
use tidegate::{Algorithm, Encoding};
use tidegate_config::duration;

use crate::error::value_error;

#[pyclass(frozen, eq, hash, module = "tidegate")]
#[derive(PartialEq, Eq, Clone)]
pub(crate) struct Quota(pub(crate) tidegate::Quota);

#[pymethods]
impl Quota {
    #[new]
    #[pyo3(signature = (rate, *, algorithm = "sliding-log", burst = None, encoding = None,
        count_denied = false, block_for = None))]
    fn new(
        rate: &str,
        algorithm: &str,
        burst: Option<u64>,
        encoding: Option<&str>,
        count_denied: bool,
        block_for: Option<Vec<f64>>,
    ) -> PyResult<Self> {
        let (limit, window) = parse_rate(rate).ok_or_else(|| {
            value_error(format!(
                "{rate:?} is not a rate: write it like 100/minute, 10/second, 5/15m or \
                 1000 per day"
            ))
        })?;
        let algorithm: Algorithm = algorithm.parse().map_err(value_error)?;
        let quota = tidegate::Quota::new(algorithm, limit, window);
        let mut quota = quota.map_err(value_error)?;
        if let Some(burst) = burst {
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

    #[getter]
    fn limit(&self) -> u64 {
        self.0.limit()
    }

    #[getter]
    fn window(&self) -> f64 {
        self.0.window().as_secs_f64()
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

    fn __repr__(&self) -> String {
        let (limit, micros) = (self.0.limit(), self.0.window().as_micros());
        let units =
            [(86_400_000_000, "d"), (3_600_000_000, "h"), (60_000_000, "m"), (1_000_000, "s")];
        let exact = units.into_iter().find(|(unit, _)| micros % unit == 0);
        let (unit, name) = exact.unwrap_or((1, "us"));
        let window = format!("{}{name}", micros / unit);
        let burst = match self.0.burst() {
            burst if burst == limit => String::new(),
            burst => format!(", burst={burst}"),
        };
        format!("Quota(\"{limit}/{window}\", algorithm=\"{}\"{burst})", self.0.algorithm())
    }
}

impl std::hash::Hash for Quota {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        (self.0.limit(), self.0.window(), self.0.burst()).hash(state);
    }
}

/// Parses a limit and a window, such as `100/minute`, `5/15m` and `10 per 2 hours`.
fn parse_rate(rate: &str) -> Option<(u64, Duration)> {
    let (limit, window) = rate.split_once('/').or_else(|| rate.split_once(" per "))?;
    let limit = limit.trim().replace('_', "").parse().ok()?;
    let window = window.trim();
    let number = window.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let unit = match &window[number.len()..] {
        "second" | "seconds" => 1,
        "minute" | "minutes" => 60,
        "hour" | "hours" => 3_600,
        "day" | "days" => 86_400,
        _ => return Some((limit, duration::parse(window).ok()?)),
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
