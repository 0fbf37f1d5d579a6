use std::time::{Duration, Instant};

use serde_json::json;

use crate::load::{Stream, sums};
use crate::support::Service;

/// Limit and window of the hot key, whose traffic is far above its limit.
pub(crate) const LIMIT: usize = 60;
pub(crate) const WINDOW: Duration = Duration::from_secs(2);
/// Limit smaller than the number of instances, so it cannot be divided.
pub(crate) const TINY_LIMIT: usize = 2;
/// Timeout of a decision by Redis.
pub(crate) const TIMEOUT: Duration = Duration::from_millis(100);
/// Limit of two policies that one request is charged to, also on different nodes of a cluster.
pub(crate) const PAIR_LIMIT: usize = 20;
/// Limit that a run cannot exhaust, so the remaining units show how many were charged.
const LEDGER: u64 = 100_000;

const POLICIES: &str = "
policies:
  - {name: hot, match: {path: /hot}, limit: 60, window: 2s}
  - {name: few, match: {path: /few}, limit: 2, window: 2s}
  - {name: quiet, match: {path: /quiet}, limit: 100, window: 2s}
  - {name: ledger, match: {path: /ledger}, limit: 100000, window: 1h, on_store_failure: deny}
  - {name: open, match: {path: /open}, limit: 1000, window: 2s, on_store_failure: allow}
  - {name: pair-1, match: {path: /pair}, key: [header.user], limit: 20, window: 2s}
  - {name: pair-2, match: {path: /pair}, key: [header.user], limit: 25, window: 2s}
  - {name: across-1, match: {path: /across}, key: [header.user], limit: 25, window: 2s}
  - {name: across-2, match: {path: /across}, key: [header.team], limit: 20, window: 2s}
  - {name: packed, match: {path: /packed}, encoding: packed, limit: 10, window: 2s}
  - {name: counter, match: {path: /counter}, algorithm: sliding-counter, limit: 10, window: 2s}
  - {name: fixed, match: {path: /fixed}, algorithm: fixed-window, limit: 10, window: 2s}
  - {name: token, match: {path: /token}, algorithm: token-bucket, limit: 10, window: 2s}
  - {name: leaky, match: {path: /leaky}, algorithm: leaky-bucket, limit: 10, window: 2s}
  - {name: canary, match: {path: /canary}, limit: 1000000, window: 10s}
";

/// Three instances on one store, and a fourth one without a store.
pub(crate) struct Fleet {
    pub(crate) instances: Vec<Service>,
    pub(crate) canary: Service,
}

/// Number of instances that share a store.
pub(crate) const INSTANCES: usize = 3;

impl Fleet {
    /// Starts instances on a store such as `redis: redis://…` and waits until all know each other.
    /// Before that, an instance without its store would use more than its share.
    pub(crate) fn start(store: &str) -> Self {
        let config = format!("store: {{{store}, timeout: 100ms}}\n{POLICIES}");
        let canary = Service::start(POLICIES);
        let fleet =
            Self { instances: (0..INSTANCES).map(|_| Service::start(&config)).collect(), canary };
        let deadline = Instant::now() + Duration::from_secs(30);
        #[expect(clippy::cast_precision_loss, reason = "three")]
        let all_there = |size: &f64| (size - INSTANCES as f64).abs() < 0.5;
        while !fleet.metric("tidegate_fleet_instances").iter().all(all_there) {
            assert!(Instant::now() < deadline, "the instances do not discover each other");
            std::thread::sleep(Duration::from_millis(20));
        }
        fleet
    }

    /// Returns the units that the store has charged to the ledger of a key.
    pub(crate) fn charged(&self, key: &str) -> u64 {
        let peek = json!({"policy": "ledger", "key": key}).to_string();
        let deadline = Instant::now() + Duration::from_secs(10);
        let body = loop {
            let body = self.instances[0].post("/v1/peek", &peek).json();
            // After a stall of the machine, the circuit may be open for a moment.
            if body["source"] == "store" {
                break body;
            }
            assert!(Instant::now() < deadline, "the store is not back: {body}");
            std::thread::sleep(Duration::from_millis(50));
        };
        // A peek reports the units that would remain after it.
        LEDGER - 1 - body["remaining"].as_u64().expect("a number")
    }

    /// Returns the length of each instance's output.
    pub(crate) fn written(&self) -> Vec<usize> {
        self.instances.iter().map(|service| service.output().len()).collect()
    }

    /// Returns the warnings and errors that each instance has logged since.
    pub(crate) fn warnings_since(&self, written: &[usize]) -> Vec<Vec<String>> {
        let bad = |line: &&str| line.contains(" WARN ") || line.contains(" ERROR ");
        let since = |(service, from): (&Service, &usize)| {
            service.output()[*from..].lines().filter(bad).map(str::to_owned).collect()
        };
        self.instances.iter().zip(written).map(since).collect()
    }

    /// Returns a metric of each instance, summed over its labels.
    pub(crate) fn metric(&self, name: &str) -> Vec<f64> {
        let value = |service: &Service| {
            sums(&service.admin("/metrics").body).get(name).copied().unwrap_or(0.0)
        };
        self.instances.iter().map(value).collect()
    }
}

/// Returns the load of every row: a key far above its limit, one with a tiny limit, some below
/// their limits, and one per failure mode.
pub(crate) fn default_streams() -> Vec<Stream> {
    let mut streams = vec![
        Stream::policy("hot", "hot", 150),
        Stream::policy("few", "few", 20),
        Stream::policy("ledger", "hot", 60),
        Stream::policy("open", "open", 30),
        Stream::path("pair", "hot", "", 20),
    ];
    streams.extend((0..5).map(|n| Stream::policy("quiet", &format!("quiet-{n}"), 10)));
    streams
}
