//! Permissions and commands that decisions need: which ones are missing on a node, and the remedy.

use std::time::{Duration, Instant};

use crate::random::random_u64;
use crate::store::StoreError;
use crate::store::redis::client::NodeClient;
use crate::store::redis::client::error::{is_not_permitted, one_line, with_address};
use crate::store::redis::client::resp::{Command, Value};

/// Commands that the scripts call, besides TIME. With these arguments each of them leaves a short
/// string unchanged or fails.
#[doc(hidden)]
pub const SCRIPT_COMMANDS: [(&str, &[&str]); 18] = [
    ("GET", &[]),
    ("SETRANGE", &["0", ""]),
    ("HMGET", &["field"]),
    // These fail, because the key has another type.
    ("HSET", &["field", "value"]),
    ("HINCRBY", &["field", "1"]),
    ("HDEL", &["field"]),
    ("ZADD", &["XX", "0", "member"]),
    ("ZCARD", &[]),
    ("ZCOUNT", &["0", "0"]),
    ("ZRANGE", &["0", "0"]),
    ("ZRANGEBYSCORE", &["0", "0"]),
    ("ZREM", &["member"]),
    ("ZREMRANGEBYRANK", &["0", "0"]),
    ("ZREMRANGEBYSCORE", &["0", "0"]),
    ("PTTL", &[]),
    // In the past: deletes the key, as the next command would.
    ("PEXPIREAT", &["1"]),
    ("UNLINK", &[]),
    ("SET", &["", "PX", "1", "XX"]),
];
/// Milliseconds for which the key of a check lives at most.
const CHECK_TTL: u64 = 10_000;

/// Tries each command that decisions need, in a form that changes no count. Returns an error
/// with those that are missing, and the remedy.
pub(crate) async fn check_permissions(
    node: &NodeClient,
    probe_key: &str,
    prefix: &str,
    timeout: Duration,
) -> Result<(), StoreError> {
    // No other instance deletes this key, as it does with that of a probe.
    let key = format!("{probe_key}:{:016x}", random_u64());
    // Commands for other types fail on a string. Without it, they could create a key that has
    // no TTL.
    let set = Command::new("SET").arg(&key).arg("").arg("PX").arg(CHECK_TTL.to_string());
    let mut missing = missing_commands(node, [("SET", set)], timeout).await?;
    if missing.is_empty() {
        let commands = SCRIPT_COMMANDS.map(|(name, arguments)| {
            (name, arguments.iter().fold(Command::new(name).arg(&key), Command::arg))
        });
        missing = missing_commands(node, commands, timeout).await?;
    }
    if missing.is_empty() {
        return Ok(());
    }
    Err(StoreError::NotPermitted(with_address(node.address(), &remedy(node, prefix, &missing))))
}

/// Returns which of these commands the node lacks, with its errors.
async fn missing_commands<const N: usize>(
    node: &NodeClient,
    commands: [(&'static str, Command); N],
    timeout: Duration,
) -> Result<Vec<(&'static str, String)>, StoreError> {
    let (names, commands): (Vec<_>, Vec<_>) = commands.into_iter().unzip();
    let replies = node.query_all(&commands, Instant::now() + timeout).await;
    let replies = replies.map_err(|error| error.into_store_error(timeout))?;
    let missing = |(name, reply): (&'static str, Value)| {
        let error = one_line(&reply.into_result().err()?);
        is_not_permitted(&error).then_some((name, error))
    };
    Ok(names.into_iter().zip(replies).filter_map(missing).collect())
}

/// Returns what is missing, and the remedy.
fn remedy(node: &NodeClient, prefix: &str, missing: &[(&str, String)]) -> String {
    let (denied, absent): (Vec<_>, Vec<_>) =
        missing.iter().partition(|(_, error)| error.contains("NOPERM"));
    let names = |list: &[&(&str, String)]| {
        list.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ")
    };
    let mut parts = Vec::new();
    if !absent.is_empty() {
        parts.push(format!(
            "the server lacks {}: remove rename-command, or use a server that has them",
            names(&absent)
        ));
    }
    let is_about_keys = |error: &str| !error.contains("to run the") && error.contains("key");
    let (keys, denied): (Vec<_>, Vec<_>) =
        denied.into_iter().partition(|(_, error)| is_about_keys(error));
    let user = node.user();
    if !keys.is_empty() {
        let pattern = format!("~{prefix}:*");
        parts.push(format!("the user may not access its keys: ACL SETUSER {user} {pattern}"));
    }
    if !denied.is_empty() {
        let rules: Vec<String> =
            denied.iter().map(|(name, _)| format!("+{}", name.to_lowercase())).collect();
        let (names, rules) = (names(&denied), rules.join(" "));
        parts.push(format!("the user may not run {names}: ACL SETUSER {user} {rules}"));
    }
    parts.join("; ")
}
