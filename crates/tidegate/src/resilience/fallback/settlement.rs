//! Recovery from an outage: debts are charged to the store, and the outage ends after a time
//! without failures.

use std::future::poll_fn;
use std::sync::Weak;
use std::sync::atomic::Ordering;
use std::task::Poll;
use std::time::Duration;

use tokio::task::yield_now;
use tokio::time::{Instant, sleep, timeout};

use super::ledger::{Claim, Debt, DebtLedger};
use super::{FallbackCore, may_have_run};
use crate::charge::{Charge, MAX_CHARGES};
use crate::clock::micros;
use crate::random::jittered;
use crate::store::{Action, SharedStore, Store, StoreError};

/// Interval between two settlement passes during an outage.
const PASS_INTERVAL: Duration = Duration::from_millis(100);
/// Interval between two passes after the outage, while some counts still cannot be settled.
const IDLE_PASS_INTERVAL: Duration = Duration::from_secs(1);
/// Time without a failure after which the outage is over.
const STABLE_AFTER: Duration = Duration::from_secs(1);
const READ_TIMEOUT: Duration = Duration::from_secs(1);
/// Debts that are reported first in a pass.
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
        // A few debts first: if all of them fail, so would the others.
        let first = if pass.reached { claims.len() } else { claims.len().min(TRIALS) };
        let (first, others) = claims.split_at_mut(first);
        let is_down = !self.report(first, pass).await && first.len() == TRIALS;
        if is_down || others.is_empty() {
            return !is_down;
        }
        self.report(others, pass).await;
        true
    }

    /// Reports these debts concurrently, and returns whether the store answered any. A report
    /// always charges, so it settles the whole debt.
    async fn report(&self, claims: &mut [&mut Claim], pass: &mut SettlementPass) -> bool {
        let debts: Vec<Debt> = claims.iter().map(|claim| claim.debt.clone()).collect();
        let charges: Vec<Charge<'_>> = debts.iter().map(Debt::charge).collect();
        // Until the answers are here the store may have counted the debts, even if this future is
        // dropped.
        for claim in &mut *claims {
            claim.debt.in_doubt = true;
        }
        // Concurrent calls of a Redis store share few calls of Redis.
        let results = join_all(charges.iter().map(|charge| self.report_one(charge))).await;
        let now = self.local.clock().now().as_micros();
        let mut answered = false;
        for ((claim, debt), result) in claims.iter_mut().zip(&debts).zip(&results) {
            let left = &mut claim.debt;
            left.in_doubt = match result {
                Ok(()) => false,
                Err(error) => debt.in_doubt || may_have_run(error),
            };
            match result {
                Ok(()) => {
                    left.units = 0;
                    pass.settled += debt.units;
                    answered = true;
                }
                Err(StoreError::Unreadable(_)) => {
                    left.not_before = now.saturating_add(micros(UNREADABLE_RETRY_INTERVAL));
                    answered = true;
                }
                Err(_) => pass.failed = true,
            }
        }
        pass.reached |= answered;
        answered
    }

    async fn report_one(&self, charge: &Charge<'_>) -> Result<(), StoreError> {
        self.store.decide(Action::Report, charge).await.map(|_| ())
    }

    /// Returns whether the store can read the count of the last request that it failed to decide.
    /// Whether it can write is known to its circuits, which would reject this call, too.
    async fn reads_failed_charge(&self) -> bool {
        let Some(failed) = self.outage.failed_charge() else { return true };
        let charge = failed.charge();
        let read = self.store.decide(Action::ChargeUpTo, &charge);
        let read = timeout(READ_TIMEOUT, read).await;
        matches!(read, Ok(Ok(_) | Err(StoreError::Unreadable(_))))
    }
}

/// Awaits futures concurrently, and returns their outputs in order.
async fn join_all<F: Future>(futures: impl Iterator<Item = F>) -> Vec<F::Output> {
    let mut running: Vec<_> = futures.map(|future| (Box::pin(future), None)).collect();
    poll_fn(|context| {
        for (future, output) in running.iter_mut().filter(|(_, output)| output.is_none()) {
            if let Poll::Ready(ready) = future.as_mut().poll(context) {
                *output = Some(ready);
            }
        }
        if running.iter().all(|(_, output)| output.is_some()) {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    })
    .await;
    running.into_iter().filter_map(|(_, output)| output).collect()
}

/// Ends a settlement pass, even if its future is dropped.
struct PassGuard<'a>(&'a DebtLedger);

impl Drop for PassGuard<'_> {
    fn drop(&mut self) {
        self.0.end_pass();
    }
}
