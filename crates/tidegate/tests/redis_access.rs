//! The Redis store by TLS, as a user with few rights, and on other servers than the usual one.

mod support;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};

use support::{
    Authority, Cluster, LONG, PATIENCE, RIGHTS, Redis, every_quota, free_port, packed, redis_6,
    valkey_9,
};
use tidegate::store::redis::Tls;
use tidegate::testing::{conformance, conformance_of_long_logs};
use tidegate::{Charge, Limiter, Quota, RedisStore, ShardId, SharedStore, StoreError};

/// All that a store does, on this server.
async fn assert_all_works(redis: &Redis, url: &str, seeds: u64) {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let builder = |prefix: &str| RedisStore::builder(url).timeout(PATIENCE).prefix(prefix);
    let mut driven = async |clock| {
        let prefix = format!("rate_limit:{}", NUMBER.fetch_add(1, Ordering::Relaxed));
        Limiter::new(
            builder(&prefix).driven_by(clock).connect().await.expect("our own server answers"),
        )
    };
    conformance(0..seeds, &mut driven).await;
    conformance_of_long_logs(0..seeds.div_ceil(30), &mut driven).await;
    let store = builder("rate_limit").connect().await.expect("our own server answers");
    store.probe(ShardId::SINGLE).await.expect("it could decide");
    assert_eq!(store.heartbeat("me").await, Ok(vec!["me".to_owned()]));
    let limiter = Limiter::new(store);
    support::assert_exact_under_concurrency(&limiter).await;
    let long = packed(1_000, LONG);
    for taken in 1..=400 {
        let decision =
            limiter.acquire(&Charge::new("one after the other", &long)).await.expect("decided");
        assert_eq!(decision.remaining, 1_000 - taken);
    }
    redis.assert_every_key_expires();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redis_6_2_answers_alike() {
    let redis = Redis::start_program(&redis_6(), &[]);
    let version: String = redis.query(&["INFO", "server"]);
    assert!(version.contains("redis_version:6.2"), "{version}");
    assert_all_works(&redis, &redis.url(), support::seeds(150).end).await;
    assert_a_lost_script_is_no_error(&redis).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn valkey_9_answers_alike() {
    let redis = Redis::start_program(&valkey_9(), &[]);
    let version: String = redis.query(&["INFO", "server"]);
    assert!(version.contains("valkey_version:9."), "{version}");
    assert_all_works(&redis, &redis.url(), support::seeds(150).end).await;
    assert_a_lost_script_is_no_error(&redis).await;
}

async fn assert_a_lost_script_is_no_error(redis: &Redis) {
    let limiter = redis.limiter().await;
    let quota = Quota::fixed_window(1_000, LONG).expect("valid");
    for _ in 0..5 {
        redis.query::<()>(&["SCRIPT", "FLUSH"]);
        limiter.acquire(&Charge::new("scripts", &quota)).await.expect("decided");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clusters_of_redis_6_2_and_valkey_9_are_followed() {
    for program in [redis_6(), valkey_9()] {
        let cluster = Cluster::start_program(&program);
        let store = RedisStore::cluster(cluster.urls())
            .timeout(PATIENCE)
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
async fn a_user_with_the_smallest_rights_can_do_everything() {
    let redis = Redis::start();
    redis.grant(&RIGHTS);
    redis.query::<()>(&["CONFIG", "RESETSTAT"]);
    let url = redis.url_of_user();
    assert_all_works(&redis, &url, support::seeds(100).end).await;
    let stats: String = redis.query(&["INFO", "commandstats"]);
    let name = |line: &str| Some(line.strip_prefix("cmdstat_")?.split_once(':')?.0.to_owned());
    let rejected = |line: &&str| !line.contains("rejected_calls=0");
    assert_eq!(stats.lines().filter(|line| line.starts_with("cmdstat_")).find(rejected), None);
    let used: BTreeSet<String> = stats.lines().filter_map(name).collect();
    // Of our own: the tests' look at the keys.
    let tests = [
        "auth",
        "config|resetstat",
        "info",
        "keys",
        "pttl",
        "client|setinfo",
        "select",
        "acl|setuser",
    ];
    let unused: Vec<&&str> = RIGHTS.iter().filter(|command| !used.contains(**command)).collect();
    assert!(unused.is_empty(), "granted and not used: {unused:?}");
    let more: Vec<&String> = used
        .iter()
        .filter(|name| !RIGHTS.contains(&name.as_str()) && !tests.contains(&name.as_str()))
        .collect();
    assert!(more.is_empty(), "used and not granted: {more:?}");

    // One right less, and it is said which.
    redis.query::<()>(&["ACL", "SETUSER", "tidegate", "-hmget"]);
    let limiter = Limiter::new(
        RedisStore::builder(&url).timeout(PATIENCE).connect().await.expect("connected"),
    );
    let quota = Quota::token_bucket(10, LONG).expect("valid");
    let refused =
        limiter.acquire(&Charge::new("u", &quota)).await.expect_err("not allowed").to_string();
    assert!(
        refused.contains("can't run this command") && !refused.contains("hunter2"),
        "{refused}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn by_tls_both_sides_show_who_they_are() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (authority, stranger) = (Authority::new(), Authority::new());
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
    let ours =
        || Tls::new().ca(authority.pem()).identity(client.certificate.clone(), client.key.clone());
    let connect = async |url: &str, tls: Option<Tls>| {
        let builder = RedisStore::builder(url).timeout(PATIENCE);
        let builder = if let Some(tls) = tls { builder.tls(tls) } else { builder };
        builder.connect().await
    };
    let limiter = Limiter::new(connect(&url, Some(ours())).await.expect("let in"));
    for quota in every_quota(10, LONG) {
        assert!(limiter.acquire(&Charge::new("u", &quota)).await.expect("decided").allowed);
    }

    let by_name = url.replace("127.0.0.1", "localhost");
    let strange = stranger.sign("client");
    for (url, tls, what) in [
        (url.as_str(), Some(Tls::new().ca(stranger.pem())), "invalid peer certificate"),
        (&url, None, ""),
        (&by_name, Some(ours()), "not valid for name"),
        (&url, Some(Tls::new().ca(authority.pem())), ""),
        (&url, Some(ours().identity(strange.certificate, strange.key)), ""),
        (&url.replace("hunter2", "hunter3"), Some(ours()), "WRONGPASS"),
        (&url.replace("rediss", "redis"), None, ""),
    ] {
        let refused = connect(url, tls).await.expect_err("not let in").to_string();
        assert!(refused.contains(what) && !refused.contains("hunter"), "{what}: {refused}");
    }
    for (url, tls) in [
        (format!("{url}/#insecure"), None),
        (redis.url(), Some(ours())),
        (url.clone(), Some(Tls::new().ca("no PEM"))),
        (url.clone(), Some(ours().identity("no PEM", client.key.clone()))),
        (url.clone(), Some(ours().identity(client.certificate.clone(), "no PEM"))),
    ] {
        let refused = connect(&url, tls).await.expect_err("misconfigured");
        assert!(
            matches!(&refused, StoreError::Misconfigured(reason) if !reason.contains("hunter")),
            "{refused}"
        );
    }
}

#[tokio::test]
async fn a_server_that_quotes_what_it_does_not_understand_gives_no_password_away() {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("bound");
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut asked = [0; 1_024];
            let answer =
                b"-ERR unknown command 'AUTH', with args beginning with: 'user' 'hunter2' \r\n";
            while stream.read(&mut asked).await.is_ok_and(|length| length > 0) {
                let _ = stream.write_all(&answer.repeat(4)).await;
            }
        }
    });
    let error = RedisStore::connect(&format!("redis://user:hunter2@{address}"))
        .await
        .expect_err("no Redis")
        .to_string();
    assert!(error.contains("unknown command") && !error.contains("hunter2"), "{error}");
}
