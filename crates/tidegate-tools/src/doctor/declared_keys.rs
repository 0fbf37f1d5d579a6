//! Checks whether a script may use keys that it does not declare, which some services refuse.

use tidegate::store::redis::Reply;

use super::{Finding, NodeUnderTest};

const SCRIPT: &str = "return redis.call('GET', ARGV[1])";
/// Number of attempts to call a script that was just loaded, before its text is sent.
const MAX_LOADS: usize = 3;
/// Number of keys that are tried until the node of a cluster has one.
const MAX_KEYS: usize = 100;

pub(super) async fn check(node: &mut NodeUnderTest<'_>) {
    for number in 0..MAX_KEYS {
        // No user's key has a hash tag that starts with a bare percent sign.
        let key = format!("{}:{{%doctor-{number}}}", node.options.prefix);
        // The same script with the declared key shows that it does not fail for another reason.
        match read(node, &key, &key).await {
            Some(Reply::Error(error)) if error.starts_with("MOVED") => {}
            None | Some(Reply::Error(_)) => return,
            Some(_) => {
                let other = read(node, &key, &format!("{key}:other")).await;
                if matches!(other, Some(Reply::Error(error)) if !error.starts_with("NOPERM")) {
                    let message = "a script may only use keys that it declares: Tidegate declares \
                                   all of them, on a cluster by one call per slot";
                    node.add(Finding::note("scripts", message));
                }
                return;
            }
        }
    }
}

/// Reads `other` by a script that declares `key`; `None` if the script cannot be called.
async fn read(node: &NodeUnderTest<'_>, key: &str, other: &str) -> Option<Reply> {
    for _ in 0..MAX_LOADS {
        let Reply::Text(sha) = node.ask(&["SCRIPT", "LOAD", SCRIPT]).await.ok()? else { break };
        match node.ask(&["EVALSHA", &sha, "1", key, other]).await.ok()? {
            Reply::Error(error) if error.starts_with("NOSCRIPT") => {}
            reply => return Some(reply),
        }
    }
    node.ask(&["EVAL", SCRIPT, "1", key, other]).await.ok()
}
