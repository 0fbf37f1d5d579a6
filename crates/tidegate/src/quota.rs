//! [`Quota`]: an algorithm with its numbers. A quota that exists is a quota that works.

use std::sync::Arc;
use std::time::Duration;

use crate::algorithm::{Algorithm, Encoding, mul_div_ceil};
use crate::fingerprint::{PolicySum, Secret};

/// An algorithm with its numbers: `limit` units per `window`, and `burst` for the buckets.
///
/// ```
/// use std::time::Duration;
/// use tidegate::Quota;
///
/// let log = Quota::sliding_log(100, Duration::from_secs(60))?;
/// let bucket = Quota::token_bucket(10, Duration::from_secs(1))?.with_burst(50)?;
/// assert_eq!(bucket.burst(), 50);
/// assert!(Quota::sliding_log(0, Duration::from_secs(60)).is_err());
/// # Ok::<(), tidegate::QuotaError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Quota {
    algorithm: Algorithm,
    encoding: Encoding,
    count_denied: bool,
    limit: u64,
    /// Microseconds.
    window: u64,
    burst: u64,
    /// How long a full bucket takes to drain, in microseconds.
    drain: u64,
    /// A few bits of the window, to tell whether a stored fraction of a unit is in this window's
    /// parts.
    window_tag: u8,
    /// After so many milliseconds a count that nobody adds to is as good as none.
    lifetime: u64,
    /// The policy that a charge counts under when it names none.
    unnamed_policy: Arc<str>,
    unnamed_policy_sum: PolicySum,
}

/// Why these numbers make no quota, and which would.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum QuotaError {
    /// The limit is zero or too large for exact arithmetic.
    #[error("limit {0} is out of range: it must be from 1 to {max}", max = Quota::MAX_LIMIT)]
    Limit(u64),
    /// A log keeps every request of its window, so its limit is bounded by what a key may weigh.
    #[error(
        "limit {0} is too large for sliding-log, which keeps each admitted request: at most {max}; \
         sliding-counter or token-bucket take up to {other}",
        max = Quota::MAX_LOG_LIMIT, other = Quota::MAX_LIMIT
    )]
    LogLimit(u64),
    /// A sorted set that Redis could not free without holding up its clients.
    #[error(
        "limit {0} is too large for a sliding-log as a sorted set: at most {max}; leave the encoding out, or make it packed",
        max = Quota::MAX_SORTED_SET_LIMIT
    )]
    SortedSetLimit(u64),
    /// The window is too short or too long.
    #[error("window {0:?} is out of range: it must be from 1ms to 366 days")]
    Window(Duration),
    /// The window has a fraction of a microsecond.
    #[error("window {0:?} is not a whole number of microseconds")]
    WindowFraction(Duration),
    /// The burst is zero or too large for exact arithmetic.
    #[error("burst {0} is out of range: it must be from 1 to {max}", max = Quota::MAX_LIMIT)]
    Burst(u64),
    /// A burst that this limit takes too long to give back.
    #[error(
        "burst {burst} would take longer than 3660 days to come back at {limit} a window: \
         lower the burst, raise the limit or shorten the window"
    )]
    BurstTooSlow {
        /// The burst asked for.
        burst: u64,
        /// The limit it would come back at.
        limit: u64,
    },
    /// The algorithm has no burst.
    #[error("{0} has no burst: only token-bucket and leaky-bucket do")]
    NoBurst(Algorithm),
    /// The algorithm has no choice of encoding.
    #[error("{0} has no encoding: only sliding-log does")]
    NoEncoding(Algorithm),
    /// The algorithm cannot count denied requests.
    #[error("{0} cannot count denied requests: only sliding-log can")]
    NoCountDenied(Algorithm),
}

const MIN_WINDOW: u64 = 1_000;
const MAX_WINDOW: u64 = 366 * 86_400 * 1_000_000;
const MAX_DRAIN: u64 = 10 * MAX_WINDOW;

impl Quota {
    /// The largest limit and burst. With windows of up to 366 days every step of the arithmetic
    /// stays exact, in Rust's integers and in the doubles of Redis's Lua.
    pub const MAX_LIMIT: u64 = 1_000_000_000_000;
    /// The largest limit of a `sliding-log` that Redis keeps as a sorted set: to free a larger one
    /// would hold up the server. A log with a higher limit is packed.
    pub const MAX_SORTED_SET_LIMIT: u64 = 100_000;
    /// The largest limit of a `sliding-log`.
    pub const MAX_LOG_LIMIT: u64 = 10_000_000;

    /// `limit` units per `window` by `algorithm`, with burst = limit.
    pub fn new(algorithm: Algorithm, limit: u64, window: Duration) -> Result<Self, QuotaError> {
        if !(1..=Self::MAX_LIMIT).contains(&limit) {
            return Err(QuotaError::Limit(limit));
        }
        if algorithm == Algorithm::SlidingLog && limit > Self::MAX_LOG_LIMIT {
            return Err(QuotaError::LogLimit(limit));
        }
        let micros = u64::try_from(window.as_micros()).map_err(|_| QuotaError::Window(window))?;
        if !(MIN_WINDOW..=MAX_WINDOW).contains(&micros) {
            return Err(QuotaError::Window(window));
        }
        if Duration::from_micros(micros) != window {
            return Err(QuotaError::WindowFraction(window));
        }
        let is_large = algorithm == Algorithm::SlidingLog && limit > Self::MAX_SORTED_SET_LIMIT;
        let encoding = if is_large { Encoding::Packed } else { Encoding::SortedSet };
        let unnamed_policy = unnamed_policy(algorithm, encoding, micros);
        Ok(Self {
            algorithm,
            encoding,
            count_denied: false,
            limit,
            window: micros,
            burst: limit,
            drain: micros,
            window_tag: window_tag(micros),
            lifetime: lifetime(algorithm, micros),
            unnamed_policy_sum: Secret::of_this_process().policy(&unnamed_policy),
            unnamed_policy,
        })
    }

    /// At most `limit` units in any stretch of time as long as `window`. Exact.
    pub fn sliding_log(limit: u64, window: Duration) -> Result<Self, QuotaError> {
        Self::new(Algorithm::SlidingLog, limit, window)
    }

    /// Two window counts, the older one weighed by how much of it is still in sight.
    pub fn sliding_counter(limit: u64, window: Duration) -> Result<Self, QuotaError> {
        Self::new(Algorithm::SlidingCounter, limit, window)
    }

    /// At most `limit` units in each window of the clock (each minute, each hour …).
    pub fn fixed_window(limit: u64, window: Duration) -> Result<Self, QuotaError> {
        Self::new(Algorithm::FixedWindow, limit, window)
    }

    /// Tokens come back at `limit` per `window`; up to [`burst`](Self::with_burst) may be saved.
    pub fn token_bucket(limit: u64, window: Duration) -> Result<Self, QuotaError> {
        Self::new(Algorithm::TokenBucket, limit, window)
    }

    /// A queue of up to [`burst`](Self::with_burst) units that drains at `limit` per `window`;
    /// an admitted request is told its [`delay`](crate::Decision::delay).
    pub fn leaky_bucket(limit: u64, window: Duration) -> Result<Self, QuotaError> {
        Self::new(Algorithm::LeakyBucket, limit, window)
    }

    /// How many units a bucket holds (default: `limit`).
    pub fn with_burst(mut self, burst: u64) -> Result<Self, QuotaError> {
        if !matches!(self.algorithm, Algorithm::TokenBucket | Algorithm::LeakyBucket) {
            return Err(QuotaError::NoBurst(self.algorithm));
        }
        if !(1..=Self::MAX_LIMIT).contains(&burst) {
            return Err(QuotaError::Burst(burst));
        }
        let drain = mul_div_ceil(burst, self.window, self.limit);
        if drain > MAX_DRAIN {
            return Err(QuotaError::BurstTooSlow { burst, limit: self.limit });
        }
        self.burst = burst;
        self.drain = drain;
        self.lifetime = lifetime(self.algorithm, drain);
        Ok(self)
    }

    /// How Redis keeps a `sliding-log`: readable (the default up to [`Self::MAX_SORTED_SET_LIMIT`])
    /// or packed.
    pub fn with_encoding(mut self, encoding: Encoding) -> Result<Self, QuotaError> {
        if self.algorithm != Algorithm::SlidingLog {
            return Err(QuotaError::NoEncoding(self.algorithm));
        }
        if encoding == Encoding::SortedSet && self.limit > Self::MAX_SORTED_SET_LIMIT {
            return Err(QuotaError::SortedSetLimit(self.limit));
        }
        self.encoding = encoding;
        self.unnamed_policy = unnamed_policy(self.algorithm, encoding, self.window);
        self.unnamed_policy_sum = Secret::of_this_process().policy(&self.unnamed_policy);
        Ok(self)
    }

    /// Makes a `sliding-log` count denied requests too, so that a client which keeps hammering
    /// stays out.
    pub fn with_count_denied(mut self, count_denied: bool) -> Result<Self, QuotaError> {
        if self.algorithm != Algorithm::SlidingLog {
            return Err(QuotaError::NoCountDenied(self.algorithm));
        }
        self.count_denied = count_denied;
        Ok(self)
    }

    /// The algorithm.
    #[must_use]
    pub fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    /// How Redis keeps a `sliding-log`.
    #[must_use]
    pub fn encoding(&self) -> Encoding {
        self.encoding
    }

    /// Whether denied requests count as well.
    #[must_use]
    pub fn count_denied(&self) -> bool {
        self.count_denied
    }

    /// Units per window.
    #[must_use]
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// The window.
    #[must_use]
    pub fn window(&self) -> Duration {
        Duration::from_micros(self.window)
    }

    /// What a bucket holds; the limit for the other algorithms. No single request can cost more.
    #[must_use]
    pub fn burst(&self) -> u64 {
        self.burst
    }

    /// The most units that can ever be recorded for a key: ten times the burst, and no more than
    /// [`Self::MAX_LIMIT`]. Only reports of finished work go beyond the burst.
    #[must_use]
    pub fn max_level(&self) -> u64 {
        (10 * self.burst).min(Self::MAX_LIMIT)
    }

    /// The name that a charge counts under when it names no policy: the algorithm and the window,
    /// so that two windows on one key never mix, and a changed limit keeps its counts.
    #[must_use]
    pub fn unnamed_policy(&self) -> &str {
        &self.unnamed_policy
    }

    #[inline]
    pub(crate) fn unnamed_policy_sum(&self) -> &PolicySum {
        &self.unnamed_policy_sum
    }

    /// The same with other numbers, no larger than these and at least 1. The name it counts under
    /// stays.
    #[cfg(feature = "resilience")]
    pub(crate) fn with_share(&self, limit: u64, burst: u64) -> Self {
        let drain = mul_div_ceil(burst, self.window, limit);
        // A part of a unit more to drain than in the whole quota, and that was at the edge already.
        let (burst, drain) = if drain > MAX_DRAIN { (limit, self.window) } else { (burst, drain) };
        Self { limit, burst, drain, lifetime: lifetime(self.algorithm, drain), ..self.clone() }
    }

    /// See [`crate::algorithm::State`].
    pub(crate) fn window_tag(&self) -> u8 {
        self.window_tag
    }

    pub(crate) fn window_micros(&self) -> u64 {
        self.window
    }

    /// How long a full bucket takes to drain.
    #[cfg(feature = "resilience")]
    pub(crate) fn drain_micros(&self) -> u64 {
        self.drain
    }

    /// After so many milliseconds a count that nobody adds to is as good as none.
    pub(crate) fn lifetime_millis(&self) -> u64 {
        self.lifetime
    }
}

/// Eight bits that differ for most pairs of windows; for the usual ones (seconds, minutes, hours,
/// days) nearly always.
fn window_tag(micros: u64) -> u8 {
    micros.wrapping_mul(0x8d8e_3b13_e83b_3ab1).to_be_bytes()[0]
}

/// `drain` is the window for all but the buckets.
fn lifetime(algorithm: Algorithm, drain: u64) -> u64 {
    let windows = if algorithm == Algorithm::SlidingCounter { 2 } else { 1 };
    (windows * drain).div_ceil(1_000)
}

fn unnamed_policy(algorithm: Algorithm, encoding: Encoding, micros: u64) -> Arc<str> {
    let packed = if encoding == Encoding::Packed { "-packed" } else { "" };
    let window = match micros {
        s if s.is_multiple_of(1_000_000) => format!("{}s", s / 1_000_000),
        ms if ms.is_multiple_of(1_000) => format!("{}ms", ms / 1_000),
        us => format!("{us}us"),
    };
    format!("{algorithm}{packed}-{window}").into()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    #[test]
    fn numbers_out_of_range_are_refused_each_with_its_own_reason() {
        let refused =
            |quota: Result<Quota, QuotaError>| quota.expect_err("out of range").to_string();
        assert!(
            refused(Quota::fixed_window(0, MINUTE))
                .contains("limit 0 is out of range: it must be from 1 to")
        );
        assert!(
            refused(Quota::fixed_window(u64::MAX, MINUTE))
                .contains("must be from 1 to 1000000000000")
        );
        assert!(refused(Quota::sliding_log(10_000_001, MINUTE)).contains("at most 10000000"));
        let large = Quota::sliding_log(100_001, MINUTE).expect("valid");
        assert_eq!(large.encoding(), Encoding::Packed);
        assert!(refused(large.with_encoding(Encoding::SortedSet)).contains("at most 100000"));
        assert!(refused(Quota::fixed_window(1, Duration::ZERO)).contains("from 1ms to 366 days"));
        assert!(refused(Quota::fixed_window(1, Duration::from_micros(999))).contains("from 1ms"));
        assert!(refused(Quota::fixed_window(1, Duration::MAX)).contains("366 days"));
        assert!(
            refused(Quota::fixed_window(1, Duration::from_nanos(1_000_001)))
                .contains("whole number of micro")
        );
        let bucket = Quota::token_bucket(10, MINUTE).expect("valid");
        assert!(refused(bucket.clone().with_burst(0)).contains("burst 0 is out of range"));
        assert!(refused(bucket.with_burst(u64::MAX)).contains("out of range"));
        let slow = Quota::token_bucket(1, Duration::from_secs(86_400 * 366)).expect("valid");
        assert!(slow.clone().with_burst(10).is_ok());
        assert!(refused(slow.with_burst(11)).contains("longer than 3660 days"));
        assert!(
            refused(Quota::fixed_window(1, MINUTE).and_then(|q| q.with_burst(2)))
                .contains("has no burst")
        );
        assert!(
            refused(Quota::token_bucket(1, MINUTE).and_then(|q| q.with_encoding(Encoding::Packed)))
                .contains("has no encoding")
        );
        assert!(
            refused(Quota::token_bucket(1, MINUTE).and_then(|q| q.with_count_denied(true)))
                .contains("cannot count denied")
        );
    }

    #[test]
    fn an_unnamed_policy_tells_algorithm_and_window_but_not_the_limit() {
        let name = |quota: Quota| quota.unnamed_policy().to_owned();
        assert_eq!(name(Quota::sliding_log(1, MINUTE).expect("valid")), "sliding-log-60s");
        assert_eq!(name(Quota::sliding_log(2, MINUTE).expect("valid")), "sliding-log-60s");
        let packed = Quota::sliding_log(1, Duration::from_millis(1500)).expect("valid");
        assert_eq!(
            name(packed.with_encoding(Encoding::Packed).expect("a log")),
            "sliding-log-packed-1500ms"
        );
        assert_eq!(
            name(Quota::token_bucket(1, Duration::from_micros(1001)).expect("valid")),
            "token-bucket-1001us"
        );
    }
}
