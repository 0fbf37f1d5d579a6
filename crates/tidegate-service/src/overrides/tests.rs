//! Overrides of whole services: in memory by a driven clock, and 50 of them on a real Redis.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::AtomicBool;

use tidegate::{Action, Clock as _, ManualClock, MemoryStore, Query, Timestamp};
use tidegate_config::Config;

use super::*;
use crate::state::ServerState;

#[path = "../../../tidegate/tests/support/server.rs"]
mod server;

use server::Redis;

const POLICIES: &str = "policies:
  - {name: per-user, key: [header.x-user], algorithm: fixed-window, limit: 10, window: 1h}
";
const MINUTE: Duration = Duration::from_secs(60);
/// Time within which something must happen on a machine under load.
const TEST_TIMEOUT: Duration = Duration::from_secs(20);

fn config(text: &str) -> Config {
    Config::parse("test.yaml", text).expect("valid")
}

fn author() -> OverrideAuthor {
    let from = SocketAddr::from((Ipv4Addr::LOCALHOST, 1)).ip().to_string();
    OverrideAuthor { by: "ops".into(), from, reason: String::new() }
}

fn request(key: &str, limit: u64, expires_in: &str) -> SetOverride {
    SetOverride {
        policy: "per-user".into(),
        key: tidegate_api::admin::KeyValues::One(key.into()),
        limit: Some(limit),
        window: None,
        burst: None,
        mode: None,
        expires_in: expires_in.into(),
        reason: "test".into(),
    }
}

async fn set(state: &ServerState, key: &str, limit: u64) {
    state.overrides.set(request(key, limit, "1h"), author()).await.expect("set");
}

/// Returns the limit and whether a request of this key passes.
async fn peek(state: &ServerState, key: &str) -> (u64, bool) {
    let active = state.active();
    let decided = active.limiter.decide(Action::Peek, Query::policy("per-user", key)).await;
    let decision = decided.expect("decided").binding().expect("a limit").decision();
    (decision.limit, decision.allowed)
}

async fn until(what: &str, mut happened: impl AsyncFnMut() -> bool) {
    let start = Instant::now();
    while !happened().await {
        assert!(start.elapsed() < TEST_TIMEOUT, "timeout: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn on_memory(text: &str) -> (Arc<ServerState>, ManualClock) {
    let clock = ManualClock::new();
    let store = MemoryStore::builder().clock(clock.clone()).build();
    (Arc::new(ServerState::on_memory(config(text), store)), clock)
}

#[tokio::test]
async fn override_in_memory_ends_on_time_and_leaves_an_audit() {
    let (state, clock) = on_memory(POLICIES);
    let body = state.overrides.set(request("ann", 5_000, "2m"), author()).await.expect("set");
    assert_eq!(state.overrides.scope(), OverrideScope::ThisProcess);
    assert_eq!(body.until_ms, Some((clock.now().as_micros() + 120_000_000).div_ceil(1_000)));
    assert_eq!(peek(&state, "ann").await, (5_000, true));
    clock.advance((2 * MINUTE).saturating_sub(Duration::from_micros(1)));
    assert_eq!(peek(&state, "ann").await.0, 5_000);
    clock.advance(Duration::from_micros(1));
    assert_eq!(peek(&state, "ann").await.0, 10);
    assert!(state.overrides.list(None, 10, |_, _| true).0.is_empty());
    set(&state, "ann", 7).await;
    state.overrides.remove("per-user", "ann", author()).await.expect("removed");
    let again = state.overrides.remove("per-user", "ann", author()).await;
    assert!(matches!(again, Err(OverrideError::NotFound)));
    let audit = state.overrides.audit(None, 10).await.expect("read");
    let states = audit.iter().map(|(_, it)| (it.before.is_some(), it.after.is_some()));
    assert_eq!(states.collect::<Vec<_>>(), [(true, false), (false, true), (false, true)]);
}

#[tokio::test]
async fn invalid_overrides_are_refused_with_the_reason() {
    let (state, _) = on_memory(POLICIES);
    let mut cases = Vec::new();
    for (change, message) in [
        (&(|it: &mut SetOverride| it.policy = "per-usr".into()) as &dyn Fn(&mut _), "per-user"),
        (&|it: &mut SetOverride| it.limit = Some(0), "limit 0"),
        (&|it: &mut SetOverride| it.limit = None, "send a limit"),
        (&|it: &mut SetOverride| it.mode = Some(OverrideMode::Block), "a mode or numbers"),
        (&|it: &mut SetOverride| it.window = Some("soon".into()), "window"),
        (&|it: &mut SetOverride| it.window = Some("month".into()), "by the overrides of the file"),
        (&|it: &mut SetOverride| it.burst = Some(3), "burst"),
        (&|it: &mut SetOverride| it.expires_in = "soon".into(), "expires_in"),
        (&|it: &mut SetOverride| it.expires_in = "1ms".into(), "from 1s to 366d, or never"),
        (&|it: &mut SetOverride| it.reason = " ".into(), "reason"),
        (&|it: &mut SetOverride| it.reason = "x".repeat(501), "500 characters"),
    ] {
        let mut request = request("ann", 5, "1h");
        change(&mut request);
        cases.push((request, message));
    }
    for (request, message) in cases {
        let error = state.overrides.set(request, author()).await.expect_err(message).to_string();
        assert!(error.contains(message), "{error}");
    }
    assert!(state.overrides.list(None, 10, |_, _| true).0.is_empty());
}

#[tokio::test]
async fn overrides_of_a_removed_policy_are_kept_without_effect() {
    let (state, _) = on_memory(POLICIES);
    set(&state, "ann", 5_000).await;
    set(&state, "*", 3).await;
    state.reload(config("policies:\n  - {name: other, limit: 1, window: 1s}\n"));
    let (listed, _) = state.overrides.list(None, 10, |_, _| true);
    assert_eq!(listed.len(), 2);
    assert!(
        listed.iter().all(|it| it.inert.as_deref() == Some("the configuration has no such policy"))
    );
    state.reload(config(&POLICIES.replace("limit: 10", "limit: 20")));
    assert_eq!([peek(&state, "ann").await.0, peek(&state, "bob").await.0], [5_000, 3]);
    assert!(state.overrides.list(None, 10, |_, _| true).0.iter().all(|it| it.inert.is_none()));
    state.reload(config(&POLICIES.replace("limit: 10", "limit: 10, cost: 4")));
    assert_eq!(peek(&state, "bob").await.0, 10, "3 would never admit a request of cost 4");
    let (listed, _) = state.overrides.list(None, 10, |_, key| key == "*");
    assert!(listed[0].inert.as_deref().is_some_and(|it| it.contains("cost 4")), "{listed:?}");
    // An inert override can be removed, too.
    state.reload(config("policies:\n  - {name: other, limit: 1, window: 1s}\n"));
    state.overrides.remove("per-user", "*", author()).await.expect("removed");
}

#[tokio::test]
async fn pages_have_every_override_once() {
    let (state, _) = on_memory(POLICIES);
    for number in 0..25 {
        set(&state, &format!("k{number}"), 5).await;
    }
    let (mut found, mut after) = (Vec::new(), None);
    loop {
        let (page, has_more) = state.overrides.list(after, 10, |_, key| key != "k7");
        found.extend(page.iter().map(|it| it.key.clone()));
        after = page.last().map(|it| (it.policy.clone(), it.key.clone()));
        if !has_more {
            break;
        }
    }
    found.sort();
    found.dedup();
    assert_eq!(found.len(), 24);
}

/// A service on a Redis: its state, and the task that follows changes.
async fn on_redis(url: &str) -> Arc<ServerState> {
    let text = format!("store: {{redis: '{url}', timeout: 2s}}\n{POLICIES}");
    let state = Arc::new(ServerState::start(config(&text)).await.expect("started"));
    tokio::spawn(Arc::clone(&state.overrides).follow());
    state
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fifty_instances_under_load_see_a_change_within_a_heartbeat() {
    let redis = Redis::start();
    let mut services = Vec::new();
    for _ in 0..50 {
        services.push(on_redis(&redis.url()).await);
    }
    let is_running = Arc::new(AtomicBool::new(true));
    let mut load = Vec::new();
    for state in &services {
        let (state, is_running) = (Arc::clone(state), Arc::clone(&is_running));
        load.push(tokio::spawn(async move {
            let mut decisions = 0_u64;
            while is_running.load(Ordering::Relaxed) {
                let active = state.active();
                let key = format!("user-{}", decisions % 100);
                let _ = active.limiter.acquire(Query::policy("per-user", &key)).await;
                decisions += 1;
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
            decisions
        }));
    }
    let all_have = async |limit: u64| {
        let start = Instant::now();
        for state in &services {
            let what = format!("all 50 instances have the limit {limit}");
            until(&what, async || peek(state, "acme").await.0 == limit).await;
        }
        start.elapsed()
    };
    assert!(all_have(10).await < TEST_TIMEOUT);
    // Raise, lower, a change by another instance, and back.
    let mut times = Vec::new();
    set(&services[0], "acme", 5_000).await;
    times.push(all_have(5_000).await);
    set(&services[49], "acme", 2).await;
    times.push(all_have(2).await);
    set(&services[7], "*", 6).await;
    services[9].overrides.remove("per-user", "acme", author()).await.expect("removed");
    times.push(all_have(6).await);
    services[3].overrides.remove("per-user", "*", author()).await.expect("removed");
    times.push(all_have(10).await);
    is_running.store(false, Ordering::Relaxed);
    let mut decisions = 0;
    for task in load {
        decisions += task.await.expect("ended");
    }
    println!("50 instances, {decisions} decisions meanwhile: {times:?} until all have a change");
    // The goal of a second is for a machine without this load; `until` bounds the wait.
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_and_unreachable_redis() {
    let mut redis = Redis::start_with(&["--appendonly", "no", "--save", ""]);
    let (here, there) = (on_redis(&redis.url()).await, on_redis(&redis.url()).await);
    set(&here, "acme", 5_000).await;
    until("the other has it", async || peek(&there, "acme").await.0 == 5_000).await;
    redis.query::<()>(&["FLUSHALL"]);
    for state in [&here, &there] {
        until("it is gone", async || peek(state, "acme").await.0 == 10).await;
        let metrics = state.metrics.text();
        assert!(metrics.contains("\ntidegate_overrides 0\n"), "{metrics}");
        assert!(metrics.contains("\ntidegate_overrides_lost_total 1\n"), "{metrics}");
    }
    // A change before the next heartbeat hides no loss.
    set(&there, "acme", 5_000).await;
    set(&there, "other", 50).await;
    until("the other has them", async || peek(&here, "other").await.0 == 50).await;
    redis.query::<()>(&["FLUSHALL"]);
    set(&here, "new", 20).await;
    for state in [&here, &there] {
        until("they are gone", async || peek(state, "other").await.0 == 10).await;
        let metrics = state.metrics.text();
        assert!(metrics.contains("\ntidegate_overrides 1\n"), "{metrics}");
        assert!(metrics.contains("\ntidegate_overrides_lost_total 3\n"), "{metrics}");
    }
    set(&there, "acme", 300).await;
    until("it is back", async || peek(&here, "acme").await.0 == 300).await;

    redis.kill();
    for state in [&here, &there] {
        let change = state.overrides.set(request("acme", 9, "1h"), author()).await;
        let error = change.expect_err("Redis is down");
        let is_lost = matches!(error, OverrideError::Unanswered(_));
        let is_failed = matches!(error, OverrideError::Query(QueryError::Store(_)));
        assert!(is_lost || is_failed, "{error:?}");
        assert_eq!(is_lost, error.to_string().contains("may have been made nevertheless"));
        // The last known override goes on; an instance has its share of it.
        let found = state.active().limiter.overrides().find(
            "per-user",
            "acme",
            state.backend.clock().now(),
        );
        let Some(OverrideEffect::Quota(numbers)) = found.map(|it| it.effect) else {
            panic!("it is still known");
        };
        let policy = state.active().policies().get("per-user").expect("known").clone();
        assert_eq!(numbers.applied_to(policy.quota(), &policy).limit(), 300);
    }
    redis.restart();
    for state in [&here, &there] {
        until("a restart without data loses it", async || peek(state, "acme").await.0 == 10).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn override_on_redis_ends_on_all_instances_by_the_clock_of_redis() {
    let redis = Redis::start();
    let states = [on_redis(&redis.url()).await, on_redis(&redis.url()).await];
    let set = states[0].overrides.set(request("acme", 500, "2s"), author()).await.expect("set");
    let end = Timestamp::from_micros(set.until_ms.expect("an end") * 1_000);
    until("the other has it", async || peek(&states[1], "acme").await.0 == 500).await;
    for state in &states {
        // In force until the end, and not after it, however long a peek takes.
        let clock = state.backend.clock();
        loop {
            let before = clock.now();
            let (limit, _) = peek(state, "acme").await;
            let margin = Duration::from_secs(1);
            if limit == 10 {
                assert!(clock.now().saturating_add(margin) >= end, "it ended too early");
                break;
            }
            assert!(before <= end.saturating_add(margin), "in force a second after its end");
        }
    }
}

/// A Redis that forwards no change by a heartbeat.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_heartbeats_changes_are_read_now_and_then() {
    let redis = Redis::start();
    let text =
        format!("store: {{redis: '{}', timeout: 2s, heartbeat: off}}\n{POLICIES}", redis.url());
    let start = async || Arc::new(ServerState::start(config(&text)).await.expect("started"));
    let (here, there) = (start().await, start().await);
    set(&here, "acme", 500).await;
    tokio::spawn(Arc::clone(&there.overrides).follow());
    until("the other has it", async || peek(&there, "acme").await.0 == 500).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deny_cache_never_answers_with_an_old_limit() {
    let redis = Redis::start();
    let state = on_redis(&redis.url()).await;
    let acquire = async || {
        let active = state.active();
        let decided = active.limiter.acquire(Query::policy("per-user", "ann")).await;
        let decision = decided.expect("decided").binding().expect("a limit").decision();
        (decision.limit, decision.allowed, decision.source.as_str())
    };
    until("the limit is used up", async || !acquire().await.1).await;
    until("the cache denies", async || acquire().await.2 == "deny-cache").await;
    set(&state, "ann", 11).await;
    assert_eq!(acquire().await, (11, true, "store"), "one more than ten");
    assert_eq!(acquire().await, (11, false, "store"));
    until("the cache denies", async || acquire().await.2 == "deny-cache").await;
    set(&state, "ann", 5).await;
    assert_eq!(acquire().await, (5, false, "store"), "a lower limit is not that of the cache");
    state.overrides.remove("per-user", "ann", author()).await.expect("removed");
    let (limit, allowed, _) = acquire().await;
    assert_eq!((limit, allowed), (10, false), "all of it is used");
}
