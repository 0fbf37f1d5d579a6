//! Flags of a quota, for commands that need no configuration file.

use std::time::Duration;

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use serde_json::{Value, json};
use tidegate::{Algorithm, Calendar, Encoding, Quota};
use tidegate_config::duration;

/// Limit of a policy, or of the requests of a command.
#[derive(Debug, Args)]
pub(super) struct LimitFlags {
    /// Units per window
    #[arg(long, value_name = "N", env = "TIDEGATE_LIMIT")]
    pub(super) limit: Option<u64>,

    /// Length of the window, such as 500ms, 60s, 5m, 1h, 30d
    #[arg(long, value_name = "DURATION", env = "TIDEGATE_WINDOW", value_parser = duration::parse)]
    pub(super) window: Option<Duration>,
}

/// Quota of the requests of a command.
#[derive(Debug, Args)]
pub(super) struct QuotaFlags {
    #[command(flatten)]
    limits: LimitFlags,

    /// Rate limit algorithm
    #[arg(long, value_name = "ALGORITHM", env = "TIDEGATE_ALGORITHM")]
    #[arg(value_parser = algorithm_parser())]
    algorithm: Option<Algorithm>,

    /// Encoding of a sliding-log or sliding-counter in Redis
    #[arg(long, value_name = "ENCODING", env = "TIDEGATE_ENCODING")]
    #[arg(value_parser = PossibleValuesParser::new(Encoding::ALL.map(Encoding::as_str))
        .try_map(|name| name.parse::<Encoding>()))]
    encoding: Option<Encoding>,

    /// Capacity of a token-bucket or leaky-bucket [default: the limit]
    #[arg(long, value_name = "B", env = "TIDEGATE_BURST")]
    burst: Option<u64>,
}

impl QuotaFlags {
    /// Returns the quota, with this limit and window unless they are given.
    pub(super) fn quota(&self, limit: u64, window: Duration) -> anyhow::Result<Quota> {
        let window = self.limits.window.unwrap_or(window);
        self.with_options(Quota::new(self.algorithm(), self.limits.limit.unwrap_or(limit), window)?)
    }

    /// Returns the quota in the periods of a calendar.
    pub(super) fn in_calendar(&self, calendar: Calendar) -> anyhow::Result<Quota> {
        let limit = self.limits.limit.unwrap_or(0);
        self.with_options(Quota::new_in_calendar(self.algorithm(), limit, calendar)?)
    }

    /// Returns whether the limit is given.
    pub(super) fn has_limit(&self) -> bool {
        self.limits.limit.is_some()
    }

    /// Returns a quota of these flags as the HTTP API has it.
    pub(super) fn body(&self, quota: &Quota) -> Value {
        let mut body = json!({
            "algorithm": quota.algorithm().as_str(),
            "limit": quota.limit(),
            "window": format!("{}us", tidegate_api::duration::micros(quota.window())),
        });
        if let Some(burst) = self.burst {
            body["burst"] = json!(burst);
        }
        if let Some(encoding) = self.encoding {
            body["encoding"] = json!(encoding.as_str());
        }
        body
    }

    fn algorithm(&self) -> Algorithm {
        self.algorithm.unwrap_or(Algorithm::SlidingLog)
    }

    fn with_options(&self, mut quota: Quota) -> anyhow::Result<Quota> {
        if let Some(burst) = self.burst {
            quota = quota.with_burst(burst)?;
        }
        if let Some(encoding) = self.encoding {
            quota = quota.with_encoding(encoding)?;
        }
        Ok(quota)
    }
}

/// Returns the parser of the name of an algorithm.
pub(super) fn algorithm_parser() -> impl TypedValueParser<Value = Algorithm> {
    PossibleValuesParser::new(Algorithm::RATES.map(Algorithm::as_str)).try_map(|name| name.parse())
}
