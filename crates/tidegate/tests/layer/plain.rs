//! The layer around plain Tower services, and in front of hyper without a framework.

use std::convert::Infallible;
use std::net::Ipv4Addr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::{Body, Frame, Incoming};
use hyper::server::conn::http1;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use tidegate::layer::{QuotaRequestLimiter, RateLimitLayer};
use tidegate::{KeySource, Limiter, ManualClock, MemoryStore, Quota};
use tokio::net::TcpListener;
use tower::{Layer as _, Service, ServiceExt as _};

use crate::site::Asker;
use crate::support::LONG;

fn layer(limit: u64) -> RateLimitLayer<QuotaRequestLimiter> {
    let quota = Quota::token_bucket(limit, LONG).expect("valid");
    RateLimitLayer::new(Limiter::new(MemoryStore::new()), quota)
}

#[tokio::test]
async fn one_layer_limits_many_hyper_connections() {
    async fn hello(_: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
        Ok(Response::new(Full::from("hello")))
    }
    let service = layer(3).layer(tower::service_fn(hello));
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a free port");
    let address = listener.local_addr().expect("bound");
    let serving = tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.expect("accepts");
            let service = TowerToHyperService::new(service.clone());
            tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
        }
    });
    for _ in 0..3 {
        let answer = Asker::of(address).get("/", &[]).await;
        assert_eq!((answer.status, answer.body.as_str()), (StatusCode::OK, "hello"));
    }
    let denied = Asker::of(address).get("/", &[]).await;
    assert_eq!(denied.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(denied.header("content-length"), denied.body.len().to_string());
    serving.abort();
}

/// A service that must be polled ready before each call, and whose clones are not ready.
struct Strict {
    ready: bool,
    calls: Arc<AtomicU64>,
}

impl Clone for Strict {
    fn clone(&self) -> Self {
        Self { ready: false, calls: Arc::clone(&self.calls) }
    }
}

impl Service<Request<()>> for Strict {
    type Response = Response<Full<Bytes>>;
    type Error = &'static str;
    type Future = std::future::Ready<Result<Self::Response, Self::Error>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.ready = true;
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<()>) -> Self::Future {
        assert!(std::mem::take(&mut self.ready), "called without being ready");
        self.calls.fetch_add(1, Ordering::Relaxed);
        std::future::ready(Err("broken"))
    }
}

#[tokio::test]
async fn the_ready_service_is_called_and_not_its_clone() {
    let calls = Arc::new(AtomicU64::new(0));
    let strict = Strict { ready: false, calls: Arc::clone(&calls) };
    let mut service = layer(2).layer(strict);
    for _ in 0..2 {
        let answer = service.ready().await.expect("ready").call(Request::new(())).await;
        assert_eq!(answer.err(), Some("broken"));
    }
    let denied =
        service.ready().await.expect("ready").call(Request::new(())).await.expect("an answer");
    assert_eq!(denied.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(calls.load(Ordering::Relaxed), 2);
}

#[tokio::test]
async fn a_service_that_fails_without_a_response_counts_as_500() {
    let calls = Arc::new(AtomicU64::new(0));
    let strict = Strict { ready: false, calls: Arc::clone(&calls) };
    // A bucket would lack what has drained between the request and its charge.
    let quota = Quota::sliding_log(1, LONG).expect("valid");
    let layer = RateLimitLayer::new(Limiter::new(MemoryStore::new()), quota);
    let service = layer.refund_on(|status| status.is_server_error()).layer(strict);
    for _ in 0..5 {
        assert_eq!(service.clone().oneshot(Request::new(())).await.err(), Some("broken"));
    }
    assert_eq!(calls.load(Ordering::Relaxed), 5);
}

/// A key of a header is counted before the request is taken apart, and its denial afterwards.
#[tokio::test]
async fn a_denial_by_a_header_is_counted_once() {
    async fn hello(_: Request<()>) -> Result<Response<Full<Bytes>>, Infallible> {
        Ok(Response::new(Full::from("hello")))
    }
    let clock = ManualClock::new();
    let minute = Duration::from_secs(60);
    let quota = Quota::sliding_log(3, minute).expect("valid");
    let quota = quota.with_count_denied(true).expect("a log");
    let store = MemoryStore::builder().clock(clock.clone()).build();
    let service = RateLimitLayer::new(Limiter::new(store), quota)
        .by(KeySource::header("x-user-id").expect("a name"))
        .layer(tower::service_fn(hello));
    let ask = || async {
        let request = Request::get("/").header("x-user-id", "ann").body(()).expect("a request");
        let answer = service.clone().oneshot(request).await.expect("an answer");
        (answer.status(), answer.headers()["x-ratelimit-remaining"].clone())
    };
    for remaining in ["2", "1", "0"] {
        assert_eq!(ask().await, (StatusCode::OK, HeaderValue::from_static(remaining)));
    }
    clock.advance(minute / 2);
    let denied = (StatusCode::TOO_MANY_REQUESTS, HeaderValue::from_static("0"));
    assert_eq!(ask().await, denied);
    // The admitted ones no longer count, and the denied one still does.
    clock.advance(minute / 2);
    for remaining in ["1", "0"] {
        assert_eq!(ask().await, (StatusCode::OK, HeaderValue::from_static(remaining)));
    }
    assert_eq!(ask().await, denied);
}

/// A body that records whether it was read.
struct Watched(Arc<AtomicBool>);

impl Body for Watched {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.store(true, Ordering::Relaxed);
        Poll::Ready(None)
    }
}

#[tokio::test]
async fn the_body_of_a_denied_request_is_not_read() {
    async fn read(request: Request<Watched>) -> Result<Response<Full<Bytes>>, Infallible> {
        http_body_util::BodyExt::collect(request.into_body()).await?;
        Ok(Response::new(Full::default()))
    }
    let service = layer(1).layer(tower::service_fn(read));
    let mut looked_at = Vec::new();
    for _ in 0..2 {
        let looked = Arc::new(AtomicBool::new(false));
        service
            .clone()
            .oneshot(Request::new(Watched(Arc::clone(&looked))))
            .await
            .expect("infallible");
        looked_at.push(looked.load(Ordering::Relaxed));
    }
    assert_eq!(looked_at, [true, false]);
}

#[tokio::test]
async fn the_response_to_a_denied_head_request_has_a_length_and_no_body() {
    let service = layer(1).layer(tower::service_fn(async |_: Request<()>| {
        Ok::<_, Infallible>(Response::new(Full::new(Bytes::new())))
    }));
    let send = |method: &str| {
        let request = Request::builder().method(method).body(()).expect("a request");
        service.clone().oneshot(request)
    };
    send("GET").await.expect("infallible");
    let denied = send("HEAD").await.expect("infallible");
    assert_eq!(denied.status(), StatusCode::TOO_MANY_REQUESTS);
    assert!(denied.body().is_end_stream());
    let length = denied.headers()["content-length"].to_str().expect("text").to_owned();
    let body = http_body_util::BodyExt::collect(send("GET").await.expect("infallible").into_body());
    let bytes = body.await.expect("infallible").to_bytes();
    assert_eq!(length, bytes.len().to_string());
}
