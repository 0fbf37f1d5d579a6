//! What Envoy asks: the charges of a request's descriptors, decided together.

use std::borrow::Cow;
use std::time::Instant;

use tidegate::{Action, Charge, Decision, Error, Quota, StoreError};
use tracing::Instrument as _;

use super::{AskError, Engine, Live, in_time};
use crate::logs::TRACE;

/// What a descriptor of Envoy charges, and what came of it.
#[derive(Debug)]
pub(crate) struct EnvoyCharge<'a> {
    pub(crate) policy: Cow<'a, str>,
    /// What metrics call it.
    pub(crate) metric: Cow<'a, str>,
    pub(crate) key: String,
    pub(crate) quota: Cow<'a, Quota>,
    pub(crate) cost: u64,
    /// Only a look.
    pub(crate) peek: bool,
    /// Not all or nothing with the others: it does not deny, or not by itself.
    pub(crate) alone: bool,
    /// `None` until it is asked.
    pub(crate) decision: Option<Decision>,
}

impl EnvoyCharge<'_> {
    /// The charge; what costs more than could ever be admitted is asked for at the most that can.
    fn charge(&self) -> Charge<'_> {
        Charge::new(&self.key, &self.quota).policy(&self.policy).cost(self.cost.min(self.quota.burst()))
    }

    /// It denies by itself.
    fn is_joint(&self) -> bool {
        !self.alone && !self.peek
    }

    fn is_hopeless(&self) -> bool {
        self.cost > self.quota.burst()
    }

    fn is_same_count(&self, other: &Self) -> bool {
        self.key == other.key && self.policy == other.policy
    }
}

impl Engine {
    /// Decides the charges of one request of Envoy. Those that deny by themselves are all or nothing.
    pub(crate) async fn ask_envoy(&self, live: &Live, charges: &mut [EnvoyCharge<'_>]) -> Result<(), AskError> {
        let span = tracing::debug_span!(target: TRACE, "decide", descriptors = charges.len());
        if span.is_disabled() {
            self.answer_envoy(live, charges).await
        } else {
            self.answer_envoy(live, charges).instrument(span).await
        }
    }

    async fn answer_envoy(&self, live: &Live, charges: &mut [EnvoyCharge<'_>]) -> Result<(), AskError> {
        let start = Instant::now();
        match charges {
            // Nearly every request: no list of those that belong together.
            [charge] if charge.is_joint() && !charge.is_hopeless() => {
                charge.decision = Some(self.counts.decide_or_fail(Action::Acquire, &charge.charge()).await?);
            }
            _ => self.ask_jointly(start, charges).await?,
        }
        for charge in charges.iter().filter(|charge| !charge.peek) {
            let Some(decision) = &charge.decision else { continue };
            self.metrics.count_source(decision.source);
            match live.outcomes.get(&*charge.metric) {
                Some(outcomes) => outcomes.count(decision.allowed, charge.alone),
                None => {
                    let outcomes = self.metrics.envoy_outcomes(&charge.metric, &charge.policy);
                    outcomes.count(decision.allowed, charge.alone);
                }
            }
            self.hot_keys.record(self.uptime_at(start), &charge.policy, &charge.key, decision.allowed);
        }
        self.metrics.decision_seconds.observe(start.elapsed());
        Ok(())
    }

    /// First those that deny by themselves, then each of the others.
    async fn ask_jointly(&self, start: Instant, charges: &mut [EnvoyCharge<'_>]) -> Result<(), AskError> {
        let is_first = |at: usize| !charges[..at].iter().any(|earlier| earlier.is_same_count(&charges[at]));
        let joint: Vec<usize> = (0..charges.len()).filter(|at| charges[*at].is_joint() && is_first(*at)).collect();
        // One that can never fit denies the rest, which then only look.
        let hopeless = charges.iter().any(|charge| charge.is_joint() && charge.is_hopeless());
        let action = if hopeless { Action::Peek } else { Action::Acquire };
        let asked: Vec<Charge<'_>> = joint.iter().map(|at| charges[*at].charge()).collect();
        let decisions = self.counts.decide_all_or_fail(action, &asked).await?;
        let denied = hopeless || decisions.iter().any(|decision| !decision.allowed);
        for (at, decision) in joint.into_iter().zip(decisions) {
            charges[at].decision = Some(decision);
        }
        for charge in charges {
            if charge.decision.is_none() {
                let looks = charge.peek || denied || charge.is_hopeless();
                let action = if looks { Action::Peek } else { Action::Acquire };
                let asked = charge.charge();
                let call = self.counts.decide_or_fail(action, &asked);
                let too_late = || Err(Error::Store(StoreError::Timeout(start.elapsed())));
                let decided = in_time(self.counts.deadline(start), call).await;
                charge.decision = Some(decided.unwrap_or_else(too_late)?);
            }
            let burst = charge.quota.burst();
            if charge.is_hopeless()
                && let Some(decision) = &mut charge.decision
            {
                // The peek spoke of less than was asked for.
                decision.remaining += if decision.allowed { burst } else { 0 };
                decision.retry_after = decision.retry_after.max(decision.reset_after);
                decision.allowed = false;
            }
        }
        Ok(())
    }
}
