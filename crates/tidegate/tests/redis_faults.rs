//! The Redis store during faults: flushed scripts, hanging servers, connections that drop
//! everything.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use support::{LONG, Redis, TEST_TIMEOUT, every_quota, free_port, until};
use tidegate::{Action, Charge, Error, Limiter, Quota, RedisStore, SharedStore, Store, StoreError};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

async fn limiter_with(redis: &Redis, timeout: Duration) -> Limiter<RedisStore> {
    let store = RedisStore::builder(&redis.url()).timeout(timeout).connect().await;
    Limiter::new(store.expect("our own server answers"))
}

/// Checks whether the only node can decide.
async fn probe(store: &RedisStore) -> Result<(), StoreError> {
    store.probe_node(&store.nodes()[0].address).await
}

// ---- Flushed scripts

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_calls_load_a_missing_script_once() {
    let redis = Redis::start();
    let limiter = limiter_with(&redis, TEST_TIMEOUT).await;
    let quota = Quota::fixed_window(1_000_000, LONG).expect("valid");
    for round in 1..=3 {
        redis.query::<()>(&["SCRIPT", "FLUSH"]);
        let tasks: Vec<_> = (0..1_000)
            .map(|_| {
                let (limiter, quota) = (limiter.clone(), quota.clone());
                tokio::spawn(async move {
                    limiter.acquire(&Charge::new("u", &quota)).await.expect("decided").allowed
                })
            })
            .collect();
        for task in tasks {
            assert!(task.await.expect("no panic"));
        }
        assert_eq!(limiter.store().script_loads(), round);
        assert_eq!(redis.calls_of("script|load"), round);
        let left = limiter.peek(&Charge::new("u", &quota)).await.expect("decided").remaining + 1;
        assert_eq!(left, 1_000_000 - 1_000 * round);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn repeated_script_flushes_cause_no_error() {
    let redis = Arc::new(Redis::start());
    let limiter = limiter_with(&redis, Duration::from_secs(2)).await;
    let stop = Arc::new(AtomicBool::new(false));
    let mut tasks = Vec::new();
    for task in 0..8 {
        let (limiter, stop) = (limiter.clone(), Arc::clone(&stop));
        tasks.push(tokio::spawn(async move {
            let (quotas, name) = (every_quota(100_000, LONG), format!("user-{task}"));
            let mut count = 0_u64;
            while !stop.load(Ordering::Relaxed) {
                for quota in &quotas {
                    let decision =
                        limiter.acquire(&Charge::new(&name, quota)).await.expect("no error");
                    assert_eq!(decision.remaining, 100_000 - count - 1);
                }
                count += 1;
            }
            count
        }));
    }
    for _ in 0..20 {
        redis.query::<()>(&["SCRIPT", "FLUSH"]);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    stop.store(true, Ordering::Relaxed);
    for task in tasks {
        assert!(task.await.expect("no panic") > 0);
    }
    // After a flush between a load and its call, the text is sent for a while instead of loads.
    assert!(limiter.store().script_loads() >= 1, "{}", limiter.store().script_loads());
}

/// Proxy in front of two servers that sends SCRIPT to the first and all other commands to the
/// second, as some managed services and cluster proxies do.
async fn splitting_proxy(scripts: u16, others: u16) -> String {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a free port");
    let url = format!("redis://{}", listener.local_addr().expect("bound"));
    tokio::spawn(async move {
        while let Ok((near, _)) = listener.accept().await {
            tokio::spawn(async move {
                let connect = async |port| {
                    let server = TcpStream::connect(("127.0.0.1", port)).await;
                    tokio::io::BufReader::new(server.expect("our own server"))
                };
                let (mut scripts, mut others) = (connect(scripts).await, connect(others).await);
                let mut near = tokio::io::BufReader::new(near);
                while let Some(command) = read_value(&mut near).await {
                    let name = command.windows(6).take(24).any(|part| part == b"SCRIPT");
                    let server = if name { &mut scripts } else { &mut others };
                    server.write_all(&command).await.expect("our own server");
                    let reply = read_value(server).await.expect("a reply");
                    if near.write_all(&reply).await.is_err() {
                        break;
                    }
                }
            });
        }
    });
    url
}

/// Reads the bytes of one command or reply. Returns `None` at the end of the stream.
async fn read_value(from: &mut tokio::io::BufReader<TcpStream>) -> Option<Vec<u8>> {
    let (mut bytes, mut values) = (Vec::new(), 1);
    while values > 0 {
        let start = bytes.len();
        if tokio::io::AsyncBufReadExt::read_until(from, b'\n', &mut bytes).await.ok()? == 0 {
            return None;
        }
        let line = std::str::from_utf8(&bytes[start..]).expect("a line").trim_end();
        let count = || line[1..].parse::<i64>().expect("a number");
        values -= 1;
        match line.as_bytes()[0] {
            b'*' => values += count().max(0),
            b'$' if count() >= 0 => {
                let mut text = vec![0; usize::try_from(count()).expect("positive") + 2];
                from.read_exact(&mut text).await.ok()?;
                bytes.extend(text);
            }
            _ => {}
        }
    }
    Some(bytes)
}

/// After one load that does not help, the text of each script is sent once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_proxy_that_loads_scripts_on_another_server_gets_their_text() {
    let (scripts, others) = (Redis::start(), Redis::start());
    let url = splitting_proxy(scripts.port(), others.port()).await;
    let store = RedisStore::builder(&url).timeout(TEST_TIMEOUT).connect().await;
    let limiter = Limiter::new(store.expect("the proxy answers"));
    let quotas = [Quota::fixed_window(1_000, LONG), Quota::token_bucket(1_000, LONG)];
    for quota in quotas.map(|quota| quota.expect("valid")) {
        for _ in 0..20 {
            let tasks: Vec<_> = (0..10)
                .map(|_| {
                    let (limiter, quota) = (limiter.clone(), quota.clone());
                    tokio::spawn(async move { limiter.acquire(&Charge::new("u", &quota)).await })
                })
                .collect();
            for task in tasks {
                assert!(task.await.expect("no panic").expect("decided").allowed);
            }
        }
        let left = limiter.peek(&Charge::new("u", &quota)).await.expect("decided").remaining + 1;
        assert_eq!(left, 800, "each request was charged once");
    }
    assert_eq!(scripts.calls_of("script|load"), 1, "no second load is tried");
    let texts = others.calls_of("eval");
    assert!((1..=2).contains(&texts), "{texts} texts of one script, two calls in flight");
    // A user without EVAL gets a clear error, and causes no further loads.
    others.query::<()>(&["SCRIPT", "FLUSH"]);
    others.query::<()>(&["ACL", "SETUSER", "default", "-eval"]);
    let quota = Quota::sliding_log(10, LONG).expect("valid");
    for _ in 0..20 {
        let error = limiter.acquire(&Charge::new("u", &quota)).await.expect_err("no script");
        let error = error.to_string();
        assert!(error.contains("NOSCRIPT") && error.contains("+eval"), "{error}");
    }
    assert_eq!(scripts.calls_of("script|load"), 1);
}

// ---- Late calls

/// Calls wait in the buffers of a stopped server. When it continues, their deadlines have passed.
#[tokio::test]
async fn a_call_after_its_deadline_does_nothing() {
    let redis = Redis::start();
    let observer = redis.limiter().await;
    let timeout = Duration::from_millis(200);
    for quota in every_quota(100, LONG) {
        let limiter = limiter_with(&redis, timeout).await;
        let charge = Charge::new("u", &quota);
        let _ = limiter.acquire(&charge.with_cost(10)).await.expect("decided");
        let before = redis.calls_of("evalsha");
        redis.signal("STOP");
        for action in [Action::Acquire, Action::Refund, Action::Reset] {
            let start = Instant::now();
            let late = limiter.store().decide(action, &charge).await;
            assert_eq!(late, Err(StoreError::Timeout(timeout).answer_lost()), "{action:?}");
            assert!(
                start.elapsed() < timeout + Duration::from_millis(100),
                "{:?}",
                start.elapsed()
            );
        }
        redis.signal("CONT");
        until("the server has run what waited", async || redis.calls_of("evalsha") >= before + 3)
            .await;
        let left = observer.peek(&charge).await.expect("decided").remaining + 1;
        assert_eq!(left, 90, "{}", quota.default_policy_name());
    }
}

/// The server's clock is set forward and back between calls.
#[tokio::test]
async fn a_clock_change_causes_no_error_and_no_late_call_is_charged() {
    let (redis, clock) = support::redis_with_settable_clock();
    let timeout = Duration::from_millis(400);
    let limiter = limiter_with(&redis, timeout).await;
    for seconds in [3_600, -3_600, 86_400, 1, -1, 0, -86_400, 5, -5] {
        let quota = Quota::sliding_log(100, LONG).expect("valid");
        let name = format!("after {seconds}");
        let charge = Charge::new(&name, &quota);
        let _ = limiter.acquire(&charge).await.expect("decided");
        clock.set(seconds);
        let time: Vec<i64> = redis.query(&["TIME"]);
        let ours = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .expect("after 1970")
            .as_secs();
        assert!((time[0] - seconds - ours.cast_signed()).abs() <= 1, "the server's clock is set");
        for count in 2..=4 {
            let decision = limiter.acquire(&charge).await.expect("decided by any clock");
            assert_eq!(decision.remaining, 100 - count, "{name}");
        }
        let before = redis.calls_of("evalsha");
        redis.signal("STOP");
        assert_eq!(
            limiter.acquire(&charge).await,
            Err(Error::Store(StoreError::Timeout(timeout).answer_lost())),
            "{name}"
        );
        redis.signal("CONT");
        until("the server has run what waited", async || redis.calls_of("evalsha") > before).await;
        until("connected", async || limiter.peek(&charge).await.is_ok()).await;
        assert_eq!(limiter.peek(&charge).await.expect("decided").remaining, 95, "{name}");
    }
}

// ---- Hanging servers and connections

/// Proxy between the store and the server that can silently drop everything, like a dead route.
struct BlackholeProxy {
    port: u16,
    drops_all: Arc<AtomicBool>,
}

impl BlackholeProxy {
    async fn to(port: u16) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a free port");
        let proxy =
            Self { port: listener.local_addr().expect("bound").port(), drops_all: Arc::default() };
        let drops_all = Arc::clone(&proxy.drops_all);
        tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                // A connection that has dropped data stays dead; later connections work.
                let far = TcpStream::connect(("127.0.0.1", port)).await.expect("our own server");
                let ((near_in, near_out), (far_in, far_out)) =
                    (near.into_split(), far.into_split());
                let dead = Arc::new(AtomicBool::new(false));
                let pass = |mut from: tokio::net::tcp::OwnedReadHalf,
                            mut to: tokio::net::tcp::OwnedWriteHalf| {
                    let (drops_all, dead) = (Arc::clone(&drops_all), Arc::clone(&dead));
                    tokio::spawn(async move {
                        let mut buffer = [0; 4096];
                        while let Ok(count @ 1..) = from.read(&mut buffer).await {
                            if drops_all.load(Ordering::Relaxed) {
                                dead.store(true, Ordering::Relaxed);
                            }
                            if !dead.load(Ordering::Relaxed)
                                && to.write_all(&buffer[..count]).await.is_err()
                            {
                                break;
                            }
                        }
                    })
                };
                pass(near_in, far_out);
                pass(far_in, near_out);
            }
        });
        proxy
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_connection_is_replaced_within_two_seconds() {
    let redis = Redis::start();
    let proxy = BlackholeProxy::to(redis.port()).await;
    let url = format!("redis://127.0.0.1:{}", proxy.port);
    let limiter = Limiter::new(RedisStore::connect(&url).await.expect("connected"));
    let quota = Quota::fixed_window(1_000_000, LONG).expect("valid");
    let charge = Charge::new("u", &quota);
    let _ = limiter.acquire(&charge).await.expect("decided");
    // The proxy drops data for a moment, so this connection is dead.
    proxy.drops_all.store(true, Ordering::Relaxed);
    let start = Instant::now();
    limiter.acquire(&charge).await.expect_err("dropped");
    assert!(start.elapsed() < Duration::from_millis(250), "{:?}", start.elapsed());
    proxy.drops_all.store(false, Ordering::Relaxed);
    until("a new connection", async || limiter.acquire(&charge).await.is_ok()).await;
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    assert_eq!(limiter.store().reconnects(), 1);

    // An idle connection is checked, too.
    proxy.drops_all.store(true, Ordering::Relaxed);
    until("the loss is detected", async || !limiter.store().nodes()[0].connected).await;
    proxy.drops_all.store(false, Ordering::Relaxed);
    until("reconnected", async || limiter.store().nodes()[0].connected).await;
    let _ = limiter.acquire(&charge).await.expect("decided");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_to_a_server_that_is_down_fail_at_once_with_the_reason() {
    let mut redis = Redis::start();
    let limiter = limiter_with(&redis, Duration::from_millis(100)).await;
    let quota = Quota::fixed_window(1_000_000, LONG).expect("valid");
    let charge = Charge::new("u", &quota);
    let _ = limiter.acquire(&charge).await.expect("decided");
    redis.kill();
    until("the loss is detected", async || !limiter.store().nodes()[0].connected).await;
    let mut fast_failures = 0;
    until("calls fail at once", async || {
        let start = Instant::now();
        let error = limiter.acquire(&charge).await.expect_err("no server");
        assert!(start.elapsed() < Duration::from_millis(200), "{:?}", start.elapsed());
        let Error::Store(reason) = &error else { panic!("{error}") };
        assert!(matches!(reason.reason(), StoreError::Unreachable(_)), "{error}");
        let is_fast = start.elapsed() < Duration::from_millis(20);
        fast_failures += u32::from(error.to_string().contains("refused") && is_fast);
        fast_failures >= 20
    })
    .await;
    assert!(probe(limiter.store()).await.is_err());
    assert!(limiter.store().heartbeat("a").await.is_err());
    redis.restart();
    until("reconnected", async || limiter.acquire(&charge).await.is_ok()).await;
    probe(limiter.store()).await.expect("can decide");
}

/// The store reconnects at once when the server closes the connection, and calls wait for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_brief_interruption_causes_no_error() {
    let redis = Redis::start();
    let limiter = limiter_with(&redis, Duration::from_secs(2)).await;
    let quota = Quota::fixed_window(1_000_000, LONG).expect("valid");
    let charge = Charge::new("u", &quota);
    // A connection is stable after a second.
    tokio::time::sleep(Duration::from_millis(1_100)).await;
    redis.query::<i64>(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
    until("the loss is detected", async || {
        limiter.store().reconnects() == 1 || !limiter.store().nodes()[0].connected
    })
    .await;
    let _ = limiter.acquire(&charge).await.expect("on the new connection");
}

/// A service starts while its Redis is down.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_connects_in_the_background_once_redis_is_up() {
    let port = free_port();
    let store = RedisStore::builder(&format!("redis://127.0.0.1:{port}"))
        .connect_in_background()
        .expect("valid");
    let limiter = Limiter::new(store);
    let quota = Quota::fixed_window(10, LONG).expect("valid");
    let error = limiter.acquire(&Charge::new("u", &quota)).await.expect_err("no server yet");
    assert!(matches!(error, Error::Store(StoreError::Unreachable(_))), "{error}");
    let _redis = Redis::try_start(std::path::Path::new("redis-server"), port, &[])
        .expect("the port is free");
    until("connected", async || limiter.acquire(&Charge::new("u", &quota)).await.is_ok()).await;
    let seeds = ["http://127.0.0.1"];
    assert!(matches!(
        RedisStore::cluster(seeds).connect_in_background(),
        Err(StoreError::Misconfigured(_))
    ));
}

#[tokio::test]
async fn a_dropped_store_closes_its_connections_and_ends_its_tasks() {
    let redis = Redis::start();
    let clients = || {
        let info: String = redis.query(&["INFO", "clients"]);
        let line = info.lines().find_map(|line| line.strip_prefix("connected_clients:"));
        line.and_then(|count| count.trim().parse::<u64>().ok()).expect("a count")
    };
    let before = clients();
    let store = RedisStore::connect(&redis.url()).await.expect("connected");
    assert_eq!(clients(), before + 1);
    drop(store);
    until("the connection is closed", async || clients() == before).await;
    assert_eq!(tokio::runtime::Handle::current().metrics().num_alive_tasks(), 0);
}

// ---- Probes and heartbeats

#[tokio::test]
async fn a_probe_fails_whenever_a_decision_would() {
    let redis = Redis::start();
    let limiter = limiter_with(&redis, TEST_TIMEOUT).await;
    let store = limiter.store();
    probe(store).await.expect("can decide");
    redis.assert_every_key_expires();
    let ours: Vec<String> = redis.query(&["KEYS", "*"]);
    assert_eq!(ours, ["rate_limit:{%probe-0}"]);
    redis.query::<()>(&["CONFIG", "SET", "maxmemory", "1"]);
    let full = probe(store).await.expect_err("no memory").to_string();
    assert!(full.contains("OOM"), "{full}");
    redis.query::<()>(&["CONFIG", "SET", "maxmemory", "0"]);
    let nowhere = free_port().to_string();
    redis.query::<()>(&["REPLICAOF", "127.0.0.1", &nowhere]);
    let replica = probe(store).await.expect_err("a replica").to_string();
    assert!(replica.contains("READONLY") || replica.contains("MASTERDOWN"), "{replica}");
    redis.query::<()>(&["REPLICAOF", "NO", "ONE"]);
    until("it is a primary again", async || probe(store).await.is_ok()).await;
}

#[tokio::test]
async fn an_instance_without_a_heartbeat_for_five_seconds_is_removed() {
    let redis = Redis::start();
    let store =
        RedisStore::builder(&redis.url()).timeout(TEST_TIMEOUT).connect().await.expect("connected");
    store.heartbeat("a").await.expect("announced");
    assert_eq!(store.heartbeat("b").await, Ok(vec!["a".to_owned(), "b".to_owned()]));
    redis.assert_every_key_expires();
    // As if the last heartbeat of a was six seconds ago, and that of c was before the clock was set
    // back.
    let time: Vec<i64> = redis.query(&["TIME"]);
    let at = |seconds: i64| ((time[0] + seconds) * 1_000_000).to_string();
    redis.query::<i64>(&["ZADD", "rate_limit:{%alive}", &at(-6), "a", &at(3_600), "c"]);
    assert_eq!(store.heartbeat("b").await, Ok(vec!["b".to_owned()]));
}

/// While no instance joins or leaves, a heartbeat reads no list, whatever the size of the fleet.
#[tokio::test]
async fn heartbeats_read_the_list_only_when_it_has_changed() {
    let redis = Redis::start();
    let connect = async || {
        RedisStore::builder(&redis.url()).timeout(TEST_TIMEOUT).connect().await.expect("connected")
    };
    let (store, other) = (connect().await, connect().await);
    let calls = |command: &str| {
        let stats: String = redis.query(&["INFO", "commandstats"]);
        let line =
            stats.lines().find_map(|line| line.strip_prefix(&format!("cmdstat_{command}:calls=")));
        line.map_or(0, |line| {
            line.split(',').next().and_then(|calls| calls.parse().ok()).expect("a number")
        })
    };
    let names: Vec<String> = (0..50).map(|number| format!("instance-{number:02}")).collect();
    for name in &names {
        store.heartbeat(name).await.expect("announced");
    }
    redis.query::<()>(&["CONFIG", "RESETSTAT"]);
    for name in names.iter().cycle().take(200) {
        assert_eq!(store.heartbeat(name).await.as_ref(), Ok(&names));
    }
    assert_eq!((calls("evalsha"), calls("zrange")), (200, 0));
    let commands = ["time", "zremrangebyscore", "zcard", "zadd", "get", "set", "pexpireat"];
    assert!(commands.map(calls).iter().sum::<u64>() <= 200 * 10, "a constant number of commands");

    // Another instance joins, and each of the two reads the list once.
    let mut joined = names.clone();
    joined.push("joined".to_owned());
    for _ in 0..10 {
        assert_eq!(other.heartbeat("joined").await.as_ref(), Ok(&joined));
        assert_eq!(store.heartbeat(&names[0]).await.as_ref(), Ok(&joined));
    }
    assert_eq!(calls("zrange"), 2);

    // A flushed Redis starts with another version, even if it has as many instances as before.
    redis.query::<()>(&["FLUSHALL"]);
    assert_eq!(other.heartbeat("joined").await, Ok(vec!["joined".to_owned()]));
    for name in &names {
        other.heartbeat(name).await.expect("announced");
    }
    redis.query::<i64>(&["ZREM", "rate_limit:{%alive}", &names[1]]);
    other.heartbeat("replacement").await.expect("announced");
    let list = store.heartbeat(&names[0]).await.expect("announced");
    assert!(
        list.len() == 51 && list.contains(&"replacement".to_owned()) && !list.contains(&names[1]),
        "{list:?}"
    );

    // An instance of an earlier version adds itself and does not change the version of the list.
    let time: Vec<i64> = redis.query(&["TIME"]);
    redis.query::<i64>(&[
        "ZADD",
        "rate_limit:{%alive}",
        &(time[0] * 1_000_000).to_string(),
        "earlier version",
    ]);
    let list = store.heartbeat(&names[0]).await.expect("announced");
    assert!(list.contains(&"earlier version".to_owned()), "{list:?}");
    redis.assert_every_key_expires();
}
