//! Who would take a primary's place, and what is lost when that happens.

use tidegate::store::redis::Reply;

use super::clock::Clocks;
use super::info::{Info, Replica};
use super::{Finding, Kind, Report, Role, Subject};

/// Seconds. A replica reports once a second.
const LONG_LAG: u64 = 10;
/// The most replicas of one primary that are looked at.
const MOST: usize = 16;

pub(super) async fn check(subject: &Subject<'_>, clocks: &mut Clocks, report: &mut Report) {
    if subject.info.is_empty() {
        return subject.unknown(report, "replicas", "INFO");
    }
    let replicas = subject.info.replicas();
    connected(subject, &replicas, report);
    for replica in replicas.iter().take(MOST) {
        reachable(subject, replica, clocks, report).await;
    }
    split_brain(subject, &replicas, report).await;
}

fn connected(subject: &Subject<'_>, replicas: &[Replica], report: &mut Report) {
    if replicas.is_empty() {
        let message = "no replica: while this server is away, decisions come from on_store_failure, and a server that \
                       comes back empty starts every count anew";
        return subject.found(report, Finding::note("replicas", message));
    }
    let behind = replicas.iter().filter(|replica| !replica.online || replica.lag > LONG_LAG);
    let behind: Vec<&str> = behind.map(|replica| replica.address.as_str()).collect();
    let lag = replicas.iter().map(|replica| replica.lag).max().unwrap_or(0);
    let count = replicas.len();
    subject.found(
        report,
        if behind.is_empty() {
            Finding::ok("replicas", format!("{count} connected, last heard of {lag} s ago at most"))
        } else {
            let message = format!(
                "{} of {count} not in step: a failover to one loses counts: {}",
                behind.len(),
                behind.join(", ")
            );
            Finding::warning("replicas", message)
                .advice("look at its log and at the network between them")
        },
    );
}

/// It is to take over: then it has to be reached from here, and must be as fit.
async fn reachable(
    subject: &Subject<'_>,
    replica: &Replica,
    clocks: &mut Clocks,
    report: &mut Report,
) {
    let node = report.node(&replica.address, Role::Replica);
    let info = match subject.store.ask_node(&replica.address, &["INFO"]).await {
        Ok(Reply::Text(text)) => Info::parse(&text),
        // It answers; it just does not tell.
        Ok(_) => return,
        Err(error) if error.to_string().contains("NOPERM") => return,
        Err(error) => {
            let message = format!(
                "this replica cannot be asked from here, so a failover to it would not be followed: {error}"
            );
            let finding = match subject.kind {
                Kind::Single => Finding::note("replicas", message),
                Kind::Sentinel | Kind::Cluster => Finding::warning("replicas", message),
            };
            let advice = "open the way to it; same user and password; see replica-announce-ip and cluster-announce-ip";
            return report.add(finding.advice(advice).on(&replica.address));
        }
    };
    node.version = info.server();
    let replica =
        Subject { store: subject.store, address: &replica.address, info, kind: subject.kind };
    if let Some(policy) =
        replica.info.text("maxmemory_policy").filter(|policy| *policy != "noeviction")
    {
        let message = format!(
            "maxmemory-policy is {policy} on this replica: once it is the primary, a flood of new keys resets limits"
        );
        let advice = "CONFIG SET maxmemory-policy noeviction (and in its redis.conf)";
        replica.found(report, Finding::warning("eviction-policy", message).advice(advice));
    }
    clocks.look(&replica, report).await;
}

/// A primary that is cut off from its replicas goes on granting, while another takes its place.
async fn split_brain(subject: &Subject<'_>, replicas: &[Replica], report: &mut Report) {
    const CHECK: &str = "min-replicas-to-write";
    let Some(wanted) = subject.setting(CHECK).await.and_then(|value| value.parse::<usize>().ok())
    else {
        return subject.unknown(report, CHECK, "CONFIG GET");
    };
    let lag = subject.setting("min-replicas-max-lag").await.unwrap_or_else(|| "10".to_owned());
    // So it is switched off, too.
    let wanted = if lag == "0" { 0 } else { wanted };
    let in_step = replicas.iter().filter(|replica| replica.online).count();
    subject.found(
        report,
        if wanted > in_step {
            let message =
                format!("it asks for {wanted} replicas and has {in_step}: it refuses every write, and cannot decide");
            Finding::error(CHECK, message).advice(format!("connect replicas, or CONFIG SET {CHECK} {in_step}"))
        } else if wanted > 0 {
            Finding::ok(CHECK, format!("{wanted}: cut off from its replicas, it stops granting after {lag} s"))
        } else if replicas.is_empty() {
            Finding::ok(CHECK, "0, as it has no replica")
        } else {
            let advice =
                format!("CONFIG SET {CHECK} 1 (and in redis.conf), if a lost replica may stop decisions by Redis");
            match subject.kind {
                Kind::Sentinel => {
                    let message = "0: a primary that is cut off from the sentinels goes on granting to those who still \
                                   reach it, for as long as that lasts, beside the new one: up to twice each limit";
                    Finding::warning(CHECK, message).advice(advice)
                }
                Kind::Cluster => {
                    let node_timeout =
                        subject.setting("cluster-node-timeout").await.unwrap_or_else(|| "15000".to_owned());
                    let message = format!(
                        "0: a primary that is cut off from the cluster goes on granting beside the new one for \
                         cluster-node-timeout, {node_timeout} ms"
                    );
                    Finding::note(CHECK, message).advice(advice)
                }
                Kind::Single => {
                    let message = "0: if a replica is promoted while this server still runs, both grant";
                    Finding::note(CHECK, message).advice(advice)
                }
            }
        },
    );
}
