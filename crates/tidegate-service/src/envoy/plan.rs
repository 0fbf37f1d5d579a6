//! Charges of each descriptor: by a rule of ratelimit's files, by the limit in the request, or by
//! Tidegate's policies.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use prost_types::Struct;
use tidegate::PreparedCharge;
use tidegate::{Action, Decision, Enforcement, Hold, Mode, OnStoreFailure, Policy, Quota, Source};

use crate::state::ActiveConfig;
use tidegate_api::duration;
use tidegate_api::envoy::extensions::common::ratelimit::v3::{
    RateLimitDescriptor, rate_limit_descriptor::RateLimitOverride,
};
use tidegate_api::envoy::service::ratelimit::v3::RateLimitRequest;
use tidegate_config::EnvoyConfig;
use tidegate_config::envoy::{self as rules, Limit, MatchedRule, Rule, Unit};

/// Limit of a descriptor.
pub(super) enum DescriptorPlan<'a> {
    /// No rule or policy applies.
    NoLimit,
    /// A rule with `unlimited` applies.
    Unlimited,
    Limited(LimitedDescriptor<'a>),
}

/// Descriptor with charges.
pub(super) struct LimitedDescriptor<'a> {
    pub(super) limit: u64,
    pub(super) unit: Option<Unit>,
    pub(super) name: Option<&'a str>,
    /// Metadata of the rule.
    pub(super) metadata: Option<&'a Struct>,
    /// Number of charges, which follow those of the earlier descriptors.
    pub(super) charges: usize,
}

/// Hits of a descriptor: the units to charge or to refund.
struct Hits {
    /// Number of units, if it is explicit.
    cost: Option<u64>,
    action: Action,
    /// Whether it is an explicit refund of 0, whose status is OK even if the limit is exceeded.
    never_denies: bool,
    /// Hold of the request, if the descriptor has its id.
    hold: Option<Arc<Hold>>,
}

impl Hits {
    fn new(
        envoy: &EnvoyConfig,
        request: &RateLimitRequest,
        descriptor: &RateLimitDescriptor,
    ) -> Self {
        let is_refund = descriptor.is_negative_hits;
        let explicit = match descriptor.hits_addend {
            None if request.hits_addend == 0 => None,
            None => Some(u64::from(request.hits_addend)),
            own => own,
        };
        // Explicit hits may report finished work, for which Envoy ignores the response, so they
        // are recorded even beyond the limit. Explicit hits of 0 ask whether it is exceeded.
        let action = match explicit {
            Some(0) => Action::Peek,
            _ if is_refund => Action::Refund,
            Some(_) => Action::Report,
            None => Action::Acquire,
        };
        // Only clients with an invalid id get no hold that they can end.
        let id = descriptor.entries.iter().find(|entry| Some(&entry.key) == envoy.hold_id.as_ref());
        let hold = id.and_then(|entry| Hold::new(entry.value.as_str()).ok()).map(Arc::new);
        let never_denies = is_refund && action == Action::Peek;
        Self { cost: explicit, action, never_denies, hold }
    }

    /// Returns the action on a limit whose units a request holds until it ends, and the units.
    /// `reserve`: those of its start, if the end reports which of them were used.
    fn on_held(&self, reserve: Option<u64>) -> (Action, Option<u64>) {
        match (self.action, reserve) {
            (Action::Acquire, Some(units)) => (Action::Acquire, Some(units)),
            (Action::Report | Action::Peek, Some(_))
                if self.hold.is_some() && !self.never_denies =>
            {
                (Action::Commit, self.cost)
            }
            // The start of a request that takes several.
            (Action::Report, None) => (Action::Acquire, self.cost),
            // Envoy sends the end of denied requests, too. Without an id it would end another one.
            (Action::Refund, None) if self.hold.is_none() => (Action::Peek, Some(0)),
            (action, _) => (action, self.cost),
        }
    }

    /// Returns the charge with these hits.
    fn apply_to<'a>(
        &self,
        charge: PreparedCharge<'a>,
        enforcement: Enforcement,
        reserve: Option<u64>,
    ) -> PreparedCharge<'a> {
        let is_held = reserve.is_some() || charge.quota().is_some_and(Quota::is_concurrency);
        let (action, cost) = if is_held { self.on_held(reserve) } else { (self.action, self.cost) };
        // A failed refund is answered with OK, too: an error would let the other descriptors pass.
        let ignores_errors =
            self.action == Action::Refund && charge.on_store_failure() != OnStoreFailure::Error;
        let is_ignored = self.never_denies || ignores_errors;
        let enforcement = if is_ignored { Enforcement::Shadow } else { enforcement };
        let charge = match cost {
            Some(cost) => charge.with_cost(cost),
            None => charge,
        };
        let charge = match &self.hold {
            Some(hold) if is_held && action != Action::Peek => charge.with_hold(Arc::clone(hold)),
            _ => charge,
        };
        // Negative hits have no time. As upstream does, they are taken from the current count.
        charge
            .with_action(action)
            .with_unknown_time_allowed()
            .with_capped_cost()
            .with_enforcement(enforcement)
    }
}

/// Returns a plan for each descriptor, and the charges of all descriptors.
pub(super) fn for_request<'a>(
    active: &'a ActiveConfig,
    request: &RateLimitRequest,
) -> Result<(Vec<DescriptorPlan<'a>>, Vec<PreparedCharge<'a>>), String> {
    let found_rules: Vec<Option<MatchedRule<'_>>> = request
        .descriptors
        .iter()
        .map(|descriptor| match descriptor.limit {
            Some(_) => None,
            None => active.envoy.rules.find(&request.domain, entries(&active.envoy, descriptor)),
        })
        .collect();
    let replaced: Vec<&str> = found_rules
        .iter()
        .flatten()
        .flat_map(|matched| matched.rule.replaces.iter().map(String::as_str))
        .collect();
    let is_replaced =
        |rule: &Rule| rule.name.as_deref().is_some_and(|name| replaced.contains(&name));
    let mut plans = Vec::with_capacity(found_rules.len());
    let mut charges = Vec::with_capacity(found_rules.len());
    for (descriptor, matched) in request.descriptors.iter().zip(found_rules) {
        let hits = Hits::new(&active.envoy, request, descriptor);
        plans.push(match (descriptor.limit, matched) {
            (Some(limit), _) => {
                by_override(active, &request.domain, descriptor, limit, &hits, &mut charges)?
            }
            (None, None) => by_policies(active, &request.domain, descriptor, &hits, &mut charges)?,
            (None, Some(matched))
                if is_replaced(matched.rule) && matched.rule.limit != Limit::Unlimited =>
            {
                DescriptorPlan::NoLimit
            }
            (None, Some(matched)) => by_rule(&active.envoy, matched, &hits, &mut charges),
        });
    }
    Ok((plans, charges))
}

/// Returns the keys and values of a descriptor, without the id of the request.
fn entries<'a>(
    envoy: &'a EnvoyConfig,
    descriptor: &'a RateLimitDescriptor,
) -> impl Iterator<Item = (&'a str, &'a str)> {
    let others =
        descriptor.entries.iter().filter(|entry| Some(&entry.key) != envoy.hold_id.as_ref());
    others.map(|entry| (entry.key.as_str(), entry.value.as_str()))
}

/// Charges by a rule of the files.
fn by_rule<'a>(
    envoy: &EnvoyConfig,
    matched: MatchedRule<'a>,
    hits: &Hits,
    charges: &mut Vec<PreparedCharge<'a>>,
) -> DescriptorPlan<'a> {
    let MatchedRule { rule, metric, key } = matched;
    let (unit, limit, charge) = match &rule.limit {
        Limit::Unlimited => return DescriptorPlan::Unlimited,
        Limit::Zero(unit, window) => {
            let denial = zero_limit_denial(*window);
            (Some(*unit), 0, PreparedCharge::of_zero_limit(&rule.path, key, denial))
        }
        Limit::Quota(unit, quota) => {
            let charge = PreparedCharge::new(&rule.path, key, quota);
            (shown_unit(*unit, quota), quota.limit(), charge)
        }
    };
    let charge = charge.with_on_store_failure(envoy.on_store_failure_of(rule));
    let charge = hits.apply_to(charge, rule.mode.into(), rule.reserve);
    charges.push(charge.with_metric_name(metric));
    let name = rule.name.as_deref();
    let metadata = rule.metadata.as_ref();
    DescriptorPlan::Limited(LimitedDescriptor { limit, unit, name, metadata, charges: 1 })
}

/// Returns the unit for headers of Envoy. Units in flight have no window.
fn shown_unit(unit: Unit, quota: &Quota) -> Option<Unit> {
    (!quota.is_concurrency()).then_some(unit)
}

/// Returns the denial of a limit of 0, with a wait until the next window starts.
fn zero_limit_denial(window: Duration) -> Decision {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let window = duration::micros(window).max(1);
    let wait = Duration::from_micros(window - duration::micros(now) % window);
    Decision::deny(0, wait).with_source(Source::Deny)
}

/// Charges by the limit in the request. It replaces the limit of the descriptor's rule, but counts
/// on, if both have the same window, or the rule limits units in flight.
fn by_override<'a>(
    active: &'a ActiveConfig,
    domain: &str,
    descriptor: &RateLimitDescriptor,
    limit_override: RateLimitOverride,
    hits: &Hits,
    charges: &mut Vec<PreparedCharge<'a>>,
) -> Result<DescriptorPlan<'a>, String> {
    let unit =
        Unit::of_number(limit_override.unit).ok_or("the limit of a descriptor has no unit")?;
    let entries = || entries(&active.envoy, descriptor);
    let found = active.envoy.rules.find(domain, entries());
    let shared = found.and_then(|matched| match &matched.rule.limit {
        Limit::Quota(_, quota) if quota.is_concurrency() || quota.window() == unit.window() => {
            Some((matched, quota))
        }
        _ => None,
    });
    let algorithm = shared.as_ref().map_or(active.envoy.algorithm, |(_, quota)| quota.algorithm());
    let limit = Limit::new(algorithm, limit_override.requests_per_unit, 1, unit)
        .map_err(|error| format!("the limit of a descriptor is invalid: {error}"))?;
    let on_store_failure = shared.as_ref().map_or(active.envoy.on_store_failure, |(matched, _)| {
        active.envoy.on_store_failure_of(matched.rule)
    });
    let limit = match (limit, &shared) {
        (Limit::Quota(unit, quota), Some((_, own))) => {
            Limit::Quota(unit, quota.with_holds(*own.holds()))
        }
        (limit, _) => limit,
    };
    let reserve = shared.as_ref().and_then(|(matched, _)| matched.rule.reserve);
    let (policy, metric) = match shared {
        Some((matched, _)) => (Cow::Borrowed(matched.rule.path.as_str()), matched.metric),
        None => {
            // The metric has no values: clients choose them, so their number is unbounded.
            let without_values = entries().map(|(key, _)| (key, ""));
            let metric = rules::metric_name(domain, without_values);
            (Cow::Owned(rules::override_name(algorithm, unit)), Cow::Owned(metric))
        }
    };
    let key = rules::counter_key(domain, entries());
    let (unit, charge) = match limit {
        Limit::Quota(unit, quota) => {
            (shown_unit(unit, &quota), PreparedCharge::with_own_quota(policy, key, quota))
        }
        _ => {
            let denial = zero_limit_denial(unit.window());
            (Some(unit), PreparedCharge::of_zero_limit(policy, key, denial))
        }
    };
    let charge = charge.with_on_store_failure(on_store_failure);
    let charge = hits.apply_to(charge, Enforcement::Enforce, reserve);
    charges.push(charge.with_metric_name(metric));
    let limit = u64::from(limit_override.requests_per_unit);
    let plan = LimitedDescriptor { limit, unit, name: None, metadata: None, charges: 1 };
    Ok(DescriptorPlan::Limited(plan))
}

/// Charges by policies that reference `domain` or `descriptor.KEY`.
fn by_policies<'a>(
    active: &'a ActiveConfig,
    domain: &str,
    descriptor: &RateLimitDescriptor,
    hits: &Hits,
    charges: &mut Vec<PreparedCharge<'a>>,
) -> Result<DescriptorPlan<'a>, String> {
    let attributes: BTreeMap<String, String> = entries(&active.envoy, descriptor)
        .map(|(key, value)| (format!("descriptor.{key}"), value.to_owned()))
        .chain([("domain".to_owned(), domain.to_owned())])
        .collect();
    let references_envoy = |policy: &Policy| {
        policy.references().any(|name| name == "domain" || name.starts_with("descriptor."))
    };
    let selection = active
        .limiter
        .select_where(&attributes, hits.cost.map(|cost| cost.max(1)), references_envoy)
        .map_err(|error| error.to_string())?;
    let counted = selection.charges.first().and_then(|charge| {
        let policy = active.limiter.policies().get(charge.policy())?;
        Some((policy, charge.quota()?.clone()))
    });
    let rejections = selection.rejected_by.into_iter().chain(selection.shadow_rejections);
    let rejections: Vec<&Policy> = rejections.collect();
    let uncounted = || rejections.first().map(|policy| (*policy, policy.quota().clone()));
    let Some((policy, quota)) = counted.or_else(uncounted) else {
        return Ok(DescriptorPlan::NoLimit);
    };
    let plan = LimitedDescriptor {
        limit: quota.limit(),
        unit: Unit::ALL.into_iter().find(|unit| unit.window() == quota.window()),
        name: Some(policy.name()),
        metadata: None,
        charges: selection.charges.len() + rejections.len(),
    };
    let missing = selection.missing_attribute;
    let rejected = |policy: &'a Policy| {
        PreparedCharge::rejected(policy, missing.filter(|_| policy.mode() == Mode::Enforce))
    };
    charges.extend(selection.charges.into_iter().map(|charge| {
        let enforcement = charge.enforcement();
        hits.apply_to(charge, enforcement, None)
    }));
    charges.extend(
        rejections
            .into_iter()
            .map(|policy| hits.apply_to(rejected(policy), policy.mode().into(), None)),
    );
    Ok(DescriptorPlan::Limited(plan))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidegate_api::envoy::service::ratelimit::v3::rate_limit_response::rate_limit;
    use tidegate_api::envoy::r#type::v3::RateLimitUnit;

    #[test]
    fn units_have_the_same_numbers_in_requests_and_responses() {
        for unit in Unit::ALL {
            let number = unit.number();
            let name = format!("{unit:?}").to_ascii_uppercase();
            let requested = RateLimitUnit::try_from(number).expect("a unit");
            let answered = rate_limit::Unit::try_from(number).expect("a unit");
            assert_eq!((requested.as_str_name(), answered.as_str_name()), (&*name, &*name));
            assert_eq!(Unit::of_number(number), Some(unit));
        }
        assert_eq!([0, 8].map(Unit::of_number), [None; 2]);
    }
}
