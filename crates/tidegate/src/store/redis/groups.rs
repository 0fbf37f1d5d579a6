//! Several charges in one call: at once where they live in one place, else group by group.

use std::sync::Arc;
use std::time::Instant;

use tokio::time::timeout_at;

use super::Shared;
use super::call::Setback;
use super::script::{Request, Verb};
use crate::algorithm::Verdict;
use crate::charge::Charge;
use crate::decision::{Decision, Source};
use crate::quota::Quota;
use crate::store::in_order::{Groups, Step, in_order};
use crate::store::{Action, StoreError};

/// Charges that live apart.
struct Apart<'a> {
    shared: &'a Arc<Shared>,
    started: Instant,
    groups: Vec<Vec<Charge<'a>>>,
}

/// A charge that outlives its caller.
struct Owned {
    key: String,
    policy: String,
    quota: Quota,
    cost: u64,
}

pub(super) async fn decide_all(
    shared: &Arc<Shared>,
    action: Action,
    charges: &[Charge<'_>],
    started: Instant,
) -> Result<Vec<Decision>, StoreError> {
    let by_slot = || group_by(charges, Shared::slot);
    let one_by_one = || (0..charges.len()).map(|at| vec![at]).collect();
    if shared.topology.known().is_cluster() {
        let groups = by_slot();
        if groups.len() > 1 {
            return apart(shared, action, charges, groups, started).await;
        }
    }
    match shared.decide(&[Request { verb: Verb::Do(action), charges }], started).await {
        Ok(verdicts) => Ok(dress(verdicts, charges)),
        Err(Setback::Failed(error)) => Err(error),
        Err(Setback::Apart) => {
            // This was a cluster, and we did not know; or a slot is migrating, with a part of its keys.
            let groups = Some(by_slot()).filter(|groups| groups.len() > 1).unwrap_or_else(one_by_one);
            apart(shared, action, charges, groups, started).await
        }
    }
}

async fn apart(
    shared: &Arc<Shared>,
    action: Action,
    charges: &[Charge<'_>],
    groups: Vec<Vec<usize>>,
    started: Instant,
) -> Result<Vec<Decision>, StoreError> {
    let members = groups.iter().map(|group| group.iter().map(|at| charges[*at]).collect()).collect();
    let decided = in_order(&Apart { shared, started, groups: members }, action).await?;
    let mut placed: Vec<(usize, Decision)> = groups.into_iter().flatten().zip(decided.into_iter().flatten()).collect();
    placed.sort_unstable_by_key(|(at, _)| *at);
    Ok(placed.into_iter().map(|(_, decision)| decision).collect())
}

/// The positions of those that belong together, in the order in which each group first appears.
fn group_by<K: PartialEq>(charges: &[Charge<'_>], kind: impl Fn(&Charge<'_>) -> K) -> Vec<Vec<usize>> {
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

fn dress(verdicts: Vec<Verdict>, charges: &[Charge<'_>]) -> Vec<Decision> {
    let dress = |(verdict, charge): (Verdict, &Charge<'_>)| verdict.into_decision(charge.quota(), Source::Store);
    verdicts.into_iter().zip(charges).map(dress).collect()
}

impl Groups for Apart<'_> {
    fn count(&self) -> usize {
        self.groups.len()
    }

    async fn ask(&self, group: usize, step: Step) -> Result<Vec<Decision>, StoreError> {
        let verb = match step {
            Step::Do(action) => Verb::Do(action),
            Step::Forgo => Verb::Forgo,
        };
        let charges = &self.groups[group];
        let verdicts = self.shared.decide(&[Request { verb, charges }], self.started).await;
        Ok(dress(verdicts.map_err(Setback::into_store_error)?, charges))
    }

    fn refund(&self, group: usize) -> impl Future<Output = Option<Vec<Decision>>> + Send {
        let owned: Vec<Owned> = self.groups[group].iter().map(Owned::of).collect();
        let shared = Arc::clone(self.shared);
        let deadline = self.started + shared.timeout;
        // It has a timeout of its own. Without a runtime nothing can be sent any more.
        let task = tokio::runtime::Handle::try_current().ok().map(|runtime| {
            runtime.spawn(async move {
                let charges: Vec<Charge<'_>> = owned.iter().map(Owned::charge).collect();
                let request = Request { verb: Verb::Do(Action::Refund), charges: &charges };
                match shared.decide(&[request], Instant::now()).await.map_err(Setback::into_store_error) {
                    Ok(verdicts) => Some(dress(verdicts, &charges)),
                    Err(error) => {
                        tracing::debug!(%error, "units may not have been given back");
                        None
                    }
                }
            })
        });
        async move { timeout_at(deadline.into(), task?).await.ok()?.ok()? }
    }

    fn unasked(&self, group: usize) -> Vec<Decision> {
        let charges = &self.groups[group];
        dress(charges.iter().map(|charge| Verdict::untouched(charge.quota())).collect(), charges)
    }
}

impl Owned {
    fn of(charge: &Charge<'_>) -> Self {
        Self {
            key: charge.key().to_owned(),
            policy: charge.policy_name().to_owned(),
            quota: charge.quota().clone(),
            cost: charge.units(),
        }
    }

    fn charge(&self) -> Charge<'_> {
        Charge::new(&self.key, &self.quota).policy(&self.policy).cost(self.cost)
    }
}
