//! Decides [`CrossSlotGroups`]: charges together that no single call can decide.
//!
//! An acquire is decided group by group: groups of one node concurrently, nodes in order. If one
//! group denies, or the caller is cancelled, the groups that were already charged are refunded
//! (compensation). Until the refund has run, other requests may be denied needlessly; a limit is
//! never exceeded.

use std::pin::Pin;
use std::time::Duration;

use tokio::sync::oneshot::Sender;

use super::groups::CrossSlotGroups;
use crate::algorithm::RawDecision;
use crate::charge::Charge;
use crate::clock::Timestamp;
use crate::decision::{Decision, Source};
use crate::join::join_all;
use crate::store::{Action, StoreError};

/// Decisions of each group.
pub(crate) type GroupDecisions = Result<Vec<Vec<Decision>>, StoreError>;

/// Refund in progress; resolves to the decisions after it, or `None` if they are unknown.
pub(crate) type PendingRefund = Pin<Box<dyn Future<Output = Option<Vec<Decision>>> + Send>>;

/// Action on one group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GroupAction {
    /// The action that the caller asked for.
    Apply(Action),
    /// An acquire that another group has already denied: it spends nothing, but quotas with
    /// `count_denied` record it.
    CountDenied,
    /// Read of the current state, without a hypothetical spend.
    ReadUnspent,
}

/// Decides all groups concurrently, with an action other than an acquire: no group depends on
/// another.
pub(crate) async fn decide_each(groups: &CrossSlotGroups<'_>, action: Action) -> GroupDecisions {
    let all: Vec<usize> = (0..groups.count()).collect();
    let mut decided = Vec::with_capacity(all.len());
    let mut failure: Option<StoreError> = None;
    for (_, answer) in decide_together(groups, &all, GroupAction::Apply(action)).await {
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
        show_unspent(groups, &mut decided).await;
    }
    Ok(decided)
}

/// Acquires all groups, stage by stage, and sends the decisions of each group to the caller. If the
/// caller has gone, what was charged is refunded, so this must run in a task of its own.
pub(crate) async fn acquire_in_order(groups: &CrossSlotGroups<'_>, caller: Sender<GroupDecisions>) {
    let (stages, mut decided) = (groups.stages(), vec![Vec::new(); groups.count()]);
    let mut spent: Vec<SpentGroup> = Vec::new();
    for (index, stage) in stages.iter().enumerate() {
        if caller.is_closed() {
            break;
        }
        let asked_at = groups.now();
        let (mut failure, mut denied) = (None, false);
        let apply = GroupAction::Apply(Action::Acquire);
        for (group, answer) in decide_together(groups, stage, apply).await {
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
                    decided[group] = untouched_decisions(groups.charges(group));
                    failure = Some(error);
                }
            }
        }
        if denied {
            // One denial decides the request, even if another group of this stage has failed.
            refund_all(groups, spent, &mut decided).await;
            for later in &stages[index + 1..] {
                for (group, answer) in
                    decide_together(groups, later, GroupAction::CountDenied).await
                {
                    decided[group] =
                        answer.unwrap_or_else(|_| untouched_decisions(groups.charges(group)));
                }
            }
            // A caller that has gone does not need the denial.
            let _ = caller.send(Ok(decided));
            return;
        }
        if let Some(error) = failure {
            refund_all(groups, spent, &mut decided).await;
            let _ = caller.send(Err(as_undone(error)));
            return;
        }
    }
    if caller.send(Ok(decided)).is_err() {
        drop(start_refunds(groups, spent));
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

/// Decides groups concurrently, and returns the answer of each.
async fn decide_together(
    groups: &CrossSlotGroups<'_>,
    stage: &[usize],
    action: GroupAction,
) -> Vec<(usize, Result<Vec<Decision>, StoreError>)> {
    let answers = join_all(stage.iter().map(|group| groups.decide(*group, action))).await;
    stage.iter().copied().zip(answers).collect()
}

fn all_allowed(decisions: &[Decision]) -> bool {
    decisions.iter().all(|decision| decision.allowed)
}

/// Replaces the decisions of groups that allow a peek which another group denies. Their peek shows
/// the state after a spend that would not happen, so the state without it is read.
async fn show_unspent(groups: &CrossSlotGroups<'_>, decided: &mut [Vec<Decision>]) {
    let allowed: Vec<usize> =
        (0..groups.count()).filter(|group| all_allowed(&decided[*group])).collect();
    for (group, answer) in decide_together(groups, &allowed, GroupAction::ReadUnspent).await {
        match answer {
            Ok(decisions) => decided[group] = decisions,
            Err(_) => restore_unspent(groups.charges(group), &mut decided[group]),
        }
    }
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

/// Group whose charges were spent.
struct SpentGroup {
    group: usize,
    /// Time of the store's clock before the group was decided.
    asked_at: Timestamp,
    decisions: Vec<Decision>,
}

/// Starts the refunds of these groups. Returns for each its group and the indices of the refunded
/// charges.
fn start_refunds(
    groups: &CrossSlotGroups<'_>,
    spent: Vec<SpentGroup>,
) -> Vec<(usize, Vec<usize>, PendingRefund)> {
    let start = |spent: SpentGroup| {
        let now = groups.now();
        let decided = groups.charges(spent.group).iter().zip(&spent.decisions).enumerate();
        let refunds = decided.filter_map(|(index, (charge, decision))| {
            charge.to_refund(decision, spent.asked_at, now).map(|refund| (index, refund))
        });
        let (members, charges): (Vec<usize>, Vec<Charge<'_>>) = refunds.unzip();
        (!charges.is_empty()).then(|| (spent.group, members, groups.refund(&charges)))
    };
    spent.into_iter().filter_map(start).collect()
}

/// Refunds groups and updates their decisions. A refund that fails is not retried: it may have run,
/// and a second one would return units that others have spent.
async fn refund_all(
    groups: &CrossSlotGroups<'_>,
    spent: Vec<SpentGroup>,
    decided: &mut [Vec<Decision>],
) {
    for (group, members, refund) in start_refunds(groups, spent) {
        for (member, decision) in members.into_iter().zip(refund.await.into_iter().flatten()) {
            decided[group][member] = decision;
        }
    }
}
