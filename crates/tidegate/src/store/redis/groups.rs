//! Several charges in one call: at once where they live in one place, else group by group.

use std::sync::Arc;
use std::time::Instant;

use tokio::time::timeout_at;

use super::Shared;
use super::call::Setback;
use super::news::PendingInvalidation;
use super::requests::{Request, Verb, Verdicts};
use crate::algorithm::RawDecision;
use crate::charge::Charge;
use crate::clock::Timestamp;
use crate::decision::{Decision, Source};
use crate::store::in_order::{
    Groups, Owned, Refund, Step, group_by, in_order, in_places, without_cost,
};
use crate::store::{Action, StoreError};

/// Charges that live apart.
struct Apart<'a> {
    shared: &'a Arc<Shared>,
    started: Instant,
    groups: Vec<Vec<Charge<'a>>>,
    /// The groups that are asked at the same time.
    stages: Vec<Vec<usize>>,
}

pub(super) async fn decide_all(
    shared: &Arc<Shared>,
    action: Action,
    charges: &[Charge<'_>],
    started: Instant,
) -> Result<Vec<Decision>, StoreError> {
    let by_slot = || Some(group_by(charges, Shared::slot)).filter(|groups| groups.len() > 1);
    if shared.topology.known().is_cluster()
        && let Some(groups) = by_slot()
    {
        let stages = stages_by_node(shared, charges, &groups);
        return Box::pin(apart(shared, action, charges, groups, stages, started)).await;
    }
    match shared.decide(&Request { verb: Verb::Do(action), charges }, started).await {
        Ok(verdicts) => Ok(dress(verdicts, charges)),
        Err(Setback::Failed(error)) => Err(error),
        Err(Setback::Apart) => {
            // This was a cluster, and we did not know; or a slot is migrating, with a part of its
            // keys.
            let one_by_one = || (0..charges.len()).map(|at| vec![at]).collect();
            let groups: Vec<Vec<usize>> = by_slot().unwrap_or_else(one_by_one);
            let stages = (0..groups.len()).map(|group| vec![group]).collect();
            Box::pin(apart(shared, action, charges, groups, stages, started)).await
        }
    }
}

/// Slots of one node are asked at the same time, and so go in one pipeline.
fn stages_by_node(
    shared: &Shared,
    charges: &[Charge<'_>],
    groups: &[Vec<usize>],
) -> Vec<Vec<usize>> {
    let firsts: Vec<Charge<'_>> =
        groups.iter().filter_map(|group| group.first().map(|at| charges[*at])).collect();
    group_by(&firsts, |charge| shared.part(charge))
}

async fn apart(
    shared: &Arc<Shared>,
    action: Action,
    charges: &[Charge<'_>],
    groups: Vec<Vec<usize>>,
    stages: Vec<Vec<usize>>,
    started: Instant,
) -> Result<Vec<Decision>, StoreError> {
    let members =
        groups.iter().map(|group| group.iter().map(|at| charges[*at]).collect()).collect();
    let decided = in_order(&Apart { shared, started, groups: members, stages }, action).await?;
    Ok(in_places(groups, decided))
}

fn dress(verdicts: Verdicts, charges: &[Charge<'_>]) -> Vec<Decision> {
    let dress = |(verdict, charge): (RawDecision, &Charge<'_>)| {
        verdict.into_decision(charge.quota(), Source::Store)
    };
    verdicts.into_vec().into_iter().zip(charges).map(dress).collect()
}

impl Groups for Apart<'_> {
    fn count(&self) -> usize {
        self.groups.len()
    }

    fn charges(&self, group: usize) -> &[Charge<'_>] {
        &self.groups[group]
    }

    fn stages(&self) -> Vec<Vec<usize>> {
        self.stages.clone()
    }

    async fn ask(&self, group: usize, step: Step) -> Result<Vec<Decision>, StoreError> {
        let charges = &self.groups[group];
        let unspent = if step == Step::Look { without_cost(charges) } else { Vec::new() };
        let (verb, charges) = match step {
            Step::Do(action) => (Verb::Do(action), charges.as_slice()),
            Step::Forgo => (Verb::Forgo, charges.as_slice()),
            Step::Look => (Verb::Do(Action::ChargeUpTo), unspent.as_slice()),
        };
        let verdicts = self.shared.decide(&Request { verb, charges }, self.started).await;
        Ok(dress(verdicts.map_err(Setback::into_store_error)?, charges))
    }

    fn now(&self) -> Timestamp {
        self.shared.now()
    }

    fn refund(&self, charges: &[Charge<'_>]) -> Refund {
        let owned: Vec<Owned> = charges.iter().map(Owned::of).collect();
        let shared = Arc::clone(self.shared);
        let deadline = self.started + shared.timeout;
        // It has a timeout of its own. Without a runtime nothing can be sent any more.
        let task = tokio::runtime::Handle::try_current().ok().map(|runtime| {
            runtime.spawn(async move {
                let charges: Vec<Charge<'_>> = owned.iter().map(Owned::charge).collect();
                let request = Request { verb: Verb::Do(Action::Refund), charges: &charges };
                // Published when this task ends.
                let _invalidation = PendingInvalidation::of(&shared, Action::Refund, &charges);
                match shared
                    .decide(&request, Instant::now())
                    .await
                    .map_err(Setback::into_store_error)
                {
                    Ok(verdicts) => Some(dress(verdicts, &charges)),
                    Err(error) => {
                        tracing::debug!(%error, "units may not have been given back");
                        None
                    }
                }
            })
        });
        Box::pin(async move { timeout_at(deadline.into(), task?).await.ok()?.ok()? })
    }
}
