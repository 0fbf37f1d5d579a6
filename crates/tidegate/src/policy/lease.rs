//! [`RequestLease`]: units that a request holds until its response has ended.

use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::runtime::Handle;
use tracing::Span;

use super::{
    Observer, OnResponse, PolicyDecision, PolicyDecisions, PolicyLimiter, PreparedCharge, Progress,
    Query, QueryError,
};
use crate::join::join_all;
use crate::limiter::Lease;
use crate::quota::Quota;
use crate::store::{Action, Store};

/// Units that a request holds until its response has ended: those of its limits in flight
/// ([`Quota::concurrency`]), and those that the response settles
/// ([`settled_by`](super::PolicyBuilder::settled_by)). [`Query::with_lease`] asks for it.
///
/// When the last clone is dropped, the units in flight are released, without blocking. Units that
/// were not [settled](Self::settle) by then end with their lease of ten seconds, and are charged or
/// returned as the [terms](crate::HoldTerms) of their quota say.
///
/// The process renews the lease. If it is killed, the units are free ten seconds later. Renewals
/// end with the maximum of the terms: a response that takes longer no longer counts as in flight,
/// and the units that it settles then are reported.
///
/// The Tower layer puts a clone into the extensions of the request, for a handler whose work
/// outlives its response, such as that of a WebSocket:
///
/// ```
/// use axum::Extension;
/// use http::StatusCode;
/// use tidegate::RequestLease;
///
/// /// Answers at once; the export counts as in flight until it has ended.
/// async fn start_export(Extension(lease): Extension<RequestLease>) -> StatusCode {
///     tokio::spawn(async move {
///         // …
///         drop(lease);
///     });
///     StatusCode::ACCEPTED
/// }
/// # let _: axum::Router = axum::Router::new().route("/", axum::routing::post(start_export));
/// ```
#[derive(Clone)]
pub struct RequestLease(Arc<dyn Leased>);

/// Limits whose units a request holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LeaseScope {
    /// Those in flight, and those that the response settles.
    Needed,
    /// All: the caller settles them.
    All,
}

/// Lease of a request, whatever its store and its observer are.
trait Leased: Send + Sync {
    fn charges(&self) -> MutexGuard<'_, Vec<LeasedCharge>>;

    /// Settles charges at these units. Returns the calls that have to wait for the store.
    fn commit(&self, commits: Vec<(LeasedCharge, u64)>) -> Option<Commits>;

    fn runtime(&self) -> Option<&Handle>;

    /// Renews the lease of a charge until it is dropped.
    fn renew(&self, lease: &mut Lease);
}

type Commits = Pin<Box<dyn Future<Output = ()> + Send>>;

struct LeasedRequest<S: Store, O: Observer + Clone + 'static> {
    limiter: PolicyLimiter<S, O>,
    /// Charges that are not settled.
    charges: Mutex<Vec<LeasedCharge>>,
    runtime: Option<Handle>,
    /// That of the request, the parent of those of its releases.
    span: Span,
}

struct LeasedCharge {
    /// That of its decision.
    position: usize,
    lease: Lease,
    on_response: Option<Arc<OnResponse>>,
}

impl LeaseScope {
    /// Returns whether an acquire of this charge is held.
    #[inline]
    pub(super) fn includes(self, charge: &PreparedCharge<'_>) -> bool {
        let is_needed = || {
            charge.quota().is_some_and(Quota::is_concurrency)
                || charge.on_response().is_some_and(|it| it.settled_by.is_some())
        };
        charge.action() == Action::Acquire && (self == Self::All || is_needed())
    }
}

impl LeasedCharge {
    fn is_in_flight(&self) -> bool {
        self.lease.charge().quota().is_concurrency()
    }

    /// Returns the name of the response header that has the units.
    fn settled_by(&self) -> Option<&str> {
        self.on_response.as_ref()?.settled_by.as_deref()
    }
}

impl RequestLease {
    /// Creates the lease of a request that is about to be decided, or just was. `None` if nothing
    /// of it is held.
    pub(super) fn new<S: Store, O: Observer + Clone + 'static>(
        limiter: &PolicyLimiter<S, O>,
        entries: &[PolicyDecision<'_>],
        scope: LeaseScope,
    ) -> Option<Self> {
        let held = entries.iter().filter(|entry| scope.includes(&entry.charge));
        let charges: Vec<LeasedCharge> = held
            .filter_map(|entry| {
                let charge = entry.charge.charge().filter(|charge| charge.hold().is_some())?;
                let on_response = entry.charge.on_response().cloned();
                let lease = Lease::new(&limiter.with_quota_of_refund(&charge));
                Some(LeasedCharge { position: entry.position, lease, on_response })
            })
            .collect();
        (!charges.is_empty()).then(|| {
            Self(Arc::new(LeasedRequest {
                limiter: limiter.clone(),
                charges: Mutex::new(charges),
                runtime: Handle::try_current().ok(),
                span: Span::current(),
            }))
        })
    }

    /// Keeps the charges that were made, and renews them. Returns whether there are any.
    pub(super) fn keep(&self, decisions: &PolicyDecisions<'_>) -> bool {
        let is_allowed = decisions.is_allowed();
        let mut charges = self.0.charges();
        charges.retain_mut(|charge| {
            let made = decisions.iter().find(|entry| entry.position == charge.position);
            let Some(decision) = made.map(PolicyDecision::decision) else { return false };
            if decision.hold.is_some() {
                self.0.renew(&mut charge.lease);
            }
            // A failure mode allows without a hold; the units that were used are reported then.
            let is_settled = !charge.is_in_flight();
            is_allowed && decision.allowed && (decision.hold.is_some() || is_settled)
        });
        !charges.is_empty()
    }

    /// Forgets the charges, because they were not made.
    pub(super) fn clear(&self) {
        self.0.charges().clear();
    }

    /// Forgets the charges whose units are refunded.
    pub(super) fn forget_refunded(&self, refunded: &PolicyDecisions<'_>) {
        let is_refunded = |charge: &LeasedCharge| {
            refunded.iter().any(|entry| entry.position == charge.position) && !charge.is_in_flight()
        };
        self.0.charges().retain(|charge| !is_refunded(charge));
    }

    /// Settles the units of the response: commits those that were used for each charge that is not
    /// one in flight, and was not settled before. `used` gets the name of the policy's
    /// [response header](super::PolicyBuilder::settled_by), if it has one; without a result, the
    /// reserved units stay.
    ///
    /// It waits for the store, and completes even if this future is dropped.
    pub async fn settle(&self, used: impl Fn(Option<&str>) -> Option<u64>) {
        let commits: Vec<(LeasedCharge, u64)> = {
            let mut charges = self.0.charges();
            let settled = charges.extract_if(.., |charge| !charge.is_in_flight());
            let commit = |charge: LeasedCharge| {
                let reserved = charge.lease.charge();
                let most = reserved.quota().max_level();
                let units = used(charge.settled_by()).map_or(reserved.cost(), |it| it.min(most));
                (charge, units)
            };
            settled.map(commit).collect()
        };
        match (self.0.commit(commits), self.0.runtime()) {
            (None, _) => {}
            (Some(commits), Some(runtime)) => drop(runtime.spawn(commits).await),
            (Some(commits), None) => commits.await,
        }
    }
}

impl fmt::Debug for RequestLease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RequestLease").field("charges", &self.0.charges().len()).finish()
    }
}

impl<S: Store, O: Observer + Clone + 'static> Leased for LeasedRequest<S, O> {
    fn charges(&self) -> MutexGuard<'_, Vec<LeasedCharge>> {
        self.charges.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn commit(&self, commits: Vec<(LeasedCharge, u64)>) -> Option<Commits> {
        let mut waiting = Vec::new();
        for (charge, units) in &commits {
            let action = match units {
                0 => charge.lease.release_action(),
                _ => Action::Commit,
            };
            let commit = PreparedCharge::settlement_of(charge.lease.charge(), action, *units);
            match self.limiter.start(action, Query::charge(commit)) {
                Ok(Progress::Decided(_)) => {}
                Ok(Progress::Waiting(commit)) => waiting.push(commit.into_owned()),
                Err(error) => log_failed(&error),
            }
        }
        if waiting.is_empty() {
            return None;
        }
        let limiter = self.limiter.clone();
        Some(Box::pin(async move {
            let results = join_all(waiting.into_iter().map(|commit| limiter.finish(commit))).await;
            // The leases end now, for those who wait until all are released.
            drop(commits);
            results.iter().filter_map(|result| result.as_ref().err()).for_each(log_failed);
        }))
    }

    fn runtime(&self) -> Option<&Handle> {
        self.runtime.as_ref()
    }

    fn renew(&self, lease: &mut Lease) {
        if let Some(runtime) = &self.runtime {
            self.limiter.limiter().renew(lease, runtime);
        }
    }
}

impl<S: Store, O: Observer + Clone + 'static> Drop for LeasedRequest<S, O> {
    fn drop(&mut self) {
        let _entered = self.span.clone().entered();
        let charges = std::mem::take(&mut *self.charges());
        let in_flight = charges.into_iter().filter(LeasedCharge::is_in_flight);
        let releases: Vec<_> = in_flight.map(|charge| (charge, 0)).collect();
        if let (Some(releases), Some(runtime)) = (self.commit(releases), &self.runtime) {
            runtime.spawn(releases);
        }
    }
}

fn log_failed(error: &QueryError) {
    tracing::debug!(%error, "units were not settled, and end with their lease");
}
