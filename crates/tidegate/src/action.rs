//! [`Action`]: the operation to perform on a charge.

/// The operation that a [`Store`](crate::Store) performs on a charge.
///
/// ```
/// use std::time::Duration;
/// use tidegate::{Action, Charge, Limiter, MemoryStore, Quota};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let limiter = Limiter::new(MemoryStore::new());
/// let quota = Quota::fixed_window(10, Duration::from_secs(60))?;
/// let charge = Charge::new("user123", &quota);
/// let decision = limiter.blocking().decide(Action::Acquire, &charge)?;
/// assert_eq!(decision.remaining, 9);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// Decides and, if the charge is allowed, spends its units.
    Acquire,
    /// Returns the decision that [`Acquire`](Self::Acquire) would return, and writes nothing. A
    /// cost of 0 asks whether more units are recorded than the limit allows.
    Peek,
    /// Returns the units of an earlier charge, if they still count. [`Charge::with_charged_at`] is
    /// the time of that charge. A [`Limiter`](crate::Limiter) requires it; a store that gets none
    /// returns the oldest units that still count, which may be newer than the charge.
    ///
    /// [`Charge::with_charged_at`]: crate::Charge::with_charged_at
    Refund,
    /// Deletes the count of the key.
    Reset,
    /// Charges as much of the cost as fits, possibly nothing: for requests that were served before
    /// they could be charged. The decision is always `allowed` and has the units that remain. A
    /// cost of 0 reads the count, and a cost above the burst is valid. Several charges are
    /// independent of each other.
    ChargeUpTo,
    /// Records units that were already used: always charges, even beyond the limit. The overdraft
    /// is bounded by [`Quota::max_level`](crate::Quota::max_level) and shrinks over time. The
    /// decision says whether the units fitted; if not, `remaining` is 0 and `retry_after` is the
    /// wait until one unit is free. Several charges are independent of each other.
    Report,
    /// Settles the hold of a [reservation](crate::Hold): its cost is the units that were used, possibly
    /// 0. Fewer than reserved return the rest to the time of their charge, and more are charged as a
    /// report. A hold that is unknown or has ended is charged as a report, too. A second commit
    /// changes nothing. Several charges are independent of each other.
    Commit,
    /// Releases one unit in flight whose hold has a [random](crate::Hold::random) id, as
    /// [`Commit`](Self::Commit) does for any hold. Only the state of the hold is valid in the
    /// decision, so that Redis needs a command instead of a script.
    Release,
    /// Extends a hold that has not ended, up to the [maximum](crate::HoldTerms::max_ttl) from its
    /// charge on. Several charges are independent of each other.
    Renew,
}

impl Action {
    /// Returns whether several charges are decided all or nothing.
    #[must_use]
    pub fn is_all_or_nothing(self) -> bool {
        matches!(self, Self::Acquire | Self::Peek)
    }

    /// Returns whether it needs the hold of an earlier acquire.
    pub(crate) fn is_on_hold(self) -> bool {
        matches!(self, Self::Commit | Self::Release | Self::Renew)
    }
}
