//! `tidegate acquire`: decide from a shell.

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use clap::builder::FalseyValueParser;
use clap::builder::PossibleValuesParser;
use tidegate::{Action, Algorithm, Charge, Decision, Encoding, Limiter, MemoryStore, Quota, Store};

use super::style;
use crate::api::json;
use crate::config::RedisConfig;
use tidegate::config::duration::{self, readable};

/// Decide from a shell whether a request may pass now.
///
/// Prints one line a decision. Exit code: 0 if all were allowed, 1 if any was denied, 2 on an
/// error. Without --redis the counts live in memory, only as long as the command runs.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  Five requests against a limit of three, in memory:
    tidegate acquire user123 --limit 3 --window 60s --count 5

  A nightly job that may run once an hour, whichever machine starts it first:
    tidegate acquire nightly-report --limit 1 --window 1h --redis redis://127.0.0.1:6379 && ./report

  A token bucket with room for bursts, as JSON:
    tidegate acquire user123 --algorithm token-bucket --limit 10 --window 1s --burst 50 --json

  Work that is done already, such as 1200 bytes sent, against 1000 an hour:
    tidegate acquire user123 --limit 1000 --window 1h --cost 1200 --report")]
pub(super) struct Acquire {
    /// Whose count it is: a user, an address, a job
    #[arg(value_name = "KEY")]
    key: String,

    /// Units per window
    #[arg(long, value_name = "N", env = "TIDEGATE_LIMIT")]
    limit: u64,

    /// The window, such as 500ms, 60s, 5m, 1h, 30d
    #[arg(long, value_name = "DURATION", env = "TIDEGATE_WINDOW", value_parser = duration::parse)]
    window: Duration,

    /// How units are counted
    #[arg(
        long, value_name = "ALGORITHM", env = "TIDEGATE_ALGORITHM", default_value = "sliding-log",
        value_parser = PossibleValuesParser::new(Algorithm::ALL.map(Algorithm::as_str))
    )]
    algorithm: String,

    /// How Redis keeps a sliding-log
    #[arg(
        long, value_name = "ENCODING", env = "TIDEGATE_ENCODING",
        value_parser = PossibleValuesParser::new(Encoding::ALL.map(Encoding::as_str))
    )]
    encoding: Option<String>,

    /// What a token-bucket or leaky-bucket holds [default: the limit]
    #[arg(long, value_name = "B", env = "TIDEGATE_BURST")]
    burst: Option<u64>,

    /// Units that each request takes
    #[arg(long, value_name = "C", env = "TIDEGATE_COST", default_value_t = 1)]
    cost: u64,

    /// Count under this policy's name [default: the algorithm and the window]
    #[arg(long, value_name = "NAME", env = "TIDEGATE_POLICY")]
    policy: Option<String>,

    /// Share the counts through this Redis: redis://[user:password@]host[:port][/database]
    /// (rediss:// for TLS; nodes of a cluster with commas between them)
    #[arg(long, value_name = "URL", env = "TIDEGATE_REDIS", hide_env_values = true)]
    redis: Option<String>,

    /// How long Redis may take to decide
    #[arg(long, value_name = "DURATION", env = "TIDEGATE_TIMEOUT", default_value = "1s", value_parser = duration::parse)]
    timeout: Duration,

    /// How many decisions to ask for, one after the other
    #[arg(long, value_name = "N", env = "TIDEGATE_COUNT", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    count: u64,

    /// Record units that were used already: charges even beyond the limit. The exit code is 1 if
    /// they did not fit
    #[arg(long, env = "TIDEGATE_REPORT", value_parser = FalseyValueParser::new())]
    report: bool,

    /// Print JSON lines
    #[arg(long, env = "TIDEGATE_JSON", value_parser = FalseyValueParser::new())]
    json: bool,
}

impl Acquire {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let quota = self.quota()?;
        let mut charge = Charge::new(&self.key, &quota).with_cost(self.cost);
        if let Some(policy) = &self.policy {
            charge = charge.with_policy(policy);
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            match &self.redis {
                None => self.decide(&Limiter::new(MemoryStore::new()), &charge).await,
                Some(url) => {
                    let store = RedisConfig::at(url)
                        .with_timeout(self.timeout)
                        .builder()
                        .connect()
                        .await
                        .context("--redis")?;
                    self.decide(&Limiter::new(store), &charge).await
                }
            }
        })
    }

    fn quota(&self) -> anyhow::Result<Quota> {
        let mut quota = Quota::new(self.algorithm.parse()?, self.limit, self.window)?;
        if let Some(burst) = self.burst {
            quota = quota.with_burst(burst)?;
        }
        if let Some(encoding) = &self.encoding {
            quota = quota.with_encoding(encoding.parse()?)?;
        }
        Ok(quota)
    }

    async fn decide<S: Store>(
        &self,
        limiter: &Limiter<S>,
        charge: &Charge<'_>,
    ) -> anyhow::Result<ExitCode> {
        let mut output = anstream::stdout().lock();
        let mut all_allowed = true;
        for _ in 0..self.count {
            let action = if self.report { Action::Report } else { Action::Acquire };
            let decision = limiter.decide(action, charge).await?;
            all_allowed &= decision.allowed;
            if self.json {
                output.write_all(&json::of_one(charge.policy(), &decision))?;
                writeln!(output)?;
            } else {
                writeln!(output, "{}", line(action, &decision, charge.quota().burst()))?;
            }
        }
        output.flush()?;
        Ok(if all_allowed { ExitCode::SUCCESS } else { ExitCode::from(1) })
    }
}

/// For people: what was decided, what is left of `all` that there can be, and when to come again.
fn line(action: Action, decision: &Decision, all: u64) -> String {
    let left = format!("{} of {all} left", decision.remaining);
    if action == Action::Report && !decision.allowed {
        let retry = readable(decision.retry_after);
        return format!("{}over{}     {left}, one is free in {retry}", style::DENIED, style::RESET);
    }
    if !decision.allowed {
        let retry = readable(decision.retry_after);
        return format!("{}denied{}   {left}, retry in {retry}", style::DENIED, style::RESET);
    }
    let delay = match decision.delay {
        Duration::ZERO => String::new(),
        delay => format!(", wait {} for its turn", readable(delay)),
    };
    let reset = readable(decision.reset_after);
    format!("{}allowed{}  {left}{delay}, all back in {reset}", style::ALLOWED, style::RESET)
}
