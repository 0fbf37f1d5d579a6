//! Decides several charges: atomically if one node has all of their keys and may decide them in one
//! call, else slot by slot.

use std::sync::Arc;
use std::time::Instant;

use tokio::time::timeout_at;

use super::Shared;
use super::invalidation::PendingInvalidation;
use super::requests::{Operation, Request};
use super::step::{CallError, Delivery};
use crate::charge::Charge;
use crate::clock::Timestamp;
use crate::decision::Decision;
use crate::store::compensation::{
    GroupAction, Groups, OwnedCharge, PendingRefund, decide_in_order, group_by, scatter,
    without_cost,
};
use crate::store::{Action, StoreError};

/// Charges of several slots, grouped by slot.
struct CrossSlotGroups<'a> {
    shared: &'a Arc<Shared>,
    started: Instant,
    groups: Vec<Vec<Charge<'a>>>,
    /// Groups that are decided concurrently.
    stages: Vec<Vec<usize>>,
}

/// Decides the charges of one caller.
pub(super) async fn decide_all(
    shared: &Arc<Shared>,
    action: Action,
    charges: &[Charge<'_>],
    started: Instant,
) -> Result<Vec<Decision>, StoreError> {
    let by_slot = || Some(group_by(charges, Shared::slot)).filter(|groups| groups.len() > 1);
    if shared.topology.state().is_cluster()
        && let Some(groups) = by_slot()
    {
        let stages = stages_by_node(shared, charges, &groups);
        if let [_] = stages.as_slice()
            && let Ok(node) = shared.topology.state().route(Shared::slot(&charges[0]))
            && shared.crosses_slots(&node)
        {
            let request = Request::new(Operation::Apply(action), charges);
            match shared.decide(&request, started, Delivery::Spanning).await {
                Ok(decided) => return Ok(decided.into_vec()),
                Err(CallError::Failed(error)) => return Err(error),
                // A slot is moving, or the node does not allow it.
                Err(CallError::CrossSlot) => {}
            }
        }
        return Box::pin(decide_cross_slot(shared, action, charges, groups, stages, started)).await;
    }
    let request = Request::new(Operation::Apply(action), charges);
    match shared.decide(&request, started, Delivery::Shared).await {
        Ok(decided) => Ok(decided.into_vec()),
        Err(CallError::Failed(error)) => Err(error),
        Err(CallError::CrossSlot) => {
            // The server is part of a cluster that was not detected yet, or a slot is migrating and
            // its keys are on two nodes.
            let one_by_one = || (0..charges.len()).map(|index| vec![index]).collect();
            let groups: Vec<Vec<usize>> = by_slot().unwrap_or_else(one_by_one);
            let stages = (0..groups.len()).map(|group| vec![group]).collect();
            Box::pin(decide_cross_slot(shared, action, charges, groups, stages, started)).await
        }
    }
}

/// Puts the groups of one node in one stage, so that they share a pipeline.
fn stages_by_node(
    shared: &Shared,
    charges: &[Charge<'_>],
    groups: &[Vec<usize>],
) -> Vec<Vec<usize>> {
    let first_charges: Vec<Charge<'_>> =
        groups.iter().filter_map(|group| group.first().map(|index| charges[*index])).collect();
    let node = |charge: &Charge<'_>| shared.topology.state().route(Shared::slot(charge)).ok();
    group_by(&first_charges, |charge| node(charge).map(|node| Arc::as_ptr(&node).addr()))
}

async fn decide_cross_slot(
    shared: &Arc<Shared>,
    action: Action,
    charges: &[Charge<'_>],
    groups: Vec<Vec<usize>>,
    stages: Vec<Vec<usize>>,
    started: Instant,
) -> Result<Vec<Decision>, StoreError> {
    let members =
        groups.iter().map(|group| group.iter().map(|index| charges[*index]).collect()).collect();
    let cross_slot = CrossSlotGroups { shared, started, groups: members, stages };
    Ok(scatter(groups, decide_in_order(&cross_slot, action).await?))
}

impl Groups for CrossSlotGroups<'_> {
    fn count(&self) -> usize {
        self.groups.len()
    }

    fn charges(&self, group: usize) -> &[Charge<'_>] {
        &self.groups[group]
    }

    fn stages(&self) -> Vec<Vec<usize>> {
        self.stages.clone()
    }

    async fn decide(&self, group: usize, action: GroupAction) -> Result<Vec<Decision>, StoreError> {
        let charges = &self.groups[group];
        let free_charges;
        let (operation, charges) = match action {
            GroupAction::Apply(action) => (Operation::Apply(action), charges.as_slice()),
            GroupAction::CountDenied => (Operation::CountDenied, charges.as_slice()),
            GroupAction::ReadUnspent => {
                free_charges = without_cost(charges);
                (Operation::Apply(Action::ChargeUpTo), free_charges.as_slice())
            }
        };
        let request = Request::new(operation, charges);
        let decided = self.shared.decide(&request, self.started, Delivery::Shared).await;
        Ok(decided.map_err(CallError::into_store_error)?.into_vec())
    }

    fn now(&self) -> Timestamp {
        self.shared.now()
    }

    fn refund(&self, charges: &[Charge<'_>]) -> PendingRefund {
        let owned: Vec<OwnedCharge> = charges.iter().map(OwnedCharge::of).collect();
        let shared = Arc::clone(self.shared);
        let deadline = self.started + shared.timeout;
        // The refund has its own timeout, so that it can outlast the caller. Without a runtime
        // nothing can be sent any more.
        let task = tokio::runtime::Handle::try_current().ok().map(|runtime| {
            runtime.spawn(async move {
                let charges: Vec<Charge<'_>> = owned.iter().map(OwnedCharge::charge).collect();
                let operation = Operation::Apply(Action::Refund);
                let request = Request::new(operation, &charges);
                // Published when this task ends.
                let _invalidation = PendingInvalidation::of(&shared, Action::Refund, &charges);
                let decided = shared.decide(&request, Instant::now(), Delivery::Shared).await;
                match decided.map_err(CallError::into_store_error) {
                    Ok(decided) => Some(decided.into_vec()),
                    Err(error) => {
                        tracing::debug!(%error, "refund of a denied request failed");
                        None
                    }
                }
            })
        });
        Box::pin(async move { timeout_at(deadline.into(), task?).await.ok()?.ok()? })
    }
}
