//! `GET /v1/hot-keys`: the keys that were allowed and denied most in the last minutes.

use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};

use super::Admin;
use crate::api::problem::Problem;
use crate::hot_keys::HotKey;
use crate::metrics::RequestOutcome;
use crate::state::ServerState;

/// Default number of keys of each list.
pub(super) const DEFAULT_LIMIT: usize = 20;
const MAX_LIMIT: usize = 1_000;

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct HotKeysQuery {
    limit: usize,
}

impl Default for HotKeysQuery {
    fn default() -> Self {
        Self { limit: DEFAULT_LIMIT }
    }
}

pub(super) async fn handle(
    State(admin): State<Admin>,
    query: Result<Query<HotKeysQuery>, QueryRejection>,
) -> Result<Response, Problem> {
    let Query(HotKeysQuery { limit }) =
        query.map_err(|error| Problem::bad_request(error.to_string()))?;
    Ok(Json(HotKeysBody::new(&admin.state, limit)).into_response())
}

/// Most frequent keys by outcome, each in the form that its policy shows.
#[derive(Serialize, PartialEq)]
pub(super) struct HotKeysBody {
    allowed: Vec<HotKey>,
    denied: Vec<HotKey>,
    shadow_denied: Vec<HotKey>,
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
