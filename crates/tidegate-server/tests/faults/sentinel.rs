use std::time::Instant;

use crate::servers::{Launch, Server};

/// Primary and replica that Sentinels monitor.
pub(crate) struct SentinelDeployment {
    pub(crate) primary: Server,
    pub(crate) replica: Server,
    sentinels: Vec<Server>,
}

impl SentinelDeployment {
    /// Starts a replica and a number of Sentinels.
    pub(crate) fn start(replica: Launch, sentinels: usize) -> Self {
        let primary = Server::start();
        let replica = replica.replica_of(&primary).start();
        replica.wait_until("the replica follows", |replica| {
            replica.info("master_link_status") == "up"
        });
        let quorum = sentinels / 2 + 1;
        let lines = format!(
            "sentinel monitor mymaster 127.0.0.1 {} {quorum}\n\
             sentinel down-after-milliseconds mymaster 500\n\
             sentinel failover-timeout mymaster 4000\n",
            primary.port
        );
        let sentinels: Vec<Server> =
            (0..sentinels).map(|_| Launch::new().sentinel(&lines).start()).collect();
        let watched = Self { primary, replica, sentinels };
        watched.wait_for_discovery();
        watched
    }

    fn wait_for_discovery(&self) {
        let others = (self.sentinels.len() - 1).to_string();
        for sentinel in &self.sentinels {
            sentinel.wait_until("the Sentinels know each other and the replica", |sentinel| {
                let facts: Vec<String> = sentinel.query(&["SENTINEL", "MASTER", "mymaster"]);
                let fact = |name: &str| {
                    facts.iter().position(|fact| fact == name).map(|at| facts[at + 1].clone())
                };
                fact("num-slaves").as_deref() == Some("1")
                    && fact("num-other-sentinels") == Some(others.clone())
            });
        }
    }

    /// Returns the store section of a configuration.
    pub(crate) fn store(&self) -> String {
        let nodes: Vec<String> =
            self.sentinels.iter().map(|sentinel| format!("'{}'", sentinel.url())).collect();
        format!("sentinel: {{master: mymaster, nodes: [{}]}}", nodes.join(", "))
    }

    /// Triggers a failover and waits until the replica is the primary. Returns the time when the
    /// Sentinels reported it.
    pub(crate) fn fail_over(&self) -> Instant {
        self.trigger_failover();
        self.promotion()
    }

    /// Triggers a failover and demotes the old primary at once. Its connections stay open and get
    /// `READONLY`.
    pub(crate) fn fail_over_and_demote(&self) -> Instant {
        self.trigger_failover();
        self.replica.wait_until("the replica is promoted", Server::is_primary);
        let _: () = self.primary.query(&["REPLICAOF", "127.0.0.1", &self.replica.port.to_string()]);
        self.promotion()
    }

    fn trigger_failover(&self) {
        // A Sentinel needs INFO of the replica before it can promote it.
        self.sentinels[0].wait_until("the failover starts", |sentinel| {
            let begun: redis::RedisResult<()> = redis::cmd("SENTINEL")
                .arg(&["FAILOVER", "mymaster"])
                .query(&mut sentinel.connection());
            begun.is_ok()
        });
    }

    /// Waits until the replica is the primary and a Sentinel reports it. Returns that time.
    pub(crate) fn promotion(&self) -> Instant {
        self.replica.wait_until("the replica is promoted", |replica| {
            let names = |sentinel: &Server| {
                let (_, port): (String, u16) =
                    sentinel.query(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", "mymaster"]);
                port == replica.port
            };
            replica.is_primary() && self.sentinels.iter().any(names)
        })
    }

    /// Swaps primary and replica by hand; all connections stay open. The Sentinels are reconfigured
    /// as their guide describes, without a failover and a newer epoch. Returns the time when all
    /// knew.
    pub(crate) fn swap_by_hand(&self) -> Instant {
        for sentinel in &self.sentinels {
            let _: () = sentinel.query(&["SENTINEL", "REMOVE", "mymaster"]);
        }
        let (port, quorum) =
            (self.replica.port.to_string(), (self.sentinels.len() / 2 + 1).to_string());
        let _: () = self.replica.query(&["REPLICAOF", "NO", "ONE"]);
        let _: () = self.primary.query(&["REPLICAOF", "127.0.0.1", &port]);
        for sentinel in &self.sentinels {
            let _: () =
                sentinel.query(&["SENTINEL", "MONITOR", "mymaster", "127.0.0.1", &port, &quorum]);
        }
        Instant::now()
    }
}
