//! The layer with one quota in front of an axum application.

use std::borrow::Cow;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::Router;
use axum::extract::ConnectInfo;
use axum::routing::get;
use http::{Response, StatusCode};
use tidegate::layer::{QuotaRequestLimiter, RateLimitLayer};
use tidegate::{KeySource, Limiter, MemoryStore, Quota};

use crate::site::Site;
use crate::support::LONG;

const HOUR: Duration = Duration::from_secs(3600);

fn limiter() -> Limiter {
    Limiter::new(MemoryStore::new())
}

fn layer(limit: u64) -> RateLimitLayer<QuotaRequestLimiter> {
    layer_of(Quota::token_bucket(limit, LONG).expect("a valid quota"))
}

fn layer_of(quota: Quota) -> RateLimitLayer<QuotaRequestLimiter> {
    RateLimitLayer::new(limiter(), quota)
        .policy("per-user")
        .by(KeySource::header("x-user-id").expect("valid"))
}

fn app(layer: RateLimitLayer<QuotaRequestLimiter>) -> Router {
    Router::new().route("/", get(async || "hello")).layer(layer)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn exactly_the_limit_is_admitted_however_often_the_layer_is_cloned() {
    let calls = Arc::new(AtomicU64::new(0));
    let count = |calls: &Arc<AtomicU64>| {
        let calls = Arc::clone(calls);
        get(move || {
            calls.fetch_add(1, Ordering::Relaxed);
            std::future::ready("hello")
        })
    };
    let layer = layer(100);
    // Two servers with two routes each. axum clones the service for each request.
    let site = |layer: &RateLimitLayer<QuotaRequestLimiter>| {
        let one = Router::new().route("/one", count(&calls)).layer(layer.clone());
        let two = Router::new().route("/two", count(&calls)).layer(layer.clone());
        Site::start(one.merge(two))
    };
    let sites = [site(&layer).await, site(&layer).await];
    let tasks: Vec<_> = (0..32)
        .map(|number: usize| {
            let asker = sites[number % 2].asker();
            tokio::spawn(async move {
                let mut admitted = 0;
                for path in ["/one", "/two"].into_iter().cycle().take(10) {
                    let answer = asker.get(path, &[("x-user-id", "ann")]).await;
                    assert!(
                        [StatusCode::OK, StatusCode::TOO_MANY_REQUESTS].contains(&answer.status),
                        "{answer:?}"
                    );
                    admitted += u64::from(answer.status == StatusCode::OK);
                }
                admitted
            })
        })
        .collect();
    let mut admitted = 0;
    for task in tasks {
        admitted += task.await.expect("no panic");
    }
    assert_eq!(admitted, 100);
    assert_eq!(calls.load(Ordering::Relaxed), 100, "a denied request does not reach the service");
    assert_eq!(
        sites[0].asker().get("/one", &[("x-user-id", "bob")]).await.status,
        StatusCode::OK,
        "another key"
    );
}

#[tokio::test]
async fn allowed_and_denied_responses_have_the_rate_limit_headers() {
    let quota = Quota::fixed_window(1, Duration::from_secs(86_400)).expect("valid");
    let site = Site::start(app(RateLimitLayer::new(limiter(), quota)
        .policy("daily")
        .by(KeySource::header("x-user-id").expect("valid"))))
    .await;
    let asker = site.asker();
    let allowed = asker.get("/", &[("x-user-id", "ann")]).await;
    assert_eq!((allowed.status, allowed.body.as_str()), (StatusCode::OK, "hello"));
    assert_eq!(allowed.header("content-length"), "5", "the body keeps its known length");
    assert_eq!(allowed.header("ratelimit-policy"), r#""daily";q=1;w=86400"#);
    assert!(allowed.header("ratelimit").starts_with(r#""daily";r=0;t="#), "{allowed:?}");
    assert_eq!(allowed.header("x-ratelimit-limit"), "1");
    assert_eq!(allowed.header("x-ratelimit-remaining"), "0");
    assert_eq!(allowed.header("retry-after"), "");

    let denied = asker.get("/", &[("x-user-id", "ann")]).await;
    assert_eq!(denied.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(denied.header("content-type"), "application/problem+json");
    assert_eq!(denied.header("ratelimit-policy"), r#""daily";q=1;w=86400"#);
    let wait: u64 = denied.header("retry-after").parse().expect("seconds");
    assert!((1..=86_400).contains(&wait));
    let problem = denied.json();
    assert_eq!(problem["status"], 429);
    assert_eq!(problem["type"], "https://iana.org/assignments/http-problem-types#quota-exceeded");
    assert_eq!(problem["title"], "Quota Exceeded");
    assert_eq!(problem["violated-policies"], serde_json::json!(["daily"]));
    assert_eq!(problem["policy"], "daily");
    let millis = problem["retry_after_ms"].as_u64().expect("a number");
    assert_eq!(millis.div_ceil(1_000), wait);
    assert!(
        problem["detail"]
            .as_str()
            .is_some_and(|detail| detail.contains(&format!("try again in {wait} s")))
    );

    let unlimited = asker.get("/", &[]).await;
    assert_eq!(
        (unlimited.status, unlimited.header("ratelimit")),
        (StatusCode::OK, ""),
        "no key, no limit"
    );
}

#[tokio::test]
async fn x_ratelimit_headers_can_be_disabled() {
    let site = Site::start(app(layer(1).x_ratelimit_headers(false))).await;
    let allowed = site.asker().get("/", &[("x-user-id", "ann")]).await;
    assert!(allowed.headers.contains_key("ratelimit"));
    assert!(
        !allowed.headers.keys().any(|name| name.as_str().starts_with("x-ratelimit")),
        "{allowed:?}"
    );
}

#[tokio::test]
async fn closures_can_set_the_key_and_the_cost() {
    let keyed = layer(10)
        .key(|head| {
            let token = head.headers.get("authorization")?.to_str().ok()?;
            token.strip_prefix("Bearer ").map(Cow::Borrowed)
        })
        .cost(|head| if head.uri.path() == "/export" { 6 } else { 1 });
    let app = Router::new()
        .route("/", get(async || "one"))
        .route("/export", get(async || "six"))
        .layer(keyed);
    let site = Site::start(app).await;
    let asker = site.asker();
    let ann = [("authorization", "Bearer ann")];
    assert_eq!(asker.get("/export", &ann).await.header("x-ratelimit-remaining"), "4");
    assert_eq!(asker.get("/export", &ann).await.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(asker.get("/", &ann).await.header("x-ratelimit-remaining"), "3");
    assert_eq!(
        asker.get("/", &[("authorization", "Basic x")]).await.header("ratelimit"),
        "",
        "no key, no limit"
    );
}

#[tokio::test]
async fn the_key_ip_needs_a_peer_address() {
    let site = Site::start(app(layer(1).by(KeySource::client_ip()))).await;
    let lost = site.asker().get("/", &[]).await;
    assert_eq!(
        lost.status,
        StatusCode::INTERNAL_SERVER_ERROR,
        "an unknown address is not admitted"
    );

    let found = layer(1)
        .by(KeySource::client_ip())
        .peer(|head| head.extensions.get::<ConnectInfo<SocketAddr>>().map(|peer| peer.ip()));
    let site = Site::start(app(found)).await;
    let asker = site.asker();
    assert_eq!(asker.get("/", &[]).await.status, StatusCode::OK);
    let spoofed = asker.get("/", &[("x-forwarded-for", "203.0.113.9")]).await;
    assert_eq!(
        spoofed.status,
        StatusCode::TOO_MANY_REQUESTS,
        "only configured proxies are trusted"
    );
}

#[tokio::test]
async fn preflight_requests_are_exempt_only_if_configured() {
    let preflight = [
        ("origin", "https://a.example"),
        ("access-control-request-method", "PUT"),
        ("x-user-id", "ann"),
    ];
    let limited = Site::start(app(layer(1))).await;
    assert!(
        limited.asker().ask("OPTIONS", "/", &preflight).await.headers.contains_key("ratelimit")
    );

    let exempt = Site::start(app(layer(1).exempt_preflight())).await;
    let asker = exempt.asker();
    for _ in 0..3 {
        let answer = asker.ask("OPTIONS", "/", &preflight).await;
        assert_eq!(
            (answer.status, answer.header("ratelimit")),
            (StatusCode::METHOD_NOT_ALLOWED, "")
        );
    }
    assert_eq!(
        asker.ask("OPTIONS", "/", &preflight[..1]).await.header("ratelimit"),
        "",
        "a request without a key"
    );
    let bare = [("x-user-id", "ann")];
    assert_eq!(
        asker.ask("OPTIONS", "/", &bare).await.status,
        StatusCode::METHOD_NOT_ALLOWED,
        "not a preflight request"
    );
    assert_eq!(asker.ask("OPTIONS", "/", &bare).await.status, StatusCode::TOO_MANY_REQUESTS);
}

#[tokio::test]
async fn failed_requests_are_refunded() {
    let fails = get(async || (StatusCode::BAD_GATEWAY, "broken"));
    // A bucket would lack what has drained between the request and its charge.
    let quota = Quota::sliding_log(2, LONG).expect("a valid quota");
    let layer = layer_of(quota).refund_on(|status| status.is_server_error());
    let app = Router::new().route("/fails", fails).route("/", get(async || "hello")).layer(layer);
    let site = Site::start(app).await;
    let asker = site.asker();
    let ann = [("x-user-id", "ann")];
    for _ in 0..5 {
        assert_eq!(asker.get("/fails", &ann).await.status, StatusCode::BAD_GATEWAY);
    }
    assert_eq!(asker.get("/nowhere", &ann).await.status, StatusCode::NOT_FOUND, "a 404 is charged");
    assert_eq!(asker.get("/", &ann).await.status, StatusCode::OK);
    assert_eq!(asker.get("/", &ann).await.status, StatusCode::TOO_MANY_REQUESTS);
}

#[tokio::test]
async fn a_custom_denial_keeps_the_rate_limit_headers() {
    let layer = layer(1).on_denied(|denial| {
        let text = format!("{} must wait", denial.denied_by().key().unwrap_or("who?"));
        Response::builder().status(StatusCode::SERVICE_UNAVAILABLE).body(text).expect("a response")
    });
    let site = Site::start(app(layer)).await;
    let asker = site.asker();
    let ann = [("x-user-id", "ann")];
    assert_eq!(asker.get("/", &ann).await.status, StatusCode::OK);
    let denied = asker.get("/", &ann).await;
    assert_eq!(
        (denied.status, denied.body.as_str()),
        (StatusCode::SERVICE_UNAVAILABLE, "ann must wait")
    );
    assert!(!denied.header("retry-after").is_empty());
}

#[tokio::test]
async fn nested_layers_add_their_limits_to_the_headers() {
    let quota = Quota::fixed_window(100, HOUR).expect("valid");
    let both = app(layer(1)).layer(RateLimitLayer::new(limiter(), quota).policy("site"));
    let site = Site::start(both).await;
    let asker = site.asker();
    let ann = [("x-user-id", "ann")];
    let allowed = asker.get("/", &ann).await;
    let names: Vec<&str> = allowed
        .headers
        .get_all("ratelimit")
        .iter()
        .map(|line| line.to_str().expect("text"))
        .collect();
    assert!(
        names[0].starts_with("\"per-user\"") && names[1].starts_with("\"site\";r=99"),
        "{names:?}"
    );
    let denied = asker.get("/", &ann).await;
    assert_eq!(denied.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(denied.header("x-ratelimit-limit"), "1", "the limit that denied");
}
