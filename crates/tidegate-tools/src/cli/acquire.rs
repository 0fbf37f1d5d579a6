//! `tidegate acquire`: decisions from a shell.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use clap::Args;
use clap::builder::{ArgPredicate, FalseyValueParser, PossibleValuesParser, TypedValueParser as _};
use serde_json::{Value, json};
use tidegate::{Calendar, CalendarUnit, Charge, Limiter, MemoryStore, Store};
use tidegate_config::duration::{self, readable};

use super::quota::QuotaFlags;
use super::redis::RedisFlags;
use crate::tool::client::{ClientOptions, Endpoint, ServiceKind, Trust, read_token};
use crate::tool::style;
use tidegate_api::json;

/// Decide from a shell whether a request is allowed now, or wait until it is.
///
/// Prints one line per decision. Exit code: 0 if all were allowed, 1 if any was denied, 2 on an
/// error. Without --redis and --http, counters live in memory and are lost when the command ends.
#[derive(Debug, Args)]
#[command(
    mut_arg("limit", |flag| flag.required_unless_present("http")),
    mut_arg("window", |flag| {
        flag.required_unless_present_any(["calendar", "http"]).conflicts_with("calendar")
    }),
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

  One call of an API per second, from all shells: each waits for its turn, at most 30 seconds:
    tidegate acquire api --limit 1 --window 1s --redis $REDIS --wait 30s --quiet && curl $URL

  A policy of a running service:
    tidegate acquire user123 --policy per-user --http http://127.0.0.1:8080

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

    /// Ask a running service: http://HOST:PORT, or https:// for TLS. Without --limit, its --policy
    /// decides
    #[arg(long, value_name = "URL", env = "TIDEGATE_HTTP")]
    #[arg(conflicts_with_all = ["redis", "redis_password_file", "calendar", "anchor"])]
    http: Option<String>,

    /// File with the token of the service
    #[arg(long, value_name = "FILE", env = "TIDEGATE_TOKEN_FILE", conflicts_with = "redis")]
    token_file: Option<PathBuf>,

    /// File with the certificates to trust, in place of those of the system
    #[arg(long, value_name = "FILE", env = "TIDEGATE_CA", conflicts_with = "redis")]
    ca: Option<PathBuf>,

    /// Time to wait until it is allowed, for each decision [default: not at all]
    #[arg(long, value_name = "DURATION", env = "TIDEGATE_WAIT", value_parser = duration::parse)]
    #[arg(conflicts_with = "report")]
    wait: Option<Duration>,

    /// Print no decisions, for scripts that read the exit code
    #[arg(long, env = "TIDEGATE_QUIET", value_parser = FalseyValueParser::new())]
    #[arg(conflicts_with = "json")]
    quiet: bool,

    /// Timeout of a decision by Redis or a service
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
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        if let Some(url) = &self.http {
            return runtime.block_on(self.decide_by_service(url));
        }
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
        runtime.block_on(async {
            match self.redis.connect(self.timeout).await? {
                None => self.decide_by(&Limiter::new(MemoryStore::new()), &charge).await,
                Some(store) => self.decide_by(&Limiter::new(store), &charge).await,
            }
        })
    }

    async fn decide_by<S: Store>(
        &self,
        limiter: &Limiter<S>,
        charge: &Charge<'_>,
    ) -> anyhow::Result<ExitCode> {
        self.decide_all(async || {
            let decision = match (self.wait, self.report) {
                (Some(timeout), _) => limiter.wait(charge, timeout).await?,
                (None, true) => limiter.report(charge).await?,
                (None, false) => limiter.acquire(charge).await?,
            };
            Ok(json::decision_body(charge.policy(), &decision))
        })
        .await
    }

    /// Asks a running service.
    async fn decide_by_service(&self, url: &str) -> anyhow::Result<ExitCode> {
        let token = self.token_file.as_deref().map(read_token).transpose()?;
        let trust = Trust::Authorities(self.ca.as_deref());
        let (token, timeout) = (token.as_ref(), self.timeout);
        let options = ClientOptions { address: url, token, trust, timeout };
        let endpoint = Endpoint::parse(ServiceKind::Http, &options)?;
        let mut body = json!({"key": self.key, "cost": self.cost});
        match &self.policy {
            Some(_) if self.quota.has_limit() => {
                bail!("--limit and --policy are given, but the policy of --http has a limit")
            }
            Some(policy) => body["policy"] = json!(policy),
            None => {
                ensure!(self.quota.has_limit(), "--http needs --policy, or --limit and --window");
                let quota = self.quota.quota(0, Duration::ZERO)?;
                body["quota"] = self.quota.body(&quota);
            }
        }
        let call = if self.report { "/v1/report" } else { "/v1/acquire" };
        self.decide_all(async || {
            let start = Instant::now();
            loop {
                let asked = endpoint.post(call, &body).await;
                let answer = asked.with_context(|| format!("--http {url}"))?;
                let decision: Value = serde_json::from_slice(&answer)?;
                let left = self.wait.unwrap_or_default().saturating_sub(start.elapsed());
                let retry = millis(&decision, "retry_after_ms");
                // A wait of zero is one that does not help.
                if decision["allowed"] == true || retry.is_zero() || retry > left {
                    return Ok(answer.to_vec());
                }
                tokio::time::sleep(retry).await;
            }
        })
        .await
    }

    /// Makes all decisions, and prints them.
    async fn decide_all(
        &self,
        decide: impl AsyncFn() -> anyhow::Result<Vec<u8>>,
    ) -> anyhow::Result<ExitCode> {
        let mut output = anstream::stdout().lock();
        let mut all_allowed = true;
        for _ in 0..self.count {
            let answer = decide().await?;
            let decision: Value = serde_json::from_slice(&answer)?;
            all_allowed &= decision["allowed"] == true;
            if self.json {
                output.write_all(&answer)?;
                writeln!(output)?;
            } else if !self.quiet {
                writeln!(output, "{}", line(self.report, &decision))?;
            }
            output.flush()?;
        }
        Ok(if all_allowed { ExitCode::SUCCESS } else { ExitCode::from(1) })
    }
}

fn millis(decision: &Value, field: &str) -> Duration {
    Duration::from_millis(decision[field].as_u64().unwrap_or_default())
}

/// Formats a decision as one line: the outcome, the remaining units, and the times to wait.
fn line(is_report: bool, decision: &Value) -> String {
    let is_allowed = decision["allowed"] == true;
    let left = format!("{} of {} left", decision["remaining"], decision["limit"]);
    let [retry, delay, reset] =
        ["retry_after_ms", "delay_ms", "reset_after_ms"].map(|field| millis(decision, field));
    if is_report && !is_allowed {
        let retry = readable(retry);
        return format!("{}over{}     {left}, 1 available in {retry}", style::DENIED, style::RESET);
    }
    if !is_allowed {
        let retry = readable(retry);
        return format!("{}denied{}   {left}, retry in {retry}", style::DENIED, style::RESET);
    }
    let delay = match delay {
        Duration::ZERO => String::new(),
        delay => format!(", delay of {}", readable(delay)),
    };
    let reset = readable(reset);
    format!("{}allowed{}  {left}{delay}, resets in {reset}", style::ALLOWED, style::RESET)
}
