//! Admin API: health, metrics, policies, hot keys, reset.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::extract::{Query, Request, State};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use http::request::Parts;
use http::{HeaderName, HeaderValue, StatusCode, header};
use serde::{Deserialize, Serialize};
use tidegate::resilience::CircuitState;
use tidegate::store::redis::NodeHealth;
use tidegate::{KeySource, ShowKeys};

use crate::api::browser::BrowserGuard;
use crate::api::problem::Problem;
use crate::api::{check_encoding, method_not_allowed, not_found, read_json, token};
use crate::backend::RedisBackend;
use crate::envoy::rules::{Limit, RuleMode};
use crate::gateway::UpstreamHealth;
use crate::hot_keys::HotKey;
use crate::key_hash;
use crate::metrics;
use crate::state::ServerState;

const CROSS_ORIGIN_RESOURCE_POLICY: HeaderName =
    HeaderName::from_static("cross-origin-resource-policy");

#[derive(Clone)]
pub(crate) struct Admin {
    pub(crate) state: Arc<ServerState>,
    /// False from the start of the shutdown.
    pub(crate) ready: Arc<AtomicBool>,
    pub(crate) guard: Arc<BrowserGuard>,
}

impl Admin {
    /// Checks the token of a request or, without one, that no web page sent it.
    fn authorize(&self, head: &Parts) -> Result<(), Problem> {
        match &self.state.active().admin_token {
            Some(token) => token::check(token, &head.headers).map_err(Problem::unauthorized),
            None => self.guard.check(head),
        }
    }
}

pub(crate) fn router(admin: Admin) -> Router {
    Router::new()
        .route("/metrics", get(all_metrics))
        .route("/v1/policies", get(policies))
        .route("/v1/hot-keys", get(hot_keys))
        .route("/v1/reset", post(reset))
        .route_layer(middleware::from_fn_with_state(admin.clone(), authorize))
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(readyz))
        .fallback(not_found)
        .method_not_allowed_fallback(method_not_allowed)
        .with_state(admin)
}

async fn authorize(State(admin): State<Admin>, request: Request, next: Next) -> Response {
    let (head, body) = request.into_parts();
    let mut response = match admin.authorize(&head) {
        Ok(()) => next.run(Request::from_parts(head, body)).await,
        Err(problem) => problem.into_response(),
    };
    // A page of another origin must not get the response as an image or a script either.
    for (name, value) in
        [(header::X_CONTENT_TYPE_OPTIONS, "nosniff"), (CROSS_ORIGIN_RESOURCE_POLICY, "same-origin")]
    {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

/// Requirements of a readiness probe besides a running process. Other parameters are ignored: some
/// load balancers add their own.
#[derive(Deserialize)]
struct ReadyzQuery {
    require: Option<Requirement>,
}

#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Requirement {
    /// At least one upstream of the gateway is not ejected.
    Upstreams,
    /// The store is available.
    Store,
}

/// Reports readiness, and the state of the store and of the upstreams as a detail: during an outage
/// of the store each policy's failure mode still decides, and instances behind one load balancer
/// share their upstreams. Probes need no token and may use any Host, but then the addresses are
/// hidden.
async fn readyz(
    State(admin): State<Admin>,
    query: Result<Query<ReadyzQuery>, axum::extract::rejection::QueryRejection>,
    head: Parts,
) -> Result<Response, Problem> {
    #[derive(Serialize)]
    struct Readiness {
        ready: bool,
        store: &'static str,
        store_up: bool,
        #[serde(flatten)]
        redis: Option<RedisDetail>,
        #[serde(flatten)]
        upstreams: Option<UpstreamsDetail>,
    }
    let Query(ReadyzQuery { require }) =
        query.map_err(|error| Problem::bad_request(error.to_string()))?;
    let redis = admin.state.backend.redis();
    let store_up = redis.is_none_or(RedisBackend::is_up);
    let upstreams = admin.state.gateway().map(|gateway| gateway.health());
    let is_satisfied = match require {
        None => true,
        Some(Requirement::Store) => store_up,
        Some(Requirement::Upstreams) => upstreams
            .as_ref()
            .ok_or_else(|| Problem::bad_request("only tidegate gateway has upstreams"))?
            .iter()
            .any(|upstream| !upstream.ejected),
    };
    let ready = admin.ready.load(Ordering::Relaxed) && is_satisfied;
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let is_authorized = admin.authorize(&head).is_ok();
    let body = Readiness {
        ready,
        store: if redis.is_some() { "redis" } else { "memory" },
        store_up,
        redis: redis.filter(|_| is_authorized).map(RedisDetail::new),
        upstreams: upstreams.map(|upstreams| UpstreamsDetail {
            upstreams_up: upstreams.iter().filter(|upstream| upstream.up).count(),
            upstreams_total: upstreams.len(),
            upstreams: is_authorized.then_some(upstreams),
        }),
    };
    Ok((status, Json(body)).into_response())
}

/// State of the gateway's upstreams.
#[derive(Serialize)]
struct UpstreamsDetail {
    upstreams_up: usize,
    upstreams_total: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    upstreams: Option<Vec<UpstreamHealth>>,
}

/// State of Redis and of the fallback.
#[derive(Serialize)]
struct RedisDetail {
    nodes: Vec<NodeDetail>,
    /// Last errors of the nodes with an open circuit.
    breaker_open: Vec<String>,
    /// Number of instances that share the limits during an outage.
    instances: usize,
    /// Units allowed during an outage that are still to be charged to Redis.
    owed_units: u64,
}

#[derive(Serialize)]
struct NodeDetail {
    address: String,
    connected: bool,
    last_error: Option<String>,
}

impl RedisDetail {
    fn new(redis: &RedisBackend) -> Self {
        let node = |node: NodeHealth| NodeDetail {
            address: node.address,
            connected: node.connected,
            last_error: node.last_error.filter(|_| !node.connected),
        };
        let nodes = redis.store().nodes();
        let open = nodes.iter().map(|node| &node.circuit).filter(|circuit| circuit.open);
        let reason = |circuit: &CircuitState| circuit.last_error.as_ref().map(ToString::to_string);
        let breaker_open = open.map(|circuit| reason(circuit).unwrap_or_default()).collect();
        let fallback = redis.fallback();
        Self {
            nodes: nodes.into_iter().map(node).collect(),
            breaker_open,
            instances: fallback.fleet().size(),
            owed_units: fallback.stats().pending_debit_units,
        }
    }
}

async fn all_metrics(State(admin): State<Admin>) -> Response {
    let mut text = admin.state.metrics.text(&admin.state.backend);
    if let Some(gateway) = admin.state.gateway() {
        gateway.write_metrics(&mut text);
    }
    let process = tokio::task::spawn_blocking(|| {
        let mut text = String::new();
        metrics::process::write(&mut text);
        text
    });
    text.push_str(&process.await.unwrap_or_default());
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
}

async fn policies(State(admin): State<Admin>) -> Response {
    #[derive(Serialize)]
    struct PolicyBody<'a> {
        name: &'a str,
        algorithm: &'static str,
        limit: u64,
        window_ms: u128,
        burst: u64,
        key: Vec<&'a str>,
        mode: &'static str,
        on_store_failure: &'static str,
        show_keys: &'static str,
        overrides: usize,
        /// Name of the rule in envoyproxy/ratelimit's file; `name` is that of its counters.
        #[serde(skip_serializing_if = "Option::is_none")]
        rule: Option<&'a str>,
    }
    let active = admin.state.active();
    let policies = active.policies().iter().map(|policy| PolicyBody {
        name: policy.name(),
        algorithm: policy.quota().algorithm().as_str(),
        limit: policy.quota().limit(),
        window_ms: policy.quota().window().as_millis(),
        burst: policy.quota().burst(),
        key: policy.key().iter().map(KeySource::as_str).collect(),
        mode: policy.mode().as_str(),
        on_store_failure: policy.on_store_failure().as_str(),
        show_keys: policy.show_keys().as_str(),
        overrides: policy.override_count(),
        rule: None,
    });
    let rules = active.envoy.rules.rules().filter_map(|rule| {
        let (algorithm, limit, window, burst) = match &rule.limit {
            // Nothing is counted.
            Limit::Unlimited => return None,
            Limit::Zero(_, window) => (active.envoy.algorithm, 0, *window, 0),
            Limit::Quota(_, quota) => {
                (quota.algorithm(), quota.limit(), quota.window(), quota.burst())
            }
        };
        Some(PolicyBody {
            name: &rule.path,
            algorithm: algorithm.as_str(),
            limit,
            window_ms: window.as_millis(),
            burst,
            key: rule.keys.iter().map(String::as_str).collect(),
            mode: if active.envoy.shadow_mode { RuleMode::Shadow } else { rule.mode }.as_str(),
            on_store_failure: active.envoy.on_store_failure_of(rule).as_str(),
            show_keys: rule.show_keys().as_str(),
            overrides: 0,
            rule: rule.name.as_deref(),
        })
    });
    Json(policies.chain(rules).collect::<Vec<_>>()).into_response()
}

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
struct HotKeysQuery {
    limit: usize,
}

impl Default for HotKeysQuery {
    fn default() -> Self {
        Self { limit: 20 }
    }
}

async fn hot_keys(
    State(admin): State<Admin>,
    query: Result<Query<HotKeysQuery>, axum::extract::rejection::QueryRejection>,
) -> Result<Response, Problem> {
    #[derive(Serialize)]
    struct HotKeysBody {
        allowed: Vec<HotKey>,
        denied: Vec<HotKey>,
    }
    let Query(HotKeysQuery { limit }) =
        query.map_err(|error| Problem::bad_request(error.to_string()))?;
    let limit = limit.min(1_000);
    let (now, hot) = (admin.state.uptime(), &admin.state.hot_keys);
    let active = admin.state.active();
    let shown = |allowed| -> Vec<HotKey> {
        let keys = hot.heaviest(now, allowed, limit).into_iter();
        keys.map(|hot| HotKey { key: active.shown_key(&hot.policy, hot.key), ..hot }).collect()
    };
    Ok(Json(HotKeysBody { allowed: shown(true), denied: shown(false) }).into_response())
}

/// Counter to reset.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ResetBody {
    policy: String,
    key: String,
}

/// Deletes the count of a key, which may be a hash in the form of the hot keys.
async fn reset(State(admin): State<Admin>, request: Request) -> Result<StatusCode, Problem> {
    check_encoding(request.headers())?;
    let ResetBody { policy, key } = read_json(request.into_body()).await?;
    let active = admin.state.active();
    let mut listed = None;
    if key_hash::is_hash(&key) && active.show_keys(&policy) == ShowKeys::Hashed {
        listed = admin.state.hot_keys.find(admin.state.uptime(), |hot_policy, hot_key| {
            hot_policy == policy && key_hash::of(hot_key) == key
        });
    }
    active.reset(&policy, listed.as_deref().unwrap_or(&key)).await?;
    Ok(StatusCode::NO_CONTENT)
}
