//! [`Quota`]: an algorithm with its limit, window and options, validated when it is created.

use std::sync::Arc;
use std::time::Duration;

use crate::algorithm::{Algorithm, Encoding, MAX_LIMIT, Parameters, mul_div_ceil};
use crate::calendar::{Calendar, CalendarError};
use crate::clock::Timestamp;
use crate::hold::{HoldTerms, OnExpire};
use crate::key::PolicyRef;

/// An algorithm with its parameters: `limit` units per `window`, and a `burst` for the buckets.
///
/// A quota is validated when it is created, so every `Quota` can be decided exactly. Create it once
/// and keep it: a [`Charge`](crate::Charge) borrows it.
///
/// | constructor | admits | memory per key |
/// | --- | --- | --- |
/// | [`sliding_log`](Self::sliding_log) | the limit in any window, exactly | grows with the limit |
/// | [`sliding_counter`](Self::sliding_counter) | approximately the same | constant |
/// | [`fixed_window`](Self::fixed_window) | the limit in each window of the clock | constant |
/// | [`calendar_window`](Self::calendar_window) | the limit in each period of a calendar | constant |
/// | [`token_bucket`](Self::token_bucket) | a constant rate, and bursts | constant |
/// | [`leaky_bucket`](Self::leaky_bucket) | a constant rate, by delaying requests | constant |
/// | [`concurrency`](Self::concurrency) | the limit in flight | grows with the limit |
///
/// A `fixed-window` can admit twice the limit around the start of a window.
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
    parameters: Parameters,
    encoding: Encoding,
    /// Policy name of charges that have none.
    default_policy_name: Arc<str>,
    default_policy: PolicyRef<'static>,
    /// Lengths of the blocks of a key, by the number of blocks before.
    block_for: Option<Arc<Vec<Duration>>>,
    holds: HoldTerms,
    /// Calendar of a fixed window whose windows are its periods.
    calendar: Option<Arc<Calendar>>,
}

/// The reason why these parameters are not a valid quota.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum QuotaError {
    /// The limit is zero or too large for exact arithmetic.
    #[error("limit {0} is out of range: it must be from 1 to {max}", max = Quota::MAX_LIMIT)]
    Limit(u64),
    /// The limit is too large for a log, which stores every request of its window.
    #[error(
        "limit {0} is too large for sliding-log, which stores each request: at most {max}; \
         sliding-counter and token-bucket allow up to {other}",
        max = Quota::MAX_LOG_LIMIT, other = Quota::MAX_LIMIT
    )]
    LogLimit(u64),
    /// The limit is too large for a sorted set: freeing it would block Redis.
    #[error(
        "limit {0} is too large for a sliding-log in a sorted set: at most {max}; \
         omit the encoding or use packed",
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
    /// The burst takes too long to refill at this limit.
    #[error(
        "burst {burst} would take longer than 3660 days to refill at {limit} per window: \
         lower the burst, raise the limit or shorten the window"
    )]
    BurstTooSlow {
        /// The requested burst.
        burst: u64,
        /// The limit at which it refills.
        limit: u64,
    },
    /// The algorithm has no burst.
    #[error("{0} has no burst: only token-bucket and leaky-bucket do")]
    NoBurst(Algorithm),
    /// The algorithm has only one encoding.
    #[error("{0} has no encoding: only sliding-log and sliding-counter do")]
    NoEncoding(Algorithm),
    /// The algorithm has other encodings.
    #[error("{algorithm} has no encoding {encoding}: its encodings are {readable} and packed")]
    WrongEncoding {
        /// The algorithm of the quota.
        algorithm: Algorithm,
        /// The requested encoding.
        encoding: Encoding,
        /// The readable encoding of this algorithm.
        readable: Encoding,
    },
    /// The algorithm cannot count denied requests.
    #[error("{0} cannot count denied requests: only sliding-log can")]
    NoCountDenied(Algorithm),
    /// The list of blocks is empty or too long.
    #[error("{0} blocks: it must be one, or a list of up to {max}", max = Quota::MAX_BLOCKS)]
    BlockCount(usize),
    /// A block is too short or too long, or has a fraction of a microsecond.
    #[error("block {0:?} is out of range: it must be from 1ms to 366 days, in microseconds")]
    Block(Duration),
    /// Units in flight have no window.
    #[error("concurrency has no window: its units count until they are released")]
    NoWindow,
    /// The limit of units in flight is too large.
    #[error("limit {0} is too large for concurrency: at most {max}", max = Quota::MAX_CONCURRENCY)]
    ConcurrencyLimit(u64),
    /// A denial by units in flight does not start a block.
    #[error("concurrency has no blocks: only the limit of a rate does")]
    NoBlock,
    /// The windows of the algorithm have no fixed times.
    #[error(
        "{0} has no calendar: its windows start with each request; only those of fixed-window start \
         at fixed times"
    )]
    NoCalendar(Algorithm),
    /// Both options keep clients out that do not wait.
    #[error("a quota cannot both count denied requests and block: use one of the two")]
    BlockAndCountDenied,
}

/// Microseconds.
pub(crate) const MIN_WINDOW: u64 = 1_000;
pub(crate) const MAX_WINDOW: u64 = 366 * 86_400 * 1_000_000;
const MAX_DRAIN: u64 = 10 * MAX_WINDOW;
/// Window in the numbers of a quota without one.
const NO_WINDOW: u64 = 1_000_000;

impl Quota {
    /// The largest limit and burst. With windows of up to 366 days, the arithmetic stays exact in
    /// the integers of Rust and in the doubles of Lua on Redis.
    pub const MAX_LIMIT: u64 = MAX_LIMIT;
    /// The largest limit of a `sliding-log` in a sorted set: freeing a larger set would block
    /// Redis. A log with a higher limit is packed.
    pub const MAX_SORTED_SET_LIMIT: u64 = 100_000;
    /// The largest limit of a `sliding-log`.
    pub const MAX_LOG_LIMIT: u64 = 10_000_000;
    /// The largest limit of units in flight.
    pub const MAX_CONCURRENCY: u64 = 1_000_000;
    /// The largest number of lengths of [blocks](Self::with_block_for).
    pub const MAX_BLOCKS: usize = 10;

    /// Creates a quota of `limit` units per `window`, with burst = limit.
    pub fn new(algorithm: Algorithm, limit: u64, window: Duration) -> Result<Self, QuotaError> {
        if !(1..=Self::MAX_LIMIT).contains(&limit) {
            return Err(QuotaError::Limit(limit));
        }
        if algorithm == Algorithm::SlidingLog && limit > Self::MAX_LOG_LIMIT {
            return Err(QuotaError::LogLimit(limit));
        }
        let micros = crate::clock::micros(window);
        if algorithm == Algorithm::Concurrency {
            return if micros == 0 { Self::concurrency(limit) } else { Err(QuotaError::NoWindow) };
        }
        if !(MIN_WINDOW..=MAX_WINDOW).contains(&micros) {
            return Err(QuotaError::Window(window));
        }
        if Duration::from_micros(micros) != window {
            return Err(QuotaError::WindowFraction(window));
        }
        let encoding = match algorithm {
            Algorithm::SlidingLog if limit > Self::MAX_SORTED_SET_LIMIT => Encoding::Packed,
            Algorithm::SlidingCounter => Encoding::Hash,
            _ => Encoding::SortedSet,
        };
        let default_policy_name = default_policy_name(algorithm, encoding, micros);
        Ok(Self {
            parameters: Parameters::new(algorithm, limit, micros, limit),
            encoding,
            default_policy: PolicyRef::default_of_quota(&default_policy_name),
            default_policy_name,
            block_for: None,
            holds: HoldTerms::default(),
            calendar: None,
        })
    }

    /// Creates a quota of at most `limit` units in flight: an acquire holds its units until they are
    /// released by [`Action::Commit`](crate::Action::Commit), or until its [`Hold`](crate::Hold) ends.
    pub fn concurrency(limit: u64) -> Result<Self, QuotaError> {
        if limit == 0 {
            return Err(QuotaError::Limit(limit));
        }
        if limit > Self::MAX_CONCURRENCY {
            return Err(QuotaError::ConcurrencyLimit(limit));
        }
        let parameters = Parameters::new(Algorithm::Concurrency, limit, NO_WINDOW, limit);
        let name = Algorithm::Concurrency.as_str();
        Ok(Self {
            parameters: parameters.without_fast_path(),
            encoding: Encoding::SortedSet,
            default_policy: PolicyRef::default_of_quota(name),
            default_policy_name: name.into(),
            block_for: None,
            holds: HoldTerms::default(),
            calendar: None,
        })
    }

    /// Creates a quota that admits at most `limit` units in any interval as long as `window`.
    /// Exact.
    pub fn sliding_log(limit: u64, window: Duration) -> Result<Self, QuotaError> {
        Self::new(Algorithm::SlidingLog, limit, window)
    }

    /// Creates a quota of two window counts, the older one weighted by its overlap with the sliding
    /// window: an approximation in constant memory.
    pub fn sliding_counter(limit: u64, window: Duration) -> Result<Self, QuotaError> {
        Self::new(Algorithm::SlidingCounter, limit, window)
    }

    /// Creates a quota of at most `limit` units in each window of the clock (each minute, each hour
    /// …).
    pub fn fixed_window(limit: u64, window: Duration) -> Result<Self, QuotaError> {
        Self::new(Algorithm::FixedWindow, limit, window)
    }

    /// Creates a fixed window of at most `limit` units in each period of a calendar, such as a month
    /// in Berlin. A count stays in force until the end of its period, even if the calendar changes.
    ///
    /// ```
    /// use tidegate::{Calendar, CalendarUnit, Charge, Limiter, ManualClock, MemoryStore, Quota};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let calendar = Calendar::new(CalendarUnit::Month, "Europe/Berlin")?.with_anchor("16")?;
    /// let quota = Quota::calendar_window(1, calendar)?;
    /// let clock = ManualClock::new(); // 15 November 2023, 13:00 in Berlin
    /// let limiter = Limiter::new(MemoryStore::builder().clock(clock.clone()).build());
    /// let charge = Charge::new("user123", &quota);
    /// assert!(limiter.blocking().acquire(&charge)?.allowed);
    /// let denied = limiter.blocking().acquire(&charge)?;
    /// assert_eq!(denied.retry_after.as_secs() / 3_600, 11); // until midnight
    /// clock.advance(denied.retry_after);
    /// assert!(limiter.blocking().acquire(&charge)?.allowed);
    /// # Ok(())
    /// # }
    /// ```
    pub fn calendar_window(limit: u64, calendar: Calendar) -> Result<Self, QuotaError> {
        Self::new_in_calendar(Algorithm::FixedWindow, limit, calendar)
    }

    /// Creates a quota of `limit` units per period of a calendar, by an algorithm that a user has
    /// chosen: any other than `fixed-window` is an error that says why.
    pub fn new_in_calendar(
        algorithm: Algorithm,
        limit: u64,
        calendar: Calendar,
    ) -> Result<Self, QuotaError> {
        if algorithm != Algorithm::FixedWindow {
            return Err(QuotaError::NoCalendar(algorithm));
        }
        let window = Duration::from_micros(calendar.nominal_micros());
        let default_policy_name: Arc<str> = format!("{algorithm}-{}", calendar.unit()).into();
        let quota = Self {
            default_policy: PolicyRef::default_of_quota(&default_policy_name),
            default_policy_name,
            calendar: Some(Arc::new(calendar)),
            ..Self::fixed_window(limit, window)?
        };
        Ok(Self { parameters: quota.parameters_with(limit, limit), ..quota })
    }

    /// Creates a bucket that refills at `limit` tokens per `window`, up to
    /// [`burst`](Self::with_burst) tokens.
    pub fn token_bucket(limit: u64, window: Duration) -> Result<Self, QuotaError> {
        Self::new(Algorithm::TokenBucket, limit, window)
    }

    /// Creates a queue of up to [`burst`](Self::with_burst) units that drains at `limit` per
    /// `window`. The decision has the [`delay`](crate::Decision::delay) of an admitted request.
    pub fn leaky_bucket(limit: u64, window: Duration) -> Result<Self, QuotaError> {
        Self::new(Algorithm::LeakyBucket, limit, window)
    }

    /// Sets the capacity of a bucket; the default is `limit`.
    pub fn with_burst(mut self, burst: u64) -> Result<Self, QuotaError> {
        let (algorithm, limit) = (self.algorithm(), self.limit());
        if !matches!(algorithm, Algorithm::TokenBucket | Algorithm::LeakyBucket) {
            return Err(QuotaError::NoBurst(algorithm));
        }
        if !(1..=Self::MAX_LIMIT).contains(&burst) {
            return Err(QuotaError::Burst(burst));
        }
        let window = self.window_micros();
        if mul_div_ceil(burst, window, limit) > MAX_DRAIN {
            return Err(QuotaError::BurstTooSlow { burst, limit });
        }
        self.parameters = self.parameters_with(limit, burst);
        Ok(self)
    }

    /// Sets the encoding in Redis: for a `sliding-log` a readable sorted set (the default up to
    /// [`Self::MAX_SORTED_SET_LIMIT`]) or packed, for a `sliding-counter` a readable hash (the
    /// default) or packed.
    pub fn with_encoding(mut self, encoding: Encoding) -> Result<Self, QuotaError> {
        let algorithm = self.algorithm();
        let readable = match algorithm {
            Algorithm::SlidingLog => Encoding::SortedSet,
            Algorithm::SlidingCounter => Encoding::Hash,
            _ => return Err(QuotaError::NoEncoding(algorithm)),
        };
        if encoding != readable && encoding != Encoding::Packed {
            return Err(QuotaError::WrongEncoding { algorithm, encoding, readable });
        }
        if encoding == Encoding::SortedSet && self.limit() > Self::MAX_SORTED_SET_LIMIT {
            return Err(QuotaError::SortedSetLimit(self.limit()));
        }
        self.encoding = encoding;
        self.default_policy_name = default_policy_name(algorithm, encoding, self.window_micros());
        self.default_policy = PolicyRef::default_of_quota(&self.default_policy_name);
        Ok(self)
    }

    /// Sets whether a `sliding-log` counts denied requests too, so that a client that retries
    /// without waiting stays denied.
    pub fn with_count_denied(mut self, count_denied: bool) -> Result<Self, QuotaError> {
        if self.algorithm() != Algorithm::SlidingLog {
            return Err(QuotaError::NoCountDenied(self.algorithm()));
        }
        if count_denied && self.block_for.is_some() {
            return Err(QuotaError::BlockAndCountDenied);
        }
        self.parameters = self.parameters.with_count_denied(count_denied);
        Ok(self)
    }

    /// Blocks a key that exceeds the limit: the acquire that exceeds it starts a block, and until
    /// its end every acquire of that key is denied, with the time until then as `retry_after`.
    ///
    /// With several lengths, the first block of a key has the first one, the next block the second
    /// one, and so on up to the last. Only blocks that were in force in the last day count.
    ///
    /// Denials do not extend a block, and a refund does not end it; a reset does, and forgets the
    /// earlier ones. A peek shows a block and starts none, and a report neither shows nor starts
    /// one. Any acquire that does not fit exceeds the limit, even if a smaller cost would fit. Of
    /// several charges, those that exceed their limit start their blocks, and the others do not.
    /// When a block ends, the count of the key is as the algorithm has it then.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tidegate::{Charge, Limiter, ManualClock, MemoryStore, Quota};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let minute = Duration::from_secs(60);
    /// let quota = Quota::fixed_window(1, minute)?.with_block_for(&[10 * minute, 60 * minute])?;
    /// let charge = Charge::new("user123", &quota);
    ///
    /// let clock = ManualClock::new();
    /// let limiter = Limiter::new(MemoryStore::builder().clock(clock.clone()).build());
    /// assert!(limiter.blocking().acquire(&charge)?.allowed);
    /// assert_eq!(limiter.blocking().acquire(&charge)?.retry_after, 10 * minute);
    /// clock.advance(4 * minute);
    /// assert_eq!(limiter.blocking().acquire(&charge)?.retry_after, 6 * minute);
    /// clock.advance(6 * minute);
    /// assert!(limiter.blocking().acquire(&charge)?.allowed);
    /// assert_eq!(limiter.blocking().acquire(&charge)?.retry_after, 60 * minute);
    /// # Ok(())
    /// # }
    /// ```
    pub fn with_block_for(mut self, lengths: &[Duration]) -> Result<Self, QuotaError> {
        if !(1..=Self::MAX_BLOCKS).contains(&lengths.len()) {
            return Err(QuotaError::BlockCount(lengths.len()));
        }
        let is_valid = |length: &Duration| {
            let micros = crate::clock::micros(*length);
            (MIN_WINDOW..=MAX_WINDOW).contains(&micros) && Duration::from_micros(micros) == *length
        };
        if let Some(length) = lengths.iter().find(|length| !is_valid(length)) {
            return Err(QuotaError::Block(*length));
        }
        if self.count_denied() {
            return Err(QuotaError::BlockAndCountDenied);
        }
        if self.is_concurrency() {
            return Err(QuotaError::NoBlock);
        }
        self.block_for = Some(Arc::new(lengths.to_vec()));
        self.parameters = self.parameters.without_fast_path();
        Ok(self)
    }

    /// Sets how long [holds](crate::Hold) of this quota live, and what happens at their end.
    #[must_use]
    pub fn with_holds(mut self, terms: HoldTerms) -> Self {
        self.holds = terms;
        self.parameters = self.parameters_with(self.limit(), self.burst());
        self
    }

    /// Returns how long holds of this quota live, and what happens at their end.
    #[must_use]
    pub fn holds(&self) -> &HoldTerms {
        &self.holds
    }

    /// Returns whether it limits units in flight.
    #[must_use]
    pub fn is_concurrency(&self) -> bool {
        self.algorithm() == Algorithm::Concurrency
    }

    /// Returns whether units are free when a hold ends, so that no wait is known exactly.
    #[inline]
    pub(crate) fn releases_holds(&self) -> bool {
        self.holds.on_expire() == OnExpire::Release || self.is_concurrency()
    }

    /// Returns the algorithm.
    #[must_use]
    pub fn algorithm(&self) -> Algorithm {
        self.parameters.algorithm()
    }

    /// Returns the encoding of a `sliding-log` or a `sliding-counter` in Redis.
    #[must_use]
    pub fn encoding(&self) -> Encoding {
        self.encoding
    }

    /// Returns whether denied requests count too.
    #[must_use]
    pub fn count_denied(&self) -> bool {
        self.parameters.count_denied()
    }

    /// Returns the lengths of blocks, the first one first; empty if a key is never blocked.
    #[must_use]
    pub fn block_for(&self) -> &[Duration] {
        self.block_for.as_ref().map_or(&[], |lengths| lengths)
    }

    /// Returns whether a key that exceeds the limit is blocked.
    #[inline]
    pub(crate) fn has_blocks(&self) -> bool {
        self.block_for.is_some()
    }

    /// Returns the units per window.
    #[must_use]
    pub fn limit(&self) -> u64 {
        self.parameters.limit()
    }

    /// Sets the day on which the periods of its calendar start, as [`Calendar::with_anchor`] does.
    pub fn with_anchor(mut self, anchor: &str) -> Result<Self, CalendarError> {
        let calendar = self.calendar().cloned().ok_or(CalendarError::NoAnchor)?;
        self.calendar = Some(Arc::new(calendar.with_anchor(anchor)?));
        Ok(self)
    }

    /// Returns the window; zero for units in flight, which have none. That of a calendar is its
    /// longest period, as long as clocks do not change: see [`window_at`](Self::window_at).
    #[must_use]
    pub fn window(&self) -> Duration {
        if self.is_concurrency() {
            return Duration::ZERO;
        }
        let nominal = self.calendar().map(Calendar::nominal_micros);
        Duration::from_micros(nominal.unwrap_or_else(|| self.window_micros()))
    }

    /// Returns the window at a time: that of a calendar is the period that has this time.
    #[must_use]
    pub fn window_at(&self, time: Timestamp) -> Duration {
        let Some(calendar) = self.calendar() else { return self.window() };
        let (start, end) = calendar.period_at(time);
        end.saturating_duration_since(start)
    }

    /// Returns the calendar whose periods are the windows.
    #[must_use]
    pub fn calendar(&self) -> Option<&Calendar> {
        self.calendar.as_deref()
    }

    /// Returns whether a count of this quota has the same windows as one of another quota.
    pub(crate) fn has_windows_of(&self, other: &Self) -> bool {
        self.window_micros() == other.window_micros() && self.calendar() == other.calendar()
    }

    /// Returns the capacity of a bucket; for the other algorithms, the limit. No single request can
    /// cost more.
    #[must_use]
    pub fn burst(&self) -> u64 {
        self.parameters.burst()
    }

    /// Returns the maximum number of units that can be recorded for a key: ten times the burst, but
    /// at most [`Self::MAX_LIMIT`]. Only reports of finished work exceed the burst.
    #[must_use]
    pub fn max_level(&self) -> u64 {
        self.parameters.max_level()
    }

    /// Returns the policy name of charges that have none: the algorithm and the window. Two windows
    /// on one key are therefore counted separately, and a changed limit keeps its counts.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tidegate::Quota;
    /// let quota = Quota::token_bucket(10, Duration::from_secs(60))?;
    /// assert_eq!(quota.default_policy_name(), "token-bucket-60s");
    /// # Ok::<(), tidegate::QuotaError>(())
    /// ```
    #[must_use]
    pub fn default_policy_name(&self) -> &str {
        &self.default_policy_name
    }

    #[inline]
    pub(crate) fn default_policy(&self) -> &PolicyRef<'static> {
        &self.default_policy
    }

    #[cfg(feature = "redis")]
    pub(crate) fn shared_calendar(&self) -> Option<&Arc<Calendar>> {
        self.calendar.as_ref()
    }

    /// Returns this quota scaled to another limit and burst, each at least 1 and no larger than
    /// [`max_level`](Self::max_level). The default policy name stays the same.
    pub(crate) fn scaled_to(&self, limit: u64, burst: u64) -> Self {
        let window = self.window_micros();
        // Rounding can push a quota at the maximum drain time just beyond it.
        let burst = if mul_div_ceil(burst, window, limit) > MAX_DRAIN { limit } else { burst };
        Self { parameters: self.parameters_with(limit, burst), ..self.clone() }
    }

    /// Returns the part of this quota that a lane may fill. The rate of a bucket stays.
    pub(crate) fn lane(&self, percent: u64) -> Self {
        let burst = self.burst() * percent / 100;
        let is_bucket = matches!(self.algorithm(), Algorithm::TokenBucket | Algorithm::LeakyBucket);
        self.scaled_to(if is_bucket { self.limit() } else { burst }, burst)
    }

    /// Returns the part of this quota for the rest of the current period, if it has a calendar. An
    /// outage can then add no more to a month than the part of it that is left.
    #[cfg(feature = "resilience")]
    pub(crate) fn for_rest_of_period(self, now: impl FnOnce() -> Timestamp) -> Self {
        let Some(calendar) = self.calendar() else { return self };
        let now = now().as_micros();
        let (start, end) = calendar.span_at(now);
        let limit = mul_div_ceil(self.limit(), end.saturating_sub(now), (end - start).max(1));
        let limit = limit.clamp(1, self.limit());
        self.scaled_to(limit, limit)
    }

    /// Returns this quota without blocks, to read a count.
    #[cfg(feature = "resilience")]
    pub(crate) fn without_blocks(&self) -> Self {
        let unblocked = Self { block_for: None, ..self.clone() };
        Self { parameters: unblocked.parameters_with(self.limit(), self.burst()), ..unblocked }
    }

    /// Returns this quota with the capacity that reports can fill, to read a count beyond its
    /// burst. It has no blocks, which a count does not depend on.
    #[cfg(feature = "resilience")]
    pub(crate) fn with_overdraft(&self) -> Self {
        let unblocked = self.without_blocks();
        let burst = self.max_level();
        let limit = match self.algorithm() {
            Algorithm::TokenBucket | Algorithm::LeakyBucket => self.limit(),
            Algorithm::SlidingLog
            | Algorithm::SlidingCounter
            | Algorithm::FixedWindow
            | Algorithm::Concurrency => burst,
        };
        let wider = unblocked.scaled_to(limit, burst);
        // A bucket with the longest drain time has no larger one of the same rate.
        if wider.burst() == burst { wider } else { unblocked }
    }

    /// Returns the numbers for another limit and burst. The window of a calendar is an upper bound.
    fn parameters_with(&self, limit: u64, burst: u64) -> Parameters {
        let window = self.calendar().map_or(self.window_micros(), Calendar::max_micros);
        let parameters = Parameters::new(self.algorithm(), limit, window, burst);
        let parameters = parameters.with_count_denied(self.count_denied());
        let is_fast = !self.has_blocks() && !self.releases_holds() && self.calendar.is_none();
        if is_fast { parameters } else { parameters.without_fast_path() }
    }

    /// Returns the numbers that the algorithms compute with.
    #[inline]
    pub(crate) fn parameters(&self) -> &Parameters {
        &self.parameters
    }

    /// Returns this quota with the numbers of the period that has this time, if it has a calendar.
    #[inline]
    pub(crate) fn in_period_at(&self, now: u64) -> Option<Self> {
        let (start, end) = self.calendar()?.span_at(now);
        Some(Self { parameters: self.parameters.in_period(start, end), ..self.clone() })
    }

    /// Returns the window; for a calendar, an upper bound of its periods.
    pub(crate) fn window_micros(&self) -> u64 {
        self.parameters.window()
    }

    /// Returns the time in which a full bucket drains; for the other algorithms, the window.
    pub(crate) fn drain_micros(&self) -> u64 {
        self.parameters.drain()
    }
}

/// Returns a window as text, such as `60s`.
pub(crate) fn window_text(micros: u64) -> String {
    match micros {
        s if s.is_multiple_of(1_000_000) => format!("{}s", s / 1_000_000),
        ms if ms.is_multiple_of(1_000) => format!("{}ms", ms / 1_000),
        us => format!("{us}us"),
    }
}

fn default_policy_name(algorithm: Algorithm, encoding: Encoding, micros: u64) -> Arc<str> {
    let packed = if encoding == Encoding::Packed { "-packed" } else { "" };
    let window = window_text(micros);
    format!("{algorithm}{packed}-{window}").into()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    /// The drain time exceeds 64 bits.
    #[test]
    fn the_slowest_burst_is_rejected() {
        let year = Duration::from_secs(366 * 86_400);
        for limit in [1, 3, 7] {
            let quota = Quota::token_bucket(limit, year).expect("valid");
            let error = quota.with_burst(Quota::MAX_LIMIT).expect_err("too slow");
            assert_eq!(error, QuotaError::BurstTooSlow { burst: Quota::MAX_LIMIT, limit });
        }
    }

    #[test]
    fn invalid_numbers_have_specific_errors() {
        let error = |quota: Result<Quota, QuotaError>| quota.expect_err("out of range").to_string();
        assert!(
            error(Quota::fixed_window(0, MINUTE))
                .contains("limit 0 is out of range: it must be from 1 to")
        );
        assert!(
            error(Quota::fixed_window(u64::MAX, MINUTE))
                .contains("must be from 1 to 1000000000000")
        );
        assert!(error(Quota::sliding_log(10_000_001, MINUTE)).contains("at most 10000000"));
        let large = Quota::sliding_log(100_001, MINUTE).expect("valid");
        assert_eq!(large.encoding(), Encoding::Packed);
        assert!(error(large.with_encoding(Encoding::SortedSet)).contains("at most 100000"));
        assert!(error(Quota::fixed_window(1, Duration::ZERO)).contains("from 1ms to 366 days"));
        assert!(error(Quota::fixed_window(1, Duration::from_micros(999))).contains("from 1ms"));
        assert!(error(Quota::fixed_window(1, Duration::MAX)).contains("366 days"));
        assert!(
            error(Quota::fixed_window(1, Duration::from_nanos(1_000_001)))
                .contains("whole number of micro")
        );
        let bucket = Quota::token_bucket(10, MINUTE).expect("valid");
        assert!(error(bucket.clone().with_burst(0)).contains("burst 0 is out of range"));
        assert!(error(bucket.with_burst(u64::MAX)).contains("out of range"));
        let slow = Quota::token_bucket(1, Duration::from_secs(86_400 * 366)).expect("valid");
        assert!(slow.clone().with_burst(10).is_ok());
        assert!(error(slow.with_burst(11)).contains("longer than 3660 days"));
        assert!(
            error(Quota::fixed_window(1, MINUTE).and_then(|q| q.with_burst(2)))
                .contains("has no burst")
        );
        assert!(
            error(Quota::token_bucket(1, MINUTE).and_then(|q| q.with_encoding(Encoding::Packed)))
                .contains("has no encoding")
        );
        let counter = Quota::sliding_counter(1, MINUTE).expect("valid");
        assert_eq!(counter.encoding(), Encoding::Hash);
        assert_eq!(
            error(counter.with_encoding(Encoding::SortedSet)),
            "sliding-counter has no encoding sorted-set: its encodings are hash and packed"
        );
        assert!(
            error(Quota::sliding_log(1, MINUTE).and_then(|q| q.with_encoding(Encoding::Hash)))
                .contains("its encodings are sorted-set and packed")
        );
        assert!(
            error(Quota::token_bucket(1, MINUTE).and_then(|q| q.with_count_denied(true)))
                .contains("cannot count denied")
        );
    }

    #[cfg(feature = "resilience")]
    #[test]
    fn share_of_a_calendar_is_that_of_the_rest_of_its_period() {
        let calendar = Calendar::new(crate::CalendarUnit::Day, "UTC").expect("a zone");
        let quota = Quota::calendar_window(24, calendar).expect("valid");
        let midnight = 1_700_006_400_000_000;
        let share = |hours: u64, micros: u64| {
            let now = Timestamp::from_micros(midnight + hours * 3_600_000_000 + micros);
            quota.clone().for_rest_of_period(|| now).limit()
        };
        assert_eq!([share(0, 0), share(0, 1), share(12, 0), share(23, 1)], [24, 24, 12, 1]);
        let window = Quota::fixed_window(24, MINUTE).expect("valid");
        assert_eq!(window.clone().for_rest_of_period(|| unreachable!()), window);
    }

    #[test]
    fn default_policy_name_has_algorithm_and_window_but_no_limit() {
        let name = |quota: Quota| quota.default_policy_name().to_owned();
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
