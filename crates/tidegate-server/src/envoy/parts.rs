//! What each descriptor of a request comes to: by the rules of the files, by its own limit, or by our policies.

use std::borrow::Cow;
use std::collections::BTreeMap;

use tidegate::Mode;
use tonic::Status;

use super::proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use super::proto::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::RateLimitOverride;
use super::proto::envoy::service::ratelimit::v3::RateLimitRequest;
use super::proto::envoy::r#type::v3::RateLimitUnit;
use super::rules::{self, Found, Limit, Rule, Unit};
use crate::engine::{EnvoyCharge, Live};

/// What a descriptor comes to before anybody is asked.
pub(super) enum Part<'a> {
    /// Nothing limits it.
    Free,
    /// A rule says that nothing does.
    Unlimited,
    /// A limit of 0.
    Never {
        unit: Unit,
        shadow: bool,
    },
    Charged(ChargedPart<'a>),
}

pub(super) struct ChargedPart<'a> {
    pub(super) limit: u64,
    pub(super) unit: Option<Unit>,
    pub(super) name: Option<&'a str>,
    pub(super) shadow: bool,
    pub(super) quota_mode: bool,
    /// How many of the request's charges are its own: the next ones after those of the descriptors before it.
    pub(super) charges: usize,
}

/// What a descriptor takes.
#[derive(Clone, Copy)]
struct Hits {
    cost: u64,
    peek: bool,
}

impl Hits {
    fn of(request: &RateLimitRequest, descriptor: &RateLimitDescriptor) -> Self {
        match descriptor.hits_addend {
            Some(0) => Self { cost: 1, peek: true },
            Some(hits) => Self { cost: hits, peek: false },
            None => Self { cost: u64::from(request.hits_addend.max(1)), peek: false },
        }
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
    let replaced: Vec<&str> =
        found.iter().flatten().flat_map(|found| found.rule.replaces.iter().map(String::as_str)).collect();
    let is_replaced = |rule: &Rule| rule.name.as_deref().is_some_and(|name| replaced.contains(&name));
    let mut parts = Vec::with_capacity(found.len());
    let mut charges = Vec::with_capacity(found.len());
    for (descriptor, found) in request.descriptors.iter().zip(found) {
        let hits = Hits::of(request, descriptor);
        parts.push(match (descriptor.limit, found) {
            (Some(wanted), _) => overridden(live, &request.domain, descriptor, wanted, hits, &mut charges)?,
            (None, None) => by_policies(live, &request.domain, descriptor, hits, &mut charges)?,
            (None, Some(found)) if is_replaced(found.rule) && found.rule.limit != Limit::Unlimited => Part::Free,
            (None, Some(found)) => by_rule(found, hits, &mut charges),
        });
    }
    Ok((parts, charges))
}

fn entries(descriptor: &RateLimitDescriptor) -> impl Iterator<Item = (&str, &str)> {
    descriptor.entries.iter().map(|entry| (entry.key.as_str(), entry.value.as_str()))
}

/// A rule of the files.
fn by_rule<'a>(found: Found<'a>, Hits { cost, peek }: Hits, charges: &mut Vec<EnvoyCharge<'a>>) -> Part<'a> {
    let Found { rule, metric, key } = found;
    let (unit, quota) = match &rule.limit {
        Limit::Unlimited => return Part::Unlimited,
        Limit::Never(unit) => return Part::Never { unit: *unit, shadow: rule.shadow_mode },
        Limit::Quota(unit, quota) => (*unit, quota),
    };
    charges.push(EnvoyCharge {
        policy: Cow::Borrowed(&rule.path),
        metric,
        key,
        quota: Cow::Borrowed(quota),
        cost,
        peek,
        alone: rule.shadow_mode || rule.quota_mode,
        decision: None,
    });
    Part::Charged(ChargedPart {
        limit: quota.limit(),
        unit: Some(unit),
        name: rule.name.as_deref(),
        shadow: rule.shadow_mode,
        quota_mode: rule.quota_mode,
        charges: 1,
    })
}

/// A limit that the request brings itself.
fn overridden<'a>(
    live: &Live,
    domain: &str,
    descriptor: &RateLimitDescriptor,
    wanted: RateLimitOverride,
    Hits { cost, peek }: Hits,
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
        RateLimitUnit::Unknown => return Err(Status::invalid_argument("a descriptor's limit has no unit")),
    };
    let limit = Limit::new(live.envoy.algorithm, wanted.requests_per_unit, unit)
        .map_err(|error| Status::invalid_argument(format!("a descriptor's limit: {error}")))?;
    let Limit::Quota(unit, quota) = limit else { return Ok(Part::Never { unit, shadow: false }) };
    let limit = quota.limit();
    charges.push(EnvoyCharge {
        policy: Cow::Owned(format!("override-{}-{}", quota.algorithm(), unit.as_str())),
        metric: Cow::Owned(rules::metric_name(domain, entries(descriptor))),
        key: rules::counter_key(domain, entries(descriptor)),
        quota: Cow::Owned(quota),
        cost,
        peek,
        alone: false,
        decision: None,
    });
    let part = ChargedPart { limit, unit: Some(unit), name: None, shadow: false, quota_mode: false, charges: 1 };
    Ok(Part::Charged(part))
}

/// Our own policies that speak of `domain` or `descriptor.KEY`.
fn by_policies<'a>(
    live: &'a Live,
    domain: &str,
    descriptor: &RateLimitDescriptor,
    Hits { cost, peek }: Hits,
    charges: &mut Vec<EnvoyCharge<'a>>,
) -> Result<Part<'a>, Status> {
    let attributes: BTreeMap<String, String> = descriptor
        .entries
        .iter()
        .map(|entry| (format!("descriptor.{}", entry.key), entry.value.clone()))
        .chain([("domain".to_owned(), domain.to_owned())])
        .collect();
    let selection =
        live.policies.select(&attributes, Some(cost)).map_err(|error| Status::invalid_argument(error.to_string()))?;
    let ours = |name: &str| name == "domain" || name.starts_with("descriptor.");
    let mut selected = selection.charges;
    selected.retain(|selected| selected.policy().speaks_of(ours));
    let Some(first) = selected.first() else { return Ok(Part::Free) };
    let (policy, quota) = (first.policy(), first.quota());
    let part = ChargedPart {
        limit: quota.limit(),
        unit: Unit::ALL.into_iter().find(|unit| unit.window() == quota.window()),
        name: Some(policy.name()),
        shadow: selected.iter().all(|selected| selected.policy().mode() == Mode::Shadow),
        quota_mode: false,
        charges: selected.len(),
    };
    charges.extend(selected.into_iter().map(|selected| EnvoyCharge {
        policy: Cow::Borrowed(selected.policy().name()),
        metric: Cow::Borrowed(selected.policy().name()),
        quota: Cow::Borrowed(selected.quota()),
        cost,
        peek,
        alone: selected.policy().mode() == Mode::Shadow,
        decision: None,
        key: selected.into_key(),
    }));
    Ok(Part::Charged(part))
}
