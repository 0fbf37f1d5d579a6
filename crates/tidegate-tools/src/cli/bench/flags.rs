//! Flags of `tidegate bench` in groups, and their checks.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use clap::Args;
use clap::builder::FalseyValueParser;
use serde_json::Value;
use tidegate::{Policy, Quota};
use tidegate_config::duration;

use super::Chosen;
use crate::bench::keys::{KEY, KeyDistribution, KeySpace};
use crate::bench::open_loop::OpenLoop;
use crate::bench::replay::Replay;
use crate::bench::{Arrivals, LoadPlan, Pace};
use crate::cli::quota::QuotaFlags;
use crate::cli::simulate::attribute;
use crate::simulate::log::LogArgs;
use crate::tool::random::{MAX_KEYS, MAX_ZIPF};
use tidegate_config::Config;

const DEFAULT_CONCURRENCY: usize = 64;
const DEFAULT_SECONDS: u64 = 10;
const DEFAULT_WARMUP_SECONDS: u64 = 1;
const DEFAULT_LIMIT: u64 = 100;
const DEFAULT_WINDOW_SECONDS: u64 = 60;
const MAX_RATE: f64 = 1e7;
const MIN_SPEED: f64 = 1e-3;
const MAX_SPEED: f64 = 1e6;
const MAX_DURATION: Duration = Duration::from_secs(86_400);
const MAX_WARMUP: Duration = Duration::from_secs(3_600);
const MAX_TIMEOUT: Duration = Duration::from_secs(60);
const MAX_REQUESTS: u64 = 1_000_000_000_000;

/// Flags of which one names the target. Each conflicts with those after it.
const TARGETS: [&str; 7] = ["memory", "http", "grpc", "resp", "gateway", "forward_auth", "redis"];
/// Flags for a store only, for a service only, and for gRPC only.
const OF_STORE: [&str; 2] = ["config", "redis_password_file"];
pub(super) const OF_SERVICE: [&str; 2] = ["token_file", "ca"];
pub(super) const OF_GRPC: [&str; 2] = ["domain", "descriptors"];
/// Flags that a policy of the service replaces.
const OF_QUOTA: [&str; 5] = ["limit", "window", "algorithm", "encoding", "burst"];

#[derive(Debug, Args)]
#[command(next_help_heading = "Target")]
pub(super) struct TargetFlags {
    /// Load a store in the memory of this process, the default
    #[arg(long, env = "TIDEGATE_MEMORY", value_parser = FalseyValueParser::new())]
    #[arg(conflicts_with_all = &TARGETS[1..], conflicts_with_all = OF_SERVICE)]
    #[arg(conflicts_with_all = OF_GRPC)]
    pub(super) memory: bool,

    /// Load the HTTP API of a service: http://HOST:PORT, or https:// for TLS
    #[arg(long, value_name = "URL", env = "TIDEGATE_HTTP")]
    #[arg(conflicts_with_all = &TARGETS[2..], conflicts_with_all = OF_STORE)]
    #[arg(conflicts_with_all = OF_GRPC)]
    pub(super) http: Option<String>,

    /// Load Envoy's rate limit service of a service: HOST:PORT, or grpcs://HOST:PORT for TLS
    #[arg(long, value_name = "ADDRESS", env = "TIDEGATE_GRPC")]
    #[arg(conflicts_with_all = &TARGETS[3..], conflicts_with_all = OF_STORE)]
    #[arg(conflicts_with_all = OF_QUOTA, conflicts_with_all = ["policy", "attributes"])]
    pub(super) grpc: Option<String>,

    /// Load the Redis protocol of a service: HOST:PORT, or rediss://HOST:PORT for TLS
    #[arg(long, value_name = "ADDRESS", env = "TIDEGATE_BENCH_RESP")]
    #[arg(conflicts_with_all = &TARGETS[4..], conflicts_with_all = OF_STORE)]
    #[arg(conflicts_with_all = OF_GRPC)]
    pub(super) resp: Option<String>,

    /// Load a gateway with requests of clients: http://HOST:PORT. 429 is a denial
    #[arg(long, value_name = "URL", env = "TIDEGATE_BENCH_GATEWAY")]
    #[arg(conflicts_with_all = &TARGETS[5..], conflicts_with_all = OF_STORE)]
    #[arg(conflicts_with_all = OF_GRPC, conflicts_with_all = OF_QUOTA)]
    #[arg(conflicts_with_all = ["policy", "token_file"])]
    pub(super) gateway: Option<String>,

    /// Load /v1/forward-auth of a service, as a proxy does: http://HOST:PORT
    #[arg(long, value_name = "URL", env = "TIDEGATE_BENCH_FORWARD_AUTH")]
    #[arg(conflicts_with_all = &TARGETS[6..], conflicts_with_all = OF_STORE)]
    #[arg(conflicts_with_all = OF_GRPC, conflicts_with_all = OF_QUOTA)]
    pub(super) forward_auth: Option<String>,

    /// Configuration file whose store is loaded, such as one with sentinels; see `tidegate config`
    #[arg(long, value_name = "FILE", env = "TIDEGATE_CONFIG")]
    pub(super) config: Option<PathBuf>,

    /// Prefix of the keys in Redis. All keys expire
    #[arg(long, value_name = "PREFIX", env = "TIDEGATE_PREFIX", default_value = "tidegate_bench")]
    pub(super) prefix: String,

    /// Attribute of all requests to --http, --gateway or --forward-auth, which selects the
    /// policies. {key} in a value stands for the key
    #[arg(long = "attribute", value_name = "NAME=VALUE", value_parser = attribute)]
    pub(super) attributes: Vec<(String, String)>,

    /// Domain of all requests to --grpc
    #[arg(long, value_name = "NAME", env = "TIDEGATE_DOMAIN", requires = "grpc")]
    pub(super) domain: Option<String>,

    /// Descriptor of all requests to --grpc, one or more entries. {key} in a value stands for the
    /// key
    #[arg(long = "descriptor", value_name = "KEY=VALUE[,…]", value_parser = descriptor)]
    #[arg(requires = "grpc")]
    pub(super) descriptors: Vec<Vec<(String, String)>>,

    /// File with the token of the service
    #[arg(long, value_name = "FILE", env = "TIDEGATE_TOKEN_FILE")]
    pub(super) token_file: Option<PathBuf>,

    /// File with the certificates to trust, in place of those of the system
    #[arg(long, value_name = "FILE", env = "TIDEGATE_CA")]
    pub(super) ca: Option<PathBuf>,

    /// Connections to --grpc, which requests share. --http has one for each request in flight
    #[arg(long, value_name = "N", env = "TIDEGATE_CONNECTIONS")]
    #[arg(default_value = "8", value_parser = count::<1_000>)]
    pub(super) connections: usize,
}

impl TargetFlags {
    /// Checks that the flags belong to the target.
    pub(super) fn check(&self, chosen: Chosen<'_>) -> anyhow::Result<()> {
        let has_attributes = matches!(chosen, Chosen::Http(_) | Chosen::Web(..));
        for (is_given, flag, targets, fits) in [
            (
                !self.attributes.is_empty(),
                "--attribute",
                "--http, --gateway and --forward-auth",
                has_attributes,
            ),
            (self.token_file.is_some(), "--token-file", "a service", chosen != Chosen::Store),
            (self.ca.is_some(), "--ca", "a service", chosen != Chosen::Store),
        ] {
            ensure!(fits || !is_given, "{flag} is only for {targets}");
        }
        Ok(())
    }
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Load")]
pub(super) struct LoadFlags {
    /// Replay the requests of --access-log at this multiple of their pace [default: 1]
    #[arg(long, value_name = "X", env = "TIDEGATE_SPEED", requires = "access_log")]
    speed: Option<f64>,

    /// Open loop: requests per second, sent at their due times
    #[arg(long, value_name = "R", env = "TIDEGATE_RATE")]
    #[arg(conflicts_with_all = ["concurrency", "access_log"])]
    rate: Option<f64>,

    /// Times between the requests of an open loop
    #[arg(long, value_name = "KIND", env = "TIDEGATE_ARRIVALS", default_value = "fixed")]
    arrivals: Arrivals,

    /// Maximum number of requests in flight in an open loop: further ones are sent late
    #[arg(long, value_name = "N", env = "TIDEGATE_MAX_IN_FLIGHT")]
    #[arg(default_value = "1000", value_parser = count::<100_000>)]
    max_in_flight: usize,

    /// Closed loop: callers that each wait for their answer [default: 64]
    #[arg(long, value_name = "N", env = "TIDEGATE_CONCURRENCY", value_parser = count::<10_000>)]
    #[arg(conflicts_with = "access_log")]
    concurrency: Option<usize>,

    /// Length of the measurement [default: 10s, or until all --requests are sent]
    #[arg(long, value_name = "DURATION", env = "TIDEGATE_DURATION", value_parser = duration::parse)]
    duration: Option<Duration>,

    /// Number of requests to measure
    #[arg(long, value_name = "N", env = "TIDEGATE_REQUESTS")]
    requests: Option<u64>,

    /// Load before the measurement, which spends units too [default: 1s, none with --requests]
    #[arg(long, value_name = "DURATION", env = "TIDEGATE_WARMUP", value_parser = duration::parse)]
    warmup: Option<Duration>,

    /// Timeout of a request
    #[arg(long, value_name = "DURATION", env = "TIDEGATE_TIMEOUT")]
    #[arg(default_value = "5s", value_parser = duration::parse)]
    pub(super) timeout: Duration,

    /// Number of keys
    #[arg(long, value_name = "N", env = "TIDEGATE_KEYS", default_value_t = 10_000)]
    keys: u64,

    /// How requests are spread over the keys
    #[arg(long, value_name = "KIND", env = "TIDEGATE_DISTRIBUTION", default_value = "uniform")]
    distribution: KeyDistribution,

    /// Exponent of Zipf's law, for --distribution zipf [default: 1]
    #[arg(long, value_name = "S", env = "TIDEGATE_ZIPF")]
    zipf: Option<f64>,

    /// Start of the random numbers; the same seed gives the same keys and due times
    #[arg(long, value_name = "N", env = "TIDEGATE_SEED", default_value_t = 1)]
    seed: u64,
}

impl LoadFlags {
    pub(super) fn keys(&self) -> anyhow::Result<Arc<KeySpace>> {
        let Self { keys, zipf, distribution, .. } = self;
        ensure!(
            (1..=MAX_KEYS).contains(keys),
            "--keys {keys} is out of range: it must be from 1 to {MAX_KEYS}"
        );
        if let Some(zipf) = zipf {
            ensure!(
                *distribution == KeyDistribution::Zipf,
                "--zipf is only for --distribution zipf"
            );
            ensure!(
                *zipf > 0.0 && *zipf <= MAX_ZIPF,
                "--zipf {zipf} is out of range: it must be above 0, and at most {MAX_ZIPF}"
            );
        }
        Ok(Arc::new(KeySpace::new(*keys, *distribution, zipf.unwrap_or(1.0))))
    }

    pub(super) fn load(
        &self,
        keys: Arc<KeySpace>,
        logs: Option<LogArgs>,
    ) -> anyhow::Result<LoadPlan> {
        let Self { rate, concurrency, requests, timeout, .. } = self;
        if let Some(requests) = requests {
            ensure!(
                (1..=MAX_REQUESTS).contains(requests),
                "--requests {requests} is out of range: it must be from 1 to {MAX_REQUESTS}"
            );
        }
        let in_range = |flag: &str, value: Duration, min: Duration, max: Duration| {
            let (least, most) = (duration::readable(min), duration::readable(max));
            ensure!(
                (min..=max).contains(&value),
                "{flag} {} is out of range: it must be from {least} to {most}",
                duration::readable(value)
            );
            Ok(())
        };
        let millisecond = Duration::from_millis(1);
        let replay = logs.map(|logs| Replay { logs, speed: self.speed.unwrap_or(1.0) });
        if let Some(Replay { speed, .. }) = &replay {
            ensure!(
                (MIN_SPEED..=MAX_SPEED).contains(speed),
                "--speed {speed} is out of range: it must be from {MIN_SPEED} to {MAX_SPEED}"
            );
        }
        let is_bounded = requests.is_some() || replay.is_some();
        let duration = match self.duration {
            None if is_bounded => None,
            duration => Some(duration.unwrap_or(Duration::from_secs(DEFAULT_SECONDS))),
        };
        let default_warmup = if is_bounded { 0 } else { DEFAULT_WARMUP_SECONDS };
        let warmup = self.warmup.unwrap_or(Duration::from_secs(default_warmup));
        if let Some(duration) = duration {
            in_range("--duration", duration, millisecond, MAX_DURATION)?;
        }
        in_range("--warmup", warmup, Duration::ZERO, MAX_WARMUP)?;
        in_range("--timeout", *timeout, millisecond, MAX_TIMEOUT)?;
        let rate = rate.or(replay.as_ref().map(|_| 1.0));
        let pace = match (&rate, concurrency) {
            (None, concurrency) => {
                Pace::Closed { concurrency: concurrency.unwrap_or(DEFAULT_CONCURRENCY) }
            }
            (Some(rate), _) => {
                ensure!(
                    *rate > 0.0 && *rate <= MAX_RATE,
                    "--rate {rate} is out of range: it must be above 0, and at most {MAX_RATE} \
                     per second"
                );
                let (arrivals, max_in_flight) = (self.arrivals, self.max_in_flight);
                Pace::Open(OpenLoop { rate: *rate, arrivals, max_in_flight })
            }
        };
        let (seed, requests, timeout) = (self.seed, *requests, *timeout);
        Ok(LoadPlan { pace, keys, seed, warmup, duration, requests, timeout, replay })
    }

    /// Checks that the requests contain the key, unless there is only one.
    pub(super) fn check_key(&self, flag: &str, has_key: bool) -> anyhow::Result<()> {
        let is_one = self.keys == 1 || self.distribution == KeyDistribution::Hot;
        ensure!(
            has_key || is_one,
            "no {flag} contains {KEY}, so all requests have the same key: write NAME={KEY}, or \
             give --distribution hot"
        );
        Ok(())
    }
}

#[derive(Debug, Args)]
#[command(
    next_help_heading = "Policy",
    mut_arg("limit", |flag| flag.help("Units per window [default: 100]")),
    mut_arg("window", |flag| {
        flag.help("Length of the window, such as 500ms, 60s, 5m, 1h, 30d [default: 60s]")
    }),
    mut_arg("algorithm", |flag| flag.help("Rate limit algorithm [default: sliding-log]"))
)]
pub(super) struct LoadPolicyFlags {
    /// Policy of the service that --http, --resp or --forward-auth loads, or of --config
    #[arg(long, value_name = "NAME", env = "TIDEGATE_POLICY", conflicts_with_all = OF_QUOTA)]
    pub(super) policy: Option<String>,

    #[command(flatten)]
    quota: QuotaFlags,

    /// Units that each request costs
    #[arg(long, value_name = "C", env = "TIDEGATE_COST", default_value_t = 1)]
    pub(super) cost: u64,
}

impl LoadPolicyFlags {
    /// Returns the quota of the policy in the file, or that of the flags.
    pub(super) fn quota(&self, config: Option<&Config>) -> anyhow::Result<Quota> {
        if let Some(name) = &self.policy {
            let config = config.context(
                "--policy is the name of a policy of a service, or of a file: give --config FILE",
            )?;
            let policy = config.policies.get(name).with_context(|| {
                let names: Vec<_> = config.policies.iter().map(Policy::name).collect();
                format!("--policy {name:?} is not in --config: it has {}", names.join(", "))
            })?;
            return Ok(policy.quota().clone());
        }
        self.quota.quota(DEFAULT_LIMIT, Duration::from_secs(DEFAULT_WINDOW_SECONDS))
    }

    /// Returns the arguments of `TG.ACQUIRE` for this key, and their description.
    pub(super) fn resp_arguments(&self, key: &str) -> anyhow::Result<(Vec<String>, String)> {
        let (mut arguments, description) = match &self.policy {
            Some(policy) => (vec![policy.clone(), key.to_owned()], format!("policy {policy}")),
            None => {
                let quota = self.quota(None)?;
                let window = format!("{}us", tidegate_api::duration::micros(quota.window()));
                let (algorithm, limit) = (quota.algorithm().to_string(), quota.limit().to_string());
                let words = ["KEY", key, "QUOTA", &algorithm, &limit, &window];
                let mut words = words.map(str::to_owned).to_vec();
                if quota.burst() != quota.limit() {
                    words.extend(["BURST".to_owned(), quota.burst().to_string()]);
                }
                (words, super::describe(&quota))
            }
        };
        ensure!(self.cost >= 1, "--cost 0 is out of range: it must be at least 1");
        if self.cost > 1 {
            arguments.extend(["COST".to_owned(), self.cost.to_string()]);
        }
        Ok((arguments, description))
    }

    /// Returns the quota as the HTTP API has it.
    pub(super) fn quota_body(&self, quota: &Quota) -> Value {
        self.quota.body(quota)
    }
}

/// Parses a number from 1 to `MAX`.
fn count<const MAX: usize>(text: &str) -> Result<usize, String> {
    let number = text.parse::<usize>().ok().filter(|number| (1..=MAX).contains(number));
    number.ok_or_else(|| format!("it must be a number from 1 to {MAX}"))
}

/// Parses `KEY=VALUE,KEY=VALUE`.
fn descriptor(text: &str) -> Result<Vec<(String, String)>, String> {
    let entry = |entry: &str| match entry.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err(format!("{entry:?} is not an entry: write it like user={KEY}")),
    };
    text.split(',').map(entry).collect()
}
