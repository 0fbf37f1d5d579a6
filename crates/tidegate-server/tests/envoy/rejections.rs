//! Calls that cannot be decided. They are denied, because Envoy passes requests whose call fails.

use super::support::Service;
use super::{Client, descriptor, start_on};
use tidegate_api::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use tidegate_api::envoy::service::ratelimit::v3::RateLimitRequest;
use tidegate_api::envoy::service::ratelimit::v3::rate_limit_response::Code;

const RULES: &str = "
domain: edge
descriptors:
  - {key: user, rate_limit: {unit: year, requests_per_unit: 3}}
";
const CONFIG: &str = "
envoy: {files: [ratelimit.yaml]}
policies:
  - {name: tenants, match: {domain: edge}, key: [descriptor.tenant], limit: 3, window: 1h}
";

/// Sends a call that must be denied, and returns the number of its statuses.
async fn rejected(client: &mut Client, descriptors: Vec<RateLimitDescriptor>) -> usize {
    let request = RateLimitRequest { domain: "edge".to_owned(), descriptors, hits_addend: 0 };
    let response = client.try_send(request).await.expect("no error");
    assert_eq!(response.overall_code(), Code::OverLimit);
    assert!(response.statuses.iter().all(|status| status.code() == Code::OverLimit));
    response.statuses.len()
}

fn counted(service: &Service) -> Vec<(String, u64)> {
    let metrics = service.admin("/metrics").body;
    let lines = metrics.lines().filter_map(|line| {
        let (reason, count) =
            line.strip_prefix("tidegate_envoy_rejections_total{reason=\"")?.split_once("\"} ")?;
        Some((reason.to_owned(), count.parse().ok()?))
    });
    lines.collect()
}

#[tokio::test]
async fn calls_that_cannot_be_decided_are_denied_and_counted() {
    let (service, mut client) = start_on(CONFIG, RULES).await;
    let user = || descriptor(&[("user", "u")]);
    let huge = descriptor(&[("user", &"x".repeat(5 * 1024 * 1024))]);
    assert_eq!(rejected(&mut client, vec![huge]).await, 0);
    assert_eq!(rejected(&mut client, vec![user(); 101]).await, 0);
    assert_eq!(rejected(&mut client, vec![descriptor(&[("a", "b"); 1_001])]).await, 0);
    for tenant in ["a\tb", &"t".repeat(513)] {
        let both = vec![user(), descriptor(&[("tenant", tenant)])];
        assert_eq!(rejected(&mut client, both).await, 2);
    }
    let expected = [("message_size", 1), ("buffered_bytes", 0), ("descriptors", 2), ("invalid", 2)];
    let expected = expected.map(|(reason, count)| (reason.to_owned(), count));
    assert_eq!(counted(&service), expected);
    service.wait_until_logged("a call of Envoy was denied");
    let output = service.output();
    assert_eq!(output.matches("a call of Envoy was denied").count(), 1, "{output}");
    assert_eq!(client.send(&[("user", "u")]).await.limit_remaining, 2, "nothing was charged");
}

#[tokio::test]
async fn large_values_are_counted() {
    let (_service, mut client) = start_on(CONFIG, RULES).await;
    let large = "x".repeat(4 * 1024 * 1024 - 1_024);
    let other = format!("{}y", &large[1..]);
    for value in [&large, &other] {
        for expected in [Code::Ok, Code::Ok, Code::Ok, Code::OverLimit] {
            assert_eq!(client.send(&[("user", value)]).await.code(), expected);
        }
    }
}
