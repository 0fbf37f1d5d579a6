//! `tidegate acquire`: decisions from a shell.

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use clap::builder::{ArgPredicate, FalseyValueParser, PossibleValuesParser, TypedValueParser as _};
use tidegate::{Action, Calendar, CalendarUnit, Charge, Decision, Limiter, MemoryStore, Store};
use tidegate_config::duration::{self, readable};

use super::quota::QuotaFlags;
use super::redis::RedisFlags;
use crate::tool::style;
use tidegate_api::json;

/// Decide from a shell whether a request is allowed now.
///
/// Prints one line per decision. Exit code: 0 if all were allowed, 1 if any was denied, 2 on an
/// error. Without --redis, counters live in memory and are lost when the command ends.
#[derive(Debug, Args)]
#[command(
    mut_arg("limit", |flag| flag.required(true)),
    mut_arg("window", |flag| flag.required_unless_present("calendar").conflicts_with("calendar")),
    mut_arg("algorithm", |flag| {
        let with_calendar = Some("fixed-window");
        flag.default_value("sliding-log")
            .default_value_if("calendar", ArgPredicate::IsPresent, with_calendar)
    }),
    after_help = "\
Examples:
  Five requests against a limit of three, in memory:
    tidegate acquire user123 --limit 3 --window 60s --count 5

  A job that may run once per hour, on whichever machine starts it first:
    tidegate acquire nightly-report --limit 1 --window 1h --redis redis://127.0.0.1:6379 && ./report

  A quota of 1000 per month, from the 15th on in Berlin, in the counts of the fleet:
    tidegate acquire acme --limit 1000 --calendar month --timezone Europe/Berlin --anchor 15 \
      --redis redis://127.0.0.1:6379

  A token bucket that allows bursts, as JSON:
    tidegate acquire user123 --algorithm token-bucket --limit 10 --window 1s --burst 50 --json

  Usage that has already happened, such as 1200 bytes sent, against 1000 per hour:
    tidegate acquire user123 --limit 1000 --window 1h --cost 1200 --report"
)]
pub struct AcquireCommand {
    /// Key to count by: a user, an address, a job
    #[arg(value_name = "KEY")]
    key: String,

    #[command(flatten)]
    quota: QuotaFlags,

    /// Instead of a window: the periods of a calendar
    #[arg(long, value_name = "UNIT", env = "TIDEGATE_CALENDAR")]
    #[arg(value_parser = PossibleValuesParser::new(CalendarUnit::ALL.map(CalendarUnit::as_str))
        .try_map(|name| name.parse::<CalendarUnit>()))]
    calendar: Option<CalendarUnit>,

    /// Time zone of the calendar, such as Europe/Berlin
    #[arg(long, value_name = "ZONE", env = "TIDEGATE_TIMEZONE", default_value = "UTC")]
    timezone: String,

    /// Day on which periods start: of the month, from 1 to 31, or a weekday
    #[arg(long, value_name = "DAY", env = "TIDEGATE_ANCHOR", conflicts_with = "window")]
    anchor: Option<String>,

    /// Units that each request costs
    #[arg(long, value_name = "C", env = "TIDEGATE_COST", default_value_t = 1)]
    cost: u64,

    /// Policy name to count under [default: the algorithm and the window]
    #[arg(long, value_name = "NAME", env = "TIDEGATE_POLICY")]
    policy: Option<String>,

    #[command(flatten)]
    redis: RedisFlags,

    /// Timeout of a decision by Redis
    #[arg(long, value_name = "DURATION", env = "TIDEGATE_TIMEOUT")]
    #[arg(default_value = "1s", value_parser = duration::parse)]
    timeout: Duration,

    /// Number of decisions, one after the other
    #[arg(long, value_name = "N", env = "TIDEGATE_COUNT")]
    #[arg(default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    count: u64,

    /// Record usage that has already happened: charge it even if it exceeds the limit. The exit
    /// code is 1 if it does
    #[arg(long, env = "TIDEGATE_REPORT", value_parser = FalseyValueParser::new())]
    report: bool,

    /// Print JSON lines
    #[arg(long, env = "TIDEGATE_JSON", value_parser = FalseyValueParser::new())]
    json: bool,
}

impl AcquireCommand {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let quota = match self.calendar {
            // Both are required, so that their defaults are not used.
            None => self.quota.quota(0, Duration::ZERO)?,
            Some(unit) => {
                let calendar = Calendar::new(unit, &self.timezone)?;
                self.quota.in_calendar(match &self.anchor {
                    Some(anchor) => calendar.with_anchor(anchor)?,
                    None => calendar,
                })?
            }
        };
        let mut charge = Charge::new(&self.key, &quota).with_cost(self.cost);
        if let Some(policy) = &self.policy {
            charge = charge.with_policy(policy);
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            match self.redis.connect(self.timeout).await? {
                None => self.decide(&Limiter::new(MemoryStore::new()), &charge).await,
                Some(store) => self.decide(&Limiter::new(store), &charge).await,
            }
        })
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
                output.write_all(&json::decision_body(charge.policy(), &decision))?;
                writeln!(output)?;
            } else {
                writeln!(output, "{}", line(action, &decision, charge.quota().burst()))?;
            }
        }
        output.flush()?;
        Ok(if all_allowed { ExitCode::SUCCESS } else { ExitCode::from(1) })
    }
}

/// Formats a decision as one line: the outcome, the remaining units, and the times to wait.
fn line(action: Action, decision: &Decision, capacity: u64) -> String {
    let left = format!("{} of {capacity} left", decision.remaining);
    if action == Action::Report && !decision.allowed {
        let retry = readable(decision.retry_after);
        return format!("{}over{}     {left}, 1 available in {retry}", style::DENIED, style::RESET);
    }
    if !decision.allowed {
        let retry = readable(decision.retry_after);
        return format!("{}denied{}   {left}, retry in {retry}", style::DENIED, style::RESET);
    }
    let delay = match decision.delay {
        Duration::ZERO => String::new(),
        delay => format!(", delay of {}", readable(delay)),
    };
    let reset = readable(decision.reset_after);
    format!("{}allowed{}  {left}{delay}, resets in {reset}", style::ALLOWED, style::RESET)
}
