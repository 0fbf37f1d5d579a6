//! [`OutageState`]: whether the store is failing, and the log lines of the start and end of an
//! outage.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::{FallbackCore, settlement};
use crate::charge::{Charge, OwnedCharge};
use crate::store::{SharedStore, Store, StoreError};

/// Number of different reasons of one outage that are logged, each once.
const MAX_LOGGED_REASONS: usize = 4;
/// Of the calls that an open circuit rejects, one in this many is examined for a new reason.
const OPEN_SAMPLE_INTERVAL: u64 = 64;

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
        if outage.logged_reasons.len() < MAX_LOGGED_REASONS
            && !outage.logged_reasons.contains(&reason)
        {
            let instances = self.fleet.size();
            if starts {
                tracing::warn!(reason, instances, "store failed, falling back");
            } else {
                tracing::warn!(reason, instances, "store still failing, falling back");
            }
            outage.logged_reasons.push(reason);
        }
        if outage.recovery.as_ref().is_none_or(AbortHandle::is_finished)
            && let Ok(runtime) = Handle::try_current()
        {
            let recovery = runtime.spawn(settlement::recover(Arc::downgrade(self)));
            outage.recovery = Some(recovery.abort_handle());
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
        if was_active {
            let outage_duration = outage.since.elapsed();
            let local = self.counters.local.load(Ordering::Relaxed) - outage.local_before;
            let settled = self.counters.settled.load(Ordering::Relaxed) - outage.settled_before;
            let pending = self.ledger.units();
            tracing::info!(?outage_duration, local, settled, pending, "store recovered");
        }
        let is_complete = self.ledger.is_empty();
        if is_complete {
            // The task ends a moment later, but a new failure must already start a new one.
            outage.recovery = None;
        }
        is_complete
    }
}
