//! `tidegate plan`: memory, CPU and servers of Redis for a number of users and requests.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, bail, ensure};
use clap::Args;
use clap::builder::FalseyValueParser;
use tokio::signal::unix::{SignalKind, signal};

use super::redis::RedisFlags;
use crate::plan::costs::Costs;
use crate::plan::measure::CostMeasurement;
use crate::plan::{CapacityPlan, Demand, RedisCalls, RedisServers};
use crate::tool::{output, style};
use tidegate_config::StoreConfig;

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
pub struct PlanCommand {
    #[command(flatten)]
    demand: Demand,

    #[command(flatten)]
    calls: RedisCalls,

    #[command(flatten)]
    servers: RedisServers,

    /// Redis on which the costs are measured: redis://[user@]host[:port][/database]. It should be
    /// idle. This takes about half a minute; the keys have a prefix of their own and are deleted
    #[arg(long, value_name = "URL", env = "TIDEGATE_MEASURE", hide_env_values = true)]
    measure: Option<String>,

    /// File with the password of that Redis
    #[arg(long, value_name = "FILE", env = "TIDEGATE_REDIS_PASSWORD_FILE")]
    redis_password_file: Option<PathBuf>,

    /// Decisions per measured series; more are more precise
    #[arg(long, value_name = "N", env = "TIDEGATE_SAMPLES")]
    #[arg(default_value_t = 1_024, value_parser = clap::value_parser!(u32).range(64..=1_000_000))]
    samples: u32,

    /// Print the measured costs as the table of the repository
    #[arg(long, hide = true, requires = "measure")]
    print_costs: bool,

    /// Print one JSON object
    #[arg(long, env = "TIDEGATE_JSON", value_parser = FalseyValueParser::new())]
    json: bool,
}

impl PlanCommand {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let (demand, servers, calls) = (self.demand, self.servers, self.calls.clone());
        ensure!(demand.users > 0, "--users must be at least 1");
        ensure!(servers.headroom < 1.0, "--headroom must be less than 100%");
        ensure!(
            demand.active != Some(0.0),
            "--active must be more than 0%: leave it out if you do not know it"
        );
        let checked_in = Costs::checked_in()?;
        // An impossible limit is an error before a measurement, not after.
        let mut plan = CapacityPlan::new(demand, servers, &calls, &checked_in, false)?;
        if let Some(url) = &self.measure {
            let costs = self.measured(url).context("--measure")?;
            if self.print_costs {
                anstream::print!("{costs}");
                return Ok(ExitCode::SUCCESS);
            }
            plan = CapacityPlan::new(demand, servers, &calls, &costs, true)?;
        }
        let json = self.json.then(|| serde_json::to_string(&plan)).transpose()?;
        output::print(json, |output| plan.write(output))?;
        Ok(ExitCode::SUCCESS)
    }

    fn measured(&self, url: &str) -> anyhow::Result<Costs> {
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
            let measurement = CostMeasurement::connect(&new_builder, samples).await?;
            let measured = tokio::select! {
                measured = measurement.run(&new_builder) => measured,
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
