//! Checks whether a Redis setup is fit for rate limiting: for `tidegate doctor`, and for the
//! warnings of `serve` at startup.
//!
//! Each check adds [`Finding`]s to a [`DoctorReport`]. If the Redis user lacks the permission for a
//! check, its result is a note, never a failure. All checks are bounded in time and in number.

use std::time::Duration;

use serde::Serialize;
use tidegate::store::redis::Reply;
use tidegate::{Fleet, RedisStore, StoreError};

use crate::tool::redis_info::{self, Info};
use tidegate_config::duration::readable;
use tidegate_config::{RedisConfig, RedisTopology, StoreNeeds};

mod acl;
mod clock;
mod cluster;
mod connection;
mod declared_keys;
mod keys;
mod latency;
mod memory;
mod replicas;
mod routing;
mod sentinels;
mod version;

/// Severity of a finding. The highest one is the verdict.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    #[default]
    Ok,
    /// Information that needs no action.
    Note,
    /// Works now, but not under load or during a failover.
    Warning,
    /// Does not work, or limits are not enforced.
    Error,
}

/// Result of one check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    pub level: Severity,
    /// Stable name of the check, such as `eviction-policy`.
    pub check: &'static str,
    pub node: Option<String>,
    pub message: String,
    pub advice: Option<String>,
}

#[derive(Debug, Default, PartialEq, Eq, Serialize)]
pub struct DoctorReport {
    pub verdict: Severity,
    pub nodes: Vec<NodeReport>,
    pub findings: Vec<Finding>,
    /// Latency over all nodes; `None` if all probes failed.
    pub latency_us: Option<latency::LatencyPercentiles>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct NodeReport {
    pub address: String,
    pub role: NodeRole,
    /// Server and version, such as `Redis 7.0.15`.
    pub version: Option<String>,
    /// Clock difference to this machine; positive if the node is ahead.
    pub clock_ahead_us: Option<i64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum NodeRole {
    Primary,
    Replica,
    Sentinel,
}

/// Parameters of the checks.
#[derive(Debug, Clone, Copy)]
pub struct CheckOptions<'a> {
    pub prefix: &'a str,
    /// Name by which sentinels know the primary.
    pub sentinel_master: Option<&'a str>,
    /// Largest limit of a log that is stored as a sorted set; 0 without one.
    pub largest_log: u64,
    /// Longest window of the policies; zero if they are unknown.
    pub longest_window: Duration,
    /// Timeout of a decision, which latency is compared with.
    pub timeout: Duration,
    /// Number of latency probes per node.
    pub probes: usize,
    /// Maximum number of keys per node whose expiry is checked.
    pub max_keys: usize,
}

impl<'a> CheckOptions<'a> {
    pub fn new(config: &'a RedisConfig, needs: StoreNeeds, probes: usize, max_keys: usize) -> Self {
        let (prefix, sentinel_master) = (config.prefix(), config.sentinel_master());
        let StoreNeeds { largest_log, longest_window } = needs;
        let timeout = config.timeout();
        Self { prefix, sentinel_master, largest_log, longest_window, timeout, probes, max_keys }
    }

    /// Returns the longest window as text, if it is so long that its counts should survive a
    /// restart.
    fn long_period(&self) -> Option<String> {
        (self.longest_window >= DAY).then(|| readable(self.longest_window))
    }
}

/// Redis node that is being checked.
struct NodeUnderTest<'a> {
    store: &'a RedisStore,
    address: &'a str,
    /// Empty if INFO is not permitted.
    info: Info,
    topology: RedisTopology,
    config: ConfigGet,
    options: &'a CheckOptions<'a>,
    report: &'a mut DoctorReport,
}

/// Availability of CONFIG GET.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ConfigGet {
    Available,
    NotPermitted,
    /// The server has no such command, as most managed services.
    Absent,
}

/// Window from which on counts should survive a restart of Redis.
const DAY: Duration = Duration::from_secs(86_400);
/// Few probes and keys at startup, so that the checks finish quickly.
const STARTUP_PROBES: usize = 20;
const STARTUP_MAX_KEYS: usize = 1_000;
const STARTUP_TIMEOUT: Duration = Duration::from_secs(10);

/// Runs all checks on a connected Redis.
pub async fn run_checks(store: &RedisStore, options: &CheckOptions<'_>) -> DoctorReport {
    let mut report = DoctorReport::default();
    let nodes = store.nodes();
    let (primaries, sentinels): (Vec<_>, Vec<_>) = nodes.iter().partition(|node| node.primary);
    let mut topology =
        if sentinels.is_empty() { RedisTopology::Single } else { RedisTopology::Sentinel };
    let mut clocks = clock::Clocks::default();
    for (index, node) in primaries.iter().enumerate() {
        let address = node.address.as_str();
        let info = match read_info(store, address).await {
            Ok(info) => info,
            Err(error) => {
                report.node(address, NodeRole::Primary);
                let finding = connection_finding(&error, options.prefix, topology);
                report.add(finding.on(address));
                continue;
            }
        };
        if primaries.len() > 1 || is_cluster_node(store, address, &info).await {
            topology = RedisTopology::Cluster;
        }
        let node =
            &mut NodeUnderTest::new(store, address, info, topology, options, &mut report).await;
        if index == 0 {
            match topology {
                RedisTopology::Single => {
                    node.report.add(Finding::ok("topology", "a single server"));
                }
                RedisTopology::Sentinel => sentinels::check(node, &sentinels).await,
                RedisTopology::Cluster => cluster::check(node, primaries.len()).await,
            }
        }
        node.report.node(address, NodeRole::Primary).version = node.info.server();
        version::check(node);
        node.check_config_command();
        acl::check(node).await;
        match topology {
            RedisTopology::Cluster => cluster::check_migration(node).await,
            RedisTopology::Single | RedisTopology::Sentinel => routing::check(node).await,
        }
        memory::check(node).await;
        replicas::check(node, &mut clocks).await;
        clocks.measure(node).await;
        declared_keys::check(node).await;
        latency::check(node, primaries.len()).await;
        clock::check_source(node);
        let largest_log = keys::check(node).await.max(options.largest_log);
        memory::check_lazy_freeing(node, largest_log).await;
    }
    clocks.compare(&mut report);
    report
}

/// Returns the fields of INFO, or none if INFO is not permitted.
async fn read_info(store: &RedisStore, address: &str) -> Result<Info, StoreError> {
    Ok(match store.ask_node(address, &["INFO"]).await? {
        Reply::Text(text) => Info::parse(&text),
        _ => Info::default(),
    })
}

/// Returns whether a node is part of a cluster. A proxy may report a cluster behind it, but does
/// not offer its commands.
async fn is_cluster_node(store: &RedisStore, address: &str, info: &Info) -> bool {
    if info.text("cluster_enabled") != Some("1") {
        return false;
    }
    let slots = store.ask_node(address, &["CLUSTER", "SLOTS"]).await;
    !matches!(slots, Ok(Reply::Error(error)) if redis_info::is_absent_command(&error))
}

/// Returns the finding of a node that cannot be reached, with advice if the cause is known.
pub fn connection_finding(error: &StoreError, prefix: &str, topology: RedisTopology) -> Finding {
    acl::missing_at_connect(&error.to_string(), prefix, topology)
        .or_else(|| connection::finding(error))
        .unwrap_or_else(|| Finding::error(connection::CHECK, error.to_string()))
}

/// Checks the number of instances that a service assumes when it starts during an outage.
pub fn instances(redis: &RedisConfig) -> Finding {
    if !redis.settings.heartbeat {
        return Finding::ok("instances", "store.heartbeat is off: this is the only instance");
    }
    if let Some(instances) = redis.settings.instances {
        return Finding::ok(
            "instances",
            format!("store.instances is {instances}: each limit is shared by at least that many"),
        );
    }
    let assumed = Fleet::ASSUMED_INSTANCES;
    let message = format!(
        "store.instances is not set: an instance that starts while Redis is down assumes that \
         {assumed} instances share each limit"
    );
    Finding::note("instances", message).advice("set store.instances to the number of instances")
}

/// Runs short checks at startup and logs each warning and each error once.
pub async fn log_warnings(store: &RedisStore, config: &RedisConfig, needs: StoreNeeds) {
    let options = CheckOptions::new(config, needs, STARTUP_PROBES, STARTUP_MAX_KEYS);
    let checks = run_checks(store, &options);
    let Ok(report) = tokio::time::timeout(STARTUP_TIMEOUT, checks).await else {
        tracing::warn!(
            "checking Redis took too long; `tidegate doctor` checks it without this time limit"
        );
        return;
    };
    for finding in report.findings.iter().filter(|finding| finding.level >= Severity::Warning) {
        let Finding { check, message, .. } = finding;
        let node = finding.node.as_deref();
        let advice = finding.advice.as_deref();
        if finding.level == Severity::Error {
            tracing::error!(check, node, advice, "Redis: {message}");
        } else {
            tracing::warn!(check, node, advice, "Redis: {message}");
        }
    }
}

impl<'a> NodeUnderTest<'a> {
    async fn new(
        store: &'a RedisStore,
        address: &'a str,
        info: Info,
        topology: RedisTopology,
        options: &'a CheckOptions<'a>,
        report: &'a mut DoctorReport,
    ) -> Self {
        let config = match store.ask_node(address, &["CONFIG", "GET", "maxmemory"]).await {
            Ok(Reply::Error(error)) if redis_info::is_absent_command(&error) => ConfigGet::Absent,
            Ok(Reply::Error(_)) | Err(_) => ConfigGet::NotPermitted,
            Ok(_) => ConfigGet::Available,
        };
        Self { store, address, info, topology, config, options, report }
    }

    async fn ask(&self, command: &[&str]) -> Result<Reply, StoreError> {
        self.store.ask_node(self.address, command).await
    }

    async fn ask_all<'s>(
        &self,
        commands: &[impl AsRef<[&'s str]>],
    ) -> Result<Vec<Reply>, StoreError> {
        let commands: Vec<&[&str]> = commands.iter().map(AsRef::as_ref).collect();
        self.store.ask_node_all(self.address, &commands).await
    }

    /// Returns the value of a setting; `None` if it does not exist or CONFIG GET does not work.
    async fn setting(&self, name: &str) -> Option<String> {
        if self.config != ConfigGet::Available {
            return None;
        }
        let reply = self.ask(&["CONFIG", "GET", name]).await.ok()?;
        redis_info::value(&redis_info::pairs(&reply), name).map(str::to_owned)
    }

    /// Returns the advice to change a setting, such as `maxmemory-policy noeviction`.
    fn set_advice(&self, setting: &str) -> String {
        match self.config {
            ConfigGet::Absent => format!("set {setting} in the console of the service"),
            ConfigGet::Available | ConfigGet::NotPermitted => {
                format!("CONFIG SET {setting} (and in redis.conf)")
            }
        }
    }

    /// Returns the note that a setting is unknown.
    fn unknown_setting(&self, check: &'static str) -> Finding {
        match self.config {
            ConfigGet::Absent => Finding::note(check, "unknown: this server has no CONFIG command"),
            ConfigGet::Available | ConfigGet::NotPermitted => Finding::unknown(check, "CONFIG GET"),
        }
    }

    /// Notes that the server has no CONFIG, which is no lack of a permission.
    fn check_config_command(&mut self) {
        if self.config == ConfigGet::Absent {
            let message = "this server has no CONFIG command, as most managed services: its \
                           settings cannot be read from here";
            let advice = "look up maxmemory-policy, lazyfree-lazy-expire and \
                          min-replicas-to-write in the console of the service; docs/redis.md \
                          lists the services";
            self.add(Finding::note("config", message).advice(advice));
        }
    }

    /// Adds a finding about this node.
    fn add(&mut self, finding: Finding) {
        self.report.add(finding.on(self.address));
    }

    /// Adds a note that a check was skipped for lack of a permission.
    fn add_unknown(&mut self, check: &'static str, command: &str) {
        self.add(Finding::unknown(check, command));
    }
}

impl Finding {
    fn new(level: Severity, check: &'static str, message: impl Into<String>) -> Self {
        Self { level, check, node: None, message: message.into(), advice: None }
    }

    fn ok(check: &'static str, message: impl Into<String>) -> Self {
        Self::new(Severity::Ok, check, message)
    }

    pub fn note(check: &'static str, message: impl Into<String>) -> Self {
        Self::new(Severity::Note, check, message)
    }

    fn warning(check: &'static str, message: impl Into<String>) -> Self {
        Self::new(Severity::Warning, check, message)
    }

    pub fn error(check: &'static str, message: impl Into<String>) -> Self {
        Self::new(Severity::Error, check, message)
    }

    /// Note that a check was skipped because the user may not run a command.
    fn unknown(check: &'static str, command: &str) -> Self {
        Self::note(check, format!("unknown: this user may not run {command}"))
    }

    /// Adds the recommended action.
    fn advice(self, advice: impl Into<String>) -> Self {
        Self { advice: Some(advice.into()), ..self }
    }

    fn on(self, node: &str) -> Self {
        Self { node: Some(node.to_owned()), ..self }
    }
}

impl From<Finding> for DoctorReport {
    fn from(finding: Finding) -> Self {
        let mut report = Self::default();
        report.add(finding);
        report
    }
}

impl DoctorReport {
    pub fn add(&mut self, finding: Finding) {
        self.verdict = self.verdict.max(finding.level);
        self.findings.push(finding);
    }

    /// Returns the entry of a node, which is added if necessary.
    fn node(&mut self, address: &str, role: NodeRole) -> &mut NodeReport {
        let index =
            self.nodes.iter().position(|node| node.address == address).unwrap_or_else(|| {
                self.nodes.push(NodeReport {
                    address: address.to_owned(),
                    role,
                    version: None,
                    clock_ahead_us: None,
                });
                self.nodes.len() - 1
            });
        &mut self.nodes[index]
    }
}
