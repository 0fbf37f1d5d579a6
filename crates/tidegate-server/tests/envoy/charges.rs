//! What a request takes, gives back, and leaves alone.

use super::proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use super::proto::envoy::service::ratelimit::v3::RateLimitRequest;
use super::proto::envoy::service::ratelimit::v3::rate_limit_response::Code;
use super::proto::envoy::service::ratelimit::v3::rate_limit_response::rate_limit::Unit;
use super::support::Redis;
use super::{Client, FILES, descriptor, start_on, with_limit};

const RULES: &str = "
domain: edge
descriptors:
  - {key: user, rate_limit: {unit: year, requests_per_unit: 10}}
  - {key: once, rate_limit: {unit: year, requests_per_unit: 1}}
  - {key: shut, rate_limit: {name: shut-out, unit: year, requests_per_unit: 0}}
  - {key: on-trial, shadow_mode: true, rate_limit: {unit: year, requests_per_unit: 0}}
  - {key: soft, quota_mode: true, rate_limit: {unit: year, requests_per_unit: 1}}
  - {key: soft-shut, quota_mode: true, rate_limit: {unit: year, requests_per_unit: 0}}
";

fn hits(descriptor: RateLimitDescriptor, hits: u64) -> RateLimitDescriptor {
    RateLimitDescriptor { hits_addend: Some(hits), ..descriptor }
}

/// How much of 10 is left to this user. To ask for 0 spends nothing.
async fn left(client: &mut Client, user: &str) -> u64 {
    let status =
        client.ask_all(vec![hits(descriptor(&[("user", user)]), 0)]).await.statuses.remove(0);
    u64::from(status.limit_remaining)
}

async fn on_memory_and_on_redis(check: impl AsyncFn(Client)) {
    on_memory_and_on_redis_with(RULES, check).await;
}

async fn on_memory_and_on_redis_with(rules: &str, check: impl AsyncFn(Client)) {
    let (_service, client) = start_on(FILES, rules).await;
    check(client).await;
    let redis = Redis::start();
    let (_service, client) =
        start_on(&format!("store: {{redis: '{}'}}\n{FILES}", redis.url()), rules).await;
    check(client).await;
    redis.assert_every_key_expires();
}

#[tokio::test]
async fn a_denied_request_spends_nothing_whatever_denies_it() {
    on_memory_and_on_redis(async |mut client| {
        for key in ["once", "soft"] {
            assert_eq!(client.ask(&[(key, "x")]).await.code(), Code::Ok);
        }
        let once = descriptor(&[("once", "x")]);
        for (denying, what) in [
            (vec![descriptor(&[("shut", "x")])], "a limit of 0"),
            (
                vec![with_limit(descriptor(&[("any", "x")]), 0)],
                "a limit of 0 that the request brings",
            ),
            (vec![once], "what is used up"),
            (vec![hits(descriptor(&[("user", "other")]), 11)], "more than could ever pass"),
            (
                vec![descriptor(&[("soft", "x")]), descriptor(&[("soft-shut", "x")])],
                "all that are in quota mode",
            ),
            (vec![descriptor(&[("once", "y")]), descriptor(&[("once", "y")])], "the same twice"),
        ] {
            for turned in [false, true] {
                let mut all = [&[descriptor(&[("user", "u")])], &denying[..]].concat();
                if turned {
                    all.reverse();
                }
                assert_eq!(client.ask_all(all).await.overall_code(), Code::OverLimit, "{what}");
                assert_eq!(left(&mut client, "u").await, 10, "{what}");
            }
        }
        assert_eq!(
            client.ask(&[("once", "y")]).await.code(),
            Code::Ok,
            "the first of two was returned"
        );
    })
    .await;
}

#[tokio::test]
async fn what_denies_nothing_keeps_nobody_from_spending() {
    on_memory_and_on_redis(async |mut client| {
        assert_eq!(client.ask(&[("soft", "x")]).await.code(), Code::Ok);
        for beside in [
            vec![descriptor(&[("on-trial", "x")])],
            vec![hits(descriptor(&[("on-trial", "x")]), 0)],
            vec![descriptor(&[("nobody", "limits")])],
            vec![descriptor(&[("soft", "x")]), descriptor(&[("soft", "another")])],
        ] {
            let before = left(&mut client, "u").await;
            let response =
                client.ask_all([&beside[..], &[descriptor(&[("user", "u")])]].concat()).await;
            assert_eq!(response.overall_code(), Code::Ok, "{beside:?}");
            assert_eq!(left(&mut client, "u").await, before - 1, "{beside:?}");
        }
    })
    .await;
}

#[tokio::test]
async fn hits_below_zero_are_given_back() {
    on_memory_and_on_redis(async |mut client| {
        let user = descriptor(&[("user", "u")]);
        let back = |descriptor: RateLimitDescriptor| RateLimitDescriptor {
            is_negative_hits: true,
            ..descriptor
        };
        assert_eq!(client.ask_all(vec![hits(user.clone(), 10)]).await.overall_code(), Code::Ok);
        assert_eq!(client.ask_all(vec![user.clone()]).await.overall_code(), Code::OverLimit);
        let request = RateLimitRequest {
            domain: "edge".to_owned(),
            descriptors: vec![back(user.clone())],
            hits_addend: 2,
        };
        let given = client.try_ask(request).await.expect("an answer");
        assert_eq!(
            (given.overall_code(), given.statuses[0].limit_remaining),
            (Code::Ok, 2),
            "the request's hits"
        );
        let given = client.ask_all(vec![back(hits(user.clone(), 3))]).await;
        assert_eq!(
            (given.overall_code(), given.statuses[0].limit_remaining),
            (Code::Ok, 5),
            "the descriptor's own"
        );
        let given = client.ask_all(vec![back(hits(user.clone(), 1_000))]).await;
        assert_eq!(
            (given.overall_code(), given.statuses[0].limit_remaining),
            (Code::Ok, 10),
            "never more than the limit"
        );
        assert_eq!(client.ask_all(vec![hits(user.clone(), 10)]).await.overall_code(), Code::Ok);
        for nothing in [hits(user, 0), descriptor(&[("shut", "x")])] {
            assert_eq!(
                client.ask_all(vec![back(nothing)]).await.overall_code(),
                Code::Ok,
                "it never denies"
            );
        }
    })
    .await;
}

#[tokio::test]
async fn a_limit_of_0_has_its_name_and_is_counted() {
    let (service, mut client) = start_on(FILES, RULES).await;
    let shut = client.ask(&[("shut", "x")]).await;
    let limit = shut.current_limit.clone().expect("its limit");
    assert_eq!(
        (limit.name.as_str(), limit.requests_per_unit, limit.unit()),
        ("shut-out", 0, Unit::Year)
    );
    assert_eq!((shut.code(), shut.limit_remaining), (Code::OverLimit, 0));
    assert_eq!(client.ask(&[("on-trial", "x")]).await.code(), Code::Ok);
    client.ask_all(vec![hits(descriptor(&[("shut", "x")]), 0)]).await;
    let metrics = service.admin("/metrics").body;
    for line in [
        r#"tidegate_decisions_total{policy="edge.shut",outcome="denied"} 1"#,
        r#"tidegate_decisions_total{policy="edge.on-trial",outcome="shadow_denied"} 1"#,
    ] {
        assert!(metrics.contains(line), "{line}: {metrics}");
    }
}

#[tokio::test]
async fn a_window_may_be_several_units_long() {
    let limit = "{unit: second, unit_multiplier: 30000000, requests_per_unit: 1}";
    let rules = format!("domain: edge\ndescriptors: [{{key: long, rate_limit: {limit}}}]");
    let (_service, mut client) = start_on(FILES, &rules).await;
    let first = client.ask(&[("long", "x")]).await;
    assert_eq!(first.code(), Code::Ok);
    assert!(first.duration_until_reset.expect("a time").seconds > 2);
    assert_eq!(client.ask(&[("long", "x")]).await.code(), Code::OverLimit);
}

/// On the wire a report of finished work (`apply_on_stream_done`) is a call with a number of hits,
/// whose answer Envoy ignores.
#[tokio::test]
async fn a_budget_of_reported_units_runs_out() {
    const BUDGET: &str = "
domain: edge
descriptors:
  - {key: bytes, rate_limit: {unit: year, requests_per_unit: 1000}}
";
    on_memory_and_on_redis_with(BUDGET, async |mut client| {
        let bytes = || descriptor(&[("bytes", "tenant")]);
        let report = |bytes, units| RateLimitRequest {
            domain: "edge".to_owned(),
            descriptors: vec![bytes],
            hits_addend: units,
        };
        let mut passed = 0;
        for _ in 0..20 {
            // Is it over already? If not, the request passes, and 300 bytes are reported when it is
            // done.
            if client.ask_all(vec![hits(bytes(), 0)]).await.overall_code() == Code::Ok {
                passed += 1;
                client.try_ask(report(bytes(), 300)).await.expect("an answer");
            }
        }
        assert_eq!(passed, 4, "900, then 1200: over");
        let status = client.ask_all(vec![bytes()]).await.statuses.remove(0);
        assert_eq!(
            (status.code(), status.limit_remaining),
            (Code::OverLimit, 0),
            "a plain call is denied"
        );
        assert!(status.duration_until_reset.expect("a time").seconds > 0);
    })
    .await;
}

#[tokio::test]
async fn explicit_hits_are_recorded_even_if_they_do_not_fit_and_plain_calls_are_not() {
    on_memory_and_on_redis(async |mut client| {
        let user = || descriptor(&[("user", "over")]);
        assert_eq!(client.ask_all(vec![hits(user(), 8)]).await.overall_code(), Code::Ok);
        let over = client.ask_all(vec![hits(user(), 3)]).await;
        assert_eq!((over.overall_code(), over.statuses[0].limit_remaining), (Code::OverLimit, 0));
        // Recorded: 11 of 10. To ask for 0 is denied only now that the limit is exceeded.
        assert_eq!(client.ask_all(vec![hits(user(), 0)]).await.overall_code(), Code::OverLimit);
        let plain = || descriptor(&[("user", "plain")]);
        assert_eq!(client.ask_all(vec![hits(plain(), 10)]).await.overall_code(), Code::Ok);
        for _ in 0..3 {
            assert_eq!(client.ask_all(vec![plain()]).await.overall_code(), Code::OverLimit);
        }
        assert_eq!(
            client.ask_all(vec![hits(plain(), 0)]).await.overall_code(),
            Code::Ok,
            "10 of 10 is not exceeded"
        );
        // The overdraft is bounded at ten times the limit.
        client.ask_all(vec![hits(plain(), 1_000_000)]).await;
        let back = RateLimitDescriptor { is_negative_hits: true, ..hits(plain(), 91) };
        assert_eq!(
            client.ask_all(vec![back]).await.statuses[0].limit_remaining,
            1,
            "100 were recorded"
        );
    })
    .await;
}
