//! The layer with a leaky bucket: requests are delayed, and a cancelled request is refunded.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::routing::get;
use http::{Request, Response, StatusCode};
use tidegate::layer::RateLimitLayer;
use tidegate::{
    Charge, Clock as _, KeySource, Limiter, ManualClock, MemoryStore, Quota, RedisStore, Store,
};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tower::limit::ConcurrencyLimit;
use tower::{Layer as _, Service as _, ServiceExt as _, service_fn};

use crate::site::Site;
use crate::support::{Redis, TEST_TIMEOUT, until};

struct Queue<S> {
    limiter: Limiter<S>,
    clock: ManualClock,
    app: Router,
    calls: Arc<AtomicU64>,
}

/// One request per second, with at most three in the bucket.
fn quota() -> Quota {
    Quota::leaky_bucket(1, Duration::from_secs(1))
        .and_then(|quota| quota.with_burst(3))
        .expect("valid")
}

impl Queue<MemoryStore> {
    fn new() -> Self {
        let clock = ManualClock::new();
        Self::on(Limiter::new(MemoryStore::builder().clock(clock.clone()).build()), clock)
    }
}

impl<S: Store> Queue<S> {
    fn on(limiter: Limiter<S>, clock: ManualClock) -> Self {
        let calls = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&calls);
        let service = get(async move || {
            counted.fetch_add(1, Ordering::Relaxed);
            "served"
        });
        let app = Router::new()
            .route("/", service)
            .layer(RateLimitLayer::new(limiter.clone(), quota()).policy("queue"));
        Self { limiter, clock, app, calls }
    }

    async fn ask(app: Router) -> StatusCode {
        app.oneshot(Request::new(Body::empty())).await.expect("infallible").status()
    }

    fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }

    /// Returns the units that would remain after one more request.
    async fn room(&self) -> u64 {
        let quota = quota();
        self.limiter
            .peek(&Charge::new("all", &quota).with_policy("queue"))
            .await
            .expect("decided")
            .remaining
    }

    async fn until_room_is(&self, room: u64) {
        until("the units are refunded", async || self.room().await == room).await;
    }
}

#[tokio::test]
async fn requests_are_delayed_one_after_the_other() {
    let queue = Queue::new();
    assert_eq!(Queue::<MemoryStore>::ask(queue.app.clone()).await, StatusCode::OK);
    let second = tokio::spawn(Queue::<MemoryStore>::ask(queue.app.clone()));
    until("the second sleeps", async || queue.clock.sleepers() == 1).await;
    let third = tokio::spawn(Queue::<MemoryStore>::ask(queue.app.clone()));
    until("the third sleeps", async || queue.clock.sleepers() == 2).await;
    assert_eq!(
        Queue::<MemoryStore>::ask(queue.app.clone()).await,
        StatusCode::TOO_MANY_REQUESTS,
        "the queue is full"
    );
    assert_eq!(queue.calls(), 1, "a delayed request has not reached the service");

    queue.clock.advance(Duration::from_millis(999));
    until("both check the clock", async || queue.clock.sleepers() == 2).await;
    assert_eq!(queue.calls(), 1);
    queue.clock.advance(Duration::from_millis(1));
    assert_eq!(second.await.expect("no panic"), StatusCode::OK);
    assert_eq!(queue.calls(), 2);
    queue.clock.advance(Duration::from_secs(1));
    assert_eq!(third.await.expect("no panic"), StatusCode::OK);
    assert_eq!(queue.calls(), 3);
}

async fn a_dropped_request_is_refunded<S: Store>(queue: Queue<S>) {
    assert_eq!(Queue::<S>::ask(queue.app.clone()).await, StatusCode::OK);
    let room = queue.room().await;
    let second = tokio::spawn(Queue::<S>::ask(queue.app.clone()));
    until("the second sleeps", async || queue.clock.sleepers() == 1).await;
    assert_eq!(queue.room().await, room - 1);
    second.abort();
    assert!(second.await.is_err_and(|error| error.is_cancelled()));
    queue.until_room_is(room).await;
    assert_eq!(queue.calls(), 1);
}

#[tokio::test]
async fn a_dropped_request_is_refunded_in_memory() {
    a_dropped_request_is_refunded(Queue::new()).await;
}

#[tokio::test]
async fn a_dropped_request_is_refunded_on_redis() {
    let redis = Redis::start();
    let clock = ManualClock::new();
    let builder = RedisStore::builder(&redis.url()).timeout(TEST_TIMEOUT).driven_by(clock.clone());
    let limiter = Limiter::new(builder.connect().await.expect("connected"));
    a_dropped_request_is_refunded(Queue::on(limiter, clock)).await;
}

#[tokio::test]
async fn a_disconnected_client_is_refunded() {
    let queue = Queue::new();
    let site = Site::start(queue.app.clone()).await;
    assert_eq!(site.asker().get("/", &[]).await.status, StatusCode::OK);
    let room = queue.room().await;
    let mut connection = TcpStream::connect(site.address).await.expect("connected");
    connection.write_all(b"GET / HTTP/1.1\r\nhost: site\r\n\r\n").await.expect("sent");
    until("it sleeps", async || queue.clock.sleepers() == 1).await;
    assert_eq!(queue.room().await, room - 1);
    drop(connection);
    queue.until_room_is(room).await;
    assert_eq!(queue.calls(), 1);
}

#[tokio::test]
async fn units_that_expired_during_the_request_are_not_refunded() {
    let clock = ManualClock::new();
    let limiter = Limiter::new(MemoryStore::builder().clock(clock.clone()).build());
    let quota = Quota::fixed_window(2, Duration::from_secs(1)).expect("valid");
    let works_for = |time: Duration| {
        let clock = clock.clone();
        get(async move || {
            clock.sleep(time).await;
            StatusCode::BAD_GATEWAY
        })
    };
    let layer = RateLimitLayer::new(limiter, quota).refund_on(|status| status.is_server_error());
    let app = Router::new()
        .route("/", get(async || "served"))
        .route("/slow", works_for(Duration::from_secs(1)))
        .route("/quick", works_for(Duration::ZERO))
        .layer(layer);
    let ask = |path: &str| {
        app.clone().oneshot(Request::get(path).body(Body::empty()).expect("a request"))
    };
    let slow = tokio::spawn(ask("/slow"));
    until("the slow one works", async || clock.sleepers() == 1).await;
    for _ in 0..3 {
        assert_eq!(
            ask("/quick").await.expect("infallible").status(),
            StatusCode::BAD_GATEWAY,
            "refunded in time"
        );
    }
    clock.advance(Duration::from_secs(1));
    // In the next window.
    for status in [StatusCode::OK, StatusCode::OK, StatusCode::TOO_MANY_REQUESTS] {
        assert_eq!(ask("/").await.expect("infallible").status(), status);
    }
    assert_eq!(
        slow.await.expect("no panic").expect("infallible").status(),
        StatusCode::BAD_GATEWAY
    );
    assert_eq!(
        ask("/").await.expect("infallible").status(),
        StatusCode::TOO_MANY_REQUESTS,
        "the units of other requests stay charged"
    );
}

fn request(user: &str) -> Request<()> {
    Request::get("/").header("x-user", user).body(()).expect("a request")
}

#[tokio::test]
async fn delayed_request_holds_no_slot_of_the_inner_service() {
    let clock = ManualClock::new();
    let limiter = Limiter::new(MemoryStore::builder().clock(clock.clone()).build());
    let user = KeySource::header("x-user").expect("valid");
    let inner = ConcurrencyLimit::new(
        service_fn(async |_: Request<()>| Ok::<_, Infallible>(Response::new(()))),
        1,
    );
    let service = RateLimitLayer::new(limiter, quota()).by(user).layer(inner);
    let ask = |user: &str| service.clone().oneshot(request(user));
    assert_eq!(ask("greedy").await.expect("infallible").status(), StatusCode::OK);
    let delayed = tokio::spawn(ask("greedy"));
    until("the second request is delayed", async || clock.sleepers() == 1).await;
    let other = tokio::time::timeout(TEST_TIMEOUT, ask("other")).await.expect("the slot is free");
    assert_eq!(other.expect("infallible").status(), StatusCode::OK);
    clock.advance(Duration::from_secs(1));
    let delayed = delayed.await.expect("no panic").expect("infallible");
    assert_eq!(delayed.status(), StatusCode::OK);
}

#[tokio::test]
async fn denied_request_releases_the_slot_of_the_inner_service() {
    let limiter = Limiter::new(MemoryStore::new());
    let quota = Quota::fixed_window(1, Duration::from_secs(3_600)).expect("valid");
    let user = KeySource::header("x-user").expect("valid");
    let inner = ConcurrencyLimit::new(
        service_fn(async |_: Request<()>| Ok::<_, Infallible>(Response::new(()))),
        1,
    );
    let mut one = RateLimitLayer::new(limiter, quota).by(user).layer(inner);
    let other = one.clone();
    for status in [StatusCode::OK, StatusCode::TOO_MANY_REQUESTS] {
        let response = one.ready().await.expect("infallible").call(request("ann")).await;
        assert_eq!(response.expect("infallible").status(), status);
    }
    let other = tokio::time::timeout(TEST_TIMEOUT, other.oneshot(request("bob"))).await;
    let response = other.expect("the slot is free").expect("infallible");
    assert_eq!(response.status(), StatusCode::OK);
}
