use std::process::Command;

use crate::servers::{Launch, Server};

/// Cluster of three primaries and their replicas.
pub(crate) struct Cluster {
    pub(crate) nodes: Vec<Server>,
}

/// Line of CLUSTER NODES.
struct Line {
    port: u16,
    primary: bool,
    follows: String,
    slots: Vec<(u16, u16)>,
}

impl Cluster {
    pub(crate) fn start() -> Self {
        let launch = Launch::new()
            .with("cluster-enabled", "yes")
            .with("cluster-node-timeout", "1000")
            // The remaining nodes stay available, to show that the service keeps using them.
            .with("cluster-require-full-coverage", "no");
        let nodes: Vec<Server> = (0..6).map(|_| launch.clone().start()).collect();
        let addresses = nodes.iter().map(|node| format!("127.0.0.1:{}", node.port));
        let output = Command::new("redis-cli")
            .args(["--cluster", "create"])
            .args(addresses)
            .args(["--cluster-replicas", "1", "--cluster-yes"])
            .output()
            .expect("redis-cli runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        let cluster = Self { nodes };
        for node in &cluster.nodes {
            node.wait_until("the cluster is whole", |node| {
                let facts: String = node.query(&["CLUSTER", "INFO"]);
                let follows = node.is_primary() || node.info("master_link_status") == "up";
                facts.contains("cluster_state:ok")
                    && facts.contains("cluster_known_nodes:6")
                    && follows
            });
        }
        for node in &cluster.nodes {
            node.wait_until("every node knows the replicas", |node| {
                lines(node).iter().filter(|line| line.primary).count() == 3
            });
        }
        cluster
    }

    /// Returns the store section of a configuration.
    pub(crate) fn store(&self) -> String {
        let urls: Vec<String> = self.nodes.iter().map(|node| format!("'{}'", node.url())).collect();
        format!("redis: [{}]", urls.join(", "))
    }

    pub(crate) fn slot(&self, key: &str) -> u16 {
        self.nodes[0].query(&["CLUSTER", "KEYSLOT", key])
    }

    pub(crate) fn primaries(&self) -> Vec<&Server> {
        let lines = lines(&self.nodes[0]);
        let primary =
            |node: &&Server| lines.iter().any(|line| line.primary && line.port == node.port);
        self.nodes.iter().filter(primary).collect()
    }

    /// Returns the primary of a key.
    pub(crate) fn owner(&self, key: &str) -> &Server {
        let slot = self.slot(key);
        let owns =
            |line: &&Line| line.slots.iter().any(|(first, last)| (*first..=*last).contains(&slot));
        let port = lines(&self.nodes[0]).iter().find(owns).expect("every slot has an owner").port;
        self.node(port)
    }

    pub(crate) fn replica_of(&self, primary: &Server) -> &Server {
        let (lines, id) = (lines(&self.nodes[0]), id(primary));
        self.node(
            lines.iter().find(|line| line.follows == id).expect("each primary has a replica").port,
        )
    }

    fn node(&self, port: u16) -> &Server {
        self.nodes.iter().find(|node| node.port == port).expect("one of ours")
    }

    /// Returns `base`, with a number if needed, so that its node fits.
    pub(crate) fn key_for(&self, base: &str, fits: impl Fn(&Server) -> bool) -> String {
        let candidates = (0..1000).map(|n| format!("{base}-{n}"));
        candidates
            .into_iter()
            .find(|key| fits(self.owner(key)))
            .expect("a matching name within a thousand")
    }

    /// Starts the migration of a slot: keys are served by the node that currently holds them.
    pub(crate) fn start_migration(slot: u16, from: &Server, to: &Server) {
        let slot = slot.to_string();
        let _: () = to.query(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &id(from)]);
        let _: () = from.query(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &id(to)]);
    }

    /// Moves the keys of a slot one by one and returns their number.
    pub(crate) fn move_keys(slot: u16, from: &Server, to: &Server) -> usize {
        let (slot, port) = (slot.to_string(), to.port.to_string());
        for moved in 0..1000 {
            let keys: Vec<String> = from.query(&["CLUSTER", "GETKEYSINSLOT", &slot, "1"]);
            let Some(key) = keys.first() else { return moved };
            // The key may have expired (NOKEY).
            let _: String = from.query(&["MIGRATE", "127.0.0.1", &port, key, "0", "5000"]);
        }
        panic!("keys come as fast as they are moved");
    }

    pub(crate) fn finish_migration(&self, slot: u16, to: &Server) {
        let (slot, id) = (slot.to_string(), id(to));
        let others = self.primaries().into_iter().filter(|node| node.port != to.port);
        for node in std::iter::once(to).chain(others) {
            let _: () = node.query(&["CLUSTER", "SETSLOT", &slot, "NODE", &id]);
        }
    }
}

fn id(node: &Server) -> String {
    node.query(&["CLUSTER", "MYID"])
}

fn lines(node: &Server) -> Vec<Line> {
    let text: String = node.query(&["CLUSTER", "NODES"]);
    let line = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let port = words.get(1)?.split('@').next()?.rsplit(':').next()?.parse().ok()?;
        // Migrating slots are in brackets.
        let slots = words.get(8..)?.iter().filter(|slots| !slots.starts_with('['));
        let range = |slots: &&str| {
            let (first, last) = slots.split_once('-').unwrap_or((*slots, *slots));
            Some((first.parse().ok()?, last.parse().ok()?))
        };
        Some(Line {
            port,
            primary: words.get(2)?.split(',').any(|flag| flag == "master"),
            follows: (*words.get(3)?).to_owned(),
            slots: slots.filter_map(range).collect(),
        })
    };
    text.lines().filter_map(line).collect()
}
