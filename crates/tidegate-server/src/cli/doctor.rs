//! `tidegate doctor`: is this Redis fit to hold counts?

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::bail;
use clap::Args;
use clap::builder::FalseyValueParser;
use clap::builder::styling::Style;

use super::style;
use crate::config::{Config, RedisConfig, StoreConfig};
use crate::doctor::{self, Examination, Finding, Level, Report};
use tidegate::config::duration;

/// Examine a Redis: is it fit to hold counts?
///
/// Looks at its version, topology, replicas, eviction policy, memory, ACL, clock, scripts, latency,
/// and keys without expiry, and says what would be right. It leaves nothing there but scripts in
/// the cache and a key that expires within seconds. Exit code: 0 if all is well (notes are no
/// worry), 1 on warnings, 2 on errors, such as a Redis that cannot be reached.
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
pub(super) struct Doctor {
    /// The configuration, of which the store is examined; see `tidegate config`
    #[arg(long, value_name = "FILE", env = "TIDEGATE_CONFIG")]
    config: Option<PathBuf>,

    /// Examine this Redis, whatever the file says; nodes of a cluster with commas between them
    #[arg(long, value_name = "URL", env = "TIDEGATE_REDIS", hide_env_values = true)]
    redis: Option<String>,

    /// How long a decision may take, which latency is compared with [default: the file's, or 100ms]
    #[arg(long, value_name = "DURATION", env = "TIDEGATE_TIMEOUT", value_parser = duration::parse)]
    timeout: Option<Duration>,

    /// How many decisions to measure, a node
    #[arg(long, value_name = "N", env = "TIDEGATE_PROBES", default_value_t = 300, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    probes: u32,

    /// How many keys to look at, a node
    #[arg(long, value_name = "N", env = "TIDEGATE_KEYS", default_value_t = 10_000)]
    keys: u32,

    /// Print one JSON object
    #[arg(long, env = "TIDEGATE_JSON", value_parser = FalseyValueParser::new())]
    json: bool,
}

impl Doctor {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let store = match &self.config {
            Some(file) => Config::load(file)?.store,
            None if self.redis.is_none() => {
                bail!("which Redis? Give --redis URL, or --config FILE that has one")
            }
            None => StoreConfig::Memory { max_keys: 0 },
        };
        let report = match self.redis.as_ref().map_or(store.clone(), |urls| store.on_redis(urls)) {
            StoreConfig::Memory { .. } => {
                let message =
                    "there is no Redis to examine: this configuration keeps its counts in memory";
                Report::of(Finding::note("store", message))
            }
            StoreConfig::Redis(redis) => {
                let redis = match self.timeout {
                    Some(timeout) => redis.with_timeout(timeout),
                    None => *redis,
                };
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
                runtime.block_on(self.examine(&redis))?
            }
        };
        let mut output = anstream::stdout().lock();
        if self.json {
            writeln!(output, "{}", serde_json::to_string(&report)?)?;
        } else {
            write!(output, "{}", text(&report))?;
        }
        output.flush()?;
        Ok(match report.verdict {
            Level::Ok | Level::Note => ExitCode::SUCCESS,
            Level::Warning => ExitCode::from(1),
            Level::Error => ExitCode::from(2),
        })
    }

    async fn examine(&self, redis: &RedisConfig) -> anyhow::Result<Report> {
        let store = match redis.builder().connect().await {
            Ok(store) => store,
            Err(error) => {
                let lacks = doctor::lacks_to_connect(&error, redis.prefix(), redis.kind());
                return match lacks {
                    Some(report) => Ok(report),
                    // For machines a finding like any other; for people one line.
                    None if self.json => {
                        Ok(Report::of(Finding::error("connection", error.to_string())))
                    }
                    None => Err(error.into()),
                };
            }
        };
        let examination = Examination {
            prefix: redis.prefix(),
            timeout: redis.timeout(),
            probes: usize::try_from(self.probes)?,
            keys: usize::try_from(self.keys)?,
        };
        let mut report = doctor::examine(&store, &examination).await;
        // Without a file, only a Redis is examined, not a service.
        if self.config.is_some() {
            report.add(doctor::instances(redis.instances));
        }
        Ok(report)
    }
}

/// For people: a line a finding, and one below it with what would be right; by nodes, if there are
/// several.
fn text(report: &Report) -> String {
    let mut nodes: Vec<&str> = Vec::new();
    for node in report.findings.iter().filter_map(|finding| finding.node.as_deref()) {
        if !nodes.contains(&node) {
            nodes.push(node);
        }
    }
    let of = |node| report.findings.iter().filter(move |finding| finding.node.as_deref() == node);
    let mut lines: Vec<String> = of(None).flat_map(lines).collect();
    for node in &nodes {
        if nodes.len() > 1 {
            lines.push(format!("{}{node}{}", style::HEADING, style::RESET));
        }
        lines.extend(of(Some(node)).flat_map(self::lines));
    }
    lines.push(verdict(report));
    lines.join("\n") + "\n"
}

fn lines(finding: &Finding) -> impl Iterator<Item = String> + use<> {
    let (style, name) = styled(finding.level);
    let (reset, check) = (style::RESET, finding.check);
    let found = format!("{style}{name:<7}{reset}  {check:<21}  {}", finding.message);
    let advice =
        finding.advice.as_ref().map(|advice| format!("{:<32}{}→ {advice}{reset}", "", style::NOTE));
    std::iter::once(found).chain(advice)
}

fn styled(level: Level) -> (Style, &'static str) {
    match level {
        Level::Ok => (style::ALLOWED, "ok"),
        Level::Note => (style::NOTE, "note"),
        Level::Warning => (style::WARNING, "warning"),
        Level::Error => (style::ERROR, "error"),
    }
}

/// Such as `fit, with 2 notes` and `not fit: 1 error, 1 warning`.
fn verdict(report: &Report) -> String {
    let count = |level, name: &str| {
        let count = report.findings.iter().filter(|finding| finding.level == level).count();
        (count > 0).then(|| format!("{count} {name}{}", if count == 1 { "" } else { "s" }))
    };
    let counts = [
        count(Level::Error, "error"),
        count(Level::Warning, "warning"),
        count(Level::Note, "note"),
    ];
    let counts = counts.into_iter().flatten().collect::<Vec<_>>().join(", ");
    let (style, _) = styled(report.verdict);
    let verdict = match report.verdict {
        Level::Ok => "fit".to_owned(),
        Level::Note => format!("fit, with {counts}"),
        Level::Warning => format!("fit for good days only: {counts}"),
        Level::Error => format!("not fit: {counts}"),
    };
    format!("{style}{verdict}{}", style::RESET)
}
