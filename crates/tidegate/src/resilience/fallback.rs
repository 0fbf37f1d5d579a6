//! [`Fallback`]: decides while the store cannot, by the failure policy of each charge.
//!
//! With the policy `local`, this instance decides in memory by its share of the quota. Units that
//! it admits are a debt to the store and are charged when it has recovered, so that a flapping
//! store cannot be exploited: a request of a key in debt needs room for the debt as well, and units
//! that the store admits to a key that was recently decided locally are taken from the local share,
//! too.

use std::borrow::Cow;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::runtime::Handle;

use self::holds::PendingCommits;
use self::ledger::{Claims, Debt, DebtLedger};
use self::outage::OutageState;
use super::fleet::{Fleet, Heartbeat};
use crate::algorithm::Algorithm;
use crate::charge::{Charge, OnStoreFailure, OwnedCharge};
use crate::clock::Clock;
use crate::decision::{Decision, Source};
use crate::join::join_all;
use crate::quota::Quota;
use crate::store::memory::MemoryStore;
use crate::store::{Action, Outcome, SharedStore, Store, StoreError, collect_independent};

mod holds;
mod ledger;
mod local;
mod outage;

/// A fallback around a store: it decides when the store cannot, by [`Charge::on_store_failure`].
///
/// | failure policy | decision while the store fails | [`Source`] |
/// | --- | --- | --- |
/// | `local` | by this instance's [share](Fleet::share), in memory | `Local` |
/// | `allow` | allowed (fail open) | `Allow` |
/// | `deny` | denied with a `retry_after` of one second (fail closed) | `Deny` |
/// | `error` | none: the store's error is returned | |
///
/// Several charges stay all or nothing, whatever their policies are: with one `error` among them,
/// all of them end with the store's error. A cost above the instance's share is denied.
///
/// * A refund of units that were admitted locally and are not charged to the store yet is made
///   locally, whether the store fails or not. Any other refund is made in the store, and returns
///   its error.
/// * A report is recorded locally in full, and is a debt, too.
/// * A [hold](crate::Hold) of a local decision is settled locally. A commit that the store cannot
///   make is made when it has recovered, as long as it remembers the hold; until then its state is
///   [`Pending`](crate::HoldStatus::Pending). Units in flight are limited to this instance's share, and
///   are not a debt: with those that the store holds, up to twice the limit is in flight.
/// * A reset also deletes the local count and the debt. If the store fails, the reset returns its
///   error, because the store's count still exists.
/// * [`StoreError::Full`] is the error of a memory store, which another memory store does not help:
///   only `allow` and `deny` apply. [`StoreError::Misconfigured`] is returned.
///
/// Heartbeats and the settlement of debts run on the Tokio runtime in which the fallback is built
/// and used. Outside of a runtime neither happens.
///
/// # Lost answers
///
/// After [`StoreError::AnswerLost`] the store may have counted the call. A call that may have run
/// is never made again, so that nothing is charged or returned twice:
///
/// * A refund counts as made: the caller gets the error, and no unit is returned elsewhere.
/// * A report counts as made, and so does the settlement of a debt.
/// * An acquire may have been denied. So it is decided locally, and if it is admitted, its units
///   are a debt like those of any local decision. Debts that it was to settle stay. The store may
///   count the units of a lost call twice, and then denies earlier, but never admits more. The key
///   is decided locally until these debts are settled, so that no further call is lost for them.
///
/// ```
/// use std::time::Duration;
/// use tidegate::{Charge, Fallback, Fleet, Limiter, MemoryStore, OnStoreFailure, Quota};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let fallback = Fallback::builder(MemoryStore::new()) // or RedisStore::connect(…)
///     .fleet(Fleet::new().with_min_instances(3))
///     .build();
/// let limiter = Limiter::new(fallback);
/// let quota = Quota::token_bucket(10, Duration::from_secs(1))?;
/// let charge = Charge::new("user123", &quota).with_on_store_failure(OnStoreFailure::Allow);
///
/// assert!(limiter.acquire(&charge).await?.allowed);
/// assert!(!limiter.store().stats().falling_back);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Fallback<S: SharedStore> {
    inner: Arc<FallbackCore<S>>,
    _heartbeat: Option<Heartbeat>,
}

#[derive(Debug)]
struct FallbackCore<S> {
    store: Arc<S>,
    local: MemoryStore,
    fleet: Fleet,
    ledger: Arc<DebtLedger>,
    pending_commits: PendingCommits,
    outage: OutageState,
    counters: FallbackCounters,
}

#[derive(Debug, Default)]
struct FallbackCounters {
    local: AtomicU64,
    allow: AtomicU64,
    deny: AtomicU64,
    settled: AtomicU64,
}

/// Counters and state of a [`Fallback`], for metrics and health checks. The counters start at 0
/// when the fallback is built.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    /// Whether the store is failing, or has failed within the last second.
    pub falling_back: bool,
    /// Number of acquires decided by this instance's share.
    pub local: u64,
    /// Number of acquires allowed by the failure policy `allow`.
    pub allow: u64,
    /// Number of acquires denied by the failure policy `deny`.
    pub deny: u64,
    /// Number of keys with units that are not charged to the store yet.
    pub pending_debits: usize,
    /// Upper bound of these units. Units that expire before the settlement are not charged.
    pub pending_debit_units: u64,
    /// Units charged to the store afterwards.
    pub settled_debit_units: u64,
    /// Units admitted beyond [the maximum of keys](Builder::max_pending_debits). They are never
    /// charged.
    pub dropped_debit_units: u64,
    /// Number of commits of [holds](crate::Hold) that wait for the store.
    pub pending_commits: usize,
    /// Commits that were dropped, because the store no longer knew their holds when it recovered.
    pub dropped_commits: u64,
}

/// Builder of a [`Fallback`].
///
/// ```
/// use tidegate::{Fallback, Fleet, MemoryStore};
///
/// let fallback = Fallback::builder(MemoryStore::new()) // or RedisStore::connect(…)
///     .fleet(Fleet::with_instance("api-1").with_min_instances(4))
///     .local(MemoryStore::builder().max_keys(100_000).build())
///     .max_pending_debits(10_000)
///     .build();
/// assert_eq!(fallback.fleet().size(), 4);
/// ```
#[derive(Debug)]
pub struct Builder<S> {
    store: S,
    local: Option<MemoryStore>,
    fleet: Option<Fleet>,
    max_pending_debits: usize,
}

impl<S: SharedStore> Builder<S> {
    /// Sets the memory store of local decisions; an empty one by default.
    #[must_use]
    pub fn local(mut self, memory: MemoryStore) -> Self {
        self.local = Some(memory);
        self
    }

    /// Sets the fleet that shares the limits. By default a new one, which finds its members through
    /// the store.
    #[must_use]
    pub fn fleet(mut self, fleet: Fleet) -> Self {
        self.fleet = Some(fleet);
        self
    }

    /// Sets the maximum number of keys with pending debits; 100,000 by default. Units of further
    /// keys are admitted locally but never charged to the store.
    #[must_use]
    pub fn max_pending_debits(mut self, keys: usize) -> Self {
        self.max_pending_debits = keys;
        self
    }

    /// Creates the fallback, and starts its heartbeats if there is a Tokio runtime.
    ///
    /// # Panics
    ///
    /// In a Tokio runtime without timers (`enable_time`).
    #[must_use]
    pub fn build(self) -> Fallback<S> {
        let store = Arc::new(self.store);
        let fleet = self.fleet.unwrap_or_default();
        let heartbeat =
            Handle::try_current().ok().map(|runtime| fleet.start_heartbeats_on(&runtime, &store));
        let inner = FallbackCore {
            store,
            local: self.local.unwrap_or_default(),
            fleet,
            ledger: Arc::new(DebtLedger::new(self.max_pending_debits)),
            pending_commits: PendingCommits::default(),
            outage: OutageState::new(),
            counters: FallbackCounters::default(),
        };
        Fallback { inner: Arc::new(inner), _heartbeat: heartbeat }
    }
}

impl<S: SharedStore> Fallback<S> {
    /// Creates a fallback around this store with the default options.
    ///
    /// # Panics
    ///
    /// In a Tokio runtime without timers (`enable_time`).
    #[must_use]
    pub fn new(store: S) -> Self {
        Self::builder(store).build()
    }

    /// Returns a builder with the default options.
    #[must_use]
    pub fn builder(store: S) -> Builder<S> {
        Builder { store, local: None, fleet: None, max_pending_debits: 100_000 }
    }

    /// Returns the wrapped store.
    #[must_use]
    pub fn store(&self) -> &S {
        &self.inner.store
    }

    /// Returns the memory store of local decisions.
    #[must_use]
    pub fn local(&self) -> &MemoryStore {
        &self.inner.local
    }

    /// Returns the fleet that shares the limits.
    #[must_use]
    pub fn fleet(&self) -> &Fleet {
        &self.inner.fleet
    }

    /// Returns the counters and the state.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let FallbackCore { ledger, pending_commits, outage, counters, .. } = &*self.inner;
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Stats {
            falling_back: outage.is_active(),
            local: load(&counters.local),
            allow: load(&counters.allow),
            deny: load(&counters.deny),
            pending_debits: ledger.keys(),
            pending_debit_units: ledger.units(),
            settled_debit_units: load(&counters.settled),
            dropped_debit_units: ledger.dropped(),
            pending_commits: pending_commits.len(),
            dropped_commits: pending_commits.dropped(),
        }
    }

    /// Returns the time since the store started to fail; `None` while it decides.
    #[must_use]
    pub fn outage(&self) -> Option<Duration> {
        self.inner.outage.elapsed()
    }

    /// Charges the pending debits to the store now instead of in the background, and makes the
    /// pending commits, for example before a shutdown. Returns the number of units charged.
    pub async fn settle(&self) -> u64 {
        let settled = self.inner.settle().await.settled;
        self.inner.make_pending_commits().await;
        settled
    }
}

impl<S: SharedStore> FallbackCore<S> {
    /// Decides while there are debts.
    async fn decide_with_debts(
        self: &Arc<Self>,
        action: Action,
        charges: &[Charge<'_>],
    ) -> Result<Vec<Decision>, StoreError> {
        match (action, charges) {
            (Action::Acquire | Action::Peek, _) => self.settle_and_decide(action, charges).await,
            (Action::Refund, [charge]) if charge.hold().is_none() => {
                Ok(vec![self.refund(charge).await?])
            }
            _ => self.store.decide_all(action, charges).await,
        }
    }

    /// Acquires or peeks. A request of a key in debt must also have room for its debt, which is
    /// settled in the same call.
    async fn settle_and_decide(
        self: &Arc<Self>,
        action: Action,
        charges: &[Charge<'_>],
    ) -> Result<Vec<Decision>, StoreError> {
        let now = self.local.clock().now().as_micros();
        let Ok(mut claims) = self.ledger.claim(charges, now) else {
            return self.decide_without_store(action, charges);
        };
        if claims.debts.is_empty() {
            return self.store.decide_all(action, charges).await;
        }
        // The hold of a charge would have the units of the debt, too.
        if claims.debts.iter().any(|claim| charges[claim.charge_index].hold().is_some()) {
            drop(claims);
            return self.decide_without_store(action, charges);
        }
        let mut with_debts = charges.to_vec();
        let mut fits = true;
        for claim in &mut claims.debts {
            let charge = &charges[claim.charge_index];
            claim.debt.units = self.unexpired_units(&claim.debt);
            with_debts[claim.charge_index] =
                charge.with_cost(charge.cost().saturating_add(claim.debt.units));
            fits &= with_debts[claim.charge_index].cost() <= charge.quota().burst();
        }
        if !fits {
            // The debt alone leaves no room, whatever the store counts. The local counts know for
            // how long.
            drop(claims);
            return self.decide_without_store(action, charges);
        }
        let owned: Vec<OwnedCharge> = with_debts.iter().map(OwnedCharge::of).collect();
        let inner = Arc::clone(self);
        let call = async move {
            let charges: Vec<Charge<'_>> = owned.iter().map(OwnedCharge::charge).collect();
            let mut decided = inner.store.decide_all(action, &charges).await;
            inner.on_answer_with_debts(action, &mut claims, &mut decided);
            decided
        };
        // In a task, because the answer must reach the ledger even if this caller is cancelled.
        match Handle::try_current() {
            Ok(runtime) => runtime.spawn(call).await.unwrap_or_else(|error| {
                Err(StoreError::Unreachable(error.to_string()).answer_lost())
            }),
            Err(_) => call.await,
        }
    }

    /// Settles debts that an answer has charged. If it denies, what remains is without the debts. A
    /// lost answer may have been a denial, so its debts stay, in doubt.
    fn on_answer_with_debts(
        &self,
        action: Action,
        claims: &mut Claims,
        decided: &mut Result<Vec<Decision>, StoreError>,
    ) {
        let all_fit = match decided {
            Ok(decisions) => decisions.iter().all(|decision| decision.allowed),
            Err(_) => false,
        };
        for claim in &mut claims.debts {
            let units = claim.debt.units;
            match decided {
                Ok(_) if all_fit && action == Action::Acquire => {
                    claim.debt.units = 0;
                    self.counters.settled.fetch_add(units, Ordering::Relaxed);
                }
                Ok(decisions) if !all_fit => {
                    let decision = &mut decisions[claim.charge_index];
                    decision.remaining = decision.remaining.saturating_sub(units);
                }
                Ok(_) => {}
                Err(error) => {
                    claim.debt.in_doubt |= action == Action::Acquire && error.may_have_run();
                }
            }
        }
    }

    /// Refunds a charge: the units that are still owed by cancelling them, because the store does
    /// not have them and others could spend what it returns, and the rest in the store.
    async fn refund(&self, charge: &Charge<'_>) -> Result<Decision, StoreError> {
        let store_fails = self.outage.is_active();
        let owed = charge.with_cost(self.ledger.cancel(charge, store_fails));
        let rest = charge.with_cost(charge.cost() - owed.cost());
        if owed.cost() == 0 {
            return self.store.decide(Action::Refund, &rest).await;
        }
        if rest.cost() == 0 {
            return self.refund_locally(&owed);
        }
        let refunded = self.store.decide(Action::Refund, &rest).await;
        if refunded.as_ref().is_err_and(|error| !error.may_have_run()) {
            // Nothing is refunded, so that the caller can try again.
            self.owe(&owed, false);
        } else {
            let _ = self.refund_locally(&owed)?;
        }
        refunded
    }

    /// Decides by the failure policy although the store may be reachable: another task is settling
    /// the debt of a key, or the debt alone exceeds the limit, so the store's answer would be
    /// unreliable.
    fn decide_without_store(
        self: &Arc<Self>,
        action: Action,
        charges: &[Charge<'_>],
    ) -> Result<Vec<Decision>, StoreError> {
        self.outage.mark_local_decision(self.local.clock().now().as_micros());
        self.decide_locally(action, charges, false)
    }

    /// Adds the units of a charge that was admitted locally to the debts.
    fn owe(&self, charge: &Charge<'_>, in_doubt: bool) {
        let (now, store_now) = (self.local.clock().now(), self.store.clock().now());
        self.ledger.add(charge, now.as_micros(), store_now, in_doubt);
    }

    /// Returns the units of a debt that still count. Units that have left the window, or have
    /// drained, are not charged any more.
    fn unexpired_units(&self, debt: &Debt) -> u64 {
        let charge = debt.charge();
        let quota = self.recording_quota(&charge).with_overdraft();
        let count = self.local.decide_now(Action::Peek, &charge.with_quota(&quota).with_cost(0));
        count.map_or(debt.units, |count| debt.units.min(quota.burst() - count.remaining))
    }

    /// Returns the quota with which units are recorded in a local count, as opposed to decided. Its
    /// capacity is that of the full quota, because the share changes with the fleet, and a smaller
    /// capacity would truncate the count. A bucket drains at the rate of the share.
    fn recording_quota<'a>(&self, charge: &Charge<'a>) -> Cow<'a, Quota> {
        let quota = charge.quota();
        let share = match quota.algorithm() {
            Algorithm::TokenBucket | Algorithm::LeakyBucket => self.share(charge),
            Algorithm::SlidingLog
            | Algorithm::SlidingCounter
            | Algorithm::FixedWindow
            | Algorithm::Concurrency => None,
        };
        let slower = share.map(|share| quota.scaled_to(share.limit(), quota.burst()));
        // A bucket with the longest drain time has no slower one of the same capacity.
        slower
            .filter(|slower| slower.burst() == quota.burst())
            .map_or(Cow::Borrowed(quota), Cow::Owned)
    }

    fn share(&self, charge: &Charge<'_>) -> Option<Quota> {
        let share = self.fleet.share(charge.quota(), charge.policy(), charge.key())?;
        Some(share.for_rest_of_period(|| self.local.clock().now()))
    }

    /// Charges units that the store admitted to the local share as well, if the key has a local
    /// count. Otherwise a store that fails once per window would admit twice the limit in each.
    ///
    /// A key without a local count was not decided locally for at least one window. Its next
    /// failure may admit the share on top of the limit that the store has admitted, at most 2 L in
    /// that window, and from then on it has a local count. So memory stays bounded by the keys that
    /// were decided locally.
    fn charge_local_share(&self, action: Action, charges: &[Charge<'_>], decisions: &[Decision]) {
        let Some(last) = self.outage.last_local_decision() else { return };
        if action != Action::Acquire
            || self.local.keys() == 0
            || decisions.iter().any(|decision| !decision.allowed)
        {
            return;
        }
        let now = self.local.clock().now().as_micros();
        for (charge, decision) in charges.iter().zip(decisions) {
            let quota = charge.quota();
            let recent_until =
                last.saturating_add(2 * quota.window_micros().max(quota.drain_micros()));
            if decision.source == Source::Store
                && charge.on_store_failure() == OnStoreFailure::Local
                && now < recent_until
                && self.local.has_count(charge)
            {
                self.local.charge_if_present(&charge.with_quota(&self.recording_quota(charge)));
            }
        }
    }
}

impl<S: SharedStore> Store for Fallback<S> {
    fn decide(
        &self,
        action: Action,
        charge: &Charge<'_>,
    ) -> Outcome<impl Future<Output = Result<Decision, StoreError>> + Send> {
        Outcome::Pending(async move {
            let inner = &self.inner;
            let charges = std::slice::from_ref(charge);
            if action == Action::Reset {
                inner.reset_local(charge);
            }
            if inner.holds_locally(action, charge) {
                return Box::pin(inner.decide_local_hold(action, charge)).await;
            }
            if inner.awaits_commit(action, charges) {
                Box::pin(inner.make_pending_commits()).await;
            }
            let decided = if inner.awaits_commit(action, charges) {
                inner.decide_without_store(action, charges).map(|decisions| decisions[0])
            } else if inner.ledger.is_empty() {
                inner.store.decide(action, charge).await
            } else {
                let decided = Box::pin(inner.decide_with_debts(action, charges)).await;
                decided.map(|decisions| decisions[0])
            };
            match decided {
                Ok(decision) => {
                    inner.charge_local_share(action, charges, std::slice::from_ref(&decision));
                    Ok(decision)
                }
                Err(error) => inner.fall_back(action, charges, error).map(|decisions| decisions[0]),
            }
        })
    }

    fn decide_all(
        &self,
        action: Action,
        charges: &[Charge<'_>],
    ) -> Outcome<impl Future<Output = Result<Vec<Decision>, StoreError>> + Send> {
        Outcome::Pending(async move {
            let inner = &self.inner;
            if !matches!(action, Action::Acquire | Action::Peek) {
                // They are independent of each other, and each may fail alone.
                let decided = join_all(
                    charges.iter().map(|charge| self.decide(action, charge).into_future()),
                )
                .await;
                return collect_independent(decided);
            }
            if charges.iter().all(|charge| inner.holds_locally(action, charge)) {
                let decide = |charge| Box::pin(inner.decide_local_hold(action, charge));
                return join_all(charges.iter().map(decide)).await.into_iter().collect();
            }
            if inner.awaits_commit(action, charges) {
                Box::pin(inner.make_pending_commits()).await;
            }
            let decided = if inner.awaits_commit(action, charges) {
                inner.decide_without_store(action, charges)
            } else if inner.ledger.is_empty() {
                inner.store.decide_all(action, charges).await
            } else {
                inner.decide_with_debts(action, charges).await
            };
            match decided {
                Ok(decisions) => {
                    inner.charge_local_share(action, charges, &decisions);
                    Ok(decisions)
                }
                Err(error) => inner.fall_back(action, charges, error),
            }
        })
    }

    fn fall_back(
        &self,
        action: Action,
        charges: &[Charge<'_>],
        error: StoreError,
    ) -> Result<Vec<Decision>, StoreError> {
        self.inner.fall_back(action, charges, error)
    }

    fn clock(&self) -> &dyn Clock {
        self.inner.store.clock()
    }
}

impl<S: SharedStore> Drop for Fallback<S> {
    fn drop(&mut self) {
        self.inner.outage.abort_recovery();
    }
}
