//! The engine: what every front door asks. It selects the policies, asks the store, counts what
//! came of it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use arc_swap::ArcSwap;
use http::HeaderMap;
use tidegate::headers::Limited;
use tidegate::{
    Action, Attributes, Charge, ChargeError, ClientIp, Decision, Error, Mode, Policies, Policy,
    Quota, QuotaError, SelectError, Selected, Source, StoreError,
};
use tracing::Instrument as _;

use crate::config::{Config, EnvoyConfig, Secret};
use crate::counts::Counts;
use crate::hot_keys::HotKeys;
use crate::logs::{self, TRACE};
use crate::metrics::{Metrics, Outcomes};

mod admit;
mod envoy;

pub(crate) use envoy::EnvoyCharge;

pub(crate) struct Engine {
    live: ArcSwap<Live>,
    pub(crate) counts: Counts,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) hot_keys: HotKeys,
    started: Instant,
}

/// The policy in metrics of questions that bring their own quota: their quotas are the callers' to
/// choose, and would be labels without end.
const OWN_QUOTA: &str = "(quota)";

/// What a reload replaces, whole.
pub(crate) struct Live {
    pub(crate) client_ip: ClientIp,
    pub(crate) policies: Policies,
    pub(crate) envoy: EnvoyConfig,
    pub(crate) tls: Option<Arc<rustls::ServerConfig>>,
    /// By policy and by rule: found without a lock.
    outcomes: HashMap<String, Arc<Outcomes>>,
    /// Of all questions that bring their own quota.
    own_quotas: Arc<Outcomes>,
    pub(crate) x_ratelimit_headers: bool,
    pub(crate) api_token: Option<Secret>,
    pub(crate) admin_token: Option<Secret>,
}

/// A question, in one of its three forms.
pub(crate) enum Ask<'a> {
    Policy {
        policy: &'a str,
        key: &'a str,
        cost: Option<u64>,
    },
    /// All policies that apply; or `only` this one, whatever it matches.
    Attributes {
        attributes: &'a (dyn Attributes + Sync),
        only: Option<&'a str>,
        cost: Option<u64>,
    },
    Quota {
        key: &'a str,
        quota: &'a Quota,
        cost: u64,
    },
}

/// The answer: each policy's decision, the most restrictive one leading.
#[derive(Debug, Default)]
pub(crate) struct Answer<'a> {
    pub(crate) lines: Vec<Line<'a>>,
    leading: Option<usize>,
}

#[derive(Debug)]
pub(crate) struct Line<'a> {
    pub(crate) policy: &'a str,
    quota: &'a Quota,
    pub(crate) decision: Decision,
    shadow: bool,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AskError {
    #[error("there is no policy {name:?}{}", suggestion(nearest.as_deref()))]
    UnknownPolicy { name: String, nearest: Option<String> },
    #[error(transparent)]
    Charge(#[from] ChargeError),
    #[error(transparent)]
    Quota(#[from] QuotaError),
    #[error(transparent)]
    Select(#[from] SelectError),
    #[error(transparent)]
    Store(#[from] StoreError),
}

fn suggestion(nearest: Option<&str>) -> String {
    nearest.map(|name| format!(": did you mean {name:?}?")).unwrap_or_default()
}

impl From<Error> for AskError {
    fn from(error: Error) -> Self {
        match error {
            Error::Charge(error) => Self::Charge(error),
            Error::Store(error) => Self::Store(error),
            other => Self::Store(StoreError::Refused(other.to_string())),
        }
    }
}

impl<'a> Answer<'a> {
    fn new(lines: Vec<Line<'a>>) -> Self {
        // What is only looked at leads only where nothing is enforced, and never denies.
        let rank = |at: &usize| (lines[*at].shadow, lines[*at].decision.rank());
        let leading = (0..lines.len()).min_by_key(rank);
        Self { lines, leading }
    }

    pub(crate) fn allowed(&self) -> bool {
        self.lines.iter().all(|line| line.shadow || line.decision.allowed)
    }

    pub(crate) fn leading(&self) -> Option<&Line<'a>> {
        self.leading.map(|index| &self.lines[index])
    }

    /// For the headers: what is enforced.
    pub(crate) fn limited(&self) -> impl Iterator<Item = Limited<'_>> + Clone {
        let enforced = self.lines.iter().filter(|line| !line.shadow);
        enforced.map(|line| Limited {
            policy: line.policy,
            quota: line.quota,
            decision: line.decision,
        })
    }
}

impl<'a> Line<'a> {
    fn new(policy: &'a Policy, key: &str, decision: Decision) -> Self {
        let shadow = policy.mode() == Mode::Shadow;
        Self { policy: policy.name(), quota: policy.quota_for(key), decision, shadow }
    }

    /// The denial of a policy that cannot count the request: it lacks the key, or has one that is
    /// none, or costs more than there can be. No wait helps.
    fn turned_away(policy: &'a Policy) -> Self {
        let (decision, shadow) = (policy.without_key(), policy.mode() == Mode::Shadow);
        Self { policy: policy.name(), quota: policy.quota(), decision, shadow }
    }
}

impl Engine {
    /// Connects to the store and takes the configuration.
    pub(crate) async fn start(config: Config) -> Result<Self, StoreError> {
        let metrics = Arc::new(Metrics::default());
        let counts = Counts::start(&config.store, &metrics).await?;
        let live = Live::new(config, &metrics);
        Ok(Self {
            live: ArcSwap::from_pointee(live),
            counts,
            metrics,
            hot_keys: HotKeys::new(),
            started: Instant::now(),
        })
    }

    /// Takes a new configuration. The counts stay.
    pub(crate) fn reload(&self, config: Config) {
        self.live.store(Arc::new(Live::new(config, &self.metrics)));
    }

    pub(crate) fn live(&self) -> Arc<Live> {
        self.live.load_full()
    }

    /// Seconds since the start, the clock of the hot keys.
    pub(crate) fn uptime(&self) -> u64 {
        self.uptime_at(Instant::now())
    }

    fn uptime_at(&self, moment: Instant) -> u64 {
        moment.saturating_duration_since(self.started).as_secs()
    }

    /// Answers a question that came with this head. `charged_at` is for refunds: when the charge
    /// was made, by the clock of [`Counts::now`]; 0 if unknown.
    pub(crate) async fn ask<'a>(
        &self,
        live: &'a Live,
        head: &HeaderMap,
        action: Action,
        ask: Ask<'a>,
        charged_at: u64,
    ) -> Result<Answer<'a>, AskError> {
        let span =
            tracing::debug_span!(target: TRACE, "decide", ?action, allowed = tracing::field::Empty);
        if span.is_disabled() {
            return self.answer(live, action, ask, charged_at).await;
        }
        logs::continue_trace(&span, head);
        let answer = self.answer(live, action, ask, charged_at).instrument(span.clone()).await;
        if let Ok(answer) = &answer {
            span.record("allowed", answer.allowed());
        }
        answer
    }

    async fn answer<'a>(
        &self,
        live: &'a Live,
        action: Action,
        ask: Ask<'a>,
        charged_at: u64,
    ) -> Result<Answer<'a>, AskError> {
        let start = Instant::now();
        let answer = match ask {
            Ask::Policy { policy, key, cost } => {
                let policy = live.policy(policy)?;
                let charge = Charge::new(key, policy.quota_for(key))
                    .policy(policy.name())
                    .cost(cost.unwrap_or_else(|| policy.usual_cost()))
                    .charged_at(charged_at)
                    .on_store_failure(policy.store_failure());
                self.ask_policies(action, start, live, &[(policy, charge)], &[]).await?
            }
            Ask::Attributes { attributes, only, cost } => {
                let selection = match only {
                    Some(name) => live.policy(name)?.select(attributes, cost)?,
                    None => live.policies.select(attributes, cost)?,
                };
                if let Some(policy) = selection.key_missing_for {
                    if action == Action::Acquire {
                        self.metrics.count_source(Source::Deny);
                        if let Some(outcomes) = live.outcomes.get(policy.name()) {
                            outcomes.count(false, false);
                        }
                    }
                    Answer::new(vec![Line::turned_away(policy)])
                } else {
                    let charge = |selected| {
                        (Selected::policy(selected), selected.charge().charged_at(charged_at))
                    };
                    let charges: Vec<(&Policy, Charge<'_>)> =
                        selection.charges.iter().map(charge).collect();
                    self.ask_policies(
                        action,
                        start,
                        live,
                        &charges,
                        &selection.turned_away_in_shadow,
                    )
                    .await?
                }
            }
            Ask::Quota { key, quota, cost } => {
                let charge = Charge::new(key, quota).cost(cost).charged_at(charged_at);
                let decision = self.counts.decide(action, &charge).await?;
                if action == Action::Acquire {
                    self.metrics.count_source(decision.source);
                    live.own_quotas.count(decision.allowed, false);
                }
                Answer::new(vec![Line {
                    policy: quota.unnamed_policy(),
                    quota,
                    decision,
                    shadow: false,
                }])
            }
        };
        if action == Action::Acquire {
            self.metrics.decision_seconds.observe(start.elapsed());
        }
        Ok(answer)
    }

    /// What is enforced is all or nothing; what is in shadow mode is asked one by one, and only if
    /// the request passes, or has `turned_away` the request without being asked.
    async fn ask_policies<'a>(
        &self,
        action: Action,
        start: Instant,
        live: &Live,
        charges: &[(&'a Policy, Charge<'_>)],
        turned_away: &[&'a Policy],
    ) -> Result<Answer<'a>, AskError> {
        let is_shadow = |policy: &Policy| policy.mode() == Mode::Shadow;
        let mut lines = Vec::with_capacity(charges.len());
        match charges {
            // Nearly every request: no list but that of the answer.
            [(policy, charge)] if !is_shadow(policy) => {
                lines.push(Line::new(
                    policy,
                    charge.key(),
                    self.counts.decide(action, charge).await?,
                ));
            }
            charges => {
                let enforced = || charges.iter().filter(|(policy, _)| !is_shadow(policy));
                let together: Vec<Charge<'_>> = enforced().map(|(_, charge)| *charge).collect();
                let decisions = self.counts.decide_all(action, &together).await?;
                let decided = enforced().zip(decisions);
                lines.extend(
                    decided.map(|((policy, charge), decision)| {
                        Line::new(policy, charge.key(), decision)
                    }),
                );
            }
        }
        let passes = lines.iter().all(|line| line.decision.allowed);
        for (policy, charge) in charges.iter().filter(|(policy, _)| is_shadow(policy)) {
            let action = if action == Action::Acquire && !passes { Action::Peek } else { action };
            // What is only looked at must neither fail a request nor make it wait longer.
            match in_time(self.counts.deadline(start), self.counts.decide(action, charge)).await {
                Some(Ok(decision)) => lines.push(Line::new(policy, charge.key(), decision)),
                // Enforced, it would refuse the request: a cost above all that there is.
                Some(Err(Error::Charge(_))) => lines.push(Line::turned_away(policy)),
                _ => {}
            }
        }
        lines.extend(turned_away.iter().map(|policy| Line::turned_away(policy)));
        if action == Action::Acquire {
            self.count(live, start, charges, &lines);
        }
        Ok(Answer::new(lines))
    }

    fn count(
        &self,
        live: &Live,
        start: Instant,
        charges: &[(&Policy, Charge<'_>)],
        lines: &[Line<'_>],
    ) {
        let now = self.uptime_at(start);
        for line in lines {
            self.metrics.count_source(line.decision.source);
            if let Some(outcomes) = live.outcomes.get(line.policy) {
                outcomes.count(line.decision.allowed, line.shadow);
                outcomes.count_source(line.decision.source);
            }
            if let Some((_, charge)) =
                charges.iter().find(|(policy, _)| policy.name() == line.policy)
            {
                self.hot_keys.record(now, line.policy, charge.key(), line.decision.allowed);
            }
        }
    }
}

/// What comes by then.
async fn in_time<T>(deadline: Option<Instant>, call: impl Future<Output = T>) -> Option<T> {
    match deadline {
        Some(deadline) => tokio::time::timeout_at(deadline.into(), call).await.ok(),
        None => Some(call.await),
    }
}

impl Live {
    fn new(config: Config, metrics: &Metrics) -> Self {
        let rules = config.envoy.rules.rules().map(|rule| rule.path.as_str());
        let names = config.policies.iter().map(Policy::name).chain(rules);
        let outcomes = names.map(|name| (name.to_owned(), metrics.outcomes(name))).collect();
        Self {
            client_ip: config.client_ip,
            policies: config.policies,
            envoy: config.envoy,
            tls: config.tls,
            outcomes,
            own_quotas: metrics.outcomes(OWN_QUOTA),
            x_ratelimit_headers: config.x_ratelimit_headers,
            api_token: config.api_token,
            admin_token: config.admin_token,
        }
    }

    pub(crate) fn policy(&self, name: &str) -> Result<&Policy, AskError> {
        self.policies.get(name).ok_or_else(|| {
            let distance = |policy: &Policy| strsim::damerau_levenshtein(name, policy.name());
            let nearest = self.policies.iter().min_by_key(|policy| distance(policy));
            let nearest = nearest.filter(|policy| distance(policy) <= 1 + name.chars().count() / 3);
            AskError::UnknownPolicy {
                name: name.to_owned(),
                nearest: nearest.map(|policy| policy.name().to_owned()),
            }
        })
    }
}
