//! Metrics of the nodes of a cluster.

use std::path::Path;

use serde_json::json;

use crate::POLICIES;
use crate::support::{Cluster, Service};

/// Returns the ports of the nodes in the metrics, each with whether its circuit is open.
fn circuits(service: &Service) -> Vec<(u16, bool)> {
    let metrics = service.admin("/metrics").body;
    let circuit = |line: &str| {
        let rest = line.strip_prefix("tidegate_redis_node_breaker_open{node=\"127.0.0.1:")?;
        let (port, value) = rest.split_once("\"} ")?;
        Some((port.parse().expect("a port"), value != "0"))
    };
    metrics.lines().filter_map(circuit).collect()
}

#[test]
fn circuit_of_a_stopped_node_is_open_in_the_metrics_until_it_answers_again() {
    // No replica takes over within the test.
    let options = ["--cluster-node-timeout", "60000"];
    let cluster = Cluster::start_with(Path::new("redis-server"), &options);
    let urls = cluster.urls().join("', '");
    let service =
        Service::start(&format!("store: {{redis: ['{urls}'], timeout: 100ms}}\n{POLICIES}"));
    let node = &cluster.nodes()[cluster.owner_of("{u1}")];
    let open_nodes = |service: &Service| {
        let circuits = circuits(service);
        assert_eq!(circuits.len(), 3, "one line for each primary: {circuits:?}");
        let open = circuits.into_iter().filter(|(_, open)| *open);
        open.map(|(port, _)| port).collect::<Vec<u16>>()
    };
    let request = json!({"policy": "per-user", "key": "u1"});
    assert_eq!(service.acquire(&request).status, 200);
    assert_eq!(open_nodes(&service), [] as [u16; 0]);

    node.signal("STOP");
    service.wait_until("the circuit of the stopped node opens", |service| {
        service.acquire(&request);
        !open_nodes(service).is_empty()
    });
    assert_eq!(open_nodes(&service), [node.port()]);

    node.signal("CONT");
    service.wait_until("the circuit closes", |service| open_nodes(service).is_empty());
}
