//! The binary in the place of envoyproxy/ratelimit: its environment, probes, ports, metrics, and
//! rules by xDS.

#[path = "../support/mod.rs"]
mod support;

/// mTLS towards the control plane, and TLS towards Envoy, while certificates are rotated.
mod certificates;
/// The conditions of a container that Envoy Gateway starts.
mod container;
mod control_plane;
/// The real Envoy in front.
mod envoy;
/// Probes, `/json`, `/rlconfig` and metrics.
mod listeners;
mod program;
/// Rules as Envoy Gateway makes them.
mod rules;
/// The stream of rules: accepted, rejected, empty, closed, lost.
mod stream;

use control_plane::ControlPlane;
use program::{Program, Variables};
use support::Redis;
use tidegate_api::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor as Descriptor;
use tidegate_api::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::Entry;
use tidegate_api::envoy::service::ratelimit::v3::rate_limit_response::Code;
use tidegate_api::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient;
use tidegate_api::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use tidegate_config::envoy::{RateLimitConfig, RateLimitDescriptor, RateLimitPolicy};
use tonic::transport::Channel;

const HOUR: i32 = 3;

/// Returns a node of a tree of rules.
fn node(key: &str, value: &str, children: Vec<RateLimitDescriptor>) -> RateLimitDescriptor {
    RateLimitDescriptor {
        key: key.to_owned(),
        value: value.to_owned(),
        descriptors: children,
        ..RateLimitDescriptor::default()
    }
}

/// Returns a node with a limit per hour.
fn limited(key: &str, value: &str, requests: u32) -> RateLimitDescriptor {
    let rate_limit =
        RateLimitPolicy { unit: HOUR, requests_per_unit: requests, ..RateLimitPolicy::default() };
    RateLimitDescriptor { rate_limit: Some(rate_limit), ..node(key, value, Vec::new()) }
}

fn rules_of(domain: &str, descriptors: Vec<RateLimitDescriptor>) -> RateLimitConfig {
    RateLimitConfig { name: domain.to_owned(), domain: domain.to_owned(), descriptors }
}

fn descriptor(entries: &[(&str, &str)]) -> Descriptor {
    let entry =
        |(key, value): &(&str, &str)| Entry { key: (*key).to_owned(), value: (*value).to_owned() };
    Descriptor { entries: entries.iter().map(entry).collect(), ..Descriptor::default() }
}

/// Sends descriptors of a domain.
async fn send_all(
    client: &mut RateLimitServiceClient<Channel>,
    domain: &str,
    descriptors: Vec<Descriptor>,
) -> RateLimitResponse {
    let request = RateLimitRequest { domain: domain.to_owned(), descriptors, hits_addend: 0 };
    client.should_rate_limit(request).await.expect("a response").into_inner()
}

/// Sends a descriptor, and returns whether the request is allowed, and the limit that applies.
async fn send(
    client: &mut RateLimitServiceClient<Channel>,
    domain: &str,
    entries: &[(&str, &str)],
) -> (bool, Option<u32>) {
    let response = send_all(client, domain, vec![descriptor(entries)]).await;
    let limit = response.statuses[0].current_limit.as_ref();
    (response.overall_code == i32::from(Code::Ok), limit.map(|limit| limit.requests_per_unit))
}

/// Starts Redis, a control plane, and the program with the stream between both.
async fn start() -> (Redis, ControlPlane, Program) {
    let (redis, mut plane) = (Redis::start(), ControlPlane::start().await);
    let program = Program::start(&Variables::of_gateway(&plane.address.to_string(), &redis));
    let first = plane.request().await;
    assert_eq!(first.node.expect("a node").id, "envoy-ratelimit");
    assert_eq!(first.type_url, RateLimitConfig::TYPE_URL);
    assert_eq!((&*first.version_info, &*first.response_nonce), ("", ""));
    (redis, plane, program)
}
