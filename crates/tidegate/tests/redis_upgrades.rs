//! Releases and configurations that differ while they are rolled out: other formats of counts,
//! other algorithms, other windows.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use support::{Redis, TEST_TIMEOUT, every_quota};
use tidegate::{Charge, Limiter, ManualClock, MemoryStore, Quota, RedisStore, SharedStore as _};

const HOUR: Duration = Duration::from_secs(3_600);
const DAY: Duration = Duration::from_secs(86_400);
/// Time by which keys live longer on a manual clock, and how long a test may take at most.
const EXTRA_TTL: Duration = HOUR;
const MAX_TEST_TIME: Duration = Duration::from_secs(1_800);

async fn of_format(redis: &Redis, format: u32) -> RedisStore {
    let builder = RedisStore::builder(&redis.url()).timeout(TEST_TIMEOUT).format(format);
    builder.connect().await.expect("our own server answers")
}

fn ttl(redis: &Redis, limiter: &Limiter<RedisStore>, charge: &Charge<'_>) -> Duration {
    let millis: u64 = redis.query(&["PTTL", &limiter.store().redis_key(charge)]);
    Duration::from_millis(millis)
}

#[tokio::test]
async fn the_first_format_has_no_mark_and_later_ones_do() {
    let redis = Redis::start();
    let quota = Quota::fixed_window(1, DAY).expect("valid");
    let charge = Charge::new("user123", &quota).with_policy("per-user");
    let plain = RedisStore::connect(&redis.url()).await.expect("connected");
    for (store, key) in [
        (plain, "rate_limit:{user123}:per-user"),
        (of_format(&redis, 1).await, "rate_limit:{user123}:per-user"),
        (of_format(&redis, 2).await, "rate_limit:{user123}v2:per-user"),
    ] {
        assert_eq!(store.redis_key(&charge), key);
    }
}

/// Two formats under one name overwrite each other's values, which admitted 80 of 20.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rolling_upgrade_to_another_format_admits_at_most_twice_the_limit() {
    const LIMIT: u64 = 20;
    const INSTANCES: usize = 4;
    const KEYS: usize = 12;
    let redis = Redis::start();
    for quota in every_quota(LIMIT, 100 * DAY) {
        let mut instances = Vec::new();
        for _ in 0..INSTANCES {
            instances.push(Limiter::new(of_format(&redis, 1).await));
        }
        let admitted: Arc<[AtomicU64]> = (0..KEYS).map(|_| AtomicU64::new(0)).collect();
        for rolled in 0..=INSTANCES {
            let load: Vec<_> = instances
                .iter()
                .map(|limiter| {
                    let (limiter, quota) = (limiter.clone(), quota.clone());
                    let admitted = Arc::clone(&admitted);
                    tokio::spawn(async move {
                        for request in 0..KEYS * 6 {
                            let key = format!("user-{}", request % KEYS);
                            let decision = limiter.acquire(&Charge::new(&key, &quota)).await;
                            let allowed = decision.expect("decided").allowed;
                            admitted[request % KEYS]
                                .fetch_add(u64::from(allowed), Ordering::Relaxed);
                        }
                    })
                })
                .collect();
            for instance in load {
                instance.await.expect("no panic");
            }
            if rolled < INSTANCES {
                instances[rolled] = Limiter::new(of_format(&redis, 2).await);
            }
        }
        let admitted: Vec<u64> =
            admitted.iter().map(|units| units.load(Ordering::Relaxed)).collect();
        assert!(admitted.iter().all(|units| (LIMIT..=2 * LIMIT).contains(units)), "{admitted:?}");
        // Only the new release is left, and it counts exactly.
        let decision = instances[0].acquire(&Charge::new("user-0", &quota)).await;
        assert!(!decision.expect("decided").allowed, "{quota:?}");
        redis.query::<()>(&["FLUSHALL"]);
    }
}

/// Counts the warnings of this thread.
#[derive(Clone, Default)]
struct Warnings(Arc<AtomicU64>);

impl tracing::Subscriber for Warnings {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() == tracing::Level::WARN
    }

    fn event(&self, _: &tracing::Event<'_>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::Id {
        tracing::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::Id, _: &tracing::Id) {}

    fn enter(&self, _: &tracing::Id) {}

    fn exit(&self, _: &tracing::Id) {}
}

#[tokio::test]
async fn instances_of_another_format_belong_to_the_fleet_and_are_logged_once() {
    let redis = Redis::start();
    let warnings = Warnings::default();
    let _here = tracing::subscriber::set_default(warnings.clone());
    let (old, new) = (of_format(&redis, 1).await, of_format(&redis, 2).await);
    assert_eq!(old.heartbeat("a").await.expect("sent"), ["a"]);
    assert_eq!(new.heartbeat("b").await.expect("sent"), ["a", "b"]);
    assert_eq!(old.heartbeat("a").await.expect("sent"), ["a", "b"]);
    assert_eq!(new.heartbeat("b").await.expect("sent"), ["a", "b"]);
    // A third instance changes the list, which is read again.
    assert_eq!(old.heartbeat("c").await.expect("sent"), ["a", "b", "c"]);
    assert_eq!(new.heartbeat("b").await.expect("sent"), ["a", "b", "c"]);
    assert_eq!(warnings.0.load(Ordering::Relaxed), 2, "one by each store");
}

/// Units of the old algorithm count at the rate of the new one, and their key must live as long.
#[tokio::test]
async fn a_denial_by_a_new_algorithm_extends_the_life_of_the_old_count() {
    let (redis, clock) = (Redis::start(), ManualClock::new());
    let on_redis = redis.driven_limiter(clock.clone()).await;
    let in_memory = Limiter::new(MemoryStore::builder().clock(clock.clone()).build());
    for old in every_quota(10, Duration::from_secs(2)) {
        for new in every_quota(10, DAY) {
            if old.algorithm() == new.algorithm() {
                continue;
            }
            let (old, new) =
                (Charge::new("u", &old).with_policy("p"), Charge::new("u", &new).with_policy("p"));
            for _ in 0..10 {
                assert!(on_redis.acquire(&old).await.expect("decided").allowed);
                assert!(in_memory.acquire(&old).await.expect("decided").allowed);
            }
            let denied = on_redis.acquire(&new).await.expect("decided");
            assert_eq!(Ok(denied), in_memory.acquire(&new).await, "{old:?}, then {new:?}");
            assert!(!denied.allowed);
            let lives = ttl(&redis, &on_redis, &new);
            let counts = denied.retry_after + EXTRA_TTL;
            assert!(lives + MAX_TEST_TIME > counts, "{lives:?}: {old:?}, then {new:?}");
            clock.advance(Duration::from_millis(2_300));
            assert!(!on_redis.acquire(&new).await.expect("decided").allowed);
            assert!(!in_memory.acquire(&new).await.expect("decided").allowed);
            on_redis.reset(&new).await.expect("reset");
            in_memory.reset(&new).await.expect("reset");
        }
    }
}

#[tokio::test]
async fn a_refund_with_an_older_window_does_not_shorten_the_life_of_a_count() {
    let (redis, clock) = (Redis::start(), ManualClock::new());
    let limiter = redis.driven_limiter(clock.clone()).await;
    for (short, long) in every_quota(10, HOUR).into_iter().zip(every_quota(10, 20 * DAY)) {
        let (short, long) =
            (Charge::new("u", &short).with_policy("p"), Charge::new("u", &long).with_policy("p"));
        for _ in 0..3 {
            assert!(limiter.acquire(&long).await.expect("decided").allowed);
        }
        let before = ttl(&redis, &limiter, &long);
        let refund = short.with_charged_at(limiter.now());
        let _ = limiter.refund(&refund).await.expect("refunded");
        let after = ttl(&redis, &limiter, &long);
        assert!(after + MAX_TEST_TIME > before, "{before:?}, then {after:?}: {long:?}");
        limiter.reset(&long).await.expect("reset");
    }
}

/// The bucket is smaller than what the log has recorded, so that nothing fits into its overdraft.
#[tokio::test]
async fn a_report_with_nothing_to_record_waits_for_the_old_count() {
    let (redis, clock) = (Redis::start(), ManualClock::new());
    let limiter = redis.driven_limiter(clock.clone()).await;
    let log = Quota::sliding_log(100, HOUR).expect("valid");
    let bucket = Quota::token_bucket(100, HOUR).and_then(|quota| quota.with_burst(1));
    let bucket = bucket.expect("valid");
    let (log, bucket) =
        (Charge::new("u", &log).with_policy("p"), Charge::new("u", &bucket).with_policy("p"));
    assert!(limiter.acquire(&log.with_cost(100)).await.expect("decided").allowed);
    clock.advance(Duration::from_secs(600));
    let reported = limiter.report(&bucket.with_cost(5)).await.expect("decided");
    assert_eq!((reported.allowed, reported.remaining), (false, 0));
    assert_eq!(reported.retry_after, Duration::from_secs(3_000), "the log stays as it is");
    clock.advance(reported.retry_after);
    assert!(limiter.acquire(&bucket).await.expect("decided").allowed);
}
