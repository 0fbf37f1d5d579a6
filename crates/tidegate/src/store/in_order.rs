//! Charges that live apart, such as in different slots of a cluster, decided together all the same.
//!
//! No one can look at all of them at once, so they are asked group by group: groups of one node at
//! the same time, nodes in order. If one denies, what the others spent is given back. For a moment
//! this may refuse a little too much; it never admits too much.

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

/// What is left once it was given back.
pub(crate) type Refund = Pin<Box<dyn Future<Output = Option<Vec<Decision>>> + Send>>;

/// Who decides the groups, each by itself all or nothing.
pub(crate) trait Groups: Sync {
    /// How many there are.
    fn count(&self) -> usize;

    /// The charges of one.
    fn charges(&self, group: usize) -> &[Charge<'_>];

    /// Asks one group; a decision for each of its charges.
    fn ask(
        &self,
        group: usize,
        step: Step,
    ) -> impl Future<Output = Result<Vec<Decision>, StoreError>> + Send;

    /// The groups that are asked at the same time, stage by stage. One group per stage by default.
    fn stages(&self) -> Vec<Vec<usize>> {
        (0..self.count()).map(|group| vec![group]).collect()
    }

    /// Begins at once to give back what these charges of a group spent, and goes on even if nobody
    /// waits for it: the caller may have gone, or its time may be up. Brings what is left then, if
    /// it is known in time.
    fn refund(&self, charges: &[Charge<'_>]) -> Refund;

    /// The time by the store's clock.
    fn now(&self) -> Timestamp;
}

/// What a group is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// What the caller wants.
    Do(Action),
    /// As acquire, when another group has denied: what it would say, with nothing spent.
    Forgo,
    /// What is left, with nothing spent.
    Look,
}

/// A charge that outlives its caller.
pub(crate) struct Owned {
    key: String,
    policy: String,
    quota: Quota,
    cost: u64,
    charged_at: Timestamp,
}

impl Owned {
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

/// The positions of those that belong together, in the order in which each group first appears.
pub(crate) fn group_by<K: PartialEq>(
    charges: &[Charge<'_>],
    kind: impl Fn(&Charge<'_>) -> K,
) -> Vec<Vec<usize>> {
    let mut groups: Vec<(K, Vec<usize>)> = Vec::new();
    for (at, charge) in charges.iter().enumerate() {
        let kind = kind(charge);
        match groups.iter_mut().find(|(known, _)| *known == kind) {
            Some((_, group)) => group.push(at),
            None => groups.push((kind, vec![at])),
        }
    }
    groups.into_iter().map(|(_, group)| group).collect()
}

/// The decisions of groups as [`group_by`] made them, in the order of the charges.
pub(crate) fn in_places(groups: Vec<Vec<usize>>, decided: Vec<Vec<Decision>>) -> Vec<Decision> {
    let mut placed: Vec<(usize, Decision)> =
        groups.into_iter().flatten().zip(decided.into_iter().flatten()).collect();
    placed.sort_unstable_by_key(|(at, _)| *at);
    placed.into_iter().map(|(_, decision)| decision).collect()
}

/// The decisions of each group, in their order.
pub(crate) async fn in_order<G: Groups>(
    groups: &G,
    action: Action,
) -> Result<Vec<Vec<Decision>>, StoreError> {
    let stages = groups.stages();
    if action == Action::Acquire {
        return acquire_in_order(groups, &stages).await;
    }
    let mut decided = vec![Vec::new(); groups.count()];
    for stage in &stages {
        let mut failure = None;
        ask_together(groups, stage, Step::Do(action), |group, answer| match answer {
            Ok(decisions) => decided[group] = decisions,
            Err(error) => failure = Some(error),
        })
        .await;
        if let Some(error) = failure {
            return Err(error);
        }
    }
    if action == Action::Peek && !decided.iter().all(|decisions| all_allowed(decisions)) {
        show_unspent(groups, &stages, &mut decided).await;
    }
    Ok(decided)
}

async fn acquire_in_order<G: Groups>(
    groups: &G,
    stages: &[Vec<usize>],
) -> Result<Vec<Vec<Decision>>, StoreError> {
    let mut decided = vec![Vec::new(); groups.count()];
    // Whatever happens from here on, a failure or a caller that goes away: what is in here is given
    // back.
    let mut spent = Spent { groups, taken: Vec::new() };
    for (at, stage) in stages.iter().enumerate() {
        let asked = groups.now();
        let (mut failure, mut denied) = (None, false);
        ask_together(groups, stage, Step::Do(Action::Acquire), |group, answer| match answer {
            Ok(decisions) => {
                if all_allowed(&decisions) {
                    spent.taken.push(Taken { group, asked, decisions: decisions.clone() });
                } else {
                    denied = true;
                }
                decided[group] = decisions;
            }
            Err(error) => {
                decided[group] = unasked(groups.charges(group));
                failure = Some(error);
            }
        })
        .await;
        if denied {
            // A denial is an answer, even if another group of its stage has failed.
            spent.give_back(&mut decided).await;
            for later in &stages[at + 1..] {
                ask_together(groups, later, Step::Forgo, |group, answer| {
                    decided[group] = answer.unwrap_or_else(|_| unasked(groups.charges(group)));
                })
                .await;
            }
            return Ok(decided);
        }
        if let Some(error) = failure {
            spent.give_back(&mut decided).await;
            return Err(error);
        }
    }
    spent.taken.clear();
    Ok(decided)
}

/// Asks groups at the same time. Each answer is handed over as soon as it is there: if the caller
/// goes away, the answers so far have been seen.
async fn ask_together<G: Groups>(
    groups: &G,
    stage: &[usize],
    step: Step,
    mut on_answer: impl FnMut(usize, Result<Vec<Decision>, StoreError>),
) {
    if let [group] = stage {
        return on_answer(*group, groups.ask(*group, step).await);
    }
    let mut asks: Vec<_> =
        stage.iter().map(|group| Some((*group, Box::pin(groups.ask(*group, step))))).collect();
    poll_fn(|context| {
        for ask in &mut asks {
            if let Some((group, call)) = ask
                && let Poll::Ready(answer) = call.as_mut().poll(context)
            {
                on_answer(*group, answer);
                *ask = None;
            }
        }
        if asks.iter().all(Option::is_none) { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

fn all_allowed(decisions: &[Decision]) -> bool {
    decisions.iter().all(|decision| decision.allowed)
}

/// A peek shows what would be left after the spend; another group denies, so nothing would be
/// spent. Groups that would spend are asked for their unspent numbers.
async fn show_unspent<G: Groups>(groups: &G, stages: &[Vec<usize>], decided: &mut [Vec<Decision>]) {
    for stage in stages {
        let allowed: Vec<usize> =
            stage.iter().copied().filter(|group| all_allowed(&decided[*group])).collect();
        ask_together(groups, &allowed, Step::Look, |group, answer| match answer {
            Ok(decisions) => decided[group] = decisions,
            Err(_) => restore_unspent(groups.charges(group), &mut decided[group]),
        })
        .await;
    }
}

/// What is said of charges that could not be asked, and need not be: others have denied.
fn unasked(charges: &[Charge<'_>]) -> Vec<Decision> {
    let untouched = |charge: &Charge<'_>| {
        RawDecision::untouched(charge.quota()).into_decision(charge.quota(), Source::Store)
    };
    charges.iter().map(untouched).collect()
}

/// Undoes the hypothetical spend in peeked decisions, as well as it can be done without the store:
/// `reset_after` stays. (A group that denies has spent nothing.)
pub(crate) fn restore_unspent(charges: &[Charge<'_>], decisions: &mut [Decision]) {
    if all_allowed(decisions) {
        for (charge, decision) in charges.iter().zip(decisions) {
            decision.remaining += charge.cost();
            decision.delay = Duration::ZERO;
        }
    }
}

/// The same charges with a cost of 0: [`Action::ChargeUpTo`] then looks without spending.
pub(crate) fn without_cost<'a>(charges: &[Charge<'a>]) -> Vec<Charge<'a>> {
    charges.iter().map(|charge| charge.with_cost(0)).collect()
}

struct Spent<'a, G: Groups> {
    groups: &'a G,
    taken: Vec<Taken>,
}

/// What a group took.
struct Taken {
    group: usize,
    /// By the store's clock, before the group was asked.
    asked: Timestamp,
    decisions: Vec<Decision>,
}

impl<G: Groups> Spent<'_, G> {
    /// Each group's charges that are given back, and the refund that has begun.
    fn begin(&mut self) -> Vec<(usize, Vec<usize>, Refund)> {
        let groups = self.groups;
        let begin = |taken: Taken| {
            let now = groups.now();
            let spent = groups.charges(taken.group).iter().zip(&taken.decisions).enumerate();
            let refunds = spent.filter_map(|(at, (charge, decision))| {
                charge.to_refund(decision, taken.asked, now).map(|refund| (at, refund))
            });
            let (members, charges): (Vec<usize>, Vec<Charge<'_>>) = refunds.unzip();
            (!charges.is_empty()).then(|| (taken.group, members, groups.refund(&charges)))
        };
        self.taken.drain(..).filter_map(begin).collect()
    }

    /// One that fails is not asked again: it may have been given back, and twice would be too much.
    async fn give_back(&mut self, decided: &mut [Vec<Decision>]) {
        for (group, members, refund) in self.begin() {
            for (member, decision) in members.into_iter().zip(refund.await.into_iter().flatten()) {
                decided[group][member] = decision;
            }
        }
    }
}

impl<G: Groups> Drop for Spent<'_, G> {
    fn drop(&mut self) {
        drop(self.begin());
    }
}
