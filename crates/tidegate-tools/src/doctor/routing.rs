//! Checks whether all connections and all keys reach one server. A proxy, a load balancer or a DNS
//! name in front may lead to several servers, each of which would count separately. Group commit
//! sends several keys in one call, which a proxy routes by the first of them.

use std::time::{SystemTime, UNIX_EPOCH};

use tidegate::store::redis::Reply;

use super::{Finding, NodeUnderTest};

const CHECK: &str = "routing";
/// Number of keys, each with its own hash tag. Even with two servers, a proxy that spreads keys
/// separates some neighbours.
const KEYS: usize = 16;
/// Number of times that calls are repeated which do not find the script.
const REPETITIONS: usize = 4;
/// Connections besides that of the store.
const CONNECTIONS: usize = 3;
/// Time to live of the keys, which are removed at the end of the check.
const TTL_MS: &str = "30000";
const SCRIPT: &str = "return {redis.call('GET', KEYS[1]), redis.call('GET', KEYS[2])}";
/// SHA-1 of the script.
const SCRIPT_HASH: &str = "c29da6f189f2ff7658ce9f61ede016fd4af0e93d";

/// Number of pairs of keys by the result of a script that reads both.
#[derive(Debug, Default, PartialEq, Eq)]
struct PairCounts {
    /// Both keys exist.
    complete: usize,
    /// The first key is missing, by which the call was routed.
    missing: usize,
    /// Only the second key is missing.
    separated: usize,
    /// The script is missing, although it was just loaded.
    without_script: usize,
    /// The call is refused, because its keys are in several slots.
    cross_slot: usize,
}

pub(super) async fn check(node: &mut NodeUnderTest<'_>) {
    let prefix = node.options.prefix;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    // No user's key has a hash tag that starts with a bare percent sign.
    let key = |index| format!("{prefix}:{{%doctor-{now}-{index}}}");
    let keys: Vec<String> = (0..KEYS).map(key).collect();
    let writes: Vec<[&str; 5]> = keys.iter().map(|key| ["SET", key, "1", "PX", TTL_MS]).collect();
    let Ok(written) = node.ask_all(&writes).await else { return };
    if written.iter().all(|reply| matches!(reply, Reply::Text(_))) {
        check_pairs(node, &keys).await;
    }
    let removals: Vec<[&str; 2]> = keys.iter().map(|key| ["UNLINK", key]).collect();
    // The keys expire in any case.
    let _ = node.ask_all(&removals).await;
}

/// Reads each key with its neighbour, on the store's connection and on others.
async fn check_pairs(node: &mut NodeUnderTest<'_>, keys: &[String]) {
    let neighbours = keys.iter().zip(keys.iter().cycle().skip(1));
    let reads: Vec<[&str; 5]> =
        neighbours.map(|(one, other)| ["EVALSHA", SCRIPT_HASH, "2", one, other]).collect();
    let load = ["SCRIPT", "LOAD", SCRIPT];
    let commands: Vec<&[&str]> =
        std::iter::once(&load[..]).chain(reads.iter().map(|words| &words[..])).collect();
    let Ok(replies) = node.ask_all(&commands).await else { return };
    let mut found = PairCounts::of(&replies);
    // A server that forgets scripts at times does so for other keys each time.
    let mut lost: Vec<usize> =
        without_script(&replies).take_while(|_| found.without_script > 0).collect();
    for _ in 0..REPETITIONS {
        if lost.is_empty() {
            break;
        }
        let Ok(again) = node.ask_all(&commands).await else { return };
        lost.retain(|index| without_script(&again).any(|it| it == *index));
    }
    found.without_script = lost.len();
    for _ in 0..CONNECTIONS {
        if let Ok(replies) = node.store.ask_node_separately(node.address, &commands).await {
            found.missing += PairCounts::of(&replies).missing;
        }
    }
    for finding in findings(&found) {
        node.add(finding);
    }
}

/// Iterates over the positions of the calls that did not find the script.
fn without_script(replies: &[Reply]) -> impl Iterator<Item = usize> {
    let is_lost = |reply: &Reply| matches!(reply, Reply::Error(it) if it.starts_with("NOSCRIPT"));
    replies.iter().enumerate().filter(move |(_, reply)| is_lost(reply)).map(|(index, _)| index)
}

impl PairCounts {
    /// Counts the replies of EVALSHA after that of SCRIPT LOAD.
    fn of(replies: &[Reply]) -> Self {
        let mut found = Self::default();
        let is_loaded = !matches!(replies.first(), Some(Reply::Error(_)));
        for reply in replies.iter().skip(1) {
            match reply {
                Reply::Error(error) if is_loaded && error.starts_with("NOSCRIPT") => {
                    found.without_script += 1;
                }
                Reply::Error(error) if is_cross_slot(error) => found.cross_slot += 1,
                Reply::List(values) => match values.as_slice() {
                    [Reply::Nil, _] => found.missing += 1,
                    [_, Reply::Nil] => found.separated += 1,
                    _ => found.complete += 1,
                },
                // Another check reports missing permissions.
                _ => {}
            }
        }
        found
    }
}

/// Returns whether an error refuses a script with keys of several slots: that of Redis, and that of
/// the proxies of Alibaba Cloud.
fn is_cross_slot(error: &str) -> bool {
    error.starts_with("CROSSSLOT") || error.contains("must be in same slot")
}

fn findings(found: &PairCounts) -> Vec<Finding> {
    let direct = "use the address of one server, or those of the sentinels or of a cluster";
    let mut findings = Vec::new();
    if found.missing > 0 {
        let message = "a key that one connection has written is missing on another: the address \
                       leads to several servers, each of which counts separately";
        findings.push(Finding::error(CHECK, message).advice(direct));
    }
    if found.separated > 0 {
        let message = format!(
            "a proxy in front spreads keys over several servers: a call finds only the keys of one \
             of them, for {} of {KEYS} pairs, so limits are not enforced",
            found.separated
        );
        let advice = format!("{direct}: the proxy routes a call by its first key");
        findings.push(Finding::error(CHECK, message).advice(advice));
    }
    if found.without_script > 0 {
        let message = format!(
            "EVALSHA does not find a script that was just loaded, for {} of {KEYS} keys: a proxy \
             in front sends SCRIPT LOAD to another server",
            found.without_script
        );
        let advice = format!("{direct}; otherwise grant +eval: then the text of a script is sent");
        findings.push(Finding::warning(CHECK, message).advice(advice));
    }
    if found.cross_slot > 0 {
        let message = "one address in front of shards: scripts with keys of several slots are \
                       refused; Tidegate makes one call per slot";
        let advice = "if the service also offers the API of a cluster, use its addresses: then \
                      one call decides all keys of a node";
        findings.push(Finding::note(CHECK, message).advice(advice));
    } else if findings.is_empty() && found.complete > 0 {
        findings.push(Finding::ok(CHECK, "all connections, keys and scripts reach one server"));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_are_counted_by_what_is_missing() {
        let text = || Reply::Text("1".to_owned());
        let replies = [
            text(),
            Reply::List(vec![text(), text()]),
            Reply::List(vec![Reply::Nil, Reply::Nil]),
            Reply::List(vec![Reply::Nil, text()]),
            Reply::List(vec![text(), Reply::Nil]),
            Reply::Error("NOSCRIPT No matching script.".to_owned()),
            Reply::Error("NOPERM no".to_owned()),
            Reply::Error("CROSSSLOT Keys in request don't hash to the same slot".to_owned()),
        ];
        let expected =
            PairCounts { complete: 1, missing: 2, separated: 1, without_script: 1, cross_slot: 1 };
        assert_eq!(PairCounts::of(&replies), expected);
        assert_eq!(findings(&expected).len(), 4);
        assert_eq!(findings(&PairCounts::default()), Vec::new());
    }
}
