//! Blocking calls on Redis, and the store with a deny cache and a fallback in one call.

#[path = "support/server.rs"]
mod server;

use std::thread;
use std::time::{Duration, Instant};

use server::Redis;
use tidegate::{Charge, ChargeError, Error, Limiter, Quota, RedisStore, Source, StoreError};

fn quota(limit: u64) -> Quota {
    Quota::fixed_window(limit, Duration::from_secs(86_400)).expect("a valid quota")
}

#[test]
fn threads_without_a_runtime_share_a_limit() {
    let redis = Redis::start();
    let limiter = Limiter::new(RedisStore::connect_blocking(&redis.url()).expect("connected"));
    let quota = quota(100);
    let allowed: usize = thread::scope(|scope| {
        let worker = || {
            let charge = Charge::new("job", &quota);
            let decisions = (0..50).map(|_| limiter.blocking().acquire(&charge).expect("decided"));
            decisions.filter(|decision| decision.allowed).count()
        };
        let workers: Vec<_> = (0..4).map(|_| scope.spawn(worker)).collect();
        workers.into_iter().map(|worker| worker.join().expect("no panic")).sum()
    });
    assert_eq!(allowed, 100);
}

#[test]
fn every_call_has_a_blocking_form() {
    let redis = Redis::start();
    let limiter = Limiter::new(RedisStore::connect_blocking(&redis.url()).expect("connected"));
    let (blocking, quota, other) = (limiter.blocking(), quota(10), quota(5));
    let charge = Charge::new("user123", &quota).with_policy("p").with_cost(4);
    let charged_at = limiter.now();
    assert_eq!(blocking.acquire(&charge).expect("decided").remaining, 6);
    assert_eq!(blocking.peek(&charge.with_cost(1)).expect("decided").remaining, 5);
    assert!(!blocking.report(&charge.with_cost(8)).expect("decided").allowed);
    assert_eq!(
        blocking.refund(&charge),
        Err(Error::Charge(ChargeError::NoChargeTime)),
        "a refund needs the time of its charge"
    );
    let refund = charge.with_charged_at(charged_at);
    assert_eq!(blocking.refund(&refund).expect("decided").remaining, 2);
    let charges = [charge.with_cost(1), Charge::new("user123", &other).with_policy("q")];
    assert!(blocking.acquire_all(&charges).expect("decided").is_allowed());
    assert!(blocking.peek_all(&charges).expect("decided").is_allowed());
    blocking.reset(&charge).expect("reset");
    assert_eq!(blocking.peek(&charge.with_cost(1)).expect("decided").remaining, 9);
    let bucket = Quota::token_bucket(100, Duration::from_secs(1)).expect("valid");
    let bucket = bucket.with_burst(1).expect("valid");
    for _ in 0..3 {
        let charge = Charge::new("waits", &bucket);
        assert!(blocking.wait(&charge, Duration::from_secs(10)).expect("decided").allowed);
    }
    let invalid = blocking.acquire(&Charge::new("", &quota));
    assert!(matches!(invalid, Err(Error::Charge(_))), "{invalid:?}");
}

/// A store with a thread of its own works in every context, also where it should not be used.
#[test]
fn blocking_calls_inside_of_a_runtime_do_not_panic() {
    let redis = Redis::start();
    let quota = quota(10);
    let current = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let several = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    for runtime in [current.expect("a runtime"), several.expect("a runtime")] {
        runtime.block_on(async {
            let store = RedisStore::connect_blocking(&redis.url()).expect("connected");
            let limiter = Limiter::new(store);
            let charge = Charge::new("user123", &quota);
            assert!(limiter.blocking().acquire(&charge).expect("decided").allowed);
            assert!(limiter.acquire(&charge).await.expect("decided").allowed);
        });
    }
}

#[test]
fn stores_of_an_async_program_have_blocking_calls() {
    let redis = Redis::start();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("a runtime");
    let limiter = runtime.block_on(async {
        let limiter = Limiter::new(RedisStore::connect(&redis.url()).await.expect("connected"));
        let (quota, shared) = (quota(10), limiter.clone());
        let decided = tokio::task::spawn_blocking(move || {
            shared.blocking().acquire(&Charge::new("user123", &quota)).expect("decided")
        });
        assert_eq!(decided.await.expect("no panic").remaining, 9);
        limiter
    });
    let quota = quota(10);
    let charge = Charge::new("user123", &quota);
    assert_eq!(limiter.blocking().acquire(&charge).expect("decided").remaining, 8);
    drop(runtime);
    let error = limiter.blocking().acquire(&charge).expect_err("no runtime");
    assert!(error.to_string().contains("runtime of this store has ended"), "{error}");
}

/// The call would wait for the thread that it blocks.
#[test]
fn blocking_call_on_the_thread_of_its_store_is_an_error() {
    let redis = Redis::start();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let builder = RedisStore::builder(&redis.url()).timeout(Duration::from_millis(50));
        let limiter = Limiter::new(builder.connect().await.expect("connected"));
        let quota = quota(10);
        let charge = Charge::new("user123", &quota);
        let error = limiter.blocking().acquire(&charge).expect_err("its own thread");
        assert!(matches!(error, Error::Store(StoreError::Misconfigured(_))), "{error}");
        let left = limiter.acquire(&charge).await.expect("decided").remaining;
        assert_eq!(left, 9, "the abandoned call was not sent");
    });
}

#[tokio::test]
async fn resilient_store_caches_denials_and_decides_locally() {
    let mut redis = Redis::start();
    let limiter = Limiter::new(RedisStore::resilient(&redis.url()).await.expect("connected"));
    let (one, large) = (quota(1), quota(1_000));
    let charge = Charge::new("user123", &one);
    assert!(limiter.acquire(&charge).await.expect("decided").allowed);
    assert_eq!(limiter.acquire(&charge).await.expect("decided").source, Source::Store);
    let deadline = Instant::now() + Duration::from_secs(20);
    while limiter.acquire(&charge).await.expect("decided").source != Source::DenyCache {
        assert!(Instant::now() < deadline, "no cached denial");
    }
    redis.kill();
    let decision = limiter.acquire(&Charge::new("other", &large)).await.expect("decided");
    assert_eq!(decision.source, Source::Local);
}

#[test]
fn resilient_store_starts_without_redis_and_connects_later() {
    let mut redis = Redis::start();
    redis.kill();
    let builder = RedisStore::builder(&redis.url());
    let limiter = Limiter::new(builder.resilient_blocking().expect("Redis may be down"));
    let quota = quota(1_000);
    let charge = Charge::new("user123", &quota);
    let source = || limiter.blocking().acquire(&charge).expect("decided").source;
    assert_eq!(source(), Source::Local);
    redis.restart();
    let deadline = Instant::now() + Duration::from_secs(20);
    while source() != Source::Store {
        assert!(Instant::now() < deadline, "Redis is not used");
        thread::sleep(Duration::from_millis(20));
    }
    let error = RedisStore::builder("http://127.0.0.1").resilient_blocking().expect_err("a URL");
    assert!(matches!(error, StoreError::Misconfigured(_)), "{error}");
}
