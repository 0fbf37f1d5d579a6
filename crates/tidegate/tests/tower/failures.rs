//! When nobody can decide.

use axum::Router;
use axum::routing::get;
use http::{Response, StatusCode};
use tidegate::tower::{QuotaGate, RateLimitLayer};
use tidegate::{Error, Fallback, Limiter, MemoryStore, OnStoreFailure, Quota, RedisStore, Store};

use crate::site::Site;
use crate::support::{LONG, Redis};

/// A store with room for one key: it cannot decide about a second.
fn layer() -> RateLimitLayer<QuotaGate> {
    let quota = Quota::token_bucket(5, LONG).expect("valid");
    let limiter = Limiter::new(MemoryStore::builder().max_keys(1).build());
    RateLimitLayer::new(limiter, quota).by("header.x-user-id")
}

async fn site<S: Store>(layer: RateLimitLayer<QuotaGate<S>>) -> Site {
    Site::start(Router::new().route("/", get(async || "hello")).layer(layer)).await
}

#[tokio::test]
async fn a_store_that_cannot_decide_is_503_and_its_reason_stays_here() {
    let site = site(layer()).await;
    let asker = site.asker();
    assert_eq!(asker.get("/", &[("x-user-id", "ann")]).await.status, StatusCode::OK);
    let undecided = asker.get("/", &[("x-user-id", "bob")]).await;
    assert_eq!(undecided.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(undecided.header("content-type"), "application/problem+json");
    assert_eq!(undecided.json()["status"], 503);
    assert!(!undecided.body.contains("memory store"), "{undecided:?}");
    assert_eq!(
        asker.get("/", &[("x-user-id", "ann")]).await.status,
        StatusCode::OK,
        "whom it knows it goes on with"
    );
}

#[tokio::test]
async fn that_answer_can_be_replaced() {
    let layer = layer().on_error(|error: &Error| {
        let text = if matches!(error, Error::Store(_)) { "not now" } else { "never" };
        Response::builder().status(StatusCode::BAD_GATEWAY).body(text).expect("a response")
    });
    let site = site(layer).await;
    let asker = site.asker();
    asker.get("/", &[("x-user-id", "ann")]).await;
    let undecided = asker.get("/", &[("x-user-id", "bob")]).await;
    assert_eq!((undecided.status, undecided.body.as_str()), (StatusCode::BAD_GATEWAY, "not now"));
}

#[tokio::test]
async fn with_a_fallback_a_redis_that_is_gone_is_no_outage() {
    let mut redis = Redis::start();
    for (failure, statuses) in [
        (OnStoreFailure::Local, [StatusCode::OK, StatusCode::TOO_MANY_REQUESTS]),
        (OnStoreFailure::Allow, [StatusCode::OK, StatusCode::OK]),
        (OnStoreFailure::Deny, [StatusCode::TOO_MANY_REQUESTS, StatusCode::TOO_MANY_REQUESTS]),
    ] {
        let store = RedisStore::connect(&redis.url()).await.expect("our own server answers");
        redis.kill();
        let quota = Quota::token_bucket(1, LONG).expect("valid");
        let layer = RateLimitLayer::new(Limiter::new(Fallback::new(store)), quota)
            .on_store_failure(failure);
        let site = site(layer).await;
        let asker = site.asker();
        for status in statuses {
            assert_eq!(asker.get("/", &[]).await.status, status, "{failure}");
        }
        redis.restart();
    }
}
