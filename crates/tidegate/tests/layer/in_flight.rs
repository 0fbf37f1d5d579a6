//! The layer with limits in flight, and with costs that the response settles.

use std::convert::Infallible;
use std::future::pending;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use axum::extract::Extension;
use axum::response::IntoResponse as _;
use axum::routing::get;
use axum::{Router, response::Response};
use bytes::Bytes;
use http::{Request, StatusCode};
use http_body::Frame;
use tidegate::layer::{QuotaRequestLimiter, RateLimitLayer};
use tidegate::{
    Action, Charge, Cost, HoldTerms, KeySource, Limiter, ManualClock, MemoryStore, OnExpire,
    Policies, Policy, Quota, RedisStore, RequestLease, Store,
};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, mpsc};
use tower::ServiceExt as _;

use crate::site::Site;
use crate::support::{LONG, Redis, TEST_TIMEOUT, until};

const ANN: [(&str, &str); 1] = [("x-user-id", "ann")];

fn limiter() -> Limiter {
    Limiter::new(MemoryStore::new())
}

/// Layer with a rate that no test uses up, unless it says so.
fn layer<S: Store>(limiter: &Limiter<S>, rate: u64) -> RateLimitLayer<QuotaRequestLimiter<S>> {
    let quota = Quota::sliding_log(rate, LONG).expect("valid");
    RateLimitLayer::new(limiter.clone(), quota)
        .policy("user")
        .by(KeySource::header("x-user-id").expect("valid"))
}

/// Returns the units that Ann has left of a quota.
async fn left<S: Store>(limiter: &Limiter<S>, policy: &str, quota: &Quota) -> u64 {
    let charge = Charge::new("ann", quota).with_policy(policy).with_cost(0);
    limiter.store().decide(Action::ChargeUpTo, &charge).await.expect("decided").remaining
}

/// Returns the number of requests in flight of Ann, below a limit that is larger.
async fn in_flight<S: Store>(limiter: &Limiter<S>) -> u64 {
    let quota = Quota::concurrency(100).expect("valid");
    100 - left(limiter, "user-in-flight", &quota).await
}

async fn left_of_rate<S: Store>(limiter: &Limiter<S>, rate: u64) -> u64 {
    left(limiter, "user", &Quota::sliding_log(rate, LONG).expect("valid")).await
}

fn request(path: &str) -> Request<Body> {
    Request::get(path).header("x-user-id", "ann").body(Body::empty()).expect("a request")
}

async fn ask(app: &Router, path: &str) -> Response {
    app.clone().oneshot(request(path)).await.expect("infallible")
}

/// Body of the chunks that a test sends.
struct Chunks(mpsc::Receiver<Bytes>);

impl http_body::Body for Chunks {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(context).map(|chunk| chunk.map(|chunk| Ok(Frame::data(chunk))))
    }
}

/// Route whose body has the chunks that the test sends.
fn streaming() -> (mpsc::Sender<Bytes>, axum::routing::MethodRouter) {
    let (sender, receiver) = mpsc::channel(1);
    let receiver = Arc::new(std::sync::Mutex::new(Some(receiver)));
    let serve = move || {
        let chunks = receiver.lock().expect("no panic").take();
        std::future::ready(match chunks {
            Some(chunks) => Body::new(Chunks(chunks)).into_response(),
            None => "once".into_response(),
        })
    };
    (sender, get(serve))
}

/// Sends a request, and returns its connection with the head of the response.
async fn open(site: &Site, path: &str) -> (TcpStream, String) {
    let mut connection = TcpStream::connect(site.address).await.expect("connected");
    let head = format!("GET {path} HTTP/1.1\r\nhost: site\r\nx-user-id: ann\r\n\r\n");
    connection.write_all(head.as_bytes()).await.expect("sent");
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(connection.read_u8().await.expect("a head"));
    }
    (connection, String::from_utf8(head).expect("text"))
}

/// Sends forty requests at once to servers with a limit of five in flight, whose handlers wait.
async fn requests_in_the_handler_never_exceed_the_limit<S: Store>(limiters: [Limiter<S>; 2]) {
    let (gate, now, most) = (Arc::new(Semaphore::new(0)), AtomicUsize::new(0), AtomicUsize::new(0));
    let counts = Arc::new((now, most));
    let (passing, counted) = (Arc::clone(&gate), Arc::clone(&counts));
    let handler = get(async move || {
        let now = counted.0.fetch_add(1, Ordering::SeqCst) + 1;
        counted.1.fetch_max(now, Ordering::SeqCst);
        let _open = passing.acquire().await.expect("open");
        counted.0.fetch_sub(1, Ordering::SeqCst);
        "done"
    });
    let app = |limiter: &Limiter<S>| {
        Router::new().route("/", handler.clone()).layer(layer(limiter, 1_000).in_flight(5))
    };
    let sites = [Site::start(app(&limiters[0])).await, Site::start(app(&limiters[1])).await];
    let requests: Vec<_> = (0..40)
        .map(|number: usize| {
            let asker = sites[number % 2].asker();
            tokio::spawn(async move { asker.get("/", &ANN).await.status })
        })
        .collect();
    until("35 are denied", async || {
        requests.iter().filter(|request| request.is_finished()).count() == 35
    })
    .await;
    assert_eq!(in_flight(&limiters[0]).await, 5);
    gate.add_permits(1_000);
    let mut admitted = 0;
    for request in requests {
        admitted += usize::from(request.await.expect("no panic") == StatusCode::OK);
    }
    assert_eq!((admitted, counts.1.load(Ordering::SeqCst)), (5, 5));
    until("all are released", async || in_flight(&limiters[0]).await == 0).await;
    assert_eq!(left_of_rate(&limiters[0], 1_000).await, 995, "a denied request takes nothing");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn requests_in_the_handler_never_exceed_the_limit_in_memory() {
    let limiter = limiter();
    requests_in_the_handler_never_exceed_the_limit([limiter.clone(), limiter]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn requests_in_the_handler_never_exceed_the_limit_of_a_fleet() {
    let redis = Redis::start();
    let limiters = [redis.limiter().await, redis.limiter().await];
    requests_in_the_handler_never_exceed_the_limit(limiters).await;
    redis.assert_every_key_expires();
}

#[tokio::test]
async fn clients_that_send_one_request_after_the_other_are_never_denied() {
    let limiter = limiter();
    let app = Router::new()
        .route("/", get(async || "hello"))
        .route("/empty", get(async || StatusCode::NO_CONTENT))
        .layer(layer(&limiter, 1_000).in_flight(1));
    for path in ["/", "/empty"].into_iter().cycle().take(50) {
        let response = ask(&app, path).await;
        assert!(response.status().is_success(), "{path}");
        let body = axum::body::to_bytes(response.into_body(), 100).await.expect("a body");
        assert_eq!(body.is_empty(), path == "/empty");
        assert_eq!(in_flight(&limiter).await, 0, "{path}");
    }
}

#[tokio::test]
async fn streamed_body_is_in_flight_until_its_end() {
    let (chunks, route) = streaming();
    let limiter = limiter();
    let app = Router::new().route("/", route).layer(layer(&limiter, 1_000).in_flight(1));
    let site = Site::start(app).await;
    let (mut connection, head) = open(&site, "/").await;
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    let denied = site.asker().get("/", &ANN).await;
    assert_eq!(denied.status, StatusCode::TOO_MANY_REQUESTS);
    assert!(denied.body.contains("user-in-flight"), "{denied:?}");
    assert_eq!(denied.header("retry-after"), "1");
    chunks.send(Bytes::from("chunk")).await.expect("received");
    assert_eq!(site.asker().get("/", &ANN).await.status, StatusCode::TOO_MANY_REQUESTS);
    drop(chunks);
    let mut body = Vec::new();
    while !body.ends_with(b"0\r\n\r\n") {
        body.push(connection.read_u8().await.expect("a body"));
    }
    assert_eq!(body, b"5\r\nchunk\r\n0\r\n\r\n");
    assert_eq!(site.asker().get("/", &ANN).await.status, StatusCode::OK, "released before its end");
}

#[tokio::test]
async fn client_that_disconnects_is_released() {
    let (chunks, route) = streaming();
    let limiter = limiter();
    let app = Router::new()
        .route("/body", route)
        .route("/handler", get(async || pending::<()>().await))
        .layer(layer(&limiter, 1_000).in_flight(2));
    let site = Site::start(app).await;
    let (connection, _) = open(&site, "/body").await;
    assert_eq!(in_flight(&limiter).await, 1);
    drop(connection);
    until("the body is dropped", async || {
        let _ = chunks.try_send(Bytes::from("chunk"));
        in_flight(&limiter).await == 0
    })
    .await;
    let mut connection = TcpStream::connect(site.address).await.expect("connected");
    let head = b"GET /handler HTTP/1.1\r\nhost: site\r\nx-user-id: ann\r\n\r\n";
    connection.write_all(head).await.expect("sent");
    until("the handler runs", async || in_flight(&limiter).await == 1).await;
    drop(connection);
    until("the handler is cancelled", async || in_flight(&limiter).await == 0).await;
}

#[tokio::test]
async fn handler_that_panics_is_released() {
    let limiter = limiter();
    let broken = get(async || assert!(!std::hint::black_box(true), "a defect"));
    let app = Router::new().route("/", broken).layer(layer(&limiter, 1_000).in_flight(1));
    for _ in 0..3 {
        let app = app.clone();
        let failed = tokio::spawn(async move { ask(&app, "/").await }).await;
        assert!(failed.is_err_and(|error| error.is_panic()), "the handler was called");
        assert_eq!(in_flight(&limiter).await, 0);
    }
}

/// The clock does not move, so that no lease ends without a release.
#[tokio::test]
async fn request_that_is_cancelled_while_it_waits_for_redis_is_released() {
    let redis = Redis::start();
    let builder = RedisStore::builder(&redis.url()).timeout(TEST_TIMEOUT);
    let store = builder.driven_by(ManualClock::new()).connect().await.expect("connected");
    let limiter = Limiter::new(store);
    let route = get(async || "hello");
    let app = Router::new().route("/", route).layer(layer(&limiter, 1_000).in_flight(5));
    assert_eq!(ask(&app, "/").await.status(), StatusCode::OK);
    until("the first is released", async || in_flight(&limiter).await == 0).await;
    let before = redis.calls_of("evalsha");
    redis.pause_writes();
    let waiting = tokio::spawn({
        let app = app.clone();
        async move { ask(&app, "/").await }
    });
    // Its call is on its way to Redis.
    for _ in 0..10 {
        tokio::task::yield_now().await;
    }
    waiting.abort();
    assert!(waiting.await.is_err_and(|error| error.is_cancelled()));
    redis.resume_writes();
    until("it is charged and released", async || {
        in_flight(&limiter).await == 0 && redis.calls_of("evalsha") > before
    })
    .await;
    assert_eq!(in_flight(&limiter).await, 0);
}

#[tokio::test]
async fn rate_and_limit_in_flight_are_all_or_nothing() {
    let limiter = limiter();
    let (_chunks, route) = streaming();
    let app = Router::new()
        .route("/", get(async || "hello"))
        .route("/stream", route)
        .layer(layer(&limiter, 2).in_flight(1));
    let held = ask(&app, "/stream").await;
    assert_eq!(held.headers()["ratelimit-policy"], {
        r#""user";q=2;w=8640000, "user-in-flight";q=1;qu="concurrent-requests""#
    });
    assert_eq!(ask(&app, "/").await.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(left_of_rate(&limiter, 2).await, 1, "a denial in flight takes nothing of the rate");
    drop(held);
    drop(ask(&app, "/").await);
    assert_eq!(ask(&app, "/").await.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(in_flight(&limiter).await, 0, "a denial of the rate holds nothing");
}

#[tokio::test]
async fn long_request_is_renewed_until_the_maximum() {
    let clock = ManualClock::new();
    let limiter = Limiter::new(MemoryStore::builder().clock(clock.clone()).build());
    let second = Duration::from_secs(1);
    let terms = HoldTerms::new(10 * second, 60 * second).expect("valid");
    let quota = Quota::concurrency(1).expect("valid").with_holds(terms);
    let exports = Policy::builder("exports", quota.clone()).key(["header.x-user-id"]);
    let policies = Policies::new(vec![exports.build().expect("valid")]).expect("one");
    let (_chunks, route) = streaming();
    let app = Router::new()
        .route("/", route)
        .layer(RateLimitLayer::with_policies(limiter.clone(), policies));
    let _held = ask(&app, "/").await;
    for round in 1..20 {
        until("the task sleeps", async || clock.sleepers() == 1).await;
        assert_eq!(left(&limiter, "exports", &quota).await, 0, "{round}");
        clock.advance(3 * second);
    }
    until("the task sleeps", async || clock.sleepers() == 1).await;
    clock.advance(3 * second);
    assert_eq!(left(&limiter, "exports", &quota).await, 1, "a minute has passed");
}

#[tokio::test]
async fn work_that_outlives_its_response_is_in_flight() {
    let limiter = limiter();
    let gate = Arc::new(Semaphore::new(0));
    let opened = Arc::clone(&gate);
    let start = get(async move |Extension(lease): Extension<RequestLease>| {
        tokio::spawn(async move {
            drop(opened.acquire().await.expect("open"));
            drop(lease);
        });
        StatusCode::ACCEPTED
    });
    let app = Router::new().route("/", start).layer(layer(&limiter, 1_000).in_flight(1));
    assert_eq!(ask(&app, "/").await.status(), StatusCode::ACCEPTED);
    assert_eq!(ask(&app, "/").await.status(), StatusCode::TOO_MANY_REQUESTS);
    gate.add_permits(1);
    until("the work has ended", async || in_flight(&limiter).await == 0).await;
}

/// Application whose responses have the header `x-tokens-used` as the path says.
fn tokens_used() -> Router {
    let serve = async |request: Request<Body>| {
        let (status, used) = request.uri().path()[1..].split_once('/').expect("two parts");
        let mut response = StatusCode::from_bytes(status.as_bytes()).expect("one").into_response();
        for used in used.split('+') {
            response.headers_mut().append("x-tokens-used", used.parse().expect("text"));
        }
        response
    };
    Router::new().fallback(serve)
}

#[tokio::test]
async fn settle_commits_the_units_of_the_response() {
    let limiter = limiter();
    let used = |response: &http::response::Parts| {
        response.headers["x-tokens-used"].to_str().expect("text").parse::<u64>().ok()
    };
    let app = tokens_used().layer(layer(&limiter, 1_000).cost(|_| 200).settle(used).in_flight(9));
    for (path, status, expected) in [
        ("/200/50", StatusCode::OK, 950),
        ("/200/0", StatusCode::OK, 950),
        ("/200/none", StatusCode::OK, 750),
        ("/500/10", StatusCode::INTERNAL_SERVER_ERROR, 740),
        ("/200/700", StatusCode::OK, 40),
        ("/200/1", StatusCode::TOO_MANY_REQUESTS, 40),
    ] {
        assert_eq!(ask(&app, path).await.status(), status, "{path}");
        assert_eq!(left_of_rate(&limiter, 1_000).await, expected, "{path}");
        assert_eq!(in_flight(&limiter).await, 0, "{path}");
    }
    // More than is left is charged, too, up to ten times the limit.
    let all = layer(&limiter, 1_000).cost(|_| 40).settle(|_| u64::MAX);
    let app = tokens_used().layer(all);
    assert_eq!(ask(&app, "/200/0").await.status(), StatusCode::OK);
    let level = Quota::sliding_log(10_000, LONG).expect("valid");
    assert_eq!(left(&limiter, "user", &level).await, 0);
}

async fn is_settled_by_its_response_header<S: Store>(limiter: &Limiter<S>) {
    let quota = Quota::sliding_log(1_000, LONG).expect("valid");
    let name = "header.x-max-tokens".to_owned();
    let tokens = Policy::builder("tokens", quota.clone())
        .key(["header.x-user-id"])
        .cost(Cost::Attribute { name, default: 200, max: 400 })
        .settled_by("X-Tokens-Used")
        .refund_on(["503"]);
    let requests = Policy::builder("requests", quota.clone()).key(["header.x-user-id"]);
    let policies = [tokens, requests].map(|policy| policy.build().expect("valid"));
    let policies = Policies::new(policies.into()).expect("two");
    let app = tokens_used().layer(RateLimitLayer::with_policies(limiter.clone(), policies));
    let mut expected = 1_000;
    for (path, used) in [
        ("/200/50", 50),
        ("/503/50", 0),
        ("/200/030", 30),
        // Not one whole number: the reserve stays.
        ("/200/-1", 200),
        ("/200/1.5", 200),
        ("/200/5+5", 200),
        ("/200/", 200),
    ] {
        ask(&app, path).await;
        expected -= used;
        assert_eq!(left(limiter, "tokens", &quota).await, expected, "{path}");
    }
    assert_eq!(left(limiter, "requests", &quota).await, 993, "only the other one is settled");
}

#[tokio::test]
async fn policy_is_settled_by_its_response_header() {
    is_settled_by_its_response_header(&limiter()).await;
    let redis = Redis::start();
    is_settled_by_its_response_header(&redis.limiter().await).await;
    redis.assert_every_key_expires();
}

/// A client that leaves before the response must not get its reserve back: the work may be done.
#[tokio::test]
async fn reserve_of_a_cancelled_request_ends_by_the_terms_of_its_quota() {
    for (on_expire, expected) in [(OnExpire::Charge, 800), (OnExpire::Release, 1_000)] {
        let clock = ManualClock::new();
        let limiter = Limiter::new(MemoryStore::builder().clock(clock.clone()).build());
        let terms = HoldTerms::default().with_on_expire(on_expire);
        let quota = Quota::sliding_log(1_000, LONG).expect("valid").with_holds(terms);
        let layer = RateLimitLayer::new(limiter.clone(), quota.clone())
            .policy("user")
            .by(KeySource::header("x-user-id").expect("valid"))
            .cost(|_| 200)
            .settle(|_| 0);
        let app = Router::new().route("/", get(async || pending::<()>().await)).layer(layer);
        let waiting = tokio::spawn(async move { ask(&app, "/").await });
        until("it is reserved", async || left(&limiter, "user", &quota).await == 800).await;
        waiting.abort();
        assert!(waiting.await.is_err_and(|error| error.is_cancelled()));
        assert_eq!(left(&limiter, "user", &quota).await, 800);
        clock.advance(Duration::from_secs(11));
        assert_eq!(left(&limiter, "user", &quota).await, expected, "{on_expire:?}");
    }
}

#[test]
#[should_panic(expected = "RateLimitLayer::in_flight: limit 0")]
fn limit_of_zero_is_refused() {
    let _ = layer(&limiter(), 1).in_flight(0);
}
