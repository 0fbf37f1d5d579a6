//! `tidegate doctor`: checks whether a Redis setup is fit for rate limiting.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::bail;
use clap::Args;
use clap::builder::FalseyValueParser;
use clap::builder::styling::Style;
use tidegate_config::duration;

use super::redis::RedisFlags;
use crate::doctor::{self, CheckOptions, DoctorReport, Finding, Severity};
use crate::tool::{output, style};
use tidegate_config::{Config, RedisConfig, StoreConfig, StoreNeeds};

/// Check whether a Redis setup is fit for rate limiting.
///
/// Checks its version, topology, replicas, eviction policy, memory, ACL, clock, scripts, latency,
/// routing, and keys without expiry, and recommends changes. It leaves nothing behind except cached
/// scripts and a key that expires within seconds. Exit code: 0 if there are only notes or nothing to
/// report, 1 on warnings, 2 on errors, such as an unreachable Redis.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  One server, or a cluster by some of its nodes:
    tidegate doctor --redis redis://127.0.0.1:6379
    tidegate doctor --redis redis://10.0.0.1:6379,redis://10.0.0.2:6379

  The Redis, the prefix and the timeout that the service uses:
    tidegate doctor --config tidegate.yaml

  In a pipeline, as one JSON object: verdict, nodes, findings, latency_us:
    tidegate doctor --config tidegate.yaml --json")]
pub struct DoctorCommand {
    /// Configuration file whose store is checked; see `tidegate config`
    #[arg(long, value_name = "FILE", env = "TIDEGATE_CONFIG")]
    config: Option<PathBuf>,

    #[command(flatten)]
    redis: RedisFlags,

    /// Timeout of a decision, which latency is compared with [default: the file's, or 100ms]
    #[arg(long, value_name = "DURATION", env = "TIDEGATE_TIMEOUT", value_parser = duration::parse)]
    timeout: Option<Duration>,

    /// Number of decisions to measure per node
    #[arg(long, value_name = "N", env = "TIDEGATE_PROBES")]
    #[arg(default_value_t = 300, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    probes: u32,

    /// Maximum number of keys to check per node
    #[arg(long, value_name = "N", env = "TIDEGATE_KEYS", default_value_t = 10_000)]
    keys: u32,

    /// Print one JSON object
    #[arg(long, env = "TIDEGATE_JSON", value_parser = FalseyValueParser::new())]
    json: bool,
}

impl DoctorCommand {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let mut needs = StoreNeeds::default();
        let store = match &self.config {
            Some(file) => {
                let config = Config::load(file)?;
                needs = config.store_needs();
                config.store
            }
            None if !self.redis.has_url() => {
                bail!("no Redis to check: give --redis URL, or --config FILE with one")
            }
            None => StoreConfig::Memory(Box::default()),
        };
        self.redis.print_warning();
        let report = match self.redis.apply(store)? {
            StoreConfig::Memory(_) => {
                let message =
                    "there is no Redis to check: this configuration keeps its counters in memory";
                DoctorReport::from(Finding::note("store", message))
            }
            StoreConfig::Redis(redis) => {
                let redis = match self.timeout {
                    Some(timeout) => redis.with_timeout(timeout),
                    None => *redis,
                };
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
                runtime.block_on(self.check(&redis, needs))?
            }
        };
        let json = self.json.then(|| serde_json::to_string(&report)).transpose()?;
        output::print(json, |output| output.write_all(text(&report).as_bytes()))?;
        Ok(match report.verdict {
            Severity::Ok | Severity::Note => ExitCode::SUCCESS,
            Severity::Warning => ExitCode::from(1),
            Severity::Error => ExitCode::from(2),
        })
    }

    async fn check(&self, redis: &RedisConfig, needs: StoreNeeds) -> anyhow::Result<DoctorReport> {
        let store = match redis.builder().connect().await {
            Ok(store) => store,
            Err(error) => {
                let finding = doctor::connection_finding(&error, redis.prefix(), redis.topology());
                return Ok(DoctorReport::from(finding));
            }
        };
        let (probes, keys) = (usize::try_from(self.probes)?, usize::try_from(self.keys)?);
        let options = CheckOptions::new(redis, needs, probes, keys);
        let mut report = doctor::run_checks(&store, &options).await;
        // Without a file, there are no settings of a service to check.
        if self.config.is_some() {
            report.add(doctor::instances(redis));
        }
        Ok(report)
    }
}

/// Formats a report as text: one line per finding with its advice below, grouped by node if there
/// are several.
fn text(report: &DoctorReport) -> String {
    let mut nodes: Vec<&str> = Vec::new();
    for node in report.findings.iter().filter_map(|finding| finding.node.as_deref()) {
        if !nodes.contains(&node) {
            nodes.push(node);
        }
    }
    let findings_of =
        |node| report.findings.iter().filter(move |finding| finding.node.as_deref() == node);
    let mut lines: Vec<String> = findings_of(None).flat_map(lines).collect();
    for node in &nodes {
        if nodes.len() > 1 {
            lines.push(format!("{}{node}{}", style::HEADING, style::RESET));
        }
        lines.extend(findings_of(Some(node)).flat_map(self::lines));
    }
    lines.push(verdict(report));
    lines.join("\n") + "\n"
}

fn lines(finding: &Finding) -> impl Iterator<Item = String> + use<> {
    let (style, name) = styled(finding.level);
    let reset = style::RESET;
    let message = format!("{style}{name:<7}{reset}  {:<21}  {}", finding.check, finding.message);
    let advice =
        finding.advice.as_ref().map(|advice| format!("{:<32}{}→ {advice}{reset}", "", style::NOTE));
    std::iter::once(message).chain(advice)
}

fn styled(level: Severity) -> (Style, &'static str) {
    match level {
        Severity::Ok => (style::ALLOWED, "ok"),
        Severity::Note => (style::NOTE, "note"),
        Severity::Warning => (style::WARNING, "warning"),
        Severity::Error => (style::ERROR, "error"),
    }
}

/// Formats the verdict, such as `fit, with 2 notes` or `not fit: 1 error, 1 warning`.
fn verdict(report: &DoctorReport) -> String {
    let count = |level, name: &str| {
        let count = report.findings.iter().filter(|finding| finding.level == level).count();
        (count > 0).then(|| format!("{count} {name}{}", if count == 1 { "" } else { "s" }))
    };
    let counts = [
        count(Severity::Error, "error"),
        count(Severity::Warning, "warning"),
        count(Severity::Note, "note"),
    ];
    let counts = counts.into_iter().flatten().collect::<Vec<_>>().join(", ");
    let (style, _) = styled(report.verdict);
    let verdict = match report.verdict {
        Severity::Ok => "fit".to_owned(),
        Severity::Note => format!("fit, with {counts}"),
        Severity::Warning => format!("fit, but not resilient: {counts}"),
        Severity::Error => format!("not fit: {counts}"),
    };
    format!("{style}{verdict}{}", style::RESET)
}
