//! A refund returns the units of its charge and never younger ones: in memory, on Redis, and behind
//! the Tower layer.

mod support;

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use http::{Request, Response, StatusCode};
use support::{Cluster, Redis, TEST_TIMEOUT, every_quota, packed};
use tidegate::layer::RateLimitLayer;
use tidegate::{
    Action, Algorithm, Charge, ChargeError, Clock as _, Error, Limiter, ManualClock, MemoryStore,
    Policies, Policy, PolicyLimiter, Query, Quota, RedisStore, Store, Timestamp,
};
use tower::{Layer as _, ServiceExt as _, service_fn};

const MINUTE: Duration = Duration::from_secs(60);
const SECOND: Duration = Duration::from_secs(1);

/// Runs a check on memory and on Redis, each on a manual clock.
async fn on_both(check: impl AsyncFn(&dyn Decide, &ManualClock)) {
    let clock = ManualClock::new();
    check(&Limiter::new(MemoryStore::builder().clock(clock.clone()).build()), &clock).await;
    let (redis, clock) = (Redis::start(), ManualClock::new());
    check(&redis.driven_limiter(clock.clone()).await, &clock).await;
    redis.assert_every_key_expires();
}

type Answer<'a> = std::pin::Pin<Box<dyn Future<Output = tidegate::Decision> + 'a>>;

trait Decide {
    fn acquire<'a>(&'a self, charge: &'a Charge<'a>) -> Answer<'a>;
    fn refund<'a>(&'a self, charge: &'a Charge<'a>) -> Answer<'a>;
    fn now(&self) -> Timestamp;
}

impl<S: Store> Decide for Limiter<S> {
    fn acquire<'a>(&'a self, charge: &'a Charge<'a>) -> Answer<'a> {
        Box::pin(async move { self.acquire(charge).await.expect("decided") })
    }

    fn refund<'a>(&'a self, charge: &'a Charge<'a>) -> Answer<'a> {
        Box::pin(async move { self.refund(charge).await.expect("refunded") })
    }

    fn now(&self) -> Timestamp {
        self.store().clock().now()
    }
}

async fn acquire_times(limiter: &dyn Decide, charge: &Charge<'_>, times: u64) -> u64 {
    let mut allowed = 0;
    for _ in 0..times {
        allowed += u64::from(limiter.acquire(charge).await.allowed);
    }
    allowed
}

#[tokio::test]
async fn refund_of_old_units_does_not_free_younger_ones() {
    for quota in [Quota::sliding_log(100, MINUTE).expect("valid"), packed(100, MINUTE)] {
        on_both(async |limiter, clock| {
            let charge = Charge::new("u", &quota);
            let charged_at = limiter.now();
            assert_eq!(acquire_times(limiter, &charge, 50).await, 50);
            clock.advance(59 * SECOND);
            assert_eq!(acquire_times(limiter, &charge, 200).await, 50);
            clock.advance(SECOND / 2);
            for _ in 0..50 {
                let _ = limiter.refund(&charge.with_charged_at(charged_at)).await;
            }
            clock.advance(SECOND / 2);
            let after = acquire_times(limiter, &charge, 200).await;
            assert_eq!(after, 50, "50 at 59 s and {after} at 60 s, against 100 per minute");
        })
        .await;
    }
}

#[tokio::test]
async fn refund_with_a_charge_time_returns_exactly_that_charge() {
    for quota in [Quota::sliding_log(3, MINUTE).expect("valid"), packed(3, MINUTE)] {
        on_both(async |limiter, clock| {
            let charge = Charge::new("u", &quota);
            let _ = limiter.acquire(&charge).await;
            clock.advance(20 * SECOND);
            let charged_at = limiter.now();
            let _ = limiter.acquire(&charge).await;
            clock.advance(20 * SECOND);
            let _ = limiter.acquire(&charge).await;
            let left = limiter.refund(&charge.with_charged_at(charged_at)).await;
            assert_eq!((left.remaining, left.reset_after), (1, MINUTE), "the newest still counts");
            assert!(limiter.acquire(&charge).await.allowed);
            let denied = limiter.acquire(&charge).await;
            assert_eq!(
                (denied.allowed, denied.retry_after),
                (false, 20 * SECOND),
                "the oldest still counts"
            );
        })
        .await;
    }
}

/// The member that used up the limit names the oldest request, which the refund removes.
#[tokio::test]
async fn refund_of_a_full_log_makes_room_at_once() {
    for quota in [Quota::sliding_log(3, MINUTE).expect("valid"), packed(3, MINUTE)] {
        on_both(async |limiter, clock| {
            let charge = Charge::new("u", &quota);
            let oldest = charge.with_charged_at(limiter.now());
            for _ in 0..3 {
                assert!(limiter.acquire(&charge).await.allowed);
                clock.advance(SECOND);
            }
            assert_eq!(limiter.acquire(&charge).await.retry_after, 57 * SECOND);
            assert_eq!(limiter.refund(&oldest).await.remaining, 1, "without the oldest request");
            assert!(limiter.acquire(&charge).await.allowed);
            assert_eq!(limiter.acquire(&charge).await.retry_after, 58 * SECOND);
        })
        .await;
    }
}

/// A count that holds newer units looks the same, whether or not the refunded ones have expired.
#[tokio::test]
async fn refund_of_units_that_have_left_the_window_returns_nothing() {
    for quota in every_quota(3, 2 * SECOND) {
        on_both(async |limiter, clock| {
            let charge = Charge::new("u", &quota);
            let charged_at = limiter.now();
            assert_eq!(acquire_times(limiter, &charge, 3).await, 3);
            // A sliding counter still counts a part of the earlier window.
            let rest = if quota.algorithm() == Algorithm::SlidingCounter { 2 } else { 1 };
            clock.advance(rest * 2 * SECOND + SECOND / 10);
            assert_eq!(acquire_times(limiter, &charge, 3).await, 3);
            for _ in 0..3 {
                let left = limiter.refund(&charge.with_charged_at(charged_at)).await;
                assert_eq!(left.remaining, 0, "{quota:?}");
            }
            assert_eq!(acquire_times(limiter, &charge, 3).await, 0, "6 of 3: {quota:?}");
        })
        .await;
    }
}

#[tokio::test]
async fn refund_without_a_charge_time_is_an_error() {
    let limiter = Limiter::new(MemoryStore::new());
    for quota in every_quota(3, MINUTE) {
        let charge = Charge::new("u", &quota);
        assert!(limiter.acquire(&charge).await.expect("decided").allowed);
        let error = Error::Charge(ChargeError::NoChargeTime);
        assert_eq!(limiter.refund(&charge).await, Err(error.clone()));
        assert_eq!(limiter.blocking().refund(&charge), Err(error.clone()));
        assert_eq!(limiter.decide_all(Action::Refund, &[charge]).await, Err(error.clone()));
        let policies =
            Policies::new(vec![Policy::builder("p", quota.clone()).build().expect("valid")]);
        let policies = PolicyLimiter::new(limiter.clone(), policies.expect("valid"));
        let refused = policies.decide(Action::Refund, Query::policy("p", "u")).await;
        assert_eq!(refused.map(drop), Err(error.into()));
        assert_eq!(limiter.peek(&charge).await.expect("decided").remaining, 1);
    }
}

/// A refund removes the newest request, so that the one before it is the newest again, with its mark
/// of a limit that is no longer used up.
#[tokio::test]
async fn refunds_before_and_after_a_report_make_room() {
    for quota in [Quota::sliding_log(3, MINUTE).expect("valid"), packed(3, MINUTE)] {
        let (redis, clock) = (Redis::start(), ManualClock::new());
        let limiter = redis.driven_limiter(clock.clone()).await;
        let (store, charge) = (limiter.store(), Charge::new("u", &quota));
        let decide = async |action, charge: &Charge<'_>| {
            store.decide(action, charge).await.expect("decided")
        };
        for _ in 0..3 {
            assert!(decide(Action::Acquire, &charge).await.allowed);
            clock.advance(SECOND);
        }
        let reported_at = clock.now();
        let _ = decide(Action::Report, &charge).await;
        clock.advance(SECOND);
        assert_eq!(decide(Action::Refund, &charge).await.remaining, 0, "4 - 1 of 3");
        let refund = charge.with_charged_at(reported_at);
        assert_eq!(decide(Action::Refund, &refund).await.remaining, 1);
        let decision = decide(Action::Acquire, &charge).await;
        assert!(decision.allowed, "{quota:?}: {decision:?}");
    }
}

#[tokio::test]
async fn refund_of_an_earlier_window_returns_nothing() {
    let quota = Quota::fixed_window(10, MINUTE).expect("valid");
    on_both(async |limiter, clock| {
        let charge = Charge::new("u", &quota);
        let charged_at = limiter.now();
        assert_eq!(acquire_times(limiter, &charge, 10).await, 10);
        clock.advance(MINUTE);
        assert_eq!(acquire_times(limiter, &charge, 20).await, 10);
        let _ = limiter.refund(&charge.with_cost(10).with_charged_at(charged_at)).await;
        assert_eq!(acquire_times(limiter, &charge, 20).await, 0);
    })
    .await;
}

#[tokio::test]
async fn refund_of_a_bucket_excludes_drained_units() {
    for quota in [Quota::token_bucket, Quota::leaky_bucket] {
        let quota = quota(100_000, 3_600 * SECOND).expect("valid");
        on_both(async |limiter, clock| {
            let charge = Charge::new("u", &quota).with_cost(60_000);
            let charged_at = limiter.now();
            assert!(limiter.acquire(&charge).await.allowed);
            clock.advance(360 * SECOND);
            // 10,000 units have drained, with or without the refund.
            let left = limiter.refund(&charge.with_charged_at(charged_at)).await;
            assert_eq!(left.remaining, 100_000);
            let twice = limiter.acquire(&charge).await;
            assert_eq!(twice.remaining, 40_000);
            let others = limiter.acquire(&charge.with_cost(40_000)).await;
            assert!(others.allowed);
            clock.advance(360 * SECOND);
            let left = limiter
                .refund(&charge.with_charged_at(limiter.now().saturating_sub(360 * SECOND)))
                .await;
            assert_eq!(
                left.remaining, 60_000,
                "50,000 refunded, 10,000 drained, 40,000 of the other charge"
            );
        })
        .await;
    }
}

/// The README says that a 5xx costs nothing.
#[tokio::test]
async fn failed_request_behind_the_layer_costs_nothing() {
    for quota in every_quota(100_000, 3_600 * SECOND) {
        let clock = ManualClock::new();
        let limiter = Limiter::new(MemoryStore::builder().clock(clock.clone()).build());
        let advance = clock.clone();
        let layer = RateLimitLayer::new(limiter, quota.clone())
            .cost(|_| 60_000)
            .refund_on(|status| status.is_server_error());
        let service = layer.layer(service_fn(move |_: Request<()>| {
            advance.advance(Duration::from_millis(100));
            let failed = Response::builder().status(StatusCode::BAD_GATEWAY).body(String::new());
            async { Ok::<_, Infallible>(failed.expect("a response")) }
        }));
        for _ in 0..5 {
            let response = service.clone().oneshot(Request::new(())).await.expect("an answer");
            assert_eq!(response.status(), StatusCode::BAD_GATEWAY, "{quota:?}: it was admitted");
        }
    }
}

#[tokio::test]
async fn clients_that_leave_a_queue_do_not_free_units_of_others() {
    let clock = ManualClock::new();
    let limiter = Limiter::new(MemoryStore::builder().clock(clock.clone()).build());
    let user = Policy::builder("per-user", Quota::sliding_log(100, MINUTE).expect("valid"))
        .key(["header.x-user"])
        .build()
        .expect("valid");
    let queue =
        Quota::leaky_bucket(1, 2 * SECOND).and_then(|quota| quota.with_burst(100)).expect("valid");
    let slow = Policy::builder("slow", queue)
        .matches("path", ["/slow"])
        .key(["header.x-user"])
        .build()
        .expect("valid");
    let served = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&served);
    let policies = Policies::new(vec![user, slow]).expect("valid");
    let service =
        RateLimitLayer::with_policies(limiter, policies).layer(service_fn(move |_: Request<()>| {
            counted.fetch_add(1, Ordering::Relaxed);
            async { Ok::<_, Infallible>(Response::new(String::new())) }
        }));
    let ask = |path: &str| {
        let request =
            Request::builder().uri(path).header("x-user", "u").body(()).expect("a request");
        service.clone().oneshot(request)
    };
    let waiting: Vec<_> = (0..51).map(|_| tokio::spawn(ask("/slow"))).collect();
    while clock.sleepers() < 50 {
        tokio::task::yield_now().await;
    }
    clock.advance(19 * SECOND);
    while served.load(Ordering::Relaxed) < 10 {
        tokio::task::yield_now().await;
    }
    let mut first = 0;
    for _ in 0..100 {
        first += u64::from(ask("/fast").await.expect("an answer").status() == StatusCode::OK);
    }
    for task in waiting {
        task.abort();
        let _ = task.await;
    }
    // The refunds run in separate tasks.
    for _ in 0..1_000 {
        tokio::task::yield_now().await;
    }
    clock.advance(Duration::from_millis(41_100));
    let mut second = 0;
    for _ in 0..200 {
        second += u64::from(ask("/fast").await.expect("an answer").status() == StatusCode::OK);
    }
    assert!(
        first + second <= 100,
        "{first} at 19 s and {second} at 60.1 s, against 100 per minute"
    );
}

/// On the clock of a real server, with other requests in between.
#[tokio::test]
async fn refund_on_redis_finds_its_charge_by_the_server_clock() {
    let redis = Redis::start();
    let limiter = redis.limiter().await;
    for quota in [Quota::sliding_log(3, MINUTE).expect("valid"), packed(3, MINUTE)] {
        let charge = Charge::new("u", &quota);
        let mut charged_at = Vec::new();
        for _ in 0..3 {
            charged_at.push(limiter.store().clock().now());
            assert!(limiter.acquire(&charge).await.expect("decided").allowed);
            tokio::time::sleep(Duration::from_millis(30)).await;
        }
        let before = limiter.peek(&charge).await.expect("looked").retry_after;
        let _ = limiter.refund(&charge.with_charged_at(charged_at[1])).await.expect("refunded");
        assert!(limiter.acquire(&charge).await.expect("decided").allowed);
        let after = limiter.peek(&charge).await.expect("looked").retry_after;
        assert!(after <= before, "the oldest unit still leaves first: {before:?}, {after:?}");
    }
}

/// A refund of a long log rewrites few members, or else returns older units, which never admits too
/// much.
#[tokio::test]
async fn refund_in_the_middle_of_a_long_log_is_cheap_and_safe() {
    for quota in [Quota::sliding_log(50_000, MINUTE).expect("valid"), packed(50_000, MINUTE)] {
        let (redis, clock) = (Redis::start(), ManualClock::new());
        let limiter = redis.driven_limiter(clock.clone()).await;
        let charge = Charge::new("u", &quota);
        let mut charged_at = Timestamp::ZERO;
        for number in 0..20_000 {
            clock.advance(Duration::from_micros(10));
            if number == 10_000 {
                charged_at = clock.now();
            }
            assert!(limiter.acquire(&charge).await.expect("decided").allowed);
        }
        redis.query::<()>(&["CONFIG", "RESETSTAT"]);
        let left = limiter.refund(&charge.with_charged_at(charged_at)).await.expect("refunded");
        assert_eq!(left.remaining, 30_001);
        let stats: String = redis.query(&["INFO", "commandstats"]);
        let calls: u64 = stats
            .lines()
            .filter_map(|line| {
                line.strip_prefix("cmdstat_")?
                    .split("calls=")
                    .nth(1)?
                    .split(',')
                    .next()?
                    .parse::<u64>()
                    .ok()
            })
            .sum();
        assert!(calls < 100, "{calls} commands");
    }
}

/// All or nothing across nodes: a denial by one policy does not change the bucket of another.
#[tokio::test]
async fn denied_request_on_a_cluster_charges_no_bucket() {
    let cluster = Cluster::start();
    let store = RedisStore::cluster(cluster.urls())
        .timeout(TEST_TIMEOUT)
        .connect()
        .await
        .expect("connected");
    let limiter = Limiter::new(store);
    let bucket = Quota::token_bucket(100_000, 3_600 * SECOND).expect("valid");
    let once = Quota::fixed_window(1, support::LONG).expect("valid");
    for number in 0..20 {
        let (first_key, second_key) = (format!("a-{number}"), format!("b-{number}"));
        let bucket = Charge::new(&first_key, &bucket).with_cost(99_999);
        let once = Charge::new(&second_key, &once);
        let _ = limiter.acquire(&once).await.expect("decided");
        let denied = limiter.acquire_all(&[bucket, once]).await.expect("decided");
        assert!(!denied[1].allowed);
        assert!(limiter.acquire(&bucket).await.expect("decided").allowed, "{number}: refunded");
    }
}
