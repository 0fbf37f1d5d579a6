//! `GET /v1/status`: version, uptime, the store, the last reload, upstreams.

use std::collections::HashMap;
use std::time::SystemTime;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use tidegate::resilience::CircuitState;
use tidegate::store::redis::NodeHealth;

use super::sampler::Percentiles;
use super::{AccessProblems, Admin};
use crate::backend::{Backend, RedisBackend, StoreHealth};
use crate::state::ReloadError;
use crate::state::ServerState;
use tidegate_api::admin::UpstreamHealth;
use tidegate_api::duration::{millis, unix_millis};

/// State of this process and of its store
#[utoipa::path(
    get, path = "/v1/status", operation_id = "status",
    responses((status = 200, description = "State", body = Status), AccessProblems)
)]
pub(super) async fn handle(State(admin): State<Admin>) -> Response {
    Json(Status::new(&admin.state, &admin.live.node_latency())).into_response()
}

/// State of this process and of its store.
#[derive(Serialize, utoipa::ToSchema)]
pub(super) struct Status {
    /// Name of this instance: host and admin port.
    instance: String,
    version: &'static str,
    started_at_ms: u64,
    uptime_ms: u64,
    now_ms: u64,
    #[serde(flatten)]
    parts: StatusParts,
}

/// Parts of the status that change only with events.
#[derive(Serialize, PartialEq, utoipa::ToSchema)]
pub(super) struct StatusParts {
    store: StoreStatus,
    reload: ReloadStatus,
    upstreams: Option<Vec<UpstreamHealth>>,
}

#[derive(Serialize, PartialEq, utoipa::ToSchema)]
struct StoreStatus {
    kind: &'static str,
    up: bool,
    /// Availability of Redis; null for memory.
    health: Option<StoreHealth>,
    nodes: Vec<NodeStatus>,
    fallback: Option<FallbackStatus>,
    memory: MemoryStatus,
    deny_cache_entries: Option<usize>,
}

#[derive(Serialize, PartialEq, utoipa::ToSchema)]
struct NodeStatus {
    address: String,
    /// Whether the node decides. Sentinels do not.
    primary: bool,
    /// Number of slots of a cluster that it serves.
    slots: u16,
    connected: bool,
    circuit: &'static str,
    last_error: Option<String>,
    /// Latency of the last seconds; null without calls.
    latency_ms: Option<Percentiles>,
    in_flight: usize,
}

#[derive(Serialize, PartialEq, utoipa::ToSchema)]
struct FallbackStatus {
    active: bool,
    since_ms: Option<u64>,
    /// Number of instances that share the limits during an outage.
    instances: usize,
    pending_debits: usize,
    pending_debit_units: u64,
}

/// Counts in the memory of this process: all of them, or those of the fallback.
#[derive(Serialize, PartialEq, utoipa::ToSchema)]
struct MemoryStatus {
    keys: usize,
    max_keys: usize,
    /// Whether a store in memory had no room for new counts in the last seconds.
    full: bool,
}

#[derive(Serialize, PartialEq, utoipa::ToSchema)]
struct ReloadStatus {
    at_ms: Option<u64>,
    ok: bool,
    error: Option<ReloadError>,
    config_loaded_at_ms: u64,
    config_file: Option<String>,
    /// Hash of the active configuration, which is equal on instances with equal files.
    config_hash: String,
    /// Sections of the file whose changes need a restart.
    restart_pending: Vec<&'static str>,
}

impl Status {
    /// Returns the status, with the latency of each node of the last seconds.
    pub(super) fn new(state: &ServerState, node_latency: &HashMap<String, Percentiles>) -> Self {
        let (started, started_at) = state.started();
        Self {
            instance: state.journal.instance(),
            version: env!("CARGO_PKG_VERSION"),
            started_at_ms: unix_millis(started_at),
            uptime_ms: millis(started.elapsed()),
            now_ms: unix_millis(SystemTime::now()),
            parts: StatusParts {
                store: StoreStatus::new(&state.backend, node_latency),
                reload: ReloadStatus::new(state),
                upstreams: state.proxy().map(|proxy| proxy.upstreams()),
            },
        }
    }

    pub(super) fn into_parts(self) -> StatusParts {
        self.parts
    }

    pub(super) fn has_parts(&self, parts: &StatusParts) -> bool {
        self.parts == *parts
    }
}

impl StoreStatus {
    fn new(backend: &Backend, node_latency: &HashMap<String, Percentiles>) -> Self {
        let memory = backend.memory_store();
        let (keys, max_keys) = (memory.keys(), memory.max_keys());
        let memory = MemoryStatus { keys, max_keys, full: backend.is_full() };
        let Some(redis) = backend.redis() else {
            return Self {
                kind: "memory",
                up: true,
                health: None,
                nodes: Vec::new(),
                fallback: None,
                memory,
                deny_cache_entries: None,
            };
        };
        let node = |node: NodeHealth| NodeStatus {
            latency_ms: node_latency.get(&node.address).copied(),
            address: node.address,
            primary: node.primary,
            slots: node.slots,
            connected: node.connected,
            circuit: circuit_name(&node.circuit),
            last_error: match node.circuit.last_error {
                Some(error) if node.circuit.open => Some(error.to_string()),
                _ => node.last_error,
            },
            in_flight: node.in_flight,
        };
        Self {
            kind: "redis",
            up: redis.is_up(),
            health: Some(redis.health()),
            nodes: redis.store().nodes().into_iter().map(node).collect(),
            fallback: Some(FallbackStatus::new(redis)),
            memory,
            deny_cache_entries: Some(redis.deny_cache().entries()),
        }
    }
}

impl FallbackStatus {
    fn new(redis: &RedisBackend) -> Self {
        let stats = redis.fallback().stats();
        let outage = redis.fallback().outage();
        let since = outage.and_then(|elapsed| SystemTime::now().checked_sub(elapsed));
        Self {
            active: stats.falling_back,
            since_ms: since.map(unix_millis),
            instances: redis.fallback().fleet().size(),
            pending_debits: stats.pending_debits,
            pending_debit_units: stats.pending_debit_units,
        }
    }
}

impl ReloadStatus {
    fn new(state: &ServerState) -> Self {
        let last = state.reloads.last();
        Self {
            at_ms: last.at.map(unix_millis),
            ok: last.error.is_none(),
            error: last.error,
            config_loaded_at_ms: unix_millis(last.loaded_at),
            config_file: last.file.map(|file| file.display().to_string()),
            config_hash: state.active().hash.clone(),
            restart_pending: last.restart_pending,
        }
    }
}

fn circuit_name(circuit: &CircuitState) -> &'static str {
    match (circuit.open, circuit.half_open) {
        (false, _) => "closed",
        (true, false) => "open",
        (true, true) => "half-open",
    }
}
