//! Nodes of a cluster in the metrics, the status and the readiness.

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
fn stopped_node_is_a_lost_part_of_the_store_until_it_answers_again() {
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

    // Each primary has a third of the slots.
    let ready = service.admin("/readyz?require=store");
    assert_eq!(ready.status, 200, "the other primaries decide");
    let status = service.admin("/v1/status").json()["store"].take();
    for (body, up) in [
        (&ready.json()["store_health"], &ready.json()["store_up"]),
        (&status["health"], &status["up"]),
    ] {
        assert_eq!((&body["state"], up), (&json!("partly-down"), &json!(false)), "{body}");
        assert_eq!([&body["primaries"], &body["primaries_unavailable"]], [3, 1], "{body}");
        let ratio = body["slots_unavailable_ratio"].as_f64().expect("a number");
        assert!((0.33..0.34).contains(&ratio), "{body}");
    }
    let slots = status["nodes"].as_array().expect("nodes").iter().map(|node| &node["slots"]);
    assert_eq!(slots.filter_map(serde_json::Value::as_u64).sum::<u64>(), 16_384, "{status}");
    let metrics = service.admin("/metrics").body;
    for line in
        ["store_up 0", "store_primaries_unavailable 1", "store_slots_unavailable_ratio 0.33"]
    {
        assert!(metrics.contains(&format!("\ntidegate_{line}")), "{line}: {metrics}");
    }

    node.signal("CONT");
    service.wait_until("the circuit closes", |service| open_nodes(service).is_empty());
    service.wait_until("Redis decides", |service| {
        service.admin("/metrics").body.contains("\ntidegate_store_slots_unavailable_ratio 0\n")
            && service.admin("/readyz").json()["store_health"]["state"] == "up"
    });
}
