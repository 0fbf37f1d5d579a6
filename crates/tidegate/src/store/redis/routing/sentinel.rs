//! Sentinel topology: the current primary, as the sentinels report it. One task polls each
//! sentinel, so a sentinel that hangs does not delay the others.
//!
//! Sentinels learn of a failover at different times; the one with the highest configuration epoch
//! is the most current. Even that one checks the server it promotes only once a second, so we check
//! the replicas ourselves while the sentinels agree that the primary is down.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::task::JoinHandle;
use tokio::time::sleep;

use super::{Routes, TopologyState};
use crate::store::redis::client::NodeClient;
use crate::store::redis::client::connection::{Address, is_primary_role, query_once};
use crate::store::redis::client::error::{AttemptError, NodeError};
use crate::store::redis::client::resp::{Command, Value};

/// Report of one sentinel.
struct SentinelReply {
    primary: Address,
    epoch: u64,
    /// Whether a quorum of sentinels agrees that the primary is down.
    down: bool,
}

/// Combined reports of all sentinels.
#[derive(Default)]
struct SentinelView {
    elected: Mutex<Option<ElectedPrimary>>,
    /// Number of sentinels whose first poll failed.
    failed: AtomicUsize,
}

struct ElectedPrimary {
    primary: Address,
    epoch: u64,
    /// Time at which the primary was last connected.
    last_healthy: Instant,
}

const POLL_INTERVAL: Duration = Duration::from_millis(250);
const MIN_POLL_INTERVAL: Duration = Duration::from_millis(25);
const QUERY_TIMEOUT: Duration = Duration::from_millis(300);
/// Outage of the primary after which a report with an older epoch is accepted: the sentinels may
/// have been reset.
const OLDER_EPOCH_TIMEOUT: Duration = Duration::from_secs(2);

/// Starts a polling task for each sentinel.
pub(crate) fn follow(topology: &Arc<TopologyState>, name: &str) -> Vec<JoinHandle<()>> {
    let view = Arc::new(SentinelView::default());
    let spawn_poller = |sentinel: &Arc<NodeClient>| {
        tokio::spawn(poll(
            Arc::clone(topology),
            Arc::clone(&view),
            Arc::clone(sentinel),
            name.to_owned(),
        ))
    };
    topology.sentinels.iter().map(spawn_poller).collect()
}

async fn poll(
    topology: Arc<TopologyState>,
    view: Arc<SentinelView>,
    sentinel: Arc<NodeClient>,
    name: String,
) {
    let mut refresh = topology.refresh.listener();
    let mut first = true;
    loop {
        let polled_at = Instant::now();
        match query(&sentinel, &name).await {
            Ok(reply) => {
                view.update(&topology, reply.primary, reply.epoch);
                if reply.down
                    && let Some(promoted) = find_promoted(&topology, &sentinel, &name).await
                {
                    view.update(&topology, promoted, reply.epoch + 1);
                }
            }
            Err(error) if std::mem::take(&mut first) => {
                let failed = view.failed.fetch_add(1, Ordering::Relaxed) + 1;
                // Another sentinel may know the primary: one that was just started may not.
                if failed == topology.sentinels.len() {
                    topology.finish_discovery(Err(error));
                }
            }
            Err(_) => {}
        }
        first = false;
        refresh.wait_timeout(POLL_INTERVAL).await;
        sleep(MIN_POLL_INTERVAL.saturating_sub(polled_at.elapsed())).await;
    }
}

async fn query(sentinel: &NodeClient, name: &str) -> Result<SentinelReply, NodeError> {
    sentinel.ready().await?;
    // One pipeline, so that both replies are consistent. During a failover only the first command
    // returns the new primary.
    let ask = |question: &str| Command::new("SENTINEL").arg(question).arg(name);
    let pipeline = [ask("GET-MASTER-ADDR-BY-NAME"), ask("MASTER")];
    let replies = sentinel.query_all(&pipeline, Instant::now() + QUERY_TIMEOUT).await;
    let replies = replies.map_err(|error| match error {
        AttemptError::Down(error) | AttemptError::Lost(error) => error,
        other => {
            let reason = other.into_store_error(QUERY_TIMEOUT).to_string();
            NodeError::new(sentinel.address(), &reason)
        }
    })?;
    let [primary, details] = replies.as_slice() else {
        return Err(NodeError::new(sentinel.address(), "no answer"));
    };
    let misconfigured = |reason: &str| Err(NodeError::misconfigured(sentinel.address(), reason));
    let address = match primary {
        Value::Array(parts) if parts.len() == 2 => {
            parts[0].text().zip(parts[1].text().and_then(|port| port.parse().ok()))
        }
        Value::Array(_) | Value::Nil => None,
        Value::Error(error) => {
            let reason = format!("the server does not answer like a sentinel: {error}");
            return misconfigured(&reason);
        }
        _ => return misconfigured("the server does not answer like a sentinel"),
    };
    let Some((host, port)) = address else {
        return misconfigured(&format!("this sentinel knows no primary named {name:?}"));
    };
    let epoch = details.field("config-epoch").and_then(|epoch| epoch.parse().ok()).unwrap_or(0);
    let flags = details.field("flags").unwrap_or_default();
    let down = flags.split(',').any(|flag| flag == "o_down");
    Ok(SentinelReply { primary: Address::tcp(host, port), epoch, down })
}

/// Returns the replica that is being promoted: the one that already reports to be a primary.
async fn find_promoted(
    topology: &TopologyState,
    sentinel: &NodeClient,
    name: &str,
) -> Option<Address> {
    let replicas = sentinel
        .query(Command::new("SENTINEL").arg("REPLICAS").arg(name), Instant::now() + QUERY_TIMEOUT)
        .await
        .ok()?;
    let Value::Array(replicas) = replicas else { return None };
    for replica in &replicas {
        let port = replica.field("port").and_then(|port| port.parse().ok());
        let Some((host, port)) = replica.field("ip").zip(port) else { continue };
        let address = Address::tcp(host, port);
        let role =
            query_once(&address, &topology.options(), Command::new("ROLE"), QUERY_TIMEOUT).await;
        if role.is_ok_and(|role| is_primary_role(&role)) {
            return Some(address);
        }
    }
    None
}

impl SentinelView {
    /// Applies a report: switches to its primary if the report is newer, or if the current primary
    /// was demoted or has been down for [`OLDER_EPOCH_TIMEOUT`].
    fn update(&self, topology: &TopologyState, primary: Address, epoch: u64) {
        let mut elected = self.elected.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(current) = &mut *elected {
            let now = Instant::now();
            let primaries = topology.primaries();
            // A manual change of roles does not increase the epoch.
            let demoted = primaries.iter().all(|node| node.is_demoted());
            if !demoted && primaries.iter().any(|node| node.is_up()) {
                current.last_healthy = now;
            }
            let newer = demoted || epoch > current.epoch;
            current.epoch = current.epoch.max(if current.primary == primary { epoch } else { 0 });
            let is_down = now - current.last_healthy >= OLDER_EPOCH_TIMEOUT;
            if current.primary == primary || !(newer || is_down) {
                return;
            }
            tracing::info!(from = %current.primary, to = %primary, "failover to a new primary");
        }
        let node = topology.node_at(&primary);
        topology.set_routes(Routes::One(Arc::clone(&node)));
        // No further write may reach the old primary.
        topology.retire_all_but(&node);
        *elected = Some(ElectedPrimary { primary, epoch, last_healthy: Instant::now() });
        topology.finish_discovery(Ok(()));
    }
}
