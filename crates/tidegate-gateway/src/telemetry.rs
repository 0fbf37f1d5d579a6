//! Counters, access log and health of the gateway, which the admin API shows.

use std::sync::Arc;

use tidegate_api::admin::UpstreamHealth;
use tidegate_service::metrics::MetricsSection;
use tidegate_service::state::Proxy;

use super::access_log::AccessLog;
use super::metrics::{self, GatewayMetrics};
use super::upstreams::Upstreams;

#[derive(Debug)]
pub(crate) struct Telemetry {
    pub(super) metrics: GatewayMetrics,
    access_log: Option<AccessLog>,
    upstreams: Arc<Upstreams>,
}

impl Telemetry {
    pub(super) fn new(access_log: Option<AccessLog>, upstreams: Arc<Upstreams>) -> Self {
        Self { metrics: GatewayMetrics::default(), access_log, upstreams }
    }

    pub(crate) fn access_log(&self) -> Option<&AccessLog> {
        self.access_log.as_ref()
    }
}

impl MetricsSection for Telemetry {
    fn write_metrics(&self, text: &mut String) {
        self.metrics.write(text);
        metrics::write_upstreams(text, self.upstreams.iter());
        if let Some(log) = &self.access_log {
            log.write_metrics(text);
        }
    }
}

impl Proxy for Telemetry {
    fn upstreams(&self) -> Vec<UpstreamHealth> {
        let health = self.upstreams.iter().map(|upstream| UpstreamHealth {
            url: upstream.metrics.url.clone(),
            up: upstream.is_up(),
            ejected: self.upstreams.is_ejected(upstream),
        });
        health.collect()
    }
}
