//! [`ReloadHistory`]: the last reload and its error, for operators.

use std::fmt;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use crate::metrics;
use tidegate_api::duration;
use tidegate_config::ConfigError;

/// Result of the last reload.
#[derive(Debug)]
pub struct ReloadHistory(Mutex<LastReload>);

/// Last reload, and the configuration that is in use.
#[derive(Debug, Clone)]
pub struct LastReload {
    /// Configuration file; `None` for the built-in sample.
    pub file: Option<PathBuf>,
    /// Time of the last reload; `None` before the first one.
    pub at: Option<SystemTime>,
    pub error: Option<ReloadError>,
    /// Time at which the configuration in use was loaded.
    pub loaded_at: SystemTime,
    /// Sections whose changes need a restart.
    pub restart_pending: Vec<&'static str>,
}

/// Reason why a configuration was not loaded, without secrets.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, utoipa::ToSchema)]
pub struct ReloadError {
    message: String,
    file: String,
    line: Option<usize>,
    column: Option<usize>,
}

impl ReloadError {
    /// Creates an error about a file as a whole.
    pub fn of_file(file: &str, message: impl Into<String>) -> Self {
        Self { message: message.into(), file: file.to_owned(), line: None, column: None }
    }
}

impl From<ConfigError> for ReloadError {
    fn from(error: ConfigError) -> Self {
        let (line, column) = error.position().unzip();
        let (message, file) = (error.message().to_owned(), error.file().to_owned());
        Self { message, file, line, column }
    }
}

impl std::error::Error for ReloadError {}

impl fmt::Display for ReloadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.file)?;
        for number in [self.line, self.column].into_iter().flatten() {
            write!(f, ":{number}")?;
        }
        write!(f, ": {}", self.message)
    }
}

impl ReloadHistory {
    /// Creates the history of a process that has loaded its configuration at this time.
    pub fn new(loaded_at: SystemTime) -> Self {
        let restart_pending = Vec::new();
        let last = LastReload { file: None, at: None, error: None, loaded_at, restart_pending };
        Self(Mutex::new(last))
    }

    pub fn set_file(&self, file: PathBuf) {
        self.lock().file = Some(file);
    }

    /// `restart_pending`: the sections whose changes need a restart.
    pub fn succeeded(&self, restart_pending: Vec<&'static str>) {
        let now = SystemTime::now();
        let mut last = self.lock();
        last.at = Some(now);
        last.loaded_at = now;
        last.restart_pending = restart_pending;
        last.error = None;
    }

    pub fn failed(&self, error: ReloadError) {
        let mut last = self.lock();
        last.at = Some(SystemTime::now());
        last.error = Some(error);
    }

    pub fn last(&self) -> LastReload {
        self.lock().clone()
    }

    pub fn write_metrics(&self, text: &mut String) {
        let last = self.last();
        let loaded_at = duration::since_epoch(last.loaded_at).as_secs();
        let numbers = [
            (
                "tidegate_config_last_reload_successful",
                "gauge",
                "Whether the last attempt to load the configuration succeeded.",
                u64::from(last.error.is_none()),
            ),
            (
                "tidegate_config_last_reload_success_timestamp_seconds",
                "gauge",
                "Time at which the configuration in use was loaded, in seconds since the epoch.",
                loaded_at,
            ),
            (
                "tidegate_restart_pending",
                "gauge",
                "Whether the configuration has changes that need a restart.",
                u64::from(!last.restart_pending.is_empty()),
            ),
        ];
        metrics::write_numbers(text, &numbers);
    }

    fn lock(&self) -> MutexGuard<'_, LastReload> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
