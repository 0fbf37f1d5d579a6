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
use crate::store::{Action, ShardId, SharedStore, Store, StoreError};

/// Interval between two settlement passes during an outage.
const PASS_INTERVAL: Duration = Duration::from_millis(100);
/// Interval between two passes after the outage, while some counts still cannot be settled.
const IDLE_PASS_INTERVAL: Duration = Duration::from_secs(1);
/// Time without a failure after which the outage is over.
const STABLE_AFTER: Duration = Duration::from_secs(1);
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);
/// Time after which the settlement of an unreadable count is retried.
const UNREADABLE_RETRY_INTERVAL: Duration = Duration::from_secs(10);

/// Result of one settlement pass over all debts.
#[derive(Debug, Default)]
pub(super) struct SettlementPass {
    /// Units charged to the store.
    pub(super) settled: u64,
    /// Shards that answered in this pass.
    reached: Vec<ShardId>,
    failed: Vec<ShardId>,
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
        let probed = timeout(PROBE_TIMEOUT, inner.store.probe(inner.outage.failed_shard())).await;
        let is_healthy = probed.is_ok_and(|probe| probe.is_ok());
        if failures_seen != Some(failures) || !pass.failed.is_empty() || !is_healthy {
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
        for shard in DebtLedger::shards() {
            self.ledger.drop_expired_in(shard, self.local.clock().now().as_micros());
            // If the only shard of the store fails, no debt can be settled.
            while !pass.failed.contains(&ShardId::SINGLE) {
                let now = self.local.clock().now().as_micros();
                let claims = self.ledger.claim_due(shard, number, MAX_CHARGES, now);
                if claims.debts.is_empty() {
                    break;
                }
                // Shards of the store fail independently: one that is down must not delay the
                // debts of another.
                for (shard, mut group) in claims.by_shard(|debt| self.store.shard(&debt.charge())) {
                    self.settle_shard(shard, &mut group.debts, &mut pass).await;
                }
                // A store that answers at once never yields, but other tasks must run.
                yield_now().await;
            }
        }
        self.counters.settled.fetch_add(pass.settled, Ordering::Relaxed);
        pass
    }

    async fn settle_shard(&self, shard: ShardId, claims: &mut [Claim], pass: &mut SettlementPass) {
        for claim in &mut *claims {
            claim.debt.units = self.unexpired_units(&claim.debt);
        }
        let mut claims: Vec<&mut Claim> =
            claims.iter_mut().filter(|claim| claim.debt.units > 0).collect();
        // One debt first, because a single call is enough to find that a shard is down.
        let first = if pass.reached.contains(&shard) { claims.len() } else { claims.len().min(1) };
        let (first, others) = claims.split_at_mut(first);
        for batch in [first, others] {
            if batch.is_empty() || pass.failed.contains(&shard) {
                continue;
            }
            if self.report(shard, batch, pass).await {
                pass.reached.push(shard);
            } else {
                pass.failed.push(shard);
            }
        }
    }

    /// Reports these debts, and returns whether the shard answered. A report always charges, so it
    /// settles the whole debt.
    async fn report(
        &self,
        shard: ShardId,
        claims: &mut [&mut Claim],
        pass: &mut SettlementPass,
    ) -> bool {
        let debts: Vec<Debt> = claims.iter().map(|claim| claim.debt.clone()).collect();
        let charges: Vec<Charge<'_>> = debts.iter().map(Debt::charge).collect();
        // Until the answers are here the store may have counted the debts, even if this future is
        // dropped.
        for claim in &mut *claims {
            claim.debt.in_doubt = true;
        }
        let results: Vec<Result<(), StoreError>> = match self.report_batch(shard, &charges).await {
            Some(result) => charges.iter().map(|_| result.clone()).collect(),
            // The counts of one cluster node are in many slots. Concurrent calls share a pipeline.
            None => join_all(charges.iter().map(|charge| self.report_one(charge))).await,
        };
        let now = self.local.clock().now().as_micros();
        let mut answered = true;
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
                }
                Err(StoreError::Unreadable(_)) => {
                    left.not_before = now.saturating_add(micros(UNREADABLE_RETRY_INTERVAL));
                }
                Err(_) => answered = false,
            }
        }
        answered
    }

    /// Reports debts in one call, if the store runs it as one script. `None` means that they must
    /// be reported one by one.
    async fn report_batch(
        &self,
        shard: ShardId,
        charges: &[Charge<'_>],
    ) -> Option<Result<(), StoreError>> {
        if shard != ShardId::SINGLE {
            return None;
        }
        match self.store.decide_all(Action::Report, charges).await {
            // One count is unreadable, and the script has charged none.
            Err(StoreError::Unreadable(_)) => None,
            result => Some(result.map(|_| ())),
        }
    }

    async fn report_one(&self, charge: &Charge<'_>) -> Result<(), StoreError> {
        self.store.decide(Action::Report, charge).await.map(|_| ())
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
