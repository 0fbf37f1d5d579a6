//! The Redis store on servers that refuse keys of several slots, undeclared keys, or TIME in
//! scripts: it learns that from the first error, and loses no request.

mod support;

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use support::{
    ClusterView, LONG, Redis, Refusal, Restrictions, ScriptCache, StrictServer, TEST_TIMEOUT,
    assert_exact_under_concurrency, every_quota,
};
use tidegate::store::invalidation::{Cursor, Scope};
use tidegate::store::redis::{Builder, ClockSource, Restriction};
use tidegate::testing::{conformance, conformance_of_holds, conformance_of_long_logs};
use tidegate::{Action, Charge, Limiter, Quota, RedisStore, SharedStore, Source, Store};

const NO_TIME: &str = "ERR This Redis command is not allowed from script";

fn builder(server: &StrictServer) -> Builder {
    RedisStore::builder(&server.url()).timeout(TEST_TIMEOUT)
}

async fn limiter(builder: Builder) -> Limiter<RedisStore> {
    Limiter::new(builder.connect().await.expect("our own server answers"))
}

/// Sends requests of 40 keys at the same time, more than their limit admits, some of them with a
/// second charge of another slot. Asserts that the store decides all of them, exactly.
async fn assert_exact_in_a_storm(limiter: &Limiter<RedisStore>) {
    let quota = Quota::fixed_window(5, LONG).expect("valid");
    let shared = Quota::sliding_log(1_000, LONG).expect("valid");
    let tasks: Vec<_> = (0..400)
        .map(|number| {
            let (limiter, quota, shared) = (limiter.clone(), quota.clone(), shared.clone());
            tokio::spawn(async move {
                let key = format!("user-{}", number % 40);
                let charges = [Charge::new(&key, &quota), Charge::new("all", &shared)];
                let charges = if number % 4 == 0 { &charges[..] } else { &charges[..1] };
                let decisions = limiter.acquire_all(charges).await.expect("decided");
                assert!(decisions.iter().all(|decision| decision.source == Source::Store));
                let is_shared = decisions.is_allowed() && charges.len() > 1;
                (key, decisions.is_allowed(), is_shared)
            })
        })
        .collect();
    let (mut admitted, mut spent) = (HashMap::<String, u64>::new(), 0);
    for task in tasks {
        let (key, is_admitted, is_shared) = task.await.expect("no panic");
        *admitted.entry(key).or_default() += u64::from(is_admitted);
        spent += u64::from(is_shared);
    }
    assert_eq!(admitted.len(), 40);
    assert!(admitted.values().all(|admitted| *admitted == 5), "{admitted:?}");
    // A request that one of its charges denies spends nothing of the other.
    let decision = limiter.peek(&Charge::new("all", &shared)).await.expect("decided");
    assert_eq!(decision.remaining, 999 - spent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_address_in_front_of_shards_gets_one_call_per_slot() {
    let server = StrictServer::start(Restrictions::enterprise());
    let limiter = limiter(builder(&server)).await;
    assert_eq!(limiter.store().nodes()[0].restrictions, []);
    assert_exact_in_a_storm(&limiter).await;
    assert_eq!(limiter.store().nodes()[0].restrictions, [Restriction::SeveralSlots]);
    // Those that were in flight together.
    let refused = server.refusals(Refusal::CrossSlot);
    assert!((1..=4).contains(&refused), "{refused}");
    assert_exact_under_concurrency(&limiter).await;
    assert_eq!(server.refusals(Refusal::CrossSlot), refused, "it was learned");
    assert_eq!(limiter.store().circuits_opened(), 0);
}

#[tokio::test]
async fn charges_of_several_slots_are_all_or_nothing_in_front_of_shards() {
    let server = StrictServer::start(Restrictions::enterprise());
    let limiter = limiter(builder(&server)).await;
    for (number, quota) in every_quota(3, LONG).into_iter().enumerate() {
        let scarce = Quota::fixed_window(1, LONG).expect("valid");
        let (one, other, last) = (format!("a{number}"), format!("b{number}"), format!("c{number}"));
        let charges =
            [Charge::new(&one, &quota), Charge::new(&other, &scarce), Charge::new(&last, &quota)];
        let mut admitted = Vec::new();
        for _ in 0..3 {
            let outcome = limiter.acquire_all(&charges).await.expect("decided");
            admitted.push(outcome.is_allowed());
        }
        assert_eq!(admitted, [true, false, false]);
        for charge in [&charges[0], &charges[2]] {
            let left = limiter.peek(charge).await.expect("decided").remaining;
            assert_eq!(left, 1, "{}", quota.default_policy_name());
        }
        limiter.store().decide_all(Action::Reset, &charges).into_future().await.expect("reset");
        assert!(limiter.acquire_all(&charges).await.expect("decided").is_allowed());
    }
    assert_eq!(server.refusals(Refusal::CrossSlot), 1, "only the first");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn any_combination_of_restrictions_loses_no_request() {
    let texts = [None, Some("CROSSSLOT no"), Some("ERR keys must be in same slot")];
    for number in 0..24 {
        let restrictions = Restrictions {
            cross_slot: texts[number % 3],
            time_in_scripts: (number % 2 == 0).then_some(NO_TIME),
            undeclared_keys: (number % 4 < 2).then_some("ERR undeclared key "),
            cluster: if number < 12 {
                ClusterView::OneNode
            } else {
                ClusterView::Refused("ERR command is not allowed")
            },
            script_cache: ScriptCache::ForgetsPermille(100),
            max_arguments: 3_999,
            ..Restrictions::default()
        };
        let server = StrictServer::start(restrictions.clone());
        let limiter = limiter(builder(&server)).await;
        assert_exact_in_a_storm(&limiter).await;
        let node = limiter.store().nodes().remove(0);
        let is_estimated = node.clock == ClockSource::Estimated;
        assert_eq!(is_estimated, restrictions.time_in_scripts.is_some(), "{restrictions:?}");
        assert_eq!(node.clock_error.is_some(), is_estimated);
        assert_eq!(limiter.store().circuits_opened(), 0, "{restrictions:?}");
        server.redis().assert_every_key_expires();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restrictions_that_come_with_an_upgrade_are_learned() {
    let server = StrictServer::start(Restrictions::default());
    let limiter = limiter(builder(&server)).await;
    assert_exact_in_a_storm(&limiter).await;
    server.restrict(Restrictions { time_in_scripts: Some(NO_TIME), ..Restrictions::enterprise() });
    let () = server.redis().query(&["FLUSHALL"]);
    assert_exact_in_a_storm(&limiter).await;
    // After a reconnect they may be gone.
    server.restrict(Restrictions::default());
    let () = server.redis().query(&["FLUSHALL"]);
    let () = server.redis().query(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
    support::until("connected again", async || limiter.store().reconnects() > 0).await;
    assert_exact_in_a_storm(&limiter).await;
    let node = limiter.store().nodes().remove(0);
    assert_eq!((node.restrictions, node.clock), (Vec::new(), ClockSource::Server));
}

// ---- The estimated clock

#[tokio::test]
async fn decisions_conform_where_scripts_must_not_call_time() {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    for refusal in [
        NO_TIME,
        "ERR Unknown Redis command called from script",
        "ERR Write commands not allowed after non deterministic commands. Call \
         redis.replicate_commands() at the start of your script",
        "ERR unknown command 'TIME', called from script",
    ] {
        let restrictions =
            Restrictions { time_in_scripts: Some(refusal), ..Restrictions::default() };
        let server = StrictServer::start(restrictions);
        let mut driven = async |clock| {
            let prefix = format!("rate_limit:{}", NUMBER.fetch_add(1, Ordering::Relaxed));
            limiter(builder(&server).prefix(prefix).driven_by(clock)).await
        };
        conformance(support::seeds(20), &mut driven).await;
        conformance_of_long_logs(0..1, &mut driven).await;
        conformance_of_holds(0..10, &mut driven).await;
        assert!(server.refusals(Refusal::Time) > 0);
    }
}

#[tokio::test]
async fn decisions_with_an_estimated_clock_conform_to_the_model() {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let redis = Redis::start();
    let builder = || RedisStore::builder(&redis.url()).clock(ClockSource::Estimated);
    let mut driven = async |clock| {
        let prefix = format!("rate_limit:{}", NUMBER.fetch_add(1, Ordering::Relaxed));
        limiter(builder().timeout(TEST_TIMEOUT).prefix(prefix).driven_by(clock)).await
    };
    conformance(support::seeds(150), &mut driven).await;
    conformance_of_long_logs(0..5, &mut driven).await;
    let limiter = limiter(builder().timeout(TEST_TIMEOUT)).await;
    assert_exact_under_concurrency(&limiter).await;
    redis.assert_every_key_expires();
}

#[tokio::test]
async fn heartbeats_and_invalidations_need_no_time_in_scripts() {
    let server = StrictServer::start(Restrictions {
        time_in_scripts: Some(NO_TIME),
        ..Restrictions::default()
    });
    let store = builder(&server).connect().await.expect("our own server answers");
    assert_eq!(store.heartbeat("a").await.expect("sent"), ["a"]);
    assert_eq!(store.heartbeat("b").await.expect("sent"), ["a", "b"]);
    let since = Cursor::default();
    let polled = store.invalidations(&since).expect("polled").await.expect("answered");
    let quota = Quota::fixed_window(1, LONG).expect("valid");
    let charge = Charge::new("a", &quota);
    let _ = store.decide(Action::Reset, &charge).into_future().await.expect("reset");
    let polled = store.invalidations(&polled.cursor).expect("polled").await.expect("answered");
    assert!(matches!(&polled.scope, Scope::Counts(counts) if counts.len() == 1), "{polled:?}");
    assert_eq!(server.refusals(Refusal::Time), 1, "it was learned");
    server.redis().assert_every_key_expires();
}

/// Messages that are delayed on a path to a server.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Delayed {
    /// TIME: the server's time seems to be later than it is.
    Requests,
    /// The reply to TIME: it seems to be earlier.
    Replies,
}

/// Forwards connections to a server over a path with a delay. Returns its URL.
fn path_to(redis: &Redis, delayed: Delayed, delay: Duration) -> String {
    fn copy(mut from: TcpStream, mut to: TcpStream, delay: impl Fn(&[u8]) -> Duration) {
        let mut buffer = vec![0; 1 << 16];
        while let Ok(length @ 1..) = from.read(&mut buffer) {
            std::thread::sleep(delay(&buffer[..length]));
            if to.write_all(&buffer[..length]).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Write);
    }
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
    let url = format!("redis://{}", listener.local_addr().expect("bound"));
    let port = redis.port();
    std::thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            let server = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).expect("our own server");
            let clone = |stream: &TcpStream| {
                stream.set_nodelay(true).expect("a socket");
                stream.try_clone().expect("a socket")
            };
            let (from, to) = (clone(&client), clone(&server));
            let is_time = Arc::new(AtomicBool::new(false));
            let asked = Arc::clone(&is_time);
            let request_delay = move |bytes: &[u8]| {
                let is_time = bytes.windows(4).any(|word| word == b"TIME");
                asked.fetch_or(is_time, Ordering::Relaxed);
                if is_time && delayed == Delayed::Requests { delay } else { Duration::ZERO }
            };
            let reply_delay = move |_: &[u8]| {
                let is_time = is_time.swap(false, Ordering::Relaxed);
                if is_time && delayed == Delayed::Replies { delay } else { Duration::ZERO }
            };
            std::thread::spawn(move || copy(from, to, request_delay));
            std::thread::spawn(move || copy(server, client, reply_delay));
        }
    });
    url
}

/// The estimates of the two instances differ by 40 ms, and their calls take turns. If a count went
/// back by that, each window of 100 ms would admit its limit twice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn instances_whose_estimates_differ_never_exceed_the_limit() {
    const LIMIT: u64 = 8;
    const WINDOW: Duration = Duration::from_millis(100);
    let redis = Redis::start();
    let delay = Duration::from_millis(40);
    let mut instances = Vec::new();
    for delayed in [Delayed::Requests, Delayed::Replies] {
        let builder = RedisStore::builder(&path_to(&redis, delayed, delay));
        let builder = builder.timeout(TEST_TIMEOUT).clock(ClockSource::Estimated);
        instances.push(limiter(builder).await);
        let node = instances.last().expect("added").store().nodes().remove(0);
        let error = node.clock_error.expect("estimated");
        assert!(error >= delay / 2, "half a round trip at least: {error:?}");
    }
    for quota in every_quota(LIMIT, WINDOW) {
        let (started, admitted) = (Instant::now(), Arc::new(AtomicU64::new(0)));
        let tasks: Vec<_> = (0..16)
            .map(|number| {
                let (limiter, quota) = (instances[number % 2].clone(), quota.clone());
                let admitted = Arc::clone(&admitted);
                tokio::spawn(async move {
                    while started.elapsed() < 10 * WINDOW {
                        let charge = Charge::new("hot", &quota);
                        let decision = limiter.acquire(&charge).await.expect("decided");
                        admitted.fetch_add(u64::from(decision.allowed), Ordering::Relaxed);
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await.expect("no panic");
        }
        // The windows that were touched, one more for the burst of a bucket, and one for the
        // difference of the estimates.
        let windows = started.elapsed().as_micros() / WINDOW.as_micros() + 3;
        let admitted = admitted.load(Ordering::Relaxed);
        let max = LIMIT * u64::try_from(windows).expect("few");
        assert!(admitted <= max, "{}: {admitted} of {max}", quota.default_policy_name());
        assert!(admitted >= LIMIT, "{}: {admitted}", quota.default_policy_name());
    }
}

#[tokio::test]
async fn refund_finds_its_charge_although_estimates_differ() {
    let redis = Redis::start();
    let delay = Duration::from_millis(40);
    let mut instances = Vec::new();
    for delayed in [Delayed::Requests, Delayed::Replies] {
        let builder = RedisStore::builder(&path_to(&redis, delayed, delay));
        let builder = builder.timeout(TEST_TIMEOUT).clock(ClockSource::Estimated);
        instances.push(limiter(builder).await);
    }
    for (charging, refunding) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        for quota in every_quota(5, LONG) {
            let key = format!("{charging}-{refunding}");
            let charged_at = instances[charging].store().clock().now();
            let charge = Charge::new(&key, &quota).with_cost(3);
            assert_eq!(instances[charging].acquire(&charge).await.expect("decided").remaining, 2);
            let refund = charge.with_charged_at(charged_at);
            let decision = instances[refunding].refund(&refund).await.expect("decided");
            // A bucket counts what has drained since, which rounds a unit down.
            let is_refunded = decision.remaining >= 4;
            assert!(is_refunded, "{key} {}: {decision:?}", quota.default_policy_name());
        }
    }
}

#[tokio::test]
async fn estimated_clock_follows_a_server_whose_clock_is_set() {
    let (redis, clock) = support::redis_with_settable_clock();
    let builder = RedisStore::builder(&redis.url()).timeout(TEST_TIMEOUT);
    let limiter = limiter(builder.clock(ClockSource::Estimated)).await;
    let (mut ahead, mut number) = (0, 0);
    for quota in every_quota(100, LONG) {
        for step in [5, -5, -60, 7_200] {
            let charge = Charge::new("a", &quota);
            ahead += step;
            clock.set(ahead);
            let first = limiter.acquire(&charge).await.expect("decided").remaining;
            let second = limiter.acquire(&charge).await.expect("decided").remaining;
            assert_eq!(second, first - 1, "{} after {step}", quota.default_policy_name());
        }
        // A count of an hour that began two hours ago for the server is not deleted, so the limit
        // is admitted once by each estimate.
        for hourly in every_quota(9, Duration::from_secs(3_600)) {
            number += 1;
            let key = format!("hourly-{number}");
            let mut admitted = 0;
            for _ in 0..40 {
                let decision = limiter.acquire(&Charge::new(&key, &hourly)).await;
                admitted += u64::from(decision.expect("decided").allowed);
            }
            let name = hourly.default_policy_name();
            assert!((9..=18).contains(&admitted), "{name}: {admitted} of 9");
        }
        redis.assert_every_key_expires();
        let charge = Charge::new("a", &quota);
        let left = limiter.acquire(&charge).await.expect("decided").remaining;
        assert_eq!(left, 91, "{}: every unit still counts", quota.default_policy_name());
    }
}

// ---- Without heartbeats

/// Returns the number of commands that the server has run before this one.
fn commands(redis: &Redis) -> u64 {
    let info: String = redis.query(&["INFO", "stats"]);
    let total = info.lines().find_map(|line| line.strip_prefix("total_commands_processed:"));
    total.and_then(|total| total.trim().parse().ok()).expect("in INFO")
}

/// Makes a decision, waits for longer than all intervals and than an estimate is good for, and
/// asserts that nothing was sent until the next decision.
async fn assert_idle_store_sends_nothing(cluster: ClusterView, clock: ClockSource) {
    let quota = Quota::fixed_window(9, LONG).expect("valid");
    let server = StrictServer::start(Restrictions { cluster, ..Restrictions::default() });
    let builder = builder(&server).heartbeat(false).clock(clock);
    let store = builder.connect().await.expect("our own server answers");
    let charge = Charge::new("a", &quota);
    let acquire = async || store.decide(Action::Acquire, &charge).into_future().await;
    assert_eq!(acquire().await.expect("decided").remaining, 8);
    assert_eq!(store.heartbeat("a").await.expect("the only one"), ["a"]);
    assert!(store.invalidations(&Cursor::default()).is_none());
    // The next check after a call, with an estimated clock.
    tokio::time::sleep(Duration::from_secs(2)).await;
    // The client of the test introduces itself to newer servers.
    let before = commands(server.redis());
    let own = commands(server.redis()) - before;
    tokio::time::sleep(Duration::from_secs(11)).await;
    assert_eq!(commands(server.redis()) - before, 2 * own, "only those of the test");
    let times = server.redis().calls_of("time");
    assert_eq!(acquire().await.expect("decided").remaining, 7);
    let is_estimated = clock == ClockSource::Estimated;
    // In the script, or as a command; and the check of a connection that is in use again.
    let calls = server.redis().calls_of("time") - times;
    assert!((1..=2).contains(&calls), "{calls}");
    assert_eq!(store.nodes()[0].clock_error.is_some(), is_estimated);
}

#[tokio::test]
async fn idle_store_without_heartbeats_sends_nothing() {
    tokio::join!(
        assert_idle_store_sends_nothing(ClusterView::Real, ClockSource::Server),
        assert_idle_store_sends_nothing(ClusterView::Real, ClockSource::Estimated),
        assert_idle_store_sends_nothing(ClusterView::OneNode, ClockSource::Server),
    );
}

/// The proxy notices the lost connection to its server, and closes ours, only with the next command.
#[tokio::test]
async fn connection_that_breaks_without_heartbeats_fails_one_decision() {
    let server = StrictServer::start(Restrictions::default());
    let builder = builder(&server).heartbeat(false);
    let store = builder.connect().await.expect("our own server answers");
    let quota = Quota::fixed_window(9, LONG).expect("valid");
    let charge = Charge::new("a", &quota);
    let acquire = async || store.decide(Action::Acquire, &charge).into_future().await;
    let _: u64 = server.redis().query(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
    let _ = acquire().await.expect_err("the connection is lost");
    support::until("connected again", async || store.reconnects() > 0).await;
    assert_eq!(acquire().await.expect("decided").remaining, 8);
}
