//! Whether a Redis is fit to hold counts: what `tidegate doctor` tells, and what `serve` warns of
//! at its start.
//!
//! Each check adds [`Finding`]s to a [`Report`]. What a Redis does not let us ask is unknown: a
//! note, never a failure. Everything here is bounded, in time and in number.

use std::time::Duration;

use serde::Serialize;
use tidegate::store::redis::Reply;
use tidegate::{Fleet, RedisStore, StoreError};

use self::info::Info;

mod acl;
mod clock;
mod cluster;
mod info;
mod keys;
mod latency;
mod memory;
mod replicas;
mod sentinels;
mod version;

/// How bad a finding is. The worst is the verdict.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Level {
    Ok,
    /// Worth knowing; nothing has to be done.
    Note,
    /// Works, and will not in a bad hour.
    Warning,
    /// Does not work, or limits do not hold.
    Error,
}

/// What a check has found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Finding {
    pub(crate) level: Level,
    /// A name that stays, such as `eviction-policy`.
    pub(crate) check: &'static str,
    pub(crate) node: Option<String>,
    pub(crate) message: String,
    pub(crate) advice: Option<String>,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Report {
    pub(crate) verdict: Level,
    pub(crate) nodes: Vec<Node>,
    pub(crate) findings: Vec<Finding>,
    /// Of all nodes together; `None` if no probe was answered.
    pub(crate) latency_us: Option<latency::Percentiles>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Node {
    pub(crate) address: String,
    pub(crate) role: Role,
    /// Such as `Redis 7.0.15`.
    pub(crate) version: Option<String>,
    /// How far its clock is ahead of this machine's.
    pub(crate) clock_ahead_us: Option<i64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Role {
    Primary,
    Replica,
    Sentinel,
}

/// What a Redis is examined for, and how thoroughly.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Examination<'a> {
    pub(crate) prefix: &'a str,
    /// How long a decision may take: what latency is compared with.
    pub(crate) timeout: Duration,
    /// Probes a node.
    pub(crate) probes: usize,
    /// Keys a node whose expiry is looked at.
    pub(crate) keys: usize,
}

/// A node that decides, while it is examined.
struct Subject<'a> {
    store: &'a RedisStore,
    address: &'a str,
    /// Empty where INFO is not permitted.
    info: Info,
    kind: Kind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Single,
    Sentinel,
    Cluster,
}

/// At the start of a service: enough to warn, and soon done.
const AT_START: (usize, usize) = (20, 1_000);
const TIME_AT_START: Duration = Duration::from_secs(10);

/// Examines a Redis that is connected to.
pub(crate) async fn examine(store: &RedisStore, examination: &Examination<'_>) -> Report {
    let mut report = Report::default();
    let nodes = store.nodes();
    let (primaries, sentinels): (Vec<_>, Vec<_>) = nodes.iter().partition(|node| node.primary);
    let mut kind = if sentinels.is_empty() { Kind::Single } else { Kind::Sentinel };
    let mut clocks = clock::Clocks::default();
    for (index, node) in primaries.iter().enumerate() {
        let address = node.address.as_str();
        let info = match store.ask_node(address, &["INFO"]).await {
            Ok(Reply::Text(text)) => Info::parse(&text),
            Ok(_) => Info::default(),
            Err(error) => {
                report.node(address, Role::Primary);
                report.add(Finding::error("connection", error.to_string()).on(address));
                continue;
            }
        };
        if info.text("redis_mode") == Some("cluster") || primaries.len() > 1 {
            kind = Kind::Cluster;
        }
        let subject = Subject { store, address, info, kind };
        if index == 0 {
            match kind {
                Kind::Single => report.add(Finding::ok("topology", "a single server")),
                Kind::Sentinel => sentinels::check(&subject, &sentinels, &mut report).await,
                Kind::Cluster => cluster::check(&subject, primaries.len(), &mut report).await,
            }
        }
        report.node(address, Role::Primary).version = subject.info.server();
        version::check(&subject, &mut report);
        acl::check(&subject, examination.prefix, &mut report).await;
        memory::check(&subject, &mut report).await;
        replicas::check(&subject, &mut clocks, &mut report).await;
        clocks.look(&subject, &mut report).await;
        latency::check(&subject, node.shard, examination, primaries.len(), &mut report).await;
        keys::check(&subject, examination, &mut report).await;
    }
    clocks.compare(&mut report);
    report
}

/// What is wrong with a Redis that could not be connected to, if it is a permission that lacks.
pub(crate) fn lacks_to_connect(error: &StoreError, prefix: &str, kind: Kind) -> Option<Report> {
    acl::lacks_to_connect(&error.to_string(), prefix, kind).map(Report::of)
}

/// Returns what a service does that starts while Redis is away.
pub(crate) fn instances(configured: Option<usize>) -> Finding {
    if let Some(instances) = configured {
        return Finding::ok(
            "instances",
            format!("store.instances is {instances}: limits are shared by that many at least"),
        );
    }
    let assumed = Fleet::ASSUMED_INSTANCES;
    let message = format!(
        "store.instances is not set: an instance that starts while Redis is away assumes that {assumed} share each limit"
    );
    Finding::note("instances", message).advice("set store.instances to the number of instances")
}

/// Logs each warning and each error once.
pub(crate) async fn warn_of(store: &RedisStore, prefix: &str, timeout: Duration) {
    let (probes, keys) = AT_START;
    let examination = Examination { prefix, timeout, probes, keys };
    let Ok(report) = tokio::time::timeout(TIME_AT_START, examine(store, &examination)).await else {
        tracing::warn!("Redis is too slow to be examined; `tidegate doctor` takes its time");
        return;
    };
    for finding in report.findings.iter().filter(|finding| finding.level >= Level::Warning) {
        let Finding { check, message, .. } = finding;
        let (node, advice) = (finding.node.as_deref(), finding.advice.as_deref());
        if finding.level == Level::Error {
            tracing::error!(check, node, advice, "Redis: {message}");
        } else {
            tracing::warn!(check, node, advice, "Redis: {message}");
        }
    }
}

impl Subject<'_> {
    /// The value of a setting; `None` if it is not there or we may not ask.
    async fn setting(&self, name: &str) -> Option<String> {
        let reply = self.store.ask_node(self.address, &["CONFIG", "GET", name]).await.ok()?;
        info::pairs(&reply)
            .into_iter()
            .find(|(found, _)| *found == name)
            .map(|(_, value)| value.to_owned())
    }

    fn found(&self, report: &mut Report, finding: Finding) {
        report.add(finding.on(self.address));
    }

    fn unknown(&self, report: &mut Report, check: &'static str, asked_by: &str) {
        let message = format!("unknown: this user may not ask by {asked_by}");
        self.found(report, Finding::note(check, message));
    }
}

impl Finding {
    fn new(level: Level, check: &'static str, message: impl Into<String>) -> Self {
        Self { level, check, node: None, message: message.into(), advice: None }
    }

    fn ok(check: &'static str, message: impl Into<String>) -> Self {
        Self::new(Level::Ok, check, message)
    }

    pub(crate) fn note(check: &'static str, message: impl Into<String>) -> Self {
        Self::new(Level::Note, check, message)
    }

    fn warning(check: &'static str, message: impl Into<String>) -> Self {
        Self::new(Level::Warning, check, message)
    }

    pub(crate) fn error(check: &'static str, message: impl Into<String>) -> Self {
        Self::new(Level::Error, check, message)
    }

    /// What would be right.
    fn advice(self, advice: impl Into<String>) -> Self {
        Self { advice: Some(advice.into()), ..self }
    }

    fn on(self, node: &str) -> Self {
        Self { node: Some(node.to_owned()), ..self }
    }
}

impl Default for Report {
    fn default() -> Self {
        Self { verdict: Level::Ok, nodes: Vec::new(), findings: Vec::new(), latency_us: None }
    }
}

impl Report {
    /// Nothing but this.
    pub(crate) fn of(finding: Finding) -> Self {
        let mut report = Self::default();
        report.add(finding);
        report
    }

    pub(crate) fn add(&mut self, finding: Finding) {
        self.verdict = self.verdict.max(finding.level);
        self.findings.push(finding);
    }

    /// The entry of a node, new or old.
    fn node(&mut self, address: &str, role: Role) -> &mut Node {
        let index =
            self.nodes.iter().position(|node| node.address == address).unwrap_or_else(|| {
                self.nodes.push(Node {
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
