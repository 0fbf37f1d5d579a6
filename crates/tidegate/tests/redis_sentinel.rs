//! The Redis store on a primary behind real sentinels.

mod support;

use std::time::{Duration, Instant};

use support::{LONG, NAME, PERMISSIONS, Sentinels, until};
use tidegate::{Charge, Limiter, Quota, RedisStore, StoreError};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failover_is_followed_within_a_second_and_the_old_primary_gets_no_more_calls() {
    // Users with minimal permissions.
    let user = "user watcher on >hunter3 +ping +sentinel|get-master-addr-by-name \
                +sentinel|master +sentinel|replicas";
    let sentinels = Sentinels::start_with(&[], user, None);
    sentinels
        .servers()
        .iter()
        .for_each(|server| server.grant(&[&PERMISSIONS[..], &["role"]].concat()));
    let urls = sentinels.urls().into_iter().map(|url| url.replace("//", "//watcher:hunter3@"));
    let timeout = Duration::from_millis(500);
    let builder =
        RedisStore::sentinel(NAME, urls).credentials(Some("tidegate"), "hunter2").timeout(timeout);
    let limiter = Limiter::new(builder.connect().await.expect("connected"));
    let quota = Quota::sliding_log(100_000, LONG).expect("valid");
    let charge = Charge::new("u", &quota);
    for _ in 0..5 {
        let _ = limiter.acquire(&charge).await.expect("decided");
    }
    until("the replicas are in sync", async || {
        let key = limiter.store().redis_key(&charge);
        sentinels.servers()[1..].iter().all(|replica| replica.query::<u64>(&["ZCARD", &key]) == 5)
    })
    .await;

    // The primary hangs: it refuses and closes no connections.
    sentinels.servers()[0].signal("STOP");
    let (mut promoted, mut slowest) = (None, Duration::ZERO);
    until("the new primary decides", async || {
        if promoted.is_none() && sentinels.promoted(0).is_some() {
            promoted = Some(Instant::now());
        }
        let start = Instant::now();
        let decided = limiter.acquire(&charge).await.is_ok();
        slowest = slowest.max(start.elapsed());
        decided
    })
    .await;
    let followed = promoted.map_or(Duration::ZERO, |promoted| promoted.elapsed());
    assert!(followed < Duration::from_secs(1), "{followed:?} after the promotion");
    assert!(slowest < timeout + Duration::from_millis(400), "{slowest:?}");
    let left = limiter.peek(&charge).await.expect("decided").remaining + 1;
    assert!(left <= 100_000 - 6, "the earlier counts are there: {left}");

    // The old primary continues, and still considers itself the primary.
    let old = &sentinels.servers()[0];
    old.signal("CONT");
    let calls = |server: &support::Redis| -> u64 {
        let stats: String = server.query(&["INFO", "commandstats"]);
        let line = stats.lines().find_map(|line| line.strip_prefix("cmdstat_evalsha:calls="));
        line.and_then(|rest| rest.split(',').next()?.parse().ok()).unwrap_or(0)
    };
    let before = calls(old);
    for _ in 0..50 {
        let _ = limiter.acquire(&charge).await.expect("decided");
    }
    assert_eq!(calls(old), before, "no further call to the old primary");
    assert_eq!(limiter.store().nodes().iter().filter(|node| node.primary).count(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hanging_sentinel_delays_nothing_and_wrong_options_are_reported() {
    let sentinels = Sentinels::start();
    let connect = async |name: &str, urls: Vec<String>| {
        RedisStore::sentinel(name, urls).connect().await.map(|_| ())
    };
    let wrong_name = connect("unknown", sentinels.urls()).await.expect_err("no such name");
    assert!(
        matches!(&wrong_name, StoreError::Misconfigured(reason) if reason.contains("\"unknown\"")),
        "{wrong_name}"
    );
    let not_a_sentinel =
        connect(NAME, vec![sentinels.servers()[0].url()]).await.expect_err("not a sentinel");
    assert!(
        matches!(&not_a_sentinel, StoreError::Misconfigured(reason) if reason.contains("sentinel")),
        "{not_a_sentinel}"
    );
    let unreachable = connect(NAME, vec!["redis://:hunter2@127.0.0.1:1".to_owned()])
        .await
        .expect_err("no server");
    assert!(
        matches!(&unreachable, StoreError::Unreachable(reason) if reason.contains("127.0.0.1:1")),
        "{unreachable}"
    );
    assert!(!unreachable.to_string().contains("hunter2"));

    sentinels.signal(0, "STOP");
    let start = Instant::now();
    connect(NAME, sentinels.urls()).await.expect("connected by the others");
    assert!(start.elapsed() < Duration::from_millis(900), "{:?}", start.elapsed());
    sentinels.signal(0, "CONT");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sentinels_and_servers_may_have_different_passwords() {
    let servers = ["--requirepass", "of-servers", "--masterauth", "of-servers"];
    let lines =
        format!("sentinel auth-pass {NAME} of-servers\nsentinel sentinel-pass of-sentinels");
    let sentinels = Sentinels::start_with(&servers, &lines, Some("of-sentinels"));
    let with_password =
        |password: &str| sentinels.urls().iter().map(|url| url.replace("//", password)).collect();
    let connect = async |urls: Vec<String>, password: Option<&str>| {
        let builder = RedisStore::sentinel(NAME, urls);
        let builder = if let Some(password) = password {
            builder.credentials(None, password)
        } else {
            builder
        };
        builder.timeout(support::TEST_TIMEOUT).connect().await
    };
    let store =
        connect(with_password("//:of-sentinels@"), Some("of-servers")).await.expect("connected");
    let quota = Quota::fixed_window(10, LONG).expect("valid");
    assert!(Limiter::new(store).acquire(&Charge::new("u", &quota)).await.expect("decided").allowed);
    for (urls, password, expected) in [
        (with_password("//:of-sentinels@"), None, "WRONGPASS"),
        (with_password("//"), Some("of-servers"), "NOAUTH"),
        (with_password("//:of-servers@"), Some("of-servers"), "WRONGPASS"),
    ] {
        let refused = connect(urls, password).await.expect_err("refused").to_string();
        assert!(refused.contains(expected) && !refused.contains("of-s"), "{refused}");
    }
}
