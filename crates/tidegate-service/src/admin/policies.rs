//! `GET /v1/policies`: the policies and Envoy's rules that are in use.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use tidegate::{Algorithm, Cost, KeySource, Policy, Quota};

use super::{AccessProblems, Admin};
use crate::metrics::Metrics;
use crate::state::ActiveConfig;
use tidegate_config::envoy::{Limit, Rule, RuleMode};

/// Maximum number of overrides that are listed per policy.
const MAX_OVERRIDES: usize = 100;
/// Maximum number of patterns that are listed per attribute.
const MAX_PATTERNS: usize = 100;

/// Policies and rules of Envoy that are in use
#[utoipa::path(
    get, path = "/v1/policies", operation_id = "policies",
    responses(
        (status = 200, description = "Policies", body = Vec<PolicyBody<'static>>),
        AccessProblems,
    )
)]
pub(super) async fn handle(State(admin): State<Admin>) -> Response {
    let active = admin.state.active();
    let metrics = &admin.state.metrics;
    let policies = active.policies().iter();
    let policies = policies.map(|policy| PolicyBody::of_policy(policy, &active, metrics));
    let rules = active.envoy.rules.rules().filter_map(|rule| PolicyBody::of_rule(rule, &active));
    Json(policies.chain(rules).collect::<Vec<_>>()).into_response()
}

#[derive(Serialize, utoipa::ToSchema)]
struct PolicyBody<'a> {
    name: &'a str,
    /// Patterns by attribute. All attributes must match, each by any of its patterns.
    #[serde(rename = "match")]
    #[schema(value_type = BTreeMap<String, Vec<String>>)]
    matches: Patterns<'a>,
    /// Exceptions like `match`. The policy does not apply if one of them matches wholly.
    #[schema(value_type = Vec<BTreeMap<String, Vec<String>>>)]
    unless: Vec<Patterns<'a>>,
    key: Vec<&'a str>,
    missing_key: &'static str,
    #[serde(flatten)]
    quota: QuotaBody,
    cost: CostBody<'a>,
    mode: &'static str,
    on_store_failure: &'static str,
    show_keys: &'static str,
    /// Statuses of responses whose requests the gateway refunds.
    #[serde(skip_serializing_if = "Option::is_none")]
    refund_on: Option<RefundOnBody>,
    overrides: Vec<OverrideBody>,
    override_count: usize,
    /// Limits by the value of an attribute; `limit` is that of all others.
    #[serde(skip_serializing_if = "Option::is_none")]
    limits: Option<LimitsBody<'a>>,
    /// Whether a request has matched it since the start. Rules have no such field.
    #[serde(skip_serializing_if = "Option::is_none")]
    matched: Option<bool>,
    /// Name of the rule in envoyproxy/ratelimit's file; `name` is that of its counters.
    #[serde(skip_serializing_if = "Option::is_none")]
    rule: Option<&'a str>,
}

/// Patterns by attribute, as they were written. A long list ends with the number of the others.
type Patterns<'a> = BTreeMap<&'a str, Vec<Cow<'a, str>>>;

fn patterns<'a>(conditions: impl Iterator<Item = (&'a str, &'a [String])>) -> Patterns<'a> {
    let shown = |(attribute, texts): (&'a str, &'a [String])| {
        let others = texts.len().saturating_sub(MAX_PATTERNS);
        let rest = (others > 0).then(|| Cow::Owned(format!("… and {others} more")));
        let texts = texts.iter().take(MAX_PATTERNS).map(|text| Cow::Borrowed(text.as_str()));
        (attribute, texts.chain(rest).collect())
    };
    conditions.map(shown).collect()
}

#[derive(Serialize, utoipa::ToSchema)]
#[schema(as = PolicyLimits)]
struct LimitsBody<'a> {
    attribute: &'a str,
    values: BTreeMap<&'a str, u64>,
}

#[derive(Serialize, utoipa::ToSchema)]
#[schema(as = PolicyQuota)]
struct QuotaBody {
    algorithm: &'static str,
    /// Null for an algorithm that has only one.
    encoding: Option<&'static str>,
    count_denied: bool,
    /// Lengths of the blocks of a key, by its number of blocks before; empty without blocks.
    block_for_ms: Vec<u128>,
    limit: u64,
    /// Null for units in flight, which have no window.
    window_ms: Option<u128>,
    /// Calendar whose periods are the windows, such as `month from day 15, Europe/Berlin`. The
    /// window is then the longest period.
    #[serde(skip_serializing_if = "Option::is_none")]
    calendar: Option<String>,
    burst: u64,
}

#[derive(Serialize, utoipa::ToSchema)]
#[serde(untagged)]
enum CostBody<'a> {
    Fixed(u64),
    Attribute { attribute: &'a str, default: u64, max: u64 },
}

#[derive(Serialize, utoipa::ToSchema)]
struct RefundOnBody {
    /// Statuses such as `404`, and classes of them such as `2xx`.
    status: Vec<String>,
}

/// Quota of one key.
#[derive(Serialize, utoipa::ToSchema)]
struct OverrideBody {
    /// In the form that the policy shows.
    key: String,
    #[serde(flatten)]
    quota: QuotaBody,
}

impl<'a> PolicyBody<'a> {
    fn of_policy(policy: &'a Policy, active: &ActiveConfig, metrics: &Metrics) -> Self {
        let mut overrides: Vec<(&str, &Quota)> = policy.overrides().collect();
        overrides.sort_unstable_by_key(|(key, _)| *key);
        overrides.truncate(MAX_OVERRIDES);
        let override_count = policy.overrides().count();
        let limits = policy.limits().map(|(attribute, quotas)| {
            let values = quotas.iter().map(|(value, quota)| (value.as_str(), quota.limit()));
            LimitsBody { attribute, values: values.collect() }
        });
        let mut quota = QuotaBody::new(policy.quota());
        if let (Some(calendar), Some(attribute)) =
            (policy.quota().calendar(), policy.anchor_attribute())
        {
            let (unit, zone) = (calendar.unit(), calendar.timezone());
            quota.calendar = Some(format!("{unit} from {attribute}, {zone}"));
        }
        let shown = |(key, quota): (&str, &Quota)| OverrideBody {
            key: active.shown_key(policy.name(), key.to_owned()),
            quota: QuotaBody::new(quota),
        };
        Self {
            name: policy.name(),
            matches: patterns(policy.conditions()),
            unless: policy.unless().map(patterns).collect(),
            key: policy.key().iter().map(KeySource::as_str).collect(),
            missing_key: policy.missing_key().as_str(),
            quota,
            cost: match policy.cost() {
                Cost::Fixed(units) => CostBody::Fixed(*units),
                Cost::Attribute { name, default, max } => {
                    CostBody::Attribute { attribute: name, default: *default, max: *max }
                }
            },
            mode: policy.mode().as_str(),
            on_store_failure: policy.on_store_failure().as_str(),
            show_keys: policy.show_keys().as_str(),
            refund_on: policy.refund_on().map(|set| RefundOnBody { status: set.iter().collect() }),
            overrides: overrides.into_iter().map(shown).collect(),
            override_count,
            limits,
            matched: Some(metrics.has_matched(policy.name())),
            rule: None,
        }
    }

    /// Returns `None` for a rule without a limit, for which nothing is counted.
    fn of_rule(rule: &'a Rule, active: &ActiveConfig) -> Option<Self> {
        let quota = match &rule.limit {
            Limit::Unlimited => return None,
            Limit::Zero(_, window) => QuotaBody {
                algorithm: active.envoy.algorithm.as_str(),
                encoding: None,
                count_denied: false,
                block_for_ms: Vec::new(),
                limit: 0,
                window_ms: Some(window.as_millis()),
                calendar: None,
                burst: 0,
            },
            Limit::Quota(_, quota) => QuotaBody::new(quota),
        };
        let mode = if active.envoy.shadow_mode { RuleMode::Shadow } else { rule.mode };
        Some(Self {
            name: &rule.path,
            matches: BTreeMap::new(),
            unless: Vec::new(),
            key: rule.keys.iter().map(String::as_str).collect(),
            missing_key: "skip",
            quota,
            cost: CostBody::Fixed(1),
            mode: mode.as_str(),
            on_store_failure: active.envoy.on_store_failure_of(rule).as_str(),
            show_keys: rule.show_keys().as_str(),
            refund_on: None,
            overrides: Vec::new(),
            override_count: 0,
            limits: None,
            matched: None,
            rule: rule.name.as_deref(),
        })
    }
}

impl QuotaBody {
    fn new(quota: &Quota) -> Self {
        let has_encodings =
            matches!(quota.algorithm(), Algorithm::SlidingLog | Algorithm::SlidingCounter);
        Self {
            algorithm: quota.algorithm().as_str(),
            encoding: has_encodings.then(|| quota.encoding().as_str()),
            count_denied: quota.count_denied(),
            block_for_ms: quota.block_for().iter().map(Duration::as_millis).collect(),
            limit: quota.limit(),
            window_ms: (!quota.is_concurrency()).then(|| quota.window().as_millis()),
            calendar: quota.calendar().map(ToString::to_string),
            burst: quota.burst(),
        }
    }
}
