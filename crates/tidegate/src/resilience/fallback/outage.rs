//! [`OutageState`]: whether the store is failing, the log lines of the start and end of an outage,
//! and the recovery from it: debts are charged to the store, and the outage ends after a time
//! without failures.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::task::{AbortHandle, yield_now};
use tokio::time::{Instant, sleep, timeout};

use super::FallbackCore;
use super::ledger::{Claim, Debt, DebtLedger};
use crate::charge::{Charge, MAX_CHARGES, OwnedCharge};
use crate::clock::micros;
use crate::join::join_all;
use crate::random::jittered;
use crate::store::{Action, SharedStore, Store, StoreError};

/// Number of different reasons of one outage that are logged, each once.
const MAX_LOGGED_REASONS: usize = 4;
/// Of the calls that an open circuit rejects, one in this many is examined for a new reason.
const OPEN_SAMPLE_INTERVAL: u64 = 64;
/// Interval between two settlement passes during an outage.
const PASS_INTERVAL: Duration = Duration::from_millis(100);
/// Interval between two passes after the outage, while some counts still cannot be settled.
const IDLE_PASS_INTERVAL: Duration = Duration::from_secs(1);
/// Time without a failure after which the outage is over.
const STABLE_AFTER: Duration = Duration::from_secs(1);
const READ_TIMEOUT: Duration = Duration::from_secs(1);
/// Counts that are read before the first reports of a pass.
const TRIALS: usize = 8;
/// Time after which the settlement of an unreadable count is retried.
const UNREADABLE_RETRY_INTERVAL: Duration = Duration::from_secs(10);

/// State of the store's failures.
#[derive(Debug)]
pub(super) struct OutageState {
    /// Set from the first failure until the recovery has seen no failure for a while.
    active: AtomicBool,
    failures: AtomicU64,
    /// Time of the last local decision by the local clock (µs); 0 before the first one.
    last_local_decision: AtomicU64,
    current: Mutex<Outage>,
}

/// Data of the current or last outage.
#[derive(Debug)]
struct Outage {
    since: Instant,
    /// Values of the counters when the outage started.
    local_before: u64,
    settled_before: u64,
    logged_reasons: Vec<String>,
    /// Charge of the last failure, with a cost of 0.
    failed_charge: Option<Arc<OwnedCharge>>,
    recovery: Option<AbortHandle>,
}

impl OutageState {
    pub(super) fn new() -> Self {
        let current = Outage {
            since: Instant::now(),
            local_before: 0,
            settled_before: 0,
            logged_reasons: Vec::new(),
            failed_charge: None,
            recovery: None,
        };
        Self {
            active: AtomicBool::new(false),
            failures: AtomicU64::new(0),
            last_local_decision: AtomicU64::new(0),
            current: Mutex::new(current),
        }
    }

    pub(super) fn is_active(&self) -> bool {
        self.active.load(Ordering::Relaxed)
    }

    /// Returns the time since the start of the current outage.
    pub(super) fn elapsed(&self) -> Option<Duration> {
        let since = self.lock().since;
        self.is_active().then(|| since.elapsed())
    }

    pub(super) fn failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }

    /// Returns the charge that the store last failed to decide, with a cost of 0.
    pub(super) fn failed_charge(&self) -> Option<Arc<OwnedCharge>> {
        self.lock().failed_charge.clone()
    }

    pub(super) fn mark_local_decision(&self, now: u64) {
        self.last_local_decision.store(now.max(1), Ordering::Relaxed);
    }

    pub(super) fn last_local_decision(&self) -> Option<u64> {
        Some(self.last_local_decision.load(Ordering::Relaxed)).filter(|last| *last > 0)
    }

    pub(super) fn abort_recovery(&self) {
        if let Some(recovery) = self.lock().recovery.take() {
            recovery.abort();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Outage> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<S: SharedStore> FallbackCore<S> {
    /// Records a failure of the store: starts an outage, logs the reason if it is new, and starts
    /// the recovery if it is not running.
    pub(super) fn on_failure(self: &Arc<Self>, charge: &Charge<'_>, error: &StoreError) {
        let state = &self.outage;
        state.mark_local_decision(self.local.clock().now().as_micros());
        let failures = state.failures.fetch_add(1, Ordering::SeqCst);
        let starts = !state.active.swap(true, Ordering::SeqCst);
        let reason = error.reason();
        // An open circuit rejects many calls, so only some of them take the lock below: the reason
        // may have changed, or the runtime of the recovery may have shut down.
        let is_sampled =
            !matches!(error, StoreError::Open(_)) || failures.is_multiple_of(OPEN_SAMPLE_INTERVAL);
        if !starts && !is_sampled {
            return;
        }
        let mut outage = state.lock();
        outage.failed_charge = Some(Arc::new(OwnedCharge::of(&charge.with_cost(0))));
        if starts {
            outage.since = Instant::now();
            outage.local_before = self.counters.local.load(Ordering::Relaxed);
            outage.settled_before = self.counters.settled.load(Ordering::Relaxed);
            outage.logged_reasons.clear();
        }
        let reason = reason.to_string();
        let is_new_reason = outage.logged_reasons.len() < MAX_LOGGED_REASONS
            && !outage.logged_reasons.contains(&reason);
        if is_new_reason {
            outage.logged_reasons.push(reason.clone());
        }
        if outage.recovery.as_ref().is_none_or(AbortHandle::is_finished)
            && let Ok(runtime) = Handle::try_current()
        {
            let recovery = runtime.spawn(recover(Arc::downgrade(self)));
            outage.recovery = Some(recovery.abort_handle());
        }
        // Not under the lock, which every failing call takes: a log line may block.
        drop(outage);
        let instances = self.fleet.size();
        match (is_new_reason, starts) {
            (true, true) => tracing::warn!(reason, instances, "store failed, falling back"),
            (true, false) => tracing::warn!(reason, instances, "store still failing, falling back"),
            (false, _) => {}
        }
    }

    /// Ends the outage, unless there was a failure that the caller has not seen. Returns whether
    /// the recovery is complete.
    pub(super) fn end_outage(&self, failures_seen: u64) -> bool {
        let state = &self.outage;
        let mut outage = state.lock();
        let was_active = state.active.swap(false, Ordering::SeqCst);
        // `on_failure` increments `failures` before it reads `active` (both SeqCst), so either it
        // sees `active` cleared or we see its increment.
        if state.failures.load(Ordering::SeqCst) != failures_seen {
            state.active.store(was_active, Ordering::SeqCst);
            return false;
        }
        let outage_duration = outage.since.elapsed();
        let local = self.counters.local.load(Ordering::Relaxed) - outage.local_before;
        let settled = self.counters.settled.load(Ordering::Relaxed) - outage.settled_before;
        let is_complete = self.ledger.is_empty() && self.pending_commits.len() == 0;
        if is_complete {
            // The task ends a moment later, but a new failure must already start a new one.
            outage.recovery = None;
        }
        drop(outage);
        if was_active {
            let pending = self.ledger.units();
            tracing::info!(?outage_duration, local, settled, pending, "store recovered");
        }
        is_complete
    }
}

/// Result of one settlement pass over all debts.
#[derive(Debug, Default)]
pub(super) struct SettlementPass {
    /// Units charged to the store.
    pub(super) settled: u64,
    /// Whether the store has answered, and whether it has failed, at least once.
    reached: bool,
    failed: bool,
}

/// Runs from the first failure until the store has recovered and all debts are settled.
pub(super) async fn recover<S: SharedStore>(inner: Weak<FallbackCore<S>>) {
    let mut failures_seen = None;
    let mut stable_since = Instant::now();
    let mut interval = PASS_INTERVAL;
    loop {
        sleep(jittered(interval)).await;
        let Some(inner) = inner.upgrade() else { return };
        let pass = inner.settle().await;
        inner.make_pending_commits().await;
        let failures = inner.outage.failures();
        let is_healthy = inner.reads_failed_charge().await;
        if failures_seen != Some(failures) || pass.failed || !is_healthy {
            (failures_seen, stable_since, interval) =
                (Some(failures), Instant::now(), PASS_INTERVAL);
        }
        if stable_since.elapsed() >= STABLE_AFTER {
            interval = IDLE_PASS_INTERVAL;
            if inner.end_outage(failures) {
                return;
            }
        }
    }
}

impl<S: SharedStore> FallbackCore<S> {
    /// Reports every debt to the store once. If another task is doing so, this one does nothing.
    pub(super) async fn settle(&self) -> SettlementPass {
        let mut pass = SettlementPass::default();
        if self.ledger.is_empty() {
            return pass;
        }
        let Some(number) = self.ledger.begin_pass() else { return pass };
        let _guard = PassGuard(&self.ledger);
        // Each pass starts with other keys: those that it tries first may all be on a node that is
        // down, while other nodes answer.
        'pass: for shard in DebtLedger::shards_from(number) {
            self.ledger.drop_expired_in(shard, self.local.clock().now().as_micros());
            loop {
                let now = self.local.clock().now().as_micros();
                let mut claims = self.ledger.claim_due(shard, number, MAX_CHARGES, now);
                if claims.debts.is_empty() {
                    break;
                }
                if !self.settle_claims(&mut claims.debts, &mut pass).await {
                    break 'pass;
                }
                // A store that answers at once never yields, but other tasks must run.
                yield_now().await;
            }
        }
        self.counters.settled.fetch_add(pass.settled, Ordering::Relaxed);
        pass
    }

    /// Reports these debts. Returns false if the store seems to be down as a whole.
    async fn settle_claims(&self, claims: &mut [Claim], pass: &mut SettlementPass) -> bool {
        for claim in &mut *claims {
            claim.debt.units = self.unexpired_units(&claim.debt);
        }
        let mut claims: Vec<&mut Claim> =
            claims.iter_mut().filter(|claim| claim.debt.units > 0).collect();
        if claims.is_empty() {
            return true;
        }
        if !pass.reached {
            // Some counts are read first: a report whose answer is lost cannot be made again.
            let trials = claims.len().min(TRIALS);
            let reads = claims[..trials].iter().map(|claim| self.reads(claim.debt.charge()));
            pass.reached = join_all(reads).await.contains(&true);
            if !pass.reached {
                pass.failed = true;
                return trials < TRIALS;
            }
        }
        self.report(&mut claims, pass).await;
        true
    }

    /// Reports these debts concurrently. A report always charges, so it settles the whole debt. One
    /// whose answer is lost counts as made.
    async fn report(&self, claims: &mut [&mut Claim], pass: &mut SettlementPass) {
        let debts: Vec<Debt> = claims.iter().map(|claim| claim.debt.clone()).collect();
        let charges: Vec<Charge<'_>> = debts.iter().map(Debt::charge).collect();
        // Until the answers are here the reports may have run, even if this future is dropped.
        for claim in &mut *claims {
            claim.debt.units = 0;
        }
        // Concurrent calls of a Redis store share few calls of Redis.
        let reports =
            charges.iter().map(|charge| self.store.decide(Action::Report, charge).into_future());
        let results = join_all(reports).await;
        let now = self.local.clock().now().as_micros();
        for ((claim, debt), result) in claims.iter_mut().zip(&debts).zip(results) {
            let left = &mut claim.debt;
            match result {
                Err(StoreError::Unreadable(_)) => {
                    left.units = debt.units;
                    left.not_before = now.saturating_add(micros(UNREADABLE_RETRY_INTERVAL));
                }
                Err(error) if !error.may_have_run() => {
                    left.units = debt.units;
                    pass.failed = true;
                }
                result => {
                    pass.settled += debt.units;
                    pass.failed |= result.is_err();
                }
            }
        }
    }

    /// Returns whether the store answers a read of this count.
    async fn reads(&self, charge: Charge<'_>) -> bool {
        let read = self.store.decide(Action::ChargeUpTo, &charge.with_cost(0)).await;
        matches!(read, Ok(_) | Err(StoreError::Unreadable(_)))
    }

    /// Returns whether the store can read the count of the last request that it failed to decide.
    /// Whether it can write is known to its circuits, which would reject this call, too.
    async fn reads_failed_charge(&self) -> bool {
        let Some(failed) = self.outage.failed_charge() else { return true };
        timeout(READ_TIMEOUT, self.reads(failed.charge())).await.unwrap_or(false)
    }
}

/// Ends a settlement pass, even if its future is dropped.
struct PassGuard<'a>(&'a DebtLedger);

impl Drop for PassGuard<'_> {
    fn drop(&mut self) {
        self.0.end_pass();
    }
}
