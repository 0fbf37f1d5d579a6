//! The deny cache on a real Redis: its calls, and the invalidations of other instances.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tidegate::store::invalidation::{Cursor, Invalidations, Scope};
use tidegate::{
    Action, Breaker, Charge, Clock, Decision, DenyCache, Fallback, Limiter, MemoryStore, Outcome,
    Quota, RedisStore, SharedStore, Source, Store, StoreError,
};

use crate::support::{
    Cluster, LONG, Redis, TEST_TIMEOUT, redis_6, redis_with_settable_clock, until, valkey_9,
};

const SECOND: Duration = Duration::from_secs(1);
const INVALIDATION_SET: &str = "rate_limit:{%news}";

async fn store(redis: &Redis) -> RedisStore {
    RedisStore::builder(&redis.url())
        .timeout(TEST_TIMEOUT)
        .connect()
        .await
        .expect("our own server answers")
}

/// Connects with all wrappers, as the service does.
async fn cached(redis: &Redis) -> Limiter<Fallback<DenyCache<Breaker<RedisStore>>>> {
    Limiter::new(Fallback::new(DenyCache::new(Breaker::new(store(redis).await))))
}

/// Polls the invalidations after this cursor.
async fn poll(store: &impl SharedStore, since: &Cursor) -> Invalidations {
    store.invalidations(since).expect("published").await.expect("polled")
}

fn quota() -> Quota {
    Quota::fixed_window(1, LONG).expect("valid")
}

/// Acquires until a denial comes from the cache.
async fn exhaust<S: Store>(limiter: &Limiter<S>, charge: &Charge<'_>) {
    until("the cache answers", async || {
        limiter.acquire(charge).await.is_ok_and(|decision| decision.source == Source::DenyCache)
    })
    .await;
}

/// Acquires until a request is admitted, and returns the time since `since` at which the cache last
/// denied one.
async fn until_admitted<S: Store>(
    limiter: &Limiter<S>,
    charge: &Charge<'_>,
    since: Instant,
) -> Duration {
    let mut last = Duration::ZERO;
    loop {
        let elapsed = since.elapsed();
        let decision = limiter.acquire(charge).await.expect("decided");
        if decision.allowed {
            return last;
        }
        if decision.source == Source::DenyCache {
            last = elapsed;
        }
        assert!(elapsed < TEST_TIMEOUT, "never admitted: {decision:?}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

fn calls_of(redis: &Redis, command: &str) -> u64 {
    let info: String = redis.query(&["INFO", "commandstats"]);
    let line = info.lines().find_map(|line| {
        line.strip_prefix(&format!("cmdstat_{command}:calls=")).map(str::to_owned)
    });
    line.and_then(|rest| rest.split(',').next()?.parse().ok()).unwrap_or(0)
}

#[tokio::test]
async fn a_hot_denied_key_causes_no_calls() {
    let redis = Redis::start();
    let limiter = cached(&redis).await;
    let quota = quota();
    let charges = [Charge::new("hot", &quota), Charge::new("hot", &quota).with_policy("other")];
    exhaust(&limiter, &charges[0]).await;
    let _ = limiter.acquire_all(&charges).await.expect("decided");
    // Each decision of a fixed window is one GET, and no other script uses it.
    let before = calls_of(&redis, "get");
    let (mut denied, mut by_cache) = (0, 0);
    for number in 0..10_000 {
        let decision = match number % 3 {
            0 => limiter.acquire(&charges[0]).await.expect("decided"),
            1 => limiter.peek(&charges[0]).await.expect("decided"),
            _ => limiter.acquire_all(&charges).await.expect("decided")[0],
        };
        denied += u32::from(!decision.allowed);
        by_cache += u32::from(decision.source == Source::DenyCache);
        // Lets the poller run.
        tokio::task::yield_now().await;
    }
    assert_eq!((denied, by_cache), (10_000, 10_000));
    assert_eq!(calls_of(&redis, "get"), before);
    redis.assert_every_key_expires();
}

#[tokio::test]
async fn a_refund_by_another_instance_takes_effect_within_a_second() {
    let redis = Redis::start();
    let (limiter, other) = (cached(&redis).await, Limiter::new(store(&redis).await));
    let quota = quota();
    let (charge, bystander) = (Charge::new("u", &quota), Charge::new("v", &quota));
    let charged_at = limiter.now();
    for action in [Action::Refund, Action::Reset, Action::Refund, Action::Reset] {
        exhaust(&limiter, &bystander).await;
        exhaust(&limiter, &charge).await;
        let refund = charge.with_charged_at(charged_at);
        let _ = other.decide(action, &refund).await.expect("refunded");
        let last_denied = until_admitted(&limiter, &charge, Instant::now()).await;
        assert!(last_denied < SECOND, "{action:?}: {last_denied:?}");
        let others = limiter.peek(&bystander).await.expect("decided");
        assert_eq!(others.source, Source::DenyCache, "no other entry was dropped");
    }
    // Several refunds in one call.
    exhaust(&limiter, &charge).await;
    let refunds = [bystander, charge].map(|charge| charge.with_charged_at(charged_at));
    let _ = other.decide_all(Action::Refund, &refunds).await.expect("refunded");
    assert!(until_admitted(&limiter, &charge, Instant::now()).await < SECOND);
    assert!(until_admitted(&limiter, &bystander, Instant::now()).await < SECOND);
}

#[tokio::test]
async fn redis_6_2_and_valkey_9_publish_invalidations_as_well() {
    for program in [redis_6(), valkey_9()] {
        let redis = Redis::start_program(&program, &[]);
        let (limiter, other) = (cached(&redis).await, store(&redis).await);
        let quota = quota();
        let charge = Charge::new("u", &quota);
        exhaust(&limiter, &charge).await;
        let _ = other.decide(Action::Refund, &charge).await.expect("refunded");
        assert!(until_admitted(&limiter, &charge, Instant::now()).await < SECOND);
        redis.assert_every_key_expires();
    }
}

#[tokio::test]
async fn more_invalidations_than_the_set_holds_clear_the_cache() {
    let redis = Redis::start();
    let (limiter, other) = (cached(&redis).await, store(&redis).await);
    let quota = quota();
    let charge = Charge::new("u", &quota);
    exhaust(&limiter, &charge).await;
    let _ = other.decide(Action::Refund, &charge).await.expect("refunded");
    let refunded = Instant::now();
    let names: Vec<String> = (0..1_280).map(|number| format!("other-{number}")).collect();
    let charges: Vec<Charge<'_>> = names.iter().map(|name| Charge::new(name, &quota)).collect();
    for some in charges.chunks(128) {
        other.decide_all(Action::Reset, some).await.expect("reset");
    }
    assert!(until_admitted(&limiter, &charge, refunded).await < SECOND);
    assert_eq!(redis.query::<u64>(&["ZCARD", INVALIDATION_SET]), 1_000);
}

#[tokio::test]
async fn a_flushed_redis_is_detected_within_a_second() {
    let redis = Redis::start();
    let limiter = cached(&redis).await;
    let quota = quota();
    let charge = Charge::new("u", &quota);
    exhaust(&limiter, &charge).await;
    redis.query::<()>(&["FLUSHALL"]);
    assert!(until_admitted(&limiter, &charge, Instant::now()).await < SECOND);
}

#[tokio::test]
async fn a_server_clock_set_forward_is_detected_within_a_second() {
    let (redis, clock) = redis_with_settable_clock();
    let limiter = cached(&redis).await;
    let quota = Quota::token_bucket(1, Duration::from_secs(3_600)).expect("valid");
    let charge = Charge::new("u", &quota);
    exhaust(&limiter, &charge).await;
    clock.set(3_700);
    assert!(until_admitted(&limiter, &charge, Instant::now()).await < SECOND);
}

#[tokio::test]
async fn entries_are_stale_after_a_second_without_a_poll() {
    let redis = Redis::start();
    let store = RedisStore::builder(&redis.url())
        .timeout(Duration::from_millis(50))
        .connect()
        .await
        .expect("connected");
    let limiter = Limiter::new(DenyCache::new(store));
    let quota = quota();
    let charge = Charge::new("u", &quota);
    exhaust(&limiter, &charge).await;
    redis.signal("STOP");
    let suspended = Instant::now();
    let mut last = Duration::ZERO;
    until("the store is called", async || {
        let elapsed = suspended.elapsed();
        let answer = limiter.acquire(&charge).await;
        if answer.is_ok() {
            last = elapsed;
        }
        answer.is_err()
    })
    .await;
    assert!(last < SECOND, "{last:?}");
    for _ in 0..5 {
        assert!(limiter.acquire(&charge).await.is_err());
    }
    redis.signal("CONT");
    exhaust(&limiter, &charge).await;
}

#[tokio::test]
async fn invalidations_are_published_only_if_there_is_a_reader() {
    let redis = Redis::start();
    let plain = Limiter::new(store(&redis).await);
    let quota = quota();
    let charge = Charge::new("u", &quota);
    let refund = charge.with_charged_at(plain.now());
    let _ = plain.acquire(&charge).await.expect("decided");
    let _ = plain.refund(&refund).await.expect("refunded");
    assert!(!redis.query::<bool>(&["EXISTS", INVALIDATION_SET]));
    let first = poll(plain.store(), &Cursor::default()).await;
    assert_eq!(first.scope, Scope::All);
    let next = poll(plain.store(), &first.cursor).await;
    assert_eq!((&next.cursor, &next.scope), (&first.cursor, &Scope::Counts(Vec::new())));
    let _ = plain.refund(&refund).await.expect("refunded");
    let next = poll(plain.store(), &next.cursor).await;
    assert!(matches!(&next.scope, Scope::Counts(counts) if counts.len() == 1), "{next:?}");
    redis.assert_every_key_expires();
}

#[tokio::test]
async fn a_cluster_publishes_invalidations_of_all_nodes_and_of_compensations() {
    let cluster = Cluster::start();
    let connect = async || {
        RedisStore::cluster(&cluster.urls()[..3])
            .timeout(TEST_TIMEOUT)
            .connect()
            .await
            .expect("our own cluster answers")
    };
    let (limiter, other) =
        (Limiter::new(DenyCache::new(Breaker::new(connect().await))), connect().await);
    let quota = quota();
    // These keys are spread over all nodes.
    for key in ["user-0", "user-1", "user-2", "user-3", "user-4", "user-5"] {
        let charge = Charge::new(key, &quota);
        exhaust(&limiter, &charge).await;
        let _ = other.decide(Action::Refund, &charge).await.expect("refunded");
        assert!(until_admitted(&limiter, &charge, Instant::now()).await < SECOND, "{key}");
    }
    // The first charge is spent, and refunded because the second is denied.
    let free = Charge::new("free", &quota);
    let charges = [free, Charge::new("user-0", &quota)];
    let since = poll(limiter.store(), &Cursor::default()).await.cursor;
    assert!(!other.decide_all(Action::Acquire, &charges).await.expect("decided")[1].allowed);
    until("the invalidation is published", async || {
        let invalidations = poll(limiter.store(), &since).await;
        invalidations.scope
            == Scope::Counts(vec![tidegate::store::invalidation::CountId::of(&free)])
    })
    .await;
    cluster.assert_every_key_expires();
}

/// Fills the memory of a server with the policy `noeviction`. Deleted keys make no room.
fn fill(redis: &Redis) {
    redis.query::<()>(&["SET", "filler", &"x".repeat(20_000_000)]);
    redis.query::<()>(&["CONFIG", "SET", "maxmemory", "10mb"]);
}

/// A reset is a DEL, which a full server accepts; an invalidation is a ZADD, which it refuses.
#[tokio::test]
async fn a_reset_on_a_full_redis_reaches_other_instances() {
    let redis = Redis::start_with(&["--maxmemory-policy", "noeviction"]);
    let (limiter, other) =
        (Limiter::new(DenyCache::new(store(&redis).await)), Limiter::new(store(&redis).await));
    let quota = quota();
    let (charge, bystander) = (Charge::new("u", &quota), Charge::new("v", &quota));
    exhaust(&limiter, &bystander).await;
    exhaust(&limiter, &charge).await;
    fill(&redis);
    other.reset(&charge).await.expect("a full server deletes");
    let reset = Instant::now();
    // The invalidation set is gone, and cannot be created: the poll fails, and entries go stale.
    let mut last = Duration::ZERO;
    until("the store is called again", async || {
        let elapsed = reset.elapsed();
        let decided = limiter.acquire(&bystander).await.expect("a denial needs no memory");
        if decided.source == Source::DenyCache {
            last = elapsed;
        }
        decided.source == Source::Store
    })
    .await;
    assert!(last < SECOND, "{last:?}");
    assert!(!redis.query::<bool>(&["EXISTS", INVALIDATION_SET]));
    redis.query::<()>(&["CONFIG", "SET", "maxmemory", "0"]);
    assert!(until_admitted(&limiter, &charge, Instant::now()).await < SECOND);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reset_reaches_other_instances_after_a_stall_of_the_invalidation_node() {
    let cluster = Cluster::start();
    let connect = async || {
        RedisStore::cluster(&cluster.urls()[..3]).connect().await.expect("our own cluster answers")
    };
    // All wrappers, with the default timeout of 100 ms.
    let limiter = Limiter::new(Fallback::new(DenyCache::new(Breaker::new(connect().await))));
    let other = Limiter::new(connect().await);
    let quota = quota();
    let stalled = cluster.owner_of(INVALIDATION_SET);
    let elsewhere = |key: &String| {
        cluster.owner_of(&other.store().redis_key(&Charge::new(key, &quota))) != stalled
    };
    let key =
        (0..1_000).map(|number| format!("user-{number}")).find(elsewhere).expect("a key elsewhere");
    let charge = Charge::new(&key, &quota);
    exhaust(&limiter, &charge).await;
    cluster.nodes()[stalled].signal("STOP");
    until("the connection is closed", async || {
        let _ = other.store().invalidations(&Cursor::default()).expect("published").await;
        other.store().nodes().iter().any(|node| !node.connected)
    })
    .await;
    other.reset(&charge).await.expect("the node of this key is up");
    cluster.nodes()[stalled].signal("CONT");
    let owner = || &cluster.nodes()[cluster.owner_of(INVALIDATION_SET)];
    let id = format!("{:016x}", tidegate::store::invalidation::CountId::of(&charge).0);
    until("the invalidation is published", async || {
        let members: Vec<String> = owner().query(&["ZRANGE", INVALIDATION_SET, "0", "-1"]);
        members.iter().any(|member| member.ends_with(&id))
    })
    .await;
    assert!(until_admitted(&limiter, &charge, Instant::now()).await < SECOND);
}

#[tokio::test]
async fn concurrent_refunds_share_publish_calls() {
    let redis = Redis::start();
    let limiter = Limiter::new(store(&redis).await);
    let quota = Quota::token_bucket(1_000, LONG).expect("valid");
    // There is a reader, so each refund must be published.
    let cursor = poll(limiter.store(), &Cursor::default()).await.cursor;
    let now = limiter.now();
    let warm_up = Charge::new("warm-up", &quota).with_charged_at(now);
    let _ = limiter.refund(&warm_up).await.expect("refunded");
    let before = redis.calls_of("evalsha");
    let refund = |number: u32| {
        let (limiter, quota) = (limiter.clone(), quota.clone());
        tokio::spawn(async move {
            let key = format!("user-{number}");
            limiter.refund(&Charge::new(&key, &quota).with_charged_at(now)).await
        })
    };
    let refunds: Vec<_> = (0..200).map(refund).collect();
    for refund in refunds {
        let _ = refund.await.expect("no panic").expect("refunded");
    }
    // Each refund returned after its invalidation was published.
    let next = poll(limiter.store(), &cursor).await;
    assert!(matches!(&next.scope, Scope::Counts(counts) if counts.len() == 201), "{next:?}");
    let calls = redis.calls_of("evalsha") - before - 1;
    assert!(calls < 30, "{calls} calls for 200 refunds");
}

/// A memory store with invalidations that counts the polls.
struct Polled {
    memory: MemoryStore,
    polls: AtomicU64,
}

impl Store for Polled {
    fn decide(
        &self,
        action: Action,
        charge: &Charge<'_>,
    ) -> Outcome<impl Future<Output = Result<Decision, StoreError>> + Send> {
        Outcome::Pending(async move { self.memory.decide(action, charge).await })
    }

    fn decide_all(
        &self,
        action: Action,
        charges: &[Charge<'_>],
    ) -> Outcome<impl Future<Output = Result<Vec<Decision>, StoreError>> + Send> {
        Outcome::Pending(async move { self.memory.decide_all(action, charges).await })
    }

    fn clock(&self) -> &dyn Clock {
        self.memory.clock()
    }
}

impl SharedStore for Polled {
    async fn heartbeat(&self, instance: &str) -> Result<Vec<String>, StoreError> {
        self.memory.heartbeat(instance).await
    }

    fn invalidations(
        &self,
        since: &Cursor,
    ) -> Option<impl Future<Output = Result<Invalidations, StoreError>> + Send> {
        let is_first = since == &Cursor::default();
        Some(async move {
            self.polls.fetch_add(1, Ordering::Relaxed);
            let scope = if is_first { Scope::All } else { Scope::Counts(Vec::new()) };
            Ok(Invalidations { cursor: Cursor("1".to_owned()), scope, now: None })
        })
    }
}

#[tokio::test(start_paused = true)]
async fn invalidations_are_polled_only_while_entries_are_used() {
    let cache = DenyCache::new(Polled { memory: MemoryStore::new(), polls: AtomicU64::new(0) });
    let polls = || cache.store().polls.load(Ordering::Relaxed);
    let (limiter, quota) = (&cache, quota());
    let charge = Charge::new("u", &quota);
    tokio::time::sleep(60 * SECOND).await;
    assert_eq!(polls(), 0, "nothing is cached");
    for round in 1..=2 {
        let before = polls();
        let first = limiter.decide(Action::Acquire, &charge).await.expect("decided");
        let second = limiter.decide(Action::Acquire, &charge).await.expect("decided");
        assert_eq!(
            (first.allowed, first.source, second.source),
            (round == 1, Source::Store, Source::Store)
        );
        // The first poll clears the cache. Later denials are cached.
        tokio::time::sleep(Duration::from_millis(10)).await;
        assert_eq!(
            limiter.decide(Action::Acquire, &charge).await.expect("decided").source,
            Source::Store
        );
        assert_eq!(
            limiter.decide(Action::Acquire, &charge).await.expect("decided").source,
            Source::DenyCache
        );
        tokio::time::sleep(5 * SECOND).await;
        assert!(
            (8..20).contains(&(polls() - before)),
            "{} polls in five seconds",
            polls() - before
        );
        tokio::time::sleep(60 * SECOND).await;
        assert!((20..40).contains(&(polls() - before)), "{} polls in total", polls() - before);
    }
}
