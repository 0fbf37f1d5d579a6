//! Checks the replicas of a primary, and the effects of a failover to one of them.

use tidegate::StoreError;
use tidegate::store::redis::Reply;

use super::clock::Clocks;
use super::{Finding, NodeRole, NodeUnderTest, acl, cluster, connection, read_info, sentinels};
use crate::tool::redis_info::Replica;
use tidegate_config::RedisTopology;

/// Maximum lag in seconds. A replica acknowledges once per second.
const MAX_LAG: u64 = 10;
/// Maximum number of replicas per primary that are checked.
const MAX_REPLICAS: usize = 16;

pub(super) async fn check(primary: &mut NodeUnderTest<'_>, clocks: &mut Clocks) {
    let addresses = if primary.info.is_empty() {
        primary.add_unknown("replicas", "INFO");
        reported_replicas(primary).await
    } else {
        let replicas = primary.info.replicas();
        check_lag(primary, &replicas);
        check_split_brain(primary, &replicas).await;
        replicas.into_iter().map(|replica| replica.address).collect()
    };
    for address in addresses.iter().take(MAX_REPLICAS) {
        check_replica(primary, address, clocks).await;
    }
}

/// Returns the replicas that the cluster or the sentinels report to a user who may not run INFO.
async fn reported_replicas(primary: &NodeUnderTest<'_>) -> Vec<String> {
    let (store, address) = (primary.store, primary.address);
    match (primary.topology, primary.options.sentinel_master) {
        (RedisTopology::Cluster, _) => {
            let slots = store.ask_node(address, &["CLUSTER", "SLOTS"]).await;
            slots.map_or_else(|_| Vec::new(), |slots| cluster::replicas_of(address, &slots))
        }
        (RedisTopology::Sentinel, Some(master)) => {
            for sentinel in store.nodes().iter().filter(|node| !node.primary && node.connected) {
                let replicas = ["SENTINEL", "REPLICAS", master];
                if let Ok(Reply::List(replicas)) =
                    store.ask_node(&sentinel.address, &replicas).await
                {
                    return replicas.iter().filter_map(sentinels::address_of).collect();
                }
            }
            Vec::new()
        }
        (RedisTopology::Single | RedisTopology::Sentinel, _) => Vec::new(),
    }
}

fn check_lag(primary: &mut NodeUnderTest<'_>, replicas: &[Replica]) {
    if replicas.is_empty() {
        let message = "no replica: while this server is down, on_store_failure applies, and after \
                       a restart without data all counters start from zero";
        return primary.add(Finding::note("replicas", message));
    }
    let behind = replicas.iter().filter(|replica| !replica.online || replica.lag > MAX_LAG);
    let behind: Vec<&str> = behind.map(|replica| replica.address.as_str()).collect();
    let lag = replicas.iter().map(|replica| replica.lag).max().unwrap_or(0);
    let count = replicas.len();
    primary.add(if behind.is_empty() {
        Finding::ok("replicas", format!("{count} connected, maximum lag {lag} s"))
    } else {
        let message = format!(
            "{} of {count} not in sync, so a failover to one of them loses counts: {}",
            behind.len(),
            behind.join(", ")
        );
        Finding::warning("replicas", message).advice("check its log and the network between them")
    });
}

/// Checks a replica as a future primary: it must be reachable from here and configured in the same way.
async fn check_replica(primary: &mut NodeUnderTest<'_>, address: &str, clocks: &mut Clocks) {
    let NodeUnderTest { store, topology, options, .. } = *primary;
    let node = primary.report.node(address, NodeRole::Replica);
    let info = match read_info(store, address).await {
        Ok(info) => info,
        Err(error) => {
            let finding = unreachable_finding(primary, &error);
            return primary.report.add(finding.on(address));
        }
    };
    node.version = info.server();
    let report = &mut *primary.report;
    let mut replica = NodeUnderTest::new(store, address, info, topology, options, report).await;
    if let Some(policy) =
        replica.info.text("maxmemory_policy").filter(|policy| *policy != "noeviction")
    {
        let message = format!(
            "maxmemory-policy is {policy} on this replica: after a failover to it, a flood of new \
             keys resets limits"
        );
        let advice = replica.set_advice("maxmemory-policy noeviction");
        replica.add(Finding::warning("eviction-policy", message).advice(advice));
    }
    acl::check_replica(&mut replica).await;
    clocks.measure(&mut replica).await;
}

/// Describes a replica that clients could not use after a failover to it.
fn unreachable_finding(primary: &NodeUnderTest<'_>, error: &StoreError) -> Finding {
    if error.to_string().contains("WRONGPASS") {
        return acl::unknown_user(primary.options.prefix, primary.topology);
    }
    let message = format!(
        "this replica is not reachable from here, so clients could not follow a failover to it: \
         {error}"
    );
    let advice =
        connection::finding(error).and_then(|finding| finding.advice).unwrap_or_else(|| {
            "allow connections to it, with the same user and password; see replica-announce-ip and \
         cluster-announce-ip"
                .to_owned()
        });
    match primary.topology {
        RedisTopology::Single => Finding::note("replicas", message),
        RedisTopology::Sentinel | RedisTopology::Cluster => Finding::warning("replicas", message),
    }
    .advice(advice)
}

/// Checks `min-replicas-to-write`: without it, an isolated primary keeps allowing requests next to
/// the new one.
async fn check_split_brain(primary: &mut NodeUnderTest<'_>, replicas: &[Replica]) {
    const CHECK: &str = "min-replicas-to-write";
    let Some(required) = primary.setting(CHECK).await.and_then(|value| value.parse::<usize>().ok())
    else {
        return primary.add(primary.unknown_setting(CHECK));
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
    primary.add(finding);
}

/// Describes the risk of a primary with replicas that does not require them for writes.
async fn split_brain_finding(primary: &NodeUnderTest<'_>, check: &'static str) -> Finding {
    let finding = match primary.topology {
        RedisTopology::Sentinel => {
            let message = "0: a primary that loses the sentinels keeps allowing requests of \
                           clients that still reach it, next to the new primary: up to twice each \
                           limit";
            Finding::warning(check, message)
        }
        RedisTopology::Cluster => {
            let node_timeout =
                primary.setting("cluster-node-timeout").await.unwrap_or_else(|| "15000".to_owned());
            let message = format!(
                "0: a primary that loses the cluster keeps allowing requests next to the new \
                 primary for cluster-node-timeout, {node_timeout} ms"
            );
            Finding::note(check, message)
        }
        RedisTopology::Single => {
            let message =
                "0: if a replica is promoted while this server still runs, both allow requests";
            Finding::note(check, message)
        }
    };
    finding.advice(format!(
        "{}, if the loss of a replica may stop decisions by Redis",
        primary.set_advice(&format!("{check} 1"))
    ))
}
