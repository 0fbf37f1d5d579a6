//! HTTP listeners of envoyproxy/ratelimit, for probes, dashboards and clients that know it:
//! `/healthcheck` and `/json`, `/rlconfig`, and metrics by its names.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use anyhow::Context as _;
use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use axum::{Extension, Router};
use http::{HeaderMap, StatusCode, header};
use tokio::sync::watch;

use crate::envoy::Envoy;
use crate::state::ServerState;
use tidegate_api::envoy::service::ratelimit::v3::rate_limit_response::Code;
use tidegate_config::RatelimitSettings;
use tidegate_config::envoy::{Limit, RuleMode};
use tidegate_net::BODY_TIMEOUT;
use tidegate_net::listener::Peer;

mod json;
mod metrics;

use json::JsonMessages;

/// Maximum size of the body of a request to `/json`.
const MAX_BODY_BYTES: usize = 64 * 1024;

/// State that the handlers share.
pub(crate) struct Ratelimit {
    state: Arc<ServerState>,
    envoy: Arc<Envoy>,
    messages: JsonMessages,
    unready: watch::Receiver<bool>,
    needs_rules: bool,
    needs_connection: bool,
    /// Whether Redis was connected once.
    was_connected: AtomicBool,
    /// Domains whose rules have counted units, also if they are gone: labels must not change.
    counted_domains: Mutex<BTreeSet<String>>,
}

impl Ratelimit {
    pub(crate) fn new(
        state: &Arc<ServerState>,
        envoy: Arc<Envoy>,
        unready: watch::Receiver<bool>,
        settings: &RatelimitSettings,
    ) -> anyhow::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            state: Arc::clone(state),
            envoy,
            messages: JsonMessages::new()?,
            unready,
            needs_rules: settings.needs_rules,
            needs_connection: settings.needs_connection,
            was_connected: AtomicBool::new(false),
            counted_domains: Mutex::default(),
        }))
    }

    /// Returns the service of the main listener.
    pub(crate) fn main(self: &Arc<Self>) -> Router {
        Router::new()
            .route("/healthcheck", get(healthcheck))
            .route("/json", get(json).post(json))
            .with_state(Arc::clone(self))
    }

    /// Returns the service of the debug listener.
    pub(crate) fn debug(self: &Arc<Self>) -> Router {
        Router::new().route("/rlconfig", get(rules)).with_state(Arc::clone(self))
    }

    /// Returns the service of the metrics.
    pub(crate) fn metrics(self: &Arc<Self>, path: &str) -> Router {
        Router::new().route(path, get(all_metrics)).with_state(Arc::clone(self))
    }

    /// Returns the health of the process, as ratelimit defines it.
    fn is_healthy(&self) -> bool {
        let redis = self.state.backend.redis();
        let is_connected = redis.is_none_or(|redis| {
            redis.store().nodes().iter().any(|node| node.primary && node.connected)
        });
        let was_connected =
            self.was_connected.fetch_or(is_connected, Ordering::Relaxed) || is_connected;
        !*self.unready.borrow()
            && was_connected
            && (is_connected || !self.needs_connection)
            && (self.state.active().envoy.has_rules || !self.needs_rules)
    }

    /// Decides a request in the JSON form of the messages. A denial has the status 429.
    async fn decide(
        &self,
        headers: &HeaderMap,
        peer: Peer,
        body: Body,
    ) -> anyhow::Result<(StatusCode, String)> {
        let body = tokio::time::timeout(BODY_TIMEOUT, axum::body::to_bytes(body, MAX_BODY_BYTES));
        let body = body.await.context("the body did not arrive in time")??;
        let answer = self.envoy.answer(headers, peer, &self.messages.request(&body)?).await;
        let answer = answer.map_err(|status| anyhow::anyhow!("{}", status.message()))?;
        let is_denied = answer.overall_code == i32::from(Code::OverLimit);
        let status = if is_denied { StatusCode::TOO_MANY_REQUESTS } else { StatusCode::OK };
        Ok((status, self.messages.response(&answer)?))
    }
}

async fn healthcheck(State(ratelimit): State<Arc<Ratelimit>>) -> (StatusCode, &'static str) {
    if ratelimit.is_healthy() {
        return (StatusCode::OK, "OK");
    }
    (StatusCode::INTERNAL_SERVER_ERROR, "")
}

async fn json(
    State(ratelimit): State<Arc<Ratelimit>>,
    Extension(peer): Extension<Peer>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    match ratelimit.decide(&headers, peer, body).await {
        Ok((status, body)) => {
            (status, [(header::CONTENT_TYPE, "application/json")], body).into_response()
        }
        Err(error) => (StatusCode::BAD_REQUEST, format!("{error:#}\n")).into_response(),
    }
}

/// Returns the rules in use, one in each line.
async fn rules(State(ratelimit): State<Arc<Ratelimit>>) -> String {
    let active = ratelimit.state.active();
    let mut text = String::new();
    for rule in active.envoy.rules.rules() {
        let (unit, requests) = match &rule.limit {
            Limit::Unlimited => ("unknown", 0),
            Limit::Zero(unit, _) => (unit.as_str(), 0),
            Limit::Quota(unit, quota) => (unit.as_str(), quota.limit()),
        };
        let _ = writeln!(
            text,
            "{}: unit={} requests_per_unit={requests}, shadow_mode: {}, quota_mode: {}",
            rule.path,
            unit.to_ascii_uppercase(),
            rule.mode == RuleMode::Shadow,
            rule.mode == RuleMode::Quota,
        );
    }
    text
}

async fn all_metrics(State(ratelimit): State<Arc<Ratelimit>>) -> Response {
    let text = metrics::text(&ratelimit);
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
}
