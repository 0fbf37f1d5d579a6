//! Decisions as JSON lines: the request, and the body that the HTTP API answers to it.

use std::borrow::Cow;
use std::io::{self, Write};

use serde::Serialize;
use tidegate::{Policies, ShowKeys};

use super::report::utc;
use super::{ReplayResult, TrafficRequest};
use tidegate_api::json::explained_body;
use tidegate_config::key_hash;

/// Members that the line of a request has before those of the answer.
#[derive(Serialize)]
struct RequestMembers<'a> {
    time: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    file: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    line: Option<u64>,
    method: Option<Cow<'a, str>>,
    path: Option<Cow<'a, str>>,
    /// That of the binding decision; each of `decisions` has its own.
    key: Option<String>,
}

/// Writes the line of one request. `policies` are those that decided, `files` the access logs.
pub fn write_line(
    output: &mut dyn Write,
    request: &dyn TrafficRequest,
    policies: &Policies,
    files: &[String],
    result: &ReplayResult<'_>,
) -> io::Result<()> {
    let shown =
        |policy: &str, key: &str| match policies.get(policy).map(tidegate::Policy::show_keys) {
            Some(ShowKeys::Hashed) => key_hash::of(key),
            _ => key.to_owned(),
        };
    let binding = result.as_ref().ok().and_then(tidegate::PolicyDecisions::binding);
    let members = RequestMembers {
        time: utc(request.time()),
        file: request.line().and_then(|(file, _)| files.get(file)).map(String::as_str),
        line: request.line().map(|(_, line)| line),
        method: request.get("method"),
        path: request.get("path"),
        key: binding.and_then(|entry| Some(shown(entry.policy(), entry.key()?))),
    };
    let answer = match result {
        Ok(decisions) => explained_body(decisions, shown, None),
        Err(error) => serde_json::json!({ "error": error.to_string() }).to_string().into_bytes(),
    };
    // Both objects become one.
    let members = serde_json::to_string(&members)?;
    write!(output, "{},", members.strip_suffix('}').unwrap_or(&members))?;
    output.write_all(answer.strip_prefix(b"{").unwrap_or(&answer))?;
    output.write_all(b"\n")
}
