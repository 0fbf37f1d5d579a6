//! Logs to standard error, and traces to an OpenTelemetry collector.

use std::io::IsTerminal as _;
use std::sync::OnceLock;
use std::time::Duration;

use clap::ValueEnum;
use opentelemetry::trace::TracerProvider as _;
use opentelemetry_sdk::trace::SdkTracerProvider;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer as _, filter::Targets};

mod denials;
mod level;
mod otlp;
pub mod panics;
mod throttle;
mod traces;
mod writer;

use tidegate_config::{LogDestination, TraceSettings};

pub use denials::DenialLog;
pub use level::VARIABLE;
pub use throttle::store_failed;
pub use traces::{TRACE, continue_trace, propagate_trace, trace_id};
pub use writer::LogWriter;

/// Time limit for writing the last lines at the end of the process.
const STOP_TIMEOUT: Duration = Duration::from_secs(1);

/// Writer of the lines on standard error.
static STDERR: OnceLock<LogWriter> = OnceLock::new();

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    Text,
    Json,
}

/// Settings of the logs and traces of a process.
#[derive(Debug, Clone)]
pub struct LogSettings {
    pub format: LogFormat,
    /// Level, unless the variable `TIDEGATE_LOG` has one.
    pub level: &'static str,
    pub traces: TraceMode,
}

/// Source of the settings of traces.
#[derive(Debug, Clone)]
pub enum TraceMode {
    /// The standard variables alone: an endpoint turns traces on.
    Standard,
    Off,
    /// Settings of envoyproxy/ratelimit, and the standard variables for the rest.
    Ratelimit(TraceSettings),
}

impl LogSettings {
    /// Returns the settings of commands that have only a format.
    pub fn of_format(format: LogFormat) -> Self {
        Self { format, level: "info", traces: TraceMode::Standard }
    }
}

/// Guard that exports the last spans and writes the last lines on drop.
pub struct LogGuard {
    traces: Option<SdkTracerProvider>,
}

impl Drop for LogGuard {
    fn drop(&mut self) {
        // First, because the exporter may log an error.
        if let Some(provider) = &self.traces {
            let _ = provider.shutdown();
        }
        if let Some(writer) = STDERR.get() {
            writer.stop(STOP_TIMEOUT);
        }
    }
}

/// Returns the numbers of lines on standard error, by outcome.
pub fn line_counts() -> [(&'static str, u64); 2] {
    STDERR.get().map_or([("written", 0), ("dropped", 0)], LogWriter::counts)
}

/// Starts logging and tracing. Must be called inside the Tokio runtime, which the trace exporter
/// runs on.
pub fn start(settings: &LogSettings) -> anyhow::Result<LogGuard> {
    let filter = match std::env::var(level::VARIABLE) {
        Ok(text) if !text.trim().is_empty() => level::parse(&text)?,
        _ => EnvFilter::new(settings.level),
    };
    // A thread of the runtime must not block on a full pipe: lines are queued, or dropped.
    let writer = LogWriter::start("log", &LogDestination::Stderr, Duration::ZERO)?;
    let writer = STDERR.get_or_init(|| writer);
    let lines = tracing_subscriber::fmt::layer().with_writer(move || writer);
    let lines = match settings.format {
        LogFormat::Json => lines.json().with_filter(filter).boxed(),
        LogFormat::Text => {
            lines.with_ansi(std::io::stderr().is_terminal()).with_filter(filter).boxed()
        }
    };
    let provider = traces::provider(&settings.traces)?;
    let layer = provider.as_ref().map(|provider| {
        let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer("tidegate"));
        layer.with_filter(Targets::new().with_target(TRACE, tracing::Level::DEBUG))
    });
    tracing_subscriber::registry().with(lines).with(layer).init();
    if provider.is_some() && matches!(settings.traces, TraceMode::Standard) {
        traces::warn_about_protocol();
    }
    Ok(LogGuard { traces: provider })
}
