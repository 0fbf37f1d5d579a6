//! Decides several charges: atomically if one node has all of their keys and may decide them in one
//! call, else slot by slot.
//!
//! Slot by slot, an acquire is decided group by group: groups of one node concurrently, nodes in
//! order. If one group denies, or the caller is cancelled, the groups that were already charged are
//! refunded (compensation). Until the refund has run, other requests may be denied needlessly; a
//! limit is never exceeded.

use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;
use tokio::time::timeout_at;

use super::SHUTTING_DOWN;
use super::dispatch::Dispatcher;
use crate::algorithm::RawDecision;
use crate::charge::{Charge, OwnedCharge};
use crate::clock::Timestamp;
use crate::decision::{Decision, Source};
use crate::join::join_all;
use crate::store::redis::coordination::invalidation::{PendingInvalidation, Publisher};
use crate::store::redis::routing::slots::slot_of_charge;
use crate::store::redis::routing::step::{CallError, Delivery};
use crate::store::redis::script::requests::{Operation, Request};
use crate::store::{Action, StoreError};

/// Charges of several slots, grouped by slot.
struct CrossSlotGroups<'a> {
    dispatcher: &'a Arc<Dispatcher>,
    publisher: &'a Arc<Publisher>,
    started: Instant,
    groups: Vec<Vec<Charge<'a>>>,
    /// Groups of one stage are decided concurrently, stages one after the other, so that a denial
    /// spends nothing in the later ones.
    stages: Vec<Vec<usize>>,
}

/// Decisions of each group.
type GroupDecisions = Result<Vec<Vec<Decision>>, StoreError>;

/// Refund in progress; resolves to the decisions after it, or `None` if they are unknown.
type PendingRefund = Pin<Box<dyn Future<Output = Option<Vec<Decision>>> + Send>>;

/// Group whose charges were spent.
struct SpentGroup {
    group: usize,
    /// Time of the store's clock before the group was decided.
    asked_at: Timestamp,
    decisions: Vec<Decision>,
}

/// Decides the charges of one caller.
pub(crate) async fn decide_all(
    dispatcher: &Arc<Dispatcher>,
    publisher: &Arc<Publisher>,
    action: Action,
    charges: &[Charge<'_>],
    started: Instant,
) -> Result<Vec<Decision>, StoreError> {
    let by_slot = || Some(group_by(charges, slot_of_charge)).filter(|groups| groups.len() > 1);
    let topology = dispatcher.topology();
    let mut cross_slot = None;
    let mut delivery = Some(Delivery::Shared);
    let node = || topology.route(slot_of_charge(&charges[0]));
    let splits_slots = || node().is_ok_and(|node| dispatcher.splits_slots(&node));
    if charges.len() > 1
        && splits_slots()
        && let Some(groups) = by_slot()
    {
        let stages = stages_by_node(dispatcher, charges, &groups);
        let node = node();
        let may_span = stages.len() == 1 && node.is_ok_and(|node| dispatcher.crosses_slots(&node));
        delivery = may_span.then_some(Delivery::Spanning);
        cross_slot = Some((groups, stages));
    }
    if let Some(delivery) = delivery {
        let request = Request::new(Operation::Apply(action), charges);
        match dispatcher.decide(&request, started, delivery).await {
            Ok(decided) => return Ok(decided.into_vec()),
            Err(CallError::Failed(error)) => return Err(error),
            // A slot is migrating and its keys are on two nodes, the node does not allow it, or the
            // server refuses keys of several slots, which was not known yet.
            Err(CallError::CrossSlot) => {}
        }
    }
    let (groups, stages) = cross_slot.unwrap_or_else(|| {
        let one_by_one = || (0..charges.len()).map(|index| vec![index]).collect();
        let groups: Vec<Vec<usize>> = by_slot().unwrap_or_else(one_by_one);
        let stages = (0..groups.len()).map(|group| vec![group]).collect();
        (groups, stages)
    });
    let decided = if action == Action::Acquire {
        // In a task, so that the compensation runs even if this caller is cancelled.
        let owned: Vec<OwnedCharge> = charges.iter().map(OwnedCharge::of).collect();
        let (caller, decided) = oneshot::channel();
        let (task_dispatcher, publisher) = (Arc::clone(dispatcher), Arc::clone(publisher));
        let indices = groups.clone();
        dispatcher.runtime.spawn(async move {
            let charges: Vec<Charge<'_>> = owned.iter().map(OwnedCharge::charge).collect();
            let groups = members(&charges, &indices);
            let dispatcher = &task_dispatcher;
            let groups =
                CrossSlotGroups { dispatcher, publisher: &publisher, started, groups, stages };
            groups.acquire_in_order(caller).await;
        });
        let shutting_down = |_| StoreError::Unreachable(SHUTTING_DOWN.to_owned()).answer_lost();
        decided.await.map_err(shutting_down)?
    } else {
        let members = members(charges, &groups);
        let groups = CrossSlotGroups { dispatcher, publisher, started, groups: members, stages };
        Box::pin(groups.decide_each(action)).await
    };
    Ok(scatter(groups, decided?))
}

/// Puts the groups of one node in one stage, so that they share a pipeline.
fn stages_by_node(
    dispatcher: &Dispatcher,
    charges: &[Charge<'_>],
    groups: &[Vec<usize>],
) -> Vec<Vec<usize>> {
    let first_charges: Vec<Charge<'_>> =
        groups.iter().filter_map(|group| group.first().map(|index| charges[*index])).collect();
    let node = |charge: &Charge<'_>| dispatcher.topology().route(slot_of_charge(charge)).ok();
    group_by(&first_charges, |charge| node(charge).map(|node| Arc::as_ptr(&node).addr()))
}

impl CrossSlotGroups<'_> {
    /// Decides all groups concurrently, with an action other than an acquire: no group depends on
    /// another.
    async fn decide_each(&self, action: Action) -> GroupDecisions {
        let all: Vec<usize> = (0..self.groups.len()).collect();
        let mut decided = Vec::with_capacity(all.len());
        let mut failure: Option<StoreError> = None;
        for (_, answer) in self.decide_together(&all, Operation::Apply(action)).await {
            match answer {
                Ok(decisions) => decided.push(decisions),
                // Of several errors, one that forbids a retry.
                Err(error) if error.may_have_run() => failure = Some(error),
                Err(error) => failure = failure.or(Some(error)),
            }
        }
        if let Some(error) = failure {
            // Groups that succeeded must not be repeated with the one that failed.
            let ran = action != Action::Peek && !decided.is_empty() && !error.may_have_run();
            return Err(if ran { error.answer_lost() } else { error });
        }
        if action == Action::Peek && !decided.iter().all(|decisions| all_allowed(decisions)) {
            self.show_unspent(&mut decided).await;
        }
        Ok(decided)
    }

    /// Acquires all groups, stage by stage, and sends the decisions of each group to the caller. If
    /// the caller has gone, what was charged is refunded, so this must run in a task of its own.
    async fn acquire_in_order(&self, caller: oneshot::Sender<GroupDecisions>) {
        let mut decided = vec![Vec::new(); self.groups.len()];
        let mut spent: Vec<SpentGroup> = Vec::new();
        for (index, stage) in self.stages.iter().enumerate() {
            if caller.is_closed() {
                break;
            }
            let asked_at = self.dispatcher.now();
            let (mut failure, mut denied) = (None, false);
            let acquire = Operation::Apply(Action::Acquire);
            for (group, answer) in self.decide_together(stage, acquire).await {
                match answer {
                    Ok(decisions) => {
                        if all_allowed(&decisions) {
                            let decisions = decisions.clone();
                            spent.push(SpentGroup { group, asked_at, decisions });
                        } else {
                            denied = true;
                        }
                        decided[group] = decisions;
                    }
                    Err(error) => {
                        decided[group] = untouched_decisions(&self.groups[group]);
                        failure = Some(error);
                    }
                }
            }
            if denied {
                // One denial decides the request, even if another group of this stage has failed.
                self.refund_all(spent, &mut decided).await;
                for later in &self.stages[index + 1..] {
                    for (group, answer) in self.decide_together(later, Operation::CountDenied).await
                    {
                        decided[group] =
                            answer.unwrap_or_else(|_| untouched_decisions(&self.groups[group]));
                    }
                }
                // A caller that has gone does not need the denial.
                let _ = caller.send(Ok(decided));
                return;
            }
            if let Some(error) = failure {
                self.refund_all(spent, &mut decided).await;
                let _ = caller.send(Err(as_undone(error)));
                return;
            }
        }
        if caller.send(Ok(decided)).is_err() {
            drop(self.start_refunds(spent));
        }
    }

    /// Decides groups concurrently, and returns the answer of each.
    async fn decide_together(
        &self,
        stage: &[usize],
        operation: Operation,
    ) -> Vec<(usize, Result<Vec<Decision>, StoreError>)> {
        let decide = |group: &usize| self.decide(operation, &self.groups[*group]);
        let answers = join_all(stage.iter().map(decide)).await;
        stage.iter().copied().zip(answers).collect()
    }

    /// Decides the charges of one group. Returns one decision per charge.
    async fn decide(
        &self,
        operation: Operation,
        charges: &[Charge<'_>],
    ) -> Result<Vec<Decision>, StoreError> {
        let request = Request::new(operation, charges);
        let decided = self.dispatcher.decide(&request, self.started, Delivery::Shared).await;
        Ok(decided.map_err(CallError::into_store_error)?.into_vec())
    }

    /// Replaces the decisions of groups that allow a peek which another group denies. Their peek
    /// shows the state after a spend that would not happen, so the state without it is read.
    async fn show_unspent(&self, decided: &mut [Vec<Decision>]) {
        let allowed: Vec<usize> =
            (0..self.groups.len()).filter(|group| all_allowed(&decided[*group])).collect();
        // With a cost of 0, this action only reads.
        let read = Operation::Apply(Action::ChargeUpTo);
        let free = |group: &usize| self.groups[*group].iter().map(|charge| charge.with_cost(0));
        let free: Vec<Vec<Charge<'_>>> =
            allowed.iter().map(|group| free(group).collect()).collect();
        let answers = join_all(free.iter().map(|charges| self.decide(read, charges))).await;
        for (group, answer) in allowed.into_iter().zip(answers) {
            match answer {
                Ok(decisions) => decided[group] = decisions,
                Err(_) => restore_unspent(&self.groups[group], &mut decided[group]),
            }
        }
    }

    /// Starts to refund these charges of one group. The refund continues even if the returned
    /// future is dropped, because the caller may have been cancelled or timed out.
    fn refund(&self, charges: &[Charge<'_>]) -> PendingRefund {
        let owned: Vec<OwnedCharge> = charges.iter().map(OwnedCharge::of).collect();
        let (dispatcher, publisher) = (Arc::clone(self.dispatcher), Arc::clone(self.publisher));
        let deadline = self.started + dispatcher.timeout;
        // The refund has its own timeout, so that it can outlast the caller.
        let task = self.dispatcher.runtime.spawn(async move {
            let charges: Vec<Charge<'_>> = owned.iter().map(OwnedCharge::charge).collect();
            let request = Request::new(Operation::Apply(Action::Refund), &charges);
            // Published when this task ends.
            let _invalidation = PendingInvalidation::of(&publisher, Action::Refund, &charges);
            let decided = dispatcher.decide(&request, Instant::now(), Delivery::Shared).await;
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

    /// Starts the refunds of these groups. Returns for each its group and the indices of the
    /// refunded charges.
    fn start_refunds(&self, spent: Vec<SpentGroup>) -> Vec<(usize, Vec<usize>, PendingRefund)> {
        let start = |spent: SpentGroup| {
            let now = self.dispatcher.now();
            let decided = self.groups[spent.group].iter().zip(&spent.decisions).enumerate();
            let refunds = decided.filter_map(|(index, (charge, decision))| {
                charge.to_refund(decision, spent.asked_at, now).map(|refund| (index, refund))
            });
            let (members, charges): (Vec<usize>, Vec<Charge<'_>>) = refunds.unzip();
            (!charges.is_empty()).then(|| (spent.group, members, self.refund(&charges)))
        };
        spent.into_iter().filter_map(start).collect()
    }

    /// Refunds groups and updates their decisions. A refund that fails is not retried: it may have
    /// run, and a second one would return units that others have spent.
    async fn refund_all(&self, spent: Vec<SpentGroup>, decided: &mut [Vec<Decision>]) {
        for (group, members, refund) in self.start_refunds(spent) {
            for (member, decision) in members.into_iter().zip(refund.await.into_iter().flatten()) {
                decided[group][member] = decision;
            }
        }
    }
}

/// Returns the error of a request whose other groups are refunded: as a whole it was not made. A
/// group whose answer was lost may stay charged, which denies early but never admits more.
fn as_undone(error: StoreError) -> StoreError {
    match error {
        StoreError::AnswerLost(reason) => StoreError::clone(&reason),
        error => error,
    }
}

fn all_allowed(decisions: &[Decision]) -> bool {
    decisions.iter().all(|decision| decision.allowed)
}

/// Returns the decisions for charges whose state is unknown: those of unused counts. They are only
/// shown beside the denial of another group.
fn untouched_decisions(charges: &[Charge<'_>]) -> Vec<Decision> {
    let untouched = |charge: &Charge<'_>| {
        RawDecision::untouched(charge.quota().burst())
            .into_decision(charge.quota().burst(), Source::Store)
    };
    charges.iter().map(untouched).collect()
}

/// Undoes the hypothetical spend in peeked decisions without the store; `reset_after` cannot be
/// corrected this way. A group that denies has nothing to undo.
fn restore_unspent(charges: &[Charge<'_>], decisions: &mut [Decision]) {
    if all_allowed(decisions) {
        for (charge, decision) in charges.iter().zip(decisions) {
            decision.remaining += charge.cost();
            decision.delay = Duration::ZERO;
        }
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

/// Returns the charges of each group.
fn members<'a>(charges: &[Charge<'a>], groups: &[Vec<usize>]) -> Vec<Vec<Charge<'a>>> {
    let members = |group: &Vec<usize>| group.iter().map(|index| charges[*index]).collect();
    groups.iter().map(members).collect()
}
