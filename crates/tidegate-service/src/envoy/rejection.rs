//! Calls that are denied because they cannot be decided.
//!
//! Envoy passes requests whose rate limit call fails (`failure_mode_deny: false`), and descriptors
//! have values of clients' headers. So a client must not be able to make a call fail: a call that
//! is too large or has an invalid value is answered with `OVER_LIMIT`, not with a gRPC error.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use crate::metrics::{Metrics, MetricsSection, write_labelled};

use tidegate_api::envoy::service::ratelimit::v3::RateLimitResponse;
use tidegate_api::envoy::service::ratelimit::v3::rate_limit_response::{Code, DescriptorStatus};
use tidegate_net::LogThrottle;

/// Reason of a denial without a decision.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Rejection {
    #[error("the message has {length} bytes: at most {max} are allowed")]
    MessageSize { length: usize, max: usize },
    #[error("too many bytes of incomplete messages: {max} per {scope} are allowed")]
    BufferedBytes { max: usize, scope: &'static str },
    #[error("{count} {parts}: at most {max} are allowed")]
    TooManyParts { count: usize, parts: &'static str, max: usize },
    #[error("{reason}")]
    Invalid { reason: String, descriptors: usize },
}

/// Numbers of rejections, by their label.
#[derive(Debug, Default)]
pub(crate) struct RejectionCounters([AtomicU64; Rejection::LABELS.len()]);

impl Rejection {
    /// Labels in metrics, in the order of the variants.
    const LABELS: [&str; 4] = ["message_size", "buffered_bytes", "descriptors", "invalid"];

    fn index(&self) -> usize {
        match self {
            Self::MessageSize { .. } => 0,
            Self::BufferedBytes { .. } => 1,
            Self::TooManyParts { .. } => 2,
            Self::Invalid { .. } => 3,
        }
    }

    /// Counts and logs the rejection, and returns the denial.
    pub(super) fn into_denial(self, counters: &RejectionCounters) -> RateLimitResponse {
        static THROTTLE: LogThrottle = LogThrottle::new();
        counters.0[self.index()].fetch_add(1, Ordering::Relaxed);
        if let Some(suppressed) = THROTTLE.should_log(Instant::now()) {
            tracing::warn!(
                reason = %self,
                suppressed,
                "a call of Envoy was denied because it cannot be decided (logged once per minute)"
            );
        }
        let descriptors = match self {
            Self::Invalid { descriptors, .. } => descriptors,
            // They are not read.
            Self::MessageSize { .. } | Self::BufferedBytes { .. } | Self::TooManyParts { .. } => 0,
        };
        let over_limit =
            DescriptorStatus { code: Code::OverLimit.into(), ..DescriptorStatus::default() };
        RateLimitResponse {
            overall_code: Code::OverLimit.into(),
            statuses: vec![over_limit; descriptors],
            ..RateLimitResponse::default()
        }
    }
}

impl RejectionCounters {
    /// Returns the number of all rejections.
    pub(super) fn total(&self) -> u64 {
        self.0.iter().map(|counter| counter.load(Ordering::Relaxed)).sum()
    }

    /// Registers the counters, even if the service of Envoy is not started: dashboards know their
    /// names.
    pub(crate) fn registered(metrics: &Metrics) -> Arc<Self> {
        let counters = Arc::<Self>::default();
        metrics.register(Arc::clone(&counters) as Arc<dyn MetricsSection>);
        counters
    }
}

impl MetricsSection for RejectionCounters {
    fn write_metrics(&self, text: &mut String) {
        let counts = self.0.iter().map(|counter| counter.load(Ordering::Relaxed));
        write_labelled(
            text,
            ("tidegate_envoy_rejections_total", "reason"),
            "Calls of Envoy that were denied because they cannot be decided, by reason.",
            Rejection::LABELS.into_iter().zip(counts),
        );
    }
}
