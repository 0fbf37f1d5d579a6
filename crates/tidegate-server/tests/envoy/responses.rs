//! Shadow mode, dynamic metadata, shared counts and what is left.

use std::collections::BTreeMap;

use prost_types::Value;
use prost_types::value::Kind;
use serde_json::{Value as Json, json};

use super::support::{Redis, Service, request};
use super::{Client, FILES, descriptor, start_on, with_limit};
use tidegate_api::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use tidegate_api::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::RateLimitOverride;
use tidegate_api::envoy::service::ratelimit::v3::rate_limit_response::{Code, DescriptorStatus};
use tidegate_api::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use tidegate_api::envoy::r#type::v3::RateLimitUnit;

const RULES: &str = "\
domain: edge
descriptors:
  - {key: wide, rate_limit: {unit: hour, requests_per_unit: 10}}
  - {key: narrow, rate_limit: {unit: hour, requests_per_unit: 1}}
  - {key: shut, rate_limit: {unit: hour, requests_per_unit: 0}}
  - {key: soft, shadow_mode: true, rate_limit: {unit: hour, requests_per_unit: 10}}
  - {key: quota, quota_mode: true, rate_limit: {unit: hour, requests_per_unit: 10}}
  - {key: spent, quota_mode: true, rate_limit: {unit: hour, requests_per_unit: 1}}
  - {key: daily, rate_limit: {unit: day, requests_per_unit: 10}}
  - {key: bucket, rate_limit: {name: bucket, unit: hour, requests_per_unit: 10}}
  - {key: files, value: a*, share_threshold: true, rate_limit: {unit: hour, requests_per_unit: 10}}
  - key: tagged
    metadata: {service: {name: one, weight: 1}, first: 1}
    rate_limit: {unit: hour, requests_per_unit: 1}
  - key: labelled
    metadata: {service: {name: two, zone: z}, list: [x, true, null]}
    rate_limit: {unit: hour, requests_per_unit: 100}
  - {key: free, metadata: {never: sent}, rate_limit: {unlimited: true}}
";

async fn on_memory_and_on_redis(config: &str, check: impl AsyncFn(&Service, Client)) {
    let (service, client) = start_on(config, RULES).await;
    check(&service, client).await;
    let redis = Redis::start();
    let stored = redis.healthy_store() + config;
    let (service, client) = start_on(&stored, RULES).await;
    check(&service, client).await;
}

fn one(key: &str) -> RateLimitDescriptor {
    descriptor(&[(key, "x")])
}

fn hits(key: &str, hits: u64) -> RateLimitDescriptor {
    RateLimitDescriptor { hits_addend: Some(hits), ..one(key) }
}

fn summary(response: &RateLimitResponse) -> Vec<(Code, u32)> {
    let of = |status: &DescriptorStatus| (status.code(), status.limit_remaining);
    response.statuses.iter().map(of).collect()
}

/// Returns what is left of a limit, by explicit hits of 0.
async fn left(client: &mut Client, key: &str) -> u32 {
    client.send_all(vec![hits(key, 0)]).await.statuses[0].limit_remaining
}

fn metric(service: &Service, line: &str) -> u64 {
    let metrics = service.admin("/metrics").body;
    let found = metrics.lines().find_map(|found| found.strip_prefix(line));
    let number = found.unwrap_or_else(|| panic!("{line} is not in {metrics}"));
    number.trim().parse().expect("a number")
}

#[tokio::test]
async fn denied_request_shows_what_is_left() {
    on_memory_and_on_redis(FILES, async |_, mut client| {
        assert_eq!(
            client.send_all(vec![one("narrow"), one("spent")]).await.overall_code(),
            Code::Ok
        );
        for sibling in ["narrow", "shut"] {
            let over = (Code::OverLimit, 0);
            for other in ["wide", "soft", "quota"] {
                let response = client.send_all(vec![one(other), one(sibling)]).await;
                assert_eq!(
                    summary(&response),
                    [(Code::Ok, 10), over],
                    "{other} is not charged, because {sibling} denies"
                );
                let response = client.send_all(vec![one(sibling), one(other)]).await;
                assert_eq!(summary(&response), [over, (Code::Ok, 10)], "{other} after {sibling}");
                assert_eq!(left(&mut client, other).await, 10, "{other} and {sibling}");
            }
            // The same count twice.
            let response = client.send_all(vec![one("wide"), one("wide"), one(sibling)]).await;
            assert_eq!(summary(&response), [(Code::Ok, 10), (Code::Ok, 10), over], "{sibling}");
            // One quota rule is spent, the other is not: only the sibling denies.
            let response = client.send_all(vec![one("quota"), one("spent"), one(sibling)]).await;
            assert_eq!(summary(&response), [(Code::Ok, 10), over, over], "{sibling}");
            // All quota rules are spent.
            let response = client.send_all(vec![one("wide"), one("spent")]).await;
            assert_eq!(summary(&response), [(Code::Ok, 10), over]);
        }
        // Reports, peeks and refunds show the count after them, also if another limit denies.
        let response = client.send_all(vec![hits("wide", 3), one("shut")]).await;
        assert_eq!(summary(&response), [(Code::Ok, 7), (Code::OverLimit, 0)]);
        let response = client.send_all(vec![hits("wide", 0), one("shut")]).await;
        assert_eq!(summary(&response), [(Code::Ok, 7), (Code::OverLimit, 0)]);
        let back = RateLimitDescriptor { is_negative_hits: true, ..hits("wide", 2) };
        let response = client.send_all(vec![back, one("shut")]).await;
        assert_eq!(summary(&response)[0], (Code::Ok, left(&mut client, "wide").await));
        let response = client.send_all(vec![one("wide"), one("shut")]).await;
        assert_eq!(summary(&response)[0], (Code::Ok, left(&mut client, "wide").await));
    })
    .await;
}

#[tokio::test]
async fn override_and_its_rule_have_one_count() {
    let config = "envoy: {files: [ratelimit.yaml], algorithms: {bucket: token-bucket}}\n";
    on_memory_and_on_redis(config, async |service, mut client| {
        for key in ["wide", "bucket"] {
            for remaining in [9, 8] {
                assert_eq!(
                    summary(&client.send_all(vec![one(key)]).await),
                    [(Code::Ok, remaining)]
                );
            }
            let response = client.send_all(vec![with_limit(one(key), 5)]).await;
            assert_eq!(summary(&response), [(Code::Ok, 2)], "{key}: 5 - 3");
            let limit = response.statuses[0].current_limit.as_ref().expect("a limit");
            assert_eq!((limit.requests_per_unit, limit.name.as_str()), (5, ""));
            assert_eq!(summary(&client.send_all(vec![one(key)]).await), [(Code::Ok, 6)], "{key}");
            let both = client.send_all(vec![one(key), with_limit(one(key), 20)]).await;
            assert_eq!(summary(&both), [(Code::Ok, 5), (Code::Ok, 14)], "{key}: 20 - 6");
            let over = client.send_all(vec![with_limit(one(key), 5)]).await;
            assert_eq!(summary(&over), [(Code::OverLimit, 0)], "{key}");
        }
        // Another unit is another count, and so is a value that shares the count of a wildcard.
        client.send_all(vec![one("daily")]).await;
        let hourly = client.send_all(vec![with_limit(one("daily"), 5)]).await;
        assert_eq!(summary(&hourly), [(Code::Ok, 4)]);
        client.send(&[("files", "a1")]).await;
        let own = client.send_all(vec![with_limit(descriptor(&[("files", "a1")]), 5)]).await;
        assert_eq!(summary(&own), [(Code::Ok, 4)]);
        // A rule of 0 and an unlimited one count nothing.
        for key in ["shut", "free"] {
            let own = client.send_all(vec![with_limit(one(key), 5)]).await;
            assert_eq!(summary(&own), [(Code::Ok, 4)], "{key}");
        }
        let denied = r#"tidegate_decisions_total{policy="edge.wide",outcome="denied"}"#;
        assert_eq!(metric(service, denied), 1);
        // The admin API resets both at once.
        let body = json!({"policy": "edge.wide", "key": "edge|wide=x"}).to_string();
        let reset = request(&service.admin, "POST", "/v1/reset", &[], body.as_bytes());
        assert_eq!(reset.status, 204);
        assert_eq!(
            summary(&client.send_all(vec![with_limit(one("wide"), 5)]).await),
            [(Code::Ok, 4)]
        );
    })
    .await;
}

#[tokio::test]
async fn shadow_mode_lets_every_request_pass() {
    let config = "envoy: {files: [ratelimit.yaml], shadow_mode: true}\n";
    on_memory_and_on_redis(config, async |service, mut client| {
        for expected in [Code::Ok, Code::OverLimit, Code::OverLimit] {
            let response = client.send_all(vec![one("narrow"), one("wide")]).await;
            assert_eq!(response.overall_code(), Code::Ok);
            assert_eq!(response.statuses[0].code(), expected, "as ratelimit shows it");
            assert!(response.response_headers_to_add.is_empty());
        }
        assert_eq!(left(&mut client, "wide").await, 7, "other limits are charged");
        for denied in [one("shut"), with_limit(one("narrow"), 1)] {
            let response = client.send_all(vec![denied]).await;
            assert_eq!(response.overall_code(), Code::Ok);
            assert_eq!(response.statuses[0].code(), Code::OverLimit);
        }
        // A rule in shadow mode shows OK, with or without the global one.
        let response = client.send_all(vec![hits("soft", 10), hits("soft", 1)]).await;
        assert_eq!((response.overall_code(), response.statuses[1].code()), (Code::Ok, Code::Ok));
        let count = |policy: &str, outcome: &str| {
            let line =
                format!(r#"tidegate_decisions_total{{policy="{policy}",outcome="{outcome}"}}"#);
            metric(service, &line)
        };
        let listed: Json =
            serde_json::from_str(&service.admin("/v1/policies").body).expect("a JSON body");
        let policies = listed.as_array().expect("a list");
        assert!(!policies.is_empty() && policies.iter().all(|policy| policy["mode"] == "shadow"));
        assert_eq!(count("edge.narrow", "shadow_denied"), 3);
        assert_eq!(count("edge.shut", "shadow_denied"), 1);
        assert_eq!((count("edge.narrow", "denied"), count("edge.shut", "denied")), (0, 0));
    })
    .await;
}

/// Returns a protobuf value as JSON.
fn as_json(value: &Value) -> Json {
    match value.kind.as_ref().expect("a value") {
        Kind::NullValue(_) => Json::Null,
        Kind::NumberValue(number) => json!(number),
        Kind::StringValue(text) => json!(text),
        Kind::BoolValue(flag) => json!(flag),
        Kind::StructValue(inner) => fields_as_json(&inner.fields),
        Kind::ListValue(list) => list.values.iter().map(as_json).collect(),
    }
}

fn fields_as_json(fields: &BTreeMap<String, Value>) -> Json {
    Json::Object(fields.iter().map(|(name, value)| (name.clone(), as_json(value))).collect())
}

#[tokio::test]
async fn dynamic_metadata_has_the_structure_of_ratelimit() {
    let config = "envoy: {files: [ratelimit.yaml], dynamic_metadata: true}\n";
    let (_service, mut client) = start_on(config, RULES).await;
    let metadata = |response: RateLimitResponse| {
        fields_as_json(&response.dynamic_metadata.expect("metadata").fields)
    };
    let first = client.send_all(vec![one("tagged"), one("labelled"), one("free")]).await;
    let entries = |entry: &str| json!({"entries": [entry]});
    assert_eq!(
        metadata(first),
        json!({
            "domain": "edge",
            "descriptors": [entries("tagged=x"), entries("labelled=x"), entries("free=x")],
            // The first one counts; structures are merged.
            "metadata": {
                "service": {"name": "one", "weight": 1.0, "zone": "z"},
                "first": 1.0,
                "list": ["x", true, null],
            },
        })
    );
    let second = client.send_all(vec![one("tagged"), one("labelled")]).await;
    assert_eq!(second.overall_code(), Code::OverLimit);
    assert_eq!(
        metadata(second)["metadata"],
        json!({"service": {"name": "two", "zone": "z"}, "list": ["x", true, null]}),
        "a rule that is over its limit adds nothing"
    );
    let two = descriptor(&[("a", "b"), ("c", "")]);
    let limited = RateLimitDescriptor {
        limit: Some(RateLimitOverride { requests_per_unit: 7, unit: RateLimitUnit::Day.into() }),
        hits_addend: Some(2),
        ..two
    };
    let request =
        RateLimitRequest { domain: "edge".to_owned(), descriptors: vec![limited], hits_addend: 5 };
    let response = client.try_send(request).await.expect("a response");
    assert_eq!(
        metadata(response),
        json!({
            "domain": "edge",
            "descriptors": [{
                "entries": ["a=b", "c="],
                "limit": "requests_per_unit:7 unit:DAY",
                "hitsAddend": 2.0,
            }],
            "hitsAddend": 5.0,
        })
    );
    let (_service, mut client) = start_on(FILES, RULES).await;
    let plain = client.send_all(vec![one("tagged")]).await;
    assert_eq!(plain.dynamic_metadata, None, "off by default");
}

#[tokio::test]
async fn units_near_the_limit_are_counted() {
    on_memory_and_on_redis(FILES, async |service, mut client| {
        let near = |policy: &str| {
            metric(service, &format!(r#"tidegate_near_limit_total{{policy="{policy}"}}"#))
        };
        for (request, expected) in [(8, 0), (9, 1), (10, 2), (11, 2), (12, 2)] {
            let until = if request == 8 { 8 } else { 1 };
            for _ in 0..until {
                client.send_all(vec![one("wide")]).await;
            }
            assert_eq!(near("edge.wide"), expected, "after {request} requests");
        }
        // Only the part of the hits above 8 of 10.
        client.send_all(vec![hits("soft", 5)]).await;
        assert_eq!(near("edge.soft"), 0);
        client.send_all(vec![hits("soft", 4)]).await;
        assert_eq!(near("edge.soft"), 1);
        // A request that another limit denies takes nothing.
        client.send_all(vec![hits("daily", 8)]).await;
        client.send_all(vec![one("daily"), one("shut")]).await;
        assert_eq!(near("edge.daily"), 0);
        client.send_all(vec![one("daily")]).await;
        assert_eq!(near("edge.daily"), 1);
        // The only unit of a limit of 1: floor(0.8) is 0.
        client.send_all(vec![one("narrow")]).await;
        assert_eq!(near("edge.narrow"), 1);
    })
    .await;
    let config = "envoy: {files: [ratelimit.yaml], near_limit_ratio: 0.5}\n";
    let (service, mut client) = start_on(config, RULES).await;
    client.send_all(vec![hits("wide", 7)]).await;
    assert_eq!(metric(&service, r#"tidegate_near_limit_total{policy="edge.wide"}"#), 2);
}
