//! What each descriptor of a request comes to: by the rules of the files, by its own limit, or by
//! our policies.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tidegate::{Action, Decision, Mode, Quota, Source};
use tonic::Status;

use super::proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use super::proto::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::RateLimitOverride;
use super::proto::envoy::service::ratelimit::v3::RateLimitRequest;
use super::proto::envoy::r#type::v3::RateLimitUnit;
use super::rules::{self, Found, Limit, Rule, RuleMode, Unit};
use crate::engine::{EnvoyCharge, Live};

/// What a descriptor comes to before anybody is asked.
pub(super) enum Part<'a> {
    /// Nothing limits it.
    Free,
    /// A rule says that nothing does.
    Unlimited,
    Charged(ChargedPart<'a>),
}

pub(super) struct ChargedPart<'a> {
    pub(super) limit: u64,
    pub(super) unit: Option<Unit>,
    pub(super) name: Option<&'a str>,
    /// How many of the request's charges are its own: the next ones after those of the descriptors
    /// before it.
    pub(super) charges: usize,
}

/// What a descriptor charges, or returns.
#[derive(Clone, Copy)]
struct Hits {
    cost: u64,
    action: Action,
    /// Whatever is left, it is told as OK.
    never_denies: bool,
}

impl Hits {
    fn of(request: &RateLimitRequest, descriptor: &RateLimitDescriptor) -> Self {
        let returns = descriptor.is_negative_hits;
        let explicit = match descriptor.hits_addend {
            None if request.hits_addend == 0 => None,
            None => Some(u64::from(request.hits_addend)),
            own => own,
        };
        // An explicit number may be that of finished work, whose answer Envoy ignores: it is
        // recorded even if it does not fit. An explicit 0 asks whether more is recorded than the
        // limit.
        let action = match explicit {
            Some(0) => Action::Peek,
            _ if returns => Action::Refund,
            Some(_) => Action::Report,
            None => Action::Acquire,
        };
        Self { cost: explicit.unwrap_or(1), action, never_denies: returns }
    }

    fn mode(self, mode: RuleMode) -> RuleMode {
        if self.never_denies { RuleMode::Shadow } else { mode }
    }
}

/// A part for each descriptor, and the charges of all.
pub(super) fn of<'a>(
    live: &'a Live,
    request: &RateLimitRequest,
) -> Result<(Vec<Part<'a>>, Vec<EnvoyCharge<'a>>), Status> {
    let found: Vec<Option<Found<'_>>> = request
        .descriptors
        .iter()
        .map(|descriptor| match descriptor.limit {
            Some(_) => None,
            None => live.envoy.rules.find(&request.domain, entries(descriptor)),
        })
        .collect();
    let replaced: Vec<&str> = found
        .iter()
        .flatten()
        .flat_map(|found| found.rule.replaces.iter().map(String::as_str))
        .collect();
    let is_replaced =
        |rule: &Rule| rule.name.as_deref().is_some_and(|name| replaced.contains(&name));
    let mut parts = Vec::with_capacity(found.len());
    let mut charges = Vec::with_capacity(found.len());
    for (descriptor, found) in request.descriptors.iter().zip(found) {
        let hits = Hits::of(request, descriptor);
        parts.push(match (descriptor.limit, found) {
            (Some(wanted), _) => {
                overridden(live, &request.domain, descriptor, wanted, hits, &mut charges)?
            }
            (None, None) => by_policies(live, &request.domain, descriptor, hits, &mut charges)?,
            (None, Some(found))
                if is_replaced(found.rule) && found.rule.limit != Limit::Unlimited =>
            {
                Part::Free
            }
            (None, Some(found)) => by_rule(found, hits, &mut charges),
        });
    }
    Ok((parts, charges))
}

fn entries(descriptor: &RateLimitDescriptor) -> impl Iterator<Item = (&str, &str)> {
    descriptor.entries.iter().map(|entry| (entry.key.as_str(), entry.value.as_str()))
}

/// A rule of the files.
fn by_rule<'a>(found: Found<'a>, hits: Hits, charges: &mut Vec<EnvoyCharge<'a>>) -> Part<'a> {
    let Found { rule, metric, key } = found;
    let (unit, quota, decision) = match &rule.limit {
        Limit::Unlimited => return Part::Unlimited,
        Limit::Never(unit, window) => (*unit, None, Some(denied_until_next(*window))),
        Limit::Quota(unit, quota) => (*unit, Some(quota), None),
    };
    charges.push(EnvoyCharge {
        policy: Cow::Borrowed(&rule.path),
        metric,
        key,
        quota: quota.map(Cow::Borrowed),
        cost: hits.cost,
        action: hits.action,
        mode: hits.mode(rule.mode),
        decision,
    });
    let limit = quota.map_or(0, Quota::limit);
    Part::Charged(ChargedPart { limit, unit: Some(unit), name: rule.name.as_deref(), charges: 1 })
}

/// A limit of 0: denied without asking anybody, until the next window of the clock begins.
fn denied_until_next(window: Duration) -> Decision {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let micros = window.as_micros().max(1);
    let left =
        Duration::from_micros(u64::try_from(micros - now.as_micros() % micros).unwrap_or(u64::MAX));
    Decision {
        allowed: false,
        limit: 0,
        remaining: 0,
        retry_after: left,
        reset_after: left,
        delay: Duration::ZERO,
        source: Source::Deny,
    }
}

/// A limit that the request brings itself.
fn overridden<'a>(
    live: &Live,
    domain: &str,
    descriptor: &RateLimitDescriptor,
    wanted: RateLimitOverride,
    hits: Hits,
    charges: &mut Vec<EnvoyCharge<'a>>,
) -> Result<Part<'a>, Status> {
    let unit = match wanted.unit() {
        RateLimitUnit::Second => Unit::Second,
        RateLimitUnit::Minute => Unit::Minute,
        RateLimitUnit::Hour => Unit::Hour,
        RateLimitUnit::Day => Unit::Day,
        RateLimitUnit::Week => Unit::Week,
        RateLimitUnit::Month => Unit::Month,
        RateLimitUnit::Year => Unit::Year,
        RateLimitUnit::Unknown => {
            return Err(Status::invalid_argument("a descriptor's limit has no unit"));
        }
    };
    let limit = Limit::new(live.envoy.algorithm, wanted.requests_per_unit, 1, unit)
        .map_err(|error| Status::invalid_argument(format!("a descriptor's limit: {error}")))?;
    let (quota, decision) = match limit {
        Limit::Quota(_, quota) => (Some(quota), None),
        _ => (None, Some(denied_until_next(unit.window()))),
    };
    let limit = u64::from(wanted.requests_per_unit);
    // Clients choose the values, which are keys: their number has no bound.
    let without_values = entries(descriptor).map(|(key, _)| (key, ""));
    charges.push(EnvoyCharge {
        policy: Cow::Owned(rules::override_name(live.envoy.algorithm, unit)),
        metric: Cow::Owned(rules::metric_name(domain, without_values)),
        key: rules::counter_key(domain, entries(descriptor)),
        quota: quota.map(Cow::Owned),
        cost: hits.cost,
        action: hits.action,
        mode: hits.mode(RuleMode::Enforce),
        decision,
    });
    Ok(Part::Charged(ChargedPart { limit, unit: Some(unit), name: None, charges: 1 }))
}

/// Our own policies that speak of `domain` or `descriptor.KEY`.
fn by_policies<'a>(
    live: &'a Live,
    domain: &str,
    descriptor: &RateLimitDescriptor,
    hits: Hits,
    charges: &mut Vec<EnvoyCharge<'a>>,
) -> Result<Part<'a>, Status> {
    let attributes: BTreeMap<String, String> = descriptor
        .entries
        .iter()
        .map(|entry| (format!("descriptor.{}", entry.key), entry.value.clone()))
        .chain([("domain".to_owned(), domain.to_owned())])
        .collect();
    let selection = live
        .policies
        .select(&attributes, Some(hits.cost.max(1)))
        .map_err(|error| Status::invalid_argument(error.to_string()))?;
    let ours = |name: &str| name == "domain" || name.starts_with("descriptor.");
    let mut selected = selection.charges;
    selected.retain(|selected| selected.policy().speaks_of(ours));
    let Some(first) = selected.first() else { return Ok(Part::Free) };
    let (policy, quota) = (first.policy(), first.quota());
    let part = ChargedPart {
        limit: quota.limit(),
        unit: Unit::ALL.into_iter().find(|unit| unit.window() == quota.window()),
        name: Some(policy.name()),
        charges: selected.len(),
    };
    charges.extend(selected.into_iter().map(|selected| EnvoyCharge {
        policy: Cow::Borrowed(selected.policy().name()),
        metric: Cow::Borrowed(selected.policy().name()),
        quota: Some(Cow::Borrowed(selected.quota())),
        cost: hits.cost,
        action: hits.action,
        mode: hits.mode(match selected.policy().mode() {
            Mode::Shadow => RuleMode::Shadow,
            Mode::Enforce => RuleMode::Enforce,
        }),
        decision: None,
        key: selected.into_key(),
    }));
    Ok(Part::Charged(part))
}
