//! Cluster topology: the owner of each slot, read from its nodes by `CLUSTER SLOTS`.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::time::sleep;

use super::TopologyState;
use super::slots::SlotMap;
use crate::store::redis::client::NodeClient;
use crate::store::redis::client::connection::{Address, query_once};
use crate::store::redis::client::error::{AttemptError, NodeError, ServerError};
use crate::store::redis::client::resp::{Command, Value};

/// Parsed reply of `CLUSTER SLOTS`.
struct ClusterSlots {
    /// First slot, last slot, owner.
    ranges: Vec<(u16, u16, Address)>,
    replicas: Vec<Address>,
    /// Host names that the nodes announce, by address.
    names: Vec<(Address, String)>,
}

/// Node in a reply of `CLUSTER SLOTS`.
struct ReportedNode {
    address: Address,
    /// Announced host name.
    name: Option<String>,
    /// Address under which other commands may report the node.
    ip: Option<Address>,
}

/// Timeout of `CLUSTER SLOTS` on one node.
const QUERY_TIMEOUT: Duration = Duration::from_millis(300);
const REFRESH_INTERVAL: Duration = Duration::from_secs(5);
/// Refresh interval while a primary cannot be reached.
const DEGRADED_REFRESH_INTERVAL: Duration = Duration::from_millis(200);
/// Minimum interval between refreshes that calls trigger.
const MIN_REFRESH_INTERVAL: Duration = Duration::from_millis(50);

/// Keeps the slot map of a cluster current, starting from these nodes.
pub(crate) async fn follow(topology: Arc<TopologyState>, seeds: Vec<Address>) {
    let mut refresh = topology.refresh.listener();
    let mut other_nodes = seeds.clone();
    loop {
        let refreshed_at = Instant::now();
        match fetch_slots(&topology, &other_nodes).await {
            Ok(slots) => {
                // Before the nodes are connected.
                if let Some(tls) = &topology.options().tls {
                    tls.announce(slots.names.iter().cloned());
                }
                other_nodes = slots.replicas.iter().chain(&seeds).cloned().collect();
                let with_node = |(first, last, address)| (first, last, topology.node_at(&address));
                topology.refresh_slots(SlotMap::new(slots.ranges.into_iter().map(with_node)));
                topology.finish_discovery(Ok(()));
            }
            Err(error) => topology.finish_discovery(Err(error)),
        }
        topology.log_moves();
        let is_healthy =
            || topology.is_cluster() && topology.primaries().iter().all(|node| node.is_up());
        if topology.settings.heartbeat || !is_healthy() {
            let interval = if is_healthy() { REFRESH_INTERVAL } else { DEGRADED_REFRESH_INTERVAL };
            refresh.wait_timeout(interval).await;
        } else {
            refresh.wait().await;
        }
        sleep(MIN_REFRESH_INTERVAL.saturating_sub(refreshed_at.elapsed())).await;
        // While calls keep failing, they keep triggering refreshes.
        if !is_healthy() {
            sleep(DEGRADED_REFRESH_INTERVAL.saturating_sub(refreshed_at.elapsed())).await;
        }
    }
}

/// Checks whether a single server is a node of a cluster, and if so follows the cluster.
pub(crate) async fn detect_cluster(topology: Arc<TopologyState>, node: Arc<NodeClient>) {
    let mut refresh = topology.refresh.listener();
    loop {
        let is_cluster = match node.ready().await {
            Ok(()) => match node.query(cluster_slots(), Instant::now() + QUERY_TIMEOUT).await {
                Ok(Value::Array(_)) => Some(true),
                // Cluster mode is off, or the user may not run CLUSTER SLOTS; then the first MOVED
                // reply triggers another check.
                Ok(_) | Err(AttemptError::Server(ServerError::Other(_))) => Some(false),
                Err(_) => None,
            },
            Err(error) => {
                topology.finish_discovery(Err(error));
                None
            }
        };
        match is_cluster {
            Some(true) => return follow(topology, vec![node.address().clone()]).await,
            Some(false) => {
                topology.finish_discovery(Ok(()));
                refresh.wait().await;
                sleep(DEGRADED_REFRESH_INTERVAL).await;
            }
            None => sleep(DEGRADED_REFRESH_INTERVAL).await,
        }
    }
}

fn cluster_slots() -> Command {
    Command::new("CLUSTER").arg("SLOTS")
}

/// Fetches the slots from a connected primary, or else from any other known node.
async fn fetch_slots(
    topology: &TopologyState,
    other_nodes: &[Address],
) -> Result<ClusterSlots, NodeError> {
    let mut last_error =
        NodeError { reason: "no node of the cluster is known".to_owned(), misconfigured: false };
    let mut primaries = topology.primaries();
    if !primaries.is_empty() {
        // Rotate the primaries: one that is partitioned from the others reports a stale map.
        let rotation = usize::try_from(topology.redirects()).unwrap_or(0) + next_rotation();
        let count = primaries.len();
        primaries.rotate_left(rotation % count);
    }
    for node in primaries.iter().filter(|node| node.is_up()) {
        match node.query(cluster_slots(), Instant::now() + QUERY_TIMEOUT).await {
            Ok(reply) => match parse_slots(&reply, node.address()) {
                Some(slots) => return Ok(slots),
                None => last_error = NodeError::new(node.address(), NO_SLOTS),
            },
            Err(error) => {
                let reason = error.into_store_error(QUERY_TIMEOUT).to_string();
                last_error = NodeError::new(node.address(), &reason);
            }
        }
    }
    let timeout = QUERY_TIMEOUT.max(topology.timeout().min(Duration::from_secs(1)));
    for address in other_nodes {
        match query_once(address, &topology.options(), cluster_slots(), timeout).await {
            Ok(reply) => match parse_slots(&reply, address) {
                Some(slots) => return Ok(slots),
                None => last_error = NodeError::new(address, NO_SLOTS),
            },
            Err(error) => last_error = error,
        }
    }
    Err(last_error)
}

const NO_SLOTS: &str = "the cluster serves no slots yet";

/// Returns a number that grows with each call.
fn next_rotation() -> usize {
    static COUNT: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
    COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed)
}

/// Parses a reply of `CLUSTER SLOTS`. Each range has its first and last slot, its primary, and its
/// replicas. Returns `None` if no slot is served.
fn parse_slots(reply: &Value, asked: &Address) -> Option<ClusterSlots> {
    let Value::Array(ranges) = reply else { return None };
    let mut slots = ClusterSlots { ranges: Vec::new(), replicas: Vec::new(), names: Vec::new() };
    for range in ranges {
        let Value::Array(parts) = range else { return None };
        let [Value::Integer(first), Value::Integer(last), primary, replicas @ ..] =
            parts.as_slice()
        else {
            return None;
        };
        let (first, last) = (u16::try_from(*first).ok()?, u16::try_from(*last).ok()?);
        let primary = ReportedNode::parse(primary, asked)?;
        slots.ranges.push((first, last, primary.address.clone()));
        slots.add_name(primary);
        for replica in replicas.iter().filter_map(|replica| ReportedNode::parse(replica, asked)) {
            slots.replicas.push(replica.address.clone());
            slots.add_name(replica);
        }
    }
    (!slots.ranges.is_empty()).then_some(slots)
}

impl ClusterSlots {
    fn add_name(&mut self, node: ReportedNode) {
        let Some(name) = node.name else { return };
        self.names.extend(node.ip.map(|ip| (ip, name.clone())));
        self.names.push((node.address, name));
    }
}

impl ReportedNode {
    /// Parses a node: its preferred endpoint, its port, its id, and since Redis 7 the other
    /// endpoints by type. An endpoint may be a host name, an address, or unknown.
    fn parse(value: &Value, asked: &Address) -> Option<Self> {
        let Value::Array(parts) = value else { return None };
        let port = match parts.get(1)? {
            Value::Integer(port) => u16::try_from(*port).ok()?,
            _ => return None,
        };
        let preferred = parts.first()?.text().unwrap_or_default();
        let others = parts.get(3);
        let ip = others.and_then(|others| others.field("ip")).filter(|ip| !ip.is_empty());
        // `?` stands for a node without a host name, where these are preferred. An endpoint that is
        // null is on the host that was asked.
        let host = if preferred == "?" { ip.unwrap_or_default() } else { preferred };
        let is_name = !host.is_empty() && host.parse::<IpAddr>().is_err();
        let name = if is_name {
            Some(host)
        } else {
            others.and_then(|others| others.field("hostname")).filter(|name| !name.is_empty())
        };
        Some(Self {
            address: asked.resolve_relative(host, port),
            name: name.map(str::to_owned),
            ip: ip.map(|ip| Address::tcp(ip, port)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bulk(text: &str) -> Value {
        Value::String(text.as_bytes().to_vec())
    }

    fn node(endpoint: Value, others: &[&str]) -> Value {
        let others = others.iter().map(|text| bulk(text)).collect();
        Value::Array(vec![endpoint, Value::Integer(7_001), bulk("id"), Value::Array(others)])
    }

    #[test]
    fn endpoints_and_names_of_nodes_are_parsed() {
        let asked = Address::tcp("seed", 7_000);
        let unnamed = Value::Array(vec![bulk("10.0.0.1"), Value::Integer(7_001)]);
        for (value, host, name, ip) in [
            (unnamed, "10.0.0.1", None, None),
            (node(bulk("10.0.0.1"), &[]), "10.0.0.1", None, None),
            (node(bulk("10.0.0.1"), &["hostname", "a.test"]), "10.0.0.1", Some("a.test"), None),
            (node(bulk("a.test"), &["ip", "10.0.0.1"]), "a.test", Some("a.test"), Some("10.0.0.1")),
            (node(bulk("?"), &["ip", "10.0.0.1"]), "10.0.0.1", None, Some("10.0.0.1")),
            (node(bulk("?"), &[]), "seed", None, None),
            (node(bulk(""), &["ip", ""]), "seed", None, None),
            (
                node(Value::Nil, &["ip", "10.0.0.1", "hostname", "a.test"]),
                "seed",
                Some("a.test"),
                Some("10.0.0.1"),
            ),
        ] {
            let parsed = ReportedNode::parse(&value, &asked).expect("a node");
            assert_eq!(parsed.address, Address::tcp(host, 7_001), "{value:?}");
            assert_eq!(parsed.name.as_deref(), name, "{value:?}");
            assert_eq!(parsed.ip, ip.map(|ip| Address::tcp(ip, 7_001)), "{value:?}");
        }
    }
}
