//! Decides charges together that no single call can decide, such as keys in several cluster slots.
//!
//! An acquire is decided group by group: groups of one node concurrently, nodes in order. If one
//! group denies, the groups that were already charged are refunded (compensation). Until the refund
//! has run, other requests may be denied needlessly; a limit is never exceeded.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

use crate::algorithm::RawDecision;
use crate::charge::Charge;
use crate::clock::Timestamp;
use crate::decision::{Decision, Source};
use crate::quota::Quota;
use crate::store::{Action, StoreError};

/// Refund in progress; resolves to the decisions after it, or `None` if they are unknown.
pub(crate) type PendingRefund = Pin<Box<dyn Future<Output = Option<Vec<Decision>>> + Send>>;

/// Groups of charges, each of which the store decides atomically.
pub(crate) trait Groups: Sync {
    /// Returns the number of groups.
    fn count(&self) -> usize;

    /// Returns the charges of one group.
    fn charges(&self, group: usize) -> &[Charge<'_>];

    /// Decides one group. Returns one decision per charge.
    fn decide(
        &self,
        group: usize,
        action: GroupAction,
    ) -> impl Future<Output = Result<Vec<Decision>, StoreError>> + Send;

    /// Returns the groups in stages, for an acquire: groups of one stage are decided concurrently,
    /// stages one after the other, so that a denial spends nothing in the later ones.
    fn stages(&self) -> Vec<Vec<usize>>;

    /// Starts to refund these charges of one group. The refund continues even if the returned
    /// future is dropped, because the caller may have been cancelled or timed out.
    fn refund(&self, charges: &[Charge<'_>]) -> PendingRefund;

    /// Returns the time of the store's clock.
    fn now(&self) -> Timestamp;
}

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

/// Copy of a charge that does not borrow from the caller.
#[derive(Debug)]
pub(crate) struct OwnedCharge {
    key: String,
    policy: String,
    quota: Quota,
    cost: u64,
    charged_at: Timestamp,
}

impl OwnedCharge {
    pub(crate) fn of(charge: &Charge<'_>) -> Self {
        Self {
            key: charge.key().to_owned(),
            policy: charge.policy().to_owned(),
            quota: charge.quota().clone(),
            cost: charge.cost(),
            charged_at: charge.charged_at(),
        }
    }

    pub(crate) fn charge(&self) -> Charge<'_> {
        Charge::new(&self.key, &self.quota)
            .with_policy(&self.policy)
            .with_cost(self.cost)
            .with_charged_at(self.charged_at)
    }
}

/// Groups charges by a key. Returns the indices of each group's charges, groups in the order of
/// their first charge.
pub(crate) fn group_by<K: PartialEq>(
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
pub(crate) fn scatter(groups: Vec<Vec<usize>>, decided: Vec<Vec<Decision>>) -> Vec<Decision> {
    let mut indexed: Vec<(usize, Decision)> =
        groups.into_iter().flatten().zip(decided.into_iter().flatten()).collect();
    indexed.sort_unstable_by_key(|(index, _)| *index);
    indexed.into_iter().map(|(_, decision)| decision).collect()
}

/// Decides all groups, stage by stage. Returns the decisions of each group.
pub(crate) async fn decide_in_order<G: Groups>(
    groups: &G,
    action: Action,
) -> Result<Vec<Vec<Decision>>, StoreError> {
    if action == Action::Acquire {
        return acquire_in_order(groups, &groups.stages()).await;
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

async fn acquire_in_order<G: Groups>(
    groups: &G,
    stages: &[Vec<usize>],
) -> Result<Vec<Vec<Decision>>, StoreError> {
    let mut decided = vec![Vec::new(); groups.count()];
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
async fn decide_together<G: Groups>(
    groups: &G,
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
async fn show_unspent<G: Groups>(groups: &G, decided: &mut [Vec<Decision>]) {
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

/// Returns the same charges with a cost of 0, with which [`Action::ChargeUpTo`] only reads.
pub(crate) fn without_cost<'a>(charges: &[Charge<'a>]) -> Vec<Charge<'a>> {
    charges.iter().map(|charge| charge.with_cost(0)).collect()
}

/// Refunds the groups that were charged, on demand or on drop.
struct Compensation<'a, G: Groups> {
    groups: &'a G,
    spent: Vec<SpentGroup>,
}

/// Group whose charges were spent.
struct SpentGroup {
    group: usize,
    /// Time of the store's clock before the group was decided.
    asked_at: Timestamp,
    decisions: Vec<Decision>,
}

impl<G: Groups> Compensation<'_, G> {
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

impl<G: Groups> Drop for Compensation<'_, G> {
    fn drop(&mut self) {
        drop(self.start_refunds());
    }
}
