//! Decides [`CrossSlotGroups`]: charges together that no single call can decide.
//!
//! An acquire is decided group by group: groups of one node concurrently, nodes in order. If one
//! group denies, the groups that were already charged are refunded (compensation). Until the refund
//! has run, other requests may be denied needlessly; a limit is never exceeded.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

use super::groups::CrossSlotGroups;
use crate::algorithm::RawDecision;
use crate::charge::Charge;
use crate::clock::Timestamp;
use crate::decision::{Decision, Source};
use crate::store::{Action, StoreError};

/// Refund in progress; resolves to the decisions after it, or `None` if they are unknown.
pub(super) type PendingRefund = Pin<Box<dyn Future<Output = Option<Vec<Decision>>> + Send>>;

/// Action on one group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum GroupAction {
    /// The action that the caller asked for.
    Apply(Action),
    /// An acquire that another group has already denied: it spends nothing, but quotas with
    /// `count_denied` record it.
    CountDenied,
    /// Read of the current state, without a hypothetical spend.
    ReadUnspent,
}

/// Decides all groups, stage by stage. Returns the decisions of each group.
pub(super) async fn decide_in_order(
    groups: &CrossSlotGroups<'_>,
    action: Action,
) -> Result<Vec<Vec<Decision>>, StoreError> {
    if action == Action::Acquire {
        return acquire_in_order(groups).await;
    }
    // No group depends on another.
    let all: Vec<usize> = (0..groups.count()).collect();
    let mut decided = vec![Vec::new(); all.len()];
    let mut failure = None;
    decide_together(groups, &all, GroupAction::Apply(action), |group, answer| match answer {
        Ok(decisions) => decided[group] = decisions,
        Err(error) => failure = Some(error),
    })
    .await;
    if let Some(error) = failure {
        return Err(error);
    }
    if action == Action::Peek && !decided.iter().all(|decisions| all_allowed(decisions)) {
        show_unspent(groups, &mut decided).await;
    }
    Ok(decided)
}

async fn acquire_in_order(groups: &CrossSlotGroups<'_>) -> Result<Vec<Vec<Decision>>, StoreError> {
    let (stages, mut decided) = (groups.stages(), vec![Vec::new(); groups.count()]);
    // Refunds every group in `spent` on drop, too: after an error, or if the caller is cancelled.
    let mut compensation = Compensation { groups, spent: Vec::new() };
    for (index, stage) in stages.iter().enumerate() {
        let asked_at = groups.now();
        let (mut failure, mut denied) = (None, false);
        decide_together(groups, stage, GroupAction::Apply(Action::Acquire), |group, answer| {
            match answer {
                Ok(decisions) => {
                    if all_allowed(&decisions) {
                        let spent = SpentGroup { group, asked_at, decisions: decisions.clone() };
                        compensation.spent.push(spent);
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
        })
        .await;
        if denied {
            // One denial decides the request, even if another group of this stage has failed.
            compensation.refund_all(&mut decided).await;
            for later in &stages[index + 1..] {
                decide_together(groups, later, GroupAction::CountDenied, |group, answer| {
                    decided[group] =
                        answer.unwrap_or_else(|_| untouched_decisions(groups.charges(group)));
                })
                .await;
            }
            return Ok(decided);
        }
        if let Some(error) = failure {
            compensation.refund_all(&mut decided).await;
            return Err(error);
        }
    }
    compensation.spent.clear();
    Ok(decided)
}

/// Decides groups concurrently. Each answer is passed on as soon as it arrives, so that the answers
/// of a cancelled call are known to its compensation.
async fn decide_together(
    groups: &CrossSlotGroups<'_>,
    stage: &[usize],
    action: GroupAction,
    mut on_answer: impl FnMut(usize, Result<Vec<Decision>, StoreError>),
) {
    if let [group] = stage {
        return on_answer(*group, groups.decide(*group, action).await);
    }
    let mut calls: Vec<_> =
        stage.iter().map(|group| Some((*group, Box::pin(groups.decide(*group, action))))).collect();
    poll_fn(|context| {
        for entry in &mut calls {
            if let Some((group, call)) = entry
                && let Poll::Ready(answer) = call.as_mut().poll(context)
            {
                on_answer(*group, answer);
                *entry = None;
            }
        }
        if calls.iter().all(Option::is_none) { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

fn all_allowed(decisions: &[Decision]) -> bool {
    decisions.iter().all(|decision| decision.allowed)
}

/// Replaces the decisions of groups that allow a peek which another group denies. Their peek shows
/// the state after a spend that would not happen, so the state without it is read.
async fn show_unspent(groups: &CrossSlotGroups<'_>, decided: &mut [Vec<Decision>]) {
    let allowed: Vec<usize> =
        (0..groups.count()).filter(|group| all_allowed(&decided[*group])).collect();
    decide_together(groups, &allowed, GroupAction::ReadUnspent, |group, answer| match answer {
        Ok(decisions) => decided[group] = decisions,
        Err(_) => restore_unspent(groups.charges(group), &mut decided[group]),
    })
    .await;
}

/// Returns the decisions for charges whose state is unknown: those of unused counts. They are only
/// shown beside the denial of another group.
fn untouched_decisions(charges: &[Charge<'_>]) -> Vec<Decision> {
    let untouched = |charge: &Charge<'_>| {
        RawDecision::untouched(charge.quota()).into_decision(charge.quota(), Source::Store)
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

/// Refunds the groups that were charged, on demand or on drop.
struct Compensation<'a> {
    groups: &'a CrossSlotGroups<'a>,
    spent: Vec<SpentGroup>,
}

/// Group whose charges were spent.
struct SpentGroup {
    group: usize,
    /// Time of the store's clock before the group was decided.
    asked_at: Timestamp,
    decisions: Vec<Decision>,
}

impl Compensation<'_> {
    /// Starts all refunds. Returns for each its group and the indices of the refunded charges.
    fn start_refunds(&mut self) -> Vec<(usize, Vec<usize>, PendingRefund)> {
        let groups = self.groups;
        let start = |spent: SpentGroup| {
            let now = groups.now();
            let decided = groups.charges(spent.group).iter().zip(&spent.decisions).enumerate();
            let refunds = decided.filter_map(|(index, (charge, decision))| {
                charge.to_refund(decision, spent.asked_at, now).map(|refund| (index, refund))
            });
            let (members, charges): (Vec<usize>, Vec<Charge<'_>>) = refunds.unzip();
            (!charges.is_empty()).then(|| (spent.group, members, groups.refund(&charges)))
        };
        self.spent.drain(..).filter_map(start).collect()
    }

    /// Refunds all spent groups and updates their decisions. A refund that fails is not retried: it
    /// may have run, and a second one would return units that others have spent.
    async fn refund_all(&mut self, decided: &mut [Vec<Decision>]) {
        for (group, members, refund) in self.start_refunds() {
            for (member, decision) in members.into_iter().zip(refund.await.into_iter().flatten()) {
                decided[group][member] = decision;
            }
        }
    }
}

impl Drop for Compensation<'_> {
    fn drop(&mut self) {
        drop(self.start_refunds());
    }
}
