//! The door on a real Redis: pipelines share calls, and an outage follows the failure modes.

use crate::client::{Client, Reply, command};
use crate::start;
use crate::support::Redis;

fn config(redis: &Redis) -> String {
    format!(
        "store: {{redis: '{}', timeout: 1s, instances: 1}}\n\
         policies:\n  \
         - {{name: wide, limit: 1000000, window: 1h, algorithm: token-bucket}}\n  \
         - {{name: local, limit: 5, window: 1h}}\n  \
         - {{name: open, limit: 1, window: 1h, on_store_failure: allow}}\n  \
         - {{name: closed, limit: 5, window: 1h, on_store_failure: deny}}\n",
        redis.url()
    )
}

#[test]
fn pipeline_is_one_call_to_redis() {
    let redis = Redis::start();
    let (_service, address) = start(&config(&redis));
    let mut client = Client::connect(&address);
    let calls = (0..20).map(|round| {
        // After a lone command, the first one of a pipeline has to wait for the others.
        client.ask(&["TG.ACQUIRE", "wide", &format!("lone{round}")]);
        let before = redis.calls_of("evalsha");
        let command = |number| command(&["TG.ACQUIRE", "wide", &format!("user{round}-{number}")]);
        client.send(&(0..100).flat_map(command).collect::<Vec<u8>>());
        for _ in 0..100 {
            assert_eq!(client.reply().integers()[..3], [1, 1_000_000, 999_999]);
        }
        redis.calls_of("evalsha") - before
    });
    // The service also calls scripts on its own, above all when it starts.
    let calls: Vec<u64> = calls.collect();
    assert_eq!(calls.iter().min(), Some(&1), "calls for 100 commands: {calls:?}");
    redis.assert_every_key_expires();
}

#[test]
fn commands_on_one_key_are_decided_in_their_order() {
    let redis = Redis::start();
    let (_service, address) = start(&config(&redis));
    let mut client = Client::connect(&address);
    let mut pipeline = Vec::new();
    for _ in 0..20 {
        for words in [
            &["TG.ACQUIRE", "local", "ann", "COST", "5"][..],
            &["TG.ACQUIRE", "local", "ann", "COST", "5"],
            &["TG.PEEK", "local", "ann"],
            &["TG.RESET", "local", "ann"],
            &["PING"],
            &["TG.PEEK", "local", "ann", "COST", "5"],
        ] {
            pipeline.extend(command(words));
        }
    }
    client.send(&pipeline);
    for round in 0..20 {
        let allowed = |client: &mut Client| client.reply().integers()[0];
        assert_eq!(allowed(&mut client), 1, "round {round}: five of five");
        assert_eq!(allowed(&mut client), 0, "round {round}: none is left");
        assert_eq!(allowed(&mut client), 0, "round {round}: the peek");
        assert_eq!(allowed(&mut client), 1, "round {round}: the reset");
        client.reply();
        assert_eq!(allowed(&mut client), 1, "round {round}: all are left");
    }
}

#[test]
fn reservations_of_a_pipeline_are_settled_in_their_order() {
    let redis = Redis::start();
    let (_service, address) = start(&config(&redis));
    let mut client = Client::connect(&address);
    let keys: Vec<String> = (0..20).map(|number| format!("user{number}")).collect();
    for round in ["a", "b", "c"] {
        let mut pipeline = Vec::new();
        for key in &keys {
            for words in [
                &["TG.RESERVE", "wide", key, "COST", "1000", "ID", round][..],
                &["TG.RESERVE", "wide", key, "COST", "1000", "ID", round],
                &["TG.RENEW", "wide", key, round, "300000"],
                &["TG.COMMIT", "wide", key, round, "0"],
                &["TG.COMMIT", "wide", key, round, "1000"],
                &["TG.RENEW", "wide", key, round, "300000"],
                &["TG.ACQUIRE", "wide", key, "COST", "7", "ID", "pay"],
                &["TG.REFUND", "wide", key, "ID", "pay"],
            ] {
                pipeline.extend(command(words));
            }
        }
        client.send(&pipeline);
        let statuses = ["held", "replayed", "held", "settled", "settled", "ended"];
        for key in &keys {
            // After its refund, the id of the acquire is free for a new request.
            for status in statuses.into_iter().chain(["settled", "settled"]) {
                let Reply::Array(fields) = client.reply() else { panic!("not an array") };
                assert_eq!(fields[0], Reply::Integer(1), "{key}: {fields:?}");
                assert_eq!(fields[8], Reply::Bulk(status.to_owned()), "{key}: {fields:?}");
            }
        }
        let left = client.ask(&["TG.PEEK", "wide", "user0"]).integers()[2];
        assert_eq!(left, 999_999, "all is returned");
    }
    redis.assert_every_key_expires();
}

#[test]
fn transaction_is_one_call_to_redis() {
    let redis = Redis::start();
    let (_service, address) = start(&config(&redis));
    let mut client = Client::connect(&address);
    let calls = (0..20).map(|round| {
        let before = redis.calls_of("evalsha");
        let mut commands = command(&["MULTI"]);
        for number in 0..100 {
            commands.extend(command(&["TG.ACQUIRE", "wide", &format!("{round}-{number}")]));
        }
        commands.extend([command(&["EXEC"]), command(&["PING"])].concat());
        client.send(&commands);
        assert_eq!(client.reply(), Reply::Simple("OK".to_owned()));
        for _ in 0..100 {
            assert_eq!(client.reply(), Reply::Simple("QUEUED".to_owned()));
        }
        let Reply::Array(replies) = client.reply() else { panic!("not an array") };
        let remaining: Vec<i64> = replies.iter().map(|reply| reply.integers()[2]).collect();
        assert_eq!(remaining, [999_999; 100]);
        assert_eq!(client.reply(), Reply::Simple("PONG".to_owned()));
        redis.calls_of("evalsha") - before
    });
    let calls: Vec<u64> = calls.collect();
    assert_eq!(calls.iter().min(), Some(&1), "calls for 100 commands: {calls:?}");
}

#[test]
fn outage_follows_the_failure_mode_of_each_policy() {
    let mut redis = Redis::start();
    let (service, address) = start(&config(&redis));
    let mut client = Client::connect(&address);
    assert_eq!(client.ask(&["TG.ACQUIRE", "local", "ann"]).integers()[2], 4);
    redis.kill();
    service.wait_until("the outage is noticed", |service| {
        service.admin("/metrics").body.contains("tidegate_store_up 0")
    });
    let ask = |client: &mut Client, policy: &str| {
        let allowed = client.ask(&["TG.ACQUIRE", policy, "bob"]).integers()[0];
        allowed == 1
    };
    let admitted = (0..10).filter(|_| ask(&mut client, "local")).count();
    assert_eq!(admitted, 5, "the share of the only instance");
    assert!((0..10).all(|_| ask(&mut client, "open")));
    assert!((0..10).all(|_| !ask(&mut client, "closed")));
    let throttled = (0..5).map(|_| client.ask(&["CL.THROTTLE", "bob", "2", "1", "3600"]));
    let limited: Vec<i64> = throttled.map(|reply| reply.integers()[0]).collect();
    assert_eq!(limited, [0, 0, 0, 1, 1]);
    redis.restart();
    service.wait_until("Redis decides again", |service| {
        service.admin("/metrics").body.contains("tidegate_store_up 1")
    });
    assert_eq!(client.ask(&["TG.ACQUIRE", "wide", "eve"]).integers()[0], 1);
}
