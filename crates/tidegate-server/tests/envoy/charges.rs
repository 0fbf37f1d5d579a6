//! Charges, refunds and peeks of requests.

use super::support::Redis;
use super::{Client, FILES, descriptor, start_on, with_limit};
use tidegate_api::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use tidegate_api::envoy::service::ratelimit::v3::RateLimitRequest;
use tidegate_api::envoy::service::ratelimit::v3::rate_limit_response::rate_limit::Unit;
use tidegate_api::envoy::service::ratelimit::v3::rate_limit_response::{Code, DescriptorStatus};

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

pub(super) fn hits(descriptor: RateLimitDescriptor, hits: u64) -> RateLimitDescriptor {
    RateLimitDescriptor { hits_addend: Some(hits), ..descriptor }
}

/// Returns the remaining units of a user. A request for 0 hits consumes nothing.
async fn remaining(client: &mut Client, user: &str) -> u64 {
    let status =
        client.send_all(vec![hits(descriptor(&[("user", user)]), 0)]).await.statuses.remove(0);
    u64::from(status.limit_remaining)
}

async fn on_memory_and_on_redis(check: impl AsyncFn(Client)) {
    on_memory_and_on_redis_with(RULES, check).await;
}

async fn on_memory_and_on_redis_with(rules: &str, check: impl AsyncFn(Client)) {
    on_memory_and_on_redis_as(FILES, rules, check).await;
}

pub(super) async fn on_memory_and_on_redis_as(
    config: &str,
    rules: &str,
    check: impl AsyncFn(Client),
) {
    let (_service, client) = start_on(config, rules).await;
    check(client).await;
    let redis = Redis::start();
    let (_service, client) = start_on(&(redis.healthy_store() + config), rules).await;
    check(client).await;
    redis.assert_every_key_expires();
}

#[tokio::test]
async fn denied_request_consumes_nothing() {
    on_memory_and_on_redis(async |mut client| {
        for key in ["once", "soft"] {
            assert_eq!(client.send(&[(key, "x")]).await.code(), Code::Ok);
        }
        let once = descriptor(&[("once", "x")]);
        for (denying, reason) in [
            (vec![descriptor(&[("shut", "x")])], "a limit of 0"),
            (vec![with_limit(descriptor(&[("any", "x")]), 0)], "a limit of 0 in the request"),
            (vec![once], "an exhausted limit"),
            (vec![hits(descriptor(&[("user", "other")]), 11)], "more hits than the limit"),
            (
                vec![descriptor(&[("soft", "x")]), descriptor(&[("soft-shut", "x")])],
                "all rules in quota mode",
            ),
            (
                vec![descriptor(&[("once", "y")]), descriptor(&[("once", "y")])],
                "the same descriptor twice",
            ),
        ] {
            for reversed in [false, true] {
                let mut all = [&[descriptor(&[("user", "u")])], &denying[..]].concat();
                if reversed {
                    all.reverse();
                }
                assert_eq!(client.send_all(all).await.overall_code(), Code::OverLimit, "{reason}");
                assert_eq!(remaining(&mut client, "u").await, 10, "{reason}");
            }
        }
        assert_eq!(
            client.send(&[("once", "y")]).await.code(),
            Code::Ok,
            "the first charge was refunded"
        );
    })
    .await;
}

#[tokio::test]
async fn rules_that_never_deny_do_not_block_charges() {
    on_memory_and_on_redis(async |mut client| {
        assert_eq!(client.send(&[("soft", "x")]).await.code(), Code::Ok);
        for sibling in [
            vec![descriptor(&[("on-trial", "x")])],
            vec![hits(descriptor(&[("on-trial", "x")]), 0)],
            vec![descriptor(&[("unlimited", "value")])],
            vec![descriptor(&[("soft", "x")]), descriptor(&[("soft", "another")])],
        ] {
            let before = remaining(&mut client, "u").await;
            let response =
                client.send_all([&sibling[..], &[descriptor(&[("user", "u")])]].concat()).await;
            assert_eq!(response.overall_code(), Code::Ok, "{sibling:?}");
            assert_eq!(remaining(&mut client, "u").await, before - 1, "{sibling:?}");
        }
    })
    .await;
}

#[tokio::test]
async fn negative_hits_are_refunded() {
    on_memory_and_on_redis(async |mut client| {
        let user = descriptor(&[("user", "u")]);
        let refund = |descriptor: RateLimitDescriptor| RateLimitDescriptor {
            is_negative_hits: true,
            ..descriptor
        };
        assert_eq!(client.send_all(vec![hits(user.clone(), 10)]).await.overall_code(), Code::Ok);
        assert_eq!(client.send_all(vec![user.clone()]).await.overall_code(), Code::OverLimit);
        let request = RateLimitRequest {
            domain: "edge".to_owned(),
            descriptors: vec![refund(user.clone())],
            hits_addend: 2,
        };
        let refunded = client.try_send(request).await.expect("a response");
        assert_eq!(
            (refunded.overall_code(), refunded.statuses[0].limit_remaining),
            (Code::Ok, 2),
            "the hits of the request"
        );
        let refunded = client.send_all(vec![refund(hits(user.clone(), 3))]).await;
        assert_eq!(
            (refunded.overall_code(), refunded.statuses[0].limit_remaining),
            (Code::Ok, 5),
            "the hits of the descriptor"
        );
        let refunded = client.send_all(vec![refund(hits(user.clone(), 1_000))]).await;
        assert_eq!(
            (refunded.overall_code(), refunded.statuses[0].limit_remaining),
            (Code::Ok, 10),
            "never more than the limit"
        );
        assert_eq!(client.send_all(vec![hits(user.clone(), 10)]).await.overall_code(), Code::Ok);
        for nothing in [hits(user, 0), descriptor(&[("shut", "x")])] {
            assert_eq!(
                client.send_all(vec![refund(nothing)]).await.overall_code(),
                Code::Ok,
                "a refund is never denied"
            );
        }
    })
    .await;
}

#[tokio::test]
async fn limit_of_0_has_a_name_and_is_counted() {
    let (service, mut client) = start_on(FILES, RULES).await;
    let shut = client.send(&[("shut", "x")]).await;
    let limit = shut.current_limit.clone().expect("its limit");
    assert_eq!(
        (limit.name.as_str(), limit.requests_per_unit, limit.unit()),
        ("shut-out", 0, Unit::Year)
    );
    assert_eq!((shut.code(), shut.limit_remaining), (Code::OverLimit, 0));
    assert_eq!(client.send(&[("on-trial", "x")]).await.code(), Code::Ok);
    client.send_all(vec![hits(descriptor(&[("shut", "x")]), 0)]).await;
    let metrics = service.admin("/metrics").body;
    for line in [
        r#"tidegate_decisions_total{policy="edge.shut",outcome="denied"} 1"#,
        r#"tidegate_decisions_total{policy="edge.on-trial",outcome="shadow_denied"} 1"#,
    ] {
        assert!(metrics.contains(line), "{line}: {metrics}");
    }
}

#[tokio::test]
async fn windows_may_span_several_units() {
    let limit = "{unit: second, unit_multiplier: 30000000, requests_per_unit: 1}";
    let rules = format!("domain: edge\ndescriptors: [{{key: long, rate_limit: {limit}}}]");
    let (_service, mut client) = start_on(FILES, &rules).await;
    let first = client.send(&[("long", "x")]).await;
    assert_eq!(first.code(), Code::Ok);
    assert!(first.duration_until_reset.expect("a time").seconds > 2);
    assert_eq!(client.send(&[("long", "x")]).await.code(), Code::OverLimit);
}

/// On the wire, a report at the end of a stream (`apply_on_stream_done`) is a call with a number of
/// hits, whose response Envoy ignores.
#[tokio::test]
async fn reported_units_exhaust_a_budget() {
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
            // If the budget is not exhausted, the request is allowed, and 300 bytes are reported
            // at its end.
            if client.send_all(vec![hits(bytes(), 0)]).await.overall_code() == Code::Ok {
                passed += 1;
                client.try_send(report(bytes(), 300)).await.expect("a response");
            }
        }
        assert_eq!(passed, 4, "the third report makes 900 bytes, the fourth 1200");
        let status = client.send_all(vec![bytes()]).await.statuses.remove(0);
        assert_eq!(
            (status.code(), status.limit_remaining),
            (Code::OverLimit, 0),
            "a plain call is denied"
        );
        assert!(status.duration_until_reset.expect("a time").seconds > 0);
    })
    .await;
}

/// Budgets of several services in `quota_mode`, as in upstream's `multiservice-tokenquota.sh`: a
/// request passes until all budgets are exceeded.
#[tokio::test]
async fn hits_of_0_see_every_budget_of_several_descriptors() {
    const BUDGETS: &str = "
domain: edge
descriptors:
  - {key: service, quota_mode: true, rate_limit: {unit: year, requests_per_unit: 2}}
";
    on_memory_and_on_redis_with(BUDGETS, async |mut client| {
        let services = ["a", "b", "c"].map(|name| descriptor(&[("service", name)]));
        let peek = || services.iter().map(|service| hits(service.clone(), 0)).collect();
        let mut passed = 0;
        for _ in 0..60 {
            let peeked = client.send_all(peek()).await;
            if peeked.overall_code() == Code::Ok {
                passed += 1;
                // The first service that still has a budget does the work.
                let free = peeked.statuses.iter().position(|status| status.code() == Code::Ok);
                let service = services[free.expect("a service with a budget")].clone();
                client.send_all(vec![hits(service, 1)]).await;
            }
        }
        assert_eq!(passed, 9, "each budget is exceeded by its third unit");
        let peeked = client.send_all(peek()).await;
        assert!(peeked.statuses.iter().all(|status| status.code() == Code::OverLimit));
    })
    .await;
}

#[tokio::test]
async fn explicit_hits_are_recorded_beyond_the_limit() {
    on_memory_and_on_redis(async |mut client| {
        let user = || descriptor(&[("user", "over")]);
        assert_eq!(client.send_all(vec![hits(user(), 8)]).await.overall_code(), Code::Ok);
        let over = client.send_all(vec![hits(user(), 3)]).await;
        assert_eq!((over.overall_code(), over.statuses[0].limit_remaining), (Code::OverLimit, 0));
        // Recorded: 11 of 10. A request for 0 is denied only when the limit is exceeded.
        assert_eq!(client.send_all(vec![hits(user(), 0)]).await.overall_code(), Code::OverLimit);
        let plain = || descriptor(&[("user", "plain")]);
        assert_eq!(client.send_all(vec![hits(plain(), 10)]).await.overall_code(), Code::Ok);
        for _ in 0..3 {
            assert_eq!(client.send_all(vec![plain()]).await.overall_code(), Code::OverLimit);
        }
        assert_eq!(
            client.send_all(vec![hits(plain(), 0)]).await.overall_code(),
            Code::Ok,
            "10 of 10 is not exceeded"
        );
        // The overdraft is bounded at ten times the limit.
        client.send_all(vec![hits(plain(), 1_000_000)]).await;
        let refund = RateLimitDescriptor { is_negative_hits: true, ..hits(plain(), 91) };
        assert_eq!(
            client.send_all(vec![refund]).await.statuses[0].limit_remaining,
            1,
            "100 were recorded"
        );
    })
    .await;
}

const POLICIES: &str = "
envoy: {files: [ratelimit.yaml]}
policies:
  - {name: keyed, match: {domain: edge}, key: [descriptor.tenant], missing_key: deny, limit: 5, window: 1h}
";

fn back(descriptor: RateLimitDescriptor) -> RateLimitDescriptor {
    RateLimitDescriptor { is_negative_hits: true, ..descriptor }
}

#[tokio::test]
async fn refund_is_never_denied_even_without_a_key() {
    let (_service, mut client) = start_on(POLICIES, RULES).await;
    let given = client.send_all(vec![back(hits(descriptor(&[("other", "x")]), 1))]).await;
    assert_eq!(given.overall_code(), Code::Ok, "a refund is never denied");
}

#[tokio::test]
async fn peek_without_a_key_is_not_counted_as_a_decision() {
    let (service, mut client) = start_on(POLICIES, RULES).await;
    client.send_all(vec![hits(descriptor(&[("other", "x")]), 0)]).await;
    let metrics = service.admin("/metrics").body;
    assert!(metrics.contains(r#"policy="keyed",outcome="denied"} 0"#), "{metrics}");
}

#[tokio::test]
async fn many_reports_are_recorded() {
    let config = "
envoy: {files: [ratelimit.yaml]}
policies:
  - {name: a, match: {domain: edge}, key: [descriptor.tenant], limit: 5, window: 1h}
  - {name: b, match: {domain: edge}, key: [descriptor.tenant], limit: 9, window: 1d}
";
    let (_service, mut client) = start_on(config, RULES).await;
    let each = (0..70).map(|n| hits(descriptor(&[("tenant", &format!("t{n}"))]), 1)).collect();
    let request = RateLimitRequest { domain: "edge".to_owned(), descriptors: each, hits_addend: 0 };
    let response = client.try_send(request).await;
    assert_eq!(
        response.map(|response| response.overall_code()).map_err(|e| e.to_string()),
        Ok(Code::Ok)
    );
}

#[tokio::test]
async fn reports_come_before_acquires_even_of_one_count() {
    on_memory_and_on_redis(async |mut client| {
        let user = || descriptor(&[("user", "r")]);
        let response = client.send_all(vec![hits(user(), 5), hits(user(), 5), user()]).await;
        let codes: Vec<Code> = response.statuses.iter().map(DescriptorStatus::code).collect();
        assert_eq!(codes, [Code::Ok, Code::Ok, Code::OverLimit]);
    })
    .await;
}
