//! Memory and Redis.

use crate::sentinel::{NAME, Sentinels};
use crate::support::{Cluster, Redis};
use crate::{HUNDRED_FOR_ONE_KEY, TEN_PER_HOUR, assert_ten_of_a_hundred, count, report};

const ALGORITHMS: [&str; 5] =
    ["sliding-log", "sliding-counter", "fixed-window", "token-bucket", "leaky-bucket"];

#[test]
fn counts_in_memory_are_exact_for_each_algorithm_and_both_loops() {
    for algorithm in ALGORITHMS {
        for pace in [["--concurrency", "8"], ["--rate", "1000"]] {
            let flags = ["--algorithm", algorithm];
            let result = report(&[&HUNDRED_FOR_ONE_KEY, &TEN_PER_HOUR, &flags[..], &pace].concat());
            assert_ten_of_a_hundred(&result);
            assert_eq!(result["target"]["kind"], "memory");
        }
    }
}

#[test]
fn counts_on_redis_are_exact_and_runs_do_not_share_them() {
    let redis = Redis::start();
    let url = redis.url();
    for pace in [["--concurrency", "8"], ["--rate", "500"]] {
        let target = ["--redis", &url];
        let result = report(&[&HUNDRED_FOR_ONE_KEY, &TEN_PER_HOUR, &target[..], &pace].concat());
        assert_ten_of_a_hundred(&result);
        assert_eq!(result["target"]["kind"], "redis");
    }
    let keys: Vec<String> = redis.query(&["KEYS", "*"]);
    let counts: Vec<&String> = keys.iter().filter(|key| key.contains("{bench-")).collect();
    assert_eq!(counts.len(), 2, "{keys:?}");
    assert!(keys.iter().all(|key| key.starts_with("tidegate_bench:{")), "{keys:?}");
    redis.assert_every_key_expires();
}

#[test]
fn prefix_of_the_keys_can_be_set() {
    let redis = Redis::start();
    let url = redis.url();
    report(&["--redis", &url, "--prefix", "load", "--requests", "5"]);
    let keys: Vec<String> = redis.query(&["KEYS", "*"]);
    assert!(!keys.is_empty() && keys.iter().all(|key| key.starts_with("load:")), "{keys:?}");
}

#[test]
fn cluster_is_loaded_by_its_nodes() {
    let cluster = Cluster::start();
    let target = ["--redis", &cluster.urls().join(",")];
    let result = report(&[&HUNDRED_FOR_ONE_KEY, &TEN_PER_HOUR, &target[..]].concat());
    assert_ten_of_a_hundred(&result);
    let many = report(&[&["--requests", "300", "--keys", "100"][..], &target].concat());
    assert_eq!((count(&many, "answered"), count(&many, "failed")), (300, 0), "{many}");
}

#[test]
fn store_and_policy_come_from_a_configuration() {
    let redis = Redis::start();
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("tidegate.yaml");
    let config = format!(
        "store: {{redis: '{}', prefix: production}}\n\
         policies: [{{name: few, limit: 10, window: 1h}}, {{name: many, limit: 50, window: 1h}}]\n",
        redis.url()
    );
    std::fs::write(&file, config).expect("written");
    let file = file.to_str().expect("UTF-8");
    for (policy, allowed) in [("few", 10), ("many", 50)] {
        let flags = ["--config", file, "--policy", policy];
        let result = report(&[&HUNDRED_FOR_ONE_KEY[..], &flags].concat());
        assert_eq!(count(&result, "allowed"), allowed, "{result}");
    }
    let keys: Vec<String> = redis.query(&["KEYS", "*"]);
    assert!(keys.iter().all(|key| key.starts_with("tidegate_bench:")), "{keys:?}");
    let memory = report(&["--config", file, "--policy", "few", "--memory", "--requests", "3"]);
    assert_eq!(memory["target"]["kind"], "memory");
}

#[test]
fn sentinels_come_from_a_configuration() {
    let sentinels = Sentinels::start();
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("tidegate.yaml");
    let nodes = sentinels.urls().join("', '");
    let config =
        format!("store: {{sentinel: {{master: {NAME}, nodes: ['{nodes}']}}}}\npolicies: []\n");
    std::fs::write(&file, config).expect("written");
    let flags = ["--config", file.to_str().expect("UTF-8")];
    let result = report(&[&HUNDRED_FOR_ONE_KEY, &TEN_PER_HOUR, &flags[..]].concat());
    assert_ten_of_a_hundred(&result);
    assert_eq!(result["target"]["name"], "Redis with Sentinel");
}

#[test]
fn costs_and_keys_are_those_of_the_flags() {
    let result = report(&[&HUNDRED_FOR_ONE_KEY, &TEN_PER_HOUR, &["--cost", "3"][..]].concat());
    assert_eq!((count(&result, "allowed"), count(&result, "denied")), (3, 97), "{result}");
    // Each key has one request on average, so more than ten are allowed; the busiest key of Zipf's
    // law has far more than its limit.
    let spread = |flags: &[&str]| {
        let flags = [&["--requests", "2000", "--keys", "2000"], &TEN_PER_HOUR[..], flags].concat();
        count(&report(&flags), "denied")
    };
    assert_eq!(spread(&["--distribution", "uniform"]), 0);
    let zipf = spread(&["--distribution", "zipf", "--concurrency", "1"]);
    assert!(zipf > 300, "{zipf}");
    // One caller and one seed have one result.
    assert_eq!(zipf, spread(&["--distribution", "zipf", "--concurrency", "1"]));
}
