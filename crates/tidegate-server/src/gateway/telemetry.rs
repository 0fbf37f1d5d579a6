//! Counters, access log and health of the gateway, which the admin API shows.

use std::sync::Arc;

use serde::Serialize;

use super::access_log::AccessLog;
use super::metrics::{self, GatewayMetrics};
use super::upstreams::Upstreams;

#[derive(Debug)]
pub(crate) struct Telemetry {
    pub(super) metrics: GatewayMetrics,
    access_log: Option<AccessLog>,
    upstreams: Arc<Upstreams>,
}

/// Health of an upstream, judged by the requests to it.
#[derive(Debug, PartialEq, Eq, Serialize, utoipa::ToSchema)]
pub(crate) struct UpstreamHealth {
    url: String,
    /// False after three failures in a row, until a request succeeds.
    pub(crate) up: bool,
    /// Whether it gets no requests for some seconds, unless all others are ejected, too.
    pub(crate) ejected: bool,
}

impl Telemetry {
    pub(super) fn new(access_log: Option<AccessLog>, upstreams: Arc<Upstreams>) -> Self {
        Self { metrics: GatewayMetrics::default(), access_log, upstreams }
    }

    pub(crate) fn access_log(&self) -> Option<&AccessLog> {
        self.access_log.as_ref()
    }

    pub(crate) fn write_metrics(&self, text: &mut String) {
        self.metrics.write(text);
        metrics::write_upstreams(text, self.upstreams.iter());
        if let Some(log) = &self.access_log {
            log.write_metrics(text);
        }
    }

    /// Returns the health of each upstream, in the order of the configuration.
    pub(crate) fn health(&self) -> Vec<UpstreamHealth> {
        let health = self.upstreams.iter().map(|upstream| UpstreamHealth {
            url: upstream.metrics.url.clone(),
            up: upstream.is_up(),
            ejected: self.upstreams.is_ejected(upstream),
        });
        health.collect()
    }
}
