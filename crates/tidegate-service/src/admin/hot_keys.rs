//! `GET /v1/hot-keys`: the keys that were allowed and denied most in the last minutes.

use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};

use super::{AccessProblems, Admin};
use crate::api::problem::Problem;
use crate::hot_keys::HotKey;
use crate::metrics::RequestOutcome;
use crate::state::ServerState;

/// Default number of keys of each list.
pub(super) const DEFAULT_LIMIT: usize = 20;
const MAX_LIMIT: usize = 1_000;

#[derive(Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(default, deny_unknown_fields)]
pub(super) struct HotKeysQuery {
    /// Number of keys of each list, at most 1000
    #[param(default = 20)]
    limit: usize,
}

impl Default for HotKeysQuery {
    fn default() -> Self {
        Self { limit: DEFAULT_LIMIT }
    }
}

/// Keys that were allowed and denied most in the last minutes
#[utoipa::path(
    get, path = "/v1/hot-keys", operation_id = "hot_keys", params(HotKeysQuery),
    responses(
        (status = 200, description = "Keys", body = HotKeysBody),
        (
            status = 400, description = "The query is invalid",
            body = Problem, content_type = "application/problem+json"
        ),
        AccessProblems,
    )
)]
pub(super) async fn handle(
    State(admin): State<Admin>,
    query: Result<Query<HotKeysQuery>, QueryRejection>,
) -> Result<Response, Problem> {
    let Query(HotKeysQuery { limit }) =
        query.map_err(|error| Problem::bad_request(error.to_string()))?;
    Ok(Json(HotKeysBody::new(&admin.state, limit)).into_response())
}

/// Most frequent keys by outcome, each in the form that its policy shows.
#[derive(Serialize, PartialEq, utoipa::ToSchema)]
pub(super) struct HotKeysBody {
    pub(super) allowed: Vec<HotKey>,
    pub(super) denied: Vec<HotKey>,
    pub(super) shadow_denied: Vec<HotKey>,
}

impl HotKeysBody {
    pub(super) fn new(state: &ServerState, limit: usize) -> Self {
        let active = state.active();
        let shown = |outcome| -> Vec<HotKey> {
            let keys =
                state.hot_keys.heaviest(state.hot_keys_time(), outcome, limit.min(MAX_LIMIT));
            let show = |hot: HotKey| HotKey { key: active.shown_key(&hot.policy, hot.key), ..hot };
            keys.into_iter().map(show).collect()
        };
        Self {
            allowed: shown(RequestOutcome::Allowed),
            denied: shown(RequestOutcome::Denied),
            shadow_denied: shown(RequestOutcome::ShadowDenied),
        }
    }
}
