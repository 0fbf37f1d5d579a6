//! Overrides that instances share through a real Redis: changes, gaps, writers at the same time,
//! failover, loss, permissions.

mod support;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use support::{
    NAME, PERMISSIONS, Redis, Restrictions, Sentinels, StrictServer, TEST_TIMEOUT, join_all, until,
};
use tidegate::store::redis::{OverrideChange, OverrideValue, OverridesUpdate};
use tidegate::{Fleet, RedisStore, Store as _};

const MINUTE: Duration = Duration::from_secs(60);
const MAX: usize = 100_000;

async fn connect(redis: &Redis) -> RedisStore {
    let builder = RedisStore::builder(&redis.url()).timeout(TEST_TIMEOUT);
    builder.connect().await.expect("connected")
}

async fn change(store: &RedisStore, name: &str, value: Option<(&str, Option<Duration>)>) -> bool {
    let change = OverrideChange { name, value, author: "ops", ended: &[] };
    store.overrides().change(&change, MAX).await.expect("made").is_some()
}

async fn set(store: &RedisStore, name: &str, text: &str) {
    assert!(change(store, name, Some((text, Some(MINUTE)))).await);
}

fn texts(entries: &HashMap<String, OverrideValue>) -> Vec<(&str, &str)> {
    let mut texts: Vec<_> =
        entries.iter().map(|(name, value)| (name.as_str(), value.text.as_str())).collect();
    texts.sort_unstable();
    texts
}

async fn read_all(store: &RedisStore) -> (String, HashMap<String, OverrideValue>) {
    match store.overrides().update("").await.expect("read") {
        OverridesUpdate::All { version, entries, .. } => (version, entries),
        other => panic!("{other:?}"),
    }
}

async fn read_changes(
    store: &RedisStore,
    known: &str,
) -> (String, Vec<(String, Option<String>, Option<String>)>) {
    let OverridesUpdate::Changes { version, records } =
        store.overrides().update(known).await.expect("read")
    else {
        panic!("all entries");
    };
    let text = |value: Option<OverrideValue>| value.map(|value| value.text);
    let shown = |record: tidegate::store::redis::OverrideRecord| {
        (record.name, text(record.before), text(record.after))
    };
    (version, records.into_iter().map(shown).collect())
}

#[tokio::test]
async fn changes_since_a_version_are_read_and_every_key_expires() {
    let some = |text: &str| Some(text.to_owned());
    let redis = Redis::start();
    let (here, there) = (connect(&redis).await, connect(&redis).await);
    assert_eq!(there.overrides().update("").await, Ok(OverridesUpdate::Empty));
    set(&here, "a", "1").await;
    let (version, entries) = read_all(&there).await;
    assert_eq!(texts(&entries), [("a", "1")]);
    let until = entries["a"].until.expect("an end");
    let left = until.saturating_duration_since(there.clock().now());
    assert!(left <= MINUTE && left > MINUTE / 2, "{left:?}");
    set(&here, "b: ü\"1:2\"", "2:\n3").await;
    set(&there, "a", "4").await;
    assert!(change(&here, "b: ü\"1:2\"", None).await);
    assert!(!change(&here, "never set", None).await, "there is nothing to remove");
    let (version, records) = read_changes(&there, &version).await;
    let name = || "b: ü\"1:2\"".to_owned();
    assert_eq!(
        records,
        [
            (name(), None, some("2:\n3")),
            ("a".to_owned(), some("1"), some("4")),
            (name(), some("2:\n3"), None),
        ]
    );
    let unchanged = (version.clone(), Vec::new());
    assert_eq!(read_changes(&there, &version).await, unchanged);
    let audit = there.overrides().audit(None, 2).await.expect("read");
    assert_eq!(audit.iter().map(|record| record.number).collect::<Vec<_>>(), [4, 3]);
    let older = there.overrides().audit(Some(3), 9).await.expect("read");
    assert_eq!(older.iter().map(|record| record.number).collect::<Vec<_>>(), [2, 1]);
    assert_eq!(older[1].author, "ops");
    assert!(change(&here, "for good", Some(("5", None))).await);
    redis.assert_every_key_expires();
}

#[tokio::test]
async fn version_that_is_too_old_or_of_another_history_is_followed_by_all_entries() {
    let some = |text: &str| Some(text.to_owned());
    let redis = Redis::start();
    let (here, there) = (connect(&redis).await, connect(&redis).await);
    for number in 0..450 {
        set(&here, &format!("{number:03}"), "x").await;
    }
    let (version, entries) = read_all(&there).await;
    assert_eq!(entries.len(), 450, "three pages");
    for number in 0..450 {
        set(&here, &format!("{number:03}"), "y").await;
    }
    assert!(change(&here, "000", None).await);
    let (_, records) = read_changes(&there, &version).await;
    assert_eq!(records.len(), 451, "three pages of changes");
    assert_eq!(records[450], ("000".to_owned(), some("y"), None));
    // As if more changes were made than are kept.
    let changes = "rate_limit:{%alive}:overrides:changes";
    redis.query::<()>(&["ZREMRANGEBYRANK", changes, "0", "600"]);
    let OverridesUpdate::All { entries, .. } =
        there.overrides().update(&version).await.expect("read")
    else {
        panic!("a gap");
    };
    assert!(entries.len() == 449 && entries.values().all(|value| value.text == "y"));
    // The same number in another history is another version.
    redis.query::<()>(&["FLUSHALL"]);
    assert_eq!(there.overrides().update(&version).await, Ok(OverridesUpdate::Empty));
    set(&here, "new", "z").await;
    let (first, _) = read_all(&there).await;
    redis.query::<()>(&["FLUSHALL"]);
    set(&here, "newer", "z").await;
    let OverridesUpdate::All { entries, is_other_history: true, .. } =
        there.overrides().update(&first).await.expect("read")
    else {
        panic!("{first} is of another history");
    };
    assert_eq!(texts(&entries), [("newer", "z")]);
}

#[tokio::test]
async fn parts_that_redis_has_evicted_neither_hide_nor_revive_entries() {
    let redis = Redis::start();
    let (here, there) = (connect(&redis).await, connect(&redis).await);
    set(&here, "a", "1").await;
    redis.query::<()>(&["DEL", "rate_limit:{%alive}:overrides:changes"]);
    let (version, entries) = read_all(&there).await;
    assert_eq!(texts(&entries), [("a", "1")], "without the changes, too");
    redis.query::<()>(&["DEL", "rate_limit:{%alive}:overrides:version"]);
    assert_eq!(there.overrides().update(&version).await, Ok(OverridesUpdate::Empty));
    set(&here, "b", "2").await;
    assert_eq!(texts(&read_all(&there).await.1), [("b", "2")], "the first one is gone for good");
}

#[tokio::test]
async fn writers_at_the_same_time_lose_nothing() {
    let redis = Redis::start();
    let stores = join_all((0..2).map(|_| connect(&redis))).await;
    let write = async |writer: usize| {
        for number in 0..50 {
            set(&stores[writer], &format!("{number}"), &format!("{writer}")).await;
            set(&stores[writer], &format!("{writer}-{number}"), "own").await;
        }
    };
    tokio::join!(write(0), write(1));
    let (version, entries) = read_all(&stores[0]).await;
    assert_eq!(entries.len(), 150);
    assert!(version.starts_with("200:"), "{version}");
    let audit = join_all([None, Some(101)].map(|before| stores[1].overrides().audit(before, 200)));
    let audit: Vec<u64> =
        audit.await.into_iter().flat_map(|page| page.expect("read")).map(|it| it.number).collect();
    assert_eq!(audit[..200], (1..=200).rev().collect::<Vec<u64>>());
    // The last change of each name is what all read.
    let (mut last, records) = (HashMap::new(), stores[0].overrides().audit(None, 200).await);
    for record in records.expect("read").into_iter().rev() {
        last.insert(record.name, record.after.expect("set"));
    }
    assert_eq!(last, entries);
}

#[tokio::test]
async fn full_table_has_room_again_when_overrides_have_ended() {
    let redis = Redis::start();
    let store = connect(&redis).await;
    let ended: Vec<String> = vec!["short".into(), "long".into(), "unknown".into()];
    let set = async |name: &str, time: Duration, ended: &[String]| {
        let change = OverrideChange { name, value: Some(("x", Some(time))), author: "", ended };
        store.overrides().change(&change, 2).await.expect("made").is_some()
    };
    assert!(set("short", Duration::from_millis(1), &[]).await);
    assert!(set("long", MINUTE, &[]).await);
    assert!(!set("third", MINUTE, &[]).await);
    assert!(set("long", 2 * MINUTE, &[]).await, "it is there already");
    until("the short one has ended", async || set("third", MINUTE, &ended).await).await;
    assert_eq!(texts(&read_all(&store).await.1), [("long", "x"), ("third", "x")]);
}

#[tokio::test]
async fn heartbeats_announce_versions_only_to_receivers() {
    let redis = Redis::start();
    let monitored = connect(&redis).await;
    let fleet = Fleet::new();
    fleet.send_heartbeat(&monitored).await.expect("sent");
    let gets = || redis.calls_of("get");
    let before = gets();
    fleet.send_heartbeat(&monitored).await.expect("sent");
    assert_eq!(gets() - before, 1, "without a receiver, only the version of the fleet is read");
    let mut versions = monitored.overrides_version();
    assert_eq!(*versions.borrow(), None);
    fleet.send_heartbeat(&monitored).await.expect("sent");
    assert_eq!(versions.borrow_and_update().as_deref(), Some(""));
    set(&monitored, "a", "1").await;
    fleet.send_heartbeat(&monitored).await.expect("sent");
    assert!(versions.has_changed().expect("open"));
    let version = versions.borrow_and_update().clone().expect("known");
    assert!(version.starts_with("1:"), "{version}");
    fleet.send_heartbeat(&monitored).await.expect("sent");
    assert!(!versions.has_changed().expect("open"));
    redis.query::<()>(&["FLUSHALL"]);
    fleet.send_heartbeat(&monitored).await.expect("sent");
    assert_eq!(versions.borrow_and_update().as_deref(), Some(""), "all is lost");
}

#[tokio::test]
async fn permissions_of_decisions_are_enough() {
    let redis = Redis::start();
    redis.grant(&PERMISSIONS);
    let builder = RedisStore::builder(&redis.url_of_user()).timeout(TEST_TIMEOUT);
    let store = builder.connect().await.expect("connected");
    set(&store, "a", "1").await;
    assert!(change(&store, "a", None).await);
    assert_eq!(read_all(&store).await.1.len(), 0);
    assert_eq!(store.overrides().audit(None, 10).await.expect("read").len(), 2);
}

#[tokio::test]
async fn overrides_survive_a_failover_and_lost_changes_are_undone() {
    let sentinels = Sentinels::start();
    let connect = async || {
        let builder = RedisStore::sentinel(NAME, sentinels.urls()).timeout(TEST_TIMEOUT);
        Arc::new(builder.connect().await.expect("connected"))
    };
    let (here, there) = (connect().await, connect().await);
    set(&here, "kept", "1").await;
    until("the replicas are in sync", async || {
        let key = "rate_limit:{%alive}:overrides";
        sentinels.servers()[1..].iter().all(|replica| replica.query::<u64>(&["EXISTS", key]) == 1)
    })
    .await;
    // The replicas do not see this change.
    for replica in &sentinels.servers()[1..] {
        replica.signal("STOP");
    }
    set(&here, "lost", "2").await;
    let (version, entries) = read_all(&there).await;
    assert_eq!(texts(&entries), [("kept", "1"), ("lost", "2")]);
    sentinels.servers()[0].signal("KILL");
    for replica in &sentinels.servers()[1..] {
        replica.signal("CONT");
    }
    until("a new primary", async || sentinels.promoted(0).is_some()).await;
    until("the new primary answers", async || there.overrides().update(&version).await.is_ok())
        .await;
    let update = there.overrides().update(&version).await.expect("read");
    let found = match update {
        OverridesUpdate::All { entries, .. } => entries,
        // The replica may have got the change in time.
        OverridesUpdate::Changes { .. } => entries,
        OverridesUpdate::Empty => panic!("all is lost"),
    };
    assert_eq!(found["kept"].text, "1");
    let after =
        OverrideChange { name: "after", value: Some(("3", None)), author: "ops", ended: &[] };
    until("the other instance follows, too", async || {
        here.overrides().change(&after, MAX).await.is_ok()
    })
    .await;
    let (_, entries) = read_all(&there).await;
    assert!(entries.contains_key("kept") && entries.contains_key("after"));
}

#[tokio::test]
async fn managed_services_and_dragonfly_run_the_script() {
    let some = |text: &str| Some(text.to_owned());
    for restrictions in [Restrictions::serverless(), Restrictions::dragonfly()] {
        let server = StrictServer::start(restrictions);
        let builder = RedisStore::builder(&server.url()).timeout(TEST_TIMEOUT);
        let store = builder.connect().await.expect("connected");
        set(&store, "a", "1").await;
        let (version, entries) = read_all(&store).await;
        assert_eq!(texts(&entries), [("a", "1")]);
        set(&store, "b", "2").await;
        let (_, records) = read_changes(&store, &version).await;
        assert_eq!(records, [("b".to_owned(), None, some("2"))]);
        assert_eq!(store.overrides().audit(None, 1).await.expect("read")[0].number, 2);
        server.redis().assert_every_key_expires();
    }
}
