//! `POST /v1/reset`: deletes the count of a key, and logs who did it.

use axum::Extension;
use axum::extract::{Request, State};
use http::StatusCode;
use serde::Deserialize;
use tidegate::ShowKeys;

use super::Admin;
use crate::api::problem::Problem;
use crate::api::{Problems, check_encoding, check_json, read_json};
use crate::state::{ActiveConfig, Caller, ServerState};
use tidegate_config::key_hash;

/// Counter to reset.
#[derive(Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
struct ResetBody {
    policy: String,
    /// Key, or its hash in the form of the hot keys.
    key: String,
}

/// Delete the count of a key
#[utoipa::path(
    post, path = "/v1/reset", operation_id = "reset", request_body = ResetBody,
    responses((status = 204, description = "The count is deleted"), Problems)
)]
pub(super) async fn handle(
    State(admin): State<Admin>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<StatusCode, Problem> {
    check_encoding(request.headers())?;
    check_json(request.headers())?;
    let ResetBody { policy, key } = read_json(request.into_body()).await?;
    let active = admin.state.active();
    let key = listed_key(&admin.state, &active, &policy, &key).unwrap_or(key);
    active.reset(&policy, &key).await?;
    // An operator may write an address in another form than requests count by.
    let counted = active.counted_key(&policy, &key);
    if counted != key {
        active.reset(&policy, &counted).await?;
    }
    active.log_reset(&caller, &policy, &key);
    Ok(StatusCode::NO_CONTENT)
}

/// Returns the key of a policy that is listed in the hot keys by this hash.
pub(super) fn listed_key(
    state: &ServerState,
    active: &ActiveConfig,
    policy: &str,
    hash: &str,
) -> Option<String> {
    if !key_hash::is_hash(hash) || active.show_keys(policy) != ShowKeys::Hashed {
        return None;
    }
    state.hot_keys.find(state.hot_keys_time(), |hot_policy, hot_key| {
        hot_policy == policy && key_hash::of(hot_key) == hash
    })
}
