//! Records decisions in metrics and hot keys.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use foldhash::fast::RandomState;
use tidegate::{
    Action, Enforcement, HoldStatus, Observer, Policy, PolicyDecision, PolicyDecisions, QueryError,
    Quota, ShowKeys, Store as _, Timestamp,
};

use crate::backend::Backend;
use crate::hot_keys::{self, HotKeys};
use crate::logs::DenialLog;
use crate::metrics::{HoldEvent, Metrics, Outcomes, RequestOutcome};

/// Name in metrics of all queries with their own quota. Callers choose these quotas, so the number
/// of distinct ones is unbounded.
pub(crate) const OWN_QUOTA: &str = "(quota)";

/// Observer of the decisions of all front doors.
pub struct DecisionObserver {
    metrics: Arc<Metrics>,
    hot_keys: Arc<HotKeys>,
    /// Its clock has the time of the decisions.
    backend: Arc<Backend>,
    /// Part of a limit from which on units count as near the limit.
    near_limit_ratio: f32,
    /// Whether units are counted, as ratelimit's metrics need it.
    counts_units: bool,
    /// Counters by the name of a policy or rule. The map never changes, so counting needs no lock.
    outcomes: HashMap<String, Arc<Outcomes>, RandomState>,
    denials: Option<Denials>,
}

/// Log of denied requests, if it is on.
struct Denials {
    log: DenialLog,
    /// Form of the keys of each policy and rule.
    show_keys: HashMap<String, ShowKeys>,
}

impl DecisionObserver {
    /// Creates an observer with counters for these policies and rules.
    pub fn new<'a>(
        metrics: &Arc<Metrics>,
        hot_keys: &Arc<HotKeys>,
        backend: &Arc<Backend>,
        near_limit_ratio: f32,
        names: impl Iterator<Item = &'a str>,
    ) -> Self {
        let outcomes =
            names.chain([OWN_QUOTA]).map(|name| (name.to_owned(), metrics.outcomes(name)));
        Self {
            metrics: Arc::clone(metrics),
            hot_keys: Arc::clone(hot_keys),
            backend: Arc::clone(backend),
            near_limit_ratio,
            counts_units: false,
            outcomes: outcomes.collect(),
            denials: None,
        }
    }

    /// Also counts units, for ratelimit's metrics.
    pub fn with_units(self, counts_units: bool) -> Self {
        Self { counts_units, ..self }
    }

    /// Also logs denied requests. The names come with the form of their keys; of two forms the
    /// stricter one is used.
    pub fn with_denial_log(mut self, log: Option<DenialLog>, names: &[(&str, ShowKeys)]) -> Self {
        self.denials = log.map(|log| {
            let mut show_keys: HashMap<String, ShowKeys> = HashMap::new();
            for (name, shown) in names {
                let stricter = show_keys.entry((*name).to_owned()).or_insert(*shown);
                *stricter = (*shown).max(*stricter);
            }
            Denials { log, show_keys }
        });
        self
    }

    /// `is_passed`: whether the request passes, so that an admitted charge took its units.
    fn count(&self, decision: &PolicyDecision<'_>, is_passed: bool, seconds: u64) {
        let made = decision.decision();
        self.metrics.count_source(made.source);
        let is_shadow = decision.enforcement() != Enforcement::Enforce;
        let name = decision.metric_name();
        let near_limit =
            if made.allowed && is_passed { near_limit(decision, self.near_limit_ratio) } else { 0 };
        self.with_outcomes(decision, |outcomes, is_own| {
            outcomes.count(made.allowed, is_shadow);
            outcomes.count_near_limit(near_limit);
            if self.counts_units {
                let is_shadow = decision.enforcement() == Enforcement::Shadow;
                outcomes.count_units(made.allowed, is_shadow, decision.cost());
            }
            if is_own && !decision.is_rejected() {
                outcomes.count_source(made.source);
            }
        });
        let outcome = match (made.allowed, decision.enforcement()) {
            (true, _) if is_passed => RequestOutcome::Allowed,
            // Another policy denied the request.
            (true, _) => return,
            (false, Enforcement::Enforce) => RequestOutcome::Denied,
            (false, Enforcement::AllDenied) if !is_passed => RequestOutcome::Denied,
            (false, _) => RequestOutcome::ShadowDenied,
        };
        if let Some(key) = decision.key().filter(|_| name != OWN_QUOTA) {
            self.hot_keys.record(seconds, decision.policy(), key, outcome);
        }
    }

    /// Calls a closure with the counters of a policy or rule, and whether the metric has its name.
    fn with_outcomes(&self, decision: &PolicyDecision<'_>, count: impl FnOnce(&Outcomes, bool)) {
        let name = decision.metric_name();
        match self.outcomes.get(name) {
            Some(outcomes) => count(outcomes, true),
            None => {
                let is_rule = self.outcomes.contains_key(decision.policy());
                count(&self.metrics.envoy_outcomes(name, decision.policy(), is_rule), false);
            }
        }
    }

    /// `is_passed`: whether the request passes. Otherwise its reservations were returned.
    #[cold]
    fn count_hold(&self, decision: &PolicyDecision<'_>, is_passed: bool) {
        let Some(hold) = decision.decision().hold else { return };
        let (event, is_settled_at_once) = match (hold.status, decision.action()) {
            (HoldStatus::Held, Action::Renew) => (HoldEvent::Renewed, false),
            (HoldStatus::Held, _) if !is_passed => return,
            (HoldStatus::Held, _) => (HoldEvent::Reserved, hold.expires_after().is_zero()),
            (HoldStatus::Replayed, _) => (HoldEvent::Replayed, false),
            (HoldStatus::Settled, _) => (HoldEvent::Settled, false),
            (HoldStatus::Ended, _) => (HoldEvent::Ended, false),
            (HoldStatus::Pending, _) => (HoldEvent::Pending, false),
            _ => (HoldEvent::Unknown, false),
        };
        self.with_outcomes(decision, |outcomes, _| {
            outcomes.count_hold(event);
            if is_settled_at_once {
                outcomes.count_hold(HoldEvent::Settled);
            }
        });
    }

    fn log_denial(&self, decisions: &PolicyDecisions<'_>) {
        let Some(Denials { log, show_keys }) = &self.denials else { return };
        if let Some(denial) = decisions.denied_by() {
            let shown = show_keys.get(denial.policy()).copied().unwrap_or(ShowKeys::Hashed);
            log.log(denial, shown, Instant::now());
        }
    }
}

/// Returns how many units of an admitted charge are above this part of the limit, as ratelimit
/// counts them.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "ratelimit rounds like this, too, and the ratio is from 0 to 1"
)]
fn near_limit(decision: &PolicyDecision<'_>, ratio: f32) -> u64 {
    let capacity = decision.quota().map_or(0, Quota::burst);
    let used = capacity.saturating_sub(decision.decision().remaining);
    let threshold = (capacity as f32 * ratio).floor() as u64;
    used.saturating_sub(threshold).min(decision.cost())
}

impl Observer for DecisionObserver {
    fn decided(&self, action: Action, decisions: &PolicyDecisions<'_>, start: Timestamp) {
        let seconds = hot_keys::seconds(start);
        let is_allowed = decisions.is_allowed();
        for decision in decisions {
            match decision.action() {
                Action::Acquire => self.count(decision, is_allowed, seconds),
                Action::Report => self.count(decision, true, seconds),
                _ => {}
            }
            if decision.decision().hold.is_some() {
                self.count_hold(decision, is_allowed);
            }
        }
        if matches!(action, Action::Acquire | Action::Report) {
            let would_deny = |entry: &PolicyDecision<'_>| !entry.decision().allowed;
            let outcome = if !is_allowed {
                RequestOutcome::Denied
            } else if decisions.iter().any(would_deny) {
                RequestOutcome::ShadowDenied
            } else {
                RequestOutcome::Allowed
            };
            let duration = self.backend.clock().now().saturating_duration_since(start);
            self.metrics.requests.count(outcome, duration);
            if action == Action::Acquire && !is_allowed {
                self.log_denial(decisions);
            }
        }
    }

    fn failed(&self, action: Action, _: &QueryError) {
        if matches!(action, Action::Acquire | Action::Report) {
            self.metrics.requests.count_error();
        }
    }

    fn refunded(&self, policy: &str, succeeded: bool) {
        if let Some(outcomes) = self.outcomes.get(policy) {
            outcomes.count_refund(succeeded);
        }
    }

    fn key_missing(&self, policy: &Policy) {
        if let Some(outcomes) = self.outcomes.get(policy.name()) {
            outcomes.count_missing_key();
        }
    }

    fn other_limit(&self, policy: &Policy) {
        if let Some(outcomes) = self.outcomes.get(policy.name()) {
            outcomes.count_other_limit();
        }
    }
}
