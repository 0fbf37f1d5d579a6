//! Checks whether a script may use keys that it does not declare, which some services refuse.

use tidegate::store::redis::Reply;

use super::{Finding, NodeUnderTest};

const SCRIPT: &str = "return redis.call('GET', ARGV[1])";
/// Number of attempts to call a script that was just loaded, before its text is sent.
const MAX_LOADS: usize = 3;

pub(super) async fn check(node: &mut NodeUnderTest<'_>) {
    // No user's key has a hash tag that starts with a bare percent sign.
    let key = format!("{}:{{%doctor}}", node.options.prefix);
    let other = format!("{key}:other");
    // The same script with the declared key shows that it does not fail for another reason.
    if reads(node, &key, &key).await == Some(true) && reads(node, &key, &other).await == Some(false)
    {
        let message = "a script may only use keys that it declares: Tidegate declares all of \
                       them, on a cluster by one call per slot";
        node.add(Finding::note("scripts", message));
    }
}

/// Returns whether a script that declares `key` may read `other`; `None` if it cannot be called.
async fn reads(node: &NodeUnderTest<'_>, key: &str, other: &str) -> Option<bool> {
    for _ in 0..MAX_LOADS {
        let Reply::Text(sha) = node.ask(&["SCRIPT", "LOAD", SCRIPT]).await.ok()? else { break };
        match node.ask(&["EVALSHA", &sha, "1", key, other]).await.ok()? {
            Reply::Error(error) if error.starts_with("NOSCRIPT") => {}
            Reply::Error(_) => return Some(false),
            _ => return Some(true),
        }
    }
    match node.ask(&["EVAL", SCRIPT, "1", key, other]).await.ok()? {
        Reply::Error(error) if error.starts_with("NOPERM") => None,
        reply => Some(!matches!(reply, Reply::Error(_))),
    }
}
