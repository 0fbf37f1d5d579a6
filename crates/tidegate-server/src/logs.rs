//! Logs to standard error, and traces to an OpenTelemetry collector.

use std::io::IsTerminal as _;

use clap::ValueEnum;
use opentelemetry::trace::TracerProvider as _;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer as _, filter::Targets};

mod denials;
mod level;
mod otlp;
pub(crate) mod panics;
mod throttle;
mod traces;

pub(crate) use denials::DenialLog;
pub(crate) use level::VARIABLE;
pub(crate) use throttle::{LogThrottle, store_failed};
pub(crate) use traces::{TRACE, Traces, continue_trace, propagate_trace, trace_id};

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    Text,
    Json,
}

/// Starts logging and tracing. Must be called inside the Tokio runtime, which the trace exporter
/// runs on.
pub(crate) fn start(format: LogFormat) -> anyhow::Result<Traces> {
    let filter = match std::env::var(level::VARIABLE) {
        Ok(text) if !text.trim().is_empty() => level::parse(&text)?,
        _ => EnvFilter::new("info"),
    };
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    let lines = match format {
        LogFormat::Json => lines.json().with_filter(filter).boxed(),
        LogFormat::Text => {
            lines.with_ansi(std::io::stderr().is_terminal()).with_filter(filter).boxed()
        }
    };
    let provider = traces::provider()?;
    let layer = provider.as_ref().map(|provider| {
        let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer("tidegate"));
        layer.with_filter(Targets::new().with_target(TRACE, tracing::Level::DEBUG))
    });
    tracing_subscriber::registry().with(lines).with(layer).init();
    if provider.is_some() {
        traces::warn_about_protocol();
    }
    Ok(Traces(provider))
}
