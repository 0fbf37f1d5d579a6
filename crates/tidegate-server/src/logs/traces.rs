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

/// Spans of this target are traces. They are below the level of logs, so that without a collector
/// they cost nothing.
pub(crate) const TRACE: &str = "tidegate::trace";

/// Ends the traces in order when it is dropped: what is gathered is sent.
pub(crate) struct Traces(pub(super) Option<SdkTracerProvider>);

impl Drop for Traces {
    fn drop(&mut self) {
        if let Some(provider) = &self.0 {
            let _ = provider.shutdown();
        }
    }
}

/// Called inside the runtime, which the exporter sends by.
pub(super) fn provider() -> anyhow::Result<Option<SdkTracerProvider>> {
    if !are_asked_for() {
        return Ok(None);
    }
    let exporter = opentelemetry_otlp::SpanExporter::builder().with_tonic().build()?;
    let exporter = Telling { exporter, is_failing: AtomicBool::new(false) };
    Ok(Some(SdkTracerProvider::builder().with_batch_exporter(exporter).build()))
}

/// As the specification says: an endpoint is set, and nothing switches them off.
fn are_asked_for() -> bool {
    let is =
        |name: &str, value: &str| variable(name).is_some_and(|set| set.eq_ignore_ascii_case(value));
    let endpoint = ["OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"];
    endpoint.into_iter().any(|name| variable(name).is_some())
        && !is("OTEL_SDK_DISABLED", "true")
        && !is("OTEL_TRACES_EXPORTER", "none")
}

/// Says so if another protocol is asked for than the one that there is. Called once logs are
/// written.
pub(super) fn warn_of_protocol() {
    let names = ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"];
    let set = names.into_iter().find_map(|name| Some((name, variable(name)?)));
    if let Some((name, protocol)) = set.filter(|(_, protocol)| protocol != "grpc") {
        tracing::warn!(
            "{name} is {protocol:?}: traces are sent by grpc, which is the only protocol supported"
        );
    }
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// Makes a span that has not begun part of the trace that a request belongs to, if its head says so
/// (W3C `traceparent`).
pub(crate) fn continue_trace(span: &tracing::Span, head: &HeaderMap) {
    let parent = TraceContextPropagator::new().extract(&Fields(head));
    if parent.span().span_context().is_valid() {
        let _ = span.set_parent(parent);
    }
}

struct Fields<'a>(&'a HeaderMap);

impl Extractor for Fields<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.to_str().ok()
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(http::HeaderName::as_str).collect()
    }
}

/// Says once that traces cannot be sent, and once that they can again.
#[derive(Debug)]
struct Telling<E> {
    exporter: E,
    is_failing: AtomicBool,
}

impl<E: SpanExporter> SpanExporter for Telling<E> {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let sent = self.exporter.export(batch).await;
        let was_failing = self.is_failing.swap(sent.is_err(), Ordering::Relaxed);
        match &sent {
            Err(error) if !was_failing => {
                tracing::warn!(%error, "traces cannot be sent to the collector")
            }
            Ok(()) if was_failing => tracing::info!("traces are sent to the collector again"),
            _ => {}
        }
        sent
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
