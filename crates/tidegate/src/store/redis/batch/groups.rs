//! Decides several charges: atomically if one node has all of their keys and may decide them in one
//! call, else slot by slot.

use std::sync::Arc;
use std::time::Instant;

use tokio::sync::oneshot;
use tokio::time::timeout_at;

use super::SHUTTING_DOWN;
use super::compensation::{
    GroupAction, GroupDecisions, PendingRefund, acquire_in_order, decide_each,
};
use crate::charge::{Charge, OwnedCharge};
use crate::clock::Timestamp;
use crate::decision::Decision;
use crate::store::redis::Shared;
use crate::store::redis::coordination::invalidation::PendingInvalidation;
use crate::store::redis::routing::step::{CallError, Delivery};
use crate::store::redis::script::requests::{Operation, Request};
use crate::store::{Action, StoreError};

/// Charges of several slots, grouped by slot.
pub(crate) struct CrossSlotGroups<'a> {
    shared: &'a Arc<Shared>,
    started: Instant,
    groups: Vec<Vec<Charge<'a>>>,
    /// Groups that are decided concurrently.
    stages: Vec<Vec<usize>>,
}

/// Decides the charges of one caller.
pub(crate) async fn decide_all(
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
    let decided = if action == Action::Acquire {
        // In a task, so that the compensation runs even if this caller is cancelled.
        let (owned, groups) = (charges.iter().map(OwnedCharge::of).collect(), groups.clone());
        let (caller, decided) = oneshot::channel();
        shared.runtime.spawn(acquire_owned(
            Arc::clone(shared),
            owned,
            groups,
            stages,
            started,
            caller,
        ));
        let shutting_down = |_| StoreError::Unreachable(SHUTTING_DOWN.to_owned()).answer_lost();
        decided.await.map_err(shutting_down)?
    } else {
        decide_each(&CrossSlotGroups::new(shared, charges, &groups, stages, started), action).await
    };
    Ok(scatter(groups, decided?))
}

/// Acquires charges that this task owns.
async fn acquire_owned(
    shared: Arc<Shared>,
    owned: Vec<OwnedCharge>,
    groups: Vec<Vec<usize>>,
    stages: Vec<Vec<usize>>,
    started: Instant,
    caller: oneshot::Sender<GroupDecisions>,
) {
    let charges: Vec<Charge<'_>> = owned.iter().map(OwnedCharge::charge).collect();
    let groups = CrossSlotGroups::new(&shared, &charges, &groups, stages, started);
    acquire_in_order(&groups, caller).await;
}

impl<'a> CrossSlotGroups<'a> {
    fn new(
        shared: &'a Arc<Shared>,
        charges: &[Charge<'a>],
        groups: &[Vec<usize>],
        stages: Vec<Vec<usize>>,
        started: Instant,
    ) -> Self {
        let members = |group: &Vec<usize>| group.iter().map(|index| charges[*index]).collect();
        Self { shared, started, groups: groups.iter().map(members).collect(), stages }
    }

    /// Returns the number of groups.
    pub(crate) fn count(&self) -> usize {
        self.groups.len()
    }

    /// Returns the charges of one group.
    pub(crate) fn charges(&self, group: usize) -> &[Charge<'_>] {
        &self.groups[group]
    }

    /// Returns the groups in stages, for an acquire: groups of one stage are decided concurrently,
    /// stages one after the other, so that a denial spends nothing in the later ones.
    pub(crate) fn stages(&self) -> &[Vec<usize>] {
        &self.stages
    }

    /// Decides one group. Returns one decision per charge.
    pub(crate) async fn decide(
        &self,
        group: usize,
        action: GroupAction,
    ) -> Result<Vec<Decision>, StoreError> {
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

    /// Returns the time of the store's clock.
    pub(crate) fn now(&self) -> Timestamp {
        self.shared.now()
    }

    /// Starts to refund these charges of one group. The refund continues even if the returned
    /// future is dropped, because the caller may have been cancelled or timed out.
    pub(crate) fn refund(&self, charges: &[Charge<'_>]) -> PendingRefund {
        let owned: Vec<OwnedCharge> = charges.iter().map(OwnedCharge::of).collect();
        let shared = Arc::clone(self.shared);
        let deadline = self.started + shared.timeout;
        // The refund has its own timeout, so that it can outlast the caller.
        let task = self.shared.runtime.spawn(async move {
            let charges: Vec<Charge<'_>> = owned.iter().map(OwnedCharge::charge).collect();
            let operation = Operation::Apply(Action::Refund);
            let request = Request::new(operation, &charges);
            // Published when this task ends.
            let _invalidation =
                PendingInvalidation::of(&shared.publisher, Action::Refund, &charges);
            let decided = shared.decide(&request, Instant::now(), Delivery::Shared).await;
            match decided.map_err(CallError::into_store_error) {
                Ok(decided) => Some(decided.into_vec()),
                Err(error) => {
                    tracing::debug!(%error, "refund of a denied request failed");
                    None
                }
            }
        });
        Box::pin(async move { timeout_at(deadline.into(), task).await.ok()?.ok()? })
    }
}

/// Groups charges by a key. Returns the indices of each group's charges, groups in the order of
/// their first charge.
fn group_by<K: PartialEq>(
    charges: &[Charge<'_>],
    group_key: impl Fn(&Charge<'_>) -> K,
) -> Vec<Vec<usize>> {
    let mut groups: Vec<(K, Vec<usize>)> = Vec::new();
    for (index, charge) in charges.iter().enumerate() {
        let wanted = group_key(charge);
        match groups.iter_mut().find(|(key, _)| *key == wanted) {
            Some((_, group)) => group.push(index),
            None => groups.push((wanted, vec![index])),
        }
    }
    groups.into_iter().map(|(_, group)| group).collect()
}

/// Returns the decisions of groups made by [`group_by`] in the order of the charges.
fn scatter(groups: Vec<Vec<usize>>, decided: Vec<Vec<Decision>>) -> Vec<Decision> {
    let mut indexed: Vec<(usize, Decision)> =
        groups.into_iter().flatten().zip(decided.into_iter().flatten()).collect();
    indexed.sort_unstable_by_key(|(index, _)| *index);
    indexed.into_iter().map(|(_, decision)| decision).collect()
}

/// Returns the same charges with a cost of 0, with which [`Action::ChargeUpTo`] only reads.
fn without_cost<'a>(charges: &[Charge<'a>]) -> Vec<Charge<'a>> {
    charges.iter().map(|charge| charge.with_cost(0)).collect()
}
