//! The Python package `tidegate`: the limiter inside a Python process. `python/tidegate` has the
//! Python part, and `_tidegate.pyi` describes this one.

#![expect(clippy::needless_pass_by_value, reason = "arguments of Python are owned")]

use pyo3::prelude::*;

mod aio;
mod connection;
mod decision;
mod error;
mod hold;
mod limiter;
mod logs;
mod policies;
mod process;
mod query;
mod quota;
mod store;
mod wait;

#[pymodule(name = "_tidegate", gil_used = false)]
mod extension {
    #[pymodule_export]
    use super::aio::Completions;
    #[pymodule_export]
    use super::decision::{Decision, Decisions};
    #[pymodule_export]
    use super::error::StoreError;
    #[pymodule_export]
    use super::hold::{Held, Hold};
    #[pymodule_export]
    use super::limiter::{Limiter, ManualClock};
    #[pymodule_export]
    use super::policies::{ClientIp, Policies, PolicyLimiter};
    #[pymodule_export]
    use super::quota::Quota;
    #[pymodule_export]
    use super::wait::Wait;
    #[pymodule_init]
    #[expect(clippy::unnecessary_wraps, reason = "as PyO3 wants it")]
    fn init(_module: &super::Bound<'_, super::PyModule>) -> super::PyResult<()> {
        super::logs::install();
        Ok(())
    }

    #[pymodule_export]
    #[expect(non_upper_case_globals, reason = "Python's name")]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
