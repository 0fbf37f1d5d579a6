//! [`PolicyLimiter`]: the decision pipeline behind every front door.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::level_filters::LevelFilter;
use tracing::{Instrument as _, Span};

use super::decisions::Entries;
use super::key_source::shown;
use super::query::QueryTarget;
use super::{
    Attributes, Explanation, LeaseScope, OverridesNow, Policies, Policy, PolicyDecision,
    PolicyDecisions, PreparedCharge, Query, QueryError, RequestLease, RuntimeOverrides, Selection,
};
use crate::clock::Timestamp;
use crate::hold::Hold;
use crate::limiter::Limiter;
use crate::quota::Quota;
use crate::store::memory::MemoryStore;
use crate::store::{Action, Store};

/// Policies and a limiter: selects the policies that apply to a request, decides them all or
/// nothing, and reports the result to an [`Observer`].
///
/// Every front door (HTTP API, Envoy, gateway, Tower layer) only translates its requests into a
/// [`Query`] and the [`PolicyDecisions`] into its responses.
///
/// ```
/// use std::time::Duration;
/// use tidegate::{Limiter, MemoryStore, Policies, Policy, PolicyLimiter, Query, Quota};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let quota = Quota::sliding_log(1, Duration::from_secs(60))?;
/// let policy = Policy::builder("per-user", quota).key(["header.x-user-id"]).build()?;
/// let limiter =
///     PolicyLimiter::new(Limiter::new(MemoryStore::new()), Policies::new(vec![policy])?);
///
/// assert!(limiter.acquire(Query::policy("per-user", "ann")).await?.is_allowed());
/// let denied = limiter.acquire(Query::policy("per-user", "ann")).await?;
/// assert_eq!(denied.denied_by().map(|decision| decision.policy()), Some("per-user"));
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct PolicyLimiter<S = MemoryStore, O = ()> {
    limiter: Limiter<S>,
    policies: Arc<Policies>,
    overrides: Arc<RuntimeOverrides>,
    observer: O,
    timeout: Duration,
}

/// Request that [`PolicyLimiter::start`] has begun to decide.
#[derive(Debug)]
#[must_use = "a denied request must not pass"]
pub enum Progress<'a> {
    /// The decisions, because the store did not have to wait.
    Decided(PolicyDecisions<'a>),
    /// [`PolicyLimiter::finish`] decides it.
    Waiting(Waiting<'a>),
}

/// Request whose decision waits for the store. Nothing has been taken yet.
#[derive(Debug)]
#[must_use = "a request that waits is not decided"]
pub struct Waiting<'a> {
    action: Action,
    decisions: PolicyDecisions<'a>,
    span: Span,
    lease: Option<LeaseScope>,
}

impl Waiting<'_> {
    /// Copies the borrowed parts, so that it outlives its request and its policies.
    pub fn into_owned(self) -> Waiting<'static> {
        let Self { action, decisions, span, lease } = self;
        Waiting { action, decisions: decisions.into_owned(), span, lease }
    }

    /// Creates the span of the decision, if a subscriber wants it.
    #[cold]
    fn enter_span(&mut self, on_span: Option<&(dyn Fn(&Span) + Sync)>) {
        let action = self.action;
        self.span = tracing::debug_span!(
            target: TRACE_TARGET,
            "decide",
            ?action,
            // Recorded before the decision, which may fail.
            policies = policy_names(&self.decisions.entries),
            allowed = tracing::field::Empty,
            denied_by = tracing::field::Empty
        );
        if let Some(on_span) = on_span
            && !self.span.is_disabled()
        {
            on_span(&self.span);
        }
    }
}

/// Time that the calls of one query may take together, 100 ms, unless
/// [`PolicyLimiter::with_timeout`] sets another.
pub const DEFAULT_QUERY_TIMEOUT: Duration = Duration::from_millis(100);

/// Target of the `decide` spans of a [`PolicyLimiter`], which are at the debug level. A subscriber
/// enables them by this target without the debug events of the library, for example with the
/// filter `info,tidegate::trace=debug`.
///
/// A span has the fields `action`; `policies`, the names of the limits that apply, separated by
/// commas; `allowed`; and, if the request is denied, `denied_by`. Keys are never recorded.
pub const TRACE_TARGET: &str = "tidegate::trace";

/// Maximum number of names in the field `policies` of a span.
const MAX_TRACED_NAMES: usize = 20;

/// Receives every decision of a [`PolicyLimiter`], for metrics and hot keys.
///
/// Its methods are called on the path of each request, so they should only count, not block. An
/// `Arc` of an observer is one, too: keep a clone to read the counters.
///
/// ```
/// use std::sync::Arc;
/// use std::sync::atomic::{AtomicU64, Ordering};
/// use std::time::Duration;
/// use tidegate::{Action, Limiter, MemoryStore, Observer, Policies, Policy};
/// use tidegate::{PolicyDecisions, PolicyLimiter, Query, Quota, Timestamp};
///
/// #[derive(Default)]
/// struct Counters {
///     allowed: AtomicU64,
///     denied: AtomicU64,
/// }
///
/// impl Observer for Counters {
///     fn decided(&self, action: Action, decisions: &PolicyDecisions<'_>, _start: Timestamp) {
///         if action == Action::Acquire {
///             let counter =
///                 if decisions.is_allowed() { &self.allowed } else { &self.denied };
///             counter.fetch_add(1, Ordering::Relaxed);
///         }
///     }
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let quota = Quota::fixed_window(2, Duration::from_secs(60))?;
/// let policies = Policies::new(vec![Policy::builder("per-user", quota).build()?])?;
/// let counters = Arc::new(Counters::default());
/// let limiter = PolicyLimiter::new(Limiter::new(MemoryStore::new()), policies)
///     .with_observer(Arc::clone(&counters));
///
/// for _ in 0..3 {
///     let _ = limiter.acquire(Query::policy("per-user", "ann")).await?;
/// }
/// assert_eq!(counters.allowed.load(Ordering::Relaxed), 2);
/// assert_eq!(counters.denied.load(Ordering::Relaxed), 1);
/// # Ok(())
/// # }
/// ```
pub trait Observer: Send + Sync {
    /// Called once per query that was decided, also if no limit applied. `start` is when the query
    /// arrived, on the store's clock; the charges of a prepared query have their own actions.
    fn decided(&self, action: Action, decisions: &PolicyDecisions<'_>, start: Timestamp) {
        let _ = (action, decisions, start);
    }

    /// Called once per query that ended with an error: the store failed, or the query is invalid.
    fn failed(&self, action: Action, error: &QueryError) {
        let _ = (action, error);
    }

    /// Called once per limit whose units [`PolicyLimiter::refund`] returned, or failed to return.
    fn refunded(&self, policy: &str, succeeded: bool) {
        let _ = (policy, succeeded);
    }

    /// Called for each policy whose key the request lacks, whether that skips the policy or denies
    /// the request. A high count may mean that the key names a misspelt header.
    fn key_missing(&self, policy: &Policy) {
        let _ = policy;
    }

    /// Called for each policy that has quotas for the values of an attribute, if the query has none
    /// of these values. A high count may mean that a plan is not listed.
    fn other_limit(&self, policy: &Policy) {
        let _ = policy;
    }
}

/// Observes nothing.
impl Observer for () {}

impl<T: Observer> Observer for Arc<T> {
    fn decided(&self, action: Action, decisions: &PolicyDecisions<'_>, start: Timestamp) {
        T::decided(self, action, decisions, start);
    }

    fn failed(&self, action: Action, error: &QueryError) {
        T::failed(self, action, error);
    }

    fn refunded(&self, policy: &str, succeeded: bool) {
        T::refunded(self, policy, succeeded);
    }

    fn key_missing(&self, policy: &Policy) {
        T::key_missing(self, policy);
    }

    fn other_limit(&self, policy: &Policy) {
        T::other_limit(self, policy);
    }
}

impl<S: Store> PolicyLimiter<S> {
    /// Creates a pipeline that decides `policies` by `limiter`, without an observer and with the
    /// [default timeout](DEFAULT_QUERY_TIMEOUT).
    #[must_use]
    pub fn new(limiter: Limiter<S>, policies: impl Into<Arc<Policies>>) -> Self {
        let timeout = DEFAULT_QUERY_TIMEOUT;
        let overrides = Arc::default();
        Self { limiter, policies: policies.into(), overrides, observer: (), timeout }
    }
}

impl<S: Store, O: Observer + Clone + 'static> PolicyLimiter<S, O> {
    /// Sets the observer.
    #[must_use]
    pub fn with_observer<P: Observer + Clone + 'static>(self, observer: P) -> PolicyLimiter<S, P> {
        let Self { limiter, policies, overrides, timeout, .. } = self;
        PolicyLimiter { limiter, policies, overrides, observer, timeout }
    }

    /// Sets the time that the calls of one query may take together. The store bounds the first call
    /// itself; later ones, such as those of policies in shadow mode, end by this deadline.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Returns the policies.
    #[must_use]
    pub fn policies(&self) -> &Policies {
        &self.policies
    }

    /// Returns the limits that replace those of policies while the program runs. Clones share them.
    #[must_use]
    pub fn overrides(&self) -> &Arc<RuntimeOverrides> {
        &self.overrides
    }

    /// Returns the limiter.
    #[must_use]
    pub fn limiter(&self) -> &Limiter<S> {
        &self.limiter
    }

    /// Returns the observer.
    #[must_use]
    pub fn observer(&self) -> &O {
        &self.observer
    }

    /// Returns the deadline of a query whose first call starts now.
    pub(super) fn deadline(&self) -> Option<Instant> {
        Instant::now().checked_add(self.timeout)
    }

    /// Decides the request and, if it is allowed, takes the units of every limit.
    ///
    /// # Errors
    ///
    /// The request is undecided: the store failed, the query names an unknown policy, a key or cost
    /// is invalid, or the address of the client is unknown. A denial is not an error.
    pub async fn acquire<'a>(
        &'a self,
        query: Query<'a, '_>,
    ) -> Result<PolicyDecisions<'a>, QueryError> {
        self.decide(Action::Acquire, query).await
    }

    /// Applies an action to every limit of the request. Charges of [`Query::prepared`] have their
    /// own actions.
    ///
    /// Enforced limits are decided together, all or nothing. Limits in shadow mode are decided one
    /// by one after them, and take units only if the request passes; their errors are ignored.
    pub async fn decide<'a>(
        &'a self,
        action: Action,
        query: Query<'a, '_>,
    ) -> Result<PolicyDecisions<'a>, QueryError> {
        match self.start(action, query)? {
            Progress::Decided(decisions) => Ok(decisions),
            Progress::Waiting(waiting) => self.finish(waiting).await,
        }
    }

    /// Starts to decide a request as [`decide`](Self::decide) does, for callers that need no future
    /// if the store answers without waiting.
    #[inline]
    pub fn start<'a>(
        &'a self,
        action: Action,
        query: Query<'a, '_>,
    ) -> Result<Progress<'a>, QueryError> {
        // Also a lower bound on the time of the charges, for refunds: the clock is read once.
        let asked_at = self.limiter.store().clock().now();
        let (on_span, hold, lease) = (query.on_span, query.hold.clone(), query.lease);
        let prepared = self.prepare(action, query, asked_at);
        let mut entries = prepared.inspect_err(|error| self.observer.failed(action, error))?;
        if hold.is_some() || entries.iter().any(|entry| needs_hold(entry, lease)) {
            set_hold(&mut entries, hold, lease);
        }
        let mut waiting = Waiting {
            action,
            decisions: PolicyDecisions { asked_at, entries, lease: None },
            span: Span::none(),
            lease,
        };
        if LevelFilter::current() >= LevelFilter::DEBUG {
            waiting.enter_span(on_span);
        }
        if waiting.span.is_disabled() && self.decide_now(&mut waiting.decisions.entries, action)? {
            let mut decisions = self.decided(action, waiting.decisions);
            if let Some(scope) = lease.filter(|_| decisions.is_allowed()) {
                let lease = RequestLease::new(self, &decisions.entries, scope);
                decisions.lease = lease.filter(|lease| lease.keep(&decisions));
            }
            return Ok(Progress::Decided(decisions));
        }
        Ok(Progress::Waiting(waiting))
    }

    /// Decides a request whose decision waits for the store.
    pub async fn finish<'a>(
        &self,
        waiting: Waiting<'a>,
    ) -> Result<PolicyDecisions<'a>, QueryError> {
        let Waiting { action, mut decisions, span, lease } = waiting;
        // Before the answer, so that a cancelled request is released, too.
        let lease = lease.and_then(|scope| RequestLease::new(self, &decisions.entries, scope));
        let decided = self.decide_entries(&mut decisions.entries);
        let decided = decided.instrument(span.clone()).await.map_err(QueryError::from);
        if let Err(error) = decided {
            self.observer.failed(action, &error);
            lease.iter().filter(|_| !error.may_have_run()).for_each(RequestLease::clear);
            return Err(error);
        }
        let mut decisions = self.decided(action, decisions);
        decisions.lease = lease.filter(|lease| lease.keep(&decisions));
        span.record("allowed", decisions.is_allowed());
        if let Some(denial) = decisions.denied_by() {
            span.record("denied_by", denial.policy());
        }
        Ok(decisions)
    }

    /// Returns the decisions of a request, without the limits that could not be decided.
    #[inline]
    fn decided<'a>(
        &self,
        action: Action,
        mut decisions: PolicyDecisions<'a>,
    ) -> PolicyDecisions<'a> {
        decisions.entries.retain_decided();
        self.observer.decided(action, &decisions, decisions.asked_at);
        decisions
    }

    /// Decides the only limit of a request, if the store answers without waiting. Returns whether
    /// all is decided.
    #[inline]
    fn decide_now(&self, entries: &mut Entries<'_>, action: Action) -> Result<bool, QueryError> {
        let [entry] = &mut **entries else { return Ok(entries.is_empty()) };
        if !entry.is_decided_alone() {
            return Ok(false);
        }
        let Some(charge) = entry.charge.charge() else { return Ok(true) };
        let Some(decided) = self.limiter.decide_now(entry.action(), &charge) else {
            return Ok(false);
        };
        let decided = decided.map_err(QueryError::from);
        let decision = decided.inspect_err(|error| self.observer.failed(action, error))?;
        entry.set(decision);
        Ok(true)
    }

    /// Returns the undecided entries of a query. Rejections are already decided. Single charges are
    /// inlined: they are large, and a call would copy them.
    #[inline]
    fn prepare<'a>(
        &'a self,
        action: Action,
        query: Query<'a, '_>,
        now: Timestamp,
    ) -> Result<Entries<'a>, QueryError> {
        let (cost, charged_at) = (query.cost, query.charged_at);
        let overrides = OverridesNow::new(&self.overrides, action, now);
        Ok(match query.target {
            QueryTarget::Policy { policy, key } => {
                let policy = self.policy(policy)?;
                if policy.quotas.by_value().is_some() {
                    self.observer.other_limit(policy);
                }
                let cost = cost.unwrap_or_else(|| policy.default_cost());
                let charge = match overrides.and_then(|it| it.find(policy.name(), key)) {
                    None => PreparedCharge::of_policy(policy, key, policy.quota_for(key), cost),
                    Some(found) => match found.charge(policy, key, cost, now) {
                        Some(charge) => charge,
                        None => return Ok(Entries::default()),
                    },
                };
                let charge = self.with_larger_quota(charge.with_action(action));
                Entries::one(charge.with_charged_at(charged_at))
            }
            QueryTarget::Quota { key, quota } => {
                let charge = PreparedCharge::new(quota.default_policy_name(), key, quota)
                    .with_cost(cost.unwrap_or(1))
                    .with_action(action)
                    .with_charged_at(charged_at);
                Entries::one(match query.metric_name {
                    Some(name) => charge.with_metric_name(name),
                    None => charge,
                })
            }
            QueryTarget::Charge(charge) => Entries::one(charge),
            QueryTarget::Prepared(charges) => charges.into_iter().collect(),
            QueryTarget::Attributes { attributes, only } => {
                let selection = match only {
                    Some(name) => self.policy(name)?.select_with(attributes, cost, overrides)?,
                    None => self.policies.select_where(attributes, cost, overrides, |_| true)?,
                };
                self.prepare_selected(action, charged_at, attributes, selection)?
            }
        })
    }

    #[inline(never)]
    fn prepare_selected<'a>(
        &'a self,
        action: Action,
        charged_at: Timestamp,
        attributes: &dyn Attributes,
        selection: Selection<'a>,
    ) -> Result<Entries<'a>, QueryError> {
        if attributes.lacks_peer() {
            return Err(QueryError::UnknownPeer);
        }
        self.report_selection(&selection);
        if let Some(policy) = selection.rejected_by {
            let charge = PreparedCharge::rejected(policy, selection.missing_attribute);
            return Ok(Entries::one(charge.with_action(action)));
        }
        let charges = selection.charges.into_iter().map(|charge| {
            self.with_larger_quota(charge.with_action(action)).with_charged_at(charged_at)
        });
        let shadow = selection.shadow_rejections.into_iter();
        let rejections = shadow.map(|policy| PreparedCharge::rejected(policy, None));
        Ok(charges.chain(rejections.map(|charge| charge.with_action(action))).collect())
    }

    /// Gives a refund, or an action on a hold, the largest quota with the windows of that which the
    /// request selects: the units may have been charged by it.
    #[inline]
    fn with_larger_quota<'a>(&'a self, charge: PreparedCharge<'a>) -> PreparedCharge<'a> {
        let action = charge.action();
        if !(action == Action::Refund || action.is_on_hold()) {
            return charge;
        }
        let policy = self.policies.get(charge.policy());
        let (Some(policy), Some(quota)) = (policy, charge.quota()) else { return charge };
        let key = charge.key().unwrap_or_default();
        let larger = policy.quotas.larger_than(quota, key);
        match (self.overrides.larger_than(larger.unwrap_or(quota), policy, key), larger) {
            (Some(larger), _) => charge.with_quota(larger),
            (None, Some(larger)) => charge.with_quota(larger),
            (None, None) => charge,
        }
    }

    /// Returns the units that an admitted request took, because it failed or was cancelled. Best
    /// effort: an unrefunded unit expires with its window. Nothing is returned for a denied
    /// request, or for units that no longer count.
    pub async fn refund(&self, decisions: &PolicyDecisions<'_>) {
        if let Some(lease) = &decisions.lease {
            lease.forget_refunded(decisions);
        }
        let now = self.limiter.store().clock().now();
        let charges: Vec<_> = decisions.refunds(now).collect();
        let succeeded = self.refund_charges(&charges).await;
        for charge in &charges {
            self.observer.refunded(charge.policy(), succeeded);
        }
    }

    /// Selects among the policies that `filter` accepts, for a front door that prepares its own
    /// charges.
    pub fn select_where(
        &self,
        attributes: &dyn Attributes,
        cost: Option<u64>,
        filter: impl Fn(&Policy) -> bool,
    ) -> Result<Selection<'_>, QueryError> {
        let overrides = self.overrides_now();
        let selection = self.policies.select_where(attributes, cost, overrides, filter)?;
        if attributes.lacks_peer() {
            return Err(QueryError::UnknownPeer);
        }
        self.report_selection(&selection);
        Ok(selection)
    }

    /// Explains for each policy why it does or does not apply to a request, with the overrides that
    /// are in force. Nothing is counted.
    pub fn explain(&self, attributes: &dyn Attributes) -> Vec<Explanation<'_>> {
        self.policies.explain_with(attributes, self.overrides_now())
    }

    /// Returns the overrides for a request of this moment. Without any, the clock is not read.
    fn overrides_now(&self) -> Option<OverridesNow<'_>> {
        if self.overrides.is_empty() {
            return None;
        }
        OverridesNow::new(&self.overrides, Action::Acquire, self.limiter.store().clock().now())
    }

    fn report_selection(&self, selection: &Selection<'_>) {
        for policy in &selection.missing_key {
            policy.log_missing_key();
            self.observer.key_missing(policy);
        }
        for policy in &selection.other_limit {
            self.observer.other_limit(policy);
        }
    }

    /// Returns the policy of this name, or an error with the most similar name.
    pub fn policy(&self, name: &str) -> Result<&Policy, QueryError> {
        self.policies.get(name).ok_or_else(|| {
            let nearest = self.policies.nearest(name);
            QueryError::UnknownPolicy { name: shown(name), nearest }
        })
    }
}

impl<S, O: Clone> Clone for PolicyLimiter<S, O> {
    fn clone(&self) -> Self {
        Self {
            limiter: self.limiter.clone(),
            policies: Arc::clone(&self.policies),
            overrides: Arc::clone(&self.overrides),
            observer: self.observer.clone(),
            timeout: self.timeout,
        }
    }
}

#[inline]
fn counts_in_flight(entry: &PolicyDecision<'_>) -> bool {
    entry.charge.quota().is_some_and(Quota::is_concurrency)
}

/// Returns whether the charge gets a hold, if the query has none: it counts units in flight, or the
/// lease of the request includes it.
#[inline]
fn needs_hold(entry: &PolicyDecision<'_>, lease: Option<LeaseScope>) -> bool {
    entry.action() == Action::Acquire
        && entry.charge.hold().is_none()
        && (counts_in_flight(entry) || lease.is_some_and(|scope| scope.includes(&entry.charge)))
}

/// Gives all charges of a request this hold, or those that need one a random hold. Units in flight
/// are not settled at once.
#[cold]
fn set_hold(
    entries: &mut [PolicyDecision<'_>],
    hold: Option<Arc<Hold>>,
    lease: Option<LeaseScope>,
) {
    let is_given = hold.is_some();
    let random = if lease.is_some() { Hold::lease } else { Hold::random };
    let hold = hold.unwrap_or_else(|| Arc::new(random()));
    for entry in entries.iter_mut().filter(|entry| is_given || needs_hold(entry, lease)) {
        let of_entry = if counts_in_flight(entry) && hold.is_settled() {
            Arc::new(hold.unsettled())
        } else {
            Arc::clone(&hold)
        };
        entry.charge.set_hold(of_entry);
    }
}

/// Returns the names of the limits, separated by commas, up to [`MAX_TRACED_NAMES`]. A limit that
/// applies several times is named once.
fn policy_names(entries: &[PolicyDecision<'_>]) -> String {
    let mut names: Vec<&str> = Vec::with_capacity(entries.len().min(MAX_TRACED_NAMES));
    for name in entries.iter().map(PolicyDecision::policy) {
        if names.contains(&name) {
            continue;
        }
        if names.len() == MAX_TRACED_NAMES {
            names.push("…");
            break;
        }
        names.push(name);
    }
    names.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn traced_names_are_unique_and_bounded() {
        let quota = Quota::fixed_window(1, Duration::from_secs(1)).expect("valid");
        let of = |names: &[String]| {
            let charges = names.iter().map(|name| PreparedCharge::new(name, "secret", &quota));
            policy_names(&charges.collect::<Entries<'_>>())
        };
        assert_eq!(of(&[]), "");
        assert_eq!(of(&["a", "b", "a"].map(str::to_owned)), "a,b");
        let many: Vec<String> = (0..50).map(|number| format!("p{number}")).collect();
        let traced = of(&many);
        assert!(traced.starts_with("p0,p1,") && traced.ends_with(",p19,…"), "{traced}");
    }
}
