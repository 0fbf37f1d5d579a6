//! The five algorithms as pure integer arithmetic: the caller passes in the state and the time, so
//! there is no clock, no I/O and no floating point here.
//!
//! Each algorithm has a Lua twin next to it, which does the same on Redis under the same names. Its
//! fast path there is `NAME.fast.lua`.
//!
//! | algorithm | Rust | Lua |
//! | --- | --- | --- |
//! | `sliding-log` | `sliding_log.rs` | `sliding_log.lua`, and `sliding_log_packed.lua` |
//! | `sliding-counter` | `sliding_counter.rs` | `sliding_counter.lua`, in both encodings |
//! | `fixed-window` | `fixed_window.rs` | `fixed_window.lua` |
//! | the same with a calendar | `calendar_window.rs` | `calendar.lua`, before `fixed_window.lua` |
//! | `token-bucket`, `leaky-bucket` | `bucket.rs` | `bucket.lua` |
//! | `block_for`, with any of them | `block.rs` | `block.lua` |
//!
//! All of them work in the same way: a copy of the stored counter is advanced to the present, the decision is
//! computed from it, and the copy is stored only if units were spent or returned. A denied request
//! writes nothing, with two exceptions. A log that counts denials (`count_denied`) spends their
//! units. If the clock stepped back, stored times later than now count as now, and even a denied
//! acquire stores that; otherwise the key would stay locked until the clock catches up.

use std::time::Duration;

use crate::action::Action;
use crate::decision::{Decision, Source};
use crate::enum_names::enum_names;

mod block;
mod bucket;
mod calendar_window;
mod fixed_window;
#[cfg(feature = "redis")]
mod grants;
mod parameters;
mod reciprocal;
mod sliding_counter;
mod sliding_log;

pub(crate) use block::Block;
pub(crate) use bucket::{Bucket, MAX_CLOCK_SKEW, Parts};
pub(crate) use calendar_window::CalendarWindow;
pub(crate) use fixed_window::FixedWindow;
#[cfg(feature = "redis")]
pub(crate) use grants::{CounterSnapshot, Grants};
pub(crate) use parameters::{Lifetime, MAX_LIMIT, Parameters};
pub(crate) use reciprocal::Reciprocal;
pub(crate) use sliding_counter::SlidingCounter;
pub(crate) use sliding_log::{LogGrowth, SlidingLog};

/// The algorithm that counts the units of a quota.
///
/// ```
/// use tidegate::Algorithm;
///
/// let algorithm: Algorithm = "token-bucket".parse()?;
/// assert_eq!(algorithm, Algorithm::TokenBucket);
/// assert_eq!(algorithm.as_str(), "token-bucket");
/// # Ok::<(), tidegate::UnknownName>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Algorithm {
    /// Exact: admits at most the limit in any interval as long as the window.
    SlidingLog,
    /// Two window counts; the older one is weighted by its overlap with the sliding window.
    SlidingCounter,
    /// One count per window, with windows aligned to the clock.
    FixedWindow,
    /// Tokens that refill continuously, up to the burst.
    TokenBucket,
    /// A queue that drains at a constant rate; the decision has the delay until a request's turn.
    LeakyBucket,
    /// The units in flight: each is held until it is released or its hold ends. It has no window.
    Concurrency,
}

enum_names!(
    Algorithm,
    "algorithm",
    SlidingLog = "sliding-log",
    SlidingCounter = "sliding-counter",
    FixedWindow = "fixed-window",
    TokenBucket = "token-bucket",
    LeakyBucket = "leaky-bucket",
    Concurrency = "concurrency"
);

impl Algorithm {
    /// The algorithms that limit a rate: all but [`Concurrency`](Self::Concurrency).
    pub const RATES: [Self; 5] = [
        Self::SlidingLog,
        Self::SlidingCounter,
        Self::FixedWindow,
        Self::TokenBucket,
        Self::LeakyBucket,
    ];
}

/// The encoding of a `sliding-log` or a `sliding-counter` in Redis: readable, or packed into a
/// string, which takes less memory and less of Redis's time. Decisions are the same with either.
///
/// Charges without a policy name show the encoding in their default name:
///
/// ```
/// use std::time::Duration;
/// use tidegate::{Encoding, Quota};
///
/// let quota = Quota::sliding_log(50_000, Duration::from_secs(60))?;
/// let packed = quota.with_encoding(Encoding::Packed)?;
/// assert_eq!(packed.default_policy_name(), "sliding-log-packed-60s");
/// # Ok::<(), tidegate::QuotaError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Encoding {
    /// A sorted set with one member per request and the time as its score: a `sliding-log` that is
    /// readable with `ZRANGE`.
    #[default]
    SortedSet,
    /// A hash: a `sliding-counter` that is readable with `HGETALL`.
    Hash,
    /// A string: of the times of a `sliding-log`, or of the two counts of a `sliding-counter`. A
    /// long log is a hash of such strings.
    Packed,
}

enum_names!(Encoding, "encoding", SortedSet = "sorted-set", Hash = "hash", Packed = "packed");

/// The count of one key under one algorithm. Times are microseconds; `now` is the time that the
/// counter was last advanced to.
pub(crate) trait Counter {
    /// Advances the counter to `now`. Returns whether the clock stepped back, that is, whether a
    /// stored time was later than `now`.
    fn advance_to(&mut self, quota: &Parameters, now: u64) -> bool;
    /// Returns the units that can be spent now.
    fn remaining(&self, quota: &Parameters) -> u64;
    /// Returns the units recorded now, which can exceed the limit: see [`Parameters::max_level`]. Units
    /// of the previous window are not included.
    fn level(&self, quota: &Parameters) -> u64;
    /// Returns whether more units are recorded than the limit allows.
    fn is_overdrawn(&self, quota: &Parameters) -> bool {
        self.level(quota) > quota.burst()
    }
    /// Returns the shortest wait until `cost` units, more than remain now, can be spent.
    fn wait_for(&self, quota: &Parameters, now: u64, cost: u64) -> u64;
    /// Returns the wait to report to a request of `cost` units that is denied now.
    #[inline]
    fn retry_after(&self, quota: &Parameters, now: u64, cost: u64) -> u64 {
        self.wait_for(quota, now, cost)
    }
    /// Returns the time until nothing counts any more, if `extra` units are spent first.
    fn reset_after(&self, quota: &Parameters, now: u64, extra: u64) -> u64;
    /// Returns the delay of units that are spent now until their turn in the queue.
    #[inline]
    fn delay(&self, _quota: &Parameters) -> u64 {
        0
    }
    /// Spends `cost` units. A cost of 0 only applies the result of `advance_to`.
    fn spend(&mut self, quota: &Parameters, now: u64, cost: u64);
    /// Returns `cost` units of a charge made at `charged_at` or slightly later, never units younger
    /// than that charge. If the time is unknown (0), the oldest units are returned first.
    fn refund(&mut self, quota: &Parameters, now: u64, cost: u64, charged_at: u64);
    /// Returns whether nothing counts any more.
    fn is_empty(&self) -> bool;
}

/// A decision in raw microseconds, before it becomes a [`Decision`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RawDecision {
    pub(crate) allowed: bool,
    pub(crate) remaining: u64,
    pub(crate) retry_after: u64,
    pub(crate) reset_after: u64,
    pub(crate) delay: u64,
}

/// The result of an action on a counter.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Applied {
    pub(crate) decision: RawDecision,
    /// Whether the counter has changed and must be stored.
    pub(crate) written: bool,
}

/// Returns whether `cost` units can be spent now. Advances the counter.
pub(crate) fn fits(counter: &mut impl Counter, quota: &Parameters, now: u64, cost: u64) -> bool {
    counter.advance_to(quota, now);
    has_room(counter, quota, counter.remaining(quota), cost)
}

/// Returns whether there is room for `cost`. A cost of 0 asks whether the counter is overdrawn.
#[inline]
fn has_room(counter: &impl Counter, quota: &Parameters, remaining: u64, cost: u64) -> bool {
    if cost == 0 { !counter.is_overdrawn(quota) } else { cost <= remaining }
}

/// An action on the count of a key, at the time `now`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Operation<'a> {
    pub(crate) action: Action,
    pub(crate) quota: &'a Parameters,
    pub(crate) cost: u64,
    /// Time of the charge that is refunded; 0 if it is unknown.
    pub(crate) charged_at: u64,
    pub(crate) now: u64,
    /// Whether all charges of an all-or-nothing group fit.
    pub(crate) all_fit: bool,
}

/// Decides an operation and updates the counter. Unless the result is `written`, the counter has only been
/// advanced and need not be stored.
#[inline(always)]
#[expect(clippy::inline_always, reason = "most of it is removed when the action is a constant")]
pub(crate) fn apply<C: Counter>(counter: &mut C, operation: &Operation<'_>) -> Applied {
    let Operation { action, quota, now, cost, .. } = *operation;
    if action == Action::Refund {
        counter.advance_to(quota, now);
        let written = !counter.is_empty();
        if written {
            counter.refund(quota, now, cost, operation.charged_at);
        }
        return Applied { decision: decision_without_spending(counter, quota, now), written };
    }
    if action == Action::Report {
        return report(counter, quota, now, cost);
    }
    let plan = Plan::new(counter, operation);
    let decision = plan.decision(counter, quota, now);
    if plan.written {
        counter.spend(quota, now, plan.spend);
    }
    Applied { decision, written: plan.written }
}

/// Records units that were already used.
fn report<C: Counter>(counter: &mut C, quota: &Parameters, now: u64, cost: u64) -> Applied {
    let stepped_back = counter.advance_to(quota, now);
    let allowed = cost <= counter.remaining(quota);
    let spend = cost.min(quota.max_level().saturating_sub(counter.level(quota)));
    let written = spend > 0 || stepped_back;
    if written {
        counter.spend(quota, now, spend);
    }
    let retry_after = if allowed { 0 } else { counter.wait_for(quota, now, 1) };
    let decision =
        RawDecision { allowed, retry_after, ..decision_without_spending(counter, quota, now) };
    Applied { decision, written }
}

/// The planned effect of an acquire, a peek or a partial charge, before anything is spent.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Plan {
    allowed: bool,
    cost: u64,
    remaining: u64,
    has_delay: bool,
    pub(crate) spend: u64,
    pub(crate) written: bool,
}

impl Plan {
    /// Advances the counter to `now` and plans the action on it.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "most of it is removed when the action is a constant")]
    pub(crate) fn new<C: Counter>(counter: &mut C, operation: &Operation<'_>) -> Self {
        let Operation { action, quota, cost, now, all_fit, .. } = *operation;
        let stepped_back = counter.advance_to(quota, now);
        let remaining = counter.remaining(quota);
        let is_partial = action == Action::ChargeUpTo;
        let cost = if is_partial { cost.min(remaining) } else { cost };
        let allowed = if action == Action::Peek {
            has_room(counter, quota, remaining, cost)
        } else {
            is_partial || cost <= remaining
        };
        let is_spent = if allowed { all_fit } else { quota.count_denied() };
        let spend = if is_spent { cost } else { 0 };
        let written = action != Action::Peek && (spend > 0 || stepped_back);
        // A request that is charged afterwards has already run, so it has no delay.
        let has_delay = all_fit && !is_partial;
        Self { allowed, cost, remaining, has_delay, spend, written }
    }

    /// Returns the units that can still be spent afterwards; 0 after a denial.
    #[inline]
    pub(crate) fn remaining_after(&self) -> u64 {
        if self.allowed { self.remaining - self.spend } else { 0 }
    }

    /// Returns the decision. The counter must have been advanced, with nothing spent yet.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "most of it is removed when the action is a constant")]
    pub(crate) fn decision(
        &self,
        counter: &impl Counter,
        quota: &Parameters,
        now: u64,
    ) -> RawDecision {
        let reset_after = counter.reset_after(quota, now, self.spend);
        if self.allowed {
            let remaining = self.remaining - self.spend;
            let delay = if self.has_delay { counter.delay(quota) } else { 0 };
            return RawDecision { allowed: true, remaining, retry_after: 0, reset_after, delay };
        }
        let remaining = if self.spend > 0 { 0 } else { self.remaining };
        let retry_after = counter.retry_after(quota, now, self.cost);
        RawDecision { allowed: false, remaining, retry_after, reset_after, delay: 0 }
    }
}

pub(crate) fn decision_without_spending(
    counter: &impl Counter,
    quota: &Parameters,
    now: u64,
) -> RawDecision {
    RawDecision {
        allowed: true,
        remaining: counter.remaining(quota),
        retry_after: 0,
        reset_after: counter.reset_after(quota, now, 0),
        delay: 0,
    }
}

impl RawDecision {
    /// Returns the decision for a key without a count.
    pub(crate) fn untouched(burst: u64) -> Self {
        Self { allowed: true, remaining: burst, retry_after: 0, reset_after: 0, delay: 0 }
    }

    #[inline]
    pub(crate) fn into_decision(self, burst: u64, source: Source) -> Decision {
        Decision {
            allowed: self.allowed,
            limit: burst,
            remaining: self.remaining,
            retry_after: duration_from_micros(self.retry_after),
            reset_after: Duration::from_micros(self.reset_after),
            delay: duration_from_micros(self.delay),
            source,
            hold: None,
        }
    }
}

/// Converts a time that is usually zero, for which it skips the division.
#[inline]
fn duration_from_micros(micros: u64) -> Duration {
    if micros == 0 { Duration::ZERO } else { Duration::from_micros(micros) }
}

/// Returns the quotient and the remainder of `a * b / m`, without overflow in between. For numbers
/// that a `Quota` allows, the quotient fits 64 bits.
#[inline]
pub(crate) fn mul_div_rem(a: u64, b: u64, m: u64) -> (u64, u64) {
    // Most products fit 64 bits, where a division is much cheaper than in 128.
    if let Some(product) = a.checked_mul(b) {
        // Little or nothing has drained from a busy key since its last request.
        return if product < m { (0, product) } else { (product / m, product % m) };
    }
    mul_div_rem_wide(a, b, m)
}

#[cold]
fn mul_div_rem_wide(a: u64, b: u64, m: u64) -> (u64, u64) {
    let (product, m) = (u128::from(a) * u128::from(b), u128::from(m));
    (u64::try_from(product / m).unwrap_or(u64::MAX), u64::try_from(product % m).unwrap_or(u64::MAX))
}

/// Returns `a * b / m`, rounded up: a wait that is a microsecond too short ends in another denial.
pub(crate) fn mul_div_ceil(a: u64, b: u64, m: u64) -> u64 {
    let (quotient, remainder) = mul_div_rem(a, b, m);
    quotient.saturating_add(u64::from(remainder > 0))
}
