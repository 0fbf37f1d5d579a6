//! Logs to standard error, and traces to an OpenTelemetry collector if the standard `OTEL_*` variables name one.

use std::io::IsTerminal as _;

use clap::ValueEnum;
use opentelemetry::trace::TracerProvider as _;
use opentelemetry_sdk::trace::SdkTracerProvider;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer as _, filter::Targets};

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    Text,
    Json,
}

/// Spans of this target are traces. They are below the level of logs, so that without a collector they cost nothing.
pub(crate) const TRACE: &str = "tidegate::trace";

/// Ends the traces in order when it is dropped: what is gathered is sent.
pub(crate) struct Traces(Option<SdkTracerProvider>);

impl Drop for Traces {
    fn drop(&mut self) {
        if let Some(provider) = &self.0 {
            let _ = provider.shutdown();
        }
    }
}

/// Starts both. Called inside the runtime, which the exporter sends by.
pub(crate) fn start(format: LogFormat) -> anyhow::Result<Traces> {
    let filter = EnvFilter::try_from_env("TIDEGATE_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    let lines = match format {
        LogFormat::Json => lines.json().with_filter(filter).boxed(),
        LogFormat::Text => lines.with_ansi(std::io::stderr().is_terminal()).with_filter(filter).boxed(),
    };
    let provider = if traces_are_asked_for() {
        let exporter = opentelemetry_otlp::SpanExporter::builder().with_tonic().build()?;
        Some(SdkTracerProvider::builder().with_batch_exporter(exporter).build())
    } else {
        None
    };
    let traces = provider.as_ref().map(|provider| {
        let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer("tidegate"));
        layer.with_filter(Targets::new().with_target(TRACE, tracing::Level::DEBUG))
    });
    tracing_subscriber::registry().with(lines).with(traces).init();
    Ok(Traces(provider))
}

/// As the specification says: an endpoint is set, and nothing switches them off.
fn traces_are_asked_for() -> bool {
    let is = |name: &str, value: &str| std::env::var(name).is_ok_and(|set| set.eq_ignore_ascii_case(value));
    let endpoint = ["OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"];
    let set = endpoint.iter().any(|name| std::env::var(name).is_ok_and(|url| !url.is_empty()));
    set && !is("OTEL_SDK_DISABLED", "true") && !is("OTEL_TRACES_EXPORTER", "none")
}
