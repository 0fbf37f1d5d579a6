//! The layer with policies in front of an axum application.

use axum::Router;
use axum::routing::get;
use http::StatusCode;
use tidegate::layer::{CustomAttributes, PolicyRequestLimiter, RateLimitLayer};
use tidegate::{
    Charge, KeySource, Limiter, MemoryStore, MissingKey, Mode, Policies, Policy, PolicyBuilder,
    Quota,
};

use crate::site::Site;
use crate::support::LONG;

fn quota(limit: u64) -> Quota {
    Quota::token_bucket(limit, LONG).expect("a valid quota")
}

fn policy(name: &str, limit: u64) -> PolicyBuilder {
    Policy::builder(name, quota(limit)).key(["header.x-user-id"])
}

fn layer(
    limiter: &Limiter,
    policies: impl IntoIterator<Item = PolicyBuilder>,
) -> RateLimitLayer<PolicyRequestLimiter> {
    let policies = policies.into_iter().map(|policy| policy.build().expect("valid"));
    let policies = Policies::new(policies.collect()).expect("unique names");
    RateLimitLayer::with_policies(limiter.clone(), policies)
}

async fn site(limiter: &Limiter, policies: impl IntoIterator<Item = PolicyBuilder>) -> Site {
    let app =
        Router::new().route("/", get(async || "hello")).route("/search", get(async || "found"));
    Site::start(app.layer(layer(limiter, policies))).await
}

fn limiter() -> Limiter {
    Limiter::new(MemoryStore::new())
}

#[tokio::test]
async fn policies_can_be_loaded_from_the_configuration_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("tidegate.yaml");
    let text = "
listen: {http: '127.0.0.1:8080'}
store: {redis: 'redis://127.0.0.1:6379'}
policies:
  - {name: search, match: {path: /search}, key: header.x-user-id, limit: 1, window: 1d}
";
    std::fs::write(&file, text).expect("written");
    let policies = tidegate_config::load_policies(&file).expect("a good file");
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
    let wrong = tidegate_config::load_policies(&file).expect_err("no number").to_string();
    assert!(wrong.contains("tidegate.yaml:5:") && wrong.contains("limit: none"), "{wrong}");
    std::fs::write(&file, text.replace("policies:", "policis:")).expect("written");
    assert!(
        tidegate_config::load_policies(&file)
            .expect_err("no such field")
            .to_string()
            .contains("did you mean `policies`?")
    );
    assert!(
        tidegate_config::load_policies(folder.path().join("absent"))
            .expect_err("no file")
            .to_string()
            .contains("cannot be read")
    );
}

#[tokio::test]
async fn several_policies_are_all_or_nothing() {
    let limiter = limiter();
    let search = policy("search", 1).matches("path", ["/search"]);
    let site = site(&limiter, vec![policy("all", 10), search]).await;
    let asker = site.asker();
    let ann = [("x-user-id", "ann")];
    let both = asker.get("/search", &ann).await;
    assert_eq!(both.status, StatusCode::OK);
    assert_eq!(both.header("ratelimit-policy"), r#""all";q=10;w=8640000, "search";q=1;w=8640000"#);
    assert_eq!(both.header("x-ratelimit-limit"), "1", "the binding limit");
    for _ in 0..3 {
        let denied = asker.get("//search/", &ann).await;
        assert_eq!(denied.status, StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(denied.json()["policy"], "search");
        assert_eq!(denied.json()["violated-policies"], serde_json::json!(["search"]));
    }
    let alone = asker.get("/", &ann).await;
    assert_eq!(
        alone.header("x-ratelimit-remaining"),
        "8",
        "denied requests spend no units of the other policy"
    );
}

#[tokio::test]
async fn a_denial_names_every_policy_that_it_violates() {
    let site = site(&limiter(), vec![policy("ä", 1), policy("b", 2), policy("c", 1)]).await;
    let asker = site.asker();
    let ann = [("x-user-id", "ann")];
    assert_eq!(asker.get("/", &ann).await.status, StatusCode::OK);
    let denied = asker.get("/", &ann).await;
    assert_eq!(denied.json()["violated-policies"], serde_json::json!(["ä", "c"]));
    assert!(denied.header("ratelimit").starts_with("\"%C3%A4\";r=0;t="), "{denied:?}");
}

#[tokio::test]
async fn a_denial_for_a_missing_key_promises_no_wait() {
    let strict = policy("strict", 1).missing_key(MissingKey::Deny);
    let site = site(&limiter(), vec![strict]).await;
    let denied = site.asker().get("/", &[]).await;
    assert_eq!(denied.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(denied.header("ratelimit"), "\"strict\";r=0");
    assert_eq!(denied.header("ratelimit-policy"), "\"strict\";q=1;w=8640000");
    assert_eq!((denied.header("retry-after"), denied.header("x-ratelimit-reset")), ("", ""));
    assert_eq!(denied.json()["type"], "about:blank", "no quota is exceeded");
}

#[tokio::test]
async fn a_policy_in_shadow_mode_denies_nothing_and_adds_no_headers() {
    let limiter = limiter();
    let site =
        site(&limiter, vec![policy("enforced", 3), policy("shadow", 1).mode(Mode::Shadow)]).await;
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
    assert_eq!(shadow.remaining, 0, "requests are counted");
}

async fn status(headers: http::HeaderMap) -> StatusCode {
    let status = headers.get("x-status").and_then(|status| status.to_str().ok());
    status.and_then(|status| status.parse().ok()).unwrap_or_default()
}

/// A bucket would return its unit only when the time between the request and its charge has passed
/// once more.
fn refunding(name: &str, statuses: [&str; 2]) -> PolicyBuilder {
    let quota = Quota::sliding_log(2, LONG).expect("valid");
    Policy::builder(name, quota).key(["header.x-user-id"]).refund_on(statuses)
}

#[tokio::test]
async fn a_policy_is_refunded_by_the_status_of_the_response() {
    let limiter = limiter();
    let shadow = refunding("shadow", ["2xx", "404"]).mode(Mode::Shadow);
    let logins = refunding("logins", ["2xx", "404"]);
    let layer = layer(&limiter, [policy("all", 100), logins, shadow]);
    let site = Site::start(Router::new().route("/", get(status)).layer(layer)).await;
    let asker = site.asker();
    let ask = async |status| asker.get("/", &[("x-user-id", "ann"), ("x-status", status)]).await;
    for turn in 1..20 {
        let answer = ask(if turn % 2 == 0 { "200" } else { "404" }).await;
        assert_eq!(answer.header("x-ratelimit-remaining"), "1", "the headers are of the charge");
        let all = format!(r#""all";r={};"#, 100 - turn);
        assert!(answer.header("ratelimit").contains(&all), "{answer:?}");
    }
    for _ in 0..2 {
        assert_eq!(ask("401").await.status, StatusCode::UNAUTHORIZED);
    }
    assert_eq!(ask("200").await.status, StatusCode::TOO_MANY_REQUESTS);
    let left = async |policy| {
        let quota = Quota::sliding_log(2, LONG).expect("valid");
        let charge = Charge::new("ann", &quota).with_policy(policy);
        limiter.peek(&charge).await.expect("decided").remaining
    };
    assert_eq!((left("logins").await, left("shadow").await), (0, 0));
}

#[tokio::test]
async fn refunds_of_the_layer_and_of_a_policy_are_made_once() {
    let limiter = limiter();
    let quota = Quota::sliding_log(5, LONG).expect("valid");
    let all = Policy::builder("all", quota).key(["header.x-user-id"]);
    let layer = layer(&limiter, [all, refunding("logins", ["2xx", "404"])])
        .refund_on(|status| status == StatusCode::NOT_FOUND || status.is_server_error());
    let site = Site::start(Router::new().route("/", get(status)).layer(layer)).await;
    let asker = site.asker();
    // Units of other requests, which a second refund would return.
    let _ = asker.get("/", &[("x-user-id", "ann"), ("x-status", "401")]).await;
    for (status, left) in [("404", 3), ("500", 3), ("404", 3), ("200", 3), ("200", 2)] {
        let answer = asker.get("/", &[("x-user-id", "ann"), ("x-status", status)]).await;
        let all = format!(r#""all";r={left};"#);
        assert!(answer.header("ratelimit").starts_with(&all), "{status}: {answer:?}");
        assert_eq!(answer.header("x-ratelimit-remaining"), "0", "{status}: {answer:?}");
    }
}

#[tokio::test]
async fn a_request_without_a_key_is_skipped_or_denied() {
    let limiter = limiter();
    let skips = site(&limiter, vec![policy("skips", 1)]).await;
    assert_eq!(skips.asker().get("/", &[]).await.status, StatusCode::OK);
    let strict = site(&limiter, vec![policy("denies", 1).missing_key(MissingKey::Deny)]).await;
    let denied = strict.asker().get("/", &[]).await;
    assert_eq!(denied.status, StatusCode::TOO_MANY_REQUESTS);
    let problem = denied.json();
    assert!(
        problem["detail"].as_str().is_some_and(|detail| detail.contains("lacks header.x-user-id")),
        "{problem}"
    );
    assert_eq!(
        (&problem["source"], &problem["missing_key"]),
        (&"missing-key".into(), &"header.x-user-id".into())
    );
}

#[tokio::test]
async fn overrides_and_cost_closures_apply() {
    let limiter = limiter();
    let tenants = policy("tenants", 1).override_for(["acme"], quota(5));
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
        "a cost of 0 is not limited"
    );
}

#[tokio::test]
async fn an_invalid_key_is_a_bad_request() {
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
async fn a_policy_by_address_rejects_requests_without_an_address() {
    let limiter = limiter();
    let site = site(&limiter, [Policy::builder("addresses", quota(1)).key(["ip"])]).await;
    assert_eq!(site.asker().get("/", &[]).await.status, StatusCode::INTERNAL_SERVER_ERROR);
}

#[test]
fn unknown_key_source_does_not_parse() {
    for source in ["ip", "method", "path", "host", "header.X-User", "query.q", "cookie.sid"] {
        let source: KeySource = source.parse().expect("known");
        let _ = RateLimitLayer::new(limiter(), quota(1)).by(source);
    }
    for (source, expected) in [
        ("heder.x", "did you mean `header.x`?"),
        ("headers.x-user", "did you mean `header.x-user`?"),
        ("Path", "did you mean `path`?"),
        ("header.", "a name is missing after the dot"),
        ("tenant", "unknown attribute \"tenant\""),
    ] {
        let error = source.parse::<KeySource>().expect_err(source).to_string();
        assert!(error.contains(expected), "{error}");
    }
    assert!(KeySource::header("a b").is_err() && KeySource::custom("ip").is_err());
}

#[test]
fn sources_that_only_envoy_sends_are_rejected() {
    let by = |source: &str| {
        let source: KeySource = source.parse().expect("known");
        let layer = || drop(RateLimitLayer::new(limiter(), quota(1)).by(source));
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(layer)).map_err(panic_message)
    };
    for source in ["domain", "descriptor.user"] {
        let message = by(source).expect_err(source);
        assert!(message.starts_with("RateLimitLayer::by: no HTTP request has"), "{message}");
    }
    let edge = Policy::builder("edge", quota(1)).matches("domain", ["edge"]);
    let layer = || drop(layer(&limiter(), [edge]));
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(layer));
    let message = panic_message(panicked.expect_err("no request would be limited"));
    assert!(message.contains("no HTTP request has the attribute \"domain\""), "{message}");
}

/// Middleware that knows the tenant of a token.
async fn authenticate(mut request: axum::extract::Request) -> axum::extract::Request {
    let tenant = request.headers().get("x-token").and_then(|token| token.to_str().ok());
    let tenant = tenant.map(|token| ("tenant".to_owned(), token.to_uppercase()));
    request.extensions_mut().insert(CustomAttributes(tenant.into_iter().collect()));
    request
}

#[tokio::test]
async fn custom_attributes_of_the_applications_middleware_are_keys() {
    let limiter = limiter();
    let tenants = Policy::builder("tenants", quota(1)).key(["tenant"]).attributes(["tenant"]);
    let app = Router::new().route("/", get(async || "hello")).layer(layer(&limiter, [tenants]));
    let site = Site::start(app.layer(axum::middleware::map_request(authenticate))).await;
    let asker = site.asker();
    assert_eq!(asker.get("/", &[("x-token", "acme")]).await.status, StatusCode::OK);
    let denied = asker.get("/", &[("x-token", "Acme")]).await;
    assert_eq!(denied.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(asker.get("/", &[("x-token", "other")]).await.status, StatusCode::OK);
    for _ in 0..2 {
        assert_eq!(asker.get("/", &[]).await.status, StatusCode::OK, "no tenant, no limit");
    }
}

fn panic_message(payload: Box<dyn std::any::Any + Send>) -> String {
    *payload.downcast::<String>().expect("a formatted message")
}

#[tokio::test]
async fn bytes_that_are_not_utf8_are_a_key_and_not_an_error() {
    let by_query = Policy::builder("q", quota(5)).key(["query.q"]);
    let site = site(&limiter(), [by_query]).await;
    for path in ["/?q=%FF", "/?q=%80", "/?q=caf%C3", "/?q=%93quoted%94"] {
        assert_eq!(site.asker().get(path, &[]).await.status, StatusCode::OK, "{path}");
    }
}

/// Policies read `/api/../x` as `/x`, but axum routes it by `/api/{*rest}`.
#[tokio::test]
async fn dot_segments_do_not_bypass_a_policy() {
    let limiter = limiter();
    let app = Router::new().route("/api/{*rest}", get(async || "hello"));
    let api = Policy::builder("api", quota(1)).matches("path", ["/api/**"]);
    let site = Site::start(app.layer(layer(&limiter, [api]))).await;
    let asker = site.asker();
    assert_eq!(asker.get("/api/x", &[]).await.status, StatusCode::OK);
    for path in ["/api/x", "/api/y."] {
        assert_eq!(asker.get(path, &[]).await.status, StatusCode::TOO_MANY_REQUESTS, "{path}");
    }
    for path in ["/api/../x", "/api/%2e%2E/x", "/api/a/../../x", "/api/.", "/api/.%2e"] {
        assert_eq!(asker.get(path, &[]).await.status, StatusCode::BAD_REQUEST, "{path}");
    }
}
