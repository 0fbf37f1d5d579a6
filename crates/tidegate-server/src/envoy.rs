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

use crate::engine::{AskError, Engine};
use crate::listener::Request;
use crate::token;

pub(crate) mod rules;

mod grpc;
mod parts;
mod proto;

use grpc::{Body, Reply};
use parts::Part;
use proto::envoy::config::core::v3::HeaderValue;
use proto::envoy::service::ratelimit::v3::rate_limit_response::{Code, DescriptorStatus, RateLimit, rate_limit};
use proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use rules::Unit;

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
    let (parts, mut charges) = parts::of(&live, &request)?;
    engine.ask_envoy(&live, &mut charges).await.map_err(|error| match error {
        // Never a status of UNKNOWN: Envoy's failure_mode_deny decides.
        AskError::Store(error) => {
            tracing::warn!(%error, "the store could not decide");
            Status::unavailable("the store cannot decide now")
        }
        other => Status::invalid_argument(other.to_string()),
    })?;
    let mut decisions = charges.iter().filter_map(|charge| charge.decision.as_ref());
    let mut answer = Overall::default();
    for part in &parts {
        answer.add(part, &mut decisions);
    }
    Ok(grpc::reply(&answer.into_response()))
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
    denied: bool,
    /// Descriptors in quota mode, and how many of them are over their limit: together they deny only if all are.
    in_quota_mode: (usize, usize),
    retry_after: Duration,
}

impl Overall {
    /// Takes as many decisions as the part has charges.
    fn add<'a>(&mut self, part: &Part<'_>, decisions: &mut impl Iterator<Item = &'a Decision>) {
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
                let leading = decisions.take(part.charges).min_by_key(|decision| decision.rank());
                let Some(leading) = leading else { return self.statuses.push(ok) };
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
                    current_limit: Some(current_limit(part.limit, part.unit, part.name)),
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
        let retry_after = || {
            let wait = whole_seconds(self.retry_after).seconds.max(1);
            HeaderValue { key: "retry-after".to_owned(), value: wait.to_string() }
        };
        RateLimitResponse {
            overall_code: if denied { Code::OverLimit } else { Code::Ok }.into(),
            statuses: self.statuses,
            response_headers_to_add: if denied { vec![retry_after()] } else { Vec::new() },
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
