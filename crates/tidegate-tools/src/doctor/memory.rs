//! Checks eviction, memory usage and persistence.

use super::{Finding, NodeUnderTest};

/// Share of `maxmemory`, or of the machine's memory, that causes a warning, in percent.
const MAX_USED_PERCENT: u64 = 80;
/// Requests in a sorted set from which on its removal is noticeable.
const LARGE_LOG: u64 = 5_000;
/// Requests of a sorted set that Redis frees per millisecond.
const FREED_PER_MS: u64 = 6_000;

pub(super) async fn check(node: &mut NodeUnderTest<'_>) {
    if node.info.is_empty() {
        node.add_unknown("eviction-policy", "INFO");
        return;
    }
    check_eviction(node);
    check_usage(node);
    check_persistence(node).await;
}

fn check_eviction(node: &mut NodeUnderTest<'_>) {
    let Some(policy) = node.info.text("maxmemory_policy") else {
        let message = "unknown: INFO of this server has no maxmemory_policy";
        return node.add(Finding::note("eviction-policy", message));
    };
    if policy == "noeviction" {
        return node.add(Finding::ok("eviction-policy", policy));
    }
    let evicted = match node.info.number("evicted_keys") {
        Some(count) if count > 0 => format!("; it has evicted {count} keys so far"),
        _ => String::new(),
    };
    let message = format!(
        "maxmemory-policy is {policy}: a flood of new keys would evict counters, which resets \
         limits{evicted}"
    );
    let message = match node.options.long_period() {
        Some(period) => format!("{message}; the limit of {period} then starts again in between"),
        None => message,
    };
    let advice = format!(
        "{}: a full Redis is then a store failure, for which on_store_failure applies",
        node.set_advice("maxmemory-policy noeviction")
    );
    node.add(Finding::warning("eviction-policy", message).advice(advice));
}

fn check_usage(node: &mut NodeUnderTest<'_>) {
    let Some(used) = node.info.number("used_memory") else {
        return node.add_unknown("memory", "INFO");
    };
    let maxmemory = node.info.number("maxmemory").filter(|bytes| *bytes > 0);
    let machine = node.info.number("total_system_memory").filter(|bytes| *bytes > 0);
    let is_nearly_full = |total: u64| used / MAX_USED_PERCENT >= total / 100;
    let finding = match (maxmemory, machine) {
        (Some(maxmemory), _) => {
            let message = format!("{} of {} (maxmemory) are used", bytes(used), bytes(maxmemory));
            if is_nearly_full(maxmemory) {
                Finding::warning("memory", message).advice("raise maxmemory, or add shards")
            } else {
                Finding::ok("memory", message)
            }
        }
        (None, Some(machine)) if is_nearly_full(machine) => {
            let message = format!("{} of the machine's {} are used", bytes(used), bytes(machine));
            Finding::warning("memory", message)
                .advice("add memory or shards, and set maxmemory below the machine's memory")
        }
        (None, _) => {
            let message = format!(
                "{} are used, and maxmemory is not set: the system may kill Redis when memory \
                 runs out",
                bytes(used)
            );
            Finding::note("memory", message).advice("set maxmemory below the machine's memory")
        }
    };
    node.add(finding);
}

/// Checks whether Redis frees expired keys in the background. Freeing a large sorted set blocks
/// other clients otherwise. `largest_log` is the number of requests in the largest one.
pub(super) async fn check_lazy_freeing(node: &mut NodeUnderTest<'_>, largest_log: u64) {
    const CHECK: &str = "lazy-freeing";
    const OFF: &str = "lazyfree-lazy-expire is off";
    let is_large = largest_log > LARGE_LOG;
    let finding = match node.setting("lazyfree-lazy-expire").await.as_deref() {
        Some("yes") => Finding::ok(CHECK, "expired keys are freed in the background"),
        Some(_) => {
            let advice = format!(
                "{}, or encoding: packed for limits above {LARGE_LOG}",
                node.set_advice("lazyfree-lazy-expire yes")
            );
            let finding = if is_large {
                let message = format!(
                    "{OFF}: a sliding-log of {largest_log} requests that expires as a sorted set \
                     blocks other clients for about {} ms",
                    largest_log.div_ceil(FREED_PER_MS)
                );
                Finding::warning(CHECK, message)
            } else {
                let message = format!(
                    "{OFF}: a sliding-log of 100,000 requests that expires as a sorted set would \
                     block other clients for about {} ms; none above {LARGE_LOG} was found",
                    100_000_u64.div_ceil(FREED_PER_MS)
                );
                Finding::note(CHECK, message)
            };
            finding.advice(advice)
        }
        None if is_large => node.unknown_setting(CHECK),
        None => return,
    };
    node.add(finding);
}

async fn check_persistence(node: &mut NodeUnderTest<'_>) {
    let has_failed = |name| node.info.text(name).is_some_and(|status| status != "ok");
    if has_failed("rdb_last_bgsave_status") || has_failed("aof_last_write_status") {
        let message = "its last write to disk failed: by default it then rejects every write, so \
                       decisions fail";
        let advice = match node.options.long_period() {
            Some(_) => "free space on its disk",
            None => "free space on its disk, or switch persistence off: counters do not need it",
        };
        return node.add(Finding::warning("persistence", message).advice(advice));
    }
    let has_aof = node.info.number("aof_enabled") == Some(1);
    let has_snapshots = node.setting("save").await.map(|save| !save.is_empty());
    if let Some(period) = node.options.long_period() {
        let advice = "appendonly yes and appendfsync everysec keep all but the last second; replicas \
                      alone do not help if all of them restart";
        return node.add(match (has_aof, has_snapshots) {
            (true, _) => Finding::ok("persistence", "an append-only file"),
            (false, Some(true)) => {
                let message = format!(
                    "it writes snapshots only: after a restart, what was used of the limit of \
                     {period} since the last one is free again"
                );
                Finding::warning("persistence", message).advice(advice)
            }
            (false, _) => {
                let message = format!(
                    "no append-only file: after a restart, the whole limit of {period} is free again"
                );
                Finding::warning("persistence", message).advice(advice)
            }
        });
    }
    node.add(match (has_aof, has_snapshots) {
        (false, Some(false)) => Finding::ok("persistence", "off, and counters do not need it"),
        (false, None) => {
            Finding::ok("persistence", "no append-only file, and counters do not need one")
        }
        (has_aof, _) => {
            let format = if has_aof { "an append-only file" } else { "snapshots" };
            let message =
                format!("it writes {format}: counters do not need it, and each fork costs latency");
            Finding::note("persistence", message)
        }
    });
}

/// Formats a number of bytes in readable form.
fn bytes(count: u64) -> String {
    let mut size = (count, "B");
    for unit in ["KiB", "MiB", "GiB", "TiB"] {
        if size.0 < 10 * 1_024 {
            break;
        }
        size = (size.0 / 1_024, unit);
    }
    format!("{} {}", size.0, size.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_readable() {
        assert_eq!([0, 9_999, 20_480, 3 << 30].map(bytes), ["0 B", "9999 B", "20 KiB", "3072 MiB"]);
    }
}
