//! Charges that live apart, such as in different slots of a cluster, decided together all the same.
//!
//! No one can look at all of them at once, so they are asked group by group, in order. If one denies, what the earlier ones
//! spent is given back. For a moment this may refuse a little too much; it never admits too much.

use std::pin::Pin;
use std::time::Duration;

use crate::algorithm::Verdict;
use crate::charge::Charge;
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
    fn ask(&self, group: usize, step: Step) -> impl Future<Output = Result<Vec<Decision>, StoreError>> + Send;

    /// Begins at once to give back what these charges of a group spent, and goes on even if nobody waits for it: the caller
    /// may have gone, or its time may be up. Brings what is left then, if it is known in time.
    fn refund(&self, charges: &[Charge<'_>]) -> Refund;

    /// The time by the store's clock.
    fn now(&self) -> u64;
}

/// What a group is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// What the caller wants.
    Do(Action),
    /// As acquire, when another group has denied: what it would say, with nothing spent.
    Forgo,
}

/// A charge that outlives its caller.
pub(crate) struct Owned {
    key: String,
    policy: String,
    quota: Quota,
    cost: u64,
    charged_at: u64,
}

impl Owned {
    pub(crate) fn of(charge: &Charge<'_>) -> Self {
        Self {
            key: charge.key().to_owned(),
            policy: charge.policy_name().to_owned(),
            quota: charge.quota().clone(),
            cost: charge.units(),
            charged_at: charge.charge_time(),
        }
    }

    pub(crate) fn charge(&self) -> Charge<'_> {
        Charge::new(&self.key, &self.quota).policy(&self.policy).cost(self.cost).charged_at(self.charged_at)
    }
}

/// The positions of those that belong together, in the order in which each group first appears.
pub(crate) fn group_by<K: PartialEq>(charges: &[Charge<'_>], kind: impl Fn(&Charge<'_>) -> K) -> Vec<Vec<usize>> {
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
    let mut placed: Vec<(usize, Decision)> = groups.into_iter().flatten().zip(decided.into_iter().flatten()).collect();
    placed.sort_unstable_by_key(|(at, _)| *at);
    placed.into_iter().map(|(_, decision)| decision).collect()
}

/// The decisions of each group, in their order.
pub(crate) async fn in_order<G: Groups>(groups: &G, action: Action) -> Result<Vec<Vec<Decision>>, StoreError> {
    let mut decided: Vec<Vec<Decision>> = Vec::with_capacity(groups.count());
    if action != Action::Acquire {
        for group in 0..groups.count() {
            decided.push(groups.ask(group, Step::Do(action)).await?);
        }
        if action == Action::Peek && decided.iter().flatten().any(|decision| !decision.allowed) {
            for (group, decisions) in decided.iter_mut().enumerate() {
                untake(groups.charges(group), decisions);
            }
        }
        return Ok(decided);
    }
    // Whatever happens from here on, a failure or a caller that goes away: what is in here is given back.
    let mut spent = Spent { groups, taken: Vec::new() };
    for group in 0..groups.count() {
        let asked = groups.now();
        let decisions = match groups.ask(group, Step::Do(Action::Acquire)).await {
            Ok(decisions) => decisions,
            Err(error) => {
                spent.give_back(&mut decided).await;
                return Err(error);
            }
        };
        let denied = decisions.iter().any(|decision| !decision.allowed);
        if !denied {
            spent.taken.push(Taken { group, asked, decisions: decisions.clone() });
        }
        decided.push(decisions);
        if denied {
            spent.give_back(&mut decided).await;
            for later in group + 1..groups.count() {
                let decisions = groups.ask(later, Step::Forgo).await;
                decided.push(decisions.unwrap_or_else(|_| unasked(groups.charges(later))));
            }
            return Ok(decided);
        }
    }
    spent.taken.clear();
    Ok(decided)
}

/// What is said of charges that could not be asked, and need not be: others have denied.
fn unasked(charges: &[Charge<'_>]) -> Vec<Decision> {
    let untouched =
        |charge: &Charge<'_>| Verdict::untouched(charge.quota()).into_decision(charge.quota(), Source::Store);
    charges.iter().map(untouched).collect()
}

/// A look said what would be left if all were taken, but others deny. (A group that itself denies has said so already.)
pub(crate) fn untake(charges: &[Charge<'_>], decisions: &mut [Decision]) {
    if decisions.iter().all(|decision| decision.allowed) {
        for (charge, decision) in charges.iter().zip(decisions) {
            decision.remaining += charge.units();
            decision.delay = Duration::ZERO;
        }
    }
}

struct Spent<'a, G: Groups> {
    groups: &'a G,
    taken: Vec<Taken>,
}

/// What a group took.
struct Taken {
    group: usize,
    /// By the store's clock, before the group was asked.
    asked: u64,
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
