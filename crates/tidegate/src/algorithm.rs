//! The five algorithms: pure arithmetic, with the state and the time handed in. No clock, no I/O,
//! no float.
//!
//! Each has a Lua twin beside it that does the same on Redis, with the same names:
//!
//! | algorithm | Rust | Lua |
//! | --- | --- | --- |
//! | `sliding-log` | `sliding_log.rs` | `sliding_log.lua`, and `sliding_log_packed.lua` |
//! | `sliding-counter` | `sliding_counter.rs` | `sliding_counter.lua` |
//! | `fixed-window` | `fixed_window.rs` | `fixed_window.lua` |
//! | `token-bucket`, `leaky-bucket` | `bucket.rs` | `bucket.lua` |
//!
//! What they share: a state is *settled* to the present on a copy, questions are asked of it, and
//! only what is spent or given back is written. A denied request writes nothing. The one exception
//! is a clock that stepped back: stored times later than now count as now, and an acquire, even a
//! denied one, writes that down, or they would stay "now" until the clock has caught up, and lock
//! the key for so long.

use std::time::Duration;

use crate::charge::Charge;
use crate::decision::{Decision, Source};
use crate::named::named;
use crate::quota::Quota;
use crate::store::Action;

mod bucket;
mod fixed_window;
#[cfg(feature = "redis")]
mod grants;
mod sliding_counter;
mod sliding_log;
mod state;

pub(crate) use bucket::Bucket;
#[cfg(feature = "testing")]
pub(crate) use bucket::MAX_CLOCK_SKEW;
pub(crate) use fixed_window::Window;
#[cfg(feature = "redis")]
pub(crate) use grants::{Evidence, Grants};
pub(crate) use sliding_counter::Counter;
pub(crate) use sliding_log::{Log, Logs};
pub(crate) use state::{Kept, Kind, MAX_TIME, State};

/// How units are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Algorithm {
    /// Exact: at most the limit in any stretch of time as long as the window.
    SlidingLog,
    /// Two window counts, the older one weighed by how much of it is still in sight.
    SlidingCounter,
    /// A count for each window of the clock.
    FixedWindow,
    /// Tokens that come back continuously, and can be saved up to the burst.
    TokenBucket,
    /// A queue that drains evenly; what is admitted is told when its turn is.
    LeakyBucket,
}

named!(
    Algorithm,
    "algorithm",
    SlidingLog = "sliding-log",
    SlidingCounter = "sliding-counter",
    FixedWindow = "fixed-window",
    TokenBucket = "token-bucket",
    LeakyBucket = "leaky-bucket"
);

/// How Redis keeps a `sliding-log`. The answers are the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Encoding {
    /// A sorted set: one member a request, its score the time. Readable with `ZRANGE`.
    #[default]
    SortedSet,
    /// A string of packed timestamps: a fraction of the memory.
    Packed,
}

named!(Encoding, "encoding", SortedSet = "sorted-set", Packed = "packed");

/// What every algorithm answers about its state. Times are microseconds; `now` is the time it was
/// settled to.
pub(crate) trait Count {
    /// Brings the state to `now`. True if a stored time was later than `now`.
    fn settle(&mut self, quota: &Quota, now: u64) -> bool;
    /// Units that could be taken now.
    fn remaining(&self, quota: &Quota) -> u64;
    /// Units recorded now, which may be more than the limit: see [`Quota::max_level`]. What counts
    /// of a window before the current one is not in it.
    fn level(&self) -> u64;
    /// Whether more is recorded than the limit.
    fn is_overdrawn(&self, quota: &Quota) -> bool {
        self.level() > quota.burst()
    }
    /// The shortest wait until `cost` units, more than there are now, could be taken.
    fn wait_for(&self, quota: &Quota, now: u64, cost: u64) -> u64;
    /// The same for a request of `cost` units that is denied now.
    fn retry_after(&self, quota: &Quota, now: u64, cost: u64) -> u64 {
        self.wait_for(quota, now, cost)
    }
    /// How long until nothing counts any more, if `extra` units were spent first.
    fn reset_after(&self, quota: &Quota, now: u64, extra: u64) -> u64;
    /// How long what is taken now has to wait for its turn.
    fn delay(&self, _quota: &Quota) -> u64 {
        0
    }
    /// Takes `cost` units; 0 only writes down what `settle` found.
    fn spend(&mut self, quota: &Quota, now: u64, cost: u64);
    /// Returns `cost` units of a charge made at `charged_at` or a little later: never units younger
    /// than that charge. If the time is unknown (0), the oldest units go first.
    fn refund(&mut self, quota: &Quota, now: u64, cost: u64, charged_at: u64);
    /// Nothing counts any more.
    fn is_empty(&self) -> bool;
}

/// A decision in microseconds, before it is dressed for users.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Verdict {
    pub(crate) allowed: bool,
    pub(crate) remaining: u64,
    pub(crate) retry_after: u64,
    pub(crate) reset_after: u64,
    pub(crate) delay: u64,
}

/// What came of an action on a state.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Outcome {
    pub(crate) verdict: Verdict,
    pub(crate) written: bool,
}

/// Whether `cost` units could be taken now.
pub(crate) fn fits(count: &mut impl Count, quota: &Quota, now: u64, cost: u64) -> bool {
    count.settle(quota, now);
    has_room(count, quota, count.remaining(quota), cost)
}

/// Whether there is room for `cost`. A cost of 0 asks whether more is recorded than the limit.
#[inline]
fn has_room(count: &impl Count, quota: &Quota, remaining: u64, cost: u64) -> bool {
    if cost == 0 { !count.is_overdrawn(quota) } else { cost <= remaining }
}

/// Decides, and changes the count as the action does. `together` is false for a charge whose
/// companions (all or nothing) do not all fit. If nothing is `written`, the count is not worth
/// keeping: it is only settled.
#[inline(always)]
#[expect(clippy::inline_always, reason = "for a known action, most of it falls away")]
pub(crate) fn apply<C: Count>(
    count: &mut C,
    action: Action,
    charge: &Charge<'_>,
    now: u64,
    together: bool,
) -> Outcome {
    let (quota, cost) = (charge.quota(), charge.units());
    if action == Action::Refund {
        count.settle(quota, now);
        let written = !count.is_empty();
        if written {
            count.refund(quota, now, cost, charge.charge_time());
        }
        return Outcome { verdict: unspent(count, quota, now), written };
    }
    if action == Action::Report {
        return report(count, quota, now, cost);
    }
    let step = Step::on(count, action, quota, now, cost, together);
    let verdict = step.verdict(count, quota, now);
    if step.written {
        count.spend(quota, now, step.spend);
    }
    Outcome { verdict, written: step.written }
}

/// Records units that were used already.
fn report<C: Count>(count: &mut C, quota: &Quota, now: u64, cost: u64) -> Outcome {
    let stepped_back = count.settle(quota, now);
    let fits = cost <= count.remaining(quota);
    let spend = cost.min(quota.max_level().saturating_sub(count.level()));
    let written = spend > 0 || stepped_back;
    if written {
        count.spend(quota, now, spend);
    }
    let retry_after = if fits { 0 } else { count.wait_for(quota, now, 1) };
    Outcome {
        verdict: Verdict { allowed: fits, retry_after, ..unspent(count, quota, now) },
        written,
    }
}

/// The outcome of an action other than a refund or a report, before it is applied.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Step {
    allowed: bool,
    cost: u64,
    remaining: u64,
    in_turn: bool,
    pub(crate) spend: u64,
    pub(crate) written: bool,
}

impl Step {
    /// Settles the count.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "for a known action, most of it falls away")]
    pub(crate) fn on<C: Count>(
        count: &mut C,
        action: Action,
        quota: &Quota,
        now: u64,
        cost: u64,
        together: bool,
    ) -> Self {
        let stepped_back = count.settle(quota, now);
        let remaining = count.remaining(quota);
        let takes = action == Action::ChargeUpTo;
        let cost = if takes { cost.min(remaining) } else { cost };
        let allowed = if action == Action::Peek {
            has_room(count, quota, remaining, cost)
        } else {
            takes || cost <= remaining
        };
        let counts = if allowed { together } else { quota.count_denied() };
        let spend = if counts { cost } else { 0 };
        let written = action != Action::Peek && (spend > 0 || stepped_back);
        // What is taken afterwards has had its turn.
        let in_turn = together && !takes;
        Self { allowed, cost, remaining, in_turn, spend, written }
    }

    /// Of the count that is settled, with nothing spent yet.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "for a known action, most of it falls away")]
    pub(crate) fn verdict(&self, count: &impl Count, quota: &Quota, now: u64) -> Verdict {
        let reset_after = count.reset_after(quota, now, self.spend);
        if self.allowed {
            let remaining = self.remaining - self.spend;
            let delay = if self.in_turn { count.delay(quota) } else { 0 };
            return Verdict { allowed: true, remaining, retry_after: 0, reset_after, delay };
        }
        let remaining = if self.spend > 0 { 0 } else { self.remaining };
        let retry_after = count.retry_after(quota, now, self.cost);
        Verdict { allowed: false, remaining, retry_after, reset_after, delay: 0 }
    }
}

/// What is left when nothing is taken.
fn unspent(count: &impl Count, quota: &Quota, now: u64) -> Verdict {
    Verdict {
        allowed: true,
        remaining: count.remaining(quota),
        retry_after: 0,
        reset_after: count.reset_after(quota, now, 0),
        delay: 0,
    }
}

impl Verdict {
    /// What there is once a key is forgotten.
    pub(crate) fn untouched(quota: &Quota) -> Self {
        Self { allowed: true, remaining: quota.burst(), retry_after: 0, reset_after: 0, delay: 0 }
    }

    #[inline]
    pub(crate) fn into_decision(self, quota: &Quota, source: Source) -> Decision {
        Decision {
            allowed: self.allowed,
            limit: quota.limit(),
            remaining: self.remaining,
            retry_after: duration(self.retry_after),
            reset_after: Duration::from_micros(self.reset_after),
            delay: duration(self.delay),
            source,
        }
    }
}

/// Of one that is mostly zero.
#[inline]
fn duration(micros: u64) -> Duration {
    if micros == 0 { Duration::ZERO } else { Duration::from_micros(micros) }
}

/// `a * b / m` and its remainder, without overflow in between. The quotient of what a `Quota`
/// allows fits.
#[inline]
fn mul_div_rem(a: u64, b: u64, m: u64) -> (u64, u64) {
    // Most products fit 64 bits, where a division costs a fraction of what it costs in 128.
    if let Some(product) = a.checked_mul(b) {
        // Of a key that is asked for often, nothing or little has drained since.
        return if product < m { (0, product) } else { (product / m, product % m) };
    }
    mul_div_rem_wide(a, b, m)
}

#[cold]
fn mul_div_rem_wide(a: u64, b: u64, m: u64) -> (u64, u64) {
    let (product, m) = (u128::from(a) * u128::from(b), u128::from(m));
    (u64::try_from(product / m).unwrap_or(u64::MAX), u64::try_from(product % m).unwrap_or(u64::MAX))
}

/// `a * b / m`, rounded up: a wait that is too short by a microsecond ends in another denial.
pub(crate) fn mul_div_ceil(a: u64, b: u64, m: u64) -> u64 {
    let (quotient, rest) = mul_div_rem(a, b, m);
    quotient + u64::from(rest > 0)
}
