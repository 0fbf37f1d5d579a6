//! Envoy's rate limit service, v3: translates descriptors and statuses, decides nothing.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::service::{Service, service_fn};
use tonic::Status;
use tonic_health::ServingStatus;
use tower::ServiceExt as _;

use crate::engine::{AskError, Engine, EnvoyCharge};
use crate::listener::Request;
use crate::{logs, token};

pub(crate) mod rules;

mod grpc;
mod parts;
mod proto;

use grpc::{Body, Reply};
use parts::Part;
use proto::envoy::config::core::v3::HeaderValue;
use proto::envoy::service::ratelimit::v3::rate_limit_response::{
    Code, DescriptorStatus, RateLimit, rate_limit,
};
use proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use rules::{RuleMode, Unit};

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
        let reflection = || {
            tonic_reflection::server::Builder::configure()
                .register_encoded_file_descriptor_set(DESCRIPTORS)
        };
        let others = tonic::service::Routes::new(health)
            .add_service(reflection().build_v1()?)
            .add_service(reflection().build_v1alpha()?);
        Ok(Arc::new(Self { engine, others: others.into_axum_router() }))
    }

    /// For one connection. It is hyper's own service, as that of the HTTP API is: only what is
    /// seldom asked goes to tonic.
    pub(crate) fn service(
        self: &Arc<Self>,
    ) -> impl Service<Request, Response = Reply, Error = Infallible, Future: Send> + Send + use<>
    {
        let envoy = Arc::clone(self);
        service_fn(move |request: Request| {
            let envoy = Arc::clone(&envoy);
            async move {
                if request.uri().path() != SHOULD_RATE_LIMIT {
                    let reply =
                        grpc::in_time(Box::pin(envoy.others.clone().oneshot(request))).await;
                    return reply.map_or_else(
                        |late| Ok(late.into_http()),
                        |reply| Ok(reply?.map(Body::Other)),
                    );
                }
                match grpc::refusal(&request) {
                    Some(refusal) => Ok(refusal),
                    None => Ok(should_rate_limit(&envoy.engine, request)
                        .await
                        .unwrap_or_else(Status::into_http)),
                }
            }
        })
    }
}

async fn should_rate_limit(engine: &Engine, request: Request) -> Result<Reply, Status> {
    let live = engine.live();
    let (head, body) = request.into_parts();
    token::check(live.api_token.as_ref(), &head.headers).map_err(Status::unauthenticated)?;
    grpc::check_encoding(&head.headers)?;
    let request: RateLimitRequest = grpc::read(body, MAX_MESSAGE).await?;
    if request.domain.is_empty() {
        return Err(Status::invalid_argument(
            "the domain is empty: it must be that of the rules to apply",
        ));
    }
    if request.descriptors.is_empty() || request.descriptors.len() > MAX_DESCRIPTORS {
        return Err(Status::invalid_argument(format!(
            "{} descriptors: from 1 to {MAX_DESCRIPTORS} are allowed",
            request.descriptors.len()
        )));
    }
    let (parts, mut charges) = parts::of(&live, &request)?;
    let allowed =
        engine.ask_envoy(&live, &head.headers, &mut charges).await.map_err(
            |error| match error {
                // Never a status of UNKNOWN: Envoy's failure_mode_deny decides.
                AskError::Store(error) => {
                    logs::store_failed(&error);
                    Status::unavailable("the store cannot decide now")
                }
                other => Status::invalid_argument(other.to_string()),
            },
        )?;
    let mut charges = charges.iter();
    let mut answer = Overall::default();
    for part in &parts {
        answer.add(part, &mut charges);
    }
    Ok(grpc::reply(&answer.into_response(allowed)))
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

/// The answer as it grows, descriptor by descriptor.
#[derive(Default)]
struct Overall {
    statuses: Vec<DescriptorStatus>,
    retry_after: Duration,
}

impl Overall {
    /// Takes as many charges as the part has.
    fn add<'a>(
        &mut self,
        part: &Part<'_>,
        charges: &mut impl Iterator<Item = &'a EnvoyCharge<'a>>,
    ) {
        let ok = DescriptorStatus { code: Code::Ok.into(), ..DescriptorStatus::default() };
        let status = match part {
            Part::Free => ok,
            Part::Unlimited => DescriptorStatus { limit_remaining: u32::MAX, ..ok },
            Part::Charged(part) => {
                let decided = |charge: &EnvoyCharge<'_>| {
                    Some((charge.mode == RuleMode::Shadow, charge.decision?))
                };
                // What is only looked at leads only where nothing is enforced, and never denies.
                let decided = charges.take(part.charges).filter_map(decided);
                let Some((shadow, leading)) =
                    decided.min_by_key(|(shadow, decision)| (*shadow, decision.rank()))
                else {
                    return self.statuses.push(ok);
                };
                let over = !leading.allowed && !shadow;
                if over {
                    self.retry_after = self.retry_after.max(leading.retry_after);
                }
                let reset = if leading.allowed { leading.reset_after } else { leading.retry_after };
                DescriptorStatus {
                    code: if over { Code::OverLimit } else { Code::Ok }.into(),
                    current_limit: Some(current_limit(part.limit, part.unit, part.name)),
                    limit_remaining: u32::try_from(leading.remaining).unwrap_or(u32::MAX),
                    duration_until_reset: Some(whole_seconds(reset)),
                }
            }
        };
        self.statuses.push(status);
    }

    fn into_response(self, allowed: bool) -> RateLimitResponse {
        let retry_after = || {
            let wait = whole_seconds(self.retry_after).seconds.max(1);
            HeaderValue { key: "retry-after".to_owned(), value: wait.to_string() }
        };
        RateLimitResponse {
            overall_code: if allowed { Code::Ok } else { Code::OverLimit }.into(),
            statuses: self.statuses,
            response_headers_to_add: if allowed { Vec::new() } else { vec![retry_after()] },
        }
    }
}

/// Rounded up: Envoy's header has whole seconds, and who waits them must get in.
fn whole_seconds(duration: Duration) -> prost_types::Duration {
    let seconds = duration.as_secs() + u64::from(duration.subsec_nanos() > 0);
    prost_types::Duration { seconds: i64::try_from(seconds).unwrap_or(i64::MAX), nanos: 0 }
}
