//! Envoy's rate limit service, v3: translates descriptors into a query and decisions into statuses.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use http::HeaderMap;
use hyper::service::{Service, service_fn};
use tidegate::PreparedCharge;
use tidegate::{
    Action, Enforcement, HoldStatus, OnStoreFailure, PolicyDecision, Query, QueryError, Quota,
};
use tokio::sync::watch;
use tonic::Status;
use tonic_health::ServingStatus;
use tower::ServiceExt as _;

use crate::auth::{self, AuthListener};
use crate::logs;
use crate::state::{ActiveConfig, ServerState};
use tidegate_config::{AuthError, Scope};
use tidegate_net::listener::{BufferBudget, Peer, Request};

mod dynamic_metadata;
mod grpc;
mod message_buffer;
mod plan;
mod rejection;
mod request;

use grpc::{GrpcBody, GrpcCallError, GrpcResponse, MessageReader};
use message_buffer::ConnectionBudget;
use plan::DescriptorPlan;
use rejection::Rejection;
pub(crate) use rejection::RejectionCounters;
use tidegate_api::DESCRIPTORS;
use tidegate_api::envoy::config::core::v3::HeaderValue;
use tidegate_api::envoy::service::ratelimit::v3::rate_limit_response::{
    Code, DescriptorStatus, RateLimit,
};
use tidegate_api::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use tidegate_config::envoy::Unit;

const SERVICE: &str = "envoy.service.ratelimit.v3.RateLimitService";
const SHOULD_RATE_LIMIT: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
/// Names for health checks: the whole server, the service, and the name of envoyproxy/ratelimit.
const HEALTH_NAMES: [&str; 3] = ["", SERVICE, "ratelimit"];
/// Reader of requests. The maximum size is that of gRPC servers in general.
const REQUESTS: MessageReader<RateLimitRequest> =
    MessageReader { decode: request::decode, max_bytes: 4 * 1024 * 1024 };
/// Minimum wait in the header of a denial, which has whole seconds.
const MIN_RETRY_AFTER: Duration = Duration::from_secs(1);
/// Maximum size of messages for health and reflection, which are a few names.
const MAX_TONIC_MESSAGE_BYTES: usize = 16 * 1024;

/// Rate limit service, with gRPC health and reflection.
pub(crate) struct Envoy {
    state: Arc<ServerState>,
    rejections: Arc<RejectionCounters>,
    /// Health and reflection.
    tonic_routes: Router,
    buffered: Arc<BufferBudget>,
}

impl Envoy {
    /// Creates the service. Its health is `NOT_SERVING` once `unready` turns true.
    pub(crate) async fn new(
        state: Arc<ServerState>,
        rejections: Arc<RejectionCounters>,
        mut unready: watch::Receiver<bool>,
    ) -> anyhow::Result<Arc<Self>> {
        let (reporter, health) = tonic_health::server::health_reporter();
        for name in HEALTH_NAMES {
            reporter.set_service_status(name, ServingStatus::Serving).await;
        }
        tokio::spawn(async move {
            let _ = unready.wait_for(|unready| *unready).await;
            for name in HEALTH_NAMES {
                reporter.set_service_status(name, ServingStatus::NotServing).await;
            }
        });
        let reflection = || {
            tonic_reflection::server::Builder::configure()
                .register_encoded_file_descriptor_set(DESCRIPTORS)
        };
        let max = MAX_TONIC_MESSAGE_BYTES;
        let routes = tonic::service::Routes::new(health.max_decoding_message_size(max))
            .add_service(reflection().build_v1()?.max_decoding_message_size(max))
            .add_service(reflection().build_v1alpha()?.max_decoding_message_size(max));
        let tonic_routes = routes.into_axum_router();
        let buffered = message_buffer::total_budget();
        Ok(Arc::new(Self { state, rejections, tonic_routes, buffered }))
    }

    /// Returns the service for one connection. Rate limit calls are answered by a plain hyper
    /// service, like the HTTP API; only health and reflection go through tonic.
    pub(crate) fn service(
        self: &Arc<Self>,
        peer: Peer,
    ) -> impl Service<Request, Response = GrpcResponse, Error = Infallible, Future: Send> + use<>
    {
        let connection = Arc::new((Arc::clone(self), ConnectionBudget::new(&self.buffered)));
        service_fn(move |request: Request| {
            let connection = Arc::clone(&connection);
            async move {
                let (envoy, buffered) = &*connection;
                if let Some(http_error) = grpc::wrong_version(&request) {
                    return Ok(http_error);
                }
                if request.uri().path() != SHOULD_RATE_LIMIT {
                    let call = Box::pin(envoy.tonic_routes.clone().oneshot(request));
                    return match grpc::with_message_timeout(call).await {
                        Ok(response) => Ok(response?.map(GrpcBody::Tonic)),
                        Err(timed_out) => Ok(timed_out.into_http()),
                    };
                }
                if let Some(http_error) = grpc::check_http(&request) {
                    return Ok(http_error);
                }
                match envoy.should_rate_limit(buffered, peer, request).await {
                    Ok(response) => Ok(grpc::response(&response)),
                    Err(GrpcCallError::Failed(status)) => Ok(status.into_http()),
                    Err(GrpcCallError::Rejected(rejection)) => {
                        Ok(grpc::response(&rejection.into_denial(&envoy.rejections)))
                    }
                }
            }
        })
    }

    /// Answers a gRPC call.
    async fn should_rate_limit(
        &self,
        buffered: &ConnectionBudget,
        peer: Peer,
        request: Request,
    ) -> Result<RateLimitResponse, GrpcCallError> {
        let active = self.state.active_guard();
        let (head, body) = request.into_parts();
        authorize(&self.state, &active, &head.headers, peer)?;
        grpc::check_encoding(&head.headers)?;
        // Lives as long as the message.
        let mut buffer = buffered.buffer();
        let request = REQUESTS.read(body, &mut buffer).await?;
        decide(&active, &head.headers, &request).await
    }

    /// Answers a request that did not arrive over gRPC.
    pub(crate) async fn answer(
        &self,
        headers: &HeaderMap,
        peer: Peer,
        request: &RateLimitRequest,
    ) -> Result<RateLimitResponse, Status> {
        let active = self.state.active_guard();
        authorize(&self.state, &active, headers, peer)?;
        let decided = match request::check(request) {
            Ok(()) => decide(&active, headers, request).await,
            Err(rejection) => Err(rejection.into()),
        };
        match decided {
            Err(GrpcCallError::Failed(status)) => Err(status),
            Err(GrpcCallError::Rejected(rejection)) => Ok(rejection.into_denial(&self.rejections)),
            Ok(response) => Ok(response),
        }
    }

    /// Returns the number of calls that could not be decided.
    pub(crate) fn rejected(&self) -> u64 {
        self.rejections.total()
    }
}

/// Checks the token of a caller, if one is needed.
fn authorize(
    state: &ServerState,
    active: &ActiveConfig,
    headers: &HeaderMap,
    peer: Peer,
) -> Result<(), Status> {
    let Some(tokens) = active.tokens.of_api() else { return Ok(()) };
    let given = auth::bearer(headers);
    let authorized = state.authorize(tokens, given, &[Scope::Acquire], AuthListener::Grpc, peer);
    authorized.map(drop).map_err(|error| match error {
        AuthError::Missing | AuthError::Wrong => Status::unauthenticated(error.to_string()),
        AuthError::MissingScope { .. } => Status::permission_denied(error.to_string()),
    })
}

/// Decides a request, whose headers may continue a trace.
async fn decide(
    active: &ActiveConfig,
    headers: &HeaderMap,
    request: &RateLimitRequest,
) -> Result<RateLimitResponse, GrpcCallError> {
    if active.envoy.needs_rules && !active.envoy.has_rules {
        return Err(Status::unavailable("the control plane has not sent its first rules").into());
    }
    if request.domain.is_empty() {
        return Err(Status::invalid_argument(
            "the domain is empty: send the domain of the rules to apply",
        )
        .into());
    }
    if request.descriptors.is_empty() {
        return Err(Status::invalid_argument("there are no descriptors: send at least one").into());
    }
    let descriptors = request.descriptors.len();
    let invalid = |reason: String| Rejection::Invalid { reason, descriptors };
    let (plans, mut charges) = plan::for_request(active, request).map_err(invalid)?;
    let failure = strictest(&charges);
    // In shadow mode the request passes, but statuses show what denies it, as in ratelimit.
    let own_modes: Option<Vec<Enforcement>> = active.envoy.shadow_mode.then(|| {
        let own_modes = charges.iter().map(PreparedCharge::enforcement).collect();
        charges = charges.drain(..).map(|c| c.with_enforcement(Enforcement::Shadow)).collect();
        own_modes
    });
    let on_span = |span: &tracing::Span| logs::continue_trace(span, headers);
    let query = Query::prepared(charges).on_span(&on_span);
    let decisions = match active.limiter.decide(Action::Acquire, query).await {
        Ok(decisions) => decisions,
        Err(QueryError::Store(error)) => {
            logs::store_failed(&error);
            return undecided(&plans, failure).map_err(Into::into);
        }
        Err(other) => return Err(invalid(other.to_string()).into()),
    };
    if decisions.iter().any(repeats_id) {
        active.limiter.refund(&decisions).await;
        return Err(invalid("the id of the request is in use by another one".to_owned()).into());
    }
    let mut response = ResponseBuilder::default();
    let mut decided = decisions.iter().peekable();
    let mut end = 0;
    for plan in &plans {
        if let DescriptorPlan::Limited(limited) = plan {
            end += limited.charges;
        }
        let own = std::iter::from_fn(|| decided.next_if(|decision| decision.position() < end));
        let own = own.map(|entry| {
            let mode = own_modes.as_ref().map_or(entry.enforcement(), |own| own[entry.position()]);
            (mode == Enforcement::Shadow, entry)
        });
        // A decision in shadow mode counts only if no limit is enforced.
        let binding = own.min_by_key(|(is_shadow, entry)| (*is_shadow, entry.decision().rank()));
        response.add(plan, binding);
    }
    let mut response = response.build(decisions.is_allowed());
    if active.envoy.dynamic_metadata {
        let metadata = dynamic_metadata::of_response(request, &plans, &response.statuses);
        response.dynamic_metadata = Some(metadata);
    }
    Ok(response)
}

/// Returns whether the start of a request has the id of another one. Envoy sends the start once, so
/// the other one is no earlier attempt: a client may have chosen the id.
fn repeats_id(entry: &PolicyDecision<'_>) -> bool {
    let hold = entry.decision().hold;
    let is_repeated = hold.is_some_and(|hold| hold.status == HoldStatus::Replayed);
    is_repeated && entry.action() == Action::Acquire && !entry.is_shadow()
}

/// Returns the strictest failure mode of the enforced charges.
fn strictest(charges: &[PreparedCharge<'_>]) -> OnStoreFailure {
    let enforced = charges.iter().filter(|charge| !charge.is_shadow());
    let strictness = |failure: &OnStoreFailure| match failure {
        OnStoreFailure::Allow => 0,
        OnStoreFailure::Local => 1,
        OnStoreFailure::Deny => 2,
        OnStoreFailure::Error => 3,
    };
    let modes = enforced.map(PreparedCharge::on_store_failure);
    modes.max_by_key(strictness).unwrap_or(OnStoreFailure::Allow)
}

/// Returns the response to a call that even the fallback could not decide, because its memory is
/// full. Only `error` is an error, which Envoy would let pass.
fn undecided(
    plans: &[DescriptorPlan<'_>],
    failure: OnStoreFailure,
) -> Result<RateLimitResponse, Status> {
    if failure == OnStoreFailure::Error {
        return Err(Status::unavailable("the store is unavailable"));
    }
    let allowed = failure == OnStoreFailure::Allow;
    let mut response = ResponseBuilder::default();
    for plan in plans {
        response.add(plan, None);
        let is_limited = matches!(plan, DescriptorPlan::Limited(_));
        if let Some(status) = response.statuses.last_mut().filter(|_| is_limited && !allowed) {
            status.set_code(Code::OverLimit);
        }
    }
    Ok(response.build(allowed))
}

fn current_limit(requests: u64, unit: Option<Unit>, name: Option<&str>) -> RateLimit {
    RateLimit {
        name: name.unwrap_or_default().to_owned(),
        requests_per_unit: u32::try_from(requests).unwrap_or(u32::MAX),
        unit: unit.map_or(0, Unit::number),
    }
}

/// Builder of a response, with one status per descriptor.
#[derive(Default)]
struct ResponseBuilder {
    statuses: Vec<DescriptorStatus>,
    retry_after: Duration,
}

impl ResponseBuilder {
    /// Adds the status of a descriptor, with the binding decision of its charges, and whether that
    /// one is in shadow mode.
    fn add(&mut self, plan: &DescriptorPlan<'_>, binding: Option<(bool, &PolicyDecision<'_>)>) {
        let ok = DescriptorStatus { code: Code::Ok.into(), ..DescriptorStatus::default() };
        let status = match (plan, binding) {
            (DescriptorPlan::Unlimited, _) => DescriptorStatus { limit_remaining: u32::MAX, ..ok },
            (DescriptorPlan::Limited(limited), Some((is_shadow, binding))) => {
                let decision = binding.decision();
                let over = binding.is_denied() && !is_shadow;
                // Units in flight may be free long before their holds end.
                let is_in_flight = binding.quota().is_some_and(Quota::is_concurrency);
                let reset = match decision.allowed {
                    true if is_in_flight => Duration::ZERO,
                    true => decision.reset_after,
                    false if is_in_flight => decision.retry_after.min(MIN_RETRY_AFTER),
                    false => decision.retry_after,
                };
                if over {
                    self.retry_after = self.retry_after.max(reset);
                }
                DescriptorStatus {
                    code: if over { Code::OverLimit } else { Code::Ok }.into(),
                    current_limit: Some(current_limit(limited.limit, limited.unit, limited.name)),
                    limit_remaining: u32::try_from(decision.remaining).unwrap_or(u32::MAX),
                    duration_until_reset: Some(whole_seconds(reset)),
                }
            }
            _ => ok,
        };
        self.statuses.push(status);
    }

    fn build(self, allowed: bool) -> RateLimitResponse {
        let retry_after = || {
            let wait = whole_seconds(self.retry_after.max(MIN_RETRY_AFTER)).seconds;
            HeaderValue { key: "retry-after".to_owned(), value: wait.to_string() }
        };
        RateLimitResponse {
            overall_code: if allowed { Code::Ok } else { Code::OverLimit }.into(),
            statuses: self.statuses,
            response_headers_to_add: if allowed { Vec::new() } else { vec![retry_after()] },
            dynamic_metadata: None,
        }
    }
}

/// Returns whole seconds, rounded up: a client that waits this long must be admitted.
fn whole_seconds(duration: Duration) -> prost_types::Duration {
    let seconds = duration.as_secs() + u64::from(duration.subsec_nanos() > 0);
    prost_types::Duration { seconds: i64::try_from(seconds).unwrap_or(i64::MAX), nanos: 0 }
}
