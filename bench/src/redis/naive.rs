//! Naive scripts: what a team would write itself, one script per algorithm and one decision per
//! call. Each is compared with the same algorithm and encoding of Tidegate, and with scripts of our
//! own for the algorithms that other libraries document.

use std::time::Duration;

use ::redis::Connection;
use anyhow::{Context, Result};
use tidegate::{Encoding, Quota};

/// An algorithm with its encoding in Redis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Structure {
    LogSortedSet,
    LogPacked,
    CounterHash,
    CounterPacked,
    FixedWindow,
    TokenBucket,
    LeakyBucket,
}

/// A script of our own for an algorithm as another library documents it.
pub(crate) struct Published {
    pub(crate) library: &'static str,
    pub(crate) script: &'static str,
    /// Start of each key.
    pub(crate) keys: &'static [&'static str],
    /// Returns the arguments for a limit and a window.
    pub(crate) arguments: fn(u64, Duration) -> Vec<String>,
}

/// Of `@upstash/ratelimit`. The client sends its time, here always the same.
const TWO_WINDOWS: Published = Published {
    library: "@upstash/ratelimit",
    script: include_str!("published/two_windows.lua"),
    keys: &["current", "previous"],
    arguments: |limit, window| {
        vec![limit.to_string(), "1700000000000".to_owned(), window.as_millis().to_string()]
    },
};
const GCRA: Published = Published {
    library: "redis_rate",
    script: include_str!("published/gcra.lua"),
    keys: &["gcra"],
    arguments: |limit, window| {
        vec![limit.to_string(), limit.to_string(), window.as_secs().to_string()]
    },
};
/// The client compares the count with the limit.
const COUNTER: Published = Published {
    library: "rate-limiter-flexible",
    script: include_str!("published/counter.lua"),
    keys: &["counter"],
    arguments: |_, window| vec!["1".to_owned(), window.as_secs().to_string()],
};

impl Structure {
    pub(crate) const ALL: [Self; 7] = [
        Self::LogSortedSet,
        Self::LogPacked,
        Self::CounterHash,
        Self::CounterPacked,
        Self::FixedWindow,
        Self::TokenBucket,
        Self::LeakyBucket,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::LogSortedSet => "sliding-log, sorted set",
            Self::LogPacked => "sliding-log, packed",
            Self::CounterHash => "sliding-counter, hash",
            Self::CounterPacked => "sliding-counter, packed",
            Self::FixedWindow => "fixed-window",
            Self::TokenBucket => "token-bucket",
            Self::LeakyBucket => "leaky-bucket",
        }
    }

    pub(crate) fn from_name(name: &str) -> Result<Self> {
        let same = |structure: &Self| structure.name() == name;
        Self::ALL.into_iter().find(same).with_context(|| format!("unknown structure {name}"))
    }

    /// Returns the quota of the library; an error if this version has no such encoding.
    pub(crate) fn quota(self, limit: u64, window: Duration) -> Result<Quota> {
        Ok(match self {
            Self::LogSortedSet => Quota::sliding_log(limit, window)?,
            Self::LogPacked => {
                Quota::sliding_log(limit, window)?.with_encoding(Encoding::Packed)?
            }
            Self::CounterHash => Quota::sliding_counter(limit, window)?,
            Self::CounterPacked => {
                Quota::sliding_counter(limit, window)?.with_encoding(Encoding::Packed)?
            }
            Self::FixedWindow => Quota::fixed_window(limit, window)?,
            Self::TokenBucket => Quota::token_bucket(limit, window)?,
            Self::LeakyBucket => Quota::leaky_bucket(limit, window)?,
        })
    }

    /// Returns the naive script. Teams do not write packed counters, so ours is compared with the
    /// hash.
    fn naive_script(self) -> &'static str {
        match self {
            Self::LogSortedSet => include_str!("naive/sliding_log.lua"),
            Self::LogPacked => include_str!("naive/sliding_log_packed.lua"),
            Self::CounterHash | Self::CounterPacked => include_str!("naive/sliding_counter.lua"),
            Self::FixedWindow => include_str!("naive/fixed_window.lua"),
            Self::TokenBucket => include_str!("naive/token_bucket.lua"),
            Self::LeakyBucket => include_str!("naive/leaky_bucket.lua"),
        }
    }

    /// Returns the best known algorithm of this kind.
    pub(crate) fn published(self) -> Option<&'static Published> {
        match self {
            Self::CounterHash | Self::CounterPacked => Some(&TWO_WINDOWS),
            Self::FixedWindow => Some(&COUNTER),
            Self::TokenBucket => Some(&GCRA),
            Self::LogSortedSet | Self::LogPacked | Self::LeakyBucket => None,
        }
    }

    /// Loads the naive script and returns its hash for EVALSHA.
    pub(crate) fn load_naive_script(self, connection: &mut Connection) -> Result<String> {
        let mut load = ::redis::cmd("SCRIPT");
        Ok(load.arg("LOAD").arg(self.naive_script()).query(connection)?)
    }

    /// Returns the key of the naive script for a user.
    pub(crate) fn naive_key(self, user: &str) -> String {
        let kind = match self {
            Self::LogSortedSet => "log",
            Self::LogPacked => "packed",
            Self::CounterHash | Self::CounterPacked => "counter",
            Self::FixedWindow => "window",
            Self::TokenBucket => "tokens",
            Self::LeakyBucket => "leaky",
        };
        ["naive:", kind, ":", user].concat()
    }
}
