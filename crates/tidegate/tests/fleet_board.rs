//! Texts and events of the instances of a fleet in a real Redis.

mod support;

use std::time::Duration;

use support::{Redis, TEST_TIMEOUT, until};
use tidegate::RedisStore;
use tidegate::store::redis::{ClockSource, FleetBoard};

const TTL: Duration = Duration::from_secs(60);

async fn store(redis: &Redis) -> RedisStore {
    store_with(redis, ClockSource::Server).await
}

async fn store_with(redis: &Redis, clock: ClockSource) -> RedisStore {
    let builder = RedisStore::builder(&redis.url()).timeout(TEST_TIMEOUT).clock(clock);
    builder.connect().await.expect("our own server answers")
}

fn board(store: &RedisStore) -> FleetBoard<'_> {
    store.fleet_board().expect("heartbeats are on")
}

#[tokio::test]
async fn texts_are_those_of_live_instances() {
    let redis = Redis::start();
    // Some servers refuse `TIME` in scripts.
    let (one, two) = (store(&redis).await, store_with(&redis, ClockSource::Estimated).await);
    let is_kept = board(&one).publish("a", "text of a", TTL, "config", "").await;
    assert_eq!(is_kept, Ok((false, false)), "there are no texts yet");
    let again = board(&one).publish("a", "text of a", TTL, "config", "shared").await;
    assert_eq!(again, Ok((true, true)));
    let other = board(&two).publish("b", "text of b", TTL, "config", "").await;
    assert_eq!(other, Ok((false, true)));
    board(&two).append("events", &[(TTL, "event".to_owned())]).await.expect("answered");
    assert_eq!(board(&one).events("events", 1).await.expect("answered")[0].1, "event");
    let texts = board(&two).read(&["b", "missing", "a"]).await.expect("answered");
    assert_eq!(texts, [Some("text of b".to_owned()), None, Some("text of a".to_owned())]);
    let shared = board(&two).read_shared(&["config", "other"]).await.expect("answered");
    assert_eq!(shared, [Some("shared".to_owned()), None]);
    redis.assert_every_key_expires();
    let short = Duration::from_millis(1);
    assert_eq!(board(&one).publish("a", "text of a", short, "config", "").await, Ok((true, true)));
    until("the text of a silent instance has expired", async || {
        board(&two).read(&["a"]).await == Ok(vec![None])
    })
    .await;
    let many: Vec<String> = (0..200).map(|number| format!("instance-{number}")).collect();
    assert_eq!(board(&one).read(&many).await.expect("answered"), vec![None; 200]);
}

#[tokio::test]
async fn a_list_has_the_last_events_in_the_order_of_their_times() {
    let redis = Redis::start();
    let store = store(&redis).await;
    let seconds = Duration::from_secs;
    let event = |number: u64, age: Duration| (age, format!("event {number}"));
    // Known later than the others: it happened during an outage.
    for events in [vec![event(1, seconds(20)), event(3, seconds(5))], vec![event(2, seconds(10))]] {
        board(&store).append("events", &events).await.expect("answered");
    }
    let listed = board(&store).events("events", 10).await.expect("answered");
    let texts: Vec<&str> = listed.iter().map(|(_, text)| text.as_str()).collect();
    assert_eq!(texts, ["event 1", "event 2", "event 3"]);
    let (seconds_1, micros_1): (u64, u64) = redis.query(&["TIME"]);
    let age = seconds_1 * 1_000_000 + micros_1 - listed[0].0;
    assert!((20_000_000..40_000_000).contains(&age), "{age} µs");
    assert_eq!(board(&store).events("other", 10).await, Ok(Vec::new()));

    let max = FleetBoard::MAX_EVENTS as u64;
    let many: Vec<_> = (0..max + 50)
        .map(|number| event(number, Duration::from_millis(max + 50 - number)))
        .collect();
    board(&store).append("events", &many).await.expect("answered");
    let listed = board(&store).events("events", usize::MAX).await.expect("answered");
    assert_eq!(listed.len(), FleetBoard::MAX_EVENTS);
    assert_eq!((listed[0].1.as_str(), listed[999].1.as_str()), ("event 50", "event 1049"));
    let last = board(&store).events("events", 150).await.expect("answered");
    assert_eq!(last, listed[850..]);
    redis.assert_every_key_expires();
}

/// Also with the commands of a user that an earlier release needed.
#[tokio::test]
async fn a_user_with_the_permissions_of_decisions_may_publish() {
    let redis = Redis::start();
    redis.grant(&support::PERMISSIONS);
    let builder = RedisStore::builder(&redis.url_of_user()).timeout(TEST_TIMEOUT);
    let store = builder.connect().await.expect("our own server answers");
    let published = board(&store).publish("a", "text", TTL, "config", "shared").await;
    assert_eq!(published, Ok((false, true)));
    board(&store).append("events", &[(Duration::ZERO, "event".to_owned())]).await.expect("allowed");
    assert_eq!(board(&store).read(&["a"]).await, Ok(vec![Some("text".to_owned())]));
    assert_eq!(board(&store).events("events", 1).await.expect("allowed").len(), 1);
}
