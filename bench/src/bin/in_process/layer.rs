//! The Tower layer around an empty service, in nanoseconds and allocations per request.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::hint::black_box;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response};
use tidegate::layer::RateLimitLayer;
use tidegate::{KeySource, Limiter, MemoryStore, Policies, Policy, Quota};
use tidegate_bench::plan::Plan;
use tidegate_bench::results::Results;
use tower_layer::Layer as _;
use tower_service::Service;

use crate::footprint::count_allocations;
use crate::in_async;

/// Requests that exist before their turn starts, so that creating them is not measured.
const BATCH: usize = 1_000;
/// The two lists and the three older headers.
const HEADERS: usize = 5;

/// Service whose response has neither headers nor a body.
#[derive(Clone)]
struct Empty;

impl Service<Request<()>> for Empty {
    type Response = Response<()>;
    type Error = Infallible;
    type Future = Ready<Result<Response<()>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<()>) -> Self::Future {
        drop(black_box(request));
        ready(Ok(Response::new(())))
    }
}

/// Layer that adds the same headers with constant values, by a copy of a map, and decides nothing:
/// the lower bound that the header map of the `http` crate sets.
struct ConstantHeaders<S> {
    inner: S,
    headers: Arc<HeaderMap>,
}

/// Future of [`ConstantHeaders`].
struct WithHeaders<F> {
    response: F,
    headers: Arc<HeaderMap>,
}

impl ConstantHeaders<Empty> {
    fn new() -> Self {
        let header =
            |(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value));
        let headers = [
            ("ratelimit-policy", "\"per-user\";q=1000000000;w=1"),
            ("ratelimit", "\"per-user\";r=999999999;t=1"),
            ("x-ratelimit-limit", "1000000000"),
            ("x-ratelimit-remaining", "999999999"),
            ("x-ratelimit-reset", "1"),
        ];
        Self { inner: Empty, headers: Arc::new(headers.map(header).into_iter().collect()) }
    }
}

impl<S: Service<Request<()>, Response = Response<()>>> Service<Request<()>> for ConstantHeaders<S>
where
    S::Future: Unpin,
{
    type Response = Response<()>;
    type Error = S::Error;
    type Future = WithHeaders<S::Future>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<()>) -> Self::Future {
        WithHeaders { response: self.inner.call(request), headers: Arc::clone(&self.headers) }
    }
}

impl<F, E> Future for WithHeaders<F>
where
    F: Future<Output = Result<Response<()>, E>> + Unpin,
{
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut response = std::task::ready!(Pin::new(&mut self.response).poll(context))?;
        response.headers_mut().clone_from(&self.headers);
        Poll::Ready(Ok(response))
    }
}

/// Measures the empty service, a layer with constant headers, the layer with one quota, and the
/// layer with one policy in turns. All limits count by a header.
pub(crate) fn run(plan: Plan) -> Result<()> {
    let mut results = Results::new("layer", plan);
    let quota = Quota::token_bucket(1_000_000_000, Duration::from_secs(1))?;
    let mut by_quota = RateLimitLayer::new(Limiter::new(MemoryStore::new()), quota.clone())
        .policy("per-user")
        .by(KeySource::header("x-user-id")?)
        .layer(Empty);
    let policy = Policy::builder("per-user", quota).key(["header.x-user-id"]).build()?;
    let policies = Policies::new(vec![policy])?;
    let mut by_policies =
        RateLimitLayer::with_policies(Limiter::new(MemoryStore::new()), policies).layer(Empty);
    for round in 0..=plan.rounds() {
        let turns = [
            ("empty service", turn(&mut Empty, plan, 0)?),
            ("constant headers", turn(&mut ConstantHeaders::new(), plan, HEADERS)?),
            ("one quota", turn(&mut by_quota, plan, HEADERS)?),
            ("one policy", turn(&mut by_policies, plan, HEADERS)?),
        ];
        // The first round warms up.
        for (candidate, (nanoseconds, allocations)) in turns.into_iter().filter(|_| round > 0) {
            results.add("layer", candidate, "ns", nanoseconds);
            results.add("layer", candidate, "allocations", allocations);
        }
    }
    in_async::run(plan, &mut results)?;
    for row in results.rows() {
        if let Some(spread) = results.spread(&row.case, &row.candidate, &row.metric) {
            println!("{}: {}, {}: {:.1}", row.case, row.candidate, row.metric, spread.median);
        }
    }
    results.save()
}

/// Passes requests for the time of a turn, and returns nanoseconds and allocations per request.
fn turn<S, B>(service: &mut S, plan: Plan, headers: usize) -> Result<(f64, f64)>
where
    S: Service<Request<()>, Response = Response<B>, Error = Infallible>,
{
    let (mut elapsed, mut count) = (Duration::ZERO, 0);
    while elapsed < plan.in_process_turn() {
        let requests = requests()?;
        let start = Instant::now();
        let found = pass(service, requests);
        elapsed += start.elapsed();
        count += BATCH;
        ensure!(found == headers * BATCH, "{found} headers in {BATCH} responses");
    }
    let requests = requests()?;
    let allocations = count_allocations(|| {
        black_box(pass(service, requests));
    });
    Ok((elapsed.as_secs_f64() * 1e9 / count as f64, allocations as f64 / BATCH as f64))
}

fn requests() -> Result<Vec<Request<()>>> {
    let request = |_| Ok(Request::get("/").header("x-user-id", "user123").body(())?);
    (0..BATCH).map(request).collect()
}

/// Passes requests, and returns the number of headers in all responses.
fn pass<S, B>(service: &mut S, requests: Vec<Request<()>>) -> usize
where
    S: Service<Request<()>, Response = Response<B>, Error = Infallible>,
{
    let mut context = Context::from_waker(Waker::noop());
    let mut headers = 0;
    for request in requests {
        if let Poll::Ready(Ok(response)) = pin!(service.call(request)).poll(&mut context) {
            headers += black_box(response).headers().len();
        }
    }
    headers
}
