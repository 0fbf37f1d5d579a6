//! Checks the replicas of a primary, and the effects of a failover to one of them.

use tidegate::store::redis::Reply;

use super::clock::Clocks;
use super::info::{Info, Replica};
use super::{Finding, NodeUnderTest, Report, Role, Topology};

/// Maximum lag in seconds. A replica acknowledges once per second.
const MAX_LAG: u64 = 10;
/// Maximum number of replicas per primary that are checked.
const MAX_REPLICAS: usize = 16;

pub(super) async fn check(primary: &NodeUnderTest<'_>, clocks: &mut Clocks, report: &mut Report) {
    if primary.info.is_empty() {
        return primary.add_unknown(report, "replicas", "INFO");
    }
    let replicas = primary.info.replicas();
    check_lag(primary, &replicas, report);
    for replica in replicas.iter().take(MAX_REPLICAS) {
        check_replica(primary, replica, clocks, report).await;
    }
    check_split_brain(primary, &replicas, report).await;
}

fn check_lag(primary: &NodeUnderTest<'_>, replicas: &[Replica], report: &mut Report) {
    if replicas.is_empty() {
        let message = "no replica: while this server is down, on_store_failure applies, and after \
                       a restart without data all counters start from zero";
        return primary.add(report, Finding::note("replicas", message));
    }
    let behind = replicas.iter().filter(|replica| !replica.online || replica.lag > MAX_LAG);
    let behind: Vec<&str> = behind.map(|replica| replica.address.as_str()).collect();
    let lag = replicas.iter().map(|replica| replica.lag).max().unwrap_or(0);
    let count = replicas.len();
    primary.add(
        report,
        if behind.is_empty() {
            Finding::ok("replicas", format!("{count} connected, maximum lag {lag} s"))
        } else {
            let message = format!(
                "{} of {count} not in sync, so a failover to one of them loses counts: {}",
                behind.len(),
                behind.join(", ")
            );
            Finding::warning("replicas", message)
                .advice("check its log and the network between them")
        },
    );
}

/// Checks a replica as a future primary: it must be reachable from here and configured alike.
async fn check_replica(
    primary: &NodeUnderTest<'_>,
    replica: &Replica,
    clocks: &mut Clocks,
    report: &mut Report,
) {
    let node = report.node(&replica.address, Role::Replica);
    let info = match primary.store.ask_node(&replica.address, &["INFO"]).await {
        Ok(Reply::Text(text)) => Info::parse(&text),
        // The replica is reachable, but INFO is not permitted.
        Ok(_) => return,
        Err(error) if error.to_string().contains("NOPERM") => return,
        Err(error) => {
            let message = format!(
                "this replica is not reachable from here, so clients could not follow a failover \
                 to it: {error}"
            );
            let finding = match primary.topology {
                Topology::Single => Finding::note("replicas", message),
                Topology::Sentinel | Topology::Cluster => Finding::warning("replicas", message),
            };
            let advice = "allow connections to it, with the same user and password; see \
                          replica-announce-ip and cluster-announce-ip";
            return report.add(finding.advice(advice).on(&replica.address));
        }
    };
    node.version = info.server();
    let replica = NodeUnderTest {
        store: primary.store,
        address: &replica.address,
        info,
        topology: primary.topology,
    };
    if let Some(policy) =
        replica.info.text("maxmemory_policy").filter(|policy| *policy != "noeviction")
    {
        let message = format!(
            "maxmemory-policy is {policy} on this replica: after a failover to it, a flood of new \
             keys resets limits"
        );
        let advice = "CONFIG SET maxmemory-policy noeviction (and in its redis.conf)";
        replica.add(report, Finding::warning("eviction-policy", message).advice(advice));
    }
    clocks.measure(&replica, report).await;
}

/// Checks `min-replicas-to-write`: without it, an isolated primary keeps allowing requests next to
/// the new one.
async fn check_split_brain(primary: &NodeUnderTest<'_>, replicas: &[Replica], report: &mut Report) {
    const CHECK: &str = "min-replicas-to-write";
    let Some(required) = primary.setting(CHECK).await.and_then(|value| value.parse::<usize>().ok())
    else {
        return primary.add_unknown(report, CHECK, "CONFIG GET");
    };
    let max_lag = primary.setting("min-replicas-max-lag").await.unwrap_or_else(|| "10".to_owned());
    // A maximum lag of 0 disables the requirement.
    let required = if max_lag == "0" { 0 } else { required };
    let online = replicas.iter().filter(|replica| replica.online).count();
    let finding = if required > online {
        let message = format!(
            "it requires {required} replicas and has {online}: it rejects every write, so \
             decisions fail"
        );
        let advice = format!("connect replicas, or CONFIG SET {CHECK} {online}");
        Finding::error(CHECK, message).advice(advice)
    } else if required > 0 {
        let message = format!(
            "{required}: without its replicas, the primary stops allowing requests after \
             {max_lag} s"
        );
        Finding::ok(CHECK, message)
    } else if replicas.is_empty() {
        Finding::ok(CHECK, "0, and it has no replica")
    } else {
        split_brain_finding(primary, CHECK).await
    };
    primary.add(report, finding);
}

/// Describes the risk of a primary with replicas that does not require them for writes.
async fn split_brain_finding(primary: &NodeUnderTest<'_>, check: &'static str) -> Finding {
    let finding = match primary.topology {
        Topology::Sentinel => {
            let message = "0: a primary that loses the sentinels keeps allowing requests of \
                           clients that still reach it, next to the new primary: up to twice each \
                           limit";
            Finding::warning(check, message)
        }
        Topology::Cluster => {
            let node_timeout =
                primary.setting("cluster-node-timeout").await.unwrap_or_else(|| "15000".to_owned());
            let message = format!(
                "0: a primary that loses the cluster keeps allowing requests next to the new \
                 primary for cluster-node-timeout, {node_timeout} ms"
            );
            Finding::note(check, message)
        }
        Topology::Single => {
            let message =
                "0: if a replica is promoted while this server still runs, both allow requests";
            Finding::note(check, message)
        }
    };
    finding.advice(format!(
        "CONFIG SET {check} 1 (and in redis.conf), if the loss of a replica may stop decisions by \
         Redis"
    ))
}
