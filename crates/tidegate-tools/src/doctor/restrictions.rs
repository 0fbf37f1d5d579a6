//! Tries what scripts may do: some services refuse TIME inside scripts, or keys that a script does
//! not declare. A script that does neither shows that others fail for this reason alone.

use tidegate::store::redis::Reply;

use super::{Finding, NodeUnderTest};

const READ: &str = "return redis.call('GET', ARGV[1])";
const TIME: &str = "return redis.call('TIME')";
/// Number of attempts to call a script that was just loaded, before its text is sent.
const MAX_LOADS: usize = 3;

/// Restrictions of scripts on one node.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ScriptRestrictions {
    pub(super) time: bool,
    undeclared_keys: bool,
}

impl ScriptRestrictions {
    pub(super) async fn of(node: &NodeUnderTest<'_>) -> Self {
        // No user's key has a hash tag that starts with a bare percent sign.
        let key = format!("{}:{{%doctor}}", node.options.prefix);
        let is_refused = async |script, argument: &str| {
            matches!(run(node, script, &key, argument).await, Some(Reply::Error(_)))
        };
        if is_refused(READ, &key).await {
            return Self::default();
        }
        let has_time = matches!(node.ask(&["TIME"]).await, Ok(Reply::List(_)));
        Self {
            time: has_time && is_refused(TIME, "").await,
            undeclared_keys: is_refused(READ, &format!("{key}:other")).await,
        }
    }

    /// Adds a note of each restriction that does not concern the clock.
    pub(super) fn report(self, node: &mut NodeUnderTest<'_>) {
        if self.undeclared_keys {
            let message = "a script may only use keys that it declares: Tidegate declares all of \
                           them, on a cluster by one call per slot";
            node.add(Finding::note("scripts", message));
        }
    }
}

/// Runs a script with one key and one argument. Returns `None` if that is not known to work.
async fn run(node: &NodeUnderTest<'_>, script: &str, key: &str, argument: &str) -> Option<Reply> {
    for _ in 0..MAX_LOADS {
        let Reply::Text(sha) = node.ask(&["SCRIPT", "LOAD", script]).await.ok()? else { break };
        let reply = node.ask(&["EVALSHA", &sha, "1", key, argument]).await.ok()?;
        if !matches!(&reply, Reply::Error(error) if error.starts_with("NOSCRIPT")) {
            return Some(reply);
        }
    }
    let reply = node.ask(&["EVAL", script, "1", key, argument]).await.ok()?;
    (!matches!(&reply, Reply::Error(error) if error.starts_with("NOPERM"))).then_some(reply)
}
