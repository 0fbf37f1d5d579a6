//! The Redis store with TLS, with minimal permissions, and on other servers (Redis 6.2, Valkey 9).

mod support;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use support::{
    Authority, Cluster, LONG, PERMISSIONS, Redis, TEST_TIMEOUT, every_quota, free_port, packed,
    redis_6, valkey_9,
};
use tidegate::store::redis::Tls;
use tidegate::testing::{conformance, conformance_of_holds, conformance_of_long_logs};
use tidegate::{
    Algorithm, Charge, Encoding, Error, Limiter, ManualClock, Quota, RedisStore, SharedStore,
    StoreError,
};

const MINUTE: Duration = Duration::from_secs(60);

/// Uses all features of a store on this server.
async fn assert_all_works(redis: &Redis, url: &str, seeds: u64) {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let builder = |prefix: &str| RedisStore::builder(url).timeout(TEST_TIMEOUT).prefix(prefix);
    let mut driven = async |clock| {
        let prefix = format!("rate_limit:{}", NUMBER.fetch_add(1, Ordering::Relaxed));
        Limiter::new(
            builder(&prefix).driven_by(clock).connect().await.expect("our own server answers"),
        )
    };
    conformance(0..seeds, &mut driven).await;
    conformance_of_long_logs(0..seeds.div_ceil(30), &mut driven).await;
    conformance_of_holds(0..seeds.div_ceil(2), &mut driven).await;
    // A full chunk of a packed log leaves the window.
    let clock = ManualClock::new();
    let (limiter, quota) = (driven(clock.clone()).await, packed(4_000, MINUTE));
    for _ in 0..2 {
        for _ in 0..1_200 {
            assert!(limiter.acquire(&Charge::new("long", &quota)).await.expect("decided").allowed);
        }
        clock.advance(MINUTE / 2);
    }
    let decision = limiter.acquire(&Charge::new("long", &quota)).await.expect("decided");
    assert_eq!(decision.remaining, 4_000 - 1_200 - 1);
    let store = builder("rate_limit").connect().await.expect("our own server answers");
    let address = store.nodes()[0].address.clone();
    store.probe_node(&address).await.expect("can decide");
    assert_eq!(store.heartbeat("me").await, Ok(vec!["me".to_owned()]));
    let limiter = Limiter::new(store);
    support::assert_exact_under_concurrency(&limiter).await;
    let long = packed(2_000, LONG);
    for taken in 1..=1_200 {
        let decision = limiter.acquire(&Charge::new("sequential", &long)).await.expect("decided");
        assert_eq!(decision.remaining, 2_000 - taken);
    }
    redis.assert_every_key_expires();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redis_6_2_is_supported() {
    let redis = Redis::start_program(&redis_6(), &[]);
    let version: String = redis.query(&["INFO", "server"]);
    assert!(version.contains("redis_version:6.2"), "{version}");
    assert_all_works(&redis, &redis.url(), support::seeds(150).end).await;
    assert_flushed_scripts_cause_no_error(&redis).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn valkey_9_is_supported() {
    let redis = Redis::start_program(&valkey_9(), &[]);
    let version: String = redis.query(&["INFO", "server"]);
    assert!(version.contains("valkey_version:9."), "{version}");
    assert_all_works(&redis, &redis.url(), support::seeds(150).end).await;
    assert_flushed_scripts_cause_no_error(&redis).await;
}

async fn assert_flushed_scripts_cause_no_error(redis: &Redis) {
    let limiter = redis.limiter().await;
    let quota = Quota::fixed_window(1_000, LONG).expect("valid");
    for _ in 0..5 {
        redis.query::<()>(&["SCRIPT", "FLUSH"]);
        let _ = limiter.acquire(&Charge::new("scripts", &quota)).await.expect("decided");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clusters_of_redis_6_2_and_valkey_9_are_supported() {
    for program in [redis_6(), valkey_9()] {
        let cluster = Cluster::start_program(&program);
        let store = RedisStore::cluster(cluster.urls())
            .timeout(TEST_TIMEOUT)
            .connect()
            .await
            .expect("connected");
        assert_eq!(store.nodes().len(), 3);
        let limiter = Limiter::new(store);
        for quota in every_quota(10, LONG) {
            let names: Vec<String> = (0..12).map(|number| format!("user-{number}")).collect();
            let charges: Vec<Charge<'_>> =
                names.iter().map(|name| Charge::new(name, &quota)).collect();
            let decisions = limiter.acquire_all(&charges).await.expect("decided");
            assert!(
                decisions.iter().all(|decision| decision.allowed && decision.remaining == 9),
                "{decisions:?}"
            );
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_documented_permissions_are_sufficient_and_necessary() {
    let redis = Redis::start();
    redis.grant(&PERMISSIONS);
    redis.query::<()>(&["CONFIG", "RESETSTAT"]);
    let url = redis.url_of_user();
    assert_all_works(&redis, &url, support::seeds(100).end).await;
    let stats: String = redis.query(&["INFO", "commandstats"]);
    let name = |line: &str| Some(line.strip_prefix("cmdstat_")?.split_once(':')?.0.to_owned());
    let rejected = |line: &&str| !line.contains("rejected_calls=0");
    assert_eq!(stats.lines().filter(|line| line.starts_with("cmdstat_")).find(rejected), None);
    let used: BTreeSet<String> = stats.lines().filter_map(name).collect();
    // Commands of the test itself.
    let test_commands = [
        "auth",
        "config|resetstat",
        "info",
        "keys",
        "pttl",
        "client|setinfo",
        "select",
        "acl|setuser",
    ];
    let unused: Vec<&&str> =
        PERMISSIONS.iter().filter(|command| !used.contains(**command)).collect();
    assert!(unused.is_empty(), "granted and not used: {unused:?}");
    let ungranted: Vec<&String> = used
        .iter()
        .filter(|name| {
            !PERMISSIONS.contains(&name.as_str()) && !test_commands.contains(&name.as_str())
        })
        .collect();
    assert!(ungranted.is_empty(), "used and not granted: {ungranted:?}");
}

fn named(error: &Error) -> &str {
    match error {
        Error::Store(StoreError::NotPermitted(reason)) => reason,
        Error::Store(StoreError::Open(error)) => match &**error {
            StoreError::NotPermitted(reason) => reason,
            error => panic!("{error}"),
        },
        error => panic!("{error}"),
    }
}

/// Each server has its own words for it, and most do not name the command.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_permission_is_a_failure_of_the_store_until_it_is_granted() {
    for program in [PathBuf::from("redis-server"), redis_6(), valkey_9()] {
        let redis = Redis::start_program(&program, &[]);
        redis.grant(&PERMISSIONS);
        let store = RedisStore::builder(&redis.url_of_user()).timeout(TEST_TIMEOUT);
        let limiter = Limiter::new(store.connect().await.expect("connected"));
        for quota in every_quota(10, LONG) {
            let needed: &[&str] = match (quota.algorithm(), quota.encoding()) {
                (Algorithm::SlidingLog, Encoding::SortedSet) => &["zrange", "zadd", "pexpireat"],
                (Algorithm::SlidingCounter, Encoding::Hash) => &["hmget", "hset", "pexpireat"],
                _ => &["get", "set"],
            };
            for command in needed {
                let charge = Charge::new(command, &quota);
                redis.query::<()>(&["ACL", "SETUSER", "tidegate", &format!("-{command}")]);
                let error = match limiter.acquire(&charge).await {
                    Err(error) => error,
                    decided => panic!("{program:?}, {quota:?} without {command}: {decided:?}"),
                };
                let remedy = format!("ACL SETUSER tidegate +{command}");
                assert!(named(&error).contains(&remedy), "{program:?}: {error}");
                assert!(!error.to_string().contains("hunter2"), "{error}");
                let health = &limiter.store().nodes()[0];
                assert!(health.circuit.open && health.circuit.times_opened > 0, "{health:?}");
                // Requests that do not need the permission fail, too: one state for all lights.
                let window = Quota::fixed_window(10, LONG).expect("valid");
                let other = limiter.peek(&Charge::new("other", &window)).await;
                assert!(named(&other.expect_err("open")).contains(&remedy));
                redis.query::<()>(&["ACL", "SETUSER", "tidegate", &format!("+{command}")]);
                support::until("the circuit closes", async || {
                    !limiter.store().nodes()[0].circuit.open
                })
                .await;
                redis.assert_every_key_expires();
                assert!(limiter.acquire(&charge).await.expect("decided").allowed);
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renamed_command_and_forbidden_keys_are_named() {
    let quota = Quota::sliding_log(10, LONG).expect("valid");
    for program in [PathBuf::from("redis-server"), redis_6(), valkey_9()] {
        let redis = Redis::start_program(&program, &["--rename-command", "ZADD", ""]);
        let limiter = redis.limiter().await;
        let error = limiter.acquire(&Charge::new("u", &quota)).await.expect_err("no ZADD");
        assert!(named(&error).contains("the server lacks ZADD"), "{error}");
        redis.grant(&PERMISSIONS);
        let store = RedisStore::builder(&redis.url_of_user()).prefix("api").timeout(TEST_TIMEOUT);
        let limiter = Limiter::new(store.connect().await.expect("connected"));
        let error = limiter.acquire(&Charge::new("u", &quota)).await.expect_err("no access");
        assert!(named(&error).contains("ACL SETUSER tidegate ~api:*"), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tls_verifies_both_the_server_and_the_client() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (authority, untrusted) = (Authority::new(), Authority::new());
    let (certificate, key) = authority.sign("127.0.0.1").write(folder.path());
    let ca = folder.path().join("ca.pem");
    std::fs::write(&ca, authority.pem()).expect("written");
    let text = |path: &std::path::Path| path.to_str().expect("UTF-8").to_owned();
    let (tls_port, certificate, key, ca) = (free_port(), text(&certificate), text(&key), text(&ca));
    let redis = Redis::start_with(&[
        "--tls-port",
        &tls_port.to_string(),
        "--tls-cert-file",
        &certificate,
        "--tls-key-file",
        &key,
        "--tls-ca-cert-file",
        &ca,
        "--tls-auth-clients",
        "yes",
    ]);
    redis.query::<()>(&["ACL", "SETUSER", "tidegate", "on", ">hunter2", "~*", "+@all"]);
    let url = format!("rediss://tidegate:hunter2@127.0.0.1:{tls_port}");
    let client = authority.sign("client");
    let valid_tls =
        || Tls::new().ca(authority.pem()).identity(client.certificate.clone(), client.key.clone());
    let connect = async |url: &str, tls: Option<Tls>| {
        let builder = RedisStore::builder(url).timeout(TEST_TIMEOUT);
        let builder = if let Some(tls) = tls { builder.tls(tls) } else { builder };
        builder.connect().await
    };
    let limiter = Limiter::new(connect(&url, Some(valid_tls())).await.expect("connected"));
    for quota in every_quota(10, LONG) {
        assert!(limiter.acquire(&Charge::new("u", &quota)).await.expect("decided").allowed);
    }

    // Renewed certificates and passwords are those of the next connection.
    let builder = |url: &str| RedisStore::builder(url).timeout(TEST_TIMEOUT);
    let store = limiter.store();
    let plain = store.renew_credentials(&builder(&redis.url()));
    assert!(plain.is_err_and(|error| error.to_string().contains("cannot replace each other")));
    let quota = Quota::fixed_window(1_000, LONG).expect("valid");
    let charge = Charge::new("renewed", &quota);
    let wrong = Tls::new().ca(untrusted.pem());
    store.renew_credentials(&builder(&url).tls(wrong)).expect("valid options");
    let _ = limiter.acquire(&charge).await.expect("open connections go on");
    redis.query::<()>(&["ACL", "SETUSER", "tidegate", "resetpass", ">hunter5"]);
    redis.query::<i64>(&["CLIENT", "KILL", "USER", "tidegate"]);
    support::until("the other CA is refused", async || {
        let error = store.nodes()[0].last_error.clone();
        error.is_some_and(|error| error.contains("invalid peer certificate"))
    })
    .await;
    let renewed = builder(&url.replace("hunter2", "hunter5")).tls(valid_tls());
    store.renew_credentials(&renewed).expect("valid options");
    support::until("the store has reconnected", async || store.nodes()[0].connected).await;
    assert!(limiter.acquire(&charge).await.expect("decided").allowed);
    redis.query::<()>(&["ACL", "SETUSER", "tidegate", "resetpass", ">hunter2"]);

    // A name that replaces the host of the URL.
    let by_name = url.replace("127.0.0.1", "localhost");
    let named = connect(&by_name, Some(valid_tls().server_name("127.0.0.1"))).await;
    named.expect("connected");

    let other = untrusted.sign("client");
    for (url, tls, expected) in [
        (url.as_str(), Some(Tls::new().ca(untrusted.pem())), "invalid peer certificate"),
        (&url, None, ""),
        (&by_name, Some(valid_tls()), "not valid for name"),
        (&url, Some(Tls::new().ca(authority.pem())), ""),
        (&url, Some(valid_tls().identity(other.certificate, other.key)), ""),
        (&url.replace("hunter2", "hunter3"), Some(valid_tls()), "WRONGPASS"),
        (&url.replace("rediss", "redis"), None, ""),
    ] {
        let refused = connect(url, tls).await.expect_err("refused").to_string();
        assert!(refused.contains(expected) && !refused.contains("hunter"), "{refused}");
    }
    for (url, tls) in [
        (format!("{url}/#insecure"), None),
        (redis.url(), Some(valid_tls())),
        (url.clone(), Some(Tls::new().ca("not PEM"))),
        (url.clone(), Some(valid_tls().server_name("redis.example.com:6379"))),
        (url.clone(), Some(valid_tls().identity("not PEM", client.key.clone()))),
        (url.clone(), Some(valid_tls().identity(client.certificate.clone(), "not PEM"))),
    ] {
        let refused = connect(&url, tls).await.expect_err("misconfigured");
        assert!(
            matches!(&refused, StoreError::Misconfigured(reason) if !reason.contains("hunter")),
            "{refused}"
        );
    }
}

#[tokio::test]
async fn an_error_that_quotes_the_password_is_shown_without_it() {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("bound");
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut buffer = [0; 1_024];
            let reply =
                b"-ERR unknown command 'AUTH', with args beginning with: 'user' 'hunter2' \r\n";
            while stream.read(&mut buffer).await.is_ok_and(|length| length > 0) {
                let _ = stream.write_all(&reply.repeat(4)).await;
            }
        }
    });
    let error = RedisStore::connect(&format!("redis://user:hunter2@{address}"))
        .await
        .expect_err("not a Redis")
        .to_string();
    assert!(error.contains("unknown command") && !error.contains("hunter2"), "{error}");
}
