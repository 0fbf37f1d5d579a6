//! The way back: what is owed is charged to the store, and the episode ends when all is calm.

use std::sync::Weak;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::task::yield_now;
use tokio::time::{Instant, sleep, timeout};

use super::owed::{Claim, Debt, Owed};
use super::{Inner, jittered, may_have_run};
use crate::charge::{Charge, MAX_CHARGES};
use crate::store::{Action, Part, Store, StoreError};

/// Between two tries to charge what is owed.
const PAUSE: Duration = Duration::from_millis(100);
/// The same when all is calm, and the store only has no room for some of it.
const CALM_PAUSE: Duration = Duration::from_secs(1);
/// Without a failure for so long, the store is back.
const CALM: Duration = Duration::from_secs(1);

/// What came of one try.
#[derive(Debug, Default)]
pub(super) struct Pass {
    pub(super) repaid: u64,
    failed: Vec<Part>,
}

/// Runs from the first failure until the store is back and nothing is owed.
pub(super) async fn recover<S: Store>(inner: Weak<Inner<S>>) {
    let mut failures = None;
    let mut calm_since = Instant::now();
    let mut pause = PAUSE;
    loop {
        sleep(jittered(pause)).await;
        let Some(inner) = inner.upgrade() else { return };
        let pass = inner.repay().await;
        let trouble = &inner.trouble;
        let now = trouble.failures.load(Ordering::Relaxed);
        let failed_part = Part(trouble.part.load(Ordering::Relaxed));
        let back = timeout(CALM, inner.store.probe(failed_part)).await.is_ok_and(|probe| probe.is_ok());
        if failures != Some(now) || !pass.failed.is_empty() || !back {
            (failures, calm_since, pause) = (Some(now), Instant::now(), PAUSE);
        }
        if calm_since.elapsed() >= CALM {
            pause = CALM_PAUSE;
            if inner.end_episode(now) {
                return;
            }
        }
    }
}

impl<S: Store> Inner<S> {
    /// Charges to the store what is owed and fits. One at a time: who comes second has nothing to do.
    pub(super) async fn repay(&self) -> Pass {
        let mut pass = Pass::default();
        if self.owed.is_empty() || self.trouble.repaying.swap(true, Ordering::AcqRel) {
            return pass;
        }
        let _done = Done(self);
        let number = self.trouble.passes.fetch_add(1, Ordering::Relaxed) + 1;
        for shard in Owed::shards() {
            self.owed.drop_expired_of(shard, self.local.clock().now());
            // A store of one part that fails takes nothing from anybody.
            while !pass.failed.contains(&Part::WHOLE) {
                let now = self.local.clock().now();
                let claims = self.owed.claim_due(shard, number, MAX_CHARGES, now);
                if claims.debts.is_empty() {
                    break;
                }
                // Parts fail apart: one that is away keeps nobody from paying to another.
                for (part, mut group) in claims.by_part(|debt| self.store.part(&debt.charge())) {
                    if pass.failed.contains(&part) {
                        continue;
                    }
                    for claim in &mut group.debts {
                        claim.debt.units = self.still_counting(&claim.debt);
                    }
                    // The counts of one node of a cluster are in many places, and one call to several of them may be done in
                    // part. So there each pays for itself.
                    let at_once = if part == Part::WHOLE { MAX_CHARGES } else { 1 };
                    for some in group.debts.chunks_mut(at_once) {
                        match self.pay(some, now).await {
                            Ok(units) => pass.repaid += units,
                            Err(error) => {
                                some.iter_mut().for_each(|claim| claim.debt.in_doubt |= may_have_run(&error));
                                pass.failed.push(part);
                                break;
                            }
                        }
                    }
                }
                // Where nothing has to be waited for, others want to run, too.
                yield_now().await;
            }
        }
        self.counters.repaid.fetch_add(pass.repaid, Ordering::Relaxed);
        pass
    }

    /// Takes what fits, and leaves in each debt what did not.
    async fn pay(&self, claims: &mut [Claim], now: u64) -> Result<u64, StoreError> {
        let owing = claims.iter_mut().map(|claim| &mut claim.debt).filter(|debt| debt.units > 0);
        let mut debts: Vec<&mut Debt> = owing.collect();
        if debts.is_empty() {
            return Ok(0);
        }
        // A take does not tell how much it took, so a look comes first. Who takes in between makes us charge too little by as
        // much: a little, once.
        let looks: Vec<Charge<'_>> = debts.iter().map(|debt| debt.charge().cost(0)).collect();
        let rooms = self.store.decide_all(Action::Take, &looks).await?;
        let payments: Vec<u64> = debts.iter().zip(&rooms).map(|(debt, room)| debt.units.min(room.remaining)).collect();
        let takes = debts.iter().zip(&payments).map(|(debt, units)| debt.charge().cost(*units));
        let takes: Vec<Charge<'_>> = takes.filter(|charge| charge.units() > 0).collect();
        if !takes.is_empty() {
            self.store.decide_all(Action::Take, &takes).await?;
        }
        for (debt, units) in debts.iter_mut().zip(&payments) {
            debt.units -= units;
            debt.in_doubt = false;
            // The store has no room for the rest now, and gets some as its window goes on.
            debt.not_before = now.saturating_add((debt.quota.window_micros() / 10).clamp(100_000, 10_000_000));
        }
        Ok(payments.iter().sum())
    }
}

/// Lets the next repayment begin, even if this one is dropped in its course.
struct Done<'a, S>(&'a Inner<S>);

impl<S> Drop for Done<'_, S> {
    fn drop(&mut self) {
        self.0.trouble.repaying.store(false, Ordering::Release);
    }
}
