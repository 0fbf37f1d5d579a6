//! `tidegate plan`: memory, CPU and servers of Redis for a number of users and requests.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, bail, ensure};
use clap::Args;
use clap::builder::FalseyValueParser;
use tidegate::internals::duration;
use tokio::signal::unix::{SignalKind, signal};

use super::redis::RedisFlags;
use crate::config::StoreConfig;
use crate::plan::costs::{Costs, KEY_BYTES};
use crate::plan::measure::CostMeasurement;
use crate::plan::{CapacityPlan, Demand, RedisDeployment};
use crate::tool::{output, style};

/// Timeout of each command of a measurement.
const MEASURE_TIMEOUT: Duration = Duration::from_secs(10);
/// CPU cores that other clients may use before a warning.
const MAX_BACKGROUND_CORES: f64 = 0.05;

/// Compute what a number of users and requests costs on Redis.
///
/// Prints, for each algorithm and encoding, the memory, CPU and network traffic of Redis, the
/// number of primaries, and a recommendation. The costs of one decision were measured with Redis
/// 7.0 on the machine of the benchmarks; --measure measures them on your own Redis.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  A billion users with 100 requests per 10 seconds each, 350,000 requests per second at the peak:
    tidegate plan --users 1B --limit 100 --window 10s --rps 350k

  A limit per day, when 5 % of the users send requests on one day:
    tidegate plan --users 20M --limit 1000 --window 1d --rps 5k --active 5%

  Busy instances, which decide several requests per call, and larger servers:
    tidegate plan --users 20M --limit 100 --window 1m --rps 500k --batch 16 --node-memory 64GiB

  With the costs on your own Redis (under a prefix of its own, deleted afterwards):
    tidegate plan --users 20M --limit 100 --window 1m --rps 50k --measure redis://127.0.0.1:6379")]
pub(super) struct PlanCommand {
    /// Number of users, or of other keys; k, M and B stand for thousands, millions and billions
    #[arg(long, value_name = "N", env = "TIDEGATE_USERS", value_parser = count)]
    users: u64,

    /// Units per window and user
    #[arg(long, value_name = "N", env = "TIDEGATE_LIMIT", value_parser = count)]
    limit: u64,

    /// Length of the window, such as 500ms, 60s, 5m, 1h, 30d
    #[arg(long, value_name = "DURATION", env = "TIDEGATE_WINDOW", value_parser = duration::parse)]
    window: Duration,

    /// Requests per second of all users together, at the peak
    #[arg(long, value_name = "R", env = "TIDEGATE_RPS", value_parser = rate)]
    rps: f64,

    /// Share of the users that send requests within one window, such as 5% or 0.05 [default: all,
    /// as far as the requests suffice]
    #[arg(long, value_name = "SHARE", env = "TIDEGATE_ACTIVE", value_parser = share)]
    active: Option<f64>,

    /// Decisions per call to Redis. Instances under load share calls; 1 is the worst case
    #[arg(
        long, value_name = "N", env = "TIDEGATE_BATCH", default_value_t = 1,
        value_parser = clap::value_parser!(u64).range(1..=128)
    )]
    batch: u64,

    /// Length of a user's key in bytes
    #[arg(
        long, value_name = "N", env = "TIDEGATE_KEY_BYTES", default_value_t = KEY_BYTES,
        value_parser = clap::value_parser!(u64).range(1..=1024)
    )]
    key_bytes: u64,

    /// Memory of one Redis server
    #[arg(
        long, value_name = "SIZE", env = "TIDEGATE_NODE_MEMORY", default_value = "16GiB",
        value_parser = bytes
    )]
    node_memory: u64,

    /// Share of the memory and of the CPU that stays free
    #[arg(
        long, value_name = "SHARE", env = "TIDEGATE_HEADROOM", default_value = "30%",
        value_parser = share
    )]
    headroom: f64,

    /// Redis on which the costs are measured: redis://[user@]host[:port][/database]. It should be
    /// idle. This takes about half a minute; the keys have a prefix of their own and are deleted
    #[arg(long, value_name = "URL", env = "TIDEGATE_MEASURE", hide_env_values = true)]
    measure: Option<String>,

    /// File with the password of that Redis
    #[arg(long, value_name = "FILE", env = "TIDEGATE_REDIS_PASSWORD_FILE")]
    redis_password_file: Option<PathBuf>,

    /// Decisions per measured series; more are more precise
    #[arg(
        long, value_name = "N", env = "TIDEGATE_SAMPLES", default_value_t = 1_024,
        value_parser = clap::value_parser!(u32).range(64..=1_000_000)
    )]
    samples: u32,

    /// Print the measured costs as the table of the repository
    #[arg(long, hide = true, requires = "measure")]
    print_costs: bool,

    /// Print one JSON object
    #[arg(long, env = "TIDEGATE_JSON", value_parser = FalseyValueParser::new())]
    json: bool,
}

impl PlanCommand {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        ensure!(self.users > 0, "--users must be at least 1");
        ensure!(self.headroom < 1.0, "--headroom must be less than 100%");
        ensure!(
            self.active != Some(0.0),
            "--active must be more than 0%: leave it out if you do not know it"
        );
        let demand = Demand {
            users: self.users,
            limit: self.limit,
            window: self.window,
            rps: self.rps,
            active: self.active,
        };
        let deployment = RedisDeployment {
            node_memory_bytes: self.node_memory,
            headroom: self.headroom,
            batch: self.batch,
            key_bytes: self.key_bytes,
        };
        let checked_in = Costs::checked_in()?;
        // An impossible limit is an error before a measurement, not after.
        let mut plan = CapacityPlan::new(demand, deployment, &checked_in, false)?;
        if let Some(url) = &self.measure {
            let costs = self.measured(url, checked_in.connection_cpu).context("--measure")?;
            if self.print_costs {
                anstream::print!("{costs}");
                return Ok(ExitCode::SUCCESS);
            }
            plan = CapacityPlan::new(demand, deployment, &costs, true)?;
        }
        let json = self.json.then(|| serde_json::to_string(&plan)).transpose()?;
        output::print(json, |output| plan.write(output))?;
        Ok(ExitCode::SUCCESS)
    }

    fn measured(&self, url: &str, connection_cpu: f64) -> anyhow::Result<Costs> {
        let flags = RedisFlags::new(url.to_owned(), self.redis_password_file.clone());
        let StoreConfig::Redis(redis) = flags.apply(StoreConfig::Memory(Box::default()))? else {
            bail!("it needs the URL of a Redis");
        };
        flags.print_warning();
        let samples = usize::try_from(self.samples)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            let mut interrupt = signal(SignalKind::interrupt())?;
            let mut terminate = signal(SignalKind::terminate())?;
            let (redis, prefix) = (redis.with_timeout(MEASURE_TIMEOUT), prefix());
            let new_builder = || redis.builder().prefix(&prefix);
            let measurement = CostMeasurement::connect(new_builder, samples).await?;
            let measured = tokio::select! {
                measured = measurement.run(connection_cpu) => measured,
                _ = interrupt.recv() => Err(anyhow::Error::msg("interrupted")),
                _ = terminate.recv() => Err(anyhow::Error::msg("terminated")),
            };
            let cleaned = measurement.clean_up().await;
            // Removes the progress bar.
            drop(measurement);
            let measured = measured?;
            cleaned.context("the keys could not be deleted, and expire within five minutes")?;
            if measured.background_cores > MAX_BACKGROUND_CORES {
                style::print_warning(format_args!(
                    "other clients use {:.0} % of a core of this Redis, which makes the measured \
                     CPU times too high",
                    measured.background_cores * 100.0
                ));
            }
            Ok(measured.costs)
        })
    }
}

/// Returns a prefix for the keys of a measurement, as long as the default prefix.
fn prefix() -> String {
    let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let number = time.subsec_nanos() ^ std::process::id();
    format!("plan{:06x}", number & 0x00ff_ffff)
}

/// Parses a whole number such as `1_000_000`, `150k`, `1.5M` or `1B`.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked")]
fn count(text: &str) -> Result<u64, String> {
    let number = scaled(text, &AMOUNTS).filter(|number| number.fract() == 0.0);
    number
        .map(|number| number as u64)
        .ok_or_else(|| format!("{text:?} is not a whole number like 5000, 150k, 20M or 1B"))
}

/// Parses a number of requests per second such as `0.5`, `5000` or `150k`.
fn rate(text: &str) -> Result<f64, String> {
    scaled(text, &AMOUNTS)
        .filter(|rate| *rate > 0.0)
        .ok_or_else(|| format!("{text:?} is not a number above 0 like 0.5, 5000, 150k or 2M"))
}

/// Parses a size such as `16GiB` or `500MB`.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked")]
fn bytes(text: &str) -> Result<u64, String> {
    scaled(text, &SIZES)
        .map(|size| size as u64)
        .filter(|size| *size >= 1 << 20)
        .ok_or_else(|| format!("{text:?} is not a size like 16GiB or 500MB, of at least 1 MiB"))
}

const AMOUNTS: [(&str, f64); 6] =
    [("k", 1e3), ("K", 1e3), ("M", 1e6), ("G", 1e9), ("B", 1e9), ("T", 1e12)];
const SIZES: [(&str, f64); 9] = [
    ("KiB", 1_024.0),
    ("MiB", 1_048_576.0),
    ("GiB", 1_073_741_824.0),
    ("TiB", 1_099_511_627_776.0),
    ("kB", 1e3),
    ("KB", 1e3),
    ("MB", 1e6),
    ("GB", 1e9),
    ("TB", 1e12),
];
const MAX_NUMBER: f64 = 1e15;

/// Parses a number with one of these units, up to [`MAX_NUMBER`].
fn scaled(text: &str, units: &[(&str, f64)]) -> Option<f64> {
    let with_unit = |(unit, factor): &(&str, f64)| Some((text.strip_suffix(unit)?, *factor));
    let (number, factor) = units.iter().find_map(with_unit).unwrap_or((text, 1.0));
    let number = number.trim_end().replace('_', "");
    // Neither signs, nor names such as "inf".
    let is_plain = number.starts_with(|first: char| first.is_ascii_digit() || first == '.');
    let value = number.parse::<f64>().ok().filter(|_| is_plain)? * factor;
    (value <= MAX_NUMBER).then_some(value)
}

/// Parses a share such as `5%` or `0.05`.
fn share(text: &str) -> Result<f64, String> {
    let number = match text.strip_suffix('%') {
        Some(percent) => percent.trim_end().parse::<f64>().map(|percent| percent / 100.0),
        None => text.parse(),
    };
    number
        .ok()
        .filter(|share| (0.0..=1.0).contains(share))
        .ok_or_else(|| format!("{text:?} is not a share from 0% to 100%, like 5% or 0.05"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_rates_sizes_and_shares_are_parsed() {
        for (text, expected) in [
            ("5000", Some(5_000)),
            ("1_000_000", Some(1_000_000)),
            ("150k", Some(150_000)),
            ("1.5M", Some(1_500_000)),
            ("1B", Some(1_000_000_000)),
            ("1e9", Some(1_000_000_000)),
            ("1000T", Some(1_000_000_000_000_000)),
            ("1001T", None),
            ("1.5", None),
            ("-1", None),
            ("+1", None),
            ("k", None),
            ("1e30", None),
            ("1e999", None),
            ("NaN", None),
            ("inf", None),
            ("", None),
        ] {
            assert_eq!(count(text).ok(), expected, "{text}");
        }
        assert_eq!((rate("0.5"), rate("2.5k")), (Ok(0.5), Ok(2_500.0)));
        assert!(rate("0").is_err() && rate("-1").is_err() && rate("many").is_err());
        assert_eq!(bytes("16GiB"), Ok(16 << 30));
        assert_eq!(bytes("500 MB"), Ok(500_000_000));
        assert!(bytes("1KiB").is_err() && bytes("GiB").is_err());
        assert_eq!(share("5%"), Ok(0.05));
        assert_eq!(share("0.5"), Ok(0.5));
        assert!(share("101%").is_err() && share("-0.1").is_err() && share("x").is_err());
        assert!(share("NaN").is_err());
    }
}
