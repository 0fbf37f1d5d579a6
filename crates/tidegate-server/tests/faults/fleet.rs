use std::time::{Duration, Instant};

use serde_json::json;

use crate::load::{Stream, sums};
use crate::support::Service;

/// The limit of the key that is asked for far above it, and of its window.
pub(crate) const LIMIT: usize = 60;
pub(crate) const WINDOW: Duration = Duration::from_secs(2);
/// A limit smaller than the number of instances: it has no shares.
pub(crate) const FEW: usize = 2;
/// How long Redis may take to decide.
pub(crate) const TIMEOUT: Duration = Duration::from_millis(100);
/// The limit of two policies that one request is charged to, and of two on different nodes of a
/// cluster.
pub(crate) const PAIR: usize = 20;
/// Far more than a run can spend: what is left tells what was charged.
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

/// Three instances on one store, and a fourth one without.
pub(crate) struct Fleet {
    pub(crate) instances: Vec<Service>,
    pub(crate) canary: Service,
}

/// How many instances share a store.
pub(crate) const INSTANCES: usize = 3;

impl Fleet {
    /// On a store that is described like this: `redis: redis://…`. They have all heard of each
    /// other: before that, an instance without its store would take more than its share.
    pub(crate) fn start(store: &str) -> Self {
        let config = format!("store: {{{store}, timeout: 100ms}}\n{POLICIES}");
        let canary = Service::start(POLICIES);
        let fleet =
            Self { instances: (0..INSTANCES).map(|_| Service::start(&config)).collect(), canary };
        let deadline = Instant::now() + Duration::from_secs(30);
        #[expect(clippy::cast_precision_loss, reason = "three")]
        let all_there = |size: &f64| (size - INSTANCES as f64).abs() < 0.5;
        while !fleet.metric("tidegate_fleet_instances").iter().all(all_there) {
            assert!(Instant::now() < deadline, "the instances do not hear of each other");
            std::thread::sleep(Duration::from_millis(20));
        }
        fleet
    }

    /// How much the store has charged to the ledger of this key.
    pub(crate) fn charged(&self, key: &str) -> u64 {
        let look = json!({"policy": "ledger", "key": key}).to_string();
        let deadline = Instant::now() + Duration::from_secs(10);
        let body = loop {
            let body = self.instances[0].post("/v1/peek", &look).json();
            // On a machine that stood still just now, the breaker may be open for a moment.
            if body["source"] == "store" {
                break body;
            }
            assert!(Instant::now() < deadline, "the store is not back: {body}");
            std::thread::sleep(Duration::from_millis(50));
        };
        // A look tells what would be left after it.
        LEDGER - 1 - body["remaining"].as_u64().expect("a number")
    }

    /// What each instance has written, so far.
    pub(crate) fn written(&self) -> Vec<usize> {
        self.instances.iter().map(|service| service.output().len()).collect()
    }

    /// The warnings and errors that each instance has written since.
    pub(crate) fn warnings_since(&self, written: &[usize]) -> Vec<Vec<String>> {
        let bad = |line: &&str| line.contains(" WARN ") || line.contains(" ERROR ");
        let since = |(service, from): (&Service, &usize)| {
            service.output()[*from..].lines().filter(bad).map(str::to_owned).collect()
        };
        self.instances.iter().zip(written).map(since).collect()
    }

    /// A metric of each instance, added up over its labels.
    pub(crate) fn metric(&self, name: &str) -> Vec<f64> {
        let value = |service: &Service| {
            sums(&service.admin("/metrics").body).get(name).copied().unwrap_or(0.0)
        };
        self.instances.iter().map(value).collect()
    }
}

/// What is asked in every row: a key far above its limit, one with a tiny limit, some that stay
/// below, one for each failure mode.
pub(crate) fn usual_streams() -> Vec<Stream> {
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
