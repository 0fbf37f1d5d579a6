//! What happens when memory gets short, and when it is written to disk.

use super::info::bytes;
use super::{Finding, Report, Subject};

/// Of `maxmemory`, or of the machine's memory, in percent.
const NEARLY_FULL: u64 = 80;

pub(super) async fn check(subject: &Subject<'_>, report: &mut Report) {
    if subject.info.is_empty() {
        subject.unknown(report, "eviction-policy", "INFO");
        return;
    }
    eviction(subject, report);
    room(subject, report);
    lazy_freeing(subject, report).await;
    persistence(subject, report).await;
}

fn eviction(subject: &Subject<'_>, report: &mut Report) {
    let Some(policy) = subject.info.text("maxmemory_policy") else {
        return subject.unknown(report, "eviction-policy", "INFO");
    };
    if policy == "noeviction" {
        return subject.found(report, Finding::ok("eviction-policy", policy));
    }
    let evicted = match subject.info.number("evicted_keys") {
        Some(count) if count > 0 => format!("; it has evicted {count} keys so far"),
        _ => String::new(),
    };
    let message = format!(
        "maxmemory-policy is {policy}: a flood of new keys would evict counts, which resets limits{evicted}"
    );
    let advice = "CONFIG SET maxmemory-policy noeviction (and in redis.conf): then a full Redis is a store failure, which \
                  on_store_failure decides";
    subject.found(report, Finding::warning("eviction-policy", message).advice(advice));
}

fn room(subject: &Subject<'_>, report: &mut Report) {
    let info = &subject.info;
    let Some(used) = info.number("used_memory") else {
        return subject.unknown(report, "memory", "INFO");
    };
    let most = info.number("maxmemory").filter(|most| *most > 0);
    let machine = info.number("total_system_memory").filter(|machine| *machine > 0);
    let nearly_full = |of: u64| used / NEARLY_FULL >= of / 100;
    subject.found(
        report,
        match (most, machine) {
            (Some(most), _) => {
                let message = format!("{} of {} (maxmemory) are used", bytes(used), bytes(most));
                if nearly_full(most) {
                    Finding::warning("memory", message).advice("raise maxmemory, or add shards")
                } else {
                    Finding::ok("memory", message)
                }
            }
            (None, Some(machine)) if nearly_full(machine) => {
                let message = format!("{} of the machine's {} are used", bytes(used), bytes(machine));
                Finding::warning("memory", message)
                    .advice("add memory or shards, and set maxmemory below what there is")
            }
            (None, _) => {
                let message = format!(
                    "{} are used, and maxmemory is not set: the system may end Redis when memory runs out",
                    bytes(used)
                );
                Finding::note("memory", message).advice("set maxmemory below what the machine has")
            }
        },
    );
}

/// A large sorted set that expires is freed at once unless Redis is configured to free it in the
/// background.
async fn lazy_freeing(subject: &Subject<'_>, report: &mut Report) {
    let finding = match subject.setting("lazyfree-lazy-expire").await.as_deref() {
        Some("yes") => Finding::ok("lazy-freeing", "expired keys are freed in the background"),
        Some(_) => {
            let message = "lazyfree-lazy-expire is off: a sliding-log of 100,000 requests that expires as a sorted set holds \
                           up other clients for some 20 ms";
            let advice = "CONFIG SET lazyfree-lazy-expire yes (and in redis.conf), or encoding: packed for limits beyond 5,000";
            Finding::note("lazy-freeing", message).advice(advice)
        }
        None => return,
    };
    subject.found(report, finding);
}

async fn persistence(subject: &Subject<'_>, report: &mut Report) {
    let info = &subject.info;
    let failed = |name| info.text(name).is_some_and(|status| status != "ok");
    if failed("rdb_last_bgsave_status") || failed("aof_last_write_status") {
        let message = "its last write to disk failed: by default it then refuses every write, and cannot decide";
        let advice = "make room on its disk, or switch persistence off: counts do not need it";
        return subject.found(report, Finding::warning("persistence", message).advice(advice));
    }
    let log = info.number("aof_enabled") == Some(1);
    let snapshots = subject.setting("save").await.map(|save| !save.is_empty());
    subject.found(
        report,
        match (log, snapshots) {
            (false, Some(false)) => Finding::ok("persistence", "off, and counts do not need it"),
            (false, None) => {
                Finding::ok("persistence", "no append-only file, and counts do not need one")
            }
            (log, _) => {
                let what = if log { "an append-only file" } else { "snapshots" };
                let message =
                    format!("it writes {what}: counts do not need it, and each fork costs latency");
                Finding::note("persistence", message)
            }
        },
    );
}
