//! Metrics of Redis, its nodes, and the fallback.

use std::time::Duration;

use tidegate::store::redis::NodeHealth;

use super::RedisBackend;
use crate::metrics::histogram::write_buckets;
use crate::metrics::{escaped, head, write_gauges, write_numbers};

/// Writes the metrics of Redis and of the fallback.
pub(super) fn write(text: &mut String, redis: &RedisBackend) {
    let nodes = redis.store().nodes();
    let fallback = redis.fallback().stats();
    let (store, health) = (redis.store(), redis.health());
    let count = |number: usize| u64::try_from(number).unwrap_or(u64::MAX);
    #[rustfmt::skip]
    let numbers = [
        ("tidegate_store_breaker_open", "gauge",
            "Nodes with an open circuit.",
            count(nodes.iter().filter(|node| node.circuit.open).count())),
        ("tidegate_store_primaries_unavailable", "gauge",
            "Primaries of Redis that this process cannot use.",
            count(health.primaries_unavailable)),
        ("tidegate_store_breaker_opened_total", "counter",
            "Number of times that the circuit of a node opened.", store.circuits_opened()),
        ("tidegate_deny_cache_entries", "gauge",
            "Entries of the deny cache, some of which may have expired.",
            count(redis.deny_cache().entries())),
        ("tidegate_fleet_instances", "gauge",
            "Instances that share the limits during an outage of the store.",
            count(redis.fallback().fleet().size())),
        ("tidegate_pending_debit_units", "gauge",
            "Units allowed during an outage that are still to be charged to the store.",
            fallback.pending_debit_units),
        ("tidegate_settled_debit_units_total", "counter",
            "Units allowed during an outage that were charged to the store afterwards.",
            fallback.settled_debit_units),
        ("tidegate_dropped_debit_units_total", "counter",
            "Units allowed during an outage that exceeded the limit on pending debits.",
            fallback.dropped_debit_units),
        ("tidegate_pending_commits", "gauge",
            "Commits of holds that wait for the store.", count(fallback.pending_commits)),
        ("tidegate_dropped_commits_total", "counter",
            "Commits of holds that waited for the store for too long.", fallback.dropped_commits),
        ("tidegate_redis_script_loads_total", "counter",
            "Scripts loaded into Redis.", store.script_loads()),
        ("tidegate_redis_reconnects_total", "counter",
            "Reconnections to Redis.", store.reconnects()),
        ("tidegate_redis_redirects_total", "counter",
            "Calls that a cluster redirected to another node.", store.redirects()),
    ];
    write_numbers(text, &numbers);
    let name = "tidegate_store_slots_unavailable_ratio";
    let help = "Part of the slots of Redis whose keys cannot be decided there.";
    write_numbers(text, &[(name, "gauge", help, health.slots_unavailable_ratio)]);
    let open = deciding(&nodes).map(|node| (&node.address, u8::from(node.circuit.open)));
    let help = "Whether the circuit of this node is open, so that it is not called.";
    write_gauges(text, ("tidegate_redis_node_breaker_open", "node"), help, open);
    write_calls(text, redis, &nodes);
}

fn deciding(nodes: &[NodeHealth]) -> impl Iterator<Item = &NodeHealth> {
    nodes.iter().filter(|node| node.primary)
}

/// Writes the latency of each node that decides, and the number of decisions per call.
#[expect(clippy::cast_precision_loss, reason = "the metrics are floats")]
fn write_calls(text: &mut String, redis: &RedisBackend, nodes: &[NodeHealth]) {
    let name = "tidegate_node_seconds";
    head(text, name, "histogram", "Duration of a call that decides, by node of Redis.");
    for node in deciding(nodes) {
        let labels = format!("node=\"{}\"", escaped(&node.address));
        let seconds = |micros: u64| Duration::from_micros(micros).as_secs_f64();
        let bound = |micros: Option<u64>| {
            micros.map_or_else(|| "+Inf".to_owned(), |micros| seconds(micros).to_string())
        };
        let buckets = node.latency.iter().map(|(micros, count)| (bound(micros), count));
        write_buckets(text, name, &labels, buckets, seconds(node.latency.sum()));
    }
    let in_flight = deciding(nodes).map(|node| (&node.address, node.in_flight));
    let help = "Calls that wait for their replies, by node of Redis.";
    write_gauges(text, ("tidegate_node_in_flight", "node"), help, in_flight);
    let name = "tidegate_decisions_per_call";
    head(text, name, "histogram", "Requests that one script call to Redis decides.");
    let sizes = redis.store().decisions_per_call();
    let bound = |size: Option<u64>| size.map_or_else(|| "+Inf".to_owned(), |size| size.to_string());
    let buckets = sizes.iter().map(|(size, count)| (bound(size), count));
    write_buckets(text, name, "", buckets, sizes.sum() as f64);
}
