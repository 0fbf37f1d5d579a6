//! Probes of nodes whose circuit is open, and checks of the permissions and commands that decisions
//! need: which ones are missing on a node, and the remedy.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use tokio::time::{sleep_until, timeout_at};

use super::internal_key;
use crate::charge::Charge;
use crate::quota::Quota;
use crate::random::random_u64;
use crate::store::redis::batch::dispatch::Dispatcher;
use crate::store::redis::batch::{Batch, InFlightBatch};
use crate::store::redis::client::NodeClient;
use crate::store::redis::client::error::{MIGRATING, is_not_permitted, one_line, with_address};
use crate::store::redis::client::resp::{Command, Value};
use crate::store::redis::routing::slots::{SLOTS, slot_of};
use crate::store::redis::routing::step::{Delivery, NextStep};
use crate::store::redis::script::requests::{Operation, Request};
use crate::store::{Action, StoreError};

/// Commands that the scripts call, besides `TIME`, each with arguments that follow its key. On a key
/// that has a short string, such a command leaves the string unchanged, deletes it, or fails.
///
/// A user of Redis needs the permission to run them; [the module](crate::store::redis) has the whole
/// list.
///
/// ```
/// use tidegate::store::redis::SCRIPT_COMMANDS;
///
/// let names = SCRIPT_COMMANDS.iter().map(|(name, _)| format!("+{}", name.to_lowercase()));
/// assert!(names.collect::<Vec<_>>().contains(&"+zadd".to_owned()));
/// ```
pub const SCRIPT_COMMANDS: [(&str, &[&str]); 19] = [
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
    ("ZSCORE", &["member"]),
    ("PTTL", &[]),
    // In the past: deletes the key, as the next command would.
    ("PEXPIREAT", &["1"]),
    ("UNLINK", &[]),
    ("SET", &["", "PX", "1", "XX"]),
];
/// Milliseconds for which the key of a check lives at most.
const CHECK_TTL: u64 = 10_000;
/// Number of hash tags to try for one in a slot of a given node. Even for a node with a single slot
/// the search fails only with probability e^-20.
const MAX_TAGS: usize = 20 * SLOTS;

/// Opens the circuit of a node that lacks a permission or a command. Returns the error with their
/// names, which the server's error rarely has. Concurrent calls share one check.
pub(crate) async fn on_not_permitted(
    dispatcher: &Arc<Dispatcher>,
    node: &Arc<NodeClient>,
    error: StoreError,
    deadline: Instant,
) -> StoreError {
    let named = timeout_at(deadline.into(), async {
        let _guard = node.permission_check.lock().await;
        if node.circuit().is_not_permitted() {
            return node.circuit().open_error();
        }
        let checked = check_permissions(dispatcher, node).await;
        let error = checked.err().unwrap_or(error.clone());
        dispatcher.record(node, Err(&error));
        error
    });
    match named.await {
        Ok(StoreError::Open(error)) => Arc::unwrap_or_clone(error),
        Ok(error) => error,
        Err(_) => {
            dispatcher.record(node, Err(&error));
            error
        }
    }
}

/// Probes a node until its circuit closes, another node has replaced it, or the store is dropped.
pub(crate) async fn probe_until_closed(dispatcher: Weak<Dispatcher>, node: Arc<NodeClient>) {
    while !node.is_retired() {
        sleep_until(node.circuit().next_probe()).await;
        let Some(dispatcher) = dispatcher.upgrade() else { return };
        if !node.circuit().takes_probe() {
            continue;
        }
        let mut probed = probe(&dispatcher, &node).await;
        // The probe does not need all commands.
        if node.circuit().is_not_permitted() || matches!(probed, Err(StoreError::NotPermitted(_))) {
            probed = check_permissions(&dispatcher, &node).await.and(probed);
        }
        if node.circuit().record_probe(probed.as_ref().err()) {
            tracing::debug!(node = %node.address(), "circuit closed");
            return;
        }
    }
}

/// Decides a charge on an internal key by the same script as any decision, so that it fails
/// whenever decisions on this node would.
pub(crate) async fn probe(
    dispatcher: &Arc<Dispatcher>,
    node: &Arc<NodeClient>,
) -> Result<(), StoreError> {
    let Some(key) = probe_key(dispatcher, node) else { return Ok(()) };
    let quota = Quota::fixed_window(Quota::MAX_LIMIT, Duration::from_secs(1));
    let quota = quota.map_err(|error| StoreError::Refused(error.to_string()))?;
    let charge = [Charge::new("probe", &quota)];
    let request = Request::new(Operation::Apply(Action::Acquire), &charge);
    let write_key = |text: &mut String, _: &Charge<'_>| text.push_str(&key);
    let deadline = Instant::now() + dispatcher.timeout;
    let batch = Arc::<Batch>::default();
    let handle = batch.join(&request, slot_of(&key), Delivery::Shared, deadline, write_key);
    dispatcher.dispatch(node, &InFlightBatch(batch), false).await;
    match handle.decisions(&request).await {
        // A node that redirects can answer.
        Ok(_) | Err(NextStep::Redirect(_)) => Ok(()),
        Err(NextStep::Fail(error) | NextStep::BackOff(error)) => Err(error),
        Err(NextStep::TimeOut | NextStep::SendAgain | NextStep::AnswerLost) => {
            Err(StoreError::Timeout(dispatcher.timeout))
        }
        Err(NextStep::SendAlone | NextStep::AwaitMigration | NextStep::Split) => {
            Err(StoreError::Refused(MIGRATING.to_owned()))
        }
    }
}

/// Returns a probe key of this node; `None` if it has left the cluster, and decides nothing.
fn probe_key(dispatcher: &Dispatcher, node: &Arc<NodeClient>) -> Option<String> {
    let topology = dispatcher.topology();
    let key = |number| internal_key(&dispatcher.prefix, &format!("probe-{number}"));
    if !topology.is_cluster() {
        return Some(key(0));
    }
    let is_primary = topology.primaries().iter().any(|primary| Arc::ptr_eq(primary, node));
    let is_owned = |key: &String| topology.is_owner(slot_of(key), node);
    is_primary.then(|| (0..MAX_TAGS).map(key).find(is_owned)).flatten()
}

/// Tries each command that decisions need, in a form that changes no count. Returns an error
/// with those that are missing, and the remedy.
async fn check_permissions(
    dispatcher: &Dispatcher,
    node: &Arc<NodeClient>,
) -> Result<(), StoreError> {
    let Some(probe_key) = probe_key(dispatcher, node) else { return Ok(()) };
    let Dispatcher { prefix, timeout, .. } = dispatcher;
    // No other instance deletes this key, as it does with that of a probe.
    let key = format!("{probe_key}:{:016x}", random_u64());
    // Commands for other types fail on a string. Without it, they could create a key that has
    // no TTL.
    let set = Command::new("SET").arg(&key).arg("").arg("PX").arg(CHECK_TTL.to_string());
    let mut missing = missing_commands(node, [("SET", set)], *timeout).await?;
    if missing.is_empty() {
        let commands = SCRIPT_COMMANDS.map(|(name, arguments)| {
            (name, arguments.iter().fold(Command::new(name).arg(&key), Command::arg))
        });
        missing = missing_commands(node, commands, *timeout).await?;
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
