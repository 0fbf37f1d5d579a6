use serde_json::Value;

use crate::support::{Cluster, Redis};
use crate::{
    advice_of, advised_rules, apply, assert_found, doctor_with, primary_for_replicas, replica_of,
    report, run_checks, sentinel_of, wait_until,
};

/// Returns the nodes of the findings of a check at a level.
fn nodes_of(report: &Value, check: &str, level: &str) -> Vec<String> {
    let findings = report["findings"].as_array().expect("findings").iter();
    findings
        .filter(|finding| finding["check"] == check && finding["level"] == level)
        .filter_map(|finding| Some(finding["node"].as_str()?.to_owned()))
        .collect()
}

#[test]
fn user_that_is_missing_behind_sentinels_is_found_on_the_replica() {
    let primary = primary_for_replicas();
    let replica = replica_of(&primary);
    let sentinel = sentinel_of(&primary);
    wait_until("the sentinel knows the replica", || {
        sentinel.query(&["INFO", "sentinel"]).contains("slaves=1")
    });
    let config = |user: &str| {
        let nodes = format!("['redis://127.0.0.1:{}']", sentinel.port);
        let sentinel = format!("{{master: mymaster, nodes: {nodes}{user}}}");
        format!("store: {{sentinel: {sentinel}}}\npolicies: []\n")
    };
    let examined_as =
        |user: &str| report(&doctor_with(&config(user), &["--json", "--probes", "5"])).0;
    let rules = advised_rules(&examined_as(""));
    apply(&primary, &rules);
    let user = ", username: tidegate, password: pw";
    let address = format!("127.0.0.1:{}", replica.port());

    // The minimal user may not run INFO: the sentinels know the replica.
    let found = examined_as(user);
    assert_eq!(found["verdict"], "warning", "{found}");
    assert_found(&found, "acl", "warning", "this user is unknown on this replica");
    assert_eq!(nodes_of(&found, "acl", "warning"), [address.as_str()], "{found}");
    assert!(advice_of(&found, "acl", "warning").contains("ACL SETUSER tidegate"), "{found}");

    // A user with fewer permissions than on the primary is found, too.
    let fewer: Vec<String> = rules.iter().filter(|rule| *rule != "+hset").cloned().collect();
    apply(&replica, &fewer);
    let found = examined_as(user);
    assert_found(&found, "acl", "warning", "on this replica the user lacks permissions");
    assert_found(&found, "acl", "warning", "hset");

    apply(&replica, &rules);
    let found = examined_as(user);
    assert_eq!(nodes_of(&found, "acl", "warning"), Vec::<String>::new(), "{found}");
}

#[test]
fn user_that_is_missing_in_a_cluster_is_found_on_the_replica() {
    let cluster = Cluster::start();
    let url = cluster.nodes()[0].url();
    let rules = advised_rules(&run_checks(&url).0);
    let is_replica =
        |node: &&Redis| node.query::<String>(&["INFO", "replication"]).contains("role:slave");
    let left_out = cluster.nodes().iter().find(is_replica).expect("a replica");
    for node in cluster.nodes().iter().filter(|node| node.port() != left_out.port()) {
        apply(node, &rules);
    }
    // A node lists a replica once it knows that the replica has data.
    let lists_replicas = |node: &Redis| {
        let redis::Value::Array(ranges) = node.query(&["CLUSTER", "SLOTS"]) else {
            panic!("a list")
        };
        ranges.iter().all(|range| matches!(range, redis::Value::Array(parts) if parts.len() > 3))
    };
    wait_until("all nodes list all replicas", || cluster.nodes().iter().all(lists_replicas));
    let url = url.replace("redis://", "redis://tidegate:pw@");
    let (found, code) = run_checks(&url);
    assert_eq!(code, Some(1), "{found}");
    let address = format!("127.0.0.1:{}", left_out.port());
    assert_eq!(nodes_of(&found, "acl", "warning"), [address], "{found}");
    apply(left_out, &rules);
    let (found, code) = run_checks(&url);
    assert_eq!(code, Some(0), "{found}");
}
