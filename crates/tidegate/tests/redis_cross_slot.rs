//! Group commit on a real cluster: one call decides keys of several slots, where the server allows
//! it, and stays exact while slots move.

mod support;

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use support::{Cluster, LONG, TEST_TIMEOUT, every_quota, packed, redis_6, valkey_9};
use tidegate::store::redis::Builder;
use tidegate::{Charge, Limiter, Quota, RedisStore};

fn builder(cluster: &Cluster) -> Builder {
    RedisStore::cluster(cluster.urls()).timeout(TEST_TIMEOUT)
}

async fn limiter(builder: Builder) -> Limiter<RedisStore> {
    Limiter::new(builder.connect().await.expect("our own cluster answers"))
}

/// Returns the number of script calls on all nodes.
fn script_calls(cluster: &Cluster) -> u64 {
    cluster.nodes().iter().map(|node| node.calls_of("evalsha")).sum()
}

/// Returns keys in different slots, and the number of nodes that own them.
fn keys_in_different_slots(
    cluster: &Cluster,
    store: &RedisStore,
    count: usize,
) -> (Vec<String>, u64) {
    let quota = Quota::fixed_window(1, LONG).expect("valid");
    let (mut keys, mut slots, mut owners) = (Vec::new(), HashSet::new(), HashSet::new());
    for key in (0..).map(|number| format!("user-{number}")) {
        let redis_key = store.redis_key(&Charge::new(&key, &quota));
        if slots.insert(cluster.slot_of(&redis_key)) {
            owners.insert(cluster.owner_of(&redis_key));
            keys.push(key);
        }
        if keys.len() == count {
            break;
        }
    }
    (keys, owners.len() as u64)
}

/// Acquires one unit of each key, all at the same moment. The runtime must have one thread.
async fn acquire_all_at_once(
    limiter: &Limiter<RedisStore>,
    keys: &[String],
    quota: &Quota,
) -> Vec<u64> {
    let acquire = |key: &String| {
        let (limiter, key, quota) = (limiter.clone(), key.clone(), quota.clone());
        tokio::spawn(async move {
            limiter.acquire(&Charge::new(&key, &quota)).await.expect("decided").remaining
        })
    };
    let tasks: Vec<_> = keys.iter().map(acquire).collect();
    let mut remaining = Vec::new();
    for task in tasks {
        remaining.push(task.await.expect("no panic"));
    }
    remaining
}

/// Returns the number of script calls for one unit of each of 60 keys in different slots, which
/// arrive at the same moment, and the number of nodes that decide them.
async fn calls_for_sixty_keys(cluster: &Cluster, builder: Builder) -> (u64, u64) {
    let limiter = limiter(builder).await;
    let (keys, nodes) = keys_in_different_slots(cluster, limiter.store(), 60);
    let mut calls = 0;
    for quota in every_quota(100, LONG) {
        // The first round loads scripts, and finds out what the servers allow.
        assert_eq!(acquire_all_at_once(&limiter, &keys, &quota).await, vec![99; 60]);
        let before = script_calls(cluster);
        assert_eq!(acquire_all_at_once(&limiter, &keys, &quota).await, vec![98; 60]);
        let of_quota = script_calls(cluster) - before;
        assert!(calls == 0 || calls == of_quota, "{calls} and {of_quota} calls");
        calls = of_quota;
    }
    cluster.assert_every_key_expires();
    (calls, nodes)
}

#[tokio::test]
async fn requests_for_one_node_share_one_call() {
    for program in [Path::new("redis-server").to_owned(), valkey_9()] {
        let cluster = Cluster::start_program(&program);
        let (calls, nodes) = calls_for_sixty_keys(&cluster, builder(&cluster)).await;
        assert_eq!((calls, nodes), (3, 3), "one call per node: {}", program.display());
    }
}

#[tokio::test]
async fn a_server_that_does_not_allow_it_gets_one_call_per_slot() {
    let cluster = Cluster::start_program(&redis_6());
    let (calls, _) = calls_for_sixty_keys(&cluster, builder(&cluster)).await;
    assert_eq!(calls, 60, "Redis 6.2");
    let cluster = Cluster::start();
    let (calls, _) = calls_for_sixty_keys(&cluster, builder(&cluster).cross_slot(false)).await;
    assert_eq!(calls, 60, "disabled");
}

/// With 512 callers on three nodes, a tenth of a call per decision or less.
#[tokio::test]
async fn many_callers_share_few_calls() {
    let cluster = Cluster::start();
    let limiter = limiter(builder(&cluster)).await;
    let quota = Quota::token_bucket(100, LONG).expect("valid");
    let tasks: Vec<_> = (0..512)
        .map(|caller| {
            let (limiter, quota) = (limiter.clone(), quota.clone());
            tokio::spawn(async move {
                for round in 0..8 {
                    let key = format!("user-{caller}-{round}");
                    let decision = limiter.acquire(&Charge::new(&key, &quota)).await;
                    assert_eq!(decision.expect("decided").remaining, 99);
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.expect("no panic");
    }
    let calls = script_calls(&cluster);
    assert!(10 * calls <= 512 * 8, "{calls} calls for {} decisions", 512 * 8);
}

/// A node refuses to write a missing key while its slot is migrating, so a count that was deleted
/// to be replaced by another form would be lost, and the charge beside it spent twice.
#[tokio::test]
async fn migrating_slot_keeps_a_count_that_would_change_its_form() {
    const LIMIT: u64 = 10_000;
    let cluster = Cluster::start();
    let limiter = limiter(builder(&cluster)).await;
    let log = packed(LIMIT, LONG);
    let window = Quota::fixed_window(LIMIT, LONG).expect("valid");
    // Cause of the new form: quota and requests before it, cost, whether the form can wait.
    let causes = [
        ("long log", &log, 679, 1, true),
        ("cost", &log, 10, 100, false),
        ("other algorithm", &window, 10, 1, false),
    ];
    for (cause, before, requests, cost, can_wait) in causes {
        let beside = Charge::new(cause, &window).with_policy("beside");
        let _ = limiter.acquire(&beside).await.expect("decided");
        for _ in 0..requests {
            let charge = Charge::new(cause, before).with_policy("count");
            assert!(limiter.acquire(&charge).await.expect("decided").allowed);
        }
        let charge = Charge::new(cause, &log).with_policy("count").with_cost(cost);
        let redis_key = limiter.store().redis_key(&charge);
        let (slot, from) = (cluster.slot_of(&redis_key), cluster.owner_of(&redis_key));
        let (source, target) = (&cluster.nodes()[from], &cluster.nodes()[(from + 1) % 3]);
        let mut decided = None;
        let migrating = async || {
            if decided.is_none() {
                decided = Some(limiter.acquire_all(&[beside, charge]).await);
            }
        };
        cluster.move_slot(slot, source, target, migrating).await;
        let is_decided = decided.as_ref().is_some_and(Result::is_ok);
        assert_eq!(is_decided, can_wait, "{cause}: {decided:?}");
        let _ = limiter.acquire_all(&[beside, charge]).await.expect("the slot has moved");
        let times = 1 + u64::from(is_decided);
        for (charge, used) in [(beside, 1 + times), (charge, requests + cost * times)] {
            let peeked = limiter.peek(&charge.with_cost(1)).await.expect("decided");
            assert_eq!(LIMIT - peeked.remaining - 1, used, "{cause}: {}", charge.policy());
        }
    }
    cluster.assert_every_key_expires();
}

/// Slots move between all nodes while keys of these and other slots are charged in shared calls.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_unit_is_lost_or_charged_twice_while_slots_move() {
    const LIMIT: u64 = 1_000_000;
    let cluster = Cluster::start();
    let limiter = limiter(builder(&cluster)).await;
    let quotas = every_quota(LIMIT, LONG);
    let keys: Vec<String> = (0..48).map(|number| format!("user-{number}")).collect();
    let admitted: Arc<Vec<AtomicU64>> = Arc::new(keys.iter().map(|_| AtomicU64::new(0)).collect());
    let stop = Arc::new(AtomicBool::new(false));
    let quota_of = |key: usize| quotas[key % quotas.len()].clone();
    let tasks: Vec<_> = (0..96)
        .map(|task| {
            let (limiter, stop, admitted) =
                (limiter.clone(), Arc::clone(&stop), Arc::clone(&admitted));
            let mine = task % keys.len();
            let (key, quota) = (keys[mine].clone(), quota_of(mine));
            let next = (mine + 1) % keys.len();
            let (next_key, next_quota) = (keys[next].clone(), quota_of(next));
            tokio::spawn(async move {
                let mut asked = 0_u64;
                while !stop.load(Ordering::Relaxed) {
                    asked += 1;
                    let charge = Charge::new(&key, &quota);
                    if asked.is_multiple_of(8) {
                        // All or nothing, on one node or on two.
                        let pair = [charge, Charge::new(&next_key, &next_quota)];
                        let decisions = limiter.acquire_all(&pair).await.expect("no error");
                        assert!(decisions.iter().all(|decision| decision.allowed));
                        admitted[next].fetch_add(1, Ordering::Relaxed);
                    } else {
                        let decision = limiter.acquire(&charge).await.expect("no error");
                        assert!(decision.allowed);
                    }
                    admitted[mine].fetch_add(1, Ordering::Relaxed);
                }
            })
        })
        .collect();
    let pause = async || tokio::time::sleep(Duration::from_millis(15)).await;
    pause().await;
    for (index, key) in keys.iter().enumerate().take(12) {
        let redis_key = limiter.store().redis_key(&Charge::new(key, &quota_of(index)));
        let (slot, from) = (cluster.slot_of(&redis_key), cluster.owner_of(&redis_key));
        let to = (from + 1 + index % 2) % 3;
        cluster.move_slot(slot, &cluster.nodes()[from], &cluster.nodes()[to], pause).await;
    }
    stop.store(true, Ordering::Relaxed);
    for task in tasks {
        task.await.expect("no panic");
    }
    assert!(limiter.store().redirects() > 0);
    let mut wrong = Vec::new();
    for (index, key) in keys.iter().enumerate() {
        let quota = quota_of(index);
        let left = limiter.peek(&Charge::new(key, &quota)).await.expect("decided").remaining + 1;
        let (admitted, charged) = (admitted[index].load(Ordering::Relaxed), LIMIT - left);
        if charged != admitted {
            let name = quota.default_policy_name();
            wrong.push(format!("{key}: {charged} charged, {admitted} admitted: {name}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    cluster.assert_every_key_expires();
}
