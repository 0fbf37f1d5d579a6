//! Allocations of the Tower layer around an empty service: those of the response's header map only.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use http::{Request, Response, StatusCode};
use tidegate::layer::{Body, RateLimitLayer};
use tidegate::{KeySource, Limiter, MemoryStore, Policies, Policy, Quota};
use tower::{Layer as _, Service};

const REQUESTS: usize = 64;

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

    fn call(&mut self, _: Request<()>) -> Self::Future {
        ready(Ok(Response::new(())))
    }
}

fn requests() -> Vec<Request<()>> {
    let request = |_| Request::get("/").header("x-user-id", "ann").body(()).expect("valid");
    (0..REQUESTS).map(request).collect()
}

/// Passes requests through the service, whose responses are ready at once.
fn pass<S>(service: &mut S, requests: Vec<Request<()>>, expected: StatusCode)
where
    S: Service<Request<()>, Response = Response<Body<()>>, Error = Infallible>,
{
    for request in requests {
        let mut context = Context::from_waker(Waker::noop());
        assert!(service.poll_ready(&mut context).is_ready());
        match pin!(service.call(request)).poll(&mut context) {
            Poll::Ready(Ok(response)) => {
                assert_eq!(response.status(), expected);
                assert!(response.headers().contains_key("ratelimit"));
                assert!(response.headers().contains_key("x-ratelimit-reset"));
            }
            _ => panic!("the response is not ready"),
        }
    }
}

/// Returns the allocations per request.
fn allocations<S>(mut service: S) -> u64
where
    S: Service<Request<()>, Response = Response<Body<()>>, Error = Infallible>,
{
    // The first requests create the count and the buffers of the thread.
    pass(&mut service, requests(), StatusCode::OK);
    let requests = requests();
    let measured = allocation_counter::measure(|| pass(&mut service, requests, StatusCode::OK));
    measured.count_total.div_ceil(REQUESTS as u64)
}

fn quota() -> Quota {
    Quota::token_bucket(1_000_000, Duration::from_secs(1)).expect("valid")
}

#[test]
fn request_by_header_takes_two_allocations() {
    let layer = RateLimitLayer::new(Limiter::new(MemoryStore::new()), quota())
        .policy("per-user")
        .by(KeySource::header("x-user-id").expect("valid"));
    // A header map has two: its index and its entries.
    assert_eq!(allocations(layer.layer(Empty)), 2);
}

#[test]
fn request_by_policies_takes_two_more_for_the_selection() {
    let policy = Policy::builder("per-user", quota()).key(["header.x-user-id"]);
    let policies = Policies::new(vec![policy.build().expect("valid")]).expect("one policy");
    let layer = RateLimitLayer::with_policies(Limiter::new(MemoryStore::new()), policies);
    let count = allocations(layer.layer(Empty));
    // The list of the selected policies, and the key.
    assert!(count <= 4, "{count} allocations");
}

/// Responses that are kept share the buffers of a thread, and keep their values.
#[test]
fn kept_responses_keep_their_headers() {
    let quota = Quota::fixed_window(1_000, Duration::from_secs(3_600)).expect("valid");
    let layer = RateLimitLayer::new(Limiter::new(MemoryStore::new()), quota).policy("all");
    let mut service = layer.layer(Empty);
    let kept: Vec<Response<Body<()>>> = (0..1_000)
        .map(|_| {
            let mut context = Context::from_waker(Waker::noop());
            match pin!(service.call(Request::new(()))).poll(&mut context) {
                Poll::Ready(Ok(response)) => response,
                _ => panic!("the response is not ready"),
            }
        })
        .collect();
    for (number, response) in kept.iter().enumerate() {
        let remaining = (999 - number).to_string();
        assert_eq!(response.headers()["x-ratelimit-remaining"], remaining);
        let state = response.headers()["ratelimit"].to_str().expect("text");
        assert!(state.starts_with(&format!("\"all\";r={remaining}")), "{state}");
    }
    pass(&mut service, vec![Request::new(())], StatusCode::TOO_MANY_REQUESTS);
}
