//! Envoy's rate limit service, v3: translates descriptors and statuses, decides nothing.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::Router;
use hyper::service::{Service, service_fn};
use tidegate::Decision;
use tonic::Status;
use tonic_health::ServingStatus;
use tower::ServiceExt as _;

use crate::engine::{AskError, Engine, EnvoyCharge, Live};
use crate::listener::Request;
use crate::token;

pub(crate) mod rules;

mod grpc;
mod proto;

use grpc::{Body, Reply};
use proto::envoy::config::core::v3::HeaderValue;
use proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use proto::envoy::service::ratelimit::v3::rate_limit_response::{Code, DescriptorStatus, RateLimit, rate_limit};
use proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use proto::envoy::r#type::v3::RateLimitUnit;
use rules::{Limit, Rule, Unit};

const SERVICE: &str = "envoy.service.ratelimit.v3.RateLimitService";
const SHOULD_RATE_LIMIT: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
/// More descriptors in one request are a mistake, or an attack.
const MAX_DESCRIPTORS: usize = 100;
const MAX_MESSAGE: usize = 256 * 1024;
/// What reflection answers with.
const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/rls.bin"));

/// The service, with gRPC health and reflection.
pub(crate) struct Envoy {
    engine: Arc<Engine>,
    others: Router,
}

impl Envoy {
    pub(crate) async fn new(engine: Arc<Engine>) -> anyhow::Result<Arc<Self>> {
        let (reporter, health) = tonic_health::server::health_reporter();
        reporter.set_service_status(SERVICE, ServingStatus::Serving).await;
        let reflection =
            || tonic_reflection::server::Builder::configure().register_encoded_file_descriptor_set(DESCRIPTORS);
        let others = tonic::service::Routes::new(health)
            .add_service(reflection().build_v1()?)
            .add_service(reflection().build_v1alpha()?);
        Ok(Arc::new(Self { engine, others: others.into_axum_router() }))
    }

    /// For one connection. It is hyper's own service, as that of the HTTP API is: only what is seldom asked goes to tonic.
    pub(crate) fn service(
        self: &Arc<Self>,
    ) -> impl Service<Request, Response = Reply, Error = Infallible, Future: Send> + Send + use<> {
        let envoy = Arc::clone(self);
        service_fn(move |request: Request| {
            let envoy = Arc::clone(&envoy);
            async move {
                if request.uri().path() != SHOULD_RATE_LIMIT {
                    let reply = Box::pin(envoy.others.clone().oneshot(request)).await?;
                    return Ok(reply.map(Body::Other));
                }
                match grpc::refusal(&request) {
                    Some(refusal) => Ok(refusal),
                    None => Ok(should_rate_limit(&envoy.engine, request).await.unwrap_or_else(Status::into_http)),
                }
            }
        })
    }
}

/// What a descriptor comes to before anybody is asked.
enum Part {
    /// Nothing limits it.
    Free,
    /// A rule says that nothing does.
    Unlimited,
    /// A limit of 0.
    Never {
        unit: Unit,
        shadow: bool,
    },
    Charged(ChargedPart),
}

struct ChargedPart {
    limit: RateLimit,
    shadow: bool,
    quota_mode: bool,
    charges: Vec<EnvoyCharge>,
}

async fn should_rate_limit(engine: &Engine, request: Request) -> Result<Reply, Status> {
    let live = engine.live();
    let (head, body) = request.into_parts();
    token::check(live.api_token.as_ref(), &head.headers).map_err(Status::unauthenticated)?;
    grpc::check_encoding(&head.headers)?;
    let request: RateLimitRequest = grpc::read(body, MAX_MESSAGE).await?;
    if request.domain.is_empty() {
        return Err(Status::invalid_argument("the domain is empty: it must be that of the rules to apply"));
    }
    if request.descriptors.is_empty() || request.descriptors.len() > MAX_DESCRIPTORS {
        return Err(Status::invalid_argument(format!(
            "{} descriptors: from 1 to {MAX_DESCRIPTORS} are allowed",
            request.descriptors.len()
        )));
    }
    let parts = parts(&live, &request)?;
    let charges: Vec<&EnvoyCharge> = parts.iter().flat_map(Part::charges).collect();
    let mut decisions = engine
        .ask_envoy(&live, &charges)
        .await
        .map_err(|error| match error {
            // Never a status of UNKNOWN: Envoy's failure_mode_deny decides.
            AskError::Store(error) => {
                tracing::warn!(%error, "the store could not decide");
                Status::unavailable("the store cannot decide now")
            }
            other => Status::invalid_argument(other.to_string()),
        })?
        .into_iter();
    let mut answer = Overall::default();
    for part in &parts {
        let decided: Vec<Decision> = decisions.by_ref().take(part.charges().len()).collect();
        answer.add(part, &decided);
    }
    Ok(grpc::reply(&answer.into_response()))
}

/// Each descriptor, by the rules of the files, by its own limit, or by our policies.
fn parts(live: &Live, request: &RateLimitRequest) -> Result<Vec<Part>, Status> {
    let found: Vec<Option<rules::Found<'_>>> = request
        .descriptors
        .iter()
        .map(|descriptor| match descriptor.limit {
            Some(_) => None,
            None => live.envoy.rules.find(&request.domain, &entries(descriptor)),
        })
        .collect();
    let replaced: Vec<&str> =
        found.iter().flatten().flat_map(|found| found.rule.replaces.iter().map(String::as_str)).collect();
    let is_replaced = |rule: &Rule| rule.name.as_deref().is_some_and(|name| replaced.contains(&name));
    let part = |(descriptor, found): (&RateLimitDescriptor, Option<rules::Found<'_>>)| {
        let (cost, peek) = match &descriptor.hits_addend {
            Some(0) => (1, true),
            Some(hits) => (*hits, false),
            None => (u64::from(request.hits_addend.max(1)), false),
        };
        if let Some(wanted) = &descriptor.limit {
            return overridden(live, &request.domain, descriptor, wanted.requests_per_unit, wanted.unit(), cost, peek);
        }
        let Some(found) = found else { return by_policies(live, &request.domain, descriptor, cost, peek) };
        Ok(match &found.rule.limit {
            Limit::Unlimited => Part::Unlimited,
            _ if is_replaced(found.rule) => Part::Free,
            Limit::Never(unit) => Part::Never { unit: *unit, shadow: found.rule.shadow_mode },
            Limit::Quota(unit, quota) => Part::Charged(ChargedPart {
                limit: current_limit(quota.limit(), Some(*unit), found.rule.name.as_deref()),
                shadow: found.rule.shadow_mode,
                quota_mode: found.rule.quota_mode,
                charges: vec![EnvoyCharge {
                    policy: found.rule.path.clone(),
                    metric: found.metric.into_owned(),
                    key: found.key,
                    quota: quota.clone(),
                    cost,
                    peek,
                    alone: found.rule.shadow_mode || found.rule.quota_mode,
                }],
            }),
        })
    };
    request.descriptors.iter().zip(found).map(part).collect()
}

fn entries(descriptor: &RateLimitDescriptor) -> Vec<(&str, &str)> {
    descriptor.entries.iter().map(|entry| (entry.key.as_str(), entry.value.as_str())).collect()
}

/// A limit that the request brings itself.
fn overridden(
    live: &Live,
    domain: &str,
    descriptor: &RateLimitDescriptor,
    requests: u32,
    unit: RateLimitUnit,
    cost: u64,
    peek: bool,
) -> Result<Part, Status> {
    let unit = match unit {
        RateLimitUnit::Second => Unit::Second,
        RateLimitUnit::Minute => Unit::Minute,
        RateLimitUnit::Hour => Unit::Hour,
        RateLimitUnit::Day => Unit::Day,
        RateLimitUnit::Week => Unit::Week,
        RateLimitUnit::Month => Unit::Month,
        RateLimitUnit::Year => Unit::Year,
        RateLimitUnit::Unknown => return Err(Status::invalid_argument("a descriptor's limit has no unit")),
    };
    let limit = Limit::new(live.envoy.algorithm, requests, unit)
        .map_err(|error| Status::invalid_argument(format!("a descriptor's limit: {error}")))?;
    let Limit::Quota(unit, quota) = limit else { return Ok(Part::Never { unit, shadow: false }) };
    let metric = rules::metric_name(domain, entries(descriptor));
    Ok(Part::Charged(ChargedPart {
        limit: current_limit(quota.limit(), Some(unit), None),
        shadow: false,
        quota_mode: false,
        charges: vec![EnvoyCharge {
            policy: format!("override-{}-{}", quota.algorithm(), unit.as_str()),
            metric,
            key: rules::counter_key(domain, entries(descriptor)),
            quota,
            cost,
            peek,
            alone: false,
        }],
    }))
}

/// Our own policies that speak of `domain` or `descriptor.KEY`.
fn by_policies(
    live: &Live,
    domain: &str,
    descriptor: &RateLimitDescriptor,
    cost: u64,
    peek: bool,
) -> Result<Part, Status> {
    let attributes: std::collections::BTreeMap<String, String> = descriptor
        .entries
        .iter()
        .map(|entry| (format!("descriptor.{}", entry.key), entry.value.clone()))
        .chain([("domain".to_owned(), domain.to_owned())])
        .collect();
    let selection =
        live.policies.select(&attributes, Some(cost)).map_err(|error| Status::invalid_argument(error.to_string()))?;
    let ours = |name: &str| name == "domain" || name.starts_with("descriptor.");
    let selected: Vec<_> = selection.charges.iter().filter(|selected| selected.policy().speaks_of(ours)).collect();
    let Some(first) = selected.first() else { return Ok(Part::Free) };
    let shadow = selected.iter().all(|selected| selected.policy().mode() == tidegate::Mode::Shadow);
    let charges = selected
        .iter()
        .map(|selected| EnvoyCharge {
            policy: selected.policy().name().to_owned(),
            metric: selected.policy().name().to_owned(),
            key: selected.key().to_owned(),
            quota: selected.charge().quota().clone(),
            cost,
            peek,
            alone: selected.policy().mode() == tidegate::Mode::Shadow,
        })
        .collect();
    let quota = first.charge().quota().clone();
    let unit = Unit::ALL.into_iter().find(|unit| unit.window() == quota.window());
    let limit = current_limit(quota.limit(), unit, Some(first.policy().name()));
    Ok(Part::Charged(ChargedPart { limit, shadow, quota_mode: false, charges }))
}

fn current_limit(requests: u64, unit: Option<Unit>, name: Option<&str>) -> RateLimit {
    let unit = match unit {
        Some(Unit::Second) => rate_limit::Unit::Second,
        Some(Unit::Minute) => rate_limit::Unit::Minute,
        Some(Unit::Hour) => rate_limit::Unit::Hour,
        Some(Unit::Day) => rate_limit::Unit::Day,
        Some(Unit::Week) => rate_limit::Unit::Week,
        Some(Unit::Month) => rate_limit::Unit::Month,
        Some(Unit::Year) => rate_limit::Unit::Year,
        None => rate_limit::Unit::Unknown,
    };
    RateLimit {
        name: name.unwrap_or_default().to_owned(),
        requests_per_unit: u32::try_from(requests).unwrap_or(u32::MAX),
        unit: unit.into(),
    }
}

impl Part {
    fn charges(&self) -> &[EnvoyCharge] {
        match self {
            Self::Charged(part) => &part.charges,
            _ => &[],
        }
    }
}

/// The answer as it grows, descriptor by descriptor.
#[derive(Default)]
struct Overall {
    statuses: Vec<DescriptorStatus>,
    denied: bool,
    /// Descriptors in quota mode, and how many of them are over their limit: together they deny only if all are.
    in_quota_mode: (usize, usize),
    retry_after: Duration,
}

impl Overall {
    fn add(&mut self, part: &Part, decisions: &[Decision]) {
        let ok = DescriptorStatus { code: Code::Ok.into(), ..DescriptorStatus::default() };
        let status = match part {
            Part::Free => ok,
            Part::Unlimited => DescriptorStatus { limit_remaining: u32::MAX, ..ok },
            Part::Never { unit, shadow } => {
                let wait = until_next(unit.window());
                self.count_denial(*shadow, false, wait);
                DescriptorStatus {
                    code: if *shadow { Code::Ok } else { Code::OverLimit }.into(),
                    current_limit: Some(current_limit(0, Some(*unit), None)),
                    limit_remaining: 0,
                    duration_until_reset: Some(whole_seconds(wait)),
                }
            }
            Part::Charged(part) => {
                let Some(leading) = Decision::most_restrictive(decisions) else { return self.statuses.push(ok) };
                if part.quota_mode {
                    self.in_quota_mode.0 += 1;
                }
                if !leading.allowed {
                    self.count_denial(part.shadow, part.quota_mode, leading.retry_after);
                }
                let over = !leading.allowed && !part.shadow;
                let reset = if leading.allowed { leading.reset_after } else { leading.retry_after };
                DescriptorStatus {
                    code: if over { Code::OverLimit } else { Code::Ok }.into(),
                    current_limit: Some(part.limit.clone()),
                    limit_remaining: u32::try_from(leading.remaining).unwrap_or(u32::MAX),
                    duration_until_reset: Some(whole_seconds(reset)),
                }
            }
        };
        self.statuses.push(status);
    }

    fn count_denial(&mut self, shadow: bool, quota_mode: bool, wait: Duration) {
        if quota_mode {
            self.in_quota_mode.1 += 1;
        } else if !shadow {
            self.denied = true;
        }
        if !shadow {
            self.retry_after = self.retry_after.max(wait);
        }
    }

    fn into_response(self) -> RateLimitResponse {
        let denied = self.denied || (self.in_quota_mode.0 > 0 && self.in_quota_mode.0 == self.in_quota_mode.1);
        let wait = whole_seconds(self.retry_after).seconds.max(1);
        let retry_after = HeaderValue { key: "retry-after".to_owned(), value: wait.to_string() };
        RateLimitResponse {
            overall_code: if denied { Code::OverLimit } else { Code::Ok }.into(),
            statuses: self.statuses,
            response_headers_to_add: if denied { vec![retry_after] } else { Vec::new() },
        }
    }
}

/// Rounded up: Envoy's header has whole seconds, and who waits them must get in.
fn whole_seconds(duration: Duration) -> prost_types::Duration {
    let seconds = duration.as_secs() + u64::from(duration.subsec_nanos() > 0);
    prost_types::Duration { seconds: i64::try_from(seconds).unwrap_or(i64::MAX), nanos: 0 }
}

/// Until the next window of the clock begins.
fn until_next(window: Duration) -> Duration {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let micros = window.as_micros();
    let left = micros - now.as_micros() % micros.max(1);
    Duration::from_micros(u64::try_from(left).unwrap_or(0))
}
