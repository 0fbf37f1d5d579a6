//! Spans of a request, by the semantic conventions of OpenTelemetry for HTTP: one for the request
//! of the client and one for each request to an upstream.

use std::net::IpAddr;

use http::uri::Authority;
use http::{HeaderMap, Method, Request, StatusCode, Version, header};
use tracing::Span;
use tracing::field::Empty;

use super::error::ProxyError;
use super::metrics::{Aborted, error_kind};
use super::upstreams::Upstream;
use tidegate_net::listener::Peer;
use tidegate_service::logs::{self, TRACE};

/// Maximum length of an attribute that the client chooses.
const MAX_ATTRIBUTE_BYTES: usize = 1024;

/// Starts the span of a client's request, in the trace of that request. `client` is only called if
/// spans are enabled.
pub(super) fn server<B>(
    request: &Request<B>,
    peer: Option<Peer>,
    client: impl FnOnce() -> Option<IpAddr>,
) -> Span {
    // Nothing is computed without a collector.
    if !tracing::enabled!(target: TRACE, tracing::Level::DEBUG) {
        return Span::none();
    }
    let authority = authority(request);
    let span = tracing::debug_span!(
        target: TRACE,
        "request",
        otel.name = span_name(request.method()),
        otel.kind = "server",
        http.request.method = method(request.method()),
        url.scheme = if peer.is_some_and(|peer| peer.tls) { "https" } else { "http" },
        url.path = cut(request.uri().path()),
        network.protocol.version = version(request.version()),
        server.address = authority.as_ref().map(|authority| cut(authority.host())),
        server.port = authority.as_ref().and_then(Authority::port_u16).map(i64::from),
        client.address = client().map(tracing::field::display),
        user_agent.original = text(request.headers(), &header::USER_AGENT),
        http.response.status_code = Empty,
        "error.type" = Empty,
        otel.status_code = Empty,
    );
    logs::continue_trace(&span, request.headers());
    span
}

/// Records the end of a client's request in its span. Only failures of the server are errors.
pub(super) fn end_server(span: &Span, status: Option<StatusCode>, aborted: Option<Aborted>) {
    if span.is_disabled() {
        return;
    }
    if let Some(status) = status {
        span.record("http.response.status_code", i64::from(status.as_u16()));
        if status.is_server_error() {
            record_error(span, status.as_str());
        }
    }
    match aborted {
        Some(Aborted::Upstream) => record_error(span, "upstream_aborted"),
        Some(Aborted::Client) => {
            span.record("error.type", "client_aborted");
        }
        None => {}
    }
}

/// Starts the span of a request to an upstream and sends its trace headers with the request.
/// `resends` is the number of earlier tries.
pub(super) fn client<B>(upstream: &Upstream, resends: u32, request: &mut Request<B>) -> Span {
    if !tracing::enabled!(target: TRACE, tracing::Level::DEBUG) {
        return Span::none();
    }
    let uri = request.uri();
    let span = tracing::debug_span!(
        target: TRACE,
        "upstream",
        otel.name = span_name(request.method()),
        otel.kind = "client",
        http.request.method = method(request.method()),
        http.request.resend_count = (resends > 0).then_some(i64::from(resends)),
        // Without the query, which may contain secrets.
        url.full = cut(&format!("{}://{}{}", upstream.url.scheme, upstream.url.authority, uri.path())),
        server.address = match &upstream.url.socket {
            Some(path) => path.display().to_string(),
            None => upstream.url.authority.host().to_owned(),
        },
        server.port = upstream.port().map(i64::from),
        network.protocol.version = version(request.version()),
        http.response.status_code = Empty,
        "error.type" = Empty,
        otel.status_code = Empty,
    );
    logs::propagate_trace(&span, request.headers_mut());
    span
}

/// Records the response of an upstream in the span of the request to it.
pub(super) fn end_client(span: &Span, result: Result<StatusCode, ProxyError>) {
    if span.is_disabled() {
        return;
    }
    match result {
        Ok(status) => {
            span.record("http.response.status_code", i64::from(status.as_u16()));
            if status.is_client_error() || status.is_server_error() {
                record_error(span, status.as_str());
            }
        }
        Err(error) => record_error(span, error_kind(error)),
    }
}

fn record_error(span: &Span, kind: &str) {
    span.record("error.type", kind);
    span.record("otel.status_code", "ERROR");
}

fn authority<B>(request: &Request<B>) -> Option<Authority> {
    let of_header = || Authority::try_from(request.headers().get(header::HOST)?.as_bytes()).ok();
    request.uri().authority().cloned().or_else(of_header)
}

/// Returns the method, or `_OTHER` for one that HTTP does not define.
fn method(method: &Method) -> &str {
    let known = [
        Method::GET,
        Method::HEAD,
        Method::POST,
        Method::PUT,
        Method::DELETE,
        Method::CONNECT,
        Method::OPTIONS,
        Method::TRACE,
        Method::PATCH,
    ];
    if known.contains(method) { method.as_str() } else { "_OTHER" }
}

fn span_name(name: &Method) -> &str {
    Some(method(name)).filter(|name| *name != "_OTHER").unwrap_or("HTTP")
}

fn version(version: Version) -> &'static str {
    match version {
        Version::HTTP_10 => "1.0",
        Version::HTTP_2 => "2",
        _ => "1.1",
    }
}

fn text<'h>(headers: &'h HeaderMap, name: &header::HeaderName) -> Option<&'h str> {
    headers.get(name)?.to_str().ok().map(cut)
}

fn cut(text: &str) -> &str {
    let mut end = text.len().min(MAX_ATTRIBUTE_BYTES);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}
