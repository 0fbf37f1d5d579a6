//! Policies in front of an axum application.

use axum::Router;
use axum::routing::get;
use http::StatusCode;
use tidegate::tower::{PolicyGate, RateLimitLayer};
use tidegate::{Charge, Limiter, MemoryStore, MissingKey, Mode, Policies, Policy, Quota};

use crate::site::Site;
use crate::support::LONG;

fn quota(limit: u64) -> Quota {
    Quota::token_bucket(limit, LONG).expect("a valid quota")
}

fn policy(name: &str, limit: u64) -> Policy {
    Policy::new(name, quota(limit)).expect("a name").counting(&["header.x-user-id"]).expect("a key")
}

fn layer(limiter: &Limiter, policies: Vec<Policy>) -> RateLimitLayer<PolicyGate> {
    RateLimitLayer::with_policies(
        limiter.clone(),
        Policies::new(policies).expect("names of their own"),
    )
}

async fn site(limiter: &Limiter, policies: Vec<Policy>) -> Site {
    let app =
        Router::new().route("/", get(async || "hello")).route("/search", get(async || "found"));
    Site::start(app.layer(layer(limiter, policies))).await
}

fn limiter() -> Limiter {
    Limiter::new(MemoryStore::new())
}

#[tokio::test]
async fn policies_may_come_from_the_file_of_the_service() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("tidegate.yaml");
    let text = "
listen: {http: '127.0.0.1:8080'}
store: {redis: 'redis://127.0.0.1:6379'}
policies:
  - {name: search, match: {path: /search}, key: header.x-user-id, limit: 1, window: 1d}
";
    std::fs::write(&file, text).expect("written");
    let policies = Policies::load(&file).expect("a good file");
    let app =
        Router::new().route("/", get(async || "hello")).route("/search", get(async || "found"));
    let site = Site::start(app.layer(RateLimitLayer::with_policies(limiter(), policies))).await;
    let asker = site.asker();
    let ann = [("x-user-id", "ann")];
    assert_eq!(
        asker.get("/search", &ann).await.header("ratelimit-policy"),
        r#""search";q=1;w=86400"#
    );
    assert_eq!(asker.get("/search", &ann).await.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(asker.get("/search", &[("x-user-id", "bob")]).await.status, StatusCode::OK);
    assert_eq!(asker.get("/", &ann).await.status, StatusCode::OK);

    std::fs::write(&file, text.replace("limit: 1", "limit: none")).expect("written");
    let wrong = Policies::load(&file).expect_err("no number").to_string();
    assert!(wrong.contains("tidegate.yaml:5:") && wrong.contains("limit: none"), "{wrong}");
    std::fs::write(&file, text.replace("policies:", "policis:")).expect("written");
    assert!(
        Policies::load(&file)
            .expect_err("no such field")
            .to_string()
            .contains("did you mean `policies`?")
    );
    assert!(
        Policies::load(folder.path().join("absent"))
            .expect_err("no file")
            .to_string()
            .contains("cannot be read")
    );
}

#[tokio::test]
async fn several_policies_are_all_or_nothing() {
    let limiter = limiter();
    let search = policy("search", 1).matching("path", &["/search"]).expect("a pattern");
    let site = site(&limiter, vec![policy("all", 10), search]).await;
    let asker = site.asker();
    let ann = [("x-user-id", "ann")];
    let both = asker.get("/search", &ann).await;
    assert_eq!(both.status, StatusCode::OK);
    assert_eq!(both.header("ratelimit-policy"), r#""all";q=10;w=8640000, "search";q=1;w=8640000"#);
    assert_eq!(both.header("x-ratelimit-limit"), "1", "the one that binds");
    for _ in 0..3 {
        let denied = asker.get("//search/", &ann).await;
        assert_eq!(denied.status, StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(denied.json()["policy"], "search");
    }
    let alone = asker.get("/", &ann).await;
    assert_eq!(alone.header("x-ratelimit-remaining"), "8", "denials spent nothing of the other");
}

#[tokio::test]
async fn a_policy_in_shadow_denies_nobody_and_is_not_shown() {
    let limiter = limiter();
    let site =
        site(&limiter, vec![policy("enforced", 3), policy("shadow", 1).in_mode(Mode::Shadow)])
            .await;
    let asker = site.asker();
    let ann = [("x-user-id", "ann")];
    for _ in 0..3 {
        let answer = asker.get("/", &ann).await;
        assert_eq!(answer.status, StatusCode::OK);
        assert!(!answer.header("ratelimit").contains("shadow"), "{answer:?}");
    }
    assert_eq!(asker.get("/", &ann).await.json()["policy"], "enforced");
    let quota = quota(1);
    let shadow =
        limiter.peek(&Charge::new("ann", &quota).with_policy("shadow")).await.expect("decided");
    assert_eq!(shadow.remaining, 0, "but it counts");
}

#[tokio::test]
async fn a_request_without_its_key_is_skipped_or_denied() {
    let limiter = limiter();
    let skips = site(&limiter, vec![policy("skips", 1)]).await;
    assert_eq!(skips.asker().get("/", &[]).await.status, StatusCode::OK);
    let denies = site(&limiter, vec![policy("denies", 1).on_missing_key(MissingKey::Deny)]).await;
    let denied = denies.asker().get("/", &[]).await;
    assert_eq!(denied.status, StatusCode::TOO_MANY_REQUESTS);
    let problem = denied.json();
    assert!(problem["detail"].as_str().is_some_and(|detail| detail.contains("lacks")), "{problem}");
}

#[tokio::test]
async fn overrides_and_the_costs_of_closures_hold() {
    let limiter = limiter();
    let tenants = policy("tenants", 1).overriding(&["acme"], quota(5)).expect("once");
    let layer = layer(&limiter, vec![tenants]).cost(|head| u64::from(head.uri.path() != "/free"));
    let app = Router::new().route("/", get(async || "hello")).route("/free", get(async || "free"));
    let site = Site::start(app.layer(layer)).await;
    let asker = site.asker();
    for left in ["4", "3"] {
        assert_eq!(
            asker.get("/", &[("x-user-id", "acme")]).await.header("x-ratelimit-remaining"),
            left
        );
    }
    assert_eq!(asker.get("/", &[("x-user-id", "other")]).await.status, StatusCode::OK);
    assert_eq!(
        asker.get("/", &[("x-user-id", "other")]).await.status,
        StatusCode::TOO_MANY_REQUESTS
    );
    assert_eq!(
        asker.get("/free", &[("x-user-id", "other")]).await.status,
        StatusCode::OK,
        "what is free is not limited"
    );
}

#[tokio::test]
async fn a_key_that_is_none_is_the_requests_fault() {
    let limiter = limiter();
    let site = site(&limiter, vec![policy("users", 1)]).await;
    let long = "x".repeat(600);
    let answer = site.asker().get("/", &[("x-user-id", &long)]).await;
    assert_eq!(answer.status, StatusCode::BAD_REQUEST);
    assert_eq!(answer.header("content-type"), "application/problem+json");
    assert!(
        answer.json()["detail"].as_str().is_some_and(|detail| detail.contains("has 600 bytes")),
        "{answer:?}"
    );
}

#[tokio::test]
async fn a_policy_by_address_never_lets_pass_whom_nobody_knows() {
    let limiter = limiter();
    let by_address = Policy::new("addresses", quota(1))
        .and_then(|policy| policy.counting(&["ip"]))
        .expect("valid");
    let site = site(&limiter, vec![by_address]).await;
    assert_eq!(site.asker().get("/", &[]).await.status, StatusCode::INTERNAL_SERVER_ERROR);
}

#[test]
#[should_panic(expected = "no HTTP request has the attribute \"heder.x\"")]
fn layer_by_an_unknown_attribute_panics() {
    let _ = RateLimitLayer::new(limiter(), quota(1)).by("heder.x");
}

#[test]
fn layer_counts_by_attributes_of_http_only() {
    let by = |attribute: &str| {
        let layer = || drop(RateLimitLayer::new(limiter(), quota(1)).by(attribute));
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(layer)).map_err(panic_message)
    };
    for attribute in ["ip", "method", "path", "host", "header.X-User", "query.q", "cookie.sid"] {
        assert_eq!(by(attribute), Ok(()), "{attribute}");
    }
    for (attribute, expected) in [
        ("tenant", "no HTTP request has the attribute \"tenant\""),
        ("domain", "no HTTP request has the attribute \"domain\""),
        ("descriptor.user", "no HTTP request has the attribute \"descriptor.user\""),
        ("headers.x-user", "did you mean `header.x-user`?"),
        ("Path", "did you mean `path`?"),
        ("header.", "a name is missing after the dot"),
    ] {
        let message = by(attribute).expect_err(attribute);
        assert!(
            message.starts_with("RateLimitLayer::by: ") && message.contains(expected),
            "{message}"
        );
    }
}

#[test]
fn policies_for_other_front_doors_are_rejected() {
    let bare = |name: &str| Policy::new(name, quota(1)).expect("a name");
    let edge = bare("edge").matching("domain", &["edge"]).expect("known");
    let tenant =
        bare("tenant").with_attributes(&["tenant"]).and_then(|policy| policy.counting(&["tenant"]));
    for (policy, attribute) in [(edge, "domain"), (tenant.expect("declared"), "tenant")] {
        let policies = Policies::new(vec![policy]).expect("one name");
        let layer = || drop(RateLimitLayer::with_policies(limiter(), policies));
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(layer));
        let message = panic_message(panicked.expect_err("no request would be limited"));
        assert!(
            message.contains(&format!("no HTTP request has the attribute {attribute:?}")),
            "{message}"
        );
    }
}

fn panic_message(payload: Box<dyn std::any::Any + Send>) -> String {
    *payload.downcast::<String>().expect("a formatted message")
}
