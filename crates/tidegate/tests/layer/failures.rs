//! The layer while the store cannot decide.

use axum::Router;
use axum::routing::get;
use http::{Response, StatusCode};
use tidegate::layer::{QuotaRequestLimiter, RateLimitLayer};
use tidegate::{
    Fallback, KeySource, Limiter, MemoryStore, OnStoreFailure, QueryError, Quota, RedisStore, Store,
};

use crate::site::Site;
use crate::support::{LONG, Redis};

/// Creates a layer on a store with room for one key, which cannot decide a second one.
/// Returns a layer on a store with room for one key, which is at its limit after one request, so
/// that no other key has room.
fn layer() -> RateLimitLayer<QuotaRequestLimiter> {
    let quota = Quota::token_bucket(1, LONG).expect("valid");
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
        StatusCode::TOO_MANY_REQUESTS,
        "known keys are still decided"
    );
}

#[tokio::test]
async fn the_response_to_a_store_failure_can_be_replaced() {
    let layer = layer().on_error(|error: &QueryError| {
        let text = if matches!(error, QueryError::Store(_)) { "not now" } else { "never" };
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
        (OnStoreFailure::Error, [StatusCode::SERVICE_UNAVAILABLE, StatusCode::SERVICE_UNAVAILABLE]),
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

/// Memory whose acquires and refunds of the policy `fails` fail.
struct FailsFor(MemoryStore);

impl Store for FailsFor {
    fn decide(
        &self,
        action: tidegate::Action,
        charge: &tidegate::Charge<'_>,
    ) -> tidegate::Outcome<
        impl Future<Output = Result<tidegate::Decision, tidegate::StoreError>> + Send,
    > {
        tidegate::Outcome::Pending(async move {
            let is_charge = matches!(action, tidegate::Action::Acquire | tidegate::Action::Refund);
            if charge.policy() == "fails" && is_charge {
                return Err(tidegate::StoreError::Unreachable("gone".to_owned()));
            }
            self.0.decide(action, charge).await
        })
    }

    fn decide_all(
        &self,
        action: tidegate::Action,
        charges: &[tidegate::Charge<'_>],
    ) -> tidegate::Outcome<
        impl Future<Output = Result<Vec<tidegate::Decision>, tidegate::StoreError>> + Send,
    > {
        tidegate::Outcome::Pending(async move { self.0.decide_all(action, charges).await })
    }

    fn clock(&self) -> &dyn tidegate::Clock {
        self.0.clock()
    }
}

#[tokio::test]
async fn error_after_the_joint_charge_returns_its_units() {
    use tidegate::PreparedCharge;
    use tidegate::{Charge, Enforcement, Policies, PolicyLimiter, Query};
    let quota = Quota::fixed_window(5, LONG).expect("valid");
    let limiter =
        PolicyLimiter::new(Limiter::new(FailsFor(MemoryStore::new())), Policies::default());
    let charges = vec![
        PreparedCharge::new("works", "k", &quota),
        PreparedCharge::new("fails", "k", &quota).with_enforcement(Enforcement::AllDenied),
    ];
    let failed = limiter.acquire(Query::prepared(charges)).await;
    assert!(matches!(failed, Err(QueryError::Store(_))), "{failed:?}");
    let works = Charge::new("k", &quota).with_policy("works");
    let left = limiter.limiter().acquire(&works).await.expect("decided").remaining;
    assert_eq!(left, 4, "an undecided request takes nothing");
}

/// A client that repeated the refund would get the units of `works` twice.
#[tokio::test]
async fn refund_that_was_made_in_part_must_not_be_repeated() {
    use tidegate::PreparedCharge;
    use tidegate::{Action, Charge, Policies, PolicyLimiter, Query};
    let quota = Quota::fixed_window(5, LONG).expect("valid");
    let limiter =
        PolicyLimiter::new(Limiter::new(FailsFor(MemoryStore::new())), Policies::default());
    let works = Charge::new("k", &quota).with_policy("works");
    for (policies, is_made) in [
        (vec!["works", "fails"], true),
        (vec!["fails", "works"], true),
        (vec!["fails", "fails"], false),
    ] {
        let _ = limiter.limiter().acquire(&works).await.expect("decided");
        let refund = |policy: &&'static str| {
            let charge = PreparedCharge::new(*policy, "k", &quota).with_action(Action::Refund);
            charge.with_unknown_time_allowed()
        };
        let query = Query::prepared(policies.iter().map(refund).collect());
        let failed = limiter.decide(Action::Refund, query).await;
        let may_have_run = matches!(&failed, Err(QueryError::Store(error)) if error.may_have_run());
        assert_eq!(may_have_run, is_made, "{policies:?}: {failed:?}");
        let left = limiter.limiter().peek(&works).await.expect("decided").remaining;
        assert_eq!(left, if is_made { 4 } else { 3 }, "{policies:?}");
    }
}

#[tokio::test]
async fn request_that_is_not_allowed_never_passes_the_layer() {
    use http::request::Parts;
    use tidegate::PreparedCharge;
    use tidegate::layer::RequestLimiter;
    use tidegate::{
        Action, Decision, Policies, PolicyDecisions, PolicyLimiter, Progress, Query, Waiting,
    };

    #[derive(Clone)]
    struct Shut(PolicyLimiter);
    impl RequestLimiter for Shut {
        type Snapshot = ();
        fn snapshot(&self) {}
        fn start<'a>(&'a self, (): &'a (), _: &'a Parts) -> Result<Progress<'a>, QueryError> {
            let charge = PreparedCharge::of_zero_limit("shut", "k", Decision::allow(0, 0));
            self.0.start(Action::Acquire, Query::prepared(vec![charge]))
        }
        async fn finish<'a>(
            &'a self,
            (): &'a (),
            _: &Parts,
            waiting: Waiting<'a>,
        ) -> Result<PolicyDecisions<'a>, QueryError> {
            let decisions = self.0.finish(waiting).await?;
            assert!(!decisions.is_allowed());
            Ok(decisions)
        }
        async fn refund(&self, (): &(), _: &PolicyDecisions<'_>) {}
    }
    let limiter = PolicyLimiter::new(Limiter::new(MemoryStore::new()), Policies::default());
    let app = Router::new()
        .route("/", get(async || "hello"))
        .layer(RateLimitLayer::with_request_limiter(Shut(limiter)));
    let site = Site::start(app).await;
    assert_eq!(site.asker().get("/", &[]).await.status, StatusCode::TOO_MANY_REQUESTS);
}

#[test]
fn select_where_needs_the_peer_as_acquire_does() {
    use tidegate::layer::RequestParts;
    use tidegate::{ClientIp, Policies, Policy, PolicyLimiter};
    let quota = Quota::fixed_window(5, LONG).expect("valid");
    let policy = Policy::builder("by-ip", quota).key(["ip"]).build().expect("valid");
    let policies = Policies::new(vec![policy]).expect("one");
    let limiter = PolicyLimiter::new(Limiter::new(MemoryStore::new()), policies);
    let (parts, ()) = http::Request::new(()).into_parts();
    let client_ip = ClientIp::default();
    let request = RequestParts::new(&parts, None, &client_ip);
    let selected = limiter.select_where(&request, None, |_| true);
    assert!(matches!(selected, Err(QueryError::UnknownPeer)), "{selected:?}");
}
