//! Requests that pass through us: decided by their heads, for the library's own layer.

use std::net::IpAddr;
use std::time::Instant;

use http::request::Parts;
use tidegate::tower::{Admission, HttpAttributes, Line as AdmittedLine};
use tidegate::{Action, Charge, Error, Policy, Selected, Source};

use super::{AskError, Engine};

impl Engine {
    /// Decides about a request that `peer` sent and, if it passes, spends.
    pub(crate) async fn admit(&self, head: &Parts, peer: IpAddr) -> Result<Admission, Error> {
        let start = Instant::now();
        let asked = self.counts.now();
        let live = self.live.load();
        let selection =
            live.policies.select(&HttpAttributes::new(head, Some(peer), &live.client_ip), None)?;
        let admission = if let Some(policy) = selection.key_missing_for {
            self.metrics.count_source(Source::Deny);
            if let Some(outcomes) = live.outcomes.get(policy.name()) {
                outcomes.count(false, false);
            }
            Admission::new(asked, vec![AdmittedLine::without_key(policy)])
        } else if selection.charges.is_empty() && selection.turned_away_in_shadow.is_empty() {
            Admission::unlimited()
        } else {
            let (mut selected, turned_away) = (selection.charges, selection.turned_away_in_shadow);
            let answer = {
                let charge = |selected| (Selected::policy(selected), Selected::charge(selected));
                let charges: Vec<(&Policy, Charge<'_>)> = selected.iter().map(charge).collect();
                self.ask_policies(Action::Acquire, start, &live, &charges, &turned_away)
                    .await
                    .map_err(without_policy)?
            };
            let lines = answer.lines.iter().filter_map(|line| {
                let at =
                    selected.iter().position(|selected| selected.policy().name() == line.policy)?;
                Some(AdmittedLine::of_policy(selected.swap_remove(at), line.decision))
            });
            Admission::new(asked, lines.collect())
        };
        self.metrics.decision_seconds.observe(start.elapsed());
        Ok(admission)
    }

    /// Gives back what an admission took.
    pub(crate) async fn give_back(&self, admission: &Admission) {
        for charge in admission.spent(self.counts.now()) {
            // Who cannot be given it back now has waited for nothing, and is none the worse for it.
            if let Err(error) = self.counts.decide(Action::Refund, &charge).await {
                tracing::debug!(%error, "a refund was lost");
            }
        }
    }
}

/// What can be wrong with a charge that the policies made.
fn without_policy(error: AskError) -> Error {
    match error {
        AskError::Charge(error) => Error::Charge(error),
        AskError::Select(error) => Error::Select(error),
        AskError::Store(error) => Error::Store(error),
        other => Error::Store(tidegate::StoreError::Refused(other.to_string())),
    }
}
