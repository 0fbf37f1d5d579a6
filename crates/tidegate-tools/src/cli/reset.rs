//! `tidegate reset`: deletes the count of a key in a running service.

use std::process::ExitCode;

use clap::Args;
use serde_json::{Value, json};

use super::admin::AnswerFlags;
use crate::tool::output;
use crate::tool::text::printable;

/// Delete the count of a key in a running service: it has all its units again.
///
/// Without --policy, in each policy in which units of the key are in use. The token needs the scope
/// `reset`. Exit code: 0, 1 if no units are in use, or 2 on an error.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  In one policy:
    tidegate reset user123 --policy per-user

  In all, after a look at them:
    tidegate lookup user123
    tidegate reset user123")]
pub struct ResetCommand {
    /// Key, or its hash
    key: String,

    /// Only this policy
    #[arg(long, value_name = "NAME", env = "TIDEGATE_POLICY")]
    policy: Option<String>,

    #[command(flatten)]
    answer: AnswerFlags,
}

impl ResetCommand {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let Self { key, policy, answer } = self;
        let body = answer.ask(async |client| {
            let policies = match policy {
                Some(policy) => vec![policy],
                None => policies_in_use(&client.lookup_json(&key, None).await?),
            };
            for policy in &policies {
                client.post("/v1/reset", &json!({"policy": policy, "key": key})).await?;
            }
            Ok(json!({"key": key, "reset": policies}))
        })?;
        let reset: Vec<&str> =
            body["reset"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        output::print(answer.json_of(&body), |output| {
            if reset.is_empty() {
                writeln!(output, "no policy has units of {} in use", printable(&key))?;
            }
            for policy in &reset {
                writeln!(output, "count of {} under {} reset", printable(&key), printable(policy))?;
            }
            Ok(())
        })?;
        Ok(if reset.is_empty() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
    }
}

/// Returns the policies in which units of a key are in use.
fn policies_in_use(lookup: &Value) -> Vec<String> {
    let results = lookup["results"].as_array().into_iter().flatten();
    let in_use = results.filter(|result| {
        result["allowed"] == Value::Bool(false)
            || result["remaining"].as_u64() < result["capacity"].as_u64()
    });
    let mut policies: Vec<String> =
        in_use.filter_map(|result| result["policy"].as_str().map(str::to_owned)).collect();
    // A policy with limits by value has a result for each of them.
    policies.dedup();
    policies
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_policies_with_units_in_use_are_reset() {
        let lookup = json!({"results": [
            {"policy": "denied", "allowed": false, "remaining": 0, "capacity": 0},
            {"policy": "used", "allowed": true, "remaining": 3, "capacity": 5},
            {"policy": "used", "allowed": true, "remaining": 8, "capacity": 10},
            {"policy": "full", "allowed": true, "remaining": 5, "capacity": 5},
            {"policy": "failed", "error": "the store is down"},
        ]});
        assert_eq!(policies_in_use(&lookup), ["denied", "used"]);
        assert!(policies_in_use(&Value::Null).is_empty());
    }
}
