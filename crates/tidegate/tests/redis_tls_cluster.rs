//! The Redis store on a real TLS cluster, whose nodes announce host names, addresses, or neither.

mod support;

use std::process::Command;
use std::time::{Duration, Instant};

use support::{Authority, LONG, Redis, TEST_TIMEOUT, free_port, until};
use tidegate::store::redis::Tls;
use tidegate::{Action, Charge, Limiter, Quota, RedisStore, Store, StoreError};

/// Cluster of three primaries. The certificate of each node is for its own name and for
/// `redis.test`, and for no address.
struct TlsCluster {
    nodes: Vec<Redis>,
    tls_ports: Vec<u16>,
    authority: Authority,
    folders: Vec<tempfile::TempDir>,
}

impl TlsCluster {
    fn start() -> Self {
        let authority = Authority::new();
        let mut cluster =
            Self { nodes: Vec::new(), tls_ports: Vec::new(), authority, folders: Vec::new() };
        for number in 0..3 {
            cluster.start_node(number);
        }
        let ca = cluster.folders[0].path().join("ca.pem");
        let addresses = cluster.tls_ports.iter().map(|port| format!("127.0.0.1:{port}"));
        let created = Command::new("redis-cli")
            .args(["--tls", "--cacert"])
            .arg(ca)
            .args(["--cluster", "create"])
            .args(addresses)
            .arg("--cluster-yes")
            .output()
            .expect("redis-cli runs");
        assert!(created.status.success(), "{}", String::from_utf8_lossy(&created.stdout));
        cluster.wait_until("each node sees all slots", |node| {
            node.query::<String>(&["CLUSTER", "INFO"]).contains("cluster_state:ok")
        });
        cluster
    }

    fn start_node(&mut self, number: usize) {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let names = [&format!("node-{number}.test"), "redis.test", "localhost"];
        let (certificate, key) = self.authority.sign_all(&names).write(folder.path());
        let ca = folder.path().join("ca.pem");
        std::fs::write(&ca, self.authority.pem()).expect("written");
        let [certificate, key, ca] =
            [&certificate, &key, &ca].map(|path| path.to_str().expect("UTF-8").to_owned());
        for _ in 0..50 {
            // The port of the cluster bus is 10,000 above the TLS port.
            let tls_port = free_port();
            if tls_port > 55_000 {
                continue;
            }
            let tls_port_text = tls_port.to_string();
            let options = [
                ["--cluster-enabled", "yes"],
                ["--cluster-node-timeout", "2000"],
                ["--tls-cluster", "yes"],
                ["--tls-port", &tls_port_text],
                ["--tls-cert-file", &certificate],
                ["--tls-key-file", &key],
                ["--tls-ca-cert-file", &ca],
                ["--tls-auth-clients", "no"],
            ];
            let program = std::path::Path::new("redis-server");
            if let Some(node) = Redis::try_start(program, free_port(), &options.concat()) {
                self.nodes.push(node);
                self.tls_ports.push(tls_port);
                self.folders.push(folder);
                return;
            }
        }
        panic!("no node started in 50 attempts");
    }

    fn wait_until(&self, description: &str, condition: impl Fn(&Redis) -> bool) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !self.nodes.iter().all(&condition) {
            assert!(Instant::now() < deadline, "timed out: {description}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Announces host names, `""` for none, and prefers this type of endpoint.
    fn announce(&self, names: [&str; 3], endpoint_type: &str) {
        for (node, name) in self.nodes.iter().zip(names) {
            node.query::<()>(&["CONFIG", "SET", "cluster-announce-hostname", name]);
            node.query::<()>(&["CONFIG", "SET", "cluster-preferred-endpoint-type", endpoint_type]);
        }
        // Names travel by gossip. Each node has its own line in the output of each other node.
        self.wait_until("all nodes know the names", |node| {
            let nodes: String = node.query(&["CLUSTER", "NODES"]);
            names.iter().zip(&self.nodes).all(|(name, other)| {
                let port = format!(":{}@", other.port());
                let line = nodes.lines().find(|line| line.contains(&port));
                line.is_some_and(|line| {
                    let address = line.split(' ').nth(1).unwrap_or_default();
                    address.split_once(',').map_or("", |(_, announced)| announced) == *name
                })
            })
        });
    }

    fn url(&self, host: &str) -> String {
        format!("rediss://{host}:{}", self.tls_ports[0])
    }

    async fn connect(
        &self,
        url: &str,
        server_name: Option<&str>,
    ) -> Result<RedisStore, StoreError> {
        let tls = Tls::new().ca(self.authority.pem());
        let tls = match server_name {
            Some(name) => tls.server_name(name),
            None => tls,
        };
        RedisStore::cluster([url]).timeout(TEST_TIMEOUT).tls(tls).connect().await
    }

    /// Asserts that a store with these options decides on all three nodes.
    async fn assert_decides(&self, url: &str, server_name: Option<&str>) -> RedisStore {
        let store = self.connect(url, server_name).await.expect("connected");
        until("all nodes are connected", async || {
            store.nodes().len() == 3 && store.nodes().iter().all(|node| node.connected)
        })
        .await;
        let quota = Quota::fixed_window(1_000, LONG).expect("valid");
        for number in 0..30 {
            let key = format!("user-{number}");
            let charge = Charge::new(&key, &quota);
            assert!(store.decide(Action::Acquire, &charge).await.expect("decided").allowed);
        }
        store
    }
}

const NO_NAMES: [&str; 3] = ["", "", ""];
const OWN_NAMES: [&str; 3] = ["node-0.test", "node-1.test", "node-2.test"];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_of_a_tls_cluster_are_verified_as_announced_or_configured() {
    let cluster = TlsCluster::start();
    let by_address = cluster.url("127.0.0.1");

    // Addresses that are not in the certificates: `server_name` is the name of all nodes.
    cluster.announce(NO_NAMES, "ip");
    let refused = cluster.connect(&by_address, None).await.expect_err("refused").to_string();
    assert!(refused.contains("not valid for name"), "{refused}");
    let refused = cluster.connect(&by_address, Some("other.test")).await.expect_err("refused");
    assert!(refused.to_string().contains("not valid for name"), "{refused}");
    cluster.assert_decides(&by_address, Some("redis.test")).await;

    // Announced names beside the addresses. The configured name is only that of the first node.
    let only_first = cluster.connect(&by_address, Some("node-0.test")).await.expect("connected");
    until("other nodes are refused by that name", async || {
        let refused = |error: &String| error.contains("not valid for name");
        store_errors(&only_first).iter().filter(|error| refused(error)).count() == 2
    })
    .await;
    cluster.announce(OWN_NAMES, "ip");
    cluster.assert_decides(&by_address, Some("node-0.test")).await;
    // The store that is already open learns the names, too.
    until("the open store connects", async || only_first.nodes().iter().all(|node| node.connected))
        .await;

    // Endpoints that are host names.
    cluster.announce(["localhost"; 3], "hostname");
    cluster.assert_decides(&cluster.url("localhost"), None).await;
    cluster.announce(NO_NAMES, "hostname");
    cluster.assert_decides(&by_address, Some("redis.test")).await;

    // Unknown endpoints are on the host of the connection.
    cluster.announce(OWN_NAMES, "unknown-endpoint");
    cluster.assert_decides(&by_address, Some("node-0.test")).await;
    cluster.announce(NO_NAMES, "unknown-endpoint");
    cluster.assert_decides(&cluster.url("localhost"), None).await;
    let store = cluster.assert_decides(&by_address, Some("redis.test")).await;
    assert_moved_without_host_is_followed(&cluster, store).await;
}

fn store_errors(store: &RedisStore) -> Vec<String> {
    store.nodes().into_iter().filter_map(|node| node.last_error).collect()
}

/// Moves the slot of a key, and decides again: MOVED then names only the port.
async fn assert_moved_without_host_is_followed(cluster: &TlsCluster, store: RedisStore) {
    let quota = Quota::fixed_window(1_000, LONG).expect("valid");
    let charge = Charge::new("moving", &quota);
    let limiter = Limiter::new(store);
    assert_eq!(limiter.acquire(&charge).await.expect("decided").remaining, 999);
    let key = limiter.store().redis_key(&charge);
    let slot = cluster.nodes[0].query::<u16>(&["CLUSTER", "KEYSLOT", &key]).to_string();
    let owns = |node: &Redis| node.query::<u64>(&["CLUSTER", "COUNTKEYSINSLOT", &slot]) > 0;
    let from = cluster.nodes.iter().position(owns).expect("an owner");
    let to = (from + 1) % 3;
    let id = |node: usize| cluster.nodes[node].query::<String>(&["CLUSTER", "MYID"]);
    let (from_id, to_id) = (id(from), id(to));
    let set_slot = |node: usize, state: &str, id: &str| {
        cluster.nodes[node].query::<()>(&["CLUSTER", "SETSLOT", &slot, state, id]);
    };
    set_slot(to, "IMPORTING", &from_id);
    set_slot(from, "MIGRATING", &to_id);
    // The value moves by DUMP and RESTORE: MIGRATE uses no TLS.
    let mut source = cluster.nodes[from].connection();
    let value: Vec<u8> = redis::cmd("DUMP").arg(&key).query(&mut source).expect("dumped");
    let mut target = cluster.nodes[to].connection();
    redis::cmd("ASKING").query::<()>(&mut target).expect("asking");
    redis::cmd("RESTORE")
        .arg(&key)
        .arg(100_000)
        .arg(value)
        .query::<()>(&mut target)
        .expect("moved");
    redis::cmd("UNLINK").arg(&key).query::<()>(&mut source).expect("removed");
    assert_eq!(limiter.acquire(&charge).await.expect("asked").remaining, 998);
    set_slot(to, "NODE", &to_id);
    set_slot(from, "NODE", &to_id);
    assert_eq!(limiter.acquire(&charge).await.expect("moved").remaining, 997);
    assert!(limiter.store().redirects() > 0);
}
