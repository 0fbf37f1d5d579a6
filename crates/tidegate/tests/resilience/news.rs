//! The deny cache on a real Redis: what it costs it, and what it hears of others who share the
//! counts.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tidegate::store::news::{Freed, Mark, News};
use tidegate::{
    Action, Breaker, Charge, Clock, Decision, DenyCache, Fallback, Limiter, MemoryStore, Quota,
    RedisStore, Source, Store, StoreError,
};

use crate::support::{
    Cluster, LONG, PATIENCE, Redis, redis_6, redis_with_a_clock_to_set, until, valkey_9,
};

const SECOND: Duration = Duration::from_secs(1);
const NEWS: &str = "rate_limit:{%news}";

async fn store(redis: &Redis) -> RedisStore {
    RedisStore::builder(&redis.url())
        .timeout(PATIENCE)
        .connect()
        .await
        .expect("our own server answers")
}

/// As the service has it.
async fn cached(redis: &Redis) -> Limiter<Fallback<DenyCache<Breaker<RedisStore>>>> {
    Limiter::new(Fallback::new(DenyCache::new(Breaker::new(store(redis).await))))
}

fn quota() -> Quota {
    Quota::fixed_window(1, LONG).expect("valid")
}

/// Takes what there is, and asks until the denial comes from the cache.
async fn exhaust<S: Store>(limiter: &Limiter<S>, charge: &Charge<'_>) {
    until("the cache answers", async || {
        limiter.acquire(charge).await.is_ok_and(|decision| decision.source == Source::DenyCache)
    })
    .await;
}

/// Asks until it is admitted; when the cache last denied, from this moment on.
async fn until_admitted<S: Store>(
    limiter: &Limiter<S>,
    charge: &Charge<'_>,
    since: Instant,
) -> Duration {
    let mut last = Duration::ZERO;
    loop {
        let asked = since.elapsed();
        let decision = limiter.acquire(charge).await.expect("decided");
        if decision.allowed {
            return last;
        }
        if decision.source == Source::DenyCache {
            last = asked;
        }
        assert!(asked < PATIENCE, "never admitted: {decision:?}");
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
async fn a_hot_denied_key_costs_redis_nothing() {
    let redis = Redis::start();
    let limiter = cached(&redis).await;
    let quota = quota();
    let charges = [Charge::new("hot", &quota), Charge::new("hot", &quota).with_policy("other")];
    exhaust(&limiter, &charges[0]).await;
    // Each decision of a fixed window is a GET; no other script has one.
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
        // The news are read meanwhile.
        tokio::task::yield_now().await;
    }
    assert_eq!((denied, by_cache), (10_000, 10_000));
    assert_eq!(calls_of(&redis, "get"), before);
    redis.assert_every_key_expires();
}

#[tokio::test]
async fn what_another_instance_gives_back_is_noticed_within_a_second() {
    let redis = Redis::start();
    let (limiter, other) = (cached(&redis).await, Limiter::new(store(&redis).await));
    let quota = quota();
    let (charge, bystander) = (Charge::new("u", &quota), Charge::new("v", &quota));
    for action in [Action::Refund, Action::Reset, Action::Refund, Action::Reset] {
        exhaust(&limiter, &bystander).await;
        exhaust(&limiter, &charge).await;
        other.decide(action, &charge).await.expect("given back");
        let noticed = until_admitted(&limiter, &charge, Instant::now()).await;
        assert!(noticed < SECOND, "{action:?}: {noticed:?}");
        let others = limiter.peek(&bystander).await.expect("decided");
        assert_eq!(others.source, Source::DenyCache, "nothing else was forgotten");
    }
    // Several at once, as well.
    exhaust(&limiter, &charge).await;
    other.decide_all(Action::Refund, &[bystander, charge]).await.expect("given back");
    assert!(until_admitted(&limiter, &charge, Instant::now()).await < SECOND);
    assert!(until_admitted(&limiter, &bystander, Instant::now()).await < SECOND);
}

#[tokio::test]
async fn redis_6_2_and_valkey_9_tell_alike() {
    for program in [redis_6(), valkey_9()] {
        let redis = Redis::start_program(&program, &[]);
        let (limiter, other) = (cached(&redis).await, store(&redis).await);
        let quota = quota();
        let charge = Charge::new("u", &quota);
        exhaust(&limiter, &charge).await;
        other.decide(Action::Refund, &charge).await.expect("given back");
        assert!(until_admitted(&limiter, &charge, Instant::now()).await < SECOND);
        redis.assert_every_key_expires();
    }
}

#[tokio::test]
async fn more_than_can_be_told_is_noticed_as_well() {
    let redis = Redis::start();
    let (limiter, other) = (cached(&redis).await, store(&redis).await);
    let quota = quota();
    let charge = Charge::new("u", &quota);
    exhaust(&limiter, &charge).await;
    other.decide(Action::Refund, &charge).await.expect("given back");
    let given_back = Instant::now();
    let names: Vec<String> = (0..1_280).map(|number| format!("other-{number}")).collect();
    let charges: Vec<Charge<'_>> = names.iter().map(|name| Charge::new(name, &quota)).collect();
    for some in charges.chunks(128) {
        other.decide_all(Action::Reset, some).await.expect("forgotten");
    }
    assert!(until_admitted(&limiter, &charge, given_back).await < SECOND);
    assert_eq!(redis.query::<u64>(&["ZCARD", NEWS]), 1_000);
}

#[tokio::test]
async fn a_redis_that_was_emptied_is_noticed_within_a_second() {
    let redis = Redis::start();
    let limiter = cached(&redis).await;
    let quota = quota();
    let charge = Charge::new("u", &quota);
    exhaust(&limiter, &charge).await;
    redis.query::<()>(&["FLUSHALL"]);
    assert!(until_admitted(&limiter, &charge, Instant::now()).await < SECOND);
}

#[tokio::test]
async fn a_server_whose_clock_is_set_forward_is_noticed_within_a_second() {
    let (redis, clock) = redis_with_a_clock_to_set();
    let limiter = cached(&redis).await;
    let quota = Quota::token_bucket(1, Duration::from_secs(3_600)).expect("valid");
    let charge = Charge::new("u", &quota);
    exhaust(&limiter, &charge).await;
    clock.set(3_700);
    assert!(until_admitted(&limiter, &charge, Instant::now()).await < SECOND);
}

#[tokio::test]
async fn without_news_nothing_is_believed_for_longer_than_a_second() {
    let redis = Redis::start();
    let store = RedisStore::builder(&redis.url())
        .timeout(Duration::from_millis(50))
        .connect()
        .await
        .expect("there");
    let limiter = Limiter::new(DenyCache::new(store));
    let quota = quota();
    let charge = Charge::new("u", &quota);
    exhaust(&limiter, &charge).await;
    redis.signal("STOP");
    let stopped = Instant::now();
    let mut last = Duration::ZERO;
    until("the store is asked", async || {
        let asked = stopped.elapsed();
        let answer = limiter.acquire(&charge).await;
        if answer.is_ok() {
            last = asked;
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
async fn nothing_is_told_where_nobody_listens() {
    let redis = Redis::start();
    let plain = Limiter::new(store(&redis).await);
    let quota = quota();
    let charge = Charge::new("u", &quota);
    plain.acquire(&charge).await.expect("decided");
    plain.refund(&charge).await.expect("refunded");
    assert!(!redis.query::<bool>(&["EXISTS", NEWS]));
    let news = plain.store().news(&Mark::default()).expect("has news").await.expect("read");
    assert_eq!(news.freed, Freed::Anything);
    let next = plain.store().news(&news.mark).expect("has news").await.expect("read");
    assert_eq!((&next.mark, &next.freed), (&news.mark, &Freed::Counts(Vec::new())));
    plain.refund(&charge).await.expect("refunded");
    let next = plain.store().news(&next.mark).expect("has news").await.expect("read");
    assert!(matches!(&next.freed, Freed::Counts(counts) if counts.len() == 1), "{next:?}");
    redis.assert_every_key_expires();
}

#[tokio::test]
async fn a_cluster_tells_from_all_its_nodes_and_of_what_it_gives_back_by_itself() {
    let cluster = Cluster::start();
    let connect = async || {
        RedisStore::cluster(&cluster.urls()[..3])
            .timeout(PATIENCE)
            .connect()
            .await
            .expect("our own cluster answers")
    };
    let (limiter, other) =
        (Limiter::new(DenyCache::new(Breaker::new(connect().await))), connect().await);
    let quota = quota();
    // Of each node.
    for key in ["user-0", "user-1", "user-2", "user-3", "user-4", "user-5"] {
        let charge = Charge::new(key, &quota);
        exhaust(&limiter, &charge).await;
        other.decide(Action::Refund, &charge).await.expect("given back");
        assert!(until_admitted(&limiter, &charge, Instant::now()).await < SECOND, "{key}");
    }
    // Taken, and given back because a later one denies.
    let free = Charge::new("free", &quota);
    let charges = [free, Charge::new("user-0", &quota)];
    let since = limiter.store().news(&Mark::default()).expect("has news").await.expect("read").mark;
    assert!(!other.decide_all(Action::Acquire, &charges).await.expect("decided")[1].allowed);
    until("it is told", async || {
        let news = limiter.store().news(&since).expect("has news").await.expect("read");
        news.freed == Freed::Counts(vec![tidegate::store::news::CountId::of(&free)])
    })
    .await;
    cluster.assert_every_key_expires();
}

/// Makes a server full, with `noeviction`: what expires or is deleted makes no room.
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
    until("the store is asked again", async || {
        let asked = reset.elapsed();
        let decided = limiter.acquire(&bystander).await.expect("a denial needs no memory");
        if decided.source == Source::DenyCache {
            last = asked;
        }
        decided.source == Source::Store
    })
    .await;
    assert!(last < SECOND, "{last:?}");
    assert!(!redis.query::<bool>(&["EXISTS", NEWS]));
    redis.query::<()>(&["CONFIG", "SET", "maxmemory", "0"]);
    assert!(until_admitted(&limiter, &charge, Instant::now()).await < SECOND);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reset_reaches_other_instances_after_a_stall_of_the_invalidation_node() {
    let cluster = Cluster::start();
    let connect = async || {
        RedisStore::cluster(&cluster.urls()[..3]).connect().await.expect("our own cluster answers")
    };
    // As the service has them, with its timeout of 100 ms.
    let limiter = Limiter::new(Fallback::new(DenyCache::new(Breaker::new(connect().await))));
    let other = Limiter::new(connect().await);
    let quota = quota();
    let stalled = cluster.owner_of(NEWS);
    let elsewhere = |key: &String| {
        cluster.owner_of(&other.store().redis_key(&Charge::new(key, &quota))) != stalled
    };
    let key =
        (0..1_000).map(|number| format!("user-{number}")).find(elsewhere).expect("a key elsewhere");
    let charge = Charge::new(&key, &quota);
    exhaust(&limiter, &charge).await;
    cluster.nodes()[stalled].signal("STOP");
    until("the connection is given up", async || {
        let _ = other.store().news(&Mark::default()).expect("has news").await;
        other.store().nodes().iter().any(|node| !node.connected)
    })
    .await;
    other.reset(&charge).await.expect("the node of this key is up");
    cluster.nodes()[stalled].signal("CONT");
    let owner = || &cluster.nodes()[cluster.owner_of(NEWS)];
    let id = format!("{:016x}", tidegate::store::news::CountId::of(&charge).0);
    until("the invalidation is published", async || {
        let members: Vec<String> = owner().query(&["ZRANGE", NEWS, "0", "-1"]);
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
    let cursor =
        limiter.store().news(&Mark::default()).expect("has news").await.expect("read").mark;
    limiter.refund(&Charge::new("warm-up", &quota)).await.expect("refunded");
    let before = redis.calls_of("evalsha");
    let refund = |number: u32| {
        let (limiter, quota) = (limiter.clone(), quota.clone());
        tokio::spawn(async move {
            limiter.refund(&Charge::new(&format!("user-{number}"), &quota)).await
        })
    };
    let refunds: Vec<_> = (0..200).map(refund).collect();
    for refund in refunds {
        refund.await.expect("no panic").expect("refunded");
    }
    // Each refund returned after its invalidation was published.
    let news = limiter.store().news(&cursor).expect("has news").await.expect("read");
    assert!(matches!(&news.freed, Freed::Counts(counts) if counts.len() == 201), "{news:?}");
    let calls = redis.calls_of("evalsha") - before - 1;
    assert!(calls < 30, "{calls} calls for 200 refunds");
}

/// Memory that others are said to share, and that counts who looks for news.
struct Told {
    memory: MemoryStore,
    looks: AtomicU64,
}

impl Store for Told {
    async fn decide(&self, action: Action, charge: &Charge<'_>) -> Result<Decision, StoreError> {
        self.memory.decide(action, charge).await
    }

    async fn decide_all(
        &self,
        action: Action,
        charges: &[Charge<'_>],
    ) -> Result<Vec<Decision>, StoreError> {
        self.memory.decide_all(action, charges).await
    }

    fn clock(&self) -> &dyn Clock {
        self.memory.clock()
    }

    fn news(&self, since: &Mark) -> Option<impl Future<Output = Result<News, StoreError>> + Send> {
        let begun = since == &Mark::default();
        Some(async move {
            self.looks.fetch_add(1, Ordering::Relaxed);
            let freed = if begun { Freed::Anything } else { Freed::Counts(Vec::new()) };
            Ok(News { mark: Mark("here".to_owned()), freed, now: None })
        })
    }
}

#[tokio::test(start_paused = true)]
async fn news_are_read_only_while_denials_are_of_use() {
    let cache = DenyCache::new(Told { memory: MemoryStore::new(), looks: AtomicU64::new(0) });
    let looks = || cache.store().looks.load(Ordering::Relaxed);
    let (limiter, quota) = (&cache, quota());
    let charge = Charge::new("u", &quota);
    tokio::time::sleep(60 * SECOND).await;
    assert_eq!(looks(), 0, "nobody was denied");
    for turn in 1..=2 {
        let before = looks();
        let first = limiter.decide(Action::Acquire, &charge).await.expect("decided");
        let second = limiter.decide(Action::Acquire, &charge).await.expect("decided");
        assert_eq!(
            (first.allowed, first.source, second.source),
            (turn == 1, Source::Store, Source::Store)
        );
        // The first look forgets what was there before; what comes then is kept.
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
            (8..20).contains(&(looks() - before)),
            "{} looks in five seconds",
            looks() - before
        );
        tokio::time::sleep(60 * SECOND).await;
        assert!((20..40).contains(&(looks() - before)), "{} looks in all", looks() - before);
    }
}
