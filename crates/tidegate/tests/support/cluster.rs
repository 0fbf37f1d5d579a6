//! A real cluster for tests: three primaries with a replica each.

use std::net::{Ipv4Addr, TcpListener};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use super::server::{Redis, free_port};

pub(crate) struct Cluster {
    nodes: Vec<Redis>,
}

impl Cluster {
    pub(crate) fn start() -> Self {
        Self::start_program(Path::new("redis-server"))
    }

    pub(crate) fn start_program(program: &Path) -> Self {
        Self::start_with(program, &[])
    }

    pub(crate) fn start_with(program: &Path, options: &[&str]) -> Self {
        let nodes: Vec<Redis> = (0..6).map(|_| start_node(program, options)).collect();
        let addresses = nodes.iter().map(|node| format!("127.0.0.1:{}", node.port()));
        let output = Command::new("redis-cli")
            .args(["--cluster", "create"])
            .args(addresses)
            .args(["--cluster-replicas", "1", "--cluster-yes"])
            .output()
            .expect("redis-cli runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        let cluster = Self { nodes };
        cluster.wait_until("each node sees all slots and a replica of each", |node| {
            let info: String = node.query(&["CLUSTER", "INFO"]);
            let roles: String = node.query(&["CLUSTER", "NODES"]);
            let synced: String = node.query(&["INFO", "replication"]);
            info.contains("cluster_state:ok")
                && roles.matches("slave").count() == 3
                && (synced.contains("role:master") || synced.contains("master_link_status:up"))
        });
        cluster
    }

    /// Adds a primary without slots.
    pub(crate) fn add_empty_primary(&mut self) -> &Redis {
        let node = start_node(Path::new("redis-server"), &[]);
        let first = self.nodes[0].port().to_string();
        node.query::<()>(&["CLUSTER", "MEET", "127.0.0.1", &first]);
        self.nodes.push(node);
        self.wait_until("all nodes know each other", |node| {
            let info: String = node.query(&["CLUSTER", "INFO"]);
            info.contains("cluster_state:ok") && info.contains("cluster_known_nodes:7")
        });
        &self.nodes[6]
    }

    fn wait_until(&self, description: &str, condition: impl Fn(&Redis) -> bool) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !self.nodes.iter().all(&condition) {
            assert!(Instant::now() < deadline, "timed out: {description}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    pub(crate) fn nodes(&self) -> &[Redis] {
        &self.nodes
    }

    pub(crate) fn urls(&self) -> Vec<String> {
        self.nodes.iter().map(Redis::url).collect()
    }

    /// Returns the index of the node that serves the slot of this Redis key.
    pub(crate) fn owner_of(&self, redis_key: &str) -> usize {
        let port = self.owner_port(self.slot_of(redis_key));
        self.nodes.iter().position(|node| node.port() == port).expect("one of ours")
    }

    pub(crate) fn slot_of(&self, redis_key: &str) -> u16 {
        self.nodes[0].query(&["CLUSTER", "KEYSLOT", redis_key])
    }

    fn owner_port(&self, slot: u16) -> u16 {
        let redis::Value::Array(ranges) = self.nodes[0].query(&["CLUSTER", "SLOTS"]) else {
            panic!("a list")
        };
        for range in ranges {
            let redis::Value::Array(parts) = range else { panic!("a range") };
            let number = |value: &redis::Value| match value {
                redis::Value::Int(number) => u16::try_from(*number).expect("a slot or a port"),
                other => panic!("{other:?} is not a number"),
            };
            if (number(&parts[0])..=number(&parts[1])).contains(&slot) {
                let redis::Value::Array(primary) = &parts[2] else { panic!("a node") };
                return number(&primary[1]);
            }
        }
        panic!("no node serves slot {slot}")
    }

    /// Returns how many other nodes report to be primaries.
    pub(crate) fn other_primaries(&self, node: usize) -> usize {
        let others = self.nodes.iter().enumerate().filter(|(index, _)| *index != node);
        others.filter(|(_, node)| is_primary(node)).count()
    }

    pub(crate) fn node_mut(&mut self, index: usize) -> &mut Redis {
        &mut self.nodes[index]
    }

    /// Migrates a slot with its keys to another node like `redis-cli --cluster reshard`. Calls
    /// `between` after each step.
    pub(crate) async fn move_slot(
        &self,
        slot: u16,
        from: &Redis,
        to: &Redis,
        mut between: impl AsyncFnMut(),
    ) {
        let id = |node: &Redis| node.query::<String>(&["CLUSTER", "MYID"]);
        let (slot_text, from_id, to_id) = (slot.to_string(), id(from), id(to));
        to.query::<()>(&["CLUSTER", "SETSLOT", &slot_text, "IMPORTING", &from_id]);
        from.query::<()>(&["CLUSTER", "SETSLOT", &slot_text, "MIGRATING", &to_id]);
        between().await;
        loop {
            let keys: Vec<String> = from.query(&["CLUSTER", "GETKEYSINSLOT", &slot_text, "1"]);
            let Some(key) = keys.first() else { break };
            let port = to.port().to_string();
            from.query::<String>(&["MIGRATE", "127.0.0.1", &port, key, "0", "5000"]);
            between().await;
        }
        to.query::<()>(&["CLUSTER", "SETSLOT", &slot_text, "NODE", &to_id]);
        between().await;
        from.query::<()>(&["CLUSTER", "SETSLOT", &slot_text, "NODE", &to_id]);
    }

    pub(crate) fn assert_every_key_expires(&self) {
        self.nodes.iter().filter(|node| is_primary(node)).for_each(Redis::assert_every_key_expires);
    }
}

fn is_primary(node: &Redis) -> bool {
    node.query::<String>(&["INFO", "replication"]).contains("role:master")
}

/// Starts a node. The port of its cluster bus is 10,000 above its own.
fn start_node(program: &Path, options: &[&str]) -> Redis {
    let mut all = vec!["--cluster-enabled", "yes", "--cluster-node-timeout", "1000"];
    all.extend(["--cluster-require-full-coverage", "no", "--cluster-replica-validity-factor", "0"]);
    all.extend(["--repl-diskless-sync-delay", "0"]);
    all.extend(options);
    for _ in 0..200 {
        let port = free_port();
        let is_bus_port_free = port
            .checked_add(10_000)
            .is_some_and(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok());
        if is_bus_port_free && let Some(node) = Redis::try_start(program, port, &all) {
            return node;
        }
    }
    panic!("no cluster node started in 200 attempts");
}
