//! Traces to an OpenTelemetry collector, if the standard `OTEL_*` variables name one.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use http::HeaderMap;
use opentelemetry::KeyValue;
use opentelemetry::propagation::TextMapPropagator as _;
use opentelemetry::trace::{TraceContextExt as _, TraceId};
use opentelemetry_http::{HeaderExtractor, HeaderInjector};
use opentelemetry_otlp::{Protocol, WithExportConfig as _, WithHttpConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{Sampler, SdkTracerProvider, SpanData, SpanExporter};
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

use super::TraceMode;
use super::otlp::OtlpClient;

/// Target of the spans that are exported. Their level is below the log level, so they cost nothing
/// without a collector.
pub const TRACE: &str = "tidegate::trace";

/// Returns the trace provider, if tracing is enabled. Must be called inside the Tokio runtime.
pub(super) fn provider(mode: &TraceMode) -> anyhow::Result<Option<SdkTracerProvider>> {
    let protocol = match mode {
        TraceMode::Standard if is_enabled() => protocol().1,
        TraceMode::Standard | TraceMode::Off => return Ok(None),
        TraceMode::Ratelimit(settings) if settings.is_grpc => Protocol::Grpc,
        TraceMode::Ratelimit(_) => Protocol::HttpBinary,
    };
    let builder = opentelemetry_otlp::SpanExporter::builder();
    let exporter = match protocol {
        Protocol::Grpc => builder.with_tonic().with_protocol(Protocol::Grpc).build()?,
        protocol => builder
            .with_http()
            .with_protocol(protocol)
            .with_http_client(OtlpClient::new()?)
            .build()?,
    };
    let exporter = ExportErrorLogger { exporter, is_failing: AtomicBool::new(false) };
    let provider = SdkTracerProvider::builder().with_batch_exporter(exporter);
    let TraceMode::Ratelimit(settings) = mode else { return Ok(Some(provider.build())) };
    let names = [
        ("service.namespace", &settings.service_namespace),
        ("service.instance.id", &settings.service_instance),
    ];
    let names = names.into_iter().filter(|(_, value)| !value.is_empty());
    let resource = Resource::builder()
        .with_service_name(settings.service_name.clone())
        .with_attributes(names.map(|(name, value)| KeyValue::new(name, value.clone())));
    let sampler = Sampler::TraceIdRatioBased(settings.sampling_rate);
    let sampler = Sampler::ParentBased(Box::new(sampler));
    Ok(Some(provider.with_resource(resource.build()).with_sampler(sampler).build()))
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

/// Returns the variable that sets the protocol, with its value, and the protocol to use: gRPC
/// unless HTTP is set.
fn protocol() -> (Option<(&'static str, String)>, Protocol) {
    let names = ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"];
    let set = names.into_iter().find_map(|name| Some((name, variable(name)?)));
    let is_http = set.as_ref().is_some_and(|(_, value)| value.starts_with("http/"));
    (set, if is_http { Protocol::HttpBinary } else { Protocol::Grpc })
}

/// Warns if an unsupported protocol is configured. Called after logging has started.
pub(super) fn warn_about_protocol() {
    if let (Some((name, value)), protocol) = protocol() {
        let used = if protocol == Protocol::Grpc { "grpc" } else { "http/protobuf" };
        if value != used {
            tracing::warn!(
                "{name} is {value:?}, but only grpc and http/protobuf are supported: traces are \
                 sent over {used}"
            );
        }
    }
}

/// Returns an environment variable that is set and not empty.
pub(super) fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// Sets the trace of a request (W3C `traceparent`) as the parent of a span that has not started.
pub fn continue_trace(span: &tracing::Span, head: &HeaderMap) {
    let parent = TraceContextPropagator::new().extract(&HeaderExtractor(head));
    if parent.span().span_context().is_valid() {
        let _ = span.set_parent(parent);
    }
}

/// Replaces the trace headers of a request by those of a span. Without a trace exporter the
/// headers stay as they are.
pub fn propagate_trace(span: &tracing::Span, headers: &mut HeaderMap) {
    let context = span.context();
    let span = context.span();
    if !span.span_context().is_valid() {
        return;
    }
    TraceContextPropagator::new().inject_context(&context, &mut HeaderInjector(headers));
    if span.span_context().trace_state().header().is_empty() {
        headers.remove("tracestate");
    }
}

/// Returns the trace of a span or, without a trace exporter, that of the request.
pub fn trace_id(span: &tracing::Span, head: &HeaderMap) -> Option<TraceId> {
    let of = |context: opentelemetry::Context| {
        let id = context.span().span_context().trace_id();
        (id != TraceId::INVALID).then_some(id)
    };
    of(span.context()).or_else(|| of(TraceContextPropagator::new().extract(&HeaderExtractor(head))))
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
