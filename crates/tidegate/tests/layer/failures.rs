//! The layer while the store cannot decide.

use axum::Router;
use axum::routing::get;
use http::{Response, StatusCode};
use tidegate::layer::{QuotaRequestLimiter, RateLimitLayer};
use tidegate::{
    Error, Fallback, KeySource, Limiter, MemoryStore, OnStoreFailure, Quota, RedisStore, Store,
};

use crate::site::Site;
use crate::support::{LONG, Redis};

/// Creates a layer on a store with room for one key, which cannot decide a second one.
fn layer() -> RateLimitLayer<QuotaRequestLimiter> {
    let quota = Quota::token_bucket(5, LONG).expect("valid");
    let limiter = Limiter::new(MemoryStore::builder().max_keys(1).build());
    RateLimitLayer::new(limiter, quota).by(KeySource::header("x-user-id").expect("valid"))
}

async fn site<S: Store>(layer: RateLimitLayer<QuotaRequestLimiter<S>>) -> Site {
    Site::start(Router::new().route("/", get(async || "hello")).layer(layer)).await
}

#[tokio::test]
async fn a_store_failure_is_a_503_without_the_reason() {
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
        "known keys are still decided"
    );
}

#[tokio::test]
async fn the_response_to_a_store_failure_can_be_replaced() {
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
async fn requests_are_served_with_a_fallback_while_redis_is_down() {
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
