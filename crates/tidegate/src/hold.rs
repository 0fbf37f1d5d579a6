//! [`Hold`]: the id of an acquire that is remembered, so that it can be settled, or repeated without
//! a second charge.

use std::fmt::Write as _;
use std::time::Duration;

use crate::clock::micros;
use crate::enum_names::enum_names;
use crate::random::random_u64;

/// The maximum length of an id, in bytes.
const MAX_ID_BYTES: usize = 64;
/// Microseconds.
const SECOND: u64 = 1_000_000;
const MIN_TTL: u64 = SECOND;
const MAX_TTL: u64 = 86_400 * SECOND;
const MAX_ID_TTL: u64 = 600 * SECOND;
/// Time for which a permit is held without a renewal. If its process is killed, the units are free
/// after it.
const LEASE: u64 = 10 * SECOND;
/// The shortest time for which one renewal may fail.
const MIN_LEASE: u64 = 5 * SECOND;
/// Time after the end of a hold for which a store remembers it, so that a late commit finds it.
pub(crate) const GRACE: u64 = 60 * SECOND;
/// Maximum number of holds that one call ends.
pub(crate) const MAX_ENDED: usize = 100;
/// Maximum number of holds of one key.
pub(crate) const MAX_HOLDS: usize = 10_000;

/// A hold: the id under which a store remembers an acquire.
///
/// An acquire with a hold is a *reservation*. It takes the units of the charge like any other, and a
/// later [`Action::Commit`](crate::Action::Commit) settles what was really used. The same id again,
/// while it lives, gets the same answer, and nothing is charged.
///
/// ```
/// use std::time::Duration;
/// use tidegate::Hold;
///
/// let hold = Hold::new("job-17")?.with_ttl(Duration::from_secs(30))?;
/// assert_eq!(hold.id(), "job-17");
/// assert!(Hold::new("").is_err());
/// assert_eq!(Hold::random().id().len(), 32);
/// # Ok::<(), tidegate::HoldError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hold {
    id: Box<str>,
    /// Microseconds; `None`: that of the quota.
    ttl: Option<u64>,
    is_settled: bool,
    /// Whether it is a [lease](Self::lease): it always has the time of one, also in its renewals,
    /// and no other hold ever has its id.
    is_lease: bool,
}

/// How long holds of a quota live, and what happens to their units at the end.
///
/// ```
/// use std::time::Duration;
/// use tidegate::{HoldTerms, OnExpire, Quota};
///
/// let minute = Duration::from_secs(60);
/// let terms = HoldTerms::new(minute, 10 * minute)?.with_on_expire(OnExpire::Release);
/// let quota = Quota::sliding_log(100_000, minute).unwrap().with_holds(terms);
/// assert_eq!(quota.holds().ttl(), minute);
/// # Ok::<(), tidegate::HoldError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HoldTerms {
    /// Microseconds.
    ttl: u64,
    max_ttl: u64,
    on_expire: OnExpire,
}

/// Treatment of the units of a hold that has ended without a commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum OnExpire {
    /// They stay charged, because the work may have been done.
    #[default]
    Charge,
    /// They return to the time of their charge.
    Release,
}

enum_names!(OnExpire, "on_expire", Charge = "charge", Release = "release");

/// State of a hold, in the [`Decision`](crate::Decision) of an action on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HoldState {
    /// The result of the action.
    pub status: HoldStatus,
    /// Milliseconds, which fit 32 bits.
    expires_after: u32,
}

/// Result of an action on a hold.
// As wide as the time beside it: every decision is copied, and its padding would be copied in parts.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum HoldStatus {
    /// The units are held: by a new reservation, or after a renewal.
    Held,
    /// The id was known: this is the earlier answer, and nothing was charged.
    Replayed,
    /// The hold is settled: by this commit or refund, or by an earlier one.
    Settled,
    /// The hold has ended. A commit after its units have returned reports those that were used.
    Ended,
    /// The id is not, or no longer, remembered. A commit has reported its units, because usage must
    /// not be lost.
    Unknown,
    /// The same for a repeated commit, which reports nothing.
    Reported,
    /// The store is unavailable. The commit is made when it has recovered.
    Pending,
}

impl HoldStatus {
    /// Returns the name in API bodies.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Held => "held",
            Self::Replayed => "replayed",
            Self::Settled => "settled",
            Self::Ended => "ended",
            Self::Unknown | Self::Reported => "unknown",
            Self::Pending => "pending",
        }
    }
}

/// The reason why an id or a time of a hold is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HoldError {
    /// The id is empty, too long, or has other characters.
    #[error("an id must have from 1 to {MAX_ID_BYTES} printable ASCII characters without spaces")]
    Id,
    /// The time is too short or too long.
    #[error("the ttl {0:?} of a hold is out of range: it must be from 1s to 24h")]
    Ttl(Duration),
    /// The time for which an id is remembered is too short or too long.
    #[error("the ttl {0:?} of an id is out of range: it must be from 1s to 10m")]
    IdTtl(Duration),
    /// Holds would live longer than the maximum.
    #[error("the ttl {ttl:?} of holds is longer than their max_ttl, {max_ttl:?}")]
    MaxTtl {
        /// The time of a hold without one of its own.
        ttl: Duration,
        /// The maximum.
        max_ttl: Duration,
    },
}

impl Hold {
    /// The maximum length of an id, in bytes.
    pub const MAX_ID_BYTES: usize = MAX_ID_BYTES;
    /// The shortest time of a hold, or of an id.
    pub const MIN_TTL: Duration = Duration::from_micros(MIN_TTL);
    /// The longest time of a hold.
    pub const MAX_TTL: Duration = Duration::from_micros(MAX_TTL);
    /// The longest time for which an id is remembered.
    pub const MAX_ID_TTL: Duration = Duration::from_micros(MAX_ID_TTL);

    /// Creates a hold with an id of the caller. Requests with the same id are the same request.
    pub fn new(id: impl Into<String>) -> Result<Self, HoldError> {
        let id = id.into();
        let is_valid = (1..=MAX_ID_BYTES).contains(&id.len())
            && id.bytes().all(|byte| byte.is_ascii_graphic());
        let id = if is_valid { id.into_boxed_str() } else { return Err(HoldError::Id) };
        Ok(Self { id, ttl: None, is_settled: false, is_lease: false })
    }

    /// Creates a hold with 128 random bits as its id.
    #[must_use]
    pub fn random() -> Self {
        let mut id = String::with_capacity(32);
        let _ = write!(id, "{:016x}{:016x}", random_u64(), random_u64());
        Self { id: id.into_boxed_str(), ttl: None, is_settled: false, is_lease: false }
    }

    /// Creates a hold with a random id for ten seconds: the lease of a
    /// [`Permit`](crate::Permit), which renews it.
    #[must_use]
    pub fn lease() -> Self {
        Self { is_lease: true, ..Self::random().leased() }
    }

    /// Returns whether it is a lease, whose id is never used again.
    pub(crate) fn is_lease(&self) -> bool {
        self.is_lease
    }

    /// Returns the same hold with its own time, if renewals can keep it, or that of a lease.
    pub(crate) fn leased(self) -> Self {
        Self { ttl: self.ttl.filter(|ttl| *ttl >= MIN_LEASE).or(Some(LEASE)), ..self }
    }

    /// Returns the same hold with the longest time that these terms allow.
    pub(crate) fn with_max_ttl_of(self, terms: &HoldTerms) -> Self {
        Self { ttl: Some(terms.max_ttl), is_lease: false, ..self }
    }

    /// Sets the time after which the hold ends, from 1 s to 24 h. The default is that of the quota,
    /// and its maximum applies.
    pub fn with_ttl(mut self, ttl: Duration) -> Result<Self, HoldError> {
        let micros = micros(ttl);
        if !(MIN_TTL..=MAX_TTL).contains(&micros) {
            return Err(HoldError::Ttl(ttl));
        }
        (self.ttl, self.is_lease) = (Some(micros), false);
        Ok(self)
    }

    /// Makes it the id of an acquire that is settled at once. The id is remembered for `ttl`, at
    /// most 10 minutes: until then a retry is not charged again.
    pub fn settled(mut self, ttl: Duration) -> Result<Self, HoldError> {
        let micros = micros(ttl);
        if !(SECOND..=MAX_ID_TTL).contains(&micros) {
            return Err(HoldError::IdTtl(ttl));
        }
        (self.ttl, self.is_settled, self.is_lease) = (Some(micros), true, false);
        Ok(self)
    }

    /// Returns a reservation with the same id.
    pub(crate) fn unsettled(&self) -> Self {
        Self { id: self.id.clone(), ttl: None, is_settled: false, is_lease: false }
    }

    /// Returns the id.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Returns whether the acquire is settled at once.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.is_settled
    }

    /// Returns the time for which it holds the units of this quota, or its id is remembered.
    pub(crate) fn ttl_micros(&self, terms: &HoldTerms) -> u64 {
        match self.ttl {
            Some(ttl) if self.is_settled => ttl.min(MAX_ID_TTL),
            ttl => ttl.unwrap_or(terms.ttl).min(terms.max_ttl),
        }
    }
}

impl HoldTerms {
    /// Creates terms by which a hold ends after `ttl`, and after `max_ttl` whatever its renewals
    /// are.
    pub fn new(ttl: Duration, max_ttl: Duration) -> Result<Self, HoldError> {
        for ttl in [ttl, max_ttl] {
            if !(MIN_TTL..=MAX_TTL).contains(&micros(ttl)) {
                return Err(HoldError::Ttl(ttl));
            }
        }
        if ttl > max_ttl {
            return Err(HoldError::MaxTtl { ttl, max_ttl });
        }
        Ok(Self { ttl: micros(ttl), max_ttl: micros(max_ttl), on_expire: OnExpire::default() })
    }

    /// Returns the same terms with the time of a lease, at most the maximum.
    pub(crate) fn leased(self) -> Self {
        Self { ttl: LEASE.min(self.max_ttl), ..self }
    }

    /// Creates terms of which a part may be left out. One time alone moves the default of the
    /// other.
    pub fn with_defaults(
        ttl: Option<Duration>,
        max_ttl: Option<Duration>,
    ) -> Result<Self, HoldError> {
        let default = Self::default();
        Self::new(
            ttl.unwrap_or_else(|| default.ttl().min(max_ttl.unwrap_or(Duration::MAX))),
            max_ttl.unwrap_or_else(|| default.max_ttl().max(ttl.unwrap_or_default())),
        )
    }

    /// Sets what happens to the units of a hold that has ended without a commit.
    #[must_use]
    pub fn with_on_expire(mut self, on_expire: OnExpire) -> Self {
        self.on_expire = on_expire;
        self
    }

    /// Returns the time after which a hold without one of its own ends.
    #[must_use]
    pub fn ttl(&self) -> Duration {
        Duration::from_micros(self.ttl)
    }

    /// Returns the time after which no renewal extends a hold.
    #[must_use]
    pub fn max_ttl(&self) -> Duration {
        Duration::from_micros(self.max_ttl)
    }

    /// Returns what happens to the units of a hold that has ended without a commit.
    #[must_use]
    pub fn on_expire(&self) -> OnExpire {
        self.on_expire
    }

    pub(crate) fn max_ttl_micros(&self) -> u64 {
        self.max_ttl
    }
}

/// A minute, and ten of them at most.
impl Default for HoldTerms {
    fn default() -> Self {
        Self { ttl: 60 * SECOND, max_ttl: 600 * SECOND, on_expire: OnExpire::Charge }
    }
}

impl HoldState {
    /// Creates the state of a hold that ends after this time, rounded down to milliseconds.
    #[must_use]
    pub fn new(status: HoldStatus, expires_after: Duration) -> Self {
        let expires_after = u32::try_from(expires_after.as_millis()).unwrap_or(u32::MAX);
        Self { status, expires_after }
    }

    pub(crate) fn of_micros(status: HoldStatus, expires_after: u64) -> Self {
        Self::new(status, Duration::from_micros(expires_after))
    }

    /// Returns the time until the hold ends, rounded down to milliseconds; zero if it holds nothing.
    #[must_use]
    pub fn expires_after(&self) -> Duration {
        Duration::from_millis(self.expires_after.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_short_and_printable() {
        for invalid in ["", "a b", "é", "a\n", "a\u{7f}", &"x".repeat(65)] {
            assert_eq!(Hold::new(invalid), Err(HoldError::Id), "{invalid:?}");
        }
        for valid in ["a", "{}:*%", &"x".repeat(64)] {
            assert!(Hold::new(valid).is_ok(), "{valid:?}");
        }
        assert_ne!(Hold::random(), Hold::random());
    }

    #[test]
    fn times_are_bounded() {
        let second = Duration::from_secs(1);
        let hold = || Hold::new("a").expect("valid");
        assert!(hold().with_ttl(86_400 * second).is_ok());
        assert!(hold().with_ttl(86_401 * second).is_err());
        assert!(hold().with_ttl(second / 2).is_err());
        assert!(hold().settled(600 * second).is_ok());
        assert!(hold().settled(601 * second).is_err());
        assert!(HoldTerms::new(2 * second, second).is_err());
        let terms = HoldTerms::new(second, 10 * second).expect("valid");
        assert_eq!(hold().ttl_micros(&terms), SECOND);
        let long = hold().with_ttl(60 * second).expect("valid");
        assert_eq!(long.ttl_micros(&terms), 10 * SECOND);
        let id = hold().settled(second).expect("valid").with_ttl(3_600 * second).expect("valid");
        assert_eq!(id.ttl_micros(&terms), MAX_ID_TTL);
    }
}
