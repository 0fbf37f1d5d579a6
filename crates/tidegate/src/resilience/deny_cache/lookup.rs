//! Lookups in the cache before a call to the store, and updates of the cache after it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tokio::runtime::Handle;

use super::DenyCacheCore;
use super::entry::{QuotaSnapshot, RequestSnapshot, StoreDenial};
use super::key::EntryKey;
use super::table::{CacheQuery, DenialTable, FindResult, Lease};
use super::unrecorded::Unrecorded;
use crate::algorithm::RawDecision;
use crate::charge::Charge;
use crate::decision::{Decision, Source};
use crate::store::invalidation::CountId;
use crate::store::{Action, SharedStore};

/// Maximum number of charges of a request for which a denial remembers the other quotas.
const MAX_SNAPSHOT_CHARGES: usize = 8;

/// Result of a lookup.
pub(super) enum Lookup<T> {
    /// A cached denial.
    Hit(T),
    /// The store must be called.
    Miss {
        leases: Leases,
        /// Time of the lookup by the store's clock (µs).
        sent: u64,
        unrecorded: Unrecorded,
    },
}

/// Leases for the charges of a request. One charge, the usual case, needs no allocation.
pub(super) enum Leases {
    One(Lease),
    Several(Vec<Lease>),
    /// The decisions must not be cached.
    None,
}

impl Leases {
    pub(super) fn as_slice(&self) -> &[Lease] {
        match self {
            Self::One(lease) => std::slice::from_ref(lease),
            Self::Several(leases) => leases,
            Self::None => &[],
        }
    }
}

impl<S: SharedStore> DenyCacheCore<S> {
    pub(super) fn now(&self) -> u64 {
        self.store.clock().now().as_micros()
    }

    /// Finds a cached denial of one charge.
    pub(super) fn lookup(
        self: &Arc<Self>,
        action: Action,
        charge: &Charge<'_>,
    ) -> Lookup<Decision> {
        let key = self.table.key(charge);
        let sent = self.now();
        if !is_cacheable(action, std::slice::from_ref(charge)) {
            self.on_miss(action, [key]);
            return Lookup::Miss { leases: Leases::None, sent, unrecorded: Vec::new() };
        }
        let query = self.query(action, key, charge, sent, None);
        match self.find(&query) {
            Ok((denial, _)) => {
                self.count_denial(action, &query);
                self.mark_used();
                Lookup::Hit(denial)
            }
            Err(lease) => {
                let unrecorded = self.take_unrecorded(action, std::slice::from_ref(charge), &[key]);
                self.on_miss(action, [key]);
                Lookup::Miss { leases: Leases::One(lease), sent, unrecorded }
            }
        }
    }

    /// Finds a cached denial of a request of several charges.
    pub(super) fn lookup_all(
        self: &Arc<Self>,
        action: Action,
        charges: &[Charge<'_>],
    ) -> Lookup<Vec<Decision>> {
        let keys: Vec<EntryKey> = charges.iter().map(|charge| self.table.key(charge)).collect();
        let sent = self.now();
        if !is_cacheable(action, charges) {
            self.on_miss(action, keys);
            return Lookup::Miss { leases: Leases::None, sent, unrecorded: Vec::new() };
        }
        let request = self.table.request_hash(charges, keys.iter().copied());
        let query = |at: usize| self.query(action, keys[at], &charges[at], sent, Some(request));
        let mut leases = Vec::with_capacity(charges.len());
        let mut denials: Vec<Option<Decision>> = vec![None; charges.len()];
        let mut snapshot: Option<Vec<QuotaSnapshot>> = None;
        for (at, denial) in denials.iter_mut().enumerate() {
            match self.find(&query(at)) {
                Ok((decision, found)) => {
                    *denial = Some(decision);
                    snapshot = snapshot.or(found);
                }
                Err(lease) => leases.push(lease),
            }
        }
        if !is_request_denied(action, charges, &denials) {
            if leases.len() < charges.len() {
                leases = (0..charges.len()).map(|at| self.table.lease(&query(at))).collect();
            }
            let unrecorded = self.take_unrecorded(action, charges, &keys);
            self.on_miss(action, keys);
            return Lookup::Miss { leases: Leases::Several(leases), sent, unrecorded };
        }
        for (at, _) in denials.iter().enumerate().filter(|(_, denial)| denial.is_some()) {
            self.count_denial(action, &query(at));
        }
        self.mark_used();
        let decision = |(at, denial): (usize, Option<Decision>)| {
            let charge = &charges[at];
            denial.unwrap_or_else(|| match &snapshot {
                Some(snapshot) => snapshot[at].decision(charge, sent),
                None => {
                    let untouched = RawDecision::untouched(charge.quota());
                    untouched.into_decision(charge.quota(), Source::DenyCache)
                }
            })
        };
        Lookup::Hit(denials.into_iter().enumerate().map(decision).collect())
    }

    fn query<'a>(
        &self,
        action: Action,
        key: EntryKey,
        charge: &'a Charge<'a>,
        now: u64,
        request: Option<u128>,
    ) -> CacheQuery<'a> {
        let epoch = self.store.epoch_of(charge);
        CacheQuery { key, charge, epoch, now, request, spends: action == Action::Acquire }
    }

    /// Finds an entry, unless entries are stale.
    fn find(&self, query: &CacheQuery<'_>) -> FindResult {
        if self.is_fresh(query.now) { self.table.find(query) } else { Err(self.table.lease(query)) }
    }

    fn is_fresh(&self, now: u64) -> bool {
        now < self.fresh_until.load(Ordering::Acquire)
    }

    /// Drops the entries that the coming call to the store makes wrong.
    fn on_miss(&self, action: Action, keys: impl IntoIterator<Item = EntryKey>) {
        match action {
            Action::Acquire => {
                for key in keys {
                    self.table.drop_other_quotas(key);
                }
            }
            // The units charged lengthen the waits of cached denials.
            Action::ChargeUpTo | Action::Report => {
                for key in keys {
                    self.table.invalidate(key.count);
                }
            }
            Action::Peek | Action::Refund | Action::Reset => {}
        }
    }

    /// Caches the denials in an answer of the store.
    pub(super) fn on_answer(
        self: &Arc<Self>,
        action: Action,
        sent: u64,
        leases: &[Lease],
        charges: &[Charge<'_>],
        decisions: &[Decision],
    ) {
        let is_denial = |decision: &Decision| !decision.allowed && decision.source == Source::Store;
        if leases.is_empty() || !decisions.iter().any(is_denial) {
            if action == Action::Acquire && decisions.iter().all(|decision| decision.allowed) {
                for (lease, charge) in leases.iter().zip(charges) {
                    self.table.on_admitted(*lease, charge);
                }
            }
            return;
        }
        let received = self.now().max(sent);
        // The denial with the longest wait stores the snapshot of the request.
        let denied = (0..decisions.len()).filter(|at| is_denial(&decisions[*at]));
        let longest = denied.max_by_key(|at| decisions[*at].retry_after);
        for (at, (charge, decision)) in charges.iter().zip(decisions).enumerate() {
            if is_denial(decision) {
                let has_snapshot =
                    Some(at) == longest && (2..=MAX_SNAPSHOT_CHARGES).contains(&charges.len());
                let snapshot = has_snapshot
                    .then(|| Box::new(self.snapshot(leases, charges, decisions, received)));
                let denial = StoreDenial {
                    cost: charge.cost(),
                    decision: *decision,
                    sent,
                    received,
                    snapshot,
                };
                self.table.insert(leases[at], charge.quota(), denial);
            }
        }
        self.mark_used();
        if self.has_invalidations && !self.is_fresh(received) {
            self.ensure_poller();
        }
    }

    fn snapshot(
        &self,
        leases: &[Lease],
        charges: &[Charge<'_>],
        decisions: &[Decision],
        received: u64,
    ) -> RequestSnapshot {
        RequestSnapshot {
            request: self.table.request_hash(charges, leases.iter().map(|lease| lease.key)),
            quotas: decisions
                .iter()
                .map(|decision| QuotaSnapshot::new(decision, received))
                .collect(),
        }
    }

    /// Marks the cache as used. All threads share the flag, so it is written only when it changes.
    fn mark_used(&self) {
        if !self.used.load(Ordering::Relaxed) {
            self.used.store(true, Ordering::Relaxed);
        }
    }
}

/// Returns whether a denial of this request may be cached. One that counts denials needs a runtime,
/// because a task records them later.
fn is_cacheable(action: Action, charges: &[Charge<'_>]) -> bool {
    matches!(action, Action::Acquire | Action::Peek)
        && (!charges.iter().any(|charge| charge.quota().count_denied())
            || Handle::try_current().is_ok())
}

/// Returns whether the cached denials decide the request without the store. Each charge that counts
/// denials must have one, because otherwise only the store knows whether this denial counts.
fn is_request_denied(action: Action, charges: &[Charge<'_>], denials: &[Option<Decision>]) -> bool {
    denials.iter().any(Option::is_some)
        && charges.iter().zip(denials).all(|(charge, denial)| {
            denial.is_some() || action == Action::Peek || !charge.quota().count_denied()
        })
}

/// Drops the entries of a refund or reset before the call, and again after it, because a denial may
/// have been cached during the call. The second time is in `drop`, so that a cancelled call is
/// covered.
pub(super) struct InvalidationGuard<'a> {
    table: &'a DenialTable,
    charges: &'a [Charge<'a>],
}

impl<'a> InvalidationGuard<'a> {
    /// Returns `None` for an action that frees no units.
    pub(super) fn begin(
        table: &'a DenialTable,
        action: Action,
        charges: &'a [Charge<'a>],
    ) -> Option<Self> {
        if !matches!(action, Action::Refund | Action::Reset) {
            return None;
        }
        let guard = Self { table, charges };
        guard.invalidate();
        Some(guard)
    }

    fn invalidate(&self) {
        self.charges.iter().for_each(|charge| self.table.invalidate(CountId::of(charge)));
    }
}

impl Drop for InvalidationGuard<'_> {
    fn drop(&mut self) {
        self.invalidate();
    }
}

/// An in-flight request that is counted in the entry of a bucket. If the store does not answer, or
/// the caller is dropped, the entry is dropped.
pub(super) struct CountedRequest<'a> {
    table: &'a DenialTable,
    lease: Option<&'a Lease>,
}

impl<'a> CountedRequest<'a> {
    pub(super) fn begin(table: &'a DenialTable, leases: &'a Leases) -> Self {
        Self { table, lease: leases.as_slice().first().filter(|lease| lease.counted) }
    }

    pub(super) fn answered(mut self, decision: &Decision) {
        if decision.source == Source::Store {
            self.lease = None;
        }
    }
}

impl Drop for CountedRequest<'_> {
    fn drop(&mut self) {
        if let Some(lease) = self.lease {
            self.table.on_unanswered(*lease);
        }
    }
}
