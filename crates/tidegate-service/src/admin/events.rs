//! `GET /v1/events`: what happened lately, to all instances or to this one.

use std::collections::HashSet;

use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tidegate::{RedisStore, StoreError};

use super::fleet::{DENIALS, EVENTS};
use super::{AccessProblems, Admin};
use crate::api::problem::Problem;
use crate::backend::RedisBackend;
use crate::state::ServerState;

const DEFAULT_LIMIT: usize = 100;
const MAX_LIMIT: usize = 1_000;

#[derive(Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(default, deny_unknown_fields)]
pub(super) struct EventsQuery {
    /// Number of events, at most 1000
    #[param(default = 100)]
    limit: usize,
    /// Whose events
    #[param(inline)]
    scope: EventScope,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "lowercase")]
enum EventScope {
    /// Of all instances that share the store.
    #[default]
    Fleet,
    /// Of this instance.
    Instance,
}

impl Default for EventsQuery {
    fn default() -> Self {
        Self { limit: DEFAULT_LIMIT, scope: EventScope::Fleet }
    }
}

#[derive(Serialize, utoipa::ToSchema)]
pub(super) struct EventsBody {
    /// Name of this instance.
    instance: String,
    /// Why only the events of this instance are known; null if those of all are.
    error: Option<String>,
    /// The newest first.
    events: Vec<EventBody>,
}

#[derive(Debug, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(as = Event)]
struct EventBody {
    /// Number since the start of the instance, from 1 on.
    number: u64,
    /// Time by the clock of Redis; by that of the instance while it is not in Redis.
    at_ms: u64,
    instance: String,
    /// Kind, such as `reloaded`.
    event: String,
    /// One sentence about it.
    text: String,
    /// Values of the event, by its kind.
    #[serde(default)]
    #[schema(value_type = Object)]
    details: Value,
}

/// Last events, the newest first
#[utoipa::path(
    get, path = "/v1/events", operation_id = "events", params(EventsQuery),
    responses(
        (status = 200, description = "Events", body = EventsBody),
        (
            status = 400, description = "The query is invalid",
            body = Problem, content_type = "application/problem+json"
        ),
        AccessProblems,
    )
)]
pub(super) async fn handle(
    State(admin): State<Admin>,
    query: Result<Query<EventsQuery>, QueryRejection>,
) -> Result<Response, Problem> {
    let Query(EventsQuery { limit, scope }) =
        query.map_err(|error| Problem::bad_request(error.to_string()))?;
    let limit = limit.min(MAX_LIMIT);
    let shared = match scope {
        EventScope::Fleet => shared_events(&admin.state, limit).await,
        EventScope::Instance => Ok(Vec::new()),
    };
    let (shared, error) = match shared {
        Ok(events) => (events, None),
        Err(error) => (Vec::new(), Some(error.to_string())),
    };
    let known: HashSet<&str> = shared.iter().map(|(_, text)| text.as_str()).collect();
    let own = admin.state.journal.events();
    let own = own.iter().filter_map(|event| Some((None, serde_json::to_string(event).ok()?)));
    let own: Vec<_> = own.filter(|(_, text)| !known.contains(text.as_str())).collect();
    let shared = shared.iter().map(|(micros, text)| (Some(micros / 1_000), text.clone()));
    let parsed = shared.chain(own).filter_map(|(at_ms, text)| {
        // Another release may write what this one cannot read.
        let mut event: EventBody = serde_json::from_str(&text).ok()?;
        event.at_ms = at_ms.unwrap_or(event.at_ms);
        Some(event)
    });
    let mut events: Vec<EventBody> = parsed.collect();
    events.sort_by_key(|event| std::cmp::Reverse((event.at_ms, event.number)));
    events.truncate(limit);
    let instance = admin.state.journal.instance();
    Ok(Json(EventsBody { instance, error, events }).into_response())
}

/// Returns the last events in Redis, with their times in microseconds.
async fn shared_events(
    state: &ServerState,
    limit: usize,
) -> Result<Vec<(u64, String)>, StoreError> {
    let board = state.backend.redis().map(RedisBackend::store).and_then(RedisStore::fleet_board);
    let Some(board) = board else { return Ok(Vec::new()) };
    let (events, denials) =
        tokio::try_join!(board.events(EVENTS, limit), board.events(DENIALS, limit))?;
    Ok(events.into_iter().chain(denials).collect())
}
