//! Flags of a quota, for commands that need no configuration file.

use std::time::Duration;

use clap::Args;
use clap::builder::PossibleValuesParser;
use tidegate::{Algorithm, Encoding, Quota};
use tidegate_config::duration;

/// Quota of the requests of a command.
#[derive(Debug, Args)]
pub(super) struct QuotaFlags {
    /// Units per window
    #[arg(long, value_name = "N", env = "TIDEGATE_LIMIT")]
    limit: Option<u64>,

    /// Length of the window, such as 500ms, 60s, 5m, 1h, 30d
    #[arg(long, value_name = "DURATION", env = "TIDEGATE_WINDOW", value_parser = duration::parse)]
    window: Option<Duration>,

    /// Rate limit algorithm
    #[arg(
        long, value_name = "ALGORITHM", env = "TIDEGATE_ALGORITHM",
        value_parser = PossibleValuesParser::new(Algorithm::ALL.map(Algorithm::as_str))
    )]
    algorithm: Option<String>,

    /// Encoding of a sliding-log or sliding-counter in Redis
    #[arg(
        long, value_name = "ENCODING", env = "TIDEGATE_ENCODING",
        value_parser = PossibleValuesParser::new(Encoding::ALL.map(Encoding::as_str))
    )]
    pub(super) encoding: Option<String>,

    /// Capacity of a token-bucket or leaky-bucket [default: the limit]
    #[arg(long, value_name = "B", env = "TIDEGATE_BURST")]
    pub(super) burst: Option<u64>,
}

impl QuotaFlags {
    /// Returns the first flag that is given.
    pub(super) fn first_given(&self) -> Option<&'static str> {
        let flags = [
            (self.limit.is_some(), "--limit"),
            (self.window.is_some(), "--window"),
            (self.algorithm.is_some(), "--algorithm"),
            (self.encoding.is_some(), "--encoding"),
            (self.burst.is_some(), "--burst"),
        ];
        flags.into_iter().find(|(is_given, _)| *is_given).map(|(_, flag)| flag)
    }

    /// Returns the quota, with this limit and window unless they are given.
    pub(super) fn quota(&self, limit: u64, window: Duration) -> anyhow::Result<Quota> {
        let algorithm = self.algorithm.as_deref().map_or(Ok(Algorithm::SlidingLog), str::parse)?;
        let (limit, window) = (self.limit.unwrap_or(limit), self.window.unwrap_or(window));
        let mut quota = Quota::new(algorithm, limit, window)?;
        if let Some(burst) = self.burst {
            quota = quota.with_burst(burst)?;
        }
        if let Some(encoding) = &self.encoding {
            quota = quota.with_encoding(encoding.parse()?)?;
        }
        Ok(quota)
    }
}
