//! HTTP listeners of envoyproxy/ratelimit, for probes, dashboards and clients that know it:
//! `/healthcheck` and `/json`, `/rlconfig`, and metrics by its names.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

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

/// Parts that the handlers share.
#[derive(Clone)]
pub(crate) struct Ratelimit {
    state: Arc<ServerState>,
    envoy: Arc<Envoy>,
    health: Arc<Health>,
    messages: JsonMessages,
    /// Domains whose rules have counted units, also if they are gone: labels must not change.
    counted_domains: Arc<Mutex<BTreeSet<String>>>,
}

impl Ratelimit {
    pub(crate) fn new(
        state: &Arc<ServerState>,
        envoy: Arc<Envoy>,
        health: Health,
    ) -> anyhow::Result<Self> {
        let (messages, counted_domains) = (JsonMessages::new()?, Arc::default());
        Ok(Self {
            state: Arc::clone(state),
            envoy,
            health: Arc::new(health),
            messages,
            counted_domains,
        })
    }

    /// Returns the service of the main listener.
    pub(crate) fn main(&self) -> Router {
        Router::new()
            .route("/healthcheck", get(healthcheck))
            .route("/json", get(json).post(json))
            .with_state(self.clone())
    }

    /// Returns the service of the debug listener.
    pub(crate) fn debug(&self) -> Router {
        Router::new().route("/rlconfig", get(rules)).with_state(self.clone())
    }

    /// Returns the service of the metrics.
    pub(crate) fn metrics(&self, path: &str) -> Router {
        Router::new().route(path, get(all_metrics)).with_state(self.clone())
    }
}

/// Health of the process, as ratelimit defines it.
pub(crate) struct Health {
    state: Arc<ServerState>,
    unready: watch::Receiver<bool>,
    needs_rules: bool,
    needs_connection: bool,
    /// Whether Redis was connected once.
    was_connected: AtomicBool,
}

impl Health {
    pub(crate) fn new(
        state: &Arc<ServerState>,
        unready: watch::Receiver<bool>,
        settings: &RatelimitSettings,
    ) -> Self {
        Self {
            state: Arc::clone(state),
            unready,
            needs_rules: settings.needs_rules,
            needs_connection: settings.needs_connection,
            was_connected: AtomicBool::new(false),
        }
    }

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
}

async fn healthcheck(State(ratelimit): State<Ratelimit>) -> (StatusCode, &'static str) {
    if ratelimit.health.is_healthy() {
        return (StatusCode::OK, "OK");
    }
    (StatusCode::INTERNAL_SERVER_ERROR, "")
}

/// Decides a request in the JSON form of the messages. A denial has the status 429.
async fn json(
    State(ratelimit): State<Ratelimit>,
    Extension(peer): Extension<Peer>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    let body = tokio::time::timeout(BODY_TIMEOUT, axum::body::to_bytes(body, MAX_BODY_BYTES));
    let request = match body.await {
        Ok(Ok(body)) => ratelimit.messages.request(&body).map_err(|error| format!("{error:#}")),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err("the body did not arrive in time".to_owned()),
    };
    let answer = match request {
        Ok(request) => ratelimit.envoy.answer(&headers, peer, &request).await,
        Err(reason) => return (StatusCode::BAD_REQUEST, format!("{reason}\n")).into_response(),
    };
    match answer {
        Ok(response) => {
            let is_denied = response.overall_code == i32::from(Code::OverLimit);
            let status = if is_denied { StatusCode::TOO_MANY_REQUESTS } else { StatusCode::OK };
            match ratelimit.messages.response(&response) {
                Ok(body) => {
                    (status, [(header::CONTENT_TYPE, "application/json")], body).into_response()
                }
                Err(error) => {
                    (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response()
                }
            }
        }
        Err(status) => (StatusCode::BAD_REQUEST, format!("{}\n", status.message())).into_response(),
    }
}

/// Returns the rules in use, one in each line.
async fn rules(State(ratelimit): State<Ratelimit>) -> String {
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

async fn all_metrics(State(ratelimit): State<Ratelimit>) -> Response {
    let text = metrics::text(&ratelimit);
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
}
