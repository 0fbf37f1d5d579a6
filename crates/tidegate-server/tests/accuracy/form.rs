use std::fmt;
use std::time::Duration;

use tidegate::{Algorithm, Encoding, Quota};

/// Units per window, so that one unit is one percent.
pub(crate) const LIMIT: u64 = 100;
pub(crate) const WINDOW: Duration = Duration::from_secs(10);

/// Algorithm with an encoding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Form {
    Log,
    PackedLog,
    Counter,
    PackedCounter,
    FixedWindow,
    TokenBucket,
    LeakyBucket,
}

impl Form {
    pub(crate) const ALL: [Self; 7] = [
        Self::Log,
        Self::PackedLog,
        Self::Counter,
        Self::PackedCounter,
        Self::FixedWindow,
        Self::TokenBucket,
        Self::LeakyBucket,
    ];

    pub(crate) fn algorithm(self) -> Algorithm {
        match self {
            Self::Log | Self::PackedLog => Algorithm::SlidingLog,
            Self::Counter | Self::PackedCounter => Algorithm::SlidingCounter,
            Self::FixedWindow => Algorithm::FixedWindow,
            Self::TokenBucket => Algorithm::TokenBucket,
            Self::LeakyBucket => Algorithm::LeakyBucket,
        }
    }

    pub(crate) fn quota(self, limit: u64, window: Duration) -> Quota {
        let quota = Quota::new(self.algorithm(), limit, window).expect("a valid quota");
        match self {
            Self::PackedLog | Self::PackedCounter => {
                quota.with_encoding(Encoding::Packed).expect("it has encodings")
            }
            _ => quota,
        }
    }
}

/// Name in the tables.
impl fmt::Display for Form {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Log => "sliding-log (sorted set)",
            Self::PackedLog => "sliding-log (packed)",
            Self::Counter => "sliding-counter (hash)",
            Self::PackedCounter => "sliding-counter (packed)",
            Self::FixedWindow => "fixed-window",
            Self::TokenBucket => "token-bucket",
            Self::LeakyBucket => "leaky-bucket",
        })
    }
}
