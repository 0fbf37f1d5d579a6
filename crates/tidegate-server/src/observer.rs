//! Records decisions in metrics and hot keys.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use tidegate::{Action, Enforcement, Observer, Policy, PolicyDecision, PolicyDecisions};

use crate::hot_keys::HotKeys;
use crate::metrics::{Metrics, Outcomes};

/// Name in metrics of all queries with their own quota. Callers choose these quotas, so the number
/// of distinct ones is unbounded.
pub(crate) const OWN_QUOTA: &str = "(quota)";

/// Observer of the decisions of all front doors.
pub(crate) struct DecisionObserver {
    metrics: Arc<Metrics>,
    hot_keys: Arc<HotKeys>,
    started: Instant,
    /// Counters by the name of a policy or rule. The map never changes, so counting needs no lock.
    outcomes: HashMap<String, Arc<Outcomes>>,
}

impl DecisionObserver {
    /// Creates an observer with counters for these policies and rules.
    pub(crate) fn new<'a>(
        metrics: &Arc<Metrics>,
        hot_keys: &Arc<HotKeys>,
        started: Instant,
        names: impl Iterator<Item = &'a str>,
    ) -> Self {
        let outcomes =
            names.chain([OWN_QUOTA]).map(|name| (name.to_owned(), metrics.outcomes(name)));
        Self {
            metrics: Arc::clone(metrics),
            hot_keys: Arc::clone(hot_keys),
            started,
            outcomes: outcomes.collect(),
        }
    }

    fn count(&self, decision: &PolicyDecision<'_>, uptime: u64) {
        let made = decision.decision();
        self.metrics.count_source(made.source);
        let is_shadow = decision.enforcement() != Enforcement::Enforce;
        let name = decision.metric_name();
        if let Some(outcomes) = self.outcomes.get(name) {
            outcomes.count(made.allowed, is_shadow);
            if !decision.is_rejected() {
                outcomes.count_source(made.source);
            }
        } else {
            let is_rule = self.outcomes.contains_key(decision.policy());
            let outcomes = self.metrics.envoy_outcomes(name, decision.policy(), is_rule);
            outcomes.count(made.allowed, is_shadow);
        }
        if let Some(key) = decision.key().filter(|_| name != OWN_QUOTA) {
            self.hot_keys.record(uptime, decision.policy(), key, made.allowed);
        }
    }
}

impl Observer for DecisionObserver {
    fn decided(&self, action: Action, decisions: &PolicyDecisions<'_>, start: Instant) {
        let uptime = start.saturating_duration_since(self.started).as_secs();
        for decision in decisions {
            if matches!(decision.action(), Action::Acquire | Action::Report) {
                self.count(decision, uptime);
            }
        }
        if matches!(action, Action::Acquire | Action::Report) {
            self.metrics.decision_seconds.observe(start.elapsed());
        }
    }

    fn key_missing(&self, policy: &Policy) {
        if let Some(outcomes) = self.outcomes.get(policy.name()) {
            outcomes.count_missing_key();
        }
    }
}
