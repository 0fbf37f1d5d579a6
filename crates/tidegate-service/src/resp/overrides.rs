//! `TG.OVERRIDE`: limits that the admin changes while the service runs.

use serde_json::{Map, Value};
use tidegate::QueryError;
use tidegate_api::admin::SetOverride;
use tidegate_config::Scope;

use super::command::{Command, shown};
use super::frame::Arguments;
use super::reply::Writer;
use super::request::number;
use crate::api::problem::unavailable;
use crate::logs;
use crate::overrides::OverrideError;
use crate::state::{ActiveConfig, Caller, ServerState};

/// Maximum number of overrides in a reply.
const MAX_LISTED: usize = 1_000;

pub(super) enum OverrideRequest {
    Set(SetOverride),
    Remove { policy: String, key: String, reason: String },
    List { policy: Option<String> },
}

/// Parses the arguments. The error is a reply.
pub(super) fn parse(arguments: Arguments<'_, '_>) -> Result<OverrideRequest, String> {
    let usage = || Command::Override.usage_error();
    let text = |index: usize| arguments.text(index).map(str::to_owned).ok_or_else(usage);
    let is_reason =
        |index| arguments.text(index).is_some_and(|it| it.eq_ignore_ascii_case("reason"));
    match (text(1)?.to_ascii_uppercase().as_str(), arguments.len()) {
        ("SET", length) => {
            let mut fields = Map::new();
            fields.insert("policy".to_owned(), text(2)?.into());
            fields.insert("key".to_owned(), text(3)?.into());
            for index in (4..length).step_by(2) {
                let (option, value) = (text(index)?, text(index + 1)?);
                let (name, value) = match option.to_ascii_uppercase().as_str() {
                    "LIMIT" => ("limit", number("LIMIT", value.as_bytes())?.into()),
                    "BURST" => ("burst", number("BURST", value.as_bytes())?.into()),
                    "WINDOW" => ("window", value.into()),
                    "MODE" => ("mode", value.to_ascii_lowercase().into()),
                    "EXPIRES" => ("expires_in", value.into()),
                    "REASON" => ("reason", value.into()),
                    _ => {
                        let (option, usage) = (shown(option.as_bytes()), Command::Override.usage());
                        return Err(format!("ERR syntax error near '{option}': {usage}"));
                    }
                };
                if fields.insert(name.to_owned(), value).is_some() {
                    return Err(format!("ERR syntax error: {option} is given twice"));
                }
            }
            let request = serde_json::from_value(Value::Object(fields));
            request.map(OverrideRequest::Set).map_err(|error| format!("ERR {error}"))
        }
        ("DEL", length) if length == 4 || length == 6 && is_reason(4) => {
            let reason = arguments.text(5).unwrap_or_default().to_owned();
            Ok(OverrideRequest::Remove { policy: text(2)?, key: text(3)?, reason })
        }
        ("LIST", 2) => Ok(OverrideRequest::List { policy: None }),
        ("LIST", 3) => Ok(OverrideRequest::List { policy: Some(text(2)?) }),
        _ => Err(usage()),
    }
}

/// Runs a command, and returns its reply in the form of the admin API. The error is a reply.
pub(super) async fn run(
    state: &ServerState,
    active: &ActiveConfig,
    caller: &Caller,
    request: OverrideRequest,
) -> Result<Value, String> {
    let shown = |body| serde_json::to_value(active.shown_override(body)).unwrap_or_default();
    let changed = match request {
        OverrideRequest::Set(request) => {
            let set = state.overrides.set(request, caller.author("")).await;
            set.map(|body| {
                active.log_override(caller, &body.policy, &body.key, Some(&body));
                shown(body)
            })
        }
        OverrideRequest::Remove { policy, key, reason } => {
            match state.overrides.remove(&policy, &key, caller.author(&reason)).await {
                Err(OverrideError::NotFound) => Ok(Value::Bool(false)),
                removed => removed.map(|()| {
                    active.log_override(caller, &policy, &key, None);
                    Value::Bool(true)
                }),
            }
        }
        OverrideRequest::List { policy } => {
            if let Some(token) = &caller.token {
                let check = token.check(&[Scope::Read]);
                check.map_err(|error| format!("NOPERM this user has no permissions: {error}"))?;
            }
            let is_wanted = |name: &str, _: &str| policy.as_deref().is_none_or(|it| it == name);
            let (found, _) = state.overrides.list(None, MAX_LISTED, is_wanted);
            Ok(found.into_iter().map(shown).collect())
        }
    };
    changed.map_err(|error| match error {
        OverrideError::Query(QueryError::Store(store)) => {
            logs::store_failed(&store);
            format!("ERR {}", unavailable(&store))
        }
        error => format!("ERR {error}"),
    })
}

/// Writes a reply: 1 or 0, a list, or a text of JSON.
pub(super) fn write(writer: &mut Writer<'_>, reply: &Value) {
    match reply {
        Value::Bool(removed) => writer.integer(i64::from(*removed)),
        Value::Array(bodies) => {
            writer.array(bodies.len());
            for body in bodies {
                writer.bulk(body.to_string());
            }
        }
        body => writer.bulk(body.to_string()),
    }
}
