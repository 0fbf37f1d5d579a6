//! Checks for keys of ours without a TTL. Such a key is never removed, and its limit might stay
//! exhausted.

use std::time::{Duration, Instant};

use tidegate::store::redis::Reply;

use super::{Finding, NodeUnderTest};

const CHECK: &str = "expiry";
/// Keys per SCAN call. Both limits matter because Redis may hold many keys that are not ours.
const SCAN_COUNT: &str = "500";
const MAX_SCANS: usize = 1_000;
const SCAN_TIMEOUT: Duration = Duration::from_secs(3);
/// Maximum number of keys in a finding, and maximum length of each.
const MAX_SHOWN_KEYS: usize = 3;
const MAX_SHOWN_CHARS: usize = 100;

/// Checks the keys, and returns the number of requests in the largest sorted set; 0 without one.
pub(super) async fn check(node: &mut NodeUnderTest<'_>) -> u64 {
    let options = node.options;
    let pattern = format!("{}:*", escape_pattern(options.prefix));
    let deadline = Instant::now() + SCAN_TIMEOUT;
    let mut cursor = "0".to_owned();
    let mut checked = 0_usize;
    let mut is_complete = false;
    let mut without_ttl: Vec<String> = Vec::new();
    let mut largest_log = 0;
    for _ in 0..MAX_SCANS {
        let scan = ["SCAN", &cursor, "MATCH", &pattern, "COUNT", SCAN_COUNT];
        let Ok(reply) = node.ask(&scan).await else { break };
        let Some((next, keys)) = parse_scan(reply) else {
            node.add_unknown(CHECK, "SCAN");
            return largest_log;
        };
        let ttls = keys.iter().map(|key| ["PTTL", key]);
        let requests: Vec<[&str; 2]> = ttls.chain(keys.iter().map(|key| ["ZCARD", key])).collect();
        let Ok(mut replies) = node.ask_all(&requests).await else {
            break;
        };
        // Other types than sorted sets answer with an error.
        for size in replies.split_off(keys.len().min(replies.len())) {
            if let Reply::Integer(size) = size {
                largest_log = largest_log.max(u64::try_from(size).unwrap_or(0));
            }
        }
        if replies.iter().any(|reply| matches!(reply, Reply::Error(_))) {
            node.add_unknown(CHECK, "PTTL");
            return largest_log;
        }
        checked += keys.len();
        let persistent =
            keys.into_iter().zip(replies).filter(|(_, ttl)| *ttl == Reply::Integer(-1));
        without_ttl.extend(persistent.map(|(key, _)| key));
        is_complete = next == "0";
        if is_complete || checked >= options.max_keys || Instant::now() > deadline {
            break;
        }
        cursor = next;
    }
    // SCAN may return a key twice.
    without_ttl.sort_unstable();
    without_ttl.dedup();
    let extent = if is_complete { "all" } else { "the first" };
    let prefix = options.prefix.escape_debug();
    node.add(if without_ttl.is_empty() {
        Finding::ok(CHECK, format!("{extent} {checked} keys under {prefix}: each has an expiry"))
    } else {
        let shown: Vec<String> =
            without_ttl.iter().take(MAX_SHOWN_KEYS).map(|key| printable(key)).collect();
        let message = format!(
            "{} of {extent} {checked} keys under {prefix}: have no expiry: {}{}",
            without_ttl.len(),
            shown.join(", "),
            if without_ttl.len() > MAX_SHOWN_KEYS { ", …" } else { "" }
        );
        let advice = "tidegate never writes such keys: find out which program does, delete \
                          them, or choose another store.prefix";
        Finding::error(CHECK, message).advice(advice)
    });
    largest_log
}

/// Returns the next cursor and the keys of a SCAN reply.
fn parse_scan(reply: Reply) -> Option<(String, Vec<String>)> {
    let Reply::List(parts) = reply else { return None };
    let [Reply::Text(cursor), Reply::List(keys)] = <[Reply; 2]>::try_from(parts).ok()? else {
        return None;
    };
    let text = |key| if let Reply::Text(text) = key { Some(text) } else { None };
    Some((cursor, keys.into_iter().filter_map(text).collect()))
}

/// Escapes a text for a pattern that matches exactly this text.
pub(super) fn escape_pattern(text: &str) -> String {
    let mut pattern = String::with_capacity(text.len());
    for character in text.chars() {
        if "*?[\\".contains(character) {
            pattern.push('\\');
        }
        pattern.push(character);
    }
    pattern
}

/// Returns a key for a terminal: shortened, and with control characters escaped, because clients
/// choose parts of keys.
fn printable(key: &str) -> String {
    let shown: String = key.chars().take(MAX_SHOWN_CHARS).collect();
    format!("\"{}\"{}", shown.escape_debug(), if shown.len() < key.len() { "…" } else { "" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wildcards_in_a_prefix_are_escaped() {
        assert_eq!(escape_pattern("rate_limit"), "rate_limit");
        assert_eq!(escape_pattern("a*b?[c]\\"), "a\\*b\\?\\[c]\\\\");
    }

    #[test]
    fn control_characters_in_keys_are_escaped() {
        assert_eq!(printable("a\u{1b}[31m\"b"), r#""a\u{1b}[31m\"b""#);
        assert_eq!(printable(&"é".repeat(101)), format!("\"{}\"…", "é".repeat(100)));
    }
}
