//! `tidegate simulate`: traffic in virtual time against policies.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use clap::Args;
use clap::builder::FalseyValueParser;
use tidegate::{Algorithm, Policies};
use tidegate_config::duration;

use super::quota::{LimitFlags, algorithm_parser};
use crate::simulate::expect::Expectation;
use crate::simulate::load::{GeneratedLoad, LoadKind};
use crate::simulate::log::LogArgs;
use crate::simulate::output::OutputFile;
use crate::simulate::retry::RetryKind;
use crate::simulate::variants::{self, QuotaChanges};
use crate::simulate::{
    self, ReplayResult, Simulation, SimulationReport, TrafficRequest, TrafficSummary, decisions,
};
use crate::tool::progress::ProgressBar;
use crate::tool::table::{PageFormat, TextPage};
use crate::tool::text::float;
use crate::tool::{output, style};

/// Period of a generated load without a window to take it from.
const DEFAULT_INTERVAL: Duration = Duration::from_secs(60);
const DAY: Duration = Duration::from_secs(86_400);

/// Try policies on generated traffic or on access logs, in virtual time.
///
/// The decisions are those that the service would have made: the same code, with the clock set to
/// the time of each request. "over" and "under" are compared with an exact log of the same limit:
/// requests that were admitted although it would deny them, and the other way round.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  All algorithms at one limit, with the traffic that fixed-window handles worst:
    tidegate simulate --load boundary --rate 200 --limit 1000 --window 10s --compare

  The policies of production on the traffic of yesterday:
    tidegate simulate --access-log access.log.1.gz --config tidegate.yaml

  The same with another limit for one policy, and a picture:
    tidegate simulate --access-log access.log --config tidegate.yaml \\
      --policy per-address --limit 300 --svg traffic.svg

  Logs in a format of your own, and only failed logins of one hour:
    tidegate simulate --access-log 'logs/access.log*' --config tidegate.yaml \\
      --log-format '$remote_addr [$time_iso8601] \"$request\" $status' \\
      --from 2026-11-16T07:00:00Z --until 2026-11-16T08:00:00Z --where status=401

  Requests that a new configuration would deny:
    tidegate simulate --access-log access.log --config tidegate.yaml --what-if new.yaml

  Ten thousand clients, a few of them busy, for one hour:
    tidegate simulate --load poisson --rate 500 --keys 10000 --zipf 1 --duration 1h \\
      --config tidegate.yaml --attribute path=/api/items

  In a pull request: exit code 1 if the new limits deny more than this, and a summary:
    tidegate simulate --access-log access.log --config tidegate.yaml --markdown \\
      --expect 'per-address.denied<0.1%' --expect-key '66.249.66.1 denied=0'

  Clients that send denied requests again:
    tidegate simulate --access-log access.log --config tidegate.yaml --retry backoff")]
pub struct SimulateCommand {
    #[command(flatten)]
    traffic: TrafficFlags,

    #[command(flatten)]
    policies: PolicyFlags,

    /// Print one JSON object
    #[arg(long, env = "TIDEGATE_JSON", value_parser = FalseyValueParser::new())]
    json: bool,

    /// Print the tables in Markdown
    #[arg(long, value_parser = FalseyValueParser::new(), conflicts_with = "json")]
    markdown: bool,

    /// Number of keys in a table, those with most denials first
    #[arg(long, value_name = "N", default_value_t = 10)]
    top: usize,

    /// Exit with code 1 unless this holds: POLICY.COUNT or COUNT (of all requests), an operator
    /// (< <= = >= >), and a number or percentage. Counts of a policy are requests, admitted, denied,
    /// over, under, keys, `denied_keys`; those of all requests also `shadow_denied`, `newly_denied`
    #[arg(long, value_name = "CONDITION", value_parser = Expectation::parse)]
    expect: Vec<Expectation>,

    /// Exit with code 1 unless this holds for a key: KEY, and a condition on requests, admitted or
    /// denied
    #[arg(long, value_name = "CONDITION", value_parser = Expectation::parse_key)]
    expect_key: Vec<Expectation>,

    /// Write the counts of all keys as CSV
    #[arg(long, value_name = "FILE")]
    keys_csv: Option<PathBuf>,

    /// Write a picture: admitted and denied requests over time, and the limit
    #[arg(long, value_name = "FILE", env = "TIDEGATE_SVG")]
    svg: Option<PathBuf>,

    /// Write each decision as a JSON line: the time, line, method, path and keys of the request, and
    /// the answer of the HTTP API
    #[arg(long, value_name = "FILE", env = "TIDEGATE_DECISIONS")]
    decisions: Option<PathBuf>,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Traffic")]
struct TrafficFlags {
    /// Generate traffic of this shape
    #[arg(long, value_name = "SHAPE", env = "TIDEGATE_LOAD")]
    #[arg(conflicts_with = "access_log", required_unless_present = "access_log")]
    load: Option<LoadKind>,

    /// Mean requests per second of all clients
    #[arg(long, value_name = "R", env = "TIDEGATE_RATE", default_value_t = 100.0)]
    rate: f64,

    /// Number of clients
    #[arg(long, value_name = "N", env = "TIDEGATE_KEYS", default_value_t = 1)]
    keys: u64,

    /// Exponent of Zipf's law for the requests per client; 0: all equal
    #[arg(long, value_name = "S", env = "TIDEGATE_ZIPF", default_value_t = 0.0)]
    zipf: f64,

    /// Length of the traffic
    #[arg(long, value_name = "DURATION", env = "TIDEGATE_DURATION")]
    #[arg(default_value = "60s", value_parser = duration::parse)]
    duration: Duration,

    /// Period of burst, boundary and diurnal [default: the window; 1d for diurnal]
    #[arg(long, value_name = "DURATION", env = "TIDEGATE_PERIOD", value_parser = duration::parse)]
    period: Option<Duration>,

    /// Start of the random numbers; the same seed gives the same traffic
    #[arg(long, value_name = "N", env = "TIDEGATE_SEED", default_value_t = 1)]
    seed: u64,

    /// Attribute of all generated requests, such as path=/api/items; GET / by default. Other
    /// attributes have the name of the client
    #[arg(long = "attribute", value_name = "NAME=VALUE", value_parser = attribute)]
    attributes: Vec<(String, String)>,

    /// Clients send a denied request again, at most 10 times
    #[arg(long, value_name = "WHEN", conflicts_with = "what_if")]
    retry: Option<RetryKind>,

    #[command(flatten)]
    logs: LogArgs,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Policies")]
struct PolicyFlags {
    /// Configuration file; see `tidegate config`
    #[arg(long, value_name = "FILE", env = "TIDEGATE_CONFIG")]
    config: Option<PathBuf>,

    /// Policy of the file that the flags below change
    #[arg(long, value_name = "NAME", env = "TIDEGATE_POLICY", requires = "config")]
    policy: Option<String>,

    #[command(flatten)]
    limits: LimitFlags,

    /// Rate limit algorithm [default: sliding-log, or that of the policy]
    #[arg(long, value_name = "ALGORITHM", env = "TIDEGATE_ALGORITHM")]
    #[arg(value_parser = algorithm_parser())]
    algorithm: Option<Algorithm>,

    /// Capacity of a token-bucket or leaky-bucket [default: the limit]
    #[arg(long, value_name = "B", env = "TIDEGATE_BURST")]
    burst: Option<u64>,

    /// Attribute to count by, without a file; several are counted together
    #[arg(long = "key", value_name = "ATTRIBUTE")]
    #[arg(default_value = "ip", value_delimiter = ',', conflicts_with = "config")]
    key: Vec<String>,

    /// Compare all algorithms at this limit
    #[arg(long, value_parser = FalseyValueParser::new(), conflicts_with = "algorithm")]
    compare: bool,

    /// Compare with another configuration file: the requests that it would newly deny
    #[arg(long, value_name = "FILE", requires = "config", conflicts_with = "compare")]
    what_if: Option<PathBuf>,
}

/// Parses `NAME=VALUE`.
pub(super) fn attribute(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("write it like path=/api/items")?;
    let is_custom = name.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c));
    if name.is_empty() || !is_custom {
        return Err(format!("{name:?} is not the name of an attribute"));
    }
    Ok((name.to_owned(), value.to_owned()))
}

impl SimulateCommand {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let (simulation, known) = self.policies.simulation()?;
        let svg = OutputFile::create("--svg", self.svg.as_ref())?;
        let mut decisions = OutputFile::create("--decisions", self.decisions.as_ref())?;
        let keys = OutputFile::create("--keys-csv", self.keys_csv.as_ref())?;
        let mut report = self.traffic.replay(simulation, &known, decisions.as_mut())?;
        if let Some(error) = report.undecided() {
            bail!("no request could be decided: {error}");
        }
        if let Some(name) = report.unmatched() {
            let hint = match self.traffic.load {
                Some(_) => {
                    "set the attributes that they match, such as --attribute path=/api/items"
                }
                None => "the log lacks the attributes that they match or count by",
            };
            bail!("no policy of {name} applies to any request: {hint}");
        }
        if let Some(file) = svg {
            file.complete(simulate::draw(&report).as_bytes())?;
        }
        if let Some(file) = decisions {
            file.complete(b"")?;
        }
        if let Some(mut file) = keys {
            report.write_keys(&mut file).context("--keys-csv")?;
            file.complete(b"")?;
        }
        let is_as_expected = report.expect(&[self.expect, self.expect_key].concat())?;
        output::print(self.json.then(|| report.to_json(self.top)), |output| {
            let format = if self.markdown { PageFormat::Markdown } else { PageFormat::Terminal };
            report.write(&mut TextPage::new(output, format), self.top)
        })?;
        for failure in report.failures() {
            anstream::eprintln!("{}error:{} {failure}", style::ERROR, style::RESET);
        }
        Ok(if is_as_expected { ExitCode::SUCCESS } else { ExitCode::from(1) })
    }
}

/// Policies of the current configuration, and the window of the one that flags change.
struct KnownPolicies {
    policies: Policies,
    window: Option<Duration>,
}

impl PolicyFlags {
    fn simulation(&self) -> anyhow::Result<(Simulation, KnownPolicies)> {
        let changes = QuotaChanges {
            algorithm: self.algorithm,
            limit: self.limits.limit,
            window: self.limits.window,
            burst: self.burst,
        };
        let policy = self.policy.as_deref();
        let current = match &self.config {
            // The burst of a comparison is that of the buckets.
            None if self.compare => {
                let bucket = changes.burst.map(|_| Algorithm::TokenBucket);
                variants::one_policy(QuotaChanges { algorithm: bucket, ..changes }, &self.key)?
            }
            None => variants::one_policy(changes, &self.key)?,
            Some(file) => variants::load("--config", file)?.with_changes(policy, changes)?,
        };
        let varied = match policy {
            Some(name) => current.policies.get(name),
            None => current.policies.iter().next(),
        };
        let window = varied.map(|policy| policy.quota().window()).filter(|it| !it.is_zero());
        let known = KnownPolicies { policies: current.policies.clone(), window };
        let simulation = match &self.what_if {
            Some(file) => Simulation::what_if(current, variants::load("--what-if", file)?),
            None if self.compare => Simulation::new(current.for_all_algorithms(policy)?),
            None => Simulation::new(vec![current]),
        };
        Ok((simulation, known))
    }
}

impl TrafficFlags {
    /// Decides all requests of the traffic.
    fn replay(
        &self,
        mut simulation: Simulation,
        known: &KnownPolicies,
        mut output: Option<&mut OutputFile>,
    ) -> anyhow::Result<SimulationReport> {
        let mut traffic = TrafficSummary::default();
        ensure!(
            self.load.is_some() || self.attributes.is_empty(),
            "--attribute is for generated traffic: the requests of a log have their own"
        );
        let reader = self.load.is_none().then(|| self.logs.open()).transpose()?;
        let names = reader.iter().flat_map(|reader| (0..).map(|index| reader.file_name(index)));
        let files: Vec<String> =
            names.take_while(|name| !name.is_empty()).map(str::to_owned).collect();
        let mut written = Ok(());
        let mut write = |request: &dyn TrafficRequest, outcome: &ReplayResult<'_>| {
            if let Some(output) = output.as_deref_mut().filter(|_| written.is_ok()) {
                written = decisions::write_line(output, request, &known.policies, &files, outcome);
            }
        };
        if let Some(kind) = self.load {
            let load = self.generated(kind, known)?;
            let end = load.micros().max(1);
            let period = load.period();
            traffic.generated = Some(period);
            simulation.start_at(period.0);
            let mut clients = simulation.clients(self.retry);
            let mut progress = ProgressBar::start();
            load.for_each(|request, time| {
                progress.count(1, || Some(float(time) / float(end)));
                traffic.count(request.time());
                simulation.decide(request, &mut clients, &mut write);
                Ok(())
            })?;
            simulation.retry_before(u64::MAX, &mut clients, &mut write);
            written.context("--decisions")?;
            ensure!(traffic.requests > 0, "the load has no request: raise --rate or --duration");
            return Ok(simulation.into_report(traffic));
        }
        let Some(reader) = reader else { return Ok(simulation.into_report(traffic)) };
        let mut clients = simulation.clients(self.retry);
        let lines = reader.for_each(|request| {
            traffic.count(request.time());
            simulation.decide(request, &mut clients, &mut write);
            Ok(())
        })?;
        simulation.retry_before(u64::MAX, &mut clients, &mut write);
        written.context("--decisions")?;
        let refunds = known.policies.iter().any(|policy| policy.refund_on().is_some());
        let is_unknown = |name: &&String| {
            known.policies.check_attribute(name).is_err() && !(refunds && *name == "status")
        };
        traffic.ignored_columns = lines.other_columns.iter().filter(is_unknown).cloned().collect();
        traffic.lines = Some(lines);
        Ok(simulation.into_report(traffic))
    }

    fn generated(&self, kind: LoadKind, known: &KnownPolicies) -> anyhow::Result<GeneratedLoad> {
        let default_period = match kind {
            LoadKind::Diurnal => DAY,
            _ => known.window.unwrap_or(DEFAULT_INTERVAL),
        };
        let load = GeneratedLoad {
            kind,
            rate: self.rate,
            keys: self.keys,
            zipf: self.zipf,
            duration: self.duration,
            seed: self.seed,
            period: self.period.unwrap_or(default_period),
            attributes: self.attributes.clone(),
        };
        load.check()?;
        Ok(load)
    }
}
