//! Recovery from an outage: debts are charged to the store, and the outage ends after a time
//! without failures.

use std::sync::Weak;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::task::yield_now;
use tokio::time::{Instant, sleep, timeout};

use super::FallbackCore;
use super::ledger::{Claim, Debt, DebtLedger};
use crate::charge::{Charge, MAX_CHARGES};
use crate::clock::micros;
use crate::join::join_all;
use crate::random::jittered;
use crate::store::{Action, SharedStore, Store, StoreError};

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
