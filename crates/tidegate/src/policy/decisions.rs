//! [`PolicyDecisions`]: the answer of all limits that apply to a request.

use std::ops::{Deref, DerefMut};
use std::time::Duration;

use super::{Enforcement, PreparedCharge, RequestLease, StatusSet};
use crate::charge::Charge;
use crate::clock::Timestamp;
use crate::decision::{Decision, Source};
use crate::headers::PolicyState;
use crate::hold::{Hold, HoldState, HoldStatus};
use crate::quota::Quota;
use crate::store::Action;

/// Decision of one limit on a request, an entry of [`PolicyDecisions`].
///
/// It has the policy, the key and the quota next to the [`Decision`], for logs, metrics and
/// responses. It does not say whether the request passes: other limits may deny it, and a limit
/// in shadow mode denies nothing.
#[derive(Debug, Clone)]
pub struct PolicyDecision<'a> {
    pub(super) charge: PreparedCharge<'a>,
    pub(super) decision: Decision,
    /// Whether `decision` is made. Entries that cannot be decided are removed from the result.
    pub(super) decided: bool,
    /// Whether the request was denied without a count.
    rejected: bool,
    /// Position among the charges of the query.
    pub(super) position: usize,
}

/// Decisions of all limits that apply to a request.
///
/// An entry may deny a request that passes, in shadow mode, or allow one that is denied by another
/// limit: ask [`is_allowed`](Self::is_allowed). Without entries no limit applies, and the request
/// passes.
///
/// ```
/// use std::collections::BTreeMap;
/// use std::time::Duration;
/// use tidegate::{Limiter, MemoryStore, Mode, Policies, Policy, PolicyLimiter, Query, Quota};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let minute = Duration::from_secs(60);
/// let users = Policy::builder("per-user", Quota::sliding_log(2, minute)?)
///     .key(["header.x-user-id"])
///     .build()?;
/// let strict = Policy::builder("planned", Quota::sliding_log(1, minute)?)
///     .key(["header.x-user-id"])
///     .mode(Mode::Shadow)
///     .build()?;
/// let policies = Policies::new(vec![users, strict])?;
/// let limiter = PolicyLimiter::new(Limiter::new(MemoryStore::new()), policies);
/// let request = BTreeMap::from([("header.x-user-id".to_owned(), "ann".to_owned())]);
///
/// assert!(limiter.acquire(Query::attributes(&request)).await?.is_allowed());
///
/// // The planned limit would deny the second request, but it is only observed.
/// let second = limiter.acquire(Query::attributes(&request)).await?;
/// assert!(second.is_allowed());
/// let planned = second.iter().find(|entry| entry.is_shadow()).expect("it applies");
/// assert!(!planned.decision().allowed);
///
/// let third = limiter.acquire(Query::attributes(&request)).await?;
/// let denial = third.denied_by().expect("the limit is used up");
/// assert_eq!((denial.policy(), denial.key()), ("per-user", Some("ann")));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Default)]
#[must_use = "a denied request must not pass: check `is_allowed()`"]
pub struct PolicyDecisions<'a> {
    /// Time just before the first call, by the store's clock.
    pub(super) asked_at: Timestamp,
    pub(super) entries: Entries<'a>,
    pub(super) lease: Option<RequestLease>,
}

/// Entries of a request. A single one, as of nearly every request, needs no allocation.
#[derive(Debug, Clone)]
pub(super) enum Entries<'a> {
    One(PolicyDecision<'a>),
    Several(Vec<PolicyDecision<'a>>),
}

impl<'a> Entries<'a> {
    #[inline]
    pub(super) fn one(charge: PreparedCharge<'a>) -> Self {
        Self::One(PolicyDecision::new(charge, 0))
    }

    /// Removes the entries that could not be decided.
    #[inline]
    pub(super) fn retain_decided(&mut self) {
        match self {
            Self::One(entry) if entry.decided => {}
            Self::One(_) => *self = Self::default(),
            Self::Several(entries) => entries.retain(|entry| entry.decided),
        }
    }
}

impl Default for Entries<'_> {
    fn default() -> Self {
        Self::Several(Vec::new())
    }
}

impl<'a> FromIterator<PreparedCharge<'a>> for Entries<'a> {
    fn from_iter<T: IntoIterator<Item = PreparedCharge<'a>>>(charges: T) -> Self {
        let mut charges = charges.into_iter();
        let Some(first) = charges.next() else { return Self::default() };
        let Some(second) = charges.next() else { return Self::one(first) };
        let all = [first, second].into_iter().chain(charges).enumerate();
        Self::Several(all.map(|(position, charge)| PolicyDecision::new(charge, position)).collect())
    }
}

impl<'a> Deref for Entries<'a> {
    type Target = [PolicyDecision<'a>];

    fn deref(&self) -> &Self::Target {
        match self {
            Self::One(entry) => std::slice::from_ref(entry),
            Self::Several(entries) => entries,
        }
    }
}

impl DerefMut for Entries<'_> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        match self {
            Self::One(entry) => std::slice::from_mut(entry),
            Self::Several(entries) => entries,
        }
    }
}

impl<'a> PolicyDecisions<'a> {
    /// Returns whether the request may pass.
    #[must_use]
    pub fn is_allowed(&self) -> bool {
        !is_denied(&self.entries)
    }

    /// Returns the most restrictive decision. One in shadow mode is returned only if no limit is
    /// enforced; then the request passes even if that decision denies.
    #[must_use]
    pub fn binding(&self) -> Option<&PolicyDecision<'a>> {
        if let [entry] = &*self.entries {
            return Some(entry);
        }
        self.entries.iter().min_by_key(|entry| (entry.is_shadow(), entry.decision.rank()))
    }

    /// Returns the decision that denies the request; of several, the one with the longest wait.
    #[must_use]
    pub fn denied_by(&self) -> Option<&PolicyDecision<'a>> {
        if self.is_allowed() {
            return None;
        }
        let denials = self.enforced().filter(|entry| entry.is_denied());
        denials.min_by_key(|entry| entry.decision.rank())
    }

    /// Iterates over the limits that a denied request exceeds. It is empty if the request is denied
    /// for another reason: it lacks the key of a policy, or the store is unavailable.
    pub fn exceeded(&self) -> impl Iterator<Item = &PolicyDecision<'a>> {
        let is_denied = !self.is_allowed();
        self.enforced().filter(move |entry| {
            let source = entry.decision.source;
            let counts = !matches!(source, Source::Deny | Source::MissingKey | Source::Override);
            is_denied && entry.is_denied() && counts
        })
    }

    /// Returns how long an admitted request has to wait for its turn: the longest delay of the
    /// enforced limits. Only a `leaky-bucket` has one. The caller sleeps, for example by
    /// [`Clock::sleep`](crate::Clock::sleep) of the store's clock.
    #[must_use]
    pub fn delay(&self) -> Duration {
        self.enforced().map(|entry| entry.decision.delay).max().unwrap_or_default()
    }

    /// Iterates over the decisions, including those in shadow mode, in the order of their
    /// [positions](PolicyDecision::position). Limits in shadow mode that could not be decided are
    /// left out.
    pub fn iter(&self) -> std::slice::Iter<'_, PolicyDecision<'a>> {
        self.entries.iter()
    }

    /// Returns the hold of the request: its id, and its state in the limit that ends first, or that
    /// is not settled. Limits in shadow mode only count if no limit is enforced. `None` if the
    /// request holds nothing, such as a reservation that is denied.
    #[must_use]
    pub fn hold(&self) -> Option<(&Hold, HoldState)> {
        let states = self.entries.iter().filter_map(|entry| Some((entry, entry.decision.hold?)));
        let (_, state) = states.min_by_key(|(entry, state)| {
            // Of an acquire that is settled at once, a renewal extends only units in flight.
            let is_of_rate = !entry.quota().is_some_and(Quota::is_concurrency);
            let is_rate_renewal = entry.action() == Action::Renew && is_of_rate;
            let rank = match state.status {
                HoldStatus::Ended | HoldStatus::Unknown | HoldStatus::Reported => 0,
                HoldStatus::Pending => 1,
                HoldStatus::Held | HoldStatus::Replayed | HoldStatus::Settled => 2,
            };
            let expires_after = state.expires_after();
            (entry.is_shadow(), is_rate_renewal, rank, expires_after.is_zero(), expires_after)
        })?;
        let hold = self.entries.iter().find_map(|entry| entry.charge.hold())?;
        Some((hold, state))
    }

    /// Returns what the request holds until its response has ended, if the query asked for
    /// [a lease](super::Query::with_lease).
    #[must_use]
    pub fn lease(&self) -> Option<&RequestLease> {
        self.lease.as_ref()
    }

    /// Returns whether no limit applies.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Iterates over the states of the enforced limits, for [`headers`](crate::headers).
    pub fn header_states(&self) -> impl Iterator<Item = PolicyState<'_>> + Clone {
        self.enforced().filter_map(|entry| {
            let quota = entry.charge.quota()?;
            Some(PolicyState::new(entry.policy(), quota, entry.decision))
        })
    }

    /// Iterates over the same states, with the partition keys that the closure returns: hashes of
    /// the [keys](PolicyDecision::key).
    pub fn header_states_with(
        &self,
        partition_key: impl Fn(&PolicyDecision<'_>) -> Option<[u8; 16]> + Clone,
    ) -> impl Iterator<Item = PolicyState<'_>> + Clone {
        self.enforced().filter_map(move |entry| {
            let state = PolicyState::new(entry.policy(), entry.charge.quota()?, entry.decision);
            Some(PolicyState { partition_key: partition_key(entry), ..state })
        })
    }

    /// Copies the borrowed parts, so that the decisions can be kept after the policies, for example
    /// for a [refund](crate::PolicyLimiter::refund) by a task that outlives the request.
    #[must_use = "it consumes the decisions"]
    pub fn into_owned(self) -> PolicyDecisions<'static> {
        let owned = |entry: PolicyDecision<'a>| PolicyDecision {
            charge: entry.charge.into_owned(),
            decision: entry.decision,
            decided: entry.decided,
            rejected: entry.rejected,
            position: entry.position,
        };
        let entries = match self.entries {
            Entries::One(entry) => Entries::One(owned(entry)),
            Entries::Several(entries) => Entries::Several(entries.into_iter().map(owned).collect()),
        };
        PolicyDecisions { asked_at: self.asked_at, entries, lease: self.lease }
    }

    /// Returns the decisions of the policies that [refund](super::PolicyBuilder::refund_on) a
    /// request whose response has this status, for
    /// [`PolicyLimiter::refund`](crate::PolicyLimiter::refund). Empty for a denied request.
    pub fn refunded_on(&self, status: u16) -> Self {
        let refunds = |entry: &&PolicyDecision<'_>| {
            refund_on(entry).is_some_and(|statuses| statuses.contains(status))
        };
        let is_allowed = self.is_allowed();
        let entries = self.entries.iter().filter(|entry| is_allowed && refunds(entry)).cloned();
        let entries = Entries::Several(entries.collect());
        Self { asked_at: self.asked_at, entries, lease: self.lease.clone() }
    }

    /// Returns whether a status may refund the request.
    #[cfg(feature = "tower")]
    pub(crate) fn awaits_status(&self) -> bool {
        self.entries.iter().any(|entry| refund_on(entry).is_some())
    }

    /// Iterates over the charges that return the units of this request, as far as any of them still
    /// count at `now`. Units in flight return when their lease ends.
    pub(super) fn refunds(&self, now: Timestamp) -> impl Iterator<Item = Charge<'_>> {
        let is_allowed = self.is_allowed();
        let is_leased = |entry: &PolicyDecision<'_>| {
            self.lease.is_some() && entry.quota().is_some_and(Quota::is_concurrency)
        };
        let is_taken = move |entry: &&PolicyDecision<'_>| entry.took_units() && !is_leased(entry);
        let taken = self.entries.iter().filter(move |entry| is_allowed && is_taken(entry));
        taken.filter_map(move |entry| {
            entry.charge.charge()?.to_refund(&entry.decision, self.asked_at, now)
        })
    }

    fn enforced(&self) -> impl Iterator<Item = &PolicyDecision<'a>> + Clone {
        self.entries.iter().filter(|entry| !entry.is_shadow())
    }
}

impl<'a, 'd> IntoIterator for &'d PolicyDecisions<'a> {
    type Item = &'d PolicyDecision<'a>;
    type IntoIter = std::slice::Iter<'d, PolicyDecision<'a>>;

    fn into_iter(self) -> Self::IntoIter {
        self.entries.iter()
    }
}

/// Returns the statuses of responses that return the units of a limit.
fn refund_on<'d>(entry: &'d PolicyDecision<'_>) -> Option<&'d StatusSet> {
    entry.charge.on_response()?.refund_on.as_ref()
}

/// Returns whether the decisions so far deny the request.
pub(super) fn is_denied(entries: &[PolicyDecision<'_>]) -> bool {
    if let [entry] = entries {
        return !entry.is_shadow() && entry.is_denied();
    }
    let of =
        |enforcement| entries.iter().filter(move |entry| entry.charge.enforcement() == enforcement);
    of(Enforcement::Enforce).any(PolicyDecision::is_denied)
        || (of(Enforcement::AllDenied).next().is_some()
            && of(Enforcement::AllDenied).all(PolicyDecision::is_denied))
}

impl<'a> PolicyDecision<'a> {
    #[inline]
    pub(super) fn new(charge: PreparedCharge<'a>, position: usize) -> Self {
        let fixed = charge.fixed().map(|fixed| fixed.decision);
        let decided = fixed.is_some();
        let decision = fixed.unwrap_or(Decision::allow(0, 0));
        Self { charge, decision, decided, rejected: decided, position }
    }

    /// Returns the decision.
    pub fn decision(&self) -> Decision {
        self.decision
    }

    /// Returns the name that the limit counts under.
    #[must_use]
    pub fn policy(&self) -> &str {
        self.charge.policy()
    }

    /// Returns the name in metrics: that of the policy, unless the query or the charge sets
    /// another, for example to keep the number of label values small.
    #[must_use]
    pub fn metric_name(&self) -> &str {
        self.charge.metric_name()
    }

    /// Returns the key; `None` if the request lacks it.
    #[must_use]
    pub fn key(&self) -> Option<&str> {
        self.charge.key()
    }

    /// Returns the name of the attribute that the request lacks, if it is denied because of that:
    /// an attribute of the policy's key, such as `header.x-user-id`.
    #[must_use]
    pub fn missing_key(&self) -> Option<&str> {
        self.charge.fixed()?.missing_key.as_deref()
    }

    /// Returns the quota; `None` for a limit of 0.
    #[must_use]
    pub fn quota(&self) -> Option<&Quota> {
        self.charge.quota()
    }

    /// Returns the number of units that the request asked for.
    #[must_use]
    pub fn cost(&self) -> u64 {
        self.charge.cost()
    }

    /// Returns the hold of the request.
    #[must_use]
    pub fn hold(&self) -> Option<&Hold> {
        self.charge.hold()
    }

    /// Returns the action that was decided.
    #[must_use]
    pub fn action(&self) -> Action {
        self.charge.action()
    }

    /// Returns how a denial affects the request.
    #[must_use]
    pub fn enforcement(&self) -> Enforcement {
        self.charge.enforcement()
    }

    /// Returns whether a denial has no effect.
    #[must_use]
    pub fn is_shadow(&self) -> bool {
        self.charge.is_shadow()
    }

    /// Returns whether the store decides this entry alone, if the request has no other.
    pub(super) fn is_decided_alone(&self) -> bool {
        !self.decided && !self.is_shadow() && !self.charge.exceeds_capacity()
    }

    /// Returns whether the request was denied without asking the store: its key is missing, its
    /// cost is above the capacity, or the limit is 0.
    #[must_use]
    pub fn is_rejected(&self) -> bool {
        self.rejected
    }

    /// Returns the position among the charges of the query, from 0: for [`Query::prepared`], the
    /// index into its charges.
    ///
    /// [`Query::prepared`]: crate::Query::prepared
    #[must_use]
    pub fn position(&self) -> usize {
        self.position
    }

    /// Returns whether the limit denies the request, were it not in shadow mode. A refund or reset
    /// never denies.
    #[must_use]
    pub fn is_denied(&self) -> bool {
        let action = self.action();
        let is_decision =
            !(matches!(action, Action::Refund | Action::Reset) || action.is_on_hold());
        is_decision && (self.charge.exceeds_capacity() || (self.decided && !self.decision.allowed))
    }

    /// Returns whether units were counted: a decision without a count takes none.
    fn took_units(&self) -> bool {
        self.charge.action() == Action::Acquire
            && self.decision.allowed
            && matches!(self.decision.source, Source::Store | Source::Local)
    }

    /// Denies a charge that can never be admitted.
    pub(super) fn reject(&mut self) {
        let limit = self.quota().map_or(0, Quota::burst);
        self.decision = Decision::deny(limit, Duration::ZERO).with_source(Source::Deny);
        self.decided = true;
        self.rejected = true;
    }

    /// Takes the store's decision.
    pub(super) fn set(&mut self, decision: Decision) {
        self.decision = decision;
        self.decided = true;
    }

    /// Adds the units of this charge to what is left after it. A decision without a count, such as
    /// that of a failure mode, has not subtracted them.
    pub(super) fn remaining_without(&self, remaining: u64) -> u64 {
        let units = self.charge.charge().map_or(0, |charge| charge.cost());
        remaining.saturating_add(units).min(self.quota().map_or(0, Quota::burst))
    }

    /// Takes the store's decision on a charge whose cost may have been capped.
    pub(super) fn set_capped(&mut self, mut decision: Decision) {
        if self.charge.exceeds_capacity() {
            // The store was asked for the burst, not for the whole cost.
            decision.retry_after = decision.retry_after.max(decision.reset_after);
            decision.allowed = false;
        }
        self.set(decision);
    }

    /// Takes the store's decision on a peek that replaced an acquire, because nothing is to be
    /// taken yet. `counts_spend`: the decision counts the units as taken, because all charges of
    /// its call fit.
    pub(super) fn set_peeked(&mut self, mut decision: Decision, counts_spend: bool) {
        if counts_spend {
            decision.remaining = self.remaining_without(decision.remaining);
        }
        self.set_capped(decision);
    }
}
