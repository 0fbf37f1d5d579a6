//! `/v1/overrides`: limits that operators change while the service runs, and who did it.

use axum::extract::rejection::QueryRejection;
use axum::extract::{Query as UrlQuery, Request, State};
use axum::{Extension, Json};
use http::StatusCode;
use serde::Deserialize;
use tidegate::store::redis::OverrideValue;
use tidegate_api::admin::{
    KeyValues, OverrideAuditBody, OverrideAuthor, OverrideBody, OverrideChangeBody,
    OverrideStateBody, OverridesBody, SetOverride, StoredOverride,
};
use tidegate_config::key_hash;

use super::Admin;
use super::reset::listed_key;
use crate::api::problem::Problem;
use crate::api::{Problems, check_encoding, check_json, read_json};
use crate::overrides::{OverrideError, until_ms};
use crate::state::{ActiveConfig, Caller};

/// Number of overrides or changes in one response.
const MAX_PAGE: usize = 1_000;
const PAGE: usize = 100;

impl From<OverrideError> for Problem {
    fn from(error: OverrideError) -> Self {
        match error {
            OverrideError::Query(error) => error.into(),
            OverrideError::NotFound => Self::new(StatusCode::NOT_FOUND, error.to_string()),
            OverrideError::Full => Self::new(StatusCode::CONFLICT, error.to_string()),
            OverrideError::Invalid(reason) => Self::bad_request(reason),
            OverrideError::Unanswered(_) => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, error.to_string())
            }
        }
    }
}

fn parsed<T>(query: Result<UrlQuery<T>, QueryRejection>) -> Result<T, Problem> {
    let UrlQuery(query) = query.map_err(|error| Problem::bad_request(error.to_string()))?;
    Ok(query)
}

/// Set the limit of a key, or of all keys of a policy, for a while
#[utoipa::path(
    put, path = "/v1/overrides", operation_id = "set_override", request_body = SetOverride,
    responses(
        (status = 200, description = "The override is set", body = OverrideBody),
        (
            status = 409, description = "There are too many overrides", body = Problem,
            content_type = "application/problem+json"
        ),
        Problems,
    )
)]
pub(super) async fn set(
    State(admin): State<Admin>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Json<OverrideBody>, Problem> {
    check_encoding(request.headers())?;
    check_json(request.headers())?;
    let mut request: SetOverride = read_json(request.into_body()).await?;
    let active = admin.state.active();
    if let KeyValues::One(key) = &mut request.key
        && let Some(listed) = listed_key(&admin.state, &active, &request.policy, key)
    {
        *key = listed;
    }
    let body = admin.state.overrides.set(request, caller.author("")).await?;
    active.log_override(&caller, &body.policy, &body.key, Some(&body));
    Ok(Json(active.shown_override(body)))
}

#[derive(Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct ListQuery {
    /// Name of a policy; all by default
    policy: Option<String>,
    /// Key, or its hash in the form of the hot keys
    key: Option<String>,
    /// Cursor of the page before
    cursor: Option<String>,
    /// Maximum number of overrides: 100 by default, 1,000 at most
    limit: Option<usize>,
}

/// Overrides that are set
#[utoipa::path(
    get, path = "/v1/overrides", operation_id = "overrides", params(ListQuery),
    responses((status = 200, description = "Overrides", body = OverridesBody), Problems)
)]
pub(super) async fn list(
    State(admin): State<Admin>,
    query: Result<UrlQuery<ListQuery>, QueryRejection>,
) -> Result<Json<OverridesBody>, Problem> {
    let query = parsed(query)?;
    let cursor = query.cursor.as_deref().map(serde_json::from_str).transpose();
    let cursor = cursor.map_err(|_| Problem::bad_request("this is not a cursor of a response"))?;
    let active = admin.state.active();
    let is_wanted = |policy: &str, key: &str| {
        query.policy.as_deref().is_none_or(|wanted| wanted == policy)
            && query.key.as_deref().is_none_or(|wanted| is_named(&active, policy, key, wanted))
    };
    let max = query.limit.unwrap_or(PAGE).clamp(1, MAX_PAGE);
    let (found, has_more) = admin.state.overrides.list(cursor, max, is_wanted);
    let last = found.last().filter(|_| has_more);
    let cursor = last.and_then(|it| serde_json::to_string(&(&it.policy, &it.key)).ok());
    let overrides = found.into_iter().map(|body| active.shown_override(body)).collect();
    Ok(Json(OverridesBody { overrides, scope: admin.state.overrides.scope(), cursor }))
}

/// Returns whether an operator names a key by this text: as it is, or by its hash if it is hidden.
fn is_named(active: &ActiveConfig, policy: &str, key: &str, text: &str) -> bool {
    key == text || key_hash::is_hash(text) && active.shown_override_key(policy, key) == text
}

#[derive(Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct RemoveQuery {
    policy: String,
    /// Key as the list shows it; `*` for that of all keys
    key: String,
    /// Why, for the audit
    #[serde(default)]
    #[param(max_length = 500)]
    reason: String,
}

/// Remove an override
#[utoipa::path(
    delete, path = "/v1/overrides", operation_id = "remove_override", params(RemoveQuery),
    responses((status = 204, description = "The override is removed"), Problems)
)]
pub(super) async fn remove(
    State(admin): State<Admin>,
    Extension(caller): Extension<Caller>,
    query: Result<UrlQuery<RemoveQuery>, QueryRejection>,
) -> Result<StatusCode, Problem> {
    let RemoveQuery { policy, mut key, reason } = parsed(query)?;
    let active = admin.state.active();
    if key_hash::is_hash(&key) {
        let is_wanted = |other: &str, other_key: &str| {
            other == policy && is_named(&active, other, other_key, &key)
        };
        let (found, _) = admin.state.overrides.list(None, 1, is_wanted);
        if let Some(found) = found.into_iter().next() {
            key = found.key;
        }
    }
    admin.state.overrides.remove(&policy, &key, caller.author(&reason)).await?;
    active.log_override(&caller, &policy, &key, None);
    Ok(StatusCode::NO_CONTENT)
}

#[derive(Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct AuditQuery {
    /// Number before which the changes were made, of the page before
    before: Option<i64>,
    /// Maximum number of changes: 100 by default, 200 at most
    limit: Option<usize>,
}

/// Changes of overrides, with who made them
#[utoipa::path(
    get, path = "/v1/overrides/audit", operation_id = "override_audit", params(AuditQuery),
    responses(
        (status = 200, description = "Changes, the latest first", body = OverrideAuditBody),
        Problems,
    )
)]
pub(super) async fn audit(
    State(admin): State<Admin>,
    query: Result<UrlQuery<AuditQuery>, QueryRejection>,
) -> Result<Json<OverrideAuditBody>, Problem> {
    let AuditQuery { before, limit } = parsed(query)?;
    let max = limit.unwrap_or(PAGE).clamp(1, 2 * PAGE);
    let before = before.map(|number| u64::try_from(number).unwrap_or(0));
    let found = admin.state.overrides.audit(before, max).await.map_err(OverrideError::from)?;
    let active = admin.state.active();
    let before = found.last().filter(|_| found.len() == max).map(|(_, record)| record.number);
    let change = |((policy, key), record): ((String, String), _)| {
        let tidegate::store::redis::OverrideRecord { number, at, before, after, author, .. } =
            record;
        let author: OverrideAuthor = serde_json::from_str(&author).unwrap_or_default();
        OverrideChangeBody {
            number,
            at_ms: at.as_micros() / 1_000,
            key: active.shown_override_key(&policy, &key),
            policy,
            author,
            before: before.as_ref().and_then(state),
            after: after.as_ref().and_then(state),
        }
    };
    Ok(Json(OverrideAuditBody { changes: found.into_iter().map(change).collect(), before }))
}

fn state(value: &OverrideValue) -> Option<OverrideStateBody> {
    let StoredOverride { limits, .. } = serde_json::from_str(&value.text).ok()?;
    Some(OverrideStateBody { limits, until_ms: until_ms(value) })
}
