//! The Redis store on a primary that real sentinels watch.

mod support;

use std::time::{Duration, Instant};

use support::{LONG, NAME, RIGHTS, Sentinels, until};
use tidegate::{Charge, Limiter, Quota, RedisStore, StoreError};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failover_is_followed_within_a_second_and_the_old_primary_gets_no_more_calls() {
    // As users who may do no more than it takes.
    let user = "user watcher on >hunter3 +ping +sentinel|get-master-addr-by-name +sentinel|master +sentinel|replicas";
    let sentinels = Sentinels::start_with(&[], user, None);
    sentinels.servers().iter().for_each(|server| server.grant(&[&RIGHTS[..], &["role"]].concat()));
    let urls = sentinels.urls().into_iter().map(|url| url.replace("//", "//watcher:hunter3@"));
    let timeout = Duration::from_millis(500);
    let builder =
        RedisStore::sentinel(NAME, urls).credentials(Some("tidegate"), "hunter2").timeout(timeout);
    let limiter = Limiter::new(builder.connect().await.expect("connected"));
    let quota = Quota::sliding_log(100_000, LONG).expect("valid");
    let charge = Charge::new("u", &quota);
    for _ in 0..5 {
        limiter.acquire(&charge).await.expect("decided");
    }
    until("the replicas have it", async || {
        let key = limiter.store().redis_key(&charge);
        sentinels.servers()[1..].iter().all(|replica| replica.query::<u64>(&["ZCARD", &key]) == 5)
    })
    .await;

    // It hangs, rather than dies: nothing is refused, nothing is closed.
    sentinels.servers()[0].signal("STOP");
    let (mut promoted, mut slowest) = (None, Duration::ZERO);
    until("the new primary decides", async || {
        if promoted.is_none() && sentinels.promoted(0).is_some() {
            promoted = Some(Instant::now());
        }
        let asked = Instant::now();
        let decided = limiter.acquire(&charge).await.is_ok();
        slowest = slowest.max(asked.elapsed());
        decided
    })
    .await;
    let followed = promoted.map_or(Duration::ZERO, |promoted| promoted.elapsed());
    assert!(followed < Duration::from_secs(1), "{followed:?} after the promotion");
    assert!(slowest < timeout + Duration::from_millis(400), "{slowest:?}");
    let left = limiter.peek(&charge).await.expect("decided").remaining + 1;
    assert!(left <= 100_000 - 6, "the counts of before are there: {left}");

    // The old one wakes up and still thinks that it is the primary.
    let old = &sentinels.servers()[0];
    old.signal("CONT");
    let calls = |server: &support::Redis| -> u64 {
        let stats: String = server.query(&["INFO", "commandstats"]);
        let line = stats.lines().find_map(|line| line.strip_prefix("cmdstat_evalsha:calls="));
        line.and_then(|rest| rest.split(',').next()?.parse().ok()).unwrap_or(0)
    };
    let before = calls(old);
    for _ in 0..50 {
        limiter.acquire(&charge).await.expect("decided");
    }
    assert_eq!(calls(old), before, "not one call more to the old primary");
    assert_eq!(limiter.store().nodes().iter().filter(|node| node.primary).count(), 1);
}

/// One of three sentinels hangs, one asks for a name that nobody knows.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hanging_sentinel_holds_up_nobody_and_mistakes_are_named() {
    let sentinels = Sentinels::start();
    let connect = async |name: &str, urls: Vec<String>| {
        RedisStore::sentinel(name, urls).connect().await.map(|_| ())
    };
    let wrong_name = connect("nobody", sentinels.urls()).await.expect_err("no such name");
    assert!(
        matches!(&wrong_name, StoreError::Misconfigured(reason) if reason.contains("\"nobody\"")),
        "{wrong_name}"
    );
    let no_sentinel =
        connect(NAME, vec![sentinels.servers()[0].url()]).await.expect_err("no sentinel");
    assert!(
        matches!(&no_sentinel, StoreError::Misconfigured(reason) if reason.contains("sentinel")),
        "{no_sentinel}"
    );
    let nowhere = connect(NAME, vec!["redis://:hunter2@127.0.0.1:1".to_owned()])
        .await
        .expect_err("nobody there");
    assert!(
        matches!(&nowhere, StoreError::Unreachable(reason) if reason.contains("127.0.0.1:1")),
        "{nowhere}"
    );
    assert!(!nowhere.to_string().contains("hunter2"));

    sentinels.signal(0, "STOP");
    let start = Instant::now();
    connect(NAME, sentinels.urls()).await.expect("the others tell");
    assert!(start.elapsed() < Duration::from_millis(900), "{:?}", start.elapsed());
    sentinels.signal(0, "CONT");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sentinels_and_servers_each_have_their_password() {
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
        builder.timeout(support::PATIENCE).connect().await
    };
    let store = connect(with_password("//:of-sentinels@"), Some("of-servers"))
        .await
        .expect("let in by all");
    let quota = Quota::fixed_window(10, LONG).expect("valid");
    assert!(Limiter::new(store).acquire(&Charge::new("u", &quota)).await.expect("decided").allowed);
    for (urls, password, what) in [
        (with_password("//:of-sentinels@"), None, "WRONGPASS"),
        (with_password("//"), Some("of-servers"), "NOAUTH"),
        (with_password("//:of-servers@"), Some("of-servers"), "WRONGPASS"),
    ] {
        let refused = connect(urls, password).await.expect_err("not let in").to_string();
        assert!(refused.contains(what) && !refused.contains("of-s"), "{refused}");
    }
}
