//! [`Query`]: the question of a front door to a [`PolicyLimiter`](super::PolicyLimiter).

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use tracing::Span;

use super::{Attributes, KeySource, LeaseScope, Mode, OnResponse, Policy};
use crate::charge::{Charge, OnStoreFailure};
use crate::clock::Timestamp;
use crate::decision::{Decision, Source};
use crate::hold::Hold;
use crate::quota::Quota;
use crate::store::Action;

/// Question about one request, for a [`PolicyLimiter`](super::PolicyLimiter).
///
/// | constructor | limits that are decided |
/// | --- | --- |
/// | [`attributes`](Self::attributes) | all policies that apply to the request |
/// | [`attributes_for`](Self::attributes_for) | one policy; its key comes from the request |
/// | [`policy`](Self::policy) | one policy, with a given key |
/// | [`quota`](Self::quota) | a quota of the caller, with a given key |
/// | [`prepared`](Self::prepared) | charges that the caller has prepared |
///
/// ```
/// use std::collections::BTreeMap;
/// use std::time::Duration;
/// use tidegate::{Limiter, MemoryStore, Policies, Policy, PolicyLimiter, Query, Quota};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let quota = Quota::sliding_log(10, Duration::from_secs(60))?;
/// let login = Policy::builder("login", quota).matches("path", ["/login"]).key(["ip"]).build()?;
/// let limiter =
///     PolicyLimiter::new(Limiter::new(MemoryStore::new()), Policies::new(vec![login])?);
///
/// let request = [("path", "/login"), ("ip", "203.0.113.9")];
/// let request = BTreeMap::from(request.map(|(name, value)| (name.into(), value.into())));
/// let decisions = limiter.acquire(Query::attributes(&request)).await?;
/// assert_eq!(decisions.binding().map(|entry| entry.decision().remaining), Some(9));
///
/// // An operation that costs five logins, for a client that is known already.
/// let query = Query::policy("login", "203.0.113.9").with_cost(5);
/// let decisions = limiter.acquire(query).await?;
/// assert_eq!(decisions.binding().map(|entry| entry.decision().remaining), Some(4));
/// # Ok(())
/// # }
/// ```
///
/// The decisions borrow from `'a`; the attributes (`'q`) are only read while the query is decided.
pub struct Query<'a, 'q> {
    pub(super) target: QueryTarget<'a, 'q>,
    pub(super) cost: Option<u64>,
    pub(super) charged_at: Timestamp,
    pub(super) metric_name: Option<&'a str>,
    pub(super) on_span: Option<&'q (dyn Fn(&Span) + Sync)>,
    pub(super) hold: Option<Arc<Hold>>,
    pub(super) lease: Option<LeaseScope>,
}

/// Limits that a query is about.
pub(super) enum QueryTarget<'a, 'q> {
    Policy { policy: &'q str, key: &'a str },
    Attributes { attributes: &'q (dyn Attributes + Sync), only: Option<&'q str> },
    Quota { key: &'a str, quota: &'a Quota },
    Charge(PreparedCharge<'a>),
    Prepared(Vec<PreparedCharge<'a>>),
}

impl<'a, 'q> Query<'a, 'q> {
    fn new(target: QueryTarget<'a, 'q>) -> Self {
        Self {
            target,
            cost: None,
            charged_at: Timestamp::ZERO,
            metric_name: None,
            on_span: None,
            hold: None,
            lease: None,
        }
    }

    /// Asks one policy, by its name and the value of its key. The conditions of the policy are not
    /// checked. An unknown name is [`QueryError::UnknownPolicy`](crate::QueryError::UnknownPolicy).
    #[must_use]
    pub fn policy(policy: &'q str, key: &'a str) -> Self {
        Self::new(QueryTarget::Policy { policy, key })
    }

    /// Asks all policies that match the attributes of a request. If none matches, the decisions are
    /// empty and the request passes.
    #[must_use]
    pub fn attributes(attributes: &'q (dyn Attributes + Sync)) -> Self {
        Self::new(QueryTarget::Attributes { attributes, only: None })
    }

    /// Asks one policy, whatever it matches, for the key that it takes from the attributes.
    #[must_use]
    pub fn attributes_for(policy: &'q str, attributes: &'q (dyn Attributes + Sync)) -> Self {
        Self::new(QueryTarget::Attributes { attributes, only: Some(policy) })
    }

    /// Asks a quota of the caller's own, counted under the quota's default name.
    #[must_use]
    pub fn quota(key: &'a str, quota: &'a Quota) -> Self {
        Self::new(QueryTarget::Quota { key, quota })
    }

    /// Asks several charges that the front door has prepared, each with its own action. At most
    /// [`MAX_CHARGES`](crate::MAX_CHARGES) are decided together.
    #[must_use]
    pub fn prepared(charges: Vec<PreparedCharge<'a>>) -> Self {
        Self::new(QueryTarget::Prepared(charges))
    }

    /// Asks one charge that the front door has prepared, with its own action.
    #[must_use]
    pub fn charge(charge: PreparedCharge<'a>) -> Self {
        Self::new(QueryTarget::Charge(charge))
    }

    /// Sets the cost, which takes precedence over those of the policies. `None`, the default,
    /// leaves the cost to the policies. Prepared charges have their own costs.
    #[must_use]
    pub fn with_cost(mut self, cost: impl Into<Option<u64>>) -> Self {
        self.cost = cost.into();
        self
    }

    /// Sets the time of the charge to be refunded; see [`Charge::with_charged_at`].
    #[must_use]
    pub fn with_charged_at(mut self, charged_at: Timestamp) -> Self {
        self.charged_at = charged_at;
        self
    }

    /// Sets the hold of all limits that apply: an acquire becomes a reservation, which a commit of
    /// the same query and hold settles. Prepared charges have their own holds.
    ///
    /// An acquire without a hold gets a [random one](Hold::random) if one of its limits is
    /// `concurrency`; [`PolicyDecisions::hold`](super::PolicyDecisions::hold) returns it.
    #[must_use]
    pub fn with_hold(mut self, hold: impl Into<Arc<Hold>>) -> Self {
        self.hold = Some(hold.into());
        self
    }

    /// Holds the units in flight, and those that the response settles
    /// ([`settled_by`](crate::PolicyBuilder::settled_by)), as long as the decisions live, or a clone
    /// of their [lease](super::PolicyDecisions::lease). For an acquire by a front door that sees the
    /// response; other units are charged as always. See [`RequestLease`](crate::RequestLease).
    ///
    /// ```
    /// use tidegate::{Limiter, MemoryStore, Policies, Policy, PolicyLimiter, Query, Quota};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let exports = Policy::builder("exports", Quota::concurrency(1)?).build()?;
    /// let policies = Policies::new(vec![exports])?;
    /// let limiter = PolicyLimiter::new(Limiter::new(MemoryStore::new()), policies);
    /// let export = || limiter.acquire(Query::policy("exports", "customer-7").with_lease());
    ///
    /// let first = export().await?;
    /// assert!(first.is_allowed());
    /// assert!(!export().await?.is_allowed());
    /// drop(first);
    /// assert!(export().await?.is_allowed());
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn with_lease(mut self) -> Self {
        self.lease = self.lease.or(Some(LeaseScope::Needed));
        self
    }

    /// Holds the units of all limits, for a caller that [settles](crate::RequestLease::settle)
    /// them when it knows the response.
    #[must_use]
    pub fn with_settled_cost(mut self) -> Self {
        self.lease = Some(LeaseScope::All);
        self
    }

    /// Sets the name in metrics of a query that brings its own quota.
    #[must_use]
    pub fn with_metric_name(mut self, name: &'a str) -> Self {
        self.metric_name = Some(name);
        self
    }

    /// Calls `on_span` with the `decide` span before it is entered, for example to set the parent
    /// of a distributed trace. It is not called if the span is disabled.
    #[must_use]
    pub fn on_span(mut self, on_span: &'q (dyn Fn(&Span) + Sync)) -> Self {
        self.on_span = Some(on_span);
        self
    }
}

/// Effect of a denial on the request.
///
/// Policies have a [`Mode`], which converts into it;
/// [`PolicyDecision::enforcement`](super::PolicyDecision::enforcement) returns it to an observer.
///
/// ```
/// use tidegate::{Enforcement, Mode};
///
/// assert_eq!(Enforcement::from(Mode::Shadow), Enforcement::Shadow);
/// assert_eq!(Enforcement::from(Mode::Enforce), Enforcement::Enforce);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Enforcement {
    /// One denial denies the request.
    Enforce,
    /// A denial has no effect; it shows in the decisions and so in metrics.
    Shadow,
    /// The request is denied if all charges with this enforcement deny it (Envoy's quota mode).
    AllDenied,
}

impl From<Mode> for Enforcement {
    fn from(mode: Mode) -> Self {
        match mode {
            Mode::Enforce => Self::Enforce,
            Mode::Shadow => Self::Shadow,
        }
    }
}

/// Charge of one limit on a request, ready to be decided: of a policy that applies, in a
/// [`Selection`](super::Selection), or of a front door's own limit, for [`Query::prepared`].
///
/// ```
/// use std::time::Duration;
/// use tidegate::PreparedCharge;
/// use tidegate::{Action, Quota};
///
/// # fn main() -> Result<(), tidegate::QuotaError> {
/// let quota = Quota::fixed_window(10, Duration::from_secs(1))?;
/// let charge = PreparedCharge::new("uploads", "user123", &quota).with_action(Action::Report);
/// assert_eq!(charge.key(), Some("user123"));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct PreparedCharge<'a> {
    policy: Cow<'a, str>,
    metric_name: Option<Cow<'a, str>>,
    /// Empty if the request lacks the key.
    key: Cow<'a, str>,
    quota: QuotaRef<'a>,
    cost: u64,
    charged_at: Timestamp,
    allows_unknown_time: bool,
    action: Action,
    enforcement: Enforcement,
    on_store_failure: OnStoreFailure,
    caps_cost: bool,
    hold: Option<Arc<Hold>>,
    /// Boxed, because every charge is moved several times, and few have it.
    rare: Option<Box<RarePart>>,
}

/// Part that few charges have. A charge with a fixed decision takes no units to refund.
#[derive(Debug, Clone)]
enum RarePart {
    Fixed(FixedDecision),
    OnResponse(Arc<OnResponse>),
}

/// Decision that needs no store.
#[derive(Debug, Clone)]
pub(super) struct FixedDecision {
    pub(super) decision: Decision,
    /// Attribute of the key that the request lacks.
    pub(super) missing_key: Option<String>,
}

/// Quota of a charge.
#[derive(Debug, Clone)]
pub(super) enum QuotaRef<'a> {
    Borrowed(&'a Quota),
    /// Of the request itself, or of an override.
    Owned(Arc<Quota>),
    /// A part of a quota, for the decision only: units are reported and returned by the whole.
    Lane(Box<Lane<'a>>),
    /// A limit of 0, which no quota has.
    Zero,
}

#[derive(Debug, Clone)]
pub(super) struct Lane<'a> {
    whole: QuotaRef<'a>,
    lane: Quota,
}

impl QuotaRef<'_> {
    /// Returns the quota; `None` for a limit of 0.
    #[inline]
    pub(super) fn get(&self, action: Action) -> Option<&Quota> {
        match self {
            Self::Borrowed(quota) => Some(quota),
            Self::Owned(quota) => Some(quota),
            Self::Lane(it) if action.is_all_or_nothing() => Some(&it.lane),
            Self::Lane(it) => it.whole.get(action),
            Self::Zero => None,
        }
    }
}

impl<'a> From<&'a Quota> for QuotaRef<'a> {
    #[inline]
    fn from(quota: &'a Quota) -> Self {
        Self::Borrowed(quota)
    }
}

impl From<Arc<Quota>> for QuotaRef<'_> {
    fn from(quota: Arc<Quota>) -> Self {
        Self::Owned(quota)
    }
}

impl<'a> PreparedCharge<'a> {
    #[inline]
    fn with_quota_ref(policy: Cow<'a, str>, key: Cow<'a, str>, quota: QuotaRef<'a>) -> Self {
        Self {
            policy,
            metric_name: None,
            key,
            quota,
            cost: 1,
            charged_at: Timestamp::ZERO,
            allows_unknown_time: false,
            action: Action::Acquire,
            enforcement: Enforcement::Enforce,
            on_store_failure: OnStoreFailure::default(),
            caps_cost: false,
            hold: None,
            rare: None,
        }
    }

    /// Creates an enforced acquire of one unit. The key and the policy name are checked when the
    /// charge is decided.
    #[must_use]
    pub fn new(
        policy: impl Into<Cow<'a, str>>,
        key: impl Into<Cow<'a, str>>,
        quota: &'a Quota,
    ) -> Self {
        Self::with_quota_ref(policy.into(), key.into(), QuotaRef::Borrowed(quota))
    }

    /// Creates an enforced acquire of a quota that the request itself brings.
    #[must_use]
    pub fn with_own_quota(
        policy: impl Into<Cow<'a, str>>,
        key: impl Into<Cow<'a, str>>,
        quota: Quota,
    ) -> Self {
        Self::with_quota_ref(policy.into(), key.into(), QuotaRef::Owned(Arc::new(quota)))
    }

    /// Creates a charge on a limit of 0, which has no quota: `decision` is its answer.
    #[must_use]
    pub fn of_zero_limit(
        policy: impl Into<Cow<'a, str>>,
        key: impl Into<Cow<'a, str>>,
        decision: Decision,
    ) -> Self {
        let charge = Self::with_quota_ref(policy.into(), key.into(), QuotaRef::Zero);
        let decision = Decision { allowed: false, ..decision };
        let fixed = FixedDecision { decision, missing_key: None };
        Self { rare: Some(Box::new(RarePart::Fixed(fixed))), ..charge }
    }

    /// Creates the denial of a policy that cannot count the request, because it lacks this
    /// attribute of the key, or because its key is invalid. There is no wait after which the
    /// request would pass.
    #[must_use]
    pub fn rejected(policy: &'a Policy, missing: Option<&KeySource>) -> Self {
        let denied = Decision::deny(policy.quota().burst(), Duration::ZERO);
        let fixed = FixedDecision {
            decision: denied.with_source(Source::MissingKey),
            missing_key: missing.map(ToString::to_string),
        };
        Self {
            cost: policy.default_cost(),
            enforcement: policy.mode().into(),
            rare: Some(Box::new(RarePart::Fixed(fixed))),
            ..Self::new(policy.name(), "", policy.quota())
        }
    }

    /// Creates the denial of a key that an override blocks for this time; zero for no end.
    pub(super) fn blocked(
        policy: &'a Policy,
        key: impl Into<Cow<'a, str>>,
        quota: &'a Quota,
        wait: Duration,
    ) -> Self {
        let decision = Decision::deny(quota.burst(), wait).with_reset_after(wait);
        let decision = decision.with_source(Source::Override);
        let fixed = FixedDecision { decision, missing_key: None };
        Self {
            key: key.into(),
            quota: QuotaRef::Borrowed(quota),
            rare: Some(Box::new(RarePart::Fixed(fixed))),
            ..Self::rejected(policy, None)
        }
    }

    /// Creates the acquire of a policy for a key, by this quota of the policy.
    #[inline]
    pub(super) fn of_policy(
        policy: &'a Policy,
        key: impl Into<Cow<'a, str>>,
        quota: impl Into<QuotaRef<'a>>,
        cost: u64,
    ) -> Self {
        let name = policy.name().into();
        let mut charge = Self::with_quota_ref(name, key.into(), quota.into());
        charge.cost = cost;
        charge.enforcement = policy.mode().into();
        charge.on_store_failure = policy.on_store_failure();
        if let Some(on_response) = &policy.on_response {
            charge.rare = Some(Box::new(RarePart::OnResponse(Arc::clone(on_response))));
        }
        charge
    }

    /// Creates the commit of a charge, which has a hold, at the units that were used, or its
    /// release.
    pub(super) fn settlement_of(charge: Charge<'a>, action: Action, used: u64) -> Self {
        Self {
            cost: used,
            action,
            on_store_failure: charge.on_store_failure(),
            hold: charge.hold().map(|hold| Arc::new(hold.clone())),
            ..Self::new(charge.policy(), charge.key(), charge.quota())
        }
    }

    /// Restricts it to a part of its quota. A cost above that part is denied.
    pub(super) fn in_lane(mut self, percent: u64) -> Self {
        if let Some(whole) = self.quota.get(Action::Report) {
            self.caps_cost |= self.cost <= whole.burst();
            let lane = whole.lane(percent);
            self.quota = QuotaRef::Lane(Box::new(Lane { whole: self.quota, lane }));
        }
        self
    }

    pub(super) fn with_quota(mut self, quota: impl Into<QuotaRef<'a>>) -> Self {
        self.quota = quota.into();
        self
    }

    /// Sets the action; [`Action::Acquire`] by default.
    #[must_use]
    pub fn with_action(mut self, action: Action) -> Self {
        self.action = action;
        self
    }

    /// Sets the cost in units; 1 by default. An acquire of more than the burst is
    /// [`ChargeError::CostTooHigh`](crate::ChargeError::CostTooHigh), unless the cost is
    /// [capped](Self::with_capped_cost).
    #[must_use]
    pub fn with_cost(mut self, cost: u64) -> Self {
        self.cost = cost;
        self
    }

    pub(super) fn with_charged_at(mut self, charged_at: Timestamp) -> Self {
        self.charged_at = charged_at;
        self
    }

    /// Lets a refund without a time return the oldest units that still count, as protocols need
    /// that have no time. If the refunded charge has left the window, up to its cost is admitted
    /// above the limit.
    #[must_use]
    pub fn with_unknown_time_allowed(mut self) -> Self {
        self.allows_unknown_time = true;
        self
    }

    /// Denies an acquire or a peek of more than the quota's burst, instead of returning an error.
    #[must_use]
    pub fn with_capped_cost(mut self) -> Self {
        self.caps_cost = true;
        self
    }

    /// Sets the hold, for a reservation and its commit.
    #[must_use]
    pub fn with_hold(mut self, hold: impl Into<Arc<Hold>>) -> Self {
        self.hold = Some(hold.into());
        self
    }

    pub(super) fn set_hold(&mut self, hold: Arc<Hold>) {
        self.hold = Some(hold);
    }

    /// Returns the hold.
    #[must_use]
    pub fn hold(&self) -> Option<&Hold> {
        self.hold.as_deref()
    }

    /// Sets how a denial affects the request; [`Enforcement::Enforce`] by default.
    #[must_use]
    pub fn with_enforcement(mut self, enforcement: Enforcement) -> Self {
        self.enforcement = enforcement;
        self
    }

    /// Sets how the charge is decided while the store is unavailable.
    #[must_use]
    pub fn with_on_store_failure(mut self, on_store_failure: OnStoreFailure) -> Self {
        self.on_store_failure = on_store_failure;
        self
    }

    /// Sets the name in metrics; by default that of the policy.
    #[must_use]
    pub fn with_metric_name(mut self, name: impl Into<Cow<'a, str>>) -> Self {
        self.metric_name = Some(name.into());
        self
    }

    /// Returns the name that it counts under.
    #[must_use]
    pub fn policy(&self) -> &str {
        &self.policy
    }

    /// Returns the name in metrics.
    #[must_use]
    pub fn metric_name(&self) -> &str {
        self.metric_name.as_ref().unwrap_or(&self.policy)
    }

    /// Returns the key; `None` if the request lacks it.
    #[must_use]
    pub fn key(&self) -> Option<&str> {
        Some(&*self.key).filter(|key| !key.is_empty())
    }

    /// Returns the quota; `None` for a limit of 0.
    #[must_use]
    pub fn quota(&self) -> Option<&Quota> {
        self.quota.get(self.action)
    }

    /// Returns the number of units that the request asks for.
    #[must_use]
    pub fn cost(&self) -> u64 {
        self.cost
    }

    /// Returns the action.
    #[must_use]
    pub fn action(&self) -> Action {
        self.action
    }

    /// Returns how a denial affects the request.
    #[must_use]
    pub fn enforcement(&self) -> Enforcement {
        self.enforcement
    }

    /// Returns how the charge is decided while the store is unavailable.
    #[must_use]
    pub fn on_store_failure(&self) -> OnStoreFailure {
        self.on_store_failure
    }

    /// Returns whether a denial has no effect.
    #[must_use]
    pub fn is_shadow(&self) -> bool {
        self.enforcement == Enforcement::Shadow
    }

    /// Returns the charge, for a [`Limiter`](crate::Limiter); `None` for a limit of 0. An acquire
    /// with a capped cost asks for the burst at most. A caller must ignore the denials of a charge
    /// [in shadow mode](Self::is_shadow).
    #[must_use]
    pub fn charge(&self) -> Option<Charge<'_>> {
        let quota = self.quota()?;
        let capped = self.caps_cost && self.action.is_all_or_nothing();
        let cost = if capped { self.cost.min(quota.burst()) } else { self.cost };
        let charge = Charge::new(&self.key, quota).with_policy(&self.policy).with_cost(cost);
        let charge = charge.with_charged_at(self.charged_at);
        let charge = charge.with_unknown_time_allowed(self.allows_unknown_time);
        let charge = charge.with_on_store_failure(self.on_store_failure);
        Some(match &self.hold {
            None => charge,
            Some(hold) => charge.with_hold(hold),
        })
    }

    /// Returns the decision that needs no store.
    #[inline]
    pub(super) fn fixed(&self) -> Option<&FixedDecision> {
        match self.rare.as_deref()? {
            RarePart::Fixed(fixed) => Some(fixed),
            RarePart::OnResponse(_) => None,
        }
    }

    /// Returns what becomes of the units when the response is there.
    #[inline]
    pub(super) fn on_response(&self) -> Option<&Arc<OnResponse>> {
        match self.rare.as_deref()? {
            RarePart::Fixed(_) => None,
            RarePart::OnResponse(on_response) => Some(on_response),
        }
    }

    /// Returns whether an acquire, or a peek, with a capped cost can never be admitted.
    pub(super) fn exceeds_capacity(&self) -> bool {
        match self.quota() {
            None => self.action == Action::Acquire,
            Some(quota) => {
                self.caps_cost && self.action.is_all_or_nothing() && self.cost > quota.burst()
            }
        }
    }

    pub(super) fn has_same_count(&self, other: &Self) -> bool {
        self.key == other.key && self.policy == other.policy
    }

    /// Copies the borrowed parts, so that the charge outlives its policies.
    pub(super) fn into_owned(self) -> PreparedCharge<'static> {
        let quota = match self.quota {
            QuotaRef::Owned(quota) => QuotaRef::Owned(quota),
            other => match other.get(self.action) {
                Some(quota) => QuotaRef::Owned(Arc::new(quota.clone())),
                None => QuotaRef::Zero,
            },
        };
        PreparedCharge {
            policy: Cow::Owned(self.policy.into_owned()),
            metric_name: self.metric_name.map(|name| Cow::Owned(name.into_owned())),
            key: Cow::Owned(self.key.into_owned()),
            quota,
            cost: self.cost,
            charged_at: self.charged_at,
            allows_unknown_time: self.allows_unknown_time,
            action: self.action,
            enforcement: self.enforcement,
            on_store_failure: self.on_store_failure,
            caps_cost: self.caps_cost,
            hold: self.hold,
            rare: self.rare,
        }
    }
}
