//! Traces to an OpenTelemetry collector, if the standard `OTEL_*` variables name one.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use http::HeaderMap;
use opentelemetry::propagation::{Extractor, TextMapPropagator as _};
use opentelemetry::trace::TraceContextExt as _;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{SdkTracerProvider, SpanData, SpanExporter};
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

/// Target of the spans that are exported. Their level is below the log level, so they cost nothing
/// without a collector.
pub(crate) const TRACE: &str = "tidegate::trace";

/// Guard that flushes and shuts down the trace exporter on drop.
pub(crate) struct Traces(pub(super) Option<SdkTracerProvider>);

impl Drop for Traces {
    fn drop(&mut self) {
        if let Some(provider) = &self.0 {
            let _ = provider.shutdown();
        }
    }
}

/// Returns the trace provider, if tracing is enabled. Must be called inside the Tokio runtime.
pub(super) fn provider() -> anyhow::Result<Option<SdkTracerProvider>> {
    if !is_enabled() {
        return Ok(None);
    }
    let exporter = opentelemetry_otlp::SpanExporter::builder().with_tonic().build()?;
    let exporter = ExportErrorLogger { exporter, is_failing: AtomicBool::new(false) };
    Ok(Some(SdkTracerProvider::builder().with_batch_exporter(exporter).build()))
}

/// Returns whether an endpoint is set and nothing disables tracing, as OpenTelemetry specifies.
fn is_enabled() -> bool {
    let is =
        |name: &str, value: &str| variable(name).is_some_and(|set| set.eq_ignore_ascii_case(value));
    let endpoint = ["OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"];
    endpoint.into_iter().any(|name| variable(name).is_some())
        && !is("OTEL_SDK_DISABLED", "true")
        && !is("OTEL_TRACES_EXPORTER", "none")
}

/// Warns if an unsupported protocol is configured. Called after logging has started.
pub(super) fn warn_about_protocol() {
    let names = ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"];
    let set = names.into_iter().find_map(|name| Some((name, variable(name)?)));
    if let Some((name, protocol)) = set.filter(|(_, protocol)| protocol != "grpc") {
        tracing::warn!(
            "{name} is {protocol:?}, but only grpc is supported: traces are sent over grpc"
        );
    }
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// Sets the trace of a request (W3C `traceparent`) as the parent of a span that has not started.
pub(crate) fn continue_trace(span: &tracing::Span, head: &HeaderMap) {
    let parent = TraceContextPropagator::new().extract(&HeaderExtractor(head));
    if parent.span().span_context().is_valid() {
        let _ = span.set_parent(parent);
    }
}

struct HeaderExtractor<'a>(&'a HeaderMap);

impl Extractor for HeaderExtractor<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.to_str().ok()
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(http::HeaderName::as_str).collect()
    }
}

/// Exporter wrapper that logs the first failure and the recovery.
#[derive(Debug)]
struct ExportErrorLogger<E> {
    exporter: E,
    is_failing: AtomicBool,
}

impl<E: SpanExporter> SpanExporter for ExportErrorLogger<E> {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let result = self.exporter.export(batch).await;
        let was_failing = self.is_failing.swap(result.is_err(), Ordering::Relaxed);
        match &result {
            Err(error) if !was_failing => {
                tracing::warn!(%error, "exporting traces failed");
            }
            Ok(()) if was_failing => tracing::info!("exporting traces succeeded again"),
            _ => {}
        }
        result
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(timeout)
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.exporter.force_flush()
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.exporter.set_resource(resource);
    }
}
