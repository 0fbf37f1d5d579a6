//! Recovery: debts are reported to the store, and the outage ends after a time without failures.

use std::future::poll_fn;
use std::sync::Weak;
use std::sync::atomic::Ordering;
use std::task::Poll;
use std::time::Duration;

use tokio::task::yield_now;
use tokio::time::{Instant, sleep, timeout};

use super::owed::{Claim, Debt, Owed};
use super::{Inner, jittered, may_have_run};
use crate::charge::{Charge, MAX_CHARGES};
use crate::clock::micros;
use crate::store::{Action, Part, Store, StoreError};

/// Interval between two passes over the debts.
const REPAY_INTERVAL: Duration = Duration::from_millis(100);
/// The same while no call fails and only single counts cannot be repaid.
const CALM_REPAY_INTERVAL: Duration = Duration::from_secs(1);
/// Time without a failure after which the store is back.
const CALM: Duration = Duration::from_secs(1);
/// Time after which a debt is tried again whose count the store cannot read.
const UNREADABLE_RETRY_INTERVAL: Duration = Duration::from_secs(10);

/// Result of one pass over the debts.
#[derive(Debug, Default)]
pub(super) struct Pass {
    pub(super) repaid: u64,
    /// Parts that answered in this pass.
    reached: Vec<Part>,
    failed: Vec<Part>,
}

/// Runs from the first failure until the store is back and nothing is owed.
pub(super) async fn recover<S: Store>(inner: Weak<Inner<S>>) {
    let mut failures = None;
    let mut calm_since = Instant::now();
    let mut pause = REPAY_INTERVAL;
    loop {
        sleep(jittered(pause)).await;
        let Some(inner) = inner.upgrade() else { return };
        let pass = inner.repay().await;
        let trouble = &inner.trouble;
        let now = trouble.failures.load(Ordering::Relaxed);
        let failed_part = Part(trouble.part.load(Ordering::Relaxed));
        let back =
            timeout(CALM, inner.store.probe(failed_part)).await.is_ok_and(|probe| probe.is_ok());
        if failures != Some(now) || !pass.failed.is_empty() || !back {
            (failures, calm_since, pause) = (Some(now), Instant::now(), REPAY_INTERVAL);
        }
        if calm_since.elapsed() >= CALM {
            pause = CALM_REPAY_INTERVAL;
            if inner.end_episode(now) {
                return;
            }
        }
    }
}

impl<S: Store> Inner<S> {
    /// Reports every debt to the store, each once. A second caller finds the first at work and does
    /// nothing.
    pub(super) async fn repay(&self) -> Pass {
        let mut pass = Pass::default();
        if self.owed.is_empty() || self.trouble.repaying.swap(true, Ordering::AcqRel) {
            return pass;
        }
        let _done = Done(self);
        let number = self.trouble.passes.fetch_add(1, Ordering::Relaxed) + 1;
        for shard in Owed::shards() {
            self.owed.drop_expired_of(shard, self.local.clock().now().as_micros());
            // A store of one part that fails takes no debt at all.
            while !pass.failed.contains(&Part::WHOLE) {
                let claims = self.owed.claim_due(
                    shard,
                    number,
                    MAX_CHARGES,
                    self.local.clock().now().as_micros(),
                );
                if claims.debts.is_empty() {
                    break;
                }
                // Parts fail independently: one that is away does not keep debts from another.
                for (part, mut group) in claims.by_part(|debt| self.store.part(&debt.charge())) {
                    self.repay_part(part, &mut group.debts, &mut pass).await;
                }
                // With a store that answers at once, other tasks must run, too.
                yield_now().await;
            }
        }
        self.counters.repaid.fetch_add(pass.repaid, Ordering::Relaxed);
        pass
    }

    async fn repay_part(&self, part: Part, claims: &mut [Claim], pass: &mut Pass) {
        for claim in &mut *claims {
            claim.debt.units = self.still_counting(&claim.debt);
        }
        let mut claims: Vec<&mut Claim> =
            claims.iter_mut().filter(|claim| claim.debt.units > 0).collect();
        // One call is enough to find that a part is away.
        let first = if pass.reached.contains(&part) { claims.len() } else { claims.len().min(1) };
        let (first, others) = claims.split_at_mut(first);
        for some in [first, others] {
            if some.is_empty() || pass.failed.contains(&part) {
                continue;
            }
            if self.report(part, some, pass).await {
                pass.reached.push(part);
            } else {
                pass.failed.push(part);
            }
        }
    }

    /// Reports these debts, and returns whether the part answered. A report always charges, so a
    /// debt is settled by one.
    async fn report(&self, part: Part, claims: &mut [&mut Claim], pass: &mut Pass) -> bool {
        let debts: Vec<Debt> = claims.iter().map(|claim| claim.debt.clone()).collect();
        let charges: Vec<Charge<'_>> = debts.iter().map(Debt::charge).collect();
        // Until the answers are here, the store may have counted the debts: also if this future is
        // dropped.
        for claim in &mut *claims {
            claim.debt.in_doubt = true;
        }
        let results: Vec<Result<(), StoreError>> = match self.report_together(part, &charges).await
        {
            Some(result) => charges.iter().map(|_| result.clone()).collect(),
            // The counts of one node of a cluster are in many slots: concurrent calls share a
            // pipeline there.
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
                    pass.repaid += debt.units;
                }
                Err(StoreError::Unreadable(_)) => {
                    left.not_before = now.saturating_add(micros(UNREADABLE_RETRY_INTERVAL));
                }
                Err(_) => answered = false,
            }
        }
        answered
    }

    /// Reports debts in one call, where one call is one script. `None`: they have to be reported
    /// one by one.
    async fn report_together(
        &self,
        part: Part,
        charges: &[Charge<'_>],
    ) -> Option<Result<(), StoreError>> {
        if part != Part::WHOLE {
            return None;
        }
        match self.store.decide_all(Action::Report, charges).await {
            // The script has charged none of them.
            Err(StoreError::Unreadable(_)) => None,
            result => Some(result.map(|_| ())),
        }
    }

    async fn report_one(&self, charge: &Charge<'_>) -> Result<(), StoreError> {
        self.store.decide(Action::Report, charge).await.map(|_| ())
    }
}

/// Runs futures concurrently, and returns their outputs in order.
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

/// Lets the next repayment begin, even if this one is dropped in its course.
struct Done<'a, S>(&'a Inner<S>);

impl<S> Drop for Done<'_, S> {
    fn drop(&mut self) {
        self.0.trouble.repaying.store(false, Ordering::Release);
    }
}
