use std::time::Instant;

use crate::servers::{Launch, Server};

/// A primary and a replica that Sentinels watch.
pub(crate) struct Watched {
    pub(crate) primary: Server,
    pub(crate) replica: Server,
    sentinels: Vec<Server>,
}

impl Watched {
    /// The replica is started like this, and so many Sentinels look after both.
    pub(crate) fn start(replica: Launch, sentinels: usize) -> Self {
        let primary = Server::start();
        let replica = replica.replica_of(&primary).start();
        replica.until("the replica follows", |replica| replica.info("master_link_status") == "up");
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
        watched.until_all_know_each_other();
        watched
    }

    fn until_all_know_each_other(&self) {
        let others = (self.sentinels.len() - 1).to_string();
        for sentinel in &self.sentinels {
            sentinel.until("the Sentinels know each other and the replica", |sentinel| {
                let facts: Vec<String> = sentinel.query(&["SENTINEL", "MASTER", "mymaster"]);
                let fact = |name: &str| {
                    facts.iter().position(|fact| fact == name).map(|at| facts[at + 1].clone())
                };
                fact("num-slaves").as_deref() == Some("1")
                    && fact("num-other-sentinels") == Some(others.clone())
            });
        }
    }

    /// As a store in a configuration.
    pub(crate) fn store(&self) -> String {
        let nodes: Vec<String> =
            self.sentinels.iter().map(|sentinel| format!("'{}'", sentinel.url())).collect();
        format!("sentinel: {{master: mymaster, nodes: [{}]}}", nodes.join(", "))
    }

    /// Asks for a failover, and waits until the replica is the primary. The moment when who asks
    /// the Sentinels could know.
    pub(crate) fn fail_over(&self) -> Instant {
        self.ask_for_failover();
        self.promotion()
    }

    /// The same, but the old primary follows the new one at once. Its connections stay, and hear
    /// `READONLY`.
    pub(crate) fn fail_over_and_demote(&self) -> Instant {
        self.ask_for_failover();
        self.replica.until("the replica is promoted", Server::is_primary);
        let _: () = self.primary.query(&["REPLICAOF", "127.0.0.1", &self.replica.port.to_string()]);
        self.promotion()
    }

    fn ask_for_failover(&self) {
        // As long as it has not looked at the replica closely, it finds none that is fit.
        self.sentinels[0].until("the Sentinel begins", |sentinel| {
            let begun: redis::RedisResult<()> = redis::cmd("SENTINEL")
                .arg(&["FAILOVER", "mymaster"])
                .query(&mut sentinel.connection());
            begun.is_ok()
        });
    }

    /// Waits until the replica is the primary, and one of the Sentinels says so: who asks them
    /// could know. That moment.
    pub(crate) fn promotion(&self) -> Instant {
        self.replica.until("the replica is promoted", |replica| {
            let names = |sentinel: &Server| {
                let (_, port): (String, u16) =
                    sentinel.query(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", "mymaster"]);
                port == replica.port
            };
            replica.is_primary() && self.sentinels.iter().any(names)
        })
    }

    /// Makes the replica the primary and the primary its replica by hand, without a word to their
    /// clients: every connection stays. The Sentinels are told to watch the other one now, as their
    /// guide says; no failover, so no newer epoch. The moment when all knew.
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
