//! Checks whether all connections and all keys reach one server. A proxy, a load balancer or a DNS
//! name in front may lead to several servers, each of which would count separately.

use std::time::{SystemTime, UNIX_EPOCH};

use tidegate::store::redis::Reply;

use super::{Finding, NodeUnderTest, Report};

const CHECK: &str = "routing";
/// Pairs of keys. Each pair has a hash tag, and by chance half of them reach each of two servers.
const PAIRS: usize = 16;
/// Connections besides that of the store.
const CONNECTIONS: usize = 3;
/// Time to live of the keys, which are removed at the end of the check.
const TTL_MS: &str = "30000";
const SCRIPT: &str = "return {redis.call('GET', KEYS[1]), redis.call('GET', KEYS[2])}";
/// SHA-1 of the script.
const SCRIPT_HASH: &str = "c29da6f189f2ff7658ce9f61ede016fd4af0e93d";

/// Pairs of keys by what a connection finds of them.
#[derive(Debug, Default, PartialEq, Eq)]
struct Found {
    /// Both keys are there.
    complete: usize,
    /// The first key is missing.
    missing: usize,
    /// Only the second key is missing.
    separated: usize,
    /// The script is missing, although it was just loaded.
    without_script: usize,
}

pub(super) async fn check(node: &NodeUnderTest<'_>, prefix: &str, report: &mut Report) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    // No user's key has a hash tag that starts with a bare percent sign.
    let pair = |index| ["a", "b"].map(|end| format!("{prefix}:{{%doctor-{now}-{index}}}:{end}"));
    let pairs: Vec<[String; 2]> = (0..PAIRS).map(pair).collect();
    let keys: Vec<&str> = pairs.iter().flatten().map(String::as_str).collect();
    let writes: Vec<[&str; 5]> = keys.iter().map(|key| ["SET", key, "1", "PX", TTL_MS]).collect();
    let writes: Vec<&[&str]> = writes.iter().map(|words| &words[..]).collect();
    let Ok(written) = node.store.ask_node_all(node.address, &writes).await else { return };
    if written.iter().all(|reply| matches!(reply, Reply::Text(_))) {
        check_pairs(node, &pairs, report).await;
    }
    let removals: Vec<[&str; 2]> = keys.iter().map(|key| ["UNLINK", key]).collect();
    let removals: Vec<&[&str]> = removals.iter().map(|words| &words[..]).collect();
    // The keys expire in any case.
    let _ = node.store.ask_node_all(node.address, &removals).await;
}

async fn check_pairs(node: &NodeUnderTest<'_>, pairs: &[[String; 2]], report: &mut Report) {
    let reads: Vec<[&str; 5]> =
        pairs.iter().map(|[a, b]| ["EVALSHA", SCRIPT_HASH, "2", a, b]).collect();
    let load = ["SCRIPT", "LOAD", SCRIPT];
    let commands: Vec<&[&str]> =
        std::iter::once(&load[..]).chain(reads.iter().map(|words| &words[..])).collect();
    let Ok(replies) = node.store.ask_node_all(node.address, &commands).await else { return };
    let own = Found::of(&replies);
    let mut others = Found::default();
    for _ in 0..CONNECTIONS {
        if let Ok(replies) = node.store.ask_node_separately(node.address, &commands).await {
            others.missing += Found::of(&replies).missing;
        }
    }
    findings(&own, &others).into_iter().for_each(|finding| node.add(report, finding));
}

impl Found {
    /// Counts the replies of EVALSHA after that of SCRIPT LOAD.
    fn of(replies: &[Reply]) -> Self {
        let mut found = Self::default();
        for reply in replies.iter().skip(1) {
            match reply {
                Reply::Error(error) if error.starts_with("NOSCRIPT") => found.without_script += 1,
                Reply::List(values) => match values.as_slice() {
                    [Reply::Nil, _] => found.missing += 1,
                    [_, Reply::Nil] => found.separated += 1,
                    _ => found.complete += 1,
                },
                // Another check reports permissions that are missing.
                _ => {}
            }
        }
        found
    }
}

/// Describes what the store's connection and other connections have found.
fn findings(own: &Found, others: &Found) -> Vec<Finding> {
    let direct = "or connect to the servers without it";
    let mut findings = Vec::new();
    if own.missing > 0 || others.missing > 0 {
        let message = "a key that one connection has written is missing on another: the address \
                       leads to several servers, each of which counts separately";
        let advice = "use the address of one server, or those of the sentinels or of a cluster; a \
                      proxy in front must send all connections to one server, or each key to its \
                      own";
        findings.push(Finding::error(CHECK, message).advice(advice));
    }
    if own.separated > 0 {
        let message = format!(
            "keys of the same hash tag are on different servers, for {} of {PAIRS} tags: a script \
             finds only a part of its keys",
            own.separated
        );
        let advice = format!("let the proxy in front route by hash tags, {direct}");
        findings.push(Finding::error(CHECK, message).advice(advice));
    }
    if own.without_script > 0 {
        let message = format!(
            "EVALSHA does not find a script that was just loaded, for {} of {PAIRS} keys: a proxy \
             in front sends SCRIPT LOAD to another server",
            own.without_script
        );
        let advice = format!("let the proxy send SCRIPT LOAD to all servers, {direct}");
        findings.push(Finding::error(CHECK, message).advice(advice));
    }
    if findings.is_empty() && own.complete > 0 {
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
        ];
        let expected = Found { complete: 1, missing: 2, separated: 1, without_script: 1 };
        assert_eq!(Found::of(&replies), expected);
        assert_eq!(findings(&expected, &Found::default()).len(), 3);
        assert_eq!(findings(&Found::default(), &Found::default()), Vec::new());
    }
}
