//! Readiness of this process, with the state of the store and of the upstreams.

use std::sync::atomic::Ordering;

use axum::extract::{Query, Request, State};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use http::StatusCode;
use serde::{Deserialize, Serialize};
use tidegate::resilience::CircuitState;
use tidegate::store::redis::{NodeHealth, Restriction};

use super::Admin;
use crate::api::problem::Problem;
use crate::backend::{RedisBackend, StoreHealth, StoreState};
use tidegate_api::admin::UpstreamHealth;
use tidegate_net::listener::Peer;

/// Requirements of a readiness probe besides a running process. Other parameters are ignored: some
/// load balancers add their own.
#[derive(Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct ReadyzQuery {
    /// Part that has to be available, too
    #[param(inline)]
    require: Option<Requirement>,
}

#[derive(Clone, Copy, PartialEq, Eq, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "lowercase")]
enum Requirement {
    /// At least one upstream of the gateway is not ejected.
    Upstreams,
    /// The store is available, or a part of it.
    Store,
}

/// Report that the process runs
#[utoipa::path(
    get, path = "/healthz", security(()),
    responses((status = 200, description = "The process runs", body = String))
)]
pub(super) async fn healthz() -> &'static str {
    "ok\n"
}

/// Readiness of this process
#[derive(Serialize, utoipa::ToSchema)]
pub(super) struct Readiness {
    ready: bool,
    store: &'static str,
    store_up: bool,
    /// Whether a store in memory had no room for new counts in the last seconds.
    store_full: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    store_health: Option<StoreHealth>,
    #[serde(flatten)]
    redis: Option<RedisDetail>,
    #[serde(flatten)]
    upstreams: Option<UpstreamsDetail>,
}

/// Reports readiness, and the state of the store and of the upstreams as a detail: during an outage
/// of the store each policy's failure mode still decides, and instances behind one load balancer
/// share their upstreams. Probes need no token and may use any Host, but then the addresses are
/// hidden.
#[utoipa::path(
    get, path = "/readyz", params(ReadyzQuery), security(()),
    responses(
        (status = 200, description = "Ready", body = Readiness),
        (status = 503, description = "Not ready", body = Readiness),
        (
            status = 400, description = "The query is invalid",
            body = Problem, content_type = "application/problem+json"
        ),
    )
)]
pub(super) async fn readyz(
    State(admin): State<Admin>,
    Extension(peer): Extension<Peer>,
    query: Result<Query<ReadyzQuery>, axum::extract::rejection::QueryRejection>,
    request: Request,
) -> Result<Response, Problem> {
    let Query(ReadyzQuery { require }) =
        query.map_err(|error| Problem::bad_request(error.to_string()))?;
    let redis = admin.state.backend.redis();
    let store_health = redis.map(RedisBackend::health);
    let state = store_health.map_or(StoreState::Up, |health| health.state);
    let upstreams = admin.state.proxy().map(|proxy| proxy.upstreams());
    let is_satisfied = match require {
        None => true,
        // If one primary of a cluster is lost, all instances would leave the load balancer at once.
        Some(Requirement::Store) => state != StoreState::Down,
        Some(Requirement::Upstreams) => upstreams
            .as_ref()
            .ok_or_else(|| Problem::bad_request("only tidegate gateway has upstreams"))?
            .iter()
            .any(|upstream| !upstream.ejected),
    };
    let ready = admin.ready.load(Ordering::Relaxed) && is_satisfied;
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let is_authorized = admin.authorize(peer, &request).is_ok();
    let body = Readiness {
        ready,
        store: if redis.is_some() { "redis" } else { "memory" },
        store_up: state == StoreState::Up,
        store_full: admin.state.backend.is_full(),
        store_health,
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
#[derive(Serialize, utoipa::ToSchema)]
struct UpstreamsDetail {
    upstreams_up: usize,
    upstreams_total: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    upstreams: Option<Vec<UpstreamHealth>>,
}

/// State of Redis and of the fallback.
#[derive(Serialize, utoipa::ToSchema)]
struct RedisDetail {
    nodes: Vec<NodeDetail>,
    /// Last errors of the nodes with an open circuit.
    breaker_open: Vec<String>,
    /// Number of instances that share the limits during an outage.
    instances: usize,
    /// Units allowed during an outage that are still to be charged to Redis.
    owed_units: u64,
}

#[derive(Serialize, utoipa::ToSchema)]
struct NodeDetail {
    address: String,
    connected: bool,
    last_error: Option<String>,
    /// Restrictions of the node: `undeclared_keys`, `several_slots`, `time_in_scripts`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    restrictions: Vec<&'static str>,
    /// Maximum error of its clock, if that is estimated.
    #[serde(skip_serializing_if = "Option::is_none")]
    clock_error_ms: Option<f64>,
}

impl RedisDetail {
    fn new(redis: &RedisBackend) -> Self {
        let node = |node: NodeHealth| NodeDetail {
            address: node.address,
            connected: node.connected,
            last_error: node.last_error.filter(|_| !node.connected),
            restrictions: node.restrictions.iter().map(Restriction::as_str).collect(),
            clock_error_ms: node.clock_error.map(|error| (error.as_secs_f64() * 1e6).round() / 1e3),
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
