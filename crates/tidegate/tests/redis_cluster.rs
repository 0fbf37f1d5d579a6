//! The Redis store on a real cluster: conformance, charges in several slots, migrations, failover.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use support::{Cluster, LONG, PERMISSIONS, Redis, TEST_TIMEOUT, every_quota, until, valkey_9};
use tidegate::testing::{conformance, conformance_of_holds};
use tidegate::{
    Action, Charge, DenyCache, Error, Limiter, ManualClock, MemoryStore, Quota, RedisStore,
    SharedStore, Source, Store, StoreError,
};

static NUMBER: AtomicU64 = AtomicU64::new(0);

async fn limiter(cluster: &Cluster) -> Limiter<RedisStore> {
    let builder = RedisStore::cluster(&cluster.urls()[..2]).timeout(TEST_TIMEOUT);
    Limiter::new(builder.connect().await.expect("our own cluster answers"))
}

async fn driven(cluster: &Cluster, clock: ManualClock) -> Limiter<RedisStore> {
    let prefix = format!("test-{}", NUMBER.fetch_add(1, Ordering::Relaxed));
    let builder =
        RedisStore::cluster(cluster.urls()).timeout(TEST_TIMEOUT).prefix(prefix).driven_by(clock);
    Limiter::new(builder.connect().await.expect("our own cluster answers"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_store_on_a_cluster_conforms_to_the_model_and_is_exact() {
    assert_conforms_and_is_exact(&Cluster::start(), 150).await;
}

/// A short form of `make test-newest`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_store_on_a_cluster_of_the_newest_server_conforms_and_is_exact() {
    assert_conforms_and_is_exact(&Cluster::start_program(&valkey_9()), 50).await;
}

async fn assert_conforms_and_is_exact(cluster: &Cluster, seeds: u64) {
    conformance(support::seeds(seeds), async |clock| driven(cluster, clock).await).await;
    let of_holds = support::seeds(seeds / 2);
    conformance_of_holds(of_holds, async |clock| driven(cluster, clock).await).await;
    support::assert_exact_under_concurrency(&limiter(cluster).await).await;

    // A single URL of a node is enough.
    let one = RedisStore::builder(&cluster.urls()[0])
        .timeout(TEST_TIMEOUT)
        .connect()
        .await
        .expect("connected");
    assert_eq!(one.nodes().len(), 3, "{:?}", one.nodes());
    let quota = Quota::fixed_window(10, LONG).expect("valid");
    let one = Limiter::new(one);
    let names: Vec<String> = (0..20).map(|number| format!("user-{number}")).collect();
    let charges: Vec<Charge<'_>> = names.iter().map(|name| Charge::new(name, &quota)).collect();
    let decisions = one.acquire_all(&charges).await.expect("decided");
    assert!(
        decisions.iter().all(|decision| decision.allowed && decision.remaining == 9),
        "{decisions:?}"
    );

    for node in one.store().nodes() {
        one.store().probe_node(&node.address).await.expect("each node can decide");
    }
    one.store().heartbeat("a").await.expect("announced");
    assert_eq!(one.store().heartbeat("b").await, Ok(vec!["a".to_owned(), "b".to_owned()]));
    cluster.assert_every_key_expires();
}

/// Many tasks charge pairs of keys on different nodes, in both orders.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn charges_on_several_nodes_are_exact_and_denied_ones_are_refunded() {
    let cluster = Cluster::start();
    let limiter = limiter(&cluster).await;
    for (wide, narrow) in every_quota(100, LONG).into_iter().zip(every_quota(40, LONG)) {
        let admitted = Arc::new(AtomicU64::new(0));
        let tasks: Vec<_> = (0..16)
            .map(|task| {
                let (limiter, wide, narrow, admitted) =
                    (limiter.clone(), wide.clone(), narrow.clone(), Arc::clone(&admitted));
                tokio::spawn(async move {
                    for _ in 0..8 {
                        let (one, other) =
                            (Charge::new("wide", &wide), Charge::new("narrow", &narrow));
                        let charges = if task % 2 == 0 { [one, other] } else { [other, one] };
                        let decisions = limiter.acquire_all(&charges).await.expect("decided");
                        assert_eq!(decisions.len(), 2);
                        if decisions.iter().all(|decision| decision.allowed) {
                            admitted.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await.expect("no panic");
        }
        let admitted = admitted.load(Ordering::Relaxed);
        assert_eq!(admitted, 40, "{}", wide.default_policy_name());
        let left = limiter.peek(&Charge::new("wide", &wide)).await.expect("decided");
        assert_eq!(
            left.remaining + 1,
            60,
            "denied requests were refunded: {}",
            wide.default_policy_name()
        );
    }
    cluster.assert_every_key_expires();
}

/// The caller times out, or is cancelled, while the second node does not answer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_first_node_is_refunded_when_the_second_does_not_answer() {
    let cluster = Cluster::start();
    let observer = limiter(&cluster).await;
    let quota = Quota::sliding_log(10, LONG).expect("valid");
    let key = |name: &str| observer.store().redis_key(&Charge::new(name, &quota));
    let here = cluster.owner_of(&key("here"));
    let there = (0..1_000)
        .map(|number| format!("there-{number}"))
        .find(|name| cluster.owner_of(&key(name)) != here);
    let there = there.expect("a key on another node");
    let limiter =
        RedisStore::cluster(cluster.urls()).timeout(Duration::from_millis(300)).connect().await;
    let limiter = Limiter::new(limiter.expect("connected"));
    let charges = [Charge::new("here", &quota), Charge::new(&there, &quota)];
    assert!(
        limiter
            .acquire_all(&charges)
            .await
            .expect("decided")
            .iter()
            .all(|decision| decision.allowed)
    );

    let silent = cluster.owner_of(&key(&there));
    cluster.nodes()[silent].signal("STOP");
    let start = Instant::now();
    limiter.acquire_all(&charges).await.expect_err("no answer");
    assert!(start.elapsed() < Duration::from_millis(900), "{:?}", start.elapsed());
    // A cancelled call.
    let _ = tokio::time::timeout(Duration::from_millis(100), limiter.acquire_all(&charges)).await;
    let left = async || observer.peek(&charges[0]).await.expect("decided").remaining + 1;
    until("the units are refunded", async || left().await == 9).await;
    cluster.nodes()[silent].signal("CONT");
}

/// The caller is cancelled before the second node answers, which charges nevertheless.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancelled_request_on_several_nodes_leaves_no_units_charged() {
    let cluster = Cluster::start();
    let limiter = limiter(&cluster).await;
    let quota = Quota::sliding_log(10, LONG).expect("valid");
    let key = |name: &str| limiter.store().redis_key(&Charge::new(name, &quota));
    let here = cluster.owner_of(&key("here"));
    let there = (0..1_000)
        .map(|number| format!("there-{number}"))
        .find(|name| cluster.owner_of(&key(name)) != here);
    let there = there.expect("a key on another node");
    let charges = [Charge::new("here", &quota), Charge::new(&there, &quota)];
    let paused = &cluster.nodes()[cluster.owner_of(&key(&there))];
    let left = async |charge| limiter.peek(charge).await.expect("decided").remaining + 1;

    paused.pause_writes();
    let cancelled = tokio::spawn({
        let (limiter, quota, there) = (limiter.clone(), quota.clone(), there.clone());
        async move {
            let charges = [Charge::new("here", &quota), Charge::new(&there, &quota)];
            limiter.acquire_all(&charges).await
        }
    });
    until("the first node has charged", async || left(&charges[0]).await == 9).await;
    cancelled.abort();
    assert!(cancelled.await.expect_err("aborted").is_cancelled());
    paused.resume_writes();
    // The connection keeps the order, so the second node has charged before it answers the peek.
    for charge in &charges {
        until("the units are refunded", async || left(charge).await == 10).await;
    }
}

/// A slot migrates, key by key, to a new node while its keys are charged.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_migration_under_load_causes_no_error_and_loses_no_unit() {
    let mut cluster = Cluster::start();
    cluster.add_empty_primary();
    // A user with minimal permissions.
    cluster.nodes().iter().for_each(|node| node.grant(&[&PERMISSIONS[..], &["asking"]].concat()));
    let urls: Vec<String> = cluster.nodes().iter().map(Redis::url_of_user).collect();
    let store = RedisStore::cluster(urls)
        .timeout(TEST_TIMEOUT)
        .connect()
        .await
        .expect("our own cluster answers");
    let limiter = Limiter::new(store);
    let quota = Quota::sliding_log(300, LONG).expect("valid");
    // All policies of one key are in one slot.
    let policies: Vec<String> = (0..6).map(|number| format!("policy-{number}")).collect();
    let redis_key =
        limiter.store().redis_key(&Charge::new("moving", &quota).with_policy("policy-0"));
    let (slot, from) = (cluster.slot_of(&redis_key), cluster.owner_of(&redis_key));

    let stop = Arc::new(AtomicBool::new(false));
    let mut tasks = Vec::new();
    for task in 0..4 {
        let (limiter, quota, policies, stop) =
            (limiter.clone(), quota.clone(), policies.clone(), Arc::clone(&stop));
        tasks.push(tokio::spawn(async move {
            let mut admitted = vec![0_u64; policies.len()];
            let mut asked = 0;
            while !stop.load(Ordering::Relaxed) {
                asked += 1;
                if asked % 4 == 0 {
                    // All or nothing, even while the two keys are on different nodes.
                    let pair = [1, 4].map(|policy: usize| {
                        Charge::new("moving", &quota).with_policy(&policies[policy])
                    });
                    let decisions = limiter.acquire_all(&pair).await.expect("no error");
                    if decisions.iter().all(|decision| decision.allowed) {
                        admitted[1] += 1;
                        admitted[4] += 1;
                    }
                } else {
                    let policy = (asked + task) % policies.len();
                    let charge = Charge::new("moving", &quota).with_policy(&policies[policy]);
                    admitted[policy] +=
                        u64::from(limiter.acquire(&charge).await.expect("no error").allowed);
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            admitted
        }));
    }
    let pause = async || tokio::time::sleep(Duration::from_millis(120)).await;
    pause().await;
    cluster.move_slot(slot, &cluster.nodes()[from], &cluster.nodes()[6], pause).await;
    pause().await;
    stop.store(true, Ordering::Relaxed);
    let mut admitted = vec![0; policies.len()];
    for task in tasks {
        for (sum, count) in admitted.iter_mut().zip(task.await.expect("no panic")) {
            *sum += count;
        }
    }
    assert!(limiter.store().redirects() > 0);
    assert_eq!(cluster.owner_of(&redis_key), 6);
    for (policy, admitted) in policies.iter().zip(admitted) {
        let left = limiter
            .peek(&Charge::new("moving", &quota).with_policy(policy))
            .await
            .expect("decided");
        let left = left.remaining + u64::from(left.allowed);
        assert_eq!(left, 300 - admitted, "{policy}: {admitted} were admitted");
    }
    cluster.assert_every_key_expires();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failover_is_followed_and_does_not_affect_other_nodes() {
    assert_failover_is_followed(false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failover_from_a_hanging_node_is_followed() {
    assert_failover_is_followed(true).await;
}

/// The replica takes over. Calls to the other nodes never fail.
async fn assert_failover_is_followed(hangs: bool) {
    let mut cluster = Cluster::start();
    let store =
        RedisStore::cluster(cluster.urls()).timeout(Duration::from_millis(500)).connect().await;
    let limiter = Limiter::new(store.expect("connected"));
    let quota = Quota::fixed_window(1_000_000, LONG).expect("valid");
    let key = |name: &str| limiter.store().redis_key(&Charge::new(name, &quota));
    let dying = cluster.owner_of(&key("dying"));
    let other = (0..1_000)
        .map(|number| format!("other-{number}"))
        .find(|name| cluster.owner_of(&key(name)) != dying);
    let other = other.expect("a key on another node");
    for name in ["dying", &other] {
        let _ = limiter.acquire(&Charge::new(name, &quota)).await.expect("decided");
    }
    if hangs {
        cluster.nodes()[dying].signal("STOP");
    } else {
        cluster.node_mut(dying).kill();
    }
    let (mut promoted, mut slowest) = (None, Duration::ZERO);
    until("the replica decides", async || {
        if promoted.is_none() && cluster.other_primaries(dying) == 3 {
            promoted = Some(Instant::now());
        }
        let _ = limiter.acquire(&Charge::new(&other, &quota)).await.expect("another node decides");
        let start = Instant::now();
        let decided = limiter.acquire(&Charge::new("dying", &quota)).await.is_ok();
        slowest = slowest.max(start.elapsed());
        decided
    })
    .await;
    let followed = promoted.map_or(Duration::ZERO, |promoted| promoted.elapsed());
    assert!(followed < Duration::from_secs(1), "{followed:?} after the promotion");
    assert!(slowest < Duration::from_millis(900), "{slowest:?}");
    if hangs {
        // The old node continues, and the calls in its buffers are past their deadlines.
        cluster.nodes()[dying].signal("CONT");
        for _ in 0..50 {
            let _ = limiter.acquire(&Charge::new("dying", &quota)).await.expect("decided");
        }
    }
}

/// A node that hangs fails its own calls at once, as soon as some of them have timed out.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_circuit_of_a_hanging_node_opens_and_no_other() {
    let cluster = Cluster::start();
    let timeout = Duration::from_millis(300);
    let store = RedisStore::cluster(cluster.urls()).timeout(timeout).connect().await;
    let limiter = Limiter::new(store.expect("connected"));
    let quota = Quota::fixed_window(1_000_000, LONG).expect("valid");
    let key = |name: &str| limiter.store().redis_key(&Charge::new(name, &quota));
    let hanging = cluster.owner_of(&key("hanging"));
    let other = (0..1_000)
        .map(|number| format!("other-{number}"))
        .find(|name| cluster.owner_of(&key(name)) != hanging)
        .expect("a key on another node");
    let (hangs, works) = (Charge::new("hanging", &quota), Charge::new(&other, &quota));
    for charge in [&hangs, &works] {
        let _ = limiter.acquire(charge).await.expect("decided");
    }
    cluster.nodes()[hanging].signal("STOP");
    let lost = Error::Store(StoreError::Timeout(timeout).answer_lost());
    assert_eq!(limiter.acquire(&hangs).await.expect_err("it hangs"), lost);
    until("the circuit opens", async || {
        let error = limiter.acquire(&hangs).await.expect_err("it hangs");
        matches!(error, Error::Store(StoreError::Open(_)))
    })
    .await;
    let address = format!("127.0.0.1:{}", cluster.nodes()[hanging].port());
    for node in limiter.store().nodes() {
        assert_eq!(node.circuit.open, node.address == address, "{node:?}");
    }
    let error = limiter.acquire(&hangs).await.expect_err("rejected");
    assert!(matches!(error, Error::Store(StoreError::Open(_))), "{error}");
    let _ = limiter.acquire(&works).await.expect("another node decides");
    // A request on both nodes charges neither.
    let left = async || limiter.peek(&works).await.expect("decided").remaining;
    let before = left().await;
    limiter.acquire_all(&[works, hangs]).await.expect_err("one node hangs");
    until("the other node is refunded", async || left().await == before).await;
    cluster.nodes()[hanging].signal("CONT");
    until("the circuit is closed", async || limiter.acquire(&hangs).await.is_ok()).await;
    assert_eq!(limiter.store().circuits_opened(), 1);
}

/// Concurrent decisions for many keys: one batch per node, with one call per slot.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_of_many_slots_returns_each_decision_to_its_caller() {
    let cluster = Cluster::start();
    let limiter = limiter(&cluster).await;
    for quota in every_quota(5, LONG) {
        let tasks: Vec<_> = (0..120)
            .map(|caller| {
                let (limiter, quota) = (limiter.clone(), quota.clone());
                tokio::spawn(async move {
                    let mut left = Vec::new();
                    for round in 0..4 {
                        let name = format!("user-{}", (caller + round) % 40);
                        let decision =
                            limiter.acquire(&Charge::new(&name, &quota)).await.expect("decided");
                        left.push((name, decision.allowed, decision.remaining));
                    }
                    left
                })
            })
            .collect();
        let mut remaining_by_key = std::collections::HashMap::<String, Vec<u64>>::new();
        for task in tasks {
            for (name, allowed, remaining) in task.await.expect("no panic") {
                if allowed {
                    remaining_by_key.entry(name).or_default().push(remaining);
                } else {
                    assert_eq!(remaining, 0);
                }
            }
        }
        assert_eq!(remaining_by_key.len(), 40);
        for (name, mut left) in remaining_by_key {
            left.sort_unstable();
            assert_eq!(left, [0, 1, 2, 3, 4], "{name} of {}", quota.default_policy_name());
        }
    }
    cluster.assert_every_key_expires();
}

/// Returns a node, and keys in different slots of it.
fn keys_of_one_node(cluster: &Cluster, store: &RedisStore, count: usize) -> (usize, Vec<String>) {
    let quota = Quota::fixed_window(1, LONG).expect("valid");
    let redis_key = |key: &String| store.redis_key(&Charge::new(key, &quota));
    let first = "same-node".to_owned();
    let node = cluster.owner_of(&redis_key(&first));
    let mut slots = vec![cluster.slot_of(&redis_key(&first))];
    let mut keys = vec![first];
    for key in (0..1_000).map(|number| format!("same-node-{number}")) {
        let slot = cluster.slot_of(&redis_key(&key));
        if keys.len() < count
            && !slots.contains(&slot)
            && cluster.owner_of(&redis_key(&key)) == node
        {
            slots.push(slot);
            keys.push(key);
        }
    }
    assert_eq!(keys.len(), count);
    (node, keys)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slots_of_one_node_are_decided_in_one_call() {
    let cluster = Cluster::start();
    let limiter = limiter(&cluster).await;
    let (node, keys) = keys_of_one_node(&cluster, limiter.store(), 5);
    let node = &cluster.nodes()[node];
    let quotas: Vec<Quota> = (0..5)
        .map(|index| Quota::sliding_log(if index == 3 { 3 } else { 10 }, LONG).expect("valid"))
        .collect();
    let charges =
        || keys.iter().zip(&quotas).map(|(key, quota)| Charge::new(key, quota)).collect::<Vec<_>>();
    // This also loads the script.
    assert!(
        limiter
            .acquire_all(&charges())
            .await
            .expect("decided")
            .iter()
            .all(|decision| decision.allowed)
    );
    let before = node.calls_of("evalsha");
    let twice: Vec<Charge<'_>> = charges().iter().map(|charge| charge.with_cost(2)).collect();
    let decisions = limiter.acquire_all(&twice).await.expect("decided");
    assert!(decisions.iter().all(|decision| decision.allowed));
    // One charge denies, and nothing is spent.
    let denied = limiter.acquire_all(&charges()).await.expect("decided");
    let results: Vec<(bool, u64)> =
        denied.iter().map(|decision| (decision.allowed, decision.remaining)).collect();
    assert_eq!(results, [(true, 7), (true, 7), (true, 7), (false, 0), (true, 7)]);
    assert_eq!(node.calls_of("evalsha") - before, 2, "two requests, two calls");
    for (charge, left) in charges().iter().zip([7, 7, 7, 0, 7]) {
        let read = limiter
            .store()
            .decide(Action::ChargeUpTo, &charge.with_cost(0))
            .await
            .expect("decided");
        assert_eq!(read.remaining, left);
    }
    cluster.assert_every_key_expires();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peek_across_slots_shows_unspent_numbers_when_one_denies() {
    let cluster = Cluster::start();
    for quotas in every_quota(4, Duration::from_secs(60)).chunks(2) {
        let clock = ManualClock::new();
        let limiter = driven(&cluster, clock.clone()).await;
        let in_memory = Limiter::new(MemoryStore::builder().clock(clock.clone()).build());
        let keys: Vec<String> = (0..6).map(|number| format!("user-{number}")).collect();
        let pairs = keys.iter().zip(quotas.iter().cycle());
        let charges: Vec<Charge<'_>> =
            pairs.map(|(key, quota)| Charge::new(key, quota).with_cost(2)).collect();
        for (index, charge) in charges.iter().enumerate() {
            clock.advance(Duration::from_millis(700));
            let spent = charge.with_cost(if index == 4 { 4 } else { 1 });
            let _ = limiter.acquire(&spent).await.expect("decided");
            let _ = in_memory.acquire(&spent).await.expect("decided");
        }
        let on_cluster = limiter.peek_all(&charges).await.expect("decided");
        let expected = in_memory.peek_all(&charges).await.expect("decided");
        assert!(!expected[4].allowed);
        assert_eq!(on_cluster, expected);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_migrated_slot_keeps_cached_denials_of_other_slots() {
    let cluster = Cluster::start();
    let store = RedisStore::cluster(cluster.urls())
        .timeout(TEST_TIMEOUT)
        .connect()
        .await
        .expect("our own cluster answers");
    let limiter = Limiter::new(DenyCache::new(store));
    let store = limiter.store().store();
    let (from, keys) = keys_of_one_node(&cluster, store, 2);
    let quota = Quota::fixed_window(1, LONG).expect("valid");
    let (moving, staying) = (Charge::new(&keys[0], &quota), Charge::new(&keys[1], &quota));
    let is_cached = async |charge: &Charge<'_>| {
        limiter.acquire(charge).await.expect("decided").source == Source::DenyCache
    };
    let slot = cluster.slot_of(&store.redis_key(&moving));
    let to = (0..3).find(|node| *node != from).expect("three primaries");
    let epochs = || (store.epoch_of(&moving), store.epoch_of(&staying));
    let mut moves = 0;
    // Entries live for five seconds. If a migration takes longer, the slot is migrated back, and so
    // on.
    until("a migration keeps the other entry", async || {
        for charge in [&moving, &staying] {
            until("the denial is cached", async || is_cached(charge).await).await;
        }
        let ((before, other), redirects) = (epochs(), store.redirects());
        let ends = if moves % 2 == 0 { (from, to) } else { (to, from) };
        moves += 1;
        cluster
            .move_slot(slot, &cluster.nodes()[ends.0], &cluster.nodes()[ends.1], async || {})
            .await;
        until("the store is redirected", async || {
            let _ = store.decide(Action::Peek, &moving).await.expect("decided");
            store.redirects() > redirects || store.epoch_of(&moving) != before
        })
        .await;
        assert_ne!(store.epoch_of(&moving), before);
        assert_eq!(store.epoch_of(&staying), other);
        let staying_is_cached = is_cached(&staying).await;
        let denied = limiter.acquire(&moving).await.expect("decided");
        assert_eq!((denied.allowed, denied.source), (false, Source::Store));
        staying_is_cached
    })
    .await;
}
