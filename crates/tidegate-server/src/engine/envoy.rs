//! What Envoy asks: the charges of a request's descriptors, decided together.

use std::borrow::Cow;
use std::time::Instant;

use http::HeaderMap;
use tidegate::{Action, Charge, Decision, Error, Quota, StoreError, Timestamp};
use tracing::Instrument as _;

use super::{AskError, Engine, Live, in_time};
use crate::envoy::rules::{Limit, RuleMode, Unit, override_name};
use crate::logs::{self, TRACE};

/// What a descriptor of Envoy charges, and what came of it.
#[derive(Debug)]
pub(crate) struct EnvoyCharge<'a> {
    pub(crate) policy: Cow<'a, str>,
    /// What metrics call it.
    pub(crate) metric: Cow<'a, str>,
    pub(crate) key: String,
    /// `None`: a limit of 0. Nobody has to be asked about it, and its decision is there from the
    /// start.
    pub(crate) quota: Option<Cow<'a, Quota>>,
    pub(crate) cost: u64,
    /// Acquire; or peek, report or refund.
    pub(crate) action: Action,
    pub(crate) mode: RuleMode,
    /// `None` until it is asked.
    pub(crate) decision: Option<Decision>,
}

impl EnvoyCharge<'_> {
    /// The charge. An acquire of more than could ever be admitted asks for the most that can.
    fn charge(&self) -> Option<Charge<'_>> {
        let quota = self.quota.as_deref()?;
        let most = if self.action == Action::Acquire { quota.burst() } else { u64::MAX };
        Some(Charge::new(&self.key, quota).with_policy(&self.policy).with_cost(self.cost.min(most)))
    }

    /// Whether it decides about the request, rather than only asking or returning units.
    fn is_decision(&self) -> bool {
        matches!(self.action, Action::Acquire | Action::Report)
    }

    /// No wait helps.
    fn is_hopeless(&self) -> bool {
        self.action == Action::Acquire
            && self.quota.as_deref().is_none_or(|quota| self.cost > quota.burst())
    }

    fn is_over(&self) -> bool {
        self.is_hopeless() || self.decision.is_some_and(|decision| !decision.allowed)
    }

    fn is_same_count(&self, other: &Self) -> bool {
        self.key == other.key && self.policy == other.policy
    }

    /// Takes what the store said.
    fn decided(&mut self, mut decision: Decision) {
        if self.is_hopeless() {
            // It spoke of less than was asked for.
            decision.remaining += if decision.allowed { self.cost_asked() } else { 0 };
            decision.retry_after = decision.retry_after.max(decision.reset_after);
            decision.allowed = false;
        }
        self.decision = Some(decision);
    }

    fn cost_asked(&self) -> u64 {
        self.charge().map_or(0, |charge| charge.cost())
    }
}

/// It spends, and denies by itself.
fn is_joint(charge: &EnvoyCharge<'_>) -> bool {
    charge.mode == RuleMode::Enforce && charge.action == Action::Acquire
}

/// As far as is known.
fn is_denied(charges: &[EnvoyCharge<'_>]) -> bool {
    let mut in_quota_mode =
        charges.iter().filter(|charge| charge.mode == RuleMode::Quota).peekable();
    charges.iter().any(|charge| charge.mode == RuleMode::Enforce && charge.is_over())
        || (in_quota_mode.peek().is_some() && in_quota_mode.all(EnvoyCharge::is_over))
}

impl Engine {
    /// Decides the charges of one request of Envoy, whose head this is, and answers whether it may
    /// pass. If not, nothing is spent.
    pub(crate) async fn ask_envoy(
        &self,
        live: &Live,
        head: &HeaderMap,
        charges: &mut [EnvoyCharge<'_>],
    ) -> Result<bool, AskError> {
        let span = tracing::debug_span!(target: TRACE, "decide", descriptors = charges.len());
        if span.is_disabled() {
            self.answer_envoy(live, charges).await
        } else {
            logs::continue_trace(&span, head);
            self.answer_envoy(live, charges).instrument(span).await
        }
    }

    async fn answer_envoy(
        &self,
        live: &Live,
        charges: &mut [EnvoyCharge<'_>],
    ) -> Result<bool, AskError> {
        let start = Instant::now();
        match charges {
            // Nearly every request: no list of those that belong together.
            [charge]
                if (is_joint(charge) && !charge.is_hopeless())
                    || charge.action == Action::Report =>
            {
                if let Some(asked) = charge.charge() {
                    charge.decision =
                        Some(self.counts.decide_or_fail(charge.action, &asked).await?);
                }
            }
            // On the heap, for it is large: every request would carry it along.
            _ => Box::pin(self.ask_jointly(start, charges)).await?,
        }
        for charge in charges.iter().filter(|charge| charge.is_decision()) {
            let Some(decision) = &charge.decision else { continue };
            self.metrics.count_source(decision.source);
            let is_alone = charge.mode != RuleMode::Enforce;
            match live.outcomes.get(&*charge.metric) {
                Some(outcomes) => outcomes.count(decision.allowed, is_alone),
                None => {
                    let is_of_a_rule = live.outcomes.contains_key(&*charge.policy);
                    let outcomes =
                        self.metrics.envoy_outcomes(&charge.metric, &charge.policy, is_of_a_rule);
                    outcomes.count(decision.allowed, is_alone);
                }
            }
            self.hot_keys.record(
                self.uptime_at(start),
                &charge.policy,
                &charge.key,
                decision.allowed,
            );
        }
        self.metrics.decision_seconds.observe(start.elapsed());
        Ok(!is_denied(charges))
    }

    /// First the reports, which are recorded whatever else happens; then those that can deny
    /// without spending; then, all or nothing, those that deny by themselves; then the others.
    async fn ask_jointly(
        &self,
        start: Instant,
        charges: &mut [EnvoyCharge<'_>],
    ) -> Result<(), AskError> {
        // The store keeps its own deadline with the first call, and must be the first to notice.
        let deadline_after =
            |calls: usize| if calls == 0 { None } else { self.counts.deadline(start) };
        let asked_at = self.counts.now();
        let mut calls = 0;
        for charge in charges
            .iter_mut()
            .filter(|charge| charge.action == Action::Report && charge.decision.is_none())
        {
            let Some(asked) = charge.charge() else { continue };
            let decision = or_too_late(
                deadline_after(calls),
                self.counts.decide_or_fail(Action::Report, &asked),
            )
            .await?;
            calls += 1;
            charge.decided(decision);
        }
        let can_deny_unspent = |charge: &EnvoyCharge<'_>| match charge.mode {
            RuleMode::Enforce => charge.action == Action::Peek,
            // They deny only if all do.
            RuleMode::Quota => charge.action != Action::Report,
            RuleMode::Shadow => false,
        };
        let looked_at =
            self.ask_all(deadline_after(calls), Action::Peek, charges, can_deny_unspent).await?;
        calls += looked_at.len();
        let action = if is_denied(charges) { Action::Peek } else { Action::Acquire };
        let joint = self.ask_all(deadline_after(calls), action, charges, is_joint).await?;
        calls += joint.len();
        let denied = is_denied(charges);
        let mut spent = if denied { Vec::new() } else { joint };
        for (at, charge) in charges.iter_mut().enumerate() {
            let action = match charge.action {
                Action::Acquire if denied || charge.is_hopeless() => Action::Peek,
                action => action,
            };
            let only_looked_at = charge.mode == RuleMode::Quota && action == Action::Acquire;
            if charge.decision.is_some() && !only_looked_at {
                continue;
            }
            let Some(asked) = charge.charge() else { continue };
            let decision =
                or_too_late(deadline_after(calls), self.counts.decide_or_fail(action, &asked))
                    .await?;
            calls += 1;
            charge.decided(decision);
            if action == Action::Acquire && decision.allowed {
                spent.push(at);
            }
        }
        if is_denied(charges) {
            self.take_back(charges, &spent, asked_at).await;
        }
        Ok(())
    }

    /// Forgets a key of a rule, or of the limits that requests bring themselves. Answers whether
    /// there is such a rule.
    pub(crate) async fn reset_envoy(
        &self,
        live: &Live,
        policy: &str,
        key: &str,
    ) -> Result<bool, AskError> {
        let algorithm = live.envoy.algorithm;
        let of_rules = live
            .envoy
            .rules
            .rules()
            .filter(|rule| rule.path == policy)
            .map(|rule| rule.limit.clone());
        let of_requests =
            Unit::ALL.into_iter().filter(|unit| override_name(algorithm, *unit) == policy);
        let of_requests = of_requests.filter_map(|unit| Limit::new(algorithm, 1, 1, unit).ok());
        let limits: Vec<Limit> = of_rules.chain(of_requests).collect();
        for limit in &limits {
            if let Limit::Quota(_, quota) = limit {
                self.counts
                    .decide_or_fail(Action::Reset, &Charge::new(key, quota).with_policy(policy))
                    .await?;
            }
        }
        Ok(!limits.is_empty())
    }

    /// Asks for those of a kind together, each count once, and answers which they are.
    async fn ask_all(
        &self,
        deadline: Option<Instant>,
        action: Action,
        charges: &mut [EnvoyCharge<'_>],
        is_meant: fn(&EnvoyCharge<'_>) -> bool,
    ) -> Result<Vec<usize>, AskError> {
        let is_meant = |charge: &EnvoyCharge<'_>| charge.decision.is_none() && is_meant(charge);
        let is_first = |at: usize| {
            let is_same = |earlier: &EnvoyCharge<'_>| {
                is_meant(earlier) && earlier.is_same_count(&charges[at])
            };
            !charges[..at].iter().any(is_same)
        };
        let meant: Vec<usize> =
            (0..charges.len()).filter(|at| is_meant(&charges[*at]) && is_first(*at)).collect();
        let asked: Vec<Charge<'_>> = meant.iter().filter_map(|at| charges[*at].charge()).collect();
        let decisions =
            or_too_late(deadline, self.counts.decide_all_or_fail(action, &asked)).await?;
        for (at, decision) in meant.iter().zip(decisions) {
            charges[*at].decided(decision);
        }
        Ok(meant)
    }

    /// The same count twice in one request, or a quota that others have used up meanwhile: then it
    /// turns out late that the request is denied.
    async fn take_back(
        &self,
        charges: &mut [EnvoyCharge<'_>],
        spent: &[usize],
        asked_at: Timestamp,
    ) {
        for at in spent {
            let Some(asked) = charges[*at].charge() else { continue };
            let refund = asked.with_charged_at(asked_at);
            let (units, given_back) =
                (asked.cost(), self.counts.decide_or_fail(Action::Refund, &refund).await);
            match given_back {
                Ok(_) => charges[*at]
                    .decision
                    .iter_mut()
                    .for_each(|decision| decision.remaining += units),
                Err(error) => tracing::debug!(%error, "a refund was lost"),
            }
        }
    }
}

async fn or_too_late<T>(
    deadline: Option<Instant>,
    call: impl Future<Output = Result<T, Error>>,
) -> Result<T, Error> {
    let start = Instant::now();
    let too_late = || Err(Error::Store(StoreError::Timeout(start.elapsed())));
    in_time(deadline, call).await.unwrap_or_else(too_late)
}
