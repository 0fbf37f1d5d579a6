//! Charges that live apart, such as in different slots of a cluster, decided together all the same.
//!
//! No one can look at all of them at once, so they are asked group by group, in order. If one denies, what the earlier ones
//! spent is given back. For a moment this may refuse a little too much; it never admits too much.

use crate::decision::Decision;
use crate::store::{Action, StoreError};

/// Who decides the groups, each by itself all or nothing.
pub(crate) trait Groups: Sync {
    /// How many there are.
    fn count(&self) -> usize;

    /// Asks one group; a decision for each of its charges.
    fn ask(&self, group: usize, step: Step) -> impl Future<Output = Result<Vec<Decision>, StoreError>> + Send;

    /// Begins at once to give back what this group spent, and goes on even if nobody waits for it: the caller may have gone,
    /// or its time may be up. Brings what is left then, if it is known in time.
    fn refund(&self, group: usize) -> impl Future<Output = Option<Vec<Decision>>> + Send;

    /// What is said of a group that could not be asked, and need not be: another one has denied.
    fn unasked(&self, group: usize) -> Vec<Decision>;
}

/// What a group is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// What the caller wants.
    Do(Action),
    /// As acquire, when another group has denied: what it would say, with nothing spent.
    Forgo,
}

/// The decisions of each group, in their order.
pub(crate) async fn in_order<G: Groups>(groups: &G, action: Action) -> Result<Vec<Vec<Decision>>, StoreError> {
    let mut decided: Vec<Vec<Decision>> = Vec::with_capacity(groups.count());
    if action != Action::Acquire {
        for group in 0..groups.count() {
            decided.push(groups.ask(group, Step::Do(action)).await?);
        }
        return Ok(decided);
    }
    // Whatever happens from here on, a failure or a caller that goes away: what is in here is given back.
    let mut spent = Spent { groups, which: Vec::new() };
    for group in 0..groups.count() {
        let decisions = groups.ask(group, Step::Do(Action::Acquire)).await?;
        let denied = decisions.iter().any(|decision| !decision.allowed);
        decided.push(decisions);
        if denied {
            spent.give_back(&mut decided).await;
            for later in group + 1..groups.count() {
                let decisions = groups.ask(later, Step::Forgo).await;
                decided.push(decisions.unwrap_or_else(|_| groups.unasked(later)));
            }
            return Ok(decided);
        }
        spent.which.push(group);
    }
    spent.which.clear();
    Ok(decided)
}

struct Spent<'a, G: Groups> {
    groups: &'a G,
    which: Vec<usize>,
}

impl<G: Groups> Spent<'_, G> {
    /// One that fails is not asked again: it may have been given back, and twice would be too much.
    async fn give_back(&mut self, decided: &mut [Vec<Decision>]) {
        let begun: Vec<_> = self.which.drain(..).map(|group| (group, self.groups.refund(group))).collect();
        for (group, refund) in begun {
            if let Some(decisions) = refund.await {
                decided[group] = decisions;
            }
        }
    }
}

impl<G: Groups> Drop for Spent<'_, G> {
    fn drop(&mut self) {
        for group in self.which.drain(..) {
            drop(self.groups.refund(group));
        }
    }
}
