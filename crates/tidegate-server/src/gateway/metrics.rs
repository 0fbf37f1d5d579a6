//! Metrics of the gateway and of its upstreams. No label has a value that clients choose.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::concurrency::Overload;
use super::error::ProxyError;
use super::local_error::LocalResource;
use super::upstreams::Upstream;
use crate::metrics::{Histogram, escaped, head, write_labelled, write_numbers};

/// Status codes that are counted one by one; all others count as `other`.
const MIN_CODE: u16 = 100;
const CODES: usize = 500;

/// Errors by which a request to an upstream can fail, as labels.
const ERROR_KINDS: [&str; 6] = [
    "connect",
    "connect_timeout",
    "connection_lost",
    "response_timeout",
    "request_body",
    "invalid_response",
];
/// Classes of the upstreams' status codes, as labels.
const CLASSES: [&str; 6] = ["1xx", "2xx", "3xx", "4xx", "5xx", "other"];

/// Side that ended a response before it was complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Aborted {
    Client,
    Upstream,
}

impl Aborted {
    const ALL: [Self; 2] = [Self::Client, Self::Upstream];

    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Upstream => "upstream",
        }
    }
}

/// Metrics of all requests.
#[derive(Debug)]
pub(super) struct GatewayMetrics {
    /// Requests by status code, from 100 on; the last counter is that of all other codes.
    codes: Box<[AtomicU64]>,
    in_flight: AtomicU64,
    seconds: Histogram,
    aborted: [AtomicU64; Aborted::ALL.len()],
    local_errors: [AtomicU64; LocalResource::ALL.len()],
}

impl Default for GatewayMetrics {
    fn default() -> Self {
        Self {
            codes: (0..=CODES).map(|_| AtomicU64::new(0)).collect(),
            in_flight: AtomicU64::new(0),
            seconds: Histogram::of_requests(),
            aborted: Default::default(),
            local_errors: Default::default(),
        }
    }
}

impl GatewayMetrics {
    pub(super) fn start(&self) {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a request whose response, or tunnel, has ended.
    pub(super) fn finish(&self, code: u16, aborted: Option<Aborted>) {
        self.in_flight.fetch_sub(1, Ordering::Relaxed);
        let index = usize::from(code.wrapping_sub(MIN_CODE)).min(CODES);
        self.codes[index].fetch_add(1, Ordering::Relaxed);
        if let Some(side) = aborted {
            self.aborted[side as usize].fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(super) fn count_local_error(&self, resource: LocalResource) {
        self.local_errors[resource as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn observe(&self, duration: Duration) {
        self.seconds.observe(duration);
    }

    pub(super) fn write(&self, text: &mut String) {
        let codes = self.codes.iter().enumerate().map(|(index, counter)| {
            let code = match index {
                CODES => "other".to_owned(),
                _ => (usize::from(MIN_CODE) + index).to_string(),
            };
            (code, load(counter))
        });
        let help = "Requests to the gateway, by the status of the response.";
        let codes = codes.filter(|(_, count)| *count > 0);
        write_labelled(text, ("tidegate_gateway_requests_total", "code"), help, codes);
        let help = "Requests whose response or tunnel has not ended.";
        let in_flight = load(&self.in_flight);
        write_numbers(text, &[("tidegate_gateway_requests_in_flight", "gauge", help, in_flight)]);
        let help = "Duration of a request to the gateway, to the end of its response.";
        self.seconds.write(text, "tidegate_gateway_request_seconds", help);
        let help = "Responses that ended early, by the side that ended them.";
        let sides =
            Aborted::ALL.map(Aborted::as_str).into_iter().zip(self.aborted.iter().map(load));
        write_labelled(text, ("tidegate_gateway_aborted_responses_total", "side"), help, sides);
        let help = "Connections to upstreams that failed for lack of a resource of this host.";
        let resources = LocalResource::ALL.map(LocalResource::as_str).into_iter();
        let resources = resources.zip(self.local_errors.iter().map(load));
        write_labelled(text, ("tidegate_gateway_local_errors_total", "resource"), help, resources);
    }
}

/// Metrics of one upstream.
#[derive(Debug)]
pub(super) struct UpstreamMetrics {
    /// URL as configured, which contains no credentials.
    pub(super) url: String,
    responses: [AtomicU64; CLASSES.len()],
    errors: [AtomicU64; ERROR_KINDS.len()],
    rejections: [AtomicU64; Overload::ALL.len()],
    in_flight: AtomicU64,
    ejections: AtomicU64,
    /// Time to the head of the response.
    seconds: Histogram,
}

impl UpstreamMetrics {
    pub(super) fn new(url: &str) -> Self {
        Self {
            url: url.to_owned(),
            responses: Default::default(),
            errors: Default::default(),
            rejections: Default::default(),
            in_flight: AtomicU64::new(0),
            ejections: AtomicU64::new(0),
            seconds: Histogram::of_requests(),
        }
    }

    pub(super) fn start(&self) {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn end(&self) {
        self.in_flight.fetch_sub(1, Ordering::Relaxed);
    }

    pub(super) fn count_response(&self, status: http::StatusCode, duration: Duration) {
        let class = usize::from(status.as_u16() / 100).wrapping_sub(1).min(CLASSES.len() - 1);
        self.responses[class].fetch_add(1, Ordering::Relaxed);
        self.seconds.observe(duration);
    }

    pub(super) fn count_error(&self, error: ProxyError) {
        if let ProxyError::Overloaded(overload) = error {
            self.count_rejection(overload);
        } else if let Some(index) = ERROR_KINDS.iter().position(|kind| *kind == error_kind(error)) {
            self.errors[index].fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(super) fn count_rejection(&self, overload: Overload) {
        self.rejections[overload as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn count_ejection(&self) {
        self.ejections.fetch_add(1, Ordering::Relaxed);
    }
}

/// Returns the label of an error of a request to an upstream.
pub(super) fn error_kind(error: ProxyError) -> &'static str {
    match error {
        ProxyError::Unreachable | ProxyError::NoUpstream => "connect",
        ProxyError::ConnectTimeout => "connect_timeout",
        ProxyError::ResponseTimeout => "response_timeout",
        ProxyError::RequestBodyTimeout | ProxyError::RequestBodyBroken => "request_body",
        ProxyError::InvalidResponse | ProxyError::ResponseTooLarge => "invalid_response",
        // These two are not errors of the upstream, and have metrics of their own.
        ProxyError::Overloaded(overload) => overload.as_str(),
        ProxyError::LocalResource(_) => "local_resource",
        _ => "connection_lost",
    }
}

/// Writes the metrics of all upstreams.
pub(super) fn write_upstreams<'a>(
    text: &mut String,
    upstreams: impl Iterator<Item = &'a Upstream>,
) {
    // Upstreams of the same URL share their metrics.
    let mut unique: Vec<(&UpstreamMetrics, bool, usize, String)> = Vec::new();
    for upstream in upstreams {
        let (metrics, up) = (&*upstream.metrics, upstream.is_up());
        match unique.iter_mut().find(|(other, ..)| other.url == metrics.url) {
            Some((_, is_any_up, ..)) => *is_any_up |= up,
            None => unique.push((metrics, up, upstream.limit.pending(), label(&metrics.url))),
        }
    }
    let upstreams = unique;
    let name = "tidegate_upstream_responses_total";
    head(text, name, "counter", "Responses of an upstream, by class of their status.");
    for (metrics, .., label) in &upstreams {
        for (class, counter) in CLASSES.iter().zip(&metrics.responses) {
            let _ = writeln!(text, "{name}{{{label},code=\"{class}\"}} {}", load(counter));
        }
    }
    let name = "tidegate_upstream_errors_total";
    head(text, name, "counter", "Requests that got no response of an upstream, by error.");
    for (metrics, .., label) in &upstreams {
        for (kind, counter) in ERROR_KINDS.iter().zip(&metrics.errors) {
            let _ = writeln!(text, "{name}{{{label},kind=\"{kind}\"}} {}", load(counter));
        }
    }
    let name = "tidegate_upstream_response_seconds";
    head(text, name, "histogram", "Time to the head of an upstream's response.");
    for (metrics, .., label) in &upstreams {
        metrics.seconds.write_series(text, name, label);
    }
    let name = "tidegate_upstream_requests_in_flight";
    head(text, name, "gauge", "Requests to an upstream whose response has not ended.");
    for (metrics, .., label) in &upstreams {
        let _ = writeln!(text, "{name}{{{label}}} {}", load(&metrics.in_flight));
    }
    let name = "tidegate_upstream_requests_pending";
    head(text, name, "gauge", "Requests that wait, because an upstream has too many in flight.");
    for (.., pending, label) in &upstreams {
        let _ = writeln!(text, "{name}{{{label}}} {pending}");
    }
    let name = "tidegate_upstream_rejections_total";
    head(text, name, "counter", "Requests rejected because an upstream has too many, by reason.");
    for (metrics, .., label) in &upstreams {
        for (reason, counter) in Overload::ALL.into_iter().zip(&metrics.rejections) {
            let reason = reason.as_str();
            let _ = writeln!(text, "{name}{{{label},reason=\"{reason}\"}} {}", load(counter));
        }
    }
    let name = "tidegate_upstream_up";
    let help = "Whether an upstream is up: its last three requests have not all failed.";
    head(text, name, "gauge", help);
    for (_, up, _, label) in &upstreams {
        let _ = writeln!(text, "{name}{{{label}}} {}", u8::from(*up));
    }
    let name = "tidegate_upstream_ejections_total";
    head(text, name, "counter", "Number of times that an upstream was ejected.");
    for (metrics, .., label) in &upstreams {
        let _ = writeln!(text, "{name}{{{label}}} {}", load(&metrics.ejections));
    }
}

fn label(url: &str) -> String {
    format!("upstream=\"{}\"", escaped(url))
}

fn load(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}
